"""Gated linear units and their gradients, against torch and its autograd."""

import numpy as np
import pytest
import torch
from support.fusions import GLU, SETTINGS, Draw, close, computed, gradient, pairs

import kernel_api as ka
from kernel_api.errors import ArgumentError

ALPHA = 0.7
LIMITS = {"geglu_clamped": {"limit": 0.8, "offset": 0.3}}

#: Order and columns of a block.
PAIRS = [("up_gate", 32), ("gate_up", 32), ("up_gate", 1), ("gate_up", 5), ("up_gate", "halves")]
WIDTHS = {32: 192, 1: 26, 5: 30, "halves": 26}


@pytest.fixture(params=SETTINGS.values(), ids=list(SETTINGS))
def setting(request):
    return request.param


def forward(x, kind, order="up_gate", granularity=32, **limits):
    return GLU[kind](*pairs(x, order, granularity), **limits)


@pytest.mark.parametrize("kind", GLU)
def test_every_kind_is_its_formula(kind, setting):
    draw = Draw(7, 128, 5, *setting)
    A, B, bias, prob = draw.A, draw.B, draw.columns(), draw.rows()
    limits = LIMITS.get(kind, {})
    args = ka.fusions.gemm_glu(
        A,
        B,
        out=draw.written(64),
        kind=kind,
        preactivation=draw.written(),
        bias=bias,
        prob=prob,
        alpha=ALPHA,
        **limits,
    )
    x = ALPHA * (A @ B) + bias.unsqueeze(-2)
    found = computed(args)
    close(found["preactivation"], x)
    close(found["out"], forward(x, kind, **limits) * prob.unsqueeze(-1))


def test_columns_alternate_as_the_formula_says():
    """C[:, 32j + i] = AB[:, 64j + i] · silu(AB[:, 64j + 32 + i])"""
    draw = Draw(3, 192, 4)
    A, B = draw.A, draw.B
    found = computed(ka.fusions.gemm_swiglu(A, B, out=draw.written(96)))["out"]
    x = A @ B
    for column in range(96):
        j, i = divmod(column, 32)
        gate = x[:, 64 * j + 32 + i]
        close(found[:, column], x[:, 64 * j + i] * gate / (1 + torch.exp(-gate)))


