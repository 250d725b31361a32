"""Methods of a graph for pointwise operations."""

from __future__ import annotations

from typing import Any

from kernel_api.graph._builder import Builder
from kernel_api.graph._options import number, one_whole, optional_number


class PointwiseMethods(Builder):
    """Operations on elements. Each returns one tensor, OUT_0.

    Inputs broadcast as in NumPy, and Python numbers may stand for tensors; strides are those of
    the first input that has the dims of the result. ``compute_data_type`` is the type of the
    arithmetic.
    """

    def _pointwise(
        self, op: str, inputs: dict[str, Any], compute: Any, name: str | None, **attributes: Any
    ) -> Any:
        given = {key: value for key, value in attributes.items() if value is not None}
        return self._add(op, inputs, name=name, compute=compute, **given)

    # Of two ------------------------------------------------------------------------------

    def add(self, a: Any, b: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """a + b."""
        return self._pointwise("add", {"a": a, "b": b}, compute_data_type, name)

    def bias(
        self, input: Any, bias: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input + bias."""
        given = {"input": input, "bias": bias}
        return self._pointwise("bias", given, compute_data_type, name)

    def sub(self, a: Any, b: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """a − b."""
        return self._pointwise("sub", {"a": a, "b": b}, compute_data_type, name)

    def mul(self, a: Any, b: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """a · b."""
        return self._pointwise("mul", {"a": a, "b": b}, compute_data_type, name)

    def scale(
        self, input: Any, scale: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input · scale."""
        given = {"input": input, "scale": scale}
        return self._pointwise("scale", given, compute_data_type, name)

    def div(self, a: Any, b: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """a / b."""
        return self._pointwise("div", {"a": a, "b": b}, compute_data_type, name)

    def add_square(
        self, a: Any, b: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """a + b²."""
        return self._pointwise("add_square", {"a": a, "b": b}, compute_data_type, name)

    def max(
        self, input0: Any, input1: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """The larger; NaN if either is."""
        given = {"input0": input0, "input1": input1}
        return self._pointwise("max", given, compute_data_type, name)

    def min(
        self, input0: Any, input1: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """The smaller; NaN if either is."""
        given = {"input0": input0, "input1": input1}
        return self._pointwise("min", given, compute_data_type, name)

    def mod(
        self, input0: Any, input1: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """What remains of input0 / input1, with the sign of input0, as C's fmod."""
        given = {"input0": input0, "input1": input1}
        return self._pointwise("mod", given, compute_data_type, name)

    def pow(
        self, input0: Any, input1: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input0 to the power of input1."""
        given = {"input0": input0, "input1": input1}
        return self._pointwise("pow", given, compute_data_type, name)

    # Comparisons and logic ---------------------------------------------------------------

    def cmp_eq(
        self, input: Any, comparison: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input = comparison; BOOLEAN unless another type is set, as of all comparisons."""
        return self._compared("cmp_eq", input, comparison, compute_data_type, name)

    def cmp_neq(
        self, input: Any, comparison: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input ≠ comparison."""
        return self._compared("cmp_neq", input, comparison, compute_data_type, name)

    def cmp_gt(
        self, input: Any, comparison: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input > comparison."""
        return self._compared("cmp_gt", input, comparison, compute_data_type, name)

    def cmp_ge(
        self, input: Any, comparison: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input ≥ comparison."""
        return self._compared("cmp_ge", input, comparison, compute_data_type, name)

    def cmp_lt(
        self, input: Any, comparison: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input < comparison."""
        return self._compared("cmp_lt", input, comparison, compute_data_type, name)

    def cmp_le(
        self, input: Any, comparison: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """input ≤ comparison."""
        return self._compared("cmp_le", input, comparison, compute_data_type, name)

    def _compared(self, op: str, input: Any, comparison: Any, compute: Any, name: Any) -> Any:
        return self._pointwise(op, {"input": input, "comparison": comparison}, compute, name)

    def logical_and(
        self, a: Any, b: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """Whether neither is 0; BOOLEAN unless another type is set."""
        return self._pointwise("logical_and", {"a": a, "b": b}, compute_data_type, name)

    def logical_or(
        self, a: Any, b: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """Whether one is not 0; BOOLEAN unless another type is set."""
        return self._pointwise("logical_or", {"a": a, "b": b}, compute_data_type, name)

    def logical_not(
        self, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """Whether it is 0; BOOLEAN unless another type is set."""
        return self._pointwise("logical_not", {"input": input}, compute_data_type, name)

    def binary_select(
        self,
        input0: Any,
        input1: Any,
        mask: Any,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """input0 where the mask is not 0, else input1."""
        given = {"input0": input0, "input1": input1, "mask": mask}
        return self._pointwise("binary_select", given, compute_data_type, name)

    # Of one ------------------------------------------------------------------------------

    def _of_one(self, op: str, input: Any, compute: Any, name: Any, **attributes: Any) -> Any:
        return self._pointwise(op, {"input": input}, compute, name, **attributes)

    def identity(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """The same, converted to the type of the result."""
        return self._of_one("identity", input, compute_data_type, name)

    def neg(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """−x."""
        return self._of_one("neg", input, compute_data_type, name)

    def abs(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """|x|."""
        return self._of_one("abs", input, compute_data_type, name)

    def exp(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """e to the power of x."""
        return self._of_one("exp", input, compute_data_type, name)

    def log(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """The natural logarithm."""
        return self._of_one("log", input, compute_data_type, name)

    def sqrt(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """√x."""
        return self._of_one("sqrt", input, compute_data_type, name)

    def rsqrt(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """1 / √x."""
        return self._of_one("rsqrt", input, compute_data_type, name)

    def reciprocal(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """1 / x."""
        return self._of_one("reciprocal", input, compute_data_type, name)

    def erf(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """The error function."""
        return self._of_one("erf", input, compute_data_type, name)

    def ceil(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """Rounded up to a whole number."""
        return self._of_one("ceil", input, compute_data_type, name)

    def floor(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """Rounded down to a whole number."""
        return self._of_one("floor", input, compute_data_type, name)

    def sin(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """Of radians, as ``cos`` and ``tan``."""
        return self._of_one("sin", input, compute_data_type, name)

    def cos(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """Of radians."""
        return self._of_one("cos", input, compute_data_type, name)

    def tan(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """Of radians."""
        return self._of_one("tan", input, compute_data_type, name)

    def gen_index(
        self, input: Any, axis: int, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """The index of each element along an axis; INT32 unless another type is set."""
        mode = one_whole("gen_index", "axis", axis)
        return self._of_one("gen_index", input, compute_data_type, name, axis=mode)

    # Activations -------------------------------------------------------------------------

    def relu(
        self,
        input: Any,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """x above ``lower_clip`` (0), lower + slope · (x − lower) below; at most ``upper_clip``."""
        clips = _clips("relu", negative_slope, lower_clip, upper_clip)
        return self._of_one("relu", input, compute_data_type, name, **clips)

    def leaky_relu(
        self,
        input: Any,
        negative_slope: float = 0.01,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """x above 0, ``negative_slope`` · x below."""
        slope = number("leaky_relu", "negative_slope", negative_slope)
        return self._of_one("leaky_relu", input, compute_data_type, name, slope=slope)

    def sigmoid(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """σ(x) = 1 / (1 + exp(−x))."""
        return self._of_one("sigmoid", input, compute_data_type, name)

    def tanh(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """The hyperbolic tangent."""
        return self._of_one("tanh", input, compute_data_type, name)

    def gelu(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """x · Φ(x) = x/2 · (1 + erf(x/√2))."""
        return self._of_one("gelu", input, compute_data_type, name)

    def gelu_approx_tanh(
        self, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))."""
        return self._of_one("gelu_approx_tanh", input, compute_data_type, name)

    def swish(
        self,
        input: Any,
        swish_beta: float | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """x · σ(β · x); β is 1 by default."""
        beta = optional_number("swish", "swish_beta", swish_beta)
        return self._of_one("swish", input, compute_data_type, name, beta=beta)

    def silu(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """x · σ(x)."""
        return self._of_one("silu", input, compute_data_type, name)

    def elu(
        self,
        input: Any,
        elu_alpha: float | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """x above 0, α · (exp(x) − 1) below; α is 1 by default."""
        alpha = optional_number("elu", "elu_alpha", elu_alpha)
        return self._of_one("elu", input, compute_data_type, name, alpha=alpha)

    def softplus(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """log(1 + exp(x))."""
        return self._of_one("softplus", input, compute_data_type, name)

    def hardswish(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """x · clamp(x + 3, 0, 6) / 6."""
        return self._of_one("hardswish", input, compute_data_type, name)

    def squared_relu(
        self, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """max(x, 0)²."""
        return self._of_one("squared_relu", input, compute_data_type, name)

    # Their gradients: loss · f'(input) ---------------------------------------------------

    def _backward_of(
        self, op: str, loss: Any, input: Any, compute: Any, name: Any, **attributes: Any
    ) -> Any:
        given = {"loss": loss, "input": input}
        return self._pointwise(f"{op}_backward", given, compute, name, **attributes)

    def relu_backward(
        self,
        loss: Any,
        input: Any,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """loss where lower < input < upper, loss · slope below, 0 above."""
        clips = _clips("relu_backward", negative_slope, lower_clip, upper_clip)
        return self._backward_of("relu", loss, input, compute_data_type, name, **clips)

    def leaky_relu_backward(
        self,
        loss: Any,
        input: Any,
        negative_slope: float = 0.01,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """loss where input > 0, else loss · slope."""
        slope = number("leaky_relu_backward", "negative_slope", negative_slope)
        return self._backward_of("leaky_relu", loss, input, compute_data_type, name, slope=slope)

    def sigmoid_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """loss · σ'(input); ``input`` is what the forward operation read, as for all of these."""
        return self._backward_of("sigmoid", loss, input, compute_data_type, name)

    def tanh_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """loss · (1 − tanh²(input))."""
        return self._backward_of("tanh", loss, input, compute_data_type, name)

    def gelu_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """loss · (Φ(x) + x · φ(x))."""
        return self._backward_of("gelu", loss, input, compute_data_type, name)

    def gelu_approx_tanh_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """loss · the derivative of ``gelu_approx_tanh``."""
        return self._backward_of("gelu_approx_tanh", loss, input, compute_data_type, name)

    def swish_backward(
        self,
        loss: Any,
        input: Any,
        swish_beta: float | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """loss · s · (1 + β · x · (1 − s)), with s = σ(β · x)."""
        beta = optional_number("swish_backward", "swish_beta", swish_beta)
        return self._backward_of("swish", loss, input, compute_data_type, name, beta=beta)

    def silu_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """``swish_backward`` with β = 1."""
        return self._backward_of("silu", loss, input, compute_data_type, name)

    def elu_backward(
        self,
        loss: Any,
        input: Any,
        elu_alpha: float | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """loss where input > 0, else loss · α · exp(input)."""
        alpha = optional_number("elu_backward", "elu_alpha", elu_alpha)
        return self._backward_of("elu", loss, input, compute_data_type, name, alpha=alpha)

    def softplus_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """loss · σ(input)."""
        return self._backward_of("softplus", loss, input, compute_data_type, name)

    def hardswish_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """loss · (0 up to −3, 1 from 3 on, x/3 + ½ between)."""
        return self._backward_of("hardswish", loss, input, compute_data_type, name)

    def squared_relu_backward(
        self, loss: Any, input: Any, compute_data_type: Any = None, name: str | None = None
    ) -> Any:
        """loss · 2 · max(input, 0)."""
        return self._backward_of("squared_relu", loss, input, compute_data_type, name)


def _clips(op: str, slope: Any, lower: Any, upper: Any) -> dict[str, float | None]:
    return {
        "slope": optional_number(op, "negative_slope", slope),
        "lower": optional_number(op, "lower_clip", lower, infinite=True),
        "upper": optional_number(op, "upper_clip", upper, infinite=True),
    }
