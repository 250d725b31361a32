"""Arguments of rows that are to be grouped: which place each of them has among the sorted ones."""

from __future__ import annotations

from typing import Any, ClassVar

from kernel_api.arguments.row import RowArguments, fitting, remember_fitting
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand, side_by_side, without_repetitions

_INT32 = dtype("int32")
_MOST_PAIRS = 2**31 - 1


class GroupRowsArguments(RowArguments):
    """Pairs of a row and one of its k choices, sorted by the group that each chooses.

    The sort is stable: pairs of a group are in the order of m · k + j. Those without a group come
    behind all others. A layer of experts begins with it: ``scatter_rows`` copies each token to the
    places that ``row_index`` names, grouped products take ``offsets``, and ``gather_rows`` adds up
    what is at these places.

    Args:
        index: Integers (M, k): the group of each pair. What is none, such as -1 or E, says that it
            has none.
        offsets: int32 (E,); written: where the pairs of each group end, as grouped products take
            them.
        row_index: int32 (M, k); written: the place of each pair among the sorted ones; -1 without
            a group.
        place: int32 (M · k,); written: of each sorted pair, m · k + j.
        weight: (M, k), floats; None: there is nothing to sort with the pairs.
        grouped: (M · k,), of weight's type; written: the weight of each sorted pair.

    Any strides are taken. Kernels may ask for more: ``explain`` tells.

    Attributes:
        M: Rows.
        k: Choices of each.
        L: Groups, E.

    Raises ArgumentError: shapes, types, devices or memory contradict each other.
    """

    kind = "group_rows"
    operand_names: ClassVar[tuple[str, ...]] = ("index", "offsets", "row_index", "place")
    output_names: ClassVar[tuple[str, ...]] = ("offsets", "row_index", "place", "grouped")
    further_names: ClassVar[tuple[str, ...]] = ("weight", "grouped")
    modes: ClassVar[dict[str, str]] = {
        "index": "MK",
        "offsets": "L",
        "row_index": "MK",
        "place": "P",
    }

    __slots__ = ("grouped", "index", "offsets", "place", "row_index", "weight")

    index: Operand
    offsets: Operand
    row_index: Operand
    place: Operand
    weight: Operand | None
    grouped: Operand | None

    def __init__(
        self,
        index: Any,
        offsets: Any,
        row_index: Any,
        place: Any,
        weight: Any = None,
        grouped: Any = None,
    ) -> None:
        operands = {"index": index, "offsets": offsets, "row_index": row_index, "place": place}
        self._take(operands, {"weight": weight, "grouped": grouped})
        absent = self.weight is None, self.grouped is None
        layouts = (self.kind, *(one.layout for one in self._all_operands()), absent)
        if layouts not in fitting:
            self._check()
            remember_fitting(layouts)
            return
        self.device = self.index.device
        if not side_by_side(self._all_operands()):
            for out in self.outputs.values():
                self._check_apart(out, self._all_operands())

    @property
    def arithmetic(self) -> DType:
        return _INT32

    @property
    def M(self) -> int:
        return self.index.shape[0]

    @property
    def k(self) -> int:
        return self.index.shape[1]

    @property
    def L(self) -> int:
        return self.offsets.shape[0]

    @property
    def sizes(self) -> dict[str, int]:
        return {"M": self.M, "k": self.k, "L": self.L}

    def draw_indices(self, random: Any) -> None:
        """Any group, and here and there none."""
        import torch

        how: dict[str, Any] = {"generator": random, "device": self.device}
        index = without_repetitions(self.index)
        index.copy_(torch.randint(-1, self.L, index.shape, **how))

    # Checks ------------------------------------------------------------------------------

    def _check(self) -> None:
        self._check_index()
        if self.offsets.rank != 1 or not self.offsets.shape[0]:
            raise ArgumentError(
                f"offsets has shape {self.offsets.shape}; expected (E,), the ends of one group at "
                f"least"
            )
        pairs = self.M * self.k
        if pairs > _MOST_PAIRS:
            raise ArgumentError(f"index has {pairs} pairs; they are counted in int32")
        self._check_shape("row_index", self.index.shape, "(M, k)")
        self._check_shape("place", (pairs,), "(M · k,)")
        for name in ("offsets", "row_index", "place"):
            operand = getattr(self, name)
            if operand.dtype is not _INT32:
                raise ArgumentError(f"{name} is {operand.dtype}; expected int32")
        self._check_weight()
        self._check_devices()
        self._check_outputs()

    def _check_index(self) -> None:
        if not self.index.dtype.is_integer:
            raise ArgumentError(f"index is {self.index.dtype}; expected integers")
        if self.index.rank != 2:
            advice = ": of one choice each, index.unsqueeze(1)" if self.index.rank == 1 else ""
            raise ArgumentError(f"index has shape {self.index.shape}; expected (M, k){advice}")

    def _check_weight(self) -> None:
        if (self.weight is None) != (self.grouped is None):
            there, absent = ("weight", "grouped") if self.weight else ("grouped", "weight")
            raise ArgumentError(f"{there} is given and {absent} is None; expected both, or neither")
        if self.weight is None or self.grouped is None:
            return
        if self.weight.dtype.kind != "float":
            raise ArgumentError(f"weight is {self.weight.dtype}; expected a floating type")
        if self.grouped.dtype is not self.weight.dtype:
            raise ArgumentError(
                f"grouped is {self.grouped.dtype}; expected {self.weight.dtype}, the type of weight"
            )
        self._check_shape("weight", self.index.shape, "(M, k)")
        self._check_shape("grouped", (self.M * self.k,), "(M · k,)")

    def _check_shape(self, name: str, expected: tuple[int, ...], letters: str) -> None:
        shape = getattr(self, name).shape
        if shape != expected:
            raise ArgumentError(
                f"{name} has shape {shape}; expected {letters} = {expected}, because index has "
                f"shape {self.index.shape}"
            )

    def __repr__(self) -> str:
        weighted = "" if self.weight is None else f", weight {self.weight.dtype.short}"
        return (
            f"{type(self).__name__}({self.M}x{self.k} of {self.L} groups, "
            f"{self.index.dtype.short}{weighted}, on {self.device})"
        )
