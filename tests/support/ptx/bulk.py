"""Bulk copies: the tensor memory accelerator, and the instructions that use it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from support.ptx.arithmetic import TYPES, U32, to_tf32
from support.ptx.errors import EmulationError
from support.ptx.mbarrier import Barrier
from support.ptx.memory import WARP, Copies
from support.ptx.ordered_memory import GRANULE, AsyncRead
from support.ptx.program import Address, Immediate, Instruction, TensorAddress
from support.ptx.tensor_map import TensorMap
from support.ptx.threads import Mask
from support.ptx.warps import Gang, Suspend, Warp

if TYPE_CHECKING:
    from support.ptx.machine import Machine

U16, U64, S32 = TYPES["u16"], TYPES["u64"], TYPES["s32"]


@dataclass(eq=False)
class _Load:
    """On its way into one block's shared memory."""

    data: np.ndarray  # (granules, 16) bytes
    granules: np.ndarray
    barrier: Barrier
    block: int

    def advance(self, machine: Machine) -> bool:
        """Go on; whether it is complete."""
        shared, barrier = machine.shared, self.barrier
        shared.finish_write(self.granules, self.data, barrier.agent, barrier.phase + 1)
        barrier.land(self.data.size)
        return True


@dataclass(eq=False)
class _Arrival:
    """cp.async.mbarrier.arrive: when what a thread has copied so far is there."""

    barrier: Barrier
    copies: list[Copies]
    block: int

    def advance(self, machine: Machine) -> bool:
        barrier = self.barrier
        machine.shared.finish_copies(self.copies, barrier.agent, barrier.phase + 1)
        barrier.arrive(1, None)
        return True


@dataclass(eq=False)
class _RemoteStore:
    """A thread's own bytes on their way into a block of the cluster."""

    copies: Copies
    barrier: Barrier
    block: int

    def advance(self, machine: Machine) -> bool:
        barrier = self.barrier
        machine.shared.finish_copies([self.copies], barrier.agent, barrier.phase + 1)
        barrier.land(self.copies.data.size)
        return True


@dataclass(eq=False)
class _Store:
    """Out of shared memory; reads it first, and writes global memory later."""

    map: TensorMap
    coordinates: tuple[int, ...]
    granules: np.ndarray
    thread: int
    reduction: str | None
    reading: AsyncRead
    data: np.ndarray | None = None
    complete: bool = False

    def advance(self, machine: Machine) -> bool:
        if self.data is None:
            self.data = machine.shared.read(self.granules)
            return False
        rows, columns = self.map.rows(self.coordinates)
        inside = rows >= 0
        data = self.data.reshape(len(rows), -1)[inside, columns]
        if data.size:
            store = machine.memory.store_rows
            store(rows[inside] + columns.start, data, self.thread, self.reduction)
        self.complete = True
        return True

    @property
    def block(self) -> None:
        return None


@dataclass(eq=False)
class _StoreBytes:
    """The same, of bytes in a row; as float32 they may be added to what is there."""

    address: int
    granules: np.ndarray
    thread: int
    adds: bool
    reading: AsyncRead
    data: np.ndarray | None = None
    complete: bool = False

    def advance(self, machine: Machine) -> bool:
        if self.data is None:
            self.data = machine.shared.read(self.granules).reshape(1, -1)
            return False
        if self.adds:
            machine.memory.add_floats(self.address, self.data[0], self.thread)
        else:
            machine.memory.store_rows(np.array([self.address]), self.data, self.thread)
        self.complete = True
        return True

    @property
    def block(self) -> None:
        return None


@dataclass(eq=False)
class _Groups:
    """Bulk groups of a thread."""

    open: list[_Store | _StoreBytes] = field(default_factory=list)
    committed: list[list[_Store | _StoreBytes]] = field(default_factory=list)


