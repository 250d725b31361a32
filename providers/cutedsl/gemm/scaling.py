"""Scaled operands, as the GEMM kernels take them: factors of the accumulators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from kernel_api.arguments import ScaleMode
from kernel_api.arguments.scaled import VECTOR_BYTES, in_vectors
from kernel_api.metadata import OperandsMetadata

#: Scales of A and B that are factors of whole sums: one has nothing to do with the other.
OF_SUMS = tuple(
    {"A": of_A, "B": of_B} for of_A, of_B in itertools.product(("per_tensor", "per_row"), repeat=2)
)

#: More batches than any launch has: what serves all of them is seen with this many.
_MANY = 1 << 20

#: Which modes of the accumulators a scale varies in.
_KINDS = {
    ("A", ScaleMode.PER_TENSOR): "l",
    ("A", ScaleMode.PER_ROW): "lm",
    ("B", ScaleMode.PER_TENSOR): "l",
    ("B", ScaleMode.PER_ROW): "ln",
    ("out", ScaleMode.PER_TENSOR): "l",
    ("out", ScaleMode.PER_ROW): "lm",
}


def scaled_by_blocks(operands: OperandsMetadata) -> bool:
    """Whether the scales vary along K, so that they act before the sum is complete."""
    return operands.tensors["A"].scale is ScaleMode.BLOCK_1x128


def scale_kinds(operands: OperandsMetadata) -> dict[str, str]:
    """Per scaled operand, which accumulators a scale belongs to: a kind of the epilogue's."""
    scaled = {name: t.scale for name, t in operands.tensors.items() if t.scale is not None}
    kinds = {name: _KINDS.get((name, mode)) for name, mode in scaled.items()}  # type: ignore[arg-type]
    return {name: kind for name, kind in kinds.items() if kind is not None}


def scaling_function(operands: OperandsMetadata) -> Callable[..., Any]:
    """accumulator, scales → element of out: times those of A and B, over that of out."""
    names = tuple(scale_kinds(operands))

    def scaled(accumulator: Any, *scales: Any) -> Any:
        from cutlass import Float32

        result = accumulator.to(Float32)
        for name, scale in zip(names, scales, strict=True):
            result = result * (1.0 / scale if name == "out" else scale)
        return result

    return scaled


def scaling(operands: OperandsMetadata) -> Any:
    """The epilogue that scales the accumulators, which is traced with the kernel; None without
    scales."""
    from kernel_api.implementations.common.epilogue import Finish

    kinds = tuple(scale_kinds(operands).values())
    return Finish(kinds, scaling_function(operands)) if kinds else None


def aligned_scales(args: Any) -> dict[str, Any]:
    """The scales by operand, as they broadcast against (L, M, N); those per block as they are."""
    scales = {name: getattr(args, name).scale.tensor for name in args.scaled}
    return {name: _aligned(name, getattr(args, name).mode, s) for name, s in scales.items()}


def alignments_of_scales(args: Any) -> dict[str, int]:
    """Of scales by their names in a launch, in bytes: of those of columns that lie side by side."""
    return {"B_scale": VECTOR_BYTES} if in_vectors(args.B) else {}


def _aligned(name: str, mode: ScaleMode, scale: Any) -> Any:
    if mode is ScaleMode.PER_TENSOR:
        return (scale.expand(_MANY) if scale.dim() == 0 else scale)[:, None, None]
    if mode is ScaleMode.PER_ROW:
        return scale.unsqueeze(-2 if name == "B" else -1)
    return scale
