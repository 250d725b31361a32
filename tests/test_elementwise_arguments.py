"""ElementwiseArguments: what is refused and how that is said; the reference against plain torch."""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.elementwise import BROADCAST, broadcast, drawn, matrix

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api._description import described, rebuilt
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._work import work_of

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
E4M3 = torch.float8_e4m3fn


def empty(*shape, element=F32, device="cpu"):
    return torch.empty(shape, dtype=element, device=device)


def reference(args):
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    return kernel


def computed(args):
    """Outputs as the reference writes them; it passes its own verification."""
    assert ka.verify(reference(args), args)
    return {name: operand.tensor for name, operand in args.outputs.items()}


# Checks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "out", "words"),
    [
        ((3,), (3,), "x has rank 1, out rank 1; expected both 2, (M, N), or both 3"),
        ((2, 3), (1, 2, 3), "x has rank 2, out rank 3; expected both 2"),
        ((1, 2, 3, 4), (1, 2, 3, 4), "see further modes as one by view"),
        ((2, 3, 4), (3, 3, 4), "batch of x is 2, of out 3; they must be equal"),
        ((2, 3), (2, 4), "out has (M, N) = (2, 4) but x has (2, 3)"),
        ((1, 3), (2, 3), "broadcast x with expand, a stride of 0"),
    ],
)
def test_shapes_that_do_not_fit_are_told_with_both(x, out, words):
    with pytest.raises(ka.errors.ArgumentError, match=re.escape(words)):
        ka.ElementwiseArguments(empty(*x), empty(*out))


def test_complex_numbers_and_scales_are_refused_by_name():
    with pytest.raises(ka.errors.ArgumentError, match="x is complex64; expected real numbers"):
        ka.ElementwiseArguments(empty(2, 3, element=torch.complex64), empty(2, 3))
    scaled = ka.ScaledOperand(empty(2, 3), torch.ones(()), ka.ScaleMode.PER_TENSOR)
    with pytest.raises(ka.errors.ArgumentError, match=r"x is a ScaledOperand.*in an epilogue"):
        ka.ElementwiseArguments(scaled, empty(2, 3))


def test_operands_of_two_devices_are_refused():
    with pytest.raises(ka.errors.ArgumentError, match="out is on meta but x is on cpu"):
        ka.ElementwiseArguments(empty(2, 3), empty(2, 3, device="meta"))


def test_what_is_written_shares_no_memory():
    x = empty(4, 6)
    with pytest.raises(ka.errors.ArgumentError, match="out shares memory with x"):
        ka.ElementwiseArguments(x, x)
    with pytest.raises(ka.errors.ArgumentError, match="several of its elements are one in memory"):
        ka.ElementwiseArguments(x, empty(1, 6).expand(4, 6))
    both = empty(4, 12)
    ka.ElementwiseArguments(both[:, :6], both[:, 6:])
    epilogue = ka.EpilogueArguments(lambda accum: (accum, ep.sum(accum, -2)), sums=x[1])
    with pytest.raises(ka.errors.ArgumentError, match="sums shares memory with x"):
        ka.ElementwiseArguments(x, empty(4, 6), epilogue=epilogue)


def test_an_epilogue_takes_no_name_of_the_arguments_and_decides_the_columns():
    twice = ka.EpilogueArguments(lambda accum, x: accum + x, x=empty(6))
    with pytest.raises(ka.errors.EpilogueError, match="is called x, which is taken"):
        ka.ElementwiseArguments(empty(4, 6), empty(4, 6), epilogue=twice)

    def glu(accum):
        up, gate = ep.glu_pair(accum, granularity="halves")
        return up * gate

    epilogue = ka.EpilogueArguments(glu)
    assert ka.ElementwiseArguments(empty(4, 6), empty(4, 3), epilogue=epilogue).N == 6
    with pytest.raises(ka.errors.EpilogueError, match="3"):
        ka.ElementwiseArguments(empty(4, 6), empty(4, 6), epilogue=epilogue)


# Without out -----------------------------------------------------------------------------


