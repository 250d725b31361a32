"""Masks of attention: which keys a query sees. They are combined with ``&``.

    mask = masks.Causal("bottom_right") & masks.Padding()

Query i sees key j by their indices within a sequence. A window that is aligned ``"top_left"``
counts from the first key, one aligned ``"bottom_right"`` from the last: its diagonal ends at the
last query and the last key, of each sequence by its actual lengths. A row that sees nothing gives
zeros, and −∞ as its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api._described import Described
from kernel_api._numbers import size_or_whole_number, whole_number
from kernel_api._score import ScoreFunction, conjunction
from kernel_api.dtypes import dtype
from kernel_api.epilogue.graph import Graph
from kernel_api.errors import ArgumentError, DeviceError
from kernel_api.operands import Operand, require_one_device
from kernel_api.utils import untraced

__all__ = [
    "BlockSparse",
    "Causal",
    "Mask",
    "MaskMod",
    "Padding",
    "SlidingWindow",
    "with_blocks",
]

#: Names of the left and the right bound of a band, by what it is aligned to.
BOUNDS = {"top_left": ("left", "right"), "bottom_right": ("left_end", "right_end")}

#: Scores of float32 below hide a key, as −∞ does: no digits are left to tell them apart.
HIDDEN_BELOW = -(2.0**26)

#: What bounds are at most: 64 bits hold them with the length of a sequence added, and none is
#: longer.
_FARTHEST = 2**62


class Mask(Described):
    """Base of the masks."""

    #: Whether it is all said by :attr:`bounds`.
    is_band = False

    @property
    def parts(self) -> tuple[Mask, ...]:
        """What it is combined of."""
        return (self,)

    @property
    def bounds(self) -> dict[str, int]:
        """Those of all bands together: with d the keys that there are more than queries,
        −left ≤ j − i ≤ right, and d − left_end ≤ j − i ≤ d + right_end; only those that exist."""
        return self._bounds_of_parts.copy()

    @cached_property
    def _bounds_of_parts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in self.parts:
            for name, bound in part._bounds():
                found[name] = min(bound, found.get(name, bound))
        return {name: found[name] for names in BOUNDS.values() for name in names if name in found}

    @property
    def is_simple(self) -> bool:
        """Whether it has neither tables nor functions."""
        return self.blocks is None and not self.functions

    @property
    def is_padding(self) -> bool:
        """Whether sequences have lengths of their own."""
        return any(isinstance(part, Padding) for part in self.parts)

    @property
    def blocks(self) -> BlockSparse | None:
        return next((part for part in self.parts if isinstance(part, BlockSparse)), None)

    @property
    def functions(self) -> tuple[MaskMod, ...]:
        return tuple(part for part in self.parts if isinstance(part, MaskMod))

    @property
    def graph(self) -> Graph | None:
        """Of all functions together."""
        functions = self.functions
        if len(functions) < 2:
            return functions[0].function.graph if functions else None
        return conjunction(one.function.graph for one in functions)

    @property
    def operands(self) -> dict[str, Operand | float]:
        """Of all functions, by name."""
        return {n: one for f in self.functions for n, one in f.function.operands.items()}

    def rebuilt(
        self, bounds: dict[str, int], table: Any = None, operands: dict[str, Any] | None = None
    ) -> Mask:
        """The same kind of mask with these bounds, and this table and these operands where they
        are given."""
        parts: list[Mask] = []
        for alignment, names in BOUNDS.items():
            left, right = (bounds.get(name) for name in names)
            if left is not None or right is not None:
                parts.append(SlidingWindow(left, right, alignment))
        for part in self.parts:
            if isinstance(part, BlockSparse):
                parts.append(part if table is None else BlockSparse(table, part.block_shape))
            elif isinstance(part, MaskMod):
                parts.append(part.with_operands(operands or {}))
            elif isinstance(part, Padding):
                parts.append(part)
        return all_of(parts) if parts else SlidingWindow(None, None)

    def __and__(self, other: Any) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return _Combined((*self.parts, *other.parts))

    def __bool__(self) -> bool:
        """`and` would take one of two masks, and forget the other."""
        raise ArgumentError(
            "a mask is neither true nor false: two are combined with `&`, and `mask is not None` "
            "tells whether there is one"
        )

    def _bounds(self) -> Iterator[tuple[str, int]]:
        return iter(())


@dataclass(frozen=True)
class Causal(Mask):
    """Key j is visible to query i iff j ≤ i, or j ≤ i + d with d the keys that there are more than
    queries.

    Args:
        alignment: ``"top_left"``, the former, or ``"bottom_right"``.
    """

    alignment: str = "top_left"
    is_band = True

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)

    def _bounds(self) -> Iterator[tuple[str, int]]:
        yield BOUNDS[self.alignment][1], 0

    def description(self) -> dict[str, Any]:
        return {"alignment": self.alignment}


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Key j is visible to query i iff i + δ − left ≤ j ≤ i + δ + right.

    Args:
        left, right: Whole numbers from 0; None: no bound on that side.
        alignment: ``"top_left"``: δ is 0; ``"bottom_right"``: the keys that there are more than
            queries.
    """

    left: int | None
    right: int | None
    alignment: str = "top_left"
    is_band = True

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)
        for name in ("left", "right"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _bound(name, given))

    def _bounds(self) -> Iterator[tuple[str, int]]:
        for name, bound in zip(BOUNDS[self.alignment], (self.left, self.right), strict=True):
            if bound is not None:
                yield name, bound

    def description(self) -> dict[str, Any]:
        return {"left": self.left, "right": self.right, "alignment": self.alignment}


