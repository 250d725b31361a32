"""Arguments of a dense matrix product."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from kernel_api._float32 import setting
from kernel_api.arguments.base import Arguments
from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.arguments.scaled import check_scale, in_vectors
from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue.shape import Problem
from kernel_api.errors import ArgumentError
from kernel_api.operands import Layout, Operand

_FLOAT32, _FLOAT64, _INT32 = dtype("float32"), dtype("float64"), dtype("int32")
_PRECISIONS = ("ieee", "tf32x3", "tf32")

#: Layouts of A, B and out that passed all checks but the one that asks for addresses.
_fitting: set[tuple[Layout, Layout, Layout]] = set()
_FITTING_KEPT = 4096


class ProductArguments(Arguments):
    """What matrix products share: A and B are read, ``out`` is written; any may carry a scale."""

    modes: ClassVar[dict[str, str]] = {"A": "MK", "B": "KN", "out": "MN"}
    contracted: ClassVar[str] = "K"
    output_names: ClassVar[tuple[str, ...]] = ("out",)

    __slots__ = ("A", "B", "fp32_precision", "out")

    A: Operand
    B: Operand
    out: Operand
    fp32_precision: str | None

    @property
    def writes_anything(self) -> bool:
        return 0 not in self.out.shape if self.epilogue is None else super().writes_anything

    @property
    def N(self) -> int:
        """Columns of the product; an epilogue may give ``out`` more or fewer."""
        return self.B.shape[-1]

    def _options(self) -> tuple[Hashable, ...]:
        scales = ("B_scale in vectors",) if in_vectors(self.B) else ()
        return (self.fp32_precision, *scales)

    def _keywords(self) -> dict[str, Any]:
        return {**super()._keywords(), "fp32_precision": self.fp32_precision}

    def _check_scales(self) -> None:
        for name in self.scaled:
            operand = getattr(self, name)
            check_scale(name, operand, self.modes[name], self.contracted)
            if operand.scale.device != self.device:
                raise ArgumentError(
                    f"{name}'s scale is on {operand.scale.device} but the operands are on "
                    f"{self.device}"
                )


class GemmArguments(ProductArguments):
    """out = A · B, accumulated in ``accumulator_type``.

    Args:
        A: (M, K), or (L, M, K) batched. Any of the three may be a
            :class:`~kernel_api.arguments.ScaledOperand`.
        B: (K, N), or (L, K, N).
        out: (M, N), or (L, M, N); written. May not share memory with what is read, scales too; but
            where an epilogue computes each element of those in its place alone, an operand of it
            may be ``out`` itself, with the same shape, strides and type, and no scale. With a
            scale, real = stored × scale: what is stored is the product over the scale.
        accumulator_type: float32 by default; int32 for integers, float64 for float64.
        epilogue: A function of the accumulator that replaces the plain store; it decides the
            number of columns of ``out``, and may read and write operands of its own.
        fp32_precision: For float32 operands, ``"ieee"``, or ``"tf32"`` to allow multiplication
            with 10 mantissa bits, or ``"tf32x3"`` with 21, where an infinity may become NaN (it
            meets the zeros that other numbers leave behind their first bits). By default what
            torch's own setting for CUDA's matmul says. Where it says another, torch's kernels
            change it, which is seen in the whole process, for the length of a call.

    All operands are on one device. Any strides are taken; a batch is broadcast by a stride of 0
    (``tensor.expand``). Kernels may ask for more: ``explain`` tells.

    Raises:
        ArgumentError: shapes, ranks, devices or memory contradict each other.
        EpilogueError: the epilogue cannot be traced, or its operands do not fit.
    """

    kind = "gemm"
    operand_names: ClassVar[tuple[str, ...]] = ("A", "B", "out")

    __slots__ = ()

    def __init__(
        self,
        A: Any,
        B: Any,
        out: Any,
        accumulator_type: Any = None,
        *,
        epilogue: EpilogueArguments | None = None,
        fp32_precision: str | None = None,
    ) -> None:
        self.A = A = A if isinstance(A, Operand) else Operand(A, "A")
        self.B = B = B if isinstance(B, Operand) else Operand(B, "B")
        self.out = out = out if isinstance(out, Operand) else Operand(out, "out")
        self.operands = (A, B, out)
        self.epilogue = None
        a_type = A.dtype
        self.accumulator_type = (
            default_accumulator(a_type) if accumulator_type is None else dtype(accumulator_type)
        )
        self.fp32_precision = precision_of(a_type, fp32_precision)
        self._signature = self._key = None
        self._accepted = {}
        plain = epilogue is None and A.mode is B.mode is out.mode is None
        layouts = (A.layout, B.layout, out.layout)
        if plain and layouts in _fitting:
            self.device = A.device
            self._check_apart(out, self.operands)
            return
        self._check_shapes(epilogue)
        self._check_devices()
        if self.scaled:
            self._check_scales()
        self._check_outputs()
        if plain:
            _remember_fitting(layouts)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.A.tensor, self.B.tensor, self.out.tensor

    def takes_in_place(self, operand: Operand) -> bool:
        """Who computes an element of ``out`` reads that element of the operand before, and nobody
        else does."""
        out, epilogue = self.out, self.epilogue
        if epilogue is None or out.mode is not None or not epilogue.graph.is_elementwise:
            return False
        alike = (operand.shape, operand.stride, operand.dtype) == (out.shape, out.stride, out.dtype)
        return alike and any(operand is one for one in epilogue.inputs.values())

    @property
    def in_place(self) -> tuple[str, ...]:
        if self.epilogue is None:
            return ()
        inputs = self.epilogue.inputs.items()
        return tuple([name for name, one in inputs if self._is_in_place(self.out, one)])

    @property
    def M(self) -> int:
        return self.A.shape[-2]

    @property
    def K(self) -> int:
        return self.A.shape[-1]

    @property
    def L(self) -> int:
        """Batch count; 1 for two-dimensional operands."""
        return self.out.shape[0] if len(self.out.shape) == 3 else 1

    def _check_shapes(self, epilogue: EpilogueArguments | None) -> None:
        a, b, out = self.A.shape, self.B.shape, self.out.shape
        if not (len(a) == len(b) == len(out)) or len(a) not in (2, 3):
            raise ArgumentError(
                f"A has rank {len(a)}, B rank {len(b)}, out rank {len(out)}; expected all 2, "
                f"(M, K) (K, N) (M, N), or all 3 with a batch in front (broadcast one by expand)"
            )
        if a[-1] != b[-2]:
            raise ArgumentError(
                f"A has K = {a[-1]} but B has K = {b[-2]} "
                f"(A {self._letters('A')} = {a}, B {self._letters('B')} = {b})"
            )
        batched = len(a) == 3
        if batched and not (a[0] == b[0] == out[0]):
            raise ArgumentError(
                f"batch of A is {a[0]}, of B {b[0]}, of out {out[0]}; they must be equal "
                f"(broadcast A or B with expand, a stride of 0)"
            )
        if epilogue is not None:
            problem = Problem(a[0] if batched else None, a[-2], b[-1])
            self._join_epilogue(epilogue, problem, self.out)
        elif out[-2:] != (a[-2], b[-1]):
            raise ArgumentError(
                f"out has (M, N) = {out[-2:]} but A and B give ({a[-2]}, {b[-1]}) "
                f"(A {self._letters('A')} = {a}, B {self._letters('B')} = {b})"
            )

    def _letters(self, name: str) -> str:
        letters = ("L" if len(self.A.shape) == 3 else "") + self.modes[name]
        return f"({', '.join(letters)})"

    def __repr__(self) -> str:
        batch = f"{self.L}x" if len(self.out.shape) == 3 else ""
        a, b, out = (described(operand) for operand in self.operands)
        types = f"{a} x {b} -> {out}"
        return (
            f"GemmArguments({batch}{self.M}x{self.N}x{self.K} (M x N x K), {types}, "
            f"accumulated in {self.accumulator_type.short}, on {self.device}"
            f"{'' if self.epilogue is None else f', {self.epilogue.graph}'})"
        )


def _remember_fitting(layouts: tuple[Layout, Layout, Layout]) -> None:
    if len(_fitting) >= _FITTING_KEPT:
        _fitting.clear()
    _fitting.add(layouts)


def described(operand: Operand) -> str:
    """Its element type, and that of its scale."""
    mode = getattr(operand, "mode", None)
    return operand.dtype.short if mode is None else f"{operand.dtype.short}*{mode.value}"


def default_accumulator(operand_type: DType) -> DType:
    """float32; int32 for integers, float64 for float64."""
    if operand_type is _FLOAT64:
        return _FLOAT64
    return _INT32 if operand_type.kind in ("int", "uint", "bool") else _FLOAT32


def precision_of(operand_type: DType, asked: str | None) -> str | None:
    """What float32 multiplication may do; None for other element types."""
    if asked is not None and asked not in _PRECISIONS:
        raise ArgumentError(f"fp32_precision is {asked!r}; expected one of {_PRECISIONS}")
    if operand_type is not _FLOAT32:
        return None
    if asked is not None:
        return asked
    return "tf32" if setting() == "tf32" else "ieee"
