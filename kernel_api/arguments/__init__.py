"""What to compute, on which operands."""

from kernel_api.arguments.base import Arguments
from kernel_api.arguments.dropout import Dropout
from kernel_api.arguments.elementwise import ElementwiseArguments
from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.arguments.experts import ExpertPointers
from kernel_api.arguments.gemm import GemmArguments
from kernel_api.arguments.grouped import GroupedGemmArguments
from kernel_api.arguments.grouping import GroupRowsArguments
from kernel_api.arguments.indexed import GatherRowsArguments, ScatterRowsArguments
from kernel_api.arguments.norm import (
    LayerNormArguments,
    LayerNormBackwardArguments,
    RmsNormArguments,
    RmsNormBackwardArguments,
)
from kernel_api.arguments.scaled import ScaledOperand, ScaleMode
from kernel_api.arguments.sdpa import SdpaArguments
from kernel_api.arguments.sdpa_backward import SdpaBackwardArguments

__all__ = [
    "Arguments",
    "Dropout",
    "ElementwiseArguments",
    "EpilogueArguments",
    "ExpertPointers",
    "GatherRowsArguments",
    "GemmArguments",
    "GroupRowsArguments",
    "GroupedGemmArguments",
    "LayerNormArguments",
    "LayerNormBackwardArguments",
    "RmsNormArguments",
    "RmsNormBackwardArguments",
    "ScaleMode",
    "ScaledOperand",
    "ScatterRowsArguments",
    "SdpaArguments",
    "SdpaBackwardArguments",
]
