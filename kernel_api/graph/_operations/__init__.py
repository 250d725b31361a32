"""The operations of a graph, one file per family: methods that add nodes, and what nodes do."""

from kernel_api.graph._operations import attention as _attention  # noqa: F401  (fills the table)
from kernel_api.graph._operations import norm as _norm  # noqa: F401  (fills the table)
from kernel_api.graph._operations._attention_arguments import attention_arguments
from kernel_api.graph._operations.attention_methods import AttentionMethods
from kernel_api.graph._operations.convolution import ConvolutionMethods
from kernel_api.graph._operations.fused import FusedMethods
from kernel_api.graph._operations.grouped import GroupedMethods
from kernel_api.graph._operations.layout import LayoutMethods, LayoutOperation, View
from kernel_api.graph._operations.matmul import MatmulMethods
from kernel_api.graph._operations.norm_methods import NormMethods
from kernel_api.graph._operations.pointwise import POINTWISE, Pointwise
from kernel_api.graph._operations.pointwise_methods import PointwiseMethods
from kernel_api.graph._operations.quantize import QuantizeMethods
from kernel_api.graph._operations.random import RandomMethods
from kernel_api.graph._operations.reduction import ReductionMethods

__all__ = [
    "POINTWISE",
    "LayoutOperation",
    "Operations",
    "Pointwise",
    "View",
    "attention_arguments",
]


class Operations(
    MatmulMethods,
    PointwiseMethods,
    AttentionMethods,
    NormMethods,
    ConvolutionMethods,
    GroupedMethods,
    LayoutMethods,
    ReductionMethods,
    QuantizeMethods,
    RandomMethods,
    FusedMethods,
):
    """Every operation as a method of a graph."""
