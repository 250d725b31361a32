"""Arguments of a product of groups: many matrices of different sizes in one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar

from kernel_api._numbers import whether
from kernel_api.arguments.base import check_writable
from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.arguments.experts import Experts, ExpertTensors, experts, memory_of
from kernel_api.arguments.gemm import (
    ProductArguments,
    default_accumulator,
    described,
    precision_of,
)
from kernel_api.arguments.scaled import BLOCK_MODES
from kernel_api.dtypes import dtype
from kernel_api.epilogue.shape import Problem
from kernel_api.errors import ArgumentError
from kernel_api.offsets import check_groups, check_is_asked
from kernel_api.operands import Layout, Operand, overlap, without_repetitions

_INT32 = dtype("int32")

#: Letters of every mode of the operands, by the mode that is cut into groups.
_LETTERS = {
    "M": {"A": "TK", "B": "EKN", "out": "TN", "offsets": "E"},
    "K": {"A": "MT", "B": "TN", "out": "EMN", "offsets": "E"},
}

_Fitting = tuple[Layout, Layout, Layout, Layout, bool]

#: Layouts of the operands, and whether they accumulate, that passed all checks but the one that
#: asks for addresses.
_fitting: set[_Fitting] = set()
_FITTING_KEPT = 4096


class GroupedGemmArguments(ProductArguments):
    """One product per group of tokens, accumulated in ``accumulator_type``.

    There are T tokens, one group of neighbours after the other: group e is those from
    ``offsets[e - 1]`` (0 for the first) up to ``offsets[e]``. Any group may be empty, and tokens
    behind the last offset belong to none: they are not read, and what ``out`` has there stays.
    Offsets are read by kernels alone, so they may change between replays of a CUDA graph.

    Which mode is cut into groups (``ragged``) is told by the shapes:

    ========  ============  ============  ==============  =====================================
    ragged    A             B             out             computes
    ========  ============  ============  ==============  =====================================
    ``"M"``   (T, K)        (E, K, N)     (T, N)          out[rows of e] = A[rows of e] · B[e]
    ``"K"``   (M, T)        (T, N)        (E, M, N)       out[e] = A[:, columns of e] ·
                                                          B[rows of e]; zeros if there are none
    ========  ============  ============  ==============  =====================================

    Args:
        A, B: Either may be a :class:`~kernel_api.arguments.ScaledOperand`, and so may ``out``;
            L of its scales is E. Scales of blocks are for ragged M. What has a matrix per
            expert, B of ragged M, may be a list of E tensors of one layout, or
            :class:`~kernel_api.arguments.ExpertPointers`.
        out: Written; read only to accumulate. May not share memory with what is read. Of ragged K
            it may be a list of E tensors, or ExpertPointers, too.
        offsets: int32 (E,), contiguous: where each group ends, never decreasing, at most T.
        accumulator_type: float32 by default; int32 for integers, float64 for float64.
        accumulate: Of ragged K: what is computed is added to ``out``; where a group is empty,
            ``out`` stays.
        row_index: Of ragged M: int32 (T,), contiguous; token t is the row ``row_index[t]`` of A,
            which then has any number of rows.
        out_row_index: Of ragged M: int32 (T,), contiguous; the result of token t is the row
            ``out_row_index[t]`` of ``out``, which then has any number of rows; no two are equal,
            and rows that none names stay.
        B_scale: Of a list, or of ExpertPointers: the scales of all experts in one float32 tensor,
            that of a ScaledOperand (E, K, N): () or (E,) is per tensor, (E, N) per row,
            (E, ceil(K/128), ceil(N/128)) per block of 128 x 128.
        epilogue: A function of the accumulator, see :class:`EpilogueArguments`. Of ragged K it
            is that of a batch of E products. Of ragged M the accumulator is (T, N), and every row
            belongs to one batch: (T, N) and (T, 1) broadcast per token (never gathered or
            scattered), (E, 1, N) and (E, 1, 1) per group; a reduction over rows or over both is
            one per group, (E, N) or (E,), and takes part in it what the group has.
        fp32_precision: As of :class:`~kernel_api.arguments.GemmArguments`.

    All operands are on one device. Any strides are taken; kernels may ask for more. On the CPU
    offsets and indices are checked as they are read. With ``KERNEL_API_CHECK_OFFSETS=1`` in the
    environment runs, one-call forms that saw no such call without it, and launches that are
    prepared then, check offsets and indices before, and raise ArgumentError; captures of CUDA
    graphs do not, and executions of :mod:`kernel_api.graph` need not.

    Raises:
        ArgumentError: shapes, ranks, devices, types or memory contradict each other.
        EpilogueError: the epilogue cannot be traced, or its operands do not fit.
    """

    kind = "grouped_gemm"
    operand_names: ClassVar[tuple[str, ...]] = ("A", "B", "out", "offsets")
    modes: ClassVar[dict[str, str]] = {**ProductArguments.modes, "offsets": "E"}
    #: What may be absent beside the operands.
    index_names: ClassVar[tuple[str, ...]] = ("row_index", "out_row_index")

    __slots__ = ("accumulate", "offsets", "out_row_index", "ragged", "row_index")

    offsets: Operand
    accumulate: bool
    row_index: Operand | None
    out_row_index: Operand | None
    #: The mode that is cut into groups: ``"M"`` or ``"K"``.
    ragged: str

    def __init__(
        self,
        A: Any,
        B: Any,
        out: Any,
        offsets: Any,
        accumulator_type: Any = None,
        *,
        accumulate: bool = False,
        row_index: Any = None,
        out_row_index: Any = None,
        B_scale: Any = None,
        epilogue: EpilogueArguments | None = None,
        fp32_precision: str | None = None,
    ) -> None:
        self.A = A = A if isinstance(A, Operand) else Operand(A, "A")
        B = B if isinstance(B, Operand) else experts(B)
        self.B = B = B if B_scale is None else _in_units_of(B, B_scale)
        self.out = out = out if isinstance(out, Operand) else experts(out, "out")
        if not isinstance(offsets, Operand):
            offsets = Operand(offsets, "offsets")
        self.offsets = offsets
        self.operands = (A, B, out, offsets)
        self.accumulate = accumulate = whether("accumulate", accumulate)
        self.row_index = _index("row_index", row_index)
        self.out_row_index = _index("out_row_index", out_row_index)
        self.ragged = "K" if len(out.shape) == 3 else "M"
        self.epilogue = None
        self.accumulator_type = (
            default_accumulator(A.dtype) if accumulator_type is None else dtype(accumulator_type)
        )
        self.fp32_precision = precision_of(A.dtype, fp32_precision)
        self._signature = self._key = None
        self._accepted = {}
        plain = epilogue is row_index is out_row_index is A.mode is B.mode is out.mode is None
        layouts = (A.layout, B.layout, out.layout, offsets.layout, accumulate)
        if plain and layouts in _fitting and not out.discrete:
            self.device = A.device
            self._check_apart(out, self.operands)
            return
        self._check_ranks()
        self._check_offsets()
        self._check_options()
        self._check_shapes(epilogue)
        self._check_devices()
        if self.scaled:
            self._check_scales()
        self._check_outputs()
        if plain:
            _remember_fitting(layouts)

    @property
    def M(self) -> int:
        """Rows of the result: of ragged M those of all groups, T."""
        return self.T if self.ragged == "M" else self.A.shape[0]

    @property
    def K(self) -> int:
        """What is summed over: of ragged K that of all groups, T."""
        return self.A.shape[1]

    @property
    def L(self) -> int:
        """Groups, E."""
        return self.offsets.shape[0]

    @property
    def T(self) -> int:
        """Tokens, those that belong to no group too."""
        for index in (self.row_index, self.out_row_index):
            if index is not None:
                return index.shape[0]
        return self.A.shape[0 if self.ragged == "M" else 1]

    @property
    def indices(self) -> dict[str, Operand]:
        """``row_index`` and ``out_row_index``, if they are there."""
        named = ((name, getattr(self, name)) for name in self.index_names)
        return {name: operand for name, operand in named if operand is not None}

    @property
    def B_scale(self) -> Operand | None:
        """Of experts that lie anywhere."""
        return self.B.scale if isinstance(self.B, Experts) else None

    @property
    def named_operands(self) -> dict[str, Operand]:
        named = {**dict(zip(self.operand_names, self.operands, strict=True)), **self.indices}
        return named if self.epilogue is None else {**named, **self.epilogue.tensors}

    @property
    def launch_values(self) -> dict[str, Any]:
        return {name: operand.tensor for name, operand in self.indices.items()}

    @property
    def accumulated(self) -> tuple[str, ...]:
        return ("out",) if self.accumulate else ()

    def draw_indices(self, random: Any) -> None:
        """Groups of equal size, of as many tokens as ``out`` has rows for; tokens that are picked
        and placed at random; scales of experts."""
        import torch

        device, T = self.device, self.T
        used = T if self.out_row_index is None else min(T, self.out.shape[0])
        rows = self.A.shape[0] if self.row_index is not None else T
        used = used if rows else 0
        groups = torch.arange(1, self.L + 1, device=device)
        self.offsets.tensor.copy_(groups * used // self.L)
        if self.row_index is not None:
            index = without_repetitions(self.row_index)
            index.copy_(torch.randint(max(rows, 1), index.shape, generator=random, device=device))
        if self.out_row_index is not None:
            placed = torch.randperm(self.out.shape[0], generator=random, device=device)
            self.out_row_index.tensor[:used] = placed[:used]
            self.out_row_index.tensor[used:] = -1
        if self.B_scale is not None:
            scale = self.B_scale.tensor
            scale.copy_(torch.rand(scale.shape, generator=random, device=device) + 0.5)

    def check_values(self, stream: Any = None) -> None:
        if check_is_asked():
            check_groups(self.tensors, self.launch_values, self.ragged, stream)

    def checked(self, launch: Callable[..., None]) -> Callable[..., None]:
        if not check_is_asked():
            return launch
        ragged, names = self.ragged, tuple(self.indices)

        def checked_launch(*tensors: Any, stream: Any = None, **others: Any) -> None:
            check_groups(tensors, {name: others[name] for name in names}, ragged, stream)
            launch(*tensors, stream=stream, **others)

        return checked_launch

    def rows_written(self) -> dict[str, Any]:
        if self.ragged == "K":
            return {}
        rows = slice(0, int(self.offsets.tensor[-1]))
        scattered = self.out_row_index
        found = {"out": rows if scattered is None else scattered.tensor[rows].long()}
        if self.epilogue is not None:
            graph = self.epilogue.graph
            names = [name for name in self.epilogue.outputs if graph.output_shape(name).rows]
            found.update(dict.fromkeys(names, rows))
        return found

    def _options(self) -> tuple[Hashable, ...]:
        experts = ("discrete",) if self.B.discrete or self.out.discrete else ()
        return (*super()._options(), self.accumulate, *self.indices, *experts)

    @property
    def key(self) -> tuple[Hashable, ...]:
        if self._key is None:
            self._key = (*super().key, self.T)
        return self._key

    def _keywords(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("accumulate", *self.index_names, "B_scale")}
        return {**super()._keywords(), **own}

    def _all_operands(self) -> tuple[Operand, ...]:
        return tuple(self.named_operands.values())

    def _check_apart(self, out: Operand, operands: Iterable[Operand]) -> None:
        if not self.B.discrete:
            super()._check_apart(out, operands)
            return
        super()._check_apart(out, [one for one in operands if one is not self.B])
        for place, part in enumerate(memory_of(self.B)):
            if overlap(out, part):
                raise ArgumentError(
                    f"{self._name_of(out)} shares memory with B[{place}]; the kernel would read "
                    f"what it has overwritten"
                )

    def _check_outputs(self) -> None:
        if not self.out.discrete:
            super()._check_outputs()
            return
        named = {**self.named_operands, **self._scales()}
        others = {name: one for name, one in named.items() if one is not self.out}
        for name, output in self.outputs.items():
            if output is not self.out:
                self._check_written(name, output, others.values())
        parts = self.out.memory if isinstance(self.out, ExpertTensors) else ()
        for place, part in enumerate(parts):
            check_writable(f"out[{place}]", part)
            for name, other in others.items():
                if overlap(part, other):
                    raise ArgumentError(f"out[{place}] shares memory with {name}")
        in_order = sorted(enumerate(parts), key=lambda one: one[1].address)
        for (place, part), (other_place, other) in itertools.pairwise(in_order):
            if overlap(part, other):
                raise ArgumentError(f"out[{place}] shares memory with out[{other_place}]")

    # Checks ------------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        ranks = tuple(len(operand.shape) for operand in self.operands[:3])
        if ranks not in ((2, 3, 2), (2, 2, 3)):
            raise ArgumentError(
                f"A has rank {ranks[0]}, B rank {ranks[1]}, out rank {ranks[2]}; expected A (T, K),"
                f" B (E, K, N), out (T, N), or A (M, T), B (T, N), out (E, M, N)"
            )

    def _check_offsets(self) -> None:
        _check_integers("offsets", self.offsets, "(E,)")
        E = self.B.shape[0] if self.ragged == "M" else self.out.shape[0]
        if self.offsets.shape != (E,):
            name = "B" if self.ragged == "M" else "out"
            raise ArgumentError(
                f"offsets has shape {self.offsets.shape}; expected ({E},), the end of each group "
                f"of {self._shown(name)}"
            )
        if not E:
            raise ArgumentError("offsets is empty; expected the end of at least one group")

    def _check_options(self) -> None:
        if self.ragged == "M":
            if self.accumulate:
                raise ArgumentError(
                    "accumulate is True and the groups are rows of A; it is for out (E, M, N), the "
                    "sum over the tokens of each group"
                )
            for name, index in self.indices.items():
                _check_integers(name, index, "(T,)")
            return
        for name in self.indices:
            raise ArgumentError(
                f"{name} is given and the groups are summed over; it is for A (T, K), whose rows "
                f"are in groups"
            )
        for name in self.scaled:
            mode = getattr(self, name).mode
            if mode in BLOCK_MODES:
                raise ArgumentError(
                    f"{name} carries a {mode.value} scale and the groups are summed over; expected "
                    f"one per tensor or per row, because groups begin in the middle of a block"
                )

    def _check_shapes(self, epilogue: EpilogueArguments | None) -> None:
        a, b = self.A.shape, self.B.shape
        if a[1] != b[-2]:
            letter = _LETTERS[self.ragged]["A"][1]
            raise ArgumentError(
                f"A has {letter} = {a[1]} but B has {letter} = {b[-2]} "
                f"({self._shown('A')}, {self._shown('B')})"
            )
        if self.ragged == "M":
            self._check_tokens()
        T, N = self.T, self.N
        out_rows = None if self.out_row_index is None else self.out.shape[0]
        if epilogue is not None:
            ragged = Problem(self.L, T, N, ragged=True, out_rows=out_rows)
            problem = ragged if self.ragged == "M" else Problem(self.L, a[0], N)
            self._join_epilogue(epilogue, problem, self.out)
            return
        rows = T if out_rows is None else out_rows
        expected = (rows, N) if self.ragged == "M" else (self.L, a[0], N)
        if self.out.shape != expected:
            raise ArgumentError(
                f"out has shape {self.out.shape} but A and B give {expected} "
                f"({self._shown('A')}, {self._shown('B')})"
            )

    def _check_tokens(self) -> None:
        """Whatever has one row per token has as many."""
        named = {**self.indices, **({} if self.row_index is not None else {"A": self.A})}
        (first, one), *others = named.items()
        for name, other in others:
            if other.shape[0] != one.shape[0]:
                raise ArgumentError(
                    f"{first} has T = {one.shape[0]} but {name} has T = {other.shape[0]}"
                )

    def _shown(self, name: str) -> str:
        letters = ", ".join(_LETTERS[self.ragged][name])
        return f"{name} ({letters}) = {getattr(self, name).shape}"

    def __repr__(self) -> str:
        a, b, out, _ = (described(operand) for operand in self.operands)
        further = [*self.indices, *(["added to out"] if self.accumulate else [])]
        if self.epilogue is not None:
            further.append(str(self.epilogue.graph))
        sizes = f"{self.L} groups of {self.T} tokens, {self.M}x{self.N}x{self.K} (M x N x K)"
        return (
            f"GroupedGemmArguments({sizes}, ragged {self.ragged}, {a} x {b} -> {out}, "
            f"accumulated in {self.accumulator_type.short}, on {self.device}"
            f"{''.join(f', {one}' for one in further)})"
        )


def _index(name: str, value: Any) -> Operand | None:
    return value if value is None or isinstance(value, Operand) else Operand(value, name)


def _in_units_of(B: Operand, scale: Any) -> Experts:
    if not isinstance(B, Experts):
        raise ArgumentError(
            "B_scale is given and B is one tensor; it is for matrices that lie anywhere, a tensor "
            "carries its own as a ScaledOperand"
        )
    return B.scaled(scale)


def _check_integers(name: str, operand: Operand, letters: str) -> None:
    """Raise unless these are int32, in one mode without gaps."""
    if operand.dtype is not _INT32:
        raise ArgumentError(f"{name} is {operand.dtype}; expected int32")
    if operand.rank != 1:
        raise ArgumentError(f"{name} has shape {operand.shape}; expected {letters}")
    if operand.stride != (1,):
        raise ArgumentError(f"{name} has stride {operand.stride[0]}; expected 1, without gaps")


def _remember_fitting(layouts: _Fitting) -> None:
    if len(_fitting) >= _FITTING_KEPT:
        _fitting.clear()
    _fitting.add(layouts)
