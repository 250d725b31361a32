"""Into how many parts the keys of decoding are cut, by numbers of Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_api.implementations.sm90 import sdpa_split
from kernel_api.implementations.sm90.sdpa_workspace import MOST_PARTS

ROOM = 132


def select(condition, one, other):
    return one if condition else other


def parts_of(tiles, row_blocks, blocks, rows, tile=(64, 128), D=128):
    costs = sdpa_split.costs_of(tile, (D, D), 2, rows, 1, select)
    size = sdpa_split.Size(tiles, row_blocks, blocks, ROOM)
    return sdpa_split.parts_of(size, costs, select)


@given(
    tiles=st.integers(1, 3000),
    blocks=st.integers(0, 4000),
    rows=st.integers(1, 4096),
    tile=st.sampled_from([(64, 64), (64, 128), (128, 128)]),
    D=st.sampled_from([64, 128, 256]),
)
def test_there_is_room_for_all_parts_and_keys_for_each(tiles, blocks, rows, tile, D):
    parts = parts_of(tiles, 1, blocks, rows, tile, D)
    assert 1 <= parts <= max(blocks, 1)
    assert parts == 1 or tiles * parts <= MOST_PARTS


@pytest.mark.parametrize(
    ("tiles", "row_blocks", "blocks", "rows", "found"),
    [
        (8, 1, 128, 8, 16),  # few rows: all multiprocessors read
        (8, 1, 3, 8, 3),
        (128, 1, 64, 8, 1),  # all are busy without parts
        (512, 1, 64, 8, 1),
        (32, 4, 64, 512, 4),  # a chunk of a prompt
        (16, 2, 1, 256, 1),
    ],
)
def test_parts_are_made_as_far_as_they_pay(tiles, row_blocks, blocks, rows, found):
    assert parts_of(tiles, row_blocks, blocks, rows) == found


def test_many_rows_are_added_up_by_a_kernel_behind():
    assert not sdpa_split.are_many(8, 64, 128, select)
    assert sdpa_split.are_many(16, 64, 128, select)
    assert not sdpa_split.are_many(16, 64, 64, select)
    assert sdpa_split.are_many(4096, 64, 64, select)


def test_parts_of_many_rows_cost_what_is_written_and_read():
    few, many = (sdpa_split.costs_of((64, 128), (128, 128), 2, rows, 1, select) for rows in (8, 64))
    assert few.part == 0 < many.part
    assert few.sums < many.sums
    assert (few.tile, few.block, few.read) == (many.tile, many.block, many.read)
