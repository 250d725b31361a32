"""What makes the forms of :mod:`kernel_api.ops` of the fusions of products."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from kernel_api._forms import Form, Fusion, with_own_code
from kernel_api._grouped_forms import GroupedForm

#: Every form of a fusion, and the function that is it.
FORMS: list[tuple[Form, Callable[..., Any]]] = []

#: The same of products of groups.
GROUPED_FORMS: list[tuple[Form, Callable[..., Any]]] = []


def one_call(fusion: Fusion, *optional: str, **how: Any) -> Callable[..., Any]:
    """The form of a fusion that allocates its outputs and runs.

    Args:
        optional: Outputs that are allocated if they are True.
        how: Further arguments of :class:`~kernel_api._forms.Form`.
    """
    form = Form(fusion, optional, **how)
    call = _named(form, _caller(form))
    FORMS.append((form, call))
    return call


def one_call_of_groups(fusion: Fusion, *optional: str, **how: Any) -> Callable[..., Any]:
    """The same of a fusion of products of groups."""
    form = GroupedForm(fusion, optional, **how)
    run = _caller(form)

    def call(A: Any, B: Any, offsets: Any, **options: Any) -> Any:
        return run(A, B, offsets=offsets, **options)

    call = _named(form, with_own_code(call))
    GROUPED_FORMS.append((form, call))
    return call


def _caller(form: Form) -> Callable[..., Any]:
    def call(A: Any, B: Any, *, out: Any = None, out_dtype: Any = None, **options: Any) -> Any:
        launches = _launches or _loaded()
        if launches.is_read_by_dynamo():
            return _traced(form, A, B, out, out_dtype, options)
        found = launches.repeated(form, A, B, out, out_dtype, options)
        if found is not launches.NEW:
            return found
        return launches.first(form, launches.Call(A, B, out, out_dtype, options))

    return with_own_code(call)


def _named(form: Form, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which looks like the fusion."""
    functools.update_wrapper(call, form.fusion)
    call.__module__ = "kernel_api.ops"
    call.__signature__ = form.signature  # type: ignore[attr-defined]
    return call


# Modules that need torch -----------------------------------------------------------------

_launches: Any = None


def _loaded() -> Any:
    """Launches need torch, which importing this module does not load."""
    global _launches
    from kernel_api import _launches as found

    _launches = found
    return found


if "torch" in sys.modules:  # a tracer that came before the first call would see it change
    _loaded()


def _traced(*call: Any) -> Any:
    from kernel_api import _operators

    return _operators.traced(*call)
