"""How operators of torch are defined for the graphs of torch.compile and torch.export.

A form is two of them, named as torch names its own: ``torch.ops.kernel_api.gemm.default`` allocates
what it returns, and ``gemm.out`` writes outputs of which some are given. Nobody comes to either in
eager mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernel_api._without_gradient import keep, refuse

_Function = Callable[..., Any]

_library: Any = torch.library.Library("kernel_api", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(name: str, schema: str, run: _Function, fake: _Function) -> None:
    """Make an operator.

    Args:
        name: With an overload behind a dot, if it has one.
        run: What it does.
        fake: What it gives of fake tensors; raises what a call would.
    """
    _library.define(f"{name}{schema}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_api::{name}", fake, lib=_library)


def define_without_gradient(name: str, schema: str, run: _Function, fake: _Function) -> None:
    """Make an operator of a form that allocates what it returns: where an operand needs a gradient,
    that does, and a backward pass that comes to it raises GradientError."""
    define(name, schema, run, fake)
    register_autograd(name, functools.partial(refuse, name), keep)


def define_constant(name: str, schema: str, run: _Function, fake: _Function) -> None:
    """Make one whose results, a list, are constants, though an operand may need a gradient."""
    define(name, schema, run, fake)
    register_autograd(name, functools.partial(refuse, name), _keep_constants)


def register_autograd(name: str, backward: _Function, keep: _Function) -> None:
    """Let an operator that allocates what it returns have gradients."""
    torch.library.register_autograd(
        f"kernel_api::{name}", backward, setup_context=keep, lib=_library
    )


def _keep_constants(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.mark_non_differentiable(*output)
