"""What pointwise operations compute: one table for torch, for epilogues and for scores."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kernel_api import epilogue as ep
from kernel_api.epilogue.value import Value, numeric, power
from kernel_api.errors import GraphError
from kernel_api.graph._enums import data_type
from kernel_api.graph._kinds import NUMBER, WHOLE, optional
from kernel_api.graph._node import Node, Operation, broadcast_dim, settle, strides_of
from kernel_api.graph._tensor import Tensor


class Pointwise(NamedTuple):
    """One operation on elements.

    Attributes:
        arguments: Names of what it reads, in order.
        torch: Of torch tensors in this order, and attributes by name: the result.
        epilogue: The same of values that :mod:`kernel_api.epilogue` traces, or Python numbers;
            None where these have no such function.
        attributes: Names of the attributes that it may have.
        element: Type of the result, where it is not that of the graph.
        is_exact: Whether of integers it is computed as of integers; else as of floating numbers.
    """

    arguments: tuple[str, ...]
    torch: Callable[..., Any]
    epilogue: Callable[..., Any] | None = None
    attributes: tuple[str, ...] = ()
    element: data_type = data_type.NOT_SET
    is_exact: bool = False


# In torch --------------------------------------------------------------------------------


def _functional(name: str, **fixed: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional."""

    def function(x: Any, **attributes: Any) -> Any:
        import torch

        return getattr(torch.nn.functional, name)(x, **fixed, **attributes)

    return function


def _where(condition: Any, a: Any, b: Any) -> Any:
    import torch

    return torch.where(condition, a, b)


def _softplus(x: Any) -> Any:
    # torch's own is x above a threshold, or overflows above 88 without one.
    return x.logaddexp(x.new_zeros(()))


def _relu(x: Any, slope: float = 0.0, lower: float = 0.0, upper: float | None = None) -> Any:
    value = _where(x > lower, x, lower + slope * (x - lower)) if slope else x.clamp_min(lower)
    return value if upper is None else value.clamp_max(upper)


def _relu_derivative(
    x: Any, slope: float = 0.0, lower: float = 0.0, upper: float | None = None
) -> Any:
    inner = _where(x > lower, 1.0, slope)
    return inner if upper is None else _where(x < upper, inner, 0.0)


def _silu_derivative(x: Any, beta: float = 1.0) -> Any:
    s = (beta * x).sigmoid()
    return s * (1 + beta * x * (1 - s))


def _gelu_derivative(x: Any) -> Any:
    density = (-0.5 * x * x).exp() / math.sqrt(2 * math.pi)
    return 0.5 * (1 + (x * math.sqrt(0.5)).erf()) + x * density


def _gelu_tanh_derivative(x: Any) -> Any:
    slope, cube = math.sqrt(2 / math.pi), 0.044715
    t = (slope * x * (1 + cube * x * x)).tanh()
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope * (1 + 3 * cube * x * x)


def _elu(x: Any, alpha: float = 1.0) -> Any:
    return _where(x > 0, x, alpha * x.expm1())


def _hardswish_derivative(x: Any) -> Any:
    return _where(x > -3, _where(x < 3, x / 3 + 0.5, 1.0), 0.0)


def _index(x: Any, axis: int) -> Any:
    import torch

    along = [1] * x.dim()
    along[axis] = x.shape[axis]
    indices = torch.arange(x.shape[axis], device=x.device, dtype=torch.int32)
    return indices.reshape(along).expand(x.shape)


# In epilogues ----------------------------------------------------------------------------


def _truth(x: Any) -> Any:
    """A truth value, of a number whether it is not 0."""
    return x if isinstance(x, Value) and x.is_boolean else numeric(x) != 0.0


#: Exponents that epilogues have.
POWERS = (0.0, 0.5, -0.5, *(float(sign * whole) for whole in range(1, 17) for sign in (1, -1)))


def _power(x: Any, exponent: Any) -> Any:
    if isinstance(exponent, numbers.Real) and float(exponent) == 0:
        # Of whatever x is, NaN too.
        return ep.where(numeric(x) > 0.0, 1.0, 1.0)
    return power(numeric(x), exponent)


# The table -------------------------------------------------------------------------------


def _binary(
    names: str, torch: Callable[..., Any], epilogue: Callable[..., Any] | None = None
) -> Pointwise:
    return Pointwise(tuple(names.split()), torch, epilogue, is_exact=True)


def _alike(names: str, function: Callable[..., Any]) -> Pointwise:
    """One function of operators serves both."""
    return _binary(names, function, function)


def _comparison(function: Callable[..., Any]) -> Pointwise:
    names = ("input", "comparison")
    return Pointwise(names, function, function, (), data_type.BOOLEAN, is_exact=True)


