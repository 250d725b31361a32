"""How long an element-wise kernel is expected to take: bytes over what the memory moves.

    bytes    everything that is read and written, each element once, a broadcast one as often as it
             stands in memory; parts of reductions through L2
    memory   its bandwidth, or less where too few bytes are on their way at a time: those of all
             CTAs that share a multiprocessor (Little's law), or where multiprocessors have
             different numbers of tiles
    waves    no less than one latency of the memory for each step of each wave, and more where each
             step leaves parts of rows
    parts    a thread adds those of a value one after the other
    rows     told apart as estimates do, see :func:`told_apart`
    edges    threads of tiles that lie behind the last row or column take their time as well, and
             have nothing on their way

Bandwidths are those of the norms' model, an H200's. Latency, launch, and what rows and parts cost
are of sums over columns measured there, 2026-11-24; the others are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

from kernel_api._estimated_sizes import told_apart
from kernel_api.arguments import ElementwiseArguments
from kernel_api.devices import multiprocessors_of
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl.h200 import (
    BANDWIDTH,
    L2_BANDWIDTH,
    MOST_CTAS,
    REGISTERS,
    THREADS,
)

#: Seconds from a request to the end of what is done with it; more if rows are summed then.
_LATENCY, _ROW_SUMS = 0.55e-6, 1.2e-6
#: Seconds of a launch.
_OVERHEAD = 1.6e-6
#: Bytes that a multiprocessor must have on their way to see all of its share of the memory.
_IN_FLIGHT = 16 * 1024
#: Seconds until a CTA knows that it is the last one, and to add a part.
_COUNT, _PART = 1.2e-6, 0.03e-6
#: By bytes that a thread moves at once: narrow ones take more instructions.
_VECTOR_COST = {16: 1.0, 8: 1.03, 4: 1.3, 2: 2.0, 1: 4.0}
#: Of the time, where neighbours in memory are not those of a row.
_STRIDED_COST = 3.0
#: Of the time, where a CTA waits for one lot of rows after the other.
_STEPS_COST = 1.05
#: Bytes of a row that a CTA moves side by side, so that no more would help; the cost of half.
_ROW_BYTES, _HALF_ROW_COST = 8192, 0.015
#: Elements a second that a multiprocessor computes.
_ELEMENTS = 60e9

_REGISTER_BYTES = 4
#: Registers of a thread beside what it has loaded: a number, and for each element.
_FIXED, _PER_ELEMENT = 26, 0.3


class Shape(NamedTuple):
    """What the model knows of a kernel.

    Attributes:
        threads: Of a CTA.
        tile: Rows and columns of a CTA.
        elements: Of a thread at a time.
        steps: Times that a CTA takes new rows.
        along: Times that it takes new columns of its rows.
        vector_bytes: That a thread moves at once, of the widest type.
        part_bytes: Of reductions, of all CTAs.
        parts: That one thread adds.
        leaves_rows: Whether parts of rows are left at every step.
    """

    threads: int
    tile: tuple[int, int]
    elements: int
    steps: int
    along: int
    vector_bytes: int
    part_bytes: int
    parts: int
    leaves_rows: bool


def seconds(args: ElementwiseArguments, shape: Shape) -> float:
    """Expected of a launch."""
    multiprocessors, rows = multiprocessors_of(args.device), told_apart(args.M)
    tiles_n = -(-args.N // shape.tile[1])
    tiles = max(1, -(-rows // shape.tile[0]) * tiles_n * args.L)
    loaded = shape.elements * _read_per_element(args)
    resident = _resident(shape, loaded)
    waves = -(-tiles // (resident * multiprocessors))
    down = min(shape.steps, -(-rows * shape.steps // shape.tile[0]))
    steps = down * shape.along
    of_one = -(-tiles // multiprocessors)
    used = args.N / (tiles_n * shape.tile[1]) if args.N else 1.0
    share = min(1.0, min(resident, of_one) * shape.threads * loaded * used / _IN_FLIGHT)
    moved = sum(_moved(args))
    memory = moved / (BANDWIDTH * share) * _VECTOR_COST[shape.vector_bytes]
    memory *= of_one * multiprocessors / tiles * _row_cost(args, shape)
    if any(_is_strided(one) for one in (args.x, args.out)):
        memory *= _STRIDED_COST
    if steps > 1:
        memory *= _STEPS_COST
    computed = of_one * math.prod(shape.tile) * down / (shape.steps * _ELEMENTS)
    latency = _LATENCY + _ROW_SUMS * shape.leaves_rows
    found = max(memory, computed, waves * steps * latency) + waves * _LATENCY / 4
    if shape.part_bytes:
        found += 2 * shape.part_bytes / L2_BANDWIDTH + waves * _COUNT + shape.parts * _PART
    return _OVERHEAD + found


def estimated_by(args: ElementwiseArguments) -> Hashable:
    """What of the arguments, beside their types and what kernels ask of operands, estimates depend
    on."""
    strided = _is_strided(args.x), _is_strided(args.out)
    return told_apart(args.M), args.N, args.L, args.signature, strided, _moved(args)


def _moved(args: ElementwiseArguments) -> tuple[int, ...]:
    """Bytes of every tensor."""
    return tuple(map(moved_bytes, args.named_operands.values()))


def moved_bytes(operand: Operand) -> int:
    """Of what is there in memory."""
    found, rows = operand.dtype.itemsize, max(len(operand.shape) - 2, 0)
    for mode, (extent, stride) in enumerate(zip(operand.shape, operand.stride, strict=True)):
        if stride or not extent:
            found *= told_apart(extent) if mode == rows else extent
    return found


def _read_per_element(args: ElementwiseArguments) -> float:
    """Bytes that are on their way for each element of the accumulator."""
    inputs = () if args.epilogue is None else args.epilogue.inputs.values()
    more = sum(map(moved_bytes, inputs)) / max(told_apart(args.M) * args.N * args.L, 1)
    return args.x.dtype.itemsize + more


def _row_cost(args: ElementwiseArguments, shape: Shape) -> float:
    """Rows of the memory are wide."""
    columns = min(shape.tile[1] // shape.along, args.N)
    halved = math.log2(max(1.0, _ROW_BYTES / max(columns * args.x.dtype.itemsize, 1)))
    return 1.0 + _HALF_ROW_COST * halved


def _is_strided(operand: Operand) -> bool:
    return operand.stride[-1] not in (0, 1) and operand.shape[-1] > 1


def _resident(shape: Shape, loaded: float) -> int:
    """CTAs that share a multiprocessor, if threads have so many registers."""
    needed = _FIXED + loaded / _REGISTER_BYTES + _PER_ELEMENT * shape.elements
    registers = min(-(-int(needed) // 8) * 8, 255)
    fitting = REGISTERS // (shape.threads * registers)
    return max(1, min(THREADS // shape.threads, fitting, MOST_CTAS))
