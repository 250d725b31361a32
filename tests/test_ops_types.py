"""What checkers of types know of the forms, ``ops.pyi``, is what the forms are."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import kernel_api as ka

_STUB = ast.parse(Path(ka.ops.__file__).with_suffix(".pyi").read_text())
_STATED = {one.name: one for one in _STUB.body if isinstance(one, ast.FunctionDef)}
#: Forms that are made of fusions; all others are functions that checkers can read themselves.
_MADE = [name for name in ka.ops.__all__ if hasattr(getattr(ka.ops, name), "__wrapped__")]


def _signature_of(stated: ast.FunctionDef) -> inspect.Signature:
    """With annotations as they are written; that of what comes back is left out."""
    given = stated.args
    positional = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    own, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [(own, *one) for one in zip(given.args, positional, strict=True)] + [
        (named, *one) for one in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return inspect.Signature(
        [
            inspect.Parameter(
                one.arg,
                kind,
                default=inspect.Parameter.empty if value is None else ast.literal_eval(value),
                annotation=ast.unparse(one.annotation),
            )
            for kind, one, value in parameters
        ]
    )


@pytest.mark.parametrize("name", _MADE)
def test_the_types_of_a_form_are_its_signature(name):
    found = inspect.signature(getattr(ka.ops, name)).replace(
        return_annotation=inspect.Signature.empty
    )
    assert _signature_of(_STATED[name]) == found, f"kernel_api/ops.pyi: expected def {name}{found}"


def test_the_types_are_of_every_name_and_of_no_other():
    imported = {
        one.asname: f"{part.module}.{one.name}"
        for part in _STUB.body
        if isinstance(part, ast.ImportFrom)
        for one in part.names
        if one.asname
    }
    internal = {"FORMS", "GROUPED_FORMS"}
    assert set(_STATED) == {*_MADE, "register_operators"}
    assert {*_STATED, *imported} - internal == set(ka.ops.__all__)
    for name, where in imported.items():
        module, _, attribute = where.rpartition(".")
        assert getattr(__import__(module, fromlist=[attribute]), attribute) is getattr(ka.ops, name)
