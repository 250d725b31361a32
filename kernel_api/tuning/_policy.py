"""How something is measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api.errors import ArgumentError
from kernel_api.tuning._canonical import canonical, digest, taken

_LAUNCHES = ("eager", "graph")
_L2 = ("cold", "warm")

#: Of the numbers: the smallest that makes sense.
_LEAST = {"rounds": 1, "operand_sets": 1, "launches_per_graph": 1, "rest": 0, "seed": 0}
_OPTIONAL = ("operand_sets", "launches_per_graph")

#: What cannot be on the CPU: it would be said of times, and not be so.
_NOT_ON_CPU = {
    ("launches", "graph"): "the CPU has no graphs of launches",
    ("l2", "cold"): "on the CPU no cache is emptied",
}

#: Of the environment: ``rest`` of the usual policy.
REST = "KERNEL_API_REST"


@dataclass(frozen=True)
class Policy:
    """How something is measured; times of two policies are not compared.

    Attributes:
        launches: ``"graph"``: replays of a CUDA graph, without the host's part; ``"eager"``:
            launches one by one, as a program without graphs makes them.
        l2: What a launch finds in the L2 cache: nothing of its operands (``"cold"``), or what
            the one before left there (``"warm"``).
        rounds: In each round every candidate is timed once; those that fall behind take part in
            fewer.
        operand_sets: Sets of operands that launches use in turn; None: as many as the sizes of
            the problem and of the L2 cache ask.
        launches_per_graph: None: as many as the problem asks; eager launches have none.
        rest: After each graph, or launch in turn of all operand sets, the GPU rests so many times
            as long as that took: then large products run at the clocks of a GPU that has rested,
            as they do among work that draws less, and a time is the same when it is measured
            again. 0: the GPU draws all the power that it may, and they are as fast as that lets
            them be, which depends on what ran before and on the GPU. A CPU never rests.
        seed: Of the random data.

    Raises:
        ArgumentError: a value is none of those, or two contradict each other.
    """

    launches: str = "graph"
    l2: str = "cold"
    rounds: int = 20
    operand_sets: int | None = None
    launches_per_graph: int | None = None
    rest: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("launches", self.launches, _LAUNCHES)
        _check_choice("l2", self.l2, _L2)
        for name, least in _LEAST.items():
            _check_number(name, getattr(self, name), least, name in _OPTIONAL)
        if self.launches == "eager" and self.launches_per_graph is not None:
            raise ArgumentError(
                f"launches_per_graph is {self.launches_per_graph} but launches is 'eager', which "
                f"makes no graph; leave it out, or pass launches='graph'"
            )

    @classmethod
    def usual(cls, device: str) -> Policy:
        """How a device is measured on unless it is said: on the CPU there is neither a graph nor a
        cache to empty, and clocks do not sink. ``KERNEL_API_REST``, if it is set, is the ``rest``
        of a GPU; raises ArgumentError if it is no number."""
        if device == "cpu":
            return cls(launches="eager", l2="warm", rest=0)
        given = os.environ.get(REST)
        return cls() if not given else cls(rest=_whole(given))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Inverse of ``to_dict``; raises ArgumentError for what is no policy."""
        return cls(**{one.name: taken(data, one.name, object, bool) for one in fields(cls)})

    def to_json(self) -> str:
        """The canonical text, the same for equal policies."""
        return canonical(self.to_dict())

    @cached_property
    def digest(self) -> str:
        """A short hash of the canonical text."""
        return digest(self.to_json())


def why_not_on_cpu(name: str, value: Any) -> str | None:
    """Why nothing is measured on the CPU with this value of a policy; None if it can be."""
    return _NOT_ON_CPU.get((name, value))


def _whole(given: str) -> int:
    if not given.isdecimal():
        raise ArgumentError(f"{REST} is {given!r}; expected a whole number of 0 or more: set one")
    return int(given)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        shown = " or ".join(map(repr, choices))
        raise ArgumentError(f"{name} is {value!r}; expected {shown}: pass one of these")


def _check_number(name: str, value: Any, least: int, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        unless = ", or leave it out to have it chosen" if optional else ""
        raise ArgumentError(
            f"{name} is {value!r}; expected a whole number of {least} or more: pass one{unless}"
        )
