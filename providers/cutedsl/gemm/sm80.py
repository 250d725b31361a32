"""What the Ampere GEMM family offers, and how it is compiled."""

from __future__ import annotations

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

    def stage_bytes(self, itemsize: int) -> int:
        tile_m, tile_n, tile_k = self.tile_shape
        return (tile_m + tile_n) * tile_k * itemsize

    def label(self) -> str:
        tile = "x".join(map(str, self.tile_shape))
        return f"tile{tile}_warps{self.warps[0]}x{self.warps[1]}_stages{self.stages}"


def _loads_by_registers(operands: GemmOperandsMetadata) -> bool:
    """cp.async moves at least 4 bytes; narrower elements without alignment take another way."""
    return operands.A.alignment < 4


_ALIGNED = {"A": 16, "B": 16, "out": 16}
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
            alignments=(_ALIGNED, {}),
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
    space = Space(
        {"tile_shape": (128, 128, 32), "warps": (2, 2), "stages": 4},
        {"tile_shape": (128, 256, 32), "warps": (2, 4), "stages": 3},
        {"tile_shape": (256, 128, 32), "warps": (4, 2), "stages": 3},
        {"tile_shape": (128, 64, 32), "warps": (2, 2), "stages": 4},
        {"tile_shape": (64, 128, 32), "warps": (2, 2), "stages": 4},
        {"tile_shape": (64, 64, 64), "warps": (2, 2), "stages": 4},
        {"tile_shape": (32, 64, 64), "warps": (1, 4), "stages": 4},
        {"tile_shape": (16, 64, 64), "warps": (1, 4), "stages": 5},
    )

    @rule("operands on their way through registers leave room for 64 accumulators a thread")
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        return not _loads_by_registers(operands) or design.accumulators <= 64

    @rule("the stages fit in the shared memory of every target")
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        assert operands.A.dtype is not None
        stages = design.stages * design.stage_bytes(operands.A.dtype.itemsize)
        return stages <= SHARED_MEMORY_BYTES

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
        stage = design.stages * design.stage_bytes(args.A.dtype.itemsize)
        registers = design.threads * (design.accumulators + 100)
        resident = max(min(_SHARED_MEMORY_PER_SM // stage, _REGISTERS_PER_SM // registers), 1)
        seconds = model.predict(args, design.tile_shape, resident, model.constants(self.family))
        aligned = self.metadata.operands.tensors["A"].alignment >= 16
        return seconds if aligned else seconds * 2
