"""Attention of few queries to few keys, for Hopper: the parts of a tile meet in a cluster."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..common.attention.scores import Scores
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.residence import residence
from ..common.threads import GROUP
from .mma import WGMMA_M
from .sdpa_decode import SdpaDecode
from .sdpa_output import OWN
from .sdpa_parts import DecodeTiles, Parts, Sum, choose, log_sum_exp
from .sdpa_rows import store
from .sdpa_split import Size, cluster_of, parts_in_clusters
from .sdpa_tiles import Work
from .sdpa_workspace import part_bytes

#: Bytes of operands of a block, at most: a multiprocessor has two, and what is 1 KiB behind each.
_HALF = 112 * 1024
_REGISTERS_OF_TWO = (40, 216)  # (producer, consumer)
_AT_ONCE = 4  # columns of parts, by a thread
_APART = 8  # columns between rows, so that those of a warp are in different banks
_WAVES_OF_PACKED = 4  # of parts of packed sequences, some of which are much longer than others


@dataclass
class ClusterTiles(DecodeTiles):
    """The same, a part for each block. Clusters have parts side by side."""

    def cluster(self, most: int) -> Int32:
        """Blocks of one: the largest power of two of a tile's parts."""
        return Int32(cluster_of(self.parts, most, choose))

    def fetch(self) -> Int32:
        """There is no other."""
        return self.total

    def leave(self) -> None:
        """Nothing was counted."""


class Memory(NamedTuple):
    """Of a block, which other blocks of its cluster read.

    rows, numbers: As of `Parts`.
    flag: Whether this block completes a tile.
    """

    rows: cute.Tensor
    numbers: cute.Tensor
    flag: cute.Pointer


