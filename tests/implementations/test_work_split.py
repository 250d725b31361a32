"""How a product is cut along K as well: every k tile is computed once, and its workers agree."""

from functools import cache

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Int32, Int64
from on_the_cpu import operand

from kernel_api.implementations.common.work_split import EvenSplit, PartialSums, WorkSplit

# (tiles, k tiles, workers); a worker has at least one unit.
SPLITS = [
    (1, 1, 1),
    (1, 7, 3),
    (1, 132, 132),
    (3, 5, 15),
    (7, 11, 4),
    (128, 128, 132),
    (448, 64, 66),
    (5, 4, 20),
    (6, 9, 12),
    (40, 3, 132 // 2),
    (131, 1, 130),
]


@cute.jit
def write_work(work: cute.Tensor, shared: cute.Tensor, k_tiles: Int32, units: Int32):
    """work: a row (worker, tile, first k tile, count) per piece; shared: (first worker, workers)
    per tile. Unused rows of work stay as they are."""
    workers = work.shape[0]
    split = WorkSplit(k_tiles, units, workers, Int64(0))
    for worker in cutlass.range(workers):
        first, end = split.tiles_of(worker)
        for tile in cutlass.range(first, end):
            k, count = split.k_range(worker, tile)
            work[worker, tile, 0], work[worker, tile, 1] = k, count
    for tile in cutlass.range(shared.shape[0]):
        shared[tile, 0], shared[tile, 1] = split.workers_on(tile)


@cache
def compiled():
    work, shared = np.empty((1, 1, 2), np.int32), np.empty((1, 2), np.int32)
    return cute.compile(write_work, operand(work, 2), operand(shared, 1), Int32(1), Int32(1))


def computed(tiles, k_tiles, workers):
    """(workers, tiles, (first, count)) with count 0 where there is no work; (tiles, 2)."""
    work = np.zeros((workers, tiles, 2), np.int32)
    shared = np.full((tiles, 2), -1, np.int32)
    compiled()(operand(work, 2), operand(shared, 1), Int32(k_tiles), Int32(tiles * k_tiles))
    return work, shared


@pytest.mark.parametrize(("tiles", "k_tiles", "workers"), SPLITS)
def test_every_k_tile_is_computed_once(tiles, k_tiles, workers):
    work, _ = computed(tiles, k_tiles, workers)
    times = np.zeros((tiles, k_tiles), int)
    for worker, tile in np.ndindex(workers, tiles):
        first, count = work[worker, tile]
        times[tile, first : first + count] += 1
        assert first + count <= k_tiles
    assert (times == 1).all()


@pytest.mark.parametrize(("tiles", "k_tiles", "workers"), SPLITS)
def test_workers_have_equal_amounts_of_work(tiles, k_tiles, workers):
    work, _ = computed(tiles, k_tiles, workers)
    amounts = work[..., 1].sum(axis=1)
    assert amounts.min() >= 1
    assert amounts.max() - amounts.min() <= 1


@pytest.mark.parametrize(("tiles", "k_tiles", "workers"), SPLITS)
def test_the_workers_of_a_tile_are_known_to_all_of_them(tiles, k_tiles, workers):
    work, shared = computed(tiles, k_tiles, workers)
    for tile in range(tiles):
        on_it = np.flatnonzero(work[:, tile, 1])
        assert shared[tile].tolist() == [on_it[0], len(on_it)]
        assert (np.diff(on_it) == 1).all()


@pytest.mark.parametrize(("tiles", "k_tiles", "workers"), SPLITS)
def test_a_worker_leaves_at_most_its_first_and_its_last_tile_to_others(tiles, k_tiles, workers):
    """Which is why two partial tiles are room enough: one that it starts in the middle of, and
    one that it starts and does not end."""
    work, _ = computed(tiles, k_tiles, workers)
    for worker in range(workers):
        counts = work[worker, :, 1]
        whole = np.flatnonzero((counts > 0) & (counts < k_tiles))
        in_the_middle = [tile for tile in whole if work[worker, tile, 0] > 0]
        assert len(in_the_middle) <= 1
        assert len(whole) - len(in_the_middle) <= 1


@pytest.mark.parametrize("parts", [2, 4])
def test_as_many_workers_as_parts_of_tiles_have_one_equal_part_each(parts):
    work, shared = computed(6, 9, 6 * parts)
    assert (np.count_nonzero(work[..., 1], axis=1) == 1).all()
    assert (shared[:, 1] == parts).all()


def test_units_beyond_32_bits_times_workers_are_dealt_out_right():
    work, _ = computed(3, 40_000_000, 132)
    assert work[..., 1].sum(dtype=np.int64) == 3 * 40_000_000


@cute.jit
def write_parts(work: cute.Tensor, shared: cute.Tensor, k_tiles: Int32, parts: cutlass.Constexpr):
    split = EvenSplit(parts, k_tiles, Int64(0))
    for worker in cutlass.range(work.shape[0]):
        work[worker, 0], work[worker, 1] = split.k_range(worker, worker // parts)
    for tile in cutlass.range(shared.shape[0]):
        shared[tile, 0], shared[tile, 1] = split.workers_on(tile)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("k_tiles", [0, 1, 2, 7, 8, 9, 100])
def test_even_parts_are_those_of_as_many_workers(k_tiles, parts):
    tiles = 5
    work = np.full((tiles * parts, 2), -1, np.int32)
    shared = np.full((tiles, 2), -1, np.int32)
    tensors = operand(work, 1), operand(shared, 1)
    cute.compile(write_parts, *tensors, Int32(1), parts)(*tensors, Int32(k_tiles))
    assert shared.tolist() == [[parts * tile, parts] for tile in range(tiles)]
    of_tiles = work.reshape(tiles, parts, 2)
    ends = of_tiles.sum(axis=2)
    assert (of_tiles[:, 0, 0] == 0).all()
    assert (of_tiles[:, 1:, 0] == ends[:, :-1]).all()
    assert (ends[:, -1] == k_tiles).all()
    if k_tiles >= parts:
        as_workers, _ = computed(tiles, k_tiles, tiles * parts)
        assert np.array_equal(as_workers.sum(axis=1), work)


def test_partial_sums_are_moved_four_at_a_time():
    with pytest.raises(ValueError, match="6 accumulators per thread are no multiple of 4"):
        PartialSums(threads=128, groups=1, values=6, slots=1)
