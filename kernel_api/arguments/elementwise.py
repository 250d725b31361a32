"""Arguments of what is done to every element of a matrix."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from kernel_api._numbers import whether
from kernel_api.arguments.base import Arguments
from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.arguments.scaled import ScaledOperand
from kernel_api.dtypes import dtype
from kernel_api.epilogue.functions import STORED_TYPES
from kernel_api.epilogue.shape import Problem
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand

_FLOAT32, _FLOAT64 = dtype("float32"), dtype("float64")


class ElementwiseArguments(Arguments):
    """out = epilogue(x): an epilogue that has a matrix x in place of a product as its accumulator.

    Args:
        x: (M, N), or (L, M, N) batched; real numbers or bool. It is converted to float32, or is
            float64; that is the accumulator.
        out: (M, N), or (L, M, N); written, never read. May not share memory with an operand. None
            where an epilogue writes operands of its own: then what it returns first is as large as
            x, and not stored.
        epilogue: A function of the accumulator; it decides the number of columns of ``out``, and
            may read and write operands of its own. Without one, out is x: the same bits where the
            types are equal, else converted as epilogues convert what they store (to nearest;
            integers and 8-bit floats saturate, NaN becomes 0 in integers).
        stores_out: False is another way to say that out is None, whatever it is.

    All operands are on one device. Any strides are taken; modes of x are broadcast by a stride of
    0 (``tensor.expand``). Kernels may ask for more: ``explain`` tells.

    Raises:
        ArgumentError: shapes, ranks, types, devices or memory contradict each other.
        EpilogueError: the epilogue cannot be traced, or its operands do not fit.
    """

    kind = "elementwise"
    operand_names: ClassVar[tuple[str, ...]] = ("x", "out")
    output_names: ClassVar[tuple[str, ...]] = ("out",)
    modes: ClassVar[dict[str, str]] = {"x": "MN", "out": "MN"}

    __slots__ = ("out", "stores_out", "x")

    x: Operand
    #: In the place of one that is not stored: x once more.
    out: Operand
    #: Whether ``out`` is written.
    stores_out: bool

    def __init__(
        self,
        x: Any,
        out: Any = None,
        *,
        epilogue: EpilogueArguments | None = None,
        stores_out: bool = True,
    ) -> None:
        stores_out = whether("stores_out", stores_out) and out is not None
        self.x, self.stores_out = _operand("x", x), stores_out
        self.out = _operand("out", out if self.stores_out else self.x.tensor)
        if not self.stores_out:
            self._check_not_stored(epilogue)
        self.operands = (self.x, self.out)
        self.accumulator_type = _FLOAT64 if self.x.dtype is _FLOAT64 else _FLOAT32
        self.epilogue = None
        self._signature = self._key = None
        self._accepted = {}
        self._check_types()
        self._check_shapes(epilogue)
        self._check_devices()
        self._check_outputs()

    @property
    def M(self) -> int:
        """Rows."""
        return self.x.shape[-2]

    @property
    def N(self) -> int:
        """Columns of x; an epilogue may give ``out`` more or fewer."""
        return self.x.shape[-1]

    @property
    def L(self) -> int:
        """Batch count; 1 for two-dimensional operands."""
        return self.x.shape[0] if self.x.rank == 3 else 1

    @property
    def named_operands(self) -> dict[str, Operand]:
        return self._without_out(super().named_operands)

    @property
    def outputs(self) -> dict[str, Operand]:
        return self._without_out(super().outputs)

    def _without_out(self, named: dict[str, Operand]) -> dict[str, Operand]:
        if not self.stores_out:
            del named["out"]
        return named

    def _keywords(self) -> dict[str, Any]:
        return {"epilogue": self.epilogue, **({} if self.stores_out else {"stores_out": False})}

    def _options(self) -> tuple[Hashable, ...]:
        return () if self.stores_out else ("out is not stored",)

    def _check_not_stored(self, epilogue: EpilogueArguments | None) -> None:
        if not isinstance(epilogue, EpilogueArguments) or not epilogue.outputs:
            raise ArgumentError(
                "out is None and the epilogue writes nothing else; then there is nothing to compute"
            )
        if self.x.dtype.name not in STORED_TYPES:
            raise ArgumentError(
                f"out is None and x is {self.x.dtype}; without out x has a type that epilogues "
                f"write: {', '.join(STORED_TYPES)}"
            )

    def _check_types(self) -> None:
        for name, operand in zip(self.operand_names, self.operands, strict=True):
            if operand.dtype.kind == "other":
                raise ArgumentError(f"{name} is {operand.dtype}; expected real numbers or bool")

    def _check_shapes(self, epilogue: EpilogueArguments | None) -> None:
        x, out = self.x.shape, self.out.shape
        if len(x) != len(out) or len(x) not in (2, 3):
            raise ArgumentError(
                f"x has rank {len(x)}, out rank {len(out)}; expected both 2, (M, N), or both 3 "
                f"with a batch in front: see further modes as one by view"
            )
        if len(x) == 3 and x[0] != out[0]:
            raise ArgumentError(
                f"batch of x is {x[0]}, of out {out[0]}; they must be equal (broadcast x with "
                f"expand, a stride of 0)"
            )
        if epilogue is not None:
            batch = x[0] if len(x) == 3 else None
            self._join_epilogue(epilogue, Problem(batch, x[-2], x[-1]), self.out)
        elif out != x:
            raise ArgumentError(
                f"out has (M, N) = {out[-2:]} but x has {x[-2:]} (broadcast x with expand, a "
                f"stride of 0)"
            )

    def __repr__(self) -> str:
        batch = f"{self.L}x" if self.x.rank == 3 else ""
        epilogue = "" if self.epilogue is None else f", {self.epilogue.graph}"
        written = self.out.dtype.short if self.stores_out else "nothing"
        return (
            f"ElementwiseArguments({batch}{self.M}x{self.N} (M x N), {self.x.dtype.short} -> "
            f"{written}{epilogue}, on {self.device})"
        )


def _operand(name: str, value: Any) -> Operand:
    if isinstance(value, ScaledOperand):
        raise ArgumentError(
            f"{name} is a ScaledOperand; expected a plain tensor: multiply with its scale in an "
            f"epilogue"
        )
    return value if isinstance(value, Operand) else Operand(value, name)
