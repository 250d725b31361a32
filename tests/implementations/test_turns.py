"""The order in which attention visits tiles where the first of a head have the most to do."""

from functools import cache

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Int32, Int64
from hypothesis import given, settings
from hypothesis import strategies as st
from on_the_cpu import operand

from kernel_api.implementations.sm90.sdpa_tiles import heads_together, in_turn


@cute.jit
def write_order(visited: cute.Tensor, blocks: Int32, heads: Int32, together: Int32):
    for i in cutlass.range(blocks * heads):
        visited[i, 0], visited[i, 1] = in_turn(i, blocks, heads, together)


@cute.jit
def write_count(found: cute.Tensor, heads: Int32, blocks: Int32, size: Int64):
    found[0] = heads_together(heads, blocks, size)


@cache
def compiled(function, shape, *kinds):
    array = operand(np.empty(shape, np.int32), len(shape) - 1)
    return cute.compile(function, array, *(kind(1) for kind in kinds))


def order(blocks, heads, together):
    """(head, block) in the order of visits."""
    visited = np.full((blocks * heads, 2), -1, np.int32)
    call = compiled(write_order, (1, 2), Int32, Int32, Int32)
    call(operand(visited, 1), *map(Int32, (blocks, heads, together)))
    return [tuple(pair) for pair in visited.tolist()]


def count(heads, blocks, size):
    found = np.full(1, -1, np.int32)
    call = compiled(write_count, (1,), Int32, Int32, Int64)
    call(operand(found, 0), Int32(heads), Int32(blocks), Int64(size))
    return int(found[0])


def finished(tiles, workers):
    """When the last of so many workers is done, each of which takes the next tile that is left; of
    tiles in their order, how long each takes."""
    busy = np.zeros(workers)
    for tile in tiles:
        busy[busy.argmin()] += tile
    return busy.max()


@settings(deadline=None, max_examples=60)
@given(blocks=st.integers(1, 40), heads=st.integers(1, 40), data=st.data())
def test_every_block_of_every_head_comes_once(blocks, heads, data):
    together = data.draw(st.integers(1, heads))
    found = order(blocks, heads, together)
    assert sorted(found) == sorted(np.ndindex(heads, blocks))
    for head in range(heads):
        assert [block for other, block in found if other == head] == list(range(blocks))


def test_heads_take_turns():
    assert order(2, 5, 2) == [
        *((0, 0), (0, 1)),
        *((1, 0), (2, 0), (1, 1), (2, 1)),
        *((3, 0), (4, 0), (3, 1), (4, 1)),
    ]


def test_with_one_at_a_time_each_has_all_its_blocks():
    assert order(3, 2, 1) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(("heads", "blocks"), [(16, 64), (8, 128), (32, 64), (64, 43), (8, 64)])
def test_multiprocessors_end_together_where_keys_behind_a_query_are_hidden(heads, blocks):
    workers, size = 132, blocks * 128 * 512
    alone, found = (
        finished([blocks - block for _, block in order(blocks, heads, together)], workers)
        for together in (1, count(heads, blocks, size))
    )
    whole = heads * blocks * (blocks + 1) / 2 / workers
    assert found < min(1.04 * whole, alone)


def test_those_that_take_turns_have_two_blocks_for_each_multiprocessor():
    assert count(64, 64, 1 << 40) == 5
    assert count(3, 64, 1 << 40) == 3
    assert count(1000, 4, 1 << 40) == 66
    assert count(4, 512, 1 << 40) == 1


def test_of_long_heads_as_many_take_turns_as_l2_keeps():
    assert count(64, 64, 4 << 20) == 12
    assert count(8, 64, 4 << 20) == 8
    assert count(128, 17, 1 << 20) == 48
    assert count(128, 16, 1 << 20) == 17


def test_no_blocks_are_no_reason_to_divide():
    assert count(3, 0, 0) == 3
