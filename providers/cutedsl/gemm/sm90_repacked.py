"""Hopper GEMMs on operands that TMA cannot read: they are copied first.

TMA takes addresses and leading dimensions in multiples of 16 bytes, and wgmma takes operands
whose elements do not have 16 bits along K only. What does not fit is copied into the workspace,
padded and transposed as needed, by a kernel that is launched before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

from kernel_api._cached_property import cached_property
from kernel_api._workspaces import ALIGNMENT, ZEROED
from kernel_api.metadata import GemmOperandsMetadata, TensorAttributes
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.gemm import machine, model, sm90_design
from kernel_api.providers.cutedsl.gemm.scaling import OF_SUMS
from kernel_api.providers.cutedsl.gemm.sm90 import Sm90GemmFamily
from kernel_api.space import Miss, Operands, Space, rule

TMA_BYTES = 16
_K_MODES = {"A": -1, "B": -2}
#: Bytes of a row of a copy, from which on the next one begins with a line of L2.
_LONG_ROW = 512


class RepackedGemmFamily(Sm90GemmFamily):
    """Hopper GEMMs that copy A, B or both."""

    fuses = False
    takes_more = True

    @rule("operands are copied only where TMA cannot read them as they are")
    def _(operands: GemmOperandsMetadata, args: Any) -> bool | Miss:
        for name in copied_operands(operands):
            if _readable(name, operands.tensors[name], getattr(args, name).alignment):
                return Miss(f"{name} can be read as it is")
        return True

    @rule("a copy asks for no alignment of what is copied")
    def _(operands: GemmOperandsMetadata) -> bool:
        tensors = operands.tensors
        return all(tensors[name].alignment < TMA_BYTES for name in copied_operands(operands))

    @cached_property
    def repacked(self) -> tuple[bool, bool]:
        copied = set(copied_operands(self.metadata.operands))
        return "A" in copied, "B" in copied

    def workspace_for(self, *tensors: Any) -> int:
        A, B, _ = (tensor.shape for tensor in tensors)
        sizes = A[-2], B[-1], A[-1], A[0] if len(A) == 3 else 1
        return self._copies(*sizes) + (super().workspace_for(*tensors) or ZEROED)

    def get_workspace_size(self, args: Any) -> int:
        copies = self._copies(args.M, args.N, args.K, args.L)
        return copies + (super().get_workspace_size(args) or ZEROED)

    def _copies(self, M: int, N: int, K: int, L: int) -> int:
        """Bytes, beside those that are zero and partial sums."""
        return sum(self._copy_bytes(name, M, N, K, L) for name in self._copied)

    @cached_property
    def _copied(self) -> tuple[str, ...]:
        return tuple(copied_operands(self.metadata.operands))

    def _copy_bytes(self, name: str, M: int, N: int, K: int, L: int) -> int:
        """Rows of multiples of 16 bytes, long ones of 128, from a multiple of 128."""
        rows, columns = (M if name == "A" else N), K
        attributes = self.metadata.operands.tensors[name]
        assert attributes.dtype is not None
        if attributes.unit_mode != _K_MODES[name] and attributes.dtype.itemsize == 2:
            rows, columns = columns, rows
        size = columns * attributes.dtype.itemsize
        multiple = TMA_BYTES if size < _LONG_ROW else ALIGNMENT
        return -(-(-(-size // multiple) * multiple * rows * L) // ALIGNMENT) * ALIGNMENT

    def predict(self, args: Any) -> float:
        """The copies are read and written, by launches of their own."""
        constants = machine.constants_on(args.device, self.family)
        sizes = model.problem_of(args)
        moved = 2 * self._copies(sizes.M, sizes.N, sizes.K, sizes.L)
        copies = len(self._copied) * constants.overhead + moved / constants.bandwidth
        problem = _copied_problem(sizes, *self.repacked)
        return model.seconds(problem, self.candidate, constants) + copies


@lru_cache(maxsize=64)
def _copied_problem(problem: model.Problem, a_copied: bool, b_copied: bool) -> model.Problem:
    """As kernels find it whose operands are copied: no rows straddle lines, but short ones."""
    return replace(
        problem,
        A_straddles=problem.A_straddles and not a_copied,
        B_straddles=problem.B_straddles and not b_copied,
    )


def _readable(name: str, attributes: TensorAttributes, alignment: int) -> bool:
    """Whether TMA reads it, and wgmma what it has read."""
    assert attributes.dtype is not None
    along_k = attributes.dtype.itemsize == 2 or attributes.unit_mode == _K_MODES[name]
    return along_k and alignment % TMA_BYTES == 0


def copied_operands(operands: Any) -> Iterator[str]:
    for name in ("A", "B"):
        attributes = operands.tensors[name]
        if not _readable(name, attributes, attributes.alignment):
            yield name


_A, _B, _OUT = {"A": 16}, {"B": 16}, {"out": 16}
_ALIGNMENTS: tuple[dict[str, int], ...] = (
    *({**_A, **_OUT}, {**_B, **_OUT}, _OUT),
    *(_A, _B, {}),
)
#: Of 8 bits, where one operand may be read as it is and the other not.
_ALIGNMENTS_OF_8_BITS: tuple[dict[str, int], ...] = (_A, _B, {})


@CuTeDSLProvider.register
class Sm90RepackedGemm(RepackedGemmFamily):
    """Dense GEMM of 16-bit floats for Hopper, of operands with any address and strides."""

    family: ClassVar[str] = "sm90.gemm_repacked"
    operands = (
        Operands(
            A="f16 | bf16",
            B="like A",
            out="f16 | bf16 | f32",
            accumulator="f32",
            alignments=_ALIGNMENTS,
        ),
    )
    space = Space(*sm90_design.points(sm90_design.REPACKED, operand_bytes=2))


@CuTeDSLProvider.register
class Sm90RepackedTf32Gemm(RepackedGemmFamily):
    """Dense GEMM of float32 for Hopper, of operands with any address and strides."""

    family: ClassVar[str] = "sm90.gemm_tf32_repacked"
    operands = (
        Operands(
            A="f32",
            B="f32",
            out="f32",
            accumulator="f32",
            multiplication="tf32",
            alignments=_ALIGNMENTS,
        ),
    )
    space = Space(*sm90_design.points(sm90_design.REPACKED, operand_bytes=4))


@CuTeDSLProvider.register
class Sm90RepackedFp8Gemm(RepackedGemmFamily):
    """Dense GEMM of 8-bit floats for Hopper, of operands with any address and strides."""

    family: ClassVar[str] = "sm90.gemm_fp8_repacked"
    promoted = True
    operands = tuple(
        Operands(
            A="e4m3 | e5m2",
            B="e4m3 | e5m2",
            out=out,
            accumulator="f32",
            scales=scales,
            alignments=_ALIGNMENTS_OF_8_BITS,
        )
        for scales, out in (
            ({}, "f16 | bf16 | f32"),
            *((scales, "f16 | bf16 | f32") for scales in OF_SUMS),
        )
    )
    space = Space(*sm90_design.points(sm90_design.REPACKED_PROMOTED, operand_bytes=1))


@CuTeDSLProvider.register
class Sm90RepackedInt8Gemm(RepackedGemmFamily):
    """Dense GEMM of 8-bit integers for Hopper, of operands with any address and strides."""

    family: ClassVar[str] = "sm90.gemm_int8_repacked"
    operands = tuple(
        Operands(
            A="i8",
            B="i8",
            out=out,
            accumulator="i32",
            scales=scales,
            alignments=_ALIGNMENTS_OF_8_BITS,
        )
        for scales, out in (
            ({}, "i32"),
            *((scales, "f16 | bf16 | f32") for scales in OF_SUMS),
        )
    )
    space = Space(*sm90_design.points(sm90_design.REPACKED, operand_bytes=1))
