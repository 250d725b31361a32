"""Output tiles: from accumulators to slices in shared memory, and from there to whole vectors."""

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import BFloat16, Float32, Int32
from on_the_cpu import INTEGERS, fixed, offsets, operand, ptx_on_the_cpu
from sm80_gemms import distinct, offered, planned

from kernel_api.implementations.common.output_tile import OutputTile

BANKS, BANK_BYTES = 32, 4

OTHERS = [
    planned((32, 256, 64), (1, 4), 2, output_type=BFloat16),
    planned((128, 32, 32), (4, 1), 2, unit_modes=(1, 1, 0)),
    planned((64, 128, 32), (1, 4), 2, 4, output_type=BFloat16, unit_modes=(1, 1, 0)),
]


def name(gemm):
    m, n, _ = gemm.tile_shape
    major = "MN"[gemm.D.unit_mode]
    warps = "x".join(map(str, gemm.warps))
    return f"{gemm.D.element_type.width}bits-{m}x{n}-{major}-warps{warps}-slices{gemm.D.slices}"


def name_with_vectors(gemm):
    return f"{name(gemm)}-bytes{gemm.vector_bytes}-of{gemm._operand_bytes()}"


def slice_shape(tile):
    """(M, N)"""
    across_along = (tile.grid.across, tile.grid.along)
    return across_along if tile.unit_mode == 1 else across_along[::-1]


PLACES = {}  # many tiles differ in their vectors, not in their layout


def places(tile):
    """(M, N): the element of shared memory that holds one of a slice."""
    key = slice_shape(tile), tile.unit_mode, tile.pitch
    if key not in PLACES:
        PLACES[key] = offsets(tile.layout, slice_shape(tile))
    return PLACES[key]


# What fits where --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gemm", distinct([*offered(), *OTHERS], name_with_vectors), ids=name_with_vectors
)
def test_a_slice_fits_into_the_memory_of_the_stages_and_keeps_all_threads_busy(gemm):
    tile, grid = gemm.D, gemm.D.grid
    assert tile.bytes <= gemm._operand_bytes()
    assert grid.across * tile.slices == gemm.tile_shape[1 - tile.unit_mode]
    assert not grid.idle_threads
    assert grid.copies * grid.step == grid.across
    assert tile.pitch * tile.element_type.width // 8 % 16 == 0  # rows on vector boundaries


@pytest.mark.parametrize(
    ("budget", "slices"), [(1 << 20, 1), (128 * 136 * 2, 1), (128 * 136 * 2 - 1, 2), (1, 4)]
)
def test_a_tile_is_cut_until_it_fits_but_not_below_the_granule(budget, slices):
    tile = OutputTile(
        BFloat16, (128, 128), 1, granule=32, budget_bytes=budget, threads=128, vector_bytes=16
    )
    assert tile.slices == slices
    assert tile.bytes == 128 // slices * 136 * 2


# Accumulators to shared memory ------------------------------------------------------------------


def partitioned(gemm):
    """For all threads and slices, what each of a thread's accumulators in the slice is:

    coordinates (slices, threads, values, 2) in the tile, places (threads, values) in the slice.
    """
    values = gemm.tile_shape[0] * gemm.tile_shape[1] // gemm.threads // gemm.D.slices
    coordinates = np.empty((gemm.D.slices, gemm.threads, values, 2), np.int32)
    places = np.empty((gemm.threads, values), np.int32)

    @cute.jit
    def partition(coordinates: cute.Tensor, places: cute.Tensor, thread: Int32):
        thr_mma = gemm._tiled_mma().get_slice(thread)
        tCcD = thr_mma.partition_C(cute.make_identity_tensor(gemm.tile_shape[:2]))
        memory = cute.make_tensor(places.iterator, gemm.D.layout())
        tCsD = thr_mma.partition_C(memory)
        first = (tCsD.iterator.toint() - places.iterator.toint()) // 4
        for index in cutlass.range_constexpr(gemm.D.slices):
            slice_of_thread = gemm.D.slice_of(tCcD, index)
            for i in cutlass.range(values, unroll=1):
                m, n = slice_of_thread[i]
                coordinates[index, thread, i, 0], coordinates[index, thread, i, 1] = m, n
        for i in cutlass.range(values, unroll=1):
            places[thread, i] = Int32(first) + Int32(tCsD.layout(i))

    tensors = fixed(coordinates), fixed(places)
    compiled = cute.compile(partition, *tensors, Int32(0))
    for thread in range(gemm.threads):
        compiled(*tensors, Int32(thread))
    return coordinates, places