@dataclass(frozen=True)
class Padding(Mask):
    """Sequences have the lengths ``seq_lens_q`` and ``seq_lens_kv`` of the arguments: keys behind
    them are not visible, and queries behind them give zeros."""

    def description(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    """Blocks of queries see blocks of keys.

    Args:
        table: bool or uint8 (B or 1, H or 1, ceil(S_q / bq), ceil(S_kv / bkv)); True, or not 0:
            they do. 2, which is :attr:`FULL`, says that functions of the mask it is combined with
            show every pair of the block as well: kernels need not ask them there. Bands and
            lengths hide pairs all the same. What two such tables show is torch.minimum of them.
        block_shape: (bq, bkv).
    """

    #: The entry of a block of which functions show every pair.
    FULL = 2

    table: Any
    block_shape: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        table = self.table if isinstance(self.table, Operand) else Operand(self.table, "table")
        object.__setattr__(self, "table", table)
        if table.dtype not in (dtype("bool"), dtype("uint8")):
            raise ArgumentError(f"table of BlockSparse is {table.dtype}; expected bool or uint8")
        if table.rank != 4:
            raise ArgumentError(
                f"table of BlockSparse has shape {table.shape}; expected (B or 1, H or 1, blocks "
                f"of queries, blocks of keys)"
            )
        object.__setattr__(self, "block_shape", _block_shape(self.block_shape))

    @property
    def marks_full(self) -> bool:
        """Whether entries tell where functions show all."""
        return bool(self.table.dtype is dtype("uint8"))

    def description(self) -> dict[str, Any]:
        return {"table": self.table, "block_shape": list(self.block_shape)}

    def __repr__(self) -> str:
        return f"BlockSparse({self.table!r}, {self.block_shape})"


class MaskMod(Mask):
    """A traced function of indices: ``fn(b, h, q, kv, **operands)`` returns a comparison, true
    where query q sees key kv.

        masks.MaskMod(lambda b, h, q, kv, document: document[b, q] == document[b, kv], document=ids)

    Args:
        fn: Called once, with symbolic values; see :mod:`kernel_api._score`.
        operands: What its further parameters are: tensors, and Python numbers.

    Raises:
        ArgumentError: ``fn`` is no function.
        EpilogueError: it cannot be traced, or its operands do not fit; starts with the line.
    """

    function: ScoreFunction

    @untraced
    def __init__(self, fn: Callable[..., Any], /, **operands: Any) -> None:
        self.function = ScoreFunction(fn, False, operands)

    def with_operands(self, operands: dict[str, Any]) -> MaskMod:
        """The same function on others of its own operands, as far as they are given.

        Raises ArgumentError for one of another kind than the function was traced with: a number
        for a tensor, a real number for a whole one, more modes.
        """
        own = {n: operands[n] for n in self.function.operands if n in operands}
        return self._of(self.function.with_operands(own))

    @classmethod
    def _of(cls, function: ScoreFunction) -> MaskMod:
        made = cls.__new__(cls)
        made.function = function
        return made

    def description(self) -> dict[str, Any]:
        return {"function": self.function}

    @classmethod
    def from_description(cls, fields: dict[str, Any]) -> MaskMod:
        return cls._of(fields["function"])

    def __repr__(self) -> str:
        names = "".join(f", {name}" for name in self.function.operands)
        return f"MaskMod({self.function.graph.identity[:8]}{names})"


class _Combined(Mask):
    """What all of several masks let a query see."""

    def __init__(self, parts: tuple[Mask, ...]) -> None:
        self._parts = parts
        self.is_band = all(part.is_band for part in parts)
        if sum(isinstance(part, BlockSparse) for part in parts) > 1:
            raise ArgumentError(
                "two BlockSparse masks are combined; pass one, with a table that holds where both "
                "do"
            )
        names = [name for one in self.functions for name in one.function.operands]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(
                    f"two mask functions that are combined have an operand {name}; choose another "
                    f"name in one of them"
                )

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self._parts

    def description(self) -> dict[str, Any]:
        return {"parts": list(self._parts)}

    @classmethod
    def from_description(cls, fields: dict[str, Any]) -> _Combined:
        return cls(tuple(fields["parts"]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Combined) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self._parts))


