"""Every fusion of the catalogue in the GEMM kernels of this GPU, against the reference.

Sizes are odd, with batches, both majors and padding; the cases take turns with them, and a family's
kernels take turns with the cases. ``KERNEL_API_TEST_EVERY_KERNEL=1`` takes every case in every
setting.
"""

import os

import pytest
import torch
from support.fusion_cases import BF16, CATALOGUE, F16, F32, Case, a_glu, check_twice, on_gpu

import kernel_api as ka

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

SETTINGS = {
    "odd": {"M": 13, "N": 192, "K": 72, "element": F16},
    "batches": {"M": 70, "N": 192, "K": 264, "batch": 2, "pad": 1},
    "columns": {"M": 129, "N": 192, "K": 200, "layout": "n", "pad": 3},
    "aligned": {"M": 1000, "N": 1344, "K": 520, "pad": 8},
    "tf32": {"M": 70, "N": 192, "K": 72, "element": F32},
}
#: They need whole rows in a tile.
SPANNING = ("quantize, row", "norm")
KERNELS = 3  # of a family, for a case in a setting


def cases():
    every = os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1"
    found = []
    for turn, (name, make) in enumerate(CATALOGUE.items()):
        for place, (setting, how) in enumerate(SETTINGS.items()):
            if every or (place - turn) % len(SETTINGS) in (0, 3):
                case = Case(name, make, how={"element": BF16, **how})
                found.append(pytest.param(case, turn, id=f"{name}-{setting}"))
    return found


def refused(case, args):
    """Words of the reason, if no kernel of these families takes such a case."""
    if case.name in SPANNING and args.N > 256:
        return "whole rows"
    if case.name.startswith("quantize") and args.A.tensor.dtype is F32:
        return "expected float32"
    return None


@pytest.mark.parametrize(("case", "turn"), cases())
def test_a_fusion_is_what_the_reference_computes(case, turn):
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


def glu_alone(granularity, order):
    """With nothing stored beside: what inference computes."""

    def make(draw):
        return ka.fusions.gemm_glu(
            draw.A, draw.B, out=draw.written(draw.N // 2), granularity=granularity, order=order
        )

    return make


FEW_ROWS = {
    "pairs": (a_glu("swiglu"), {"M": 7, "N": 448, "K": 264}),
    "pairs, alone": (glu_alone(32, "gate_up"), {"M": 64, "N": 14336, "K": 4096}),
    "halves": (a_glu("geglu", granularity="halves"), {"M": 33, "N": 448, "K": 200, "pad": 3}),
    "halves, alone": (glu_alone("halves", "up_gate"), {"M": 16, "N": 14336, "K": 4096}),
    "halves of a row": (a_glu("swiglu", granularity="halves", order="gate_up"), {"M": 1, "N": 64}),
    "batches": (a_glu("reglu", F32), {"M": 17, "N": 192, "K": 264, "batch": 3, "pad": 8}),
    "64": (a_glu("swiglu", granularity=64), {"M": 40, "N": 384, "element": F16}),
    "8": (glu_alone(8, "up_gate"), {"M": 9, "N": 144}),
    "columns": (glu_alone(32, "up_gate"), {"M": 24, "N": 192, "layout": "n"}),
    "tf32": (a_glu("swiglu", granularity="halves"), {"M": 9, "N": 192, "element": F32}),
}


@pytest.mark.parametrize("name", FEW_ROWS)
def test_pairs_of_few_rows_are_right_in_every_transposed_tile(name):
    make, how = FEW_ROWS[name]
    args = on_gpu(Case(name, make, how={"element": BF16, "pad": 8, **how}).drawn(0))
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    found = [k for k in kernels if getattr(k.metadata.design, "swap_ab", False)]
    assert bool(found) == (torch.cuda.get_device_capability() == (9, 0))
    for kernel in found:
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
