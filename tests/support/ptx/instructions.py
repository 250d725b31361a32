"""What executes each instruction."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from support.ptx.arithmetic import OPERATIONS, TYPES, U32, Operation
from support.ptx.errors import EmulationError
from support.ptx.grid import Grid, Handler, Mask, Targets
from support.ptx.matrix import (
    MULTIPLIES,
    MatrixMultiply,
    load_fragments,
    store_fragments,
)
from support.ptx.memory import WARP
from support.ptx.program import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Program,
    Symbol,
    Vector,
)

U64 = TYPES["u64"]


def handlers(program: Program) -> list[Handler]:
    """What executes each instruction; EmulationError if one is unknown, executed or not."""
    return [handler_of(instruction) for instruction in program.instructions]


def handler_of(instruction: Instruction) -> Handler:
    name = instruction.name
    if name in OPERATIONS:
        operation = OPERATIONS[name]
        if len(instruction.operands) == 1 + len(operation.inputs):
            return partial(_compute, operation)
    elif name in MULTIPLIES:
        return partial(_multiply, MULTIPLIES[name])
    for pattern, handler in _PATTERNS:
        if match := pattern.fullmatch(name):
            return partial(handler, match)
    raise EmulationError(f"the emulator does not know the instruction {instruction.text!r}")


# Registers ----------------------------------------------------------------------------------


def _compute(operation: Operation, grid: Grid, instruction: Instruction, mask: Mask) -> None:
    target, *sources = instruction.operands
    values = [grid.read(s, dtype) for s, dtype in zip(sources, operation.inputs, strict=True)]
    result = operation.function(*values)
    grid.write(target, result.astype(operation.result, copy=False), mask)


def _multiply(operation: MatrixMultiply, grid: Grid, instruction: Instruction, mask: Mask) -> None:
    grid.require_whole_warps(mask)
    target, *sources = map(_elements, instruction.operands)
    registers = [[grid.everywhere(grid.read(e, U32)) for e in source] for source in sources]
    for element, value in zip(target, operation(*registers), strict=True):
        grid.write(element, value, mask)


def _shuffle(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    """shfl.sync of all lanes, as the PTX ISA's pseudocode has it."""
    grid.require_whole_warps(mask)
    target, *sources = instruction.operands
    value, lane_or_offset, clamp, members = (
        grid.everywhere(grid.read(source, U32)) for source in sources
    )
    if (members != 0xFFFFFFFF).any():
        raise EmulationError("leaves lanes out, which the emulator does not know")
    lane = grid.threads % WARP
    offset, segment, last = (
        x.astype(np.int64) for x in (lane_or_offset & 31, clamp >> 8 & 31, clamp & 31)
    )
    highest = (lane & segment) | (last & ~segment)
    source = {
        "idx": (lane & segment) | (offset & ~segment),
        "bfly": lane ^ offset,
        "up": lane - offset,
        "down": lane + offset,
    }[match["mode"]]
    inside = source >= highest if match["mode"] == "up" else source <= highest
    source = np.where(inside, source, lane)
    if isinstance(target, Pair):
        grid.write(target.predicate, inside, mask)
        target = target.value
    grid.write(target, value[np.arange(lane.size) - lane + source], mask)


# Memory -------------------------------------------------------------------------------------


