"""Calls that look like an earlier one, of forms that allocate all that they write.

As in :mod:`kernel_api._launches`, which is for forms that are given outputs as well: what a call
looks like is read from its tensors, and one that looks like an earlier one goes straight to the
kernel's launcher. What is remembered keeps no tensor alive.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from kernel_api import _compile_cache, provider
from kernel_api._launches import LOW_BITS, NEVER_NEGATIVE, TENSORS, dispatch_modes, run_best
from kernel_api.arguments import Arguments
from kernel_api.kernel import LauncherInOrder
from kernel_api.offsets import check_is_asked
from kernel_api.provider import PROVIDERS, raw_setting

_KEPT = 1024
_launchers: dict[tuple[Hashable, ...], LauncherInOrder] = {}
_lock = threading.Lock()


def look(read: Sequence[Any], *how: Hashable) -> tuple[Hashable, ...] | None:
    """What a call looks like; None: it is not looked at.

    Args:
        read: The tensors that it reads; None in the place of one that is absent.
        how: What else tells it from others: its kind, element types and sizes of what is written.
    """
    if dispatch_modes() or forward_ad._current_level >= 0 or check_is_asked():
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    key: tuple[Hashable, ...] = (
        provider._generation, raw_setting(PROVIDERS), _compile_cache._era, *how,
    )  # fmt: skip
    for one in read:
        if one is None:
            key += (None,)
            continue
        if type(one) not in TENSORS or one.layout is not torch.strided:
            return None
        if one.dtype is not NEVER_NEGATIVE and one.is_neg():
            return None
        address = one.data_ptr()
        if not address:  # empty, or freed
            return None
        key += (one.dtype, one.shape, one.stride(), one.device, address & LOW_BITS)
    return key


def repeated(
    key: tuple[Hashable, ...] | None, tensors: Sequence[Any], values: Sequence[Any] = ()
) -> bool:
    """Launch what is remembered of such calls; False if nothing is.

    Args:
        tensors: In the order of the arguments' fields.
        values: What stands beside them, in the order of the names that :func:`run` was given.
    """
    launcher = None if key is None else _launchers.get(key)
    if launcher is None:
        return False
    launcher(tensors, values)
    return True


def run(key: tuple[Hashable, ...] | None, args: Arguments, names: Sequence[str]) -> None:
    """Run by the best kernel, and remember that for calls that look alike.

    Args:
        names: Of what such calls give beside the operands: all that a launch takes by name.
    """
    kernel, artifact = run_best(args)
    if key is None or not args.writes_anything:
        return
    if tuple(kernel._launch_operands(args)) != tuple(names):
        return
    launcher = kernel._launcher_in_order(args, artifact)
    with _lock:
        if len(_launchers) >= _KEPT:
            _launchers.clear()
        _launchers[key] = launcher
