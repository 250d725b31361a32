"""Fusions of products of groups, against torch and its autograd."""

import numpy as np
import pytest
import torch
from support.fusions import GLU, close, gradient, pairs
from support.grouped import GROUPS, GroupedDraw, computed
from torch.nn import functional

import kernel_api as ka
from kernel_api import fusions
from kernel_api.errors import ArgumentError

#: Empty groups first, in the middle and last, and tokens of none.
MIXED = ([0, 5, 5, 12, 13, 13], 15)

LIMITS = {"geglu_clamped": {"limit": 0.8, "offset": 0.3}}


@pytest.fixture(params=GROUPS.values(), ids=list(GROUPS))
def groups(request):
    return request.param


def drawn(groups, N=64, K=5, **how):
    return GroupedDraw(*groups, N, K, **how)


def rows_close(draw, found, expected):
    """Of tokens in groups; the others are as they were."""
    close(found[: draw.used], expected)
    assert found[draw.used :].isnan().all()


def of_token(draw, per_expert):
    return per_expert[draw.expert]


# Plain products --------------------------------------------------------------------------


def test_a_product_of_groups_is_one_product_per_expert(groups):
    draw = drawn(groups, 7)
    A, B = draw.A, draw.B
    out = draw.written(draw.T, 7)
    rows_close(draw, computed(fusions.grouped_gemm(A, B, draw.offsets, out=out))["out"],
               draw.product(A, B))  # fmt: skip


def test_prob_is_on_the_product_without_a_bias_and_on_the_bias_with_one(groups):
    draw = drawn(groups, 7)
    A, B, alpha, bias = draw.A, draw.B, draw.random(draw.E), draw.random(draw.E, 7)
    prob = draw.per_token()
    shown = prob[: draw.used, None]
    x = of_token(draw, alpha)[:, None] * draw.product(A, B)

    def found(**options):
        out = draw.written(draw.T, 7)
        return computed(fusions.grouped_gemm(A, B, draw.offsets, out=out, **options))["out"]

    rows_close(draw, found(alpha=alpha), x)
    rows_close(draw, found(alpha=alpha, prob=prob), x * shown)
    rows_close(draw, found(alpha=alpha, prob=prob[:, None], bias=bias),
               x + of_token(draw, bias) * shown)  # fmt: skip
    rows_close(draw, found(bias=bias[0], alpha=0.5), 0.5 * draw.product(A, B) + bias[0])


def test_tokens_are_picked_and_results_scattered():
    draw = drawn(([3, 3, 9], 11), 7)
    source, B, prob = draw.random(4, 5), draw.B, draw.per_token()
    pick = torch.randint(0, 4, (11,), generator=draw.drawn, dtype=torch.int32)
    place = torch.randperm(20, generator=draw.drawn)[:11].to(torch.int32)
    args = fusions.grouped_gemm(
        source, B, draw.offsets, out=draw.written(20, 7), prob=prob,
        row_index=pick, out_row_index=place,
    )  # fmt: skip
    found = computed(args)["out"]
    close(found[place[:9].long()], draw.product(source[pick.long()], B) * prob[:9, None])
    others = torch.ones(20, dtype=torch.bool)
    others[place[:9].long()] = False
    assert found[others].isnan().all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("alpha", [None, "numbers", 0.5])
def test_gradients_of_weights_sum_over_the_tokens_of_each_expert(groups, accumulate, alpha):
    draw = drawn(groups, 7)
    A, B = draw.per_token(5).t(), draw.per_token(7)
    alpha = draw.random(draw.E) if alpha == "numbers" else alpha
    before = draw.random(draw.E, 5, 7)
    out = before.clone()
    for fusion in (fusions.grouped_gemm_wgrad, fusions.grouped_gemm):
        out.copy_(before)
        args = fusion(A, B, draw.offsets, out=out, accumulate=accumulate, alpha=alpha)
        (kernel,) = ka.get_kernels(args, providers=["reference"])
        kernel.run(args)
        products = torch.stack([A[:, group] @ B[group] for group in draw.groups])
        factor = 1.0 if alpha is None else torch.as_tensor(alpha).reshape(-1, 1, 1)
        close(out, (before if accumulate else 0) + factor * products)


