"""A CuTe DSL family as a third party would write it: one thread for each element of out.

It stands for every family where a test needs one that really compiles, whatever else is
registered. Importing this loads the DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

import kernel_api as ka
from kernel_api.metadata import BLASDesignMetadata
from kernel_api.providers.cutedsl import CuteDslKernel
from kernel_api.space import Operands, Space


class Implementation:
    """out = A · B for rank 2 or 3; a block computes a tile of rows × columns."""

    def __init__(self, tile: tuple[int, int], accumulator: type[cutlass.Numeric]) -> None:
        self.tile = tile
        self.accumulator = accumulator
        self.threads = tile[0] * tile[1]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows, columns = self.tile
        m, n = out.shape[-2], out.shape[-1]
        batches = out.shape[0] if cutlass.const_expr(cute.rank(out) == 3) else 1
        grid = ((m + rows - 1) // rows, (n + columns - 1) // columns, batches)
        # Asked for one block per multiprocessor, the compiler does not spill to fit a second.
        self.kernel(a, b, out).launch(
            grid=grid, block=[rows, columns, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
        tile_m, tile_n, batch = cute.arch.block_idx()
        row, column, _ = cute.arch.thread_idx()
        i = tile_m * self.tile[0] + row
        j = tile_n * self.tile[1] + column
        if cutlass.const_expr(cute.rank(out) == 3):
            a, b, out = a[batch, None, None], b[batch, None, None], out[batch, None, None]
        if i < out.shape[0] and j < out.shape[1]:
            total = self.accumulator(0)
            for k in range(a.shape[1]):
                total += a[i, k].to(self.accumulator) * b[k, j].to(self.accumulator)
            out[i, j] = total.to(out.element_type)


class ExampleGemm(CuteDslKernel):
    """16-bit and wider floats with any majors, on every GPU from Ampere on."""

    family = "example.gemm"
    arguments = ka.GemmArguments
    targets = ("sm_80",)
    design = BLASDesignMetadata
    operands = (
        Operands(A="f16 | bf16 | f32", B="like A", out="like A", accumulator="f32"),
        Operands(A="f64", B="f64", out="f64", accumulator="f64"),
    )
    space = Space(tile_shape=((16, 16, 1), (32, 8, 1)))

    def implementation(self) -> Callable[..., None]:
        metadata: Any = self.metadata
        accumulator = metadata.operands.accumulator_type.cutlass
        return Implementation(metadata.design.tile_shape[:2], accumulator)
