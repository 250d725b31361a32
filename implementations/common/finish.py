"""What becomes of an accumulator on its way out: scales, a bias, a function of them."""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Numeric, const_expr

_MODES = {"scalar": "", "row": "m", "column": "n", "full": "mn"}
_TRANSPOSED = {"row": "column", "column": "row"}


def _identity(accumulator: Numeric) -> Numeric:
    return accumulator


@dataclass(frozen=True)
class Finish:
    """An element of D = function(accumulator, one value of each operand).

    kind of operand   shape, each with or without a batch mode in front
    ---------------   -------------------------------------------------
    scalar            ()
    row               (M,)      one value per row
    column            (N,)      one value per column
    full              (M, N)
    """

    kinds: tuple[str, ...] = ()
    function: Callable[..., Numeric] = _identity

    def transposed(self) -> "Finish":
        """The same for the transposed product."""
        return Finish(tuple(_TRANSPOSED.get(k, k) for k in self.kinds), self.function)

    def operand_modes(self, operands: tuple) -> tuple:
        """Operands as (M, N, L); the modes that one does not vary in have stride 0."""
        return tuple(_modes(mX, kind) for mX, kind in zip(operands, self.kinds, strict=True))


def _modes(mX: cute.Tensor, kind: str) -> cute.Tensor:
    names = _MODES[kind]
    rank = len(mX.shape)
    if const_expr(rank == len(names) + 1):
        names = "l" + names
    if const_expr(rank != len(names)):
        raise ValueError(f"a {kind} operand has rank {rank}")
    shape = tuple(mX.shape[names.index(mode)] if mode in names else 1 for mode in "mnl")
    stride = tuple(mX.stride[names.index(mode)] if mode in names else 0 for mode in "mnl")
    return cute.make_tensor(mX.iterator, cute.make_layout(shape, stride=stride))


@dataclass
class OperandReader:
    """Reads the values that belong to accumulators of one thread, each of them once.

    A coordinate beyond the output reads its last row or column; what comes of it is not stored.
    """

    kinds: tuple[str, ...]
    operands: tuple  # (M, N, L)
    last: tuple[Int32, Int32]  # coordinate of the output
    batch: Int32

    def __post_init__(self):
        self._known = {}

    def values(self, row: Int32, column: Int32, names: tuple[int, int]) -> list:
        """For the accumulator at a coordinate; `names` tell apart, while the kernel is traced,
        the rows and columns that the thread has accumulators in."""
        values = []
        for i, (kind, operand) in enumerate(zip(self.kinds, self.operands, strict=True)):
            modes = _MODES[kind]
            key = (i, names[0] if "m" in modes else None, names[1] if "n" in modes else None)
            if key not in self._known:
                m, n = cutlass.min(row, self.last[0]), cutlass.min(column, self.last[1])
                self._known[key] = operand[m, n, self.batch]
            values.append(self._known[key])
        return values