def test_gradients_of_weights_take_neither_bias_nor_prob():
    draw = drawn(([3, 9], 9), 7)
    A, B, out = draw.A.t(), draw.per_token(7), draw.written(2, 5, 7)
    for name, value in (("bias", draw.random(2, 7)), ("prob", draw.per_token())):
        with pytest.raises(ArgumentError, match=f"{name} is given and B is"):
            fusions.grouped_gemm(A, B, draw.offsets, out=out, **{name: value})


def test_an_epilogue_stands_alone():
    draw = drawn(([3, 9], 9), 7)
    A, B, out = draw.A, draw.B, draw.written(9, 7)
    epilogue = ka.EpilogueArguments(lambda accum: accum * 2)
    found = computed(fusions.grouped_gemm(A, B, draw.offsets, out=out, epilogue=epilogue))
    close(found["out"], 2 * draw.product(A, B))
    with pytest.raises(ArgumentError, match="epilogue is given and so is alpha"):
        fusions.grouped_gemm(A, B, draw.offsets, out=out, epilogue=epilogue, alpha=2.0)


# Gated linear units ----------------------------------------------------------------------


#: Every kind on mixed groups, and one on all that there are.
each_kind = pytest.mark.parametrize(
    ("kind", "groups"),
    [
        *(pytest.param(kind, MIXED, id=kind) for kind in GLU),
        *(pytest.param("swiglu", groups, id=text) for text, groups in GROUPS.items()),
    ],
)


@each_kind
def test_every_kind_of_gated_linear_unit_is_its_formula(kind, groups):
    draw, limits = drawn(groups), LIMITS.get(kind, {})
    A, B, bias, alpha = draw.A, draw.B, draw.random(draw.E, 64), draw.random(draw.E)
    prob = draw.per_token()
    args = fusions.grouped_gemm_glu(
        A, B, draw.offsets, out=draw.written(draw.T, 32), kind=kind, bias=bias, prob=prob,
        alpha=alpha, preactivation=draw.written(draw.T, 64), amax=draw.written(draw.E), **limits,
    )  # fmt: skip
    found = computed(args)
    x = of_token(draw, alpha)[:, None] * draw.product(A, B) + of_token(draw, bias)
    y = GLU[kind](*pairs(x, "gate_up", 32), **limits) * prob[: draw.used, None]
    rows_close(draw, found["preactivation"], x)
    rows_close(draw, found["out"], y)
    close(found["amax"], draw.largest(y))


def test_columns_alternate_as_the_formula_says():
    """D[:, 32j + i] = c[64j + 32 + i] · silu(c[64j + i])"""
    draw = drawn(([2, 5], 5), 128)
    A, B = draw.A, draw.B
    args = fusions.grouped_gemm_glu(A, B, draw.offsets, out=draw.written(5, 64))
    found, x = computed(args)["out"], draw.product(A, B)
    for column in range(64):
        j, i = divmod(column, 32)
        gate = x[:, 64 * j + i]
        close(found[:, column], x[:, 64 * j + 32 + i] * gate / (1 + torch.exp(-gate)))


def test_a_gated_linear_unit_picks_its_tokens_and_blocks_otherwise():
    draw = drawn(([2, 5], 6), 10)
    source, B = draw.random(3, 5), draw.B
    pick = torch.tensor([2, 0, 2, 1, 0, 1], dtype=torch.int32)
    args = fusions.grouped_gemm_glu(
        source, B, draw.offsets, out=draw.written(6, 5), kind="reglu", order="up_gate",
        granularity="halves", row_index=pick,
    )  # fmt: skip
    x = draw.product(source[pick.long()], B)
    rows_close(draw, computed(args)["out"], GLU["reglu"](*pairs(x, "up_gate", "halves")))


