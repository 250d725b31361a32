"""What passes in eager mode share: results can be changed in place; gradients of gradients are
refused, and outputs that are given and would have those of what was there before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kernel_api.errors import ArgumentError, GradientError
from kernel_api.operands import require_tensors

_Gradients = tuple[Any, ...]


def changeable(out: torch.Tensor) -> torch.Tensor:
    """What ``forward`` returns of a view that it has made: as it is, torch would refuse to change
    it in place, as in ``y += residual``. Where it is saved too, torch sees that it was changed."""
    return out.detach()


def zeros(inputs: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    """The gradients that are wanted, where nothing was computed of the inputs."""
    pairs = zip(inputs, wanted, strict=True)
    return tuple([one.new_zeros(one.shape) if w and one is not None else None for one, w in pairs])


def needs_gradient(given: Iterable[Any]) -> bool:
    """Whether gradients are followed, and something that is given needs one."""
    if not torch.is_grad_enabled():
        return False
    # A list, which is made faster than few values are asked one by one.
    return True in [isinstance(one, torch.Tensor) and one.requires_grad for one in given]


def without_gradient(name: str, results: Any, given: Sequence[Any]) -> Any:
    """The results of a form that has no gradient: where what they are made of needs one, those that
    were made for the call do, and a backward pass that comes to them raises GradientError.

    Args:
        given: All that the call was given, outputs too.
    """
    if not needs_gradient(given):
        return results
    from kernel_api._without_gradient import refusing

    # In what is exported the operators say so.
    return results if torch.compiler.is_exporting() else refusing(name, results, given)


def check_outputs(outputs: Iterable[tuple[str, Any]]) -> None:
    """Raise ArgumentError where an output that is given belongs to a graph of autograd."""
    if not torch.is_grad_enabled():
        return
    for name, one in outputs:
        if getattr(one, "requires_grad", False):
            raise ArgumentError(
                f"{name} is given and needs a gradient, which is not that of what is written "
                f"there; pass it detached, or call within torch.no_grad()"
            )


def differentiable_once(name: str) -> Callable[[Callable[..., _Gradients]], Callable[..., Any]]:
    """Decorates ``backward`` of a :class:`torch.autograd.Function`, which then takes the saved
    tensors behind ``ctx``; among them has to be every input that may need a gradient.

    What depends on the gradients of a pass with ``create_graph`` raises GradientError as soon as it
    is differentiated, by any input. (torch's ``once_differentiable`` raises only where the engine
    walks to all leaves and the loss was no sum; else the gradients count as constants.)

    Args:
        name: Of the function, for the message.
    """

    def decorated(backward: Callable[..., _Gradients]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def backward_once(ctx: Any, *upstream: Any) -> Any:
            _check_upstream(name, upstream)
            saved = ctx.saved_tensors  # once: checkpoints compute them anew for every look
            with torch.no_grad():
                gradients = backward(ctx, saved, *upstream)
            if not torch.is_grad_enabled():
                return gradients
            return _Last.apply(name, gradients, *upstream, *saved)  # type: ignore[no-untyped-call]

        return backward_once

    return decorated


def _check_upstream(name: str, upstream: _Gradients) -> None:
    """Raise ArgumentError for what kernels cannot read, as several gradients that torch takes at
    once (``is_grads_batched``)."""
    if torch.compiler.is_compiling():
        return
    for one in upstream:
        if type(one) is torch.Tensor:
            require_tensors(**{f"the gradient of the result of {name}": one})


class _Last(torch.autograd.Function):
    """Gradients as they are, joined to what they were computed of."""

    @staticmethod
    def forward(ctx: Any, name: str, gradients: _Gradients, *sources: Any) -> _Gradients:
        ctx.name = name
        # Detached, they are no views of what backward made, which could not be changed in place.
        return tuple([None if one is None else one.detach() for one in gradients])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise GradientError(
            f"a gradient of {ctx.name} is differentiated again, which its kernels cannot do; "
            f"compute it without create_graph or detach it, or use torch's own functions where "
            f"second derivatives are needed"
        )
