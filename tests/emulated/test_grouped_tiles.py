"""A warp finds the tiles of groups, whose sizes only the device knows: each of them once. It also
finds which groups are the longest."""

import tempfile
from functools import cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Int32, const_expr
from support.ptx.hopper import launch
from support.ptx.host import HostFunction, HostTensor
from support.ptx.memory import GlobalMemory
from support.ptx.program import parse_all

from kernel_api.implementations.common.grouped_tiles import GroupedTiles, most_row_tiles
from kernel_api.implementations.common.longest_first import MOST_GROUPS, LongestFirst
from kernel_api.providers.cutedsl import compiler
from kernel_api.providers.cutedsl.grouped_gemm import base
from kernel_api.targets import target

pytestmark = pytest.mark.compile

ROWS_PER_TILE = 8
WIDTH = 3
FIELDS = ("group", "first_row", "end_row", "m", "n", "first_tile", "tiles")
SIZES = (0, 1, 7, 8, 9, 23, 0, 0, 31, 3)


class Visits:
    """Every block visits every so many tiles, and writes down what it finds.

    skips: Whether a block begins near its first tile.
    """

    def __init__(self, skips):
        self.skips = skips

    @cute.jit
    def __call__(
        self,
        offsets: cute.Tensor,
        found: cute.Tensor,
        tiles_n: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(offsets, found, tiles_n).launch(
            grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, offsets: cute.Tensor, found: cute.Tensor, tiles_n: Int32):
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane, _, _ = cute.arch.thread_idx()
        tiles = GroupedTiles(offsets, tiles_n, ROWS_PER_TILE, WIDTH)
        index = Int32(block)
        state = tiles.start_at(index) if const_expr(self.skips) else tiles.start()
        is_tile, tile, state = tiles.find(state, index)
        while is_tile:
            if lane == 0:
                for i, name in enumerate(FIELDS):
                    found[index, i] = getattr(tile, name)
            index += blocks
            is_tile, tile, state = tiles.find(state, index)


@cache
def compiled(skips):
    tensors = [
        cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
        cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), 7), (7, 1), assumed_align=4),
    ]
    return parsed(
        Visits(skips), [*tensors, Int32(1), Int32(1), compiler.current_stream_placeholder()]
    )


def parsed(kernel, arguments):
    """(program, what launches it)"""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder}"
        code = compiler.compile(kernel, arguments, target("sm_80"), options)
        (program,) = parse_all(code.artifacts.PTX)
    return program, HostFunction(code, lambda name: list(program.parameters.values()))


def visits(sizes, tiles_n, skips=False):
    """What was found for every tile, by the names of its fields."""
    ends = np.cumsum(sizes, dtype=np.int32)
    count = sum(-(-size // ROWS_PER_TILE) for size in sizes) * tiles_n
    found = np.full((max(count, 1), len(FIELDS)), -1, np.int32)
    run(*compiled(skips), ends, found, tiles_n, 3 + count // 12, all_written=bool(count))
    return [dict(zip(FIELDS, row, strict=True)) for row in found[:count].tolist()]


def run(program, host, offsets, found, *numbers, all_written=True):
    """Overwrites what is found."""
    memory = GlobalMemory()
    arguments = []
    for name, array in (("offsets", offsets), ("found", found)):
        strides = array.strides
        how = {"output": True} if name == "found" else {}
        storage = array.reshape(-1).view(np.uint8)
        placed = memory.place(name, storage, 0, array.shape, strides, 4, alignment=4, **how)
        arguments.append(
            HostTensor(placed.pointer, (0, 32, 1), array.shape, tuple(s // 4 for s in strides))
        )
    for one in host.launches(*arguments, *numbers):
        launch(program, memory, one)
    if all_written:
        assert memory.unwritten(placed) == 0
    found[:] = memory.storage(placed).view(np.int32).reshape(found.shape)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("groups", "tiles_n"), [(1, 5), (31, 2), (32, 1), (33, 3), (300, 1)])
def test_every_tile_of_every_group_is_found_once(groups, tiles_n, skips):
    sizes = [SIZES[(7 * i + groups) % len(SIZES)] for i in range(groups)]
    found = visits(sizes, tiles_n, skips)
    first_row = first_tile = 0
    for group, size in enumerate(sizes):
        tiles = -(-size // ROWS_PER_TILE)
        own = found[first_tile * tiles_n : (first_tile + tiles) * tiles_n]
        facts = {
            "group": group,
            "first_row": first_row,
            "end_row": first_row + size,
            "first_tile": first_tile,
            "tiles": tiles,
        }
        assert all({name: one[name] for name in facts} == facts for one in own)
        places = sorted((one["m"], one["n"]) for one in own)
        assert places == list(np.ndindex(tiles, tiles_n))
        first_row, first_tile = first_row + size, first_tile + tiles
    assert len(found) == first_tile * tiles_n


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("groups", [1, 40])
def test_empty_groups_have_no_tiles(groups, skips):
    assert visits([0] * groups, 3, skips) == []


def test_a_group_is_visited_in_bands_there_and_back():
    found = visits([0, 5 * ROWS_PER_TILE, 3], 4)
    order = np.zeros((5, 4), int)
    for index, one in enumerate(found[:20]):
        order[one["m"], one["n"]] = index
    assert order.tolist() == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
        [18, 16, 14, 12],
        [19, 17, 15, 13],
    ]


class Order:
    """Writes down which group is at every place."""

    @cute.jit
    def __call__(self, offsets: cute.Tensor, found: cute.Tensor, stream: cuda.CUstream):
        self.kernel(offsets, found).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, offsets: cute.Tensor, found: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        longest_first = LongestFirst(offsets)
        places = longest_first.places()
        for place in cutlass.range(offsets.shape[0], unroll=1):
            group = longest_first.group_at(places, place)
            if lane == 0:
                found[place] = group


@cache
def compiled_order():
    def vector():
        return cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)

    return parsed(Order(), [vector(), vector(), compiler.current_stream_placeholder()])


@pytest.mark.parametrize("groups", [1, 5, 32, 33, 64, 100, MOST_GROUPS, MOST_GROUPS + 1])
def test_the_longest_groups_come_first_and_many_groups_in_their_order(groups):
    sizes = [SIZES[(7 * i + groups) % len(SIZES)] for i in range(groups)]
    found = np.full(groups, -1, np.int32)
    run(*compiled_order(), np.cumsum(sizes, dtype=np.int32), found)
    expected = list(range(groups))
    if groups <= MOST_GROUPS:
        expected.sort(key=lambda group: -sizes[group])
    assert found.tolist() == expected


@pytest.mark.parametrize("sizes", [(5, 0, 8, 9), (1,) * 9, (0, 0), (64, 1)])
def test_there_are_never_more_row_tiles_than_room_is_made_for(sizes):
    tiles = sum(-(-size // ROWS_PER_TILE) for size in sizes)
    most = most_row_tiles(sum(sizes), len(sizes), ROWS_PER_TILE)
    assert tiles <= most <= sum(sizes)
    assert most == base.most_row_tiles(sum(sizes), len(sizes), ROWS_PER_TILE)
