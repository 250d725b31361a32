"""What every test shares: which tests can run here, and how Hypothesis draws."""

from __future__ import annotations

import gc
import os
import pwd
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Processes that test side by side share the cores: threads that wait for each other by trying again
# would take them from the others. Numpy and torch look at these when they are loaded.
if _processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    _threads = max(1, len(os.sched_getaffinity(0)) // int(_processes))
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, str(_threads))

import torch

# "python -m pytest" puts the repository first on the path, where kernel_api is a folder without its
# providers: the package is what pyproject.toml's package-dir, or a tree of links, makes of it.
_ROOT = Path(__file__).parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]

# Tests say themselves what architecture and which providers they are about.
for _name in (
    "KERNEL_API_ARCH",
    "KERNEL_API_BUNDLE",
    "KERNEL_API_COMPILE_WORKERS",
    "KERNEL_API_DISABLE_CACHE",
    "KERNEL_API_MULTIPROCESSORS",
    "KERNEL_API_PROVIDERS",
    "KERNEL_API_RECORD",
    "KERNEL_API_REST",
):
    os.environ.pop(_name, None)

# What is compiled is kept as long as the tests run, in a directory of each process's own.
_CACHE = tempfile.TemporaryDirectory(prefix="kernel_api-tests-")
os.environ["KERNEL_API_CACHE_DIR"] = os.path.join(_CACHE.name, "cache")

from support.registry import Registry, restored_registry  # noqa: E402

from kernel_api import devices  # noqa: E402

try:
    from hypothesis import settings
except ImportError:  # the tests in tests/gpu do without
    settings = None

if settings is not None:
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are deselected where there is no GPU."""
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _gpu_is_for_tests_of_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """What tests without a marker say of machines without a GPU holds where there is one, too."""
    has_marker = map(request.node.get_closest_marker, ("gpu", "gpu_or_cpu"))
    if not torch.cuda.is_available() or any(has_marker):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        devices.cuda_available.cache_clear()
        yield
    devices.cuda_available.cache_clear()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiling makes so many objects that Python looks for garbage often: less often now, and not
    among these."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels; its directory is not made yet."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(directory))
    return directory


@pytest.fixture(autouse=True)
def _code_to_look_at_is_not_kept(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To link a library of what is compiled and to keep it takes a tenth of the time."""
    if request.node.get_closest_marker("compile") and "cache_directory" not in request.fixturenames:
        monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder, as in containers: nothing says where a cache may be."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "KERNEL_API_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.fixture
def registry() -> Iterator[Registry]:
    """Throwaway providers and kernel classes; the registry is as before when the test ends."""
    with restored_registry() as registry:
        yield registry


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The problems of one-call forms that are run the long way: they look like none before."""
    from kernel_api import _launches

    problems: list[object] = []
    run_best = _launches._run_best

    def noted(args: object) -> object:
        problems.append(args)
        return run_best(args)

    monkeypatch.setattr(_launches, "_run_best", noted)
    return problems
