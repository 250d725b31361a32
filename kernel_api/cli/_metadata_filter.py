"""Which kernels are meant, by the axes of their design."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_api.cli import _describe
from kernel_api.errors import ArgumentError
from kernel_api.metadata import KernelMetadata

#: Axes that every kernel has.
_OF_ALL = ("family", "provider", "name")

#: An axis, and the values that it may have.
Condition = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class MetadataFilter:
    """Passes kernels that meet all conditions; one without such an axis does not."""

    conditions: Sequence[Condition]

    @classmethod
    def checked(cls, conditions: Sequence[Condition]) -> MetadataFilter:
        """Raises ArgumentError for an axis that there is not."""
        known = _known_axes()
        for axis, values in conditions:
            if axis not in known:
                raise ArgumentError(
                    f"--filter {axis}={','.join(values)}: there is no axis {axis}; expected one of "
                    f"{', '.join(known)}"
                )
        return cls(conditions)

    def __call__(self, metadata: KernelMetadata) -> bool:
        axes = _axes(metadata) if self.conditions else {}
        return all(axes.get(axis) in values for axis, values in self.conditions)


def condition(text: str) -> Condition:
    """Of ``AXIS=VALUE,VALUE``, for argparse."""
    axis, separator, values = text.partition("=")
    names = tuple(value.strip() for value in values.split(",") if value.strip())
    if not separator or not axis.strip() or not names:
        raise argparse.ArgumentTypeError(f"{text!r} is no AXIS=VALUE, such as stages=4")
    return _describe.axis(axis.strip()), names


def _known_axes() -> list[str]:
    """Of all kernels there are."""
    from kernel_api._filters import design_axes
    from kernel_api.provider import providers

    providers()  # loads their designs
    return [*_OF_ALL, *dict.fromkeys(map(_describe.axis, design_axes()))]


def _axes(metadata: KernelMetadata) -> dict[str, str]:
    """As ``kernel-api list`` prints them."""
    own = _describe.family(metadata), metadata.provider, metadata.kernel_name
    return {
        **dict(zip(_OF_ALL, own, strict=True)),
        **dict(one.split("=", 1) for one in _describe.design(metadata).split() if "=" in one),
    }
