"""The orders in which kernels visit the tiles of their output: all of them, each of them once."""

from functools import cache
from itertools import pairwise, product

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Int32, const_expr
from on_the_cpu import operand

from kernel_api.implementations.common.tile_order import make_tile_order, preferred_band_widths
from kernel_api.implementations.sm80.gemm import Gemm
from kernel_api.implementations.sm90.gemm import CONCURRENT_TILES
from kernel_api.implementations.sm90.gpc import TileOrderByGpc, by_gpc
from kernel_api.providers.cutedsl.gemm.sm90 import Sm90Gemm

#: (tile, cluster) that the Hopper family offers.
TILES = sorted({(d.kernel_tile, d.kernel_cluster) for d in Sm90Gemm.space.designs(Sm90Gemm.design)})
COUNTS = [(1, 1), (1, 7), (9, 1), (2, 3), (8, 8), (16, 17), (23, 11), (5, 40), (64, 33)]


def all_tiles(count_m, count_n, batches):
    """(m, n, batch) of every tile, sorted."""
    return sorted(np.ndindex(count_m, count_n, batches))


# Persistent kernels: TileOrder -------------------------------------------------------------------


@cache
def compiled_order(shared):
    @cute.jit
    def write_order(
        visited: cute.Tensor,
        clusters_m: Int32,
        clusters_n: Int32,
        batches: Int32,
        width_m: Int32,
        width_n: Int32,
        share: Int32,
    ):
        widths = width_m, width_n
        order = make_tile_order(clusters_m, clusters_n, batches, widths, shared, share == 1)
        for i in cutlass.range(order.total):
            visited[i, 0], visited[i, 1], visited[i, 2] = order.coordinates(i)

    return cute.compile(write_order, operand(np.empty((1, 3), np.int32), 1), *[Int32(1)] * 6)


def visits(count_m, count_n, batches, widths, shared="", share=True):
    """(m, n, batch) in the order of visits."""
    visited = np.full((count_m * count_n * batches, 3), -1, np.int32)
    arguments = (Int32(value) for value in (count_m, count_n, batches, *widths, share))
    compiled_order(shared)(operand(visited, 1), *arguments)
    return [tuple(tile) for tile in visited.tolist()]


def widths_offered():
    """Band widths of every tile that the Hopper family offers."""
    pairs = {
        preferred_band_widths(tile_shape, cluster_shape, CONCURRENT_TILES)
        for tile_shape, cluster_shape in TILES
    }
    return sorted(pairs)


@pytest.mark.parametrize("widths", [*widths_offered(), (1, 1), (3, 5), (100, 100)])
def test_every_tile_is_visited_once(widths):
    for counts, batches in product(COUNTS, [1, 3]):
        visited = visits(*counts, batches, widths)
        assert sorted(visited) == all_tiles(*counts, batches), (counts, batches)


@pytest.mark.parametrize("counts", COUNTS)
def test_batches_are_visited_one_after_the_other_in_the_same_order(counts):
    one = visits(*counts, 1, (2, 3))
    assert visits(*counts, 3, (2, 3)) == [(m, n, batch) for batch in range(3) for m, n, _ in one]


def test_bands_are_visited_there_and_back():
    order = np.zeros((4, 6), int)
    for index, (m, n, _) in enumerate(visits(4, 6, 1, (2, 2))):
        order[m, n] = index
    assert order.tolist() == [
        [0, 2, 4, 6, 8, 10],
        [1, 3, 5, 7, 9, 11],
        [22, 20, 18, 16, 14, 12],
        [23, 21, 19, 17, 15, 13],
    ]


def test_bands_cut_the_shorter_side_and_the_last_one_may_be_narrower():
    by_rows = visits(3, 5, 1, (2, 4))
    assert [m for m, _, _ in by_rows] == [0, 1] * 5 + [2] * 5
    by_columns = visits(5, 3, 1, (4, 2))
    assert [n for _, n, _ in by_columns] == [0, 1] * 5 + [2] * 5


@pytest.mark.parametrize("widths", [*widths_offered(), (1, 1), (3, 5)])
@pytest.mark.parametrize("counts", [(23, 11), (5, 40), (64, 33)])
def test_a_band_begins_with_the_operand_that_the_last_one_ended_on(counts, widths):
    visited = visits(*counts, 1, widths)
    for (m, n, _), (next_m, next_n, _) in pairwise(visited):
        assert m == next_m or n == next_n or abs(m - next_m) == 1 or abs(n - next_n) == 1


@pytest.mark.parametrize("widths", [(1, 1), (3, 5), (8, 8), (100, 100)])
@pytest.mark.parametrize("shared", ["a", "b", "ab"])
def test_every_tile_is_visited_once_where_neighbours_share(widths, shared):
    for counts in COUNTS:
        visited = visits(*counts, 2, widths, shared)
        assert sorted(visited) == all_tiles(*counts, 2), counts


def test_neighbours_share_an_operand():
    assert [m for m, _, _ in visits(8, 16, 1, (8, 8), "a")] == [*np.arange(8).repeat(4)] * 4
    assert [m for m, _, _ in visits(8, 16, 1, (8, 8), "b")] == [*range(8)] * 16
    assert [n for _, n, _ in visits(16, 8, 1, (8, 8), "b")] == [*np.arange(8).repeat(4)] * 4
    assert [n for _, n, _ in visits(16, 8, 1, (8, 8), "a")] == [*range(8)] * 16


def test_sixteen_neighbours_that_share_both_operands_are_four_by_four():
    visited = visits(8, 16, 1, (8, 8), "ab")
    assert set(visited[:16]) == {(m, n, 0) for m in range(4) for n in range(4)}


