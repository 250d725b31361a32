"""Operand tiles: where their elements lie in shared memory, and which thread copies what there."""

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import BFloat16, Float32, Int8, Int32
from on_the_cpu import INTEGERS, fixed, offsets, operand, ptx_on_the_cpu
from sm80_gemms import distinct, offered

from kernel_api.implementations.common.operand_tiles import OperandTiles, TileSource

BANKS, BANK_BYTES = 32, 4
WAVEFRONT_BYTES = BANKS * BANK_BYTES


def tiles_of(element_type, shape, unit_mode, *, threads, vector_bytes=16, stages=3):
    by_element = element_type is Float32 and unit_mode == 0
    return OperandTiles(
        element_type,
        shape,
        unit_mode,
        stages=stages,
        k_blocks=shape[1] * element_type.width // 8 // 32,
        threads=threads,
        vector_bytes=vector_bytes,
        piece_bytes=32 if by_element else 16,
    )


OTHERS = [
    tiles_of(BFloat16, (64, 128), 1, threads=64),
    tiles_of(BFloat16, (256, 32), 0, threads=128, vector_bytes=4),
    tiles_of(BFloat16, (32, 64), 1, threads=256, vector_bytes=8),
    tiles_of(BFloat16, (16, 32), 0, threads=512, vector_bytes=2),
    tiles_of(Float32, (128, 16), 1, threads=128, vector_bytes=8),
    tiles_of(Float32, (16, 64), 0, threads=512, vector_bytes=16),
    tiles_of(Int8, (64, 256), 1, threads=64),
    tiles_of(Int8, (32, 64), 1, threads=256, vector_bytes=1),
]


def name(tiles):
    major = ("rows", "K")[tiles.unit_mode]
    rows, k = tiles.shape
    return (
        f"{tiles.element_type.width}bits-{rows}x{k}-{major}-stages{tiles.stages}"
        f"-threads{tiles.grid.threads}-bytes{tiles.grid.vector * tiles.element_bytes}"
        f"{'' if tiles.asynchronous else '-registers'}"
    )


def offered_tiles():
    return distinct((tiles for gemm in offered() for tiles in (gemm.A, gemm.B)), name)


def places(tiles):
    """(along, across, stage): the byte of shared memory where the element begins."""
    bytes_ = places_by_mode(tiles) * tiles.element_bytes
    return bytes_ if tiles.unit_mode == 0 else bytes_.swapaxes(0, 1)


PLACES = {}  # many tiles differ in the threads that copy them, not in their layout


def places_by_mode(tiles):
    """(rows, K, stage): the element of shared memory."""
    key = tiles.element_type.width, tiles.shape, tiles.unit_mode, tiles.stages, tiles.piece_bytes
    if key not in PLACES:
        PLACES[key] = offsets(tiles.layout, (*tiles.shape, tiles.stages))
    return PLACES[key]


def vectors(tiles):
    """along, across of each thread's copies: two arrays (threads with work, copies)."""
    grid = tiles.grid
    along, across = grid.first(np.arange(grid.threads))
    busy = across < grid.across
    copies = np.arange(grid.copies) * grid.step
    return np.broadcast_arrays(along[busy, None], across[busy, None] + copies)


def source_with(tiles, slots):
    """Of no operand; each slot is an array over the threads."""
    nothing = dict.fromkeys(
        ("pointer", "along_left", "across_left", "copy_pitch", "tile_pitch", "busy")
    )
    return TileSource(tiles, slots=slots, **nothing)


