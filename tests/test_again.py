"""One-call forms of norms, rows and quantisation: calls that look alike are launched at once, each
on its own tensors, be they outputs that are made for it or given."""

import gc
import re
import weakref

import pytest
import torch
from support.arrays import Array
from support.repeated import (
    CALLS,
    E4M3,
    F32,
    bits,
    drawn,
    forget,
    places,
    remembered,
    room,
)

import kernel_api as ka
from kernel_api import _again, _compile_cache, _launches
from kernel_api.arguments import GroupRowsArguments
from kernel_api.kernel import Kernel


@pytest.fixture
def nothing_remembered(monkeypatch):
    """But the providers are there; tensors of the CPU lie at any multiple of 64 bytes."""
    ka.get_kernels(providers=["reference"])
    monkeypatch.setattr(_again, "LOW_BITS", 63)
    forget()
    yield
    forget()


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_look_alike_compute_what_they_are_given(name, nothing_remembered):
    call = CALLS[name]
    alone = []
    for seed in range(3):
        alone.append(bits(call(seed)))
        forget()
    for seed in range(3):
        for one, other in zip(bits(call(seed)), alone[seed], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert len(remembered()) == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_an_earlier_one_makes_no_arguments(name, nothing_remembered, monkeypatch):
    CALLS[name](0)

    def refused(*args):
        raise AssertionError("it ran the long way")

    monkeypatch.setattr(_launches, "run_best", refused)
    monkeypatch.setattr(_again, "run_best", refused)
    CALLS[name](1)


def in_place_of_a_copy(x):
    residual = x.clone()
    return ka.ops.rmsnorm_quantize(x, "row", residual=residual, residual_out=residual)[:2]


IN_GRAPHS = {
    "rmsnorm": lambda x, index: ka.ops.rmsnorm(x, weight=x[0]),
    "nn.layernorm": lambda x, index: ka.nn.layernorm(x, x[0], x[1]),
    "quantize": lambda x, index: ka.ops.quantize(x, "row")[:2],
    "layernorm_quantize": lambda x, index: ka.ops.layernorm_quantize(x, "row")[:2],
    "rmsnorm into": lambda x, index: ka.ops.rmsnorm(x, out=torch.empty_like(x), rstd=True),
    "quantize into": lambda x, index: ka.ops.quantize(
        x, "row", out=torch.empty_like(x, dtype=E4M3)
    )[:2],
    "rmsnorm_quantize of a sum in place": lambda x, index: in_place_of_a_copy(x),
    "scatter_rows into": lambda x, index: ka.ops.scatter_rows(
        x, index[0, 0] + torch.arange(14, dtype=torch.int32)[:, None], out=x.new_zeros(40, 64)
    ),
    "gather_rows": lambda x, index: ka.ops.gather_rows(x, index),
}


@pytest.mark.parametrize("name", IN_GRAPHS)
def test_a_call_in_a_graph_makes_no_arguments_either(name, nothing_remembered, monkeypatch):
    torch._dynamo.reset()
    graph = torch.compile(IN_GRAPHS[name], fullgraph=True, backend="eager")
    graph(drawn(0, 14, 64), places(0))

    def refused(*args):
        raise AssertionError("it ran the long way")

    monkeypatch.setattr(_launches, "run_best", refused)
    monkeypatch.setattr(_again, "run_best", refused)
    graph(drawn(1, 14, 64), places(1))


def test_what_is_remembered_keeps_no_tensor_alive(nothing_remembered):
    x, index = drawn(0, 14, 24), places(0)
    known = [weakref.ref(one) for one in (x, index, ka.ops.gather_rows(x, index))]
    assert remembered()
    del x, index
    gc.collect()
    assert not any(one() is not None for one in known)


@pytest.mark.parametrize(
    ("look", "other"),
    [
        (lambda: drawn(0, 14, 24), lambda: drawn(0, 14, 32)),
        (lambda: drawn(0, 14, 24), lambda: drawn(0, 14, 24, element=torch.float32)),
        (lambda: drawn(0, 14, 24), lambda: drawn(0, 24, 14).t()),
        (lambda: drawn(0, 14, 32)[:, :24], lambda: drawn(0, 14, 32)[:, 1:25]),
    ],
    ids=["sizes", "types", "strides", "alignment"],
)
def test_calls_that_look_different_are_told_apart(look, other, nothing_remembered):
    for made in (look, other):
        ka.ops.gather_rows(made(), places(0))
    assert len(remembered()) == 2


def test_it_is_forgotten_when_kernels_are(nothing_remembered):
    key = _again.look((drawn(0, 3, 8),), "kind")
    _compile_cache.clear()
    assert _again.look((drawn(0, 3, 8),), "kind") != key


def test_what_is_checked_at_each_launch_is_never_remembered(nothing_remembered, monkeypatch):
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    assert _again.look((drawn(0, 3, 8),), "kind") is None


def test_empty_tensors_are_not_looked_at(nothing_remembered):
    assert ka.ops.gather_rows(drawn(0, 0, 8), places(0)[:0]).shape == (0, 8)
    assert ka.ops.quantize(drawn(0, 0, 128)).out.shape == (0, 128)
    assert not remembered()


def test_a_kernel_that_takes_other_names_is_not_remembered(nothing_remembered):
    index, outputs = places(0), ka.ops.group_rows(places(1), 5)[:3]
    key = _again.look((index,), "group_rows", "another")
    _again.run(key, GroupRowsArguments(index, *outputs), ("weight",))
    assert key not in remembered()


def test_norms_that_differ_are_not_taken_for_each_other(nothing_remembered):
    x, w = drawn(1, 4, 128), drawn(2, 128)
    calls = (
        lambda: ka.ops.rmsnorm(x, weight=w),
        lambda: ka.ops.rmsnorm(x),
        lambda: ka.ops.rmsnorm(x, weight=w, eps=1e-3),
        lambda: ka.ops.rmsnorm(x, weight=w, rstd=True),
        lambda: ka.ops.rmsnorm(x, weight=w, out_dtype="float32"),
        lambda: ka.ops.rmsnorm(x[:, :64], weight=w[:64]),
        lambda: ka.ops.rmsnorm(x, bias=w),
        lambda: ka.ops.layernorm(x, weight=w),
        lambda: ka.ops.layernorm_quantize(x, weight=w),
        lambda: ka.ops.layernorm_quantize(x, "mx", weight=w),
        lambda: ka.ops.layernorm_quantize(x, weight=w, eps=1e-3),
        lambda: ka.ops.layernorm_quantize(x, weight=w, out_dtype="int8"),
    )
    for count, call in enumerate(calls, 1):
        call(), call()
        assert len(remembered()) == count
    with pytest.raises(ka.errors.ArgumentError, match=r"eps is -1\.0"):
        ka.ops.rmsnorm(x, weight=w, eps=-1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ka.ops.rmsnorm(x, eps=0),
        lambda x: ka.ops.rmsnorm_rht_amax(x, weight=x[0]),
        lambda x: ka.ops.rmsnorm_quantize(x, eps=0),
        lambda x: ka.ops.rmsnorm_quantize(x, "tensor", scale=2),
    ],
)
def test_norms_with_maxima_or_numbers_of_other_types_are_not_remembered(call, nothing_remembered):
    call(drawn(1, 4, 128))
    assert not remembered()


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_a_step_of_training_like_an_earlier_one_makes_no_arguments(
    name, nothing_remembered, monkeypatch
):
    def step(seed):
        x, w, b = drawn(seed, 9, 64), drawn(seed + 9, 64), drawn(seed + 10, 64)
        learning = [one.requires_grad_() for one in (x, w, b)]
        y = getattr(ka.nn, name)(x, w, b)
        return bits(torch.autograd.grad(y, learning, drawn(seed + 20, 9, 64)))

    expected = step(1)
    assert len(remembered()) == 2
    forget()
    step(0)

    def refused(*args):
        raise AssertionError("it ran the long way")

    monkeypatch.setattr(_again, "run_best", refused)
    found = step(1)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, r: ka.ops.rmsnorm(x=x, weight=w),
        lambda x, w, r: ka.ops.layernorm(weight=w, x=x, rstd=True),
        lambda x, w, r: ka.ops.rmsnorm_backward(x, x=x * 2, rstd=r, dweight=True),
        lambda x, w, r: ka.ops.rmsnorm_backward(rstd=r, x=x * 2, dy=x, dweight=True),
    ],
)
def test_matrices_may_be_passed_by_name(call, nothing_remembered):
    def given(seed):
        return drawn(seed, 9, 128), drawn(seed + 9, 128), drawn(seed, 9, element=torch.float32)

    alone = []
    for seed in range(3):
        alone.append(bits(call(*given(seed))))
        forget()
    for seed in range(3):
        for one, other in zip(bits(call(*given(seed))), alone[seed], strict=True):
            assert torch.equal(one, other)
        assert len(remembered()) == 1