@dataclass
class PartsOfCluster:
    """Each in the shared memory of a block."""

    rows: cute.Tensor
    numbers: cute.Tensor
    count: Int32

    def read_instead(self) -> Int32:
        """The block's own: another one may have ended before a read that nobody waits for."""
        return cute.arch.block_idx_in_cluster()

    def at(self, part: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        return _of_block(self.rows, part), _of_block(self.numbers, part)


class SdpaDecodeCluster(SdpaDecode):
    """The same, where the parts of a tile are the blocks of a cluster, as far as that goes. Each
    leaves its rows in shared memory, and adds up some vectors of all of them. Sums of clusters go
    through the workspace where a tile has several.

    A block has one part, and ends with it. A multiprocessor has two: the next kernel's are there
    when this one's end.

    cluster: Blocks of one, at most: a power of two. How many there are is known at run time.
    """

    tiles = ClusterTiles
    schedules = False  # parts of a tile are there together
    sums_at_once = 4
    ahead_of_more = 0  # blocks begin while others read

    def __init__(
        self, head_dims, tile, stages, element_type, scores: Scores, *, cluster, **options
    ):
        super().__init__(head_dims, tile, stages, element_type, scores, **options)
        self.most = cluster
        self.registers = _REGISTERS_OF_TWO
        element_bytes = element_type.width // 8
        read = self.tile_m * self.head_dim + self.tile_n * stages * sum(head_dims)
        left = self.tile_m * (self.head_dim_v + _APART + self.numbers) * Float32.width // 8
        stored = self.tile_n * self.stages * self.head_dim * element_bytes
        if self.tile_m > WGMMA_M:
            raise ValueError(f"a cluster takes tiles of {WGMMA_M} rows, not {self.tile_m}")
        if read * element_bytes > _HALF:
            raise ValueError(f"{stages} stages of {tile} leave no room for a block beside this one")
        if left > stored:
            raise ValueError(f"{tile} rows of {self.head_dim_v} columns do not fit where K was")

    def _parts(self, size: Size, rows: Int32) -> Int32:
        """As many as a cluster has, or some clusters have."""
        waves = _WAVES_OF_PACKED if self.packed else 1
        return Int32(parts_in_clusters(size, self.most, waves, choose))

    def _are_many(self, rows: Int32) -> Boolean:
        """All blocks of a cluster add up."""
        return Boolean(False)

    def _launch_sums(self, mQ, mK, mO, operands, tiles: ClusterTiles, stream) -> None:
        """None is behind."""

    def _blocks(self, tiles: ClusterTiles, multiprocessors: Int32) -> Int32:
        return tiles.total

    def _residence(self, tiles: ClusterTiles) -> dict:
        return {"cluster": (tiles.cluster(self.most), 1, 1), **residence(2)}

    def _await_launch(self) -> None:
        """Later, see `_work`."""

    def _work(self, tiles: ClusterTiles, tile: Int32, values: Values, mQ, mK) -> Work:
        """The producer and the consumers ask for one each, before all that they read."""
        if not self.knows_keys:
            super()._await_launch()
        work = super()._work(tiles, tile, values, mQ, mK)
        if self.knows_keys:
            super()._await_launch()
        return work

    def _staged_output(self, storage, layout) -> Memory:
        """Instead: where parts are left. K was there."""
        pointer = cute.recast_ptr(storage.K.data_ptr(), dtype=Float32)
        pitch = self.head_dim_v + _APART
        rows = cute.make_layout((self.tile_m, self.head_dim_v), stride=(pitch, 1))
        numbers = cute.make_layout((self.tile_m, self.numbers))
        return Memory(
            cute.make_tensor(pointer, rows),
            cute.make_tensor(pointer + self.tile_m * pitch, numbers),
            storage.flag.data_ptr(),
        )

    def _own_part(self, consumer, memory: Memory, work: Work, tiles) -> tuple:
        # Other warps of the group may still multiply what lay there.
        cute.arch.barrier(barrier_id=OWN + consumer, number_of_threads=GROUP)
        return memory.rows, memory.numbers

    def _parts_of_tile(self, work: Work, tiles) -> Parts:
        """Sums of clusters."""
        shape = self.tile_m, self.head_dim_v, self.numbers
        first, size = work.tile - work.place.key, cute.arch.cluster_size()
        address = tiles.partial + Int64(first) * part_bytes(*shape)
        return Parts(address, tiles.parts // size, shape)

    @cute.jit
    def _combine(self, thread, memory: Memory, mO, work: Work, values, tiles):
        """The parts of a tile."""
        cute.arch.cluster_arrive()
        self._add_up_cluster(thread, memory, mO, work, values, tiles)
        # Nobody reads this block's memory any more when all have arrived: what they read has been
        # added, so none of it is on its way.
        cute.arch.cluster_arrive_relaxed()
        if tiles.parts > cute.arch.cluster_size():
            # `super` is not known where code is traced.
            SdpaDecode._combine_last(self, thread, memory.flag, mO, work, values, tiles)
        cute.arch.cluster_wait()

    @cute.jit
    def _add_up_cluster(self, thread, memory: Memory, mO, work: Work, values, tiles):
        """The vectors of this block: as many of each block of the cluster, side by side. Waits for
        the others."""
        size = cute.arch.cluster_size()
        parts = PartsOfCluster(memory.rows, memory.numbers, size)
        sums, other = self._parts_of_tile(work, tiles).at(work.place.key // size)
        across = self.head_dim_v // _AT_ONCE
        rows = cutlass.min(self._rows(work.sequence, tiles) - work.place.query, self.tile_m)
        each = (rows * across + size - 1) // size
        first = cute.arch.block_idx_in_cluster() * each
        end = cutlass.min(first + each, rows * across)
        cute.arch.cluster_wait()
        for vector in cutlass.range(first + thread, end, GROUP * self.consumers, unroll=1):
            local, column = vector // across, vector % across * _AT_ONCE
            added = self._sum(parts, local, column, _AT_ONCE, self.most)
            if tiles.parts == size:
                self._finish(added, parts, local, column, mO, work, values, tiles)
            else:
                self._pass_on(added, parts, local, column, sums, other)

    @cute.jit
    def _pass_on(self, added: Sum, parts, local, column, rows, numbers):
        """Writes a vector of a row of the workspace, and with the first one the row's numbers."""
        exists = added.total > 0.0
        scale = select(exists, 1.0 / added.total, Float32(0.0))
        scaled = cute.make_rmem_tensor_like(added.values)
        scaled.store(added.values.load() * scale)
        store(scaled, rows[local, None], column)
        if column == 0:
            numbers[local, 0] = log_sum_exp(added)
            if const_expr(self.numbers > 1):
                numbers[local, 1] = self._largest_score(parts, local, None)


def _of_block(tensor: cute.Tensor, rank: Int32) -> cute.Tensor:
    """The same in the memory of another block of the cluster."""
    return cute.make_tensor(cute.arch.map_dsmem_ptr(tensor.iterator, rank), tensor.layout)
