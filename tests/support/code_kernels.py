"""Kernels with machine code that no compiler has to be waited for: a few lines of C.

Importable by name, so that other processes rebuild them. Each compilation adds a line to the file
that ``KERNEL_API_TEST_LOG`` names.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import kernel_api as ka
from kernel_api.artifact import Resources
from kernel_api.metadata import BLASDesignMetadata
from kernel_api.providers.cutedsl.linking import CuteCodeFiles
from kernel_api.space import Operands, Space

LOG = "KERNEL_API_TEST_LOG"

# The calling convention of TVM-FFI: handle, arguments, their number, result. Returns the number.
_SOURCE = """
#include <stdint.h>
typedef struct { int32_t type; int32_t zero; int64_t value; } Any;
int __tvm_ffi_kernel(void *handle, const Any *arguments, int32_t count, Any *result) {
  result->type = 1;
  result->value = count;
  return 0;
}
"""


@functools.lru_cache(maxsize=1)
def machine_code() -> bytes:
    """An object file with the function."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        command = ["cc", "-c", "-O1", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
        return path.read_bytes()


class CodeFiles(CuteCodeFiles):
    def object_code(self, compiled_obj: Any) -> bytes | None:
        return compiled_obj if isinstance(compiled_obj, bytes) else None


class CodeGemm(ka.Kernel):
    """Compiles to C; one kernel per tile."""

    arguments = ka.GemmArguments
    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    operands = (Operands(A="bf16", B="like A", out="bf16 | f32", accumulator="f32"),)
    space = Space(tile_shape=((128, 128, 32), (64, 64, 32), (32, 32, 32)))
    design = BLASDesignMetadata
    code_files = CodeFiles()
    seconds = 0.0

    def compile(self, args: Any, cc: Any = None) -> ka.CompiledArtifact:
        if path := os.environ.get(LOG):
            with open(path, "a") as log:
                log.write(f"{self.metadata.kernel_name} {os.getpid()}\n")
        time.sleep(self.seconds)
        self.before_code()
        return ka.CompiledArtifact(machine_code(), self)

    def before_code(self) -> None:
        """Where the classes below go wrong."""

    def read_resources(self, artifact: Any) -> Resources:
        return Resources(32, 1024, 0, 128)

    def _run(self, args: Any, artifact: Any, stream: Any, workspace: Any = None) -> None:
        artifact.compiled_obj(*args.tensors)


class SlowGemm(CodeGemm):
    space = Space(tile_shape=tuple((rows, 64, 32) for rows in (16, 32, 64, 128)))
    seconds = 0.3


class ExitingGemm(CodeGemm):
    def before_code(self) -> None:
        os._exit(7)


class SegfaultingGemm(CodeGemm):
    def before_code(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class EndlessGemm(CodeGemm):
    seconds = 1000.0


class RaisingGemm(CodeGemm):
    def before_code(self) -> None:
        raise ValueError("no registers are left")


def compilations() -> list[str]:
    """The lines of the log: kernel name and process."""
    path = Path(os.environ[LOG])
    return path.read_text().splitlines() if path.exists() else []
