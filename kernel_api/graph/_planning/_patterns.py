"""What finds patterns of nodes: who writes what, factors behind views, masks of indices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._operations.layout import view_strides
from kernel_api.graph._operations.pointwise import POINTWISE
from kernel_api.graph._tensor import Tensor

Order = tuple[int, ...]

#: The modes of (B, H, S, D) as they are, and with the last two exchanged.
AS_IT_IS: Order = (0, 1, 2, 3)
EXCHANGED: Order = (0, 1, 3, 2)

#: Types that values between the operations of a pattern may be kept in: kernels keep float32 there,
#: and round what they multiply to the type of the operands.
ROUNDED = (data_type.HALF, data_type.BFLOAT16)
KEPT_AS = (data_type.FLOAT, *ROUNDED)


class Miss(Exception):  # noqa: N818  (it is no error: the nodes are left as they are)
    """Nodes that are nearly a pattern; the text says what is missing."""


class Flow:
    """Which nodes write and read the tensors of a graph."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = list(nodes)
        self.writer: dict[Tensor, Node] = {t: n for n in self.nodes for t in n.writes}
        self.readers: dict[Tensor, list[Node]] = {}
        for node in self.nodes:
            for tensor in node.reads:
                self.readers.setdefault(tensor, []).append(node)

    def made_by(self, tensor: Tensor, *ops: str) -> Node | None:
        """The node that writes a tensor, if it is one of these operations."""
        node = self.writer.get(tensor)
        return node if node is not None and node.op in ops else None

    def comes_of(self, tensor: Tensor, sources: Iterable[Node]) -> bool:
        """Whether one of some nodes has to run before a tensor is known."""
        wanted, seen = set(sources), set()
        pending = [self.writer.get(tensor)]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            if node in wanted:
                return True
            seen.add(node)
            pending += [self.writer.get(one) for one in node.reads]
        return False

    def value(self, tensor: Tensor, passed: list[Node]) -> Tensor:
        """What a tensor is a conversion of; the conversions are added to ``passed``."""
        while (node := self.made_by(tensor, "identity")) is not None:
            if tensor.data_type not in KEPT_AS:
                break
            passed.append(node)
            tensor = node.input("input")
        return tensor

    def factor(self, tensor: Tensor, *, converted: bool = False) -> Factor:
        """What a tensor is, apart from scalar factors and transpositions.

        Args:
            converted: Whether conversions are looked behind, too, and other roundings to 16 bits.
        """
        order, number, scale = tuple(range(tensor.rank)), 1.0, None
        passed: list[Node] = []
        seen = [(tensor, order)]
        while (node := self.writer.get(tensor)) is not None:
            if node.op == "transpose" and tensor.data_type is node.input("input").data_type:
                order = tuple(node["permutation"][mode] for mode in order)
                tensor = node.input("input")
                seen.append((tensor, order))
            elif converted and node.op == "identity" and tensor.data_type in KEPT_AS:
                tensor = node.input("input")
                seen = [(tensor, order)]
            elif (parts := scaled(node)) is not None and _keeps(node, parts.tensor, converted):
                if isinstance(parts.by, Tensor):
                    if scale is not None:
                        break
                    scale = parts.by
                else:
                    number *= parts.by
                tensor = parts.tensor
                seen = [(tensor, order)]
            else:
                break
            passed.append(node)
        return Factor(tensor, order, number, scale, tuple(seen), tuple(passed))


class Factor(NamedTuple):
    """A tensor as scalar factors times another one with its modes in another order.

    Attributes:
        root: That tensor.
        order: Mode i is mode ``order[i]`` of the root.
        number, scale: The factors: numbers that are known, and a tensor of one element.
        seen: Tensors that this is, without the factors, with their modes in the order beside.
        passed: Nodes that make it of the root.
    """

    root: Tensor
    order: Order
    number: float
    scale: Tensor | None
    seen: tuple[tuple[Tensor, Order], ...]
    passed: tuple[Node, ...]

    @property
    def is_plain(self) -> bool:
        """Whether there are no factors."""
        return self.number == 1 and self.scale is None

    def exchanged(self) -> Factor:
        """The same with its last two modes exchanged."""
        *batch, rows, columns = self.order
        seen = tuple((tensor, (*own[:-2], own[-1], own[-2])) for tensor, own in self.seen)
        return self._replace(order=(*batch, columns, rows), seen=seen)

    def is_same(self, other: Factor) -> bool:
        """Whether both are the same elements, apart from factors."""
        return self.root is other.root and self.order == other.order

    @property
    def tensor(self) -> Tensor | None:
        """A tensor of the graph that is this without the factors; None if there is none."""
        whole = tuple(range(len(self.order)))
        return next((tensor for tensor, order in self.seen if order == whole), None)


