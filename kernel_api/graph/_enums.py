"""The enumerations of the graph interface; their names are those of cuDNN's frontend."""

from __future__ import annotations

from enum import Enum
from typing import Any

from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError


class data_type(Enum):
    """Element types. Where one is asked for, a torch, NumPy or CuTe type or its name will do."""

    FLOAT = "float32"
    DOUBLE = "float64"
    HALF = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "float8_e4m3fn"
    FP8_E5M2 = "float8_e5m2"
    FP8_E8M0 = "float8_e8m0fnu"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    BOOLEAN = "bool"
    FAST_FLOAT_FOR_FP8 = "fast_float_for_fp8"
    INT4 = "int4"
    FP4_E2M1 = "fp4_e2m1"
    INT8x4 = "int8x4"
    INT8x32 = "int8x32"
    UINT8x4 = "uint8x4"
    NOT_SET = ""


class heur_mode(Enum):
    """Where plans come from.

    A: Fused kernels, the first of the performance model. B: fused kernels, another design of each.
    FALLBACK: torch, operation by operation. CUDNN_FIND: fused kernels, the fastest as measured;
    OPENSOURCE is A.
    """

    A = "A"
    B = "B"
    FALLBACK = "FALLBACK"
    OPENSOURCE = "OPENSOURCE"
    CUDNN_FIND = "CUDNN_FIND"


class build_plan_policy(Enum):
    """Which plans are compiled: the first that can be, or all."""

    HEURISTICS_CHOICE = "HEURISTICS_CHOICE"
    ALL = "ALL"


class numerical_note(Enum):
    """What a plan does to numbers."""

    TENSOR_CORE = "TENSOR_CORE"
    DOWN_CONVERT_INPUTS = "DOWN_CONVERT_INPUTS"
    REDUCED_PRECISION_REDUCTION = "REDUCED_PRECISION_REDUCTION"
    FFT = "FFT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    WINOGRAD = "WINOGRAD"
    WINOGRAD_TILE_4x4 = "WINOGRAD_TILE_4x4"
    WINOGRAD_TILE_6x6 = "WINOGRAD_TILE_6x6"
    WINOGRAD_TILE_13x13 = "WINOGRAD_TILE_13x13"
    STRICT_NAN_PROP = "STRICT_NAN_PROP"


class behavior_note(Enum):
    """How a plan behaves."""

    RUNTIME_COMPILATION = "RUNTIME_COMPILATION"
    REQUIRES_FILTER_INT8x32_REORDER = "REQUIRES_FILTER_INT8x32_REORDER"
    REQUIRES_BIAS_INT8x32_REORDER = "REQUIRES_BIAS_INT8x32_REORDER"
    SUPPORTS_CUDA_GRAPH_NATIVE_API = "SUPPORTS_CUDA_GRAPH_NATIVE_API"
    CUBLASLT_DEPENDENCY = "CUBLASLT_DEPENDENCY"


class tensor_reordering(Enum):
    """Layouts that strides do not tell; only the plain one is supported, see ``Tensor``."""

    NONE = "NONE"
    INT8x32 = "INT8x32"
    F16x16 = "F16x16"
    F8_128x4 = "F8_128x4"


class reduction_mode(Enum):
    """What a reduction computes of the elements that become one."""

    ADD = "ADD"
    MUL = "MUL"
    MIN = "MIN"
    MAX = "MAX"
    AMAX = "AMAX"
    AVG = "AVG"
    NORM1 = "NORM1"
    NORM2 = "NORM2"
    MUL_NO_ZEROS = "MUL_NO_ZEROS"


class norm_forward_phase(Enum):
    """Whether a norm gives the statistics that its backward pass needs."""

    INFERENCE = "INFERENCE"
    TRAINING = "TRAINING"


class convolution_mode(Enum):
    """Whether the filter is turned round."""

    CROSS_CORRELATION = "CROSS_CORRELATION"
    CONVOLUTION = "CONVOLUTION"


class diagonal_alignment(Enum):
    """Where the diagonal of a causal mask starts."""

    TOP_LEFT = "TOP_LEFT"
    BOTTOM_RIGHT = "BOTTOM_RIGHT"


class attention_implementation(Enum):
    """Kept for compatibility: attention is planned as one kernel wherever there is one."""

    AUTO = "AUTO"
    COMPOSITE = "COMPOSITE"
    UNIFIED = "UNIFIED"


class moe_grouped_matmul_mode(Enum):
    """How tokens come to their experts."""

    NONE = "NONE"
    GATHER = "GATHER"
    SCATTER = "SCATTER"


class reshape_mode(Enum):
    """Whether a reshape must be a view of its input, or may move elements."""

    VIEW_ONLY = "VIEW_ONLY"
    LOGICAL = "LOGICAL"


class rng_distribution(Enum):
    """What random numbers are drawn from."""

    BERNOULLI = "BERNOULLI"
    UNIFORM = "UNIFORM"
    NORMAL = "NORMAL"


#: Types that tensors here can have, by the name of their dtype.
_STORED = {
    one.value: one
    for one in (
        data_type.FLOAT,
        data_type.DOUBLE,
        data_type.HALF,
        data_type.BFLOAT16,
        data_type.FP8_E4M3,
        data_type.FP8_E5M2,
        data_type.FP8_E8M0,
        data_type.INT8,
        data_type.INT32,
        data_type.INT64,
        data_type.UINT8,
        data_type.BOOLEAN,
    )
}


def as_data_type(value: Any) -> data_type:
    """The member for a member, a type of any library, or its name; None is NOT_SET.

    Raises ArgumentError for what names no type.
    """
    if isinstance(value, data_type):
        return value
    if value is None:
        return data_type.NOT_SET
    name = dtype(value).name
    if name not in _STORED:
        raise ArgumentError(f"graphs have no tensors of {name}; there are {', '.join(_STORED)}")
    return _STORED[name]


def element_type(value: data_type) -> DType:
    """The canonical dtype that elements of it are stored as.

    Raises ArgumentError for types that no kernel here stores, such as INT8x32.
    """
    if value is data_type.FAST_FLOAT_FOR_FP8:
        return dtype("float32")
    if value.value not in _STORED:
        raise ArgumentError(
            f"data_type.{value.name} is not supported; use one of "
            f"{', '.join(member.name for member in _STORED.values())}"
        )
    return dtype(value.value)


def member_of(kind: type[Enum], value: Any) -> Any:
    """The member of an enumeration that a member or its name says."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        for name, member in kind.__members__.items():
            if name.upper() == value.upper():
                return member
    raise ArgumentError(
        f"{value!r} is no {kind.__name__}; expected one of {', '.join(kind.__members__)}"
    )
