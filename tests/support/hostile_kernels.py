"""Kernels on torch that do to the process, the GPU and the data what kernels should not.

Importable by name, so that other processes rebuild them. Each run adds a line to the file that
``KERNEL_API_TEST_LOG`` names. Wherever this is imported, the tuner's clock for the CPU is one that
only these kernels move: which is the fastest does not hang on what else the machine does.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

import kernel_api as ka
from kernel_api.metadata import BLASDesignMetadata, DesignMetadata
from kernel_api.space import Operands, Space
from kernel_api.tuning._timing import CpuTimer

LOG = "KERNEL_API_TEST_LOG"


class Clock:
    """Seconds that kernels said they took, since the process began."""

    seconds: ClassVar[float] = 0.0

    @classmethod
    def now(cls) -> float:
        return cls.seconds


CpuTimer.now = Clock.now


class TorchGemm(ka.Kernel):
    """A right one. It takes as long as ``seconds`` say, by the clock above."""

    arguments = ka.GemmArguments
    devices = ("cpu", "cuda")
    operands = (Operands(A="f32", B="f32", out="f32", accumulator="f32", majors="strided"),)
    space = Space()
    design = DesignMetadata
    seconds: ClassVar[float] = 3e-4

    def _run(self, args: Any, artifact: Any, stream: Any, workspace: Any = None) -> None:
        self._work(*args.tensors)

    def _launcher(self, args: Any, artifact: Any) -> Any:
        def launch(*tensors: Any, stream: Any = None) -> None:
            self._work(*tensors)

        return launch

    def _work(self, A: Any, B: Any, out: Any) -> None:
        if path := os.environ.get(LOG):
            with open(path, "a") as log:
                log.write(f"{type(self).__name__}\n")
        Clock.seconds += self.seconds
        self.compute(A, B, out)

    def compute(self, A: Any, B: Any, out: Any) -> None:
        torch.mm(A, B, out=out)


class FastGemm(TorchGemm):
    """The best of the right ones."""


class SlowGemm(TorchGemm):
    seconds = 0.002


class SlowerGemm(TorchGemm):
    seconds = 0.004


class DawdlingGemm(TorchGemm):
    """Ten designs: the first takes 9 milliseconds longer than it has to, the last none."""

    space = Space(tile_shape=tuple((milliseconds, 1, 1) for milliseconds in range(9, -1, -1)))
    design = BLASDesignMetadata

    def compute(self, A: Any, B: Any, out: Any) -> None:
        Clock.seconds += 1e-3 * self.metadata.design.tile_shape[0]  # type: ignore[union-attr]
        torch.mm(A, B, out=out)


class WrongGemm(TorchGemm):
    def compute(self, A: Any, B: Any, out: Any) -> None:
        torch.mm(A, B, out=out)
        out.mul_(1.01)


class PartialGemm(TorchGemm):
    """Leaves the last row as it was."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        torch.mm(A[:-1], B, out=out[:-1])


class StaleGemm(TorchGemm):
    """Writes once: what stands there looks right to whoever does not look twice."""

    _has_run = False

    def compute(self, A: Any, B: Any, out: Any) -> None:
        if not StaleGemm._has_run:
            torch.mm(A, B, out=out)
        StaleGemm._has_run = True


class InPlaceGemm(TorchGemm):
    """Right, but its input is another one afterwards."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        torch.mm(A, B, out=out)
        A.zero_()


class RaisingGemm(TorchGemm):
    def compute(self, A: Any, B: Any, out: Any) -> None:
        raise ValueError("the grid has no blocks")


class SpoilingGemm(TorchGemm):
    """Its input is another one when it raises."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        A.zero_()
        raise ValueError("too late")


class SpoilingLaterGemm(TorchGemm):
    """Right while it is checked, then its input is another one."""

    _runs = 0

    def compute(self, A: Any, B: Any, out: Any) -> None:
        SpoilingLaterGemm._runs += 1
        torch.mm(A, B, out=out)
        if SpoilingLaterGemm._runs > 2:
            A.zero_()


class LateGemm(TorchGemm):
    """Right while it is checked, then not."""

    _runs = 0

    def compute(self, A: Any, B: Any, out: Any) -> None:
        LateGemm._runs += 1
        torch.mm(A, B, out=out)
        if LateGemm._runs > 3:
            out.zero_()


class EndlessGemm(TorchGemm):
    def compute(self, A: Any, B: Any, out: Any) -> None:
        if A.is_cuda:
            torch.cuda._sleep(1 << 62)
        while not A.is_cuda:
            time.sleep(1)


class EndlessLaterGemm(TorchGemm):
    """Hangs when it is timed, not when it is checked."""

    _runs = 0

    def compute(self, A: Any, B: Any, out: Any) -> None:
        EndlessLaterGemm._runs += 1
        torch.mm(A, B, out=out)
        if EndlessLaterGemm._runs > 2:
            EndlessGemm.compute(self, A, B, out)  # type: ignore[arg-type]


class WildGemm(TorchGemm):
    """Reads where nothing is: on the CPU that ends the process, on a GPU its context."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        if not A.is_cuda:
            ctypes.string_at(8)
        out.copy_(torch.as_tensor(_Nowhere(), device=A.device)[0, 0])


class _Nowhere:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "shape": (1, 1),
        "typestr": "<f4",
        "data": (0x7000_0000_0000, False),
        "version": 3,
    }


class HungryGemm(TorchGemm):
    """Wants more memory than there is."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        torch.empty(1 << 50, dtype=torch.uint8, device=A.device).zero_()


class WorkspaceGemm(TorchGemm):
    """Asks for a terabyte and more."""

    def get_workspace_size(self, args: Any) -> int:
        return 1 << 50


class ExitingGemm(TorchGemm):
    def compute(self, A: Any, B: Any, out: Any) -> None:
        os._exit(7)


class UncompilableGemm(TorchGemm):
    def compile(self, args: Any, cc: Any = None) -> Any:
        raise ka.errors.CompileError("no registers are left")


#: What becomes of each, and words of its message.
FATES: dict[type[TorchGemm], tuple[str, str]] = {
    WrongGemm: ("WRONG", "of what is allowed"),
    PartialGemm: ("WRONG", "not finite"),
    StaleGemm: ("WRONG", "not finite"),
    InPlaceGemm: ("WRONG", "the kernel changed its input A"),
    RaisingGemm: ("RUNTIME_ERROR", "ValueError: the grid has no blocks"),
    LateGemm: ("WRONG", ""),
    EndlessGemm: ("TIMEOUT", "it took more than"),
    EndlessLaterGemm: ("TIMEOUT", "it took more than"),
    WildGemm: ("RUNTIME_ERROR", ""),
    HungryGemm: ("OOM", ""),
    WorkspaceGemm: ("OOM", ""),
    ExitingGemm: ("RUNTIME_ERROR", "its process died (with exit code 7)"),
    UncompilableGemm: ("COMPILE_ERROR", "no registers are left"),
}


def runs() -> list[str]:
    """The lines of the log: which kernel ran, as often as it did."""
    path = Path(os.environ[LOG])
    return path.read_text().splitlines() if path.exists() else []
