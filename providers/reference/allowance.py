"""What ``verify`` allows outputs to be off by that are computed of something that is off itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_api.epilogue import Graph

#: A change in one direction of so many times that in another is sudden.
_SUDDEN = 8.0


def changes(
    value: Any,
    error: Any,
    exact: Mapping[str, Any],
    least: Mapping[str, float],
    graph: Graph,
    evaluated: Callable[[Any], Mapping[str, Any]],
) -> dict[str, Any]:
    """By output, what it changes by where elements of the value are off by as much as `error` says:
    all up, all down, and either at random.

    Of what is rounded down on the way a change may be sudden, as where the rest of a division
    begins anew. There comes on top what it is otherwise: what lies behind the step may be anywhere
    within the error.

    Args:
        exact: The outputs of the value itself, float64.
        least: What is allowed besides.
        graph: What computes them.
        evaluated: The outputs of another value.
    """
    generator = torch.Generator(device=value.device).manual_seed(0)
    drawn = torch.randint(0, 2, value.shape, generator=generator, device=value.device)
    signs = 2.0 * drawn - 1.0
    most = {name: torch.zeros_like(one) for name, one in exact.items()}
    fewest = {name: torch.full_like(one, torch.inf) for name, one in exact.items()}
    for direction in (1.0, -1.0, signs, -signs):
        for name, values in evaluated(value + direction * error).items():
            off = torch.nan_to_num(values.double() - exact[name], posinf=0.0, neginf=0.0).abs()
            most[name] = torch.maximum(most[name], off)
            fewest[name] = torch.minimum(fewest[name], off)
    if graph.has_steps:
        for name, few in fewest.items():
            most[name] = most[name] + torch.where(most[name] > _SUDDEN * few, few, 0.0)
    return {name: least[name] + one for name, one in most.items()}
