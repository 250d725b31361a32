"""All threads of all blocks, which execute a program at once in numpy arrays.

Every thread has a program counter of its own. What runs next is always the smallest one, for all
threads that have it: after a branch the threads behind catch up with those ahead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from support.ptx.arithmetic import PREDICATE
from support.ptx.errors import EmulationError, FaultError
from support.ptx.memory import POISON, WARP, GlobalMemory, SharedMemory
from support.ptx.program import Instruction, Program, Register
from support.ptx.threads import Mask, Threads

#: Where those threads go on that do not go on behind the instruction.
Targets = int | None
Handler = Callable[["Grid", Instruction, Mask], Targets]

#: A program that branches more often than this is taken to be caught in a loop.
MOST_BRANCHES = 1_000_000


class Grid(Threads):
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

    # Registers -------------------------------------------------------------------------------

    def bits_of(self, register: Register) -> np.ndarray:
        return self.registers[register.name]

    def set_bits(self, register: Register, bits: np.ndarray, mask: Mask) -> None:
        if mask is None:
            self.registers[register.name] = self.everywhere(bits)
            return
        old = self.registers.get(register.name)
        if old is None:
            size = self.threads.size * bits.dtype.itemsize
            old = np.full(size, POISON, np.uint8).view(bits.dtype)
        self.registers[register.name] = np.where(mask, bits, old)

    def special(self, name: str) -> np.ndarray | int:
        return self.specials[name]
