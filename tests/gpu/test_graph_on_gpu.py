"""Graphs on a GPU: what they compute, in graphs of CUDA, in threads, and after a restart."""

from __future__ import annotations

import threading

import pytest
import torch
from support.graph_attention_fp8 import allowance, exact, executed, written
from support.graph_restarts import restarted, stored
from support.random_graphs import data_of, disagreement, example, graph_of

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api.verification import compare

pytestmark = pytest.mark.gpu

A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK


def on_gpu(made, seed=0):
    graph, _ = graph_of(made, handle=cudnn.create_handle())
    graph.build([A, FALLBACK])
    data = data_of(made, "cuda", seed)
    return graph, data, {i: data[n] for i, n in enumerate([*made.inputs, *made.outputs])}


def workspace_of(graph):
    return torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")


#: Of 200 random graphs, each a test: several processes share them. Both tests of a shard want the
#: same kernels, which ``--dist loadgroup`` compiles once.
SHARDS = [
    pytest.param(range(first, first + 20), id=str(first), marks=pytest.mark.xdist_group(f"{first}"))
    for first in range(0, 200, 20)
]


@pytest.mark.parametrize("numbers", SHARDS)
def test_random_graphs(numbers):
    wrong = []
    for seed in numbers:
        made = example(seed)
        graph, data, pack = on_gpu(made, seed)
        graph.execute(pack, workspace_of(graph))
        reason = disagreement(made, data)
        if reason is not None:
            wrong.append(f"{seed}: {reason}\n{made!r}\n{graph.plans[0]}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("numbers", SHARDS)
def test_after_a_restart_the_same_bits_and_nothing_is_compiled(numbers, tmp_path):
    stored({number: [A, FALLBACK] for number in numbers}, "cuda", tmp_path / "graphs.pt")
    found = restarted(tmp_path / "graphs.pt")
    assert found == {"executed": len(numbers), "wrong": [], "compiler": False}


def test_sums_alone_are_those_of_what_is_read():
    graph = cudnn.pygraph("", "bfloat16", "float32", "float32", handle=cudnn.create_handle())
    x = graph.tensor((3, 333, 1160), name="x")
    total = graph.reduction(graph.relu(x), "ADD", axis=-1).set_output(True).set_name("total")
    least = graph.reduction(x, "MIN", axis=-1).set_output(True).set_name("least")
    for tensor in (total, least):
        tensor.set_data_type("float32")
    graph.build([A])
    assert len(graph.selected.kernel_steps) == 1 and not graph.get_workspace_size()
    given = torch.randn(3, 333, 1160, device="cuda").bfloat16()
    before = given.clone()
    found = {
        name: torch.full((3, 333, 1), float("nan"), device="cuda") for name in ("total", "least")
    }
    graph.execute({"x": given, **found})
    exact, same = given.double().relu().sum(-1, keepdim=True), given.float().relu()
    verdict = compare(found["total"], exact, same.sum(-1, keepdim=True), factor=3.0)
    assert verdict, verdict.reason
    assert torch.equal(found["least"], given.float().amin(-1, keepdim=True))
    assert torch.equal(given, before)


def test_attention_of_8_bit_floats():
    graph = written(beside=("stats",), device="cuda")
    by_kernel, by_torch = (
        executed(graph, plan, device="cuda") for plan in (0, len(graph.plans) - 1)
    )
    assert graph.plans[-1].mode is FALLBACK
    expected, off = exact(by_kernel[0]), allowance(by_kernel[0])
    for name, found in by_kernel[1].items():
        verdict = compare(found, expected[name], by_torch[1][name], factor=3.0, allowance=off[name])
        assert verdict, f"{name}: {verdict.reason}"


def bias_gelu(M=512, N=768, K=256):
    graph = cudnn.pygraph("", "bfloat16", "float32", "float32", handle=cudnn.create_handle())
    a, b, bias = graph.tensor((M, K)), graph.tensor((K, N)), graph.tensor((1, N))
    y = graph.gelu(graph.bias(graph.matmul(a, b), bias)).set_output(True)
    graph.build([A])
    return graph, (a, b, bias, y)


def drawn(*shapes):
    return [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]


def judged(y, a, b, bias):
    def computed(*operands):
        product, shift = operands[0] @ operands[1], operands[2]
        return torch.nn.functional.gelu(product + shift)

    exact = computed(*(operand.double() for operand in (a, b, bias)))
    return compare(y, exact, computed(a, b, bias))


def check(y, a, b, bias):
    verdict = judged(y, a, b, bias)
    assert verdict, verdict.reason


def test_a_graph_of_cuda_replays_it():
    graph, tensors = bias_gelu()
    a, b, bias = drawn((512, 256), (256, 768), (1, 768))
    y = torch.zeros(512, 768, device="cuda", dtype=torch.bfloat16)
    pack = dict(zip(tensors, (a, b, bias, y), strict=True))
    graph.execute(pack)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph.execute(pack)
    for operand, other in zip((a, b, bias), drawn(a.shape, b.shape, bias.shape), strict=True):
        operand.copy_(other)
    y.fill_(float("nan"))
    captured.replay()
    check(y, a, b, bias)


def test_threads_and_streams_share_a_graph():
    graph, tensors = bias_gelu()
    wrong = []

    def work():
        handle, stream = cudnn.create_handle(), torch.cuda.Stream()
        cudnn.set_stream(handle, stream)
        for _ in range(20):
            with torch.cuda.stream(stream):
                a, b, bias = drawn((512, 256), (256, 768), (1, 768))
                y = torch.full((512, 768), float("nan"), device="cuda", dtype=torch.bfloat16)
            graph.execute(dict(zip(tensors, (a, b, bias, y), strict=True)), handle=handle)
            with torch.cuda.stream(stream):
                verdict = judged(y, a, b, bias)
            if not verdict:
                wrong.append(verdict.reason)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_extents_take_the_same_kernel():
    graph, tensors = bias_gelu()
    uids = [tensor.uid for tensor in tensors]
    for M in (8, 129, 1024):
        a, b, bias = drawn((M, 256), (256, 768), (1, 768))
        y = torch.full((M, 768), float("nan"), device="cuda", dtype=torch.bfloat16)
        graph.execute(
            dict(zip(uids, (a, b, bias, y), strict=True)),
            override_uids=[uids[0], uids[3]],
            override_shapes=[a.shape, y.shape],
            override_strides=[a.stride(), y.stride()],
        )
        check(y, a, b, bias)


def test_misaligned_memory_is_served_by_another_kernel():
    graph, tensors = bias_gelu()
    a, b, bias = drawn((512 * 256 + 1,), (256, 768), (1, 768))
    a = a[1:].view(512, 256)
    y = torch.full((512, 768), float("nan"), device="cuda", dtype=torch.bfloat16)
    graph.execute(dict(zip(tensors, (a, b, bias, y), strict=True)))
    check(y, a, b, bias)


def test_autotune_selects_what_is_fastest():
    graph, tensors = bias_gelu(2048, 2048, 2048)
    a, b, bias = drawn((2048, 2048), (2048, 2048), (1, 2048))
    y = torch.empty(2048, 2048, device="cuda", dtype=torch.bfloat16)
    pack = dict(zip(tensors, (a, b, bias, y), strict=True))
    times = graph.autotune(pack)
    assert len(times) > 1 and graph.get_plan_name() == times[0][0]
    y.fill_(float("nan"))
    graph.execute(pack)
    check(y, a, b, bias)


def test_addresses_stand_for_tensors():
    graph, tensors = bias_gelu()
    a, b, bias = drawn((512, 256), (256, 768), (1, 768))
    y = torch.full((512, 768), float("nan"), device="cuda", dtype=torch.bfloat16)
    graph.execute({t: d.data_ptr() for t, d in zip(tensors, (a, b, bias, y), strict=True)})
    check(y, a, b, bias)


def test_the_kernel_is_that_of_the_direct_call():
    graph, _ = bias_gelu(4096, 4096, 4096)
    a, b, bias = drawn((4096, 4096), (4096, 4096), (4096,))
    y = torch.empty_like(a)
    args = ka.fusions.gemm_bias_activation(a, b, out=y, bias=bias, activation="gelu")
    (step,) = graph.selected.kernel_steps
    direct = ka.get_kernels(args)[0]
    assert step.kernel.metadata.design == direct.metadata.design
