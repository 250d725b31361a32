"""Operands that groups cut along one mode, where TMA sees only whole tensors.

A descriptor ends where its tensor ends, a group in the middle of it. So the tensor gets one more
mode that moves along the same memory: with the end of a group as its coordinate, the cut mode
counts down to the end of the tensor, and what lies behind the group lies outside of the descriptor.
One descriptor serves all groups, and nothing is made on the device.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr


def stored_by_groups(tensor: cute.Tensor, mode: int) -> cute.Tensor:
    """A tensor (M, N, 1) for TMA to store to: `of_group` has what a group has of it.

    With T the extent of the cut mode and s its stride: the tensor begins T · s earlier, and its
    last mode has stride s. Element (T - rows + i, …, end) is row i of a group up to `end`.
    """
    shape, stride = list(tensor.shape), list(tensor.stride)
    extent, pitch = shape[mode], stride[mode]
    shape[2], stride[2] = extent + 1, pitch
    before = tensor.iterator - Int64(extent) * pitch
    return cute.make_tensor(before, cute.make_layout(tuple(shape), stride=tuple(stride)))


_FAR = 1 << 30  # more than any mode has elements
_WRAP = 1 << 34  # elements: _FAR times it is a multiple of 2**64 bytes


def loaded_by_groups(tensor: cute.Tensor) -> cute.Tensor:
    """A tensor (M, K, 1) for TMA to load from, cut along K: `loads_of_group` has a group's part.

    What a load takes must begin in memory that is there, so the tensor does. Instead of beginning
    earlier it has two more modes, of which one steps back: addresses wrap around at 2**64.
    """
    (rows, extent, _), (row_pitch, pitch, _) = tensor.shape, tensor.stride
    layout = cute.make_layout(
        (rows, Int32(_FAR), extent + 1, Int32(_FAR + 1)),
        stride=(row_pitch, pitch, pitch, Int64(_WRAP) - pitch),
    )
    return cute.make_tensor(tensor.iterator, layout)


def loads_of_group(tensor: cute.Tensor, first: Int32, end: Int32) -> cute.Tensor:
    """(M, K, 1, 1), beyond the group zeros; of a tensor that TMA sees."""
    return cute.domain_offset((0, _FAR - (end - first), end, _FAR), tensor)


def of_group(tensor: cute.Tensor, mode: int, first: Int32, end: Int32, by_tma: bool) -> cute.Tensor:
    """What a group has of a tensor (M, N, L): `first` to `end` of one mode.

    by_tma: The tensor is the one that TMA sees.
    """
    rows = end - first
    if const_expr(by_tma):
        start = [0, 0, end]
        start[mode] = tensor.shape[mode] - rows
        return cute.domain_offset(tuple(start), tensor)
    shape = list(tensor.shape)
    shape[mode] = rows
    layout = cute.make_layout(tuple(shape), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator + Int64(first) * tensor.stride[mode], layout)


def ending_at(tensor: cute.Tensor, end: Int32) -> cute.Tensor:
    """(M, N, L) with M rows up to `end`."""
    layout = cute.make_layout((end, *tensor.shape[1:]), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator, layout)