def test_what_was_known_first_is_forgotten_first(nothing_remembered, monkeypatch):
    monkeypatch.setattr(_again, "_KEPT", 4)
    for columns in (64, 128, 192, 256, 320):
        ka.ops.rmsnorm(drawn(0, 3, columns))
    assert len(remembered()) == 4


def test_calls_that_are_not_remembered_make_no_launcher(nothing_remembered, monkeypatch):
    """Of a whole matrix whose scale is to be found, in three launches."""
    made = []
    monkeypatch.setattr(Kernel, "_launcher_in_order", lambda *of: made.append(of))
    x = drawn(0, 9, 128)
    ka.ops.quantize(x, "tensor", out=torch.empty_like(x, dtype=E4M3))
    ka.ops.rmsnorm_rht_amax(x, weight=x[0])
    assert not made and not remembered()


# Outputs that are given --------------------------------------------------------------------


def test_what_is_given_is_what_is_returned_and_torch_is_told(nothing_remembered, monkeypatch):
    told = []
    monkeypatch.setattr(_again, "_tell", told.extend)
    out, residual, matrix = room(9, 128), drawn(1, 9, 128), room(7, 24)
    for _ in range(2):
        told.clear()
        found = ka.ops.rmsnorm(drawn(0, 9, 128), residual=residual, residual_out=residual, out=out)
        assert found.out is out and found.residual_out is residual
        assert ka.ops.gather_rows(drawn(0, 14, 24), places(0), out=matrix) is matrix
    assert {id(one) for one in told} == {id(one) for one in (out, residual, matrix)}


