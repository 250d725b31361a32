"""Products as tensor cores form them on this GPU, by torch: what a kernel's error is measured by.

Their accumulators are not IEEE float32: additions are cut off, and those of 8-bit floats have some
14 bits. A result can be no better than that, and one that is computed in parts is.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kernel_api.arguments.scaled import BLOCK, ScaleMode, expanded_scale

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)

#: Rows and columns from which on cuBLAS has no reason to cut K into parts, which would be summed
#: up more precisely than one accumulator does.
_WHOLE = 2048

#: What torch._scaled_mm wants sizes to be multiples of.
_MULTIPLE = 16

_LARGEST_E4M3 = 448.0


def tensor_core_product(args: Any) -> Any:
    """The accumulator of 16-bit or 8-bit floats, scales applied, in float32."""
    A, B, _ = args.tensors
    if A.dtype not in EIGHT_BITS:
        return _in_whole(A, B, _sixteen_bits)
    if args.scaled and args.A.mode is ScaleMode.BLOCK_1x128:
        return _block_scaled(args)
    product = _in_whole(A, B, _eight_bits)
    for name in ("A", "B"):
        if name in args.scaled:
            operand = getattr(args, name)
            product = product * expanded_scale(operand, args.modes[name], args.contracted)
    return product


def _block_scaled(args: Any) -> Any:
    """A sum over blocks of K, each with its own scales."""
    A, B, _ = args.tensors
    scale_a = args.A.scale.tensor
    scale_b = args.B.scale.tensor.repeat_interleave(BLOCK, dim=-1)[..., : B.shape[-1]]
    total = A.new_zeros((*A.shape[:-1], B.shape[-1]), dtype=torch.float32)
    for block, start in enumerate(range(0, A.shape[-1], BLOCK)):
        part = slice(start, start + BLOCK)
        product = _in_whole(A[..., part], B[..., part, :], _eight_bits)
        total += product * scale_a[..., block, None] * scale_b[..., block, None, :]
    return total


def _in_whole(A: Any, B: Any, multiply: Any) -> Any:
    """The product, as a part of one that is large enough not to be cut along K."""
    M, N = A.shape[-2], B.shape[-1]
    if not (M and N and A.shape[-1]):
        return A.new_zeros((*A.shape[:-1], N), dtype=torch.float32)
    rows, columns = -(-_WHOLE // M) if M < _WHOLE else 1, -(-_WHOLE // N) if N < _WHOLE else 1
    if A.dim() == 3:
        pairs = zip(A, B, strict=True)
        return torch.stack([_in_whole(a, b, multiply) for a, b in pairs])
    return multiply(_repeated(A, rows, 0), _repeated(B, columns, 1))[:M, :N]


def _repeated(matrix: Any, times: int, mode: int) -> Any:
    return torch.cat([matrix] * times, dim=mode) if times > 1 else matrix


def _sixteen_bits(A: Any, B: Any) -> Any:
    return torch.mm(A, B, out_dtype=torch.float32)


def _eight_bits(A: Any, B: Any) -> Any:
    """torch multiplies no two e5m2, so B goes as e4m3: times a power of two that changes no element
    but tiny ones, whose part is added from the exact product."""
    if A.dtype is torch.float8_e5m2 and B.dtype is torch.float8_e5m2:
        b, scale = as_e4m3(B)
        rest = B.double() - b.double() / scale
        return (_eight_bits(A, b).double() / scale + A.double() @ rest).float()
    M, K = A.shape
    N = B.shape[1]
    one = torch.ones((), device=A.device)
    a = _padded(A, -M % _MULTIPLE, -K % _MULTIPLE)
    b = _padded(B.t(), -N % _MULTIPLE, -K % _MULTIPLE)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)[:M, :N]


def as_e4m3(matrix: Any) -> tuple[Any, float]:
    """(matrix * scale in e4m3, scale), the scale the largest power of two that saturates nothing.

    An element of e5m2 down to 2**-15 of the largest keeps its bits; smaller ones are rounded.
    """
    largest = float(matrix.float().abs().max())
    if not 0 < largest < math.inf:
        return matrix.to(torch.float8_e4m3fn), 1.0
    scale = 2.0 ** math.floor(math.log2(_LARGEST_E4M3 / largest))
    return (matrix.float() * scale).to(torch.float8_e4m3fn), scale


def _padded(matrix: Any, rows: int, columns: int) -> Any:
    """Contiguous, with zeros behind."""
    bits = matrix.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(bits, (0, columns, 0, rows)).view(matrix.dtype)
