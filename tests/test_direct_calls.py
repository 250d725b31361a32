"""Calls of kernel_api.ops that look like earlier ones, and go straight to a launcher."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from support.cute_on_cpu import operands, registered
from support.fusions import ACTIVATIONS, GLU, pairs
from support.kernels import CpuGemm

import kernel_api as ka
from kernel_api import _compile_cache, _launches
from kernel_api.errors import ArgumentError, DeviceError, UnsupportedError

M, N, K = 6, 64, 5


_empty = torch.empty


def aligned_empty(*shape, dtype=torch.float32, **how):
    """As torch allocates on a GPU; on the CPU it gives some more, some less aligned memory."""
    shape = torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)
    memory = _empty(shape.numel() * dtype.itemsize + 128, dtype=torch.uint8, **how)
    start = -memory.data_ptr() % 128
    return memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def aligned_strided(shape, stride, **how):
    found = aligned_empty(tuple(shape), **how)
    assert found.stride() == stride
    return found


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(torch, "empty", aligned_empty)
    monkeypatch.setattr(torch, "empty_strided", aligned_strided)
    _launches._launches.clear()
    _launches._chosen.clear()


@pytest.fixture
def made(monkeypatch):
    """The arguments that calls of ops made."""
    made = []
    chosen = _launches.chosen
    monkeypatch.setattr(_launches, "chosen", lambda args: made.append(args) or chosen(args))
    return made


@pytest.fixture
def cute_on_cpu(registry, monkeypatch):
    return registered(registry, monkeypatch)


@pytest.fixture
def launched(registry):
    """What reached the launcher of a kernel that takes anything and checks nothing."""
    found = []

    class Unchecked(CpuGemm):
        any_epilogue = True

        def _run(self, args, artifact, stream, workspace=None):
            pass

        def _launcher(self, args, artifact):
            return lambda *tensors, **operands: found.append((tensors, operands))

    registry.provider(rank=-5).register(Unchecked)
    return found


def matrix(rows=M, columns=N, seed=0, batch=()):
    generator = torch.Generator().manual_seed(seed)
    found = aligned_empty(*batch, rows, columns, dtype=torch.float64)
    return found.normal_(generator=generator)


def nan(*shape):
    return aligned_empty(*shape, dtype=torch.float64).fill_(torch.nan)


def close(found, expected):
    torch.testing.assert_close(found, expected)


# What is computed -------------------------------------------------------------------------


def _bias_activation(seed, alpha):
    a, b, bias = matrix(M, K, seed), matrix(K, N, seed + 1), matrix(1, N, seed + 2)[0]
    found = ka.ops.gemm_bias_activation(a, b, bias=bias, alpha=alpha, preactivation=True)
    x = alpha * (a @ b) + bias
    return found, (ACTIVATIONS["gelu"](x), x)


def _swiglu(seed, alpha):
    a, b, prob = matrix(M, K, seed), matrix(K, N, seed + 1), matrix(1, M, seed + 2)[0]
    out, pre = nan(M, N // 2), nan(M, N)
    found = ka.ops.gemm_swiglu(a, b, out=out, preactivation=pre, prob=prob, alpha=alpha)
    assert found.out is out
    x = alpha * (a @ b)
    return found, (GLU["swiglu"](*pairs(x, "up_gate", 32)) * prob[:, None], x)


def _clamped(seed, alpha):
    a, b = matrix(M, K, seed), matrix(K, N, seed + 1)
    limit = 1.25 + seed
    found = ka.ops.gemm_glu(
        a, b, kind="geglu_clamped", limit=limit, offset=0.25, granularity="halves", alpha=alpha
    )
    up, gate = (alpha * (a @ b)).chunk(2, 1)
    low = gate.clamp(max=limit)
    expected = low * torch.sigmoid(1.702 * low) * (up.clamp(-limit, limit) + 0.25)
    return (found,), (expected,)


def _residual(seed, alpha):
    a, b = matrix(M, K, seed, (2,)), matrix(K, N, seed + 1, (2,))
    c, bias = matrix(M, N, seed + 2, (2,)), matrix(2, N, seed + 3)
    beta = nan(1)[0].fill_(0.5 - seed)
    found = ka.ops.gemm_residual(a, b, C=c, bias=bias, alpha=alpha, beta=beta)
    return (found,), (alpha * (a @ b) + beta * c + bias[:, None],)


def _amax(seed, alpha):
    a, b = matrix(M, K, seed), matrix(K, N, seed + 1)
    found = ka.ops.gemm_amax(a, b, alpha=alpha)
    return found, (alpha * (a @ b), (alpha * (a @ b)).abs().max())


@pytest.mark.parametrize("form", [_bias_activation, _swiglu, _clamped, _residual, _amax])
def test_a_call_that_looks_like_an_earlier_one_computes_with_what_it_is_given(form, made):
    for seed, alpha in enumerate((1.5, -1.25, 3.5)):
        found, expected = form(seed, alpha)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    assert len(made) == 1
    for seed, alpha in ((7, 0.25), (8, 2)):  # other kinds of numbers
        for one, other in zip(*form(seed, alpha), strict=True):
            close(one, other)
    assert len(made) == 3


@pytest.mark.parametrize("strides", ["row", "column", "padded", "offset"])
def test_operands_as_they_lie(strides, made):
    for seed in range(3):
        a, b, out = matrix(M, K, seed), matrix(K, N, seed + 1), nan(M, N)
        if strides == "column":
            a, out = matrix(K, M, seed).t(), nan(N, M).t()
        if strides == "padded":
            out = nan(M, N + 3)[:, :N]
        if strides == "offset":
            out = nan(M * N + 1)[1:].view(M, N)
        assert ka.ops.gemm(a, torch.nn.Parameter(b), out=out) is out
        close(out, a @ b)
    assert len(made) == 1


def test_calls_that_look_different_are_told_apart(made):
    a, b = matrix(M, K), matrix(K, N)
    looks = [
        {},
        {"out": nan(M, N)},
        {"out": nan(M, N + 1)[:, :N]},
        {"out": nan(M * N + 1)[1:].view(M, N)},
        {"A": matrix(K, M, 1).t()},
        {"B": matrix(N, K, 1).t()},
        {"out": aligned_empty(M, N)},
        {"out_dtype": "f32"},
        {"alpha": 0.5},
        {"alpha": nan(1)[0].fill_(0.5)},
        {"activation": "relu"},
        {"activation": "tanh"},
        {"bias": matrix(1, N)[0]},
        {"bias": aligned_empty(N).normal_()},
    ]
    for _ in range(2):
        for options in looks:
            tensors = {"A": a, "B": b, **options}
            out = ka.ops.gemm(**tensors)
            factor = float(options.get("alpha", 1.0))
            x = (
                factor * (tensors["A"] @ tensors["B"])
                + options.get("bias", torch.zeros(N)).double()
            )
            function = {"relu": torch.relu, "tanh": torch.tanh}.get(options.get("activation"))
            x = x if function is None else function(x)
            torch.testing.assert_close(out, x.to(out.dtype))
    assert len(made) == len(looks)


def test_an_option_that_is_true_is_not_the_number_one():
    a, b = matrix(M, K), matrix(K, N)
    for _ in range(2):
        ka.ops.gemm_swiglu(a, b, granularity=1)
        with pytest.raises(ArgumentError, match="granularity is True"):
            ka.ops.gemm_swiglu(a, b, granularity=True)


def test_float32_is_multiplied_as_torchs_setting_says_at_the_time(registry):
    asked = []

    class Asking(CpuGemm):
        def _run(self, args, artifact, stream, workspace=None):
            asked.append(args.fp32_precision)

    registry.provider(rank=-5).register(Asking)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(setting)
            ka.ops.gemm(a, b)
    finally:
        torch.set_float32_matmul_precision(before)
    assert asked == ["ieee", "tf32", "ieee"]


def test_scales_are_those_of_the_call():
    a, b = matrix(M, K), matrix(K, N)
    for value in (0.5, 3.0, -2.0):
        scale = torch.tensor(value)
        scaled = ka.ScaledOperand(a, scale, ka.ScaleMode.PER_TENSOR)
        close(ka.ops.gemm(scaled, b), value * (a @ b))


# What is refused --------------------------------------------------------------------------


def test_memory_that_is_shared_is_refused_though_the_call_looks_the_same(launched):
    a, b, out = matrix(M, M), matrix(M, M), nan(M, M)
    for _ in range(2):
        ka.ops.gemm(a, b, out=out)
    assert len(launched) == 1
    for one, other, name in ((out, b, "A"), (a, out, "B")):
        with pytest.raises(ArgumentError, match=f"out shares memory with {name}"):
            ka.ops.gemm(one, other, out=out)
    memory = nan(2 * M * M)
    for start in (16, 32, M * M - 4):
        part = memory[start : start + M * M].view(M, M)
        with pytest.raises(ArgumentError, match="out shares memory with A"):
            ka.ops.gemm(memory[: M * M].view(M, M), b, out=part)
        with pytest.raises(ArgumentError, match="out shares memory with B"):
            ka.ops.gemm(a, part, out=memory[: M * M].view(M, M))
    assert len(launched) == 1
    ka.ops.gemm(memory[: M * M].view(M, M), b, out=memory[M * M :].view(M, M))
    assert len(launched) <= 2


def test_outputs_beside_out_may_share_no_memory_either(launched):
    a, b, bias = matrix(M, K), matrix(K, N), matrix(1, N)[0]
    out, pre = nan(M, N), nan(M, N)
    for options in ({}, {"out": out}):
        for _ in range(2):
            ka.ops.gemm_bias_activation(a, b, **options, bias=bias, preactivation=pre)
        with pytest.raises(ArgumentError, match="preactivation shares memory with bias"):
            ka.ops.gemm_bias_activation(a, b, **options, bias=pre[2], preactivation=pre)
    with pytest.raises(ArgumentError, match="out shares memory with preactivation"):
        ka.ops.gemm_bias_activation(a, b, out=pre, bias=bias, preactivation=pre)
    with pytest.raises(ArgumentError, match="out shares memory with bias"):
        ka.ops.gemm_bias_activation(a, b, out=out, bias=out[2], preactivation=pre)
    assert len(launched) == 2


def test_the_launcher_gets_what_the_call_gives_and_no_more(launched):
    a, b, out = matrix(M, K), matrix(K, N), nan(M, N // 2)
    pre, prob = nan(M, N), matrix(1, M)[0]
    options = {"preactivation": pre, "prob": prob, "alpha": 3, "kind": "geglu_clamped"}
    for _ in range(2):
        found = ka.ops.gemm_glu(a, b, out=out, limit=5, **options)
        assert found.out is out
        assert found.preactivation is pre
    ((tensors, operands),) = launched
    assert all(one is other for one, other in zip(tensors, (a, b, out), strict=True))
    assert operands.keys() == {"alpha", "limit", "offset", "preactivation", "prob"}
    assert (operands["alpha"], operands["limit"], operands["offset"]) == (3.0, 5.0, 1.0)
    assert {type(operands[name]) for name in ("alpha", "limit", "offset")} == {float}
    assert operands["preactivation"] is pre
    assert operands["prob"].shape == (M, 1)  # one per row, as it broadcasts
    assert operands["prob"].data_ptr() == prob.data_ptr()


def test_slices_side_by_side_are_taken_each_time_they_are_looked_at():
    packed = matrix(M, 3 * M)
    b = matrix(M, M)
    for _ in range(3):
        a, out = packed[:, :M], packed[:, M : 2 * M]
        ka.ops.gemm(a, b, out=out)
        close(out, a @ b)


@pytest.mark.parametrize("which", ["A", "B", "out"])
def test_a_meta_tensor_is_refused_where_a_call_with_data_looked_the_same(which):
    tensors = {"A": matrix(M, K), "B": matrix(K, N), "out": nan(M, N)}

    def call():
        return ka.ops.gemm(tensors["A"], tensors["B"], out=tensors["out"])

    call(), call()
    tensors[which] = torch.empty_like(tensors[which], device="meta")
    with pytest.raises((ArgumentError, DeviceError), match="meta"):
        call()


@pytest.mark.parametrize("which", ["A", "B", "out", "C"])
def test_memory_that_was_freed_is_refused_where_a_call_with_data_looked_the_same(which, launched):
    tensors = {"A": matrix(M, K), "B": matrix(K, N), "out": nan(M, N), "C": matrix(M, N)}

    def call():
        return ka.ops.gemm_residual(tensors["A"], tensors["B"], C=tensors["C"], out=tensors["out"])

    call(), call()
    before = len(launched)
    tensors[which] = _empty(tensors[which].shape, dtype=torch.float64)
    tensors[which].untyped_storage().resize_(0)
    with pytest.raises(DeviceError, match=f"{which} has shape .* and no memory"):
        call()
    assert len(launched) == before > 0


def test_values_that_fusions_refuse_are_refused_though_others_were_taken():
    a, b, c = matrix(M, K), matrix(K, N), matrix(M, N)
    for _ in range(2):
        ka.ops.gemm(a, b, beta=1.0)
        ka.ops.gemm_dropout(a, b, p=0.25, seed=1, offset=2)
        ka.ops.gemm_residual(a, b, C=c, beta=0.5)
    with pytest.raises(ArgumentError, match=r"beta is 0\.5 and there is no C"):
        ka.ops.gemm(a, b, beta=0.5)
    for p in (1.5, -0.25, float("nan")):
        with pytest.raises(ArgumentError, match="expected a probability from 0 to 1"):
            ka.ops.gemm_dropout(a, b, p=p, seed=1, offset=2)
    with pytest.raises(ArgumentError, match="beta is True"):
        ka.ops.gemm_residual(a, b, C=c, beta=True)


def test_what_cannot_be_looked_at_is_refused_as_ever():
    a, b = matrix(M, K), matrix(K, N)
    ka.ops.gemm(a, b)
    with pytest.raises(ArgumentError, match="expected a strided one"):
        ka.ops.gemm(a.to_sparse(), b)
    with pytest.raises(ArgumentError, match="bias is a list"):
        ka.ops.gemm(a, b, bias=[1.0] * N)
    with pytest.raises(TypeError, match="gamma"):
        ka.ops.gemm(a, b, gamma=0.5)


def test_outputs_that_happen_to_be_allocated_less_aligned_are_looked_at(made, monkeypatch):
    a, b, allocated = matrix(M, K), matrix(K, N), [aligned_strided]
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **how: allocated[-1](*args, **how))
    for _ in range(2):
        ka.ops.gemm_amax(a, b)
    assert len(made) == 1
    allocated.append(lambda shape, *_, **how: nan(1 + torch.Size(shape).numel())[1:].view(shape))
    found = ka.ops.gemm_amax(a, b)
    close(found.out, a @ b)
    assert len(made) == 2


def test_a_launch_asks_which_device_is_current_where_there_are_several(cute_on_cpu, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: asked.append(0) or 0, raising=False)
    a, b, out, *_ = operands()
    for turn in range(3):
        ka.ops.gemm(a, b, out=out)
        close(out, a @ b)
        assert len(asked) == turn + 1


def test_products_of_no_terms_are_zero_each_time(cute_on_cpu):
    for _ in range(3):
        out = nan(M, N).float()
        ka.ops.gemm(torch.empty(M, 0), torch.empty(0, N), out=out)
        assert (out == 0).all()
    assert cute_on_cpu.launches == []


# What is remembered -----------------------------------------------------------------------


def test_no_tensor_is_kept(cute_on_cpu):
    def call(kind):
        a, b, c = (aligned_empty(8, 8, dtype=kind).normal_() for _ in range(3))
        out, pre, bias = aligned_empty(8, 8, dtype=kind), torch.empty(8, 8, dtype=kind), c[0]
        ka.ops.gemm(a, b, out=out)
        if kind is torch.float64:  # of which the kernel class has none
            ka.ops.gemm_bias_activation(a, b, out=out, bias=bias, preactivation=pre)
            ka.ops.gemm_residual(a, b, C=c, beta=0.5)
        return [weakref.ref(t) for t in (a, b, c, out, pre, bias)]

    for _ in range(2):
        kept = call(torch.float32) + call(torch.float64)
        gc.collect()
        assert [one() for one in kept] == [None] * len(kept)
    assert len(_launches._launches) == 4
    assert len(cute_on_cpu.launches) == 2


def test_a_kernel_class_that_changes_is_asked_again(registry, made):
    a, b = matrix(M, K), matrix(K, N)
    ka.ops.gemm(a, b), ka.ops.gemm(a, b)
    assert len(made) == 1

    class Better(CpuGemm):
        def _run(self, args, artifact, stream, workspace=None):
            args.out.tensor.fill_(7)

    provider = registry.provider(rank=-5)
    provider.register(Better)
    assert (ka.ops.gemm(a, b) == 7).all()
    assert (ka.ops.gemm(a, b) == 7).all()
    provider.unregister(Better)
    close(ka.ops.gemm(a, b), a @ b)


def test_forgetting_compiled_kernels_forgets_their_launches(made):
    a, b = matrix(M, K), matrix(K, N)
    ka.ops.gemm(a, b), ka.ops.gemm(a, b)
    _compile_cache.clear()
    close(ka.ops.gemm(a, b), a @ b)
    assert len(made) == 2


def test_what_was_not_used_lately_is_forgotten_first(monkeypatch, made):
    monkeypatch.setattr(_launches, "_KEPT", 8)
    often = matrix(40, K), matrix(K, N)
    for rows in range(1, 40):
        for _ in range(2):
            ka.ops.gemm(matrix(rows, K), often[1])
            ka.ops.gemm(*often)
            assert len(_launches._launches) <= 8
    assert sum(args.M == 40 for args in made) == 1
    made.clear()
    ka.ops.gemm(matrix(1, K), often[1])
    assert len(made) == 1


def test_threads_look_and_remember_at_the_same_time(monkeypatch):
    monkeypatch.setattr(_launches, "_KEPT", 16)  # so that they forget at the same time, too
    wrong = []

    def work(seed):
        b = matrix(K, N, seed)
        for turn in range(60):
            rows = 1 + (turn * (seed + 3)) % 25
            a, bias = matrix(rows, K, turn), matrix(1, N, turn)[0]
            found = ka.ops.gemm(a, b, bias=bias, alpha=0.5 + turn)
            if not torch.allclose(found, (0.5 + turn) * (a @ b) + bias):
                wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# What arguments were offered ---------------------------------------------------------------


@pytest.fixture
def asked(registry):
    """Arguments that two kernel classes were asked about, and the classes."""
    found = []

    class Counting(CpuGemm):
        def _supports(self, args):
            found.append(args)
            return ka.Status.success()

    class Other(Counting):
        pass

    registry.register(Counting, Other)
    return found


def test_a_kernel_that_was_offered_is_not_asked_again(asked):
    counts = []
    for _ in range(3):
        args = ka.GemmArguments(matrix(M, K), matrix(K, N), nan(M, N))
        kernel = next(k for k in ka.get_kernels(args) if k.family_name() == "Counting")
        kernel.run(args)
        close(args.out.tensor, args.A.tensor @ args.B.tensor)
        counts.append(len(asked))
    assert counts == [3, 3, 3]  # once for each class, and once before the compilation


def test_a_kernel_that_was_not_offered_is_asked(asked):
    first = ka.GemmArguments(matrix(M, K), matrix(K, N), nan(M, N))
    kernels = {k.family_name(): k for k in ka.get_kernels(first)}
    for name in ("Counting", "Other"):
        kernels[name].compile(first)

    def times_asked(kernel, *query, **how):
        args = ka.GemmArguments(*first.tensors)
        if query or how:
            ka.get_kernels(args, *query, **how)
        before = len(asked)
        kernel.run(args)
        return len(asked) - before

    assert times_asked(kernels["Counting"]) == 1
    assert times_asked(kernels["Other"], providers=["reference"]) == 1
    assert times_asked(kernels["Other"], cc=80) == 1  # that is no answer for this device
    assert times_asked(kernels["Counting"].metadata.rebuild(), None) == 1
    assert times_asked(kernels["Counting"], None) == 0


def test_an_offer_ends_when_a_class_changes(asked):
    tensors = matrix(M, K), matrix(K, N), nan(M, N)
    args = ka.GemmArguments(*tensors)
    kernel = next(k for k in ka.get_kernels(args) if k.family_name() == "Counting")
    kernel.compile(args)
    type(kernel)._supports = lambda self, args: ka.Status.fail("not any more")
    with pytest.raises(UnsupportedError, match="not any more"):
        kernel.run(args)
    assert args.out.tensor.isnan().all()


# What it costs ----------------------------------------------------------------------------


def python_calls(call):
    """Functions of Python that a call enters, itself left out, and what is told of garbage."""
    entered = []

    def note(frame, event, argument):
        if event == "call":
            entered.append(frame.f_code.co_name)

    call(), call()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered[1:]


def test_a_call_enters_few_functions(cute_on_cpu):
    """Counted, because a count is the same on every machine; benchmarks/host.py has the times."""
    a, b, out, *_ = operands()
    assert len(python_calls(lambda: ka.ops.gemm(a, b, out=out))) <= 8
    kernel = ka.get_kernels(ka.GemmArguments(a, b, out))[0]
    launch = kernel.prepare(ka.GemmArguments(a, b, out))
    assert len(python_calls(lambda: launch(a, b, out))) <= 3

    def whole_way():
        args = ka.GemmArguments(a, b, out)
        ka.get_kernels(args)[0].run(args)

    assert len(python_calls(whole_way)) <= 66
