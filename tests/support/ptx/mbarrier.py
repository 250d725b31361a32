"""mbarriers: phases that are complete when all have arrived and all bytes announced have landed."""

from __future__ import annotations

from dataclasses import dataclass

from support.ptx.order import Order, View

MOST = (1 << 20) - 1  # arrivals of a phase, bytes on their way


class BarrierError(Exception):
    """An mbarrier is used as it must not be."""


@dataclass(eq=False)
class Barrier:
    """One mbarrier.

    Attributes:
        count: Arrivals that complete a phase.
        pending: Arrivals that are missing.
        bytes: Announced and not landed; negative while some have landed before they are announced.
        phase: Counted from zero.
        agent: Its number in the order of things.
    """

    order: Order
    count: int
    agent: int
    initialised: int  # mark of the initialisation
    block: int
    offset: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST:
            raise BarrierError(f"an mbarrier of {self.count} arrivals")
        self.pending = self.count
        self._arrived: View = self.order.empty()
        self._complete: View = self.order.empty()

    def arrive(self, count: int, view: View | None) -> None:
        """`view`: what the arriving warp releases."""
        if count > self.pending:
            raise BarrierError(
                f"arrives {count} times at {self}, which waits for {self.pending} more arrivals"
            )
        self.pending -= count
        if view is not None:
            if self._arrived.seen.size < view.seen.size:
                self._arrived = self.order.grown(self._arrived)
            self._arrived.join(view)
        self._advance()

    def expect(self, size: int) -> None:
        self._add(size)

    def land(self, size: int) -> None:
        """complete_tx."""
        self._add(-size)
        self._advance()

    def _add(self, size: int) -> None:
        self.bytes += size
        if abs(self.bytes) > MOST:
            raise BarrierError(f"{self.bytes} bytes are pending at {self}; at most {MOST} can be")

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self._complete = self.order.grown(self._arrived)
            self._complete.seen[self.agent] = self.phase

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete: the one before the current one is."""
        return (self.phase & 1) != parity

    @property
    def view(self) -> View:
        """What is known to who has seen the last phase complete."""
        return self._complete

    def __str__(self) -> str:
        return f"the mbarrier at {self.offset:#x} of block {self.block}"

    def state(self) -> str:
        return (
            f"{self}, phase {self.phase}: {self.pending} of {self.count} arrivals and "
            f"{self.bytes} bytes are missing"
        )
