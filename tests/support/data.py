"""Operands of matrix products: any element type, layout, padding and offset; real or meta.

Layout letters are those of ``kernel_api.utils.strides_to_layout_string``: ``t`` is row-major,
``n`` column-major; ``ttn`` is A and B row-major, out column-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import kernel_api as ka
from kernel_api.arguments.scaled import expected_scale_shape
from kernel_api.dtypes import dtype

#: Element types that torch can fill, copy and convert on the CPU.
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


#: Rules of kernels that are for small problems.
TOO_MANY_PARTS = (
    "a split along K is for less than 512 parts of tiles",
    "tiles cut anywhere along K are for at most 2 tiles per resident cluster",
    "tiles that are cut for all resident clusters are at most half as many as these",
    "a workspace has room for 16384 counters, one per group of threads that sums up a tile",
)


def strided_empty(
    shape: Sequence[int],
    element: torch.dtype,
    layout: str = "t",
    *,
    pad: int = 0,
    offset: int = 0,
    device: Any = "cpu",
) -> torch.Tensor:
    """Uninitialised; rows ``pad`` elements longer than needed, ``offset`` elements into storage.

    Padded batches have a spare row between them as well.
    """
    *batch, rows, columns = shape
    major, minor = (rows, columns) if layout == "t" else (columns, rows)
    leading = max(minor + pad, 1)
    strides = [leading, 1] if layout == "t" else [1, leading]
    distance = max(major + (pad > 0), 1) * leading
    if batch:
        strides.insert(0, distance)
    size = offset + max((batch[0] if batch else 1) * distance, 1)
    storage = torch.empty(size, dtype=element, device=device)
    return storage.as_strided(tuple(shape), tuple(strides), offset)


def fill(tensor: torch.Tensor, seed: int, values: str = "random") -> torch.Tensor:
    """Fill in place with ``random`` values around one, or small ``integers``; returns it.

    Integers are -3..3, so that sums of a few thousand products are exact in float32; -1..1 for
    8-bit floats, and never negative for unsigned types.
    """
    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if floating and values == "random":
        kind = tensor.dtype if tensor.dtype.is_complex else torch.float32
        drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=kind)
    else:
        bound = 1 if floating and tensor.element_size() == 1 else 3
        low = 0 if tensor.dtype in (torch.uint8, torch.bool) else -bound
        drawn = torch.randint(
            low, bound + 1, tensor.shape, generator=generator, device=tensor.device
        )
    return tensor.copy_(drawn.to(tensor.dtype))


def gemm_tensors(
    M: int,
    N: int,
    K: int,
    L: int | None = None,
    *,
    types: Sequence[Any] = ("float32", "float32", "float32"),
    layouts: str = "ttt",
    pads: Sequence[int] = (0, 0, 0),
    offsets: Sequence[int] = (0, 0, 0),
    device: Any = "cpu",
    values: str = "random",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and out of (M, K) · (K, N); batched if L is given. A and B are filled."""
    batch = () if L is None else (L,)
    shapes = ((*batch, M, K), (*batch, K, N), (*batch, M, N))
    tensors = [
        strided_empty(shape, dtype(kind).torch, layout, pad=pad, offset=offset, device=device)
        for shape, kind, layout, pad, offset in zip(
            shapes, types, layouts, pads, offsets, strict=True
        )
    ]
    if torch.device(device).type != "meta":
        fill(tensors[0], 2 * seed, values)
        fill(tensors[1], 2 * seed + 1, values)
    A, B, out = tensors
    return A, B, out


def gemm_arguments(
    M: int,
    N: int,
    K: int,
    L: int | None = None,
    *,
    accumulator_type: Any = None,
    fp32_precision: str | None = None,
    **how: Any,
) -> ka.GemmArguments:
    """Arguments on :func:`gemm_tensors`."""
    tensors = gemm_tensors(M, N, K, L, **how)
    return ka.GemmArguments(*tensors, accumulator_type, fp32_precision=fp32_precision)