@pytest.mark.parametrize(("order", "granularity"), PAIRS)
def test_pairs_may_be_ordered_and_blocked_otherwise(order, granularity, setting):
    N = WIDTHS[granularity]
    draw = Draw(7, N, 5, *setting)
    A, B = draw.A, draw.B
    args = ka.fusions.gemm_glu(A, B, out=draw.written(N // 2), order=order, granularity=granularity)
    close(computed(args)["out"], forward(A @ B, "swiglu", order, granularity))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu"])
def test_a_kind_has_a_name_of_its_own(name):
    draw = Draw(7, 128, 5)
    A, B, prob = draw.A, draw.B, draw.rows()
    fusion = getattr(ka.fusions, f"gemm_{name}")
    found = computed(fusion(A, B, out=draw.written(64), prob=prob, alpha=ALPHA))["out"]
    close(found, forward(ALPHA * (A @ B), name) * prob.unsqueeze(-1))


def test_prob_may_be_a_column():
    draw = Draw(7, 64, 5)
    A, B, prob = draw.A, draw.B, draw.random(7, 1)
    found = computed(ka.fusions.gemm_swiglu(A, B, out=draw.written(32), prob=prob))["out"]
    close(found, forward(A @ B, "swiglu") * prob)


@pytest.mark.parametrize("limit", [-1.0, -1, float("nan"), np.float32(-0.5)])
def test_a_limit_is_from_0_up_every_time(limit):
    x, w, experts = torch.randn(4, 8), torch.randn(64, 8), torch.randn(1, 8, 64)
    ends = torch.tensor([4], dtype=torch.int32)
    given = {"kind": "geglu_clamped"}
    for call in (
        lambda limit: ka.ops.gemm_glu(x, w.t(), limit=limit, **given),
        lambda limit: ka.ops.grouped_gemm_glu(x, experts, ends, limit=limit, **given),
        lambda limit: ka.nn.linear_glu(x, w, limit=limit, **given),
    ):
        for _ in range(2):  # calls that look like an earlier one are not checked again
            for taken in (7.0, 7, 1.0, 0.5, 0.0, float("inf"), np.float32(2.5)):
                assert not call(taken).isnan().any()
            with pytest.raises(ArgumentError, match=r"limit is .*; expected a number from 0 up"):
                call(limit)


def test_a_granularity_may_be_a_number_of_numpy():
    x, w, experts = torch.randn(4, 8), torch.randn(16, 8), torch.randn(1, 8, 16)
    dy, z = torch.randn(4, 8), torch.randn(4, 16)
    ends = torch.tensor([4], dtype=torch.int32)
    for call in (
        lambda blocks: ka.ops.gemm_glu(x, w.t(), granularity=blocks),
        lambda blocks: ka.ops.gemm_dglu(x, w[:8].t(), preactivation=z, granularity=blocks),
        lambda blocks: ka.ops.gemm_recompute_dglu(x, w.t(), upstream=dy, granularity=blocks),
        lambda blocks: ka.ops.grouped_gemm_glu(x, experts, ends, granularity=blocks),
        lambda blocks: ka.nn.linear_glu(x, w, granularity=blocks),
    ):
        assert torch.equal(call(np.int64(4)), call(4))
        for refused in (np.int64(0), 2.0, True, np.array([1, 2])):
            with pytest.raises(ArgumentError, match=r"granularity is .*; expected a number of"):
                call(refused)


def test_limit_and_offset_are_7_and_1_unless_said():
    draw = Draw(7, 64, 5)
    A, B = 20 * draw.A, draw.B
    args = ka.fusions.gemm_glu(A, B, out=draw.written(32), kind="geglu_clamped")
    x = A @ B
    assert (x.abs() > 7).any()
    close(computed(args)["out"], forward(x, "geglu_clamped", limit=7.0, offset=1.0))


# Gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GLU)
def test_dglu_is_what_autograd_gives(kind, setting):
    draw = Draw(7, 64, 5, *setting)
    A, B, pre, prob = draw.A, draw.B, draw.matrix(128), draw.rows()
    limits = LIMITS.get(kind, {})
    args = ka.fusions.gemm_dglu(
        A,
        B,
        out=draw.written(128),
        preactivation=pre,
        kind=kind,
        prob=prob,
        dprob=draw.reduced(*prob.shape),
        dbias=draw.reduced(*draw.batches, 128),
        alpha=ALPHA,
        **limits,
    )
    check_gradients(computed(args), kind, pre, prob, ALPHA * (A @ B), **limits)


@pytest.mark.parametrize("kind", GLU)
def test_recompute_dglu_is_what_autograd_gives(kind, setting):
    draw = Draw(7, 128, 5, *setting)
    A, B, bias, prob, dy = draw.A, draw.B, draw.columns(), draw.rows(), draw.matrix(64)
    limits = LIMITS.get(kind, {})
    args = ka.fusions.gemm_recompute_dglu(
        A,
        B,
        out=draw.written(),
        upstream=dy,
        kind=kind,
        bias=bias,
        prob=prob,
        dprob=draw.reduced(*prob.shape),
        dbias=draw.reduced(*bias.shape),
        alpha=ALPHA,
        **limits,
    )
    x = ALPHA * (A @ B) + bias.unsqueeze(-2)
    check_gradients(computed(args), kind, x, prob, dy, **limits)


def check_gradients(found, kind, pre, prob, dy, **limits):
    pre, prob = pre.clone().requires_grad_(), prob.clone().requires_grad_()
    result = forward(pre, kind, **limits) * prob.unsqueeze(-1)
    dpre = gradient(result, pre, dy)
    close(found["out"], dpre)
    close(found["dprob"], gradient(result, prob, dy))
    close(found["dbias"], dpre.sum(-2))


@pytest.mark.parametrize(("order", "granularity"), PAIRS)
def test_gradients_are_paired_as_the_preactivation_is(order, granularity):
    N = WIDTHS[granularity] // 2
    draw = Draw(7, N, 5)
    A, B, pre = draw.A, draw.B, draw.matrix(2 * N)
    args = ka.fusions.gemm_dswiglu(
        A,
        B,
        out=draw.written(2 * N),
        preactivation=pre,
        order=order,
        granularity=granularity,
    )
    pre.requires_grad_()
    result = forward(pre, "swiglu", order, granularity)
    close(computed(args)["out"], gradient(result, pre, A @ B))


@pytest.mark.parametrize("fusion", ["gemm_dglu", "gemm_recompute_dglu", "grouped_gemm_dglu"])
def test_gradients_of_no_columns_are_empty_and_their_sums_zero(fusion):
    """Computed by the graph that other problems have, so that no further kernel is needed."""

    def made(N):
        grouped, recompute = fusion.startswith("grouped"), "recompute" in fusion
        wide = N if recompute else 2 * N
        given = {"upstream": torch.ones(7, N // 2)} if recompute else {}
        given = given or {"preactivation": torch.ones(7, wide)}
        B = torch.ones(1, 5, N) if grouped else torch.ones(5, N)
        ends = [torch.tensor([7], dtype=torch.int32)] if grouped else []
        written = {"out": torch.empty(7, wide), "dprob": torch.full((7,), torch.nan)}
        given["prob"] = torch.ones(7)
        return getattr(ka.fusions, fusion)(torch.ones(7, 5), B, *ends, **written, **given)

    args = made(0)
    assert args.epilogue.identity == made(64).epilogue.identity
    found = computed(args)
    assert found["out"].shape == (7, 0) and torch.equal(found["dprob"], torch.zeros(7))


def test_the_gradient_at_a_limit_is_that_of_inside():
    """What torch gives for a number that is at its limit is not the same in every version."""
    pre = torch.tensor([[1.0, -1.0, 0.5, 1.0, 2.0, -2.0, -1.0, 0.25]], dtype=torch.float64)
    A, B = torch.ones(1, 1).double(), torch.ones(1, 4).double()
    args = ka.fusions.gemm_dglu(
        A,
        B,
        out=torch.empty(1, 8).double(),
        preactivation=pre,
        kind="geglu_clamped",
        granularity=1,
        limit=1.0,
        offset=0.5,
    )
    found = computed(args)["out"]
    leaf = torch.where(pre.abs() == 1, pre * (1 - 1e-15), pre).requires_grad_()
    result = forward(leaf, "geglu_clamped", "up_gate", 1, limit=1.0, offset=0.5)
    close(found, gradient(result, leaf, A @ B))
