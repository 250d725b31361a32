"""Attention of latent vectors runs on a GPU, and is right."""

from __future__ import annotations

import pytest
import torch
from support.sdpa import NAN, Draw

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

FAMILY = "sm90.sdpa_latent"


def arguments(B, H, S_q, S_kv, D=576, D_v=512, page_size=None, lengths=None, **options):
    """On a GPU; NaN behind the keys of every sequence."""
    draw = Draw(B, H, 1, S_q, S_kv, D, D_v, element="bfloat16", pad=8, device="cuda")
    Q, K, out = draw.queries(), draw.keys(), draw.results(read=False)
    # Of one key it is the score, of which some are next to 0: nothing to be relative to.
    lse = draw.lse() if S_kv > 1 else None
    if lengths is not None:
        for b, keys in enumerate(lengths):
            K[b, :, keys:] = NAN
        options["seq_lens_kv"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if page_size is not None:
        each = S_kv // page_size
        order = torch.randperm(B * each, generator=torch.Generator().manual_seed(1)).cuda()
        pages = torch.full((B * each, 1, page_size, D), NAN, dtype=Q.dtype, device="cuda")
        pages[order] = K.reshape(B, 1, each, page_size, D).flatten(0, 2)[:, None]
        K, options["page_table"] = pages, order.int().view(B, each)
    within = True if D_v == D else None  # else it is seen
    return ka.SdpaArguments(Q, K, K[..., :D_v], out, lse, values_in_keys=within, **options)


def kernel_for(args):
    (found,) = [k for k in ka.get_kernels(args) if k.family == FAMILY]
    return found


def check(args):
    kernel = kernel_for(args)
    broken = conduct(args, lambda: kernel.run(args))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, verdict


@pytest.mark.parametrize("H", [1, 16, 100, 128])
@pytest.mark.parametrize("S_kv", [1, 63, 64, 65, 200, 1023, 4100])
def test_any_number_of_keys(S_kv, H):
    check(arguments(3, H, 1, S_kv))


@pytest.mark.parametrize("D, D_v", [(264, 256), (320, 256), (512, 512), (576, 64), (568, 504)])
def test_any_columns(D, D_v):
    check(arguments(2, 20, 2, 300, D, D_v))


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_pages_and_lengths(page_size):
    lengths = (2048, 1, 0, 777, 64)
    check(arguments(5, 128, 1, 2048, page_size=page_size, lengths=lengths))


@pytest.mark.parametrize("mask", [masks.Causal("bottom_right"), masks.SlidingWindow(300, 5)])
def test_several_queries_and_masks(mask):
    check(arguments(4, 32, 5, 900, mask=mask, lengths=(900, 4, 600, 33)))


def test_many_sequences():
    """More tiles than blocks."""
    check(arguments(300, 128, 1, 130))


def test_sinks_caps_and_functions():
    sink = torch.randn(24, device="cuda")
    check(arguments(2, 24, 2, 700, sink=sink, softcap=20.0, scale=0.3))
    check(arguments(2, 24, 2, 700, score_mod=lambda s, b, h, q, kv: s - 0.01 * (kv - q)))
    check(arguments(2, 24, 2, 700, mask=masks.MaskMod(lambda b, h, q, kv: (kv + h) % 3 != 0)))


def test_reruns_give_the_same_bits():
    args = arguments(5, 128, 1, 3000, lengths=(3000, 2999, 5, 64, 1700))
    kernel = kernel_for(args)
    kernel.run(args)
    first = args.out.tensor.clone(), args.lse.tensor.clone()
    for _ in range(200):
        args.out.tensor.fill_(NAN)
        kernel.run(args)
        assert torch.equal(args.out.tensor.view(torch.int16), first[0].view(torch.int16))
        assert torch.equal(args.lse.tensor, first[1])


def test_one_graph_serves_sequences_that_grow():
    lengths = (100, 900, 17)
    args = arguments(3, 128, 1, 1024, page_size=64, lengths=(1024, 1024, 1024))
    launch = kernel_for(args).prepare(args)
    launch(*args.tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*args.tensors)
    for step in range(3):
        args.seq_lens_kv.tensor.copy_(torch.tensor(lengths, dtype=torch.int32) + 31 * step)
        args.out.tensor.fill_(NAN)
        graph.replay()
        verdict = judge(args, FACTOR_REORDERED)
        assert verdict, verdict


def test_the_op_takes_a_view_of_the_keys():
    args = arguments(2, 16, 1, 500)
    Q, K, V, _ = args.tensors
    for _ in range(2):  # the second call is remembered
        out, lse = ka.ops.sdpa(Q, K, V, return_lse=True)
        made = ka.SdpaArguments(Q, K, V, out, lse)
        verdict = judge(made, FACTOR_REORDERED)
        assert verdict, verdict
    apart = ka.ops.sdpa(Q, K, V.clone())
    torch.testing.assert_close(apart, out, atol=0.02, rtol=0.02)


def test_it_captures_and_compiles():
    args = arguments(2, 16, 1, 500)
    Q, K, _, _ = args.tensors

    @torch.compile(fullgraph=True)
    def attend(q, k):
        return ka.ops.sdpa(q, k, k[..., :512])

    made = ka.SdpaArguments(Q, K, K[..., :512], attend(Q, K))
    verdict = judge(made, FACTOR_REORDERED)
    assert verdict, verdict