class BulkCopies:
    """All that are on their way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pending: list[_Load | _RemoteStore | _Store | _StoreBytes | _Arrival] = []
        self.groups: dict[int, _Groups] = {}  # by thread

    def advance(self) -> None:
        """One of them, whichever."""
        index = int(self.machine.random.integers(len(self.pending)))
        if self.pending[index].advance(self.machine):
            self.pending.pop(index)
        self.machine.progress += 1

    def landing_in(self, block: int) -> str:
        landing = [one for one in self.pending if one.block == block]
        return f"a bulk copy for {landing[0].barrier}" if landing else ""  # type: ignore[union-attr]

    def load(self, data: np.ndarray, granules: np.ndarray, barrier: Barrier, thread: int) -> None:
        """`granules`: numbered through all blocks."""
        shared = self.machine.shared
        shared.start_write(granules, thread // WARP, barrier.agent, thread)
        block = shared.block_at(int(granules[0]) * GRANULE)
        self.pending.append(_Load(data.reshape(-1, GRANULE), granules, barrier, block))

    def group(self, thread: int) -> _Groups:
        return self.groups.setdefault(thread, _Groups())


# Instructions -----------------------------------------------------------------------------------


def tensor_map_at(gang: Gang, address: int) -> TensorMap:
    from support.ptx.machine import PARAMETER_WINDOW

    if address % 64:
        raise EmulationError(f"uses a tensor map at {address:#x}, no multiple of 64")
    if address >> 40 == PARAMETER_WINDOW >> 40:
        return TensorMap.decode(gang.machine.parameter_bytes(address, 128))
    data = gang.memory.load(np.array([[address]])[0], 16, gang.threads[:1])
    raise EmulationError(f"uses a tensor map in global memory, which is not known: {data}")


@dataclass(frozen=True)
class _Issue:
    """Of a tensor copy by one thread."""

    thread: int
    warp: Warp
    map: TensorMap
    coordinates: tuple[int, ...]


def _issues(gang: Gang, operand: Any, mask: Mask, rank: int) -> list[tuple[int, _Issue]]:
    """With the position of each thread in the gang."""
    assert isinstance(operand, TensorAddress)
    maps = gang.everywhere(gang.read(operand.map, U64))
    coordinates = [gang.everywhere(gang.read(c, S32)) for c in operand.coordinates]
    found = []
    for at in np.arange(gang.threads.size)[gang.chosen(mask)].tolist():
        tensor_map = tensor_map_at(gang, int(maps[at]))
        if len(tensor_map.box) != rank or len(coordinates) != rank:
            raise EmulationError(f"uses a tensor map of {len(tensor_map.box)} modes")
        thread = int(gang.threads[at])
        where = tuple(int(c[at]) for c in coordinates)
        found.append((at, _Issue(thread, gang.warps[at // WARP], tensor_map, where)))
    return found


def _value(gang: Gang, operand: Any, dtype: np.dtype, at: int) -> int:
    return int(gang.everywhere(gang.read(operand, dtype))[at])


def _address(gang: Gang, operand: Any, at: int) -> int:
    assert isinstance(operand, Address)
    return (_value(gang, operand.base, U32, at) + operand.offset) & 0xFFFFFFFF


def _load_tensor(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    machine = gang.machine
    target, source, barrier_at, *rest = instruction.operands
    issued: set[Warp] = set()
    for at, issue in _issues(gang, source, mask, int(match["rank"])):
        if issue.warp in issued:
            raise EmulationError("is executed by several threads of a warp; one copies the box")
        issued.add(issue.warp)
        ranks: list[int | None] = [None]
        if match["multicast"]:
            chosen = _value(gang, rest[0], U16, at)
            ranks = [rank for rank in range(16) if chosen >> rank & 1]
            if not ranks or ranks[-1] >= machine.cluster_size:
                raise EmulationError(f"copies to the blocks {chosen:#b} of the cluster")
        rows, columns = issue.map.rows(issue.coordinates)
        data = gang.memory.load_rows(rows, columns, issue.map.row_bytes, issue.thread)
        if issue.map.rounds:
            data = to_tf32(data.view(np.float32)).view(np.uint8)
        address, barrier_address = (_address(gang, one, at) for one in (target, barrier_at))
        for rank in ranks:
            to, signalled = (
                one if rank is None else (one & 0xFFFFFF) | rank + 1 << 24
                for one in (address, barrier_address)
            )
            barrier = machine.barrier_at(gang.block, signalled, issue.warp, remote=True)
            begin = machine.shared_position(gang.block, to, issue.map.box_bytes)
            offset = begin % machine.shared.pitch
            granules = (begin - offset + issue.map.granules(offset)) // GRANULE
            machine.bulk.load(data, granules, barrier, issue.thread)
    machine.progress += 1


def _store_tensor(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """A warp whose lanes ask for the same store makes it once: hardware issues it per warp, and
    CUTLASS does not elect a lane for it. All of these lanes have it in their groups."""
    machine = gang.machine
    target, source, *_ = instruction.operands
    made: dict[tuple[Any, ...], _Store] = {}
    for at, issue in _issues(gang, target, mask, int(match["rank"])):
        same = (issue.warp.number, issue.map, issue.coordinates, _address(gang, source, at))
        if same in made:
            machine.bulk.group(issue.thread).open.append(made[same])
            continue
        begin = machine.shared_position(gang.block, _address(gang, source, at), issue.map.box_bytes)
        offset = begin % machine.shared.pitch
        granules = (begin - offset + issue.map.granules(offset)) // GRANULE
        reading = machine.shared.start_read(
            "a bulk store", granules, [issue.warp.number], issue.thread
        )
        store = _Store(
            issue.map,
            issue.coordinates,
            granules,
            issue.thread,
            match.groupdict().get("reduction"),
            reading,
        )
        made[same] = store
        machine.bulk.pending.append(store)
        machine.bulk.group(issue.thread).open.append(store)
    machine.progress += 1


def _load_bytes(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """cp.async.bulk: so many bytes in a row."""
    machine = gang.machine
    target, source, size_operand, barrier_at, *_ = instruction.operands
    for at in np.arange(gang.threads.size)[gang.chosen(mask)].tolist():
        thread, warp = int(gang.threads[at]), gang.warps[at // WARP]
        size, to = _value(gang, size_operand, U32, at), _address(gang, target, at)
        assert isinstance(source, Address)
        address = _value(gang, source.base, U64, at) + source.offset
        if size % 16 or to % 16 or address % 16:
            raise EmulationError(f"copies {size} bytes from {address:#x} to {to:#x}, not by 16")
        data = gang.memory.load_rows(np.array([address]), slice(0, size), size, thread)
        barrier = machine.barrier_at(gang.block, _address(gang, barrier_at, at), warp, remote=True)
        begin = machine.shared_position(gang.block, to, size)
        machine.bulk.load(data, np.arange(begin, begin + size, 16) // GRANULE, barrier, thread)
    machine.progress += 1


def _store_bytes(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """cp.async.bulk, cp.reduce.async.bulk: every thread that executes it makes one."""
    machine = gang.machine
    target, source, size_operand, *_ = instruction.operands
    for at in np.arange(gang.threads.size)[gang.chosen(mask)].tolist():
        thread = int(gang.threads[at])
        size, start = _value(gang, size_operand, U32, at), _address(gang, source, at)
        assert isinstance(target, Address)
        address = _value(gang, target.base, U64, at) + target.offset
        if size % 16 or start % 16 or address % 16:
            raise EmulationError(f"copies {size} bytes from {start:#x} to {address:#x}, not by 16")
        begin = machine.shared_position(gang.block, start, size)
        granules = np.arange(begin, begin + size, GRANULE) // GRANULE
        reading = machine.shared.start_read("a bulk store", granules, [thread // WARP], thread)
        adds = match.groupdict().get("adds") is not None
        store = _StoreBytes(address, granules, thread, adds, reading)
        machine.bulk.pending.append(store)
        machine.bulk.group(thread).open.append(store)
    machine.progress += 1


def _commit(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    for thread in gang.active(mask).tolist():
        if thread in gang.machine.bulk.groups:
            groups = gang.machine.bulk.group(thread)
            groups.committed.append(groups.open)
            groups.open = []


def _wait(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> Suspend | None:
    (operand,) = instruction.operands
    assert isinstance(operand, Immediate)
    machine, only_read = gang.machine, match["read"] is not None
    waiting = [t for t in gang.active(mask).tolist() if t in machine.bulk.groups]
    waited: set[tuple[int, _Store | _StoreBytes]] = set()  # with the warps
    for thread in waiting:
        groups = machine.bulk.group(thread).committed
        for group in groups[: max(len(groups) - operand.value, 0)]:
            waited |= {(thread // WARP, store) for store in group}

    def done() -> bool:
        return all(store.complete or (only_read and store.data is not None) for _, store in waited)

    if not done():
        return Suspend(mask, done, "its bulk stores", again=True)
    for warp, store in waited:
        machine.shared.finish_read(store.reading, warp)
    for thread in waiting:  # what is complete does not come up again
        groups = machine.bulk.group(thread).committed
        while groups and all(store.complete for store in groups[0]):
            if any(store.reading.warps for store in groups[0]):
                break
            groups.pop(0)
    return None


def _store_async(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """st.async: through the generic proxy, which an mbarrier of the same block is told of."""
    machine = gang.machine
    target, source, barrier_at = instruction.operands
    values = gang.everywhere(gang.read(source, U32))
    for at in np.arange(gang.threads.size)[gang.chosen(mask)].tolist():
        thread, where = gang.threads[at : at + 1], _address(gang, target, at)
        signalled = _address(gang, barrier_at, at)
        barrier = machine.barrier_at(gang.block, signalled, gang.warps[at // WARP], remote=True)
        position = machine.shared_position(gang.block, where, 4)
        block = machine.shared.block_at(position)
        if block != barrier.block:
            raise EmulationError(f"stores to block {block}, and signals {barrier}")
        data = values[at : at + 1, None].view(np.uint8).copy()
        copies = machine.shared.start_store(np.array([where]), data, thread, barrier.agent)
        machine.bulk.pending.append(_RemoteStore(copies, barrier, block))
    machine.progress += 1


def _arrive_behind_copies(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> None:
    """Without noinc, the arrival is one more than the barrier counts."""
    (address,) = instruction.operands
    machine = gang.machine
    for at in np.arange(gang.threads.size)[gang.chosen(mask)].tolist():
        where = _address(gang, address, at)
        barrier = machine.barrier_at(gang.block, where, gang.warps[at // WARP])
        if not match["noinc"]:
            barrier.pending += 1
        copies = machine.shared.take_copies(int(gang.threads[at]))
        machine.bulk.pending.append(_Arrival(barrier, copies, gang.block.number))
    machine.progress += 1


def _prefetch(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    (operand,) = instruction.operands
    assert isinstance(operand, Address)
    for address in np.unique(gang.addresses(operand, U64, mask)).tolist():
        tensor_map_at(gang, address)


def _prefetch_tensor(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> None:
    """To L2, where it is never stale: nothing that a program sees."""
    source, *_ = instruction.operands
    warps = [issue.warp for _, issue in _issues(gang, source, mask, int(match["rank"]))]
    if len(set(warps)) < len(warps):
        raise EmulationError("is executed by several threads of a warp; one asks for the box")


_HINT = r"(\.L2::cache_hint)?"
_TENSOR = r"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d"

BULK = (
    (
        _TENSOR + r"\.shared::(cluster|cta)\.global(\.tile)?\.mbarrier::complete_tx::bytes"
        r"(?P<multicast>\.multicast::cluster)?" + _HINT,
        _load_tensor,
    ),
    (
        _TENSOR + r"\.global\.shared::cta(\.tile)?\.bulk_group" + _HINT,
        _store_tensor,
    ),
    (
        r"cp\.reduce\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.global\.shared::cta"
        r"\.(?P<reduction>add|min|max)(\.tile)?\.bulk_group" + _HINT,
        _store_tensor,
    ),
    (
        r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes" + _HINT,
        _load_bytes,
    ),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group" + _HINT, _store_bytes),
    (
        r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group"
        + _HINT
        + r"(?P<adds>\.add)\.f32",
        _store_bytes,
    ),
    (r"cp\.async\.bulk\.commit_group", _commit),
    (r"cp\.async\.bulk\.wait_group(?P<read>\.read)?", _wait),
    (
        r"cp\.async\.mbarrier\.arrive(?P<noinc>\.noinc)?\.shared(::cta)?\.b64",
        _arrive_behind_copies,
    ),
    (
        r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes\.[bus]32",
        _store_async,
    ),
    (r"prefetch\.(param\.)?tensormap", _prefetch),
    (
        r"cp\.async\.bulk\.prefetch\.tensor\.(?P<rank>[1-5])d\.L2\.global(\.tile)?" + _HINT,
        _prefetch_tensor,
    ),
)
