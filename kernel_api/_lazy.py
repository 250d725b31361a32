"""Modules and names of packages that are loaded on first use."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any


def attribute(package: str, name: str, home_of: Mapping[str, str]) -> Any:
    """What a package calls so, which is there from then on; for its ``__getattr__``.

    Args:
        home_of: Names, and the modules of kernel_api that have them.
    """
    if name not in home_of:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kernel_api.{home_of[name]}"), name)
    setattr(sys.modules[package], name, value)
    return value


@functools.cache
def module(name: str) -> Any:
    """One of kernel_api, for what is called often: an import statement takes five times as long."""
    return importlib.import_module(f"kernel_api.{name}")
