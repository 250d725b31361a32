"""Evaluates an epilogue's graph with plain torch, in float64 or float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue import Graph, Node, Problem
from kernel_api.epilogue.graph import HADAMARD_BLOCK, rotated_columns
from kernel_api.operands import Operand
from kernel_api.providers.reference.philox import uniform

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "floor": torch.floor,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "modulo": torch.remainder,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": torch.where,
}


def evaluate(
    graph: Graph,
    accumulator: Any,
    operands: Mapping[str, Operand | float],
    *,
    wide: bool,
    double: bool = False,
    groups: Sequence[slice] | None = None,
) -> dict[str, Any]:
    """The outputs of a graph, by name and with the modes that they have; not yet rounded.

    Args:
        accumulator: (M, N) or (L, M, N).
        operands: What the graph reads, by name.
        wide: Compute in float64 (the oracle), else in the type of the arithmetic.
        double: Whether that type is float64, not float32. Constants and operands are rounded to
            it in any case, because what is computed from them depends on it.
        groups: Of a ragged problem, whose accumulator is (M, N): the rows of each batch, which
            follow each other without gaps.
    """
    given = (graph, accumulator, operands, wide, double)
    if groups is None:
        L = accumulator.shape[0] if accumulator.dim() == 3 else None
        problem = Problem(L, *accumulator.shape[-2:])
        values = _Evaluation(*given).values()
    else:
        M, N = accumulator.shape
        problem = Problem(len(groups), M, N, ragged=True)
        values = _RaggedEvaluation(groups, *given).values()
    outputs = {}
    for name, index in graph.outputs:
        shape = graph.nodes[index].shape
        outputs[name] = values[index].expand(shape.extents(problem)).reshape(shape.stored(problem))
    return outputs


class _Evaluation:
    """One pass over the nodes; every value has three modes, those broadcast of extent 1."""

    def __init__(
        self,
        graph: Graph,
        accumulator: Any,
        operands: Mapping[str, Operand | float],
        wide: bool,
        double: bool,
    ) -> None:
        self._graph = graph
        self._operands = operands
        self._arithmetic = torch.float64 if double else torch.float32
        self._type = torch.float64 if wide else self._arithmetic
        matrices = accumulator if accumulator.dim() == 3 else accumulator.unsqueeze(0)
        self._matrices = matrices.to(self._type)

    def values(self) -> list[Any]:
        found: list[Any] = []
        last = {i: index for index, node in enumerate(self._graph.nodes) for i in node.inputs}
        kept = {index for _, index in self._graph.outputs}
        for index, node in enumerate(self._graph.nodes):
            inputs = [self._aligned(node, i, found[i]) for i in node.inputs]
            for i in node.inputs:
                if last[i] == index and i not in kept:
                    found[i] = None  # a matrix in float64 is large
            if node.op in ELEMENTWISE:
                found.append(ELEMENTWISE[node.op](*inputs))
            else:
                found.append(getattr(self, f"_op_{node.op}")(node, *inputs))
        return found

    def _aligned(self, node: Node, index: int, value: Any) -> Any:
        """The value of an earlier node, as it broadcasts against those beside it."""
        return value

    # Leaves ------------------------------------------------------------------------------

    def _op_accumulator(self, node: Node) -> Any:
        return self._matrices

    def _op_constant(self, node: Node) -> Any:
        return self._number(float.fromhex(node["value"]))

    def _op_scalar(self, node: Node) -> Any:
        value = self._operands[node["name"]]
        assert not isinstance(value, Operand)
        return value if node["type"] == "integer" else self._number(value)

    def _op_operand(self, node: Node) -> Any:
        tensor = self._tensor(node)
        return self._converted(tensor) if node["type"] == "real" else tensor

    def _op_table(self, node: Node) -> Any:
        return self._converted(self._tensor(node))

    def _tensor(self, node: Node) -> Any:
        operand = self._operands[node["name"]]
        assert isinstance(operand, Operand)
        return operand.tensor.reshape((1,) * (3 - operand.rank) + operand.shape)

    def _converted(self, tensor: Any) -> Any:
        return tensor.to(self._arithmetic).to(self._type)

    def _number(self, number: float) -> Any:
        device = self._matrices.device
        return self._converted(torch.tensor(number, dtype=torch.float64, device=device))

    # Operations --------------------------------------------------------------------------

    def _op_cast(self, node: Node, x: Any) -> Any:
        return rounded(x, dtype(node["to"])).to(self._type)

    def _op_split(self, node: Node, x: Any) -> Any:
        return _blocks(x, node["granularity"], 2)[..., node["part"], :].flatten(2)

    def _op_interleave(self, node: Node, first: Any, second: Any) -> Any:
        alike = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]
        pair = [_blocks(x, node["granularity"], 1) for x in alike]
        return torch.cat(pair, dim=3).flatten(2)

    def _op_repeat(self, node: Node, x: Any) -> Any:
        return x.repeat_interleave(node["times"], dim=2)

    def _op_rotate(self, node: Node, x: Any, cos: Any, sin: Any) -> Any:
        half, columns = node["width"] // 2, rotated_columns(node)
        columns = x.shape[2] if columns is None else columns
        heads = x[..., :columns].unflatten(2, (-1, node["head_dim"]))
        before, part, behind = heads.split(
            [node["start"], 2 * half, node["head_dim"] - node["start"] - 2 * half], dim=-1
        )
        # Pairs side by side in the last mode, whatever the style.
        beside = node["style"] == "interleaved"
        pairs = part.unflatten(-1, (half, 2) if beside else (2, half))
        a, b = (pairs if beside else pairs.transpose(-1, -2)).unbind(-1)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
        part = (turned if beside else turned.transpose(-1, -2)).flatten(-2)
        heads = torch.cat([before, part, behind], dim=-1).flatten(2)
        return torch.cat([heads, x[..., columns:]], dim=-1)

    def _op_hadamard(self, node: Node, x: Any, signs: Any = None) -> Any:
        blocks = x.unflatten(2, (-1, HADAMARD_BLOCK))
        if signs is not None:
            blocks = blocks * signs.unsqueeze(2)
        return (blocks @ _hadamard_matrix(x)).flatten(2)

    def _op_uniform(self, node: Node, seed: Any, offset: Any) -> Any:
        batches, rows, columns = self._matrices.shape
        shape = node.shape
        extents = (batches if shape.batch else 1, rows, int(shape.columns * columns))
        return uniform(seed, offset, extents, self._matrices.device).to(self._type)

    def _op_reduce(self, node: Node, x: Any) -> Any:
        if node["axis"] == "block":
            return _REDUCTIONS[node["kind"]](x.unflatten(2, (-1, node["block"])), (3,)).squeeze(3)
        modes = {"columns": (2,), "rows": (1,), "matrix": (1, 2), "all": (0, 1, 2)}[node["axis"]]
        return _REDUCTIONS[node["kind"]](x, modes)


class _RaggedEvaluation(_Evaluation):
    """The same where every row belongs to one batch: what has rows is (1, M, ...) for all batches
    together, what has none (L, 1, ...)."""

    def __init__(self, groups: Sequence[slice], *given: Any) -> None:
        super().__init__(*given)
        self._groups = groups
        self._sizes = torch.tensor([rows.stop - rows.start for rows in groups], device="cpu")

    def _aligned(self, node: Node, index: int, value: Any) -> Any:
        shape = self._graph.nodes[index].shape
        if not (node.shape.rows and shape.batch) or shape.rows:
            return value
        return value.repeat_interleave(self._sizes.to(value.device), dim=0).transpose(0, 1)

    def _tensor(self, node: Node) -> Any:
        tensor = super()._tensor(node)
        return tensor[:, : self._matrices.shape[1]] if node.shape.rows else tensor

    def _op_reduce(self, node: Node, x: Any) -> Any:
        reduced, own = super()._op_reduce, self._graph.nodes[node.inputs[0]].shape
        if node["axis"] not in ("rows", "matrix") or not own.rows:
            return reduced(node, x)
        return torch.cat([reduced(node, x[:, rows]) for rows in self._groups])


def _blocks(x: Any, granularity: int | str, parts: int) -> Any:
    """Columns as (pairs, parts, columns of a block)."""
    columns = x.shape[2]
    width = columns // parts if granularity == "halves" else int(granularity)
    return x.reshape(*x.shape[:2], columns // max(width * parts, 1), parts, width)


def _hadamard_matrix(x: Any) -> Any:
    """H16 by Sylvester's construction, in the type of x."""
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < HADAMARD_BLOCK:
        rows = [torch.cat([matrix, other], dim=1) for other in (matrix, -matrix)]
        matrix = torch.cat(rows)
    return matrix


