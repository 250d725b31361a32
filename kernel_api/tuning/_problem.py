"""What is computed, as text: the arguments without their data, and how near two of them are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api._description import described
from kernel_api.arguments import Arguments
from kernel_api.errors import ArgumentError
from kernel_api.metadata import encode
from kernel_api.tuning._canonical import as_object, canonical, digest, taken

#: Bytes that alignment is counted to: allocators differ beyond that, also from call to call.
_ALIGNMENT = 64

#: The same where problems are alike: the widest access that asks for it.
_ALIGNMENT_CLASS = 16

#: Where ``out`` stands among the operands of operations that have others behind it.
_OUT = {"grouped_gemm": 2, "sdpa": 3, "sdpa_backward": 3}


@dataclass(frozen=True)
class Problem:
    """Arguments without their data and device, and without numbers given at run time.

    Equal for arguments of the same class, element types, shapes, strides, alignment (up to 64
    bytes), scale modes, accumulator, float32 precision, options and epilogue (by its hash).

    Attributes:
        text: The canonical JSON: ``signature`` (:attr:`Arguments.signature`), ``arguments`` (each
            tensor's dtype, shape, stride, alignment) and ``sizes`` (:attr:`Arguments.sizes`).
    """

    text: str

    @classmethod
    def of(cls, args: Arguments) -> Problem:
        """Raises ArgumentError for arguments that carry what cannot be described."""
        found = described(args)
        keywords = {name: _plain(value) for name, value in found["keywords"].items()}
        data = {
            "signature": encode(args.signature),
            "arguments": {
                "class": found["class"],
                "operands": [_plain(one) for one in found["operands"]],
                "keywords": {n: v for n, v in keywords.items() if not isinstance(v, float)},
            },
            "sizes": args.sizes,
        }
        return cls(canonical(data))

    @classmethod
    def from_dict(cls, data: Any) -> Problem:
        """Inverse of ``to_dict``; raises ArgumentError for what is no problem."""
        fields = as_object(data, "problem")
        taken(fields, "signature", list)
        sizes = as_object(taken(fields, "sizes", dict), "sizes")
        for name in sizes:
            if not 0 <= taken(sizes, name, int) < 1 << 63:
                raise ArgumentError(f"{name} is {sizes[name]}; expected a size")
        try:
            found = cls(canonical(data))
            _ = found.likeness, str(found)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"this does not describe a problem: {error!r}") from error
        return found

    def to_dict(self) -> dict[str, Any]:
        return dict(self._data)

    @cached_property
    def digest(self) -> str:
        """A short hash of the text."""
        return digest(self.text)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self._data["sizes"])

    @property
    def matrices(self) -> list[Any]:
        """Of the signature's operands (element type, rank, mode with stride 1, scale mode), what is
        read and then ``out``."""
        operation, operands = self._data["signature"][:2]
        found: list[Any] = operands[: 1 + _OUT.get(operation, len(operands))]
        return found

    @cached_property
    def likeness(self) -> str:
        """A short hash of all but the sizes: the same for problems that one kernel may suit.

        Of strides it has which are 0 and which are 1; of alignment whether 16 bytes are reached,
        or how many. Whole numbers beside the operands, such as rows per block, have no part.
        """
        arguments = self._data["arguments"]
        keywords = arguments["keywords"].items()
        alike = {
            "signature": self._data["signature"],
            "class": arguments["class"],
            "operands": [_alike(one) for one in arguments["operands"]],
            "keywords": {n: _alike(one) for n, one in keywords if not _is_number(one)},
        }
        return digest(canonical(alike))

    def distance(self, other: Problem, most: float = math.inf) -> tuple[float, float] | None:
        """How many times as large sizes are: the largest |log2| of the ratios, then their sum.

        A size of 0 is infinitely far from any other. None for problems that are not alike, or where
        the largest is more than ``most``.
        """
        (names, mine), (its_names, its) = self._logarithms, other._logarithms
        if self.likeness != other.likeness or names != its_names:
            return None
        largest = together = 0.0
        for one, its_one in zip(mine, its, strict=True):
            if one != its_one:
                step = abs(one - its_one)
                if step > most:
                    return None
                largest, together = max(largest, step), together + step
        return largest, together

    def near(self, others: Iterable[Problem]) -> list[Problem]:
        """Those that are alike in all but the sizes (see :attr:`likeness`), none of which is more
        than twice as large, or less than half as large. Nearest, and first, is where the largest
        |log2| of the ratios of sizes is smallest; ties go by the sum of these, then by the text.
        """
        found = []
        for one in others:
            distance = self.distance(one, most=1)
            if distance is not None:
                found.append((distance, one.text, one))
        return [one for *_, one in sorted(found)]

    @cached_property
    def _logarithms(self) -> tuple[tuple[str, ...], list[float]]:
        """Names of the sizes, sorted as they are in the text, and log2 of them."""
        sizes = self._data["sizes"]
        return tuple(sizes), [math.log2(size) if size else -math.inf for size in sizes.values()]

    @cached_property
    def _data(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.text)
        return found

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        return f"{self._data['arguments']['class'][1]} with {sizes} ({self.digest})"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """What :func:`described` says of a value: alignment up to what counts, an epilogue by its
    operands (the signature has its hash) with None in place of a number, as of every object."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "graph" in value:
        named = value["operands"].items()
        return {"operands": {n: None if _is_number(one) else _plain(one) for n, one in named}}
    if "shape" in value:
        return {**value, "alignment": min(value["alignment"], _ALIGNMENT)}
    named = value.items()
    return {n: None if isinstance(one, float) else _plain(one) for n, one in named}


def _alike(value: Any) -> Any:
    """The same without sizes."""
    if isinstance(value, list):
        return [_alike(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value:
        return {
            "dtype": value["dtype"],
            "strides": [one if one in (0, 1) else "any" for one in value["stride"]],
            "alignment": min(value["alignment"], _ALIGNMENT_CLASS),
        }
    return {name: _alike(one) for name, one in value.items()}