def summed(element=F32, scale=2.0, x=None, **more):
    """Sums of a matrix that is not stored."""
    x = drawn((5, 7), element) if x is None else x
    epilogue = ka.EpilogueArguments(
        lambda accum, scale: (accum, ep.sum(accum * scale, -1)), scale=scale, sums=empty(5)
    )
    return ka.ElementwiseArguments(x, epilogue=epilogue, **more)


@pytest.mark.parametrize("element", [F32, BF16, F64, torch.int8])
def test_without_out_the_other_outputs_are_all_that_is_written(element):
    args = summed(element)
    before = args.x.tensor.clone()
    assert list(args.outputs) == ["sums"] and list(args.named_operands) == ["x", "sums"]
    assert torch.equal(args.x.tensor, before)
    found = computed(args)["sums"]
    torch.testing.assert_close(found, 2 * args.x.tensor.double().sum(1).float())
    assert torch.equal(args.x.tensor, before)
    assert "-> nothing" in repr(args)


def test_without_out_there_is_a_kernel_of_its_own():
    args = summed()
    stored = ka.ElementwiseArguments(args.x.tensor, empty(5, 7), epilogue=args.epilogue)
    assert args.signature != stored.signature and args.key != stored.key


def test_without_out_they_are_rebuilt_on_other_tensors_and_in_another_process():
    args = summed()
    x = torch.ones(5, 7)
    other = args.rebuilt(x, x, scale=3.0, sums=empty(5))
    assert not other.stores_out and other.signature == args.signature
    assert computed(other)["sums"].tolist() == [21.0] * 5
    again = rebuilt(described(args))
    assert again.signature == args.signature and again.x.device.type == "meta"


def test_without_out_something_else_is_written_and_x_has_a_type_that_is():
    with pytest.raises(
        ka.errors.ArgumentError, match="out is None and the epilogue writes nothing"
    ):
        ka.ElementwiseArguments(empty(2, 3))
    with pytest.raises(
        ka.errors.ArgumentError, match="out is None and the epilogue writes nothing"
    ):
        ka.ElementwiseArguments(empty(2, 3), epilogue=ka.EpilogueArguments(lambda accum: accum))
    for element, name in ((torch.bool, "bool"), (torch.int64, "int64")):
        with pytest.raises(ka.errors.ArgumentError, match=f"out is None and x is {name}; without"):
            summed(x=drawn((5, 7), element))
    with pytest.raises(ka.errors.ArgumentError, match="sums shares memory with x"):
        x = empty(5, 7)
        epilogue = ka.EpilogueArguments(lambda accum: (accum, ep.sum(accum, -1)), sums=x[:, 0])
        ka.ElementwiseArguments(x, epilogue=epilogue)


# What they say ---------------------------------------------------------------------------


def test_they_say_what_they_are():
    x, out = empty(2, 3, 4, element=BF16), empty(2, 3, 4)
    args = ka.ElementwiseArguments(x, out)
    assert (args.kind, args.L, args.M, args.N) == ("elementwise", 2, 3, 4)
    assert args.sizes == {"M": 3, "N": 4, "L": 2}
    assert repr(args) == "ElementwiseArguments(2x3x4 (M x N), bf16 -> f32, on cpu)"
    assert args.accumulator_type == F32
    assert ka.ElementwiseArguments(empty(2, 3, element=F64), empty(2, 3)).accumulator_type == F64
    assert ka.ElementwiseArguments(empty(2, 3, element=torch.int64), empty(2, 3)).L == 1


def test_the_signature_has_no_sizes_and_the_key_has():
    a = ka.ElementwiseArguments(empty(2, 3), empty(2, 3))
    b = ka.ElementwiseArguments(empty(5, 7), empty(5, 7))
    c = ka.ElementwiseArguments(empty(5, 7), empty(5, 7, element=BF16))
    assert a.signature == b.signature != c.signature
    assert a.key != b.key


