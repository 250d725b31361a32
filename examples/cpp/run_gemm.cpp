// Loads a matrix product that kernel_api exported, and runs it on bfloat16 operands.
//
//   python -c "import torch, kernel_api as ka
//   A, B, out = (torch.empty(256, 256, dtype=torch.bfloat16, device='meta') for _ in range(3))
//   args = ka.GemmArguments(A, B, out)
//   kernel = ka.get_kernels(args, lambda m: 'sm80_gemm' in m.kernel_name, cc='sm_90')[0]
//   kernel.compile(args, cc='sm_90').export('gemm.so')"
//
//   run_gemm ./gemm.so [integers that the kernel takes behind its operands]
//
// A kernel of the sm80 family takes none; one of sm90.gemm takes the number of multiprocessors over
// the size of its cluster.

#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ffi = tvm::ffi;

namespace {

constexpr int64_t kM = 300, kN = 200, kK = 128;

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

float to_float(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// The manifest: JSON with the kernel, the signature and the target.
std::string manifest_of(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  auto* text = library ? static_cast<const char*>(dlsym(library, "kernel_api_manifest")) : nullptr;
  return text ? std::string(text) : "";
}

// A row-major matrix on the GPU, with small integers in it: products and sums of them are exact.
struct Matrix {
  int64_t shape[2], strides[2];
  std::vector<uint16_t> host;
  DLTensor tensor{};

  Matrix(int64_t rows, int64_t columns) : shape{rows, columns}, strides{columns, 1} {
    for (int64_t i = 0; i < rows * columns; ++i) host.push_back(to_bfloat16(float(i % 5 - 2)));
    tensor.device = {kDLCUDA, 0};
    tensor.ndim = 2;
    tensor.dtype = {kDLBfloat, 16, 1};
    tensor.shape = shape;
    tensor.strides = strides;
#ifdef WITH_CUDA
    cudaMalloc(&tensor.data, bytes());
    cudaMemcpy(tensor.data, host.data(), bytes(), cudaMemcpyHostToDevice);
#endif
  }

  size_t bytes() const { return host.size() * sizeof(uint16_t); }
  float at(int64_t row, int64_t column) const { return to_float(host[row * shape[1] + column]); }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: run_gemm ./gemm.so [integers]\n";
    return 2;
  }
  try {
    ffi::Module module = ffi::Module::LoadFromFile(argv[1]);
    std::cout << manifest_of(argv[1]) << "\n";
    ffi::Optional<ffi::Function> kernel = module->GetFunction("kernel");
    if (!kernel.has_value()) throw std::runtime_error("there is no function \"kernel\" in it");
#ifdef WITH_CUDA
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      std::cout << "loaded; there is no GPU to run it on\n";
      return 0;
    }
    Matrix A(kM, kK), B(kK, kN), out(kM, kN);
    std::vector<ffi::AnyView> arguments{&A.tensor, &B.tensor, &out.tensor};
    for (int i = 2; i < argc; ++i) arguments.push_back(int64_t{std::atoll(argv[i])});
    ffi::Any nothing;
    // Launched on the stream of TVMFFIEnvSetStream; here the default one.
    kernel.value().CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &nothing);
    cudaMemcpy(out.host.data(), out.tensor.data, out.bytes(), cudaMemcpyDeviceToHost);
    for (int64_t m = 0; m < kM; ++m) {
      for (int64_t n = 0; n < kN; ++n) {
        float expected = 0;
        for (int64_t k = 0; k < kK; ++k) expected += A.at(m, k) * B.at(k, n);
        if (std::abs(out.at(m, n) - expected) > std::abs(expected) / 128) {
          std::cerr << "out[" << m << ", " << n << "] is " << out.at(m, n) << "; expected "
                    << expected << "\n";
          return 1;
        }
      }
    }
    std::cout << "passed\n";
#else
    std::cout << "loaded; built without CUDA, so it is not run\n";
#endif
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