@pytest.mark.parametrize("alpha_power", [1, 2])
@each_kind
def test_the_gradient_of_a_gated_linear_unit_is_that_of_autograd(kind, alpha_power, groups):
    draw, limits = drawn(groups, 32), LIMITS.get(kind, {})
    A, B, saved, prob = draw.A, draw.B, draw.per_token(64), draw.per_token()
    alpha, beta = draw.random(draw.E), draw.random(draw.E)
    args = fusions.grouped_gemm_dglu(
        A, B, draw.offsets, out=draw.written(draw.T, 64), preactivation=saved, kind=kind,
        prob=prob, dprob=draw.written(draw.T), dbias=draw.written(draw.E, 64), alpha=alpha,
        alpha_power=alpha_power, beta=beta, amax=draw.written(draw.E, 2), **limits,
    )  # fmt: skip
    found = computed(args)
    dy = of_token(draw, alpha**alpha_power)[:, None] * draw.product(A, B)
    x = (of_token(draw, beta)[:, None] * saved[: draw.used]).requires_grad_()
    shown = prob[: draw.used].clone().requires_grad_()
    y = GLU[kind](*pairs(x, "gate_up", 32), **limits) * shown[:, None]
    dx, dprob = (gradient(y, of, dy) for of in (x, shown))
    rows_close(draw, found["out"], dx)
    rows_close(draw, found["dprob"], dprob)
    close(found["dbias"], draw.summed(dx))
    for name, part in zip(("amax_gate", "amax_up"), pairs(dx, "gate_up", 32), strict=True):
        close(found[name], draw.largest(part))


def test_both_largest_values_of_a_gradient_stand_in_one_tensor():
    draw = drawn(([2, 5], 6), 32)
    amax = draw.written(2, 2)
    args = fusions.grouped_gemm_dglu(
        draw.A, draw.B, draw.offsets, out=draw.written(6, 64),
        preactivation=draw.per_token(64), amax=amax,
    )  # fmt: skip
    found = computed(args)["out"][:5]
    largest = [draw.largest(part) for part in pairs(found, "gate_up", 32)]
    close(amax, torch.stack(largest, dim=1))


def test_forward_and_backward_are_a_round_trip():
    """x → GLU → down projection, and every gradient by the fusions, against autograd."""
    draw = drawn(([4, 4, 9, 17], 17), 64)
    K, inner = 5, 32
    x, up, down = draw.A, draw.B, draw.random(4, inner, K) / inner**0.5
    bias, prob, upstream = draw.random(4, 64), draw.per_token(), draw.per_token(K)
    leaves = [one.clone().requires_grad_() for one in (x, up, down, bias, prob)]
    tx, tup, tdown, tbias, tprob = leaves
    h = draw.product(tx, tup) + of_token(draw, tbias)
    y = GLU["swiglu"](*pairs(h, "gate_up", 32)) * tprob[:, None]
    expected = torch.autograd.grad(draw.product(y, tdown), leaves, upstream)

    offsets, written = draw.offsets, draw.written
    forward = computed(fusions.grouped_gemm_glu(
        x, up, offsets, out=written(17, inner), preactivation=written(17, 64), bias=bias,
        prob=prob,
    ))  # fmt: skip
    backward = computed(fusions.grouped_gemm_dglu(
        upstream, down.transpose(1, 2), offsets, out=written(17, 64),
        preactivation=forward["preactivation"], prob=prob, dprob=written(17),
        dbias=written(4, 64),
    ))  # fmt: skip
    dx = computed(fusions.grouped_gemm(
        backward["out"], up.transpose(1, 2), offsets, out=written(17, K)
    ))  # fmt: skip
    dup, ddown = (
        computed(fusions.grouped_gemm_wgrad(a.t(), b, offsets, out=written(4, *shape)))["out"]
        for a, b, shape in (
            (x, backward["out"], (K, 64)), (forward["out"], upstream, (inner, K)),
        )
    )  # fmt: skip
    found = (dx["out"], dup, ddown, backward["dbias"], backward["dprob"])
    for one, other in zip(found, expected, strict=True):
        close(one, other)


