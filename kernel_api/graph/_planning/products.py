"""Matrix products and element-wise chains as arguments of kernels."""

from __future__ import annotations

from typing import Any

from kernel_api.arguments import ElementwiseArguments, EpilogueArguments, GemmArguments
from kernel_api.arguments.base import Arguments
from kernel_api.epilogue.functions import STORED_TYPES
from kernel_api.graph._enums import element_type
from kernel_api.graph._node import Node
from kernel_api.graph._planning.builds import Anchored, FusedBuilds, Make, Needed
from kernel_api.graph._planning.frame import Frame, Layout, matrix_frames
from kernel_api.graph._planning.steps import DeclineError, Take
from kernel_api.graph._tensor import Tensor


def elementwise(main: Tensor, frame: Frame) -> FusedBuilds:
    """A kernel that loads a tensor, and has nothing but an epilogue."""

    def make(take: Take, out: Any, epilogue: EpilogueArguments | None) -> Arguments:
        layout = frame.of(main)
        if layout is None:
            raise DeclineError(f"{main} is no matrix in the modes of the kernel")
        return ElementwiseArguments(take(main, layout), out, epilogue=epilogue)

    # Of others the kernel has no out of the same type.
    stores = element_type(main.data_type).name in STORED_TYPES
    return FusedBuilds(main, frame, make, needs_out=not stores)


def gemm(node: Node, needed: Needed) -> Anchored:
    """C = A · B, with what follows as its epilogue."""
    A, B, C = node.input("A"), node.input("B"), node.outputs["C"]
    flat = all(extent == 1 for extent in B.dim[:-2])
    return [
        FusedBuilds(C, frame, _gemm_maker(A, B, frame)) for frame in matrix_frames(C.dim, flat=flat)
    ]


def _gemm_maker(A: Tensor, B: Tensor, frame: Frame) -> Make:
    def make(take: Take, out: Any, epilogue: EpilogueArguments | None) -> Arguments:
        M, K, N = frame.dim[-2], A.dim[-1], frame.dim[-1]
        left = _matrix(A, (*frame.dim[:-2], M, K), frame.groups)
        if len(frame.groups) == 2:
            right: Layout = B.dim[-2:], B.stride[-2:]
        else:
            right = _matrix(B, (*frame.dim[:-2], K, N), frame.groups)
        return GemmArguments(take(A, left), take(B, right), out, epilogue=epilogue)

    return make


def _matrix(tensor: Tensor, dim: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> Layout:
    """A factor, with a stride of 0 over batches that it serves all."""
    own = Frame(dim, groups)
    layout = own.of(tensor)
    if layout is None:
        raise DeclineError(
            f"{tensor}, dim {list(tensor.dim)} and stride {list(tensor.stride)}, is no batch of "
            f"matrices with one stride from each to the next"
        )
    shape, stride = layout
    extents = own.extents
    if any(n != 1 and n != extent for n, extent in zip(shape[1:], extents[1:], strict=True)):
        raise DeclineError(f"{tensor} has dim {list(tensor.dim)}; expected {list(dim)}")
    found = zip(shape, stride, extents, strict=True)
    return extents, tuple(step if n == extent else 0 for n, step, extent in found)
