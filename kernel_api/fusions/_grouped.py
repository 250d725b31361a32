"""Products of groups of tokens (mixtures of experts) with what is done to their results."""

from __future__ import annotations

import functools
import numbers
from typing import Any, NamedTuple

from kernel_api import epilogue as ep
from kernel_api._numbers import whether
from kernel_api.arguments import EpilogueArguments, GroupedGemmArguments
from kernel_api.arguments.experts import experts
from kernel_api.epilogue.graph import HADAMARD_BLOCK
from kernel_api.errors import ArgumentError
from kernel_api.fusions._activation import bent_dsrelu, dactivation_of, srelu
from kernel_api.fusions._glu import (
    check_halves,
    checked_pairs,
    dglu_of,
    glu_of,
    limits_of,
    of_blocks,
)
from kernel_api.fusions._shared import (
    Function,
    above_0,
    epilogue_of,
    one_of,
    real,
    required,
    shaped,
    times,
    weighted,
)
from kernel_api.fusions._store import MODES, quantized, written_scale
from kernel_api.operands import Operand


class _Groups(NamedTuple):
    """Tokens and experts of a product of groups of rows.

    Attributes:
        T: Tokens.
        E: Experts.
        N: Columns of the product.
    """

    A: Operand
    B: Operand
    T: int
    E: int
    N: int

    def per_token(self, name: str, value: Any) -> Operand | None:
        """(T,) or (T, 1); as it broadcasts against the accumulator."""
        operand = shaped(name, value, (self.T,), (self.T, 1))
        if operand is None or operand.rank == 2:
            return operand
        return operand.viewed(operand.tensor.unsqueeze(-1), name)

    def per_expert(self, name: str, value: Any) -> Any:
        """A number, a tensor () or (E,); as it broadcasts against the accumulator."""
        return per_expert(name, value, self.E)

    def bias(self, value: Any) -> Operand | None:
        """(E, N), or (N,) for all experts; as it broadcasts against the accumulator."""
        operand = shaped("bias", value, (self.E, self.N), (self.N,))
        if operand is None or operand.rank == 1:
            return operand
        return operand.viewed(operand.tensor.unsqueeze(-2), "bias")

    def matrix(self, name: str, value: Any, columns: int) -> Operand | None:
        return shaped(name, value, (self.T, columns))

    def amax(self, value: Any) -> Operand | None:
        return shaped("amax", value, (self.E,))

    def fused(
        self,
        function: Function,
        out: Any,
        offsets: Any,
        reads: dict[str, Any],
        writes: dict[str, Any] | None = None,
        **how: Any,
    ) -> GroupedGemmArguments:
        """Arguments with the epilogue that a function computes of what is there."""
        epilogue = epilogue_of(function, reads, writes or {})
        return GroupedGemmArguments(self.A, self.B, out, offsets, epilogue=epilogue, **how)


def _groups(A: Any, B: Any, row_index: Any = None) -> _Groups:
    """Raises ArgumentError unless these are tokens and experts."""
    A, B = A if isinstance(A, Operand) else Operand(A, "A"), experts(B)
    if A.rank != 2 or B.rank != 3:
        raise ArgumentError(
            f"A has rank {A.rank} and B rank {B.rank}; expected tokens (T, K) and experts (E, K, N)"
        )
    tokens = A if row_index is None else Operand(row_index, "row_index")
    return _Groups(A, B, tokens.shape[0] if tokens.rank else 0, B.shape[0], B.shape[2])


def per_expert(name: str, value: Any, E: int) -> Any:
    """A number, a tensor () or (E,); as it broadcasts against the accumulator."""
    if value is None or isinstance(value, numbers.Real):
        return real(name, value)
    operand = shaped(name, value, (E,), ())
    assert operand is not None
    return operand if not operand.rank else operand.viewed(operand.tensor.view(E, 1, 1), name)


# Plain products --------------------------------------------------------------------------


