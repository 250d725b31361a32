"""Global and shared memory, which check every access.

Both work on many accesses at once: `addresses` holds one each, `threads` who makes it, numbered
through all blocks. Accesses are aligned to their size, so that memory is a table whose rows are as
long as one access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from support.ptx.errors import EmulationError, FaultError

POISON = 0xFF  # all ones are a NaN in every floating-point type
WARP = 32
WARPS = 64  # more than a block has

#: Of who marks what is theirs, counted from 1: tables of marks are zeros, which the system maps to
#: memory where they are touched.
NOBODY = 0
_LONGEST = 16  # bytes of an access
EARLY = "accesses global memory in front of griddepcontrol.wait"


def write_rows(table: np.ndarray, rows: np.ndarray, size: int, values: Any) -> None:
    """`values`: (rows, size) or (rows, 1), or one for all."""
    entries = np.empty((len(values) if np.ndim(values) else 1, size), table.dtype)
    entries[...] = values
    # As one value per row, which numpy assigns many times faster than rows of values.
    whole = f"V{size * table.itemsize}"
    table.view(whole)[rows] = entries.view(whole)[:, 0]


@dataclass(frozen=True)
class Accesses:
    """Made at once by `threads`, to `size` bytes each, which are a row of memory."""

    threads: np.ndarray
    addresses: np.ndarray
    rows: np.ndarray
    size: int

    @classmethod
    def to(
        cls, addresses: np.ndarray, size: int, threads: np.ndarray, origin: int | np.ndarray
    ) -> Accesses:
        """`origin` is the address of the first row."""
        wrong = addresses % size != 0
        if wrong.any():
            at = int(wrong.argmax())
            reason = f"has address {addresses[at]:#x}, no multiple of {size} bytes"
            raise FaultError(int(threads[at]), reason)
        return cls(threads, addresses, (addresses - origin) // size, size)

    def part(self, chosen: np.ndarray) -> Accesses:
        return Accesses(self.threads[chosen], self.addresses[chosen], self.rows[chosen], self.size)

    def read(self, table: np.ndarray) -> np.ndarray:
        """(accesses, bytes) out of a table with one entry per byte of memory."""
        return table.reshape(-1, self.size).take(self.rows, axis=0)

    def write(self, table: np.ndarray, values: np.ndarray | bool) -> None:
        write_rows(table, self.rows, self.size, values)

    def require(self, fine: np.ndarray, reason: str) -> None:
        """Fault at the first of (accesses, bytes) that is not fine."""
        if not fine.all():
            access, byte = np.argwhere(~fine)[0]
            address = int(self.addresses[access] + byte)
            raise FaultError(int(self.threads[access]), f"{reason}, at {address:#x}")


@dataclass(frozen=True)
class Placed:
    """A tensor in global memory."""

    name: str
    pointer: int
    storage: slice  # of the memory's bytes
    elements: np.ndarray  # of these bytes, whether they belong to elements


class GlobalMemory:
    """Tensors between poisoned gaps in one buffer.

    An access to a byte that is no element of a tensor is a fault, padding between rows included;
    so is a write to an input, a read of an output, and a second write by another thread.
    """

    BASE = 0x7F00_0000_0000  # no 32-bit calculation gets this right
    GAP = 4096  # addresses are multiples of it, plus the alignment asked for
    CAPACITY = 1 << 26  # of tables to begin with; no tensor has what is behind the last one

    def __init__(self) -> None:
        self._end = 0
        self.bytes = np.zeros(self.CAPACITY, np.uint8)
        self._readable = np.zeros(self.CAPACITY, bool)
        self._writable = np.zeros(self.CAPACITY, bool)
        self._scratch = np.zeros(self.CAPACITY, bool)
        self._writer = np.zeros(self.CAPACITY, np.int32)  # thread + 1
        #: What decides whether accesses to scratch are ordered; it is told of each.
        self.order: Any = None

    def place(
        self,
        name: str,
        storage: np.ndarray,
        offset: int,
        shape: Sequence[int],
        strides: Sequence[int],
        itemsize: int,
        *,
        alignment: int,
        output: bool = False,
        scratch: bool = False,
        whole_pieces: bool = False,
    ) -> Placed:
        """Copy a tensor in; its address is a multiple of `alignment` and of no more.

        Args:
            storage: Bytes that hold its elements, and perhaps more.
            offset: Of the first element, in bytes.
            strides: In bytes.
            output: It is written and not read.
            scratch: It is read and written, by threads that order what they do.
            whole_pieces: What lies between its elements may be read with them, in aligned pieces
                of 16 bytes; it is poison, if it is so in the storage.
        """
        elements = np.zeros(storage.size, bool)
        for byte in range(itemsize if 0 not in shape else 0):
            np.lib.stride_tricks.as_strided(elements[offset + byte :], shape, strides)[...] = True
        begin = self.GAP * ((self._end + offset) // self.GAP + 2) + alignment - offset
        end = self.GAP * ((begin + storage.size) // self.GAP + 2)
        for table in ("bytes", "_readable", "_writable", "_scratch", "_writer"):
            setattr(self, table, self._with_room(getattr(self, table), end))
        inside = slice(begin, begin + storage.size)
        self.bytes[self._end : begin] = POISON
        self.bytes[inside] = storage
        self.bytes[inside.stop : end] = POISON
        self._end = end
        if output or scratch:
            self._writable[inside] = elements
        if not output:
            self._readable[inside] = elements
        if whole_pieces and elements.any():
            first, last = begin + np.flatnonzero(elements)[[0, -1]]
            pieces = self._readable[:end].reshape(-1, _LONGEST)
            held = np.repeat(pieces.any(axis=1), _LONGEST)[first:last]
            self._readable[first:last] |= held
        self._scratch[inside] = scratch
        return Placed(name, self.BASE + begin + offset, inside, elements)

    def _with_room(self, table: np.ndarray, end: int) -> np.ndarray:
        if end <= len(table):
            return table
        grown = np.zeros(max(2 * len(table), end), table.dtype)
        grown[: self._end] = table[: self._end]
        return grown

    def storage(self, placed: Placed) -> np.ndarray:
        """The bytes of the tensor's storage as they are now."""
        return self.bytes[placed.storage]

    def unwritten(self, placed: Placed) -> int:
        """How many bytes of the tensor's elements nobody has written."""
        writer = self._writer[placed.storage]
        return int((placed.elements & (writer == NOBODY)).sum())

    def load(
        self,
        addresses: np.ndarray,
        size: int,
        threads: np.ndarray,
        inside: np.ndarray | None = None,
    ) -> np.ndarray:
        """(accesses, size) bytes, of which `inside` says how many are read; zero behind them."""
        accesses = self._accesses(addresses, size, threads)
        allowed = accesses.read(self._readable)
        if inside is None:
            accesses.require(allowed, "reads what is no element of an input")
            if self._is_scratch(accesses):
                self.order.note_load(accesses)
            return accesses.read(self.bytes)
        wanted = np.arange(size) < inside[:, None]
        accesses.require(allowed | ~wanted, "reads what is no element of an input")
        return np.where(wanted, accesses.read(self.bytes), np.uint8(0))

    def store(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        accesses = self._accesses(addresses, data.shape[1], threads)
        accesses.require(accesses.read(self._writable), "writes what is no element of an output")
        if self._is_scratch(accesses):
            self.order.note_store(accesses)
            accesses.write(self.bytes, data)
            return
        before, mine = accesses.read(self._writer), threads[:, None] + 1
        accesses.require((before == NOBODY) | (before == mine), "writes what another wrote")
        accesses.write(self._writer, mine)
        accesses.require(accesses.read(self._writer) == mine, "writes what another writes")
        accesses.write(self.bytes, data)

    def _is_scratch(self, accesses: Accesses) -> bool:
        return self.order is not None and bool(accesses.read(self._scratch).all())

    def holds_for_all(self, index: np.ndarray) -> np.ndarray:
        """Of bytes, whether no kernel writes them: they are of inputs alone."""
        found: np.ndarray = self._readable[index] & ~self._writable[index]
        return found

    # Atomics, and loads and stores that are not weak ----------------------------------------------

    def load_strong(
        self, addresses: np.ndarray, size: int, threads: np.ndarray, *, writes: bool
    ) -> np.ndarray:
        """`writes`: a store of the same bytes follows."""
        accesses = self._accesses(addresses, size, threads)
        allowed = accesses.read(self._writable if writes else self._readable)
        what = "writes what is no element of an output"
        accesses.require(allowed, what if writes else "reads what is no element of an input")
        self.order.note_strong(accesses, writes=writes)
        return accesses.read(self.bytes)

    def store_strong(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        accesses = self._accesses(addresses, data.shape[1], threads)
        accesses.write(self._writer, threads[:, None] + 1)
        accesses.write(self.bytes, data)

    # Rows of any length, which bulk copies move ---------------------------------------------------

    def load_rows(
        self, addresses: np.ndarray, columns: slice, row_bytes: int, thread: int
    ) -> np.ndarray:
        """(rows, row_bytes): zero but for the columns, in rows whose address is not -1.

        An address is that of column 0, which may be outside of the tensor.
        """
        rows = np.zeros((len(addresses), row_bytes), np.uint8)
        inside = addresses != -1
        if inside.any() and columns.stop > columns.start:
            size = columns.stop - columns.start
            index = self._index(addresses[inside] + columns.start, size)
            fine = self._readable[index]
            self._require(fine, index, "reads what is no element of an input", thread)
            rows[inside, columns] = self.bytes[index]
        return rows

    def store_rows(
        self, addresses: np.ndarray, data: np.ndarray, thread: int, reduction: str | None = None
    ) -> None:
        if reduction is not None:
            raise FaultError(thread, f"reduces by {reduction}, which the emulator does not know")
        index = self._index(addresses, data.shape[1])
        fine = self._writable[index]
        self._require(fine, index, "writes what is no element of an output", thread)
        unwritten = self._writer[index] == NOBODY
        self._require(unwritten, index, "writes what another wrote", thread)
        self._writer[index] = thread + 1
        self.bytes[index] = data

    def add_floats(self, address: int, data: np.ndarray, thread: int) -> None:
        """float32 numbers to those that are there, each by an atomic of its own."""
        addresses = address + np.arange(0, data.size, 4)
        threads = np.full(len(addresses), thread)
        before = self.load_strong(addresses, 4, threads, writes=True)
        sums = before.view(np.float32) + data.view(np.float32)[:, None]
        self.store_strong(addresses, sums.view(np.uint8), threads)

    def _index(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """(rows, size); what is outside of the buffer is its first byte, a gap."""
        index = (addresses - self.BASE)[:, None] + np.arange(size)
        return np.where((index >= 0) & (index < len(self.bytes)), index, 0)

    def _require(self, fine: np.ndarray, index: np.ndarray, reason: str, thread: int) -> None:
        if not fine.all():
            raise FaultError(thread, f"{reason}, at {self.BASE + int(index[~fine][0]):#x}")

    def _accesses(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> Accesses:
        """What is outside of the buffer becomes an access to its first gap."""
        accesses = Accesses.to(addresses, size, threads, self.BASE)
        within = (accesses.rows >= 0) & (accesses.rows < len(self.bytes) // size)
        return replace(accesses, rows=np.where(within, accesses.rows, 0))


class Inputs:
    """What of global memory no kernel of a call writes."""

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory

    def load(
        self,
        addresses: np.ndarray,
        size: int,
        threads: np.ndarray,
        inside: np.ndarray | None = None,
    ) -> np.ndarray:
        wanted = np.arange(size) < (size if inside is None else inside[:, None])
        self._require_inputs(addresses, size, int(threads[0]), wanted)
        return self.memory.load(addresses, size, threads, inside)

    def load_rows(
        self, addresses: np.ndarray, columns: slice, row_bytes: int, thread: int
    ) -> np.ndarray:
        size = max(columns.stop - columns.start, 0)
        inside = addresses[addresses != -1] + columns.start
        self._require_inputs(inside, size, thread, np.ones(size, bool))
        return self.memory.load_rows(addresses, columns, row_bytes, thread)

    def _require_inputs(
        self, addresses: np.ndarray, size: int, thread: int, wanted: np.ndarray
    ) -> None:
        index = self.memory._index(addresses, size)
        fine = self.memory.holds_for_all(index) | ~wanted
        self.memory._require(fine, index, f"{EARLY}, which other kernels of a call write", thread)

    def __getattr__(self, name: str) -> Any:
        raise EmulationError(f"{EARLY}, and not by a plain load")


@dataclass
class Copies:
    """What one cp.async instruction of several threads has on its way."""

    accesses: Accesses
    groups: np.ndarray  # of each thread, counted from its first
    data: np.ndarray

    def part(self, chosen: np.ndarray) -> Copies:
        return Copies(self.accesses.part(chosen), self.groups[chosen], self.data[chosen])

    def arriving(
        self, waiting: np.ndarray, committed: np.ndarray, pending: int | None
    ) -> tuple[Copies, Copies]:
        """Those that arrive when threads wait for all but the last `pending` groups, and the rest.

        Args:
            waiting: Of all threads, which wait.
            committed: The groups that each has committed.
            pending: None to wait for what is not committed, too.
        """
        copying = self.accesses.threads
        arrived = waiting[copying]
        if pending is not None:
            arrived &= self.groups < committed[copying] - pending
        return self.part(arrived), self.part(~arrived)


class SharedMemory:
    """Of all blocks, `size` bytes each.

    Faults are accesses outside of it, reads of bytes that were never written or that a copy is on
    its way to, and races: two accesses to a byte by different warps with no barrier in between,
    one of them a write. Lanes of one warp are taken to be in step.

    What cp.async copies becomes visible when the copying thread waits for its group.
    """

    def __init__(self, size: int, blocks: int, threads_per_block: int) -> None:
        self.size = size
        self._pitch = -(-size // _LONGEST) * _LONGEST
        self._threads_per_block = threads_per_block
        bytes_ = self._pitch * blocks
        self.bytes = np.full(bytes_, POISON, np.uint8)
        self._written = np.zeros(bytes_, bool)
        self._on_its_way = np.zeros(bytes_, bool)
        self._epoch = 1
        # The last access of each kind: epoch · WARPS + warp for reads, the last number standing
        # for several warps; for writes the same with threads, which are 32 to a warp.
        self._write_mark = np.zeros(bytes_, np.int32)
        self._read_mark = np.zeros(bytes_, np.int32)
        self._groups = np.zeros(blocks * threads_per_block, np.int64)  # committed by each thread
        self._copies: list[Copies] = []

    def barrier(self) -> None:
        """All threads of every block have come together."""
        self._epoch += 1

    def load(
        self,
        addresses: np.ndarray,
        size: int,
        threads: np.ndarray,
        unused: np.ndarray | None = None,
    ) -> np.ndarray:
        """(accesses, size) bytes; those that are unused need not be there."""
        accesses = self._accesses(addresses, size, threads)
        unused = np.zeros(size, bool) if unused is None else unused
        arrived, written = ~accesses.read(self._on_its_way), accesses.read(self._written)
        accesses.require(arrived | unused, "reads what a copy is on its way to")
        accesses.require(written | unused, "reads what was never written")
        writer = np.where(unused, NOBODY, accesses.read(self._write_mark) // WARP)
        self._require_no_race(accesses, writer, "reads what another warp writes")
        self._mark_read(accesses)
        return accesses.read(self.bytes)

    def store(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        accesses = self._accesses(addresses, data.shape[1], threads)
        self._mark_written(accesses)
        self._write(accesses, data)

    def start_copy(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        """cp.async: the bytes may arrive at any time from now on."""
        accesses = self._accesses(addresses, data.shape[1], threads)
        self._mark_written(accesses)
        accesses.write(self._on_its_way, True)
        self._copies.append(Copies(accesses, self._groups[threads], data))

    def commit_copies(self, threads: np.ndarray) -> None:
        self._groups[threads] += 1

    def await_copies(self, threads: np.ndarray, pending: int | None) -> None:
        """All but the last `pending` groups arrive; None: also what is not committed."""
        waiting = np.zeros(len(self._groups), bool)
        waiting[threads] = True
        left = []
        for copies in self._copies:
            now, later = copies.arriving(waiting, self._groups, pending)
            now.accesses.write(self._on_its_way, False)
            self._mark_written(now.accesses)
            self._write(now.accesses, now.data)
            if later.groups.size:
                left.append(later)
        self._copies = left

    def _accesses(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> Accesses:
        block = threads // self._threads_per_block
        accesses = Accesses.to(addresses, size, threads, -block * self._pitch)
        inside = (addresses >= 0) & (addresses + size <= self.size)
        accesses.require(inside[:, None], f"is outside of {self.size} bytes of shared memory")
        return accesses

    def _write(self, accesses: Accesses, data: np.ndarray) -> None:
        accesses.write(self._written, True)
        accesses.write(self.bytes, data)

    # Races -----------------------------------------------------------------------------------

    def _thread_marks(self, accesses: Accesses) -> np.ndarray:
        in_block = accesses.threads % self._threads_per_block
        return (self._epoch * WARPS * WARP + in_block).astype(np.int32)[:, None]

    def _require_no_race(self, accesses: Accesses, marks: np.ndarray, reason: str) -> None:
        mine = self._thread_marks(accesses) // WARP
        fine = (marks < self._epoch * WARPS) | (marks == mine)
        accesses.require(fine, f"{reason}, with no barrier in between")

    def _mark_read(self, accesses: Accesses) -> None:
        mine = self._thread_marks(accesses) // WARP
        several = (self._epoch + 1) * WARPS - 1
        before = accesses.read(self._read_mark)
        others = (before >= self._epoch * WARPS) & (before != mine)
        accesses.write(self._read_mark, np.where(others, several, mine))
        clash = (accesses.read(self._read_mark) != mine).any(axis=1)  # within these accesses
        accesses.part(clash).write(self._read_mark, several)

    def _mark_written(self, accesses: Accesses) -> None:
        on_its_way = accesses.read(self._on_its_way)
        accesses.require(~on_its_way, "writes what a copy is on its way to")
        writer, reader = accesses.read(self._write_mark) // WARP, accesses.read(self._read_mark)
        self._require_no_race(accesses, writer, "writes what another warp writes")
        self._require_no_race(accesses, reader, "writes what another warp reads")
        mine = self._thread_marks(accesses)
        accesses.write(self._write_mark, mine)
        accesses.require(
            accesses.read(self._write_mark) == mine, "writes what another thread writes"
        )
