"""Parts of kernels, compiled for the CPU: the memory they use is NumPy's, one thread at a time.

What they say in PTX is carried out here instead, by the code below.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Boolean, Int64, Uint16
from cutlass.cute.runtime import from_dlpack

INTEGERS = {16: np.int16, 32: np.int32}  # elements that name where they come from, by bits


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
    if "ld.global.b16" in code:
        return _load_pair(*read_only_args)
    if code.startswith(("st.shared.v2.b16", "st.global")):
        address, *values = read_only_args
        return _store(address, tuple(values), predicate)
    raise NotImplementedError(code)


@cute.jit
def _copy_or_zero(target, source, inside, predicate, vector_bytes: cutlass.Constexpr):
    """cp.async: `inside` bytes of the source, then zeros."""
    if predicate:
        for i in cutlass.range_constexpr(vector_bytes // 2):
            _pointer(Uint16, target, i).store(Uint16(0))
            if 2 * i < inside:
                _pointer(Uint16, target, i).store(_pointer(Uint16, source, i).load())


@cute.jit
def _load_pair(source, inside):
    first, second = Uint16(0), Uint16(0)
    if inside > 0:
        first = Uint16(_pointer(Uint16, source, 0).load())
    if inside > 1:
        second = Uint16(_pointer(Uint16, source, 1).load())
    return first, second


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
