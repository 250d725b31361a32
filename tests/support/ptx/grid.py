"""All threads of all blocks, which execute a program at once in numpy arrays.

Every thread has a program counter of its own. What runs next is always the smallest one, for all
threads that have it: after a branch the threads behind catch up with those ahead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from support.ptx.arithmetic import BITS, PREDICATE, U32
from support.ptx.errors import EmulationError, FaultError
from support.ptx.memory import POISON, WARP, GlobalMemory, SharedMemory
from support.ptx.program import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Special,
    Symbol,
    Vector,
)

#: Which threads execute an instruction; None for all.
Mask = np.ndarray | None
#: Where those threads go on that do not go on behind the instruction.
Targets = int | None
Handler = Callable[["Grid", Instruction, Mask], Targets]

#: A program that branches more often than this is taken to be caught in a loop.
MOST_BRANCHES = 1_000_000


class Grid:
    """Blocks along x only; threads are numbered through all of them.

    Args:
        handlers: What executes each instruction of the program.
        parameters: What each parameter of the program holds.
        shared_bytes: Of a block, static and dynamic.
    """

    def __init__(
        self,
        program: Program,
        handlers: list[Handler],
        memory: GlobalMemory,
        parameters: dict[str, bytes],
        *,
        blocks: int,
        threads_per_block: int,
        shared_bytes: int,
    ) -> None:
        self.program = program
        self.handlers = handlers
        self.memory = memory
        self.shared = SharedMemory(shared_bytes, blocks, threads_per_block)
        self.parameters = parameters
        self.threads_per_block = threads_per_block
        self.threads = np.arange(blocks * threads_per_block)
        self.registers: dict[str, np.ndarray] = {}
        self.program_counters = np.zeros(self.threads.size, np.int64)
        self.counter = 0  # of the instruction that is being executed
        self.waiting = np.zeros(self.threads.size, bool)  # at a barrier
        self.specials = {
            "%tid.x": self.threads % threads_per_block,
            "%ctaid.x": self.threads // threads_per_block,
            "%laneid": self.threads % WARP,
            "%ntid.x": threads_per_block,
            "%nctaid.x": blocks,
            **dict.fromkeys(("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"), 0),
            **dict.fromkeys(("%ntid.y", "%ntid.z", "%nctaid.y", "%nctaid.z"), 1),
        }

    # Control flow ----------------------------------------------------------------------------

    def run(self) -> None:
        """Until all threads have returned."""
        end = len(self.program.instructions)
        counters = self.program_counters
        for _ in range(MOST_BRANCHES):
            ready = (counters < end) & ~self.waiting
            if ready.any():
                begin = counters[ready].min()
                active = ready & (counters == begin)
                others = counters[ready & ~active]
                self._run_together(int(begin), int(others.min()) if others.size else end, active)
            elif self.waiting.any():
                self._pass_barrier()
            else:
                return
        raise EmulationError("the program does not come to an end")

    def _run_together(self, counter: int, meeting: int, active: np.ndarray) -> None:
        """Until the active threads branch, wait, or meet others."""
        everyone = bool(active.all())
        for self.counter in range(counter, meeting):
            instruction = self.program.instructions[self.counter]
            guard, mask = instruction.guard, active
            if guard is not None:
                mask = active & (self.read(guard, PREDICATE) ^ instruction.guard_negated)
            elif everyone:
                mask = None
            try:
                targets = self.handlers[self.counter](self, instruction, mask)
            except (FaultError, EmulationError) as error:
                raise self._explained(error, instruction) from error
            if targets is not None:
                self.program_counters[active] = self.counter + 1
                self.program_counters[self.active(mask)] = targets
                return
        self.program_counters[active] = meeting

    def _pass_barrier(self) -> None:
        """Every block is at one, or has returned."""
        blocks = self.waiting.reshape(-1, self.threads_per_block)
        incomplete = blocks.any(axis=1) & ~blocks.all(axis=1)
        if incomplete.any():
            raise EmulationError(
                f"threads of block {incomplete.argmax()} wait at a barrier, others have returned"
            )
        self.waiting[:] = False
        self.shared.barrier()

    def _explained(
        self, error: FaultError | EmulationError, instruction: Instruction
    ) -> EmulationError:
        where = ""
        if isinstance(error, FaultError):
            block, thread = divmod(error.thread, self.threads_per_block)
            where = f" (block {block}, thread {thread})"
        return EmulationError(f"{instruction.text!r} {error}{where}")

    def require_whole_warps(self, mask: Mask) -> None:
        if mask is not None:
            warps = mask.reshape(-1, WARP)
            if (warps.any(axis=1) != warps.all(axis=1)).any():
                raise EmulationError("is executed by a part of a warp")

    # Registers -------------------------------------------------------------------------------

    def read(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """The value for each thread; of one element if it is the same for all."""
        if isinstance(operand, Immediate):
            return operand.array(dtype)
        if isinstance(operand, Vector):
            return self._packed(operand, dtype)
        bits = self._bits(operand)
        if bits.dtype.itemsize != dtype.itemsize:
            bits = bits.astype(f"u{dtype.itemsize}")
        return bits.view(dtype)

    def _bits(self, operand: Operand) -> np.ndarray:
        if isinstance(operand, Register):
            if operand.name not in self.registers:
                raise EmulationError(f"reads {operand.name}, which has no value")
            return self.registers[operand.name]
        if isinstance(operand, Special) and operand.name in self.specials:
            return np.atleast_1d(self.specials[operand.name]).astype(U32)
        if isinstance(operand, Symbol) and operand.name in self.program.shared:
            return np.array([self.program.shared[operand.name]], BITS["b64"])
        raise EmulationError(f"reads {operand}, which the emulator does not know")

    def _packed(self, operand: Vector, dtype: np.dtype) -> np.ndarray:
        """The elements side by side, the first one lowest."""
        part = np.dtype(f"u{dtype.itemsize // len(operand.elements)}")
        parts = [self.everywhere(self.read(e, part)) for e in operand.elements]
        return np.stack(parts, axis=-1).view(dtype)[:, 0]

    def write(self, operand: Operand, value: np.ndarray, mask: Mask) -> None:
        if isinstance(operand, Vector):
            part = np.dtype(f"u{value.dtype.itemsize // len(operand.elements)}")
            parts = self.everywhere(value)[:, None].view(part)
            for i, element in enumerate(operand.elements):
                self.write(element, np.ascontiguousarray(parts[:, i]), mask)
            return
        if isinstance(operand, Symbol) and operand.name == "_":
            return
        if not isinstance(operand, Register):
            raise EmulationError(f"writes {operand}, which is no register")
        if operand.width > value.dtype.itemsize:  # signed values keep their sign
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{operand.width}")
        container = np.dtype(f"u{operand.width}") if operand.width else PREDICATE
        bits = value.view(container)
        if mask is None:
            self.registers[operand.name] = self.everywhere(bits)
            return
        old = self.registers.get(operand.name)
        if old is None:
            old = np.full(self.threads.size * container.itemsize, POISON, np.uint8).view(container)
        self.registers[operand.name] = np.where(mask, bits, old)

    def everywhere(self, value: np.ndarray) -> np.ndarray:
        """One contiguous element for each thread."""
        if value.size == self.threads.size:
            return value
        return np.full(self.threads.size, value[0], value.dtype)

    def addresses(self, operand: Operand, dtype: np.dtype, mask: Mask) -> np.ndarray:
        """Those of the active threads."""
        assert isinstance(operand, Address)
        base = self.everywhere(self.read(operand.base, dtype))
        addresses = base + Immediate(operand.offset).array(dtype)  # wraps around
        return (addresses if mask is None else addresses[mask]).astype(np.int64)

    def active(self, mask: Mask) -> np.ndarray:
        return self.threads if mask is None else self.threads[mask]
