"""GEMM kernels in the order of NVIDIA's nvMatmulHeuristics: a second opinion on our own candidates.

    pip install 'kernel-api[heuristics]'
    kernels = ka.tuning.heuristics.ranked(ka.get_kernels(args), args)
    ka.autotune(args, order=ka.tuning.heuristics.ranked)  # kernel-api tune --order heuristics

It neither makes kernels nor leaves any out, and nothing asks it by itself. The library can crash,
so that it runs in a process of its own; its licence is proprietary.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_api import _log, devices
from kernel_api.arguments import Arguments, GemmArguments
from kernel_api.kernel import Kernel
from kernel_api.metadata import BLASDesignMetadata, GemmOperandsMetadata
from kernel_api.tuning import _heuristics_process

logger = _log.logger(__name__)

_TIMEOUT_SECONDS = 30.0

#: So many configurations may end the process until the rest is not asked for any more.
_CRASHES = 4

#: Their numbers of GPUs, by what the driver's names have in them; the first that fits.
_GPUS = {
    "GB200": 10001,
    "GB300": 10300,
    "B200": 10000,
    "H200": 9003,
    "H100 NVL": 9002,
    "H100 PCIe": 9001,
    "H100": 9000,
    "H20": 9004,
    "A100-PCIE": 8001,
    "A100": 8000,
}

_LETTERS = {
    "float16": "H",
    "bfloat16": "T",
    "float32": "S",
    "float8_e4m3fn": "Q",
    "float8_e5m2": "R",
}


def is_installed() -> bool:
    """Whether the extra ``heuristics`` is."""
    return importlib.util.find_spec("nvMatmulHeuristics") is not None


def ranked(kernels: Sequence[Kernel], args: Arguments, gpu: str | None = None) -> list[Kernel]:
    """The same kernels, from fast to slow as nvMatmulHeuristics sees them.

    What it knows nothing of keeps its place: kernels that are no GEMM of the DSL, types, layouts
    and designs that it has not, and all of them where it is not installed or knows no such GPU.

    Args:
        kernels: In the order of the performance model, as ``get_kernels`` gives them.
        args: What they are to compute.
        gpu: The name of the GPU, as the driver has it; by default that of the arguments, or the
            first one of this machine.
    """
    kernels = list(kernels)
    number = _number_of(gpu or _name_of(args))
    if number is None or not is_installed() or type(args) is not GemmArguments:
        return kernels
    questions = ((index, _question(one, args)) for index, one in enumerate(kernels))
    asked = {index: question for index, question in questions if question is not None}
    estimates = _estimates(number, [*asked.values()])
    known = [(s, index) for index, s in zip(asked, estimates, strict=True) if s is not None]
    found = list(kernels)
    for place, (_, index) in zip(sorted(i for _, i in known), sorted(known), strict=True):
        found[place] = kernels[index]
    return found


def _name_of(args: Arguments) -> str | None:
    """None without a GPU."""
    if not devices.cuda_available():
        return None
    import torch

    device = args.device if args.device.type == "cuda" else "cuda:0"
    return str(torch.cuda.get_device_properties(device).name)


def _number_of(gpu: str | None) -> int | None:
    if gpu is None:
        return None
    return next((number for words, number in _GPUS.items() if words in gpu), None)


def _question(kernel: Kernel, args: GemmArguments) -> dict[str, Any] | None:
    """What to ask about a kernel; None where the library has no words for it."""
    metadata = kernel.metadata
    design, operands = metadata.design, metadata.operands
    stages = getattr(design, "stages", None)
    if (
        not isinstance(design, BLASDesignMetadata)
        or not isinstance(operands, GemmOperandsMetadata)
        or stages is None
        or getattr(design, "stream_k", False)
        or getattr(design, "even_k", False)
        or design.cluster_shape[2:] > (1,)
    ):
        return None
    precision = _precision(operands)
    if precision is None:
        return None
    is_swapped = getattr(design, "swap_ab", False)
    warps = getattr(design, "warps", None)
    (M, N, tile_k), cluster = design.tile_shape, design.cluster_shape[:2]
    sizes = (args.M, args.N, args.K)
    if is_swapped:  # the transposed product
        M, N, cluster, sizes = N, M, cluster[::-1], (args.N, args.M, args.K)
    if warps is None:
        backend, warp, instruction = "CUTLASS3", (min(64, M), N, tile_k), (64, N, 16)
    else:
        backend, instruction = "CUTLASS", (16, 8, 16)
        warp = (M // warps[0], N // warps[1], tile_k)
    return {
        "backend": backend,
        "precision": precision,
        "sizes": sizes,
        "batches": args.L or 1,
        "layout": _layout(args, is_swapped),
        "tile": (M, N, tile_k),
        "warp": warp,
        "instruction": instruction,
        "cluster": cluster,
        "split_k": getattr(design, "split_k", 1),
        "stages": stages,
    }


def _precision(operands: GemmOperandsMetadata) -> str | None:
    """As the library spells the types of A, B, C, the accumulator and out."""
    types = (operands.A.dtype, operands.B.dtype, operands.out.dtype, operands.accumulator_type)
    a, b, out, accumulator = ("" if one is None else _LETTERS.get(one.name, "") for one in types)
    if not (a and b and out) or accumulator != "S":
        return None
    if a in "QR":
        return f"{a}{b}{'T' if out in 'QR' else out}S{out}"
    return None if a != b else f"{a}{'F' if a == 'S' else 'S'}{out}"


def _layout(args: GemmArguments, is_swapped: bool) -> str:
    """Which of A and B are transposed, seen from an out of rows or of columns."""
    A, B, out = args.tensors[:3]
    k_major, is_row = (A.stride()[-1] == 1, B.stride()[-2] == 1), out.stride()[-1] == 1
    if is_swapped:
        k_major, is_row = k_major[::-1], not is_row
    by_rows = k_major[0], not k_major[1]
    letters = "".join("N" if one is is_row else "T" for one in by_rows)
    return f"{letters}_{'ROW' if is_row else 'COL'}_MAJOR"


def _estimates(gpu: int, questions: Sequence[dict[str, Any]]) -> list[float | None]:
    """Seconds; None for what the library does not know, or dies of."""
    found: list[float | None] = []
    crashes = 0
    while len(found) < len(questions) and crashes < _CRASHES:
        answers, told = _answers(gpu, questions[len(found) :])
        found += answers
        if len(found) < len(questions):
            logger.info("nvMatmulHeuristics died of %s: %s", questions[len(found)], told)
            found.append(None)
            crashes += 1
    return found + [None] * (len(questions) - len(found))


def _answers(gpu: int, questions: Sequence[dict[str, Any]]) -> tuple[list[float | None], str]:
    """As many as came before the process ended, and what else it had to say."""
    question = json.dumps({"gpu": gpu, "configurations": questions})
    command = [sys.executable, str(Path(_heuristics_process.__file__))]
    try:
        ran = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    lines = ran.stdout.splitlines()[: len(questions)]
    told = ran.stderr.strip().rpartition("\n")[2]
    return [_seconds(line) for line in lines], f"exit code {ran.returncode} {told}"


def _seconds(line: str) -> float | None:
    try:
        found = float(line)
    except ValueError:
        return None
    return found if math.isfinite(found) and found > 0 else None
