"""Right kernels on torch whose processes end: because of them, or of somebody else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from support.hostile_kernels import LOG, TorchGemm


class PatientGemm(TorchGemm):
    """Long enough at it that somebody else can do something."""

    seconds = 0.05

    def compute(self, A: Any, B: Any, out: Any) -> None:
        time.sleep(self.seconds)
        super().compute(A, B, out)


class ImpatientGemm(PatientGemm):
    """Some of many problems are done when somebody else does something."""

    seconds = 0.002


class KilledGemm(TorchGemm):
    """What the system does to those that take all memory."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LitteringGemm(TorchGemm):
    """Dies, and leaves a process behind."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        subprocess.Popen(["sleep", "1000"])
        os._exit(7)


class OnceGemm(TorchGemm):
    """Right in the first process that it meets; the end of every other one."""

    def compute(self, A: Any, B: Any, out: Any) -> None:
        first = Path(f"{os.environ[LOG]}.first")
        if not first.exists():
            first.write_text(f"{os.getpid()}")
        if first.read_text() != f"{os.getpid()}":
            os._exit(7)
        torch.mm(A, B, out=out)
