"""CUDA graphs, several streams, several devices: every family, with poisoned outputs."""

import ctypes
import gc

import pytest
import torch
from support.data import arguments_for, fill, supported_sizes

import kernel_api as ka
from kernel_api import _compile_cache
from kernel_api.arguments.experts import memory_of
from kernel_api.errors import CaptureError, DeviceError
from kernel_api.verification import FACTOR, FACTOR_REORDERED, judge, poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SIZES = (200, 192, 328)


def splits(kernel):
    """How a kernel's work is cut along K."""
    design = kernel.metadata.design
    if getattr(design, "stream_k", False):
        return "stream"
    return "split" if getattr(design, "split_k", 1) > 1 else "whole"


def one_of_each():
    """A kernel per family and way of cutting K, for this GPU, that takes the problem."""
    if not torch.cuda.is_available():
        return []
    cc = "{}.{}".format(*torch.cuda.get_device_capability())
    found = {}
    for kernel in ka.get_kernels(cc=cc, providers=["cutedsl"]):
        way = type(kernel), splits(kernel)
        if way not in found and kernel.supports(problem(kernel, device="meta")):
            found[way] = kernel
    return [pytest.param(kernel, id=kernel.metadata.kernel_name) for kernel in found.values()]


def problem(kernel, device="cuda"):
    return arguments_for(kernel, *supported_sizes(kernel, *SIZES), device=device)


def fused_problem(name, seed=0, M=256, N=256, K=320):
    """bf16 operands of a fusion that reduces, and so takes a workspace."""
    a, b = (fill(torch.empty(s, device="cuda", dtype=torch.bfloat16), seed + i)
            for i, s in enumerate(((M, K), (K, N))))  # fmt: skip
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    if name == "gemm_amax":
        out, amax = torch.empty(M, N, **kinds), torch.empty((), device="cuda")
        return ka.fusions.gemm_amax(a, b, out=out, amax=amax, alpha=0.75)
    pre = fill(torch.empty(M, 2 * N, **kinds), seed + 7)
    prob = torch.rand(M, device="cuda") + 0.25
    dprob, dbias = torch.empty(M, device="cuda"), torch.empty(2 * N, device="cuda")
    out = torch.empty(M, 2 * N, **kinds)
    return ka.fusions.gemm_dswiglu(
        a, b, out=out, preactivation=pre, prob=prob, dprob=dprob, dbias=dbias, alpha=0.75
    )


def poison_outputs(args):
    for operand in args.outputs.values():
        for one in memory_of(operand):
            poison(one.tensor)


def check(kernel, args):
    torch.cuda.synchronize()
    found = judge(args, FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR)
    assert found, str(found)


def refill(args, seed):
    """New values in the matrices that are read."""
    outputs = [operand.tensor for operand in args.outputs.values()]
    for place, (name, operand) in enumerate(zip(args.operand_names, args.operands, strict=True)):
        where = name == "offsets" or getattr(operand, "discrete", False)  # sizes and addresses stay
        if not where and not any(operand.tensor is one for one in outputs):
            fill(operand.tensor, 10 * seed + place)


def captured(launch, **options):
    graph = torch.cuda.CUDAGraph(**options)
    with torch.cuda.graph(graph):
        launch()
    return graph


