"""How rows of keys and values, which may be in pages, come to shared memory on Hopper."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from .sdpa_loads import tma_load

REGISTERS_FOR_PAGES = (40, 232)  # producer and each of two consumers: it reads numbers of pages

SLAB_BYTES = 128  # of a row that TMA copies at once, at most: the span of a swizzle


class Pages(NamedTuple):
    """Numbers of pages, a piece of a block each; blocks have as many pieces as TMA copies.

    held: Of each lane, from the first piece of block `last` on, and of those before it.
    own: Of each lane, of the pieces of the block that was asked for.
    """

    held: Int32
    last: Int32
    own: Int32


class RowLoads:
    """TMA copies slabs of as many rows as a tile has, or a page if that is less.

    A part of a kernel, which has `tile_m`, `tile_n`, `stages`, `element_type` and `page_size`:
    None, or a divisor or multiple of `tile_n` and a multiple of 8.
    """

    @property
    def rows_at_once(self) -> int:
        return min(self.tile_n, self.page_size or self.tile_n)

    def _slab(self, columns: int) -> int:
        """Columns that are copied at once, those of a swizzle."""
        return math.gcd(columns, SLAB_BYTES * 8 // self.element_type.width)

    def _tma_rows(self, tensor: cute.Tensor, columns: int) -> tuple:
        """columns: That a tile has room for."""
        slab = self._slab(columns)
        layout = sm90.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, (self.rows_at_once, self.tile_n, slab), self.element_type, 1
        )
        return tma_load(tensor, layout, (self.rows_at_once, slab))

    def _partitioned(self, tma, tensor, shared, columns: int, head, first=None) -> tuple:
        """((TMA, pieces of rows, slabs, stages), (TMA, pieces of rows, slabs, batches)). The tiles
        lie in shared memory as rows of a slab, slab by slab.

        first: The row where those of a sequence begin, if that is not always the first.
        """
        tile = (self.tile_m, self.tile_n, columns)
        layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.element_type, self.stages)
        rows = cute.make_tensor(shared.iterator, layout.outer)
        piece = (self.rows_at_once, self._slab(columns))
        pieces = cute.local_tile(rows, piece, (None, None, None))
        of_head = tensor[None, None, head, None]
        if first is not None:
            of_head = cute.domain_offset((first, 0, 0), of_head)
        source = cute.local_tile(of_head, piece, (None, None, None))
        return cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(pieces, 0, 2),
            cute.group_modes(source, 0, 2),
        )

    def _no_pages(self) -> Pages:
        """Before the first block."""
        return Pages(Int32(0), Int32(-1), Int32(0))

    @cute.jit
    def _pages_of(self, pages: Pages, block, batch, sequence, values):
        """Numbers of the pages of a block of keys, asked for from the last block to the first: read
        for many at once, so that loads seldom wait for them."""
        if const_expr(self.page_size is not None):
            pieces = self.tile_n // self.rows_at_once
            lane = cute.arch.lane_idx()
            last = pages.last
            held = pages.held
            if (block > last) | (block <= last - 32 // pieces):
                last = block
                first = (block - lane // pieces) * self.tile_n + lane % pieces * self.rows_at_once
                # In front of the first key and behind the last one there may be no page: what is
                # read there is not used.
                first = cutlass.max(cutlass.min(first, sequence.keys - 1), Int32(0))
                held = values["page_table"][batch, first // self.page_size]
            own = cute.arch.shuffle_sync(held, (last - block) * pieces + lane % pieces)
            pages = Pages(held, last, own)
        return pages

    @cute.jit
    def _load_block(self, tma, source, shared, block, pages: Pages, stages, state, batch):
        """Of keys, into its stage when that is empty."""
        stages.producer_acquire(state)
        pieces = self.tile_n // self.rows_at_once
        for piece in cutlass.range(pieces, unroll=1):
            row, at = self._piece(block * pieces + piece, piece, pages, batch)
            for slab in cutlass.range_constexpr(cute.size(shared, mode=[2])):
                cute.copy(
                    tma,
                    source[None, row, slab, at],
                    shared[None, piece, slab, state.index],
                    tma_bar_ptr=stages.producer_get_barrier(state),
                )

    @cute.jit
    def _ask_for_block(self, tma, source, shared, block, pages: Pages, batch):
        """The same into L2."""
        pieces = self.tile_n // self.rows_at_once
        for piece in cutlass.range(pieces, unroll=1):
            row, at = self._piece(block * pieces + piece, piece, pages, batch)
            with cute.arch.elect_one():
                for slab in cutlass.range_constexpr(cute.size(shared, mode=[2])):
                    cute.prefetch(tma, source[None, row, slab, at])

    def _piece(self, row, piece, pages: Pages, batch) -> tuple:
        """(row, batch) of a piece of a block: those of its page if there are pages."""
        if self.page_size is None:
            return row, batch
        row = row % (self.page_size // self.rows_at_once)
        return row, cute.arch.shuffle_sync(pages.own, piece)

    @cute.jit
    def _load_pages(self, tma, source, shared, block, stages, state, batch, sequence, values):
        """The same of keys in pages, in few registers: each lane reads the number of a page."""
        first = block * self.tile_n
        own = cutlass.min(first + cute.arch.lane_idx() * self.rows_at_once, sequence.keys - 1)
        page = values["page_table"][batch, own // self.page_size]
        stages.producer_acquire(state)
        row = Int32(0)
        if const_expr(self.page_size > self.tile_n):
            row = first % self.page_size // self.tile_n
        for piece in cutlass.range(self.tile_n // self.rows_at_once, unroll=1):
            at = cute.arch.shuffle_sync(page, piece)
            for slab in cutlass.range_constexpr(cute.size(shared, mode=[2])):
                cute.copy(
                    tma,
                    source[None, row, slab, at],
                    shared[None, piece, slab, state.index],
                    tma_bar_ptr=stages.producer_get_barrier(state),
                )


class PagedKeys(RowLoads):
    """How a forward kernel loads keys that are in pages; others as it does without this."""

    def _tma_keys(self, mK: cute.Tensor, layout) -> tuple:
        if self.page_size is None:
            return super()._tma_keys(mK, layout)
        return self._tma_rows(mK, self.head_dim)

    def _keys_to_load(self, tma, mK, sK, head, batch, sequence) -> tuple:
        if self.page_size is None:
            return super()._keys_to_load(tma, mK, sK, head, batch, sequence)
        return tma, *self._partitioned(tma, mK, sK, self.head_dim, head)

    def _load_keys(self, keys: tuple, block, stages, state, work, values) -> None:
        if self.page_size is None:
            super()._load_keys(keys, block, stages, state, work, values)
        else:
            self._load_rows(keys, block, stages, state, work, values)

    def _load_rows(self, rows: tuple, block, stages, state, work, values) -> None:
        """Of keys or values, in pages."""
        tma, shared, source = rows
        of_batch = work.place.batch, work.sequence, values
        self._load_pages(tma, source, shared, block, stages, state, *of_batch)
