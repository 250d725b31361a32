"""Functions of each element: arithmetic, activations and their derivatives."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue.value import Value, common_shape, elementwise, fail, numeric, running
from kernel_api.errors import ArgumentError

CAST_TYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e8m0fnu", "int32", "int16", "int8", "uint8",
)  # fmt: skip
#: What outputs may be made of, beside bool for comparisons.
STORED_TYPES = ("float64", *CAST_TYPES)


def exp(x: Any) -> Value:
    return elementwise("exp", x)


def log(x: Any) -> Value:
    """The natural logarithm."""
    return elementwise("log", x)


def sqrt(x: Any) -> Value:
    return elementwise("sqrt", x)


def rsqrt(x: Any) -> Value:
    """1 / √x."""
    return elementwise("rsqrt", x)


def reciprocal(x: Any) -> Value:
    """1 / x."""
    return elementwise("div", 1.0, x)


def erf(x: Any) -> Value:
    return elementwise("erf", x)


def tanh(x: Any) -> Value:
    return elementwise("tanh", x)


def sigmoid(x: Any) -> Value:
    """σ(x) = 1 / (1 + exp(−x))."""
    return elementwise("sigmoid", x)


def abs(x: Any) -> Value:
    return elementwise("abs", x)


def floor(x: Any) -> Value:
    """The largest whole number that is not above x; as ``math.floor(x)``."""
    return elementwise("floor", x)


def ceil(x: Any) -> Value:
    """The smallest whole number that is not below x; as ``math.ceil(x)``."""
    found: Value = math.ceil(numeric(x))
    return found


def minimum(a: Any, b: Any) -> Value:
    """The smaller; NaN if either is, as in torch."""
    return elementwise("minimum", a, b)


def maximum(a: Any, b: Any) -> Value:
    """The larger; NaN if either is, as in torch."""
    return elementwise("maximum", a, b)


def clamp(x: Any, low: Any = None, high: Any = None) -> Value:
    """min(max(x, low), high); None leaves that side open."""
    value = numeric(x)
    if low is not None:
        value = maximum(value, low)
    return value if high is None else minimum(value, high)


def where(condition: Any, a: Any, b: Any) -> Value:
    """a where the condition holds, else b; both are computed, as numbers."""
    if not isinstance(condition, Value) or not condition.is_boolean:
        fail(f"the condition of where is {condition!r}; expected a comparison such as x > 0")
    values = [condition, numeric(a), numeric(b)]
    return running().node("where", *values, shape=common_shape("where", values))


def cast(x: Any, dtype: Any) -> Value:
    """x rounded to an element type; arithmetic goes on with the rounded value.

    To nearest, ties to even. Integers and 8-bit floats saturate at their largest finite value,
    as the hardware's conversions do; NaN becomes 0 in integers. To float8_e8m0fnu, up to the next
    power of two, so that what is divided by a scale does not grow.
    """
    to = _castable(dtype)
    value = numeric(x)
    return running().node("cast", value, shape=value.modes, to=to.name)


def _castable(given: Any) -> DType:
    try:
        found = dtype(given)
    except ArgumentError as error:
        fail(str(error))
    if found.name not in CAST_TYPES:
        fail(f"cast to {found}; expected one of {', '.join(CAST_TYPES)}")
    return found


def quantize(x: Any, dtype: Any, scale: Any) -> Value:
    """x / scale rounded to the element type, saturating: real value = stored × scale."""
    return cast(elementwise("div", x, scale), dtype)


# Activations -----------------------------------------------------------------------------


def relu(x: Any, slope: float = 0.0, lower: float = 0.0, upper: float | None = None) -> Value:
    """x above ``lower``, lower + slope · (x − lower) below; at most ``upper``."""
    if _is(slope, 0.0):
        value = maximum(x, lower)
    else:
        below = slope * numeric(x) if _is(lower, 0.0) else lower + slope * (numeric(x) - lower)
        value = where(numeric(x) > lower, x, below)
    return value if upper is None else minimum(value, upper)


def _relu_derivative(
    x: Any, slope: float = 0.0, lower: float = 0.0, upper: float | None = None
) -> Value:
    inner = where(numeric(x) > lower, 1.0, slope)
    return inner if upper is None else where(numeric(x) < upper, inner, 0.0)


def leaky_relu(x: Any, slope: float = 0.01) -> Value:
    """x above 0, slope · x below."""
    return relu(x, slope)


def _leaky_relu_derivative(x: Any, slope: float = 0.01) -> Value:
    return _relu_derivative(x, slope)


def _sigmoid_derivative(x: Any) -> Value:
    s = sigmoid(x)
    return s * (1.0 - s)


def _tanh_derivative(x: Any) -> Value:
    t = tanh(x)
    return 1.0 - t * t


def silu(x: Any, beta: float = 1.0) -> Value:
    """x · σ(β · x), also called swish."""
    return numeric(x) * sigmoid(_scaled(x, beta))


def _silu_derivative(x: Any, beta: float = 1.0) -> Value:
    inner = _scaled(x, beta)
    s = sigmoid(inner)
    return s * (1.0 + inner * (1.0 - s))


def gelu(x: Any) -> Value:
    """x · Φ(x) = x/2 · (1 + erf(x/√2))."""
    return 0.5 * numeric(x) * (1.0 + erf(numeric(x) * math.sqrt(0.5)))


def _gelu_derivative(x: Any) -> Value:
    value = numeric(x)
    density = exp(-0.5 * value * value) * (1.0 / math.sqrt(2.0 * math.pi))
    return 0.5 * (1.0 + erf(value * math.sqrt(0.5))) + value * density


_GELU_SLOPE, _GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715


def gelu_tanh(x: Any) -> Value:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))."""
    value = numeric(x)
    inner = _GELU_SLOPE * value * (1.0 + _GELU_CUBE * value * value)
    return 0.5 * value * (1.0 + tanh(inner))


