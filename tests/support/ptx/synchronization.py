"""Instructions by which warps wait for each other, and which order what they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from support.ptx.arithmetic import PREDICATE, TYPES, U32
from support.ptx.errors import EmulationError
from support.ptx.mbarrier import Barrier
from support.ptx.memory import WARP
from support.ptx.order import View
from support.ptx.ordered_memory import RANK_SHIFT
from support.ptx.program import Address, Immediate, Instruction, Operand, Pair, Symbol
from support.ptx.threads import Mask
from support.ptx.warps import GROUP, Block, Gang, Suspend, Warp

U64 = TYPES["u64"]
_EARLY = 0.1  # how often a wait of an mbarrier ends early, as if its time were over


# mbarriers --------------------------------------------------------------------------------------


def _positions(gang: Gang, mask: Mask) -> list[tuple[int, Warp]]:
    """Of the active threads within the gang, with their warps."""
    positions = np.arange(gang.threads.size)[gang.chosen(mask)].tolist()
    return [(at, gang.warps[at // WARP]) for at in positions]


def _by_warp(
    gang: Gang, mask: Mask, *values: np.ndarray
) -> Iterator[tuple[np.ndarray, Warp, list[int]]]:
    """The active threads of each warp, with the values that they share; one at a time if they do
    not share them. Threads are given by their positions in the gang."""
    positions = np.arange(gang.threads.size)
    for i, warp in enumerate(gang.warps):
        lanes = positions[i * WARP : (i + 1) * WARP]
        if mask is not None:
            lanes = lanes[mask[lanes]]
        if not lanes.size:
            continue
        columns = np.stack([value[lanes].astype(np.int64) for value in values], axis=-1)
        if (columns == columns[0]).all():
            yield lanes, warp, columns[0].tolist()
        else:
            for lane, row in zip(lanes, columns.tolist(), strict=True):
                yield np.array([lane]), warp, row


def _values(gang: Gang, operand: Operand, dtype: np.dtype = U32) -> np.ndarray:
    return gang.everywhere(gang.read(operand, dtype))


def _barrier_addresses(gang: Gang, operand: Operand) -> np.ndarray:
    """Of all threads."""
    assert isinstance(operand, Address)
    return gang.addresses(operand, U32, None)


def _initialise(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    address, count_operand = instruction.operands
    machine, addresses = gang.machine, _barrier_addresses(gang, address)
    counts = _values(gang, count_operand)
    for at, warp in _positions(gang, mask):
        position = machine.shared_position(gang.block, int(addresses[at]))
        if position % 8:
            raise EmulationError(f"has address {int(addresses[at]):#x}, no multiple of 8 bytes")
        marked = int(machine.order.marks(np.array([warp.number]))[0])
        before = machine.barriers.get(position)
        agent = before.agent if before else machine.order.new_agent()
        offset = position % machine.shared.pitch
        machine.barriers[position] = Barrier(
            machine.order, int(counts[at]), agent, marked, gang.block.number, offset
        )
        machine.shared.reserve_barrier(position)
    machine.progress += 1


def _invalidate(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    (address,) = instruction.operands
    addresses = _barrier_addresses(gang, address)
    for at, _ in _positions(gang, mask):
        position = gang.machine.shared_position(gang.block, int(addresses[at]))
        if gang.machine.barriers.pop(position, None) is None:
            raise EmulationError("ends an mbarrier that is not initialised")
        gang.machine.shared.reserve_barrier(position, False)


def _arrive(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    state, address, *rest = instruction.operands
    machine, addresses = gang.machine, _barrier_addresses(gang, address)
    amounts = _values(gang, rest[0]) if rest else np.ones(gang.threads.size, U32)
    states = np.zeros(gang.threads.size, np.uint64)
    released: dict[int, View] = {}
    for lanes, warp, (at, amount) in _by_warp(gang, mask, addresses, amounts):
        if warp.number not in released:
            order = machine.order
            if ".relaxed" in instruction.name:
                released[warp.number] = order.released(warp.number, "cluster")
            else:
                released[warp.number] = order.release(warp.number)
        barrier = _barrier(gang, at, warp)
        states[lanes] = barrier.phase
        if match["expect"]:
            barrier.expect(amount * lanes.size)
        each = 1 if match["expect"] else amount
        barrier.arrive(each * lanes.size, released[warp.number])
    machine.progress += 1
    if not isinstance(state, Symbol):
        gang.write(state, states, mask)


def _expect(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    address, amount = instruction.operands
    addresses, amounts = _barrier_addresses(gang, address), _values(gang, amount)
    for lanes, warp, (at, amount) in _by_warp(gang, mask, addresses, amounts):
        barrier = _barrier(gang, at, warp)
        if match["what"] == "expect":
            barrier.expect(amount * lanes.size)
        else:
            barrier.land(amount * lanes.size)
    gang.machine.progress += 1


def _barrier(gang: Gang, address: int, warp: Warp) -> Barrier:
    return gang.machine.barrier_at(gang.block, address, warp, remote=bool(address >> RANK_SHIFT))


def _test(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> Suspend | None:
    """try_wait and test_wait, for a parity or for the state that an arrival returned."""
    result, address, wanted, *_ = instruction.operands
    machine, addresses = gang.machine, _barrier_addresses(gang, address)
    asked = _values(gang, wanted, U32 if match["parity"] else U64)
    passed = np.zeros(gang.threads.size, bool)
    late: list[_Late] = []
    for lanes, warp, (at, phase) in _by_warp(gang, mask, addresses, asked):
        barrier = machine.barrier_at(gang.block, at, warp)
        until = _passed(barrier, phase, match["parity"] is not None)
        if until():
            passed[lanes] = True
            machine.order.acquire(warp.number, barrier.view)
        else:
            late.append(_Late(lanes, warp, until, barrier))
    suspended = _suspended(gang, mask, late) if match["try"] else None
    chosen = gang.lanes if mask is None else mask
    if suspended is not None and suspended.mask is not None:
        chosen = ~suspended.mask if chosen is None else chosen & ~suspended.mask
    for warp in gang.warps_of(chosen):
        warp.expired = False
    gang.write(result, passed, chosen)
    return suspended


def _passed(barrier: Barrier, asked: int, parity: bool) -> Callable[[], bool]:
    if parity:
        return lambda: barrier.passed(asked & 1)
    return lambda: barrier.phase > asked


@dataclass(frozen=True)
class _Late:
    """Threads of a warp that wait for a phase."""

    lanes: np.ndarray
    warp: Warp
    until: Callable[[], bool]
    barrier: Barrier


def _suspended(gang: Gang, mask: Mask, late: list[_Late]) -> Suspend | None:
    """Those that are late, unless their time is over."""
    early = gang.machine.random.random() < _EARLY
    waiting = [one for one in late if not (one.warp.expired or early)]
    if not waiting:
        return None
    lanes = np.zeros(gang.threads.size, bool)
    for one in waiting:
        lanes[one.lanes] = True
    different = {id(one.barrier): one for one in waiting}
    conditions = [one.until for one in different.values()]
    return Suspend(
        lanes,
        lambda: any(until() for until in conditions),
        _States([one.barrier for one in different.values()]),
        again=True,
        peek=True,
    )


@dataclass(frozen=True)
class _States:
    """Of mbarriers, when they are printed."""

    barriers: list[Barrier]

    def __str__(self) -> str:
        return "; ".join(barrier.state() for barrier in self.barriers)


# Barriers of blocks and clusters ----------------------------------------------------------------


@dataclass(eq=False)
class _Meeting:
    """Warps that come together, again and again."""

    arrived: list[Warp] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    syncing: list[Warp] = field(default_factory=list)
    expected: int | None = None  # threads
    generation: int = 0

    def complete(self, gang: Gang) -> None:
        for warp in self.syncing:
            for view in self.views:
                gang.machine.order.acquire(warp.number, view)
        self.arrived, self.views, self.syncing = [], [], []
        self.generation += 1
        gang.machine.progress += 1


def _block_barrier(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> Suspend | None:
    gang.require_whole_warps(mask)
    number_operand, *rest = instruction.operands or (Immediate(0),)
    numbers = np.unique(_values(gang, number_operand)[gang.chosen(mask)])
    if numbers.size != 1 or not numbers[0] < 16:
        raise EmulationError(f"is at the barriers {numbers}")
    number, block = int(numbers[0]), gang.block
    expected = gang.machine.threads_per_block
    if rest:
        counts = np.unique(_values(gang, rest[0])[gang.chosen(mask)])
        if counts.size != 1 or counts[0] % WARP or not counts[0]:
            raise EmulationError(f"waits for {counts} threads, no multiple of {WARP}")
        expected = int(counts[0])
    meeting = block.named.setdefault(number, _Meeting())
    if meeting.expected not in (None, expected):
        raise EmulationError(
            f"expects {expected} threads at barrier {number}, others {meeting.expected}"
        )
    meeting.expected = expected
    syncing = match["how"] == "sync"
    for warp in gang.warps_of(mask):
        if warp in meeting.arrived:
            raise EmulationError(f"arrives twice at barrier {number}")
        if len(meeting.arrived) * WARP == expected:
            raise EmulationError(f"is at barrier {number} with more than {expected} threads")
        meeting.arrived.append(warp)
        meeting.views.append(gang.machine.order.release(warp.number))
        if syncing:
            meeting.syncing.append(warp)
    gang.machine.progress += 1
    generation = meeting.generation
    if len(meeting.arrived) * WARP == expected:
        meeting.complete(gang)
        meeting.expected = None
        return None
    if not syncing:
        return None
    what = f"barrier {number} of {expected} threads"
    return Suspend(None, lambda: meeting.generation > generation, what)


def _warp_barrier(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> Suspend | None:
    if mask is not None and len(gang.warps) == 1:
        (warp,), others, here = gang.warps, ~mask, gang.counter

        def waiting_elsewhere() -> bool:
            lanes = others & (warp.counters != here)
            return any((waiting & lanes).any() for waiting, _ in warp.waits)

        if waiting_elsewhere() or (warp.counters[others] == here).all():
            return Suspend(mask, lambda: not waiting_elsewhere(), "its warp's others", again=True)
    gang.require_whole_warps(mask)
    return None


@dataclass(eq=False)
class _ClusterMeeting(_Meeting):
    """Of a cluster: arriving and waiting are two steps; warps that have exited count."""

    waiting: dict[int, int] = field(default_factory=dict)  # generation, by warp


def _cluster_meeting(gang: Gang) -> _ClusterMeeting:
    found = gang.machine.clusters.setdefault(gang.block.cluster, _ClusterMeeting())
    assert isinstance(found, _ClusterMeeting)
    return found


def _cluster_blocks(gang: Gang) -> list[Block]:
    return [one for one in gang.machine.blocks if one.cluster == gang.block.cluster]


def _cluster_arrive(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    gang.require_whole_warps(mask)
    meeting, order = _cluster_meeting(gang), gang.machine.order
    for warp in gang.warps_of(mask):
        if warp.number in meeting.waiting:
            raise EmulationError("arrives twice at the cluster's barrier, with no wait in between")
        meeting.waiting[warp.number] = meeting.generation
        meeting.arrived.append(warp)
        if match["semantics"] == ".relaxed":
            meeting.views.append(order.released(warp.number, "cluster"))
        else:
            meeting.views.append(order.release(warp.number))
    gang.machine.progress += 1


def _cluster_wait(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> Suspend | None:
    gang.require_whole_warps(mask)
    meeting, blocks = _cluster_meeting(gang), _cluster_blocks(gang)
    warps = [warp for block in blocks for warp in block.warps]

    def complete() -> bool:
        if meeting.arrived and all(warp in meeting.arrived or warp.over for warp in warps):
            meeting.syncing = meeting.arrived
            meeting.complete(gang)
        return all(
            meeting.generation > meeting.waiting[warp.number] for warp in gang.warps_of(mask)
        )

    for warp in gang.warps_of(mask):
        if warp.number not in meeting.waiting:
            raise EmulationError("waits at the cluster's barrier without having arrived")
    if not complete():
        return Suspend(None, complete, "the cluster's barrier", again=True)
    for warp in gang.warps_of(mask):
        del meeting.waiting[warp.number]
    return None


# Fences -----------------------------------------------------------------------------------------


def _fence_async(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    for warp in gang.warps_of(mask):
        gang.machine.order.fence_async(warp.number)


def _fence_barriers(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    for warp in gang.warps_of(mask):
        gang.machine.order.fence_async(warp.number)
        gang.machine.order.fence(warp.number, "cluster")


def _fence(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """One of a block's scope orders nothing here: barriers do that."""
    if match["scope"] in ("cta", None) and match["old"] in ("cta", None):
        return
    for warp in gang.warps_of(mask):
        gang.machine.order.fence(warp.number, "cluster" if match["scope"] == "cluster" else "gpu")


