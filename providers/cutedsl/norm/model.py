"""How long a norm is expected to take: bytes over what the memory moves, in whole waves of CTAs.

    bytes    each matrix once; what is not kept in shared memory once more for each time that it
             is looked at again, from L2
    memory   its bandwidth, or less where too few bytes are on their way at a time: those of all
             CTAs that share a multiprocessor (Little's law)
    waves    no less than one latency of the memory for each turn of each wave, and for each
             vector of a thread where rows are streamed
    turns    what a CTA that takes several rows waits for between them
    maxima   an atomic of every CTA, which holds its place until it has returned
    lanes    what they tell each other of every vector
    parts    sums over rows that CTAs leave and another kernel adds up, through L2
    gradients   of rows that are staged: each turn takes what its bytes and what its instructions
             take, which overlap in part; CTAs that share a multiprocessor wait for each other's
             instructions, but not for each other's latencies

Numbers of rows that are nearly the same are one, see :func:`told_apart`. The constants are those of
an H200.
"""

from __future__ import annotations

from typing import Any

from kernel_api._estimated_sizes import told_apart
from kernel_api.arguments.norm import (
    LayerNormArguments,
    LayerNormBackwardArguments,
    NormArguments,
)
from kernel_api.devices import multiprocessors_of
from kernel_api.metadata import OperandsMetadata
from kernel_api.providers.cutedsl.h200 import (
    BANDWIDTH,
    L2_BANDWIDTH,
    MOST_CTAS,
    REGISTERS,
    THREADS,
)
from kernel_api.providers.cutedsl.norm.base import (
    RowDesign,
    further_rows,
    staged_bytes,
    vector_of,
)

#: What L2 keeps until it is read again.
_L2_BYTES = 30e6
#: Seconds from the request of a row to the end of what is done with it.
_LATENCY = 1.5e-6
#: Seconds that a thread waits for a vector where rows are streamed.
_STEP = 0.27e-6
#: Seconds of a launch.
_OVERHEAD = 2.5e-6
#: Bytes that a multiprocessor must have on their way to see all of its share of the memory.
_IN_FLIGHT = 40 * 1024

#: Rows on their way of each that is in use, where none is fetched ahead.
_PART_OF_TIME = 0.9
#: Of the time, where a CTA takes several rows after each other.
_TURNS_COST = 1.12
#: Of the time, where what rows are multiplied by is read again for every one of them.
_FACTORS_COST = 1.1
#: Seconds from the last row of a CTA until the largest value is with the others'.
_MAXIMA_LATENCY = 2.5e-6
#: Seconds until the scale of a vector is found from the lanes that share it.
_EXCHANGE_LATENCY = 0.2e-6
#: By bytes of a vector: narrow ones take more instructions.
_VECTOR_COST = {16: 1.0, 8: 1.15, 4: 1.5, 2: 3.0}

# Of a turn of a gradient.
#: Bytes that a multiprocessor has on their way at least, where its share of the memory is busy.
_GRADIENT_IN_FLIGHT = 25 * 1024
#: Seconds of instructions: of a warp, and more where rows have means; of a warp's vector, and more
#: where there are elements in it.
_WARP_TIME, _WARP_TIME_OF_MEAN = 1.7e-9, 11.7e-9
_VECTOR_TIME, _ELEMENTS_TIME = 7.5e-9, 0.7e-9
#: Seconds that a CTA waits: for each vector of a thread, and where rows have means.
_VECTOR_LATENCY, _MEAN_LATENCY = 54e-9, 82e-9
#: How bytes and instructions overlap: 1 if not at all, more the better they do.
_OVERLAP = 1.25
#: Seconds of the kernel that adds up sums over rows, and how many times each part moves.
_SUMS_TIME, _PART_MOVES = 4.1e-6, 3.3

_WARP = 32
#: Of a multiprocessor.
_SHARED_MEMORY = 220 * 1024
#: Of a thread: a number, and one per element that it has of a row.
_REGISTERS_OF_ROW, _REGISTERS_OF_TURNS = (24, 0.6), (48, 0.4)
_REGISTERS_OF_MEAN, _REGISTERS_OF_TRANSFORM, _MOST_FACTORS = 8, 12, 32


