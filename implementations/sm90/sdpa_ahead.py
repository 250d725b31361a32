"""How a block of attention has its first keys on their way while the kernels before still run."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..common.attention.scores import Scores
from ..common.attention.values import Values
from ..common.conversion import select

#: Of launch values, those that a block uses behind its first loads if at all.
_NOT_READ_FIRST = frozenset(
    ("scale", "lse", "score_max", "score_sum_exp", "sink", "max_seqlen_q", "max_seqlen_kv")
)
#: And those that it needs to know where its keys lie.
_READ_FIRST = frozenset(
    ("page_table", "seq_lens_q", "seq_lens_kv", "cu_seqlens_q", "cu_seqlens_kv")
)
#: The warp that asks. No other waits for what it reads, but where registers are handed over.
_ASKS = 1
_LINE = 32  # numbers that L2 gets at once
#: Bytes of keys and values that a block asks for, where all blocks of a launch together read no
#: more than `_SMALL`.
_ALL, _SMALL = 128 << 10, 8 << 20


class AsksAhead:
    """A part of a kernel, which has what `RowLoads` has; `_part_of` says what is to be done of a
    tile."""

    #: Bytes that a block asks for where all of them read more than `_SMALL`: kernels that still run
    #: get theirs later. A block begins when another one ends.
    ahead_of_more = 32 << 10

    scores: Scores

    @property
    def knows_keys(self) -> bool:
        """Whether it is known where keys lie before anything is read."""
        return set(self.scores.names) <= _NOT_READ_FIRST

    @property
    def _finds_keys(self) -> bool:
        """Whether little that is read says so."""
        return set(self.scores.names) <= _NOT_READ_FIRST | _READ_FIRST

    @property
    def asks_ahead(self) -> bool:
        return self._finds_keys or bool(set(self.scores.names) & _READ_FIRST)

    @cute.jit
    def _ask_ahead(self, warp_index, *of_first_loads):
        """Brings what this block loads first to L2 while the kernels before run. They may still
        write it: L2 is where what they write arrives."""
        if warp_index == _ASKS:
            if const_expr(self._finds_keys):
                self._ask_for_keys(*of_first_loads)
            else:
                self._ask_for_places(*of_first_loads)

    @cute.jit
    def _ask_for_places(self, tma_k, mK, sK, tma_v, mV, sV, mQ, tiles, operands):
        """For lengths, and numbers of pages as far as the lanes of a warp go."""
        names = self.scores.names
        values = Values(names, operands)
        early = Values(names, tuple(map(_early, names, operands)))
        batch = self._place(tiles, Int32(cute.arch.block_idx()[0]), early).batch
        for name in sorted(_READ_FIRST & set(names)):
            tensor = values[name]
            index = batch
            if const_expr(name == "page_table"):
                of_lane = cute.arch.lane_idx() * _LINE
                index = (batch, cutlass.min(of_lane, Int32(tensor.shape[1]) - 1))
            address = tensor.iterator + cute.crd2idx(index, tensor.layout)
            cute.arch.prefetch(address.llvm_ptr, cache_level="L2")

    @cute.jit
    def _ask_for_keys(self, tma_k, mK, sK, tma_v, mV, sV, mQ, tiles, operands):
        """Where lengths and numbers of pages say by now that they are: what is somewhere else in
        the end is not read from there."""
        names = self.scores.names
        values = Values(names, tuple(map(_early, names, operands)))
        tile = Int32(cute.arch.block_idx()[0])
        work = self._part_of(tiles, tile, values, mQ, mK)
        place, sequence, blocks = work.place, work.sequence, work.blocks
        first_key, batch = self._first_key(sequence), self._batch_of_keys(place)
        tKsK, tKgK = self._partitioned(tma_k, mK, sK, self.head_dim, place.head, first_key)
        row_bytes = self.element_type.width // 8 * self.tile_n
        of_keys = of_both = self.head_dim * row_bytes
        if const_expr(not self.values_in_keys):
            tVsV, tVgV = self._partitioned(tma_v, mV, sV, self.head_dim_v, place.head, first_key)
            of_both += self.head_dim_v * row_bytes
        whole, _ = divmod(tiles.total, tiles.by_part)
        read = Int64(whole) * cute.ceil_div(sequence.keys, self.tile_n)
        ahead = select(read * of_both <= _SMALL, Int32(_ALL), Int32(self.ahead_of_more))
        pages = self._no_pages()
        count = cutlass.min(blocks.end - blocks.begin, cute.ceil_div(ahead, of_both))
        if const_expr(self.values_in_keys):
            # Blocks of rows that read the same keys were slower where each asked for them.
            count = select(tiles.blocks == 1, count, Int32(0))
        for i in cutlass.range(count, unroll=1):
            block = blocks.end - 1 - i
            pages = self._pages_of(pages, block, place.batch, sequence, values)
            self._ask_for_block(tma_k, tKgK, tKsK, block, pages, batch)
            if const_expr(not self.values_in_keys):
                left = ahead - (i * of_both + of_keys)
                if left > 0:
                    self._ask_for_block(tma_v, tVgV, tVsV, block, pages, batch)


def _early(name: str, value):
    """What is called so, as it may be read while the kernels before run."""
    return _FromL2(value, of_lanes=name == "page_table") if name in _READ_FIRST else value


class _FromL2:
    """A tensor of numbers, read from L2: what a kernel before still writes is read anew behind it,
    not from a cache that knows no better.

    of_lanes: Whether each lane reads one of its own; if not, all have the same one, whoever writes
        it meanwhile.
    """

    def __init__(self, tensor: cute.Tensor, of_lanes: bool):
        self._tensor, self._of_lanes = tensor, of_lanes
        self.shape = tensor.shape

    def __getitem__(self, index) -> Int32:
        return self.of_lane(index) if self._of_lanes else self._read(_read_by_one, index)

    def of_lane(self, index) -> Int32:
        """Each lane reads one of its own."""
        return self._read(_read, index)

    def _read(self, read, index) -> Int32:
        address = self._tensor.iterator + cute.crd2idx(index, self._tensor.layout)
        return read(address, self._tensor.element_type)


def of_lane(numbers, index) -> Int32:
    """Of a tensor, as it is or as it may be read while the kernels before run."""
    return numbers.of_lane(index) if isinstance(numbers, _FromL2) else numbers[index]


def _read(address: cute.Pointer, element_type) -> cutlass.Numeric:
    return cute.arch.load(address.llvm_ptr, element_type, cop="cg")


@cute.jit
def _read_by_one(address: cute.Pointer, element_type: cutlass.Constexpr):
    """By the first lane, for all."""
    number = element_type(0)
    if cute.arch.lane_idx() == 0:
        number = _read(address, element_type)
    return cute.arch.shuffle_sync(number, offset=0)
