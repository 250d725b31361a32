"""The reference of products of groups, against formulas written here; and that verify sees what
is wrong with others."""

import pytest
import torch
from support.grouped import GROUPS, GroupedDraw, ends

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.errors import ArgumentError
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, GroupedGemmOperandsMetadata
from kernel_api.space import Operands, Space
from kernel_api.verification import judge, prepare

TYPES = ("f64", "f32", "bf16", "e4m3", "i8")


@pytest.fixture(params=GROUPS.values(), ids=list(GROUPS))
def groups(request):
    return request.param


def integers(draw, *shape, kind="f64"):
    """Small ones, so that every sum is exact in every type."""
    from kernel_api.dtypes import dtype

    drawn = torch.randint(-2, 3, shape, generator=draw.drawn)
    return drawn.to(dtype(kind).torch)


def result_type(kind):
    return {"f64": torch.float64, "i8": torch.int32}.get(kind, torch.float32)


def verified(args):
    """What the reference writes; it passes its own verification."""
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    verdict = ka.verify(kernel, args)
    assert verdict, verdict
    return args.out.tensor


def products(draw, A, B):
    """Of the tokens that belong to a group, in float64."""
    return draw.product(A.double(), B.double())


# Rows in groups --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_a_group_are_multiplied_with_its_expert(kind, groups):
    draw = GroupedDraw(*groups, 6, 5)
    A, B = integers(draw, draw.T, 5, kind=kind), integers(draw, draw.E, 5, 6, kind=kind)
    out = torch.zeros(draw.T, 6, dtype=result_type(kind))
    found = verified(ka.GroupedGemmArguments(A, B, out, draw.offsets))
    assert torch.equal(found[: draw.used].double(), products(draw, A, B))


@pytest.mark.parametrize("layouts", ["ttt", "tnn", "ntt", "nnn"])
def test_any_strides_are_taken(layouts):
    draw = GroupedDraw([3, 3, 9], 11, 6, 5)

    def matrix(*shape, layout):
        drawn = integers(draw, *shape[:-2], shape[-1], shape[-2] + 3)[..., : shape[-2]]
        return drawn.transpose(-1, -2) if layout == "n" else drawn.transpose(-1, -2).contiguous()

    A, B, out = (
        matrix(*shape, layout=layout)
        for shape, layout in zip(((11, 5), (3, 5, 6), (11, 6)), layouts, strict=True)
    )
    found = verified(ka.GroupedGemmArguments(A, B, out, draw.offsets))
    assert torch.equal(found[:9], products(draw, A, B))


def test_tokens_are_picked_and_placed(groups):
    draw = GroupedDraw(*groups, 6, 5)
    source, B = integers(draw, 4, 5), integers(draw, draw.E, 5, 6)
    pick = torch.randint(0, 4, (draw.T,), generator=draw.drawn, dtype=torch.int32)
    place = torch.randperm(draw.T + 7, generator=draw.drawn)[: draw.T].to(torch.int32)
    expected = products(draw, source[pick.long()], B)
    out = torch.zeros(draw.T, 6, dtype=torch.float64)
    args = ka.GroupedGemmArguments(source, B, out, draw.offsets, row_index=pick)
    assert torch.equal(verified(args)[: draw.used], expected)
    out = torch.zeros(draw.T + 7, 6, dtype=torch.float64)
    args = ka.GroupedGemmArguments(
        source, B, out, draw.offsets, row_index=pick, out_row_index=place
    )  # fmt: skip
    assert torch.equal(verified(args)[place[: draw.used].long()], expected)


def test_tokens_behind_the_last_group_are_neither_read_nor_written():
    draw = GroupedDraw([3, 3, 9], 14, 6, 5)
    A, B = draw.A, draw.B
    assert A[9:].isnan().all()
    out = torch.full((14, 6), 77.0, dtype=torch.float64)
    args = ka.GroupedGemmArguments(A, B, out, draw.offsets)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)
    assert torch.equal(out[9:], torch.full((5, 6), 77.0, dtype=torch.float64))
    assert not out[:9].isnan().any()


def test_offsets_are_read_at_every_run():
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    A, B, offsets = integers(draw, 9, 5), integers(draw, 3, 5, 6), draw.offsets
    args = ka.GroupedGemmArguments(A, B, torch.zeros(9, 6, dtype=torch.float64), offsets)
    verified(args)
    offsets.copy_(ends(1, 7, 8))
    other = GroupedDraw([1, 7, 8], 9, 6, 5)
    assert torch.equal(verified(args)[:8], products(other, A, B))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_float32_is_rounded_to_what_is_allowed(precision):
    draw = GroupedDraw([3, 3, 9], 9, 6, 50, element=torch.float32)
    A, B, out = draw.A, draw.B, torch.zeros(9, 6)
    verified(ka.GroupedGemmArguments(A, B, out, draw.offsets, fp32_precision=precision))