def _extreme(reduce: Callable[..., Any], of_nothing: float) -> Callable[..., Any]:
    """A maximum or minimum that is also defined over no elements."""

    def reduction(x: Any, modes: tuple[int, ...]) -> Any:
        if x.numel():
            return reduce(x, dim=modes, keepdim=True)
        shape = [1 if mode in modes else extent for mode, extent in enumerate(x.shape)]
        return x.new_full(shape, of_nothing)

    return reduction


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, modes: x.sum(dim=modes, keepdim=True),
    "mean": lambda x, modes: x.mean(dim=modes, keepdim=True),
    "max": _extreme(torch.amax, -math.inf),
    "min": _extreme(torch.amin, math.inf),
    "amax": lambda x, modes: _extreme(torch.amax, 0.0)(x.abs(), modes),
}


# Element types ---------------------------------------------------------------------------


def rounded(x: Any, to: DType) -> Any:
    """Converted as ``cast`` and the stores do: to nearest, ties to even; integers and 8-bit
    floats saturate, NaN becomes 0 in integers; to e8m0 up to the next power of two."""
    if to.torch is torch.float8_e8m0fnu:
        x = _power_of_two_above(x)
    return saturated(x, to).to(to.torch) if to.is_float else _whole(x, to)


def held(x: Any, to: DType) -> Any:
    """Rounded to a float; integers are saturated, not rounded."""
    return rounded(x, to) if to.is_float else saturated(x, to)


