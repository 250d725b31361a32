"""Attention: what its nodes give, and how it is computed without a fused kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from kernel_api.errors import GraphError
from kernel_api.graph import _kinds as kinds
from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._node import Body, Node, Operation, check_whole, settle
from kernel_api.graph._operations._attention_arguments import (
    BLOCK_SHAPE,
    STATISTICS,
    attention_arguments,
    slopes_on,
)
from kernel_api.graph._operations._attention_scores import without_body
from kernel_api.graph._operations._ragged import check_ragged
from kernel_api.graph._operations.pointwise import POINTWISE
from kernel_api.graph._tensor import memory_order, packed_strides

_TABLES = {"k": "paged_attention_k_table", "v": "paged_attention_v_table"}

_Dims = tuple[int, int, int, int, int, int]


#: Inputs that all of them may have.
_BESIDE = (
    "attn_scale", "bias", "block_mask", "sink_token", "seq_len_q", "seq_len_kv", "dropout_seed",
    "dropout_offset", "score_operands",
)  # fmt: skip
_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")

_BAND = kinds.record(
    left=kinds.optional(kinds.whole(0)),
    right=kinds.optional(kinds.whole(0)),
    alignment=kinds.one_of(("top_left", "bottom_right")),
)
_OPTIONS = {
    "scale": kinds.optional(kinds.NUMBER),
    "band": kinds.optional(_BAND),
    "alibi": kinds.TRUTH,
    "padding": kinds.TRUTH,
    "dropout": kinds.optional(kinds.NUMBER),
}


class Attention(Operation):
    """What forward and backward share."""

    optional: ClassVar[tuple[str, ...]] = _BESIDE
    numbers: ClassVar[tuple[str, ...]] = (
        "attn_scale", "dropout_seed", "dropout_offset", "score_operands",
    )  # fmt: skip
    several = ("score_operands",)
    has_body = True

    def check(self, node: Node) -> None:
        check_whole(node, "dropout_seed", "dropout_offset")
        drops = node["dropout"] is not None
        _check_given(node, "scale", node["scale"] is None, "attn_scale")
        _check_given(node, "dropout", drops, "dropout_seed", "dropout_offset")
        if drops and not 0 < node["dropout"] < 1:
            raise GraphError(f"{node} has dropout = {node['dropout']}; expected a probability")
        lengths = [name for name in ("seq_len_q", "seq_len_kv") if name in node.inputs]
        if node["padding"] != bool(lengths):
            raise GraphError(f"{node} has padding = {node['padding']} and lengths {lengths}")
        check_alibi(node["alibi"], node["band"])
        if node.body is not None:
            _check_body(node, node.body)

    def infer(self, node: Node) -> None:
        dims = sizes(node)
        _check_beside(node, dims)
        check_ragged(node, dims[0])
        if node.body is not None:
            _infer_body(node, dims)
        self._settle(node, dims)

    def _settle(self, node: Node, dims: _Dims) -> None:
        raise NotImplementedError


class Sdpa(Attention):
    """O and Stats; the other results are written where they are asked for."""

    name = "sdpa"
    result = ("O", *STATISTICS, "Rng_dump")
    inputs = ("q", "k", "v", *Attention.optional, *_TABLES.values())
    optional = (*result[1:], *inputs[3:])
    attributes: ClassVar[dict[str, kinds.Kind]] = {
        **_OPTIONS,
        "max_seq_len_kv": kinds.optional(kinds.whole(0)),
    }

    def check(self, node: Node) -> None:
        super().check(node)
        if "Rng_dump" in node.outputs and node["dropout"] is None:
            raise GraphError(f"{node} has Rng_dump and no dropout; it is what dropout keeps")
        tables = [name for name in _TABLES.values() if name in node.inputs]
        if tables and "seq_len_kv" not in node.inputs:
            raise GraphError(f"{node} has {tables[0]} and no seq_len_kv, which ends its pages")

    def _settle(self, node: Node, dims: _Dims) -> None:
        B, H, S_q, S_kv, _, D_v = dims
        q, wide = node.input("q"), _wide(node)
        dim = (B, H, S_q, D_v)
        settle(node, node.outputs.get("O"), dim, packed_strides(dim, memory_order(q.dim, q.stride)))
        for name in STATISTICS:
            settle(node, node.outputs.get(name), (B, H, S_q, 1), element=wide)
        settle(node, node.outputs.get("Rng_dump"), (B, H, S_q, S_kv), element=data_type.FLOAT)

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        plain, tensors, _ = without_body(node.copy(), _plain(node, given))
        found = _run(plain, tensors, ("O", *STATISTICS))
        if "Rng_dump" in node.outputs:
            found["Rng_dump"] = _kept(plain, tensors)
        return found


class SdpaBackward(Attention):
    """Gradients of q, k and v, and of bias and sink where they are asked for."""

    name = "sdpa_backward"
    result = ("dQ", "dK", "dV", "dBias", "dSink")
    inputs = ("q", "k", "v", "o", "dO", "stats", *Attention.optional)
    optional = ("dBias", "dSink", *Attention.optional)
    attributes: ClassVar[dict[str, kinds.Kind]] = {
        **_OPTIONS,
        "deterministic": kinds.TRUTH,
        "max_total_seq_len_q": kinds.optional(kinds.whole(0)),
        "max_total_seq_len_kv": kinds.optional(kinds.whole(0)),
    }

    def infer(self, node: Node) -> None:
        super().infer(node)
        q, v = node.input("q").dim, node.input("v").dim
        for name, dim in (
            ("o", (*q[:3], v[3])),
            ("dO", (*q[:3], v[3])),
            ("stats", (*q[:3], 1)),
        ):
            if node.input(name).dim != dim:
                raise GraphError(
                    f"{node} has {name} of dim {list(node.input(name).dim)}; expected {list(dim)}"
                )

    def _settle(self, node: Node, dims: _Dims) -> None:
        for name, of in (("dQ", "q"), ("dK", "k"), ("dV", "v")):
            one = node.input(of)
            stride = packed_strides(one.dim, memory_order(one.dim, one.stride))
            settle(node, node.outputs.get(name), one.dim, stride)
        for name, of in (("dBias", "bias"), ("dSink", "sink_token")):
            if name in node.outputs:
                settle(node, node.outputs[name], node.input(of).dim, element=_wide(node))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        plain, tensors, scores = without_body(node.copy(), _plain(node, given))
        found = _run(plain, tensors, ("dQ", "dK", "dV", "dBias", "dSink"))
        if scores is not None:
            found.update(scores.gradients(found["dBias"], node))
        return found


class SdpaFp8(Attention):
    """Probabilities are rounded to the type of q, times scale_s, before they meet v."""

    name = "sdpa_fp8"
    result = ("O", "Stats", "Amax_S", "Amax_O")
    inputs = ("q", "k", "v", *_SCALES, *Attention.optional)
    optional = ("Stats", *Attention.optional)
    numbers = (*_SCALES, *Attention.numbers)
    attributes = _OPTIONS

    def _settle(self, node: Node, dims: _Dims) -> None:
        B, H, S_q, _, _, D_v = dims
        q, dim = node.input("q"), (B, H, S_q, D_v)
        settle(node, node.outputs.get("O"), dim, packed_strides(dim, memory_order(q.dim, q.stride)))
        settle(node, node.outputs.get("Stats"), (B, H, S_q, 1), element=data_type.FLOAT)
        for name in ("Amax_S", "Amax_O"):
            settle(node, node.outputs.get(name), (1, 1, 1, 1), element=data_type.FLOAT)

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        from kernel_api.providers.reference.epilogue import rounded

        names = [name for name in given if name.startswith(("scale_", "descale_"))]
        scales = {name: float(given[name]) for name in names}
        tensors = _plain(node, {name: one for name, one in given.items() if name not in scales})
        tensors["q"] = tensors["q"] * (scales["descale_q"] * scales["descale_k"])
        element = element_type(node.input("q").data_type)
        plain, tensors, _ = without_body(node.copy(), tensors)
        rows = _Rows(plain, tensors)
        out, stats = rows.new(tensors["v"].shape[-1]), rows.new(1, -math.inf)
        amax_S = out.new_zeros(())
        for place, scores, keep, values in rows:
            largest, total, p = rows.softmax(scores)
            p = p / total.where(total != 0, 1.0)
            p = p if keep is None else p * keep
            if p.numel():
                amax_S = torch.maximum(amax_S, p.amax())
            p = rounded(p * scales["scale_s"], element).to(out.dtype)
            out[place] = p @ values * (scales["descale_v"] * scales["descale_s"])
            stats[place] = total.log() + largest
        amax_O = out.abs().amax() if out.numel() else out.new_zeros(())
        shape = (1, 1, 1, 1)
        return {
            "O": out * scales["scale_o"],
            "Stats": stats,
            "Amax_S": amax_S.reshape(shape),
            "Amax_O": amax_O.reshape(shape),
        }


# Dims ------------------------------------------------------------------------------------


def sizes(node: Node) -> _Dims:
    """(B, H_q, S_q, S_kv, D, D_v); raises GraphError if q, k and v contradict each other."""
    q, k, v = (node.input(name).dim for name in ("q", "k", "v"))
    for name, dim in (("q", q), ("k", k), ("v", v)):
        if len(dim) != 4:
            raise GraphError(
                f"{node} has {name} of dim {list(dim)}; expected (B, H, S, D), whatever the strides"
            )
    if q[3] != k[3]:
        raise GraphError(f"{node} has q with D = {q[3]} but k with D = {k[3]}")
    if k[1] != v[1]:
        raise GraphError(f"{node} has k with {k[1]} heads but v with {v[1]}")
    if not k[1] or q[1] % k[1]:
        raise GraphError(
            f"{node} has q with {q[1]} heads and k with {k[1]}; for grouped-query attention the "
            f"former must be a multiple of the latter"
        )
    lengths = {name: _keys_of(node, name, q[0]) for name in ("k", "v")}
    if lengths["k"] != lengths["v"]:
        raise GraphError(
            f"{node} has k with S_kv = {lengths['k']} but v with S_kv = {lengths['v']}"
        )
    return (q[0], q[1], q[2], lengths["k"], q[3], v[3])


def _keys_of(node: Node, name: str, B: int) -> int:
    """S_kv as k or v has it."""
    dim, table = node.input(name).dim, node.optional(_TABLES[name])
    if table is None:
        if dim[0] != B:
            raise GraphError(f"{node} has q with B = {B} but {name} with B = {dim[0]}")
        return dim[2] if node["max_seq_len_kv"] is None else min(dim[2], node["max_seq_len_kv"])
    if table.rank != 4 or table.dim[0] != B or table.dim[1] != 1 or table.dim[3] != 1:
        raise GraphError(
            f"{node} has a table of pages of dim {list(table.dim)}; expected (B, 1, pages, 1) with "
            f"B = {B}"
        )
    held = table.dim[2] * dim[2]
    return held if node["max_seq_len_kv"] is None else min(held, int(node["max_seq_len_kv"]))


def _check_given(node: Node, attribute: str, is_needed: bool, *inputs: str) -> None:
    """Raise GraphError unless inputs are there exactly where an attribute asks for them."""
    for name in inputs:
        if (name in node.inputs) != is_needed:
            given = "not given" if is_needed else "given"
            raise GraphError(f"{node} has {attribute} = {node[attribute]} and {name} is {given}")


def check_alibi(alibi: bool, band: Mapping[str, Any] | None) -> None:
    """Raise GraphError where there are slopes and later keys are seen."""
    if alibi and (band is None or band["right"] != 0):
        raise GraphError(
            "use_alibi_mask is set without a causal mask; it needs use_causal_mask, or "
            "diagonal_band_right_bound = 0"
        )


def _check_body(node: Node, body: Body) -> None:
    """Raise GraphError where a function of scores reads or gives what it does not have."""
    made = {body.argument, *(tensor for inner in body.nodes for tensor in inner.writes)}
    operands = node.inputs.get("score_operands", ())
    known = {*made, *(operands if isinstance(operands, tuple) else ())}
    for inner in body.nodes:
        if inner.op not in POINTWISE:
            raise GraphError(f"score_mod adds {inner}; expected pointwise operations only")
        strange = [str(t) for t in inner.reads if t not in known and not t.is_constant]
        if strange:
            raise GraphError(f"{inner} of {node} reads {strange[0]}, which is no operand of it")
    if body.result not in made:
        raise GraphError(f"score_mod of {node} gives {body.result}, which it does not compute")


def _check_beside(node: Node, dims: _Dims) -> None:
    B, H, S_q, S_kv = dims[:4]
    blocks = (math.ceil(S_q / BLOCK_SHAPE[0]), math.ceil(math.ceil(S_kv / BLOCK_SHAPE[1]) / 8))
    for name, full in (("bias", (B, H, S_q, S_kv)), ("block_mask", (B, H, *blocks))):
        one = node.optional(name)
        if one is None:
            continue
        # Blocks are not broadcast.
        free = 4 if name == "bias" else 2
        fits = one.rank == 4 and all(
            own == extent or (own == 1 and mode < free)
            for mode, (own, extent) in enumerate(zip(one.dim, full, strict=True))
        )
        if not fits:
            raise GraphError(
                f"{node} has {name} of dim {list(one.dim)}, which does not broadcast to "
                f"{list(full)}"
            )
    for name, count in (
        ("seq_len_q", B), ("seq_len_kv", B), ("sink_token", H), ("dropout_seed", 1),
        ("dropout_offset", 1), ("attn_scale", 1), ("descale_q", 1), ("descale_k", 1),
        ("descale_v", 1), ("descale_s", 1), ("scale_s", 1), ("scale_o", 1),
    ):  # fmt: skip
        one = node.optional(name)
        if one is not None and math.prod(one.dim) != count:
            raise GraphError(
                f"{node} has {name} of dim {list(one.dim)}; expected {count} element"
                f"{'' if count == 1 else 's'}"
            )


def _infer_body(node: Node, dims: _Dims) -> None:
    assert node.body is not None
    score = node.body.argument
    score.dim = dims[:4]
    score.stride = packed_strides(score.dim)
    for inner in node.body.nodes:
        inner.operation.infer(inner)
        for tensor in inner.writes:
            if tensor.data_type is data_type.NOT_SET:
                tensor.data_type = data_type.FLOAT
    fits = node.body.result.dim == score.dim
    if not fits:
        raise GraphError(
            f"score_mod of {node} makes {list(node.body.result.dim)} of scores of dim "
            f"{list(score.dim)}; expected one for each"
        )


def _wide(node: Node) -> data_type:
    kinds = {node.compute, node.input("q").data_type}
    return data_type.DOUBLE if data_type.DOUBLE in kinds else data_type.FLOAT


# Computing -------------------------------------------------------------------------------


def _run(node: Node, tensors: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the results by the reference kernel."""
    import torch

    import kernel_api as ka

    q = tensors["q"]
    always = ("O", "dQ", "dK", "dV")
    asked = [name for name in names if name in node.outputs or name in always]
    outputs = {name: q.new_empty(_dim_of(node, name)) for name in asked}
    if "dBias" in names and ("dBias" in outputs or node["gradient_of_scores"]):
        outputs["dBias"] = torch.empty_like(tensors["bias"])
    arguments = attention_arguments(node, tensors, outputs)
    ka.get_kernels(arguments, providers=("reference",))[0].run(arguments)
    return outputs


