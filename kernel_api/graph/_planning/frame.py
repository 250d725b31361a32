"""How tensors of many modes are seen as the matrices that kernels work on."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from kernel_api.graph._tensor import Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Frame(NamedTuple):
    """Modes of a tensor, put together to rows and columns, or to batches, rows and columns.

    Attributes:
        dim: Extents of a tensor that has every mode.
        groups: The modes that become one, in the order (rows, columns) or (batches, rows,
            columns). Every mode is in one of them; modes of a group go from slow to fast.
        ragged: Whether rows are those of many products: then reductions over them are many.
    """

    dim: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    ragged: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(_product(self.dim[mode] for mode in group) for group in self.groups)

    def layout(self, dim: tuple[int, ...], stride: tuple[int, ...]) -> Layout | None:
        """Shape and strides of a tensor that broadcasts, as a matrix; None if it is none.

        A group in which it has no mode has extent 1, one in which it has all is whole.
        """
        extra = len(self.dim) - len(dim)
        if extra < 0:
            if any(extent != 1 for extent in dim[:-extra]):
                return None
            dim, stride, extra = dim[-extra:], stride[-extra:], 0
        dim, stride = (1,) * extra + tuple(dim), (0,) * extra + tuple(stride)
        shape, strides = [], []
        for group in self.groups:
            merged = self._merged(group, dim, stride)
            if merged is None:
                return None
            shape.append(merged[0])
            strides.append(merged[1])
        return tuple(shape), tuple(strides)

    def of(self, tensor: Tensor) -> Layout | None:
        return self.layout(tensor.dim, tensor.stride)

    def has_all(self, dim: tuple[int, ...]) -> bool:
        """Whether a tensor of these extents has every mode, leading ones of extent 1 aside."""
        core = list(dim)
        while len(core) > len(self.dim) and core[0] == 1:
            core.pop(0)
        return (1,) * (len(self.dim) - len(core)) + tuple(core) == self.dim

    def is_main(self, dim: tuple[int, ...]) -> bool:
        """Whether a tensor of these extents is a matrix of all rows, and all columns or half."""
        found = self.layout(dim, (0,) * len(dim))
        if found is None:
            return False
        shape, extents = found[0], self.extents
        return shape[:-1] == extents[:-1] and shape[-1] * 2 in (2 * extents[-1], extents[-1])

    def reduced(self, dim: tuple[int, ...]) -> tuple[bool, ...] | None:
        """For each group whether a tensor of these extents has lost it; None if in part."""
        padded = (1,) * (len(self.dim) - len(dim)) + tuple(dim)
        lost = []
        for group in self.groups:
            pairs = [(padded[mode], self.dim[mode]) for mode in group]
            if all(own == full for own, full in pairs):
                lost.append(False)
            elif all(own == 1 for own, _ in pairs):
                lost.append(True)
            else:
                return None
        return tuple(lost)

    def _merged(
        self, group: tuple[int, ...], dim: tuple[int, ...], stride: tuple[int, ...]
    ) -> tuple[int, int] | None:
        """Extent and stride of the modes of a group as one; columns may be half of them."""
        if group == self.groups[-1] and len(group) == 1 and 2 * dim[group[0]] == self.extents[-1]:
            return dim[group[0]], stride[group[0]]
        if all(dim[mode] == 1 for mode in group):
            return 1, stride[group[-1]] if group else 0
        if any(dim[mode] != self.dim[mode] for mode in group):
            return None
        long = [mode for mode in group if dim[mode] != 1]
        for slow, fast in itertools.pairwise(long):
            if stride[slow] != stride[fast] * dim[fast]:
                return None
        return _product(dim[mode] for mode in long), stride[long[-1]]


def matrix_frames(dim: tuple[int, ...], *, flat: bool) -> list[Frame]:
    """Frames of a matrix product, or of what has its modes: the last two are rows and columns.

    Args:
        dim: Of the product.
        flat: Whether the modes before may be rows as well, because all batches share a factor.
    """
    rank = len(dim)
    batches, rows, columns = tuple(range(rank - 2)), rank - 2, rank - 1
    one_batch = _product(dim[:-2]) == 1
    frames = []
    if flat or one_batch:
        frames.append(Frame(dim, ((*batches, rows), (columns,))))
    if not one_batch:
        frames.append(Frame(dim, (batches, (rows,), (columns,))))
    return frames


def memory_frames(tensors: list[Tensor], order: tuple[int, ...]) -> list[Frame]:
    """Frames for what is computed element by element: that with the fewest modes that fit all
    tensors, and those with more, which what follows may need.

    Args:
        tensors: All that is read or written; the first has every mode.
        order: Modes from the slowest to the fastest in memory.
    """
    dim, last = tensors[0].dim, len(order) - 1
    cuts = [(), (last,), *((cut,) for cut in range(1, last))]
    cuts += [(cut, last) for cut in range(1, last)]
    found: dict[tuple[tuple[int, ...], ...], Frame] = {}
    for cut in cuts:
        groups = _groups(tensors, order, set(cut))
        if len(groups) == 1:
            groups.insert(0, ())
        if len(groups) <= 3:
            found.setdefault(tuple(groups), Frame(dim, tuple(groups)))
    return list(found.values())


def _groups(tensors: list[Tensor], order: tuple[int, ...], cuts: set[int]) -> list[tuple[int, ...]]:
    """Modes put together wherever all tensors allow it, but for the places that are cut."""
    groups: list[tuple[int, ...]] = []
    for place, mode in enumerate(order):
        joins = groups and place not in cuts
        if joins and all(_joins(t, tensors[0].dim, groups[-1], mode) for t in tensors):
            groups[-1] = (*groups[-1], mode)
        else:
            groups.append((mode,))
    return groups


def _joins(tensor: Tensor, dim: tuple[int, ...], group: tuple[int, ...], mode: int) -> bool:
    """Whether a mode is, in a tensor, the next faster one of a group."""
    extra = len(dim) - len(tensor.dim)
    own = (1,) * extra + tensor.dim
    stride = (0,) * extra + tensor.stride
    if dim[mode] == 1:
        return True
    before = [m for m in group if dim[m] != 1]
    if not before:
        return True
    last = before[-1]
    if own[mode] == 1 or own[last] == 1:
        return own[mode] == 1 and all(own[m] == 1 for m in before)
    return stride[last] == stride[mode] * own[mode]


def _product(numbers: object) -> int:
    result = 1
    for number in numbers:  # type: ignore[attr-defined]
        result *= number
    return result
