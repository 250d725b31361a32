"""Problems of attention of 8-bit floats for the emulator, which runs them, and keys in pages."""

from __future__ import annotations

import torch

import kernel_api as ka
from kernel_api.verification import FACTOR_REORDERED, conduct, judge
from support.ptx.kernel import EmulatedKernel
from support.sdpa import NAN, Draw
from support.sdpa_cases import BF16, on_meta

BEHIND = 5  # rows of packed queries


def fp8_arguments(sizes, lengths=None, statistics=("lse",), queries=None, **options):
    """Of e4m3, with what they are multiplied with. queries: The type of Q and out, if not that."""
    B, H, H_kv, S_q, S_kv, D = sizes
    options |= {name: torch.empty(B, H, S_q) for name in statistics}
    random = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(shape, generator=random).to(torch.float8_e4m3fn)

    Q, K, V = drawn(B, H, S_q, D), drawn(B, H_kv, S_kv, D), drawn(B, H_kv, S_kv, D)
    if queries is not None:
        Q = wide_queries(B, H, S_q, D, random, queries)
    if lengths is not None:
        for b, keys in enumerate(lengths):
            V[b, :, keys:] = float("nan")
        options["seq_lens_kv"] = torch.tensor(lengths, dtype=torch.int32)
    scales = {
        "descale_q": torch.tensor(0.7),
        "descale_k": 0.5 + torch.rand((B, H_kv), generator=random),
        "descale_v": 0.5 + torch.rand((B, H_kv), generator=random),
    }
    if queries is not None:
        del scales["descale_q"]
    out = torch.empty(B, H, S_q, D, dtype=queries or torch.bfloat16)
    return ka.SdpaArguments(Q, K, V, out, **{**scales, **options})


def wide_queries(B, H, S_q, D, random, element):
    """Some of which are much larger than others."""
    rows = torch.randn((B, H, S_q, D), generator=random)
    sizes = torch.exp2(torch.randint(-12, 3, (B, H, S_q, 1), generator=random))
    return (rows * sizes).to(element)


