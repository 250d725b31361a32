"""Every fusion of the catalogue of operands with scales, in the kernels of this GPU."""

import pytest
import torch
from support.fusion_cases import CATALOGUE, check_twice, on_gpu
from support.scaled_fusions import MODES, ScaledCase

import kernel_api as ka

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

E5M2 = torch.float8_e5m2
INT8 = {"of_A": torch.int8, "of_B": torch.int8}
SETTINGS = [
    {"M": 13, "N": 192, "K": 144, "pad": 0},
    {"M": 70, "N": 192, "K": 784, "batch": 2, "pad": 1},
    {"M": 129, "N": 192, "K": 400, "layout": "n", "pad": 3, "of_A": E5M2},
    {"M": 1000, "N": 1344, "K": 1040, "pad": 16},
    {"M": 1, "N": 192, "K": 2064, "pad": 16, "of_B": E5M2},
    {"M": 70, "N": 192, "K": 784, "pad": 16, **INT8},
    {"M": 300, "N": 1344, "K": 144, "batch": 2, "pad": 1, **INT8},
]
KERNELS = 3  # of a family, for a case in a setting

#: What no kernel computes, and words of the reason.
WHOLE_ROWS = ("quantize, row", "norm")
HOPPER = (9, 0)


def cases():
    turns = [(name, scales) for name in CATALOGUE for scales in MODES]
    for turn, (name, scales) in enumerate(turns):
        for place in (turn, turn + 3):
            how = SETTINGS[place % len(SETTINGS)]
            if scales == "blocks" and "of_A" in how and how["of_A"] is torch.int8:
                continue
            case = ScaledCase(name, CATALOGUE[name], how={**how, "scales": scales})
            yield pytest.param(case, turn, id=f"{name}-{scales}-{place % len(SETTINGS)}")


def refused(case, args):
    """Words of the reason, if no kernel takes such a case."""
    integers = args.A.dtype.is_integer
    if case.name.startswith("quantize") and (args.out.dtype.is_float == integers):
        return f"out is {args.out.dtype}"
    if case.name in WHOLE_ROWS and args.N > 256:
        return "whole rows"
    if case.name == "halves" and case.how["scales"] == "blocks":
        return "side by side"
    if not integers and torch.cuda.get_device_capability() != HOPPER:
        return "sm_90a"
    return None


@pytest.mark.parametrize(("case", "turn"), list(cases()))
def test_a_fusion_of_scaled_operands_is_what_the_reference_computes(case, turn):
    args = on_gpu(case.drawn(turn))
    families = {}
    for kernel in ka.get_kernels(args, providers=["cutedsl"]):
        families.setdefault(kernel.family_name(), []).append(kernel)
    reason = refused(case, args)
    if reason is not None:
        assert not families
        assert reason in str(ka.explain(args, providers=["cutedsl"]))
        return
    assert families, str(ka.explain(args))
    for kernels in families.values():
        for kernel in kernels[turn % len(kernels) :: max(1, len(kernels) // KERNELS)][:KERNELS]:
            check_twice(kernel, args)