def _gelu_tanh_derivative(x: Any) -> Value:
    value = numeric(x)
    t = tanh(_GELU_SLOPE * value * (1.0 + _GELU_CUBE * value * value))
    slope = _GELU_SLOPE * (1.0 + 3.0 * _GELU_CUBE * value * value)
    return 0.5 * (1.0 + t) + 0.5 * value * (1.0 - t * t) * slope


def softplus(x: Any) -> Value:
    """log(1 + exp(x)), as max(x, 0) + log1p(exp(−|x|))."""
    # At 0 derivatives take the second of two: of these 0 and x, which make 1/2 together.
    falling = minimum(-numeric(x), x)
    return maximum(x, 0.0) + elementwise("log1p", exp(falling))


def elu(x: Any, alpha: float = 1.0) -> Value:
    """x above 0, α · (exp(x) − 1) below."""
    below = elementwise("expm1", x)
    return where(numeric(x) > 0.0, x, below if _is(alpha, 1.0) else alpha * below)


def _elu_derivative(x: Any, alpha: float = 1.0) -> Value:
    return where(numeric(x) > 0.0, 1.0, exp(x) if _is(alpha, 1.0) else alpha * exp(x))


def hardswish(x: Any) -> Value:
    """x · clamp(x + 3, 0, 6) / 6."""
    return numeric(x) * clamp(numeric(x) + 3.0, 0.0, 6.0) * (1.0 / 6.0)


def _hardswish_derivative(x: Any) -> Value:
    value = numeric(x)
    return where(value > -3.0, where(value < 3.0, value * (1.0 / 3.0) + 0.5, 1.0), 0.0)


def squared_relu(x: Any) -> Value:
    """max(x, 0)²."""
    above = maximum(x, 0.0)
    return above * above


def _squared_relu_derivative(x: Any) -> Value:
    return 2.0 * maximum(x, 0.0)


def softcap(x: Any, cap: float) -> Value:
    """cap · tanh(x / cap)."""
    return cap * tanh(numeric(x) / cap)


def _softcap_derivative(x: Any, cap: float) -> Value:
    return _tanh_derivative(numeric(x) / cap)


_DERIVATIVES: dict[str, Callable[..., Value]] = {
    "relu": _relu_derivative,
    "leaky_relu": _leaky_relu_derivative,
    "sigmoid": _sigmoid_derivative,
    "tanh": _tanh_derivative,
    "silu": _silu_derivative,
    "gelu": _gelu_derivative,
    "gelu_tanh": _gelu_tanh_derivative,
    "softplus": sigmoid,
    "elu": _elu_derivative,
    "hardswish": _hardswish_derivative,
    "squared_relu": _squared_relu_derivative,
    "softcap": _softcap_derivative,
}


def derivative(name: str) -> Callable[..., Value]:
    """The derivative of an activation, a function of the same parameters.

    >>> derivative("silu")(x, beta=1.702)

    At a kink it is what torch takes there: that of the left side (relu'(0) = 0), but of hardswish
    at 3 that of the right one.
    """
    if name not in _DERIVATIVES:
        fail(f"there is no derivative of {name!r}; there are those of {', '.join(_DERIVATIVES)}")
    return _DERIVATIVES[name]


def _scaled(x: Any, factor: Any) -> Value:
    return numeric(x) if _is(factor, 1.0) else factor * numeric(x)


def _is(parameter: Any, number: float) -> bool:
    """Whether a parameter is that very number, and neither traced nor a tensor from outside."""
    return isinstance(parameter, numbers.Real) and float(parameter) == number
