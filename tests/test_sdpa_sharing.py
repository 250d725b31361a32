"""Blocks of the forward family for Hopper that share a multiprocessor."""

import pytest
import torch
from support.kernels import EVERY_KERNEL
from support.sdpa import Draw
from support.sdpa_offered import (
    BANDS,
    DROPOUT,
    FORWARD,
    OPTIONS,
    blocks,
    meta,
    offered,
    paged,
    some,
)

import kernel_api as ka
from kernel_api import masks

#: Columns of which two blocks share a multiprocessor.
OF_TWO = [(96, 96), (128, 128), (192, 128)]


def sharing(*, room=(64, 64), **options):
    """Kernels whose blocks share a multiprocessor."""
    kernels = offered(FORWARD, room, **options)
    return [kernel for kernel in kernels if kernel.metadata.design.resident > 1]


def widths(**options):
    return {kernel.metadata.design.tile_shape[1] for kernel in sharing(**options)}


def test_blocks_of_short_sequences_share_a_multiprocessor():
    def first(keys, mask=None, D=64):
        Q = torch.empty(16384 // keys, 2048 // D, keys, D, dtype=torch.bfloat16, device="meta")
        args = ka.SdpaArguments(Q, Q.clone(), Q.clone(), Q.clone(), mask=mask)
        return ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])[0].metadata.design

    causal = masks.Causal()
    assert first(512).tile_shape == first(512, causal).tile_shape == (64, 64)
    assert first(1024).tile_shape == first(2048, causal).tile_shape == (64, 96)
    assert first(512).resident == first(2048, causal).resident == 3
    assert first(2048).resident == first(16384, causal).resident == 1
    assert first(512, causal, 128).resident == 2
    assert first(512, D=128).resident == first(1024, causal, 128).resident == 1
    assert not any(k.metadata.design.resident > 1 for k in offered(FORWARD, (256, 256)))


@pytest.mark.parametrize(("D", "resident"), [(32, 3), (40, 1), (48, 3), (56, 1), (64, 3)])
def test_blocks_share_a_multiprocessor_where_rows_begin_at_sectors(D, resident):
    Q = torch.empty(32, 32, 512, D, dtype=torch.bfloat16, device="meta")
    args = ka.SdpaArguments(Q, Q.clone(), Q.clone(), Q.clone(), mask=masks.Causal())
    kernel = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])[0]
    assert kernel.metadata.design.resident == resident


def test_blocks_that_share_registers_take_what_they_have_room_for_and_it_is_told():
    assert widths() == widths(mask=masks.Causal()) == {64, 96}
    for options in ({"softcap": 5.0}, {"dropout": DROPOUT}, {"mask": BANDS["window"]}):
        assert widths(**options) == {64}
        told = [k.supports(meta(FORWARD, (64, 64), **options)) for k in sharing()]
        words = "registers for more than 64 keys at once where scores are products"
        assert any(words in str(status) for status in told if not status)
    small, bias = blocks(512, 512, (32, 64)), torch.empty(1, 4, 512, 512, device="meta")
    for options in ({"mask": small}, {"softcap": 5.0, "bias": bias.bfloat16()}):
        assert not sharing(**options)
        told = [str(k.supports(meta(FORWARD, (64, 64), **options))) for k in sharing()]
        assert any("scores that are changed in one way" in one for one in told)
    args = paged(FORWARD, (64, 64))
    words = "three blocks that share a multiprocessor have no registers for numbers of pages"
    assert all(words in str(kernel.supports(args)) for kernel in sharing())


@pytest.mark.parametrize("room", OF_TWO)
def test_two_blocks_of_more_columns_share_a_multiprocessor_where_scores_are_products(room):
    kernels = sharing(room=room)
    assert {(k.metadata.design.tile_shape, k.metadata.design.resident) for k in kernels} == {
        ((64, 64), 2)
    }
    assert all(k.supports(paged(FORWARD, room)) for k in kernels)
    assert len(sharing(room=room, mask=masks.Causal())) == len(kernels)
    assert not sharing(room=room, softcap=5.0)
    (at_once,) = (k for k in kernels if k.metadata.design.scaling == "at_once")
    told = at_once.supports(meta(FORWARD, room, softcap=5.0))
    assert "of more than 64 columns for products; there is softcap" in str(told)


#: Ways to change scores of which blocks that share a multiprocessor take one.
ONE_WAY = {
    **OPTIONS,
    "none": lambda d: {},
    "alibi": lambda d: {"alibi": d.wides(d.H), "sink": d.wides(d.H)},
    "softcap": lambda d: {"softcap": 5.0},
    "dropout": lambda d: {"dropout": DROPOUT},
}


@pytest.mark.compile
@pytest.mark.parametrize("room", OF_TWO)
@pytest.mark.parametrize("band", [*BANDS, "pages"] if EVERY_KERNEL else ["pages"])
def test_two_blocks_of_a_multiprocessor_fit_and_spill_nothing(room, band):
    in_pages = band == "pages"
    assert_that_blocks_fit(
        paged(FORWARD, room) if in_pages else meta(FORWARD, room, mask=BANDS[band])
    )


@pytest.mark.compile
@pytest.mark.parametrize("option", ONE_WAY if EVERY_KERNEL else ["none"])
@pytest.mark.parametrize("band", BANDS if EVERY_KERNEL else ["causal"])
def test_blocks_that_share_a_multiprocessor_fit_and_spill_nothing(option, band):
    draw = Draw(2, 4, 2, 512, 512, 64, 64, element="bfloat16", device="meta")
    more = ONE_WAY[option](draw)
    if BANDS[band] is not None:
        more["mask"] = more["mask"] & BANDS[band] if "mask" in more else BANDS[band]
    assert_that_blocks_fit(draw.arguments(**more))


def assert_that_blocks_fit(args):
    """Those that share a multiprocessor, and spill nothing."""
    kernels = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    shared = [k for k in kernels if getattr(k.metadata.design, "resident", 1) > 1]
    assert shared
    for kernel in some(shared):
        needed, blocks = kernel.compile(args, cc="90a").resources, kernel.metadata.design.resident
        assert needed.spill_bytes == 0
        assert blocks * needed.registers * needed.threads <= 1 << 16
        assert blocks * (needed.shared_memory_bytes + 1024) <= 228 * 1024
