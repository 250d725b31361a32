"""Estimates of nvMatmulHeuristics, in a process that may die of them; run as a script.

One question on stdin, a line with a number on stdout for each of its configurations, in seconds: 0
for what the library does not know. Nothing of ours is imported, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from typing import Any

#: ``RUNTIME_RELATIVE_FAST_S``, the metric that is made for comparing kernels.
_METRIC = 14


def main() -> None:
    question = json.load(sys.stdin)
    library: Any = importlib.import_module("nvMatmulHeuristics.nvMatmulHeuristics")
    gpu = library.NvMatmulHeuristicsNvidiaGpu(question["gpu"])
    interface = library.NvMatmulHeuristicsInterfaceEx(gpu=gpu)
    backends: dict[str, Any] = {}
    for one in question["configurations"]:
        name = one["backend"]
        if name not in backends:
            backends[name] = interface.createBackend(library.NvMatmulHeuristicsTarget[name])
        layout = library.NvMatmulHeuristicsMatmulLayout[one["layout"]]
        problem = interface.makeNvMatmulHeuristicsProblem(*one["sizes"], layout, one["batches"])
        # The wheel's estimateSiliconMetric passes a number where the library wants a backend.
        estimate = interface.nvMatmulHeuristicsEstimateSiliconMetricEx(
            interface.handle,
            one["precision"].encode("ascii"),
            backends[name],
            ctypes.byref(problem),
            ctypes.byref(_configuration(interface, one)),
            ctypes.c_int(_METRIC),
            interface.hardware_descriptor,
        )
        print(f"{estimate!r}", flush=True)  # what comes next may be the end


def _configuration(interface: Any, one: dict[str, Any]) -> Any:
    made = interface.nvmmhKernelConfiguration()
    for name, key in (("cta", "tile"), ("warp", "warp"), ("instr", "instruction")):
        getattr(made, name)[:] = one[key]
    made.cluster[:] = one["cluster"]
    made.splitK, made.loadStages, made.gridSwizzle = one["split_k"], one["stages"], 1
    return made


if __name__ == "__main__":
    main()
