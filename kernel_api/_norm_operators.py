"""The norms' one-call forms as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.rmsnorm(x, out, weight, ...)`` takes the element types of the
outputs that are asked for, allocates these and returns them; ``rmsnorm.out`` writes outputs that
are there. Nobody comes here in eager mode.

Everything is passed by place: a keyword ``out`` with gaps between its rows would break the graph of
torch.compile, whatever the operator is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernel_api import _norm_ops
from kernel_api._norm_ops import FORMS, NormForm, run_into, tensor
from kernel_api._numbers import known_number, known_or_wide
from kernel_api._results import serialize_all
from kernel_api._torch_operators import define, define_without_gradient
from kernel_api._transforms import are_known, check_traced
from kernel_api._without_gradient import beside_outputs

_NUMBERS = {"eps": "float", "rows_per_block": "int?"}
#: Programs that were saved before have none.
_ABSENT_BEFORE = ("residual", "residual_out", "dresidual")


def _register(form: NormForm) -> None:
    make = functools.partial(_make, form, getattr(_norm_ops, form.name))
    fake = functools.partial(_make_fake, form)
    types = dict.fromkeys(form.written, "ScalarType?")
    types[form.written[0]] = "ScalarType"
    define_without_gradient(form.name, f"({_described(form, types)}) -> Tensor[]", make, fake)
    # Tensors that are written are named by letters.
    targets = {n: f"Tensor({a}!)?" for n, a in zip(form.written, "abcdefgh", strict=False)}
    targets[form.written[0]] = "Tensor(a!)"
    run, check = functools.partial(_run, form), functools.partial(_check, form)
    define(f"{form.name}.out", f"({_described(form, targets)}) -> ()", run, check)


def _described(form: NormForm, written: dict[str, str]) -> str:
    required = dict.fromkeys(form.matrices, "Tensor")
    known = {**required, **_NUMBERS, **written}
    described = []
    for name in _names(form):
        absent = "=None" if name in _ABSENT_BEFORE else ""
        described.append(f"{known.get(name, 'Tensor?')} {name}{absent}")
    return ", ".join(described)


def _names(form: NormForm) -> tuple[str, ...]:
    """What an operator takes, in order."""
    return (*form.matrices, *form.defaults)


def traced(form: NormForm, options: dict[str, Any]) -> Any:
    """The call in a graph: one operator."""
    check_traced(**options)
    operator = getattr(torch.ops.kernel_api, form.name)
    elements = form.elements(tensor(options["x"]), options)
    absent = [n for n in form.written if options.get(n) is None or options.get(n) is False]
    if all(name in elements or name in absent for name in form.written):
        found = operator.default(*_packed(form, {**options, **dict.fromkeys(absent), **elements}))
        return form.results(dict(zip(elements, found, strict=True)))
    complete = form.completed(options)
    operator.out(*_packed(form, complete))
    return beside_outputs(form.name, form.results(complete), [*options.values()])


def _packed(form: NormForm, options: dict[str, Any]) -> list[Any]:
    given = {**form.defaults, **options}
    for name, read in (("eps", known_or_wide), ("rows_per_block", known_number)):
        if name in given:
            given[name] = read(given[name])
    return [given[name] for name in _names(form)]


def _make(form: NormForm, call: Callable[..., Any], *given: Any) -> list[Any]:
    """By the form, which remembers calls."""
    options = _options(form, given)
    matrices = [options.pop(name) for name in form.matrices]
    found = call(*matrices, **options)
    return list(found) if isinstance(found, tuple) else [found]


def _options(form: NormForm, given: tuple[Any, ...]) -> dict[str, Any]:
    """What an operator gets, by name; outputs that are None are not wanted."""
    named = zip(_names(form), given, strict=False)  # torch leaves out what is absent at the end
    present = {name: one for name, one in named if one is not None}
    return {**dict.fromkeys(form.written, False), **present}


def _make_fake(form: NormForm, *given: Any) -> list[Any]:
    complete = form.completed({**dict.fromkeys(form.defaults), **_options(form, given)})
    _check_call(form, complete)
    return [complete[name] for name in form.written if complete[name] is not None]


def _run(form: NormForm, *given: Any) -> None:
    run_into(form, dict(zip(_names(form), given, strict=False)))


def _check(form: NormForm, *given: Any) -> None:
    _check_call(form, dict(zip(_names(form), given, strict=False)))


def _check_call(form: NormForm, complete: dict[str, Any]) -> None:
    """Raises what the call would, where sizes and numbers are known."""
    if are_known(complete.values()):
        form.fusion(**complete)


for _form in FORMS:
    _register(_form)
serialize_all()
