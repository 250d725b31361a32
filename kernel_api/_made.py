"""Outputs that calls like earlier ones make again and again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def maker(like: Any, device: Any = None) -> Callable[[], Any]:
    """Of tensors like one without gaps, not initialised; on a device, or its own. torch is told the
    strides, too, and plain tuples: so it has half as much to find out."""
    shape, stride = tuple(like.shape), like.stride()
    place = like.device if device is None else device
    return functools.partial(torch.empty_strided, shape, stride, dtype=like.dtype, device=place)