def bank_conflicts(gemm, places):
    """The words that the worst bank takes for one write of a warp."""
    element_bytes = gemm.D.element_type.width // 8
    neighbours = 2 if gemm.D.unit_mode == 1 else 1  # written at once by a thread
    lanes = min(32, 128 // (neighbours * element_bytes))  # that shared memory serves at once
    worst = 0
    for warp in places.reshape(-1, lanes, places.shape[1] // neighbours, neighbours):
        words = warp.swapaxes(0, 1).reshape(warp.shape[1], -1) * element_bytes // BANK_BYTES
        for written in words:
            worst = max(worst, np.bincount(np.unique(written) % BANKS).max())
    return worst


@pytest.mark.parametrize("gemm", distinct([*offered(), *OTHERS], name), ids=name)
def test_accumulators_of_a_slice_go_to_their_places_without_bank_conflicts(gemm):
    coordinates, found = partitioned(gemm)
    wanted = places(gemm.D)
    across = 1 - gemm.D.unit_mode
    for index in range(gemm.D.slices):
        coordinates[index, ..., across] -= index * gemm.D.grid.across
        m, n = coordinates[index, ..., 0], coordinates[index, ..., 1]
        assert np.array_equal(wanted[m, n], found)
    assert np.array_equal(np.sort(found, axis=None), np.sort(wanted, axis=None))
    assert bank_conflicts(gemm, found) == 1


# Shared to global memory, by all threads in turn, in NumPy's memory -------------------------------

SENTINEL = -1
BATCH = 1  # of two


@cute.jit
def store_slices(
    shared: cute.Tensor,
    mD: cute.Tensor,
    first_m: Int32,
    first_n: Int32,
    thread: Int32,
    tile: cutlass.Constexpr,
):
    for index in cutlass.range_constexpr(tile.slices):
        sD = cute.make_tensor(shared[None, index].iterator, tile.layout())
        tile.store(sD, mD, (first_m, first_n), Int32(BATCH), index, thread)


class Stores:
    """The stores of one kind of tile, compiled for the CPU; all slices lie in shared memory."""

    def __init__(self, tile):
        self.tile = tile
        element_bytes = tile.element_type.width // 8
        slice_elements = tile.bytes // element_bytes
        shape = slice_shape(tile)
        self.values = 1 + np.arange(shape[0] * shape[1] * tile.slices) % 30011
        self.values = self.values.reshape(tile.slices, *shape).astype(
            INTEGERS[tile.element_type.width]
        )
        self.shared = np.zeros((tile.slices, slice_elements), self.values.dtype)
        self.shared[:, places(tile)] = self.values
        self.shared = self.shared.T
        with ptx_on_the_cpu():
            tensors = fixed(self.shared), operand(self.output(1, 1), tile.unit_mode)
            self.compiled = cute.compile(store_slices, *tensors, *[Int32(0)] * 3, tile)

    def whole_tile(self):
        """(M, N)"""
        return np.concatenate(list(self.values), axis=1 - self.tile.unit_mode)

    def output(self, m, n):
        """(M, N, L), all of it and the padding of its rows SENTINEL."""
        padded = np.full((2, m + 3, n + 3), SENTINEL, self.values.dtype)
        if self.tile.unit_mode == 0:
            padded = np.ascontiguousarray(padded.swapaxes(1, 2)).swapaxes(1, 2)
        return padded.transpose(1, 2, 0)[:m, :n]

    def run(self, array, first_m, first_n):
        tensors = fixed(self.shared), operand(array, self.tile.unit_mode)
        for thread in range(self.tile.grid.threads):
            self.compiled(*tensors, Int32(first_m), Int32(first_n), Int32(thread))


def stored(element_type, shape, unit_mode, *, vector_bytes):
    """A tile in two slices."""
    m, n = shape
    return OutputTile(
        element_type,
        shape,
        unit_mode,
        granule=16,
        budget_bytes=m * n * element_type.width // 8 * 3 // 4,
        threads=128,
        vector_bytes=vector_bytes,
    )


STORED = [
    stored(element_type, shape, unit_mode, vector_bytes=vector_bytes)
    for element_type, shape, vector_bytes in (
        (BFloat16, (64, 128), 16),
        (BFloat16, (64, 64), 8),
        (BFloat16, (32, 32), 4),
        (BFloat16, (16, 32), 2),
        (Float32, (64, 64), 16),
        (Float32, (32, 32), 8),
        (Float32, (16, 32), 2),  # an element at a time
    )
    for unit_mode in (0, 1)
]


def stored_name(tile):
    m, n = slice_shape(tile)
    major = "MN"[tile.unit_mode]
    return f"{tile.element_type.width}bits-{tile.slices}x{m}x{n}-{major}-vector{tile.grid.vector}"


@pytest.mark.parametrize("tile", STORED, ids=stored_name)
def test_stores_write_what_lies_inside_of_the_output_and_nothing_else(tile):
    stores = Stores(tile)
    whole = stores.whole_tile()
    tile_m, tile_n = whole.shape
    for inside_m, inside_n in ((tile_m, tile_n), (1, 7), (tile_m - 3, tile_n - 1)):
        array = stores.output(tile_m + inside_m, tile_n + inside_n)
        before = array.base.copy()
        stores.run(array, tile_m, tile_n)
        assert np.array_equal(array[tile_m:, tile_n:, BATCH], whole[:inside_m, :inside_n])
        array[tile_m:, tile_n:, BATCH] = SENTINEL
        assert np.array_equal(array.base, before)
