"""Packed queries of keys in pages on this GPU: lengths that change under a graph, many sequences,
and the same bits every time."""

import pytest
import torch

import kernel_api as ka
from kernel_api import masks
from kernel_api.verification import FACTOR, FACTOR_REORDERED, judge, poison

pytestmark = pytest.mark.gpu

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
E4M3 = torch.float8_e4m3fn
PAGE, PAGES = 64, 12  # of a sequence
MOST = PAGE * PAGES

#: Queries and keys of each sequence; some rows are of none.
ROWS = 300
BATCHES = [
    ((1, 1, 1, 1, 1, 1), (700, 65, 1, 64, 300, 768)),
    ((1, 0, 200, 1, 70, 3), (700, 40, 201, 0, 768, 129)),
    ((0, 0, 0, 0, 0, 256), (5, 0, 30, 64, 7, 700)),
    ((150, 150, 0, 0, 0, 0), (150, 768, 0, 0, 0, 0)),
]


def arguments(kind, B, rows, most, seed=0):
    """kind: ``bf16``, ``8 bits``: of keys, or ``latent``."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(BF16)

    H, H_kv, D, D_v = (20, 1, 576, 512) if kind == "latent" else (8, 2, 128, 128)
    K, V = (drawn(B * PAGES, PAGE, H_kv, D).transpose(1, 2) for _ in range(2))
    options = {}
    if kind == "latent":
        V = K[..., :D_v]
    if kind == "8 bits":
        K, V = K.to(E4M3), V.to(E4M3)
        options = {"descale_k": torch.rand((B, H_kv), generator=generator, device="cuda") + 0.5}
    out = torch.empty((rows, H, D_v), dtype=BF16, device="cuda")
    order = torch.randperm(B * PAGES, generator=generator, device="cuda").int()
    return ka.SdpaArguments(
        *(drawn(rows, H, D), K, V, out, torch.empty((H, rows), dtype=F32, device="cuda")),
        mask=masks.Causal("bottom_right"),
        cu_seqlens_q=torch.zeros(B + 1, dtype=I32, device="cuda"),
        max_seqlen_q=most,
        page_table=order.view(B, PAGES),
        seq_lens_kv=torch.zeros(B, dtype=I32, device="cuda"),
        **options,
    )


def set_lengths(args, queries, keys):
    ends = torch.tensor((0, *queries)).cumsum(0)
    args.further["cu_seqlens_q"].tensor.copy_(ends)
    args.further["seq_lens_kv"].tensor.copy_(torch.tensor(keys))


def poison_results(args):
    for output in args.outputs.values():
        poison(output.tensor)


def assert_right(kernel, args):
    torch.cuda.synchronize()
    factor = FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR
    verdict = judge(args, factor)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


KINDS = ["bf16", "8 bits", "latent"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_replayed_with_other_lengths(kind):
    args = arguments(kind, 6, ROWS, ROWS)
    set_lengths(args, *BATCHES[0])
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    ka.compile_all(kernels, args)
    assert kernels
    for kernel in kernels:
        launch = kernel.prepare(args)
        launch(*args.tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(*args.tensors)
        for batch in (*BATCHES, BATCHES[0]):
            set_lengths(args, *batch)
            poison_results(args)
            graph.replay()
            assert_right(kernel, args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 40])
def test_many_sequences_are_scheduled(kind, most):
    """More than the threads that do, and of some several tiles."""
    B = 700
    draw = torch.Generator().manual_seed(most)
    queries = torch.randint(0, 2, (B,), generator=draw)
    queries[::50] = most
    keys = torch.randint(0, MOST + 1, (B,), generator=draw)
    args = arguments(kind, B, int(queries.sum()) + 9, most)
    set_lengths(args, queries.tolist(), keys.tolist())
    kernels = [k for k in ka.get_kernels(args, providers=["cutedsl"]) if k.family[:4] == "sm90"]
    ka.compile_all(kernels, args)
    for kernel in kernels:
        poison_results(args)
        kernel.run(args)
        assert_right(kernel, args)


@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_same_bits_every_time(kind):
    args = arguments(kind, 6, ROWS, ROWS)
    set_lengths(args, *BATCHES[1])
    for kernel in ka.get_kernels(args, providers=["cutedsl"]):
        kernel.run(args)
        expected = [output.tensor.clone() for output in args.outputs.values()]
        for _ in range(50):
            poison_results(args)
            kernel.run(args)
            for output, before in zip(args.outputs.values(), expected, strict=True):
                assert torch.equal(output.tensor, before), kernel.metadata.kernel_name
