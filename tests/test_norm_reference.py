"""What the reference and torch compute of norms, beside formulas written down here again; and what
``verify`` lets pass."""

import pytest
import torch
from support.norms import (
    KINDS,
    LAYER,
    LAYER_BACKWARD,
    RMS,
    RMS_BACKWARD,
    Draw,
    block_maxima,
    gradients,
    hadamard,
    norm,
    statistics,
)
from torch.testing import assert_close

import kernel_api as ka
from kernel_api.arguments import EpilogueArguments
from kernel_api.errors import ArgumentError
from kernel_api.verification import FACTOR, compare, judge, poison

FLOATS = ("float64", "float32", "float16", "bfloat16")
EPS = 0.03


def only(args, provider):
    (kernel,) = ka.get_kernels(args, providers=[provider])
    return kernel


def run(args, provider="reference"):
    for output in args.outputs.values():
        poison(output.tensor)
    only(args, provider).run(args)
    return {name: output.tensor for name, output in args.outputs.items()}


def check(found, exact):
    """Rounded once: half a unit in the last place, and what float64 itself is off by."""
    assert found.shape == exact.shape
    rounded = exact.to(found.dtype)
    if found.dtype is torch.float64:
        assert_close(found, exact, rtol=1e-12, atol=1e-12)
    else:
        unit = torch.finfo(found.dtype).eps
        assert_close(found.double(), rounded.double(), rtol=unit, atol=1e-7)


def forward(draw, kind, **given):
    args = draw.arguments(
        kind, weight=draw.columns(), bias=draw.columns(), rstd=draw.statistic(), eps=EPS, **given
    )
    mean, rstd = statistics(args.x.tensor, kind is LAYER, EPS)
    y = norm(args.x.tensor, args.weight.tensor, args.bias.tensor, centred=kind is LAYER, eps=EPS)
    return args, {"out": y, "rstd": rstd, "mean": mean}


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("kind", [RMS, LAYER])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (7, 33), (64, 160)])
def test_rows_are_normalised_and_rounded_once(kind, element, M, N):
    draw = Draw(M, N, element, pad=3, offset=1)
    given = {"mean": draw.statistic()} if kind is LAYER else {}
    args, exact = forward(draw, kind, **given)
    for name, found in run(args).items():
        check(found, exact[name])


@pytest.mark.parametrize("out", ["float32", "float16", "float8_e4m3fn"])
def test_out_may_have_another_type_and_8_bits_saturate(out):
    draw = Draw(5, 40, "bfloat16")
    written = draw.matrix(read=False, element=out)
    args, exact = forward(draw, RMS, out=written)
    args.weight.tensor.mul_(1e4)
    exact["out"] = norm(args.x.tensor, args.weight.tensor, args.bias.tensor, centred=False, eps=EPS)
    found = run(args)["out"]
    if out == "float8_e4m3fn":
        exact["out"] = exact["out"].clamp(-448, 448)
        assert found.float().abs().max() == 448
    check(found, exact["out"])