class Scaled(NamedTuple):
    """A tensor times a number, or times a tensor of one element."""

    tensor: Tensor
    by: float | Tensor


def scaled(node: Node) -> Scaled | None:
    """What a node multiplies by a scalar; None if it does something else."""
    if node.op not in ("mul", "scale", "div"):
        return None
    one, other = operands(node)
    if node.op == "div":
        if isinstance(other.value, (int, float)) and other.value:
            return Scaled(one, 1.0 / other.value)
        return None
    for tensor, by in ((one, other), (other, one)):
        if by.value is not None:
            return Scaled(tensor, float(by.value))
        is_scalar = by.is_pass_by_value or math.prod(by.dim) == 1
        if is_scalar and by.data_type in KEPT_AS and math.prod(tensor.dim) != 1:
            return Scaled(tensor, by)
    return None


def _keeps(node: Node, tensor: Tensor, converted: bool) -> bool:
    """Whether a kernel may compute with a tensor itself where a node makes a multiple of it.

    Args:
        converted: Whether the multiple may have a narrower type.
    """
    (result,) = node.writes
    kinds = KEPT_AS if converted else (data_type.FLOAT, tensor.data_type)
    return (
        result.data_type in kinds
        and tensor.data_type in KEPT_AS
        and node.compute is not data_type.DOUBLE
    )


def next_of(flow: Flow, tensor: Tensor) -> Node | None:
    """The one node that reads a tensor, if that is all that it is there for."""
    readers = flow.readers.get(tensor, ())
    return readers[0] if len(readers) == 1 and tensor.is_virtual else None


class Summed(NamedTuple):
    """The sum over heads that are neighbours, and the nodes that make it."""

    tensor: Tensor
    nodes: tuple[Node, ...]