def saturated(x: Any, to: DType) -> Any:
    """Held within the finite range of an integer, of which NaN becomes 0, or of an 8-bit float;
    not rounded."""
    if to.is_float and to.bits > 8:
        return x
    if to.kind == "bool" or x.dtype is torch.bool:
        return x
    limits = torch.finfo(to.torch) if to.is_float else torch.iinfo(to.torch)
    wide = x.double()  # holds the limits of 32-bit integers exactly
    within = wide.clamp(limits.min, limits.max)
    return within if to.is_float else within.nan_to_num(nan=0.0)


def put(out: Any, rows: Any, values: Any) -> None:
    """Write rows of a tensor, of values that have its type."""
    if out.dtype is torch.float8_e8m0fnu:  # which torch cannot write where an index says
        out, values = out.view(torch.uint8), values.view(torch.uint8)
    out[rows] = values


def _power_of_two_above(x: Any) -> Any:
    mantissa, exponent = torch.frexp(x.double())  # x = mantissa · 2 ** exponent, in [0.5, 1)
    finite = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(torch.isfinite(x) & (x > 0), finite, x.double())


def _whole(x: Any, to: DType) -> Any:
    if x.dtype is torch.bool or to.kind == "bool":
        return x.to(to.torch)
    found = saturated(x, to).round()
    most = torch.iinfo(to.torch).max
    beyond = found >= float(most)  # of 64 bits that is one more, which is not converted back
    # torch does hardly anything to the wider unsigned types: int64 holds the same bits.
    signed = torch.where(found < 2.0**63, found, found - 2.0**64).to(torch.int64)
    return signed.masked_fill(beyond, most if most < 2**63 else -1).to(to.torch)
