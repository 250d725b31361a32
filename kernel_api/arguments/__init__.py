"""What to compute, on which operands."""

from kernel_api.arguments.base import Arguments
from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.arguments.experts import ExpertPointers
from kernel_api.arguments.gemm import GemmArguments
from kernel_api.arguments.grouped import GroupedGemmArguments
from kernel_api.arguments.norm import (
    LayerNormArguments,
    LayerNormBackwardArguments,
    RmsNormArguments,
    RmsNormBackwardArguments,
)
from kernel_api.arguments.scaled import ScaledOperand, ScaleMode

__all__ = [
    "Arguments",
    "EpilogueArguments",
    "ExpertPointers",
    "GemmArguments",
    "GroupedGemmArguments",
    "LayerNormArguments",
    "LayerNormBackwardArguments",
    "RmsNormArguments",
    "RmsNormBackwardArguments",
    "ScaleMode",
    "ScaledOperand",
]
