"""Random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import data_type, member_of, rng_distribution
from kernel_api.graph._kinds import NUMBER, Kind, list_of, one_of, optional, whole
from kernel_api.graph._node import Node, Operation, check_single, check_whole, settle
from kernel_api.graph._options import number, one_whole, optional_number, refused, wholes
from kernel_api.graph._tensor import Tensor, packed_strides


class RandomMethods(Builder):
    """Random numbers that seed, offset and index decide, whatever the device."""

    def rng(
        self,
        dim: Iterable[int],
        stride: Iterable[int] | None = None,
        distribution: Any = "BERNOULLI",
        seed: Any = 0,
        offset: Any = 0,
        bernoulli_probability: float | None = None,
        name: str | None = None,
        *,
        uniform_min: float = 0.0,
        uniform_max: float = 1.0,
        normal_mean: float = 0.0,
        normal_std: float = 1.0,
        compute_data_type: Any = None,
    ) -> Any:
        """Y of the given dim and stride (row-major by default); FLOAT unless a type is set.

        The last two modes are a matrix; each further one draws by the next offset. u in [0, 1) is
        what :func:`kernel_api.epilogue.dropout` of one matrix draws for the same seed and offset.

        BERNOULLI
            1 where attention keeps by :class:`kernel_api.arguments.Dropout` of p = 1 −
            ``bernoulli_probability`` and the same seed and offset, with matrices as its heads, rows
            as queries and columns as keys; else 0.
        UNIFORM
            min + (max − min) · u.
        NORMAL
            mean + std · √2 · erf⁻¹(2u − 1), less than 5.5 standard deviations off.

        Args:
            seed, offset: Whole numbers, or tensors of one.

        Raises:
            GraphError: the probability, the range or the deviation is none.
        """
        kind = member_of(rng_distribution, distribution).name
        p = optional_number("rng", "bernoulli_probability", bernoulli_probability)
        _check_probability("rng", kind, p)
        low = number("rng", "uniform_min", uniform_min)
        high = number("rng", "uniform_max", uniform_max)
        mean = number("rng", "normal_mean", normal_mean)
        deviation = number("rng", "normal_std", normal_std)
        if kind == "UNIFORM" and low > high:
            raise GraphError(
                f"rng has uniform_min = {low} and uniform_max = {high}; expected a min that is not "
                f"above max"
            )
        if kind == "NORMAL" and deviation < 0:
            raise refused("rng", "normal_std", normal_std, "a number that is not negative")
        shape = wholes("rng", "dim", dim)
        steps = list(packed_strides(shape)) if stride is None else wholes("rng", "stride", stride)
        state = {}
        for key, value in (("seed", seed), ("offset", offset)):
            if not isinstance(value, Tensor):
                value = self._constant(one_whole("rng", key, value), key, data_type.INT64)
            state[key] = value
        return self._add(
            "rng",
            state,
            name=name,
            compute=compute_data_type,
            dim=shape,
            stride=steps,
            distribution=kind,
            probability=p,
            uniform=[low, high],
            normal=[mean, deviation],
        )


def _check_probability(what: str, distribution: str, p: float | None) -> None:
    if distribution == "BERNOULLI" and (p is None or not 0 <= p <= 1):
        raise GraphError(f"{what} has bernoulli_probability = {p}; expected a number from 0 to 1")


class Rng(Operation):
    """Random numbers by Philox4x32-10."""

    name = "rng"
    result = ("Y",)
    inputs = numbers = ("seed", "offset")
    attributes: ClassVar[dict[str, Kind]] = {
        "dim": list_of(whole(0)),
        "stride": list_of(whole(0)),
        "distribution": one_of(rng_distribution.__members__),
        "probability": optional(NUMBER),
        "uniform": list_of(NUMBER, 2),
        "normal": list_of(NUMBER, 2),
    }

    def check(self, node: Node) -> None:
        check_whole(node, *self.numbers)
        _check_probability(str(node), node["distribution"], node["probability"])

    def infer(self, node: Node) -> None:
        check_single(node, *self.numbers)
        settle(
            node, node.outputs.get("Y"), tuple(node["dim"]), tuple(node["stride"]), data_type.FLOAT
        )

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        from kernel_api.providers.reference.philox import halves_apart, uniform_apart

        state = [given[name] for name in ("seed", "offset")]
        device = next((one.device for one in state if hasattr(one, "device")), None)
        device = _device(node) if device is None else device
        dim = tuple(node["dim"])
        matrix = (1,) * (2 - len(dim)) + dim
        matrices, rows, columns = math.prod(matrix[:-2]), matrix[-2], matrix[-1]
        seed, offset = (_whole(one) for one in state)
        if node["distribution"] == "BERNOULLI":
            places = (matrices, torch.arange(rows, device=device), columns)
            drawn = halves_apart(seed, offset, places, device).reshape(dim)
            return {"Y": (drawn >= 1.0 - node["probability"]).to(torch.float32)}
        u = uniform_apart(seed, offset, (matrices, rows, columns), device).reshape(dim)
        if node["distribution"] == "UNIFORM":
            low, high = node["uniform"]
            return {"Y": low + (high - low) * u}
        mean, deviation = node["normal"]
        # u is a multiple of 2⁻²⁴; half a step keeps it from 0.
        inverse = torch.erfinv(2 * (u + 2.0**-25) - 1)
        return {"Y": mean + deviation * math.sqrt(2) * inverse}


def _whole(state: Any) -> Any:
    return int(state) if not hasattr(state, "device") else state


def _device(node: Node) -> Any:
    """Where the numbers are drawn: what the graph is for, else the CPU."""
    planned = getattr(node.outputs["Y"]._owner, "_planned_device", None)
    return "cpu" if planned is None else planned()
