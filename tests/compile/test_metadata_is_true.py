"""What the metadata of a kernel says is what its implementation builds."""

import pytest
from support.kernels import generated_by

from kernel_api import provider

(CUTEDSL,) = provider.providers(["cutedsl"])


def kernels_of(name):
    return [k for one in CUTEDSL.families() if one.family == name for k in generated_by(one)]


AMPERE = ["sm80.gemm", "sm80.gemm_int8"]
HOPPER = ["sm90.gemm", *(f"sm90.gemm_{kind}" for kind in ("tf32", "tf32x3", "fp8", "int8"))]


@pytest.mark.parametrize("family", [*AMPERE, *HOPPER])
def test_tile_threads_and_stages_are_those_of_the_implementation(family):
    for kernel in kernels_of(family):
        built, design = kernel.implementation(), kernel.metadata.design
        swapped = getattr(design, "swap_ab", False)
        tile = (built.tile_shape[1], built.tile_shape[0], built.tile_shape[2])
        assert (tile if swapped else built.tile_shape) == design.tile_shape
        assert (built.threads, built.stages) == (design.threads, design.stages)


@pytest.mark.parametrize("family", HOPPER)
def test_hopper_kernels_use_as_many_stages_as_fit_and_are_built_as_described(family):
    from kernel_api.implementations.sm90.gemm import Gemm

    for kernel in kernels_of(family):
        design, operands = kernel.metadata.design, kernel.metadata.operands
        built = kernel.implementation()
        cluster = (design.cluster_shape[1], design.cluster_shape[0])
        assert built.cluster_shape == (cluster if design.swap_ab else design.cluster_shape[:2])
        assert (built.schedule, built.swap_ab) == (design.schedule, design.swap_ab)
        parts = design.split_k if design.split_k > 1 else None
        expected = "stream" if design.stream_k else "even" if design.even_k else parts
        assert (built.split_k, built.parallel) == (expected, design.parallel)
        assert built.cluster_k == design.cluster_shape[2]
        most = Gemm(
            built.tile_shape,
            built.cluster_shape,
            design.schedule,
            a_type=operands.A.dtype.cutlass,
            b_type=operands.B.dtype.cutlass,
            output_types=(operands.out.dtype.cutlass,),
            accumulator_type=operands.accumulator_type.cutlass,
            split_float32=built.split_float32,
            loaded_columns=built.loaded_columns,
        )
        assert design.stages == most.stages


@pytest.mark.parametrize("family", AMPERE)
def test_ampere_kernels_are_built_as_described_and_take_the_shared_memory_that_they_say(family):
    for kernel in kernels_of(family):
        design, operands = kernel.metadata.design, kernel.metadata.operands
        implementation = kernel.implementation()
        assert implementation.warps == design.warps
        assert implementation.split_k == (design.split_k if design.split_k > 1 else None)
        built = implementation.shared_memory_bytes(
            operands.A.dtype.cutlass,
            operands.out.dtype.cutlass,
            1 if operands.out.unit_mode == -1 else 0,
        )
        assert built == design.shared_memory_bytes(operands.A.dtype.itemsize)
        assert built <= 99 * 1024
