"""Finding the gradient of attention behind its softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from kernel_api.graph._node import Node
from kernel_api.graph._planning._attention_parts import (
    Backward,
    Dropped,
    Softmax,
    check_of_rows,
    check_values,
    dropped_by,
    dropped_products,
    products_of,
)
from kernel_api.graph._planning._patterns import (
    AS_IT_IS,
    EXCHANGED,
    Factor,
    Flow,
    Miss,
    next_of,
    operands,
    scaled,
    summed_over_heads,
)
from kernel_api.graph._tensor import Tensor


def gradient_of(
    flow: Flow, softmax: Softmax, node: Node, products: list[tuple[Node, Factor]]
) -> Backward | None:
    """The gradient if a node computes dS = P · (dP − rowsum); None if it computes something else.

    Raises Miss for what is nearly it.
    """
    if node.op not in ("mul", "scale"):
        return None
    inner = [node]
    values = [flow.value(one, inner) for one in operands(node)]
    others = [one for one in values if one is not softmax.out]
    difference = flow.made_by(others[0], "sub") if len(others) == 1 else None
    if difference is None:
        return None
    dP, sums = (flow.value(one, inner) for one in operands(difference))
    of_values, total = flow.made_by(dP, "matmul"), flow.made_by(sums, "reduction")
    drawn = None
    if of_values is None and (dropped := _of_kept(flow, dP)) is not None:
        of_values, drawn = flow.made_by(dropped.root, "matmul"), dropped.drawn
        products = _kept_products(flow, softmax.out, drawn, inner)
        inner += dropped.inner
    if of_values is None or total is None:
        return None
    if softmax.scores.function is not None:
        raise Miss("gradients are derived of a function of scores otherwise than they are written")
    inner += [difference, total, of_values]
    dO, v = flow.factor(of_values.input("A")), flow.factor(of_values.input("B")).exchanged()
    if not (dO.is_plain and v.is_plain):
        raise Miss("dO or V is scaled")
    o = _of_sums(flow, softmax, dP, dO, total, inner)
    found = _Gradients(flow, softmax, v, dO, node)
    found.of_scores()
    found.of_values(products)
    if not {"dQ", "dK"} & found.tensors.keys():
        raise Miss("there is no product of it with K or Q")
    inner += [*softmax.scores.inner, *softmax.inner, *found.inner]
    check_values(inner)
    replaced = tuple(found.replaced)
    return Backward(softmax, v, o, dO, found.tensors, replaced, tuple(inner), drawn)


def _of_kept(flow: Flow, dP: Tensor) -> Dropped | None:
    """What the gradient of kept probabilities is made of: 0 where those are; raises Miss where that
    is no dropout of attention."""
    whole = flow.factor(dP, converted=True)
    node = flow.made_by(whole.root, "mul")
    dropped = None if node is None else dropped_by(flow, node)
    if dropped is None or whole.order != AS_IT_IS:
        return None
    dropped.check(whole)
    return dropped._replace(inner=(*dropped.inner, *whole.passed))


def _kept_products(
    flow: Flow, p: Tensor, drawn: Node, inner: list[Node]
) -> list[tuple[Node, Factor]]:
    """Products of the same kept probabilities, as if of all; raises Miss as above."""
    found = []
    for dropped, product, left in dropped_products(flow, p):
        if dropped.drawn is drawn and left.order == EXCHANGED:
            dropped.check(left)
            inner += dropped.inner
            found.append((product, left._replace(number=1.0)))
    return found


def _of_sums(
    flow: Flow, softmax: Softmax, dP: Tensor, dO: Factor, total: Node, inner: list[Node]
) -> Tensor | None:
    """O where the sums are those of dO · O, None where they are of dP · P; else raises Miss."""
    summed = flow.value(total.input("input"), inner)
    product = flow.made_by(summed, "mul", "scale")
    if product is None:
        raise Miss(f"{total} is not of dP · P or dO · O")
    check_of_rows(total, "ADD")
    inner.append(product)
    pair = [flow.value(one, inner) for one in operands(product)]
    if {*pair} == {dP, softmax.out}:
        return None
    for one, other in (pair, pair[::-1]):
        if flow.factor(one).is_same(dO) and flow.factor(one).is_plain:
            return other
    raise Miss(f"{total} is not of dP · P or dO · O")


class _Scales(NamedTuple):
    """What something is multiplied with."""

    number: float
    tensors: list[Tensor]

    def times(self, by: float | Tensor) -> _Scales:
        if isinstance(by, Tensor):
            return _Scales(self.number, [*self.tensors, by])
        return _Scales(self.number * by, self.tensors)


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


@dataclass
class _Gradients:
    """The products that gradients are.

    Attributes:
        node: Writes dS.
        tensors, replaced, inner: As of :class:`Backward`.
    """

    flow: Flow
    softmax: Softmax
    v: Factor
    dO: Factor
    node: Node
    tensors: dict[str, Tensor] = field(default_factory=dict)
    replaced: list[Node] = field(default_factory=list)
    inner: list[Node] = field(default_factory=list)

    def of_scores(self) -> None:
        """dQ, dK and dBias."""
        scores = self.softmax.scores
        (dS,) = self.node.writes
        for product, left in products_of(self.flow, dS):
            name, other = ("dQ", scores.k) if left.order == AS_IT_IS else ("dK", scores.q)
            right = self.flow.factor(product.input("B"))
            if not right.is_same(other):
                raise Miss(f"{product} is with {right.root}, not with {other.root}")
            of = scores.q if name == "dQ" else scores.k
            tensors = [one for one in (left.scale, right.scale) if one is not None]
            by = _Scales(left.number * right.number, tensors)
            self.inner += left.passed
            self._take(name, *self._finished(product, of, scores.number, scores.scale, by))
        bias = scores.bias
        if bias is None:
            return
        for reader in self.flow.readers.get(dS, ()):
            (result, *_) = reader.writes
            if reader.op == "reduction" and reader["mode"] == "ADD" and result.dim == bias.dim:
                self._take("dBias", result, reader)
        used = {self.node, *self.inner, *self.replaced}
        read = any(
            reader not in used and reader.op != "matmul" for reader in self.flow.readers.get(dS, ())
        )
        if "dBias" not in self.tensors and bias.dim == dS.dim and (read or not dS.is_virtual):
            self._take("dBias", dS, self.node)

    def of_values(self, products: list[tuple[Node, Factor]]) -> None:
        """dV."""
        for product, left in products:
            right = self.flow.factor(product.input("B"))
            if left.order == EXCHANGED and right.is_same(self.dO):
                if not (left.is_plain and right.is_plain):
                    raise Miss(f"{product} is scaled")
                self.inner += left.passed
                self._take("dV", *self._finished(product, self.v, 1.0, None, _Scales(1.0, [])))

    def _finished(
        self, product: Node, of: Factor, number: float, scale: Tensor | None, by: _Scales
    ) -> tuple[Tensor, Node]:
        """The gradient that a product becomes behind it, scaled and summed over heads that share
        what it is the gradient of; and the node that writes it.

        Args:
            of: What it is the gradient of.
            number, scale: What it is to be multiplied with.
            by: What the factors of the product are multiplied with already.
        """
        writer, expected = product, [] if scale is None else [scale]
        heads = of.root.dim[of.order[1]]
        while True:
            (result,) = writer.writes
            is_scaled = _is_close(by.number, number) and by.tensors == expected
            is_summed, is_kept = result.dim[1] == heads, result.data_type is of.root.data_type
            node = next_of(self.flow, result)
            is_converted = node is not None and node.op == "identity"
            if is_scaled and is_summed and (is_kept or not is_converted):
                return result, writer
            following = None if node is None or is_scaled else scaled(node)
            summed = None if is_summed else summed_over_heads(self.flow, result, heads)
            if following is not None and following.tensor is result:
                assert node is not None
                by, passed = by.times(following.by), [node]
            elif summed is not None:
                passed = list(summed.nodes)
            elif node is not None and is_converted:
                passed = [node]
            elif not is_scaled:
                raise Miss(f"{product} is scaled by another number than the scores")
            else:
                raise Miss(
                    f"{product} makes {list(result.dim)}; expected the sum over the queries' heads "
                    f"that share one of {heads}"
                )
            self.inner += [writer, *passed[:-1]]
            writer = passed[-1]

    def _take(self, name: str, tensor: Tensor, writer: Node) -> None:
        if name in self.tensors:
            raise Miss(f"there are two candidates for {name}: {self.tensors[name]} and {tensor}")
        self.tensors[name] = tensor
        self.replaced.append(writer)