# Hadamard --------------------------------------------------------------------------------


def hadamard(rows):
    """H16 by its definition: −1 to the number of bits that i and j share."""
    matrix = [[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]
    blocks = rows.unflatten(-1, (-1, 16)) @ torch.tensor(matrix, dtype=rows.dtype)
    return blocks.flatten(-2)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_a_gated_linear_unit_is_turned_by_hadamard(normalised, signed, groups):
    draw = drawn(groups)
    A, B, prob, alpha = draw.A, draw.B, draw.per_token(), draw.random(draw.E)
    signs = draw.random(16).sign() if signed else None
    args = fusions.grouped_gemm_glu_hadamard(
        A, B, draw.offsets, out=draw.written(draw.T, 32), prob=prob, alpha=alpha, signs=signs,
        normalised=normalised, amax=draw.written(draw.E), preactivation=draw.written(draw.T, 64),
    )  # fmt: skip
    found = computed(args)
    x = of_token(draw, alpha)[:, None] * draw.product(A, B)
    y = GLU["swiglu"](*pairs(x, "gate_up", 32)) * prob[: draw.used, None]
    turned = hadamard(y * signs.repeat(2) if signed else y) * (0.25 if normalised else 1.0)
    rows_close(draw, found["preactivation"], x)
    rows_close(draw, found["out"], turned)
    close(found["amax"], draw.largest(turned))


# Squared relu ----------------------------------------------------------------------------


def squared_relu(x, limit):
    above = functional.relu(x)
    return (above if limit is None else limit * torch.tanh(above / limit)) ** 2


@pytest.mark.parametrize("limit", [None, 0.6])
def test_squared_relu_and_its_gradient_are_those_of_autograd(limit, groups):
    draw = drawn(groups, 7)
    A, B, bias, prob = draw.A, draw.B, draw.random(draw.E, 7), draw.per_token()
    alpha, upstream, down = draw.random(draw.E), draw.per_token(5), draw.random(draw.E, 5, 7)
    forward = computed(fusions.grouped_gemm_srelu(
        A, B, draw.offsets, out=draw.written(draw.T, 7), bias=bias, prob=prob, alpha=alpha,
        preactivation=draw.written(draw.T, 7), amax=draw.written(draw.E), limit=limit,
    ))  # fmt: skip
    x = of_token(draw, alpha)[:, None] * draw.product(A, B) + of_token(draw, bias)
    x.requires_grad_()
    shown = prob[: draw.used].clone().requires_grad_()
    y = squared_relu(x, limit) * shown[:, None]
    rows_close(draw, forward["preactivation"], x)
    rows_close(draw, forward["out"], y)
    close(forward["amax"], draw.largest(y))

    backward = computed(fusions.grouped_gemm_dsrelu(
        upstream, down, draw.offsets, out=draw.written(draw.T, 7),
        preactivation=forward["preactivation"], prob=prob, dprob=draw.written(draw.T),
        dbias=draw.written(draw.E, 7), amax=draw.written(draw.E), alpha=alpha, limit=limit,
    ))  # fmt: skip
    dy = of_token(draw, alpha)[:, None] * draw.product(upstream, down)
    dx, dprob = (gradient(y, of, dy) for of in (x, shown))
    rows_close(draw, backward["out"], dx)
    rows_close(draw, backward["dprob"], dprob)
    close(backward["dbias"], draw.summed(dx))
    close(backward["amax"], draw.largest(dx))


@pytest.mark.parametrize("limit", [0, 0.0, -1.0, float("nan"), float("inf"), np.float32(-0.5)])
def test_a_limit_of_squared_relu_is_above_0_every_time(limit):
    x, w, ends = torch.randn(4, 8), torch.randn(1, 8, 16), torch.tensor([4], dtype=torch.int32)
    z = torch.randn(4, 16)
    for call in (
        lambda limit: ka.ops.grouped_gemm_srelu(x, w, ends, limit=limit),
        lambda limit: ka.ops.grouped_gemm_dsrelu(x, w, ends, preactivation=z, limit=limit),
    ):
        for _ in range(2):  # calls that look like an earlier one are not checked again
            for taken in (7, 7.0, 1, 0.5, np.float32(2.5)):
                assert not call(taken).isnan().any()
            with pytest.raises(ArgumentError, match=r"limit is .*; expected a finite number"):
                call(limit)


def test_a_limit_is_one_number():
    x, w, ends = torch.randn(4, 8), torch.randn(1, 8, 16), torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"limit has shape \(16,\); expected one number"):
        ka.ops.grouped_gemm_srelu(x, w, ends, limit=torch.ones(16))


