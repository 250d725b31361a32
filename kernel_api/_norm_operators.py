"""The norms' one-call forms as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.rmsnorm(x, *, out, weight, ...)`` and so on. They write outputs
that are there; nobody comes here in eager mode."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernel_api._norm_ops import FORMS, NormForm, run
from kernel_api._transforms import check_traced

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

    matrices = ", ".join(map(described, form.matrices))
    others = ", ".join(map(described, form.defaults))
    return f"({matrices}, *, {others}) -> ()"


def _register(form: NormForm) -> None:
    _library.define(f"{form.name}{_schema(form)}")
    _library.impl(form.name, functools.partial(_run, form), "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_api::{form.name}", _check, lib=_library)


def traced(form: NormForm, complete: dict[str, Any]) -> None:
    """The call in a graph."""
    check_traced(**complete)
    matrices = [complete[name] for name in form.matrices]
    options = {name: complete.get(name, default) for name, default in form.defaults.items()}
    getattr(torch.ops.kernel_api, form.name)(*matrices, **options)


def _run(form: NormForm, *matrices: Any, **options: Any) -> None:
    run(form, {**dict(zip(form.matrices, matrices, strict=True)), **options})


def _check(*matrices: Any, **options: Any) -> None:
    """Outputs are there; what they hold is not looked at."""


for _form in FORMS:
    _register(_form)
