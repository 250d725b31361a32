"""Whether tensors are like others, asked of all of them at once.

That is what torch.compile guards its code with: one call instead of five for every tensor, which is
most of what a launch costs the host beside the driver's part. It is no public interface of torch,
so it is tried before it is relied on; without it, tensors are looked at one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kernel_api import _log

logger = _log.logger(__name__)

Likeness = Callable[..., bool]


def likeness(tensors: Sequence[Any]) -> Likeness | None:
    """What tells whether tensors have the types, element types, devices, shapes and strides of
    these, in this order; None where torch has nothing that does, or one of them is there twice.

    It may say no to tensors that are alike, for example where one is given twice, or one needs a
    gradient: a no means to look closer. It keeps none of the tensors.
    """
    guards = _guards()
    if guards is None or not tensors or len({*map(id, tensors)}) < len(tensors):
        return None
    return _made(guards, tensors)


@functools.cache
def _guards() -> Any:
    """Torch's class, if it does what is said of it."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        if _tells_apart(TensorGuards):
            return TensorGuards
        why = "it takes tensors for alike that are not"
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}"
    logger.info("torch's TensorGuards is not used, tensors are looked at one by one: %s", why)
    return None


def _made(guards: Any, tensors: Sequence[Any]) -> Likeness:
    check: Likeness = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _tells_apart(guards: Any) -> bool:
    """Whether it finds each difference that counts."""
    import torch

    kind: Any = {"dtype": torch.float16, "device": "cpu"}
    one, other = torch.empty(2, 3, **kind), torch.empty(3, **kind)
    check = _made(guards, (one, other))
    different = (
        torch.empty(2, 4, **kind),
        torch.empty(3, 2, **kind).t(),
        torch.empty(2, 4, **kind)[:, :3],
        torch.empty(6, **kind),
        torch.empty(2, 3, dtype=torch.bfloat16, device="cpu"),
        torch.empty(2, 3, dtype=torch.float16, device="meta"),
        torch.nn.Parameter(torch.empty(2, 3, **kind)),
        other,
    )
    behind = _made(guards, (other, one))
    alike = check(torch.empty_like(one), torch.empty_like(other))
    found = [check(wrong, other) or behind(other, wrong) for wrong in different]
    return alike is True and not any(found)
