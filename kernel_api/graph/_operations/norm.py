"""Norms and their gradients.

With m the mean and v the biased variance over the normalised modes, and r = 1 / √(v + ε)::

    Y = (x − m) · r · scale + bias
    dX = r · (g − mean(g) − x̂ · mean(g · x̂))   g = dY · scale, x̂ = (x − m) · r
    dscale = Σ dY · x̂,  dbias = Σ dY           over the modes that scale does not have

Of rmsnorm m = 0, v = mean(x²), and there is no mean(g).

==============  =========================================  =============================
norm            normalised modes                           scale and bias
==============  =========================================  =============================
layernorm       those in which scale has not extent 1      (1, C, H, W), or (D,)
rmsnorm         the same                                   the same
adalayernorm    the same, but the first                    (N, 1, D)
instancenorm    all but the first two                      (1, C, 1, 1), or (C,)
batchnorm       all but the second                         (1, C, 1, 1), or (C,)
==============  =========================================  =============================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kernel_api.errors import GraphError
from kernel_api.graph._enums import data_type
from kernel_api.graph._kinds import TRUTH, Kind
from kernel_api.graph._node import Node, Operation, check_single, settle, strides_of
from kernel_api.graph._tensor import Tensor

#: Norms whose parameters are one per channel.
_CHANNEL_NORMS = ("batchnorm", "instancenorm")

#: Modes of their inputs, at least.
_LEAST_MODES = {
    "adalayernorm": (2, "(N, ..., D)"),
    "batchnorm": (2, "(N, C, ...)"),
    "instancenorm": (3, "(N, C, spatial...)"),
}


def normalised_modes(node: Node) -> tuple[int, ...]:
    """The modes of the input that the norm of a node goes over."""
    rank, kind = node.input("input").rank, _kind(node)
    if kind == "batchnorm":
        return tuple(mode for mode in range(rank) if mode != 1)
    if kind == "instancenorm":
        return tuple(range(2, rank))
    scale = scale_dim(node)
    first = 1 if kind == "adalayernorm" else 0
    found = tuple(mode for mode in range(first, rank) if scale[mode] != 1)
    return found or (rank - 1,)


def _check_modes(node: Node) -> None:
    """Raise GraphError where the input has not the modes that its norm is about."""
    dim, kind = node.input("input").dim, _kind(node)
    if kind not in _LEAST_MODES:
        return
    least, expected = _LEAST_MODES[kind]
    if len(dim) < least:
        raise GraphError(f"{node} has an input of dim {list(dim)}; expected {expected}")


def scale_dim(node: Node) -> tuple[int, ...]:
    """The dim of scale, with as many modes as the input has."""
    return aligned_dim(node, node.input("scale"))


def statistics_dim(node: Node) -> tuple[int, ...]:
    """The dim of mean and inverse deviation."""
    modes = normalised_modes(node)
    return tuple(1 if mode in modes else n for mode, n in enumerate(node.input("input").dim))


def aligned_dim(node: Node, tensor: Tensor) -> tuple[int, ...]:
    """The dim of a parameter, with as many modes as the input has; raises GraphError if it does
    not broadcast to the input."""
    x = node.input("input")
    rank, dim = x.rank, tensor.dim
    if _kind(node) in _CHANNEL_NORMS and len(dim) == 1 and rank > 1:
        dim = (1, *dim, *(1 for _ in range(rank - 2)))
    dim = (1,) * (rank - len(dim)) + dim
    if len(dim) != rank or any(own not in (1, n) for own, n in zip(dim, x.dim, strict=True)):
        raise GraphError(
            f"{node} has {tensor} of dim {list(tensor.dim)}, which does not broadcast to its input "
            f"of dim {list(x.dim)}"
        )
    return dim


def _kind(node: Node) -> str:
    return node.op.partition("_")[0]


def _statistic(node: Node) -> data_type:
    """Statistics are as precise as the arithmetic."""
    kinds = {node.compute, node.input("input").data_type}
    return data_type.DOUBLE if data_type.DOUBLE in kinds else data_type.FLOAT


#: Of norms whose gain may be said as what it is beside 1.
_OF_GAIN: dict[str, Kind] = {"zero_centered_gamma": TRUTH}


class _Norm(Operation):
    """Y, with what the backward pass needs."""

    result: ClassVar[tuple[str, ...]] = ("Y", "mean", "inv_var")
    inputs: ClassVar[tuple[str, ...]] = ("input", "scale", "bias", "epsilon")
    optional: ClassVar[tuple[str, ...]] = ("bias", "mean", "inv_var")
    numbers: ClassVar[tuple[str, ...]] = ("epsilon",)
    has_mean = True

    def infer(self, node: Node) -> None:
        x = node.input("input")
        _check_modes(node)
        check_single(node, *self.numbers)
        for name in ("scale", "bias"):
            if name in node.inputs:
                aligned_dim(node, node.input(name))
        settle(node, node.outputs.get("Y"), x.dim, strides_of(x))
        for name in ("mean", "inv_var"):
            settle(node, node.outputs.get(name), statistics_dim(node), element=_statistic(node))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        x, modes = _real(node, given["input"]), normalised_modes(node)
        mean = x.mean(modes, keepdim=True) if self.has_mean else None
        centred = x if mean is None else x - mean
        inverse = (centred.square().mean(modes, keepdim=True) + given["epsilon"]).rsqrt()
        found = {"Y": _scaled(node, given, centred * inverse), "inv_var": inverse}
        return found if mean is None else {**found, "mean": mean}


class Layernorm(_Norm):
    name = "layernorm"
    attributes = _OF_GAIN


class AdaLayernorm(_Norm):
    name = "adalayernorm"


class Instancenorm(_Norm):
    name = "instancenorm"


class Rmsnorm(_Norm):
    name = "rmsnorm"
    result = ("Y", "inv_var")
    attributes = _OF_GAIN
    has_mean = False


class Batchnorm(_Norm):
    """With running statistics, whose variance is that of a sample."""

    name = "batchnorm"
    result = ("Y", "mean", "inv_var", "next_running_mean", "next_running_var")
    inputs = (*_Norm.inputs, "in_running_mean", "in_running_var", "momentum")
    optional = (*_Norm.optional, *result[3:], "in_running_mean", "in_running_var")
    numbers = ("epsilon", "momentum")

    def check(self, node: Node) -> None:
        for name in self.result[3:]:
            given = f"in_{name.removeprefix('next_')}"
            if (name in node.outputs) != (given in node.inputs):
                raise GraphError(f"{node} has one of {given} and {name}; expected both, or none")

    def infer(self, node: Node) -> None:
        super().infer(node)
        for name in self.result[3:]:
            running = node.optional(f"in_{name.removeprefix('next_')}")
            if running is not None:
                _check_each_channel(node, running)
                stride = strides_of(running)
                settle(node, node.outputs.get(name), running.dim, stride, _statistic(node))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        found = super().evaluate(node, given)
        x, modes = _real(node, given["input"]), normalised_modes(node)
        count = x.numel() // max(x.shape[1], 1)
        variance = (x - found["mean"]).square().mean(modes, keepdim=True)
        sample = variance * (count / max(count - 1, 1))
        for name, new in (("running_mean", found["mean"]), ("running_var", sample)):
            old = given.get(f"in_{name}")
            if old is not None:
                momentum = given["momentum"]
                found[f"next_{name}"] = old * (1 - momentum) + new.reshape(old.shape) * momentum
        return found


class BatchnormInference(Operation):
    """Y = (x − mean) · inv_variance · scale + bias."""

    name = "batchnorm_inference"
    result = ("Y",)
    inputs = ("input", "mean", "inv_variance", "scale", "bias")

    def infer(self, node: Node) -> None:
        x = node.input("input")
        _check_modes(node)
        for name in ("mean", "inv_variance", "scale", "bias"):
            aligned_dim(node, node.input(name))
        settle(node, node.outputs.get("Y"), x.dim, strides_of(x))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        mean, inverse = (_aligned(node, given, name) for name in ("mean", "inv_variance"))
        return {"Y": _scaled(node, given, (given["input"] - mean) * inverse)}


def check_deviation(what: str, inv_variance: Any, epsilon: Any) -> None:
    """Raise GraphError where a gradient has nothing to know the deviation of."""
    if inv_variance is None and epsilon is None:
        raise GraphError(
            f"{what} has neither inv_variance nor epsilon; pass the statistics of the forward "
            f"pass, or the epsilon to compute them with"
        )


class _NormBackward(Operation):
    """Gradients of the input, of scale and of bias."""

    result = ("dx", "dscale", "dbias")
    inputs = ("grad", "input", "scale", "mean", "inv_variance", "epsilon")
    optional = ("mean", "inv_variance", "epsilon", "dbias")
    numbers = ("epsilon",)
    has_mean = True

    def check(self, node: Node) -> None:
        check_deviation(str(node), *map(node.optional, ("inv_variance", "epsilon")))

    def infer(self, node: Node) -> None:
        x, grad = node.input("input"), node.input("grad")
        if grad.dim != x.dim:
            raise GraphError(
                f"{node} has grad of dim {list(grad.dim)} but an input of dim {list(x.dim)}"
            )
        _check_modes(node)
        scale = node.input("scale")
        check_single(node, *self.numbers)
        for name in ("scale", "mean", "inv_variance"):
            if name in node.inputs:
                aligned_dim(node, node.input(name))
        settle(node, node.outputs.get("dx"), x.dim, strides_of(x))
        for name in ("dscale", "dbias"):
            settle(node, node.outputs.get(name), scale.dim, strides_of(scale))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        x, grad, modes = _real(node, given["input"]), given["grad"], normalised_modes(node)
        centred = x
        if self.has_mean:
            known = "mean" in given
            centred = x - (_aligned(node, given, "mean") if known else x.mean(modes, keepdim=True))
        if "inv_variance" in given:
            inverse = _aligned(node, given, "inv_variance")
        else:
            inverse = (centred.square().mean(modes, keepdim=True) + given["epsilon"]).rsqrt()
        normal = centred * inverse
        g = grad * _gain(node, given)
        dx = g - normal * (g * normal).mean(modes, keepdim=True)
        if self.has_mean:
            dx = dx - g.mean(modes, keepdim=True)
        kept, shape = scale_dim(node), given["scale"].shape
        summed = [mode for mode in range(x.dim()) if kept[mode] == 1 != x.shape[mode]]
        parts = {"dscale": grad * normal, "dbias": grad}
        if summed:
            parts = {name: one.sum(summed, keepdim=True) for name, one in parts.items()}
        return {"dx": dx * inverse, **{name: one.reshape(shape) for name, one in parts.items()}}


class LayernormBackward(_NormBackward):
    name = "layernorm_backward"
    attributes = _OF_GAIN


class AdaLayernormBackward(_NormBackward):
    name = "adalayernorm_backward"


class InstancenormBackward(_NormBackward):
    name = "instancenorm_backward"


class BatchnormBackward(_NormBackward):
    name = "batchnorm_backward"


class RmsnormBackward(_NormBackward):
    name = "rmsnorm_backward"
    attributes = _OF_GAIN
    has_mean = False


def _check_each_channel(node: Node, running: Tensor) -> None:
    """Raise GraphError unless a running statistic has a number for each channel."""
    expected = statistics_dim(node)
    if aligned_dim(node, running) != expected:
        raise GraphError(
            f"{node} has {running} of dim {list(running.dim)}; expected {list(expected)}, a number "
            f"for each channel"
        )


def _real(node: Node, x: Any) -> Any:
    """Whole numbers in the type of the arithmetic, for they have no mean of their own."""
    return x if x.is_floating_point() else x.to(node.arithmetic)


def _aligned(node: Node, given: Mapping[str, Any], name: str) -> Any:
    return given[name].reshape(aligned_dim(node, node.input(name)))


def _gain(node: Node, given: Mapping[str, Any]) -> Any:
    scale = _aligned(node, given, "scale")
    return 1 + scale if node["zero_centered_gamma"] else scale


def _scaled(node: Node, given: Mapping[str, Any], normal: Any) -> Any:
    value = normal * _gain(node, given)
    return value + _aligned(node, given, "bias") if "bias" in given else value
