"""What a problem is, in a reader's words, and how much work it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.tuning import Problem

#: What damaged or unknown text of a problem may raise; the report names such a problem by its
#: hash instead.
_UNKNOWN = (LookupError, TypeError, ValueError, AttributeError, ArgumentError, OverflowError)


#: Operations of which all operands but the last are multiplied.
_PRODUCTS = ("gemm", "grouped_gemm", "sdpa", "sdpa_backward")

_SIZES = ("M", "N", "K", "L", "B", "H", "H_kv", "S_q", "S_kv", "D", "D_v")


@dataclass(frozen=True)
class Description:
    """A problem in a reader's words.

    Attributes:
        operation: As ``"gemm"``.
        types: Element types: ``"bf16"`` if all are that, else as ``"e4m3 × e4m3 → bf16"``; and of
            the sums if it is not the usual one.
        layout: ``t`` (row-major) or ``n`` per operand.
        sizes: By their names.
        options: The epilogue and all else that is not plain.
    """

    operation: str
    types: str = ""
    layout: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: str = ""

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return " · ".join(filter(None, (self.operation, sizes, self.types, self.layout)))


def describe(problem: Problem) -> Description:
    try:
        return _described(problem)
    except _UNKNOWN:
        return Description(str(problem), sizes=problem.sizes)


def _described(problem: Problem) -> Description:
    data, operands = problem.to_dict(), problem.matrices
    operation, _, accumulator = data["signature"][:3]
    names = [dtype(one[0]).short for one in operands]
    if len(set(names)) == 1:
        types = names[0]
    elif operation in _PRODUCTS:
        types = f"{' × '.join(names[:-1])} → {names[-1]}"
    else:
        types = " → ".join(names)
    if accumulator != ("int32" if dtype(operands[0][0]).is_integer else "float32"):
        types += f", {dtype(accumulator).short} sums"
    layout = "".join({-1: "t", -2: "n", None: "s"}[one[2]] for one in operands)
    scales = [f"{one[3]['scale']} scales" for one in operands if one[3]]
    sizes = {name: data["sizes"][name] for name in in_order(data["sizes"])}
    options = [*dict.fromkeys(scales), *_options(data)]
    if operation not in ("gemm", "grouped_gemm"):
        layout = ""
    return Description(str(operation), types, layout, sizes, "; ".join(options))


def in_order(names: Iterable[str]) -> list[str]:
    """Names of sizes as a reader expects them; others behind those."""
    found = set(names)
    return [name for name in _SIZES if name in found] + sorted(found.difference(_SIZES))


def _options(data: Mapping[str, Any]) -> Iterator[str]:
    for name, value in data["arguments"]["keywords"].items():
        if name == "accumulator_type" or value is None or value is False:
            continue
        if name == "epilogue":
            operands = ", ".join(value["operands"])
            yield f"epilogue({operands}) {data['signature'][3][0][:6]}"
        elif isinstance(value, dict):
            yield name
        else:
            yield name if value is True else f"{name}={value}"
