"""Warps, what they wait for, and gangs of them that execute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from support.ptx.errors import EmulationError
from support.ptx.memory import EARLY, POISON, WARP, GlobalMemory, Inputs
from support.ptx.program import Register, Symbol
from support.ptx.threads import Mask, Threads

if TYPE_CHECKING:
    from support.ptx.machine import Machine

GROUP = 4  # warps of a warp group


@dataclass
class Suspend:
    """An instruction's answer: these threads cannot go on.

    Attributes:
        mask: Of the gang's threads; None for all that execute.
        until: Whether they can.
        what: They wait for; printed.
        again: Whether they execute the instruction again then, or have done with it.
        peek: Whether the wait may end early, without what is waited for.
    """

    mask: Mask
    until: Callable[[], bool]
    what: object
    again: bool = False
    peek: bool = False


@dataclass(eq=False)
class Block:
    """A block of a launch.

    Attributes:
        named: State of the barriers that bar.sync uses, by their number.
        registers: Of the register file, not in use.
    """

    number: int
    cluster: int
    rank: int
    warps: list[Warp] = field(default_factory=list)
    named: dict[int, Any] = field(default_factory=dict)
    registers: int = 0

    @property
    def over(self) -> bool:
        return all(warp.over for warp in self.warps)


class Warp:
    """32 threads. They run together unless a branch has parted them.

    Attributes:
        lanes: Its threads among those of the launch.
        expired: Whether its last wait has ended early.
        groups: Groups of wgmma that it has committed and not waited for.
        in_flight: Registers that belong to unfinished wgmma.
        touched: Registers of wgmma, written since the last wgmma.fence.
        per_thread_registers: As setmaxnreg has set.
        may_access: Whether it may read and write global memory: what the kernels before this one
            write may not be there, in front of griddepcontrol.wait. If the one before is of the
            same call, and has waited itself before it let this one begin, inputs are there.
    """

    def __init__(self, machine: Machine, number: int, block: Block) -> None:
        self.number = number
        self.block = block
        self.local = number % machine.warps_per_block
        self.lanes = slice(number * WARP, (number + 1) * WARP)
        self.counters = machine.program_counters[self.lanes]
        self.end = len(machine.program.instructions)
        self.counter: int | None = 0  # of all lanes, or None if they differ
        self.waits: list[tuple[np.ndarray, Suspend]] = []
        self.expired = False
        self.uncommitted: list[Any] = []
        self.groups: list[list[Any]] = []
        self.in_flight: set[str] = set()
        self.touched: set[str] | None = None  # no fence yet
        self.per_thread_registers = 0
        self.may_access = not machine.waits_for_others

    @property
    def group(self) -> list[Warp]:
        first = self.local // GROUP * GROUP
        return self.block.warps[first : first + GROUP]

    @property
    def over(self) -> bool:
        return self.counter == self.end

    def settle(self) -> None:
        """The lanes have new program counters."""
        first = self.counters[0]
        self.counter = int(first) if (self.counters == first).all() else None

    def ready(self) -> bool:
        if self.waits:
            self.waits = [wait for wait in self.waits if not wait[1].until()]
        if self.counter is not None:
            return not self.waits and self.counter != self.end
        return bool(self.runnable().any())

    def runnable(self) -> np.ndarray:
        lanes = self.counters != self.end
        for waiting, _ in self.waits:
            lanes &= ~waiting
        return lanes

    def __str__(self) -> str:
        return f"warp {self.local} of block {self.block.number}"


class Gang(Threads):
    """Warps of one block that execute together: all of their threads, or some of one warp's.

    Attributes:
        lanes: Which of the threads; None for all.
        meeting: Where others of the warp wait for them to catch up.
    """

    def __init__(self, machine: Machine, warps: list[Warp]) -> None:
        self.machine = machine
        self.program = machine.program
        self.shared = machine.shared
        self.parameters = machine.parameters
        self.registers = machine.registers
        self.warps = warps
        self.block = warps[0].block
        self.counter = 0
        self.lanes: np.ndarray | None = None
        self.meeting = len(self.program.instructions)
        numbers = [warp.number for warp in warps]
        self.index: slice | np.ndarray
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            self.index = slice(numbers[0] * WARP, (numbers[-1] + 1) * WARP)
            self.threads = machine.threads[self.index]
        else:
            self.index = np.concatenate([machine.threads[warp.lanes] for warp in warps])
            self.threads = self.index
        self.note_in_flight()

    @property
    def memory(self) -> GlobalMemory | Inputs:
        if self.may_access:
            return self.machine.memory
        if not self.machine.has_inputs:
            raise EmulationError(EARLY)
        return Inputs(self.machine.memory)

    @property
    def may_access(self) -> bool:
        return all(warp.may_access for warp in self.warps)

    def note_in_flight(self) -> None:
        """Again, when wgmma were issued or are complete."""
        self.in_flight: set[str] = set().union(*(warp.in_flight for warp in self.warps))

    # Threads -------------------------------------------------------------------------------------

    def bits_of(self, register: Register) -> np.ndarray:
        return self.machine.registers[register.name][self.index]

    def set_bits(self, register: Register, bits: np.ndarray, mask: Mask) -> None:
        table = self.machine.register(register)
        if mask is None:
            table[self.index] = bits
        else:
            table[self.threads[mask]] = bits[mask] if bits.size > 1 else bits
        if register.name in self.program.matrix_registers:
            self.note_written(register.name)

    def note_written(self, name: str) -> None:
        """A register of wgmma."""
        for warp in self.warps:
            if warp.touched is not None:
                warp.touched.add(name)

    def special(self, name: str) -> np.ndarray | int:
        value = self.machine.specials[name]
        return value[self.index] if isinstance(value, np.ndarray) else value

    def address_of(self, symbol: Symbol) -> int:
        return self.machine.address_of(symbol)

    def parameter_at(self, address: int, size: int) -> bytes:
        return self.machine.parameter_at(address, size)

    def warps_of(self, mask: Mask) -> list[Warp]:
        """Those with active threads."""
        if mask is None:
            return self.warps
        some = mask.reshape(-1, WARP).any(axis=1)
        return [warp for warp, active in zip(self.warps, some, strict=True) if active]


def poisoned(size: int, dtype: np.dtype) -> np.ndarray:
    return np.full(size * dtype.itemsize, POISON, np.uint8).view(dtype)