def grouped_gemm(
    A: Any,
    B: Any,
    offsets: Any,
    *,
    out: Any,
    bias: Any = None,
    prob: Any = None,
    alpha: Any = None,
    accumulate: bool = False,
    row_index: Any = None,
    out_row_index: Any = None,
    epilogue: EpilogueArguments | None = None,
) -> GroupedGemmArguments:
    """out = alpha · acc · prob, or with a bias alpha · acc + bias · prob, of the expert of each
    token; of A (M, T) and B (T, N) see :func:`grouped_gemm_wgrad`.

    With a bias, ``prob`` is not on the product: what comes from :func:`grouped_gemm_glu` carries
    it already.

    Args:
        row_index, out_row_index, accumulate: See
            :class:`~kernel_api.arguments.GroupedGemmArguments`.
        epilogue: A function of the accumulator in place of all that.
    """
    options = {"alpha": alpha, "bias": bias, "prob": prob}
    given = [name for name, value in options.items() if value is not None]
    how = {"accumulate": accumulate, "row_index": row_index, "out_row_index": out_row_index}
    if epilogue is not None and given:
        raise ArgumentError(
            f"epilogue is given and so is {' and '.join(given)}; write it in epilogue"
        )
    if not given:
        return GroupedGemmArguments(A, B, out, offsets, epilogue=epilogue, **how)
    if not isinstance(B, (list, tuple)) and Operand(B, "B").rank == 2:
        for name in ("bias", "prob"):
            if name in given:
                raise ArgumentError(f"{name} is given and B is (T, N); it is for experts (E, K, N)")
        return _sum_over_tokens(A, B, offsets, out, alpha, **how)
    groups = _groups(A, B, row_index)
    reads = {
        "alpha": groups.per_expert("alpha", alpha),
        "bias": groups.bias(bias),
        "prob": groups.per_token("prob", prob),
    }
    return groups.fused(_weighted, out, offsets, reads, **how)


def _weighted(accum: Any, alpha: Any = None, bias: Any = None, prob: Any = None) -> dict[str, Any]:
    return {"out": weighted(accum, alpha, bias, prob)}


def grouped_gemm_wgrad(
    A: Any, B: Any, offsets: Any, *, out: Any, accumulate: bool = False, alpha: Any = None
) -> GroupedGemmArguments:
    """out[e] = alpha · A[:, tokens of e] · B[tokens of e]: the gradient of the experts' weights;
    zeros where there are no tokens.

    Args:
        A: (M, T).
        B: (T, N).
        out: (E, M, N), or a list of E tensors (M, N).
        accumulate: Add to ``out``.
    """
    out = experts(out, "out")
    if out.rank != 3:
        raise ArgumentError(f"out has shape {out.shape}; expected (E, M, N), a sum of each group")
    if alpha is None:
        return GroupedGemmArguments(A, B, out, offsets, accumulate=accumulate)
    return _sum_over_tokens(A, B, offsets, out, alpha, accumulate=accumulate)


def _sum_over_tokens(
    A: Any, B: Any, offsets: Any, out: Any, alpha: Any, **how: Any
) -> GroupedGemmArguments:
    out = experts(out, "out")
    E = out.shape[0] if out.rank else 0
    epilogue = epilogue_of(_scaled, {"alpha": per_expert("alpha", alpha, E)}, {})
    return GroupedGemmArguments(A, B, out, offsets, epilogue=epilogue, **how)


def _scaled(accum: Any, alpha: Any = None) -> dict[str, Any]:
    return {"out": times(alpha, accum)}


# Gated linear units ----------------------------------------------------------------------