def forward(
    args: Any, design: RowDesign, operands: OperandsMetadata, turns: int, *, exchanges: bool = False
) -> float:
    """Seconds.

    Args:
        turns: Times that a CTA takes new rows.
        exchanges: Whether lanes tell each other of every vector before it is written.
    """
    multiprocessors = multiprocessors_of(args.device)
    transformed = getattr(args, "hadamard", False)
    registers = _registers(design, turns, isinstance(args, LayerNormArguments), transformed)
    resident = _resident(design, operands, args, registers)
    waves = -(-told_apart(args.M) // (design.rows * turns * resident * multiprocessors))
    seconds = _seconds(args, design, operands, resident, waves * turns, waves)
    if turns > 1:
        seconds *= _TURNS_COST
        if transformed and not _factors_kept(design):
            seconds *= _FACTORS_COST
    if exchanges:
        vectors = -(-args.N // (design.threads_per_row * vector_of(operands)))
        seconds += waves * turns * vectors * _EXCHANGE_LATENCY
    if getattr(args, "finds_maxima", False):
        seconds += waves * _MAXIMA_LATENCY
    return seconds


def _registers(design: RowDesign, turns: int, centred: bool, transformed: bool) -> int:
    """About so many a thread has."""
    fixed, per_element = _REGISTERS_OF_TURNS if turns > 1 else _REGISTERS_OF_ROW
    registers = fixed + per_element * design.elements + centred * _REGISTERS_OF_MEAN
    if transformed:
        registers += _REGISTERS_OF_TRANSFORM + _factors_kept(design)
    return -(-int(registers) // 8) * 8


def backward(
    args: NormArguments,
    design: RowDesign,
    operands: OperandsMetadata,
    resident: int,
    parts: int,
) -> float:
    """Seconds.

    Args:
        resident: CTAs per multiprocessor.
        parts: Of each sum over rows.
    """
    multiprocessors = multiprocessors_of(args.device)
    rows = told_apart(args.M)
    blocks = min(resident * multiprocessors, -(-rows // design.rows))
    turns = -(-rows // max(design.rows * blocks, 1))
    if design.elements:
        together = max(blocks / multiprocessors, 1.0)
        seconds: float = _OVERHEAD + _LATENCY + turns * _turn(args, design, operands, together)
    else:
        seconds = _seconds(args, design, operands, resident, turns, 1)
    sums = sum(name in args.further for name in ("dweight", "dbias"))
    if not sums:
        return seconds
    if not design.elements:  # they are made of what is read again
        sizes = _sizes(operands)
        read = sizes["x"] + sizes["dy"]
        seconds += _OVERHEAD + rows * args.N * read / BANDWIDTH
    seconds += _SUMS_TIME + _PART_MOVES * parts * 4 * args.N * sums / L2_BANDWIDTH
    return seconds


def _turn(args: NormArguments, design: RowDesign, operands: OperandsMetadata, ctas: float) -> float:
    """Seconds that so many CTAs of a multiprocessor take for their next rows together."""
    sizes, vector = _sizes(operands), vector_of(operands)
    beside = _itemsizes(further_rows(args))
    row = ctas * design.rows * args.N
    ahead = max(design.stages - 1, _PART_OF_TIME)
    in_flight = row * (sizes["x"] + sizes["dy"] + beside) * ahead
    share = min(1.0, in_flight / _GRADIENT_IN_FLIGHT) * BANDWIDTH / multiprocessors_of(args.device)
    bytes_time = row * (sum(sizes.values()) + beside) / share
    bytes_time *= _VECTOR_COST[vector * sizes["x"]]
    centred = isinstance(args, LayerNormBackwardArguments)
    warps, vectors = design.threads / _WARP, design.elements // vector
    issued = warps * (_WARP_TIME + centred * _WARP_TIME_OF_MEAN + vectors * _VECTOR_TIME)
    issued += design.rows * args.N / (_WARP * vector) * _ELEMENTS_TIME
    waited = vectors * _VECTOR_LATENCY + centred * _MEAN_LATENCY
    instructions_time = max(ctas * issued, issued + waited)
    overlapped = bytes_time**_OVERLAP + instructions_time**_OVERLAP
    seconds: float = overlapped ** (1 / _OVERLAP)
    return seconds


def _factors_kept(design: RowDesign) -> int:
    """Of a row that is transformed, the factors that a thread has in registers."""
    return design.elements if design.elements <= _MOST_FACTORS else 0


def _resident(design: RowDesign, operands: OperandsMetadata, args: Any, registers: int) -> int:
    """CTAs that share a multiprocessor, if threads have so many registers."""
    return min(
        THREADS // design.threads,
        max(1, REGISTERS // (design.threads * registers)),
        _SHARED_MEMORY // (staged_bytes(design, operands, args) + 1024),
        MOST_CTAS,
    )


def _seconds(
    args: Any,
    design: RowDesign,
    operands: OperandsMetadata,
    resident: int,
    turns: int,
    waves: int,
) -> float:
    sizes, beside = _sizes(operands), _itemsizes(further_rows(args))
    rows = told_apart(args.M)
    moved = sum(sizes.values()) + _itemsizes(further_rows(args, written=True))
    read = beside + sum(size for name, size in sizes.items() if name in ("x", "dy"))
    row = args.N * read
    ahead = max(design.stages - 1, _PART_OF_TIME)
    in_flight = resident * design.rows * row * ahead
    share = min(1.0, in_flight / _IN_FLIGHT)
    multiprocessors = multiprocessors_of(args.device)
    seconds: float = rows * args.N * moved / (BANDWIDTH * share)
    if not design.elements:
        seconds += _read_again(rows * row, resident * design.rows * row * multiprocessors)
    seconds *= _VECTOR_COST[vector_of(operands) * sizes["x"]]
    of_row = _LATENCY + _STEP * _steps(args.N, design, operands)
    return _OVERHEAD + max(seconds, turns * of_row) + waves * _LATENCY / 4


def _sizes(operands: OperandsMetadata) -> dict[str, int]:
    """Bytes of an element of each matrix."""
    return {name: t.dtype.itemsize for name, t in operands.tensors.items() if t.dtype is not None}


def _itemsizes(matrices: dict[str, Any]) -> int:
    """Bytes of an element of all of them."""
    return sum(one.dtype.itemsize for one in matrices.values())


def _steps(N: int, design: RowDesign, operands: OperandsMetadata) -> int:
    """Vectors of a row that is streamed, which a thread waits for one after the other, twice."""
    if design.elements:
        return 0
    return 2 * -(-N // (design.threads_per_row * vector_of(operands)))


def _read_again(amount: int, in_use: int) -> float:
    """Seconds for so many bytes, of which so many are in use at a time: what L2 does not keep of
    those comes from memory once more."""
    kept = min(1.0, _L2_BYTES / max(min(in_use, amount), 1))
    return amount * (kept / L2_BANDWIDTH + (1 - kept) / BANDWIDTH)
