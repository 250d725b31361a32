"""Launches that kernel.prepare gives, of arguments with an epilogue and without."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support import sdpa_cases
from support.cute_on_cpu import MULTIPROCESSORS, formula, lender, operands, registered
from support.epilogues import reference_kernel

import kernel_api as ka
from kernel_api import _workspaces
from kernel_api.errors import ArgumentError, EpilogueError, KernelApiError
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl import kernel as cutedsl_kernel
from kernel_api.providers.cutedsl.gemm import base as cutedsl_gemm

ALPHA = 0.75


@pytest.fixture
def cute_on_cpu(registry, monkeypatch):
    return registered(registry, monkeypatch)


def fused_arguments(seed=0, **sizes):
    A, B, out, bias, pre = operands(seed=seed, **sizes)
    epilogue = ka.EpilogueArguments(formula, bias=bias, alpha=ALPHA, pre=pre)
    return ka.GemmArguments(A, B, out, epilogue=epilogue)


def best(args):
    return ka.get_kernels(args)[0]


@pytest.fixture(params=["cutedsl", "reference"])
def kernel_for(request):
    """The kernel of an own class of CuTe DSL kernels, or the reference; both on the CPU."""
    if request.param == "cutedsl":
        request.getfixturevalue("cute_on_cpu")
        return best
    return reference_kernel


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Operands of an epilogue ------------------------------------------------------------------


def test_operands_and_numbers_are_new_at_each_call(kernel_for):
    args = fused_arguments()
    launch = kernel_for(args).prepare(args)
    for seed, (rows, alpha) in enumerate(((5, 0.5), (3, -1.25), (8, 2))):
        A, B, out, bias, pre = operands(M=rows, seed=seed)
        launch(A, B, out, bias=bias, alpha=alpha, pre=pre)
        close(pre, alpha * (A @ B) + bias)
        close(out, (alpha * (A @ B) + bias).relu())
    assert args.out.tensor.isnan().all()


def test_operands_that_are_not_named_are_those_prepared_with(kernel_for):
    args = fused_arguments()
    prepared_bias = args.epilogue.operands["bias"].tensor
    launch = kernel_for(args).prepare(args)
    A, B, out, bias, _ = operands(seed=1)
    launch(A, B, out, alpha=2.5)
    close(out, (2.5 * (A @ B) + prepared_bias).relu())
    launch(A, B, out, bias=bias)
    close(out, (ALPHA * (A @ B) + bias).relu())  # not the number of the call before
    close(args.epilogue.operands["pre"].tensor, ALPHA * (A @ B) + bias)


def test_launches_of_one_artifact_keep_to_their_own_operands(kernel_for):
    one, other = fused_arguments(seed=1), fused_arguments(seed=2)
    kernel = kernel_for(one)
    artifact = kernel.compile(one)
    launches = [(args, kernel.prepare(args, artifact)) for args in (one, other)]
    for args, launch in launches:
        A, B, out = args.tensors
        launch(A, B, out)
        close(out, (ALPHA * (A @ B) + args.epilogue.operands["bias"].tensor).relu())


def test_names_that_the_epilogue_does_not_have_are_refused_before_the_launch(kernel_for):
    args = fused_arguments()
    launch = kernel_for(args).prepare(args)
    with pytest.raises(EpilogueError, match=r"there is no operand gamma; there are .*bias"):
        launch(*args.tensors, gamma=1.0)
    assert args.out.tensor.isnan().all()


def test_without_an_epilogue_there_are_no_operands_to_name(kernel_for):
    A, B, out, bias, _ = operands()
    args = ka.GemmArguments(A, B, out)
    launch = kernel_for(args).prepare(args)
    with pytest.raises((TypeError, ArgumentError), match="bias"):
        launch(A, B, out, bias=bias)
    launch(A, B, out)
    close(out, A @ B)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda A, B, out: (A[:5], B, out[:4, :4]), r"out has \(M, N\) = \(4, 4\) but A and B"),
        (lambda A, B, out: (A[:5], B, out.new_empty(0)), "A has rank 2, B rank 2, out rank 1"),
        (lambda A, B, out: (A, B[:-1], out), "A has K = 16 but B has K = 15"),
        (lambda A, B, out: (A, B), "2 tensors are given; expected A, B, out"),
        (lambda A, B, out: (A, B, out, out), "4 tensors are given; expected A, B, out"),
        (lambda A, B, out: (A.double(), B, out), "float64"),
        (lambda A, B, out: (A, B.to("meta"), out), "B is on meta but A is on cpu"),
        (lambda A, B, out: (A, B[0], out), "A has rank 2, B rank 1, out rank 2"),
        (lambda A, B, out: (A[None], B[None], out[None]), r"batches|signature|compiled for"),
    ],
)
def test_torchs_products_check_what_torch_would_take(change, words, integers):
    """It resizes an out of other sizes, and says of arguments what is its own."""
    A, B = (torch.ones(shape, dtype=torch.int8) for shape in ((32, 16), (16, 64)))
    out = torch.zeros(32, 64, dtype=torch.int32)
    if not integers:
        A, B, out = (one.float() for one in (A, B, out))
    args = ka.GemmArguments(A, B, out)
    launch = ka.get_kernels(args, providers=["torch"])[0].prepare(args)
    launch(A, B, out)
    assert (out == 16).all()
    given = change(A, B, torch.zeros_like(out))
    with pytest.raises(KernelApiError, match=words):
        launch(*given)
    launch(A[:5], B, out[:5])
    with pytest.raises(ArgumentError, match="there is no epilogue, so it has no foo"):
        launch(A, B, out, foo=1)


@pytest.mark.parametrize("name", ["stream", "workspace"])
def test_an_epilogue_cannot_take_the_names_of_a_launch(name):
    A, B, out, *_ = operands()
    epilogue = ka.EpilogueArguments(lambda accum: (accum, accum), **{name: out.clone()})
    with pytest.raises(EpilogueError, match=f"called {name}, which is taken"):
        ka.GemmArguments(A, B, out, epilogue=epilogue)


# What reaches the compiled code -----------------------------------------------------------


def test_values_come_in_the_kernels_order_and_whole_numbers_as_reals(cute_on_cpu):
    args = fused_arguments()
    kernel = best(args)
    launch = kernel.prepare(args)
    A, B, out, bias, pre = operands(seed=1)
    launch(A, B, out, bias=bias, pre=pre, alpha=3)
    kernel._launcher(args, kernel.compile(args))(A, B, out, bias=bias, alpha=3.0, pre=pre)
    (more, address, multiprocessors), other = cute_on_cpu.launches
    assert other[0] == more
    assert more[0] == 3.0
    assert type(more[0]) is float
    assert more[1] is pre
    assert more[2] is bias
    assert (address, multiprocessors) == (0, MULTIPROCESSORS)


def test_run_makes_one_launcher_for_all_operands(cute_on_cpu, monkeypatch):
    made = []
    launcher = cute_on_cpu._launcher
    monkeypatch.setattr(cute_on_cpu, "_launcher", lambda *given: made.append(1) or launcher(*given))
    kernel = best(fused_arguments())
    for seed in range(3):
        args = fused_arguments(seed=seed)
        kernel.run(args)
        A, B, out = args.tensors
        close(out, (ALPHA * (A @ B) + args.epilogue.operands["bias"].tensor).relu())
    assert len(made) == 1


def test_a_workspace_is_asked_for_once_for_sizes_that_come_again(cute_on_cpu):
    asked = []

    def workspace_for(self, *tensors):
        asked.append(tuple(tensors[0].shape))
        return 0

    cute_on_cpu.workspace_for = workspace_for
    args = fused_arguments()
    launch = best(args).prepare(args)
    for rows in (5, 3, 5, 3):
        A, B, out, bias, pre = operands(M=rows)
        launch(A, B, out, bias=bias, pre=pre)
    assert asked == [(5, 4), (3, 4)]


def bf16(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def _linear(seed):
    A, B, C = (bf16(128, 128, seed=3 * seed + place) for place in range(3))
    return ka.fusions.gemm(
        A, B, out=bf16(128, 128), C=C, beta=0.5 - seed, alpha=1.5 + seed, bias=bf16(128, seed=seed)
    )


def _reduced(seed):
    A, B = (bf16(128, 128, seed=2 * seed + place) for place in range(2))
    written = {"dprob": torch.empty(128), "dbias": torch.empty(256), "out": bf16(128, 256)}
    return ka.fusions.gemm_dswiglu(
        A, B, preactivation=bf16(128, 256, seed=seed), alpha=0.25 + seed, **written
    )


def _scaled(seed):
    A, B = (bf16(128, 128, seed=2 * seed + place).to(torch.float8_e4m3fn) for place in range(2))
    mode = ka.ScaleMode.PER_ROW
    A = ka.ScaledOperand(A, torch.rand(128), mode)
    return ka.GemmArguments(A, ka.ScaledOperand(B.t(), torch.rand(128), mode), bf16(128, 128))


def on_meta(args):
    """The same problem without data, for which kernels of any device are offered."""
    if args.scaled:
        operands = [
            ka.ScaledOperand(o.tensor.to("meta"), o.scale.tensor.to("meta"), o.mode)
            if isinstance(o, ka.ScaledOperand)
            else o.tensor.to("meta")
            for o in args.operands
        ]
        return ka.GemmArguments(*operands)
    named = () if args.epilogue is None else args.epilogue.operands.items()
    others = {n: o.tensor.to("meta") if isinstance(o, Operand) else o for n, o in named}
    return args.rebuilt(*(tensor.to("meta") for tensor in args.tensors), **others)


def seen(values):
    """What compiled code sees of them."""
    return [
        seen(value)
        if isinstance(value, tuple)
        else (value.data_ptr(), value.dtype, value.shape, value.stride())
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]


@pytest.mark.parametrize("make", [_linear, _reduced, _scaled])
def test_kernels_of_the_dsl_get_from_a_launcher_what_they_get_from_run(make, monkeypatch):
    monkeypatch.setattr(cutedsl_kernel, "sm_count", lambda index: MULTIPROCESSORS)
    calls = []
    first, other = make(1), make(2)
    offered = ka.get_kernels(on_meta(first), cc=90, providers=["cutedsl"])
    kernel = next(kernel for kernel in offered if kernel.takes_more)
    artifact = ka.CompiledArtifact(lambda *call: calls.append(call), kernel, first.signature)
    workspace = torch.zeros(max(kernel.get_workspace_size(other), 1 << 16), dtype=torch.uint8)
    launcher = kernel._launcher(first, artifact)
    launcher(*other.tensors, workspace=workspace, **kernel._launch_operands(other))
    kernel._run(other, artifact, None, workspace)
    by_launcher, by_run = map(seen, calls)
    assert by_launcher == by_run
    kernel._run(first, artifact, None, workspace)
    assert seen(calls[-1])[3] != by_run[3]  # the values beside the operands


def _attention(seed, with_lse=True):
    q, k, v = (bf16(1, 2, 33, 64, seed=3 * seed + place) for place in range(3))
    lse = torch.empty(1, 2, 33) if with_lse else None
    return ka.SdpaArguments(q, k, v, torch.empty_like(q), lse, softcap=1.5 + seed)


def _attention_without_lse(seed):
    return _attention(seed, with_lse=False)


def _packed_gradient(seed):
    q, k, v, out, dO = (bf16(33, 2, 64, seed=5 * seed + place) for place in range(5))
    ends = torch.tensor([0, 5, 33], dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 28, "max_seqlen_kv": 28}
    written = [torch.empty_like(one) for one in (q, k, v)]
    lse = torch.rand(2, 33)
    return ka.SdpaBackwardArguments(
        q, k, v, out, dO, lse, *written, scale=0.5 + seed, **packed
    )  # fmt: skip


def _grouped(seed):
    A, B = bf16(100, 64, seed=seed), bf16(3, 128, 64, seed=seed + 9).mT
    ends = torch.tensor([10, 40 + seed, 100], dtype=torch.int32)
    return ka.fusions.grouped_gemm_glu(A, B, out=bf16(100, 64), offsets=ends, alpha=0.5 + seed)


def _plain(seed):
    A, B = (bf16(128, 128, seed=2 * seed + place) for place in range(2))
    return ka.GemmArguments(A, B, bf16(128, 128))


@pytest.mark.parametrize("make", [_plain, _linear, _reduced, _scaled, _grouped])
def test_products_of_one_size_get_from_their_launcher_what_they_get_from_run(make, monkeypatch):
    of_one_size(make, on_meta, monkeypatch)


@pytest.mark.parametrize("make", [_attention, _attention_without_lse, _packed_gradient])
def test_attention_of_one_size_gets_from_its_launcher_what_it_gets_from_run(make, monkeypatch):
    of_one_size(make, sdpa_cases.on_meta, monkeypatch)


def of_one_size(make, on_meta, monkeypatch):
    borrowed = []
    monkeypatch.setattr(_workspaces, "lender", lender(borrowed))
    monkeypatch.setattr(cutedsl_kernel, "sm_count", lambda index: MULTIPROCESSORS)
    calls = []
    first, other = make(1), make(2)
    kernels = ka.get_kernels(on_meta(first), cc=90, providers=["cutedsl"])
    assert kernels
    for kernel in kernels:
        artifact = ka.CompiledArtifact(lambda *call: calls.append(call), kernel, first.signature)
        launcher = kernel._launcher_in_order(first, artifact)
        values = tuple(kernel._launch_operands(other).values())
        launcher(other.tensors, values)
        kernel._run(other, artifact, None)
        by_launcher, by_run = map(seen, calls[-2:])
        assert by_launcher == by_run
        if kernel.get_workspace_size(other):
            assert borrowed[-2:] == [kernel.get_workspace_size(other)] * 2
        if getattr(other, "lse", None) is not None and other.kind == "sdpa":
            launcher((*other.tensors, other.lse.tensor), values)
            assert seen(calls[-1]) == by_run


def test_what_is_done_without_a_launch_is_done_on_the_operands_device(cute_on_cpu, monkeypatch):
    asked = []
    monkeypatch.setattr(
        cutedsl_gemm, "on_stream", lambda *given: asked.append(given) or nullcontext()
    )
    args = ka.GemmArguments(*operands()[:3])
    kernel = best(args)
    launcher = kernel._launcher(args, kernel.compile(args))
    there = SimpleNamespace(device=torch.device("cuda", 1), numel=lambda: 0)
    out = torch.ones(5, 6)
    launcher(there, there, out, stream=7)
    assert asked == [(7, 1)]
    assert (out == 0).all()


# What is kept -----------------------------------------------------------------------------


def references(args):
    return [weakref.ref(operand.tensor) for operand in args.named_operands.values()]


@pytest.mark.parametrize("make", [fused_arguments, lambda: ka.GemmArguments(*operands()[:3])])
def test_a_launcher_keeps_no_tensor(kernel_for, make):
    args = make()
    kernel = kernel_for(args)
    launcher = kernel._launcher(args, kernel.compile(args))
    kept = references(args)
    del args
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    assert callable(launcher)


def test_a_launch_says_which_tensors_it_takes():
    A, B, out, *_ = operands()
    args = ka.GemmArguments(A, B, out)
    launch = reference_kernel(args).prepare(args)
    for given in ((A, B), (A, B, out, out)):
        with pytest.raises(ArgumentError, match=rf"{len(given)} tensors are given; expected A, B"):
            launch(*given)


def test_a_blueprint_makes_the_same_problem_on_other_tensors():
    A, B, out = (torch.randn(8, 8) for _ in range(3))
    scale = torch.rand(())
    args = ka.GemmArguments(
        ka.ScaledOperand(A, scale, ka.ScaleMode.PER_TENSOR), B, out, fp32_precision="tf32"
    )
    made = args.blueprint()(A, Operand(B), torch.empty(8, 8))
    assert made.signature == args.signature
    assert made.A.scale.tensor is scale
    with pytest.raises(ArgumentError, match="there is no epilogue, so it has no bias"):
        args.blueprint()(A, B, out, bias=A)
    fused = fused_arguments()
    with pytest.raises(EpilogueError, match="fn takes bias"):
        fused.blueprint()(*fused.tensors, alpha=1.0)


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float32, torch.int8])
def test_a_launch_of_torch_makes_no_arguments(element, monkeypatch):
    A, B = torch.ones(32, 16).to(element), torch.ones(16, 24).to(element)
    out = torch.zeros(32, 24, dtype=torch.int32 if element is torch.int8 else element)
    (kernel,) = ka.get_kernels(ka.GemmArguments(A, B, out), providers=["torch"])
    launch = kernel.prepare(ka.GemmArguments(A, B, out))
    monkeypatch.setattr(ka.GemmArguments, "__init__", None)
    launch(A, B, out)
    assert (out == 16).all()
