"""Runs the blocks of a launch, every warp at its own pace.

Who goes on next, and for how long, is drawn from a random generator, and so is when asynchronous
copies land: a seed is an interleaving. Warps of a group that stand at the same instruction execute
it together, as one set of numpy arrays, so that there are only a few thousand steps.

Within a warp, threads whose branches parted them go on in turns: those that are behind come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.ptx.arithmetic import PREDICATE
from support.ptx.atomics import GlobalOrder
from support.ptx.bulk import BulkCopies
from support.ptx.errors import EmulationError, FaultError
from support.ptx.mbarrier import Barrier, BarrierError
from support.ptx.memory import WARP, GlobalMemory
from support.ptx.order import Order
from support.ptx.ordered_memory import RANK_SHIFT, OrderedSharedMemory
from support.ptx.program import Instruction, Program, Register, Symbol
from support.ptx.threads import Mask
from support.ptx.warps import GROUP, Block, Gang, Suspend, Warp, poisoned

#: None to go on behind it; where the threads go on; or that they cannot.
Answer = int | Suspend | None
Handler = Callable[[Gang, Instruction, Mask], Answer]

RESERVED_SHARED = 1024  # bytes at the beginning of a block's shared memory, on Hopper
REGISTERS = 65536  # of a multiprocessor
#: Generic addresses of shared memory and of parameters.
SHARED_WINDOW, PARAMETER_WINDOW = 0x7E00_0000_0000, 0x7D00_0000_0000
_LONGEST_TURN = 64  # instructions of a gang in a row
_FRUITLESS = 2_000  # turns that change nothing, and some per warp: a program caught in a loop
_FRUITLESS_OF_A_WARP = 50


class Machine:
    """A launch.

    Args:
        handlers: What executes each instruction of the program.
        shared_bytes: Dynamic ones, of each block.
        seed: Of the interleaving.
    """

    def __init__(
        self,
        program: Program,
        handlers: list[Handler],
        memory: GlobalMemory,
        parameters: dict[str, bytes],
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        shared_bytes: int,
        seed: int,
        cuts_edges: bool,
        reads_at_once: bool,
        has_inputs: bool,
    ) -> None:
        self.program = program
        self.handlers = handlers
        self.memory = memory
        self.waits_for_others = not reads_at_once and any(
            one.name == "griddepcontrol.wait" for one in program.instructions
        )
        self.has_inputs = has_inputs
        self.parameters = parameters
        self.cuts_edges = cuts_edges
        self.random = np.random.default_rng(seed)
        self.threads_per_block = int(np.prod(block))
        self.warps_per_block = self.threads_per_block // WARP
        self.cluster_size = int(np.prod(cluster))
        self.threads = np.arange(int(np.prod(grid)) * self.threads_per_block)
        self.registers: dict[str, np.ndarray] = {}
        self.program_counters = np.zeros(self.threads.size, np.int64)
        self.specials = self._specials(grid, block, cluster)
        self.blocks = self._make_blocks()
        self.warps = [warp for one in self.blocks for warp in one.warps]
        self._by_cluster = {(one.cluster, one.rank): one.number for one in self.blocks}
        base = -(-(RESERVED_SHARED + program.static_shared_bytes) // 1024) * 1024
        self.dynamic_shared = base
        self.order = Order(len(self.warps))
        self.shared = OrderedSharedMemory(
            self.order,
            base + shared_bytes,
            len(self.blocks),
            self.threads_per_block,
            self._block_of_rank,
        )
        self.global_order = GlobalOrder(self.order, len(memory.bytes))
        memory.order = self.global_order
        self.barriers: dict[int, Barrier] = {}  # by position in shared memory
        self.clusters: dict[int, Any] = {}  # state of barrier.cluster
        self.bulk = BulkCopies(self)
        self.matrices: dict[tuple[int, int], deque[Any]] = {}  # wgmma in order, by warp group
        self.parameter_offsets = self._lay_out_parameters()
        self.touched = program.registers_touched
        self.progress = 0  # counts what others may be waiting for

    def _make_blocks(self) -> list[Block]:
        blocks = []
        for number in range(self.threads.size // self.threads_per_block):
            thread = number * self.threads_per_block
            cluster, rank = (
                int(self.specials[name][thread]) for name in ("%clusterid", "%cluster_ctarank")
            )
            one = Block(number, cluster, rank)
            first = number * self.warps_per_block
            warps = range(first, first + self.warps_per_block)
            one.warps = [Warp(self, warp, one) for warp in warps]
            available = REGISTERS // self.program.blocks_together
            each = min(available // self.threads_per_block // 8 * 8, 255)
            for warp in one.warps:
                warp.per_thread_registers = each
            one.registers = available - each * self.threads_per_block
            blocks.append(one)
        return blocks

    def _specials(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
    ) -> dict[str, Any]:
        thread, number = (
            self.threads % self.threads_per_block,
            self.threads // self.threads_per_block,
        )
        tid, ctaid = _coordinates(thread, block), _coordinates(number, grid)
        in_cluster = [c % extent for c, extent in zip(ctaid, cluster, strict=True)]
        clusters = [extent // c for extent, c in zip(grid, cluster, strict=True)]
        id_of_cluster = [c // extent for c, extent in zip(ctaid, cluster, strict=True)]
        found: dict[str, Any] = {
            "%laneid": thread % WARP,
            "%warpid": thread // WARP,
            "%cluster_ctarank": _number(in_cluster, cluster),
            "%clusterid": _number(id_of_cluster, clusters),
            "%cluster_nctarank": self.cluster_size,
            "%is_explicit_cluster": 1,
            "%smid": number,
            "%clock": 0,
            "%lanemask_lt": (1 << thread % WARP) - 1,
            "%lanemask_le": (2 << thread % WARP) - 1,
            "%lanemask_eq": 1 << thread % WARP,
        }
        for axis, letter in enumerate("xyz"):
            found |= {
                f"%tid.{letter}": tid[axis],
                f"%ntid.{letter}": block[axis],
                f"%ctaid.{letter}": ctaid[axis],
                f"%nctaid.{letter}": grid[axis],
                f"%cluster_ctaid.{letter}": in_cluster[axis],
                f"%cluster_nctaid.{letter}": cluster[axis],
                f"%clusterid.{letter}": id_of_cluster[axis],
                f"%nclusterid.{letter}": clusters[axis],
            }
        return found

    def _lay_out_parameters(self) -> dict[str, int]:
        offsets, end = {}, 64
        for name, size in self.program.parameters.items():
            offsets[name] = end
            end += -(-size // 64) * 64
        return offsets

    # State ---------------------------------------------------------------------------------------

    def register(self, register: Register) -> np.ndarray:
        """Of all threads; poisoned at first."""
        table = self.registers.get(register.name)
        if table is None:
            dtype = np.dtype(f"u{register.width}") if register.width else PREDICATE
            table = self.registers[register.name] = poisoned(self.threads.size, dtype)
        return table

    def address_of(self, symbol: Symbol) -> int:
        if symbol.name in self.program.shared:
            offset = self.program.shared[symbol.name]
            if offset == self.program.static_shared_bytes:
                return self.dynamic_shared
            return RESERVED_SHARED + offset
        return self.parameter_offsets[symbol.name]

    def parameter_bytes(self, address: int, size: int) -> bytes:
        """Behind a generic address in the window of parameters."""
        return self.parameter_at(address - PARAMETER_WINDOW, size)

    def parameter_at(self, address: int, size: int) -> bytes:
        for name, offset in self.parameter_offsets.items():
            inside = address - offset
            if 0 <= inside <= self.program.parameters[name] - size:
                return self.parameters[name][inside : inside + size]
        raise EmulationError(f"uses {address:#x}, which is no parameter")

    def barrier_at(self, block: Block, address: int, warp: Warp, remote: bool = False) -> Barrier:
        """The mbarrier that `warp` uses; of another block, or from a bulk copy, if `remote`."""
        position = self.shared_position(block, address)
        barrier = self.barriers.get(position)
        if barrier is None:
            raise EmulationError(f"uses an mbarrier at {address:#x}, where none is initialised")
        owner = self.blocks[barrier.block]
        if owner is not block and owner.over:
            raise EmulationError(f"signals {barrier}, which has exited")
        if not self.order.relies_on(warp.number, barrier.initialised):
            raise EmulationError(f"uses {barrier} before it has seen the initialisation")
        if remote and not self.order.relies_on(warp.number, barrier.initialised, fenced=True):
            raise EmulationError(f"uses {barrier}, with no fence behind its initialisation")
        return barrier

    def _block_of_rank(self, number: int, rank: int) -> int:
        """In the cluster of a block; KeyError if there is none, ValueError if it is over."""
        found = self._by_cluster[self.blocks[number].cluster, rank]
        if found != number and self.blocks[found].over:
            raise ValueError(f"uses the memory of block {found}, which has exited")
        return found

    def shared_position(self, block: Block, address: int, size: int = 8) -> int:
        if SHARED_WINDOW <= address < SHARED_WINDOW + (64 << RANK_SHIFT):
            address -= SHARED_WINDOW
        try:
            return self.shared.position(address, block.number, size)
        except ValueError as error:
            raise EmulationError(str(error)) from None

    # Running -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until all threads have returned and all copies have landed."""
        fruitless, progress, expired_at = 0, -1, -1
        while True:
            self._advance_asynchronous()
            warp = self._ready()
            if warp is not None:
                fruitless = 0 if self.progress != progress else fruitless + 1
                progress = self.progress
                if fruitless > _FRUITLESS + _FRUITLESS_OF_A_WARP * len(self.warps):
                    raise EmulationError(self._deadlock("the program is caught in a loop"))
                self._turn(warp)
            elif self.bulk.pending:
                self.bulk.advance()
            elif self._over():
                return
            elif self.progress != expired_at and self._expire():
                expired_at = self.progress
            else:
                raise EmulationError(self._deadlock("deadlock"))

    def _ready(self) -> Warp | None:
        """One of the warps that can run, whichever; to ask all of them takes longer than to run."""
        for number in self.random.permutation(len(self.warps)):
            if self.warps[number].ready():
                return self.warps[number]
        return None

    def _over(self) -> bool:
        return all(block.over for block in self.blocks)

    def _advance_asynchronous(self) -> None:
        if self.bulk.pending and self.random.random() < 0.25:
            self.bulk.advance()
        for operations in self.matrices.values():
            if operations and self.random.random() < 0.1:
                operations.popleft().execute()

    def _expire(self) -> bool:
        """End the waits that may end early; whether there were any."""
        found = False
        for warp in self.warps:
            kept = [wait for wait in warp.waits if not wait[1].peek]
            if len(kept) < len(warp.waits):
                warp.waits, warp.expired, found = kept, True, True
        return found

    def _turn(self, warp: Warp) -> None:
        gang = self._gang(warp)
        longest = int(self.random.integers(1, _LONGEST_TURN))
        if gang.lanes is None:
            assert warp.counter is not None
            self._execute(gang, warp.counter, longest)
        else:
            self._execute(gang, int(warp.counters[gang.lanes].min()), longest)

    def _gang(self, warp: Warp) -> Gang:
        """The warp and others of its group at the same instruction; some of its threads if they
        are not all together."""
        if warp.counter is None:
            gang = Gang(self, [warp])
            runnable = warp.runnable()
            behind = warp.counters[runnable].min()
            gang.lanes = runnable & (warp.counters == behind)
            others = warp.counters[runnable & (warp.counters > behind)]
            gang.meeting = int(others.min()) if others.size else gang.meeting
            return gang
        fellows = [w for w in warp.group if w.counter == warp.counter and w.ready()]
        name = self.program.instructions[warp.counter].name
        if not name.startswith("wgmma.mma") and self.random.random() < 0.1:
            fellows = [w for w in fellows if w is warp or self.random.random() < 0.5]
        return Gang(self, fellows)

    def _execute(self, gang: Gang, counter: int, longest: int) -> None:
        lanes, instructions = gang.lanes, self.program.instructions
        end = len(instructions)
        for _ in range(longest):
            if counter == end or (lanes is not None and counter >= gang.meeting):
                break
            gang.counter = counter
            instruction = instructions[counter]
            mask = lanes
            if instruction.guard is not None:
                mask = gang.read(instruction.guard, PREDICATE) ^ instruction.guard_negated
                if lanes is not None:
                    mask &= lanes
                taken = np.count_nonzero(mask)
                if not taken:
                    counter += 1
                    continue
                if taken == mask.size:
                    mask = None
            try:
                if gang.in_flight and not gang.in_flight.isdisjoint(self.touched[counter]):
                    self._require_not_in_flight(gang, instruction)
                answer = self.handlers[counter](gang, instruction, mask)
            except (FaultError, EmulationError, BarrierError) as error:
                raise self._explained(error, instruction, gang) from error
            if answer is None:
                counter += 1
            elif isinstance(answer, Suspend):
                self._suspend(gang, answer, mask, counter)
                return
            elif mask is None or (lanes is not None and (mask == lanes).all()):
                counter = answer
            else:
                self._move(gang, lanes, counter + 1)
                self._move(gang, mask, answer)
                return
        self._move(gang, lanes, counter)

    def _require_not_in_flight(self, gang: Gang, instruction: Instruction) -> None:
        if not instruction.name.startswith("wgmma.mma"):
            names = sorted(gang.in_flight & self.touched[gang.counter])
            raise EmulationError(f"uses {names[0]}, which belongs to an unfinished wgmma")

    def _move(self, gang: Gang, mask: Mask, counter: int) -> None:
        if mask is None:
            self.program_counters[gang.index] = counter
            for warp in gang.warps:
                warp.counter = counter
        else:
            self.program_counters[gang.threads[mask]] = counter
            for warp in gang.warps:
                warp.settle()
        if counter == len(self.program.instructions):
            self.progress += 1
            for block in {warp.block.number: warp.block for warp in gang.warps}.values():
                self._exited(block)

    def _suspend(self, gang: Gang, answer: Suspend, mask: Mask, counter: int) -> None:
        self._move(gang, gang.lanes, counter + 1)
        waiting = mask if answer.mask is None else answer.mask
        if answer.again:
            self._move(gang, waiting, counter)
        everyone = np.ones(len(gang.threads), bool) if waiting is None else waiting
        for warp, lanes in zip(gang.warps, everyone.reshape(-1, WARP), strict=True):
            if lanes.any():
                warp.waits.append((lanes, answer))

    def _exited(self, block: Block) -> None:
        if not block.over:
            return
        on_their_way = self.bulk.landing_in(block.number)
        if on_their_way:
            raise EmulationError(f"block {block.number} exits while {on_their_way} is on its way")
        for reader in self.shared.reads_in_progress(block.number):
            raise EmulationError(f"block {block.number} exits while {reader} reads its memory")

    # Errors --------------------------------------------------------------------------------------

    def _explained(self, error: Exception, instruction: Instruction, gang: Gang) -> EmulationError:
        if isinstance(error, FaultError):
            block, thread = divmod(error.thread, self.threads_per_block)
            where = f"block {block}, thread {thread}"
        else:
            warps = ", ".join(str(warp.local) for warp in gang.warps)
            where = f"block {gang.block.number}, warp {warps}"
        text = instruction.text
        if len(text) > 200:
            text = text[:100] + " … " + text[-60:]
        return EmulationError(f"{text!r} {error} ({where})")

    def _deadlock(self, title: str) -> str:
        lines = [f"{title}:"]
        for warp in self.warps:
            for _, wait in warp.waits:
                lines.append(f"  {warp} waits for {wait.what}")
            if not warp.waits and not warp.over:
                lines.append(f"  {warp} goes on and on")
        return "\n".join(lines)


def _coordinates(number: np.ndarray, extents: Sequence[int]) -> list[np.ndarray]:
    x, y, _ = extents
    return [number % x, number // x % y, number // (x * y)]


def _number(coordinates: Sequence[np.ndarray], extents: Sequence[int]) -> np.ndarray:
    (a, b, c), (x, y, _) = coordinates, extents
    return a + x * (b + y * c)


__all__ = ["GROUP", "Answer", "Handler", "Machine"]
