"""Shared memory of blocks whose warps run on their own, with every access checked for its order.

Faults are accesses outside of it, reads of bytes never written, and two accesses to a byte, one of
them a write, of which neither happens before the other: by warps, by bulk copies, by wgmma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from support.ptx.errors import FaultError
from support.ptx.memory import NOBODY, POISON, WARP, Accesses, Copies, write_rows
from support.ptx.order import ON_ITS_WAY, Order, agents_of, mark

GRANULE = 16  # bytes that the async proxy reads and writes together
_WORD = 4  # bytes that share a mark of who has read them
_ALIGNMENT = 1024

#: A block's shared memory in addresses of the cluster's window: rank + 1, above this many bits.
RANK_SHIFT = 24


@dataclass(eq=False)
class AsyncRead:
    """By wgmma or a bulk store, which is not over until the warps have waited for it."""

    what: str
    granules: np.ndarray
    warps: set[int]


class OrderedSharedMemory:
    """Of all blocks, `size` bytes each.

    Bytes and granules are numbered through all blocks.

    Args:
        block_of_rank: The block at a rank of a block's cluster; a KeyError if there is none, a
            ValueError if it must not be used any more.
    """

    def __init__(
        self,
        order: Order,
        size: int,
        blocks: int,
        threads_per_block: int,
        block_of_rank: Callable[[int, int], int],
    ) -> None:
        self.size = size
        self.order = order
        self.pitch = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._block_of_rank = block_of_rank
        self._threads_per_block = threads_per_block
        self._warps_per_block = threads_per_block // WARP
        total = self.pitch * blocks
        self.bytes = np.full(total, POISON, np.uint8)
        self._writes = np.zeros(total, np.int64)
        self._reads = np.zeros((self._warps_per_block, total // _WORD), np.int32)
        self._reads_by_threads = np.zeros_like(self._reads)  # the same without asynchronous ones
        self._remote_reads: dict[int, dict[int, int]] = {}  # by word: counts of warps elsewhere
        self._async_readers = np.zeros(total // GRANULE, np.int16)
        self._async_reads: list[AsyncRead] = []
        self._barriers = np.zeros(total // 8, bool)
        self._copies: list[Copies] = []
        self._groups = np.zeros(blocks * threads_per_block, np.int64)  # committed by each thread
        self._copying = order.new_agent()

    # Addresses -----------------------------------------------------------------------------------

    def position(self, address: int, block: int, size: int) -> int:
        """The first byte behind an address that a thread of `block` uses.

        Raises ValueError.
        """
        owner = block
        if rank := address >> RANK_SHIFT:
            try:
                owner = self._block_of_rank(block, rank - 1)
            except KeyError:
                raise ValueError(f"{address:#x} is no address of the cluster") from None
        offset = address & (1 << RANK_SHIFT) - 1
        if not 0 <= offset <= self.size - size:
            raise ValueError(f"{offset:#x} is outside of {self.size} bytes of shared memory")
        return owner * self.pitch + offset

    def block_at(self, position: int) -> int:
        return position // self.pitch

    def _accesses(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> Accesses:
        blocks = threads // self._threads_per_block
        if (addresses >> RANK_SHIFT).any():
            pairs = zip(addresses.tolist(), blocks.tolist(), strict=True)
            try:
                positions = np.array([self.position(a, b, size) for a, b in pairs], np.int64)
            except ValueError as error:
                raise FaultError(int(threads[0]), str(error)) from None
            return Accesses.to(positions, size, threads, 0)
        accesses = Accesses.to(addresses, size, threads, -blocks * self.pitch)
        inside = (addresses >= 0) & (addresses + size <= self.size)
        accesses.require(inside[:, None], f"is outside of {self.size} bytes of shared memory")
        return accesses

    def _words(self, accesses: Accesses) -> np.ndarray:
        """(accesses, words)"""
        first = accesses.rows * accesses.size // _WORD
        return first[:, None] + np.arange(max(accesses.size // _WORD, 1))

    # Generic proxy -------------------------------------------------------------------------------

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
        warps = threads // WARP
        marks = accesses.read(self._writes)
        accesses.require((marks != NOBODY) | unused, "reads what was never written")
        self._require_writes_observed("reads", accesses, marks, unused)
        words, counts = self._words(accesses), self.order.counts(warps)
        own = accesses.rows * size // self.pitch == warps // self._warps_per_block
        place = (warps[own] % self._warps_per_block)[:, None], words[own]
        self._reads[place] = self._reads_by_threads[place] = counts[own, None]
        for at in np.flatnonzero(~own).tolist():
            for word in words[at].tolist():
                self._remote_reads.setdefault(word, {})[int(warps[at])] = int(counts[at])
        return accesses.read(self.bytes)

    def store(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        accesses = self._accesses(addresses, data.shape[1], threads)
        warps = threads // WARP
        marks = accesses.read(self._writes)
        self._require_writes_observed("writes", accesses, marks)
        self._require_reads_observed(accesses.rows * accesses.size, self._words(accesses), threads)
        granules = accesses.rows * accesses.size // GRANULE
        self._require_no_async_read(granules, int(threads[0]))
        if self._barriers[accesses.rows * accesses.size // 8].any():
            raise FaultError(int(threads[0]), "writes over an mbarrier")
        accesses.write(self._writes, self.order.marks(warps)[:, None])
        accesses.write(self.bytes, data)
        accesses.require(accesses.read(self.bytes) == data, "writes what another thread writes")

    def _require_writes_observed(
        self,
        verb: str,
        accesses: Accesses,
        marks: np.ndarray,
        unused: np.ndarray | None = None,
    ) -> None:
        if (marks == NOBODY).all():
            return
        warps = accesses.threads // WARP
        if (marks == marks[:, :1]).all():  # in the usual case, all bytes of an access are alike
            marks = marks[:, :1]
        observed = self.order.observed(warps[:, None], marks)
        if not observed.all():
            wrong = ~observed if unused is None else ~observed & ~unused
            if wrong.any():
                at = np.broadcast_to(wrong, (len(marks), accesses.size))
                accesses.require(~at, self._reason(verb, np.broadcast_to(marks, at.shape)[at][0]))

    def _reason(self, verb: str, mark_: int) -> str:
        agent = int(agents_of(mark_))
        if mark_ & ON_ITS_WAY == ON_ITS_WAY:
            return f"{verb} what an asynchronous copy is on its way to"
        if agent < self.order.warps:
            return f"{verb} what another warp writes, with no barrier in between"
        return f"{verb} what an asynchronous copy wrote, without having waited for its mbarrier"

    def _require_reads_observed(
        self, positions: np.ndarray, words: np.ndarray, threads: np.ndarray
    ) -> None:
        """`words`: (accesses, words)"""
        self._require_remote_reads_observed(words, threads)
        counts = self._reads.take(words, axis=1)  # (warps of the block, accesses, words)
        if not counts.any():
            return
        first = positions // self.pitch * self._warps_per_block
        readers = first + np.arange(self._warps_per_block)[:, None]  # (warps, accesses)
        writers = threads // WARP
        latest = counts.max(axis=2)
        fine = (latest <= self.order.seen(writers, readers)) | (readers == writers)
        if not fine.all():
            self._refuse_write(int(threads[np.argwhere(~fine)[0][1]]))

    def _require_remote_reads_observed(self, words: np.ndarray, threads: np.ndarray) -> None:
        """Those by warps of other blocks."""
        if not self._remote_reads:
            return
        for thread, read in zip(threads.tolist(), words.tolist(), strict=True):
            for word in read:
                for warp, count in self._remote_reads.get(word, {}).items():
                    if count > self.order.seen(thread // WARP, warp):
                        self._refuse_write(thread)

    def _refuse_write(self, thread: int) -> None:
        raise FaultError(thread, "writes what another warp reads, with no barrier in between")

    def _require_no_async_read(self, granules: np.ndarray, thread: int) -> None:
        if self._async_readers[granules].any():
            for read in self._async_reads:
                if np.isin(read.granules, granules).any():
                    raise FaultError(thread, f"writes what {read.what} still reads")

    def start_store(
        self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray, agent: int
    ) -> Copies:
        """Bytes that may arrive at any time from now on, and complete on the mbarrier `agent`."""
        self.store(addresses, np.full_like(data, POISON), threads)
        accesses = self._accesses(addresses, data.shape[1], threads)
        accesses.write(self._writes, mark(agent, ON_ITS_WAY))
        return Copies(accesses, self._groups[threads], data)

    # cp.async ------------------------------------------------------------------------------------

    def start_copy(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        """The bytes may arrive at any time from now on."""
        self.store(addresses, np.full_like(data, POISON), threads)
        accesses = self._accesses(addresses, data.shape[1], threads)
        accesses.write(self._writes, mark(self._copying, ON_ITS_WAY))
        self._copies.append(Copies(accesses, self._groups[threads], data))

    def commit_copies(self, threads: np.ndarray) -> None:
        self._groups[threads] += 1

    def await_copies(self, threads: np.ndarray, pending: int | None) -> None:
        """All but the last `pending` groups arrive, as if the threads that wait had stored them;
        None: also what is not committed."""
        waiting = np.zeros(len(self._groups), bool)
        waiting[threads] = True
        left = []
        for copies in self._copies:
            now, later = copies.arriving(waiting, self._groups, pending)
            warps = now.accesses.threads // WARP
            now.accesses.write(self._writes, self.order.marks(warps)[:, None])
            now.accesses.write(self.bytes, now.data)
            if later.groups.size:
                left.append(later)
        self._copies = left

    def take_copies(self, thread: int) -> list[Copies]:
        """Those of a thread that are on their way: the caller will finish them."""
        taken, left = [], []
        for copies in self._copies:
            own = copies.accesses.threads == thread
            taken.append(copies.part(own))
            left.append(copies.part(~own))
        self._copies = [copies for copies in left if copies.groups.size]
        return [copies for copies in taken if copies.groups.size]

    def finish_copies(self, taken: list[Copies], agent: int, count: int) -> None:
        """They arrive; `count`: the agent's, once they may be read."""
        for copies in taken:
            copies.accesses.write(self._writes, mark(agent, count))
            copies.accesses.write(self.bytes, copies.data)

    # Async proxy ---------------------------------------------------------------------------------

    def start_read(
        self,
        what: str,
        granules: np.ndarray,
        warps: Iterable[int],
        thread: int,
        *,
        may_be_unwritten: bool = False,
    ) -> AsyncRead:
        """By instructions that these warps have issued together.

        may_be_unwritten: Bytes that were never written are POISON, and no fault.
        """
        marks = self._granules(self._writes, granules)
        written = marks[marks != NOBODY]
        if written.size < marks.size and not may_be_unwritten:
            raise FaultError(thread, "reads what was never written")
        kinds = _distinct(written) if written.size else written
        for warp in warps:
            unseen = kinds[~self.order.observed(warp, kinds)]
            if unseen.size:
                raise FaultError(thread, self._reason("reads", unseen[0]))
            if not self.order.fenced(warp, kinds).all():
                raise FaultError(
                    thread, "reads what was written without fence.proxy.async behind it"
                )
        read = AsyncRead(what, granules, set(warps))
        self._async_readers[granules] += 1
        self._async_reads.append(read)
        return read

    def read(self, granules: np.ndarray) -> np.ndarray:
        """(..., 16) bytes, as they are now."""
        return self._granules(self.bytes, granules)

    def finish_read(self, read: AsyncRead, warp: int) -> None:
        """The warp has waited for it."""
        if warp not in read.warps:
            return
        words, count = self._reads[warp % self._warps_per_block], self.order.counts([warp])[0]
        write_rows(words, read.granules, GRANULE // _WORD, count)
        read.warps.remove(warp)
        if not read.warps:
            self._async_readers[read.granules] -= 1
            self._async_reads.remove(read)

    def start_write(self, granules: np.ndarray, warp: int, agent: int, thread: int) -> None:
        """A copy that completes on the mbarrier `agent` may arrive at any time from now on."""
        kinds = _distinct(self._granules(self._writes, granules))
        unseen = kinds[~self.order.observed(warp, kinds)]
        if unseen.size:
            raise FaultError(thread, self._reason("writes", unseen[0]))
        if not self.order.fenced(warp, kinds).all():
            raise FaultError(
                thread, "overwrites what was written without fence.proxy.async behind it"
            )
        words = granules[:, None] * (GRANULE // _WORD) + np.arange(GRANULE // _WORD)
        threads = np.full(len(granules), thread)
        self._require_no_async_read(granules, thread)
        self._require_reads_observed(granules * GRANULE, words, threads)
        self._require_reads_fenced(granules, words, warp, thread)
        if self._barriers.reshape(-1, GRANULE // 8)[granules].any():
            raise FaultError(thread, "writes over an mbarrier")
        self._write_granules(granules, np.uint8(POISON), mark(agent, ON_ITS_WAY))

    def _require_reads_fenced(
        self, granules: np.ndarray, words: np.ndarray, warp: int, thread: int
    ) -> None:
        """A load that nothing has waited for yet may be behind what TMA writes, even if the warp
        says already that it has read."""
        counts = self._reads_by_threads.take(words, axis=1)  # (warps of the block, granules, words)
        blocks = granules[:, None] * GRANULE // self.pitch
        for own in np.flatnonzero(counts.any(axis=(1, 2))).tolist():
            marks = mark(blocks * self._warps_per_block + own, counts[own].astype(np.int64))
            if not self.order.fenced(warp, marks).all():
                raise FaultError(
                    thread, "overwrites what was read without fence.proxy.async behind it"
                )

    def finish_write(self, granules: np.ndarray, data: np.ndarray, agent: int, count: int) -> None:
        """`data`: (granules, 16) bytes; `count`: the agent's, once they may be read."""
        self._write_granules(granules, data, mark(agent, count))

    def _write_granules(self, granules: np.ndarray, data: np.ndarray, marked: int) -> None:
        write_rows(self.bytes, granules, GRANULE, data)
        write_rows(self._writes, granules, GRANULE, marked)

    @staticmethod
    def _granules(table: np.ndarray, granules: np.ndarray) -> np.ndarray:
        return table.reshape(-1, GRANULE).take(granules, axis=0)

    # Barriers ------------------------------------------------------------------------------------

    def reserve_barrier(self, position: int, reserved: bool = True) -> None:
        self._barriers[position // 8] = reserved

    def reads_in_progress(self, block: int) -> list[str]:
        """By whom, of the block's memory."""
        first = block * self.pitch // GRANULE
        last = first + self.pitch // GRANULE
        return [
            read.what
            for read in self._async_reads
            if ((read.granules >= first) & (read.granules < last)).any()
        ]


def _distinct(marks: np.ndarray) -> np.ndarray:
    """Of which there is often but one."""
    first = marks.flat[0]
    return np.array([first]) if (marks == first).all() else np.unique(marks)
