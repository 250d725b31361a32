"""From a node of attention to the arguments that kernels take."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api._score import ScoreFunction, whole_numbers
from kernel_api.epilogue.value import Value
from kernel_api.errors import GraphNotSupportedError
from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._node import Body, Node
from kernel_api.graph._operations.pointwise import POINTWISE
from kernel_api.graph._planning.steps import origin_of
from kernel_api.graph._tensor import Tensor

_INDICES = ("b", "h", "q", "kv")

#: What 8-bit operands are multiplied with.
DESCALES = ("descale_q", "descale_k", "descale_v")

#: Results that have a number for each row, (B, H, S_q, 1), and what arguments call them.
STATISTICS = {"Stats": "lse", "Max": "score_max", "Sum_exp": "score_sum_exp"}

#: Queries and keys of a block of ``block_mask``.
BLOCK_SHAPE = (128, 128)


def attention_arguments(
    node: Node, tensors: Mapping[str, Any], outputs: Mapping[str, Any]
) -> ka.SdpaArguments | ka.SdpaBackwardArguments:
    """The arguments of a node ``sdpa``, ``sdpa_backward`` or ``sdpa_fp8``; of the latter without
    what is done to P and O. Looks at no data.

    Args:
        tensors: Meta or real ones by input name, in the dims of the graph; numbers for what is
            passed by value. Inputs that are not there are left out, whatever the node has. Beside
            them ``block_table``, bool (B or 1, H or 1, blocks of queries, blocks of keys), stands
            for ``block_mask``, whose bits kernels do not read, and ``alibi``, (H,), for the slopes.
        outputs: By result name. Statistics are of the type of the arithmetic.

    Raises:
        ArgumentError: no kernel takes such operands.
        GraphNotSupportedError: the options cannot be said to kernels: ragged offsets, tables of
            pages that differ, bits of blocks, operations on scores that kernels do not have.
    """
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    _decline_ragged(node)
    options = _options(node, tensors)
    if node.op == "sdpa_backward":
        return ka.SdpaBackwardArguments(
            q,
            k,
            v,
            tensors["o"],
            tensors["dO"],
            _rows(tensors["stats"]),
            *(outputs[name] for name in ("dQ", "dK", "dV")),
            dBias=outputs.get("dBias"),
            dSink=_vector(outputs.get("dSink")),
            deterministic=bool(node["deterministic"]),
            **options,
        )
    return ka.SdpaArguments(
        q,
        k,
        v,
        outputs["O"],
        page_table=_pages(node, tensors),
        values_in_keys=None if _values_are_keys(node) else False,
        **{name: _rows(outputs.get(result)) for result, name in STATISTICS.items()},
        **{name: _single(tensors[name]) for name in DESCALES if name in tensors},
        **options,
    )


def _values_are_keys(node: Node) -> bool:
    """Whether V is in the memory of K in every execution, not by chance in the first."""
    k, v = node.inputs["k"], node.inputs["v"]
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    return origin_of(k) == origin_of(v)


def _decline_ragged(node: Node) -> None:
    for tensor in (*node.reads, *node.writes):
        if tensor.ragged_offset is not None:
            raise GraphNotSupportedError(
                f"{tensor} of {node} is ragged; kernels take what planning made of it, sequences "
                f"at equal distances"
            )


def _options(node: Node, tensors: Mapping[str, Any]) -> dict[str, Any]:
    scale = tensors.get("attn_scale", node["scale"])
    found: dict[str, Any] = {
        "scale": float(scale) if isinstance(scale, numbers.Real) else 1.0,
        "mask": _mask(node, tensors),
        "bias": tensors.get("bias"),
        "sink": _vector(tensors.get("sink_token")),
        "seq_lens_q": _vector(tensors.get("seq_len_q")),
        "seq_lens_kv": _vector(tensors.get("seq_len_kv")),
    }
    if node["alibi"]:
        found["alibi"] = tensors.get("alibi")
        if found["alibi"] is None:
            q = tensors["q"]
            found["alibi"] = slopes_on(q.shape[1], q.device)
    if node["dropout"]:
        found["dropout"] = ka.arguments.Dropout(
            node["dropout"],
            _single(tensors["dropout_seed"]),
            _single(tensors["dropout_offset"]),
        )
    found["score_mod"] = score_function(node, tensors)
    return found


def _mask(node: Node, tensors: Mapping[str, Any]) -> Any:
    parts: list[Any] = []
    band = node["band"]
    if band is not None:
        left, right, alignment = band["left"], band["right"], band["alignment"]
        if left is None and right == 0:
            parts.append(ka.masks.Causal(alignment))
        else:
            parts.append(ka.masks.SlidingWindow(left, right, alignment))
    if "block_table" in tensors:
        parts.append(ka.masks.BlockSparse(tensors["block_table"], BLOCK_SHAPE))
    elif "block_mask" in tensors:
        raise GraphNotSupportedError(f"{node} has a block_mask, whose bits kernels do not read")
    return functools.reduce(lambda one, other: one & other, parts) if parts else None


def _pages(node: Node, tensors: Mapping[str, Any]) -> Any:
    names = ("paged_attention_k_table", "paged_attention_v_table")
    table: Any = tensors.get(names[0])
    if table is None and names[1] not in tensors:
        return None
    if node.inputs.get(names[0]) is not node.inputs.get(names[1]):
        raise GraphNotSupportedError(
            "k and v have tables of pages that are not the same tensor; kernels read one"
        )
    return table.view(table.shape[0], table.shape[2])


# Shapes ----------------------------------------------------------------------------------


def _rows(tensor: Any) -> Any:
    """(B, H, S) of (B, H, S, 1)."""
    return None if tensor is None else tensor.squeeze(-1)


def _vector(tensor: Any) -> Any:
    """One mode of a tensor that has others of extent 1 only."""
    return None if tensor is None else tensor.view(tensor.numel())


def _single(state: Any) -> Any:
    return state if isinstance(state, numbers.Integral) else state.view(())


# ALiBi -----------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> list[float]:
    """One for each head: 2^(−8i/n) for i = 1 ... n, with n the largest power of two up to the
    number of heads, then 2^(−4(2i − 1)/n) (Press, Smith and Lewis, Train Short, Test Long,
    2022)."""
    n = 1 << (max(heads, 1).bit_length() - 1)
    found = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    found += [2.0 ** (-4.0 * (2 * i - 1) / n) for i in range(1, heads - n + 1)]
    return found[:heads]


@functools.lru_cache(maxsize=64)
def slopes_on(heads: int, device: Any, wide: bool = False) -> Any:
    """The slopes as a tensor (H,), float32 or float64; made once for a device."""
    import torch

    kind = torch.float64 if wide else torch.float32
    return torch.tensor(alibi_slopes(heads), dtype=torch.float64).to(kind).to(device)


# Functions of scores ---------------------------------------------------------------------


def score_function(node: Node, tensors: Mapping[str, Any]) -> ScoreFunction | None:
    """``score_mod`` with its operands, traced; a scale that is a tensor is one of them.

    Raises GraphNotSupportedError or EpilogueError for what kernels have no functions for.
    """
    body, scale = node.body, tensors.get("attn_scale")
    by_tensor = scale is not None and not isinstance(scale, numbers.Real)
    if body is None and not by_tensor:
        return None
    operands: dict[str, Any] = {"attn_scale": _single(scale)} if by_tensor else {}
    names: dict[int, str] = {}
    if body is not None:
        _check_expressible(body)
        given = node.inputs.get("score_operands", ())
        for place, one in enumerate(given if isinstance(given, tuple) else ()):
            name = names[id(one)] = f"operand{place}"
            operands[name] = _squeezed(tensors["score_operands"][place])
    return ScoreFunction(_traced(body, names, operands), True, operands)


def _squeezed(operand: Any) -> Any:
    """Without the modes that it broadcasts; numbers as they are."""
    if isinstance(operand, numbers.Real):
        return int(operand) if isinstance(operand, bool) else operand
    return operand.view([extent for extent in operand.shape if extent != 1])


def _check_expressible(body: Body) -> None:
    for node in body.nodes:
        if node.op not in _OF_INDICES and POINTWISE[node.op].epilogue is None:
            raise GraphNotSupportedError(
                f"score_mod has {node}, which kernels have no function for"
            )


def _traced(
    body: Body | None, names: Mapping[int, str], operands: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function of (score, b, h, q, kv, **operands) for :class:`kernel_api.SdpaArguments`."""

    def changed(score: Any, *indices: Any, **given: Any) -> Any:
        if "attn_scale" in given:
            score = score * given["attn_scale"]
        if body is None:
            return score
        values: dict[int, Any] = {id(body.argument): score}

        def value(tensor: Tensor) -> Any:
            if tensor.is_constant:
                return tensor.value
            if id(tensor) not in values:
                values[id(tensor)] = _element(given[names[id(tensor)]], tensor, indices)
            return values[id(tensor)]

        for node in body.nodes:
            made = _of_scores(node, value, indices)
            for tensor in node.writes:
                values[id(tensor)] = _held(made, tensor)
        return values[id(body.result)]

    parameters = ("score", *_INDICES, *operands)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    changed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in parameters]
    )
    return changed


