"""Calls of several launches: those that look alike are launched one behind the other, each on its
own tensors; and what is no sequence of launches is made anew every time."""

import gc
import threading
import weakref

import pytest
import torch
from support.sequences import ATorchMode, check_gradients_as_one, repeated

import kernel_api as ka
from kernel_api import _again, _sequence

T, K, INNER, E = 9, 32, 64, 4
F8 = torch.float8_e4m3fn
PER_TENSOR, PER_ROW = ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_ROW


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(seed, M=7, k=2):
    found = torch.randperm(M * k, generator=torch.Generator().manual_seed(seed)).int()
    return found.view(M, k)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """But the providers are there; tensors of the CPU lie at any multiple of 64 bytes."""
    ka.get_kernels(providers=["reference"])
    for module in (_again, _sequence):
        monkeypatch.setattr(module, "LOW_BITS", 63)
    _again._sequences.clear()
    yield
    assert getattr(_sequence._running, "recorder", None) is None
    _again._sequences.clear()


def as_one(make, *tensors, how=()):
    """A call of its own kind per test."""
    return _again.as_one(_again.look(tensors, "test", *how), tensors, make)


def there_and_back(x, index):
    scattered = ka.ops.scatter_rows(x, index)
    return ka.ops.gather_rows(scattered, index)


# Repeating ---------------------------------------------------------------------------------


def test_a_call_like_an_earlier_one_is_launched_on_its_own_tensors(long_way):
    for seed in range(3):
        x, index = drawn(seed, 7, 24), rows(seed)
        found = as_one(lambda x=x, index=index: there_and_back(x, index), x, index)
        torch.testing.assert_close(found, 2 * x)
    assert len(long_way) == 2


def test_each_call_gets_memory_of_its_own():
    x, index = drawn(0, 7, 24), rows(0)
    found = [as_one(lambda: there_and_back(x, index), x, index) for _ in range(3)]
    assert len({one.data_ptr() for one in found}) == 3