# Sums over groups ------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_tokens_of_a_group_are_summed_over(kind, accumulate, groups):
    draw = GroupedDraw(*groups, 6, 5)
    A, B = integers(draw, 5, draw.T, kind=kind), integers(draw, draw.T, 6, kind=kind)
    before = integers(draw, draw.E, 5, 6).to(result_type(kind))
    out = before.clone()
    args = ka.GroupedGemmArguments(A, B, out, draw.offsets, accumulate=accumulate)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)
    sums = torch.stack([A.double()[:, group] @ B.double()[group] for group in draw.groups])
    assert torch.equal(out.double(), before.double() * accumulate + sums)
    verified(args)


# Scales ----------------------------------------------------------------------------------


def scaled(draw, tensor, mode, *shape):
    scale = draw.random(*shape, element=torch.float32).abs() + 0.5
    return ka.ScaledOperand(tensor, scale, ka.ScaleMode(mode))


def real(operand, contracted):
    """What the stored values mean, in float64."""
    scale = operand.scale.tensor.double()
    stored = operand.tensor.double()
    if operand.mode is ka.ScaleMode.PER_TENSOR:
        return stored * scale.reshape(*scale.shape, *(1,) * (stored.dim() - scale.dim()))
    if operand.mode is ka.ScaleMode.PER_ROW:
        return stored * scale.unsqueeze(contracted)
    for mode in (-1, -2) if operand.mode is ka.ScaleMode.BLOCK_128x128 else (-1,):
        extent = stored.shape[mode]
        scale = scale.repeat_interleave(128, dim=mode).narrow(mode, 0, extent)
    return stored * scale


SCALES = {
    "tensor": ("per_tensor", (), "per_tensor", ()),
    "expert": ("per_tensor", (), "per_tensor", (3,)),
    "row and column": ("per_row", (11,), "per_row", (3, 6)),
    "blocks": ("block_1x128", (11, 2), "block_128x128", (3, 2, 1)),
}


