"""Gated linear units: f(gate) · h(up) and its derivatives, traced."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernel_api import epilogue as ep

#: Kinds whose gate is an activation and whose up is taken as it is.
_GATES = {
    "glu": "sigmoid",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
}
#: The kind that has a limit and an offset.
LIMITED = "geglu_clamped"
KINDS = (*_GATES, LIMITED, "situglu")

_CLAMPED_SLOPE = 1.702
_SITU_GATE, _SITU_UP = 4.0, 25.0


class Gated(NamedTuple):
    """The factors of a gated linear unit, with their derivatives.

    Attributes:
        gate: f(gate).
        up: h(up).
        gate_slope: f'(gate).
        up_slope: h'(up); None: 1.
    """

    gate: Any
    up: Any
    gate_slope: Any
    up_slope: Any = None

    @property
    def result(self) -> Any:
        return self.gate * self.up

    def gradients(self, upstream: Any) -> tuple[Any, Any]:
        """Of gate and of up, from that of the result."""
        up = upstream * self.gate
        up = up if self.up_slope is None else up * self.up_slope
        return upstream * self.up * self.gate_slope, up


def gated(kind: str, gate: Any, up: Any, limit: Any, offset: Any) -> Gated:
    """The factors of one kind; what of them is not used leaves no trace."""
    if kind == LIMITED:
        low = ep.minimum(gate, limit)
        slope = ep.derivative("silu")(low, beta=_CLAMPED_SLOPE)
        return Gated(
            ep.silu(low, beta=_CLAMPED_SLOPE),
            ep.clamp(up, -limit, limit) + offset,
            ep.where(gate <= limit, slope, 0.0),
            ep.where(ep.abs(up) <= limit, 1.0, 0.0),
        )
    if kind == "situglu":
        bent, s = ep.tanh(gate * (1 / _SITU_GATE)), ep.sigmoid(gate)
        bent_up = ep.tanh(up * (1 / _SITU_UP))
        return Gated(
            _SITU_GATE * bent * s,
            _SITU_UP * bent_up,
            s * (1.0 - bent * bent + _SITU_GATE * bent * (1.0 - s)),
            1.0 - bent_up * bent_up,
        )
    name = _GATES[kind]
    return Gated(getattr(ep, name)(gate), up, ep.derivative(name)(gate))
