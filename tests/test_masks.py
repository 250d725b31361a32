"""Masks of attention, alone and combined."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_api as ka
from kernel_api import masks
from kernel_api.errors import ArgumentError, EpilogueError
from kernel_api.masks import BlockSparse, Causal, MaskMod, Padding, SlidingWindow

TABLE = torch.ones(1, 1, 2, 2, dtype=torch.bool)


def near(b, h, q, kv, reach):
    return q - kv < reach


@pytest.mark.parametrize(
    ("mask", "bounds"),
    [
        (Causal(), {"right": 0}),
        (Causal("bottom_right"), {"right_end": 0}),
        (SlidingWindow(4, 1), {"left": 4, "right": 1}),
        (SlidingWindow(4, None, "bottom_right"), {"left_end": 4}),
        (SlidingWindow(None, None), {}),
        (Causal() & SlidingWindow(8, 3), {"left": 8, "right": 0}),
        (SlidingWindow(8, 3) & SlidingWindow(5, 4), {"left": 5, "right": 3}),
        (
            Causal("bottom_right") & SlidingWindow(2, 9) & SlidingWindow(7, 7, "bottom_right"),
            {"left": 2, "right": 9, "left_end": 7, "right_end": 0},
        ),
        (Padding() & BlockSparse(TABLE), {}),
    ],
)
def test_bands_together_are_four_bounds_at_most(mask, bounds):
    assert mask.bounds == bounds
    assert list(mask.bounds) == list(bounds)


bands = st.builds(
    SlidingWindow,
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 6),
    st.sampled_from(["top_left", "bottom_right"]),
)


def sees(mask, i, j, beyond):
    low = {"left": -1, "left_end": beyond}
    return all(
        j - i >= (beyond if "end" in name else 0) - bound
        if name in low
        else j - i <= (beyond if "end" in name else 0) + bound
        for name, bound in mask.bounds.items()
    )


@settings(max_examples=40)
@given(bands, bands, st.integers(-3, 3))
def test_what_a_combination_lets_see_is_what_both_do(one, other, beyond):
    for i in range(6):
        for j in range(6):
            both = sees(one, i, j, beyond) and sees(other, i, j, beyond)
            assert sees(one & other, i, j, beyond) == both


@settings(max_examples=20)
@given(bands, bands)
def test_a_combination_is_rebuilt_of_its_bounds(one, other):
    mask = one & other & Padding()
    again = mask.rebuilt(mask.bounds)
    assert again.bounds == mask.bounds
    assert again.is_padding


def test_parts_are_found_in_a_combination():
    function = MaskMod(near, reach=4)
    mask = Causal() & Padding() & BlockSparse(TABLE, (64, 128)) & function
    assert mask.is_padding
    assert not mask.is_band
    assert mask.blocks.block_shape == (64, 128)
    assert mask.functions == (function,)
    assert mask.operands == {"reach": 4}
    assert mask.graph == function.function.graph
    assert (Causal() & SlidingWindow(1, 2)).is_band
    assert Causal().graph is None
    assert not Causal().is_padding


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("far", [2**63 - 1, 2**70])
@pytest.mark.parametrize(("S_q", "S_kv"), [(3, 6), (6, 3)])
def test_a_bound_may_be_farther_than_64_bits_count(S_q, S_kv, far, alignment):
    q, k = torch.randn(1, 2, S_q, 8), torch.randn(1, 2, S_kv, 8)
    expected = ka.ops.sdpa(q, k, k)
    for bounds in ((far, None), (None, far)):
        found = ka.ops.sdpa(q, k, k, mask=SlidingWindow(*bounds, alignment))
        torch.testing.assert_close(found, expected)


def test_masks_are_told_apart_and_compared():
    assert Causal() == Causal("top_left") != Causal("bottom_right")
    assert hash(Causal() & Padding()) == hash(Causal() & Padding())
    assert Causal() & Padding() == Causal() & Padding() != Padding() & Causal()
    assert repr(SlidingWindow(3, 0) & Padding()) == (
        "SlidingWindow(left=3, right=0, alignment='top_left') & Padding()"
    )
    assert repr(MaskMod(near, reach=4)).endswith(", reach)")
    with pytest.raises(AttributeError):
        Causal().alignment = "bottom_right"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_whole_numbers_may_be_of_numpy(kind):
    mask = SlidingWindow(kind(3), kind(0))
    assert mask == SlidingWindow(3, 0)
    assert {type(one) for one in mask.bounds.values()} == {int}
    blocks = BlockSparse(TABLE, (kind(64), kind(128)))
    assert blocks.block_shape == (64, 128)
    assert {type(one) for one in blocks.block_shape} == {int}


def test_functions_are_joined_and_keep_their_operands():
    ids = torch.zeros(2, 4, dtype=torch.int32)
    one = MaskMod(near, reach=4)
    other = MaskMod(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids=ids)
    mask = one & other
    assert list(mask.operands) == ["reach", "ids"]
    assert mask.graph.nodes[-1].op == "and"
    assert mask.graph == (MaskMod(near, reach=7) & other).graph != (other & one).graph
    moved = mask.rebuilt({}, operands={"reach": 9})
    assert moved.operands["reach"] == 9
    assert moved.operands["ids"].tensor is ids
    with pytest.raises(ArgumentError, match="have an operand reach; choose another name"):
        _ = one & MaskMod(near, reach=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Causal("middle"), "alignment is 'middle'; expected one of"),
        (lambda: Causal(["top_left"]), r"alignment is \['top_left'\]; expected one of"),
        (lambda: SlidingWindow(3, 0, "left"), "alignment is 'left'; expected one of"),
        (lambda: SlidingWindow(-3, 0), "left is -3; expected how far a query sees to that side"),
        (lambda: SlidingWindow(3, -1), "right is -1; expected how far"),
        (lambda: SlidingWindow(1.5, 0), "left is 1.5; expected a whole number, or None"),
        (lambda: SlidingWindow(True, 0), "left is True; expected a whole number"),
        (lambda: BlockSparse(TABLE.int()), "table of BlockSparse is int32; expected bool or"),
        (lambda: BlockSparse(TABLE[0]), r"table of BlockSparse has shape \(1, 2, 2\); expected"),
        (lambda: BlockSparse(TABLE, 128), r"block_shape is 128; expected \(queries, keys\)"),
        (lambda: BlockSparse(TABLE, (128,)), r"block_shape is \(128,\); expected \(queries, keys"),
        (lambda: SlidingWindow(np.float32(2), 0), "left is .*2.*; expected a whole number"),
        (lambda: BlockSparse(TABLE, (128, 2.0)), r"block_shape is \(128, 2.0\); expected"),
        (lambda: BlockSparse(TABLE, (0, 128)), r"block_shape is \(0, 128\); expected at least 1"),
        (lambda: BlockSparse(TABLE) & BlockSparse(TABLE), "two BlockSparse masks are combined"),
        (lambda: MaskMod("causal"), "fn is a str; expected a function"),
        (lambda: MaskMod(near), r"test_masks.py:\d+ in near: fn takes reach; pass it by name"),
        (lambda: MaskMod(near, reach=1, r=2), "r is passed, and fn has no parameter of the name"),
        (lambda: MaskMod(near, reach=True), "reach is True; functions are traced once"),
        (lambda: MaskMod(lambda b, h, q, kv: q - kv), "fn returns .*; expected a comparison"),
        (lambda: MaskMod(lambda b, h, q, kv: True), "fn returns True; expected a comparison"),
        (
            lambda: MaskMod(lambda b, h, q, kv: TABLE[0, 0, q, kv]),
            r"a Tensor of shape \(1, 1, 2, 2\) is used that fn does not take; pass it by the name "
            r"of a parameter of fn, as in MaskMod\(fn, name=...\)",
        ),
        (lambda: MaskMod(lambda q, kv: q > kv), r"fn takes q, kv; expected \(b, h, q, kv\)"),
    ],
)
def test_what_is_no_mask_is_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_masks_combine_with_masks_alone():
    with pytest.raises(TypeError):
        _ = Causal() & True
    with pytest.raises(EpilogueError):
        MaskMod(lambda b, h, q, kv: q if b > 0 else kv)
    assert sorted(masks.__all__) == masks.__all__


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Causal() & masks.Padding()], ids=repr)
def test_no_mask_is_forgotten_by_and(mask):
    with pytest.raises(ArgumentError, match="two are combined with `&`"):
        mask and masks.Padding()


def test_bounds_that_were_given_out_are_no_part_of_the_mask():
    mask = masks.SlidingWindow(5, 0)
    mask.bounds.clear()
    assert mask.bounds == {"left": 5, "right": 0}
