"""Neighbours of a row in vectors, loaded and stored up to where the row ends."""

from math import gcd

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64, Numeric, Uint8, Uint16, Uint32, Uint64
from cutlass.cute import AddressSpace

from ..common.conversion import bfloat16_pair
from ..common.vectors import VECTOR, braced, load_words

_UNSIGNED = {8: Uint8, 16: Uint16, 32: Uint32, 64: Uint64}


def is_one(stride) -> bool:
    """Known to be, while the kernel is traced."""
    return isinstance(stride, int) and stride == 1


def loads_vectors(operand: cute.Tensor) -> bool:
    """Whether its columns are neighbours, of which one instruction may load several."""
    element_type = operand.element_type
    return is_one(operand.stride[1]) and element_type is not Boolean and element_type.width <= 32


def vector_of(chunk: int, vector_bytes: int, element_type: type[Numeric]) -> int:
    """Elements of a thread's neighbours that are moved at once."""
    return gcd(chunk, max(1, vector_bytes * 8 // element_type.width))


def as_bits(tensor: cute.Tensor) -> cute.Tensor:
    """Numbers as what they are in memory."""
    width = max(8, tensor.element_type.width)
    pointer = cute.make_ptr(
        _UNSIGNED[width], tensor.iterator.toint(), AddressSpace.gmem, assumed_align=width // 8
    )
    return cute.make_tensor(pointer, tensor.layout)


def load_inside(first: Int64, left: Int32, column: int, count: int, element_type) -> list:
    """`count` elements of a row from `column` on, in one load; zeros if fewer are left."""
    loaded = load_words(first, left, column, count, element_type.width, kind=".nc")
    words = len(loaded)
    return [value for one in loaded for value in _elements(one, count // words, element_type)]


def _elements(word: Uint32 | Uint16, count: int, element_type) -> list:
    """Of a word."""
    width = element_type.width
    if width == 32:
        return [word.bitcast(element_type)]
    if element_type is BFloat16 and count == 2:
        return list(bfloat16_pair(word))
    unsigned = _UNSIGNED[width]
    parts = [unsigned(word >> type(word)(i * width) if i else word) for i in range(count)]
    return [part if element_type is unsigned else part.bitcast(element_type) for part in parts]


def words_of(fragment: cute.Tensor, first: int, count: int) -> list:
    """Elements in registers as the words that are stored."""
    width = fragment.element_type.width
    if count * width >= 32:
        words = cute.recast_tensor(fragment, Uint32)
        return [words[first * width // 32 + i] for i in range(count * width // 32)]
    if count > 1:
        pair = [Uint16(fragment[first + i].bitcast(Uint8)) for i in range(count)]
        return [pair[0] | (pair[1] << Uint16(8))]
    value = fragment[first].bitcast(_UNSIGNED[width])
    return [Uint16(value) if width == 8 else value]


def store_inside(address: Int64, left: Int32, last: int, words: list, bits: int) -> None:
    """Words of so many bits, if more elements than `last` are left."""
    names = [f"{{$r{i + 2}}}" for i in range(len(words))]
    cute.arch.inline_ptx(
        f"{{ .reg .pred inside; setp.gt.s32 inside, {{$r1}}, {last}; @inside "
        f"st.global{VECTOR[len(words)]}.b{bits} [{{$r0}}], {braced(names)}; }}",
        read_only_args=[address, left, *words],
    )
