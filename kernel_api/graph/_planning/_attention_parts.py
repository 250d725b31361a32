"""What attention is written as: its scores, softmax and products, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._planning._patterns import (
    AS_IT_IS,
    EXCHANGED,
    KEPT_AS,
    ROUNDED,
    Factor,
    Flow,
    Miss,
    Visible,
    operands,
    scaled,
)
from kernel_api.graph._planning._score_bodies import Function
from kernel_api.graph._planning.refusal import Refusal
from kernel_api.graph._tensor import Tensor

#: As far as a factor is known that may be kept in 16 bits.
_NEAR = 2.0**-9


@dataclass(frozen=True)
class Scores:
    """mask(scale · Q · Kᵀ + bias), or another function of scale · Q · Kᵀ.

    Attributes:
        q, k: As (B, H, S, D), without their factors.
        number, scale: The factors, of both and of the product.
        bias: Added; None without.
        seen: The mask.
        function: None, or what is instead of bias and mask.
        is_indexed: Whether they depend on indices.
        values: Without the mask.
        inner: Nodes that are no use but for the scores.
    """

    q: Factor
    k: Factor
    number: float
    scale: Tensor | None
    bias: Tensor | None
    seen: Visible
    function: Function | None
    is_indexed: bool
    values: Tensor
    inner: tuple[Node, ...]

    @property
    def is_rounded(self) -> bool:
        """Whether the graph keeps them, or something that they are made of, in 16 bits."""
        scaled = (n for n in (*self.q.passed, *self.k.passed) if n.op != "transpose")
        written = (tensor for node in (*self.inner, *scaled) for tensor in node.writes)
        return any(tensor.data_type in ROUNDED for tensor in written)


@dataclass(frozen=True)
class Softmax:
    """exp(x − max x) / Σ exp(x − max x) over keys.

    Attributes:
        out: The probabilities, which ``node`` writes.
        inner: Nodes between the scores and it, with it.
    """

    scores: Scores
    node: Node
    out: Tensor
    inner: tuple[Node, ...]


class Dropped(NamedTuple):
    """Numbers of which random ones are made 0.

    Attributes:
        root: The numbers before, without factors.
        drawn: ``rng``, which says what is kept, 1 or 0.
        number: What they are multiplied with beside that.
        inner: Nodes between, with what multiplies.
    """

    root: Tensor
    drawn: Node
    number: float
    inner: tuple[Node, ...]

    def check(self, by: Factor) -> None:
        """Raise Miss where this, with a factor more, is no dropout of attention."""
        drawn, number = self.drawn, self.number * by.number
        if drawn["distribution"] != "BERNOULLI" or not 0 < drawn["probability"] <= 1:
            raise Miss(
                f"{drawn} is {drawn['distribution']}; dropout keeps by BERNOULLI, some at least"
            )
        kept = drawn["probability"]
        if by.scale is not None or not math.isclose(number * kept, 1.0, rel_tol=_NEAR):
            raise Miss(
                f"{drawn} keeps {kept} and what is kept is multiplied by {number:.6g}; dropout "
                f"divides it by how likely it is kept, {1 / kept:.6g}"
            )


@dataclass(eq=False)
class Forward:
    """O = softmax · V; or what is kept of the softmax, divided by how likely that is, times V."""

    softmax: Softmax
    product: Node
    v: Factor
    inner: tuple[Node, ...]
    keeps: bool = False
    drawn: Node | None = None

    def refused(self, why: object) -> Refusal:
        return not_attention(self.product, why)


@dataclass(eq=False)
class Backward:
    """The gradients of one attention.

    Attributes:
        o: That the gradient is computed of; None: what attention gives.
        gradients: Tensors by result of ``sdpa_backward``.
        replaced: Nodes that write them.
        inner: Nodes that are no use but for the gradients.
        drawn: ``rng``, which says which probabilities are kept; None: all of them.
    """

    softmax: Softmax
    v: Factor
    o: Tensor | None
    dO: Factor
    gradients: dict[str, Tensor]
    replaced: tuple[Node, ...]
    inner: tuple[Node, ...]
    drawn: Node | None = None

    def refused(self, why: object) -> Refusal:
        return not_gradient(self.softmax.node, why)


def not_attention(product: Node, why: object) -> Refusal:
    return Refusal(product, "is not the product of attention", str(why))


def not_gradient(node: Node, why: object) -> Refusal:
    return Refusal(node, "is not part of the gradient of attention", str(why))


# What is found in several places ----------------------------------------------------------


def products_of(flow: Flow, tensor: Tensor) -> list[tuple[Node, Factor]]:
    """Products whose left factor is a tensor, apart from scalars and an exchange of modes."""
    found = []
    for node in flow.nodes:
        if node.op != "matmul":
            continue
        try:
            left = flow.factor(node.input("A"), converted=True)
        except Miss:
            continue
        if left.root is tensor and left.order in (AS_IT_IS, EXCHANGED):
            found.append((node, left))
    return found


def dropped_by(flow: Flow, node: Node) -> Dropped | None:
    """What a node makes 0, by a product with random numbers."""
    if node.op != "mul" or scaled(node) is not None:
        return None
    for one, other in (operands(node), operands(node)[::-1]):
        kept, by = (flow.factor(tensor, converted=True) for tensor in (one, other))
        drawn = flow.made_by(by.root, "rng")
        if drawn is None or kept.scale is not None or by.scale is not None:
            continue
        if kept.order == by.order == AS_IT_IS and by.root.dim == kept.root.dim:
            inner = (node, *kept.passed, *by.passed)
            return Dropped(kept.root, drawn, kept.number * by.number, inner)
    return None


def dropped_products(flow: Flow, p: Tensor) -> Iterator[tuple[Dropped, Node, Factor]]:
    """Products whose left factor is what is kept of probabilities, apart from scalars and an
    exchange of modes."""
    for node in flow.nodes:
        dropped = dropped_by(flow, node)
        if dropped is not None and dropped.root is p:
            (out,) = node.writes
            for product, left in products_of(flow, out):
                yield dropped, product, left


def check_of_rows(node: Node, mode: str) -> None:
    given, (result,) = node.input("input").dim, node.writes
    if node["mode"] != mode:
        raise Miss(f"{node} has mode {node['mode']}; a softmax has {mode}")
    if len(given) != 4 or result.dim != (*given[:3], 1):
        raise Miss(
            f"{node} makes {list(result.dim)} of {list(given)}; attention reduces (B, H, S_q, S_kv)"
            f" over keys"
        )


def check_values(nodes: Iterable[Node]) -> None:
    """Raise Miss where something between is not kept as floating numbers of 32 bits or less."""
    for node in nodes:
        for tensor in node.writes:
            if tensor.data_type not in KEPT_AS:
                raise Miss(f"{tensor} is kept as {tensor.data_type.name}")
        if node.compute is data_type.DOUBLE:
            raise Miss(f"{node} computes in DOUBLE")