# Quantisation ----------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("mode", ["tensor", "row", "mx"])
def test_results_are_quantised_by_tensor_expert_row_or_block(mode, with_bias, groups):
    draw = drawn(groups, element=torch.float32)
    A, B, prob, row_scale = draw.A, draw.B, draw.per_token(), draw.per_token().abs() + 0.5
    alpha, bias = draw.random(draw.E), draw.random(draw.E, 64) if with_bias else None
    scales = {
        "tensor": draw.random(draw.E).abs() + 0.1,
        "row": draw.written(draw.T),
        "mx": draw.written(draw.T, 2).to(torch.float8_e8m0fnu),
    }
    args = fusions.grouped_gemm_quantize(
        A, B, draw.offsets, out=draw.written(draw.T, 64).to(E4M3), scale=scales[mode], mode=mode,
        bias=bias, prob=prob, row_scale=row_scale, alpha=alpha, amax=draw.written(draw.E),
    )  # fmt: skip
    found = computed(args)
    shown, factor = prob[: draw.used, None], row_scale[: draw.used, None]
    x = of_token(draw, alpha)[:, None] * factor * draw.product(A, B)
    x = x + of_token(draw, bias) * shown if with_bias else x * shown
    if mode == "tensor":
        divisor = of_token(draw, scales["tensor"])[:, None]
    elif mode == "row":
        divisor = found["scale"][: draw.used, None]
        close(divisor, x.abs().amax(1, keepdim=True) / 448, 1e-5)
    else:
        divisor = found["scale"][: draw.used].float().repeat_interleave(32, dim=1)
    stored = found["out"][: draw.used].float()
    assert ((stored - (x / divisor).clamp(-448, 448)).abs() <= 0.067 * stored.abs() + 2e-3).all()
    close(found["amax"], draw.largest(x), 1e-5)


def test_a_scale_that_is_read_may_be_absent_or_a_number():
    draw = drawn(([2, 5], 5), element=torch.float32)
    A, B = draw.A, draw.B
    for scale, factor in ((None, 1.0), (0.25, 4.0)):
        out = draw.written(5, 64).to(E4M3)
        args = fusions.grouped_gemm_quantize(A, B, draw.offsets, out=out, scale=scale)
        expected = (factor * draw.product(A, B)).to(E4M3).float()
        close(computed(args)["out"].float(), expected, 0.13)


# Experts that lie anywhere ---------------------------------------------------------------


def test_experts_may_be_a_list_of_tensors():
    draw = drawn(([4, 4, 9], 9))
    A, B = draw.A, draw.B
    found = [
        computed(fusions.grouped_gemm_glu(
            A, experts, draw.offsets, out=draw.written(9, 32), amax=draw.written(3)
        ))
        for experts in (B, list(B), tuple(B))
    ]  # fmt: skip
    for other in found[1:]:
        assert torch.equal(found[0]["out"], other["out"])
        assert torch.equal(found[0]["amax"], other["amax"])