@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("how", SCALES.values(), ids=list(SCALES))
def test_scales_are_those_of_tokens_and_experts(how, picked):
    draw = GroupedDraw([3, 3, 9], 11, 6, 200, element=torch.float8_e4m3fn)
    mode_a, a, mode_b, b = how
    A = scaled(draw, draw.random(11, 200), mode_a, *a)
    B = scaled(draw, draw.random(3, 200, 6), mode_b, *b)
    pick = torch.randint(0, 11, (11,), generator=draw.drawn, dtype=torch.int32)
    out = torch.zeros(11, 6)
    args = ka.GroupedGemmArguments(
        A, B, out, draw.offsets, row_index=pick if picked else None
    )  # fmt: skip
    tokens = real(A, -1)[pick.long()] if picked else real(A, -1)
    expected = draw.product(tokens, real(B, -2))
    torch.testing.assert_close(verified(args)[:9].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", SCALES.values(), ids=list(SCALES))
def test_scales_of_experts_that_lie_anywhere_are_those_of_one_tensor(how):
    draw = GroupedDraw([3, 3, 9], 11, 6, 200, element=torch.float8_e4m3fn)
    mode_a, a, mode_b, b = how
    A = scaled(draw, draw.random(11, 200), mode_a, *a)
    B = scaled(draw, draw.random(3, 200, 6), mode_b, *b)
    tensors = list(B.tensor)
    addresses = torch.tensor([one.data_ptr() for one in tensors])
    given = ka.ExpertPointers(
        addresses, shape=(200, 6), stride=(6, 1), dtype="e4m3", alignment=1
    )  # fmt: skip
    out = torch.zeros(11, 6)
    expected = verified(ka.GroupedGemmArguments(A, B, out, draw.offsets))
    for experts in (tensors, given):
        args = ka.GroupedGemmArguments(
            A, experts, torch.zeros(11, 6), draw.offsets, B_scale=B.scale.tensor
        )  # fmt: skip
        assert torch.equal(verified(args)[:9], expected[:9])


def test_a_prepared_launch_keeps_the_scale_of_its_experts():
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    scale = draw.random(3, 6, element=torch.float32)
    args = ka.GroupedGemmArguments(
        draw.A, list(draw.B), draw.written(9, 6), draw.offsets, B_scale=scale
    )  # fmt: skip
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    launch = kernel.prepare(args)
    A, B, out = draw.A, draw.B, draw.written(9, 6)
    for experts in (list(B), torch.tensor([one.data_ptr() for one in B])):
        out.zero_()
        launch(A, experts, out, draw.offsets)
        torch.testing.assert_close(out, draw.product(A, B * scale.double().unsqueeze(1)))


@pytest.mark.parametrize(("mode", "shape"), [("per_tensor", ()), ("per_row", (20,))])
def test_results_are_stored_in_units_of_a_scale(mode, shape):
    draw = GroupedDraw([3, 3, 9], 11, 6, 5)
    A, B = draw.A.float(), draw.B.float()
    place = torch.randperm(20, generator=draw.drawn)[:11].to(torch.int32)
    out = scaled(draw, torch.zeros(20, 6), mode, *shape)
    args = ka.GroupedGemmArguments(A, B, out, draw.offsets, out_row_index=place)
    rows = place[:9].long()
    verified(args)
    torch.testing.assert_close(real(args.out, -1)[rows].float(), draw.product(A, B))


# Epilogues -------------------------------------------------------------------------------


def everything(accum, prob, bias, alpha, number):
    x = alpha * accum + bias
    y = ep.silu(x) * prob * number
    return (
        y, x, ep.sum(x, -1), ep.max(y, -2), ep.min(y, -2), ep.sum(y, None), ep.amax(y, None),
        ep.max(y, None), ep.sum(y, None), ep.sum(prob, -2) * ep.amax(bias, None) + ep.sum(x, -2),
    )  # fmt: skip


def test_reductions_are_over_the_tokens_of_a_group(groups):
    draw = GroupedDraw(*groups, 6, 5)
    T, E = draw.T, draw.E
    A, B, prob, bias = draw.A, draw.B, draw.per_token(1), draw.random(E, 1, 6)
    alpha = draw.random(E, 1, 1)
    written = {
        "x": (T, 6), "row": (T,), "largest": (E, 6), "smallest": (E, 6), "total": (E,),
        "amax": (E,), "most": (), "all": (), "mixed": (E, 6),
    }  # fmt: skip
    outputs = {name: draw.written(*shape) for name, shape in written.items()}
    epilogue = ka.EpilogueArguments(
        everything, prob=prob, bias=bias, alpha=alpha, number=0.5, **outputs
    )  # fmt: skip
    args = ka.GroupedGemmArguments(A, B, draw.written(T, 6), draw.offsets, epilogue=epilogue)
    out = verified(args)
    x = draw.product(A, B) * alpha[draw.expert][:, 0] + bias[draw.expert][:, 0]
    y = torch.nn.functional.silu(x) * prob[: draw.used] * 0.5

    def close(name, expected):
        found = outputs[name][: draw.used] if name in ("x", "row") else outputs[name]
        torch.testing.assert_close(found, expected)

    torch.testing.assert_close(out[: draw.used], y)
    close("x", x)
    close("row", x.sum(1))
    parts = [y[group] for group in draw.groups]
    infinite = y.new_full((6,), torch.inf)
    close("largest", torch.stack([p.amax(0) if len(p) else -infinite for p in parts]))
    close("smallest", torch.stack([p.amin(0) if len(p) else infinite for p in parts]))
    close("total", torch.stack([p.sum() for p in parts]))
    close("amax", draw.largest(y))
    close("most", y.max() if len(y) else -infinite[0])
    close("all", y.sum())
    prob_sums = torch.stack([prob[group].sum() for group in draw.groups])
    largest = bias.abs().amax((1, 2))
    close("mixed", (prob_sums * largest)[:, None] + draw.summed(x))


def test_an_epilogue_of_a_scattered_out_writes_the_rest_by_token():
    draw = GroupedDraw([3, 3, 9], 11, 6, 5)
    A, B, x = draw.A, draw.B, draw.written(11, 6)
    place = torch.randperm(20, generator=draw.drawn)[:11].to(torch.int32)
    epilogue = ka.EpilogueArguments(lambda accum: (accum * 2, accum), x=x)
    args = ka.GroupedGemmArguments(
        A, B, draw.written(20, 6), draw.offsets, out_row_index=place, epilogue=epilogue
    )  # fmt: skip
    out = verified(args)
    torch.testing.assert_close(x[:9], draw.product(A, B))
    torch.testing.assert_close(out[place[:9].long()], 2 * x[:9])


def test_dropout_counts_tokens():
    """The element of token t is that of row t of a product without groups."""
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    ones, B = torch.ones(9, 5), torch.ones(5, 6)

    def fn(accum, seed, offset):
        return ep.dropout(accum, 0.5, seed, offset)

    epilogue = ka.EpilogueArguments(fn, seed=3, offset=4)
    grouped = ka.GroupedGemmArguments(
        ones, B.expand(3, 5, 6), torch.zeros(9, 6), draw.offsets, epilogue=epilogue
    )  # fmt: skip
    dense = ka.GemmArguments(ones, B, torch.zeros(9, 6), epilogue=epilogue)
    assert torch.equal(verified(grouped), verified(dense))


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_have_the_epilogue_of_a_batch(accumulate, groups):
    draw = GroupedDraw(*groups, 6, 5)
    A, B, alpha = draw.per_token(5).t(), draw.per_token(6), draw.random(draw.E, 1, 1)
    total = draw.written(draw.E, 6)
    epilogue = ka.EpilogueArguments(
        lambda accum, alpha: (accum * alpha, ep.sum(accum, -2)), alpha=alpha, total=total
    )  # fmt: skip
    out = draw.written(draw.E, 5, 6)
    args = ka.GroupedGemmArguments(
        A, B, out, draw.offsets, accumulate=accumulate, epilogue=epilogue
    )  # fmt: skip
    prepare(args)
    before = out.clone() if accumulate else 0.0
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)
    assert judge(args)
    sums = torch.stack([A[:, group] @ B[group] for group in draw.groups])
    torch.testing.assert_close(out, before + alpha * sums)
    torch.testing.assert_close(total, sums.sum(1))