def _activation(
    torch: Callable[..., Any], epilogue: Callable[..., Any] | None, *attributes: str
) -> Pointwise:
    return Pointwise(("input",), torch, epilogue, attributes)


def _backward(name: str, torch: Callable[..., Any], *attributes: str) -> Pointwise:
    """loss · f'(input)."""

    def in_torch(loss: Any, input: Any, **given: Any) -> Any:
        return loss * torch(input, **given)

    def in_epilogue(loss: Any, input: Any, **given: Any) -> Any:
        return loss * ep.derivative(name)(input, **given)

    return Pointwise(("loss", "input"), in_torch, in_epilogue, attributes)


_RELU = ("slope", "lower", "upper")

#: Every pointwise operation by name.
POINTWISE: dict[str, Pointwise] = {
    # Of two.
    "add": _alike("a b", lambda a, b: a + b),
    "bias": _alike("input bias", lambda a, b: a + b),
    "sub": _alike("a b", lambda a, b: a - b),
    "mul": _alike("a b", lambda a, b: a * b),
    "scale": _alike("input scale", lambda a, b: a * b),
    "div": Pointwise(("a", "b"), lambda a, b: a / b, lambda a, b: a / b),
    "add_square": _alike("a b", lambda a, b: a + b * b),
    "max": _binary("input0 input1", lambda a, b: _joined("maximum", a, b), ep.maximum),
    "min": _binary("input0 input1", lambda a, b: _joined("minimum", a, b), ep.minimum),
    "mod": _binary("input0 input1", lambda a, b: a.fmod(b)),
    "pow": Pointwise(("input0", "input1"), lambda a, b: a.pow(b), _power),
    # Comparisons and logic.
    "cmp_eq": _comparison(lambda a, b: a == b),
    "cmp_neq": _comparison(lambda a, b: a != b),
    "cmp_gt": _comparison(lambda a, b: a > b),
    "cmp_ge": _comparison(lambda a, b: a >= b),
    "cmp_lt": _comparison(lambda a, b: a < b),
    "cmp_le": _comparison(lambda a, b: a <= b),
    "logical_and": Pointwise(
        ("a", "b"), lambda a, b: a.logical_and(b), lambda a, b: _truth(a) & _truth(b),
        (), data_type.BOOLEAN, is_exact=True,
    ),
    "logical_or": Pointwise(
        ("a", "b"), lambda a, b: a.logical_or(b), lambda a, b: _truth(a) | _truth(b),
        (), data_type.BOOLEAN, is_exact=True,
    ),
    "logical_not": Pointwise(
        ("input",), lambda x: x.logical_not(), lambda x: ~_truth(x),
        (), data_type.BOOLEAN, is_exact=True,
    ),
    "binary_select": _binary(
        "input0 input1 mask",
        lambda a, b, mask: _where(mask != 0, a, b),
        lambda a, b, mask: ep.where(_truth(mask), a, b),
    ),
    # Of one.
    "identity": _binary("input", lambda x: x, numeric),
    "neg": _binary("input", lambda x: -x, lambda x: -numeric(x)),
    "abs": _binary("input", lambda x: x.abs(), ep.abs),
    "exp": _activation(lambda x: x.exp(), ep.exp),
    "log": _activation(lambda x: x.log(), ep.log),
    "sqrt": _activation(lambda x: x.sqrt(), ep.sqrt),
    "rsqrt": _activation(lambda x: x.rsqrt(), ep.rsqrt),
    "reciprocal": _activation(lambda x: x.reciprocal(), ep.reciprocal),
    "erf": _activation(lambda x: x.erf(), ep.erf),
    "ceil": _binary("input", lambda x: x.ceil(), ep.ceil),
    "floor": _binary("input", lambda x: x.floor(), ep.floor),
    "sin": _activation(lambda x: x.sin(), None),
    "cos": _activation(lambda x: x.cos(), None),
    "tan": _activation(lambda x: x.tan(), None),
    "gen_index": Pointwise(
        ("input",), _index, None, ("axis",), data_type.INT32, is_exact=True
    ),
    # Activations.
    "relu": _activation(_relu, ep.relu, *_RELU),
    "leaky_relu": _activation(_relu, ep.leaky_relu, "slope"),
    "sigmoid": _activation(lambda x: x.sigmoid(), ep.sigmoid),
    "tanh": _activation(lambda x: x.tanh(), ep.tanh),
    "gelu": _activation(_functional("gelu"), ep.gelu),
    "gelu_approx_tanh": _activation(_functional("gelu", approximate="tanh"), ep.gelu_tanh),
    "swish": _activation(lambda x, beta=1.0: x * (beta * x).sigmoid(), ep.silu, "beta"),
    "silu": _activation(_functional("silu"), ep.silu),
    "elu": _activation(_elu, ep.elu, "alpha"),
    "softplus": _activation(_softplus, ep.softplus),
    "hardswish": _activation(_functional("hardswish"), ep.hardswish),
    "squared_relu": _activation(lambda x: x.clamp_min(0).square(), ep.squared_relu),
    # Their gradients.
    "relu_backward": _backward("relu", _relu_derivative, *_RELU),
    "leaky_relu_backward": _backward("leaky_relu", _relu_derivative, "slope"),
    "sigmoid_backward": _backward("sigmoid", lambda x: x.sigmoid() * (1 - x.sigmoid())),
    "tanh_backward": _backward("tanh", lambda x: 1 - x.tanh().square()),
    "gelu_backward": _backward("gelu", _gelu_derivative),
    "gelu_approx_tanh_backward": _backward("gelu_tanh", _gelu_tanh_derivative),
    "swish_backward": _backward("silu", _silu_derivative, "beta"),
    "silu_backward": _backward("silu", _silu_derivative),
    "elu_backward": _backward(
        "elu", lambda x, alpha=1.0: _where(x > 0, 1.0, alpha * x.exp()), "alpha"
    ),
    "softplus_backward": _backward("softplus", lambda x: x.sigmoid()),
    "hardswish_backward": _backward("hardswish", _hardswish_derivative),
    "squared_relu_backward": _backward("squared_relu", lambda x: 2 * x.clamp_min(0)),
}  # fmt: skip


