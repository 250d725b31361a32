"""GPU architectures: what a kernel is written for, and which devices can run it.

A *target* carries the suffix of the architecture name, as the CUDA compiler does:

``sm_80``   that compute capability and every newer one (the code is compiled again for it)
``sm_90a``  exactly compute capability 9.0: architecture-specific instructions
``sm_100f`` the family: 10.0 and newer of the same major
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

from kernel_api.errors import ArgumentError

CcLike = Union[int, str, "Target", None]

#: The major version that names with a suffix begin at.
_SUFFIXES = {"a": 9, "f": 10}

_PATTERN = re.compile(r"(?:sm_?)?(\d{1,4})(?:\.(\d))?([af]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """An architecture such as ``sm_90a``; ``str()`` gives that spelling."""

    major: int
    minor: int
    suffix: str = ""

    @property
    def cc(self) -> int:
        """The compute capability as one number: 90 for 9.0."""
        return 10 * self.major + self.minor

    def runs_on(self, device: Target) -> bool:
        """Whether a kernel written for this target can be compiled for and run on the device."""
        if self.suffix == "a":
            return self.cc == device.cc
        if self.suffix == "f":
            return self.major == device.major and self.minor <= device.minor
        return self.cc <= device.cc

    def compiled_for(self, device: Target) -> Target:
        """The target to hand to the compiler for a kernel of this target on that device."""
        if device.suffix:
            return device
        return Target(device.major, device.minor, self.suffix)

    def __str__(self) -> str:
        return f"sm_{self.cc}{self.suffix}"


def target(value: int | str | Target) -> Target:
    """The target that ``90``, ``"90"``, ``"9.0"``, ``"90a"`` or ``"sm_90a"`` names.

    Raises ArgumentError for anything else.
    """
    if isinstance(value, Target):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ArgumentError(
            f"{value!r} names no GPU architecture; write 90, '9.0', '90a' or 'sm_90a'"
        )
    return _parsed(str(value).strip())


def is_compute_capability(number: object) -> bool:
    """As one number: 90 for 9.0."""
    try:
        return isinstance(number, int) and target(number).cc == number
    except ArgumentError:
        return False


@lru_cache(maxsize=256)
def _parsed(value: str) -> Target:
    match = _PATTERN.fullmatch(value)
    if match is None:
        raise ArgumentError(
            f"{value!r} names no GPU architecture; write 90, '9.0', '90a' or 'sm_90a'"
        )
    digits, minor, suffix = match.groups()
    if minor is None:
        if len(digits) < 2:
            nearest = f"write {digits}0 or '{digits}.0'" if int(digits) else "write 90 or '9.0'"
            raise ArgumentError(f"{value!r} names no GPU architecture; {nearest}")
        digits, minor = digits[:-1], digits[-1]
    found = Target(int(digits), int(minor), suffix.lower())
    if found.major < _SUFFIXES.get(found.suffix, 0):
        raise ArgumentError(
            f"{value!r} names no GPU architecture; those with {found.suffix} begin at "
            f"{_SUFFIXES[found.suffix]}.0, write {found.cc}"
        )
    return found


def targets_of(names: Iterable[str], min_cc: int) -> tuple[Target, ...]:
    """A kernel's targets; one that names none runs from ``min_cc`` on."""
    listed = tuple(target(name) for name in names)
    return listed or (Target(min_cc // 10, min_cc % 10),)


def fitting(targets: Iterable[Target], device: Target) -> Target | None:
    """The most specific of a kernel's targets that runs on the device, or None."""
    able = [t for t in targets if t.runs_on(device)]
    return max(able, key=lambda t: (t.cc, t.suffix), default=None)
