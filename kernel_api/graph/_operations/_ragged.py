"""Attention of ragged batches: sequences that begin where offsets say, and at equal distances.

A ragged tensor is (B, H, S, D) with strides. Sequence b is the rows 0 ... length[b] of it as if it
began ``offset[b]`` elements behind its start, and its first mode is not looked at. Between the
sequences there may be anything. All of it is done on the device: the host reads no offset. Rows
that offsets put outside of the tensor are neither read, which gives zeros, nor written.
"""

from __future__ import annotations

import math
from typing import Any

from kernel_api.errors import GraphError
from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._operations.layout import span
from kernel_api.graph._tensor import Tensor, packed_strides

#: What may be ragged, with the lengths of its sequences.
RAGGED = {
    **dict.fromkeys(("q", "o", "dO", "stats", "O", "Stats", "Max", "Sum_exp", "dQ"), "seq_len_q"),
    **dict.fromkeys(("k", "v", "dK", "dV"), "seq_len_kv"),
}

_INTEGERS = (data_type.INT32, data_type.INT64)


def even_strides(dim: tuple[int, ...]) -> tuple[int, ...]:
    """Of sequences at equal distances: tokens one behind the other, the heads of each side by side;
    numbers of rows as kernels write them."""
    return packed_strides(dim, (0, 1, 2, 3) if dim[3] == 1 else (0, 2, 1, 3))


def ragged_names(node: Node) -> list[str]:
    """Names of the inputs and results of attention that are ragged."""
    tensors = {**node.inputs, **node.outputs}
    return [n for n, t in tensors.items() if isinstance(t, Tensor) and t.ragged_offset is not None]


def check_ragged(node: Node, B: int) -> None:
    """Raise GraphError where ragged batches cannot be."""
    for name in ragged_names(node):
        if name not in RAGGED:
            raise GraphError(f"{node} has ragged {name}; expected {', '.join(RAGGED)} to be")
        if not node["padding"] or RAGGED[name] not in node.inputs:
            raise GraphError(
                f"{node} has ragged {name} and no padding mask with {RAGGED[name]}; ragged batches "
                f"have lengths, seq_len_q and seq_len_kv"
            )
        if any(table.startswith("paged") for table in node.inputs):
            raise GraphError(f"{node} has ragged {name} and pages; expected one of them")
        offset = offset_of(node, name)
        if offset.data_type not in _INTEGERS or math.prod(offset.dim) <= B:
            raise GraphError(
                f"{node} has {name} with ragged offsets {offset.data_type.name} "
                f"{list(offset.dim)}; expected INT32 or INT64 (B + 1, 1, 1, 1) with B = {B}"
            )


def offset_of(node: Node, name: str) -> Tensor:
    """The offsets of what is ragged."""
    offset = tensor_of(node, name).ragged_offset
    assert offset is not None
    return offset


def tensor_of(node: Node, name: str) -> Tensor:
    """An input or a result of attention."""
    return node.input(name) if name in node.inputs else node.outputs[name]


# Computing -------------------------------------------------------------------------------


def even(tensor: Tensor, values: Any, offsets: Any, lengths: Any) -> Any:
    """What a ragged tensor holds with sequences at equal distances; zeros behind each.

    Args:
        values: Of the dim and stride of the tensor.
    """
    B, H, S, D = tensor.dim
    kind = values.dtype
    if not values.numel():
        return values.new_empty(tensor.dim)
    places, visible = _places(tensor, offsets, lengths)
    bits = values.view(_same_size(kind))
    rows = _rows(bits, tensor, span(tensor.dim, tensor.stride))
    found = rows.index_select(0, places.masked_fill(~visible, 0).flatten())
    found.masked_fill_(~visible.view(-1, 1, 1), 0)
    return found.view(kind).view(B, S, H, D).transpose(1, 2)


def ragged(tensor: Tensor, values: Any, offsets: Any, lengths: Any) -> Any:
    """Sequences at equal distances where offsets say; zeros between. Where other tensors lie
    between the tokens of one, the offsets are multiples of the distance of tokens."""
    B, H, S, D = tensor.dim
    if not values.numel():
        return values
    end = span(tensor.dim, tensor.stride)
    places, visible = _places(tensor, offsets, lengths)
    row = 1 + (H - 1) * tensor.stride[1] + (D - 1) * tensor.stride[3]
    # Behind the end there is a row for what is behind the lengths.
    memory = values.new_zeros(end + row, dtype=_same_size(values.dtype))
    places = places.masked_fill(~visible, end).flatten()
    given = values.transpose(1, 2).reshape(B * S, H, D).view(memory.dtype)
    _rows(memory, tensor, end + row).index_copy_(0, places, given)
    return memory.view(values.dtype).as_strided(tensor.dim, tensor.stride)


def _places(tensor: Tensor, offsets: Any, lengths: Any) -> tuple[Any, Any]:
    """(B, S): where in memory rows begin, in elements, and whether they are of a sequence."""
    import torch

    B, H, S, D = tensor.dim
    rows = torch.arange(S, device=offsets.device)
    starts = offsets.flatten()[:B].long().view(B, 1)
    places = starts + rows * tensor.stride[2]
    behind = (H - 1) * tensor.stride[1] + (D - 1) * tensor.stride[3]
    inside = (places >= 0) & (places < span(tensor.dim, tensor.stride) - behind)
    return places, (rows < lengths.view(B, 1)) & inside


def _rows(memory: Any, tensor: Tensor, end: int) -> Any:
    """(elements, H, D): the row that begins at each element of the memory up to the end."""
    _, H, _, D = tensor.dim
    behind = (H - 1) * tensor.stride[1] + (D - 1) * tensor.stride[3]
    strides = (1, tensor.stride[1], tensor.stride[3])
    return memory.as_strided((end - behind, H, D), strides, memory.storage_offset())


def _same_size(kind: Any) -> Any:
    """Integers of as many bits: rows are moved, whatever they are of."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sizes[kind.itemsize]
