"""Rows of a matrix spread over the threads of a block: vectors in and out, sums along a row."""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Numeric, Uint16, Uint32, const_expr

from .conversion import bfloat16_pair, select
from .threads import WARP
from .vectors import VECTOR, braced

_WORD_BYTES = 4
_PIECE_BYTES = 16  # that one instruction moves at most


def added(a: Numeric, b: Numeric) -> Numeric:
    return a + b


@dataclass(frozen=True)
class RowThreads:
    """`per_row` threads lie along a row, a vector each, and step on along it.

    Args:
        threads: Of a block, whole warps; several rows at once if they are more than `per_row`.
        per_row: A power of two, or whole warps.
        vector: Elements side by side in a thread, a power of two. Rows are whole vectors.
    """

    threads: int
    per_row: int
    vector: int

    def __post_init__(self):
        if not _is_power(self.vector):
            raise ValueError(f"vector is {self.vector}; expected a power of two")
        if self.per_row % WARP and not _is_power(self.per_row):
            raise ValueError(f"per_row is {self.per_row}; expected a power of two or whole warps")
        if self.threads % WARP or self.threads % self.per_row:
            raise ValueError(f"{self.threads} threads are no warps on rows of {self.per_row}")

    @property
    def rows(self) -> int:
        """At once."""
        return self.threads // self.per_row

    @property
    def step(self) -> int:
        """Elements from one vector of a thread to its next."""
        return self.per_row * self.vector

    @property
    def warps_per_row(self) -> int:
        """1 if a row is the work of a part of a warp."""
        return max(1, self.per_row // WARP)

    def slot(self, thread: Int32) -> Int32:
        """Which of the rows at once is the thread's."""
        return thread // self.per_row if self.rows > 1 else Int32(0)

    def column(self, thread: Int32) -> Int32:
        """Of the thread's first element."""
        return (thread % self.per_row if self.rows > 1 else thread) * self.vector

    def partials(self, allocator, values: int, buffers: int = 2) -> cute.Tensor | None:
        """Shared memory for `across`, for so many values; (buffers, values, warps)."""
        if self.warps_per_row == 1:
            return None
        layout = cute.make_layout((buffers, values, self.threads // WARP))
        return allocator.allocate_tensor(Float32, layout, byte_alignment=16)

    @cute.jit
    def across(
        self,
        values: tuple,
        thread: Int32,
        sPartials: cute.Tensor | None,
        buffer: Int32,
        of_two: cutlass.Constexpr[Callable] = added,
    ) -> tuple:
        """Sums over the row of what its threads have, or what else is found of two values in any
        order; all of them get the same.

        buffer: Another one than the last time.
        of_two: What a value and 0 are is the value.
        """
        values = over_lanes(values, of_two, min(self.per_row, WARP))
        if const_expr(self.warps_per_row > 1):
            warp = thread // WARP
            if thread % WARP == 0:
                for i in cutlass.range_constexpr(len(values)):
                    sPartials[buffer, i, warp] = values[i]
            cute.arch.sync_threads()
            first = warp // self.warps_per_row * self.warps_per_row
            lanes = _power_from(self.warps_per_row)
            mine = thread % lanes
            of_warps = tuple(
                self._partial(sPartials, buffer, i, first, mine) for i in range(len(values))
            )
            values = over_lanes(of_warps, of_two, lanes)
        return values

    def _partial(self, sPartials: cute.Tensor, buffer: Int32, i: int, first: Int32, mine: Int32):
        """What a warp of the row has found; 0 where there is none."""
        count = self.warps_per_row
        if _is_power(count):
            return sPartials[buffer, i, first + mine]
        found = sPartials[buffer, i, first + cutlass.min(mine, count - 1)]
        return select(mine < count, found, Float32(0))


def _is_power(value: int) -> bool:
    return value > 0 and not value & (value - 1)


def _power_from(value: int) -> int:
    """The least power of two that is no less."""
    return 1 << (value - 1).bit_length()


def over_lanes(values: tuple, combined: Callable, lanes: int) -> tuple:
    """Over so many neighbours, a power of two; all of them get the same."""
    offset = 1
    while offset < lanes:
        others = [cute.arch.shuffle_sync_bfly(value, offset=offset) for value in values]
        values = tuple(map(combined, values, others))
        offset *= 2
    return values


def combined(values: list, of_two: Callable = added) -> Numeric:
    """Neighbours first, so that rounding errors stay small and operations overlap."""
    while len(values) > 1:
        pairs = [of_two(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


# Vectors -----------------------------------------------------------------------------------


class Vector:
    """Neighbours in a row, moved at once: `count` elements of a type, in words.

    is_written: Whether the kernel writes where they are read from, too.
    """

    def __init__(self, count: int, element_type: type[Numeric], is_written: bool = False):
        self.count = count
        self.is_written = is_written
        self.element_type = element_type
        self.element_bytes = element_type.width // 8
        self.bytes = count * self.element_bytes
        self.word = Uint16 if self.bytes == 2 else Uint32
        self.words = self.bytes * 8 // self.word.width

    def __extract_mlir_values__(self) -> list:
        return []  # all is known while tracing: loops carry nothing of it

    def __new_from_mlir_values__(self, values: list) -> "Vector":
        return self

    @property
    def pieces(self) -> list:
        """(first byte, words) of each instruction."""
        most = _PIECE_BYTES // _WORD_BYTES
        starts = range(0, self.words, most)
        return [(start * _WORD_BYTES, min(most, self.words - start)) for start in starts]

    def elements(self, words: list) -> list:
        """As Float32."""
        if self.element_type.width == 32:
            return [word.bitcast(Float32) for word in words]
        if self.count == 1:
            return [words[0].bitcast(self.element_type).to(Float32)]
        if self.element_type is BFloat16:
            return [value for word in words for value in bfloat16_pair(word)]
        # The stride of one word has to be said: that of its elements is made of it.
        packed = cute.make_rmem_tensor(cute.make_layout(self.words, stride=1), Uint32)
        for i, word in enumerate(words):
            packed[i] = word
        values = cute.recast_tensor(packed, self.element_type).load().to(Float32)
        return [values[i] for i in range(self.count)]

    def packed(self, values: list) -> list:
        """Words of Float32 values, rounded."""
        if self.element_type.width == 32:
            return [value.bitcast(Uint32) for value in values]
        if self.count == 1:
            return [values[0].to(self.element_type).bitcast(Uint16)]
        wide = cute.make_rmem_tensor(self.count, Float32)
        for i, value in enumerate(values):
            wide[i] = value
        rounded = cute.make_rmem_tensor(self.count, self.element_type)
        rounded.store(wide.load().to(self.element_type))
        packed = cute.recast_tensor(rounded, Uint32)
        return [packed[i] for i in range(self.words)]


@dataclass
class GlobalRow:
    """What one thread has of a row in global memory; vectors are named by their first element,
    counted from the thread's first one.

    Attributes:
        address: Of its first element.
        left: Elements from that one to the end of the row; 0 or less: there is nothing.
    """

    address: Int64
    left: Int32
    vector: Vector

    def has(self, first: Int32) -> Boolean:
        return self.left > first

    def load(self, first: Int32) -> list:
        """As Float32; zeros behind the end. No other thread writes there meanwhile."""
        vector, loaded = self.vector, []
        cache = "" if vector.is_written else ".nc"
        for offset, count in vector.pieces:
            names = [f"{{$w{i}}}" for i in range(count)]
            zeros = " ".join(f"mov.b{vector.word.width} {name}, 0;" for name in names)
            piece = cute.arch.inline_ptx(
                f"{{ .reg .pred inside; setp.gt.s32 inside, {{$r1}}, {{$r2}}; {zeros} @inside "
                f"ld.global{cache}{VECTOR[count]}.b{vector.word.width} {braced(names)}, "
                f"[{{$r0}} + {offset}]; }}",
                write_only_types=[vector.word] * count,
                read_only_args=[self._at(first), self.left, Int32(first)],
            )
            loaded += [piece] if count == 1 else piece
        return vector.elements(loaded)

    def store(self, first: Int32, values: list) -> None:
        """Float32 values, rounded; nothing behind the end."""
        self.store_words(first, self.vector.packed(values))

    def store_words(self, first: Int32, words: list) -> None:
        """A vector; nothing behind the end."""
        vector = self.vector
        for offset, count in vector.pieces:
            names = [f"{{$r{i + 3}}}" for i in range(count)]
            start = offset // _WORD_BYTES
            cute.arch.inline_ptx(
                f"{{ .reg .pred inside; setp.gt.s32 inside, {{$r1}}, {{$r2}}; @inside "
                f"st.global{VECTOR[count]}.b{vector.word.width} [{{$r0}} + {offset}], "
                f"{braced(names)}; }}",
                read_only_args=[
                    self._at(first), self.left, Int32(first), *words[start : start + count]
                ],
            )  # fmt: skip

    def copy(self, first: Int32, target: "SharedRow") -> None:
        """Starts to copy a vector to the same place of a row in shared memory; zeros behind the
        end."""
        for offset, count in self.vector.pieces:
            size = count * _WORD_BYTES
            cache = "cg" if size == _PIECE_BYTES else "ca"
            cute.arch.inline_ptx(
                f"{{ .reg .pred inside; .reg .b32 size; setp.gt.s32 inside, {{$r1}}, {{$r2}}; "
                f"selp.b32 size, {size}, 0, inside; cp.async.{cache}.shared.global "
                f"[{{$r3}} + {offset}], [{{$r0}} + {offset}], {size}, size; }}",
                read_only_args=[self._at(first), self.left, Int32(first), target.at(first)],
            )

    def _at(self, first: Int32) -> Int64:
        return self.address + Int64(first) * self.vector.element_bytes


@dataclass
class SharedRow:
    """The same in shared memory: a thread reads what it has copied itself."""

    address: Int32
    vector: Vector

    def load(self, first: Int32) -> list:
        """As Float32."""
        loaded = []
        for offset, count in self.vector.pieces:
            names = [f"{{$w{i}}}" for i in range(count)]
            piece = cute.arch.inline_ptx(
                f"ld.shared{VECTOR[count]}.b32 {braced(names)}, [{{$r0}} + {offset}];",
                write_only_types=[Uint32] * count,
                read_only_args=[self.at(first)],
            )
            loaded += [piece] if count == 1 else piece
        return self.vector.elements(loaded)

    def at(self, first: Int32) -> Int32:
        return self.address + first * self.vector.element_bytes


@dataclass
class SummedRow:
    """The sum of two rows, rounded to the type of the second."""

    row: GlobalRow | SharedRow
    other: GlobalRow | SharedRow

    def load(self, first: Int32) -> list:
        """As Float32."""
        return self.other.vector.elements(self.words(first))

    def words(self, first: Int32) -> list:
        """As it is stored."""
        values = zip(self.row.load(first), self.other.load(first), strict=True)
        return self.other.vector.packed([a + b for a, b in values])


def matrix_row(
    mX: cute.Tensor, row: Int32, column: Int32, end: Int32, count: int, is_written: bool = False
) -> GlobalRow:
    """From a column of a row of (M, N) on, in vectors of `count`; of nothing if the row is not
    before `end`."""
    vector = Vector(count, mX.element_type, is_written)
    left = (mX.shape[1] - column) * Int32(row < end)
    offset = Int64(row) * mX.stride[0] + column
    return GlobalRow(mX.iterator.toint() + offset * vector.element_bytes, left, vector)


def single_row(mX: cute.Tensor, column: Int32, count: int) -> GlobalRow:
    """From a column of (N,) on, in vectors of `count`."""
    vector = Vector(count, mX.element_type)
    address = mX.iterator.toint() + Int64(column) * vector.element_bytes
    return GlobalRow(address, mX.shape[0] - column, vector)
