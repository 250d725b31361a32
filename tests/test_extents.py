"""Extents that kernels do not count are refused, those of operands beside matrices too."""

import pytest
import torch

import kernel_api as ka
from kernel_api import epilogue as ep

BF16, F32, I8, I32 = torch.bfloat16, torch.float32, torch.int8, torch.int32


def meta(*shape, element=BF16):
    return torch.empty(shape, dtype=element, device="meta")


def repeated(extent):
    x, out = meta(1, extent // 4, element=I8), meta(1, extent, element=I8)
    return ka.ElementwiseArguments(x, out, epilogue=ka.EpilogueArguments(lambda a: ep.repeat(a, 4)))


def repeated_product(extent):
    epilogue = ka.EpilogueArguments(lambda a: (a, ep.repeat(a, 4)), more=meta(1, extent))
    matrices = meta(1, 64), meta(extent // 4, 64).t(), meta(1, extent // 4)
    return ka.GemmArguments(*matrices, epilogue=epilogue)


def attention(**how):
    return ka.SdpaArguments(*[meta(1, 1, 64, 64) for _ in range(4)], **how)


def masked(extent):
    documents = meta(extent, element=I8)
    mask = ka.masks.MaskMod(lambda b, h, q, kv, doc: doc[q] == doc[kv], doc=documents)
    return attention(mask=mask)


def scored(extent):
    return attention(
        score_mod=lambda s, b, h, q, kv, t: s + t[q],
        score_operands={"t": meta(extent, element=F32)},
    )


def grouped(extent):
    offsets, empty = meta(4, element=I32), meta(extent, 0, element=I32)
    return ka.GroupRowsArguments(empty, offsets, empty, meta(0, element=I32))


def gathered(extent):
    return ka.GatherRowsArguments(meta(8, 64), meta(0, 64), meta(0, extent, element=I32))


#: By the name of the operand, what makes arguments where it has such an extent.
CASES = {
    "out": (repeated, 1 << 30),
    "more": (repeated_product, 1 << 28),
    "mask_doc": (masked, 1 << 30),
    "score_t": (scored, 1 << 30),
    "index": (grouped, 1 << 30),
    "row_index": (gathered, 1 << 30),
}


@pytest.mark.parametrize("name", CASES)
def test_operands_of_any_kind_have_extents_that_are_counted_in_32_bits(name):
    make, most = CASES[name]
    assert ka.get_kernels(make(most), cc=90, providers=["cutedsl"])
    for extent in (2 * most, 1 << 31, 1 << 33):
        found = ka.explain(make(extent), cc=90, providers=["cutedsl"])
        assert not found.accepted
        told = [one.reason for one in found.rejected if "are counted in 32 bits" in one.reason]
        assert told
