"""Every design of the element-wise family is right on a GPU, by the rule of ``verify``.

Epilogues, element types and alignments take turns; ``KERNEL_API_TEST_EVERY_KERNEL=1`` runs every
epilogue with all kernels that it is offered: compilation is most of the time, so add ``-n 8``.
"""

import os

import pytest
import torch
from support.elementwise import (
    BF16,
    BROADCAST,
    arguments_for,
    arguments_on,
    broadcast,
    drawn,
    matrix,
    of_fusion,
    on,
)
from support.fusion_cases import CATALOGUE
from support.kernels import generated_by

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import provider
from kernel_api.verification import poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

EVERY_KERNEL = os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1"
F32, F16 = torch.float32, torch.float16

(CUTEDSL,) = provider.providers(["cutedsl"])
(SM80,) = (one for one in CUTEDSL.families() if one.family == "sm80.elementwise")


def kernels_of(args):
    found = ka.get_kernels(args, providers=["cutedsl"])
    assert found, ka.explain(args)
    return found


def verified(kernel, args):
    verdict = ka.verify(kernel, args)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def a_kernel_of_each_variant():
    variants = {kernel.metadata.operands: [] for kernel in generated_by(SM80)}
    for kernel in generated_by(SM80):
        variants[kernel.metadata.operands].append(kernel)
    for place, kernels in enumerate(variants.values()):
        chosen = kernels if EVERY_KERNEL else [kernels[place % len(kernels)]]
        yield from (pytest.param(k, id=k.metadata.kernel_name) for k in chosen)


@pytest.mark.parametrize("kernel", list(a_kernel_of_each_variant()))
def test_conversions_are_right(kernel):
    for M, N, L in ((1, 1, None), (37, 100, 3), (1030, 700, None)):
        args = arguments_for(kernel, M, N, L, device="cuda")
        assert kernel in kernels_of(args)
        verified(kernel, args)


@pytest.mark.parametrize("element", [BF16, F32, F16])
@pytest.mark.parametrize("name", CATALOGUE)
def test_epilogues_are_right(name, element):
    turn = list(CATALOGUE).index(name)
    whole_rows = name in ("norm", "quantize, row")
    few = 128 if name == "rope, some heads" else 64  # two heads
    sizes = ((1, few), (333, 128)) if whole_rows else ((1, few), (333, 576), (70, 4160))
    for place, (M, N) in enumerate(sizes):
        how = {"pad": (16, 4, 3)[place], "batch": (None, 3)[place % 2], "element": element}
        args = of_fusion(CATALOGUE[name], M=M, N=N, seed=turn, **how)
        args = arguments_on(args, "cuda")
        kernels = kernels_of(args)
        chosen = kernels if EVERY_KERNEL else [kernels[(turn + place) % len(kernels)]]
        for kernel in chosen:
            verified(kernel, args)


@pytest.mark.parametrize("modes", BROADCAST)
def test_what_x_broadcasts_is_read_where_it_is(modes):
    x = broadcast((3, 200, 520), modes)
    x = on(x, "cuda")
    args = ka.ElementwiseArguments(x, matrix((3, 200, 520), F32, device="cuda"))
    verified(kernels_of(args)[0], args)


def test_a_matrix_of_more_than_two_to_the_31_elements_is_reached():
    rows, columns = 2**15 + 3, 2**16 + 64
    if torch.cuda.mem_get_info()[0] < 3 * rows * columns:
        pytest.skip("there is no memory for it")
    x = torch.arange(columns, device="cuda").to(torch.int8).expand(rows, columns).contiguous()
    out = torch.empty_like(x)
    args = ka.ElementwiseArguments(x, out)
    kernels_of(args)[0].run(args)
    assert torch.equal(out, x)


def summed(M, N):
    def fn(accum, bias):
        y = accum + bias
        return y, ep.sum(y, -1), ep.sum(y, -2), ep.amax(y, None)

    outputs = {"rows": (M,), "columns": (N,), "largest": ()}
    sums = {name: torch.empty(shape, device="cuda") for name, shape in outputs.items()}
    epilogue = ka.EpilogueArguments(fn, bias=on(drawn((N,), F32), "cuda"), **sums)
    x = on(drawn((M, N), BF16, seed=1), "cuda")
    return ka.ElementwiseArguments(x, torch.empty_like(x), epilogue=epilogue)


@pytest.mark.parametrize(("M", "N", "L"), [(1, 9, 2), (203, 1032, 3), (1000, 5003, 1)])
@pytest.mark.parametrize("element", [BF16, F32])
def test_reductions_along_whole_rows_are_right(M, N, L, element):
    def fn(accum):
        y = accum * 0.7
        return y, ep.sum(y, -1), ep.max(accum, -1), ep.mean_square(accum, -1), ep.sum(y * y, None)

    sums = {name: torch.empty(L, M, device="cuda") for name in ("sums", "most", "square")}
    epilogue = ka.EpilogueArguments(fn, **sums, total=torch.empty(L, device="cuda"))
    x = on(drawn((L, M, N), element, pad=8, seed=M), "cuda")
    args = ka.ElementwiseArguments(x, torch.empty_like(x), epilogue=epilogue)
    kernels = [k for k in kernels_of(args) if k.metadata.design.whole_rows]
    assert kernels
    for kernel in kernels:
        verified(kernel, args)


def test_sums_are_the_same_every_time():
    args = summed(5000, 1024)
    for kernel in kernels_of(args)[:3]:
        results = []
        for _ in range(3):
            for output in args.outputs.values():
                poison(output.tensor)
            kernel.run(args)
            results.append([output.tensor.clone() for output in args.outputs.values()])
        for again in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))
        verified(kernel, args)


def test_a_prepared_launch_takes_other_operands_and_runs_in_a_graph():
    args = summed(300, 512)
    kernel = kernels_of(args)[0]
    launch = kernel.prepare(args)
    other = torch.randn_like(args.x.tensor)
    bias = torch.randn(512, device="cuda")
    launch(other, args.out.tensor, bias=bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(other, args.out.tensor, bias=bias)
    other.copy_(torch.randn_like(other))
    for output in args.outputs.values():
        poison(output.tensor)
    graph.replay()
    again = args.rebuilt(other, args.out.tensor, bias=bias)
    torch.cuda.synchronize()
    verdict = ka.verification.judge(again, 3.0)
    assert verdict, verdict


def test_nothing_is_launched_for_no_elements():
    empty = torch.empty(0, 64, device="cuda")
    args = ka.ElementwiseArguments(empty, torch.empty_like(empty))
    kernel = kernels_of(args)[0]
    kernel.run(args)
    kernel.prepare(args)(empty, torch.empty_like(empty))
    torch.cuda.synchronize()