# Experts that lie anywhere ---------------------------------------------------------------


@pytest.mark.parametrize("layout", ["t", "n"])
def test_experts_are_found_wherever_they_lie(layout):
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    dense = draw.B.transpose(1, 2) if layout == "t" else draw.B
    dense = dense.contiguous().transpose(1, 2) if layout == "t" else dense.contiguous()
    A = draw.A
    tensors = list(dense)
    pointers = torch.tensor([one.data_ptr() for one in tensors])
    given = ka.ExpertPointers(pointers, shape=(5, 6), stride=tensors[0].stride(), dtype="f64")
    for B in (dense, tensors, given):
        args = ka.GroupedGemmArguments(A, B, draw.written(9, 6), draw.offsets)
        torch.testing.assert_close(verified(args), draw.product(A, dense))


def test_a_prepared_launch_takes_the_addresses_of_other_experts():
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    args = ka.GroupedGemmArguments(draw.A, list(draw.B), draw.written(9, 6), draw.offsets)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    launch = kernel.prepare(args)
    A, B, out = draw.A, draw.B, draw.written(9, 6)
    for experts in (list(B), torch.tensor([one.data_ptr() for one in B])):
        out.zero_()
        launch(A, experts, out, draw.offsets)
        torch.testing.assert_close(out, draw.product(A, B))
    launch(*args.tensors)
    own = torch.stack([part.tensor for part in args.B.memory])
    torch.testing.assert_close(args.out.tensor, draw.product(args.A.tensor, own))


def test_addresses_on_a_gpu_are_refused_by_name():
    from kernel_api.providers.reference.grouped import ReferenceGroupedGemm

    (rule,) = (one for one in ReferenceGroupedGemm.rules if "addresses" in one.text)
    pointers = torch.zeros(3, dtype=torch.int64, device="meta")
    B = ka.ExpertPointers(pointers, shape=(5, 6), stride=(6, 1), dtype="f32")
    made = {"device": "meta", "dtype": torch.float32}
    args = ka.GroupedGemmArguments(
        torch.empty(9, 5, **made), B, torch.empty(9, 6, **made),
        torch.empty(3, dtype=torch.int32, device="meta"),
    )  # fmt: skip
    verdict = rule.check(args=args)
    assert not verdict
    assert "B's are on meta" in verdict.error


# Verification ----------------------------------------------------------------------------


class Wrong(Kernel):
    """A product of groups that does one thing wrong."""

    arguments = ka.GroupedGemmArguments
    devices = ("cpu",)
    operands_metadata = GroupedGemmOperandsMetadata
    ragged = "any"
    operands = (
        Operands(A="any", B="any", out="any", offsets="i32", accumulator="any", majors="strided"),
    )
    space = Space()
    design = DesignMetadata

    def _run(self, args, artifact, stream, workspace=None):
        (right,) = ka.get_kernels(args, providers=["reference"])
        before = args.out.tensor.clone()
        right.run(args)
        self.spoil(args, before)


def wrong(spoil):
    family = type("Wrong", (Wrong,), {"spoil": staticmethod(spoil), "__module__": __name__})
    (kernel,) = family.generate_kernels(lambda metadata: True)
    return kernel


