"""Find, understand, compile, verify and run GPU kernels written in CuTe DSL.

>>> import kernel_api as ka
>>> args = ka.GemmArguments(A, B, out)
>>> kernels = ka.get_kernels(args)      # those that can compile and run it, best first
>>> kernels[0].run(args)
>>> print(ka.explain(args))             # every kernel family: accepted, or why not

Everything here is loaded on first use: importing the package loads neither torch nor the DSL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_api._lazy import attribute

if TYPE_CHECKING:
    from kernel_api import arguments as arguments
    from kernel_api import artifact as artifact
    from kernel_api import epilogue as epilogue
    from kernel_api import errors as errors
    from kernel_api import fusions as fusions
    from kernel_api import graph as graph
    from kernel_api import masks as masks
    from kernel_api import metadata as metadata
    from kernel_api import nn as nn
    from kernel_api import ops as ops
    from kernel_api import providers as providers
    from kernel_api import space as space
    from kernel_api import status as status
    from kernel_api import targets as targets
    from kernel_api import tuning as tuning
    from kernel_api import utils as utils
    from kernel_api.arguments import (
        ElementwiseArguments,
        EpilogueArguments,
        ExpertPointers,
        GatherRowsArguments,
        GemmArguments,
        GroupedGemmArguments,
        GroupRowsArguments,
        LayerNormArguments,
        LayerNormBackwardArguments,
        RmsNormArguments,
        RmsNormBackwardArguments,
        ScaledOperand,
        ScaleMode,
        ScatterRowsArguments,
        SdpaArguments,
        SdpaBackwardArguments,
    )
    from kernel_api.artifact import CompiledArtifact
    from kernel_api.bundle import load_bundle
    from kernel_api.discovery import explain, get_kernels
    from kernel_api.kernel import Kernel
    from kernel_api.library import load
    from kernel_api.offsets import (
        check_offsets,
        offsets_from_boundaries,
        offsets_from_counts,
        offsets_from_starts,
    )
    from kernel_api.parallel import compile_all
    from kernel_api.provider import Provider
    from kernel_api.status import Status
    from kernel_api.tuning import autotune, tuned
    from kernel_api.verification import verify

__version__ = "0.1.0"

_HOME_OF = {
    "CompiledArtifact": "artifact",
    "ElementwiseArguments": "arguments",
    "EpilogueArguments": "arguments",
    "ExpertPointers": "arguments",
    "GatherRowsArguments": "arguments",
    "GemmArguments": "arguments",
    "GroupRowsArguments": "arguments",
    "GroupedGemmArguments": "arguments",
    "Kernel": "kernel",
    "LayerNormArguments": "arguments",
    "LayerNormBackwardArguments": "arguments",
    "Provider": "provider",
    "RmsNormArguments": "arguments",
    "RmsNormBackwardArguments": "arguments",
    "ScaleMode": "arguments",
    "ScaledOperand": "arguments",
    "ScatterRowsArguments": "arguments",
    "SdpaArguments": "arguments",
    "SdpaBackwardArguments": "arguments",
    "Status": "status",
    "autotune": "tuning",
    "check_offsets": "offsets",
    "compile_all": "parallel",
    "explain": "discovery",
    "get_kernels": "discovery",
    "load": "library",
    "load_bundle": "bundle",
    "offsets_from_boundaries": "offsets",
    "offsets_from_counts": "offsets",
    "offsets_from_starts": "offsets",
    "tuned": "tuning",
    "verify": "verification",
}
_MODULES = (
    "arguments",
    "artifact",
    "epilogue",
    "errors",
    "fusions",
    "graph",
    "masks",
    "metadata",
    "nn",
    "ops",
    "providers",
    "space",
    "status",
    "targets",
    "tuning",
    "utils",
)

__all__ = [
    "CompiledArtifact",
    "ElementwiseArguments",
    "EpilogueArguments",
    "ExpertPointers",
    "GatherRowsArguments",
    "GemmArguments",
    "GroupRowsArguments",
    "GroupedGemmArguments",
    "Kernel",
    "LayerNormArguments",
    "LayerNormBackwardArguments",
    "Provider",
    "RmsNormArguments",
    "RmsNormBackwardArguments",
    "ScaleMode",
    "ScaledOperand",
    "ScatterRowsArguments",
    "SdpaArguments",
    "SdpaBackwardArguments",
    "Status",
    "__version__",
    "autotune",
    "check_offsets",
    "compile_all",
    "explain",
    "get_kernels",
    "load",
    "load_bundle",
    "offsets_from_boundaries",
    "offsets_from_counts",
    "offsets_from_starts",
    "tuned",
    "verify",
]


if not TYPE_CHECKING:  # to which every name would be there, and of any type

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        return attribute(__name__, name, _HOME_OF)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
