"""Launches a kernel for sm_90a on emulated memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from support.ptx import decoded
from support.ptx import functions as _functions  # noqa: F401  it adds operations
from support.ptx import instructions as common
from support.ptx.atomics import ATOMICS
from support.ptx.bulk import BULK
from support.ptx.errors import EmulationError
from support.ptx.host import Launch
from support.ptx.machine import Handler, Machine
from support.ptx.memory import GlobalMemory
from support.ptx.program import Instruction, Program
from support.ptx.synchronization import SYNCHRONIZATION
from support.ptx.wgmma import WGMMA

#: Of instructions, by theme; the first pattern that matches decides.
TABLES: Sequence[Sequence[tuple[str, Any]]] = (SYNCHRONIZATION, BULK, WGMMA, ATOMICS)
_PATTERNS = [(re.compile(pattern), handler) for table in TABLES for pattern, handler in table]


def launch(
    program: Program,
    memory: GlobalMemory,
    asked: Launch,
    *,
    seed: int = 0,
    cuts_edges: bool = False,
    reads_at_once: bool = False,
    has_inputs: bool = False,
) -> None:
    """Run what the host code has launched.

    Args:
        seed: Of the interleaving of warps and asynchronous copies.
        cuts_edges: Whether rows that are never written are multiplied too: none of them is stored.
        reads_at_once: Whether what it reads was there before the kernel before it began, so that it
            does not wait for that.
        has_inputs: Whether a kernel of the same call is before it, so that inputs are there when it
            begins.

    Raises:
        EmulationError: with the instruction, and the block and warp or thread, that did wrong.
    """
    threads = int(np.prod(asked.block))
    if program.threads not in (None, threads):
        raise EmulationError(f"the kernel is for {program.threads} threads, not {threads}")
    if any(extent % part for extent, part in zip(asked.grid, asked.cluster, strict=True)):
        raise EmulationError(f"the grid {asked.grid} is no multiple of {asked.cluster}")
    if not within_limits(asked.grid):
        raise EmulationError(f"the grid {asked.grid} has more blocks than GPUs take")
    machine = Machine(
        program,
        _handlers(program),
        memory,
        dict(zip(program.parameters, asked.parameters, strict=True)),
        grid=asked.grid,
        block=asked.block,
        cluster=asked.cluster,
        shared_bytes=asked.shared_bytes,
        seed=seed,
        cuts_edges=cuts_edges,
        reads_at_once=reads_at_once,
        has_inputs=has_inputs,
    )
    with np.errstate(all="ignore"):  # of threads that are not active
        machine.run()


def within_limits(grid: Sequence[int]) -> bool:
    """Whether GPUs take it (CUDA C++ Programming Guide, Technical Specifications)."""
    return grid[0] < 1 << 31 and max(grid[1:]) < 1 << 16


@lru_cache(maxsize=32)  # tests often run a program on several operands, and by several seeds
def _handlers(program: Program) -> list[Handler]:
    return [handler_of(instruction, program) for instruction in program.instructions]


def handler_of(instruction: Instruction, program: Program) -> Handler:
    """EmulationError if the instruction is not known."""
    return (
        decoded.parameter(instruction, program)
        or _handler_of(instruction.name)
        or decoded.computation(instruction, program)
        or common.handler_of(instruction)  # type: ignore[return-value]
    )


@cache
def _handler_of(name: str) -> Handler | None:
    for pattern, handler in _PATTERNS:
        if match := pattern.fullmatch(name):
            return partial(handler, match)
    return None