def test_they_are_rebuilt_on_other_tensors_and_in_another_process():
    def scaled(accum, bias, alpha):
        return alpha * accum + bias, ep.sum(accum, -1)

    sums = empty(2)
    epilogue = ka.EpilogueArguments(scaled, bias=torch.ones(3), alpha=2.0, sums=sums)
    args = ka.ElementwiseArguments(torch.ones(2, 3), empty(2, 3), epilogue=epilogue)
    other = args.rebuilt(torch.zeros(2, 3), empty(2, 3), alpha=3.0, sums=empty(2))
    assert computed(other)["out"].tolist() == [[1.0] * 3] * 2
    again = rebuilt(described(args))
    assert again.signature == args.signature
    assert again.x.device.type == "meta"


def test_the_work_of_a_problem_is_its_bytes():
    x = empty(64, 32, element=BF16)
    epilogue = ka.EpilogueArguments(lambda accum, b: accum + b, b=empty(1, 32).expand(64, 32))
    args = ka.ElementwiseArguments(x, empty(64, 32), epilogue=epilogue)
    work = work_of(Problem.of(args))
    assert work.operations is None
    assert work.bytes == 64 * 32 * (2 + 4) + 32 * 4


# The reference and torch -----------------------------------------------------------------

shapes = st.tuples(st.sampled_from(((), (1,), (3,))), st.integers(0, 9), st.integers(0, 33))
layouts = st.tuples(st.sampled_from("tn"), st.integers(0, 3), st.integers(0, 2))


@settings(deadline=None, max_examples=60)
@given(shapes, layouts, layouts, st.sampled_from((F32, F64, BF16, torch.int32, torch.bool)))
def test_any_shape_and_strides_are_right(shape, of_x, of_out, element):
    batch, M, N = shape
    shape = (*batch, M, N)
    x = drawn(shape, element, of_x[0], pad=of_x[1], offset=of_x[2])
    more = drawn(shape, F32, seed=1)
    out = matrix(shape, F32, of_out[0], pad=of_out[1], offset=of_out[2])
    sums = torch.empty((*batch, M))

    def fn(accum, more):
        return 2.0 * accum + more, ep.sum(accum, -1)

    epilogue = ka.EpilogueArguments(fn, more=more, sums=sums)
    args = ka.ElementwiseArguments(x, out, epilogue=epilogue)
    found = computed(args)
    torch.testing.assert_close(found["out"], (2 * x.double() + more).float())
    torch.testing.assert_close(found["sums"].double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("modes", BROADCAST)
def test_what_x_broadcasts_is_read_where_it_is(modes):
    x = broadcast((3, 5, 7), modes, F32)
    args = ka.ElementwiseArguments(x, empty(3, 5, 7))
    for kernel in ka.get_kernels(args):
        assert ka.verify(kernel, args)
        assert torch.equal(args.out.tensor, x)


NUMBERS = [0.0, -0.5, 0.5, 1.5, 2.5, 1e9, -1e9, float("inf"), float("nan")]


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        (torch.int8, [0, 0, 0, 2, 2, 127, -128, 127, 0]),
        (torch.uint8, [0, 0, 0, 2, 2, 255, 0, 255, 0]),
        (E4M3, [0, -0.5, 0.5, 1.5, 2.5, 448, -448, 448, float("nan")]),
    ],
)
def test_without_an_epilogue_numbers_are_converted_as_epilogues_do(element, expected):
    x = torch.tensor([NUMBERS])
    args = ka.ElementwiseArguments(x, empty(1, len(NUMBERS), element=element))
    found = computed(args)["out"].double()
    wanted = torch.tensor([expected], dtype=F64)
    assert torch.equal(found.nan_to_num(nan=-7), wanted.nan_to_num(nan=-7))
    # torch cuts off, and wraps around: it is not offered.
    assert [k.provider_name() for k in ka.get_kernels(args)] == ["reference"]
    (told,) = [r for r in ka.explain(args).rejected if r.family == "torch.copy"]
    assert told.rule == "element types"


