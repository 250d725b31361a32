"""The names that ``import kernel_api`` offers."""

import copy
import inspect
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


FUNCTIONS = [
    pytest.param(function, id=f"{module.__name__}.{name}")
    for module in (ka.fusions, ka.ops, ka.nn)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name)) and name != "register_operators"
]


def test_modules_of_functions_list_these_and_nothing_else():
    for module in (ka.fusions, ka.ops, ka.nn):
        assert dir(module) == sorted(module.__all__)
    forms = {name for name in dir(ka.fusions) if name.islower()}
    assert {*dir(ka.ops)} == {*forms, "GroupedRows", "Quantized", "register_operators"}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_says_all_that_it_takes_and_names_itself_where_it_takes_none_of_a_name(function):
    taken = inspect.signature(function).parameters.values()
    assert not any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in taken)
    given = {one.name: torch.empty(32, 64) for one in taken if one.default is one.empty}
    named = {one.name for one in taken if one.kind is one.KEYWORD_ONLY}
    placed = [one for name, one in given.items() if name not in named]
    options = {name: one for name, one in given.items() if name in named}
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\)") as caught:
        function(*placed, **options, colour=3)
    assert "unexpected keyword argument 'colour'" in str(caught.value)


def test_functions_that_fix_an_option_of_others_have_these_others():
    def options(function):
        return {*inspect.signature(function).parameters}

    glu, dglu = options(ka.fusions.gemm_glu), options(ka.fusions.gemm_dglu)
    for name in ("gemm_swiglu", "gemm_geglu", "gemm_reglu"):
        assert options(getattr(ka.fusions, name)) == glu - {"kind"}
    assert options(ka.fusions.gemm_dswiglu) == dglu - {"kind"}
    assert options(ka.nn.linear_swiglu) == options(ka.nn.linear_glu) - {"kind"}
    with pytest.raises(TypeError, match=r"gemm_swiglu\(\) got an .* argument 'kind'"):
        ka.ops.gemm_swiglu(torch.empty(32, 64), torch.empty(64, 64), kind="geglu")


@pytest.mark.parametrize("function", [ka.ops.sdpa, ka.nn.attention], ids=["sdpa", "attention"])
def test_names_of_torch_are_answered_with_what_to_write(function):
    Q = torch.empty(1, 2, 8, 16)
    message = r"unexpected keyword argument 'is_causal'; pass mask=ka\.masks\.Causal\(\)"
    with pytest.raises(TypeError, match=message):
        function(Q, Q, Q, is_causal=True)