@pytest.mark.parametrize("shared", ["a", "b", "ab"])
def test_neighbours_that_drift_apart_share_what_the_short_side_has(shared):
    assert visits(8, 16, 1, (8, 8), shared, share=False) == visits(8, 16, 1, (8, 8))


def test_what_is_left_of_a_band_is_a_shorter_block():
    order = np.zeros((2, 6), int)
    for index, (m, n, _) in enumerate(visits(2, 6, 1, (2, 2), "a")):
        order[m, n] = index
    assert order.tolist() == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11]]


@pytest.mark.parametrize(("tile_shape", "cluster_shape"), TILES, ids=str)
def test_preferred_widths_make_the_footprint_about_square(tile_shape, cluster_shape):
    side = (CONCURRENT_TILES * tile_shape[0] * tile_shape[1]) ** 0.5
    widths = preferred_band_widths(tile_shape, cluster_shape, CONCURRENT_TILES)
    for width, extent, cluster in zip(widths, tile_shape, cluster_shape, strict=False):
        assert width >= 1
        assert abs(width * extent * cluster - side) <= extent * cluster / 2


def test_a_band_is_never_narrower_than_one_cluster():
    assert preferred_band_widths((256, 16, 64), (2, 1), concurrent_tiles=1) == (1, 4)


# Clusters of one GPC ------------------------------------------------------------------------------


@cache
def compiled_numbers(blocks):
    @cute.jit
    def write_numbers(numbers: cute.Tensor, clusters: Int32, share: Int32):
        order = by_gpc(make_tile_order(8, 8, 1, (2, 2), "a", share == 1), clusters, blocks)
        for cluster in cutlass.range(clusters):
            numbers[cluster] = cluster
            if const_expr(isinstance(order, TileOrderByGpc)):
                numbers[cluster] = order.numbers.of(cluster, blocks)

    return cute.compile(write_numbers, operand(np.empty(1, np.int32), 0), Int32(1), Int32(1))


def numbers(clusters, blocks, share=1):
    found = np.full(clusters, -1, np.int32)
    compiled_numbers(blocks)(operand(found, 0), Int32(clusters), Int32(share))
    return found.tolist()


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 8])
def test_every_cluster_has_a_number_of_its_own(blocks):
    for clusters in (*range(1, 80), 132, 200):
        assert sorted(numbers(clusters, blocks)) == list(range(clusters))


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_clusters_of_which_nothing_is_known_keep_their_numbers(blocks):
    assert numbers(66, blocks) == list(range(66))


@pytest.mark.parametrize("blocks", [2, 4])
def test_clusters_that_are_not_to_share_keep_their_numbers(blocks):
    assert numbers(66, blocks) != numbers(66, blocks, share=0) == list(range(66))


def gpc_of(cluster, blocks):
    """Of a cluster of an empty GPU, as %smid says; -1 of those that are alone."""
    alone, each = {2: (4, 4), 4: (0, 2)}[blocks]
    turns = [range(8)] * each + [range(1, 8)] * each
    dealt = [gpc for turn in turns for gpc in turn]
    return -1 if cluster < alone else dealt[cluster - alone]


@pytest.mark.parametrize(("blocks", "clusters"), [(2, 64), (2, 40), (2, 7), (4, 30), (4, 9)])
def test_clusters_of_a_gpc_have_numbers_that_follow_each_other(blocks, clusters):
    by_number = sorted(range(clusters), key=numbers(clusters, blocks).__getitem__)
    gpcs = [gpc_of(cluster, blocks) for cluster in by_number]
    assert gpcs == sorted(gpcs)


# Ampere: one block per tile, in bands of `raster` rows --------------------------------------------


TILE_M, TILE_N = 64, 32


@cache
def compiled_raster(raster):
    gemm = Gemm((TILE_M, TILE_N, 64), (2, 2), 3, raster=raster)

    @cute.jit
    def first_of_tile(block: Int32, size_m: Int32, size_n: Int32):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cute.arch, "block_idx", lambda: (block, 0, 0))
            return gemm._first_of_tile((size_m, size_n))

    @cute.jit
    def write_places(places: cute.Tensor, blocks: Int32, size_m: Int32, size_n: Int32):
        for block in cutlass.range(blocks):
            places[block, 0], places[block, 1], places[block, 2] = first_of_tile(
                block, size_m, size_n
            )

    return cute.compile(write_places, operand(np.empty((1, 3), np.int32), 1), *[Int32(1)] * 3)


def tiles_of_blocks(count_m, count_n, batches, raster):
    """(m, n, batch) of every block; the last row and column of tiles are not whole."""
    places = np.full((count_m * count_n * batches, 3), -1, np.int32)
    sizes = Int32(count_m * TILE_M - 1), Int32((count_n - 1) * TILE_N + 1)
    compiled_raster(raster)(operand(places, 1), Int32(len(places)), *sizes)
    tiles, remainders = np.divmod(places, (TILE_M, TILE_N, 1))
    assert not remainders.any()
    return [tuple(tile) for tile in tiles.tolist()]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("raster", [1, 4, 8])
def test_every_tile_has_one_block(counts, raster):
    assert sorted(tiles_of_blocks(*counts, 2, raster)) == all_tiles(*counts, 2)


def test_blocks_visit_a_band_column_by_column():
    found = [(m, n) for m, n, _ in tiles_of_blocks(5, 3, 1, raster=4)]
    first_band = [(m, n) for n in range(3) for m in range(4)]
    assert found == [*first_band, (4, 0), (4, 1), (4, 2)]
