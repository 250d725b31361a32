"""The norms' one-call forms as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.rmsnorm(x, out, weight, ...)`` and so on. They write outputs
that are there; nobody comes here in eager mode.

Everything is passed by place: a keyword ``out`` with gaps between its rows would break the graph of
torch.compile, whatever the operator is."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernel_api._norm_ops import FORMS, NormForm, run
from kernel_api._numbers import known_number, known_or_wide
from kernel_api._results import serialize_all
from kernel_api._transforms import are_known, check_traced

_NUMBERS = {"eps": "float", "rows_per_block": "int?"}

_library: Any = torch.library.Library("kernel_api", "FRAGMENT")  # type: ignore[no-untyped-call]


def _schema(form: NormForm) -> str:
    """Tensors that are written are named by letters."""
    letters = dict(zip(form.written, "abcdefgh", strict=False))
    required = (*form.matrices, form.written[0])

    def described(name: str) -> str:
        if name in _NUMBERS:
            return f"{_NUMBERS[name]} {name}"
        written = f"({letters[name]}!)" if name in letters else ""
        return f"Tensor{written}{'' if name in required else '?'} {name}"

    return f"({', '.join(map(described, _names(form)))}) -> ()"


def _names(form: NormForm) -> tuple[str, ...]:
    """What an operator takes, in order."""
    return (*form.matrices, *form.defaults)


def _register(form: NormForm) -> None:
    _library.define(f"{form.name}{_schema(form)}")
    _library.impl(form.name, functools.partial(_run, form), "CompositeExplicitAutograd")
    check = functools.partial(_check, form)
    torch.library.register_fake(f"kernel_api::{form.name}", check, lib=_library)


def traced(form: NormForm, complete: dict[str, Any]) -> None:
    """The call in a graph."""
    check_traced(**complete)
    given = {**form.defaults, **complete}
    for name, read in (("eps", known_or_wide), ("rows_per_block", known_number)):
        if name in given:
            given[name] = read(given[name])
    getattr(torch.ops.kernel_api, form.name)(*[given[name] for name in _names(form)])


def _run(form: NormForm, *given: Any) -> None:
    run(form, dict(zip(_names(form), given, strict=True)))


def _check(form: NormForm, *given: Any) -> None:
    """Raises what the call would, where sizes and numbers are known."""
    if are_known(given):
        form.fusion(**dict(zip(_names(form), given, strict=True)))


for _form in FORMS:
    _register(_form)
serialize_all()
