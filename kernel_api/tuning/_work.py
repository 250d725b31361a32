"""How much work a problem is, and the least time that it can take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._roofs import roofs_of

#: What damaged or unknown text of a problem may raise; of such a problem nothing is known.
_UNKNOWN = (LookupError, TypeError, ValueError, AttributeError, ArgumentError, OverflowError)


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    Attributes:
        operations: A product and a sum are two; None where they are not what counts.
        bytes: Of all operands, each once; a broadcast one has the bytes that it has in memory.
        kind: Of the arithmetic, as ``"float16"``: what its rate depends on; None if unknown.
    """

    operations: int | None
    bytes: int
    kind: str | None


def work_of(problem: Problem) -> Work | None:
    """None where the problem's text does not tell, or does not tell all of it.

    Groups are of equal size and sequences as long as they may be, as the tuner draws them.
    """
    try:
        data = problem.to_dict()
        arguments, sizes = data["arguments"], data["sizes"]
        operation = data["signature"][0]
        if not _reads_all(operation, sizes, arguments["keywords"]):
            return None
        operands = arguments["operands"]
        if arguments["keywords"].get("stores_out") is False:
            operands = operands[:-1]
        size = sum(map(_bytes, _tensors([operands, arguments["keywords"]])))
        operations, kind = None, None
        if operation in _OPERATIONS:
            operations = _OPERATIONS[operation](sizes, arguments["keywords"])
            kind = _arithmetic(data["signature"][1][0][0], arguments["keywords"])
        # Rows may say anything; what no machine has is no amount of work.
        known = isinstance(size, int) and 0 <= size < 1 << 63
        return Work(operations or None, size, kind) if known else None
    except _UNKNOWN:
        return None


#: What picks rows, pages or keys by values that are not known.
_UNTOLD = {"row_index", "out_row_index", "cu_seqlens_q", "cu_seqlens_kv", "page_table"}

_Sizes = Mapping[str, int]


def _reads_all(operation: str, sizes: _Sizes, keywords: Mapping[str, Any]) -> bool:
    """Whether every operand is needed, all of it."""
    if any(keywords.get(name) is not None for name in _UNTOLD):
        return False
    if operation == "grouped_gemm":  # experts without tokens are not read
        return sizes["L"] <= max(sizes["M"], sizes["K"])
    if operation in ("sdpa", "sdpa_backward") and (band := _band(sizes, keywords.get("mask"))):
        low, high = band
        queries, keys = sizes["S_q"], sizes["S_kv"]
        first = high is None or high >= 0  # the first query sees a key, the last query another
        last = low is None or queries - 1 + low < keys
        begin = low is None or low <= 0  # the first key is seen, and the last
        end = high is None or queries - 1 + high >= keys - 1
        return first and last and begin and end
    return True


def _band(sizes: _Sizes, mask: Any) -> tuple[int | None, int | None] | None:
    """How far to the left and right of query i its keys are, j - i; None for other masks."""
    if mask is None:
        return None, None
    (_, name), fields = mask["object"], mask["fields"]
    if name not in ("Causal", "SlidingWindow"):
        return None
    shift = sizes["S_kv"] - sizes["S_q"] if fields["alignment"] == "bottom_right" else 0
    left, right = (None, 0) if name == "Causal" else (fields["left"], fields["right"])
    return None if left is None else shift - left, None if right is None else shift + right


def _of_product(sizes: _Sizes, keywords: Mapping[str, Any]) -> int:
    return 2 * sizes["M"] * sizes["N"] * sizes["K"] * sizes["L"]


def _of_groups(sizes: _Sizes, keywords: Mapping[str, Any]) -> int:
    return 2 * sizes["M"] * sizes["N"] * sizes["K"]


def _of_attention(sizes: _Sizes, keywords: Mapping[str, Any]) -> int | None:
    """Two products of what is seen."""
    scores = _scores(sizes, keywords.get("mask"))
    return None if scores is None else 2 * scores * (sizes["D"] + sizes["D_v"])


def _of_attention_backward(sizes: _Sizes, keywords: Mapping[str, Any]) -> int | None:
    """Five: the scores again, dP and the three gradients."""
    scores = _scores(sizes, keywords.get("mask"))
    return None if scores is None else 2 * scores * (3 * sizes["D"] + 2 * sizes["D_v"])


_OPERATIONS = {
    "gemm": _of_product,
    "grouped_gemm": _of_groups,
    "sdpa": _of_attention,
    "sdpa_backward": _of_attention_backward,
}


def _scores(sizes: _Sizes, mask: Any) -> int | None:
    """Keys that queries see, of all heads; None for masks that are no band."""
    queries, keys, band = sizes["S_q"], sizes["S_kv"], _band(sizes, mask)
    if band is None:
        return None
    low, high = band
    seen = queries * keys if high is None else _clamped(queries, high + 1, keys)
    hidden = 0 if low is None else _clamped(queries, low, keys)
    return sizes["B"] * sizes["H"] * (seen - hidden)


def _clamped(count: int, first: int, most: int) -> int:
    """The sum of ``count`` whole numbers from ``first``, each 0 at least and ``most`` at most."""
    begin = min(max(-first, 0), count)
    end = min(max(most - first, begin), count)
    ramp = (end - begin) * (begin + end - 1 + 2 * first) // 2
    return ramp + (count - end) * most


def least_us(problem: Problem, gpu: str, policy: Policy) -> float:
    """Microseconds below which no GPU of this name can be; 0 where that is not known.

    What a warm cache may hold does not have to be read from memory.
    """
    work, roofs = work_of(problem), roofs_of(gpu)
    if work is None or roofs is None:
        return 0.0
    if policy.l2 == "warm":
        work = replace(work, bytes=0)
    return 1e6 * (roofs.seconds(work) or 0.0)


def _arithmetic(name: str, keywords: Mapping[str, Any]) -> str | None:
    """Whose peak is that of products of these elements."""
    element = dtype(name)
    if element.name == "float32":
        return "tfloat32" if keywords.get("fp32_precision") == "tf32" else None
    if element.is_integer:
        return f"int{element.bits}"  # the sign makes no difference
    return f"float{element.bits}"


def _tensors(value: Any) -> Iterator[Mapping[str, Any]]:
    """Everything with a shape."""
    if isinstance(value, dict):
        if "shape" in value:
            yield value
        else:
            yield from _tensors(list(value.values()))
    elif isinstance(value, list):
        for one in value:
            yield from _tensors(one)


def _bytes(tensor: Mapping[str, Any]) -> int:
    extents = zip(tensor["shape"], tensor["stride"], strict=True)
    count: int = math.prod(extent if stride or not extent else 1 for extent, stride in extents)
    return count * dtype(tensor["dtype"]).bits // 8
