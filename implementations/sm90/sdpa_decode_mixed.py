"""Attention of few queries of 16 bits to many keys of 8-bit floats, for Hopper."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.tensor_utils import LayoutEnum

from ..common.attention.blocks import Hidden
from ..common.attention.scores import Tile
from ..common.attention.softmax import largest_of_quad
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.threads import GROUP, QUAD, WARP
from .sdpa_decode_fp8 import SdpaDecodeFp8
from .sdpa_parts import DecodeTiles, query_and_head
from .sdpa_rows import load_vector
from .sdpa_tiles import Work

#: 8-bit floats of 4 digits that hold the digits of a type together.
_TERMS = {BFloat16: 2, Float16: 3}
#: Rows are multiplied with powers of two, so that the exponent of their largest element is this.
_EXPONENT = 7
_EXPONENT_BITS, _MANTISSA, _BIAS = 0x7F800000, 23, 127  # of float32

_VECTOR = 8  # elements of a row that a thread has side by side
_ROWS = WARP // QUAD  # that the threads of a warp have at a time
_OWN_ROWS = 2  # of a tile, that a thread has scores of
#: Bytes that a swizzle leaves together, and by how many places the bits are behind that it is by.
_SWIZZLED, _FROM_ROWS = 16, 3


class SdpaDecodeMixed(SdpaDecodeFp8):
    """`SdpaDecodeFp8` of queries of 16 bits, which a consumer writes to shared memory as sums of
    8-bit floats, side by side: wgmma multiplies each of them with the keys. A sum is off by
    2 ** -17 of a row's largest element at most, and by nothing where elements are not much smaller.

    queries_type: Of Q.
    """

    def __init__(self, *design, queries_type: type[cutlass.Numeric], **options):
        super().__init__(*design, **options)
        self.queries_type = queries_type
        self.terms = _TERMS[queries_type]

    def _shared_layouts(self) -> tuple:
        _, *others = super()._shared_layouts()
        tile = (self.tile_m, self.tile_n, self.terms * self.head_dim)
        of_queries = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.element_type, 1)
        return of_queries, *others

    def _factors_of_rows(self) -> cute.Tensor:
        factors = cute.make_rmem_tensor(_OWN_ROWS, Float32)
        factors.fill(1.0)
        return factors

    @cute.jit
    def _load_queries(self, thread, mQ, sQ, work: Work, tiles: DecodeTiles, factors):
        """By the threads that have the scores of a row."""
        lane, warp = thread % WARP, thread // WARP
        place, across = work.place, QUAD * _VECTOR
        vectors = self.head_dim // across
        # All loads before the first of them is waited for.
        loaded = cute.make_rmem_tensor((_VECTOR, vectors, _OWN_ROWS), self.queries_type)
        first = lane % QUAD * _VECTOR
        last = self._rows(work.sequence, tiles) - 1
        for i in cutlass.range_constexpr(_OWN_ROWS):
            local = (warp * _OWN_ROWS + i) * _ROWS + lane // QUAD
            row = cutlass.min(place.query + local, last)
            query, head = query_and_head(place, row - place.query, tiles)
            source = self._row(mQ, query, head, work)
            for j in cutlass.range_constexpr(vectors):
                column = cutlass.min(first + j * across, mQ.shape[1] - _VECTOR)
                load_vector(source, column, loaded[None, j, i])
        slots = self._slots(lane, warp, sQ)
        for i in cutlass.range_constexpr(_OWN_ROWS):
            rest = cute.make_rmem_tensor((_VECTOR, vectors), Float32)
            rest.store(loaded[None, None, i].load().to(Float32))
            for j in cutlass.range_constexpr(vectors):
                exists = first + j * across < mQ.shape[1]
                for k in cutlass.range_constexpr(_VECTOR):
                    rest[k, j] = select(exists, rest[k, j], Float32(0.0))
            power, factors[i] = _power_and_inverse(rest)
            for j in cutlass.range_constexpr(cute.size(rest)):
                rest[j] = rest[j] * power
            for term in cutlass.range_constexpr(self.terms):
                rounded = cute.make_rmem_tensor((_VECTOR, vectors), self.element_type)
                rounded.store(rest.load().to(self.element_type))
                # The largest ones last: sums are cut off below 14 bits of what is added.
                before = (self.terms - 1 - term) * vectors
                for j in cutlass.range_constexpr(vectors):
                    target = self._vector(slots, sQ, i * _ROWS, (before + j) * across)
                    cute.autovec_copy(cute.recast_tensor(rounded[None, j], Int32), target)
                rest.store(rest.load() - rounded.load().to(Float32))
        cute.arch.fence_view_async_shared()
        self._meet(thread // GROUP)

    def _slots(self, lane, warp, sQ) -> list:
        """Addresses of a thread's first vectors in shared memory, as many as differ in what is
        swizzled: all others are a constant apart, so they need no registers."""
        columns = sQ.shape[1][0] if isinstance(sQ.shape[1], tuple) else sQ.shape[1]
        row = warp * (_OWN_ROWS * _ROWS) + lane // QUAD
        # Elements are bytes.
        first = sQ.iterator.toint() + cute.crd2idx((row, lane % QUAD * _VECTOR, 0), sQ.layout)
        bits, slots = columns - _SWIZZLED, []
        for along in range(0, columns, QUAD * _VECTOR):
            address = first + along
            slots.append(address ^ ((address >> _FROM_ROWS) & bits))
        return slots

    def _vector(self, slots: list, sQ, row: int, column: int) -> cute.Tensor:
        """Of a thread, so many rows and columns behind its first one."""
        across = QUAD * _VECTOR
        phase = column // across % len(slots)
        address = slots[phase] + cute.crd2idx((row, column - phase * across, 0), sQ.layout)
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=_VECTOR)
        return cute.make_tensor(pointer, cute.make_layout(_VECTOR // 4))

    def _score(self, tile: Tile, sequence, values: Values, tiles, hidden: bool | Hidden) -> None:
        rows, columns = tile.extents
        for row in range(rows):
            for column in range(columns):
                tile.values[row, column] = tile.values[row, column] * tile.factors[row]
        super()._score(tile, sequence, values, tiles, hidden)


def _power_and_inverse(row: cute.Tensor) -> tuple[Float32, Float32]:
    """The power of two that a row, of which a thread has its elements, is multiplied with, and
    what undoes that."""
    largest = Float32(0.0)
    for i in range(cute.size(row)):
        largest = cute.arch.fmax(largest, cute.arch.fmax(row[i], -row[i]))
    exponent = largest_of_quad(largest).bitcast(Int32) & Int32(_EXPONENT_BITS)
    exponent = cutlass.max(exponent, Int32((_EXPONENT + 1) << _MANTISSA))  # else its inverse is 0
    power = Int32((2 * _BIAS + _EXPONENT) << _MANTISSA) - exponent
    inverse = exponent - Int32(_EXPONENT << _MANTISSA)
    # 8 bits hold a large number in place of infinity.
    inverse = select(exponent == Int32(_EXPONENT_BITS), exponent, inverse)
    return power.bitcast(Float32), inverse.bitcast(Float32)
