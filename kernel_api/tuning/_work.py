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
    """None where the problem's text does not tell."""
    try:
        data = problem.to_dict()
        arguments, sizes = data["arguments"], data["sizes"]
        size = sum(map(_bytes, _tensors([arguments["operands"], arguments["keywords"]])))
        operations, kind = None, None
        if data["signature"][0] == "gemm":
            operations = 2 * sizes["M"] * sizes["N"] * sizes["K"] * sizes["L"]
            kind = _arithmetic(data["signature"][1][0][0], arguments["keywords"])
        # Rows may say anything; what no machine has is no amount of work.
        known = isinstance(size, int) and 0 <= size < 1 << 63
        return Work(operations or None, size, kind) if known else None
    except _UNKNOWN:
        return None


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