@pytest.mark.parametrize("rows_per_block", [1, 3, 4, 100])
@pytest.mark.parametrize("element", FLOATS)
def test_the_transform_multiplies_blocks_of_16_and_maxima_are_taken_before_rounding(
    element, rows_per_block
):
    M, N = 10, 64
    draw = Draw(M, N, element)
    signs = draw.statistic((16,)).copy_(draw.random((16,)).sign())
    amax = draw.statistic((-(-M // rows_per_block),))
    args = draw.arguments(
        RMS,
        weight=draw.columns(),
        hadamard=True,
        signs=signs,
        amax=amax,
        global_amax=draw.statistic(()),
        rows_per_block=rows_per_block,
        eps=EPS,
    )
    h = hadamard(norm(args.x.tensor, args.weight.tensor, centred=False, eps=EPS), signs)
    found = run(args)
    check(found["out"], h)
    check(found["amax"], block_maxima(h, rows_per_block))
    check(found["global_amax"], h.abs().max())


def test_a_transform_without_signs_has_signs_of_one():
    draw = Draw(4, 32)
    plain = draw.arguments(RMS, hadamard=True)
    signed = plain.rebuilt(plain.tensors[0], torch.empty(4, 32), signs=torch.ones(16))
    assert torch.equal(run(plain)["out"], run(signed)["out"])


def test_maxima_hold_a_nan_and_only_of_its_block():
    draw = Draw(6, 16)
    args = draw.arguments(RMS, amax=draw.statistic((3,)), global_amax=draw.statistic(()))
    args.x.tensor[2, 5] = float("nan")
    found = run(args.rebuilt(*args.tensors))
    assert found["amax"].isnan().tolist() == [False, True, False]
    assert found["global_amax"].isnan()


@pytest.mark.parametrize("kind", [RMS_BACKWARD, LAYER_BACKWARD])
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_are_those_of_the_forward_formula(kind, element, weighted):
    draw = Draw(9, 37, element, pad=2)
    given = {"weight": draw.columns()} if weighted else {}
    sums = {n: draw.columns(read=False, element=draw.wide) for n in ("dweight", "dbias")}
    args = draw.arguments(kind, **given, **sums)
    # Statistics in float64, as they would be without rounding: gradients pass through them.
    exact = gradients(
        args.dy.tensor,
        args.x.tensor,
        args.weight.tensor if weighted else None,
        centred=kind is LAYER_BACKWARD,
        eps=1e-5,
    )
    for name, found in run(args).items():
        wide = found.double()
        scale = exact[name].abs().max()
        assert_close(wide, exact[name], rtol=0.01, atol=float(scale) * 1e-2)
        if element == "float64":
            assert_close(wide, exact[name], rtol=1e-10, atol=1e-10)


def test_an_epilogue_is_computed_of_the_result():
    draw = Draw(6, 40, "bfloat16")
    C, alpha, amax = draw.random((6, 40)), 0.7, torch.full((6,), float("nan"))

    def fn(accum, C, alpha):
        y = alpha * accum + C
        return ka.epilogue.relu(y), ka.epilogue.amax(y, -1)

    for kind in (RMS, LAYER):
        epilogue = EpilogueArguments(fn, C=C, alpha=alpha, amax=amax)
        args = draw.arguments(kind, weight=draw.columns(), eps=EPS, epilogue=epilogue)
        assert "sm80" not in " ".join(k.family_name() for k in ka.get_kernels(args))
        found = run(args)
        y = norm(args.x.tensor, args.weight.tensor, centred=kind is LAYER, eps=EPS)
        y = alpha * y + C.double()
        assert_close(found["out"].double(), y.relu(), rtol=0.01, atol=1e-6)
        assert_close(found["amax"].double(), y.abs().amax(1), rtol=1e-6, atol=1e-6)
        assert ka.verify(only(args, "reference"), args)


# torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("kind", [RMS, LAYER, LAYER_BACKWARD])
def test_what_torch_offers_is_right(kind, element):
    draw = Draw(33, 65, element, pad=1)
    args = draw.arguments(kind, weight=draw.columns())
    kernels = ka.get_kernels(args, providers=["torch"])
    if kind is LAYER_BACKWARD and element in ("float16", "bfloat16"):
        assert kernels == []
        (told,) = [r for r in ka.explain(args).rejected if r.family == "torch.layer_norm_backward"]
        assert told.reason == "torch has the statistics of a layer norm in x's type on the CPU"
        return
    assert ka.verify(kernels[0], args)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (RMS, {"bias": torch.ones(16)}, "torch's RMS norm adds no bias"),
        (RMS, {"hadamard": True}, "torch's RMS norm has no Hadamard transform"),
        (RMS, {"weight": torch.ones(16).half()}, "weight is float16, x is float32"),
        (RMS_BACKWARD, {}, "the operands are on cpu; the kernel runs on cuda"),
        (LAYER_BACKWARD, {"dweight": torch.ones(16)}, "computes dweight and dbias where there is"),
    ],
)
def test_what_torch_does_not_do_is_refused_with_the_reason(kind, given, words):
    args = Draw(4, 16).arguments(kind, **given)
    told = ka.explain(args, providers=["torch"]).rejected
    assert any(words in r.reason for r in told), [r.reason for r in told]
    assert ka.get_kernels(args, providers=["torch"]) == []


@pytest.mark.parametrize("name", ["mean", "rstd"])
def test_torch_reads_statistics_that_are_not_side_by_side_where_they_are(name):
    draw = Draw(7, 33)
    sums = {n: draw.columns(read=False) for n in ("dweight", "dbias")}
    args = draw.arguments(LAYER_BACKWARD, weight=draw.columns(), **sums)
    apart = torch.full((7, 2), torch.nan)[:, 0].copy_(args.named_operands[name].tensor)
    assert apart.stride() == (2,)
    args = args.rebuilt(*args.tensors, **{name: apart})
    assert ka.verify(only(args, "torch"), args)


# verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", FLOATS)
def test_the_reference_passes_with_a_margin(kind, element):
    draw = Draw(65, 129, element, shift=3.0)
    sums = {n: draw.columns(read=False) for n in ("dweight", "dbias")}
    given = {} if kind in (RMS, LAYER) else sums
    args = draw.arguments(kind, weight=draw.columns(), **given)
    found = ka.verify(only(args, "reference"), args)
    assert found, found
    assert found.error_ratio < 0.6


def computed(draw, kind):
    """Arguments, with their outputs written by the reference."""
    further = {} if kind not in (RMS, LAYER) else {"rstd": draw.statistic()}
    if kind is LAYER:
        further["mean"] = draw.statistic()
    if kind in (RMS, LAYER):
        residual = draw.matrix().mul_(0.01)  # no larger than x: the place below is not near zero
        further |= {"residual": residual, "residual_out": draw.matrix(read=False)}
    if kind is RMS:
        further["amax"], further["global_amax"] = draw.statistic((9,)), draw.statistic(())
    if kind in (RMS_BACKWARD, LAYER_BACKWARD):
        further = {n: draw.columns(read=False, element=draw.wide) for n in ("dweight", "dbias")}
    args = draw.arguments(kind, weight=draw.columns(), **further)
    run(args)
    return args


def wrong_outputs():
    for kind in KINDS:
        for name in kind.output_names:
            if name != "mean" or kind is LAYER:
                yield pytest.param(kind, name, id=f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("kind", "name"), list(wrong_outputs()))
def test_one_wrong_element_of_any_output_is_noticed(kind, name):
    args = computed(Draw(18, 48), kind)
    assert judge(args, FACTOR)
    tensor = args.outputs[name].tensor
    place = (3, 5) if tensor.dim() == 2 else tensor.shape[0] - 1 if tensor.dim() else ()
    right = tensor[place].clone()
    for wrong in (right * 1.00002, right + 1e-3, float("nan")):
        tensor[place] = wrong
        assert not judge(args, FACTOR), wrong
    tensor[place] = right
    assert judge(args, FACTOR)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (RMS, lambda x, w: x * statistics(x, True, 1e-6)[1][:, None] * w),  # deviation, not rms
        (LAYER, lambda x, w: norm(x, w, centred=False, eps=1e-5)),
        (RMS, lambda x, w: norm(x, w, centred=False, eps=1e-3)),
        (RMS, lambda x, w: norm(x, centred=False, eps=1e-6)),
        (LAYER, lambda x, w: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True) * w),
    ],
    ids=["deviation", "no mean", "eps", "no weight", "unbiased"],
)
@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_another_formula_is_noticed(kind, wrong, element):
    draw = Draw(40, 24, element)
    args = draw.arguments(kind, weight=draw.columns())
    x, w = args.x.tensor.double() * 0.1, args.weight.tensor.double()
    args.x.tensor.copy_(x)
    args.out.tensor.copy_(wrong(args.x.tensor.double(), w))
    assert not judge(args, FACTOR)