def test_several_results_keep_their_places_and_what_is_absent_is():
    def make():
        scattered = ka.ops.scatter_rows(x, index)
        return None, ka.ops.gather_rows(scattered, index), scattered.view(7, 2, 24).mT

    x, index = drawn(0, 7, 24), rows(0)
    first, again = as_one(make, x, index), as_one(make, x, index)
    assert repeated()
    assert first[0] is again[0] is None
    for one, other in zip(first[1:], again[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride()


def test_memory_is_seen_as_other_elements_and_from_other_places():
    """Rows of bytes are moved as float32, half of what is given is not the first."""

    def make():
        moved = ka.ops.scatter_rows(x.view(torch.float32)[7:], index)
        return moved.view(torch.uint8)[:, 4:]

    for seed in range(3):
        x, index = drawn(seed, 14, 8).view(torch.uint8), rows(seed)
        found = as_one(make, x, index)
        assert len(_again._sequences) == 1
        expected = x[7:].repeat_interleave(2, 0)
        assert torch.equal(found[index.flatten().long()], expected[:, 4:])
    assert repeated()


def test_a_number_is_what_it_was():
    def make():
        return ka.ops.gather_rows(ka.ops.rmsnorm(x, eps=0.5), index)

    x, index = drawn(0, 14, 24), rows(0)
    first, again = as_one(make, x, index), as_one(make, x, index)
    assert torch.equal(first, again)
    assert repeated()


def test_what_is_no_longer_needed_is_let_go():
    """Of a chain of rows no more than what a launch reads and writes is held."""

    def make():
        found = x
        for _ in range(4):
            found = ka.ops.gather_rows(found, index)
        return found

    x, index = drawn(0, 7, 24), rows(0, k=1)
    as_one(make, x, index)
    (sequence,) = repeated()
    held, most = 0, 0
    for step in sequence.steps:
        held += len(step.aligned)
        most = max(most, held)
        held -= len(step.done)
    assert (held, most) == (1, 2)


def test_no_tensor_is_kept_alive():
    def call(x, index):
        return as_one(lambda: there_and_back(x, index), x, index)

    x, index = drawn(0, 7, 24), rows(0)
    for _ in range(2):
        known = [weakref.ref(one) for one in (x, index, call(x, index))]
    assert repeated()
    del x, index
    gc.collect()
    assert not any(one() is not None for one in known)


def test_other_sizes_and_options_are_other_calls():
    x, index = drawn(0, 7, 24), rows(0)
    as_one(lambda: there_and_back(x, index), x, index)
    doubled = as_one(lambda: there_and_back(x, index) * 2, x, index, how=("doubled",))
    torch.testing.assert_close(doubled, 4 * x)
    narrow = x[:, :8]
    found = as_one(lambda: there_and_back(narrow, index), narrow, index)
    torch.testing.assert_close(found, 2 * narrow)
    assert len(_again._sequences) == 3


# What is not repeated --------------------------------------------------------------------


def changed_in_place(x, index):
    found = there_and_back(x, index)
    return found.mul_(2)


NOT_REPEATED = {
    "a copy": lambda x, index: 2 * ka.ops.gather_rows(ka.ops.scatter_rows(x, index), index),
    "an operand that torch makes": lambda x, index: there_and_back(x + x, index),
    "an operand that was there": lambda x, index: 2 * there_and_back(x + ONES, index) - 2,
    "a change in place": changed_in_place,
    "a copy of what lies apart": lambda x, index: 2 * there_and_back(x.t().contiguous().t(), index),
    "zeros": lambda x, index: there_and_back(torch.zeros_like(x).add(4 * x).div(2), index),
    "what is given": lambda x, index: x * 4,
}
ONES = torch.ones(7, 24)


@pytest.mark.parametrize("name", NOT_REPEATED)
def test_what_is_more_than_launches_is_made_anew(name):
    for seed in range(3):
        x, index = drawn(seed, 7, 24), rows(seed)
        make = NOT_REPEATED[name]
        found = as_one(lambda x=x, index=index, make=make: make(x, index), x, index)
        expected = 2 * there_and_back(x, index)
        if name == "an operand that was there":
            expected += 2  # of ones that are gathered twice, less two
        torch.testing.assert_close(found, expected)
    assert not repeated()


def test_an_operand_that_is_none_of_those_given_is_no_part_of_it():
    """Its memory may be something else's by then."""
    for seed in range(3):
        x, index = drawn(seed, 7, 24), rows(seed)
        found = as_one(lambda x=x, index=index: there_and_back(x, index), x)
        torch.testing.assert_close(found, 2 * x)
    assert not repeated()


def test_what_is_given_is_never_written():
    def make():
        ka.ops.gather_rows(x, index, out=out)
        return ka.ops.gather_rows(out, index)

    x, index, out = drawn(0, 7, 24), rows(0, k=1), torch.empty(7, 24)
    as_one(make, x, index, out)
    assert not repeated()


def test_what_a_kernel_makes_of_its_operands_is_no_part_of_it(monkeypatch):
    """Such as an aligned copy of a scale, be it where some result just was."""
    kinds = ka.kernel.Kernel
    launch_operands = kinds._launch_operands

    def copied(kernel, args):
        return {name: one.clone() for name, one in launch_operands(kernel, args).items()}

    def make():
        scattered = ka.ops.scatter_rows(x, index)
        found = ka.ops.gather_rows(scattered, index)
        del scattered
        kept.append(found.untyped_storage())
        return ka.ops.gather_rows(found, index)

    kept = []
    monkeypatch.setattr(kinds, "_launch_operands", copied)
    x, index = drawn(0, 7, 24), rows(0)
    as_one(make, x, index)
    assert not repeated()


def test_what_is_given_may_be_a_result():
    for seed in range(2):
        x, index = drawn(seed, 7, 24), rows(seed)
        call = lambda x=x, index=index: (there_and_back(x, index), x)  # noqa: E731
        assert as_one(call, x, index)[1] is x
    assert repeated()


def test_tensors_that_share_memory_say_nothing_of_others():
    both = drawn(0, 14, 24)
    index = rows(0)
    call = lambda a, b: lambda: (there_and_back(a, index), there_and_back(b, index))  # noqa: E731
    a, b = both[:7], both[7:]
    as_one(call(a, b), a, b, index)
    assert not _again._sequences
    a, b = drawn(1, 7, 24), drawn(2, 7, 24)
    for _ in range(2):
        for one, other in zip(as_one(call(a, b), a, b, index), (2 * a, 2 * b), strict=True):
            torch.testing.assert_close(one, other)
    assert repeated()
    for one, other in zip(
        as_one(call(both[:7], both[7:]), both[:7], both[7:], index), both.split(7), strict=True
    ):
        torch.testing.assert_close(one, 2 * other)


def test_an_error_is_raised_and_nothing_remembered():
    def make():
        there_and_back(x, index)
        raise ValueError("of the caller")

    x, index = drawn(0, 7, 24), rows(0)
    with pytest.raises(ValueError, match="of the caller"):
        as_one(make, x, index)
    assert not _again._sequences
    torch.testing.assert_close(as_one(lambda: there_and_back(x, index), x, index), 2 * x)


def test_other_threads_are_not_watched():
    inside, done = threading.Event(), threading.Event()

    def elsewhere():
        inside.wait(60)
        there_and_back(drawn(5, 9, 8), rows(5, 9)).add_(1)
        done.set()

    def make():
        found = ka.ops.scatter_rows(x, index)
        inside.set()
        assert done.wait(60)
        return ka.ops.gather_rows(found, index)

    x, index = drawn(0, 7, 24), rows(0)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    as_one(make, x, index)
    thread.join()
    (sequence,) = repeated()
    assert len(sequence.steps) == 2


@torch.library.custom_op("kernel_api_tests::back", mutates_args=())
def back(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return ka.ops.gather_rows(x, index)


def test_what_an_operation_of_torch_launches_is_its_own():
    """Whoever implements one may do so by calls of ours."""
    x, index = drawn(0, 7, 24), rows(0)
    for _ in range(2):
        found = as_one(lambda: back(ka.ops.scatter_rows(x, index), index), x, index)
        torch.testing.assert_close(found, 2 * x)
        assert not torch._C._len_torch_dispatch_stack()
    assert not repeated()


def test_memory_that_is_less_aligned_is_for_another_kernel(monkeypatch):
    def unaligned(shape, stride, **of):
        size = 1 + sum((extent - 1) * one for extent, one in zip(shape, stride, strict=True))
        return torch.empty(size + 1, **of)[1:].as_strided(shape, stride)

    x, index = drawn(0, 7, 24), rows(0)
    monkeypatch.setattr(_sequence.torch, "empty_strided", unaligned)
    as_one(lambda: there_and_back(x, index), x, index)
    (sequence,) = repeated()
    assert sequence((x, index)) is NotImplemented
    x = drawn(1, 7, 24)
    torch.testing.assert_close(as_one(lambda: there_and_back(x, index), x, index), 2 * x)


class Garbage:
    """Asks torch for something when it is let go."""

    def __init__(self, last_words):
        self.last_words = last_words

    def __del__(self):
        self.last_words()


def test_what_garbage_allocates_is_no_part_of_it():
    def make():
        scattered = ka.ops.scatter_rows(x, index)
        Garbage(lambda: torch.empty(1 << 10))
        return ka.ops.gather_rows(scattered, index)

    x, index = drawn(0, 7, 24), rows(0)
    as_one(make, x, index)
    (sequence,) = repeated()
    assert [len(step.added) for step in sequence.steps] == [1, 1]


def test_a_call_is_recorded_again_where_garbage_asked_for_more():
    def make():
        if times:
            Garbage(lambda: torch.ones(2).add_(times.pop()))
        return there_and_back(x, index)

    x, index, times = drawn(0, 7, 24), rows(0), [1, 2]
    for recorded in (False, False, True):
        torch.testing.assert_close(as_one(make, x, index), 2 * x)
        assert bool(repeated()) == recorded


# Who uses it -----------------------------------------------------------------------------


def test_a_matrix_is_quantised_as_one(long_way):
    for seed in range(3):
        x = drawn(seed, 9, 256)
        found = ka.ops.quantize(x, "tensor")
        assert float(found.scale) == pytest.approx(float(x.abs().max()) / 448)
    assert len(long_way) == 3
    assert ka.ops.quantize(x, "tensor", out_dtype="int8").out.dtype is torch.int8


def experts(seed, N, K, scales):
    """(E, K, N)."""
    weight = drawn(seed, E, N, K).mT
    if scales is None:
        return weight
    stored = (weight * 9).clamp(-127, 127).to(torch.int8 if scales == "int8" else F8)
    mode, shape = (PER_TENSOR, (E,)) if scales == "expert" else (PER_ROW, (E, N))
    return ka.ScaledOperand(stored, drawn(seed + 1, *shape).abs(), mode)


def layer(seed, scales=None):
    """Operands of one, which has pairs without an expert."""
    index = torch.randint(-1, E, (T, 2), generator=torch.Generator().manual_seed(seed))
    matrices = experts(seed + 10, 2 * INNER, K, scales), experts(seed + 20, K, INNER, scales)
    return drawn(seed, T, K), index, drawn(seed + 30, T, 2).abs(), *matrices


@pytest.mark.parametrize("scales", [None, "expert", "column", "int8"])
def test_a_layer_of_experts_is_launched_as_one(scales, long_way):
    for seed in range(3):
        operands = layer(seed, scales)
        del long_way[:]
        found = ka.nn.moe(*operands)
        # The reference keeps the scale that it was made with.
        assert bool(long_way) == (seed == 0 or scales is not None)
        with ATorchMode():  # each launch for itself
            torch.testing.assert_close(found, ka.nn.moe(*operands), rtol=0, atol=0)
    assert len(_again._sequences) == 1


def test_gradients_of_a_layer_of_experts_are_launched_as_one(long_way):
    check_gradients_as_one(layer, long_way)


def test_layers_that_differ_are_not_taken_for_each_other():
    operands = layer(0)
    calls = (
        {},
        {"kind": "reglu"},
        {"order": "up_gate"},
        {"granularity": 32},
    )
    found = [ka.nn.moe(*operands, **options) for options in (*calls, *calls)]
    assert len(_again._sequences) == len(calls)
    for n, one in enumerate(found[:4]):
        assert torch.equal(one, found[n + 4])
        assert not any(torch.equal(one, other) for other in found[n + 1 : 4])
    with pytest.raises(ka.errors.ArgumentError, match="granularity"):
        ka.nn.moe(*operands, granularity=True)


def test_what_a_known_layer_refuses_it_refuses_again():
    operands = layer(0, "column")
    ka.nn.moe(*operands)
    operands[0].requires_grad_()
    with pytest.raises(ka.errors.GradientError, match="8 bits"):
        ka.nn.moe(*operands)
    with torch.no_grad():
        ka.nn.moe(*operands)
    with pytest.raises(ka.errors.ArgumentError, match="w_down is a ScaledOperand"):
        ka.nn.moe(*operands[:3], operands[3].tensor, operands[4])


def test_tensors_without_memory_are_named():
    """Such as torch.func's, which left the call that they belong to."""
    x, *others = layer(0)
    left = []
    torch.func.vmap(lambda one: left.append(one) or one)(torch.stack((x, x)))
    with pytest.raises(ka.errors.ArgumentError, match="x has no memory of its own"):
        ka.nn.moe(*left, *others)


def test_one_of_the_weights_alone_in_units_of_scales_is_refused_before_gradients():
    x, index, weight, up, _ = layer(0, "column")
    down = torch.nn.Parameter(layer(0)[4])
    with pytest.raises(ka.errors.ArgumentError, match="w_up is a ScaledOperand and w_down is none"):
        ka.nn.moe(x, index, weight, up, down)


def test_autocast_casts_a_layer_before_it_is_looked_at(long_way):
    x, *routed, up, down = layer(0)
    for _ in range(2):
        del long_way[:]
        with torch.autocast("cpu", torch.bfloat16):
            found = ka.nn.moe(x, *routed, up, down)
    assert found.dtype is torch.bfloat16
    assert not long_way
    assert ka.nn.moe(x, *routed, up, down).dtype is torch.float32
