"""The names that ``import kernel_api`` offers."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import kernel_api as ka
from kernel_api.status import Status


@pytest.mark.parametrize("name", ka.__all__)
def test_every_public_name_is_there_and_listed(name):
    assert getattr(ka, name) is not None
    assert name in dir(ka)


@pytest.mark.parametrize("name", sorted(set(dir(ka)) - set(ka.__all__)))
def test_every_public_module_is_there(name):
    assert getattr(ka, name).__name__ == f"kernel_api.{name}"


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'kernel_api' has no attribute 'no_such_name'"):
        _ = ka.no_such_name


@pytest.mark.parametrize("name", ["get_kernels", "explain", "verify"])
def test_a_function_is_not_hidden_by_a_module_of_its_name_that_was_imported_first(name):
    code = (
        "import importlib, importlib.util\n"
        f"if importlib.util.find_spec('kernel_api.{name}'):\n"
        f"    importlib.import_module('kernel_api.{name}')\n"
        "import kernel_api as ka\n"
        f"assert callable(ka.{name}), ka.{name}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_error_is_in_the_tree_that_the_module_documents():
    errors = [e for e in vars(ka.errors).values() if isinstance(e, type)]
    for error in errors:
        assert error.__name__ in ka.errors.__doc__
        assert issubclass(error, (ka.errors.KernelApiError, UserWarning))


@pytest.mark.parametrize(
    ("error", "built_in"),
    [
        ("ArgumentError", ValueError),
        ("RegistrationError", TypeError),
        ("NoKernelError", LookupError),
        ("UnsupportedError", ValueError),
        ("CompileError", RuntimeError),
        ("ArtifactError", ValueError),
        ("DeviceError", RuntimeError),
        ("CaptureError", RuntimeError),
        ("WorkspaceError", ValueError),
        ("BenchError", Exception),
        ("GradientError", RuntimeError),
        ("PluginWarning", UserWarning),
    ],
)
def test_errors_are_caught_by_the_built_in_ones_too(error, built_in):
    assert issubclass(getattr(ka.errors, error), built_in)


def errors_with_more_than_a_text():
    explanation = ka.explain(ka.GemmArguments(*(torch.empty(4, 4) for _ in range(3))))
    return [
        ka.errors.NoKernelError(explanation),
        ka.errors.NoKernelError(explanation, "none of 3 passed"),
        ka.errors.UnsupportedError("any", Status.fail("A is int8", rule="types", operand="A")),
        ka.errors.GraphNotSupportedError("no plan", {"one": "of this", "other": "of that"}),
    ]


def _ours(error):
    return [base for base in error.__mro__ if base.__module__ == error.__module__]


@pytest.mark.parametrize("again", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_errors_reach_other_processes_as_they_are(again):
    texts = [
        one("why")
        for one in vars(ka.errors).values()
        if isinstance(one, type) and not any("__init__" in vars(base) for base in _ours(one))
    ]
    assert len(texts) > 10
    for error in (*texts, *errors_with_more_than_a_text()):
        found = again(error)
        assert type(found) is type(error) and str(found) == str(error)
        assert vars(found).keys() == vars(error).keys()
        assert all(str(found.__dict__[name]) == str(one) for name, one in vars(error).items())
