"""Rows of decoding in memory, global or shared: stored and loaded in vectors and pairs."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32

from ..common.conversion import select


def _at(row: cute.Tensor, column, count: int) -> cute.Tensor:
    """Elements side by side, that begin at a multiple of their size."""
    element_type = row.element_type
    size = element_type.width // 8
    pointer = cute.make_ptr(
        element_type,
        row.iterator.toint() + column * size,
        row.memspace,
        assumed_align=count * size,
    )
    return cute.make_tensor(pointer, cute.make_layout(count))


def store(fragment: cute.Tensor, row: cute.Tensor, column) -> None:
    cute.autovec_copy(fragment, _at(row, column, cute.size(fragment)))


def load_vector(row: cute.Tensor, column, fragment: cute.Tensor) -> None:
    cute.autovec_copy(_at(row, column, cute.size(fragment)), fragment)


def number(numbers: cute.Tensor, row, index: int) -> Float32:
    """One of a row; in a way that memory of other blocks is read as well."""
    loaded = cute.make_rmem_tensor(1, Float32)
    load_vector(numbers[None, index], row, loaded)
    return loaded[0]


def store_row(outputs, i: int, scale, exists, row, first, thread) -> None:
    """Of accumulators, in pairs of columns from the first on; 0 where the query does not exist."""
    own = first + thread % 4 * 2
    begin = _at(row, own, 2).iterator
    left = row.shape[0] - own
    for j in range(0, cute.size(outputs, mode=[1]), 2):
        pair = cute.make_rmem_tensor(2, Float32)
        for lane in range(2):
            pair[lane] = select(exists, outputs[i, j + lane] * scale, Float32(0.0))
        rounded = cute.make_rmem_tensor(2, row.element_type)
        rounded.store(pair.load().to(row.element_type))
        if cute.is_static(row.shape):
            cute.autovec_copy(rounded, cute.make_tensor(begin + 4 * j, cute.make_layout(2)))
        else:
            _store_if(left > 4 * j, begin, 4 * j, rounded)


def _store_if(inside: Boolean, begin: cute.Pointer, offset: int, pair: cute.Tensor) -> None:
    """To global memory; predicated, not branched around: the compiler would find the address anew
    in each branch."""
    size = pair.element_type.width // 8
    found = cute.recast_tensor(pair, Int16 if size == 1 else Int32)
    words = [found[i] for i in range(cute.size(found))]
    several = ".v2" if len(words) == 2 else ""
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    cute.arch.inline_ptx(
        f"st.global{several}.b{words[0].width} [{{$r0}} + {offset * size}], {{{registers}}};",
        read_only_args=[begin.toint(), *words],
        predicate=inside,
    )
