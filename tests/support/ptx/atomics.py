"""Accesses to global memory by which threads of different blocks communicate."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from support.ptx.arithmetic import TYPES
from support.ptx.errors import EmulationError
from support.ptx.memory import WARP, Accesses
from support.ptx.order import Order, View
from support.ptx.program import Address, Instruction, Operand, Symbol, Vector
from support.ptx.threads import Mask
from support.ptx.warps import Gang

U64 = TYPES["u64"]


class GlobalOrder:
    """Whether accesses to what is both read and written are ordered.

    Atomics, and loads and stores that are not weak, need not be ordered among themselves; they
    carry what their warp has released to whom they acquire it for.
    """

    def __init__(self, order: Order, size: int) -> None:
        self.order = order
        self._writes = np.zeros(size, np.int64)
        self._strong = np.zeros(size, bool)  # the last write is no weak one
        self._reads = np.zeros(size, np.int64)  # the last one
        self._views: dict[int, View] = {}  # by address

    def note_load(self, accesses: Accesses) -> None:
        """Weak."""
        warps = accesses.threads // WARP
        self._require(accesses, self._writes, "reads what another warp writes")
        accesses.write(self._reads, self.order.marks(warps)[:, None])

    def note_store(self, accesses: Accesses) -> None:
        """Weak."""
        warps = accesses.threads // WARP
        self._require(accesses, self._writes, "writes what another warp writes")
        self._require(accesses, self._reads, "writes what another warp reads")
        accesses.write(self._writes, self.order.marks(warps)[:, None])
        accesses.write(self._strong, False)
        for address in accesses.addresses.tolist():
            self._views.pop(address, None)

    def note_strong(self, accesses: Accesses, *, writes: bool) -> None:
        weak = ~accesses.read(self._strong)
        self._require(accesses, self._writes, "uses what another warp writes", weak)
        if writes:
            warps = accesses.threads // WARP
            self._require(accesses, self._reads, "writes what another warp reads", weak)
            accesses.write(self._writes, self.order.marks(warps)[:, None])
            accesses.write(self._strong, True)

    def _require(
        self,
        accesses: Accesses,
        table: np.ndarray,
        reason: str,
        where: np.ndarray | None = None,
    ) -> None:
        marks = accesses.read(table)
        observed = self.order.observed(accesses.threads[:, None] // WARP, marks)
        if where is not None:
            observed |= ~where
        accesses.require(observed, f"{reason}, and nothing orders them")

    def publish(self, address: int, view: View, *, replace: bool) -> None:
        """`replace`: a store; else it joins what is there, as an atomic does."""
        mine = self.order.grown(view)
        if not replace and address in self._views:
            mine.join(self._views[address])
        self._views[address] = mine

    def acquire(self, address: int, warp: int, *, now: bool) -> None:
        """`now`, or at the warp's next fence."""
        view = self._views.get(address)
        if view is not None:
            (self.order.acquire if now else self.order.observe)(warp, view)


# Instructions -----------------------------------------------------------------------------------


def _add_packed(element: np.dtype) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        sums = a.view(element).astype(np.float32) + b.view(element).astype(np.float32)
        return sums.astype(element).view(a.dtype)

    return add


_OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
    "inc": lambda a, b: np.where(a >= b, a.dtype.type(0), a + a.dtype.type(1)),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - a.dtype.type(1)),
}


def _operation(match: re.Match[str]) -> tuple[Callable[..., np.ndarray], np.dtype]:
    kind = match["type"]
    if packed := re.fullmatch(r"(f16|bf16)x2", kind):
        element = np.dtype("f2") if packed[1] == "f16" else np.dtype(ml_dtypes.bfloat16)
        return _add_packed(element), TYPES["b32"]
    return _OPERATIONS.get(match["op"], lambda a, b: b), TYPES[kind]


