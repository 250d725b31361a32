"""Small helpers for those who bring kernels."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from kernel_api.errors import ArgumentError

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: torch, and what is in front of each call where its compiler is at work, if they came before this:
#: the compiler that reads a look at ``sys.modules`` makes variables of all that is there.
_TORCH = sys.modules.get("torch")
_EVAL_FRAME = sys.modules.get("torch._C._dynamo.eval_frame")


def to_cuda_stream(stream: Any = None) -> Any:
    """The ``cuda.bindings.driver.CUstream`` of a stream; None is torch's current stream.

    Takes a torch stream, an int handle, a CUstream, or an object with ``__cuda_stream__``.
    """
    from cuda.bindings import driver

    if isinstance(stream, driver.CUstream):
        return stream
    return driver.CUstream(stream_handle(stream))


def stream_handle(stream: Any = None) -> int:
    """The address of a CUDA stream, as an int; None is torch's current stream.

    Raises TypeError for what is no stream, ArgumentError for what is no address.
    """
    if stream is None:
        import torch

        stream = torch.cuda.current_stream()
    try:
        handle = _handle_of(stream)
    except (TypeError, LookupError):
        raise TypeError(
            f"stream is a {type(stream).__name__}; expected None, a torch stream, an int, "
            f"a CUstream or an object whose __cuda_stream__ gives (0, handle)"
        ) from None
    if not 0 <= handle < 1 << 64:
        raise ArgumentError(f"stream is the handle {handle}; expected the address of a stream")
    return handle


def _handle_of(stream: Any) -> int:
    """Raises TypeError or LookupError for what has none."""
    if isinstance(stream, bool):
        raise TypeError
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "cuda_stream"):
        return operator.index(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        return operator.index(stream.__cuda_stream__()[1])
    if hasattr(stream, "native_handle"):  # torch.Stream, of whatever device
        return operator.index(stream.native_handle)
    return operator.index(stream)


def strides_to_layout_string(*strides: Sequence[int]) -> str:
    """One letter per operand: ``t`` if its last mode has stride 1 (row-major), else ``n``.

    >>> strides_to_layout_string((0, 0, 1), (0, 1, 0), (0, 0, 1))
    'tnt'
    """
    return "".join("t" if stride[-1] == 1 else "n" for stride in strides)


def is_traced() -> bool:
    """Whether torch's compiler reads the code that calls this, to make a graph of it."""
    torch = _TORCH or sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def is_read() -> bool:
    """Whether it reads that code line by line; torch.export calls it, unless it is to be strict."""
    torch = _TORCH or sys.modules.get("torch")
    torch_compiler = getattr(torch, "compiler", None)  # none while another thread imports torch
    return torch_compiler is not None and bool(torch_compiler.is_dynamo_compiling())


def is_watched() -> bool:
    """Whether torch's compiler looks at every function that is called here, and all that these are
    given: because it left a caller as it is, or meets this call, which it cannot read."""
    # :func:`is_read`, written out: every query comes here.
    torch = _TORCH or sys.modules.get("torch")
    torch_compiler = getattr(torch, "compiler", None)
    if torch_compiler is not None and torch_compiler.is_dynamo_compiling():
        return True  # it reads this line, and could not read what follows
    compiler = _EVAL_FRAME or sys.modules.get("torch._C._dynamo.eval_frame")
    ask = getattr(compiler, "get_eval_frame_callback", None)
    return ask is not None and callable(ask())


def untraced(function: _Function) -> _Function:
    """The same, which torch's compiler leaves as it is: it would read all that is called there,
    frame by frame, and find nothing for its graphs."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if is_watched():
            from kernel_api._outside import outside

            return outside(function, *given, **named)
        return function(*given, **named)

    return cast(_Function, call)
