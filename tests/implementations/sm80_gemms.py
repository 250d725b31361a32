"""The Ampere GEMMs that the provider offers, with all that depends on types and majors decided."""

from functools import cache

from cutlass import BFloat16, Float32, Int8, Int32

from kernel_api import provider
from kernel_api.implementations.sm80.gemm import Gemm


def planned(
    tile_shape,
    warps,
    stages,
    vector_bytes=16,
    *,
    operand_type=BFloat16,
    output_type=Float32,
    unit_modes=(1, 1, 1),
):
    accumulator_type = Int32 if operand_type is Int8 else Float32
    gemm = Gemm(tile_shape, warps, stages, accumulator_type, vector_bytes=vector_bytes)
    gemm._plan(operand_type, output_type, unit_modes)
    return gemm


@cache
def offered():
    (cutedsl,) = provider.providers(["cutedsl"])
    families = [family for family in cutedsl.families() if family.family.startswith("sm80.gemm")]
    return [
        _as_offered(kernel)
        for family in families
        for kernel in family.generate_kernels(lambda metadata: True)
    ]


def _as_offered(kernel):
    operands, design = kernel.metadata.operands, kernel.metadata.design
    k_is_unit = operands.A.unit_mode == -1, operands.B.unit_mode == -2
    n_is_unit = operands.out.unit_mode == -1
    return planned(
        design.tile_shape,
        design.warps,
        design.stages,
        kernel.implementation().vector_bytes,
        operand_type=operands.A.dtype.cutlass,
        output_type=operands.out.dtype.cutlass,
        unit_modes=(*map(int, k_is_unit), int(n_is_unit)),
    )


def distinct(parts, key):
    """The first of those that are alike."""
    return list({key(part): part for part in reversed(list(parts))}.values())[::-1]
