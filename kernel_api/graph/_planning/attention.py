"""Attention as arguments of kernels."""

from __future__ import annotations

import math
from typing import Any

from kernel_api.arguments.base import Arguments
from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._operations._attention_arguments import (
    DESCALES,
    STATISTICS,
    attention_arguments,
)
from kernel_api.graph._planning.builds import Anchored, Needed, PlainBuilds
from kernel_api.graph._planning.steps import Prober, Take
from kernel_api.graph._tensor import Tensor, constant

#: What kernels write in any case.
_ALWAYS = ("O", "dQ", "dK", "dV")

#: What they do not write.
_BESIDE = ("Rng_dump", "Amax_S", "Amax_O")

_BYTES = (data_type.FP8_E4M3, data_type.FP8_E5M2)

#: Of ``sdpa_fp8``: factors of P as it is rounded, of what P is multiplied with, and of O.
_OF_RESULTS = {"scale_s": 256.0, "descale_s": 1 / 256, "scale_o": 1.0}


def attention(node: Node, needed: Needed) -> Anchored:
    """sdpa, sdpa_backward, and sdpa_fp8 with the scales of kernels."""
    scales = [name for name in (*DESCALES, *_OF_RESULTS) if name in node.inputs]
    numbers = [name for name in scales if node.input(name).value == _OF_RESULTS.get(name, 1.0)]
    if any(name in scales and name not in numbers for name in _OF_RESULTS):
        return []  # with_kernel_scales has said why
    why = _why_not_written(node, needed)
    if why is not None:
        return why
    written = {name: t for name, t in node.outputs.items() if name in _ALWAYS or needed(t)}

    def make(take: Take) -> Arguments:
        given = {name: one for name, one in node.inputs.items() if name not in numbers}
        tensors = {name: _taken(take, one) for name, one in given.items()}
        outputs = {name: take(tensor) for name, tensor in written.items() if name not in _BESIDE}
        return attention_arguments(node, tensors, outputs)

    return [PlainBuilds(make, tuple(t for t in written.values() if not needed(t)))]


def _why_not_written(node: Node, needed: Needed) -> str | None:
    """Why kernels do not write the results of attention; None if they do."""
    beside = [n for n in _BESIDE if n in node.outputs and needed(node.outputs[n])]
    if beside:
        return f"kernels do not write {' and '.join(beside)}"
    for name in STATISTICS:
        if name in node.outputs and node.outputs[name].data_type is not data_type.FLOAT:
            return f"kernels write {node.outputs[name]} as FLOAT"
    if node.op == "sdpa_fp8" and node.outputs["O"].data_type in _BYTES:
        kind = node.outputs["O"].data_type.name
        return f"kernels write O in 16 bits, not as {kind}: it would be rounded twice"
    return None


def with_kernel_scales(node: Node, needed: Needed, prober: Prober) -> list[Node] | str:
    """``sdpa_fp8`` in the scales of kernels: P is rounded times 256, and all that multiplies
    results is a factor of V. Or why there is no kernel."""
    why = _why_not_written(node, needed)
    if why is not None:
        return why
    changed = node.copy()
    for name in ("descale_q", "descale_k"):
        known = node.input(name).value
        if known is not None and node["scale"] is not None:
            changed.attributes["scale"] *= float(known)
            changed.inputs[name] = constant(name, 1.0)
    changed.inputs.update({name: constant(name, value) for name, value in _OF_RESULTS.items()})
    scales = [node.input(name) for name in ("descale_v", *_OF_RESULTS)]
    factors = [one for one in scales if one.value is None]
    numbers = [float(one.value) for one in scales if one.value is not None]
    if math.prod(numbers) != 1.0:
        factors.append(constant("number", math.prod(numbers)))
    of_host = [name for name in DESCALES[:2] if _is_of_host(changed.input(name))]
    if of_host or (factors and all(one.is_pass_by_value for one in factors)):
        shown = " and ".join(of_host) or "all that V is multiplied with"
        return f"{shown}: numbers of the host, and kernels read scales from memory"
    changed.inputs["descale_v"], made = _multiplied(node, factors)
    builds = attention(changed, needed)
    assert not isinstance(builds, str)
    (build,) = builds
    step = prober.step((changed,), build)
    return step if isinstance(step, str) else [*made, changed]


def _is_of_host(scale: Tensor) -> bool:
    return scale.is_pass_by_value and scale.value != 1.0


def _multiplied(node: Node, factors: list[Tensor]) -> tuple[Tensor, list[Node]]:
    """The product of scales, and the nodes that compute it."""
    made: list[Node] = []
    product, *others = sorted(factors, key=lambda one: one.is_pass_by_value) or [
        constant("one", 1.0)
    ]
    for place, factor in enumerate(others):
        name = f"{node.name}::scale{place}"
        mul = Node("mul", name, {"a": product, "b": factor}, {}, data_type.FLOAT)
        product = Tensor(None, name=name, element=data_type.FLOAT, is_virtual=True, producer=mul)
        mul.outputs["OUT_0"] = product
        mul.operation.infer(mul)
        made.append(mul)
    return product, made


def _taken(take: Take, given: Tensor | tuple[Tensor, ...]) -> Any:
    return tuple(map(take, given)) if isinstance(given, tuple) else take(given)
