"""One-call forms: outputs allocated if absent, the best kernel chosen, the launch remembered.

    out = ka.ops.gemm(x, w.t())
    out, preactivation = ka.ops.gemm_swiglu(x, w.t(), preactivation=True)

The names and operands are those of :mod:`kernel_api.fusions`. If ``out`` is not given, it is
allocated row-major, of ``out_dtype`` or the element type of A. An output that one may do without
is allocated if it is True; those that the operation is for (``amax`` of ``gemm_amax``, ``scale``
of ``gemm_quantize``) always are. What comes back is ``out``, or a named tuple of all outputs
where there are several.

All raise what the fusions raise, and NoKernelError, which says why, where no kernel takes the
operands.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from kernel_api import fusions
from kernel_api.arguments import GemmArguments
from kernel_api.discovery import explain, get_kernels
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError, NoKernelError
from kernel_api.fusions._shared import batches, matrices, rows
from kernel_api.operands import Operand
from kernel_api.provider import generation

Fusion = Callable[..., GemmArguments]

_LAUNCHES_KEPT = 1024
_launches: OrderedDict[Any, Callable[[GemmArguments], None]] = OrderedDict()
_lock = threading.Lock()

_E8M0, _FLOAT32, _FLOAT64 = dtype("float8_e8m0fnu"), dtype("float32"), dtype("float64")


def _one_call(
    fusion: Fusion,
    *optional: str,
    always: tuple[str, ...] = (),
    width: Fraction | int = 1,
    element: str | None = None,
) -> Callable[..., Any]:
    """The form of a fusion that allocates its outputs and runs.

    Args:
        optional: Outputs that are allocated if they are True.
        always: Those that are allocated if they are None, too.
        width: Columns of ``out`` in units of N.
        element: Type of ``out``; that of A by default.
    """
    named = (*always, *optional)

    @functools.wraps(fusion)
    def call(A: Any, B: Any, *, out: Any = None, out_dtype: Any = None, **options: Any) -> Any:
        if out is None:
            A, B = matrices(A, B)
            found = dtype(out_dtype or element) if out_dtype or element else A.dtype
            out = _empty((*rows(A), int(width * B.shape[-1])), found, A)
        elif out_dtype is not None:
            _check_type(out, out_dtype)
        for name in named:
            given = options.get(name)
            if given is True or (given is None and name in always):
                A, B = matrices(A, B)
                options[name] = _allocated(name, A, B, out, options)
            elif given is False:
                options[name] = None
        args = fusion(A, B, out=out, **options)
        _run(args)
        if not named or args.epilogue is None or not args.epilogue.outputs:
            return out
        written = tuple(name for name in named if name in args.epilogue.outputs)
        return _results(fusion.__name__, written)(out, *(options[name] for name in written))

    call.__module__ = __name__
    call.__signature__ = _signature(fusion, always)  # type: ignore[attr-defined]
    return call


@functools.lru_cache
def _results(fusion: str, names: tuple[str, ...]) -> Callable[..., Any]:
    title = "".join(word.capitalize() for word in fusion.split("_"))
    return namedtuple(title, ("out", *names))


def _signature(fusion: Fusion, always: tuple[str, ...]) -> inspect.Signature:
    """Of the fusion, with outputs that may be absent and a type for ``out``."""
    found = inspect.signature(fusion)
    parameters = []
    for one in found.parameters.values():
        absent = one.name == "out" or one.name in always
        parameters.append(one.replace(default=None) if absent else one)
        if one.name == "out":
            parameters.append(one.replace(name="out_dtype", default=None))
    return found.replace(parameters=parameters, return_annotation=Any)


# Outputs ---------------------------------------------------------------------------------


def _allocated(name: str, A: Operand, B: Operand, out: Any, options: dict[str, Any]) -> Any:
    """An output beside ``out``; None where its operation only reads what has that name."""
    N, element = B.shape[-1], _FLOAT64 if A.dtype is _FLOAT64 else _FLOAT32
    if name == "preactivation":
        return _empty((*rows(A), N), dtype(out.dtype), A)
    if name == "amax":
        return _empty((), element, A)
    if name == "dprob":
        return _empty(rows(A), element, A)
    if name == "dbias":
        return _empty((*batches(A), out.shape[-1]), element, A)
    assert name == "scale", name
    mode = options.get("mode")
    if mode == "row":
        return _empty(rows(A), _FLOAT32, A)
    return _empty((*rows(A), N // 32), _E8M0, A) if mode == "mx" else None


def _empty(shape: tuple[int, ...], element: DType, like: Operand) -> Any:
    import torch

    return torch.empty(shape, dtype=element.torch, device=like.device)


def _check_type(out: Any, out_dtype: Any) -> None:
    given, asked = Operand(out, "out").dtype, dtype(out_dtype)
    if given is not asked:
        raise ArgumentError(f"out is {given} and out_dtype {asked}; one of them is enough")


# Launches --------------------------------------------------------------------------------


def _run(args: GemmArguments) -> None:
    key = (args.key, generation())
    launch = _launches.get(key)
    if launch is None:
        launch = _launch(args)
        with _lock:
            _launches[key] = launch
            if len(_launches) > _LAUNCHES_KEPT:
                _launches.popitem(last=False)
    launch(args)


def _launch(args: GemmArguments) -> Callable[[GemmArguments], None]:
    """What runs the best kernel on arguments of the same key."""
    kernels = get_kernels(args)
    if not kernels:
        raise NoKernelError(explain(args))
    kernel = kernels[0]
    if args.epilogue is not None:
        # A prepared launch would keep the operands of this epilogue.
        return functools.partial(kernel.run, assume_supported_args=True)
    prepared = kernel.prepare(args)
    return lambda args: prepared(*args.tensors)


# The forms -------------------------------------------------------------------------------

_HALF = Fraction(1, 2)
_GRADIENT = ("dprob", "dbias")

gemm = _one_call(fusions.gemm)
gemm_bias_activation = _one_call(fusions.gemm_bias_activation, "preactivation")
gemm_residual = _one_call(fusions.gemm_residual)
gemm_amax = _one_call(fusions.gemm_amax, always=("amax",))
gemm_glu = _one_call(fusions.gemm_glu, "preactivation", width=_HALF)
gemm_swiglu = _one_call(fusions.gemm_swiglu, "preactivation", width=_HALF)
gemm_geglu = _one_call(fusions.gemm_geglu, "preactivation", width=_HALF)
gemm_reglu = _one_call(fusions.gemm_reglu, "preactivation", width=_HALF)
gemm_dglu = _one_call(fusions.gemm_dglu, *_GRADIENT, width=2)
gemm_dswiglu = _one_call(fusions.gemm_dswiglu, *_GRADIENT, width=2)
gemm_recompute_dglu = _one_call(fusions.gemm_recompute_dglu, *_GRADIENT)
gemm_srelu = _one_call(fusions.gemm_srelu, "preactivation")
gemm_dsrelu = _one_call(fusions.gemm_dsrelu, *_GRADIENT)
gemm_dactivation = _one_call(fusions.gemm_dactivation, *_GRADIENT)
gemm_recompute_dsrelu = _one_call(fusions.gemm_recompute_dsrelu, *_GRADIENT)
gemm_recompute_dactivation = _one_call(fusions.gemm_recompute_dactivation, *_GRADIENT)
gemm_rope = _one_call(fusions.gemm_rope)
gemm_quantize = _one_call(fusions.gemm_quantize, "amax", always=("scale",), element="float8_e4m3fn")
gemm_dropout = _one_call(fusions.gemm_dropout)
