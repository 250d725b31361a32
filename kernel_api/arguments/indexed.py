"""Arguments of rows that an index names: gathered and added up, or scattered.

They stand around the products of a layer of experts: rows of tokens are scattered to where their
experts' groups lie, and gathered from there with the weights of the router. Megatron-LM calls that
permute and unpermute. Gathering is the gradient of scattering with respect to x; scattering that of
gathering, where every row is named once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api.arguments.row import RowArguments, fitting, remember_fitting
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.offsets import check_is_asked, check_scattered
from kernel_api.operands import Operand, without_repetitions

_INT32 = dtype("int32")


class IndexedRowsArguments(RowArguments):
    """What both share: x and out (rows, N), row_index (M, k), and a weight of each of its places.

    Attributes:
        M: Rows of row_index.
        k: Rows that each of those names.
    """

    operand_names: ClassVar[tuple[str, ...]] = ("x", "out")
    output_names: ClassVar[tuple[str, ...]] = ("out",)
    further_names: ClassVar[tuple[str, ...]] = ("row_index", "weight")
    #: The matrix whose rows are those of row_index.
    in_order: ClassVar[str]

    __slots__ = ("out", "row_index", "weight", "x")

    out: Operand
    row_index: Operand
    weight: Operand | None

    def __init__(self, x: Any, out: Any, row_index: Any, weight: Any = None) -> None:
        self._take({"x": x, "out": out}, {"row_index": row_index, "weight": weight})
        weighted = self.weight
        layouts = (self.kind, *(one.layout for one in self._all_operands()), weighted is None)
        if layouts in fitting:
            self.device = self.x.device
            self._check_apart(self.out, self._all_operands())
            return
        self._check()
        remember_fitting(layouts)

    @property
    def M(self) -> int:
        return self.row_index.shape[0]

    @property
    def k(self) -> int:
        return self.row_index.shape[1]

    @property
    def N(self) -> int:
        """Columns."""
        return self.x.shape[1]

    @property
    def sizes(self) -> dict[str, int]:
        rows = self.x.shape[0] if self.in_order == "out" else self.out.shape[0]
        return {"M": self.M, "N": self.N, "k": self.k, "rows": rows}

    @property
    def indexed(self) -> Operand:
        """The matrix whose rows row_index names."""
        return self.x if self.in_order == "out" else self.out

    # Checks ------------------------------------------------------------------------------

    def _check(self) -> None:
        self._check_index()
        for name in self.operand_names:
            operand = getattr(self, name)
            if operand.rank != 2:
                advice = f": see trailing modes as one, {name}.flatten(1)"
                raise ArgumentError(
                    f"{name} has shape {operand.shape}; expected {self._letters(name)}"
                    f"{advice if operand.rank > 2 else ''}"
                )
            if name == self.in_order and operand.shape[0] != self.M:
                raise ArgumentError(
                    f"{name} has {operand.shape[0]} rows but row_index (M, k) = "
                    f"{self.row_index.shape}"
                )
        if self.out.shape[1] != self.N:
            raise ArgumentError(f"out has N = {self.out.shape[1]} but x has N = {self.N}")
        self._check_weight()
        self._check_types()
        self._check_devices()
        self._check_outputs()

    def _check_index(self) -> None:
        if self.row_index is None:
            raise ArgumentError("row_index is None; expected int32 (M, k)")
        if self.row_index.dtype is not _INT32:
            raise ArgumentError(f"row_index is {self.row_index.dtype}; expected int32")
        if self.row_index.rank != 2:
            advice = ": of one row each, row_index.unsqueeze(1)"
            raise ArgumentError(
                f"row_index has shape {self.row_index.shape}; expected (M, k)"
                f"{advice if self.row_index.rank == 1 else ''}"
            )

    def _check_weight(self) -> None:
        if self.weight is None:
            return
        if self.weight.dtype.kind != "float":
            raise ArgumentError(f"weight is {self.weight.dtype}; expected a floating type")
        if self.weight.shape != self.row_index.shape:
            raise ArgumentError(
                f"weight has shape {self.weight.shape} but row_index (M, k) = "
                f"{self.row_index.shape}"
            )

    def _check_types(self) -> None:
        for name, operand in zip(self.operand_names, self.operands, strict=True):
            if operand.dtype.kind != "float":
                raise ArgumentError(f"{name} is {operand.dtype}; expected a floating type")

    def _letters(self, name: str) -> str:
        return "(M, N)" if name == self.in_order else "(rows, N)"

    def __repr__(self) -> str:
        weighted = "" if self.weight is None else f", weight {self.weight.dtype.short}"
        sizes = f"{self.M}x{self.k} of {self.indexed.shape[0]} rows, N = {self.N}"
        return (
            f"{type(self).__name__}({sizes}, {self.x.dtype.short} -> {self.out.dtype.short}"
            f"{weighted}, on {self.device})"
        )


class GatherRowsArguments(IndexedRowsArguments):
    """out[m] = Σ over j of weight[m, j] · x[row_index[m, j]]

    Args:
        x: (rows, N).
        out: (M, N); written. May not share memory with an operand.
        row_index: int32 (M, k). What is no row of x, such as -1, adds nothing, whatever its weight
            is; where that are all, and where k is 0, out is 0.
        weight: (M, k); 1 if it is None.

    Sums are formed in float32, or in float64 where x is, in the order of j, and rounded once. Any
    strides are taken. Kernels may ask for more: ``explain`` tells.

    Raises ArgumentError: shapes, types, devices or memory contradict each other.
    """

    kind = "gather_rows"
    modes: ClassVar[dict[str, str]] = {"x": "RN", "out": "MN"}
    in_order = "out"

    __slots__ = ()

    def draw_indices(self, random: Any) -> None:
        """Any rows, and here and there none."""
        import torch

        index = without_repetitions(self.row_index)
        drawn = torch.randint(
            *(-1, self.x.shape[0], index.shape),
            generator=random,
            device=self.device,
            dtype=torch.int32,
        )
        index.copy_(drawn)


class ScatterRowsArguments(IndexedRowsArguments):
    """out[row_index[m, j]] = weight[m, j] · x[m]

    Args:
        x: (M, N).
        out: (rows, N); written where row_index says, and not elsewhere. May not share memory with
            an operand.
        row_index: int32 (M, k), no row of out twice: of those, one or parts of several are
            written. What is no row of out, such as -1, is left out.
        weight: (M, k); 1 if it is None.

    Products are formed in float32, or in float64 where x is, and rounded once. Any strides are
    taken. Kernels may ask for more: ``explain`` tells.

    Raises ArgumentError: shapes, types, devices or memory contradict each other.
    """

    kind = "scatter_rows"
    modes: ClassVar[dict[str, str]] = {"x": "MN", "out": "RN"}
    in_order = "x"

    __slots__ = ()

    def rows_written(self) -> dict[str, Any]:
        index = self.row_index.tensor.flatten().long()
        return {"out": index[(index >= 0) & (index < self.out.shape[0])]}

    def check_values(self, stream: Any = None) -> None:
        if check_is_asked():
            check_scattered(self.row_index.tensor, self.out.shape[0], stream)

    def checked(self, launch: Callable[..., None]) -> Callable[..., None]:
        if not check_is_asked():
            return launch
        names = ("x", "out", *self.further)

        def checked_launch(*tensors: Any, stream: Any = None, **others: Any) -> None:
            given = {**dict(zip(names, tensors, strict=False)), **others}
            check_scattered(given["row_index"], given["out"].shape[0], stream)
            launch(*tensors, stream=stream, **others)

        return checked_launch

    def draw_indices(self, random: Any) -> None:
        """Rows of out in any order, each once; where there are too few, or rows of x have the same
        one: none."""
        import torch

        index = without_repetitions(self.row_index)
        if index.shape[0] < self.row_index.shape[0]:
            index.fill_(-1)
            return
        rows, places = self.out.shape[0], index.numel()
        drawn = torch.randperm(max(rows, places), generator=random, device=self.device)[:places]
        drawn = torch.where(drawn < rows, drawn, -1).to(torch.int32)
        index.copy_(drawn.view(index.shape))