def _load(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    target, address = instruction.operands
    dtype, count = TYPES[match["type"]], int(match["count"] or 1)
    size, threads = dtype.itemsize * count, grid.active(mask)
    if match["space"] == "param":
        data = _parameter(grid, address, size, mask)
    elif match["space"] == "global":
        data = grid.memory.load(grid.addresses(address, U64, mask), size, threads)
    else:
        # The compiler joins loads to vectors, with gaps in registers that nobody reads.
        unread = [e.name not in grid.program.registers_read for e in _elements(target)]
        unused = np.repeat(unread, dtype.itemsize)
        data = grid.shared.load(grid.addresses(address, U32, mask), size, threads, unused)
    loaded = np.zeros((grid.threads.size, count), dtype)
    loaded[grid.chosen(mask)] = data.view(dtype)
    for element, values in zip(_elements(target), loaded.T, strict=True):
        grid.write(element, np.ascontiguousarray(values), mask)


def _parameter(grid: Grid, address: Operand, size: int, mask: Mask) -> np.ndarray:
    assert isinstance(address, Address)
    if isinstance(address.base, Symbol):
        data = grid.parameters[address.base.name][address.offset :][:size]
        return np.frombuffer(data, np.uint8)[None]
    places = grid.addresses(address, U64, mask)
    if (places == places[0]).all():  # as they are in the usual case
        places = places[:1]
    return np.stack([np.frombuffer(grid.parameter_at(int(p), size), np.uint8) for p in places])


def _store(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    address, source = instruction.operands
    dtype, elements = TYPES[match["type"]], _elements(source)
    if len(elements) != int(match["count"] or 1):
        raise EmulationError("stores another number of registers than it says")
    columns = [grid.everywhere(grid.read(element, dtype)) for element in elements]
    threads = grid.active(mask)
    data = np.stack(columns, axis=-1)[grid.chosen(mask)].view(np.uint8)
    if match["space"] == "global":
        addresses = grid.addresses(address, U64, mask)
        grid.memory.store(addresses, data, threads)
    else:
        grid.shared.store(grid.addresses(address, U32, mask), data, threads)


def _load_matrix(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    """Lanes 8 · i to 8 · i + 7 hold the addresses of the rows of matrix i."""
    grid.require_whole_warps(mask)
    target, address = instruction.operands
    count, threads = int(match["count"]), grid.active(mask)
    pointing = threads % WARP < 8 * count
    addresses = grid.addresses(address, U32, mask)[pointing]
    rows = grid.shared.load(addresses, 16, threads[pointing]).reshape(-1, count, 8, 16)
    words = load_fragments(rows, transposed=match["trans"] is not None)
    for i, element in enumerate(_elements(target)):
        loaded = np.zeros(grid.threads.size, U32)
        loaded[grid.chosen(mask)] = words[:, i].reshape(-1)
        grid.write(element, loaded, mask)


def _store_matrix(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    """stmatrix, the reverse of ldmatrix."""
    grid.require_whole_warps(mask)
    address, source = instruction.operands
    count, threads = int(match["count"]), grid.active(mask)
    columns = [grid.everywhere(grid.read(e, U32))[grid.chosen(mask)] for e in _elements(source)]
    words = np.stack(columns, axis=-1).reshape(-1, WARP, count)
    rows = store_fragments(np.swapaxes(words, 1, 2), transposed=match["trans"] is not None)
    pointing = threads % WARP < 8 * count
    addresses = grid.addresses(address, U32, mask)[pointing]
    grid.shared.store(addresses, rows.reshape(-1, 16), threads[pointing])


def _copy_async(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    """Copies the first `inside` bytes and fills with zeros up to `size`."""
    del match
    target, source, size_operand, *rest = instruction.operands
    assert isinstance(size_operand, Immediate)
    size = size_operand.value
    inside = grid.everywhere(grid.read(rest[0] if rest else size_operand, U32))
    threads, inside = grid.active(mask), inside[grid.chosen(mask)]
    if (inside > size).any():
        raise EmulationError("reads more bytes than it copies")
    data = grid.memory.load(grid.addresses(source, U64, mask), size, threads, inside)
    grid.shared.start_copy(grid.addresses(target, U32, mask), data, threads)


def _commit(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    grid.shared.commit_copies(grid.active(mask))


def _wait(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    pending = None
    if match["group"]:
        (operand,) = instruction.operands
        assert isinstance(operand, Immediate)
        pending = operand.value
    grid.shared.await_copies(grid.active(mask), pending)


# Control flow -------------------------------------------------------------------------------


def _branch(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> Targets:
    (target,) = instruction.operands
    assert isinstance(target, Symbol)
    return grid.program.labels[target.name]


def _return(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> Targets:
    return len(grid.program.instructions)


def _barrier(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> Targets:
    if instruction.operands != (Immediate(0),):
        raise EmulationError("is a barrier other than 0 of all threads")
    grid.require_whole_warps(mask)
    grid.waiting[grid.active(mask)] = True
    return grid.counter + 1


def _warp_barrier(match: re.Match[str], grid: Grid, instruction: Instruction, mask: Mask) -> None:
    grid.require_whole_warps(mask)


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


_PATTERNS = [
    (re.compile(pattern), handler)
    for pattern, handler in (
        (
            r"ld\.(?P<space>param|global|shared)(::cluster)?(\.nc)?(\.L[12]::\w+)*(\.v(?P<count>[24]))?\.(?P<type>[busf]\d+)",
            _load,
        ),
        (
            r"st\.(?P<space>global|shared)(::cluster)?(\.v(?P<count>[24]))?\.(?P<type>[busf]\d+)",
            _store,
        ),
        (
            r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared\.b16",
            _load_matrix,
        ),
        (
            r"stmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared\.b16",
            _store_matrix,
        ),
        (r"cp\.async\.(ca|cg)\.shared\.global", _copy_async),
        (r"cp\.async\.commit_group", _commit),
        (r"cp\.async\.wait_((?P<group>group)|all)", _wait),
        (r"shfl\.sync\.(?P<mode>idx|bfly|up|down)\.b32", _shuffle),
        (r"bra(\.uni)?", _branch),
        (r"ret|exit", _return),
        (r"bar\.sync|barrier\.sync(\.aligned)?", _barrier),
        (r"bar\.warp\.sync", _warp_barrier),
    )
]
