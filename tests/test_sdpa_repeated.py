"""What calls of attention that look like earlier ones refuse and keep, and what backward sees."""

import decimal
import gc
import weakref

import pytest
import torch
from support.repeated import BACKWARD, gradients, passes
from support.repeated import scores as drawn
from support.sdpa import Draw
from torch.testing import assert_close

import kernel_api as ka
from kernel_api import _attention_launches, masks
from kernel_api.arguments import Dropout
from kernel_api.errors import ArgumentError, DeviceError

DRAW = Draw(S_q=5, S_kv=6, D=8)
Q, K, V = DRAW.queries(), DRAW.keys(), DRAW.values()
TIMES = 2.0


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    monkeypatch.setattr(_attention_launches, "_launches", {})


@pytest.fixture
def unchecked(monkeypatch):
    """Launchers check nothing, as those of compiled kernels."""
    monkeypatch.setattr(ka.Kernel, "_launcher_in_order", lambda *_: lambda tensors, values: None)


def twice(call):
    call(), call()


@pytest.mark.parametrize("shared", ["dropout_seed", "dropout_offset"])
def test_the_state_of_dropout_shares_no_memory_with_what_is_written(unchecked, shared):
    memory = torch.zeros(1000, dtype=torch.int64)
    apart = {"dropout_seed": memory[-1:].view(()), "dropout_offset": memory[-2:-1].view(())}
    out = memory.view(torch.float64)[: Q[..., 0].numel() * V.shape[-1]]
    out = out.view(*Q.shape[:-1], V.shape[-1])

    def call(state):
        seed, offset = state.values()
        ka.ops.sdpa(Q, K, V, out=out, dropout=Dropout(0.5, seed, offset))

    twice(lambda: call(apart))
    with pytest.raises(ArgumentError, match=f"out shares memory with {shared}"):
        call({**apart, shared: memory[3:4].view(())})


@pytest.mark.parametrize("place", range(4), ids=["Q", "K", "V", "out"])
def test_memory_that_was_freed_is_refused_every_time(unchecked, place):
    tensors = [Q.clone(), K.clone(), V.clone(), torch.zeros(*Q.shape[:-1], V.shape[-1])]
    twice(lambda: ka.ops.sdpa(*tensors[:3], out=tensors[3]))
    tensors[place].untyped_storage().resize_(0)
    with pytest.raises(DeviceError, match=r"has shape .* and no memory"):
        ka.ops.sdpa(*tensors[:3], out=tensors[3])


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [True, decimal.Decimal("0.5"), torch.tensor(0.5), "0.5"])
def test_numbers_of_other_types_are_refused_every_time(name, value):
    twice(lambda: ka.ops.sdpa(Q, K, V, **{name: 0.5}))
    with pytest.raises(ArgumentError, match=name):
        ka.ops.sdpa(Q, K, V, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 1e39), ("scale", -1e39), ("softcap", 1e39), ("softcap", 1e-39)]
)
def test_numbers_that_float32_does_not_hold_are_refused_every_time(unchecked, name, value):
    q, k, v = (one.float() for one in (Q, K, V))
    twice(lambda: ka.ops.sdpa(q, k, v, **{name: 0.5}))
    with pytest.raises(ArgumentError, match=name):
        ka.ops.sdpa(q, k, v, **{name: value})


def test_no_tensor_is_kept():
    def tensors():
        return torch.randn(4), torch.tensor([3, 6]), torch.rand(1, 1, 3, 3) < 0.8

    def call(slope, ends, table):
        mask = masks.MaskMod(lambda b, h, q, kv, ends: kv < ends[b], ends=ends)
        ka.ops.sdpa(
            *(Q, K, V),
            mask=mask & masks.BlockSparse(table, (2, 2)) & masks.Causal(),
            score_mod=lambda score, b, h, q, kv, slope: score + slope[h],
            score_operands={"slope": slope},
        )

    given = tensors()
    for _ in range(2):
        call(*given)
    assert _attention_launches._launches
    alive = [weakref.ref(one) for one in given]
    del given
    gc.collect()
    assert [one() for one in alive] == [None] * 3


# Backward ---------------------------------------------------------------------------------


def scaled(score, b, h, q, kv):
    return score * TIMES


def test_both_passes_are_of_one_function(monkeypatch):
    def gradient(change):
        q = Q.clone().requires_grad_()
        out = ka.ops.sdpa(q, K, V, score_mod=scaled)
        change()
        out.sum().backward()
        return q.grad

    expected = gradient(lambda: None)
    found = gradient(lambda: monkeypatch.setitem(globals(), "TIMES", 0.25))
    assert_close(found, expected)


def by_table(score, b, h, q, kv, table):
    return score * table[h]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("score_table", lambda one: {"score_mod": by_table, "score_operands": {"table": one}}),
        ("alibi", lambda one: {"alibi": one}),
        ("mask_ends", lambda one: {"mask": masks.MaskMod(lambda b, h, q, kv, ends: kv < ends[h],
                                                         ends=one)}),
        ("blocks", lambda one: {"mask": masks.BlockSparse(one[:1].view(1, 1, 1, 1) > 0)}),
    ],
)  # fmt: skip
def test_what_is_overwritten_before_backward_is_refused(name, make):
    options = make(torch.full((4,), 3.0, dtype=torch.float64))
    q = Q.clone().requires_grad_()
    ka.ops.sdpa(q, K, V, **options).sum().backward()
    out = ka.ops.sdpa(q, K, V, **options)
    written = options.get("alibi", (options.get("score_operands") or {}).get("table"))
    if written is None:
        mask = options["mask"]
        found = mask.operands.get("ends") if mask.blocks is None else mask.blocks.table
        written = found.tensor
    written.zero_()
    with pytest.raises(RuntimeError, match=f"{name} is needed .* modified by an inplace operation"):
        out.sum().backward()


