"""The one-call forms as operators of torch, for the graphs of torch.compile and torch.export.

``torch.ops.kernel_api.gemm_swiglu(A, B, out_dtype, read, floats, integers, names, options)``
allocates and returns all outputs; ``gemm_swiglu.out(A, B, out, written, read, ...)`` is for calls
that are given one, and writes ``out`` and the tensors of ``written``. ``names`` are those of what
stands in the lists, one after the other; ``options`` are further ones as ``name=value``, outputs
that are asked for by True among them. A ScaledOperand is what it stores, its scale one of ``read``,
and the mode of that an option. Nobody comes here in eager mode.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_api._autograd import check_outputs
from kernel_api._forms import FACTORS, Form, torch_type
from kernel_api._launches import (
    Call,
    first,
    scales_of_products,
    type_of_out,
    values_of,
    with_scales,
    without_scales,
)
from kernel_api._results import serialize_all
from kernel_api._torch_operators import define, define_without_gradient
from kernel_api._transforms import are_known, check_traced
from kernel_api._without_gradient import beside_outputs
from kernel_api.errors import ArgumentError
from kernel_api.ops import FORMS, GROUPED_FORMS

#: Lists without anything are None, as AOTInductor's packages give them whatever the schema says.
_READ = "Tensor[]? read, float[]? floats, SymInt[]? integers, str[]? names, str[]? options"
_SCHEMA = f"(Tensor A, Tensor B, ScalarType? out_dtype, {_READ}) -> Tensor[]"
_SCHEMA_OUT = f"(Tensor A, Tensor B, Tensor(a!) out, Tensor(b!)[] written, {_READ}) -> ()"

_IN_GRAPHS = (torch.Tensor, torch.SymInt, torch.SymFloat, int, float, str, type(None))
_WHY = (
    "an epilogue, a number of NumPy, or experts that lie anywhere, is nothing that a graph of "
    "torch holds"
)


def _register(form: Form, call: Callable[..., Any]) -> None:
    """Make a form two operators, whose implementation calls it."""
    make, fake = functools.partial(_make, call), functools.partial(_make_fake, form)
    define_without_gradient(form.name, _SCHEMA, make, fake)
    run, check = functools.partial(_run, call), functools.partial(_check, form)
    define(f"{form.name}.out", _SCHEMA_OUT, run, check)
    form.results_types.make_all(form.outputs)


def traced(form: Form, A: Any, B: Any, out: Any, out_dtype: Any, options: dict[str, Any]) -> Any:
    """The call in a graph: one operator."""
    made = Call(A, B, out, out_dtype, options)
    A, B, out, _, options = call = without_scales(made)
    for value in (A, B, out, *options.values()):
        if not isinstance(value, _IN_GRAPHS):
            return _refused(form, made)
    check_traced(A=A, B=B, **options)
    check_outputs(form.given(out, options))
    if out is not None and out_dtype is not None and out.dtype is not torch_type(out_dtype):
        raise ArgumentError(f"out is {out.dtype} and out_dtype {out_dtype}; one of them is enough")
    scaled = len(scales_of_products(call)) > 0  # torch 2.11 reads no bool(a list)
    asked = type_of_out(form, call, A.dtype, scaled)
    operator = getattr(torch.ops.kernel_api, form.name)
    if out is None and not any(isinstance(options[n], torch.Tensor) for n in form.written(options)):
        element = None if asked is None else torch_type(asked)
        found = operator.default(A, B, element, *_packed(options, ()))
        return form.results_of(found, options)
    out, complete = form.completed(A, B, out, asked, options)
    written = form.written(complete)
    operator.out(A, B, out, [complete[name] for name in written], *_packed(complete, written))
    results = form.results(out if made.out is None else made.out, complete)
    return beside_outputs(form.name, results, values_of(call))


def _packed(options: dict[str, Any], written: Sequence[str]) -> list[Any]:
    """What an operator gets behind the tensors that it writes."""
    given = {name: _held(value) for name, value in options.items() if value is not None}
    numbers = [name for name in given if name in FACTORS and _in_lists(given[name])]
    groups = (
        [n for n, value in given.items() if isinstance(value, torch.Tensor) and n not in written],
        [name for name in numbers if isinstance(given[name], float)],
        [name for name in numbers if not isinstance(given[name], float)],
    )
    names = [name for group in (written, *groups) for name in group]
    found = (
        *([given[name] for name in group] for group in groups),
        names,
        [f"{name}={_text(value)}" for name, value in given.items() if name not in names],
    )
    return [one or None for one in found]


def _held(value: Any) -> Any:
    """As an operator holds it: of a number that depends on sizes, the one that it is, which torch
    then guards."""
    return float(value) if isinstance(value, torch.SymFloat) else value


def _in_lists(value: Any) -> bool:
    """Whether a factor is what the lists of numbers hold: whole numbers have a sign there, so that
    texts have those of 64 bits without one."""
    if isinstance(value, (torch.Tensor, bool)):
        return False
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _text(value: Any) -> str:
    """What :func:`_options` reads; int makes a number of a tracer's symbol."""
    return f"{int(value)}" if type(value) in (int, torch.SymInt) else repr(value)


def _refused(form: Form, call: Call) -> Any:
    """A call with what no graph holds breaks the graph where that may be."""
    if torch.compiler.is_dynamo_compiling():
        return _outside(form, call)
    raise ArgumentError(f"{form.name}: {_WHY}; call it outside of torch.export")


def _untraced(form: Form, call: Call) -> Any:
    return first(form, call)


_outside: Any = torch.compiler.disable(_untraced, reason=_WHY)  # type: ignore[no-untyped-call]


def _options(*rest: Any) -> dict[str, Any]:
    """The options of a form, of what :func:`_packed` gives."""
    *groups, names, texts = [given or () for given in rest]
    found = dict(zip(names, itertools.chain(*groups), strict=True))
    for text in texts:
        name, _, value = text.partition("=")
        found[name] = ast.literal_eval(value)
    return found


def _make(run: Callable[..., Any], A: Any, B: Any, out_dtype: Any, *rest: Any) -> list[Any]:
    A, B, _, _, options = with_scales(Call(A, B, None, None, _options(*rest)))
    found = run(A, B, out_dtype=out_dtype, **options)
    return list(found) if isinstance(found, tuple) else [found]


def _make_fake(form: Form, A: Any, B: Any, out_dtype: Any, *rest: Any) -> list[Any]:
    out, complete = form.completed(A, B, None, out_dtype, _options(*rest))
    _check_call(form, A, B, out, complete)
    return [out, *[complete[name] for name in form.written(complete)]]


def _run(run: Callable[..., Any], A: Any, B: Any, out: Any, *rest: Any) -> None:
    A, B, out, _, options = with_scales(Call(A, B, out, None, _options(*rest)))
    run(A, B, out=out, **options)


def _check(form: Form, A: Any, B: Any, out: Any, *rest: Any) -> None:
    _check_call(form, A, B, out, _options(*rest))


def _check_call(form: Form, A: Any, B: Any, out: Any, options: dict[str, Any]) -> None:
    """Raises what the call would, where sizes and numbers are known."""
    if are_known((A, B, out, *options.values())):
        A, B, out, _, options = with_scales(Call(A, B, out, None, options))
        form.fusion(A, B, out=out, **options)


for _form, _call in (*FORMS, *GROUPED_FORMS):
    _register(_form, _call)
serialize_all()