def pages_of(draw, lengths, size):
    """K and V of a draw in pages, which lie in disorder. Behind the last key no key and no value is
    a number, and no page is that of the table; nor is a page a number that no sequence has."""
    B, each, order = draw.B, draw.S_kv // size, torch.Generator().manual_seed(1)
    table = torch.randperm(B * each + 1, generator=order)[: B * each].view(B, each).int()
    pages = {"page_table": table, "seq_lens_kv": torch.tensor(lengths, dtype=torch.int32)}
    for name, dense in (("K", draw.keys()), ("V", draw.values())):
        _, heads, _, columns = dense.shape
        whole = torch.full((B * each + 1, heads, size, columns + draw.pad), NAN).to(draw.element)
        pages[name] = whole[..., :columns]
        for b, keys in enumerate(lengths):
            for page in range(-(-keys // size)):
                rows = dense[b, :, page * size : min((page + 1) * size, keys)]
                pages[name][int(table[b, page]), :, : rows.shape[1]] = rows
    for b, keys in enumerate(lengths):
        table[b, -(-keys // size) :] = 1 << 30
    return pages


def keys_of(lengths, size):
    """That there are pages for: one more than the longest sequence has."""
    return (-(-max(lengths) // size) + 1) * size


def paged_fp8_arguments(
    sizes, lengths, size, statistics=("lse",), queries=None, rows=None, **options
):
    """The same in pages. rows: Of packed queries, by sequence; some follow that are of none."""
    B, H, H_kv, S_q, D = sizes
    S_kv = keys_of(lengths, size)
    draw = Draw(B, H, H_kv, S_q, S_kv, D, D, element="float8_e4m3fn", pad=16)
    of_queries, sequences = draw, B
    if rows is not None:
        sequences, S_q = 1, sum(rows) + BEHIND
        of_queries = Draw(1, H, H_kv, S_q, S_kv, D, D, element="float8_e4m3fn", pad=16)
        ends = torch.tensor((0, *rows)).cumsum(0)
        options |= {"cu_seqlens_q": ends.int(), "max_seqlen_q": max(rows) + 2}
    scales = {
        "descale_q": torch.tensor(0.7),
        "descale_k": 0.5 + draw.random(B, H_kv, element=torch.float32).abs(),
        "descale_v": 0.5 + draw.random(B, H_kv, element=torch.float32).abs(),
    }
    Q, element = of_queries.queries(), BF16
    if queries is not None:
        Q = wide_queries(sequences, H, S_q, D, torch.Generator().manual_seed(4), queries)
        element = queries
        del scales["descale_q"]
    out = Draw(sequences, H, H_kv, S_q, 1, D, D, element=element, pad=8).results(read=False)
    found = {name: of_queries.lse() for name in statistics}
    if rows is not None:
        Q[:, :, sum(rows) :] = NAN
        Q, out = (one[0].transpose(0, 1) for one in (Q, out))
        found = {name: one[0] for name, one in found.items()}
    return ka.SdpaArguments(
        Q, out=out, **pages_of(draw, lengths, size), **found, **{**scales, **options}
    )


def packed_fp8_arguments(sizes, lengths, queries=None, **options):
    """The same of sequences one behind the other, which begin within a tile of the one before.

    Of those without queries no key and no value is a number, nor of rows behind the last one.
    """
    H, H_kv, D = sizes
    rows, keys = lengths
    draw = Draw(1, H, H_kv, sum(rows), sum(keys) + 9, D, D, element="float8_e4m3fn", pad=16)
    out = Draw(1, H, H_kv, sum(rows), 1, D, D, element=queries or BF16, pad=8)
    tensors = {
        "Q": draw.queries(),
        "K": draw.keys(),
        "V": draw.values(),
        "out": out.results(read=False),
    }
    if queries is not None:
        random = torch.Generator().manual_seed(4)
        tensors["Q"] = wide_queries(1, H, sum(rows), D, random, queries)
    packed = {name: one[0].transpose(0, 1) for name, one in tensors.items()}
    for side, lens in zip(("q", "kv"), lengths, strict=True):
        ends = torch.tensor((0, *lens)).cumsum(0)
        packed |= {f"cu_seqlens_{side}": ends.int(), f"max_seqlen_{side}": max(lens) + 2}
    begin = 0
    for count, length in zip((*rows, 0), (*keys, 9), strict=True):
        if not count:
            packed["K"][begin : begin + length] = packed["V"][begin : begin + length] = NAN
        begin += length
    scales = {
        "descale_q": torch.tensor(0.7),
        "descale_k": 0.5 + draw.random(len(rows), H_kv, element=torch.float32).abs(),
        "descale_v": 0.5 + draw.random(len(rows), H_kv, element=torch.float32).abs(),
    }
    if queries is not None:
        del scales["descale_q"]
    return ka.SdpaArguments(**packed, lse=draw.lse()[0], **scales, **options)


def arguments_of(case):
    """In pages where there is a size of them, packed where sizes name no sequences."""
    if "size" in case:
        return paged_fp8_arguments(**case)
    if len(case["sizes"]) == 3:
        return packed_fp8_arguments(**case)
    return fp8_arguments(**case)


def check(args, family, cc="sm_90a", *, every=False, multiprocessors=4):
    """Runs the family's first kernel in the emulator, or every one, and compares with the
    reference."""
    offered = ka.get_kernels(on_meta(args), cc=cc, providers=["cutedsl"])
    kernels = [kernel for kernel in offered if kernel.family == family]
    assert kernels
    for kernel in kernels if every else kernels[:1]:
        compiled = EmulatedKernel.compile(kernel, args, cc)
        assert compiled.artifact.resources.spill_bytes == 0
        broken = conduct(args, lambda: compiled.run(args, multiprocessors=multiprocessors))  # noqa: B023
        assert broken is None, broken
        verdict = judge(args, FACTOR_REORDERED)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