def nodes_of(graph):
    count = ctypes.c_size_t()
    ask = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
    assert not ask(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return count.value


def replays_are_right(kernel, args, graph):
    for seed in range(1, 4):
        refill(args, seed)
        poison_outputs(args)
        graph.replay()
        check(kernel, args)


# Graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", one_of_each())
def test_a_replay_of_every_family_is_right(kernel):
    args = problem(kernel)
    kernel.run(args)
    graph = captured(lambda: kernel.run(args))
    replays_are_right(kernel, args, graph)
    kernel.run(args)  # beside the graph's own workspace
    graph.replay()
    check(kernel, args)


@pytest.mark.parametrize("name", ["gemm_amax", "gemm_dswiglu"])
def test_a_replay_of_a_fusion_that_reduces_is_right(name):
    args = fused_problem(name)
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    assert kernels, ka.explain(args)
    for kernel in kernels[:3]:
        kernel.run(args)
        replays_are_right(kernel, args, captured(lambda kernel=kernel: kernel.run(args)))


def test_a_workspace_of_the_callers_is_captured_as_well():
    args = fused_problem("gemm_amax")
    kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
    workspace = torch.full(
        (kernel.get_workspace_size(args) + 128,), 0xFF, device="cuda", dtype=torch.uint8
    )
    kernel.run(args, workspace=workspace)
    check(kernel, args)
    workspace.fill_(0xFF)
    graph = captured(lambda: kernel.run(args, workspace=workspace))
    replays_are_right(kernel, args, graph)


def test_graphs_of_kernels_with_workspaces_run_side_by_side():
    problems = [fused_problem("gemm_amax", seed=seed, M=1024, N=1024) for seed in (0, 20)]
    kernel = ka.get_kernels(problems[0], providers=["cutedsl"])[0]
    graphs, streams = [], [torch.cuda.Stream() for _ in problems]
    for args in problems:
        kernel.run(args)
        graphs.append(captured(lambda args=args: kernel.run(args)))
    torch.cuda.synchronize()
    for _ in range(50):
        for args in problems:
            poison_outputs(args)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    for args in problems:
        check(kernel, args)


def test_launches_of_one_graph_share_a_workspace_that_is_cleared_once():
    problems = [fused_problem("gemm_amax", seed=seed, M=512, N=512) for seed in (0, 20, 40)]
    kernel = ka.get_kernels(problems[0], providers=["cutedsl"])[0]
    for args in problems:
        kernel.run(args)
    alone = captured(lambda: kernel.run(problems[0]), keep_graph=True)
    graph = captured(lambda: [kernel.run(args) for args in problems], keep_graph=True)
    assert nodes_of(graph) - 1 == len(problems) * (nodes_of(alone) - 1) > 0
    graph.instantiate()
    for seed in range(3):
        for turn, args in enumerate(problems):
            refill(args, 10 * seed + turn)
            poison_outputs(args)
        graph.replay()
        for args in problems:
            check(kernel, args)


def test_garbage_that_is_collected_in_a_capture_does_no_harm():
    problems = [fused_problem("gemm_amax", seed=seed, M=512, N=512) for seed in (0, 20)]
    kernel = ka.get_kernels(problems[0], providers=["cutedsl"])[0]
    for args in problems:
        kernel.run(args)

    def both():
        for args in problems:
            kernel.run(args)
            gc.collect()

    graph = captured(both)
    for args in problems:
        poison_outputs(args)
    graph.replay()
    for args in problems:
        check(kernel, args)


def test_graph_trees_of_torch_compile_get_their_memory_back():
    """They refuse to record where somebody holds memory of theirs that they do not know of."""
    A, B = (fill(torch.empty(256, 256, device="cuda").bfloat16(), seed) for seed in (0, 1))

    def step(x):
        out, amax = torch.empty_like(x), torch.empty((), device="cuda")
        ka.ops.gemm_amax(x, B, out=out, amax=amax, alpha=0.0625)
        return out

    expected = step(step(A))
    first, second = (torch.compile(step, mode="reduce-overhead") for _ in range(2))
    for _ in range(4):  # the first ones warm up
        torch.compiler.cudagraph_mark_step_begin()
        found = second(first(A)).clone()
    assert torch.equal(found, expected)


def test_a_kernel_from_the_disk_is_captured_at_its_first_launch():
    args = fused_problem("gemm_amax")
    kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
    kernel.compile(args)
    _compile_cache.clear()
    fresh = kernel.metadata.rebuild()
    fresh.compile(args)
    replays_are_right(fresh, args, captured(lambda: fresh.run(args)))


def test_calls_of_ops_are_captured_and_refused_before_they_are_compiled():
    A, B, out = (torch.randn(192, 192, device="cuda").bfloat16() for _ in range(3))
    bias = torch.randn(192, device="cuda")
    ka.ops.gemm(A, B, out=out)
    ka.ops.gemm_bias_activation(A, B, out=out, bias=bias, activation="relu")
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="call compile"):  # a signature of its own
            ka.ops.gemm_bias_activation(A, B, out=out, bias=bias, activation="hardswish")
        ka.ops.gemm(A, B, out=out)
        ka.ops.gemm_bias_activation(A, B, out=out, bias=bias, activation="relu")
    poison(out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_a_capture_on_the_stream_of_the_launch_is_seen_from_another_stream():
    args, other = fused_problem("gemm_amax"), fused_problem("gemm_amax", seed=20, M=128)
    kernel, compiled = ka.get_kernels(args, providers=["cutedsl"])[:2]
    _compile_cache.clear()
    compiled.run(other)
    captured_stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=captured_stream):
        with torch.cuda.stream(side), pytest.raises(CaptureError, match="call compile"):
            kernel.run(args, stream=captured_stream.cuda_stream)
        compiled.run(other)
    replays_are_right(compiled, other, graph)


# Streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemm_amax", "gemm_dswiglu"])
def test_launches_on_two_streams_do_not_share_a_workspace(name):
    problems = [fused_problem(name, seed=seed, M=512, N=512) for seed in (0, 20)]
    kernel = ka.get_kernels(problems[0], providers=["cutedsl"])[0]
    streams = [torch.cuda.Stream() for _ in problems]
    for args in problems:
        kernel.run(args)
    for _ in range(50):
        torch.cuda.synchronize()
        for args in problems:
            poison_outputs(args)
        torch.cuda.synchronize()
        for args, stream in zip(problems, streams, strict=True):
            kernel.run(args, stream=stream)
    for args in problems:
        check(kernel, args)


def test_a_prepared_launch_takes_operands_numbers_and_any_form_of_stream():
    from cuda.bindings import driver

    A, B, out = (torch.randn(192, 192, device="cuda").bfloat16() for _ in range(3))
    bias = torch.randn(192, device="cuda")
    args = ka.fusions.gemm(A, B, out=out, bias=bias, alpha=0.5)
    kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
    launch = kernel.prepare(args)
    stream = torch.cuda.Stream()

    class Protocol:
        def __cuda_stream__(self):
            return (0, stream.cuda_stream)

    forms = (None, stream, stream.cuda_stream, driver.CUstream(stream.cuda_stream), Protocol())
    for number, form in enumerate(forms):
        a, b = (torch.randn(192, 192, device="cuda").bfloat16() for _ in range(2))
        one, alpha = torch.randn(192, device="cuda"), 0.75 - number
        poison(out)
        torch.cuda.synchronize()
        launch(a, b, out, bias=one, alpha=alpha, stream=form)
        again = ka.fusions.gemm(a, b, out=out, bias=one, alpha=alpha)
        check(kernel, again)


# Devices ----------------------------------------------------------------------------------

several = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="there is one GPU"
)


@several
@pytest.mark.parametrize("name", ["gemm_amax", "gemm_dswiglu"])
def test_a_launch_goes_to_the_operands_device_whatever_is_current(name):
    with torch.cuda.device(1):
        second = fused_problem(name)
    first = fused_problem(name)
    kernel = ka.get_kernels(second, providers=["cutedsl"])[0]
    stream = torch.cuda.Stream(device=1)
    assert torch.cuda.current_device() == 0
    for where in (None, stream, stream.cuda_stream):
        for args, on in ((second, where), (first, None)):
            poison_outputs(args)
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            kernel.run(args, stream=on)
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            check(kernel, args)
    assert torch.cuda.current_device() == 0


@several
def test_calls_of_ops_on_two_devices_keep_apart():
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        A, B, out = (torch.randn(128, 128, device=device).bfloat16() for _ in range(3))
        poison(out)
        assert ka.ops.gemm(A, B, out=out) is out
        torch.cuda.synchronize(device)
        assert judge(ka.GemmArguments(A, B, out), FACTOR_REORDERED)
        assert ka.ops.gemm(A, B).device == torch.device(device)


@several
def test_a_stream_of_another_device_is_refused():
    args = fused_problem("gemm_amax")
    kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
    poison_outputs(args)
    with pytest.raises(DeviceError, match="is one of cuda:1, the operands are on cuda:0"):
        kernel.run(args, stream=torch.cuda.Stream(device=1))
    torch.cuda.synchronize()
    assert args.out.tensor.isnan().all()
