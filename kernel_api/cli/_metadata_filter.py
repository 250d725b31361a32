"""Which kernels are meant, by the axes of their design."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_api.cli import _describe
from kernel_api.metadata import KernelMetadata

#: An axis, and the values that it may have.
Condition = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class MetadataFilter:
    """Passes kernels that meet all conditions; one without such an axis does not."""

    conditions: Sequence[Condition]

    def __call__(self, metadata: KernelMetadata) -> bool:
        axes = _axes(metadata)
        return all(axes.get(axis) in values for axis, values in self.conditions)


def condition(text: str) -> Condition:
    """Of ``AXIS=VALUE,VALUE``, for argparse."""
    axis, separator, values = text.partition("=")
    names = tuple(value.strip() for value in values.split(",") if value.strip())
    if not separator or not axis.strip() or not names:
        raise argparse.ArgumentTypeError(f"{text!r} is no AXIS=VALUE, such as stages=4")
    return axis.strip().removesuffix("_shape"), names


def _axes(metadata: KernelMetadata) -> dict[str, str]:
    """As ``kernel-api list`` prints them."""
    return {
        "family": _describe.family(metadata),
        "provider": metadata.provider,
        "name": metadata.kernel_name,
        **dict(one.split("=", 1) for one in _describe.design(metadata).split() if "=" in one),
    }