def plain(**options):
    draw = GroupedDraw([3, 3, 9], 11, 6, 5)
    rows = 20 if "out_row_index" in options else 11
    out = torch.zeros(rows, 6, dtype=torch.float64)
    return ka.GroupedGemmArguments(draw.A, draw.B, out, draw.offsets, **options)


def reason(args, spoil):
    verdict = ka.verify(wrong(spoil), args)
    assert not verdict
    return verdict.reason


def test_verify_sees_rows_that_belong_to_no_group():
    def spoil(args, before):
        args.out.tensor[9:] = 0.0

    assert reason(plain(), spoil) == "the kernel wrote rows of out that are none of the result's"


def test_verify_sees_rows_that_no_token_is_placed_at():
    def spoil(args, before):
        args.out.tensor[19] = 0.0

    place = torch.arange(11, dtype=torch.int32)
    text = reason(plain(out_row_index=place), spoil)
    assert text == "the kernel wrote rows of out that are none of the result's"


def test_verify_sees_the_expert_of_another_group():
    def spoil(args, before):
        args.out.tensor[3] = (args.A.tensor[3:4] @ args.B.tensor[0])[0]

    assert "of what is allowed" in reason(plain(), spoil)


def test_verify_sees_rows_that_are_missing():
    def spoil(args, before):
        args.out.tensor[8] = before[8]

    assert "not finite" in reason(plain(), spoil)


def test_verify_sees_sums_that_are_not_added():
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    operands = (draw.A.t(), draw.per_token(6), draw.written(3, 5, 6), draw.offsets)

    def spoil(args, before):
        args.out.tensor.sub_(before)

    args = ka.GroupedGemmArguments(*operands, accumulate=True)
    assert "of what is allowed" in reason(args, spoil)
    assert ka.verify(wrong(lambda args, before: None), args)


def test_verify_sees_an_expert_that_is_overwritten():
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    args = ka.GroupedGemmArguments(draw.A, list(draw.B), draw.written(9, 6), draw.offsets)

    def spoil(args, before):
        args.B.memory[1].tensor.zero_()

    family = type("Listed", (Wrong,), {"spoil": staticmethod(spoil), "experts": "any"})
    (kernel,) = family.generate_kernels(lambda metadata: True)
    assert ka.verify(kernel, args).reason == "the kernel changed its input B"


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_are_written_to_experts_wherever_they_lie(accumulate, groups):
    draw = GroupedDraw(*groups, 6, 5)
    A, B, offsets = draw.per_token(5).t(), draw.per_token(6), draw.offsets
    before = draw.random(draw.E, 5, 6)
    sums = torch.stack([A[:, group] @ B[group] for group in draw.groups])
    tensors = list(before.clone())
    pointers = torch.tensor([one.data_ptr() for one in tensors])
    addresses = ka.ExpertPointers(pointers, shape=(5, 6), stride=(6, 1), dtype="f64")
    for out in (tensors, addresses):
        for one, value in zip(tensors, before, strict=True):
            one.copy_(value)
        args = ka.GroupedGemmArguments(A, B, out, offsets, accumulate=accumulate)
        (kernel,) = ka.get_kernels(args, providers=["reference"])
        kernel.run(args)
        torch.testing.assert_close(torch.stack(tensors), before * accumulate + sums)
    args = ka.fusions.grouped_gemm_wgrad(
        A, B, offsets, out=tensors, accumulate=accumulate, alpha=draw.random(draw.E)
    )  # fmt: skip
    assert ka.verify(kernel, args)


def test_verify_sees_one_expert_that_is_wrong():
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    out = [draw.written(5, 6) for _ in range(3)]

    def spoil(args, before):
        args.out.memory[2].tensor[0, 0] += 1.0

    args = ka.GroupedGemmArguments(draw.A.t(), draw.per_token(6), out, draw.offsets)
    family = type("Listed", (Wrong,), {"spoil": staticmethod(spoil), "experts": "any"})
    (kernel,) = family.generate_kernels(lambda metadata: True)
    assert "of what is allowed" in ka.verify(kernel, args).reason


def test_verify_looks_at_tensors_and_not_at_addresses():
    draw = GroupedDraw([3, 3, 9], 9, 6, 5)
    out = draw.written(3, 5, 6)
    pointers = torch.tensor([one.data_ptr() for one in out])
    given = ka.ExpertPointers(pointers, shape=(5, 6), stride=(6, 1), dtype="f64")
    args = ka.GroupedGemmArguments(draw.A.t(), draw.per_token(6), given, draw.offsets)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    with pytest.raises(ArgumentError, match="an output is given by addresses"):
        ka.verify(kernel, args)
