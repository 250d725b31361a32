"""Finding attention, and its gradient, among products, masks and a softmax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._node import Node
from kernel_api.graph._planning._patterns import (
    AS_IT_IS,
    EXCHANGED,
    KEPT_AS,
    Factor,
    Flow,
    Linear,
    Miss,
    Visible,
    conditions,
    next_of,
    operands,
    scaled,
    summed_over_heads,
    visible,
)
from kernel_api.graph._planning._score_bodies import Function, function_of_scores
from kernel_api.graph._planning.refusal import Refusal
from kernel_api.graph._tensor import Tensor

#: Scores that are selected to be this or less count as hidden: behind the softmax they are 0 next
#: to any score that is not of this size itself.
_HIDDEN = -1e4


def attentions(flow: Flow) -> Iterator[Forward | Backward | Refusal]:
    """All that may be attention, or its gradient, and what is nearly that."""
    for node in flow.nodes:
        try:
            found = _softmax(flow, node)
        except Miss as miss:
            yield Refusal(node, "is not the softmax of attention", str(miss))
        else:
            if found is not None:
                yield from _around(flow, found)


# What is looked for ----------------------------------------------------------------------


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
    """Probabilities, of which random ones are 0.

    Attributes:
        out: They are.
        drawn: ``rng``, which says what is kept, 1 or 0.
        number: What they are multiplied with beside that.
        inner: Nodes between the softmax and them, with what multiplies.
    """

    out: Tensor
    drawn: Node
    number: float
    inner: tuple[Node, ...]


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
        return _not_attention(self.product, why)


@dataclass(eq=False)
class Backward:
    """The gradients of one attention.

    Attributes:
        o: That the gradient is computed of; None: what attention gives.
        gradients: Tensors by result of ``sdpa_backward``.
        replaced: Nodes that write them.
        inner: Nodes that are no use but for the gradients.
    """

    softmax: Softmax
    v: Factor
    o: Tensor | None
    dO: Factor
    gradients: dict[str, Tensor]
    replaced: tuple[Node, ...]
    inner: tuple[Node, ...]

    def refused(self, why: object) -> Refusal:
        return _not_gradient(self.softmax.node, why)


def _not_attention(product: Node, why: object) -> Refusal:
    return Refusal(product, "is not the product of attention", str(why))


def _not_gradient(node: Node, why: object) -> Refusal:
    return Refusal(node, "is not part of the gradient of attention", str(why))


# From the softmax back to Q and K --------------------------------------------------------


def _softmax(flow: Flow, node: Node) -> Softmax | None:
    """None for what is no quotient of exponentials; raises Miss for one of no scores."""
    if node.op not in ("div", "mul"):
        return None
    for one, other in (operands(node), operands(node)[::-1]):
        inner = [node]
        exponential = flow.made_by(flow.value(one, inner), "exp")
        divisor = flow.value(other, inner)
        if node.op == "mul":
            inverse = flow.made_by(divisor, "reciprocal")
            if inverse is None:
                continue
            inner.append(inverse)
            divisor = flow.value(inverse.input("input"), inner)
        total = flow.made_by(divisor, "reduction")
        if exponential is None or total is None:
            if node.op == "div":
                return None
            continue
        inner += [exponential, total]
        if flow.value(total.input("input"), inner) is not next(exponential.writes):
            return None
        _check_of_rows(total, "ADD")
        shifted = flow.value(exponential.input("input"), inner)
        scores = _said_or_computed(flow, _unshifted(flow, shifted, inner))
        (out,) = node.writes
        _check_values(inner)
        return Softmax(scores, node, out, tuple(inner))
    return None


def _unshifted(flow: Flow, shifted: Tensor, inner: list[Node]) -> Tensor:
    """x of x − max x; what is no such difference is x itself."""
    difference = flow.made_by(shifted, "sub")
    if difference is None:
        return shifted
    tensor, other = operands(difference)
    passed: list[Node] = []
    largest = flow.made_by(flow.value(other, passed), "reduction")
    if largest is None:
        return shifted
    tensor = flow.value(tensor, passed)
    if flow.value(largest.input("input"), passed) is not tensor:
        raise Miss(f"{largest} is not of what it is subtracted from")
    _check_of_rows(largest, "MAX")
    inner += [difference, largest, *passed]
    return tensor


def _check_of_rows(node: Node, mode: str) -> None:
    given, (result,) = node.input("input").dim, node.writes
    if node["mode"] != mode:
        raise Miss(f"{node} has mode {node['mode']}; a softmax has {mode}")
    if len(given) != 4 or result.dim != (*given[:3], 1):
        raise Miss(
            f"{node} makes {list(result.dim)} of {list(given)}; attention reduces (B, H, S_q, S_kv)"
            f" over keys"
        )


def _said_or_computed(flow: Flow, tensor: Tensor) -> Scores:
    """By what attention has options for; else by a function of scores, which skips no blocks."""
    try:
        return _scores(flow, tensor)
    except Miss as miss:
        try:
            return _computed(flow, tensor)
        except Miss as other:
            raise Miss(f"{miss}; and for a function of scores {other}") from miss


def _computed(flow: Flow, tensor: Tensor) -> Scores:
    found = function_of_scores(flow, tensor)
    q, k = flow.factor(found.product.input("A")), flow.factor(found.product.input("B")).exchanged()
    number, scale = _scale((q, k))
    return Scores(
        q, k, number, scale, None, Visible(None, {}, False), found, found.is_indexed, tensor,
        found.inner,
    )  # fmt: skip


def _scores(flow: Flow, tensor: Tensor) -> Scores:
    inner: list[Node] = []
    found: list[Linear] = []
    fill, dim = -math.inf, tensor.dim
    tensor = flow.value(tensor, inner)
    while (node := flow.made_by(tensor, "binary_select")) is not None:
        inner.append(node)
        one, other, mask = operands(node)
        score, hidden = (one, other.value) if one.value is None else (other, one.value)
        if hidden is None:
            raise Miss(f"{node} selects between two tensors; expected a number where it hides")
        fill = max(fill, _as_kept(float(hidden), tensor))
        found += conditions(flow, mask, dim, score is one)
        tensor = flow.value(score, inner)
    if fill > _HIDDEN:
        raise Miss(f"a mask puts {fill} where it hides; expected {_HIDDEN:.0e} or less, or −∞")
    if len(dim) != 4:
        raise Miss(f"scores have dim {list(dim)}; expected four modes")
    seen = visible(found, dim)
    if found and seen.can_hide_all and fill != -math.inf:
        # A query that sees nothing has equal probabilities for all keys if what hides them is a
        # number, and zeros in attention. A causal mask from the first key hides no query's own.
        raise Miss(
            f"a mask that may hide all keys of a query puts {fill} there; attention gives zeros, "
            f"as −∞ says"
        )
    values = tensor
    miss: Miss | None = None
    for product, bias in _sums(flow, tensor):
        beside = [*inner] if bias is None else [*inner, flow.writer[tensor]]
        try:
            q, k, number, scale = _product(flow, product, beside)
        except Miss as other_miss:
            miss = miss or other_miss
            continue
        _check_bias(bias)
        if bias is not None and flow.comes_of(bias, beside):
            raise Miss(f"the bias {bias} is computed of the scores")
        _check_values(beside)
        return Scores(
            q, k, number, scale, bias, seen, None, bool(found), values, tuple(beside)
        )  # fmt: skip
    assert miss is not None
    raise miss


def _as_kept(value: float, tensor: Tensor) -> float:
    """A number as a tensor's type holds it: float16 has no −1e9, but −∞."""
    import torch

    if tensor.data_type not in KEPT_AS:
        return value
    return float(torch.tensor(value, dtype=element_type(tensor.data_type).torch))