@pytest.mark.parametrize("element", ["int32", "int64", "uint16", "uint32", "uint64"])
def test_the_widest_integers_saturate_and_are_verified(element):
    element = getattr(torch, element)
    limits = torch.iinfo(element)
    x = torch.tensor([[-2.5, 1.5, 2.0**15 + 1, 2.0**63, 1e30, -1e30, float("nan")]], dtype=F64)
    args = ka.ElementwiseArguments(x, empty(1, x.numel(), element=element))
    (kernel,) = ka.get_kernels(args)
    assert ka.verify(kernel, args)
    least, most = limits.min, limits.max
    wide = min(2**63, most)
    expected = [max(-2, least), 2, min(2**15 + 1, most), wide, most, least, 0]
    assert args.out.tensor.tolist() == [expected]
    args.out.tensor[0, 1] = 3
    assert not ka.verification.judge(args)


@pytest.mark.parametrize("element", [torch.int64, torch.float8_e5m2, torch.bool, F64, torch.int32])
def test_of_the_same_type_bits_stay(element):
    x = drawn((5, 7), element)
    if element is torch.float8_e5m2:
        x[2, 3] = float("inf")
    if element is torch.int64:
        x[2, 3] = 2**62 + 1
    args = ka.ElementwiseArguments(x, matrix((5, 7), element, "n", pad=1))
    for kernel in ka.get_kernels(args):
        assert ka.verify(kernel, args)
        copied = args.out.tensor.contiguous()
        assert torch.equal(copied.view(torch.uint8), x.contiguous().view(torch.uint8))


@pytest.mark.parametrize("out", [F32, BF16, torch.float16])
@pytest.mark.parametrize("element", [F64, F32, BF16, E4M3, torch.int32, torch.int64, torch.bool])
def test_torch_and_the_reference_convert_alike(element, out):
    args = ka.ElementwiseArguments(drawn((4, 9), element), matrix((4, 9), out))
    results = []
    for kernel in ka.get_kernels(args):
        assert ka.verify(kernel, args)
        results.append(args.out.tensor.clone())
    assert [k.family for k in ka.get_kernels(args)] == ["torch.copy", "reference.elementwise"]
    assert torch.equal(*results)


def test_a_wrong_result_is_found():
    x, wrong = drawn((6, 40), BF16), matrix((6, 40), BF16)
    args = ka.ElementwiseArguments(x, wrong, epilogue=ka.EpilogueArguments(lambda a: a * 2.0))
    computed(args)
    wrong[3, 5] += 0.1
    assert not ka.verification.judge(args)


def test_torch_takes_no_epilogue():
    epilogue = ka.EpilogueArguments(lambda accum: -accum)
    args = ka.ElementwiseArguments(empty(2, 3), empty(2, 3), epilogue=epilogue)
    (told,) = [r for r in ka.explain(args).rejected if r.family == "torch.copy"]
    assert told.rule == "epilogue"


@pytest.mark.parametrize("element", [torch.int8, torch.int16, torch.int32])
def test_what_is_wrong_is_found_beside_what_saturates(element):
    x = drawn((64, 256))
    x[0, 0] = 1e12
    epilogue = ka.EpilogueArguments(lambda accum, by: accum * by, by=20.0)
    args = ka.ElementwiseArguments(x, torch.empty(64, 256, dtype=element), epilogue=epilogue)
    kernel = ka.get_kernels(args, providers=["reference"])[0]
    assert ka.verify(kernel, args)
    kernel.run(args)
    out = args.out.tensor
    for wrong in (torch.zeros_like(out), -out):
        out.copy_(wrong)
        assert not ka.verification.judge(args, 2.0)


@pytest.mark.parametrize("element", [torch.int8, torch.int32, torch.uint8])
def test_a_nan_that_becomes_0_in_integers_is_right_and_anything_else_is_wrong(element):
    x = drawn((8, 32), F32)
    x[2, 3] = float("nan")
    sums = torch.empty(8, dtype=element)
    epilogue = ka.EpilogueArguments(lambda accum: (accum * 10.0, ep.sum(accum, -1)), sums=sums)
    args = ka.ElementwiseArguments(x, empty(8, 32, element=element), epilogue=epilogue)
    (kernel,) = ka.get_kernels(args)
    assert ka.verify(kernel, args)
    kernel.run(args)
    assert args.out.tensor[2, 3] == sums[2] == 0
    sums[2] = 2
    assert not ka.verification.judge(args)
