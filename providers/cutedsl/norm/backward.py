"""What the families of the norms' gradients offer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api._estimated_sizes import told_apart
from kernel_api._workspaces import ZEROED
from kernel_api.arguments import LayerNormBackwardArguments, RmsNormBackwardArguments
from kernel_api.arguments.norm import NormArguments
from kernel_api.devices import multiprocessors_of
from kernel_api.metadata import NormBackwardOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.h200 import REGISTERS
from kernel_api.providers.cutedsl.kernel import WorkspaceFinder, remembered_by_shape
from kernel_api.providers.cutedsl.norm import model
from kernel_api.providers.cutedsl.norm.base import (
    SHARED_MEMORY_BYTES,
    WHY_ALIGNED,
    NormKernel,
    RowDesign,
    columns_of,
    further_rows,
    staged_bytes,
    vector_of,
)
from kernel_api.space import Miss, Operands, Space, rule

_SUMS = ("dweight", "dbias")
_SUM_BYTES = 4

#: Sums over rows that all threads of a CTA together have registers for, beside a weight of so many
#: bytes, and at most.
_SUMS_HELD, _MOST_HELD = {4: 16 * 1024}, 32 * 1024

#: Of a thread that is given as many as it likes: a number, and one per element that it has.
_REGISTERS_OF_THREAD, _REGISTERS_OF_ELEMENT = 56, 3

_MOST_STAGES = 3
#: Bytes of an element of a residual, at most; and of what threads that are many may read.
_WIDEST, _NARROW = 4, 2

#: Of the kernel that adds up shares of rows that are streamed: threads of a CTA, rows of a share.
_SHARE_THREADS, _FEWEST_ROWS = 256, 16


@dataclass(frozen=True)
class NormBackwardDesign(RowDesign):
    """Rows on threads that stay.

    Attributes:
        resident: CTAs per multiprocessor; each takes every so many-th row.
    """

    resident: int

    @property
    def is_crowded(self) -> bool:
        """Whether its CTAs have a multiprocessor together only if registers are shared out."""
        registers = _REGISTERS_OF_THREAD + _REGISTERS_OF_ELEMENT * self.elements
        return self.resident > 1 and self.resident * self.threads * registers > REGISTERS

    def parts(self, M: int, N: int, vector: int, blocks: int) -> int:
        """Of each sum over rows, where so many CTAs run at once: one of each that has rows, or, of
        rows that are streamed, of each share that a kernel behind has."""
        if self.elements:
            return min(blocks, -(-M // self.rows))
        panels = max(-(-N // (_SHARE_THREADS * vector)), 1)
        wanted = -(-blocks * self.threads // (_SHARE_THREADS * panels))
        rows = max(-(-M // wanted), _FEWEST_ROWS)
        return -(-M // rows)

    def label(self) -> str:
        return f"{super().label()}_resident{self.resident}"


#: (threads, threads per row, elements per thread), CTAs per multiprocessor
_STAGED = (
    ((256, 8, 8), 3),
    ((256, 8, 16), 2),
    ((256, 16, 16), 2),
    ((256, 32, 16), 2),
    ((256, 32, 32), 1),
    ((256, 32, 40), 1),
    ((256, 64, 16), 2),
    ((160, 160, 8), 6),
    ((192, 192, 8), 5),
    ((224, 224, 8), 4),
    ((256, 256, 8), 3),
    ((512, 128, 16), 1),
    ((160, 160, 16), 4),
    ((192, 192, 16), 4),
    ((384, 384, 8), 3),
    ((448, 448, 8), 2),
    ((512, 512, 8), 2),
    ((256, 256, 16), 2),
    ((512, 256, 16), 1),
    ((320, 320, 16), 2),
    ((384, 384, 16), 2),
    ((768, 768, 8), 1),
    ((896, 896, 8), 1),
    ((512, 512, 16), 1),
    ((1024, 1024, 8), 1),
    ((256, 256, 32), 1),
    ((384, 384, 32), 1),
    ((512, 512, 32), 1),
)
_STREAMED = (((512, 512), 2), ((1024, 1024), 1), ((256, 32), 4))


class NormBackward(NormKernel):
    """What the families of gradients share."""

    operands = tuple(
        Operands(
            dy=types,
            x="like dy",
            dx="like dy",
            accumulator="f32",
            majors="dy:n x:n dx:n",
            alignments=(
                *(dict.fromkeys(("dy", "x", "dx"), alignment) for alignment in alignments),
                {},
            ),
            why_aligned=WHY_ALIGNED,
        )
        for types, alignments in (("f16 | bf16", (16, 4)), ("f32", (16,)))
    )
    operands_metadata = NormBackwardOperandsMetadata
    design = NormBackwardDesign
    space = Space(
        *(
            NormBackwardDesign(*threads, stages, resident)
            for (threads, resident), stages in itertools.product(_STAGED, (3, 2, 1))
        ),
        *(NormBackwardDesign(*threads, 0, 0, resident) for threads, resident in _STREAMED),
    )

    @rule("stages fit in shared memory, 3 at most; fewer beside those of a residual")
    def _(design: NormBackwardDesign, operands: NormBackwardOperandsMetadata) -> bool:
        widest = _NARROW if design.is_crowded else _WIDEST
        least, most = (_most_stages(design, operands, extra) for extra in (widest, 0))
        return max(least, min(design.elements, 1)) <= design.stages <= most

    @rule("there are as many stages as fit in shared memory")
    def _(
        design: NormBackwardDesign, operands: NormBackwardOperandsMetadata, args: NormArguments
    ) -> bool | Miss:
        further = sum(one.dtype.itemsize for one in further_rows(args).values())
        most = _most_stages(design, operands, further)
        return design.stages == most or Miss(f"{most} do")

    @rule("a thread has 8 vectors of a row at most, each with sums of its own")
    def _(design: NormBackwardDesign, operands: NormBackwardOperandsMetadata) -> bool:
        return design.elements <= 8 * vector_of(operands)

    @rule("threads have registers for the sums over rows that are asked for")
    def _(design: NormBackwardDesign, args: Any) -> bool | Miss:
        asked = _sums_among(args.further)
        held = design.threads * design.elements * asked
        weight = args.further.get("weight")
        room = _MOST_HELD if weight is None else _SUMS_HELD.get(weight.dtype.itemsize, _MOST_HELD)
        return held <= room or Miss(f"they are {held}, the registers hold {room}")

    @rule("registers are shared out to many threads where matrices have 16 bits")
    def _(design: NormBackwardDesign, operands: NormBackwardOperandsMetadata) -> bool:
        x = operands.tensors["x"].dtype
        return not design.is_crowded or (x is not None and x.itemsize <= _NARROW)

    @rule("registers are shared out to many threads where what is beside has 16 bits")
    def _(design: NormBackwardDesign, args: Any) -> bool | Miss:
        if not design.is_crowded:
            return True
        for name, operand in {**further_rows(args), **columns_of(args)}.items():
            if operand.dtype.itemsize > _NARROW:
                return Miss(f"{name} is {operand.dtype}")
        return True

    def implementation(self) -> Callable[..., None]:
        return self._implementation(("rstd",))

    def implementation_for(self, args: Any) -> Callable[..., None]:
        return self._implementation(tuple(self.more_values(args)))

    def _implementation(self, operands: tuple[str, ...]) -> Callable[..., None]:
        from kernel_api.implementations.sm80.norm_backward import NormBackward

        centred = self.arguments is LayerNormBackwardArguments
        found: Callable[..., None] = NormBackward(
            **self._launched(),
            centred=centred,
            resident=self._design.resident if self._design.is_crowded else 1,
            operands=operands,
        )
        return found

    def scalars(self, multiprocessors: int) -> tuple[int, ...]:
        return (self._design.resident * multiprocessors,)

    def _workspace_bytes(self, M: int, N: int, sums: int, multiprocessors: int) -> int:
        if not sums:
            return 0
        return ZEROED + sums * self._parts(M, N, multiprocessors) * -(-N // 4) * 4 * _SUM_BYTES

    def _parts(self, M: int, N: int, multiprocessors: int) -> int:
        design: NormBackwardDesign = self._design
        vector = vector_of(self.metadata.operands)
        return design.parts(M, N, vector, *self.scalars(multiprocessors))

    def _workspace_finder(self, names: tuple[str, ...]) -> WorkspaceFinder:
        sums = _sums_among(names)

        def size_of(dy: Any, *_: Any) -> int:
            M, N = dy.shape
            return self._workspace_bytes(M, N, sums, multiprocessors_of(dy.device))

        return remembered_by_shape(size_of)

    def get_workspace_size(self, args: Any) -> int:
        sums = _sums_among(args.further)
        return self._workspace_bytes(args.M, args.N, sums, multiprocessors_of(args.device))

    def predict(self, args: Any) -> float:
        design = self._design
        operands = self.metadata.operands
        M = told_apart(args.M)
        parts = self._parts(M, args.N, multiprocessors_of(args.device))
        return model.backward(args, design, operands, design.resident, parts)


def _most_stages(
    design: NormBackwardDesign, operands: NormBackwardOperandsMetadata, further: int
) -> int:
    """That fit, where an element of a residual has so many bytes."""
    if not design.stages:
        return 0
    stage = staged_bytes(design, operands) // design.stages
    stage += design.threads * design.elements * further
    return min(SHARED_MEMORY_BYTES // stage, _MOST_STAGES)


def _sums_among(names: Collection[str]) -> int:
    return sum(name in names for name in _SUMS)


@CuTeDSLProvider.register
class Sm80RmsNormBackward(NormBackward):
    """The gradient of an RMS norm, for every GPU from Ampere on: cp.async and vectors."""

    family: ClassVar[str] = "sm80.rmsnorm_backward"
    arguments = RmsNormBackwardArguments


@CuTeDSLProvider.register
class Sm80LayerNormBackward(NormBackward):
    """The gradient of a layer norm, for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.layernorm_backward"
    arguments = LayerNormBackwardArguments

    @rule("registers are shared out to many threads where there is no dresidual")
    def _(design: NormBackwardDesign, args: Any) -> bool:
        return not (design.is_crowded and "dresidual" in args.further)

    @rule("many threads have as many stages as fit without dresidual")
    def _(design: NormBackwardDesign, operands: NormBackwardOperandsMetadata) -> bool:
        return not design.is_crowded or design.stages == _most_stages(design, operands, 0)