def _atomic(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """Threads one after the other."""
    operands: list[Operand] = list(instruction.operands)
    target = operands.pop(0) if match["name"] == "atom" else Symbol("_")
    address, *sources = operands
    function, dtype = _operation(match)
    values = [gang.everywhere(gang.read(source, dtype)) for source in sources]
    old = np.zeros(gang.threads.size, dtype)
    addresses = gang.addresses(address, U64, mask)
    order = gang.machine.order
    semantics = match["semantics"] or "relaxed"
    released: dict[int, View] = {}
    positions = np.arange(gang.threads.size)[gang.chosen(mask)]
    for at, where in zip(positions.tolist(), addresses.tolist(), strict=True):
        thread, warp = gang.threads[at : at + 1], int(gang.threads[at]) // WARP
        if warp not in released:
            strong = semantics in ("release", "acq_rel")
            released[warp] = order.release(warp) if strong else order.released(warp)
        memory, one = gang.memory, np.array([where])
        before = memory.load_strong(one, dtype.itemsize, thread, writes=True).view(dtype)[0]
        if match["op"] == "cas":
            after = np.where(before == values[0][at], values[1][at : at + 1], before)
        else:
            after = function(before, values[0][at : at + 1]).astype(dtype)
        memory.store_strong(one, after.view(np.uint8)[None], thread)
        old[at] = before[0]
        gang.machine.global_order.publish(where, released[warp], replace=False)
        gang.machine.global_order.acquire(where, warp, now=semantics in ("acquire", "acq_rel"))
    gang.machine.progress += 1
    gang.write(target, old, mask)


def _add_vectors(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """Numbers side by side, each by an atomic of its own; threads do not share any."""
    address, vector = instruction.operands
    assert isinstance(vector, Vector) and len(vector.elements) == int(match["count"])
    dtype, threads = TYPES["f32"], gang.active(mask)
    chosen = gang.chosen(mask)
    values = np.stack([gang.everywhere(gang.read(e, dtype)) for e in vector.elements], -1)[chosen]
    addresses, memory = gang.addresses(address, U64, mask), gang.memory
    if len(np.unique(addresses)) < len(addresses):
        raise EmulationError("adds to one address in several threads, which the emulator does not")
    before = memory.load_strong(addresses, values.shape[1] * 4, threads, writes=True)
    sums = (before.view(dtype) + values).astype(dtype)
    memory.store_strong(addresses, sums.view(np.uint8), threads)
    gang.machine.progress += 1


def _load_strong(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    target, address = instruction.operands
    dtype, count = TYPES[match["type"]], int(match["count"] or 1)
    addresses, threads = gang.addresses(address, U64, mask), gang.active(mask)
    data = gang.memory.load_strong(addresses, dtype.itemsize * count, threads, writes=False)
    now = match["semantics"] == "acquire"
    for where, thread in zip(addresses.tolist(), threads.tolist(), strict=True):
        gang.machine.global_order.acquire(where, thread // WARP, now=now)
    loaded = np.zeros((gang.threads.size, count), dtype)
    loaded[gang.chosen(mask)] = data.view(dtype)
    elements = target.elements if isinstance(target, Vector) else (target,)
    for element, values in zip(elements, loaded.T, strict=True):
        gang.write(element, np.ascontiguousarray(values), mask)


def _load_from_l2(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """Which may be in front of griddepcontrol.wait, where it gives anything: the kernels before may
    not have written it."""
    target, address = instruction.operands
    dtype, machine = TYPES[match["type"]], gang.machine
    addresses, threads = gang.addresses(address, U64, mask), gang.active(mask)
    data = machine.memory.load(addresses, dtype.itemsize, threads)
    numbers = data.view(dtype)[:, 0]
    if not all(warp.may_access for warp in gang.warps):
        # Often one that could be right: a length, a number of a page.
        most = machine.random.choice([1, 8, 500, np.iinfo(np.int32).max])
        numbers = machine.random.integers(-1, most, numbers.shape).astype(dtype)
    loaded = np.zeros(gang.threads.size, dtype)
    loaded[gang.chosen(mask)] = numbers
    gang.write(target, loaded, mask)


def _store_strong(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    address, source = instruction.operands
    assert isinstance(address, Address)
    if isinstance(source, Vector):
        raise EmulationError("is a vector, which the emulator does not know")
    dtype, threads = TYPES[match["type"]], gang.active(mask)
    addresses = gang.addresses(address, U64, mask)
    data = gang.everywhere(gang.read(source, dtype))[gang.chosen(mask)]
    gang.memory.load_strong(addresses, dtype.itemsize, threads, writes=True)
    gang.memory.store_strong(addresses, data[:, None].view(np.uint8), threads)
    order = gang.machine.order
    for where, thread in zip(addresses.tolist(), threads.tolist(), strict=True):
        warp = thread // WARP
        strong = match["semantics"] == "release"
        view = order.release(warp) if strong else order.released(warp)
        gang.machine.global_order.publish(where, view, replace=True)
    gang.machine.progress += 1


_ATOMIC = r"(?P<name>atom|red)"
_ATOMIC_SEMANTICS = r"(\.(?P<semantics>relaxed|acquire|release|acq_rel))?"
_SCOPE = r"(\.(cta|cluster|gpu|sys))?"
_OP = r"\.(?P<op>add|min|max|and|or|xor|exch|cas|inc|dec)(\.noftz)?"
_TYPE = r"\.(?P<type>[busf](16|32|64)|bf16|f16x2|bf16x2)"

ATOMICS = (
    # The compiler has the space in front of the semantics as well.
    (_ATOMIC + _ATOMIC_SEMANTICS + _SCOPE + r"\.global" + _OP + _TYPE, _atomic),
    (_ATOMIC + r"\.global" + _ATOMIC_SEMANTICS + _SCOPE + _OP + _TYPE, _atomic),
    (r"red(\.relaxed)?" + _SCOPE + r"\.global\.add\.v(?P<count>[24])\.f32", _add_vectors),
    (
        r"ld\.(?P<semantics>relaxed|acquire|volatile)"
        + _SCOPE
        + r"\.global(\.v(?P<count>[24]))?\.(?P<type>[busf](8|16|32|64))",
        _load_strong,
    ),
    (r"ld\.global\.cg\.(?P<type>[bus]32)", _load_from_l2),
    (
        r"st\.(?P<semantics>relaxed|release|volatile)"
        + _SCOPE
        + r"\.global\.(?P<type>[busf](8|16|32|64))",
        _store_strong,
    ),
)