def _dim_of(node: Node, name: str) -> tuple[int, ...]:
    if name in node.outputs:
        return node.outputs[name].dim
    if name == "O":
        return (*node.input("q").dim[:3], node.input("v").dim[3])
    return node.input(name[1:].lower()).dim


def _plain(node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
    """Operands as the reference kernel takes them: no pages, no bits."""
    import torch

    found = dict(given)
    wide = node.arithmetic
    for name in ("q", "k", "v", "o", "dO", "stats"):
        if name in found:
            found[name] = found[name].to(wide).contiguous()
    for name in ("seq_len_q", "seq_len_kv"):
        if name in found:
            found[name] = found[name].to(torch.int32).contiguous()
    for name in ("dropout_seed", "dropout_offset"):
        if hasattr(found.get(name), "dtype"):
            found[name] = found[name].to(torch.int64)
    for name in ("sink_token", "bias"):
        if name in found:
            found[name] = found[name].to(wide).contiguous()
    if "attn_scale" in found:
        found["attn_scale"] = float(found["attn_scale"])
    if node["alibi"]:
        found["alibi"] = slopes_on(found["q"].shape[1], found["q"].device, wide is torch.float64)
    for name, table in _TABLES.items():
        if table in found:
            found[name] = _gathered(found[name], found.pop(table), sizes(node)[3])
        elif node["max_seq_len_kv"] is not None:
            found[name] = found[name][:, :, : node["max_seq_len_kv"]].contiguous()
    if "block_mask" in found:
        found["block_table"] = block_table(found.pop("block_mask"), sizes(node)[3])
    return found


def _gathered(container: Any, table: Any, keys: int) -> Any:
    """(B, H, S_kv, D) of pages."""
    pages = table.flatten(1).long().clamp(0, max(container.shape[0] - 1, 0))
    dense = container[pages].transpose(1, 2).flatten(2, 3)
    return dense[:, :, :keys].contiguous()


def block_table(bits: Any, keys: int) -> Any:
    """The truth values of a block mask, one for each block of queries and of keys."""
    import torch

    places = torch.arange(8, device=bits.device, dtype=torch.int32)
    each = (bits.to(torch.int32).unsqueeze(-1) >> places) & 1
    return each.flatten(3)[..., : -(-keys // BLOCK_SHAPE[1])].bool().contiguous()


class _Rows:
    """The scores of some queries at a time, in float64.

    Args:
        tensors: As :func:`_plain` gives them.
    """

    def __init__(self, node: Node, tensors: Mapping[str, Any]) -> None:
        import torch

        from kernel_api.providers.reference.sdpa import ReferenceSdpa

        q, v = tensors["q"], tensors["v"]
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        forward = node.copy()
        forward.op = "sdpa"  # which sdpa_fp8 is, but for what is rounded
        self._args = attention_arguments(forward, tensors, {"O": out})
        self._computation = ReferenceSdpa.computation(self._args, torch.float64)
        self._shape = tuple(q.shape[:3])

    def new(self, columns: int, fill: float = 0.0) -> Any:
        import torch

        shape = (*self._shape, columns)
        return torch.full(shape, fill, dtype=torch.float64, device=self._args.device)

    def __iter__(self) -> Any:
        """(Index of the rows, scores, what dropout multiplies with or None, values)."""
        computation = self._computation
        for rows in computation.attention.rows():
            _, _, values, products = computation.products(rows)
            scores, _, keep = computation.attention.scores(rows, products)
            yield (rows.b, slice(None), slice(rows.start, rows.stop)), scores, keep, values

    def softmax(self, scores: Any) -> tuple[Any, Any, Any]:
        """(Largest score or sink, sum, exponentials) of rows; 0 as the largest where a row sees
        nothing."""
        import torch

        shape = (*scores.shape[:-1], 1)
        largest = scores.new_full(shape, -math.inf)
        if scores.shape[-1]:
            largest = scores.amax(-1, keepdim=True)
        sink = None
        if self._args.sink is not None:
            sink = self._computation.attention.per_head("sink").expand(shape)
            largest = torch.maximum(largest, sink)
        largest = largest.where(largest != -math.inf, 0.0)
        p = (scores - largest).exp()
        total = p.sum(-1, keepdim=True)
        return largest, total if sink is None else total + (sink - largest).exp(), p


def _kept(node: Node, tensors: Mapping[str, Any]) -> Any:
    """What dropout keeps, 1 or 0."""
    import torch

    rows, S_kv = _Rows(node, tensors), sizes(node)[3]
    found = rows.new(S_kv)
    for place, _, keep, _ in rows:
        padded = torch.nn.functional.pad(keep, (0, S_kv - keep.shape[-1]))
        found[place] = (padded != 0).double()
    return found