def grouped_gemm_glu(
    A: Any,
    B: Any,
    offsets: Any,
    *,
    out: Any,
    kind: str = "swiglu",
    preactivation: Any = None,
    bias: Any = None,
    prob: Any = None,
    alpha: Any = None,
    amax: Any = None,
    order: str = "gate_up",
    granularity: int | str = 32,
    limit: Any = None,
    offset: Any = None,
    scale: Any = None,
    row_index: Any = None,
) -> GroupedGemmArguments:
    """:func:`gemm_glu` of the expert of each token: out = f(gate) · h(up) · prob, of the column
    pairs gate and up of alpha · acc + bias, the ``preactivation``; amax = max |out| per expert,
    before that is in units of ``scale``, (T, N / 256)."""
    groups = _groups(A, B, row_index)
    granularity = checked_pairs(kind, order, granularity)
    check_halves("B has N", groups.N, granularity)
    reads = {
        "alpha": groups.per_expert("alpha", alpha),
        "bias": groups.bias(bias),
        "prob": groups.per_token("prob", prob),
        **limits_of(kind, limit, offset),
    }
    writes = {
        "preactivation": groups.matrix("preactivation", preactivation, groups.N),
        "amax": groups.amax(amax),
    }
    out = groups.matrix("out", out, groups.N // 2)
    writes["scale"], top = of_blocks(scale, out, (groups.T,), groups.N // 2)
    function = glu_of(kind, order, granularity, top)
    return groups.fused(function, out, offsets, reads, writes, row_index=row_index)


def grouped_gemm_dglu(
    A: Any,
    B: Any,
    offsets: Any,
    *,
    out: Any,
    preactivation: Any,
    kind: str = "swiglu",
    prob: Any = None,
    dprob: Any = None,
    dbias: Any = None,
    amax: Any = None,
    alpha: Any = None,
    alpha_power: int = 1,
    beta: Any = None,
    order: str = "gate_up",
    granularity: int | str = 32,
    limit: Any = None,
    offset: Any = None,
    deterministic: bool = False,
) -> GroupedGemmArguments:
    """:func:`gemm_dglu` of the expert of each token: the product is the gradient of the result of
    :func:`grouped_gemm_glu`, dy = alpha ** alpha_power · acc, and gate and up are the pairs of
    beta · preactivation::

        d_gate = dy · prob · f'(gate) · h(up)      dprob = Σ over columns of dy · f(gate) · h(up)
        d_up   = dy · prob · f(gate) · h'(up)      dbias = Σ over the expert's rows of out

    Args:
        out: (T, 2N): d_gate and d_up, paired as gate and up; the gradient with respect to
            beta · preactivation.
        preactivation: (T, 2N), what :func:`grouped_gemm_glu` wrote.
        dbias: (E, 2N).
        amax: (E, 2): max |d_gate| and max |d_up|.
        alpha_power: 1; or 2, where both operands were divided by alpha.
        deterministic: Sums are formed in one order whatever this is.
    """
    groups = _groups(A, B)
    whether("deterministic", deterministic)
    wide = 2 * groups.N
    granularity = checked_pairs(kind, order, granularity)
    check_halves("preactivation has columns", wide, granularity)
    one_of("alpha_power", alpha_power, (1, 2))
    pair = shaped("amax", amax, (groups.E, 2))
    reads = {
        "preactivation": required("preactivation", preactivation, (groups.T, wide)),
        "alpha": groups.per_expert("alpha", alpha),
        "beta": groups.per_expert("beta", beta),
        "prob": groups.per_token("prob", prob),
        **limits_of(kind, limit, offset),
    }
    writes = {
        **_sums(groups, dprob, dbias, wide),
        "amax_gate": None if pair is None else pair.viewed(pair.tensor[:, 0], "amax"),
        "amax_up": None if pair is None else pair.viewed(pair.tensor[:, 1], "amax"),
    }
    out = groups.matrix("out", out, wide)
    function = dglu_of(kind, order, granularity, alpha_power)
    return groups.fused(function, out, offsets, reads, writes)


def _sums(groups: _Groups, dprob: Any, dbias: Any, columns: int) -> dict[str, Any]:
    return {
        "dprob": shaped("dprob", dprob, (groups.T,)),
        "dbias": shaped("dbias", dbias, (groups.E, columns)),
    }


def grouped_gemm_glu_hadamard(
    A: Any,
    B: Any,
    offsets: Any,
    *,
    out: Any,
    preactivation: Any = None,
    prob: Any = None,
    alpha: Any = None,
    amax: Any = None,
    axis: int = -1,
    normalised: bool = False,
    signs: Any = None,
    order: str = "gate_up",
    granularity: int | str = 32,
) -> GroupedGemmArguments:
    """out = blocks of 16 columns of y times signs, then times H16, of y = up · silu(gate) · prob
    as :func:`grouped_gemm_glu` has it; amax = max |out| per expert.

    Args:
        axis: -1, along the columns of ``out``; along tokens there is none.
        normalised: Divide by 4 = √16.
        signs: (16,); absent, they are all 1.
    """
    groups = _groups(A, B)
    granularity = checked_pairs("swiglu", order, granularity)
    check_halves("B has N", groups.N, granularity)
    one_of("axis", axis, (-1,))
    if groups.N // 2 % HADAMARD_BLOCK:
        raise ArgumentError(
            f"out has columns = {groups.N // 2}; blocks of {HADAMARD_BLOCK} need a multiple"
        )
    reads = {
        "alpha": groups.per_expert("alpha", alpha),
        "prob": groups.per_token("prob", prob),
        "signs": shaped("signs", signs, (HADAMARD_BLOCK,)),
    }
    writes = {
        "preactivation": groups.matrix("preactivation", preactivation, groups.N),
        "amax": groups.amax(amax),
    }
    out = groups.matrix("out", out, groups.N // 2)
    function = _glu_hadamard(order, granularity, whether("normalised", normalised))
    return groups.fused(function, out, offsets, reads, writes)


@functools.lru_cache
def _glu_hadamard(order: str, granularity: int | str, normalised: bool) -> Function:
    glu = glu_of("swiglu", order, granularity)

    def fn(accum: Any, alpha: Any = None, prob: Any = None, signs: Any = None) -> dict[str, Any]:
        found = glu(accum, alpha, prob=prob)
        turned = ep.hadamard(found["out"], normalised, signs)
        return {**found, "out": turned, "amax": ep.amax(turned, None)}

    return fn


# Activations -----------------------------------------------------------------------------


def grouped_gemm_srelu(
    A: Any,
    B: Any,
    offsets: Any,
    *,
    out: Any,
    preactivation: Any = None,
    bias: Any = None,
    prob: Any = None,
    alpha: Any = None,
    amax: Any = None,
    limit: Any = None,
) -> GroupedGemmArguments:
    """:func:`gemm_srelu` of the expert of each token: preactivation = x = alpha · acc + bias,
    out = max(x, 0)² · prob, amax = max |out| per expert.

    Args:
        limit: A number above 0; with it, out = (limit · tanh(max(x, 0) / limit))² · prob.
    """
    groups = _groups(A, B)
    reads = {
        "alpha": groups.per_expert("alpha", alpha),
        "bias": groups.bias(bias),
        "prob": groups.per_token("prob", prob),
        "limit": above_0("limit", limit),
    }
    writes = {
        "preactivation": groups.matrix("preactivation", preactivation, groups.N),
        "amax": groups.amax(amax),
    }
    return groups.fused(srelu, groups.matrix("out", out, groups.N), offsets, reads, writes)


def grouped_gemm_dsrelu(
    A: Any,
    B: Any,
    offsets: Any,
    *,
    out: Any,
    preactivation: Any,
    prob: Any = None,
    dprob: Any = None,
    dbias: Any = None,
    amax: Any = None,
    alpha: Any = None,
    limit: Any = None,
    deterministic: bool = False,
) -> GroupedGemmArguments:
    """The gradient of :func:`grouped_gemm_srelu` with respect to its pre-activation x; the product
    is that of its result, dy = alpha · acc::

        out   = dy · prob · 2 · max(x, 0)            dbias = Σ over the expert's rows of out
        dprob = Σ over columns of dy · max(x, 0)²    amax  = max |out| per expert

    Args:
        preactivation: (T, N), what :func:`grouped_gemm_srelu` wrote.
        limit: As there; with t = tanh(max(x, 0) / limit) and c = limit · t, out = dy · prob · 2 · c
            · (1 − t²) and dprob = Σ of dy · c².
        deterministic: Sums are formed in one order whatever this is.
    """
    groups = _groups(A, B)
    whether("deterministic", deterministic)
    N = groups.N
    reads = {
        "preactivation": required("preactivation", preactivation, (groups.T, N)),
        "alpha": groups.per_expert("alpha", alpha),
        "prob": groups.per_token("prob", prob),
        "limit": above_0("limit", limit),
    }
    writes = {**_sums(groups, dprob, dbias, N), "amax": groups.amax(amax)}
    function = dactivation_of("squared_relu") if limit is None else bent_dsrelu
    return groups.fused(function, groups.matrix("out", out, N), offsets, reads, writes)


# Quantisation ----------------------------------------------------------------------------


def grouped_gemm_quantize(
    A: Any,
    B: Any,
    offsets: Any,
    *,
    out: Any,
    scale: Any = None,
    mode: str = "tensor",
    bias: Any = None,
    prob: Any = None,
    row_scale: Any = None,
    alpha: Any = None,
    amax: Any = None,
) -> GroupedGemmArguments:
    """:func:`gemm_quantize` of the expert of each token: out = round(x / scale) of x = alpha ·
    row_scale · acc · prob, or with a bias x = alpha · row_scale · acc + bias · prob.

    Args:
        scale: As there, (T,), (T, N / 32) or (T, N / 128) where it is written. Where it is read: a
            number, a tensor () or one per expert, (E,); absent, 1.
        row_scale: (T,).
        amax: (E,): max |x| per expert.
    """
    groups = _groups(A, B)
    one_of("mode", mode, MODES)
    out = required("out", out, (groups.T, groups.N))
    reads = {
        "alpha": groups.per_expert("alpha", alpha),
        "bias": groups.bias(bias),
        "prob": groups.per_token("prob", prob),
        "row_scale": groups.per_token("row_scale", row_scale),
    }
    writes = {"amax": groups.amax(amax)}
    if mode == "tensor":
        reads["scale"] = groups.per_expert("scale", scale)
    else:
        writes["scale"] = written_scale(mode, scale, (groups.T,), groups.N)
    return groups.fused(quantized(mode, out), out, offsets, reads, writes)
