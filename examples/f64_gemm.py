"""Bring your own kernel, the long form: implementation, interface, discovery, run.

A double-precision GEMM in which each thread computes one element. Without a GPU the operands are
meta tensors: everything but running works, and the kernel compiles for any target.
"""

import itertools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch

import kernel_api as ka
from kernel_api.metadata import (
    BLASDesignMetadata,
    GemmOperandsMetadata,
    KernelMetadata,
    TensorAttributes,
)
from kernel_api.providers.cutedsl import CuteDslKernel, CuTeDSLProvider


class F64GemmImplementation:
    """The kernel. It knows nothing of the API that offers it."""

    def __init__(self, cta_tile_shape_mn: tuple[int, int]):
        self.cta_tile_shape_mn = cta_tile_shape_mn

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        batches, m, n = out.shape
        tile_m, tile_n = self.cta_tile_shape_mn
        grid = [cute.ceil_div(m, tile_m), cute.ceil_div(n, tile_n), batches]
        self.kernel(a, b, out).launch(grid=grid, block=[tile_m, tile_n, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
        tile_m, tile_n = self.cta_tile_shape_mn
        block_m, block_n, batch = cute.arch.block_idx()
        thread_m, thread_n, _ = cute.arch.thread_idx()
        m, n = block_m * tile_m + thread_m, block_n * tile_n + thread_n
        if m < out.shape[1] and n < out.shape[2]:
            total = cutlass.Float64(0)
            for k in range(a.shape[2]):
                total += a[batch, m, k] * b[batch, k, n]
            out[batch, m, n] = total


@CuTeDSLProvider.register
class F64Gemm(CuteDslKernel):
    """The interface: what the kernel takes, how it is compiled and launched."""

    def __init__(self, metadata: KernelMetadata):
        super().__init__(metadata)
        self.impl = F64GemmImplementation(metadata.design.tile_shape[:2])

    @staticmethod
    def generate_kernels(metadata_filter, epilogue_args=None, cc=None):
        if epilogue_args is not None:
            return []
        kernels = []
        row_major, column_major = (0, 0, 1), (0, 1, 0)
        layouts = list(itertools.product([row_major, column_major], repeat=3))
        for tile_shape, strides in itertools.product([(32, 32, 1), (16, 16, 1)], layouts):
            attributes = [TensorAttributes(cutlass.Float64, s, 1) for s in strides]
            layout = ka.utils.strides_to_layout_string(*strides)
            metadata = KernelMetadata(
                kernel_name=f"F64Gemm_tile{tile_shape[0]}x{tile_shape[1]}_{layout}",
                kernel_class=F64Gemm,
                operands=GemmOperandsMetadata(*attributes, accumulator_type=cutlass.Float64),
                design=BLASDesignMetadata(tile_shape, (1, 1, 1)),
            )
            if metadata_filter(metadata):
                kernels.append(F64Gemm(metadata))
        return kernels

    def _supports(self, args):
        if args.out.rank != 3:
            return ka.Status.fail("all operands must be rank 3")
        return ka.Status.success()

    def compile(self, args, cc=None):
        stream = cute.runtime.make_fake_stream()
        compiled = self.cute_compile(self.impl, args.A, args.B, args.out, stream)
        return ka.CompiledArtifact(compiled, self)

    def _run(self, args, artifact, stream, workspace=None):
        stream = ka.utils.to_cuda_stream(stream)
        self.cute_run(artifact.compiled_obj, args.A, args.B, args.out, stream)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "meta"
    A = torch.randn(1, 256, 128, device=device, dtype=torch.float64)
    B = torch.randn(1, 128, 1024, device=device, dtype=torch.float64)
    out = torch.empty(1, 256, 1024, device=device, dtype=torch.float64)
    args = ka.GemmArguments(A, B, out)
    kernels = ka.get_kernels(args, metadata_filter=lambda m: m.kernel_class is F64Gemm)
    print(ka.explain(args))
    for kernel in kernels:
        if device == "cuda":
            print(kernel, ka.verify(kernel, args))
        else:
            for target in ("sm_80", "sm_90a"):
                print(kernel, target, kernel.compile(args, cc=target).resources)


if __name__ == "__main__":
    main()
