"""What the Ampere GEMM refuses when it is built, instead of computing something else."""

import pytest
from cutlass import BFloat16, Float16, Float32, Int8, Int32
from sm80_gemms import planned

from kernel_api.implementations.common.epilogue import Epilogue, Full
from kernel_api.implementations.sm80.gemm import Gemm


class Wide(Epilogue):
    bundle = 64


class TwoOutputs(Epilogue):
    full = (Full(), Full())


def test_columns_looked_at_together_that_are_more_than_a_warp_has():
    gemm = Gemm((64, 64, 64), (2, 2), 3, epilogue=Wide())
    with pytest.raises(ValueError, match="32 columns of a warp are no multiple of a bundle of 64"):
        gemm._plan(BFloat16, BFloat16, (1, 1, 1))


def test_fewer_outputs_than_the_epilogue_gives():
    gemm = Gemm((64, 64, 64), (2, 2), 3, epilogue=TwoOutputs())
    with pytest.raises(ValueError, match="1 outputs for 2 to write"):
        gemm._plan(BFloat16, BFloat16, (1, 1, 1))


def test_a_split_into_fewer_than_two_parts():
    with pytest.raises(ValueError, match="two parts or more, not 1"):
        Gemm((64, 64, 64), (2, 2), 3, split_k=1)


@pytest.mark.parametrize("how", [{"split_k": 2}, {"vector_bytes": 2}])
def test_more_accumulators_than_leave_room_for_the_rest(how):
    with pytest.raises(ValueError, match=r"128 accumulators per thread.* leave room for 64"):
        Gemm((128, 128, 32), (2, 2), 3, **how)


@pytest.mark.parametrize(
    ("operand_type", "accumulator_type", "output_type", "refusal"),
    [
        (Float32, Float32, BFloat16, "no product of"),
        (Float16, Float32, Int32, "no product of"),
        (Int8, Float32, Int32, "accumulate in"),
        (BFloat16, Int32, Float32, "accumulate in"),
    ],
)
def test_types_without_an_instruction(operand_type, accumulator_type, output_type, refusal):
    gemm = Gemm((64, 64, 128), (2, 2), 3, accumulator_type)
    with pytest.raises(ValueError, match=refusal):
        gemm._plan(operand_type, output_type, (1, 1, 1))


def test_8_bit_operands_that_are_not_contiguous_along_k():
    with pytest.raises(ValueError, match="ldmatrix cannot transpose"):
        planned(
            (64, 64, 128), (2, 2), 3, operand_type=Int8, output_type=Int32, unit_modes=(0, 1, 1)
        )
