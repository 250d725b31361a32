"""One-call forms: outputs allocated if absent, the best kernel chosen, the launch remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kernel_api.arguments import GemmArguments
from kernel_api.discovery import explain, get_kernels
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError, NoKernelError
from kernel_api.operands import Operand
from kernel_api.provider import generation

_LAUNCHES_KEPT = 1024
_launches: OrderedDict[Any, Callable[..., None]] = OrderedDict()
_lock = threading.Lock()


def gemm(A: Any, B: Any, *, out: Any = None, out_dtype: Any = None) -> Any:
    """A · B: (M, K) · (K, N), or batched (L, M, K) · (L, K, N); accumulated in float32.

    Args:
        out: Written if given, else allocated row-major.
        out_dtype: Element type of an allocated ``out``; that of A by default.

    Raises:
        ArgumentError: the shapes contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    if out is None:
        A, B = _operand(A, "A"), _operand(B, "B")
        out = _allocated(A, B, dtype(out_dtype) if out_dtype is not None else A.dtype)
    args = GemmArguments(A, B, out)
    _launch(args)(*args.tensors)
    return out


def _operand(value: Any, name: str) -> Operand:
    operand = value if isinstance(value, Operand) else Operand(value, name)
    if operand.rank not in (2, 3):
        raise ArgumentError(f"{name} has rank {operand.rank}; expected 2, or 3 with a batch")
    return operand


def _allocated(A: Operand, B: Operand, element: DType) -> Any:
    import torch

    shape = (*A.shape[:-1], B.shape[-1])
    return torch.empty(shape, dtype=element.torch, device=A.device)


def _launch(args: GemmArguments) -> Callable[..., None]:
    """The prepared launch of the best kernel for these arguments."""
    key = (args.key, generation())
    found = _launches.get(key)
    if found is not None:
        return found
    kernels = get_kernels(args)
    if not kernels:
        raise NoKernelError(explain(args))
    launch = kernels[0].prepare(args)
    with _lock:
        _launches[key] = launch
        if len(_launches) > _LAUNCHES_KEPT:
            _launches.popitem(last=False)
    return launch