def test_a_sum_in_place_and_one_apart_are_told_apart(nothing_remembered):
    x = drawn(0, 9, 128)
    for seed in range(1, 5):
        residual = drawn(seed, 9, 128)
        before = residual.clone()
        written = residual if seed % 2 else room(9, 128)
        found = ka.ops.rmsnorm(x, residual=residual, residual_out=written)
        assert torch.equal(written, x + before)
        assert torch.equal(found.out, ka.ops.rmsnorm(x + before))
        assert torch.equal(residual, x + before if seed % 2 else before)
    assert len(remembered()) == 3


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        (lambda x, out: ka.ops.rmsnorm(x, out=out), 9),
        (lambda x, out: ka.ops.rmsnorm(x.clone(), residual=x, residual_out=out), 9),
        (lambda x, out: ka.ops.rmsnorm_quantize(x, residual=x.clone(), residual_out=out), 9),
        (lambda x, out: ka.ops.rmsnorm_backward(x, x.clone(), rstd=x[:, 0].float(), dx=out), 9),
        (lambda x, out: ka.ops.gather_rows(x, torch.arange(9).int()[:, None], out=out), 9),
        (lambda x, out: ka.ops.scatter_rows(x, torch.arange(9).int()[:, None], out=out), 9),
        (lambda x, out: ka.ops.quantize(x, out=out.view(torch.int8)[:, ::2][:, :128]), 9),
    ],
    ids=["out", "residual_out", "quantised", "dx", "gathered", "scattered", "quantize"],
)
def test_memory_that_is_shared_is_refused_after_calls_that_look_the_same(
    call, rows, nothing_remembered
):
    buffer = drawn(0, 3 * rows, 128)
    call(buffer[:rows], buffer[rows : 2 * rows])
    assert remembered()
    with pytest.raises(ka.errors.ArgumentError, match="shares memory"):
        call(buffer[:rows], buffer[1 : rows + 1])
    call(buffer[rows : 2 * rows], buffer[2 * rows :])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("out", lambda x, out: ka.ops.rmsnorm(x, out=out)),
        ("residual_out", lambda x, out: ka.ops.rmsnorm_quantize(x, residual=x, residual_out=out)),
        ("out", lambda x, out: ka.ops.gather_rows(x, places(0, 9) % 9, out=out)),
    ],
)
def test_outputs_that_need_gradients_are_refused_after_calls_that_look_the_same(
    name, call, nothing_remembered
):
    x = drawn(0, 9, 128)
    call(x, room(9, 128))
    with pytest.raises(ka.errors.ArgumentError, match=f"{name} is given and needs a gradient"):
        call(x, room(9, 128).requires_grad_())
    with torch.no_grad():
        call(x, room(9, 128).requires_grad_())