def _sums(flow: Flow, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What may be (product, bias)."""
    node = flow.made_by(tensor, "add", "bias")
    if node is None:
        yield tensor, None
        return
    one, other = operands(node)
    yield one, other
    yield other, one


def _product(
    flow: Flow, tensor: Tensor, inner: list[Node]
) -> tuple[Factor, Factor, float, Tensor | None]:
    """(Q, K, number, scale) of a product's multiple."""
    whole = flow.factor(tensor, converted=True)
    node = flow.made_by(whole.root, "matmul")
    if node is None or whole.order != AS_IT_IS:
        writer = flow.writer.get(whole.root)
        what = "an input" if writer is None else f"computed by {writer}"
        raise Miss(
            f"{whole.root} is {what}; expected scale · Q · Kᵀ, then a bias, then masks, then the "
            f"softmax"
        )
    inner += [*whole.passed, node]
    q = flow.factor(node.input("A"))
    k = flow.factor(node.input("B")).exchanged()
    if len(q.order) != 4 or len(k.order) != 4:
        raise Miss(f"{node} multiplies what has not four modes")
    return q, k, *_scale((whole, q, k))


def _scale(factors: tuple[Factor, ...]) -> tuple[float, Tensor | None]:
    """The scale that factors have together; one of them may be a tensor, and then no other."""
    scales = [one.scale for one in factors if one.scale is not None]
    number = math.prod(one.number for one in factors)
    if len(scales) > 1 or (scales and number != 1):
        raise Miss("the product is scaled by a tensor and by something else; expected one scale")
    if number <= 0:
        raise Miss(f"the product is scaled by {number}; kernels of attention take positive scales")
    return number, scales[0] if scales else None


def _check_bias(bias: Tensor | None) -> None:
    if bias is None:
        return
    if bias.rank != 4 or bias.data_type not in KEPT_AS:
        raise Miss(
            f"the bias {bias} is {bias.data_type.name} of dim {list(bias.dim)}; expected floating "
            f"numbers that broadcast to (B, H, S_q, S_kv)"
        )


def _check_values(nodes: Iterable[Node]) -> None:
    """Raise Miss where something between is not kept as floating numbers of 32 bits or less."""
    for node in nodes:
        for tensor in node.writes:
            if tensor.data_type not in KEPT_AS:
                raise Miss(f"{tensor} is kept as {tensor.data_type.name}")
        if node.compute is data_type.DOUBLE:
            raise Miss(f"{node} computes in DOUBLE")


# From the softmax on ---------------------------------------------------------------------


def _around(flow: Flow, softmax: Softmax) -> Iterator[Forward | Backward | Refusal]:
    """What is attention, and its gradient, around a softmax."""
    products = _products(flow, softmax.out)
    found: list[Forward | Backward] = []
    for product, left in products:
        if left.order == AS_IT_IS and left.is_plain:
            v = flow.factor(product.input("B"))
            inner = (*softmax.scores.inner, *softmax.inner, product, *left.passed)
            if v.is_plain:
                found.append(Forward(softmax, product, v, inner))
            else:
                yield _not_attention(product, "V is scaled")
        elif not left.is_plain:
            yield _not_attention(product, "what it multiplies is scaled after the softmax")
    for dropped in _dropped(flow, softmax.out):
        for product, left in _products(flow, dropped.out):
            try:
                found.append(_with_dropout(flow, softmax, dropped, product, left))
            except Miss as miss:
                yield _not_attention(product, miss)
                products.append((product, left))
    for node in flow.readers.get(softmax.out, ()):
        try:
            gradient = _backward(flow, softmax, node, products)
        except Miss as miss:
            yield _not_gradient(node, miss)
        else:
            found += [] if gradient is None else [gradient]
    if not found:
        why = _why_alone(flow, softmax.out)
        yield Refusal(softmax.node, "is not the softmax of attention", why)
    yield from found


def _dropped(flow: Flow, p: Tensor) -> Iterator[Dropped]:
    """Products of probabilities and random numbers that are 1 or 0."""
    for node in flow.nodes:
        if node.op != "mul" or scaled(node) is not None:
            continue
        for one, other in (operands(node), operands(node)[::-1]):
            kept, by = (flow.factor(tensor, converted=True) for tensor in (one, other))
            drawn = flow.made_by(by.root, "rng")
            if kept.root is p and drawn is not None and kept.scale is None and by.scale is None:
                (out,) = node.writes
                if kept.order == by.order == AS_IT_IS and by.root.dim == p.dim == out.dim:
                    inner = (node, *kept.passed, *by.passed)
                    yield Dropped(out, drawn, kept.number * by.number, inner)


def _with_dropout(
    flow: Flow, softmax: Softmax, dropped: Dropped, product: Node, left: Factor
) -> Forward:
    """Raises Miss where this is no dropout of attention."""
    drawn = dropped.drawn
    if drawn["distribution"] != "BERNOULLI" or not 0 < drawn["probability"] <= 1:
        raise Miss(f"{drawn} is {drawn['distribution']}; dropout keeps by BERNOULLI, some at least")
    kept = drawn["probability"]
    number = dropped.number * left.number
    if left.order != AS_IT_IS or left.scale is not None or not _is_near(number * kept, 1.0):
        raise Miss(
            f"{drawn} keeps {kept} and what is kept is multiplied by {number:.6g}; dropout divides "
            f"it by how likely it is kept, {1 / kept:.6g}"
        )
    v = flow.factor(product.input("B"))
    if not v.is_plain:
        raise Miss("V is scaled")
    inner = (*softmax.scores.inner, *softmax.inner, product, *left.passed, *dropped.inner)
    return Forward(softmax, product, v, inner, drawn=drawn)


def _why_alone(flow: Flow, p: Tensor) -> str:
    """Why probabilities are those of no attention: what reads them."""
    readers = flow.readers.get(p, [])
    for reader in readers:
        if reader.op not in ("mul", "scale") or scaled(reader) is not None:
            continue
        (by,) = [one for one in operands(reader) if one is not p] or [p]
        return (
            f"{reader} multiplies it with {by}; of dropout attention takes a probability, and "
            f"draws what it drops, but no mask"
        )
    shown = ", ".join(map(str, readers)) or "nothing"
    return f"it is read by {shown}; expected a product with V, or the gradient"


def _products(flow: Flow, tensor: Tensor) -> list[tuple[Node, Factor]]:
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


def _backward(
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
    _check_values(inner)
    return Backward(softmax, v, o, dO, found.tensors, tuple(found.replaced), tuple(inner))


def _of_sums(
    flow: Flow, softmax: Softmax, dP: Tensor, dO: Factor, total: Node, inner: list[Node]
) -> Tensor | None:
    """O where the sums are those of dO · O, None where they are of dP · P; else raises Miss."""
    summed = flow.value(total.input("input"), inner)
    product = flow.made_by(summed, "mul", "scale")
    if product is None:
        raise Miss(f"{total} is not of dP · P or dO · O")
    _check_of_rows(total, "ADD")
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


def _is_near(one: float, other: float) -> bool:
    """As far as a factor is known that may be kept in 16 bits."""
    return math.isclose(one, other, rel_tol=2.0**-9)


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
        for product, left in _products(self.flow, dS):
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
