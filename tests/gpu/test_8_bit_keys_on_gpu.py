"""Attention to 8-bit floats by few queries, or by those of 16 bits, runs on a GPU, is right, and
always gives the same bits."""

from __future__ import annotations

import pytest
import torch
from support.sdpa_fp8 import fp8_arguments, packed_fp8_arguments, paged_fp8_arguments

import kernel_api as ka
from kernel_api import masks
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

FEW, MANY = "sm90.sdpa_decode_fp8", "sm90.sdpa_forward_mixed"
END = masks.Causal("bottom_right")


def on_gpu(args):
    """The same problem there."""

    def moved(value):
        return value.cuda() if isinstance(value, torch.Tensor) else value

    values = {name: moved(value) for name, value in args.launch_values.items()}
    return args.blueprint()(*(moved(one) for one in args.tensors), **values)


def check(args, family=FEW):
    args = on_gpu(args)
    kernels = [kernel for kernel in ka.get_kernels(args) if kernel.family == family]
    assert kernels, str(ka.explain(args))
    for kernel in kernels:
        broken = conduct(args, lambda kernel=kernel: kernel.run(args))
        assert broken is None, broken
        verdict = judge(args, FACTOR_REORDERED)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
    return args, kernels


@pytest.mark.parametrize("D", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("S_kv", [1, 63, 65, 700, 5000])
def test_any_number_of_keys(S_kv, D):
    check(fp8_arguments((3, 16, 2, 1, S_kv, D)))


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_pages_of_any_size(D, size):
    check(paged_fp8_arguments((4, 8, 2, 3, D), (1000, 1, 0, 513), size, mask=END))


@pytest.mark.parametrize("statistics", [("lse",), ("score_max", "score_sum_exp")])
def test_statistics_and_sinks(statistics):
    sink = torch.randn(8)
    check(fp8_arguments((2, 8, 1, 4, 900, 128), (900, 333), statistics, sink=sink, softcap=20.0))


@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("S_kv", [1, 65, 5000])
def test_queries_of_16_bits(S_kv, D, queries):
    check(fp8_arguments((3, 16, 2, 1, S_kv, D), queries=queries))


@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 256])
def test_queries_of_16_bits_and_pages(size, queries):
    sink = torch.randn(8)
    lengths = (1000, 1, 0, 513)
    check(
        paged_fp8_arguments((4, 8, 2, 3, 128), lengths, size, queries=queries, mask=END, sink=sink)
    )


@pytest.mark.parametrize("family", [FEW, MANY])
@pytest.mark.parametrize("D", [64, 80, 128, 192, 256])
@pytest.mark.parametrize(("S_q", "S_kv"), [(300, 300), (129, 1000), (700, 65)])
def test_many_queries_of_16_bits(S_q, S_kv, D, family):
    lengths = (S_kv, S_kv // 2)
    check(fp8_arguments((2, 8, 2, S_q, S_kv, D), lengths, queries=torch.bfloat16, mask=END), family)


@pytest.mark.parametrize("size", [16, 24, 256])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_many_queries_and_pages_of_any_size(D, size):
    lengths, options = (1000, 1, 0, 513), {"queries": torch.float16, "softcap": 20.0}
    check(paged_fp8_arguments((4, 8, 2, 300, D), lengths, size, **options), MANY)


@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_packed_queries(D, queries):
    lengths = (700, 0, 33, 130), (900, 50, 150, 131)
    check(packed_fp8_arguments((8, 2, D), lengths, queries=queries, mask=END), MANY)


def test_many_tiles():
    check(fp8_arguments((90, 64, 8, 1, 200, 128)))


@pytest.mark.parametrize(
    ("sizes", "queries", "family"),
    [
        ((5, 64, 8, 1, 3000, 128), None, FEW),
        ((2, 8, 1, 1, 9000, 64), None, FEW),
        ((5, 64, 8, 1, 3000, 128), torch.bfloat16, FEW),
        ((2, 8, 1, 1, 9000, 64), torch.bfloat16, FEW),
        ((2, 16, 2, 500, 900, 128), torch.bfloat16, MANY),
    ],
)
def test_reruns_give_the_same_bits(sizes, queries, family):
    args, kernels = check(fp8_arguments(sizes, queries=queries), family)
    for kernel in kernels:
        kernel.run(args)
        first = args.out.tensor.clone()
        for _ in range(200):
            args.out.tensor.fill_(float("nan"))
            kernel.run(args)
            assert torch.equal(args.out.tensor.view(torch.int16), first.view(torch.int16))