def summed_over_heads(flow: Flow, tensor: Tensor, heads: int) -> Summed | None:
    """(B, heads, S, D) of (B, H, S, D), if that is what becomes of it.

    It is written as a sum over all heads where one is left, else as a reshape to (B, heads,
    H / heads, S, D), the sum over the third mode, and a reshape.
    """
    B, H, *rows = tensor.dim
    ways: list[list[tuple[str, tuple[int, ...]]]] = [
        [
            ("reshape", (B, heads, H // heads, *rows)),
            ("reduction", (B, heads, 1, *rows)),
            ("reshape", (B, heads, *rows)),
        ]
    ]
    if heads == 1:
        ways.append([("reduction", (B, 1, *rows))])
    found = (_followed(flow, tensor, way) for way in ways)
    return next((one for one in found if one is not None), None)


def _followed(flow: Flow, tensor: Tensor, way: list[tuple[str, tuple[int, ...]]]) -> Summed | None:
    """Behind reshapes and sums that give these extents, one behind the other, and conversions."""
    passed: list[Node] = []
    for op, dim in way:
        while (node := next_of(flow, tensor)) is not None and node.op == "identity":
            passed.append(node)
            (tensor,) = node.writes
        if node is None or node.op != op or next(node.writes).dim != dim:
            return None
        if not (is_reshape(node) if op == "reshape" else node["mode"] == "ADD"):
            return None
        passed.append(node)
        (tensor,) = node.writes
    return Summed(tensor, tuple(passed))


def is_reshape(node: Node) -> bool:
    """Whether a ``reshape`` keeps the row-major order of elements."""
    x, (result,) = node.input("input"), node.writes
    if node["mode"] == "LOGICAL":
        return True
    stride = view_strides(x.dim, x.stride, result.dim)
    if stride is None:
        return False
    modes = zip(result.dim, result.stride, stride, strict=True)
    return all(n == 1 or own == moved for n, own, moved in modes)


def operands(node: Node) -> tuple[Tensor, ...]:
    """What a pointwise operation reads, in order."""
    return tuple(node.input(name) for name in POINTWISE[node.op].arguments)


def without_dead(nodes: Iterable[Node], before: Flow) -> list[Node]:
    """The nodes in an order, without those whose results were read before and are not now."""
    kept: list[Node] = []
    needed: set[Tensor] = set()
    for node in reversed(list(nodes)):
        was_read = any(before.readers.get(tensor) for tensor in node.writes)
        is_new = not any(before.writer.get(tensor) is node for tensor in node.writes)
        visible = any(not t.is_virtual or t in needed for t in node.writes)
        if visible or not (was_read or is_new):
            kept.append(node)
            needed.update(node.reads)
    return kept[::-1]


# Masks of indices ------------------------------------------------------------------------

#: Up to which magnitude all whole numbers are exact.
_WHOLE_UP_TO = {
    data_type.INT32: 2**31 - 1,
    data_type.INT64: 2**63 - 1,
    data_type.FLOAT: 2**24,
    data_type.HALF: 2**11,
    data_type.BFLOAT16: 2**8,
}

#: Of what is compared: whether it is left − right, and what is subtracted for a strict comparison.
_COMPARISONS = {"cmp_ge": (1, 0), "cmp_gt": (1, 1), "cmp_le": (-1, 0), "cmp_lt": (-1, 1)}


@dataclass(frozen=True)
class Linear:
    """row · i + column · j + lengths + constant, of query i and key j."""

    row: int = 0
    column: int = 0
    constant: int = 0
    lengths: dict[Tensor, int] = field(default_factory=dict)

    def plus(self, other: Linear, times: int = 1) -> Linear:
        lengths = dict(self.lengths)
        for tensor, count in other.lengths.items():
            lengths[tensor] = lengths.get(tensor, 0) + times * count
        return Linear(
            self.row + times * other.row,
            self.column + times * other.column,
            self.constant + times * other.constant,
            {tensor: count for tensor, count in lengths.items() if count},
        )

    def largest(self, dim: tuple[int, ...]) -> int:
        """A bound of its magnitude; lengths are at most those of the score."""
        of_lengths = sum(map(abs, self.lengths.values())) * max(dim[-2:])
        rows, columns = abs(self.row) * dim[-2], abs(self.column) * dim[-1]
        return rows + columns + of_lengths + abs(self.constant)


def conditions(flow: Flow, mask: Tensor, dim: tuple[int, ...], holds: bool) -> Iterator[Linear]:
    """What is ≥ 0, all of it, exactly where a mask holds, or where it does not.

    Args:
        dim: Of the scores: (B, H, S_q, S_kv).

    Raises Miss where that cannot be said.
    """
    node = flow.writer.get(mask)
    if node is None:
        raise Miss(f"{mask} is a mask of the caller's; as a bias of 0 and −inf it would be taken")
    if node.op == "identity":
        yield from conditions(flow, node.input("input"), dim, holds)
    elif node.op == "logical_not":
        yield from conditions(flow, node.input("input"), dim, not holds)
    elif node.op == ("logical_and" if holds else "logical_or"):
        for one in operands(node):
            yield from conditions(flow, one, dim, holds)
    elif node.op in _COMPARISONS:
        sign, less = _COMPARISONS[node.op]
        left, right = (_linear(flow, one, dim) for one in operands(node))
        found = left.plus(right, -1)
        found = Linear().plus(found, sign).plus(Linear(constant=-less))
        # Of whole numbers x < 0 is −x − 1 ≥ 0.
        yield found if holds else Linear(constant=-1).plus(found, -1)
    else:
        raise Miss(f"{node} is part of a mask; expected comparisons of indices, all of which hold")


def _linear(flow: Flow, tensor: Tensor, dim: tuple[int, ...]) -> Linear:
    found = _index(flow, tensor, dim)
    if not tensor.is_pass_by_value and found.largest(dim) > _WHOLE_UP_TO.get(tensor.data_type, -1):
        raise Miss(f"{tensor} is {tensor.data_type.name}, which does not hold all indices exactly")
    return found


def _index(flow: Flow, tensor: Tensor, dim: tuple[int, ...]) -> Linear:
    if tensor.value is not None:
        if not float(tensor.value).is_integer():  # infinities are none either
            raise Miss(f"an index is compared with {tensor.value}, which is no whole number")
        return Linear(constant=int(tensor.value))
    node = flow.writer.get(tensor)
    if node is not None and node.op == "gen_index":
        given = node.input("input").dim
        mode = node["axis"] % len(given) + 4 - len(given)
        if mode in (2, 3) and given[mode - 4] == dim[mode]:
            return Linear(row=int(mode == 2), column=int(mode == 3))
        raise Miss(f"{node} is the index of another mode than those of queries and keys")
    if node is not None and node.op in ("identity", "neg"):
        inner = _linear(flow, node.input("input"), dim)
        return inner if node.op == "identity" else Linear().plus(inner, -1)
    if node is not None and node.op in ("add", "bias", "sub"):
        left, right = (_linear(flow, one, dim) for one in operands(node))
        return left.plus(right, -1 if node.op == "sub" else 1)
    if tensor.dim == (dim[0], 1, 1, 1) and tensor.data_type is data_type.INT32:
        return Linear(lengths={tensor: 1})
    raise Miss(
        f"an index is compared with {tensor}, {tensor.data_type.name} of dim {list(tensor.dim)}; "
        f"expected an index, a number, or lengths, INT32 of dim {[dim[0], 1, 1, 1]}"
    )


class Visible(NamedTuple):
    """Which keys queries see, as attention says it.

    Attributes:
        band: As the attribute of ``sdpa``.
        lengths: ``seq_len_q`` and ``seq_len_kv``, those that there are.
        can_hide_all: Whether there may be a query that sees no key.
    """

    band: dict[str, object] | None
    lengths: dict[str, Tensor]
    can_hide_all: bool


def visible(found: Iterable[Linear], dim: tuple[int, ...]) -> Visible:
    """What conditions say together; raises Miss where attention has no such mask."""
    lengths: dict[str, Tensor] = {}
    right: list[Linear] = []  # bounds of j − i from above
    left: list[Linear] = []  # and from below
    for one in found:
        slope = one.row, one.column
        if slope == (1, -1):
            right.append(Linear(constant=one.constant, lengths=one.lengths))
        elif slope == (-1, 1):
            left.append(Linear().plus(Linear(constant=one.constant, lengths=one.lengths), -1))
        else:
            name = {(-1, 0): "seq_len_q", (0, -1): "seq_len_kv"}.get(slope)
            if name is None or one.constant != -1 or list(one.lengths.values()) != [1]:
                raise Miss("a mask compares indices in a way that is no diagonal and no length")
            (tensor,) = one.lengths
            if lengths.setdefault(name, tensor) is not tensor:
                raise Miss(f"two masks say {name}: {lengths[name]} and {tensor}")
    return Visible(_band(left, right, lengths, dim), lengths, _hides(left, right, lengths, dim))


def _band(
    left: list[Linear], right: list[Linear], lengths: dict[str, Tensor], dim: tuple[int, ...]
) -> dict[str, object] | None:
    if not left and not right:
        return None
    bands: list[dict[str, object]] = []
    for alignment, diagonal in _diagonals(lengths, dim):
        above = [one.plus(diagonal, -1) for one in right]
        below = [diagonal.plus(one, -1) for one in left]
        if all(not one.lengths and one.constant >= 0 for one in (*above, *below)):
            bounds = {
                "left": min((one.constant for one in below), default=None),
                "right": min((one.constant for one in above), default=None),
            }
            bands.append({**bounds, "alignment": alignment})
    if not bands:
        raise Miss("the diagonals of a mask are not around those that attention has")
    # Kernels have a shorter way for a diagonal that is itself the bound.
    return next((band for band in bands if band["right"] == 0), bands[0])


def _diagonals(lengths: dict[str, Tensor], dim: tuple[int, ...]) -> Iterator[tuple[str, Linear]]:
    """Where j − i is 0 for attention: at the first query and key, or at the last."""
    yield "top_left", Linear()
    ends = []
    for name, extent in (("seq_len_kv", dim[3]), ("seq_len_q", dim[2])):
        own = lengths.get(name)
        ends.append(Linear(constant=extent) if own is None else Linear(lengths={own: 1}))
    yield "bottom_right", ends[0].plus(ends[1], -1)


def _hides(
    left: list[Linear], right: list[Linear], lengths: dict[str, Tensor], dim: tuple[int, ...]
) -> bool:
    if lengths or any(one.lengths for one in (*left, *right)):
        return True
    high = min((one.constant for one in right), default=dim[3])
    low = max((one.constant for one in left), default=-dim[2])
    return low > high or high < 0 or dim[2] - 1 + low > dim[3] - 1
