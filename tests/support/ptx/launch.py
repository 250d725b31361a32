"""Launches a kernel on emulated memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from support.ptx.errors import EmulationError
from support.ptx.grid import Grid
from support.ptx.instructions import handlers
from support.ptx.memory import GlobalMemory
from support.ptx.program import Program


def launch(
    program: Program,
    memory: GlobalMemory,
    parameters: Sequence[bytes],
    *,
    blocks: int,
    threads: int,
    shared_bytes: int = 0,
) -> None:
    """Run all blocks.

    Args:
        shared_bytes: Of dynamic shared memory.

    Raises:
        EmulationError: with the instruction, and the block and thread, that did wrong.
    """
    if program.threads not in (None, threads):
        raise EmulationError(f"the kernel is for {program.threads} threads, not {threads}")
    sizes = list(program.parameters.values())
    if [len(parameter) for parameter in parameters] != sizes:
        given = [len(parameter) for parameter in parameters]
        raise EmulationError(f"the parameters have {given} bytes; the kernel takes {sizes}")
    grid = Grid(
        program,
        handlers(program),
        memory,
        dict(zip(program.parameters, parameters, strict=True)),
        blocks=blocks,
        threads_per_block=threads,
        shared_bytes=program.static_shared_bytes + shared_bytes,
    )
    with np.errstate(all="ignore"):  # of threads that are not active
        grid.run()


def tensor_parameter(pointer: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """A CuTe tensor as a kernel takes it: what of shape and strides is known at run time only."""
    return struct.pack(f"@Q{len(shape)}i{len(strides)}q", pointer, *shape, *strides)