def arguments_for(
    kernel: ka.Kernel,
    M: int,
    N: int,
    K: int,
    L: int | None = None,
    *,
    device: Any = "cpu",
    values: str = "random",
    seed: int = 0,
) -> Any:
    """Arguments that a kernel's metadata asks for, whatever the sizes; a norm has rows of N,
    attention M queries and N keys.

    Rows are padded to the divisibility that the kernel asks, and by no more, so that a kernel
    without alignment gets odd strides; a row of one element has a pitch of at least two, because
    with two strides of 1 the major could not be told.
    """
    if is_norm(kernel):
        from support import norms

        return norms.arguments_for(kernel, M, N, device=device, seed=seed)
    if is_attention(kernel):
        from support import sdpa

        return sdpa.arguments_for(kernel, M, N, L, device=device, seed=seed)
    if is_elementwise(kernel):
        from support import elementwise

        return elementwise.arguments_for(kernel, M, N, L, device=device, seed=seed)
    if kernel.arguments is ka.GroupRowsArguments:
        from support import grouping

        return grouping.arguments_for(kernel, M, device=device, seed=seed)
    if is_indexed(kernel):
        from support import indexed

        return indexed.arguments_for(kernel, M, N, device=device, seed=seed)
    if is_grouped(kernel):
        from support import grouped_kernels

        how = {"device": device, "values": values, "seed": seed}
        return grouped_kernels.arguments_for(kernel, M, N, K, L, **how)
    operands = kernel.metadata.operands
    letters = {"M": M, "N": N, "K": K}
    repacked = getattr(kernel, "repacked", (False, False))
    copied = [name for name, is_copied in zip("AB", repacked, strict=True) if is_copied]
    types, layouts, pads = [], "", []
    for name, asked in operands.tensors.items():
        layout = "n" if asked.unit_mode == -2 else "t"
        modes = ka.GemmArguments.modes[name]
        extent = letters[modes[asked.unit_mode or -1]]
        types.append(asked.dtype or "float32")
        layouts += layout
        pitch = -(-max(extent, 2) // asked.divisibility) * asked.divisibility
        if name in copied:
            pitch |= 1  # or there would be nothing to copy
        pads.append(pitch - extent)
    multiplied_as = operands.multiplication_type
    scales = {name: asked.scale for name, asked in operands.tensors.items()}
    plain = gemm_arguments(
        M,
        N,
        K,
        L,
        types=types,
        layouts=layouts,
        pads=pads,
        device=device,
        values=values,
        seed=seed,
        accumulator_type=operands.accumulator_type,
        fp32_precision=multiplied_as.short if multiplied_as is not None else None,
    )
    return with_scales(plain, scales, seed)


def is_norm(kernel: ka.Kernel) -> bool:
    from kernel_api.arguments.norm import NormArguments

    return issubclass(kernel.arguments or ka.GemmArguments, NormArguments)


def is_elementwise(kernel: ka.Kernel) -> bool:
    return issubclass(kernel.arguments or ka.GemmArguments, ka.ElementwiseArguments)


def is_indexed(kernel: ka.Kernel) -> bool:
    from kernel_api.arguments.indexed import IndexedRowsArguments

    return issubclass(kernel.arguments or ka.GemmArguments, IndexedRowsArguments)


def is_attention(kernel: ka.Kernel) -> bool:
    from kernel_api.arguments.attention import AttentionArguments

    return issubclass(kernel.arguments or ka.GemmArguments, AttentionArguments)


def is_grouped(kernel: ka.Kernel) -> bool:
    from kernel_api.arguments.grouped import GroupedGemmArguments

    return issubclass(kernel.arguments or ka.GemmArguments, GroupedGemmArguments)


def supported_sizes(kernel: ka.Kernel, M: int, N: int, K: int) -> tuple[int, int, int]:
    """The sizes, enlarged where the kernel asks: K for a split along it, M or N of an output that
    is written 16 bytes at once. Those of other operations stay."""
    others = (is_norm, is_attention, is_elementwise, is_indexed)
    if kernel.arguments is ka.GroupRowsArguments or any(asks(kernel) for asks in others):
        return M, N, K
    design, out = kernel.metadata.design, kernel.metadata.operands.out
    split = getattr(design, "split_k", 1)
    if split > 1:
        K += (split - 1) * design.tile_shape[2]
    if kernel.metadata.targets == ("sm_90a",) and out.alignment >= 16:
        if out.unit_mode == -1:
            N = -(-N // out.divisibility) * out.divisibility
        else:
            M = -(-M // out.divisibility) * out.divisibility
    return M, N, K


def with_scales(
    args: ka.GemmArguments, modes: dict[str, ka.ScaleMode | str | None], seed: int = 0
) -> ka.GemmArguments:
    """The same arguments, their operands stored in units of random scales, laid out by the seed."""
    generator = torch.Generator().manual_seed(seed)
    operands = list(args.operands)
    for index, name in enumerate(args.operand_names):
        mode = modes.get(name)
        if not isinstance(mode, ka.ScaleMode):
            continue
        scaled = ka.ScaledOperand(operands[index].tensor, torch.ones(()), mode)
        shape = expected_scale_shape(name, scaled, args.modes[name], args.contracted)
        batch = () if mode is ka.ScaleMode.PER_TENSOR else scaled.shape[:-2]
        scale = torch.rand((*batch, *shape), generator=generator) + 0.25
        scale = _laid_out(scale, args.device, seed + index)
        operands[index] = ka.ScaledOperand(scaled.tensor, scale, mode)
    return args.rebuilt(*operands)


def _laid_out(scale: torch.Tensor, device: torch.device, seed: int) -> torch.Tensor:
    """Packed, from another place than the first of a vector, or with gaps: NaN around them."""
    if scale.dim() == 0:
        return scale.to(device)
    first, step = ((0, 1), (1, 1), (1, 2))[seed % 3]
    columns = scale.shape[-1]
    held = torch.full((*scale.shape[:-1], first + step * columns), float("nan"))
    held[..., first::step] = scale
    return held.to(device)[..., first::step]
