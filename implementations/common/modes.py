"""Mode orders: from the user's row-of-matrices order to the order that tiling wants."""

import cutlass.cute as cute
from cutlass import const_expr


def gemm_modes(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor) -> tuple:
    """(L,M,K), (L,K,N), (L,M,N) seen as (M,K,L), (N,K,L), (M,N,L); no data moves.

    Two-dimensional operands get a batch mode of extent 1 and stride 0. A broadcast batch arrives
    as a stride of 0 in L and stays one.
    """
    return (
        operand_batch_last(mA),
        operand_batch_last(mB, transposed=True),
        operand_batch_last(mD),
    )


def operand_batch_last(tensor: cute.Tensor, transposed: bool = False) -> cute.Tensor:
    """One operand with its batch mode last; transposed: its other modes change places."""
    shape, stride = list(tensor.shape), list(tensor.stride)
    if const_expr(len(shape) == 2):
        shape, stride = [1, *shape], [0, *stride]
    order = (2, 1, 0) if transposed else (1, 2, 0)
    layout = cute.make_layout(
        tuple(shape[i] for i in order), stride=tuple(stride[i] for i in order)
    )
    return cute.make_tensor(tensor.iterator, layout)


def transposed_modes(tensor: cute.Tensor) -> cute.Tensor:
    """(M,N,L) seen as (N,M,L)."""
    (m, n, batch), (m_stride, n_stride, l_stride) = tensor.shape, tensor.stride
    layout = cute.make_layout((n, m, batch), stride=(n_stride, m_stride, l_stride))
    return cute.make_tensor(tensor.iterator, layout)
