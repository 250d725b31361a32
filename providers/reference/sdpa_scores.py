"""Scores of attention, one sequence and some of its queries at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernel_api._score import among_whole_numbers
from kernel_api.arguments.attention import AttentionArguments
from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue.graph import Graph, Node
from kernel_api.errors import ArgumentError
from kernel_api.masks import HIDDEN_BELOW
from kernel_api.operands import Operand
from kernel_api.providers.reference.epilogue import ELEMENTWISE, rounded
from kernel_api.providers.reference.philox import halves_apart

_MOST = torch.iinfo(torch.int64).max
#: Scores that are held at a time.
_ELEMENTS = 1 << 24


class Rows(NamedTuple):
    """Some queries of one sequence.

    Attributes:
        b: Number of the sequence.
        start, stop: Of the queries, within the sequence.
        queries, keys: That the sequence has.
    """

    b: int
    start: int
    stop: int
    queries: int
    keys: int


class Scores(NamedTuple):
    """Of some queries with all keys of their sequence, (H, queries, keys).

    Attributes:
        values: −∞ where a query does not see a key.
        capped: Before the score function.
        keep: What probabilities are multiplied with; None without dropout.
    """

    values: Any
    capped: Any
    keep: Any


class Arithmetic:
    """What numbers that are not whole are read and computed in.

    Args:
        device: Where that is.
        read: The type that they are read in.
        wide: The type of all arithmetic.
    """

    def __init__(self, device: Any, read: torch.dtype, wide: torch.dtype) -> None:
        self.device, self.wide = device, wide
        self._read = read

    def converted(self, tensor: Any) -> Any:
        """As it is read: in the type of the arithmetic, which may then be wider."""
        return tensor.to(self._read).to(self.wide)

    def number(self, value: float) -> float:
        """As it is read."""
        return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(self._read))


class Attention(Arithmetic):
    """What some arguments read, in a type.

    Args:
        wide: The type of all arithmetic.
    """

    def __init__(self, args: AttentionArguments, wide: torch.dtype) -> None:
        super().__init__(args.device, args.accumulator_type.torch, wide)
        self.args = args
        self._hides_below = args.accumulator_type.bits == 32
        self.groups = args.H // args.H_kv if args.H_kv else 1

    # Sequences ---------------------------------------------------------------------------

    def rows(self) -> Iterator[Rows]:
        """All queries, as many at a time as there is room for."""
        args = self.args
        for b in range(args.B):
            queries, keys = self.length("q", b), self.length("kv", b)
            step = max(_ELEMENTS // max(args.H * keys, 1), 1)
            for start in range(0, queries, step):
                yield Rows(b, start, min(start + step, queries), queries, keys)

    def length(self, which: str, b: int) -> int:
        """Of a sequence's queries or keys."""
        args = self.args
        if args.is_packed and not (which == "kv" and args.is_paged):
            tokens = self._packed(which, b)
            return int(tokens.stop - tokens.start)
        most = args.S_q if which == "q" else args.S_kv
        lengths = args.further.get(f"seq_lens_{which}")
        return most if lengths is None else min(max(int(lengths.tensor[b]), 0), most)

    def of_queries(self, tensor: Any, b: int) -> Any:
        """(H, queries, ...) of a tensor like Q."""
        if self.args.is_packed:
            return tensor[self._packed("q", b)].transpose(0, 1)
        return tensor[b, :, : self.length("q", b)]

    def of_keys(self, tensor: Any, b: int) -> Any:
        """(H_kv, keys, ...) of a tensor like K."""
        args, keys = self.args, self.length("kv", b)
        if not args.is_paged:
            if args.is_packed:
                return tensor[self._packed("kv", b)].transpose(0, 1)
            return tensor[b, :, :keys]
        assert args.page_size is not None
        pages = args.further["page_table"].tensor[b, : -(-keys // args.page_size)].long()
        outside = ((pages < 0) | (pages >= tensor.shape[0])).nonzero()
        if len(outside):
            place = int(outside[0])
            raise ArgumentError(
                f"page_table[{b}, {place}] is {int(pages[place])}, and {keys} keys are there; "
                f"expected one of the {tensor.shape[0]} pages"
            )
        picked = _picked(tensor, pages).transpose(0, 1)
        return picked.flatten(1, 2)[:, :keys]

    def of_lse(self, tensor: Any, b: int) -> Any:
        """(H, queries) of a tensor like lse."""
        if self.args.is_packed:
            return tensor[:, self._packed("q", b)]
        return tensor[b, :, : self.length("q", b)]

    def _packed(self, which: str, b: int) -> slice:
        name, args = f"cu_seqlens_{which}", self.args
        first, end = map(int, args.further[name].tensor[b : b + 2])
        tokens = (args.Q if which == "q" else args.K).shape[0]
        if not 0 <= first <= end <= tokens:
            raise ArgumentError(
                f"{name}[{b}] is {first} and {name}[{b + 1}] is {end}; expected ends of sequences, "
                f"which do not decrease, of {tokens} tokens"
            )
        if b == 0 and first != 0:
            raise ArgumentError(f"{name} begins with {first}; expected 0, where sequence 0 begins")
        longest = args.S_q if which == "q" else args.S_kv
        if end - first > longest:
            raise ArgumentError(
                f"sequence {b} has {end - first} tokens by {name}, and max_seqlen_{which} is "
                f"{longest}; expected the length of the longest one, or more"
            )
        return slice(first, end)

    def per_head(self, name: str) -> Any:
        """(H, 1, 1) of ``alibi`` or ``sink``."""
        return self.converted(self.args.further[name].tensor).view(-1, 1, 1)

    def descale(self, name: str, b: int) -> Any:
        """(H, 1, 1), or 1."""
        operand = self.args.further.get(name)
        if operand is None:
            return 1.0
        tensor = self.converted(operand.tensor)
        if tensor.dim():
            return tensor[b].repeat_interleave(self.groups).view(-1, 1, 1)
        return tensor

    def for_each_query_head(self, tensor: Any) -> Any:
        """(H, ...) of (H_kv, ...)."""
        return tensor.repeat_interleave(self.groups, dim=0)

    def summed_over_groups(self, tensor: Any) -> Any:
        """(H_kv, ...) of (H, ...)."""
        return tensor.unflatten(0, (self.args.H_kv, self.groups)).sum(1)

    # Scores ------------------------------------------------------------------------------

    def scores(self, rows: Rows, products: Any) -> Scores:
        """What becomes of q·k, (H, queries, keys), which are descaled and not yet scaled."""
        args = self.args
        values = products * self.number(args.scale)
        if args.softcap is not None:
            cap = self.number(args.softcap)
            values = cap * torch.tanh(values / cap)
        capped = values
        if args.score is not None:
            values = self.function(args.score.graph, "score", rows, values)
        if "bias" in args.further:
            values = values + self.converted(self.of_bias(args.further["bias"].tensor, rows))
        i, j = self._places(rows)
        if "alibi" in args.further:
            values = values + self.per_head("alibi") * (j - i).to(self.wide)
        if self._hides_below and (args.score is not None or "bias" in args.further):
            values = values.masked_fill(values < HIDDEN_BELOW, float("-inf"))
        visible = self._visible(rows)
        if visible is not None:
            values = values.masked_fill(~visible, float("-inf"))
        return Scores(values, capped, self._keep(rows))

    def of_bias(self, tensor: Any, rows: Rows) -> Any:
        """(H or 1, queries or 1, keys or 1) of a tensor like bias."""
        own = tensor[rows.b if tensor.shape[0] > 1 else 0]
        if own.shape[1] > 1:
            own = own[:, rows.start : rows.stop]
        return own[:, :, : rows.keys] if own.shape[2] > 1 else own

    def slope(self, rows: Rows, scores: Scores) -> Any:
        """Derivative of the scores by the scaled products; None where it is 1."""
        args, found = self.args, None
        if args.score is not None:
            found = self.function(args.score.derivative, "score", rows, scores.capped)
        if args.softcap is None:
            return found
        capped = 1 - (scores.capped / self.number(args.softcap)) ** 2
        if args.score is None:
            return capped
        # The score function's operand was capped already.
        return found * capped

    def _places(self, rows: Rows) -> tuple[Any, Any]:
        device = self.device
        i = torch.arange(rows.start, rows.stop, device=device).view(1, -1, 1)
        return i, torch.arange(rows.keys, device=device).view(1, 1, -1)

    def _visible(self, rows: Rows) -> Any:
        args = self.args
        i, j = self._places(rows)
        found = within_bounds(args.bounds, i, j, rows.keys - rows.queries)
        if args.block_shape is not None:
            table = args.further["blocks"].tensor
            own = table[rows.b if table.shape[0] > 1 else 0]
            blocks = (i.flatten() // args.block_shape[0], j.flatten() // args.block_shape[1])
            found.append(own[:, blocks[0]][:, :, blocks[1]] != 0)
        if args.mask_graph is not None:
            found.append(self.function(args.mask_graph, "mask", rows, None))
        if not found:
            return None
        visible = found[0]
        for one in found[1:]:
            visible = visible & one
        return visible

    def function(self, graph: Graph, prefix: str, rows: Rows, score: Any) -> Any:
        """What a function of scores or indices gives."""
        i, j = self._places(rows)
        heads = torch.arange(self.args.H, device=self.device).view(-1, 1, 1)
        indices = {"b": torch.full_like(heads[:1], rows.b), "h": heads, "q": i, "kv": j}
        part = self.args.mask if prefix == "mask" else self.args.score
        assert part is not None
        found = evaluated(graph, score, indices, part.operands, self)
        return found.expand(self.args.H, rows.stop - rows.start, rows.keys)

    def _keep(self, rows: Rows) -> Any:
        dropout = self.args.dropout
        if dropout is None:
            return None
        seed, offset = (_integer(one) for one in (dropout.seed, dropout.offset))
        extents = (self.args.H, torch.arange(rows.start, rows.stop, device=self.device), rows.keys)
        uniform = halves_apart(seed, offset + rows.b * self.args.H, extents, self.device)
        p = self.number(dropout.p)
        kept = (uniform >= p).to(self.wide)
        return kept / (1.0 - p) if p < 1.0 else kept  # as read, p may be 1


def _integer(state: Any) -> int:
    return int(state.tensor) if isinstance(state, Operand) else int(state)


def _picked(tensor: Any, pages: Any) -> Any:
    """Some pages; torch does not pick 8-bit floats everywhere."""
    if tensor.element_size() > 1:
        return tensor[pages]
    return tensor.view(torch.uint8)[pages].view(tensor.dtype)


# Masks and functions ---------------------------------------------------------------------


def within_bounds(bounds: Mapping[str, int], i: Any, j: Any, beyond: int) -> list[Any]:
    """Whether queries i see keys j, by each bound of a mask.

    Args:
        beyond: The keys that there are more than queries.
    """
    found = []
    if "left" in bounds:
        found.append(j >= i - bounds["left"])
    if "right" in bounds:
        found.append(j <= i + bounds["right"])
    if "left_end" in bounds:
        found.append(j >= i + (beyond - bounds["left_end"]))
    if "right_end" in bounds:
        found.append(j <= i + (beyond + bounds["right_end"]))
    return found


def evaluated(
    graph: Graph,
    score: Any,
    indices: Mapping[str, Any],
    operands: Mapping[str, Operand | float],
    arithmetic: Arithmetic,
) -> Any:
    """The result of a function of scores, or of indices alone. It does not wait for the device.

    Args:
        score: None of a function of indices.
        indices: Whole numbers by name; they broadcast, and so does the result.
        operands: What the graph reads, by name.
    """
    found: list[Any] = []
    for node, as_integers in zip(graph.nodes, among_whole_numbers(graph.nodes), strict=True):
        inputs = [found[i] for i in node.inputs]
        if node.op in ("floordiv", "remainder"):
            divide = torch.floor_divide if node.op == "floordiv" else torch.remainder
            found.append(divide(*_integers((inputs[0], node["divisor"]), arithmetic)))
        elif node.op not in ELEMENTWISE:
            found.append(_leaf(node, inputs, score, indices, operands, arithmetic))
        elif as_integers:
            found.append(ELEMENTWISE[node.op](*_integers(inputs, arithmetic)))
        else:
            found.append(ELEMENTWISE[node.op](*(_real(one, arithmetic) for one in inputs)))
    return _real(found[graph.outputs[0][1]], arithmetic)


def _real(value: Any, arithmetic: Arithmetic) -> Any:
    """Beside numbers that are not whole; a constant is a Python number."""
    if not isinstance(value, torch.Tensor):
        return _number(value, arithmetic)
    whole = not value.is_floating_point() and value.dtype is not torch.bool
    return arithmetic.converted(value) if whole else value


def _integers(values: Sequence[Any], arithmetic: Arithmetic) -> list[Any]:
    """Whole numbers in the widest type of theirs, and what is bool as it is."""
    device = arithmetic.device
    tensors = [
        value if isinstance(value, torch.Tensor) else _whole_constant(value, device)
        for value in values
    ]
    types = [one.dtype for one in tensors if one.dtype is not torch.bool]
    widest = torch.int64 if torch.int64 in types else torch.int32
    return [one if one.dtype is torch.bool else one.to(widest) for one in tensors]


def _whole_constant(value: float, device: Any) -> Any:
    fits = torch.iinfo(torch.int32).min <= value <= torch.iinfo(torch.int32).max
    return torch.full((), int(value), dtype=torch.int32 if fits else torch.int64, device=device)


def _whole(tensor: Any) -> Any:
    """In the type that it is computed in: of 32 bits if they hold all of its own."""
    signed = tensor.dtype.is_signed
    narrow = tensor.dtype.itemsize < 4 or (tensor.dtype.itemsize == 4 and signed)
    return tensor.to(torch.int32 if narrow else torch.int64)


def _leaf(
    node: Node,
    inputs: list[Any],
    score: Any,
    indices: Mapping[str, Any],
    operands: Mapping[str, Operand | float],
    arithmetic: Arithmetic,
) -> Any:
    if node.op == "score":
        return score
    if node.op == "index":
        return indices[node["name"]].to(torch.int32)
    if node.op == "constant":
        number = float.fromhex(node["value"])
        return int(number) if dict(node.attributes).get("type") == "integer" else number
    if node.op == "cast":
        return _cast(inputs[0], dtype(node["to"]), arithmetic)
    operand = operands[node["name"]]
    if not isinstance(operand, Operand):
        if node["type"] != "integer":
            return operand
        return torch.full((), operand, dtype=torch.int64, device=arithmetic.device)
    tensor = operand.tensor
    if node.op == "lookup":
        extents = zip(inputs, operand.shape, strict=True)
        tensor = tensor[tuple(_index(i, extent, arithmetic) for i, extent in extents)]
    if node["type"] == "bool":
        return tensor
    return _whole(tensor) if node["type"] == "integer" else arithmetic.converted(tensor)


def _index(value: Any, extent: int, arithmetic: Arithmetic) -> Any:
    """Within a mode; beyond an end, that end."""
    (number,) = _integers((value,), arithmetic)
    return number.long().clamp(0, max(extent - 1, 0))


def _cast(value: Any, to: DType, arithmetic: Arithmetic) -> Any:
    if not to.is_integer:
        return rounded(_real(value, arithmetic), to).to(arithmetic.wide)
    if isinstance(value, float):
        value = _number(value, arithmetic)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return _whole(rounded(value, to))
    (value,) = _integers((value,), arithmetic)
    limits = torch.iinfo(to.torch)
    return _whole(value.long().clamp(limits.min, min(limits.max, _MOST)).to(to.torch))


def _number(value: float, arithmetic: Arithmetic) -> Any:
    read = arithmetic.number(value)
    return torch.full((), read, dtype=arithmetic.wide, device=arithmetic.device)
