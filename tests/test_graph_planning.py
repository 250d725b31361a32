"""How graphs are planned: what is one kernel, what is not and why; and what they compute."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.verification import compare

HALF, BF16, FLOAT = cudnn.data_type.HALF, cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT


def hopper(**options):
    """A graph that is planned for an H200, wherever that is done."""
    types = {"io_data_type": BF16, "intermediate_data_type": FLOAT, "compute_data_type": FLOAT}
    return cudnn.pygraph(sm_version=90, **{**types, **options})


def example(name):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(graph, mode=cudnn.heur_mode.A):
    graph.validate()
    graph.create_execution_plans([mode])
    return graph.plans[0]


def launches(plan):
    return [step.title for step in plan.steps if step.kind != "view"]


# What is one kernel -----------------------------------------------------------------------


def bias_gelu(graph):
    product = graph.matmul(graph.tensor((1, 512, 256)), graph.tensor((1, 256, 384)))
    return graph.gelu(graph.bias(product, graph.tensor((1, 1, 384))))


def scale_amax(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    factor = graph.tensor((1, 1), data_type=FLOAT, is_pass_by_value=True)
    scaled = graph.scale(product, factor)
    largest = graph.reduction(scaled, cudnn.reduction_mode.AMAX)
    largest.set_dim((1, 1)).set_data_type(FLOAT).set_output(True)
    return scaled


def halves(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 768), (1, 256)))
    rows = slice(None)
    gate = graph.slice(product, slices=[rows, slice(0, 384)])
    up = graph.slice(product, slices=[rows, slice(384, 768)])
    return graph.mul(graph.silu(gate), up)


def pairs(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 768)))
    gate, up = graph.glu_pair(product, granularity=32)
    return graph.mul(graph.gelu(gate), up)


def preactivation(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    product.set_output(True).set_data_type(BF16)
    return graph.relu(product)


def residual(graph):
    """Two chains that only meet in the epilogue."""
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    other = graph.mul(graph.tensor((512, 384)), graph.tensor((1, 384)))
    return graph.add(graph.tanh(product), graph.sigmoid(other))


def row_sums(graph):
    product = graph.matmul(graph.tensor((512, 256)), graph.tensor((256, 384)))
    sums = graph.reduction(product, cudnn.reduction_mode.ADD, axis=1)
    sums.set_output(True).set_data_type(FLOAT)
    return product


def channels_last(graph):
    shape, stride = (8, 64, 16, 24), (64 * 16 * 24, 1, 24 * 64, 64)
    scaled = graph.mul(graph.tensor(shape, stride), graph.tensor((1, 64, 1, 1)))
    return graph.relu(graph.add(scaled, graph.tensor(shape, stride)))


def attention(graph):
    q, k, v = (graph.tensor((2, heads, 256, 64)) for heads in (8, 2, 2))
    out, _ = graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=0.125,
        generate_stats=False,
        use_causal_mask=True,
        score_mod=lambda g, score: g.mul(g.tanh(g.mul(score, 0.1)), 10.0),
    )
    return out


ONE_KERNEL = {
    bias_gelu: "sm90_gemm",
    scale_amax: "sm90_gemm",
    halves: "sm90_gemm",
    pairs: "sm90_gemm",
    preactivation: "sm90_gemm",
    residual: "sm90_gemm",
    row_sums: "sm90_gemm",
    channels_last: "sm80_elementwise",
    attention: "sm90_sdpa_forward",
}


@pytest.mark.parametrize("make", ONE_KERNEL, ids=lambda make: make.__name__)
def test_one_kernel_computes_all(make):
    graph = hopper()
    make(graph).set_output(True)
    plan = planned(graph)
    (kernel,) = launches(plan)
    assert kernel.startswith(ONE_KERNEL[make])
    assert sum(len(step.nodes) for step in plan.steps) == len(graph.nodes)
    assert plan.workspace_size == 0
    assert kernel in str(graph.explain())


def test_a_transformer_block_is_eight_kernels():
    block = example("transformer_graph")
    given = block.operands(block.SMALL, 64, "cpu")
    on_gpu = {name: operand.to("meta") for name, operand in given.items()}
    graph, _ = block.graph_of(block.SMALL, on_gpu, sm_version=90)
    names = [name.split("_bf16")[0] for name in launches(planned(graph))]
    gemm, norm = "sm90_gemm", "sm80_rmsnorm"
    assert names == [norm, gemm, gemm, "sm90_sdpa_forward", gemm, norm, gemm, gemm]


def test_a_transformer_block_computes_what_torch_does():
    block = example("transformer_graph")
    given = block.operands(block.SMALL, 96, "cpu")
    graph, tensors = block.graph_of(block.SMALL, given)
    graph.build([cudnn.heur_mode.A])
    y = torch.full_like(given["x"], float("nan"))
    graph.execute({**block.pack(tensors, given), tensors["y"]: y})
    exact = block.block_of_torch(block.SMALL, given, torch.float64)
    verdict = compare(y, exact, block.block_of_torch(block.SMALL, given), factor=3.0)
    assert verdict, verdict.reason
