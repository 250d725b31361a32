"""The scripts of ``examples/``, whose layers some suites time."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = str(Path(__file__).parents[1] / "examples")


@functools.cache
def load(name: str) -> Any:
    """One of them, as a module; they import each other by their bare names."""
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    return importlib.import_module(name)