def _joined(name: str, a: Any, b: Any) -> Any:
    """A function of torch that asks for two tensors of one type."""
    import torch

    kind = torch.result_type(a, b)
    return getattr(torch, name)(a.to(kind), b.to(kind))


# Nodes -----------------------------------------------------------------------------------


class PointwiseOperation(Operation):
    """An operation of the table."""

    result = ("OUT_0",)

    def infer(self, node: Node) -> None:
        """Dims broadcast; strides are those of the first input that has the same dims, and every
        element once."""
        given = [_tensor(node, name) for name in POINTWISE[self.name].arguments]
        dim = broadcast_dim(node, *(one.dim for one in given))
        stride = strides_of(*(one for one in given if one.dim == dim))
        axis = node["axis"]
        if axis is not None and not -len(dim) <= axis < len(dim):
            raise GraphError(f"{node} has axis {axis}; its input has dim {list(dim)}")
        settle(node, node.outputs.get("OUT_0"), dim, stride, POINTWISE[self.name].element)

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        entry = POINTWISE[self.name]
        values = _tensors(node, [given[name] for name in entry.arguments])
        if not entry.is_exact:
            values = [one if one.is_floating_point() else one.to(node.arithmetic) for one in values]
        elif self.name not in _AS_THEY_ARE:
            values = [_counted(one) for one in values]
        attributes = {name: node[name] for name in entry.attributes if node[name] is not None}
        return {"OUT_0": entry.torch(*values, **attributes)}


#: Operations that take integers and truth values as they are; to others truth values are 1 and 0,
#: as in epilogues, and integers have 64 bits, for results may be larger than what makes them.
_AS_THEY_ARE = ("logical_and", "logical_or", "logical_not", "identity")


def _counted(value: Any) -> Any:
    import torch

    return value if value.is_floating_point() else value.to(torch.int64)


def _tensor(node: Node, name: str) -> Tensor:
    return node.input(name)


def _tensors(node: Node, values: list[Any]) -> list[Any]:
    """Numbers as tensors () beside those that are tensors."""
    import torch

    device = next((one.device for one in values if hasattr(one, "device")), None)
    found = []
    for one in values:
        if hasattr(one, "device"):
            found.append(one)
        else:
            whole = isinstance(one, (bool, int))
            # Filled on the device: nothing is copied there, so it can be captured.
            kind = None if whole else node.arithmetic
            found.append(torch.full((), one, dtype=kind, device=device))
    return found


def _declare(name: str, entry: Pointwise) -> None:
    """An operation of the table."""
    has_defaults = name not in _WITHOUT_DEFAULTS
    kinds = {one: WHOLE if one == "axis" else NUMBER for one in entry.attributes}
    fields = {
        "name": name,
        "inputs": entry.arguments,
        "numbers": entry.arguments,
        "attributes": {one: optional(k) if has_defaults else k for one, k in kinds.items()},
        "__doc__": None,
    }
    type(f"_{name}", (PointwiseOperation,), fields)


#: Operations whose attributes must be there.
_WITHOUT_DEFAULTS = ("gen_index", "leaky_relu", "leaky_relu_backward")

for _name, _entry in POINTWISE.items():
    _declare(_name, _entry)
