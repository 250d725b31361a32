"""Rows that an index names, on a GPU: by every kernel, replayed, and between streams."""

import pytest
import torch
from support.indexed import GATHER, KINDS, arguments, arguments_for, check
from support.kernels import generated_by

import kernel_api as ka
from kernel_api import provider

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

(CUTEDSL,) = provider.providers(["cutedsl"])
KERNELS = [
    kernel
    for family in CUTEDSL.families()
    if family.arguments in KINDS
    for kernel in generated_by(family)
]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    "index", range(len(KERNELS)), ids=lambda i: KERNELS[i].metadata.kernel_name
)
def test_every_kernel_is_right(index):
    kernel = KERNELS[index]
    for M, N, k in ((1, 1, 1), (37, 200, 3), (130, 1100, 8)):
        weight = (None, "float32", "bfloat16")[index % 3]
        args = arguments_for(kernel, M, N, k=k, device="cuda", seed=index, weight=weight)
        assert kernel.supports(args)
        kernel.run(args)
        check(args)
        verdict = ka.verify(kernel, args)
        assert verdict, verdict


@every_kind
def test_indices_may_change_between_replays_of_a_graph(kind):
    one = arguments(kind, 33, 256, 4, 150, device="cuda", seed=0)
    other = arguments(kind, 33, 256, 4, 150, device="cuda", seed=1)
    kernel = ka.get_kernels(one, providers=["cutedsl"])[0]
    kernel.run(one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(one)
    for name in ("x", "row_index", "weight"):
        getattr(one, name).tensor.copy_(getattr(other, name).tensor)
    one.out.tensor.fill_(float("nan"))
    graph.replay()
    check(one)


def test_more_than_two_to_the_31_elements_are_reached():
    rows, N = 2**19 + 3, 4096 + 8
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device="cuda")
    x[-1], x[0] = 1.0, 2.0
    index = torch.tensor([[rows - 1, 0], [rows, -1]], dtype=torch.int32, device="cuda")
    out = ka.ops.gather_rows(x, index)
    assert out[0].eq(3).all()
    assert out[1].eq(0).all()
    ka.ops.scatter_rows(out[:1], index[:1, :1], out=x)
    assert x[-1].eq(3).all()
    assert not x[-2].any()


def test_a_layer_of_experts_is_equal_on_every_run():
    layer = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(700, 256, **layer)
    up, down = torch.randn(16, 512, 256, **layer).mT, torch.randn(16, 256, 256, **layer).mT
    index = torch.randint(-1, 16, (700, 4), device="cuda")
    weight = torch.rand(700, 4, device="cuda")
    first = ka.nn.moe(x, index, weight, up, down)
    for _ in range(20):
        assert torch.equal(ka.nn.moe(x, index, weight, up, down), first)


@every_kind
def test_there_is_a_kernel_of_ours_first(kind):
    args = arguments(kind, 64, 512, 2, 300, device="cuda")
    assert ka.get_kernels(args)[0].metadata.provider == "cutedsl"
    assert (kind is GATHER) == any(
        kernel.metadata.provider == "torch" for kernel in ka.get_kernels(args)
    )
