"""Which accesses happen before what a warp does: a vector clock per warp.

An agent is a warp, or an mbarrier on behalf of the copies that complete on it. Agents count: warps
the times that they released something, mbarriers their phases. An access is marked by its agent and
the agent's count; a warp may rely on it once it has learnt of that count through barriers,
mbarriers or atomics.

A second clock holds what warps have also fenced for the async proxy: bulk copies and wgmma use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SHIFT = 40
_COUNT = (1 << _SHIFT) - 1
#: The count of what has not happened yet.
ON_ITS_WAY = _COUNT


@dataclass
class View:
    """What is known of every agent's count, and of the counts fenced for the async proxy."""

    seen: np.ndarray
    fenced: np.ndarray

    def join(self, other: View) -> None:
        for mine, theirs in ((self.seen, other.seen), (self.fenced, other.fenced)):
            np.maximum(mine[: theirs.size], theirs, out=mine[: theirs.size])


def mark(agent: int, count: int) -> int:
    return agent << _SHIFT | count


def agents_of(marks: np.ndarray) -> np.ndarray:
    return marks >> _SHIFT


class Order:
    """Of `warps` warps; further agents are added on the way."""

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self._agents = warps
        capacity = 2 * warps + 256
        self._seen = np.zeros((warps, capacity), np.int64)
        self._fenced = np.zeros((warps, capacity), np.int64)
        np.fill_diagonal(self._seen, 1)  # so that no mark of the first warp is NOBODY
        self._released: dict[tuple[int, str], View] = {}  # at a warp's last fence, by its scope
        self._pending: dict[int, View] = {}  # what a warp's next fence acquires

    def new_agent(self) -> int:
        self._agents += 1
        if self._agents > self._seen.shape[1]:
            more = np.zeros_like(self._seen)
            self._seen = np.append(self._seen, more, axis=1)
            self._fenced = np.append(self._fenced, more, axis=1)
        return self._agents - 1

    def empty(self) -> View:
        size = self._seen.shape[1]
        return View(np.zeros(size, np.int64), np.zeros(size, np.int64))

    def grown(self, view: View) -> View:
        """The view, with room for all agents."""
        grown = self.empty()
        grown.join(view)
        return grown

    # Synchronisation -----------------------------------------------------------------------------

    def release(self, warp: int) -> View:
        """What others learn who acquire; later accesses of the warp are not part of it."""
        view = View(self._seen[warp].copy(), self._fenced[warp].copy())
        self._seen[warp, warp] += 1
        return view

    def acquire(self, warp: int, view: View) -> None:
        View(self._seen[warp], self._fenced[warp]).join(view)

    def fence_async(self, warp: int) -> None:
        """fence.proxy.async: of the warp's own writes so far."""
        self._fenced[warp, warp] = self._seen[warp, warp]
        self._seen[warp, warp] += 1

    def fence(self, warp: int, scope: str) -> None:
        """Acquires what the warp's relaxed loads and atomics have met; relaxed ones, and relaxed
        arrivals, from now on release what it has seen. Scope: "cluster" or "gpu"."""
        if warp in self._pending:
            self.acquire(warp, self._pending.pop(warp))
        view = self.release(warp)
        for reached in ("cluster", "gpu") if scope == "gpu" else ("cluster",):
            self._released[warp, reached] = view

    def released(self, warp: int, scope: str = "gpu") -> View:
        """At the last fence of this scope or a wider one."""
        return self._released.get((warp, scope)) or self.empty()

    def observe(self, warp: int, view: View) -> None:
        """What the warp acquires at its next fence."""
        known = self.grown(view)
        if warp in self._pending:
            known.join(self._pending[warp])
        self._pending[warp] = known

    # Marks ---------------------------------------------------------------------------------------

    def counts(self, warps: np.ndarray | Sequence[int]) -> np.ndarray:
        return self._seen[warps, warps]

    def marks(self, warps: np.ndarray) -> np.ndarray:
        """Of accesses that these warps make now."""
        return warps.astype(np.int64) << _SHIFT | self.counts(warps)

    def observed(self, warps: np.ndarray | int, marks: np.ndarray) -> np.ndarray:
        """Whether warps may rely on accesses; on none (NOBODY) they may."""
        return self._covered(self._seen, warps, marks)

    def fenced(self, warps: np.ndarray | int, marks: np.ndarray) -> np.ndarray:
        """The same of accesses through the async proxy."""
        by_warp = (marks >> _SHIFT) < self.warps
        fenced = self._covered(self._fenced, warps, marks)
        return np.where(by_warp, fenced, self.observed(warps, marks))

    def relies_on(self, warp: int, marked: int, *, fenced: bool = False) -> bool:
        """Whether the warp may rely on one access; through the async proxy, if it is to be `fenced`
        and a warp has made it."""
        agent, count = marked >> _SHIFT, marked & _COUNT
        clocks = self._fenced if fenced and agent < self.warps else self._seen
        return bool(clocks[warp, agent] >= count)

    def seen(self, warps: np.ndarray | int, agents: np.ndarray | slice) -> np.ndarray:
        return self._seen[warps, agents]

    @staticmethod
    def _covered(clocks: np.ndarray, warps: np.ndarray | int, marks: np.ndarray) -> np.ndarray:
        # NOBODY is a warp's count of zero, which is behind all clocks.
        return clocks[warps, marks >> _SHIFT] >= (marks & _COUNT)
