"""What the Hopper GEMM family offers, and how it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api.arguments import GemmArguments
from kernel_api.metadata import BLASDesignMetadata, GemmOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.gemm import model
from kernel_api.providers.cutedsl.gemm.base import CuteDslGemm
from kernel_api.space import Operands, Space, rule

#: Shared memory of a CTA on every Hopper GPU.
SHARED_MEMORY_BYTES = 227 * 1024

#: Elements of out that a warp group stages in shared memory at a time, in each of two buffers.
_SUBTILE = 64 * 32
_BARRIER_BYTES = 16


@dataclass(frozen=True)
class Sm90GemmDesign(BLASDesignMetadata):
    """A persistent, warp-specialised kernel.

    Attributes:
        schedule: ``cooperative``: the consumer warp groups share a tile; ``pingpong``: each has
            its own, and one writes out while the other multiplies.
        stages: Tiles of A and B that shared memory holds.
    """

    schedule: str = "cooperative"
    stages: int = 4

    @property
    def consumers(self) -> int:
        """Warp groups that multiply."""
        return 2 if self.schedule == "pingpong" or self.tile_shape[0] > 64 else 1

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def cluster_size(self) -> int:
        return self.cluster_shape[0] * self.cluster_shape[1]

    def most_stages(self, operand_bytes: int, out_bytes: int) -> int:
        """As many as shared memory holds beside the buffers of the epilogue, by element sizes."""
        tile_m, tile_n, tile_k = self.tile_shape
        stage = (tile_m + tile_n) * tile_k * operand_bytes + _BARRIER_BYTES
        epilogue = 2 * self.consumers * _SUBTILE * out_bytes
        return (SHARED_MEMORY_BYTES - epilogue - _BARRIER_BYTES) // stage

    def label(self) -> str:
        return f"{super().label()}_{self.schedule}_stages{self.stages}"


_TILES: tuple[dict[str, Any], ...] = (
    {"tile_shape": (128, 256, 64), "cluster_shape": (2, 1, 1)},
    {"tile_shape": (128, 256, 64), "cluster_shape": (1, 2, 1)},
    {"tile_shape": (256, 128, 64), "cluster_shape": (2, 1, 1)},
    {"tile_shape": (128, 192, 64), "cluster_shape": (2, 1, 1), "schedule": "pingpong"},
    {"tile_shape": (128, 128, 64), "cluster_shape": (2, 1, 1), "schedule": "pingpong"},
    {"tile_shape": (64, 256, 64), "cluster_shape": (2, 1, 1), "schedule": "pingpong"},
    {"tile_shape": (128, 128, 64), "cluster_shape": (1, 1, 1)},
    {"tile_shape": (64, 256, 64), "cluster_shape": (1, 1, 1)},
    {"tile_shape": (64, 128, 64), "cluster_shape": (1, 1, 1)},
    {"tile_shape": (64, 64, 64), "cluster_shape": (1, 1, 1)},
)


def _with_stages(**point: Any) -> Iterator[dict[str, Any]]:
    """The point with as many stages as fit, beside 16-bit and beside 32-bit outputs."""
    design = Sm90GemmDesign(**point)
    for stages in sorted({design.most_stages(2, out) for out in (2, 4)}):
        yield {**point, "stages": stages}


_LOADS_ALIGNED = {"A": 16, "B": 16}
_ALL_ALIGNED = {**_LOADS_ALIGNED, "out": 16}


@CuTeDSLProvider.register
class Sm90Gemm(CuteDslGemm):
    """Dense GEMM for Hopper: TMA loads, wgmma, persistent warp-specialised schedule."""

    family: ClassVar[str] = "sm90.gemm"
    targets = ("sm_90a",)
    design = Sm90GemmDesign
    operands = (
        Operands(
            A="f16 | bf16",
            B="like A",
            out="f16 | bf16 | f32",
            accumulator="f32",
            alignments=(_ALL_ALIGNED, _LOADS_ALIGNED),
            why_aligned="TMA needs addresses and leading dimensions in multiples of 16 bytes",
        ),
    )
    space = Space(*(point for tile in _TILES for point in _with_stages(**tile)))

    @rule("all of shared memory is used for stages")
    def _(design: Sm90GemmDesign, operands: GemmOperandsMetadata) -> bool:
        assert operands.A.dtype is not None and operands.out.dtype is not None
        itemsizes = operands.A.dtype.itemsize, operands.out.dtype.itemsize
        return design.stages == design.most_stages(*itemsizes)

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.sm90.gemm import Gemm

        design: Any = self.metadata.design
        operands: Any = self.metadata.operands
        found: Callable[..., None] = Gemm(
            design.tile_shape,
            design.cluster_shape[:2],
            design.schedule,
            operand_type=operands.A.dtype.cutlass,
            output_type=operands.out.dtype.cutlass,
            stages=design.stages,
            tma_store=operands.out.alignment >= 16,
        )
        return found

    def scalars(self, multiprocessors: int) -> tuple[int, ...]:
        """The clusters that are resident at once: the persistent grid."""
        design: Any = self.metadata.design
        return (multiprocessors // design.cluster_size,)

    def predict(self, args: GemmArguments) -> float:
        design: Any = self.metadata.design
        return model.predict(args, design.tile_shape, 1, model.constants(self.family))
