"""The wgmma instructions by element type."""

from dataclasses import dataclass

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as cute_nvgpu_ir
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import (
    BFloat16,
    Boolean,
    Float8E4M3FN,
    Float8E5M2,
    Float16,
    Float32,
    Int8,
    Int32,
    TFloat32,
)
from cutlass.cute.atom import make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.cute.nvgpu.warpgroup.mma import MmaOp, MmaTraits

WGMMA_M = 64  # rows of every wgmma
K_BYTES = 32  # of an operand's row that every wgmma takes

FLOAT8 = (Float8E4M3FN, Float8E5M2)


@dataclass(frozen=True)
class MmaTF32Op(MmaOp):
    """wgmma of tfloat32, both operands K-major, which the DSL has no class for."""

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _make_trait(self, *, loc=None, ip=None, **_):
        shape = _pack_shape(self.shape_mnk, loc=loc, ip=ip)
        kind = cute_nvgpu_ir.MmaAtomSM90Type.get(
            shape.type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        accumulate = Boolean(False).ir_value(loc=loc, ip=ip)
        return MmaTraits(make_atom(kind, [accumulate], loc=loc, ip=ip))


def check_types(
    a_type: type[cutlass.Numeric],
    b_type: type[cutlass.Numeric],
    accumulator_type: type[cutlass.Numeric],
) -> None:
    """Raises ValueError unless wgmma multiplies these. Float32 is multiplied as tfloat32."""
    same = a_type is b_type and a_type in (Float16, BFloat16, Float32, Int8)
    if not same and not (a_type in FLOAT8 and b_type in FLOAT8):
        raise ValueError(f"wgmma does not multiply {a_type} with {b_type}")
    expected = Int32 if a_type is Int8 else Float32
    if accumulator_type is not expected:
        raise ValueError(f"{a_type} accumulates in {expected}, not {accumulator_type}")


def multiplied_as(element_type: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """The type that shared memory holds: TMA rounds float32 to tfloat32 on its way."""
    return TFloat32 if element_type is Float32 else element_type


def make_tiled_mma(
    a_type: type[cutlass.Numeric],
    b_type: type[cutlass.Numeric],
    accumulator_type: type[cutlass.Numeric],
    a_major: OperandMajorMode,
    b_major: OperandMajorMode,
    groups: int,
    columns: int,
) -> cute.TiledMma:
    """The product of 64 × `groups` rows with `columns` columns, A and B from shared memory."""
    if a_type is not TFloat32:
        return sm90.make_trivial_tiled_mma(
            a_type,
            b_type,
            a_major,
            b_major,
            accumulator_type,
            (groups, 1, 1),
            (WGMMA_M, columns),
        )
    op = MmaTF32Op(
        a_type,
        b_type,
        accumulator_type,
        (WGMMA_M, columns, K_BYTES * 8 // 32),
        OperandSource.SMEM,
        a_major,
        b_major,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (groups, 1, 1))
