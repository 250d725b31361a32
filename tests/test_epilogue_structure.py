"""Pairs of columns, rotations, Hadamard blocks, reductions, dropout; several outputs."""

import math

import pytest
import torch
from support.epilogues import (
    computed,
    kept,
    normal,
    philox,
    reference_kernel,
    torch_functions,
    with_accumulator,
)

import kernel_api as ka
import kernel_api.epilogue as ep
from kernel_api.errors import EpilogueError
from kernel_api.providers.reference.philox import philox as torch_philox
from kernel_api.providers.reference.philox import uniform

M, N, L = 6, 64, 3
BATCHES = pytest.mark.parametrize("batch", [(), (L,)], ids=["matrix", "batch"])


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def empty(*shape, dtype=torch.float64):
    return torch.full(shape, 7, dtype=dtype)


# Pairs of columns ------------------------------------------------------------------------


@BATCHES
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("granularity", [1, 2, 16, 32, "halves"])
def test_a_gated_activation_halves_the_columns(batch, order, granularity):
    def swiglu(accum):
        gate, up = ep.glu_pair(accum, order, granularity)
        return up * ep.silu(gate)

    x = normal(*batch, M, N)
    found = computed(x, swiglu, empty(*batch, M, N // 2))
    gate, up = torch_functions.glu_pair(x, order, granularity)
    close(found, up * gate * torch.sigmoid(gate))


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("granularity", [1, 32, "halves"])
def test_the_backward_of_a_gated_activation_doubles_them(order, granularity):
    def dswiglu(accum, saved, prob):
        gate, up = ep.glu_pair(saved, order, granularity)
        d_up = accum * prob * ep.silu(gate)
        d_gate = accum * prob * up * ep.derivative("silu")(gate)
        d = ep.interleave(d_gate, d_up, order, granularity)
        return d, ep.sum(accum * up * ep.silu(gate), -1), ep.sum(d, -2)

    dy, saved, prob = normal(M, N), normal(M, 2 * N, seed=1), normal(M, 1, seed=2)
    dprob, dbias = empty(M), empty(2 * N)
    out = empty(M, 2 * N)
    computed(dy, dswiglu, out, saved=saved, prob=prob, dprob=dprob, dbias=dbias)

    leaf, weight = saved.clone().requires_grad_(), prob.clone().requires_grad_()
    gate, up = torch_functions.glu_pair(leaf, order, granularity)
    (up * torch.nn.functional.silu(gate) * weight).backward(dy)
    close(out, leaf.grad)
    close(dprob, weight.grad[:, 0])
    close(dbias, leaf.grad.sum(0))


@pytest.mark.parametrize("granularity", [1, 8, "halves"])
def test_interleave_is_the_inverse_of_glu_pair(granularity):
    def there_and_back(accum):
        return ep.interleave(*ep.glu_pair(accum, "up_gate", granularity), "up_gate", granularity)

    x = normal(M, N)
    assert torch.equal(computed(x, there_and_back), x)


def test_interleave_broadcasts_what_has_fewer_modes():
    x, up = normal(L, M, N), normal(M, N, seed=1)
    found = computed(x, lambda x, up: ep.interleave(x, up), empty(L, M, 2 * N), up=up)
    assert torch.equal(found, torch_functions.interleave(x, up.expand(x.shape)))


def test_the_halves_take_operands_of_half_the_columns():
    bias = normal(N // 2, seed=1)

    def fn(accum, bias):
        gate, up = ep.glu_pair(accum)
        return ep.sigmoid(gate + bias) * up

    x = normal(M, N)
    gate, up = torch_functions.glu_pair(x)
    close(computed(x, fn, empty(M, N // 2), bias=bias), torch.sigmoid(gate + bias) * up)


# Rotations and Hadamard blocks ------------------------------------------------------------


@BATCHES
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "start", "width"), [(64, 0, None), (16, 0, None), (32, 8, None), (32, 8, 16)]
)
def test_rotate_turns_pairs_of_columns_of_each_head(batch, style, head_dim, start, width):
    pairs = (head_dim - start if width is None else width) // 2
    angles = normal(M, pairs, seed=1)
    cos, sin = angles.cos(), angles.sin()

    def rope(accum, cos, sin):
        return ep.rotate(accum, cos, sin, head_dim, start, width, style)

    x = normal(*batch, M, N)
    expected = torch_functions.rotate(x, cos, sin, head_dim, start, width, style)
    close(computed(x, rope, cos=cos, sin=sin), expected)


@BATCHES
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "start", "heads"), [(16, 0, 3), (32, 8, 1), (16, 4, 4)])
def test_rotate_leaves_the_heads_behind_those_it_is_about(batch, style, head_dim, start, heads):
    angles = normal(M, (head_dim - start) // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    x = normal(*batch, M, N)

    def rope(accum, cos, sin):
        return ep.rotate(accum, cos, sin, head_dim, start, style=style, heads=heads)

    expected = torch.cat(
        [
            torch_functions.rotate(
                x[..., : heads * head_dim], cos, sin, head_dim, start, None, style
            ),
            x[..., heads * head_dim :],
        ],
        dim=-1,
    )
    close(computed(x, rope, cos=cos, sin=sin), expected)


def test_rotate_takes_tables_of_every_batch():
    angles = normal(L, M, 8)
    x = normal(L, M, N)
    found = computed(x, lambda x, c, s: ep.rotate(x, c, s, 16), c=angles.cos(), s=angles.sin())
    close(found, torch_functions.rotate(x, angles.cos(), angles.sin(), 16))


def test_rotate_of_torchs_own_rotary_formula():
    # As models write it: x · cos + rotate_half(x) · sin with the angles repeated.
    angles = normal(M, N // 2)
    x = normal(M, N)
    turned = torch.cat([-x[:, N // 2 :], x[:, : N // 2]], dim=-1)
    expected = x * angles.cos().repeat(1, 2) + turned * angles.sin().repeat(1, 2)
    found = computed(x, lambda x, c, s: ep.rotate(x, c, s, N), c=angles.cos(), s=angles.sin())
    close(found, expected)


@BATCHES
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_hadamard_multiplies_blocks_of_16_columns(batch, normalised, signed):
    signs = normal(16, seed=1).sign()
    x = normal(*batch, M, N)
    if signed:
        found = computed(x, lambda x, s: ep.hadamard(x, normalised, signs=s), s=signs)
    else:
        found = computed(x, lambda x: ep.hadamard(x, normalised))
    close(found, torch_functions.hadamard(x, normalised, signs if signed else None))


def test_signs_of_16_are_no_vector_of_columns_where_there_are_16_columns():
    x, signs = normal(M, 16), normal(16, seed=1).sign()
    args = with_accumulator(x, lambda x, s: ep.hadamard(x, signs=s), s=signs)
    wide = with_accumulator(normal(M, 48), lambda x, s: ep.hadamard(x, signs=s), s=signs)
    assert args.epilogue.identity == wide.epilogue.identity


# Reductions ------------------------------------------------------------------------------

REDUCTIONS = ["sum", "max", "min", "amax", "mean_square"]


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize(
    ("axis", "batch", "shape"),
    [
        (-1, (), (M,)),
        (-1, (), (M, 1)),
        (-1, (L,), (L, M)),
        (-1, (L,), (L, M, 1)),
        (-2, (), (N,)),
        (-2, (), (1, N)),
        (-2, (L,), (L, N)),
        (-2, (L,), (L, 1, N)),
        (None, (), ()),
        (None, (), (1, 1)),
        (None, (L,), (L,)),
        (None, (L,), (L, 1, 1)),
        (None, (L,), ()),
    ],
)
def test_a_reduction_is_an_output_of_fewer_modes(name, axis, batch, shape):
    x, found = normal(*batch, M, N), empty(*shape)
    fn = getattr(ep, name)
    out = computed(x, lambda x: (2 * x, fn(x * 3, axis)), found=found)
    assert torch.equal(out, 2 * x)
    if axis is None and shape == () and batch:
        expected = getattr(torch_functions, name)(3 * x.reshape(-1, N), None)
    else:
        expected = getattr(torch_functions, name)(3 * x, axis)
    close(found, expected.reshape(shape))


def test_reductions_go_on_into_arithmetic():
    def normalised(accum, eps):
        scale = ep.rsqrt(ep.mean_square(accum, -1) + eps)
        return accum * scale, scale

    x, rstd = normal(M, N), empty(M)
    found = computed(x, normalised, eps=1e-3, rstd=rstd)
    expected = (x.square().mean(-1) + 1e-3).rsqrt()
    close(rstd, expected)
    close(found, x * expected.unsqueeze(-1))


def test_a_root_of_a_mean_goes_over_all_batches_where_its_output_has_none():
    x, rms = normal(L, M, N), empty()
    computed(x, lambda x: (x, ep.sqrt(ep.mean_square(x, None)) + 1), rms=rms)
    close(rms, x.square().mean().sqrt() + 1)


def test_one_value_per_batch_cannot_be_stored_as_one():
    x, per_batch = normal(L, M, N), normal(L, 1, 1)

    def fn(accum, per_batch):
        return accum, ep.sum(accum, None) * per_batch

    with pytest.raises(EpilogueError, match=r"total has shape \(\); fn gives it \(3,\)"):
        with_accumulator(x, fn, per_batch=per_batch, total=empty())


def test_reductions_over_nothing():
    x = torch.empty(0, 4, dtype=torch.float64)
    outputs = {n: empty(4) for n in ("total", "largest", "smallest", "magnitude")}

    def fn(x):
        return x, ep.sum(x, -2), ep.max(x, -2), ep.min(x, -2), ep.amax(x, -2)

    computed(x, fn, **outputs)
    values = [o[0].item() for o in outputs.values()]
    assert values == [0, -math.inf, math.inf, 0]


def test_blocks_of_columns_have_scales_of_their_own():
    # MX: one power of two per 32 columns, rounded up so that nothing overflows.
    def mx(accum):
        scale = ep.cast(ep.amax(accum, -1, block=32) / 448.0, "float8_e8m0fnu")
        return ep.quantize(accum, "float8_e4m3fn", ep.repeat(scale, 32)), scale

    x = normal(L, M, N) * torch.logspace(-9, 9, N, dtype=torch.float64)
    out = empty(L, M, N, dtype=torch.float8_e4m3fn)
    scale = torch.empty(L, M, N // 32, dtype=torch.float8_e8m0fnu)
    computed(x, mx, out, scale=scale)
    blocks = x.unflatten(-1, (-1, 32))
    expected = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(-1) / 448))
    assert torch.equal(scale.double(), expected)
    stored = (blocks / expected.unsqueeze(-1)).flatten(-2)
    assert stored.abs().max() <= 448
    assert torch.equal(out.double(), stored.to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_keep_nan(name):
    x = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64)
    found = empty()
    computed(x, lambda x: (x, getattr(ep, name)(x, None)), found=found)
    assert torch.isnan(found)


@pytest.mark.parametrize("axis", [0, 1, 2, -3, (-1, -2), "rows", True])
def test_other_axes_are_refused(axis):
    with pytest.raises(EpilogueError, match=r"axis is .*expected -1 \(columns\), -2 \(rows\)"):
        computed(normal(M, N), lambda x: (x, ep.sum(x, axis)), total=empty())


def test_what_has_no_such_mode_cannot_be_reduced():
    with pytest.raises(EpilogueError, match="has no columns to reduce"):
        computed(normal(M, N), lambda x: (x, ep.sum(ep.sum(x, -1), -1)), total=empty(M))


def test_reducing_twice_is_reducing_both():
    x, total = normal(M, N), empty()
    computed(x, lambda x: (x, ep.sum(ep.max(x, -1), -2)), total=total)
    close(total, x.amax(-1).sum())


# Dropout ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, expected):
    words = [int(word, 16) for word in expected.split()]
    assert philox(counter, key) == words
    tensors = torch_philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [word.item() for word in tensors] == words


SEEDS = [(0, 0), (1, 2), (2**63 + 5, 2**40 + 3), (2**64 - 1, 2**64 - 1), (-1, 7)]


@pytest.mark.parametrize(("seed", "offset"), SEEDS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 6)])
def test_dropout_keeps_what_the_documented_counters_say(seed, offset, shape):
    x = normal(*shape) + 10
    found = computed(x, lambda x, p, s, o: ep.dropout(x, p, s, o), p=0.25, s=seed, o=offset)
    expected = torch.where(kept(shape, 0.25, seed % 2**64, offset % 2**64), x / 0.75, 0.0)
    close(found, expected)


def test_the_state_of_dropout_may_be_on_the_device():
    x = normal(M, N)
    seed, offset = torch.tensor(-3), torch.tensor(5, dtype=torch.int32)
    found = computed(x, lambda x, s, o: ep.dropout(x, 0.5, s, o), s=seed, o=offset)
    assert torch.equal(found, computed(x, lambda x, s, o: ep.dropout(x, 0.5, s, o), s=-3, o=5))


@pytest.mark.parametrize("p", [0, 0.0, 1, 1.0])
def test_nothing_or_everything_is_dropped(p):
    x = normal(M, N)
    found = computed(x, lambda x, s, o: ep.dropout(x, p, s, o), s=1, o=0)
    assert torch.equal(found, x * (1 - p))


def test_dropout_drops_a_share_of_p_and_the_next_offset_drops_others():
    seconds = [uniform(3, offset, (1, 256, 255), "cpu") for offset in (0, 1)]
    for drawn in seconds:
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert abs(float((drawn < 0.3).double().mean()) - 0.3) < 0.01
    assert not torch.equal(*seconds)


def test_dropout_of_half_the_columns_counts_those():
    def fn(x, s):
        gate, up = ep.glu_pair(x, granularity="halves")
        return ep.dropout(gate * up, 0.5, s, s)

    x = normal(M, N) + 10
    found = computed(x, fn, empty(M, N // 2), s=9)
    assert torch.equal(found != 0, kept((M, N // 2), 0.5, 9, 9))


@pytest.mark.parametrize(
    ("fn", "operands", "text"),
    [
        (lambda x: ep.dropout(x, 0.5, 1, 2), {}, "seed is 1; pass it to EpilogueArguments"),
        (lambda x, s: ep.dropout(x, 0.5, s, 2), {"s": 1}, "offset is 2; pass it"),
        (lambda x, s: ep.dropout(x, 0.5, s, s), {"s": 1.5}, "s, the seed of dropout, is not an"),
        (lambda x, s: ep.dropout(x, 1.5, s, s), {"s": 1}, "p is 1.5; expected a probability"),
        (
            lambda x, s: ep.dropout(x, 0.5, s, s),
            {"s": torch.tensor([1, 2])},
            "must be one integer, a tensor of shape ()",
        ),
        (
            lambda x, s: ep.dropout(x * s, 0.5, s, s),
            {"s": 1},
            "s is read as integer values and as real values",
        ),
    ],
)
def test_dropout_says_what_it_takes(fn, operands, text):
    with pytest.raises(EpilogueError) as caught:
        computed(normal(M, 2), fn, **operands)
    assert text in str(caught.value)


# Several outputs -------------------------------------------------------------------------


def test_outputs_may_differ_in_type_and_layout():
    bf16 = empty(M, N, dtype=torch.bfloat16)
    columns = empty(N, M, dtype=torch.float16).t()
    padded = empty(M, 2 * N, dtype=torch.float32)[:, :N]

    def fn(accum, bias):
        pre = accum + bias
        act = ep.gelu(pre)
        return act, pre, act, act > 0.1, ep.amax(act, None)

    x, bias = normal(M, N), normal(N, seed=1)
    mask, amax = torch.zeros(M, N, dtype=torch.bool), empty(dtype=torch.float32)
    out = computed(x, fn, bf16, bias=bias, pre=columns, same=padded, mask=mask, amax=amax)
    act = torch.nn.functional.gelu(x + bias)
    assert torch.equal(out, act.bfloat16())
    assert torch.equal(columns, (x + bias).half())
    assert torch.equal(padded, act.float())
    assert torch.equal(mask, act > 0.1)
    close(amax, act.abs().max().float())


@pytest.mark.parametrize("types", [("i8", "i8", "i32"), ("u8", "i8", "f32")])
def test_integer_accumulators_are_scaled_and_quantised(types):
    from support.data import gemm_tensors

    A, B, _ = gemm_tensors(5, 8, 16, types=types)
    scale, out = torch.rand(5, 1) + 0.1, torch.empty(5, 8, dtype=torch.int8)

    def fn(accum, scale):
        return ep.quantize(accum * scale, "int8", 0.5)

    args = ka.GemmArguments(A, B, out, epilogue=ka.EpilogueArguments(fn, scale=scale))
    assert args.accumulator_type.name == "int32"
    assert ka.verify(reference_kernel(args), args)
    product = (A.long() @ B.long()).double()
    assert torch.equal(out, (product * scale / 0.5).round().clamp(-128, 127).to(torch.int8))


def test_a_scaled_out_stores_d_over_its_scale():
    A, B = normal(4, 8, dtype=torch.float32), normal(8, 6, dtype=torch.float32, seed=1)
    scale = torch.rand(4) + 0.5
    stored = torch.empty(4, 6)
    out = ka.ScaledOperand(stored, scale, ka.ScaleMode.PER_ROW)
    args = ka.GemmArguments(A, B, out, epilogue=ka.EpilogueArguments(ep.relu))
    assert ka.verify(reference_kernel(args), args)
    torch.testing.assert_close(stored * scale.unsqueeze(1), torch.relu(A @ B))


# What these functions refuse -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x: ep.glu_pair(x, "gate")[0], "order is 'gate'; expected one of ('gate_up', "),
        (lambda x: ep.glu_pair(x, granularity=0)[0], "granularity is 0; expected a number"),
        (lambda x: ep.glu_pair(x, granularity="half")[0], "granularity is 'half'"),
        (lambda x: ep.glu_pair(x, granularity=48)[0], "split needs columns in multiples of 96"),
        (lambda x: ep.interleave(*ep.glu_pair(x), granularity=24), "in multiples of 24"),
        (lambda x: ep.interleave(x, ep.glu_pair(x)[0]), "expected as many columns"),
        (lambda x: x + ep.glu_pair(x)[0], "have different numbers of columns"),
        (lambda x: ep.glu_pair(ep.sum(x, -1))[0], "glu_pair needs columns"),
        (lambda x: ep.hadamard(ep.glu_pair(x, granularity=4)[0] * 1) * 1, "(6, 32)"),
        (lambda x: ep.hadamard(x, signs=1.0), "signs is 1.0; pass it to EpilogueArguments"),
        (lambda x: ep.rotate(x, 1.0, 0.0, 16), "cos is 1.0; pass it to EpilogueArguments"),
        (lambda x: ep.rotate(x, x, x, 16), "cos of rotate must be an operand"),
        (lambda x: ep.rotate(x, x, x, 15), "expected an even width that fits"),
        (lambda x: ep.rotate(x, x, x, 16, 8, 16), "expected an even width that fits"),
        (lambda x: ep.rotate(x, x, x, 16, style="full"), "style is 'full'"),
        (lambda x: ep.rotate(x, x, x, 16, heads=0), "heads is 0; expected how many are rotated"),
        (lambda x: ep.rotate(x, x, x, 16, heads=1.5), "heads is 1.5; expected a whole number"),
        (lambda x: x * ep.amax(x, -1, block=48), "numbers of columns"),
        (lambda x: x * ep.repeat(ep.amax(x, -1, block=48), 48), "in multiples of 48"),
        (lambda x: x * ep.amax(x, -2, block=16), "expected axis -1 and at least 1 column"),
        (lambda x: ep.repeat(x, 0), "times is 0; expected at least 1"),
        (lambda x: ep.cast(x, "float12"), "'float12' names no element type"),
        (lambda x: ep.cast(x, torch.complex64), "cast to complex64; expected one of float32"),
        (lambda x: ep.cast(x, "int64"), "cast to int64; expected one of"),
        (lambda x: ep.where(x, 1, 2), "expected a comparison such as x > 0"),
        (lambda x: (x > 0) & x, "and is for comparisons"),
        (lambda x: ~x, "not is for comparisons"),
        (lambda x: ep.exp("x"), "'x' is no number and no traced value"),
        (lambda x: x + None, "None is no number"),
        (lambda x: x + 1j, "1j is no number"),
    ],
)
def test_a_misuse_is_told(fn, text):
    with pytest.raises(EpilogueError) as caught:
        computed(normal(M, N), fn)
    assert text in str(caught.value)
    assert "test_epilogue_structure.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "operands", "text"),
    [
        (
            lambda x, c: ep.rotate(x, c, c, 16),
            {"c": torch.ones(M, 16)},
            "c has shape (6, 16); cos of rotate is ([L,] M, 8)",
        ),
        (
            lambda x, c: ep.rotate(x, c, c, 16),
            {"c": torch.ones(8)},
            "c has shape (8,); cos of rotate is ([L,] M, 8)",
        ),
        (
            lambda x, c: ep.rotate(x, c, c, 24),
            {"c": torch.ones(M, 12)},
            "rotate needs columns in multiples of 24, and there are 64",
        ),
        (
            lambda x, c: ep.rotate(x, c, c, 16, heads=5),
            {"c": torch.ones(M, 8)},
            "rotate is of 5 heads, and there are 4",
        ),
        (
            lambda x, s: ep.hadamard(x, signs=s),
            {"s": torch.ones(8)},
            "s has shape (8,); signs of hadamard is (16,)",
        ),
        (
            lambda x, s: ep.hadamard(x * s, signs=s),
            {"s": torch.ones(16)},
            "s has shape (16,), which does not broadcast",
        ),
        (
            lambda x, c: ep.rotate(x + c, c, c, 64),
            {"c": torch.ones(M, 32)},
            "have different numbers of columns: the accumulator is (L, M, N) and c is (M, N/2)",
        ),
    ],
)
def test_tables_of_another_shape_are_told(fn, operands, text):
    with pytest.raises(EpilogueError) as caught:
        computed(normal(M, N), fn, **operands)
    assert text in str(caught.value)
