"""What to compute, on which operands."""

from kernel_api.arguments.base import Arguments
from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.arguments.gemm import GemmArguments
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
    "GemmArguments",
    "LayerNormArguments",
    "LayerNormBackwardArguments",
    "RmsNormArguments",
    "RmsNormBackwardArguments",
    "ScaleMode",
    "ScaledOperand",
]
