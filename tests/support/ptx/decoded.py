"""Most of what a kernel executes, decoded once: registers computed from registers.

What an operand is and what it is converted to follows from the instruction. It means the same as in
`instructions`, for gangs of warps; what is not known here is left to those.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from support.ptx.arithmetic import OPERATIONS, PREDICATE, TYPES
from support.ptx.errors import EmulationError
from support.ptx.program import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Symbol,
    Vector,
)
from support.ptx.threads import Mask
from support.ptx.warps import Gang

Reader = Callable[[Gang], np.ndarray]
Writer = Callable[[Gang, np.ndarray, Mask], None]
Decoded = Callable[[Gang, Instruction, Mask], None]

_PARAMETER = re.compile(r"ld\.param(\.v[24])?\.(?P<type>[busf]\d+)")


def computation(instruction: Instruction, program: Program) -> Decoded | None:
    """Of registers from registers; None for what `instructions` is to do."""
    operation = OPERATIONS.get(instruction.name)
    if operation is None or len(instruction.operands) != 1 + len(operation.inputs):
        return None
    target, *sources = instruction.operands
    write = _writer(target, operation.result, program)
    if write is None:
        return None
    function = operation.function
    readers = [_reader(s, dtype) for s, dtype in zip(sources, operation.inputs, strict=True)]

    if len(readers) == 1:
        (read,) = readers

        def execute(gang: Gang, instruction: Instruction, mask: Mask) -> None:
            try:
                value = read(gang)
            except KeyError as error:
                raise _without_value(error) from None
            write(gang, function(value), mask)

    elif len(readers) == 2:
        first, second = readers

        def execute(gang: Gang, instruction: Instruction, mask: Mask) -> None:
            try:
                a, b = first(gang), second(gang)
            except KeyError as error:
                raise _without_value(error) from None
            write(gang, function(a, b), mask)

    else:

        def execute(gang: Gang, instruction: Instruction, mask: Mask) -> None:
            try:
                values = [read(gang) for read in readers]
            except KeyError as error:
                raise _without_value(error) from None
            write(gang, function(*values), mask)

    return execute


def _without_value(error: KeyError) -> EmulationError:
    return EmulationError(f"reads {error.args[0]}, which has no value")


def parameter(instruction: Instruction, program: Program) -> Decoded | None:
    """A load of a parameter by its name; None for other instructions."""
    match = _PARAMETER.fullmatch(instruction.name)
    if match is None:
        return None
    target, address = instruction.operands
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        return None
    dtype = TYPES[match["type"]]
    elements = target.elements if isinstance(target, Vector) else (target,)
    writers = [_writer(element, dtype, program) for element in elements]
    name, offset, count = address.base.name, address.offset, len(writers)

    def execute(gang: Gang, instruction: Instruction, mask: Mask) -> None:
        values = np.frombuffer(gang.parameters[name], dtype, count, offset)
        for i, write in enumerate(writers):
            write(gang, values[i : i + 1], mask)

    return execute if None not in writers else None


def _container(register: Register) -> np.dtype:
    return np.dtype(f"u{register.width}") if register.width else PREDICATE


def _reader(operand: Operand, dtype: np.dtype) -> Reader:
    """As `Threads.read`, but for a KeyError with the name of a register without a value."""
    if isinstance(operand, Immediate):
        constant = operand.array(dtype)
        constant.flags.writeable = False
        return lambda gang: constant
    if not isinstance(operand, Register):
        return lambda gang: gang.read(operand, dtype)
    name, held = operand.name, _container(operand)
    if held == dtype:
        return lambda gang: gang.registers[name][gang.index]
    if held.itemsize == dtype.itemsize:
        return lambda gang: gang.registers[name][gang.index].view(dtype)
    resized = np.dtype(f"u{dtype.itemsize}")
    return lambda gang: gang.registers[name][gang.index].astype(resized).view(dtype)


def _writer(operand: Operand, dtype: np.dtype, program: Program) -> Writer | None:
    """As `Threads.write`, of values that are made this type; None for what is no register."""
    if not isinstance(operand, Register) or (operand.width or 1) < dtype.itemsize:
        return None
    name, held = operand.name, _container(operand)
    belongs_to_wgmma = name in program.matrix_registers
    widened = dtype
    if operand.width > dtype.itemsize:  # signed values keep their sign
        widened = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{operand.width}")

    def write(gang: Gang, value: np.ndarray, mask: Mask) -> None:
        if value.dtype != dtype:
            value = value.astype(dtype)
        if dtype is not widened:
            value = value.astype(widened)
        table = gang.registers.get(name)
        if table is None:
            table = gang.machine.register(operand)
        if mask is None:
            table[gang.index] = value.view(held)
        else:
            bits = value.view(held)
            table[gang.threads[mask]] = bits[mask] if bits.size > 1 else bits
        if belongs_to_wgmma:
            gang.note_written(name)

    return write
