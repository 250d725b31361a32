"""Operands of element-wise kernels: drawn, in storages of NaN, outputs poisoned."""

from __future__ import annotations

from typing import Any

import torch

import kernel_api as ka
from kernel_api.dtypes import dtype
from support.data import strided_empty
from support.fusions import Draw
from support.norms import columns_for
from support.ptx.gemm import storage_bytes

BF16 = torch.bfloat16

#: Ways in which x lies in memory that are no rows side by side.
BROADCAST = ("rows", "columns", "everything")


def matrix(
    shape: tuple[int, ...],
    element: Any = BF16,
    layout: str = "t",
    *,
    pad: int = 0,
    offset: int = 0,
    device: Any = "cpu",
) -> torch.Tensor:
    """Of NaN, also between its rows; or a vector."""
    rows = shape if len(shape) > 1 else (1, *shape)
    found = strided_empty(rows, dtype(element).torch, layout, pad=pad, offset=offset)
    found = found if len(shape) > 1 else found.reshape(shape)
    storage_bytes(found)[:] = 0xFF
    if torch.device(device).type == "cpu":
        return found
    return on(found, device)


def drawn(
    shape: tuple[int, ...],
    element: Any = BF16,
    layout: str = "t",
    *,
    pad: int = 0,
    offset: int = 0,
    seed: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Random numbers, of integers small ones; NaN between rows."""
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    element = dtype(element).torch
    if element is torch.bool:
        values = values > 0
    elif not element.is_floating_point:
        values = (9 * values).round().clamp(0 if element is torch.uint8 else -99, 99)
    return matrix(shape, element, layout, pad=pad, offset=offset).copy_(values)


def broadcast(shape: tuple[int, ...], modes: str, element: Any = BF16, seed: int = 0) -> Any:
    """Random numbers that some modes share: those have a stride of 0."""
    *batch, M, N = shape
    kept = {"rows": (1, N), "columns": (M, 1), "everything": (1, 1)}[modes]
    return drawn((*(1 for _ in batch), *kept), element, seed=seed).expand(shape)


def on(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """The same values, strides and alignment on another device."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = torch.empty(size, dtype=tensor.dtype, device=device)
    if torch.device(device).type != "meta":
        storage.copy_(tensor.as_strided((size,), (1,), 0))
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def arguments_on(args: ka.ElementwiseArguments, device: Any = "meta") -> Any:
    """The same arguments on another device: a query asks tensors of a GPU or of none."""
    epilogue = args.epilogue
    more = {} if epilogue is None else epilogue.tensors
    more = {name: on(one.tensor, device) for name, one in more.items()}
    return args.rebuilt(*(on(tensor, device) for tensor in args.tensors), **more)


def of_fusion(make: Any, x: Any = None, **how: Any) -> ka.ElementwiseArguments:
    """The epilogue of a fused product, of a matrix in its place.

    Args:
        make: Arguments of the product, of a draw; see ``support.fusion_cases``.
        x: The matrix; by default drawn, with rows as far apart as those of out.
        how: Sizes, padding and element type of the draw.
    """
    draw = Draw(**{"K": 8, "element": BF16, **how})
    fused = make(draw)
    shape = (*draw.batches, draw.M, draw.N)
    if x is None:
        pad = draw.pad if draw.layout == "t" else 0
        x = drawn(shape, draw.element, pad=pad, seed=draw.seed + 1, scale=1.5)
    return ka.ElementwiseArguments(x, fused.out.tensor, epilogue=fused.epilogue)


def arguments_for(
    kernel: ka.Kernel, M: int, N: int, L: int | None = None, *, device: Any = "cpu", seed: int = 0
) -> ka.ElementwiseArguments:
    """Arguments that a kernel takes, without an epilogue: columns in whole vectors, rows no
    further apart than it asks."""
    operands = kernel.metadata.operands
    vector = max(asked.divisibility for asked in operands.tensors.values())
    N = -(-columns_for(kernel, N) // vector) * vector
    batch = () if L is None else (L,)
    x_type, out_type = (one.dtype or "float32" for one in operands.tensors.values())
    x = drawn((*batch, M, N), x_type, pad=vector, seed=seed)
    return ka.ElementwiseArguments(
        on(x, device), matrix((*batch, M, N), out_type, pad=vector, device=device)
    )


def offered(args: ka.ElementwiseArguments, cc: Any = 90, **how: Any) -> list[ka.Kernel]:
    """Kernels of ours, best first."""
    on_meta = arguments_on(args)
    return ka.get_kernels(on_meta, cc=cc, **{"providers": ["cutedsl"], **how})
