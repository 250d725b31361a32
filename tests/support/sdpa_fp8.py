"""Problems of attention of 8-bit floats for the emulator, and keys in pages."""

from __future__ import annotations

import torch

import kernel_api as ka
from support.sdpa import NAN, Draw
from support.sdpa_cases import BF16


def fp8_arguments(sizes, lengths=None, statistics=("lse",), **options):
    """Of e4m3, with what they are multiplied with."""
    B, H, H_kv, S_q, S_kv, D = sizes
    options |= {name: torch.empty(B, H, S_q) for name in statistics}
    random = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(shape, generator=random).to(torch.float8_e4m3fn)

    Q, K, V = drawn(B, H, S_q, D), drawn(B, H_kv, S_kv, D), drawn(B, H_kv, S_kv, D)
    if lengths is not None:
        for b, keys in enumerate(lengths):
            V[b, :, keys:] = float("nan")
        options["seq_lens_kv"] = torch.tensor(lengths, dtype=torch.int32)
    scales = {
        "descale_q": torch.tensor(0.7),
        "descale_k": 0.5 + torch.rand((B, H_kv), generator=random),
        "descale_v": 0.5 + torch.rand((B, H_kv), generator=random),
    }
    out = torch.empty(B, H, S_q, D, dtype=torch.bfloat16)
    return ka.SdpaArguments(Q, K, V, out, **{**scales, **options})


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


def paged_fp8_arguments(sizes, lengths, size, statistics=("lse",), **options):
    """The same in pages."""
    B, H, H_kv, S_q, D = sizes
    S_kv = keys_of(lengths, size)
    draw = Draw(B, H, H_kv, S_q, S_kv, D, D, element="float8_e4m3fn", pad=16)
    scales = {
        "descale_q": torch.tensor(0.7),
        "descale_k": 0.5 + draw.random(B, H_kv, element=torch.float32).abs(),
        "descale_v": 0.5 + draw.random(B, H_kv, element=torch.float32).abs(),
    }
    return ka.SdpaArguments(
        draw.queries(),
        out=Draw(B, H, H_kv, S_q, 1, D, D, element=BF16, pad=8).results(read=False),
        **pages_of(draw, lengths, size),
        **{name: draw.lse() for name in statistics},
        **scales,
        **options,
    )