def bank_conflicts(bytes_):
    """The words that the worst bank has to deliver to a wavefront; rows are wavefronts."""
    words = np.sort(bytes_ // BANK_BYTES, axis=1)
    new = np.diff(words, axis=1, prepend=-1) > 0  # lanes that read the same word share it
    counts = [np.sum(new & (words % BANKS == bank), axis=1) for bank in range(BANKS)]
    return np.max(counts)


every_tile = pytest.mark.parametrize("tiles", [*offered_tiles(), *OTHERS], ids=name)


@every_tile
def test_every_element_has_its_own_place(tiles):
    found = np.sort(places(tiles), axis=None)
    assert np.array_equal(found, np.arange(tiles.elements) * tiles.element_bytes)


@every_tile
def test_stages_are_alike(tiles):
    stage_bytes = tiles.elements // tiles.stages * tiles.element_bytes
    first = places(tiles)[:, :, :1]
    assert np.array_equal(places(tiles), first + np.arange(tiles.stages) * stage_bytes)


@every_tile
def test_every_element_is_in_one_vector_of_one_thread(tiles):
    along, across = vectors(tiles)
    times = np.zeros((tiles.grid.along, tiles.grid.across), int)
    for i in range(tiles.grid.vector):
        np.add.at(times, (along + i, across), 1)
    assert (times == 1).all()


@every_tile
def test_vectors_are_in_one_piece_and_aligned_in_shared_memory(tiles):
    along, across = vectors(tiles)
    first = places(tiles)[along, across, 0]
    assert (first % tiles.vector_bytes == 0).all()
    for i in range(1, tiles.grid.vector):
        assert np.array_equal(places(tiles)[along + i, across, 0], first + i * tiles.element_bytes)


@every_tile
def test_slots_are_where_the_layout_says(tiles):
    along, across = vectors(tiles)
    slots = places(tiles)[along, across, 0].T[: tiles.phases] // tiles.element_bytes
    source = source_with(tiles, slots)
    for stage in range(tiles.stages):
        for i in range(tiles.grid.copies):
            wanted = places(tiles)[along[:, i], across[:, i], stage] // tiles.element_bytes
            assert np.array_equal(source._slot(i, stage), wanted)


@every_tile
def test_parts_are_all_copies_in_turn(tiles):
    source = source_with(tiles, slots=[])
    ranges = [range(*source._copies(part)) for part in range(tiles.parts)]
    assert [i for part in ranges for i in part] == list(range(tiles.grid.copies))


@every_tile
def test_writes_of_vectors_are_free_of_bank_conflicts(tiles):
    along, across = vectors(tiles)
    first = places(tiles)[along[:, 0], across[:, 0], 0]
    lanes = min(WAVEFRONT_BYTES // tiles.vector_bytes, 32, len(first))
    words = np.arange(0, tiles.vector_bytes, BANK_BYTES)
    assert bank_conflicts((first[:, None] + words).reshape(-1, lanes * len(words))) == 1


@every_tile
def test_reads_of_fragments_are_free_of_bank_conflicts(tiles):
    bytes_ = places(tiles)[:, :, 0]
    along, across = bytes_.shape
    if tiles.piece_bytes == 16:  # ldmatrix: 8 rows of 16 bytes
        read_along, read_across = 16 // tiles.element_bytes, 8
    else:  # one element for each lane
        read_along, read_across = 8, 4
    reads = bytes_.reshape(along // read_along, read_along, across // read_across, read_across)
    assert bank_conflicts(reads.transpose(0, 2, 1, 3).reshape(-1, read_along * read_across)) == 1


# Copying, by all threads in turn, in NumPy's memory --------------------------------------------

SENTINEL = -1


@cute.jit
def copy_tile(
    mX: cute.Tensor,
    shared: cute.Tensor,
    first_row: Int32,
    batch: Int32,
    k_tile: Int32,
    stage: Int32,
    thread: Int32,
    tiles: cutlass.Constexpr,
):
    sX = cute.make_tensor(shared.iterator, tiles.layout())
    source = tiles.source(mX, first_row, batch, sX, thread)
    for part in cutlass.range_constexpr(tiles.parts):
        pending = source.start(k_tile, stage, part)
        source.finish(stage, part, pending)


class Copies:
    """The copying of one kind of tile, compiled for the CPU."""

    def __init__(self, tiles):
        self.tiles = tiles
        self.shared = np.empty(tiles.elements, INTEGERS[tiles.element_type.width])
        with ptx_on_the_cpu():
            self.compiled = cute.compile(
                copy_tile, *self._tensors(self.operand(1, 1)), *[Int32(0)] * 5, tiles
            )

    def operand(self, rows, k):
        """(rows, K, L), 2 batches, every element another; its padding is SENTINEL."""
        shape = [rows, k, 2]
        shape[self.tiles.unit_mode] += 5
        order = (2, 0, 1) if self.tiles.unit_mode == 1 else (2, 1, 0)
        stored = np.full([shape[i] for i in order], SENTINEL, self.shared.dtype)
        padded = stored.transpose(np.argsort(order))
        prime = 113 if self.tiles.element_bytes == 1 else 30011
        padded[:rows, :k] = 1 + np.arange(rows * k * 2).reshape(rows, k, 2) % prime
        return padded[:rows, :k]

    def run(self, array, first_row, batch, k_tile, stage):
        """(rows, K, stages) of shared memory, SENTINEL where nothing was written."""
        self.shared[:] = SENTINEL
        tensors = self._tensors(array)
        place = [Int32(value) for value in (first_row, batch, k_tile, stage)]
        for thread in range(self.tiles.grid.threads):
            self.compiled(*tensors, *place, Int32(thread))
        return self.shared[places_by_mode(self.tiles)]

    def _tensors(self, array):
        return operand(array, self.tiles.unit_mode), fixed(self.shared)


def expected_tile(array, shape, first_row, batch, k_tile):
    rows, k = shape
    found = np.zeros(shape, array.dtype)
    inside = array[first_row : first_row + rows, k_tile * k : (k_tile + 1) * k, batch]
    found[: inside.shape[0], : inside.shape[1]] = inside
    return found


COPIED = [
    tiles_of(element_type, shape, unit_mode, threads=threads, vector_bytes=vector_bytes)
    for element_type, shape, threads, vector_bytes in (
        (BFloat16, (64, 64), 128, 16),
        (BFloat16, (16, 32), 128, 16),  # with idle threads
        (BFloat16, (128, 32), 128, 4),
        (BFloat16, (64, 32), 128, 2),
        (BFloat16, (16, 32), 512, 2),  # with idle threads
        (Float32, (64, 32), 128, 16),
        (Float32, (32, 16), 128, 4),
        (Int8, (64, 64), 128, 16),
        (Int8, (32, 64), 128, 4),
        (Int8, (32, 64), 128, 1),
    )
    for unit_mode in (0, 1)
]


@pytest.mark.parametrize("tiles", COPIED, ids=name)
def test_copies_bring_the_tile_to_its_stage_with_zeros_outside_of_the_operand(tiles):
    copies = Copies(tiles)
    rows, k = tiles.shape
    for past_rows, past_k in ((rows, k), (1, 7), (rows - 3, k - 1)):
        array = copies.operand(rows + past_rows, k + past_k)
        for first_row, k_tile in ((0, 0), (rows, 1), (rows, 2)):
            found = copies.run(array, first_row, batch=1, k_tile=k_tile, stage=1)
            wanted = expected_tile(array, tiles.shape, first_row, 1, k_tile)
            assert np.array_equal(found[:, :, 1], wanted)
            assert (found[:, :, [0, 2]] == SENTINEL).all()
