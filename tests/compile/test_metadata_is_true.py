"""What the metadata of a kernel says is what its implementation builds."""

import pytest

import kernel_api as ka


def kernels_of(family):
    return [k for k in ka.get_kernels(providers=["cutedsl"]) if k.family_name() == family]


@pytest.mark.parametrize("family", ["sm80.gemm", "sm90.gemm"])
def test_tile_threads_and_stages_are_those_of_the_implementation(family):
    for kernel in kernels_of(family):
        built, design = kernel.implementation(), kernel.metadata.design
        assert tuple(built.tile_shape) == design.tile_shape
        assert (built.threads, built.stages) == (design.threads, design.stages)


def test_hopper_kernels_use_as_many_stages_as_fit():
    from kernel_api.implementations.sm90.gemm import Gemm

    for kernel in kernels_of("sm90.gemm"):
        design, operands = kernel.metadata.design, kernel.metadata.operands
        types = {
            "operand_type": operands.A.dtype.cutlass,
            "output_type": operands.out.dtype.cutlass,
        }
        built = kernel.implementation()
        assert (tuple(built.cluster_shape), built.schedule) == (
            design.cluster_shape[:2],
            design.schedule,
        )
        most = Gemm(design.tile_shape, design.cluster_shape[:2], design.schedule, **types)
        assert design.stages == most.stages


def test_ampere_kernels_take_the_shared_memory_that_they_say():
    for kernel in kernels_of("sm80.gemm"):
        design, operands = kernel.metadata.design, kernel.metadata.operands
        built = kernel.implementation().shared_memory_bytes(
            operands.A.dtype.cutlass,
            operands.out.dtype.cutlass,
            1 if operands.out.unit_mode == -1 else 0,
        )
        assert built == design.shared_memory_bytes(operands.A.dtype.itemsize)
        assert built <= 99 * 1024
