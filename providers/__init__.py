"""Sources of kernels: how each family describes itself, and is compiled and launched."""

from __future__ import annotations

import importlib
from typing import Any

_PROVIDERS = ("cutedsl", "reference", "torch")


def __getattr__(name: str) -> Any:
    if name in _PROVIDERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_PROVIDERS)
