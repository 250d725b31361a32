"""Orders of modes: from the user's to the one that tiling wants."""

import cutlass.cute as cute
from cutlass import const_expr


def attention_modes(tensor: cute.Tensor) -> cute.Tensor:
    """(B,H,S,D), or packed (T,H,D), seen as (S,D,H,B); no data moves. Packed there is one batch,
    of stride 0."""
    shape, stride = list(tensor.shape), list(tensor.stride)
    order = (2, 3, 1, 0)
    if const_expr(len(shape) == 3):
        shape, stride, order = [*shape, 1], [*stride, 0], (0, 2, 1, 3)
    layout = cute.make_layout(
        tuple(shape[i] for i in order), stride=tuple(stride[i] for i in order)
    )
    return cute.make_tensor(tensor.iterator, layout)
