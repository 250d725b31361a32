"""Attention of 8-bit floats for Hopper, forward."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int8, Int32, Int64, const_expr
from cutlass.cute import AddressSpace
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ..common.attention.blocks import Hidden
from ..common.attention.descale import descale, descale_products, descaled
from ..common.attention.modes import attention_modes
from ..common.attention.scores import Place, Tile
from ..common.attention.sequences import Sequence, keys_in_pages, sequence_of
from ..common.attention.values import Values
from ..common.flat_grid import flat_block_idx, flat_grid
from ..common.work_split import COUNTER_BYTES
from .sdpa_forward import SdpaForward
from .sdpa_loads import tma_load
from .sdpa_pages import REGISTERS_FOR_PAGES, PagedKeys
from .sdpa_tiles import Tiles, Work
from .sdpa_workspace import PERMUTED, first_of_packed, keys_with_room

#: Columns of scores and of O together that leave the producer registers to read pages. Of more,
#: consumers need the usual 240, and the producer gets by with 24.
_FEW_COLUMNS = 288

_PIECE = 16  # accumulators of 32 columns that a thread has: a k block of the second product

_KEYS, _COLUMNS, _THREADS = 128, 64, 128  # of a block of `ValuesAcross`
_VECTOR = 16  # bytes


@dataclass
class DescaledTiles(Tiles):
    """group: Heads of queries that share a head of keys."""

    group: Int32


class Descaled:
    """A part of a kernel, which takes what `descale` takes."""

    def _tiles(self, *sizes_and_group) -> DescaledTiles:
        return DescaledTiles(*sizes_and_group)

    def _key_head(self, place: Place | Tile, tiles: Tiles) -> Int32:
        """Whose keys a place or tile sees."""
        return place.head // tiles.group

    def _score(self, tile: Tile, sequence, values: Values, tiles, hidden: bool | Hidden) -> None:
        if not self.scores.plain:
            descale_products(tile, values, self._key_head(tile, tiles))
        super()._score(tile, sequence, values, tiles, hidden)

    def _multiplier(self, values: Values, place: Place, tiles: Tiles) -> Float32:
        found = super()._multiplier(values, place, tiles)
        if not self.scores.plain:
            return found
        return descaled(found, values, place.batch, self._key_head(place, tiles))

    def _factor(self, factor: Float32, values: Values, place: Place, tiles: Tiles) -> Float32:
        return factor * descale(values, "descale_v", place.batch, self._key_head(place, tiles))


class SdpaForwardFp8(Descaled, PagedKeys, SdpaForward):
    """The same of 8-bit floats: wgmma reads V along its keys, so a kernel before writes Vᵀ to the
    workspace. P is as large as its type takes: the largest of a row is 256.

    K and V may be pages: (pages, H_kv, page_size, D), page `page_table[b, i]` has keys
    i · page_size and following of sequence b. Vᵀ is not.
    """

    largest_power = 8.0

    def __init__(self, *design, **options):
        super().__init__(*design, **options)
        few = self.tile_n + self.head_dim_v <= _FEW_COLUMNS
        if self.page_size is not None and self.consumers == 2 and few:
            self.registers = REGISTERS_FOR_PAGES

    @cute.jit
    def with_operands(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        operands,
        workspace: Int64,
        multiprocessors: Int32,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what the scores are called by; workspace: an address, of two
        counters that are zero, then of room for Vᵀ."""
        values = Values(self.scores.names, operands)
        batches, queries = self._sequences(mQ, values)
        mQ, mK, mV, mO = (attention_modes(tensor) for tensor in (mQ, mK, mV, mO))
        across = ValuesAcross(self.element_type, self.scores.names, self.tile_n, self.page_size)
        mVt = across(mV, operands, workspace + COUNTER_BYTES, batches, stream)
        q_layout, k_layout, v_layout, _ = layouts = self._shared_layouts()
        tma_q, tQ = tma_load(mQ, q_layout, (self.tile_m, self.head_dim))
        tma_k, tK = self._tma_keys(mK, k_layout)
        tma_v, tV = tma_load(mVt, v_layout, (self.head_dim_v, self.tile_n))
        blocks, heads = cute.ceil_div(queries, self.tile_m), mQ.shape[2]
        together = self._together(mK, values, blocks, heads, batches)
        total, group = blocks * heads * batches, heads // mK.shape[2]
        tiles = self._tiles(blocks, heads, total, together, workspace, group)
        self._launch(
            *(tma_q, tQ, tma_k, tK, tma_v, tV, mO),
            *(layouts, operands, tiles, multiprocessors, stream),
        )

    def _first_value(self, work: Work) -> Int32:
        first = super()._first_value(work)
        if "cu_seqlens_kv" in self.scores.names:
            first = first_of_packed(first, work.place.batch, self.tile_n)
        return first

    def _shared_layouts(self) -> tuple:
        q_layout, k_layout, _, o_layout = super()._shared_layouts()
        tile = (self.tile_m, self.head_dim_v, self.tile_n)
        v_layout = sm90.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, tile, self.element_type, self.stages
        )
        return q_layout, k_layout, v_layout, o_layout

    def _mma_pv(self) -> cute.TiledMma:
        return self._mma(self.head_dim_v, OperandMajorMode.K, OperandSource.RMEM)

    def _store_powers(self, tOrP, tSrS, tile: Tile, tiles: Tiles, values: Values) -> None:
        """A thread has 2 neighbours of every 8 columns, and is to have 4 of every 16: it takes its
        pairs of two as if they were one, which the keys of V were moved for."""
        if self.scores.drops:
            self.scores.drop(tile, tiles.heads, values, keys=self.tile_n, scaled=False)
        for first in range(0, cute.size(tSrS), _PIECE):
            # (pair, of two blocks of 8 columns; row; half of 32 columns)
            order = cute.make_layout((2, 2, 2, 2), stride=(1, 4, 2, 8))
            powers = cute.make_tensor(tSrS.iterator + first, order)
            rounded = cute.make_tensor(tOrP.iterator + first, cute.make_layout(_PIECE))
            in_order = cute.make_rmem_tensor(_PIECE, Float32)
            for i in range(_PIECE):
                in_order[i] = powers[i]
            rounded.store(in_order.load().to(self.element_type))

    def _operand(self, tOrP: cute.Tensor, tSrS: cute.Tensor) -> cute.Tensor:
        blocks = cute.size(tSrS) // _PIECE
        layout = cute.make_layout(((4, 2, 2), 1, blocks), stride=((1, 4, 8), 0, _PIECE))
        return cute.make_tensor(tOrP.iterator, layout)

    def _clear_behind(self, thread, sV, block, sequence, pipeline_v, v_state) -> None:
        """Vᵀ is clear there."""