@pytest.mark.parametrize("kind", [RMS_BACKWARD, LAYER_BACKWARD])
def test_a_gradient_without_its_mean_terms_is_noticed(kind):
    draw = Draw(30, 24, "bfloat16")
    args = draw.arguments(kind, weight=draw.columns())
    g = args.dy.tensor.double() * args.weight.tensor.double()
    args.dx.tensor.copy_(g * args.rstd.tensor.double()[:, None])
    assert not judge(args, FACTOR)


def test_statistics_in_16_bits_are_noticed():
    draw = Draw(16, 256, "bfloat16")
    args = draw.arguments(LAYER, weight=draw.columns(), rstd=draw.statistic())
    run(args)
    args.rstd.tensor.copy_(args.rstd.tensor.bfloat16())
    assert not judge(args, FACTOR)


def test_a_large_mean_costs_no_more_than_its_rounding():
    """x is 1000 times its deviation: what torch is off by there is allowed, and not twice that."""
    draw = Draw(32, 256, shift=1000.0)
    args = draw.arguments(LAYER, weight=draw.columns())
    torch_one = torch.nn.functional.layer_norm(
        args.x.tensor, (256,), args.weight.tensor, eps=args.eps
    )
    args.out.tensor.copy_(torch_one)
    assert judge(args, FACTOR)
    exact = only(args, "reference").exact(args)["out"]
    one_pass = args.x.tensor.float()
    variance = (one_pass**2).mean(1) - one_pass.mean(1) ** 2
    args.out.tensor.copy_(
        (one_pass - one_pass.mean(1, keepdim=True))
        * torch.rsqrt(variance + args.eps)[:, None]
        * args.weight.tensor
    )
    assert not judge(args, FACTOR)
    assert not compare(args.out.tensor, exact, torch_one)


