"""Who imports whom: implementations nothing of ours, kernel_api only itself, providers both."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("kernel_api", "providers", "implementations", "tests", "support", "examples", "benchmarks")
DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def files(folder):
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in found]


def imports(path):
    """Every module that a file imports, with whether that waits for a function to be called."""

    def visit(node, deferred):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, deferred) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = absolute(path, child.level, child.module)
                yield module, deferred
                yield from ((f"{module}.{alias.name}", deferred) for alias in child.names)
            yield from visit(child, deferred or isinstance(child, DEFERRED))

    return list(visit(ast.parse(path.read_text()), False))


def absolute(path, level, module):
    """The full name of what ``from ..module import`` names in this file."""
    if not level:
        return module
    folders = path.relative_to(ROOT).parts[:-1]
    package = folders if folders[0] == "kernel_api" else ("kernel_api", *folders)
    return ".".join((*package[: len(package) - level + 1], *filter(None, [module])))


def inside(module, package):
    return module == package or module.startswith(f"{package}.")


def is_ours(module):
    return any(inside(module, package) for package in OURS)


@pytest.mark.parametrize("path", files("implementations"))
def test_implementations_import_nothing_of_ours_but_each_other(path):
    foreign = [
        module
        for module, _ in imports(path)
        if is_ours(module)
        and module != "kernel_api"
        and not inside(module, "kernel_api.implementations")
    ]
    assert foreign == []


@pytest.mark.parametrize("path", files("kernel_api"))
def test_the_api_imports_providers_and_implementations_only_when_a_function_is_called(path):
    foreign = [
        module
        for module, deferred in imports(path)
        if inside(module, "kernel_api.implementations")
        or (inside(module, "kernel_api.providers") and not deferred)
        or (is_ours(module) and not inside(module, "kernel_api"))
    ]
    assert foreign == []


@pytest.mark.parametrize("path", files("providers"))
def test_providers_import_the_api_and_implementations_under_the_one_name(path):
    foreign = [m for m, _ in imports(path) if is_ours(m) and not inside(m, "kernel_api")]
    assert foreign == []


#: Modules that are code for kernels themselves, imported where implementations are.
LOWERING = (
    "kernel_api.providers.cutedsl.epilogue.lower",
    "kernel_api.providers.cutedsl.sdpa.scores",
)


@pytest.mark.parametrize("path", files("providers"))
def test_providers_import_the_dsl_and_implementations_only_when_a_function_is_called(path):
    if absolute(path, 1, path.stem) in LOWERING:
        return
    early = [
        module
        for module, deferred in imports(path)
        if not deferred
        and any(
            inside(module, p) for p in ("cutlass", "cuda", "kernel_api.implementations", *LOWERING)
        )
    ]
    assert early == []


@pytest.mark.parametrize(
    "path", [*files("kernel_api"), *files("providers"), *files("implementations")]
)
def test_nothing_private_of_a_module_of_ours_is_imported_by_another(path):
    private = [
        module
        for module, _ in imports(path)
        if inside(module, "kernel_api") and is_private(module) and not is_module(module)
    ]
    assert private == []


def is_private(module):
    name = module.rpartition(".")[2]
    return name.startswith("_") and not name.startswith("__")


def is_module(module):
    place = ROOT.joinpath(*module.split("."))
    return place.with_suffix(".py").exists() or place.is_dir()


def test_a_wheel_has_every_package():
    project = (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    listed = {line.strip().strip('",') for line in project.splitlines() if line.strip()}
    found = {
        ".".join(("kernel_api",) * (folder != "kernel_api") + path.parent.relative_to(ROOT).parts)
        for folder in ("kernel_api", "providers", "implementations")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == listed
