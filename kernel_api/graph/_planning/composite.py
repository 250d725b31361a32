"""Attention that is written as products, a softmax and masks, as nodes of attention.

    O = matmul(softmax(mask(scale · matmul(Q, Kᵀ) + bias)), V)

becomes ``sdpa``; and with what differentiates it,

    dV = matmul(Pᵀ, dO)         dP = matmul(dO, Vᵀ)         dS = P · (dP − rowsum(dP · P))
    dQ = scale · matmul(dS, K)  dK = scale · matmul(dSᵀ, Q)  dBias = dS, or its sum

``sdpa`` with its log-sum-exp, and ``sdpa_backward``. Masks are diagonals and lengths; what else is
pointwise between the product and the softmax is a function of scores, in the forward pass. What is
not exactly this stays as it is, and ``explain`` says why. In two things the result is another, and
a better one: a softmax without the largest score stays within the range of float32, and a query
whose scores are all −∞ gives zeros, not NaN.

Where P is read or given to the caller as well, only O is taken from attention, and P is computed
as exp(score − log-sum-exp), which the epilogue of one product does; where scores depend on indices
the nodes that P needs stay.

Dropout is a product of the probabilities, and of dP, with ``rng``, which draws what attention does,
and a factor. Masks that are given stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kernel_api._log import logger
from kernel_api.errors import GraphError
from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._planning._attention_parts import Backward, Forward, Softmax
from kernel_api.graph._planning._attention_patterns import attentions
from kernel_api.graph._planning._patterns import (
    KEPT_AS,
    Factor,
    Flow,
    Miss,
    Order,
    without_dead,
)
from kernel_api.graph._planning._score_bodies import of_other_scores
from kernel_api.graph._planning.attention import attention
from kernel_api.graph._planning.builds import PlainBuilds
from kernel_api.graph._planning.refusal import Refusal
from kernel_api.graph._planning.steps import Prober
from kernel_api.graph._tensor import Tensor, constant, packed_strides
from kernel_api.graph._validation import in_order

_log = logger(__name__)

#: Elements of a head that kernels of attention take.
_WIDEST = 256


class Rewritten(NamedTuple):
    """The same computation in other nodes, and what is nearly one of them and was left."""

    nodes: list[Node]
    refusals: list[Refusal]


def composite_attention(nodes: list[Node], prober: Prober) -> Rewritten:
    """The same computation with attention in the place of the nodes that it is written as.

    Args:
        nodes: In order, all known. They and their tensors stay as they are.
        prober: Finds the kernels; what none takes is left as it is.
    """
    flow = Flow(nodes)
    found: list[Forward | Backward] = []
    refusals: list[Refusal] = []
    for one in attentions(flow):
        (refusals if isinstance(one, Refusal) else found).append(one)  # type: ignore[arg-type]
    replaced = _replaced(flow, prober, found, refusals)
    for refusal in refusals:
        _log.debug("%s", refusal)
    return Rewritten(replaced, refusals)


def _replaced(
    flow: Flow, prober: Prober, found: list[Forward | Backward], refusals: list[Refusal]
) -> list[Node]:
    """All that can be of what was found, with attention in its place; the rest is refused."""
    while found:
        made, unfit = _Replacement(flow, prober), None
        for match in found:
            try:
                made.add(match)
            except Miss as miss:
                unfit = match, str(miss)
                break
        if unfit is None:
            try:
                replaced = made.nodes()
            except GraphError as circle:
                unfit = found[-1], str(circle)
            else:
                unfit = _unfit(found, set(replaced))
                if unfit is None:
                    return replaced
        match, why = unfit
        if isinstance(match, Forward) and why == _KEPT:
            for one in found:
                if isinstance(one, Forward) and one.softmax is match.softmax:
                    one.keeps = True
            continue
        refusals.append(match.refused(why))
        found = [one for one in found if one is not match]
    return flow.nodes


#: Why a match is to be replaced in the other way.
_KEPT = "its probabilities are needed"


def _unfit(
    found: list[Forward | Backward], alive: set[Node]
) -> tuple[Forward | Backward, str] | None:
    """The first match of which something is needed that attention does not give, and what."""
    for match in found:
        node = _needed(match, alive)
        if node is None:
            continue
        if isinstance(match, Forward) and not match.keeps and match.softmax.node in alive:
            return match, _KEPT
        return match, f"the result of {node} is needed besides"
    return None


# Replacing -------------------------------------------------------------------------------


class _Replacement:
    """Attention in the place of what was found.

    Attributes:
        made: New nodes.
        replaced: Nodes whose results they write.
    """

    def __init__(self, flow: Flow, prober: Prober) -> None:
        self.flow, self.prober = flow, prober
        self.made: list[Node] = []
        self.replaced: set[Node] = set()
        self._attention: dict[tuple[Tensor, Tensor, Order, Node | None], Node] = {}
        self._views: dict[tuple[Tensor, Order], Tensor] = {}
        self._kept: set[Tensor] = set()

    def nodes(self) -> list[Node]:
        """All of them in order, without those that only served what is replaced."""
        left = [node for node in self.flow.nodes if node not in self.replaced]
        return without_dead(in_order([*left, *self.made]), self.flow)

    def add(self, match: Forward | Backward) -> None:
        """Raises Miss where attention is not the same, or has no kernel."""
        if isinstance(match, Forward):
            self._add_forward(match)
        else:
            self._add_backward(match)

    def _add_forward(self, match: Forward) -> None:
        node = self._attention_of(match.softmax, match.v, match.product.name, match.drawn)
        (out,) = match.product.writes
        if not node.outputs["O"].is_virtual or node.outputs["O"].producer is not node:
            raise Miss("the same is computed twice")
        self._check_types(node, out)
        node.outputs["O"] = out
        self.replaced.add(match.product)
        if match.keeps and not match.softmax.scores.is_indexed:
            self._keep(match.softmax, node)
        self._check(node)

    def _add_backward(self, match: Backward) -> None:
        forward = self._attention_of(
            match.softmax, match.v, f"{match.softmax.node.name}::attention", match.drawn
        )
        name = match.replaced[0].name
        stats = self._statistics(forward)
        self._check(forward)
        inputs = {**forward.inputs, "dO": self._tensor(match.dO, f"{name}::dO")}
        inputs["o"] = forward.outputs["O"] if match.o is None else match.o
        inputs["stats"] = stats
        unset = {"deterministic": False, "max_total_seq_len_q": None, "max_total_seq_len_kv": None}
        node = Node("sdpa_backward", name, inputs, {**forward.attributes, **unset}, data_type.FLOAT)
        for result, like in (("dQ", "q"), ("dK", "k"), ("dV", "v")):
            found = match.gradients.get(result)
            node.outputs[result] = found or self._virtual(node, result, forward.input(like))
        if "dBias" in match.gradients:
            node.outputs["dBias"] = match.gradients["dBias"]
        self._check_types(node, *(node.outputs[one] for one in ("dQ", "dK", "dV")))
        self._check_types(node, node.input("o"), node.input("dO"))
        self._check(node)
        self.made.append(node)
        self.replaced.update(match.replaced)

    def _keep(self, softmax: Softmax, attention: Node) -> None:
        """Probabilities of the log-sum-exp: exp(score − log-sum-exp), of the scores it is of."""
        if softmax.out in self._kept:
            return
        self._kept.add(softmax.out)
        values, name = self._values(softmax, attention), softmax.node.name
        stats = self._statistics(attention)
        difference = self._computed("sub", f"{name}::difference", a=values, b=stats)
        made = Node("exp", name, {"input": difference}, {}, data_type.FLOAT)
        made.outputs["OUT_0"] = softmax.out
        self.made.append(made)
        self.replaced.add(softmax.node)

    def _values(self, softmax: Softmax, attention: Node) -> Tensor:
        """Scores in float32, as attention has them: the graph's own where it rounds none."""
        scores, name = softmax.scores, f"{softmax.node.name}::scores"
        if not scores.is_rounded:
            return scores.values
        kt = self._tensor(scores.k.exchanged(), f"{name}::k")
        values = self._computed("matmul", name, A=attention.input("q"), B=kt)
        if scores.scale is not None or scores.number != 1:
            by = scores.scale or constant(f"{name}::scale", scores.number)
            values = self._computed("mul", f"{name}::scaled", a=values, b=by)
        if scores.bias is not None:
            values = self._computed("add", f"{name}::biased", a=values, b=scores.bias)
        if scores.function is not None:
            function = of_other_scores(scores.function.body, values)
            self.made += function.nodes
            values = function.result
        return values

    def _computed(self, op: str, name: str, **inputs: Tensor) -> Tensor:
        """What an operation makes of tensors, in float32."""
        node = Node(op, name, inputs, {}, data_type.FLOAT)
        (result,) = node.operation.result
        node.outputs[result] = made = Tensor(
            None, name=f"{name}::{result}", element=data_type.FLOAT, is_virtual=True, producer=node
        )
        node.operation.infer(node)
        self.made.append(node)
        return made

    # Nodes of attention ------------------------------------------------------------------

    def _attention_of(
        self, softmax: Softmax, v: Factor, name: str, drawn: Node | None = None
    ) -> Node:
        """``sdpa`` of scores and values: one for all that need it; named if it is new.

        drawn: What says which probabilities are kept; None: all of them.
        """
        key = softmax.out, v.root, v.order, drawn
        if key not in self._attention:
            self._attention[key] = made = self._made_attention(softmax, v, name, drawn)
            self.made.append(made)
        return self._attention[key]

    def _made_attention(self, softmax: Softmax, v: Factor, name: str, drawn: Node | None) -> Node:
        scores = softmax.scores
        seen, function = scores.seen, scores.function
        inputs = {
            "q": self._tensor(scores.q, f"{name}::q"),
            "k": self._tensor(scores.k, f"{name}::k"),
            "v": self._tensor(v, f"{name}::v"),
            "attn_scale": scores.scale,
            "bias": scores.bias,
            "score_operands": None if function is None else function.operands or None,
            "dropout_seed": None if drawn is None else drawn.input("seed"),
            "dropout_offset": None if drawn is None else drawn.input("offset"),
            **seen.lengths,
        }
        attributes = {
            "scale": scores.number if scores.scale is None else None,
            "band": seen.band,
            "alibi": False,
            "padding": bool(seen.lengths),
            "dropout": None if drawn is None else 1.0 - drawn["probability"],
            "max_seq_len_kv": None,
        }
        body = None if function is None else function.body
        node = Node("sdpa", name, inputs, attributes, data_type.FLOAT, body)
        q = node.input("q")
        if q.data_type not in KEPT_AS:
            raise Miss(
                f"Q is {q.data_type.name}; expected {' or '.join(one.name for one in KEPT_AS)}"
            )
        self._check_types(node, node.input("k"), node.input("v"))
        node.outputs["O"] = self._virtual(node, "O", q)
        node.outputs["O"].dim, node.outputs["O"].stride = (), ()
        self._check(node)
        return node

    def _statistics(self, node: Node) -> Tensor:
        if "Stats" not in node.outputs:
            node.outputs["Stats"] = made = Tensor(
                None, name=f"{node.name}::Stats", is_virtual=True, producer=node,
                element=data_type.FLOAT,
            )  # fmt: skip
            node.operation.infer(node)
            assert made.dim
        return node.outputs["Stats"]

    def _tensor(self, factor: Factor, name: str) -> Tensor:
        """What attention reads: a tensor of the graph, or a view of one."""
        found = factor.tensor
        if found is not None:
            return found
        key = factor.root, factor.order
        if key not in self._views:
            node = Node(
                "transpose", name, {"input": factor.root}, {"permutation": list(factor.order)}
            )
            made = Tensor(None, name=f"{name}::Y", is_virtual=True, producer=node)
            made.data_type = factor.root.data_type
            node.outputs["Y"] = made
            view = node.operation.views(node)["Y"]  # type: ignore[attr-defined]
            made.dim, made.stride = view.dim, view.stride
            self._views[key] = made
            self.made.append(node)
        return self._views[key]

    def _virtual(self, node: Node, result: str, like: Tensor) -> Tensor:
        return Tensor(
            None, name=f"{node.name}::{result}", dim=like.dim, stride=packed_strides(like.dim),
            element=like.data_type, is_virtual=True, producer=node,
        )  # fmt: skip

    # What attention asks for -------------------------------------------------------------

    def _check_types(self, node: Node, *tensors: Tensor) -> None:
        kind = node.input("q").data_type
        for tensor in tensors:
            if tensor.data_type is not kind:
                raise Miss(f"{tensor} is {tensor.data_type.name} and Q {kind.name}; expected one")

    def _check(self, node: Node) -> None:
        """Raise Miss where the node contradicts itself or has no kernel."""
        try:
            node.operation.infer(node)
        except GraphError as error:
            raise Miss(str(error)) from error
        names = ("q", "k", "v", "o", "dO", "O", "dQ", "dK", "dV")
        for tensor in (node.inputs.get(name) or node.outputs.get(name) for name in names):
            if not isinstance(tensor, Tensor):
                continue
            if 0 in tensor.dim:
                raise Miss(f"{tensor} has no elements")
            if tensor.dim[-1] > _WIDEST:
                raise Miss(f"{tensor} has {tensor.dim[-1]} elements a head; expected {_WIDEST}")
        for tensor in (*node.reads, *node.writes):
            if tensor.ragged_offset is not None:
                raise Miss(f"{tensor} is ragged, which products do not see")
        builds = attention(node, lambda tensor: True)
        if isinstance(builds, str):
            raise Miss(builds)
        (build,) = builds
        assert isinstance(build, PlainBuilds)
        step = self.prober.step((node,), build)
        if isinstance(step, str):
            raise Miss(step)


def _needed(match: Forward | Backward, alive: set[Node]) -> Node | None:
    """A node that a match replaces and that is needed all the same."""
    nodes: Iterable[Node] = match.inner
    if isinstance(match, Forward) and match.keeps:
        nodes = () if match.softmax.scores.is_indexed else match.softmax.inner
    return next((node for node in nodes if node in alive), None)
