"""Rotation, quantisation and dropout of a product as it is stored, against torch."""

import math

import numpy as np
import pytest
import torch
from support.epilogues import kept
from support.fusions import SETTINGS, Draw, close, computed

import kernel_api as ka
from kernel_api.errors import ArgumentError
from kernel_api.providers.reference.epilogue import evaluate

ALPHA = 0.7
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
TOPS = {E4M3: 448, E5M2: 57344, torch.int8: 127}


@pytest.fixture(params=SETTINGS.values(), ids=list(SETTINGS))
def setting(request):
    return request.param


# Rotation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"head_dim": 12},
        {"head_dim": 12, "style": "interleaved"},
        {"head_dim": 12, "start": 4},
        {"head_dim": 12, "start": 2, "width": 6, "style": "interleaved"},
        {"head_dim": 36, "width": 10},
        {"head_dim": 12, "heads": 2},
        {"head_dim": 6, "start": 2, "style": "interleaved", "heads": 1},
    ],
    ids=str,
)
def test_rope_turns_pairs_of_complex_numbers(how, setting):
    draw = Draw(7, 36, 5, *setting)
    head_dim, start = how["head_dim"], how.get("start", 0)
    width = how.get("width", head_dim - start)
    angle = draw.random(*draw.batches, 7, width // 2)
    A, B = draw.A, draw.B
    args = ka.fusions.gemm_rope(A, B, out=draw.written(), cos=angle.cos(), sin=angle.sin(), **how)
    expected = (A @ B).unflatten(-1, (-1, head_dim)).clone()
    part = expected[..., : how.get("heads"), start : start + width]
    beside = how.get("style") == "interleaved"
    real, imaginary = (
        (part[..., 0::2], part[..., 1::2])
        if beside
        else (part[..., : width // 2], part[..., width // 2 :])
    )
    turned = torch.complex(real, imaginary) * torch.exp(1j * angle).unsqueeze(-2)
    pair = torch.stack([turned.real, turned.imag], -1 if beside else -2).flatten(-2)
    expected[..., : how.get("heads"), start : start + width] = pair
    close(computed(args)["out"], expected.flatten(-2))


def test_batches_may_share_the_angles_of_rope():
    draw = Draw(7, 24, 5, batch=3)
    A, B, angle = draw.A, draw.B, draw.random(7, 6)
    found = [
        ka.ops.gemm_rope(A, B, cos=given.cos(), sin=given.sin(), head_dim=12)
        for given in (angle, angle.expand(3, 7, 6))
    ]
    close(*found)


@pytest.mark.parametrize("given", ["16", 16.0, True, [16]], ids=repr)
@pytest.mark.parametrize("name", ["head_dim", "start", "width"])
def test_columns_of_heads_are_whole_numbers(name, given):
    draw = Draw(7, 32, 5)
    how = {"head_dim": 16, name: given}
    with pytest.raises(ArgumentError) as caught:
        ka.fusions.gemm_rope(draw.A, draw.B, out=draw.written(), cos=None, sin=None, **how)
    assert str(caught.value) == f"{name} is {given!r}; expected a whole number of columns"


def test_numbers_of_numpy_are_those_of_python_and_no_real_takes_their_place():
    draw = Draw(7, 44, 5)
    angle = draw.random(7, 11)
    given = {"out": draw.written(), "cos": angle.cos(), "sin": angle.sin()}
    with pytest.raises(ArgumentError):
        ka.fusions.gemm_rope(draw.A, draw.B, head_dim=22.0, **given)
    one = ka.fusions.gemm_rope(draw.A, draw.B, head_dim=np.int64(22), **given)
    other = ka.fusions.gemm_rope(draw.A, draw.B, head_dim=22, **given)
    assert one.epilogue.graph is other.epilogue.graph


# Quantisation ----------------------------------------------------------------------------


def stored(x, element):
    """Rounded, and held within what is finite."""
    top = TOPS[element]
    low = -128 if element is torch.int8 else -top
    x = x.clamp(low, top)
    return (x.round() if element is torch.int8 else x).to(element)


@pytest.mark.parametrize("element", TOPS, ids=str)
def test_a_scale_for_all_is_read(element, setting):
    draw = Draw(7, 13, 5, *setting)
    A, B, bias = draw.A, draw.B, draw.columns()
    scale = 0.9 / TOPS[element]  # small enough for some to saturate
    for given in (scale, torch.tensor(scale, dtype=torch.float64)):
        args = ka.fusions.gemm_quantize(
            A,
            B,
            out=draw.written(element=element),
            scale=given,
            amax=draw.reduced(),
            alpha=ALPHA,
            bias=bias,
        )
        x = ALPHA * (A @ B) + bias.unsqueeze(-2)
        assert (x / scale).abs().max() > TOPS[element]
        found = computed(args)
        assert torch.equal(found["out"].double(), stored(x / scale, element).double())
        close(found["amax"], x.abs().max())


@pytest.mark.parametrize("element", TOPS, ids=str)
def test_a_scale_per_row_is_its_largest_magnitude_over_the_largest_value(element, setting):
    draw = Draw(7, 13, 5, *setting)
    A, B = draw.A, draw.B
    A[..., 2, :] = 0
    args = ka.fusions.gemm_quantize(
        A,
        B,
        out=draw.written(element=element),
        scale=draw.reduced(*draw.batches, 7, element=torch.float32),
        mode="row",
        alpha=ALPHA,
    )
    x = ALPHA * (A @ B)
    scale = x.abs().amax(-1) / TOPS[element]
    scale[..., 2] = 1
    found = computed(args)
    close(found["scale"], scale, 1e-7)
    expected = stored(x / scale.unsqueeze(-1), element).double()
    assert torch.equal(found["out"].double(), expected)
    assert (found["out"].double().abs().amax(-1)[..., [0, 1, 3]] == TOPS[element]).all()
    assert not found["out"].double()[..., 2, :].any()


@pytest.mark.parametrize("element", TOPS, ids=str)
def test_mx_scales_are_powers_of_two_under_which_nothing_saturates(element, setting):
    draw = Draw(7, 96, 5, *setting)
    A, B, bias = draw.A, draw.B, draw.columns()
    A[..., 2, :], bias[..., 32:64] = 0, 0
    args = ka.fusions.gemm_quantize(
        A,
        B,
        out=draw.written(element=element),
        scale=draw.reduced(*draw.batches, 7, 3, element=E8M0),
        mode="mx",
        amax=draw.reduced(),
        alpha=ALPHA,
        bias=bias,
    )
    x = ALPHA * (A @ B) + bias.unsqueeze(-2)
    largest = x.unflatten(-1, (3, 32)).abs().amax(-1)
    scale = torch.exp2(torch.ceil(torch.log2(largest / TOPS[element])))
    scale[largest == 0] = 2.0**-127
    found = computed(args)
    assert torch.equal(found["scale"].double(), scale)
    wide = scale.repeat_interleave(32, -1)
    assert torch.equal(found["out"].double(), stored(x / wide, element).double())
    assert ((x / wide).abs() <= TOPS[element]).all()
    close(found["amax"], x.abs().max())


def test_a_block_whose_largest_value_is_the_types_has_scale_one():
    for element, top in TOPS.items():
        A, B = torch.ones(1, 1), torch.full((1, 32), float(top))
        out, scale = torch.empty(1, 32, dtype=element), torch.empty(1, 1, dtype=E8M0)
        found = computed(ka.fusions.gemm_quantize(A, B, out=out, scale=scale, mode="mx"))
        assert float(found["scale"]) == 1
        assert (found["out"].float() == top).all()


@pytest.mark.parametrize("mode", ["row", "mx"])
def test_nan_is_kept_by_what_scales_it(mode):
    A, B = torch.ones(2, 1), torch.ones(1, 64)
    A[1] = math.nan
    shape, element = ((2,), torch.float32) if mode == "row" else ((2, 2), E8M0)
    out, scale = torch.empty(2, 64, dtype=E4M3), torch.empty(shape, dtype=element)
    found = computed(ka.fusions.gemm_quantize(A, B, out=out, scale=scale, mode=mode))
    assert found["scale"].float()[1].isnan().all()
    assert found["out"].float()[1].isnan().all()
    assert found["out"].float()[0].isfinite().all()


# Dropout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [int, torch.tensor])
def test_dropout_drops_by_philox(state, setting):
    draw = Draw(7, 13, 5, *setting)
    A, B, p, seed, offset = draw.A, draw.B, 0.3, 123456789012345, 2**33 + 5
    args = ka.fusions.gemm_dropout(
        A, B, out=draw.written(), p=p, seed=state(seed), offset=state(offset), alpha=ALPHA
    )
    x = ALPHA * (A @ B)
    mask = kept(x.shape, p, seed, offset)
    assert 0.5 < mask.double().mean() < 0.9
    close(computed(args)["out"], torch.where(mask, x / (1 - p), 0.0), 1e-7)


@pytest.mark.parametrize(("p", "factor"), [(0.0, 1.0), (0, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_all(p, factor):
    draw = Draw(7, 13, 5)
    A, B = draw.A, draw.B
    args = ka.fusions.gemm_dropout(A, B, out=draw.written(), p=p, seed=1, offset=2)
    close(computed(args)["out"], factor * (A @ B))


@pytest.mark.parametrize("sizes", [(0, 7), (5, 0)])
def test_dropout_has_no_elements(sizes):
    A, B = torch.ones(sizes[0], 3), torch.ones(3, sizes[1])
    args = ka.fusions.gemm_dropout(A, B, out=torch.empty(sizes), p=0.5, seed=1, offset=2)
    assert ka.verify(ka.get_kernels(args)[0], args)


@pytest.mark.parametrize("element", TOPS, ids=str)
@pytest.mark.parametrize("largest", [1e-45, 1e-43, 1e-38, 1e-30])
def test_rows_of_tiny_values_have_scales_that_can_be_divided_by(element, largest):
    x = torch.tensor([[largest, 0.0, -largest, 0.0], [1.0, 2.0, 3.0, -4.0], [0.0] * 4])
    out, scale = torch.empty(3, 4, dtype=element), torch.empty(3)
    args = ka.fusions.gemm_quantize(x, torch.eye(4), out=out, scale=scale, mode="row")
    ka.get_kernels(args)[0].run(args)
    assert scale[2] == 1
    assert (scale >= 2.0**-126).all()
    for wide in (False, True):  # as kernels compute it, in float32, and as the reference does
        found = evaluate(args.epilogue.graph, x, args.epilogue.operands, wide=wide)
        assert all(values.isfinite().all() for values in found.values())
    back = out.float() * scale.unsqueeze(1)
    unit = 2.0**-3 if element.is_floating_point else 1 / 127
    assert ((back - x).abs() <= unit * x.abs().amax(1, keepdim=True) + 2.0**-126).all()
