"""Kernels of operands with scales have registers for epilogues as well."""

import pytest
from support import fusion_cases as make
from support.sampling import some
from support.scaled_fusions import MODES, ScaledCase

import kernel_api as ka

pytestmark = pytest.mark.compile

FUSIONS = {
    "swiglu": make.a_glu("swiglu"),
    "bias gelu": make.a_bias_activation("gelu"),
    "matrix beside": make.a_gemm,
    "quantize, mx": make.a_quantize("mx"),
}
SIZES = ((16, 4096, 8192), (128, 4096, 4096), (1024, 1536, 16384), (4096, 4096, 4096))


def offered(name, scales):
    """Every Hopper kernel of 8-bit floats that a fusion of some size finds, with its arguments."""
    found = {}
    for M, N, K in SIZES:
        how = {"M": M, "N": N, "K": K, "pad": 16, "scales": scales}
        args = ScaledCase(name, FUSIONS[name], how=how).described()
        for kernel in ka.get_kernels(args, cc=90, providers=["cutedsl"]):
            found.setdefault(kernel.metadata.kernel_name, (kernel, args))
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize(
    ("name", "scales"), some([(name, scales) for name in FUSIONS for scales in MODES], 2)
)
def test_epilogues_beside_scales_spill_nothing(name, scales):
    for kernel, args in some(offered(name, scales), 1):
        used = kernel.compile(args, cc="sm_90a").resources
        assert used.spill_bytes == 0, kernel.metadata.kernel_name
