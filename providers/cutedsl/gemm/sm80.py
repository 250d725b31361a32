"""What the Ampere GEMM family offers, and how it is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api.arguments import GemmArguments
from kernel_api.metadata import BLASDesignMetadata, GemmOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.gemm import model
from kernel_api.providers.cutedsl.gemm.base import CuteDslGemm
from kernel_api.space import Operands, Space, rule

#: Shared memory of a CTA on the smallest multiprocessor that the family runs on (8.6, 8.9).
SHARED_MEMORY_BYTES = 99 * 1024
_SHARED_MEMORY_PER_SM = 164 * 1024
_REGISTERS_PER_SM = 64 * 1024

#: Accumulators that a thread has registers for; operands that pass through them take half.
_ACCUMULATORS, _ACCUMULATORS_BESIDE_OPERANDS = 128, 64


@dataclass(frozen=True)
class Sm80GemmDesign(BLASDesignMetadata):
    """A tile shared by ``warps`` (M, N) warps, its operands ``stages`` deep in shared memory."""

    warps: tuple[int, int] = (2, 2)
    stages: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "warps", tuple(self.warps))

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold the tile of out."""
        return self.tile_shape[0] * self.tile_shape[1] // self.threads

    def shared_memory_bytes(self, itemsize: int) -> int:
        """Of all stages, and the coordinates of the tile."""
        tile_m, tile_n, tile_k = self.tile_shape
        return self.stages * (tile_m + tile_n) * tile_k * itemsize + 16

    def label(self) -> str:
        tile = "x".join(map(str, self.tile_shape))
        return f"tile{tile}_warps{self.warps[0]}x{self.warps[1]}_stages{self.stages}"


def _design(tile: str, warps: str, stages: int) -> Sm80GemmDesign:
    m, n, k = map(int, tile.split("x"))
    warps_m, warps_n = map(int, warps.split("x"))
    return Sm80GemmDesign((m, n, k), warps=(warps_m, warps_n), stages=stages)


#: By bytes of an operand element: tiles are 64 or 128 bytes deep along K.
_DESIGNS = {
    2: (
        _design("128x128x32", "2x2", 4),
        _design("128x128x32", "2x4", 4),
        _design("128x256x32", "2x4", 4),
        _design("256x128x32", "4x2", 4),
        _design("128x64x32", "2x2", 4),
        _design("64x128x32", "2x2", 4),
        _design("64x64x64", "2x2", 4),
        _design("32x64x64", "2x2", 4),
        _design("16x128x64", "1x4", 4),
        _design("16x64x64", "1x4", 6),
    ),
    4: (
        _design("128x128x16", "2x2", 4),
        _design("128x128x32", "2x4", 3),
        _design("128x256x16", "2x4", 4),
        _design("256x128x16", "4x2", 4),
        _design("128x64x32", "2x2", 4),
        _design("64x128x32", "2x2", 4),
        _design("64x64x32", "2x2", 4),
        _design("32x64x32", "2x2", 4),
        _design("16x128x32", "1x4", 4),
        _design("16x64x32", "1x4", 6),
    ),
}


_ALIGNED = {"A": 16, "B": 16, "out": 16}
_HALF_ALIGNED = {"A": 4, "B": 4, "out": 4}
#: By bytes of a copy: narrow ones take more instructions, the narrowest a way through registers.
_LOAD_COST = {16: 1.0, 4: 1.25, 2: 2.0}

_WHY_ALIGNED = "cp.async of 16 bytes needs addresses and leading strides in multiples of 16 bytes"


@CuTeDSLProvider.register
class Sm80Gemm(CuteDslGemm):
    """Dense GEMM for every GPU from Ampere on: cp.async, ldmatrix, mma.sync."""

    family: ClassVar[str] = "sm80.gemm"
    targets = ("sm_80",)
    design = Sm80GemmDesign
    operands = (
        Operands(
            A="f16 | bf16",
            B="like A",
            out="f16 | bf16 | f32",
            accumulator="f32",
            alignments=(_ALIGNED, _HALF_ALIGNED, {}),
            why_aligned=_WHY_ALIGNED,
        ),
        Operands(
            A="f32",
            B="f32",
            out="f32",
            accumulator="f32",
            multiplication="tf32",
            alignments=(_ALIGNED, {}),
            why_aligned=_WHY_ALIGNED,
        ),
    )
    space = Space(*dict.fromkeys(itertools.chain(*_DESIGNS.values())))

    @rule("the tile is one of those for operands of this width")
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        assert operands.A.dtype is not None
        return design in _DESIGNS[operands.A.dtype.itemsize]

    @rule("the accumulators fit in registers, beside operands that pass through them")
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        # cp.async moves at least 4 bytes; what is narrower and not aligned takes another way.
        through_registers = operands.A.alignment < 4
        most = _ACCUMULATORS_BESIDE_OPERANDS if through_registers else _ACCUMULATORS
        return design.accumulators <= most

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.sm80.gemm import Gemm

        design: Any = self.metadata.design
        found: Callable[..., None] = Gemm(
            design.tile_shape,
            design.warps,
            design.stages,
            vector_bytes=self.metadata.operands.tensors["A"].alignment,
        )
        return found

    def predict(self, args: GemmArguments) -> float:
        design: Any = self.metadata.design
        shared = design.shared_memory_bytes(args.A.dtype.itemsize)
        registers = design.threads * (design.accumulators + 100)
        resident = max(min(_SHARED_MEMORY_PER_SM // shared, _REGISTERS_PER_SM // registers), 1)
        seconds = model.predict(args, design.tile_shape, resident, model.constants(self.family))
        return seconds * _LOAD_COST[self.metadata.operands.tensors["A"].alignment]