# Refusals --------------------------------------------------------------------------------


def refused(fusion, text, **options):
    draw = drawn(([4, 4, 9], 9))
    given = {"A": draw.A, "B": draw.B, "offsets": draw.offsets, "out": draw.written(9, 64)}
    with pytest.raises(ArgumentError) as caught:
        fusion(**{**given, **options})
    assert text in str(caught.value)


def test_operands_of_other_shapes_are_named():
    zeros = torch.zeros
    glu, dglu = fusions.grouped_gemm_glu, fusions.grouped_gemm_dglu
    plain = fusions.grouped_gemm
    refused(glu, "out has shape (9, 64); expected (9, 32)")
    half = {"out": zeros(9, 32)}
    refused(glu, "prob has shape (8,); expected (9,) or (9, 1)", prob=zeros(8), **half)
    refused(glu, "bias has shape (2, 64); expected (3, 64) or (64,)", bias=zeros(2, 64), **half)
    refused(glu, "alpha has shape (4,); expected (3,) or ()", alpha=zeros(4), **half)
    refused(glu, "amax has shape (); expected (3,)", amax=zeros(()), **half)
    refused(dglu, "preactivation has shape (9, 64)", preactivation=zeros(9, 64))
    refused(plain, "A has rank 3", A=zeros(1, 9, 5), alpha=2.0)
    refused(plain, "offsets has shape (2,)", offsets=zeros(2, dtype=torch.int32))


def test_options_that_cannot_be_are_named():
    half, wide = {"out": torch.zeros(9, 32)}, torch.zeros(9, 128)
    refused(fusions.grouped_gemm_glu, "kind is 'gelu'", kind="gelu", **half)
    refused(fusions.grouped_gemm_glu, "B has N = 64; pairs of 48", granularity=48, **half)
    refused(fusions.grouped_gemm_glu, "limit is 7", limit=7, **half)
    refused(fusions.grouped_gemm_glu_hadamard, "axis is -2; expected one of -1", axis=-2, **half)
    refused(fusions.grouped_gemm_dglu, "alpha_power is 3", alpha_power=3,
            out=wide, preactivation=wide)  # fmt: skip
    refused(fusions.grouped_gemm_dglu, "alpha_power is tensor([1, 2]); expected one of 1, 2",
            alpha_power=torch.tensor([1, 2]), out=wide, preactivation=wide)  # fmt: skip
    refused(fusions.grouped_gemm_quantize, "scale is None", mode="row",
            out=torch.zeros(9, 64).to(E4M3))  # fmt: skip
    refused(fusions.grouped_gemm_quantize, "out's type is 'float64'")


@pytest.mark.parametrize("E", [1, 3])
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("granularity", [1, "halves"])
def test_a_gradient_takes_a_beta_of_every_expert_however_few_columns_there_are(E, N, granularity):
    generator = torch.Generator().manual_seed(0)
    A, B, C = (torch.randn(shape, generator=generator) for shape in ((5, 3), (E, 3, N), (5, 2 * N)))
    offsets = torch.tensor([2, 4, 5][-E:], dtype=torch.int32)
    beta = torch.tensor([0.5, 2.0, 0.3][:E])
    how = {"granularity": granularity}
    found = ka.ops.grouped_gemm_dglu(A, B, offsets, preactivation=C, beta=beta, **how)
    sizes = torch.tensor([*offsets]).diff(prepend=torch.zeros(1, dtype=torch.int32))
    scaled = C * beta.repeat_interleave(sizes).unsqueeze(1)
    expected = ka.ops.grouped_gemm_dglu(A, B, offsets, preactivation=scaled, **how)
    torch.testing.assert_close(found, expected)
