"""What the Ampere GEMM families offer, and how they are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api._cached_property import cached_property
from kernel_api.metadata import GemmOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.epilogue.operands import Tiling, fits_tile, spans_rows
from kernel_api.providers.cutedsl.gemm import model
from kernel_api.providers.cutedsl.gemm.fusing import (
    columns_that_matter,
    lowered,
    operands_rule,
    types_rule,
)
from kernel_api.providers.cutedsl.gemm.modelled import ModelledGemm
from kernel_api.providers.cutedsl.gemm.scaling import OF_SUMS, scale_kinds, scaling
from kernel_api.providers.cutedsl.gemm.splitting import SplitDesign
from kernel_api.space import Miss, Operands, Space, rule

#: Shared memory of a CTA on the smallest multiprocessor that the families run on (8.6, 8.9).
SHARED_MEMORY_BYTES = 99 * 1024
_SHARED_MEMORY_PER_SM = 164 * 1024
_REGISTERS_PER_SM = 64 * 1024

#: Accumulators that a thread has registers for; beside operands that pass through them, or the
#: sums of other CTAs, half of that.
_ACCUMULATORS, _ACCUMULATORS_BESIDE = 128, 64
#: That copy many pieces each where they are narrow.
_FEW_THREADS = 128


@dataclass(frozen=True)
class Sm80GemmDesign(SplitDesign):
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

    @property
    def warp_columns(self) -> int:
        """Of the tile, that a warp has."""
        return self.tile_shape[1] // self.warps[1]

    def shared_memory_bytes(self, itemsize: int) -> int:
        """Of all stages, and the coordinates of the tile."""
        tile_m, tile_n, tile_k = self.tile_shape
        return self.stages * (tile_m + tile_n) * tile_k * itemsize + 16

    def label(self) -> str:
        tile = "x".join(map(str, self.tile_shape))
        label = f"tile{tile}_warps{self.warps[0]}x{self.warps[1]}_stages{self.stages}"
        return f"{label}_split{self.split_k}" if self.splits else label


def _designs(texts: Iterable[str], itemsize: int) -> tuple[Sm80GemmDesign, ...]:
    return tuple(_design(*text.split(), itemsize=itemsize) for text in texts)


def _design(
    tile: str, warps: str, stages: str, split: str = "split1", *, itemsize: int
) -> Sm80GemmDesign:
    """``"64x64x128 2x2 4 split4"``: the tile, its K in bytes; warps; stages; parts of K."""
    m, n, k_bytes = map(int, tile.split("x"))
    warps_m, warps_n = map(int, warps.split("x"))
    return Sm80GemmDesign(
        (m, n, k_bytes // itemsize),
        split_k=int(split.removeprefix("split")),
        warps=(warps_m, warps_n),
        stages=int(stages),
    )


_COMMON = (
    "128x128x64 2x2 4",
    "128x256x64 2x4 4",
    "256x128x64 4x2 4",
    "64x64x128 2x2 4",
    "32x64x128 2x2 4",
    "16x128x128 1x4 4",
    "16x64x128 1x4 6",
)
#: For few tiles, and very few of very many products.
_SPLIT = (
    "64x64x128 2x2 4 split4",
    "64x64x128 2x2 4 split16",
    "64x64x128 2x2 4 split64",
    "16x64x128 1x4 6 split4",
    "16x64x128 1x4 6 split8",
)
#: For epilogues that look at 128 columns, or at 64 in few rows.
_WIDE_WARPS = (
    "64x128x64 4x1 4",
    "32x128x128 2x2 4",
    "32x128x128 2x2 4 split4",
)
_NARROW_K = (
    *_COMMON,
    "128x128x64 2x4 4",
    "128x64x64 2x2 4",
    "64x128x64 2x2 4",
    *_SPLIT,
    "128x128x64 2x4 4 split2",
    "128x128x64 2x4 4 split8",
    *_WIDE_WARPS,
)
_WIDE_K = (
    *_COMMON,
    "128x128x128 2x4 3",
    "128x64x128 2x2 4",
    "64x128x128 2x2 4",
    *_SPLIT,
    "128x128x128 2x4 3 split2",
    "128x128x128 2x4 3 split8",
    *_WIDE_WARPS,
)

#: By bytes of an operand element.
DESIGNS = {
    1: _designs(_NARROW_K, 1),
    2: _designs(_NARROW_K, 2),
    4: _designs(_WIDE_K, 4),
}

_ALIGNED = {"A": 16, "B": 16, "out": 16}
_HALF_ALIGNED = {"A": 4, "B": 4, "out": 4}
#: Of a step along K, by bytes of a copy: narrow ones take more instructions, the narrowest a way
#: through registers. Of 64 x 64 products, and fewer; more at once share their operands.
_LOAD_COST = {16: 1.0, 4: 2.0, 2: 3.5, 1: 7.0}
_COSTLY_TILE = 64

#: What an epilogue may write matrices of.
_STORED = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int32", "int16", "int8", "uint8",
)  # fmt: skip

_WHY_ALIGNED = "cp.async of 16 bytes needs addresses and leading strides in multiples of 16 bytes"


class Sm80GemmFamily(ModelledGemm):
    """What the families share; they differ in element types, and so in designs."""

    targets = ("sm_80",)
    design = Sm80GemmDesign
    _design: Sm80GemmDesign

    @rule("the tile is one of those for operands of this width")
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        assert operands.A.dtype is not None
        return design in DESIGNS[operands.A.dtype.itemsize]

    @rule("the accumulators fit in registers, beside what passes through them")
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        # cp.async moves at least 4 bytes; what is narrower and not aligned takes another way.
        beside = operands.A.alignment < 4 or design.splits
        return design.accumulators <= (_ACCUMULATORS_BESIDE if beside else _ACCUMULATORS)

    @rule(
        "4 warps that copy 4 bytes at a time have no registers for 128 accumulators where A or B "
        "alone is K-major"
    )
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        crowded = design.threads <= _FEW_THREADS and design.accumulators > _ACCUMULATORS_BESIDE
        alike = (operands.A.unit_mode == -1) == (operands.B.unit_mode == -2)
        return alike or not crowded or operands.A.alignment >= 16

    aligned_operands = operands_rule()
    stored_types = types_rule(_STORED)

    @rule(
        "a warp has whole bundles of the columns that the epilogue looks at together",
        by=columns_that_matter,
    )
    def _(design: Sm80GemmDesign, args: Any) -> bool | Miss:
        return args.epilogue is None or fits_tile(args.epilogue.graph, design.warp_columns)

    @rule("what is computed from whole rows needs a warp that holds them")
    def _(design: Sm80GemmDesign, args: Any) -> bool | Miss:
        if args.epilogue is None:
            return True
        return spans_rows(args.epilogue.graph, args.N, design.warp_columns)

    def _implementation(
        self, more_outputs: tuple[Any, ...] = (), others: tuple[Any, ...] = ()
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm80.gemm import Gemm

        split_k = self._design.split_k if self._design.splits else None
        return self._built(Gemm, more_outputs, others, split_k=split_k)

    def _built(
        self, gemm: Any, more_outputs: tuple[Any, ...], others: tuple[Any, ...], **options: Any
    ) -> Callable[..., None]:
        """An implementation of that class, with options beside those that all take."""
        design, operands = self._design, self.metadata.operands
        out: Any = operands.tensors["out"].dtype
        accumulator: Any = getattr(operands, "accumulator_type", None)
        # On the oldest of these GPUs nothing converts 8-bit floats.
        epilogue = lowered(
            self.metadata.epilogue,
            (out.cutlass, *more_outputs, *others),
            scales=scale_kinds(operands),
            float8=False,
        )
        found: Callable[..., None] = gemm(
            design.tile_shape,
            design.warps,
            design.stages,
            accumulator.cutlass,
            vector_bytes=operands.tensors["A"].alignment,
            output_bytes=self.alignment_asked,
            epilogue=epilogue or scaling(operands),
            **options,
        )
        return found

    def tiling(self, M: int, N: int) -> Tiling:
        tile_m, tile_n, _ = self._design.tile_shape
        return Tiling((tile_m, tile_n), tile_m, 1, (-(-M // tile_m), -(-N // tile_n)))

    @cached_property
    def candidate(self) -> model.Candidate:
        """The design as the performance model sees it."""
        design = self._design
        dtype = self.metadata.operands.tensors["A"].dtype
        assert dtype is not None
        shared = design.shared_memory_bytes(dtype.itemsize)
        registers = design.threads * (design.accumulators + 100)
        resident = max(min(_SHARED_MEMORY_PER_SM // shared, _REGISTERS_PER_SM // registers), 1)
        return model.Candidate(
            design.tile_shape,
            stages=design.stages,
            blocks_per_multiprocessor=resident,
            split_k=design.split_k,
            load_cost=self._load_cost,
        )

    @property
    def _load_cost(self) -> float:
        tile_m, tile_n, _ = self._design.tile_shape
        copied = _COSTLY_TILE * (tile_m + tile_n) / (2 * tile_m * tile_n)
        cost = _LOAD_COST[self.metadata.operands.tensors["A"].alignment]
        return 1 + (cost - 1) * min(copied, 1.0)


@CuTeDSLProvider.register
class Sm80Gemm(Sm80GemmFamily):
    """Dense GEMM of floats for every GPU from Ampere on: cp.async, ldmatrix, mma.sync."""

    family: ClassVar[str] = "sm80.gemm"
    operands = (
        *(
            Operands(
                A="f16 | bf16",
                B="like A",
                out=out,
                accumulator="f32",
                alignments=(_ALIGNED, _HALF_ALIGNED, {}),
                why_aligned=_WHY_ALIGNED,
            )
            for out in ("f16 | bf16 | f32", "e4m3 | e5m2 | i8")
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
    space = Space(*dict.fromkeys(itertools.chain(DESIGNS[2], DESIGNS[4])))


@CuTeDSLProvider.register
class Sm80Int8Gemm(Sm80GemmFamily):
    """Dense GEMM of 8-bit integers for every GPU from Ampere on, exact in int32, then scaled if
    asked."""

    family: ClassVar[str] = "sm80.gemm_int8"
    operands = tuple(
        Operands(
            A="i8",
            B="i8",
            out=out,
            accumulator="i32",
            majors="A:k B:k",
            scales=scales,
            alignments=(_ALIGNED, _HALF_ALIGNED, {}),
            why_aligned=_WHY_ALIGNED,
        )
        for scales, out in (
            ({}, "i32 | f16 | bf16 | f32 | i8"),
            *((scales, "f16 | bf16 | f32 | i8") for scales in OF_SUMS),
        )
    )
    space = Space(*DESIGNS[1])