def test_outputs_of_as_many_elements_in_other_modes_are_refused_every_time(nothing_remembered):
    x = drawn(0, 2, 4, 128)
    ka.ops.rmsnorm_quantize(x, out=room(2, 4, 128, element=E4M3))
    ka.ops.rmsnorm_quantize(x, residual=x, residual_out=room(2, 4, 128))
    for _ in range(2):
        with pytest.raises(ka.errors.ArgumentError, match=r"out has shape \(4, 2, 128\)"):
            ka.ops.rmsnorm_quantize(x, out=room(4, 2, 128, element=E4M3))
        with pytest.raises(ka.errors.ArgumentError, match=r"residual_out has shape \(4, 2, 128\)"):
            ka.ops.rmsnorm_quantize(x, residual=x, residual_out=room(4, 2, 128))


@pytest.mark.parametrize("name", ["quantize", "rmsnorm_quantize", "layernorm_quantize"])
@pytest.mark.parametrize("scale", [-0.5, 0.0, float("nan"), float("inf")])
def test_scales_that_are_refused_are_so_after_one_that_is_not(name, scale, nothing_remembered):
    form, x = getattr(ka.ops, name), drawn(0, 4, 128)
    form(x, "tensor", scale=0.5)
    assert remembered()
    with pytest.raises(ka.errors.ArgumentError, match=f"scale is {scale}; expected a finite"):
        form(x, "tensor", scale=scale)


@pytest.mark.parametrize("name", ["quantize", "rmsnorm_quantize", "layernorm_quantize"])
@pytest.mark.parametrize("mode", ["row", "block"])
@pytest.mark.parametrize("shape", [(8, 128), (2, 4, 128)], ids=str)
def test_outputs_of_other_libraries_are_written_and_others_refused(
    name, mode, shape, nothing_remembered
):
    form, x, out = getattr(ka.ops, name), drawn(0, *shape), torch.zeros(shape, dtype=torch.int8)
    expected = form(x, mode, out_dtype="int8")
    for _ in range(2):
        assert torch.equal(form(x, mode, out=Array(out)).scale, expected.scale)
        assert torch.equal(out, expected.out)
        out.zero_()
        with pytest.raises(ka.errors.ArgumentError, match="out is a list; expected a torch tensor"):
            form(x, mode, out=[1])


@pytest.mark.parametrize("shape", [(4, 2, 128), (8, 1, 128), (8, 128)], ids=str)
@pytest.mark.parametrize("mode", ["row", "block"])
def test_quantised_matrices_have_the_shape_of_those_that_are_read(mode, shape, nothing_remembered):
    x = drawn(0, 2, 4, 128)
    ka.ops.quantize(x, mode, out=room(2, 4, 128, element=E4M3))
    with pytest.raises(ka.errors.ArgumentError, match=re.escape(f"out has shape {shape}")):
        ka.ops.quantize(x, mode, out=room(*shape, element=E4M3))


def test_rows_of_arrays_have_as_many_modes_as_those_of_tensors(nothing_remembered):
    x, residual = drawn(0, 2, 4, 128, element=F32), drawn(1, 2, 4, 128, element=F32)
    expected = ka.ops.rmsnorm_quantize(x, residual=residual)
    found = ka.ops.rmsnorm_quantize(x.numpy(), residual=residual.numpy())
    assert found.scale.shape == expected.scale.shape == (2, 4, 1)
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: ka.ops.rmsnorm(x, out=out),
        lambda x, out: ka.ops.gather_rows(x, torch.arange(4).int()[:, None], out=out),
    ],
)
def test_outputs_between_what_is_read_make_one_launcher(call, nothing_remembered, monkeypatch):
    """Whether elements lie between each other's, arguments say every time."""
    made, make = [], Kernel._launcher_in_order
    monkeypatch.setattr(Kernel, "_launcher_in_order", lambda *of: made.append(of) or make(*of))
    buffer = drawn(0, 4, 64)
    x, out = buffer[:, :32], buffer[:, 32:]
    for _ in range(3):
        call(x, out)
    assert len(made) == 1
