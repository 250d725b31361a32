"""The document "Adding a kernel": its code must run with nothing but the package renamed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENT = _ROOT.parent / "shared" / "seeds" / "adding-a-kernel.notebook.py"
_COPY = _ROOT / "tests" / "data" / "adding_a_kernel.py"


def text() -> str:
    """The document with the package renamed; the copy of its code where it is not at hand."""
    found = _DOCUMENT if _DOCUMENT.exists() else _COPY
    return found.read_text().replace("cutlass_api", "kernel_api")


def code_lines(source: str) -> list[str]:
    """The lines that are code, without the text between the cells."""
    return [line for line in source.splitlines() if line.strip() and not line.startswith("#")]


def copied_text() -> str:
    return _COPY.read_text()


def run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a source text as a script of its own."""
    path = folder / "adding_a_kernel.py"
    path.write_text(source)
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        timeout=280,
    )
