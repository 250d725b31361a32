"""Operations of graphs that epilogues have, too: steps, random numbers, scales of blocks, pairs."""

import pytest
import torch
from support.graph_operations import Nodes, close, random

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api.errors import GraphError
from kernel_api.graph._enums import data_type, rng_distribution

FLOAT = data_type.FLOAT

# Steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ceil", "floor"])
def test_steps_are_part_of_a_kernel(op):
    g = cudnn.pygraph("", FLOAT, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"))
    x, y = (g.tensor((3, 5, 7), name=name) for name in "xy")
    g.relu(g.mul(getattr(g, op)(g.relu(x)), y)).set_output(True).set_name("out")
    g.build([cudnn.heur_mode.A])
    assert [step.kind for step in g.selected.steps] == ["kernel"]
    x, y = (4 * torch.rand(3, 5, 7) for _ in "xy")
    out = torch.empty(3, 5, 7)
    g.execute({"x": x, "y": y, "out": out})
    assert torch.equal(out, getattr(x, op)() * y)


@pytest.mark.parametrize("op", ["ceil", "floor"])
@pytest.mark.parametrize("kind", [data_type.INT32, data_type.INT64], ids=lambda kind: kind.name)
def test_steps_leave_integers_as_they_are(op, kind):
    g = cudnn.pygraph("", kind, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"))
    x = g.tensor((1, 4), name="x")
    getattr(g, op)(x).set_output(True).set_name("out").set_data_type(kind)
    g.build([cudnn.heur_mode.A])
    given = torch.tensor([[2**24 + 1, -(2**24) - 1, 2**31 - 1, 5]]).to(getattr(torch, kind.value))
    out = torch.zeros_like(given)
    g.execute({"x": given, "out": out})
    assert torch.equal(out, given)


# Random numbers --------------------------------------------------------------------------


def test_numbers_that_are_0_or_1_are_those_of_dropout():
    seed, offset, dim = 91, 2**33 - 3, (2, 3, 7, 41)
    g = Nodes()
    kept = g.compute(g.rng(dim, seed=seed, offset=offset, bernoulli_probability=0.7))
    q, k, v = torch.zeros(2, 3, 7, 8), torch.zeros(2, 3, 41, 8), torch.eye(41).expand(2, 3, 41, 41)
    args = ka.SdpaArguments(
        q, k, v, out := torch.empty(2, 3, 7, 41), dropout=ka.arguments.Dropout(0.3, seed, offset)
    )
    ka.get_kernels(args, providers=("reference",))[0].run(args)
    assert torch.equal(kept != 0, out != 0)
    assert set(kept.unique().tolist()) == {0.0, 1.0}


def test_uniform_numbers_of_a_matrix_are_those_of_an_epilogue():
    seed, offset = 91, 2**33 + 5
    g = Nodes()
    drawn = g.compute(g.rng((7, 9), distribution="UNIFORM", seed=seed, offset=offset))

    def fn(accum, seed, offset):
        return ka.epilogue.dropout(accum, 0.3, seed, offset)

    A, B, out = torch.ones(7, 1), torch.ones(1, 9), torch.empty(7, 9)
    epilogue = ka.EpilogueArguments(fn, seed=seed, offset=offset)
    args = ka.GemmArguments(A, B, out, epilogue=epilogue)
    ka.get_kernels(args, providers=("reference",))[0].run(args)
    assert torch.equal(drawn >= 0.3, out != 0)


def test_uniform_and_normal_numbers():
    g = Nodes()
    u = g.rng((64, 65), distribution="UNIFORM", seed=3, uniform_min=-2.0, uniform_max=5.0)
    n = g.rng(
        (64, 65), stride=(1, 64), distribution=rng_distribution.NORMAL, seed=4, normal_mean=1.5,
        normal_std=0.5,
    )  # fmt: skip
    uniform, normal = g.compute(u, n)
    assert -2 <= float(uniform.min()) < -1.9 and 4.9 < float(uniform.max()) < 5
    assert float(normal.mean()) == pytest.approx(1.5, abs=0.05)
    assert float(normal.std()) == pytest.approx(0.5, abs=0.05)
    assert n.stride == (1, 64) and n.data_type is data_type.FLOAT


def test_random_numbers_by_tensors_of_seed_and_offset():
    g = Nodes()
    state = [g.given(torch.tensor([[n]])) for n in (17, 2**40)]
    one = g.rng((5, 6), None, "UNIFORM", *state)
    other = g.rng((5, 6), None, "UNIFORM", 17, 2**40)
    assert torch.equal(*g.compute(one, other))
    with pytest.raises(GraphError, match="expected a number from 0 to 1"):
        g.rng((3, 4), seed=1, offset=2)


@pytest.mark.parametrize("name", ["seed", "offset"])
@pytest.mark.parametrize("kind", [data_type.FLOAT, data_type.HALF])
def test_seeds_and_offsets_are_whole(kind, name):
    g = cudnn.pygraph(handle=cudnn.create_handle("cpu"))
    state = {"seed": 3, "offset": 4, name: g.tensor((1,), data_type=kind, name=name)}
    g.rng((3, 4), distribution="UNIFORM", **state).set_output(True)
    with pytest.raises(GraphError, match=f"has {name} of {kind.name}; expected INT64"):
        g.validate()


# Blocks with scales ----------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("kind", [data_type.FP8_E4M3, data_type.FP8_E5M2])
def test_blocks_are_scaled_by_powers_of_two(axis, kind):
    x = random(5, 70) * torch.exp(2 * random(5, 70, seed=1))
    x[1] = 0.0
    x = x if axis is None else x.t()
    g = Nodes()
    data, scale = g.block_scale_quantize(g.given(x), block_size=32, axis=axis)
    data.set_data_type(kind)
    back = g.block_scale_dequantize(data, scale, 32, axis=axis)
    g.infer()
    stored, factors, found = g.compute(data, scale, back)
    rows = (lambda t: t) if axis is None else (lambda t: t.t())
    assert rows(factors).shape == (5, 3) and scale.data_type is data_type.FP8_E8M0
    largest = torch.finfo(stored.dtype).max
    for block in range(3):
        part = slice(32 * block, 32 * block + 32)
        amax = rows(x)[:, part].abs().amax(1).double()
        exact = torch.exp2(torch.ceil(torch.log2(amax / largest)).clamp(min=-127))
        assert torch.equal(rows(factors).double()[:, block], exact)
        own = rows(x)[:, part].double() / exact.unsqueeze(1)
        assert torch.equal(rows(stored)[:, part], own.to(stored.dtype))
        values = rows(stored)[:, part].double() * exact.unsqueeze(1)
        assert torch.equal(rows(found)[:, part].double(), values)


@pytest.mark.parametrize("scale_kind", [data_type.FP8_E8M0, data_type.FLOAT])
@pytest.mark.parametrize("kind", [data_type.FP8_E4M3, data_type.FP8_E5M2])
def test_blocks_of_extreme_numbers_are_finite(kind, scale_kind):
    x = random(5, 32)
    x[0] = 0.0
    x[1] = 1e-43
    x[2, 3] = torch.inf
    x[3, 4] = -2.9e38
    x[4, 5] = torch.nan
    g = Nodes()
    data, scale = g.block_scale_quantize(g.given(x), block_size=32)
    data.set_data_type(kind)
    scale.set_data_type(scale_kind)
    stored, factors, back = g.compute(data, scale, g.block_scale_dequantize(data, scale, 32))
    assert bool((factors[:4].float() > 0).all()) and bool(factors[:4].float().isfinite().all())
    assert torch.equal(stored[0].float(), torch.zeros(32)) and not back[0].any()
    assert float((back[1] - x[1]).abs().max()) <= 1e-43
    assert float(stored[2, 3]) == torch.finfo(stored.dtype).max and float(back[2, 3]) > 1e38
    assert float(back[2].abs().nan_to_num(posinf=0.0).where(x[2].isfinite(), 0).max()) < 10
    assert float(back[3, 4]) == pytest.approx(-2.9e38, rel=0.2) and back[3].isfinite().all()
    assert back[4].isnan().all()


def test_blocks_say_what_does_not_fit():
    g = Nodes()
    g.block_scale_dequantize(g.unknown((4, 64)), g.unknown((4, 3)), 32)
    with pytest.raises(GraphError, match=r"has \[4, 2\] blocks"):
        g.infer()
    with pytest.raises(GraphError, match="block_size = 0; expected 1 or more"):
        g.block_scale_quantize(g.unknown((4, 64)), block_size=0)
    g = Nodes()
    data, _ = g.block_scale_quantize(g.unknown((4, 64)), block_size=32)
    data.set_data_type(data_type.HALF)
    with pytest.raises(GraphError, match="is HALF; expected FP8_E4M3 or FP8_E5M2"):
        g.infer()


# Pairs and rotations ---------------------------------------------------------------------


def by_epilogue(fn, x, **given):
    """A function of the accumulator, which x is."""
    out = torch.empty(x.shape[0], x.shape[1])
    args = ka.GemmArguments(
        x, torch.eye(x.shape[1]), out, epilogue=ka.EpilogueArguments(fn, **given)
    )
    ka.get_kernels(args, providers=("reference",))[0].run(args)
    return out


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("granularity", ["halves", 4, 1])
def test_pairs_are_those_of_epilogues(order, granularity):
    x, ep = random(5, 24), ka.epilogue
    g = Nodes()
    gate, up = g.glu_pair(g.given(x), granularity=granularity, order=order)
    first, second = g.compute(gate, up)

    def fn(accum):
        one, other = ep.glu_pair(accum, order=order, granularity=granularity)
        return ep.interleave(one, other, order="gate_up", granularity="halves")

    assert torch.equal(by_epilogue(fn, x), torch.cat([first, second], 1))
    assert gate.dim == (5, 12)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("start", "width", "heads"), [(0, None, None), (2, 4, None), (0, None, 2), (2, 4, 1)]
)
def test_rotations_are_those_of_epilogues(style, start, width, heads):
    x, half = random(5, 24), (width or 8) // 2
    cos, sin = random(5, half, seed=1), random(5, half, seed=2)
    g = Nodes()
    how = {"head_dim": 8, "start": start, "width": width, "style": style, "heads": heads}
    found = g.compute(g.rope(g.given(x), g.given(cos), g.given(sin), **how))

    def fn(accum, cos, sin):
        return ka.epilogue.rotate(accum, cos, sin, **how)

    close(found, by_epilogue(fn, x, cos=cos, sin=sin).double())


def test_pairs_and_rotations_say_what_does_not_fit():
    g = Nodes()
    x = g.unknown((5, 24))
    with pytest.raises(GraphError, match="order 'gates'"):
        g.glu_pair(x, order="gates")
    with pytest.raises(GraphError, match="granularity 0"):
        g.glu_pair(x, granularity=0)
    with pytest.raises(GraphError, match="an even width that fits"):
        g.rope(x, x, x, head_dim=8, start=4, width=6)
    with pytest.raises(GraphError, match="style 'whole'"):
        g.rope(x, x, x, head_dim=8, style="whole")
    with pytest.raises(GraphError, match="heads 0; expected 1 or more, or None"):
        g.rope(x, x, x, head_dim=8, heads=0)
    g.glu_pair(x, granularity=5)
    with pytest.raises(GraphError, match="a multiple of 10"):
        g.infer()
    g = Nodes()
    g.rope(g.unknown((5, 24)), g.unknown((5, 3)), g.unknown((5, 4)), head_dim=8)
    with pytest.raises(GraphError, match=r"expected \(\.\.\., M, width / 2\) = \[5, 4\]"):
        g.infer()
    g = Nodes()
    angles = g.unknown((5, 4))
    g.rope(g.unknown((5, 24)), angles, angles, head_dim=8, heads=4)
    with pytest.raises(GraphError, match="rotates 4 heads; its input has 3"):
        g.infer()
