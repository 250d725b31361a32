"""How long an element-wise kernel is expected to take: bytes over what the memory moves.

    bytes    everything that is read and written, each element once, a broadcast one as often as it
             stands in memory; parts of reductions through L2
    memory   its bandwidth, or less where too few bytes are on their way at a time: those of all
             CTAs that share a multiprocessor (Little's law)
    waves    no less than one latency of the memory for each step of each wave
    edges    threads of tiles that lie behind the last row or column take their time as well

The constants are those of an H200.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kernel_api.arguments import ElementwiseArguments
from kernel_api.devices import multiprocessors_of
from kernel_api.operands import Operand

#: Bytes per second that a copy reads and writes, and that are read from L2.
_BANDWIDTH, _L2_BANDWIDTH = 4.3e12, 6e12
#: Seconds from a request to the end of what is done with it.
_LATENCY = 1.2e-6
#: Seconds of a launch.
_OVERHEAD = 2.5e-6
#: Bytes that a multiprocessor must have on their way to see all of its share of the memory.
_IN_FLIGHT = 40 * 1024
#: Seconds until a CTA knows that it is the last one.
_COUNT = 1.5e-6
#: By bytes that a thread moves at once: narrow ones take more instructions.
_VECTOR_COST = {16: 1.0, 8: 1.03, 4: 1.3, 2: 2.0, 1: 4.0}
#: Of the time, where neighbours in memory are not those of a row.
_STRIDED_COST = 3.0
#: Elements a second that a multiprocessor computes.
_ELEMENTS = 60e9

_THREADS, _REGISTERS, _MOST_CTAS = 2048, 64 * 1024, 32
#: Of a thread: a number, and for each element that it has at a time.
_FIXED, _PER_ELEMENT = 28, 1.2


class Shape(NamedTuple):
    """What the model knows of a kernel.

    Attributes:
        threads: Of a CTA.
        tile: Rows and columns.
        elements: Of a thread at a time.
        steps: Times that a CTA takes new rows.
        vector_bytes: That a thread moves at once, of the widest type.
        part_bytes: Of reductions, of all CTAs.
    """

    threads: int
    tile: tuple[int, int]
    elements: int
    steps: int
    vector_bytes: int
    part_bytes: int


def seconds(args: ElementwiseArguments, shape: Shape) -> float:
    """Expected of a launch."""
    multiprocessors = multiprocessors_of(args.device)
    tiles = -(-args.M // shape.tile[0]) * -(-args.N // shape.tile[1]) * args.L
    resident = _resident(shape)
    waves = -(-tiles // (resident * multiprocessors))
    steps = min(shape.steps, -(-args.M * shape.steps // shape.tile[0]))
    in_flight = min(resident, -(-tiles // multiprocessors)) * shape.threads * shape.elements
    share = min(1.0, in_flight * args.x.dtype.itemsize / _IN_FLIGHT)
    moved = sum(map(moved_bytes, args.named_operands.values()))
    memory = moved / (_BANDWIDTH * share) * _VECTOR_COST[shape.vector_bytes]
    if any(_is_strided(one) for one in (args.x, args.out)):
        memory *= _STRIDED_COST
    computed = tiles * math.prod(shape.tile) / (_ELEMENTS * min(tiles, multiprocessors))
    found = max(memory, computed, waves * steps * _LATENCY) + waves * _LATENCY / 4
    if shape.part_bytes:
        found += 2 * shape.part_bytes / _L2_BANDWIDTH + waves * _COUNT
    return _OVERHEAD + found


def moved_bytes(operand: Operand) -> int:
    """Of what is there in memory."""
    extents = zip(operand.shape, operand.stride, strict=True)
    elements = math.prod(extent if stride or not extent else 1 for extent, stride in extents)
    return elements * operand.dtype.itemsize


def _is_strided(operand: Operand) -> bool:
    return operand.stride[-1] not in (0, 1) and operand.shape[-1] > 1


def _resident(shape: Shape) -> int:
    """CTAs that share a multiprocessor, if threads have so many registers."""
    registers = -(-int(_FIXED + _PER_ELEMENT * shape.elements) // 8) * 8
    return max(
        1,
        min(_THREADS // shape.threads, _REGISTERS // (shape.threads * registers), _MOST_CTAS),
    )