# Beside run ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_launch_takes_the_further_operands_by_place_and_by_name(kind):
    draw, other = Draw(6, 32), Draw(8, 32, seed=1)
    sums = {"dweight": draw.columns(read=False)} if kind not in (RMS, LAYER) else {}
    args = draw.arguments(kind, weight=draw.columns(), **sums)
    again = other.arguments(kind, weight=other.columns(), **{n: v.clone() for n, v in sums.items()})
    launch = only(args, "reference").prepare(args)
    exact = only(again, "reference").exact(again)
    further = {name: operand.tensor for name, operand in again.further.items()}
    for tensors, named in ((again.tensors, further), ((*again.tensors, *further.values()), {})):
        for output in again.outputs.values():
            poison(output.tensor)
        launch(*tensors, **named)
        for name, output in again.outputs.items():
            assert_close(output.tensor.double(), exact[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("provider", ["reference", "torch"])
def test_a_prepared_launch_says_which_tensors_it_takes(provider):
    args = Draw(6, 32).arguments(RMS)
    launch = only(args, provider).prepare(args)
    for given in (args.tensors[:1], args.tensors * 9):
        with pytest.raises(
            ArgumentError, match=rf"{len(given)} tensors are given; expected x, out"
        ):
            launch(*given)


@pytest.mark.parametrize("provider", ["reference", "torch"])
def test_no_rows_are_nothing_to_do_but_sums_over_them_are_zero(provider):
    draw = Draw(0, 32)
    args = draw.arguments(RMS, weight=draw.columns())
    only(args, provider).run(args)
    if provider == "reference":
        maxima = {"amax": draw.statistic((0,)), "global_amax": draw.statistic(())}
        args = draw.arguments(RMS, weight=draw.columns(), **maxima)
        assert run(args)["global_amax"] == 0
    sums = {"dweight": draw.columns(read=False), "dbias": draw.columns(read=False)}
    args = draw.arguments(LAYER_BACKWARD, weight=draw.columns(), **sums)
    found = run(args, provider)
    assert not found["dweight"].any()
    assert not found["dbias"].any()


@pytest.mark.parametrize("kind", [RMS, LAYER])
@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bits_are_verified(kind, element):
    args, _ = forward(Draw(7, 48, element), kind)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert ka.verify(kernel, args)
