"""Parts of kernels, compiled for the CPU: the memory they use is NumPy's, one thread at a time.

What they say in PTX is carried out here instead, by the code below.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Boolean, Int64, Uint8, Uint16
from cutlass.cute.runtime import from_dlpack

INTEGERS = {8: np.int8, 16: np.int16, 32: np.int32}  # elements that name their place, by bits


def fixed(array: np.ndarray) -> cute.Tensor:
    """An array whose shape is known when the code that uses it is compiled."""
    return from_dlpack(array, assumed_align=16)


def operand(array: np.ndarray, unit_mode: int) -> cute.Tensor:
    """An array as kernels see their operands: all sizes and all strides but one at run time."""
    return from_dlpack(array).mark_layout_dynamic(leading_dim=unit_mode)


@contextmanager
def ptx_on_the_cpu() -> Iterator[None]:
    """What is compiled in here does without PTX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute.arch, "inline_ptx", _carry_out)
        yield


def _carry_out(code, *, read_only_args, write_only_types=(), predicate=None):
    if predicate is None:
        predicate = Boolean(True)
    if code.startswith("cp.async"):
        vector_bytes = int(code.split(", ")[2])
        return _copy_or_zero(*read_only_args, predicate, vector_bytes)
    if loads := re.findall(r"ld\.global\.b(8|16) ", code):
        return _load_each(*read_only_args, {"8": Uint8, "16": Uint16}[loads[0]], len(loads))
    if stores := re.match(r"st\.(shared|global).*\.b(8|16|32) ", code):
        address, *values = read_only_args
        if stores[2] == "8":  # in registers of 16 bits
            values = [value.to(Uint8) for value in values]
        return _store(address, tuple(values), predicate)
    raise NotImplementedError(code)


@cute.jit
def _copy_or_zero(target, source, inside, predicate, vector_bytes: cutlass.Constexpr):
    """cp.async: `inside` bytes of the source, then zeros."""
    if predicate:
        for i in cutlass.range_constexpr(vector_bytes):
            _pointer(Uint8, target, i).store(Uint8(0))
            if i < inside:
                _pointer(Uint8, target, i).store(_pointer(Uint8, source, i).load())


def _load_each(source, inside, element_type, count):
    return tuple(_load_one(source, inside, element_type, i) for i in range(count))


@cute.jit
def _load_one(source, inside, element_type: cutlass.Constexpr, i: cutlass.Constexpr):
    value = Uint16(0)
    if inside > i:
        value = Uint16(_pointer(element_type, source, i).load())
    return value


@cute.jit
def _store(address, values, predicate):
    if predicate:
        for i in cutlass.range_constexpr(len(values)):
            _pointer(type(values[i]), address, i).store(values[i])


def _pointer(element_type, address, index: int) -> cute.Pointer:
    size = element_type.width // 8
    space = cute.AddressSpace.generic
    return cute.make_ptr(element_type, Int64(address) + index * size, space, assumed_align=size)


def offsets(layout_of, shape: tuple[int, ...]) -> np.ndarray:
    """All offsets of the layout that a function returns, as an array over its coordinates."""

    @cute.jit
    def tabulate(table: cute.Tensor):
        layout = layout_of()
        for i in cutlass.range(cute.size(layout), unroll=1):
            table[i] = cutlass.Int32(layout(i))

    table = np.full(np.prod(shape), -1, np.int32)
    cute.compile(tabulate, fixed(table))(fixed(table))
    return table.reshape(shape, order="F")
