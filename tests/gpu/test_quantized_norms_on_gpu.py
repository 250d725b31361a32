"""Norms with quantised results are right on a GPU: every design, by the rule of ``verify`` and by
the formulas; the one-call forms and graphs give what these do."""

import pytest
import torch
from support.quantized_norms import MODES, STORED, check, drawn

import kernel_api as ka
from kernel_api.verification import judge, poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NAMES = ("rmsnorm_quantize", "layernorm_quantize", "quantize")
FAMILIES = {f"sm80.{name}" for name in NAMES[:2]} | {"sm80.quantize_rows"}
COLUMNS = (128, 384, 1024, 2560, 4096, 7168, 16384, 40960)


@pytest.mark.parametrize("N", COLUMNS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_design_is_right_and_the_same_when_repeated(name, mode, N):
    index = COLUMNS.index(N) + MODES.index(mode)
    element = (torch.bfloat16, torch.float32, torch.float16)[index % 3]
    stored = list(STORED)[index // 2 % 3]
    args = drawn(name, mode, 37 if N > 4096 else 301, N, element, stored, seed=index, device="cuda")
    kernels = [kernel for kernel in ka.get_kernels(args) if kernel.family in FAMILIES]
    assert kernels or (name == "quantize" and mode != "row")
    for kernel in kernels:
        artifact = kernel.compile(args)
        assert artifact.resources.spill_bytes == 0
        found = []
        for _ in range(2):
            for output in args.outputs.values():
                poison(output.tensor)
            kernel.run(args, artifact)
            check(args, mode)
            found.append([output.tensor.double() for output in args.outputs.values()])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("mode", ["block", "row"])
def test_graphs_and_calls_give_what_products_take(mode):
    x = torch.randn(3, 50, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    found = [ka.ops.rmsnorm_quantize(x, mode, weight=weight) for _ in range(3)][-1]
    args = ka.fusions.rmsnorm_quantize(
        x, out=found.out, scale=found.scale, mode=mode, weight=weight
    )
    assert judge(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = ka.ops.rmsnorm_quantize(x, mode, weight=weight)
    graph.replay()
    assert torch.equal(again.out.view(torch.uint8), found.out.view(torch.uint8))
    assert torch.equal(again.scale, found.scale)
    compiled = torch.compile(
        lambda x: ka.ops.rmsnorm_quantize(x, mode, weight=weight)[:2], fullgraph=True
    )
    assert torch.equal(compiled(x)[0].view(torch.uint8), found.out.view(torch.uint8))


@pytest.mark.parametrize("N", [384, 7168])
def test_rows_of_any_number_of_columns_are_quantised_in_one_launch(N):
    x = torch.randn(3, 50, N, device="cuda", dtype=torch.bfloat16)
    ka.ops.quantize(x, "row")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = ka.ops.quantize(x, "row")
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_gpu) == 1
    args = ka.fusions.quantize(x, out=found.out, scale=found.scale, mode="row")
    assert judge(args)
