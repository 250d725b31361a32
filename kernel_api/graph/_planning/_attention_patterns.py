"""Finding attention among products, masks and a softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernel_api.graph._enums import element_type
from kernel_api.graph._node import Node
from kernel_api.graph._planning._attention_parts import (
    Backward,
    Dropped,
    Forward,
    Scores,
    Softmax,
    check_of_rows,
    check_values,
    dropped_products,
    not_attention,
    not_gradient,
    products_of,
)
from kernel_api.graph._planning._gradient_patterns import gradient_of
from kernel_api.graph._planning._patterns import (
    AS_IT_IS,
    KEPT_AS,
    Factor,
    Flow,
    Linear,
    Miss,
    Visible,
    conditions,
    operands,
    scaled,
    visible,
)
from kernel_api.graph._planning._score_bodies import function_of_scores
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
        check_of_rows(total, "ADD")
        shifted = flow.value(exponential.input("input"), inner)
        scores = _said_or_computed(flow, _unshifted(flow, shifted, inner))
        (out,) = node.writes
        check_values(inner)
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
    check_of_rows(largest, "MAX")
    inner += [difference, largest, *passed]
    return tensor


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
        kept = _as_kept(float(hidden), tensor)
        if not kept <= _HIDDEN:  # as NaN is not
            raise Miss(f"a mask puts {kept} where it hides; expected {_HIDDEN:.0e} or less, or −∞")
        fill = max(fill, kept)
        found += conditions(flow, mask, dim, score is one)
        tensor = flow.value(score, inner)
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
        check_values(beside)
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


# From the softmax on ---------------------------------------------------------------------


def _around(flow: Flow, softmax: Softmax) -> Iterator[Forward | Backward | Refusal]:
    """What is attention, and its gradient, around a softmax."""
    products = products_of(flow, softmax.out)
    found: list[Forward | Backward] = []
    for product, left in products:
        if left.order == AS_IT_IS and left.is_plain:
            v = flow.factor(product.input("B"))
            inner = (*softmax.scores.inner, *softmax.inner, product, *left.passed)
            if v.is_plain:
                found.append(Forward(softmax, product, v, inner))
            else:
                yield not_attention(product, "V is scaled")
        elif not left.is_plain:
            yield not_attention(product, "what it multiplies is scaled after the softmax")
    for dropped, product, left in dropped_products(flow, softmax.out):
        if left.order == AS_IT_IS:
            try:
                found.append(_with_dropout(flow, softmax, dropped, product, left))
            except Miss as miss:
                yield not_attention(product, miss)
                products.append((product, left))
    for node in flow.readers.get(softmax.out, ()):
        try:
            gradient = gradient_of(flow, softmax, node, products)
        except Miss as miss:
            yield not_gradient(node, miss)
        else:
            found += [] if gradient is None else [gradient]
    if not found:
        why = _why_alone(flow, softmax.out)
        yield Refusal(softmax.node, "is not the softmax of attention", why)
    yield from found


def _with_dropout(
    flow: Flow, softmax: Softmax, dropped: Dropped, product: Node, left: Factor
) -> Forward:
    """Raises Miss where this is no dropout of attention."""
    dropped.check(left)
    check_values(dropped.inner)
    v = flow.factor(product.input("B"))
    if not v.is_plain:
        raise Miss("V is scaled")
    inner = (*softmax.scores.inner, *softmax.inner, product, *left.passed, *dropped.inner)
    return Forward(softmax, product, v, inner, drawn=dropped.drawn)


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
