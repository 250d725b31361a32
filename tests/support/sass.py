"""Machine code as text."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import kernel_api as ka


def disassembler() -> str:
    """The nvdisasm of the wheel nvidia-cuda-nvdisasm, or the toolkit's."""
    site = Path(sysconfig.get_path("purelib"))
    found = sorted(site.glob("nvidia/*/bin/nvdisasm"))
    path = str(found[-1]) if found else shutil.which("nvdisasm")
    if path is None:
        raise FileNotFoundError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    return path


def sass(artifact: ka.CompiledArtifact) -> str:
    """The instructions of a compiled CuTe DSL kernel."""
    from kernel_api.providers.cutedsl.machine_code import cubin

    code = cubin(artifact.compiled_obj)
    assert code is not None, "no machine code in the artifact"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run(
            [disassembler(), "-c", file.name], capture_output=True, text=True, check=True
        )
    return done.stdout