@untraced
def with_blocks(
    mask: Mask,
    S_q: int,
    S_kv: int,
    *,
    B: int | None = None,
    H: int | None = None,
    block_shape: tuple[int, int] = (128, 128),
    device: Any = None,
) -> Mask:
    """``mask & BlockSparse(table, block_shape)``, with the table of the blocks that the mask shows
    any pair of a query and a key of.

    It shows the same pairs as the mask. Kernels leave out what a table hides, and ask a function,
    of which they know nothing else, only where it hides some pair of a block::

        same = masks.MaskMod(lambda b, h, q, kv, ids: ids[q] == ids[kv], ids=ids)
        mask = masks.with_blocks(same, S, S)

    The table is made of what the operands of the functions hold now; make another when they
    change. It costs a look at every pair, some millions at a time, and does not wait for the
    device. Of functions that compute numbers that are not whole, it shows what they show in
    float32 or in float64.

    Lengths of sequences are not known here, and hide nothing: the table serves any up to S_q and
    S_kv, but for bounds aligned ``"bottom_right"``, which are taken as they are of S_q queries and
    S_kv keys. Where the mask has :class:`Padding` they hide no block. To sequences that have
    lengths without it, packed or in pages, add them behind:
    ``with_blocks(same, S_q, S_kv) & Causal("bottom_right")``.

    Args:
        mask: Without a :class:`BlockSparse`.
        S_q, S_kv: Queries and keys that a sequence has, at most.
        B, H: Sequences, and heads of queries. Only functions that look at ``b``, or ``h``, need
            them; where none does, the table has 1 for all.
        block_shape: (bq, bkv), queries and keys of a block.
        device: That the table is made on, or its name, where no function has a tensor; else it
            is made beside those. By default the current CUDA device, or the CPU without one.

    Returns:
        A mask; ``.blocks.table.tensor`` is (B or 1, H or 1, ceil(S_q / bq), ceil(S_kv / bkv)),
        uint8 as :class:`BlockSparse` has it if the mask has functions, else bool. It has no data if
        an operand has none, be it a meta or a fake tensor.

    Raises:
        ArgumentError: ``mask`` is no mask, or has a table; a size is no whole number from 1; a
            function looks at b, and B is not given, or at h, and H is not; operands are on several
            devices, or not on ``device``, or have no element.
        DeviceError: ``device`` is a GPU, and there is none.
    """
    from kernel_api.arguments._attention_checks import check_read, instance_of

    if instance_of("mask", mask, Mask) is None:
        raise ArgumentError("mask is None; expected a Mask of kernel_api.masks")
    if mask.blocks is not None:
        raise ArgumentError(
            "the mask has a BlockSparse, and with_blocks makes another; pass the mask without it, "
            "and combine the two tables to one of one block_shape, with `&` where they are bool, "
            "else with torch.minimum"
        )
    shape, graph = _block_shape(block_shape), mask.graph
    extents = (
        _count_if_read("B", B, "b", "sequences", graph),
        _count_if_read("H", H, "h", "heads of queries", graph),
        _count("S_q", S_q, "queries"),
        _count("S_kv", S_kv, "keys"),
    )
    check_read("the mask", mask)
    place = _place_of_table(mask, device)
    # Made here, for what has no data is of a kind of its own.
    without = [one for one in _tensors(mask).values() if not one.has_data]
    if without:
        blocks = (-(-one // block) for one, block in zip(extents[2:], shape, strict=True))
        table = without[0].tensor.new_empty((*extents[:2], *blocks), dtype=dtype("uint8").torch)
    else:
        from kernel_api.providers.reference.sdpa_blocks import shown_blocks

        bounds = mask.bounds
        if mask.is_padding:  # those from the end are of each sequence's own
            bounds = {name: bounds[name] for name in BOUNDS["top_left"] if name in bounds}
        table = shown_blocks(mask, bounds, extents, shape, place)
    return mask & BlockSparse(table, block_shape)


def _tensors(mask: Mask) -> dict[str, Operand]:
    """Of the operands of functions, those that are tensors, by name."""
    return {name: one for name, one in mask.operands.items() if isinstance(one, Operand)}


def _count(name: str, given: Any, of: str) -> int:
    count = whole_number(given)
    if count is None or count < 1:
        raise ArgumentError(f"{name} is {given!r}; expected a number of {of}, from 1")
    return count


def _count_if_read(name: str, given: Any, index: str, of: str, graph: Graph | None) -> int:
    """That many, if a function tells them apart by the index; else 1."""
    nodes = () if graph is None else graph.nodes
    is_read = any(node.op == "index" and node["name"] == index for node in nodes)
    if given is None and is_read:
        raise ArgumentError(
            f"{name} is None, and a function of the mask looks at {index}; expected the number of "
            f"{of}: each has blocks of its own"
        )
    count = 1 if given is None else _count(name, given, of)
    return count if is_read else 1


def _place_of_table(mask: Mask, given: Any) -> Any:
    """The device of a mask's operands; without any the given one, or the current."""
    import torch

    from kernel_api.devices import cuda_available, torch_device

    device = None if given is None else torch_device(given)
    tensors = _tensors(mask)
    if tensors:
        require_one_device(**tensors)
        name, beside = next((name, one.device) for name, one in tensors.items())
        same = device is None or (
            device.type == beside.type and device.index in (None, beside.index)
        )
        if not same:
            raise ArgumentError(
                f"device is {str(device)!r} and {name} of the mask is on {str(beside)!r}; expected "
                f"the table beside it: leave device out"
            )
        return beside
    if device is None:
        here = ("cuda", torch.cuda.current_device()) if cuda_available() else ("cpu",)
        return torch.device(*here)
    if device.type == "cuda" and not cuda_available():
        raise DeviceError(f"device is {str(device)!r} but torch sees no GPU; pass 'cpu'")
    return device


def all_of(parts: Sequence[Mask]) -> Mask:
    """Several masks combined, one at least."""
    return _Combined(tuple(parts)) if len(parts) > 1 else parts[0]


def _check_alignment(alignment: Any) -> None:
    if not isinstance(alignment, str) or alignment not in BOUNDS:
        raise ArgumentError(f"alignment is {alignment!r}; expected one of {tuple(BOUNDS)}")


def _bound(name: str, given: Any) -> int:
    bound = size_or_whole_number(given)
    if bound is None:
        raise ArgumentError(f"{name} is {given!r}; expected a whole number, or None")
    if bound < 0:
        raise ArgumentError(
            f"{name} is {bound}; expected how far a query sees to that side, at least 0, or None "
            f"where there is no bound"
        )
    return min(bound, _FARTHEST)


def _block_shape(given: Any) -> tuple[int, ...]:
    found = [size_or_whole_number(one) for one in given] if isinstance(given, Iterable) else []
    shape = tuple([one for one in found if one is not None])
    if len(found) != 2 or len(shape) != 2:
        raise ArgumentError(f"block_shape is {given!r}; expected (queries, keys)")
    if min(shape) < 1:
        raise ArgumentError(f"block_shape is {shape}; expected at least 1 of each")
    return shape