def _nothing(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """Of no consequence here."""


def _await_others(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    for warp in gang.warps_of(mask):
        warp.may_access = True


def _let_begin(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    if not gang.may_access:
        raise EmulationError("lets the next kernel begin in front of griddepcontrol.wait")


# Warps and warp groups --------------------------------------------------------------------------


def _elect(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """The lowest lane."""
    gang.require_whole_warps(mask)
    target, _ = instruction.operands
    assert isinstance(target, Pair)
    gang.write(target.value, np.zeros(1, U32), mask)
    gang.write(target.predicate, gang.threads % WARP == 0, mask)


def _vote(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    gang.require_whole_warps(mask)
    target, source, _ = instruction.operands
    votes = gang.everywhere(gang.read(source, PREDICATE)).reshape(-1, WARP)
    if match["mode"] == "ballot":
        ballots = (votes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
        gang.write(target, np.repeat(ballots.astype(U32), WARP), mask)
        return
    result = {
        "all": votes.all(axis=1),
        "any": votes.any(axis=1),
        "uni": votes.all(axis=1) | ~votes.any(axis=1),
    }[match["mode"]]
    gang.write(target, np.repeat(result, WARP), mask)


def _active(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    (target,) = instruction.operands
    active = np.ones(gang.threads.size, bool) if mask is None else mask
    bits = active.reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
    gang.write(target, np.repeat(bits.sum(axis=1).astype(U32), WARP), mask)


def _set_registers(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> Suspend | None:
    """setmaxnreg: all warps of a group; an increase waits for registers that others give back."""
    gang.require_whole_warps(mask)
    (operand,) = instruction.operands
    assert isinstance(operand, Immediate)
    asked, block = operand.value, gang.block
    if asked % 8 or not 24 <= asked <= 256:
        raise EmulationError(f"asks for {asked} registers")
    group, counter = gang.warps[0].group, gang.counter
    if len(group) != GROUP:
        raise EmulationError("is executed by less than a warp group")
    if len(gang.warps_of(mask)) != GROUP:
        return Suspend(
            None,
            lambda: all(warp.counter == counter for warp in group),
            "the other warps of its group, at setmaxnreg",
            again=True,
        )
    more = sum(asked - warp.per_thread_registers for warp in group) * WARP
    if (more < 0) != (match["direction"] == "dec") and more:
        raise EmulationError(f"changes {group[0].per_thread_registers} registers to {asked}")
    if more > block.registers:
        return Suspend(
            None, lambda: more <= block.registers, f"{more} registers of its block", again=True
        )
    block.registers -= more
    for warp in group:
        warp.per_thread_registers = asked
    gang.machine.progress += 1
    return None


# Addresses --------------------------------------------------------------------------------------


def _map_address(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """mapa: the same address in the block at a rank of the cluster."""
    target, address, rank = instruction.operands
    dtype = TYPES[match["type"]]
    addresses, ranks = _values(gang, address, dtype), _values(gang, rank)
    if (ranks[gang.chosen(mask)] >= gang.machine.cluster_size).any():
        raise EmulationError("asks for a rank that the cluster does not have")
    own = addresses & dtype.type((1 << RANK_SHIFT) - 1)
    window = addresses & ~dtype.type((1 << 32) - 1) if dtype.itemsize == 8 else dtype.type(0)
    gang.write(target, window | own | (ranks.astype(dtype) + 1 << RANK_SHIFT), mask)


def _convert_address(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> None:
    """cvta: between addresses of a space and generic ones."""
    from support.ptx.machine import PARAMETER_WINDOW, SHARED_WINDOW

    target, source = instruction.operands
    window = {"shared": SHARED_WINDOW, "param": PARAMETER_WINDOW}.get(match["space"], 0)
    values = _values(gang, source, U64)
    moved = values - np.uint64(window) if match["to"] else values + np.uint64(window)
    gang.write(target, moved, mask)


_SEMANTICS = r"(\.(release|relaxed|acquire))?(\.(cta|cluster))?"
_SHARED = r"\.shared(::cta|::cluster)?\.b64"

SYNCHRONIZATION = (
    (r"mbarrier\.init" + _SHARED, _initialise),
    (r"mbarrier\.inval" + _SHARED, _invalidate),
    (
        r"mbarrier\.arrive(?P<expect>\.expect_tx)?" + _SEMANTICS + _SHARED,
        _arrive,
    ),
    (r"mbarrier\.(?P<what>expect|complete)_tx" + _SEMANTICS + _SHARED, _expect),
    (
        r"mbarrier\.((?P<try>try)|test)_wait(?P<parity>\.parity)?" + _SEMANTICS + _SHARED,
        _test,
    ),
    (r"(bar|barrier(\.cta)?)\.(?P<how>sync|arrive)(\.aligned)?", _block_barrier),
    (r"bar\.warp\.sync", _warp_barrier),
    (r"barrier\.cluster\.arrive(?P<semantics>\.release|\.relaxed)?(\.aligned)?", _cluster_arrive),
    (r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?", _cluster_wait),
    (r"fence\.proxy\.async(\.shared::(cta|cluster)|\.global)?", _fence_async),
    (r"fence\.mbarrier_init\.release\.cluster", _fence_barriers),
    (
        r"fence(\.acq_rel|\.sc)?\.(?P<scope>cta|cluster|gpu|sys)|membar\.(?P<old>cta|gl|sys)",
        _fence,
    ),
    (r"elect\.sync", _elect),
    (r"vote\.sync\.(?P<mode>all|any|uni|ballot)\.(pred|b32)", _vote),
    (r"activemask\.b32", _active),
    (r"setmaxnreg\.(?P<direction>inc|dec)\.sync\.aligned\.u32", _set_registers),
    (r"mapa\.shared::cluster\.(?P<type>u32|u64)", _map_address),
    (
        r"cvta(?P<to>\.to)?\.(?P<space>shared|param|global|const|local)(::cta|::cluster)?\.u64",
        _convert_address,
    ),
    (r"griddepcontrol\.wait", _await_others),
    (r"griddepcontrol\.launch_dependents", _let_begin),
    (r"nanosleep\.u32|prefetch\..*", _nothing),
)
