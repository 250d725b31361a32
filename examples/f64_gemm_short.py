# The FP64 example in the short form: the kernel, and a declaration of what it takes.
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from kernel_api.providers.cutedsl import CuteDslKernel, CuTeDSLProvider
from kernel_api.space import Operands, Space, rule


class Implementation:
    def __init__(self, tile_shape):
        self.tile = tile_shape

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        m, n = cute.ceil_div(out.shape[1:], self.tile[:2])
        self.kernel(a, b, out).launch(grid=[m, n, out.shape[0]], block=self.tile, stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
        (x, y, _), (bx, by, z) = cute.arch.thread_idx(), cute.arch.block_idx()
        i, j = bx * self.tile[0] + x, by * self.tile[1] + y
        if i < out.shape[1] and j < out.shape[2]:
            total = cutlass.Float64(0)
            for k in range(a.shape[2]):
                total += a[z, i, k] * b[z, k, j]
            out[z, i, j] = total


@CuTeDSLProvider.register
class F64GemmShort(CuteDslKernel):
    operands = (Operands(A="f64", B="f64", out="f64", accumulator="f64"),)
    space = Space(tile_shape=((32, 32, 1), (16, 16, 1)))

    @rule("all operands must be rank 3")
    def _(args):
        return args.out.rank == 3

    def implementation(self):
        return Implementation(self.metadata.design.tile_shape)
