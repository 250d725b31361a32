"""What torch traces inside of torch.func's transforms, and of the forward mode; and what a tracer
knows.

In eager mode tensors tell it: inside of transforms they have no memory. A tracer's never have any,
so the tracer itself is asked; its graph would have right values, and derivatives of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from kernel_api import operands
from kernel_api.errors import ArgumentError

_is_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD: Any = torch._C.DispatchKey.AutogradFunctionality
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


def check_traced(**given: Any) -> None:
    """Raise ArgumentError where a graph would lose derivatives of what is given."""
    if _is_transformed():
        raise operands._no_memory(_transformed(given))
    if _is_forward_mode():
        for name, one in given.items():
            if isinstance(one, torch.Tensor) and operands._has_tangent(one):
                raise ArgumentError(
                    f"{name} has a tangent (torch.autograd.forward_ad), which graphs with kernels "
                    f"would lose; they have gradients of the backward mode alone"
                )


def _transformed(given: Mapping[str, Any]) -> str:
    """The first that a transform is of; a tracer does not tell, and the first of all is."""
    if not torch.compiler.is_compiling():
        for name, one in given.items():
            if isinstance(one, torch.Tensor) and _is_wrapped(one):
                return name
    return next(iter(given))


def are_known(given: Iterable[Any]) -> bool:
    """Whether arguments can be made of what a tracer has: neither a number nor a size depends on
    what only an execution knows. Not inside of the forward mode, where they ask for tangents, which
    tracers do not tell."""
    values = list(given)
    sizes = (n for one in values if isinstance(one, torch.Tensor) for n in one.shape)
    is_open = any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in (*values, *sizes))
    return not is_open and forward_ad._current_level < 0


# Answers that hold while a graph is traced: it asks for neither again.


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_transformed() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_forward_mode() -> bool:
    """Not below autograd, as where operators tell sizes: there nothing has a tangent."""
    return forward_ad._current_level >= 0 and not _is_excluded(_AUTOGRAD)