@pytest.fixture
def longest_way(monkeypatch):
    """Counts the backward passes that make arguments; tensors of the CPU lie at any multiple."""
    monkeypatch.setattr(_attention_launches, "_LOW_BITS", 7)
    first, found = _attention_launches._first_backward, []

    def counted(*given):
        found.append(given)
        return first(*given)

    monkeypatch.setattr(_attention_launches, "_first_backward", counted)
    return found


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_passes_that_look_alike_compute_what_they_are_given(name, longest_way):
    alone = []
    for seed in range(3):
        alone.append(gradients(name, seed, deterministic=True))
        _attention_launches._launches.clear()
    longest_way.clear()
    for seed in range(3):
        found = gradients(name, seed, deterministic=True)
        assert found._fields == alone[seed]._fields
        for one, other in zip(found, alone[seed], strict=True):
            assert_close(one, other, rtol=0, atol=0)
    assert len(longest_way) == 1


def test_backward_passes_that_differ_are_told_apart(longest_way):
    operands = passes(0, mask=masks.Causal())
    calls = (
        {"mask": masks.Causal()},
        {"mask": masks.SlidingWindow(3, 0)},
        {"mask": masks.Causal(), "deterministic": True},
        {"mask": masks.Causal(), "softcap": 30.0},
        {"mask": masks.Causal(), "dQ": torch.empty_like(operands[0])},
        {"mask": masks.Causal(), "sink": drawn(1, 4)},
        {"mask": masks.Causal(), "sink": drawn(1, 4), "dSink": True},
    )
    for count, call in enumerate(calls, 1):
        twice(lambda: ka.ops.sdpa_backward(*operands, **call))  # noqa: B023
        assert len(longest_way) == count


def test_gradients_share_no_memory_with_what_is_read_every_time(unchecked, longest_way):
    operands = list(passes(0))
    apart = torch.empty_like(operands[0])
    twice(lambda: ka.ops.sdpa_backward(*operands, dQ=apart))
    assert len(longest_way) == 1
    with pytest.raises(ArgumentError, match="dQ shares memory with Q"):
        ka.ops.sdpa_backward(*operands, dQ=operands[0])
    operands[-1] = None
    with pytest.raises(ArgumentError, match="lse is None"):
        ka.ops.sdpa_backward(*operands, dQ=apart)


def test_torch_is_told_of_gradients_that_are_given(monkeypatch):
    told = []
    monkeypatch.setattr(_attention_launches, "_tell", told.extend)
    operands = passes(0)
    dK = torch.empty_like(operands[1])
    for _ in range(3):
        told.clear()
        ka.ops.sdpa_backward(*operands, dK=dK)
    assert [id(one) for one in told] == [id(dK)]


def test_a_step_of_training_like_an_earlier_one_makes_no_arguments(longest_way):
    def step(seed):
        q, k, v = (drawn(seed + n, 2, 4, 5, 8).requires_grad_() for n in range(3))
        bias = drawn(seed, 5, 5).requires_grad_()
        y = ka.ops.sdpa(q, k, v, bias=bias, mask=masks.Causal())
        return torch.autograd.grad(y, (q, k, v, bias), drawn(seed + 9, *y.shape))

    expected = step(1)
    _attention_launches._launches.clear()
    step(0)
    longest_way.clear()
    for one, other in zip(step(1), expected, strict=True):
        assert torch.equal(one, other)
    assert not longest_way


def test_a_step_in_a_graph_makes_no_arguments_either(longest_way):
    torch._dynamo.reset()

    def loss(q, k, v):
        return ka.ops.sdpa(q, k, v, mask=masks.Causal()).sum()

    graph = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        q, k, v = (drawn(seed + n, 2, 4, 5, 8).requires_grad_() for n in range(3))
        expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
        longest_way.clear()
        found = torch.autograd.grad(graph(q, k, v), (q, k, v))
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    assert not longest_way


def test_backward_keeps_no_tensor():
    operands = passes(0)
    for _ in range(2):
        ka.ops.sdpa_backward(*operands)
    assert _attention_launches._launches
    alive = [weakref.ref(one) for one in operands]
    del operands
    gc.collect()
    assert not any(one() is not None for one in alive)


def test_gradients_between_each_other_make_one_launcher(monkeypatch):
    made, make = [], ka.Kernel._launcher_in_order
    operands = passes(0, H=2, H_kv=2, S_q=6, S_kv=6)
    monkeypatch.setattr(ka.Kernel, "_launcher_in_order", lambda *of: made.append(of) or make(*of))
    dQ, dK, dV = torch.empty(2, 2, 6, 3, 8, dtype=torch.float64).unbind(3)
    expected = ka.ops.sdpa_backward(*operands)
    made.clear()
    for _ in range(3):
        found = ka.ops.sdpa_backward(*operands, dQ=dQ, dK=dK, dV=dV)
        assert_close(tuple(found), tuple(expected))
    assert len(made) == 1


def test_what_is_allocated_is_no_view_the_first_time_either():
    operands = passes(0)
    for _ in range(2):
        for one in (*ka.ops.sdpa(*operands[:3], return_lse=True), *ka.ops.sdpa_backward(*operands)):
            assert not one._is_view()


def test_what_is_wrong_is_said_in_one_order(monkeypatch):
    """Arguments come before functions."""
    operands = passes(0)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"softcap is 0\.0"):
            ka.ops.sdpa_backward(*operands, softcap=0.0, score_mod=by_table)
