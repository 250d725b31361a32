"""Global and shared memory, which check every access.

Both work on many accesses at once: `addresses` holds one each, `threads` who makes it. A thread is
numbered through all blocks in global memory and within its block in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from support.ptx.errors import Fault

POISON = 0xFF  # all ones are a NaN in every floating-point type
WARP = 32

_NOBODY = -1


@dataclass(frozen=True)
class _Accesses:
    """Made at once by `threads`, each to some bytes in a row, `offsets` (accesses, bytes)."""

    threads: np.ndarray
    offsets: np.ndarray

    @classmethod
    def to(cls, addresses: np.ndarray, size: int, threads: np.ndarray) -> _Accesses:
        wrong = addresses % size != 0
        if wrong.any():
            at = int(wrong.argmax())
            raise Fault(
                int(threads[at]), f"has address {addresses[at]:#x}, no multiple of {size} bytes"
            )
        return cls(threads, addresses[:, None] + np.arange(size))

    def require(self, fine: np.ndarray, reason: str) -> None:
        """Fault at the first byte that is not fine."""
        if not fine.all():
            access, byte = np.argwhere(~fine)[0]
            offset = int(self.offsets[access, byte])
            raise Fault(int(self.threads[access]), f"{reason}, at {offset:#x}")


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

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        self._readable = np.zeros(0, bool)
        self._writable = np.zeros(0, bool)
        self._writer = np.zeros(0, np.int64)

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
    ) -> Placed:
        """Copy a tensor in; its address is a multiple of `alignment` and of no more.

        Args:
            storage: Bytes that hold its elements, and perhaps more.
            offset: Of the first element, in bytes.
            strides: In bytes.
        """
        elements = np.zeros(storage.size, bool)
        first = np.lib.stride_tricks.as_strided(elements[offset:], shape, strides)
        for byte in range(itemsize if first.size else 0):
            np.lib.stride_tricks.as_strided(elements[offset + byte :], shape, strides)[...] = True
        begin = self.GAP * ((len(self.bytes) + offset) // self.GAP + 2) + alignment - offset
        grow = begin + storage.size + self.GAP - len(self.bytes)
        self.bytes = np.concatenate([self.bytes, np.full(grow, POISON, np.uint8)])
        self._readable, self._writable = (
            np.concatenate([known, np.zeros(grow, bool)])
            for known in (self._readable, self._writable)
        )
        self._writer = np.concatenate([self._writer, np.full(grow, _NOBODY, np.int64)])
        inside = slice(begin, begin + storage.size)
        self.bytes[inside] = storage
        (self._writable if output else self._readable)[inside] = elements
        return Placed(name, self.BASE + begin + offset, inside, elements)

    def storage(self, placed: Placed) -> np.ndarray:
        """The bytes of the tensor's storage as they are now."""
        return self.bytes[placed.storage]

    def unwritten(self, placed: Placed) -> int:
        """How many bytes of the tensor's elements nobody has written."""
        writer = self._writer[placed.storage]
        return int((placed.elements & (writer == _NOBODY)).sum())

    def load(
        self,
        addresses: np.ndarray,
        size: int,
        threads: np.ndarray,
        inside: np.ndarray | None = None,
    ) -> np.ndarray:
        """(accesses, size) bytes, of which `inside` says how many are read; zero behind them."""
        accesses = _Accesses.to(addresses, size, threads)
        wanted = np.full(accesses.offsets.shape, True)
        if inside is not None:
            wanted = np.arange(size) < inside[:, None]
        places, allowed = self._look_up(accesses, self._readable)
        accesses.require(allowed | ~wanted, "reads what is no element of an input")
        return np.where(wanted, self.bytes[places], np.uint8(0))

    def store(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        accesses = _Accesses.to(addresses, data.shape[1], threads)
        places, allowed = self._look_up(accesses, self._writable)
        accesses.require(allowed, "writes what is no element of an output")
        before, threads = self._writer[places], threads[:, None]
        accesses.require((before == _NOBODY) | (before == threads), "writes what another wrote")
        self._writer[places] = threads
        accesses.require(self._writer[places] == threads, "writes what another writes")
        self.bytes[places] = data

    def _look_up(self, accesses: _Accesses, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in the buffer the bytes are, and what the table says of them: no if outside."""
        places = accesses.offsets - self.BASE
        within = (places >= 0) & (places < len(table))
        places = np.where(within, places, 0)
        return places, within & table[places]


@dataclass
class _Copies:
    """What one cp.async instruction of several threads has on its way."""

    threads: np.ndarray
    groups: np.ndarray  # of each thread, counted from its first
    offsets: np.ndarray
    data: np.ndarray

    def part(self, chosen: np.ndarray) -> _Copies:
        return _Copies(
            self.threads[chosen], self.groups[chosen], self.offsets[chosen], self.data[chosen]
        )


class SharedMemory:
    """Of one block.

    Faults are accesses outside of it, reads of bytes that were never written or that a copy is on
    its way to, and races: of two accesses to a byte by different warps with no barrier in between,
    one a write. (Lanes of one warp are taken to be in step.)

    What cp.async copies becomes visible when the copying thread waits for its group.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self._written = np.zeros(size, bool)
        self._on_its_way = np.zeros(size, bool)
        self._epoch = 0
        # The last access of each kind: epoch · _WARPS + warp for reads, the last number standing
        # for several warps; for writes the same with threads, which are 32 to a warp.
        self._write_mark = np.full(size, _NOBODY, np.int32)
        self._read_mark = np.full(size, _NOBODY, np.int32)
        self._groups = np.zeros(threads, np.int64)  # begun by each thread
        self._copies: list[_Copies] = []

    _WARPS = 64

    def barrier(self) -> None:
        """All threads of the block have come together."""
        self._epoch += 1

    def load(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> np.ndarray:
        """(accesses, size) bytes."""
        accesses = self._accesses(addresses, size, threads)
        offsets, warps = accesses.offsets, self._marks(threads // WARP, self._WARPS)
        accesses.require(~self._on_its_way[offsets], "reads what a copy is on its way to")
        accesses.require(self._written[offsets], "reads what was never written")
        self._require_no_race(accesses, self._write_mark[offsets] // WARP, "reads", "writes")
        before, several = self._read_mark[offsets], self._now(self._WARPS) + self._WARPS - 1
        others = (before >= self._now(self._WARPS)) & (before != warps)
        self._read_mark[offsets] = np.where(others, several, warps)
        clashes = self._read_mark[offsets] != warps
        self._read_mark[offsets[clashes]] = several
        return self.bytes[offsets]

    def store(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        accesses = self._accesses(addresses, data.shape[1], threads)
        self._claim(accesses)
        self._write(accesses.offsets, data)

    def start_copy(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        """cp.async: the bytes may arrive at any time from now on."""
        accesses = self._accesses(addresses, data.shape[1], threads)
        self._claim(accesses)
        self._on_its_way[accesses.offsets] = True
        self._copies.append(_Copies(threads, self._groups[threads], accesses.offsets, data))

    def commit_copies(self, threads: np.ndarray) -> None:
        self._groups[threads] += 1

    def await_copies(self, threads: np.ndarray, pending: int | None) -> None:
        """All but the last `pending` groups arrive; None: also what is not committed."""
        waiting = np.zeros(len(self._groups), bool)
        waiting[threads] = True
        left = []
        for copies in self._copies:
            arrived = waiting[copies.threads]
            if pending is not None:
                arrived &= copies.groups < self._groups[copies.threads] - pending
            now, later = copies.part(arrived), copies.part(~arrived)
            self._on_its_way[now.offsets] = False
            self._write_mark[now.offsets] = self._marks(now.threads, self._WARPS * WARP)
            self._write(now.offsets, now.data)
            if later.threads.size:
                left.append(later)
        self._copies = left

    def _accesses(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> _Accesses:
        accesses = _Accesses.to(addresses, size, threads)
        inside = (accesses.offsets >= 0) & (accesses.offsets < len(self.bytes))
        accesses.require(inside, f"is outside of {len(self.bytes)} bytes of shared memory")
        return accesses

    def _now(self, marks: int) -> int:
        return self._epoch * marks

    def _marks(self, who: np.ndarray, marks: int) -> np.ndarray:
        return (self._now(marks) + who).astype(np.int32)[:, None]

    def _claim(self, accesses: _Accesses) -> None:
        """For writing."""
        offsets = accesses.offsets
        accesses.require(~self._on_its_way[offsets], "writes what a copy is on its way to")
        self._require_no_race(accesses, self._write_mark[offsets] // WARP, "writes", "writes")
        self._require_no_race(accesses, self._read_mark[offsets], "writes", "reads")
        mine = self._marks(accesses.threads, self._WARPS * WARP)
        self._write_mark[offsets] = mine
        accesses.require(self._write_mark[offsets] == mine, "writes what another thread writes")

    def _require_no_race(
        self, accesses: _Accesses, marks: np.ndarray, does: str, other_does: str
    ) -> None:
        mine = self._marks(accesses.threads // WARP, self._WARPS)
        fine = (marks < self._now(self._WARPS)) | (marks == mine)
        accesses.require(
            fine, f"{does} what another warp {other_does}, with no barrier in between"
        )

    def _write(self, offsets: np.ndarray, data: np.ndarray) -> None:
        self._written[offsets] = True
        self.bytes[offsets] = data