class ValuesAcross:
    """Writes V (S,D,H,B) as Vᵀ (D,S,H,B) with keys side by side, zeros behind the last one.

    Packed sequences begin at tiles of keys there, and zeros fill their last tile: a tile has no key
    of a neighbour, whose values may be no numbers. Tiles that no sequence has are not written, and
    not read; nor are those of pages behind the last key.

    Of every 16 keys, those that one thread has of the accumulators of Q · Kᵀ are neighbours: key k
    is at 4 · (k % 8 // 2) + 2 · (k // 8) + k % 2.

    A block turns 128 keys of 64 columns over in shared memory.
    """

    def __init__(
        self,
        element_type: type[cutlass.Numeric],
        names: tuple[str, ...],
        tile: int,
        page_size: int | None,
    ):
        """tile: Keys that are read at once."""
        self.element_type = element_type
        self.names = names
        self.tile = tile
        self.packed = "cu_seqlens_kv" in names
        self.page_size = page_size

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,
        operands,
        address: Int64,
        sequences: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the copy to the address; returns it as a tensor."""
        values = Values(self.names, operands)
        keys, columns, heads, batches = mV.shape
        if const_expr(self.page_size is not None):
            keys, batches = keys_in_pages(values, self.page_size), sequences
        longest, room = keys, keys_with_room(keys)
        if const_expr(self.packed):
            longest = self._whole_tiles(values.longest("kv", keys))
            room = first_of_packed(keys, sequences, self.tile)
        pitch = cute.assume(Int64(room), divby=PERMUTED)
        layout = cute.make_layout(
            (columns, room, heads, batches),
            stride=(pitch, 1, pitch * columns, pitch * columns * heads),
        )
        pointer = cute.make_ptr(self.element_type, address, AddressSpace.gmem, assumed_align=128)
        mVt = cute.make_tensor(pointer, layout)
        blocks = cute.ceil_div(longest, _KEYS)
        self.kernel(mV, mVt, operands, blocks).launch(
            grid=flat_grid(blocks, heads, cute.ceil_div(columns, _COLUMNS), sequences),
            block=(_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )
        return mVt

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mVt: cute.Tensor, operands, blocks: Int32):
        keys, columns, heads, _ = mV.shape
        parts = cute.ceil_div(columns, _COLUMNS)
        block, head, part, batch = flat_block_idx(blocks, heads, parts)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(self.names, operands)
        if const_expr(self.page_size is not None):
            keys = keys_in_pages(values, self.page_size)
        sequence = sequence_of(values, batch, Int32(0), keys)
        if const_expr(self.packed):
            first = first_of_packed(sequence.first_key, batch, self.tile)
            rows = cute.domain_offset((sequence.first_key, 0), mV[None, None, head, 0]), None
            mVt = cute.domain_offset((0, first), mVt[None, None, head, 0])
            room = self._whole_tiles(sequence.keys)
            if block * _KEYS < room:
                self._turn_over(rows, mVt, block * _KEYS, part * _COLUMNS, sequence, room)
        elif const_expr(self.page_size is not None):
            rows = mV[None, None, head, None], values["page_table"][batch, None]
            mVt = mVt[None, None, head, batch]
            room = cutlass.min(self._whole_tiles(sequence.keys), mVt.shape[1])
            if block * _KEYS < room:
                self._turn_over(rows, mVt, block * _KEYS, part * _COLUMNS, sequence, room)
        else:
            rows, mVt = (mV[None, None, head, batch], None), mVt[None, None, head, batch]
            room = mVt.shape[1]
            self._turn_over(rows, mVt, block * _KEYS, part * _COLUMNS, sequence, room)

    def _row(self, rows: tuple, key: Int32) -> cute.Tensor:
        """Of a sequence. rows: Its values (S,D), or all pages (S,D,pages) and its own."""
        mV, pages = rows
        if pages is None:
            return mV[key, None]
        return mV[key % self.page_size, None, pages[key // self.page_size]]

    def _whole_tiles(self, keys: Int32) -> Int32:
        return cute.ceil_div(keys, self.tile) * self.tile

    @cute.jit
    def _turn_over(self, rows, mVt, first_key, first_column, sequence: Sequence, room):
        """A block. rows: See `_row`; mVt: (D,S), written up to `room`."""
        thread, _, _ = cute.arch.thread_idx()
        columns = rows[0].shape[1]
        # One vector more per row, so that a column of rows does not hit one bank.
        shared = cute.make_layout((_COLUMNS, _KEYS), stride=(_KEYS + _VECTOR, 1))
        sV = SmemAllocator().allocate_tensor(Int8, shared, byte_alignment=_VECTOR)
        across = _COLUMNS // _VECTOR
        for i in cutlass.range_constexpr(_KEYS * across // _THREADS):
            place = thread + i * _THREADS
            row, column = place // across, place % across * _VECTOR
            key = first_key + row
            fragment = cute.make_rmem_tensor(_VECTOR, Int8)
            fragment.fill(0)
            if (key < sequence.keys) & (first_column + column < columns):
                source = self._row(rows, key).iterator + (first_column + column)
                cute.autovec_copy(_vector(source, AddressSpace.gmem), fragment)
            inner = row % PERMUTED
            moved = row - inner + 4 * (inner % 8 // 2) + 2 * (inner // 8) + inner % 2
            for j in cutlass.range_constexpr(_VECTOR):
                sV[column + j, moved] = fragment[j]
        cute.arch.barrier()
        along = _KEYS // _VECTOR
        for i in cutlass.range_constexpr(_COLUMNS * along // _THREADS):
            place = thread + i * _THREADS
            row, key = place // along, place % along * _VECTOR
            if (first_column + row < columns) & (first_key + key < room):
                target = mVt[first_column + row, None].iterator + (first_key + key)
                cute.autovec_copy(
                    _vector(sV[row, None].iterator + key, AddressSpace.smem),
                    _vector(target, AddressSpace.gmem),
                )


def _vector(pointer, space):
    address = cute.make_ptr(Int8, pointer.toint(), space, assumed_align=_VECTOR)
    return cute.make_tensor(address, cute.make_layout(_VECTOR))
