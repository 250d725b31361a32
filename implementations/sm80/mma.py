"""The mma.sync instructions by element type."""

from dataclasses import dataclass

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as cute_nvgpu_ir
from cutlass import BFloat16, Float16, Float32, Int8, Int32
from cutlass._mlir import ir
from cutlass.cute.atom import MmaOp, Trait, make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import warp

from ..common.conversion import STORED

MMA_M, MMA_N = 16, 8  # of every instruction
K_BYTES = 32  # of an operand's row that every instruction takes

OUTPUTS = {  # types of D for each type of A and B
    Float16: (Float16, BFloat16, Float32),
    BFloat16: (Float16, BFloat16, Float32),
    Float32: (Float32,),
    Int8: (Int32, Float16, BFloat16, Float32),
}


@dataclass(frozen=True)
class MmaI8Op(MmaOp):
    """mma.sync of signed 8-bit integers, which the DSL has no class for.

    Sums beyond the 32 bits of an accumulator are clamped; 131071 products cannot get there.
    """

    shape_mnk: tuple[int, int, int]

    def _make_trait(self, *, loc=None, ip=None, **_):
        shape = _pack_shape(self.shape_mnk, loc=loc, ip=ip)
        signed = ir.IntegerType.get_signed(8)  # Int8 is an integer without a sign to the compiler
        kind = cute_nvgpu_ir.MmaAtomSM80Type.get(
            shape.type.attribute, signed, signed, Int32.mlir_type
        )
        return Trait(make_atom(kind, loc=loc, ip=ip))

    def _verify_fragment_A(self, fragment, *, loc=None, ip=None):
        return True

    def _verify_fragment_B(self, fragment, *, loc=None, ip=None):
        return True


def check_types(
    operand_type: type[cutlass.Numeric],
    accumulator_type: type[cutlass.Numeric],
    output_types: tuple[type[cutlass.Numeric], ...],
    *,
    fused: bool = False,
) -> None:
    """Raises ValueError unless there is such a product; a fused one gives anything that is stored.
    Float32 is multiplied as tfloat32."""
    for output_type in output_types:
        known = STORED if fused else OUTPUTS.get(operand_type, ())
        if operand_type not in OUTPUTS or output_type not in known:
            raise ValueError(f"no product of {operand_type} operands gives {output_type}")
    expected = Int32 if operand_type is Int8 else Float32
    if accumulator_type is not expected:
        raise ValueError(
            f"products of {operand_type} accumulate in {expected}, not {accumulator_type}"
        )


def mma_k(operand_type: type[cutlass.Numeric]) -> int:
    """Elements along K of one instruction."""
    return K_BYTES * 8 // operand_type.width


def mma_operation(operand_type: type[cutlass.Numeric]) -> MmaOp:
    shape = (MMA_M, MMA_N, mma_k(operand_type))
    if operand_type is Float32:
        return warp.MmaTF32Op(shape)
    if operand_type is Int8:
        return MmaI8Op(shape)
    return warp.MmaF16BF16Op(operand_type, Float32, shape)
