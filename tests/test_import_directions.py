"""Who imports whom: implementations nothing of ours, kernel_api only itself, providers both."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("kernel_api", "providers", "implementations", "tests", "support", "examples", "benchmarks")
DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def files(folder):
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


@cache
def imports(path):
    """Every module that a file imports, with whether that waits for a function to be called; what
    only checkers of types read waits for ever."""

    def visit(node, deferred):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, deferred) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = absolute(path, child.level, child.module)
                yield module, deferred
                yield from ((f"{module}.{alias.name}", deferred) for alias in child.names)
            later = isinstance(child, DEFERRED) or is_for_checkers(child)
            yield from visit(child, deferred or later)

    return list(visit(ast.parse(path.read_text()), False))


def is_for_checkers(node):
    """Whether it is ``if TYPE_CHECKING``, without anything else."""
    named = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and not node.orelse
    return named and node.test.id == "TYPE_CHECKING"


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


def offenders(folders, is_wrong):
    """What files import that ``is_wrong(module, deferred)``, by file."""
    found = {
        str(path.relative_to(ROOT)): [m for m, deferred in imports(path) if is_wrong(m, deferred)]
        for folder in folders
        for path in files(folder)
    }
    return {path: modules for path, modules in found.items() if modules}


def test_implementations_import_nothing_of_ours_but_each_other():
    def is_foreign(module, deferred):
        ours = module == "kernel_api" or inside(module, "kernel_api.implementations")
        return is_ours(module) and not ours

    assert offenders(["implementations"], is_foreign) == {}


def test_the_api_imports_providers_and_implementations_only_when_a_function_is_called():
    def is_foreign(module, deferred):
        return (
            inside(module, "kernel_api.implementations")
            or (inside(module, "kernel_api.providers") and not deferred)
            or (is_ours(module) and not inside(module, "kernel_api"))
        )

    assert offenders(["kernel_api"], is_foreign) == {}


def test_providers_import_the_api_and_implementations_under_the_one_name():
    def is_foreign(module, deferred):
        return is_ours(module) and not inside(module, "kernel_api")

    assert offenders(["providers"], is_foreign) == {}


#: Modules that are code for kernels themselves, imported where implementations are.
LOWERING = (
    "kernel_api.providers.cutedsl.epilogue.lower",
    "kernel_api.providers.cutedsl.sdpa.scores",
)


def test_providers_import_the_dsl_and_implementations_only_when_a_function_is_called():
    of_kernels = ("cutlass", "cuda", "kernel_api.implementations", *LOWERING)

    def is_early(module, deferred):
        return not deferred and any(inside(module, package) for package in of_kernels)

    early = offenders(["providers"], is_early)
    assert {path: early[path] for path in early if not is_lowering(ROOT / path)} == {}


def is_lowering(path):
    return absolute(path, 1, path.stem) in LOWERING


def test_nothing_private_of_a_module_of_ours_is_imported_by_another():
    def is_of_another(module, deferred):
        return inside(module, "kernel_api") and is_private(module) and not is_module(module)

    assert offenders(["kernel_api", "providers", "implementations"], is_of_another) == {}


def is_private(module):
    name = module.rpartition(".")[2]
    return name.startswith("_") and not name.startswith("__")


def is_module(module):
    place = ROOT.joinpath(*module.split("."))
    return place.with_suffix(".py").exists() or place.is_dir()


def test_a_wheel_has_every_package_and_every_folder_of_data():
    project = (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    listed = {line.strip().strip('",') for line in project.splitlines() if line.strip()}
    found = {
        ".".join(("kernel_api",) * (folder != "kernel_api") + path.parent.relative_to(ROOT).parts)
        for folder in ("kernel_api", "providers", "implementations")
        for pattern in ("__init__.py", "tables/*.json")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert found == listed


def test_the_archive_of_the_sources_has_what_tests_need_and_documents_are():
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    folders = {
        path.name for path in ROOT.iterdir() if any(path.glob("*.py")) or path.name == "docs"
    }
    packages = {"implementations", "kernel_api", "providers"}
    assert folders - packages <= {*manifest}
    assert {"CONTRIBUTING.md", "Makefile", ".ci/run"} <= {*manifest}