def _element(operand: Any, tensor: Tensor, indices: tuple[Any, ...]) -> Any:
    """What a score reads of an operand that broadcasts to (B, H, S_q, S_kv)."""
    dim = (1,) * (4 - tensor.rank) + tensor.dim
    read = tuple(index for index, extent in zip(indices, dim, strict=True) if extent != 1)
    return operand[read] if read else operand


def _of_scores(node: Node, value: Callable[[Tensor], Any], indices: tuple[Any, ...]) -> Any:
    if node.op == "gen_index":
        # The input is (B, H, S_q, S_kv), or has the last modes of it.
        rank = max(node.input("input").rank, 1)
        return indices[len(indices) - rank + node["axis"] % rank]
    entry = POINTWISE[node.op]
    values = [value(node.input(name)) for name in entry.arguments]
    if node.op == "mod":
        return _remainder(*values)
    assert entry.epilogue is not None
    attributes = {name: node[name] for name in entry.attributes if node[name] is not None}
    return entry.epilogue(*values, **attributes)


def _held(value: Any, tensor: Tensor) -> Any:
    """A value as a tensor of its type holds it, see :func:`is_kept`."""
    if is_kept(tensor) or not isinstance(value, Value) or value.is_boolean:
        return value
    if tensor.data_type is data_type.BOOLEAN:
        return value != 0
    element = element_type(tensor.data_type)
    whole = whole_numbers(value.tracer.nodes[: value.node + 1])[value.node]
    return value if whole and element.bits >= 32 else ep.cast(value, element.name)


def is_kept(tensor: Tensor) -> bool:
    """Whether what a function of scores computes stays as it is in a tensor: floating numbers of 16
    bits or more stay in the type of the arithmetic."""
    element = element_type(tensor.data_type)
    return element.is_float and element.bits >= 16


def _remainder(a: Any, b: Any) -> Any:
    """With the sign of a, as C's fmod has."""
    divisor = abs(int(b)) if isinstance(b, (int, float)) and float(b).is_integer() else b
    return ep.where(a < 0, -((-a) % divisor), a % divisor)


#: Operations that are said in indices of scores, not by the table.
_OF_INDICES = ("gen_index", "mod")
