"""What ``verify`` allows outputs to be off by that are computed of something that is off itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

#: A change in one direction of so many times that in another is sudden.
_SUDDEN = 8.0


def changes(
    value: Any,
    error: Any,
    exact: Mapping[str, Any],
    least: Mapping[str, float],
    evaluated: Callable[[Any], Mapping[str, Any]],
) -> dict[str, Any]:
    """By output, what it changes by where elements of the value are off by as much as `error` says:
    all up, all down, and either at random.

    Where a change is sudden, as where the rest of a division begins anew, there comes on top what
    it is otherwise: what lies behind the step may be anywhere within the error.

    Args:
        exact: The outputs of the value itself, float64.
        least: What is allowed besides.
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
    sudden = {name: most[name] > _SUDDEN * fewest[name] for name in most}
    return {
        name: least[name] + one + torch.where(sudden[name], fewest[name], 0.0)
        for name, one in most.items()
    }
