"""Epilogues of products whose operands carry scales: the PTX runs in the emulator, without GPU."""

import pytest
import torch
from support import fusion_cases as make
from support.fusion_cases import E4M3, E5M2, on_meta
from support.hopper_designs import smallest
from support.ptx.kernel import EmulatedKernel
from support.sampling import some
from support.scaled_fusions import ScaledCase

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.verification import FACTOR, FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

INT8 = {"of_A": torch.int8, "of_B": torch.int8}


def a_scaled_out(draw):
    """Stored in units of a scale of its own; what is reduced is not."""

    def fn(accum, bias):
        x = ep.silu(accum + bias)
        return x, ep.amax(x, None)

    out = ka.ScaledOperand(draw.written(element=E4M3), torch.tensor(0.037), ka.ScaleMode.PER_TENSOR)
    amax = draw.reduced(*draw.batches, element=torch.float32)
    epilogue = ka.EpilogueArguments(fn, bias=draw.random(draw.N), amax=amax)
    return ka.GemmArguments(draw.A, draw.B, out, epilogue=epilogue)


def blocks(name, fusion, design, **how):
    return ScaledCase(name, fusion, design, {"scales": "blocks", **how})


CASES = [
    ScaledCase("swiglu", make.a_glu("swiglu"), "cooperative", {"M": 70, "N": 192}),
    blocks("bias gelu", make.a_bias_activation("gelu"), "swapped", M=13, N=136, K=400),
    ScaledCase(
        "residual", make.a_residual, "clusters", {"M": 70, "N": 264, "scales": "rows of A", **INT8}
    ),
    blocks("swiglu", make.a_glu("swiglu"), "cooperative", M=70, N=192, K=272),
    ScaledCase("amax", make.an_amax, "split", {"M": 70, "N": 72, "K": 784}),
    ScaledCase("scaled out", a_scaled_out, "clusters", {"M": 70, "N": 272, "batch": 2}),
    ScaledCase(
        "swiglu of few rows",
        make.a_glu("swiglu"),
        "swapped",
        {"M": 7, "N": 192, "of_A": E5M2, "scales": "rows of B"},
    ),
    ScaledCase(
        "geglu, halves",
        make.a_glu("geglu", granularity="halves"),
        "stream of few rows",
        {"M": 33, "N": 448, "K": 528},
    ),
    ScaledCase(
        "quantize", make.a_quantize("tensor"), "meeting", {"M": 70, "N": 80, "K": 528, "pad": 16}
    ),
    blocks("quantize, mx", make.a_quantize("mx", E5M2), "stream", M=13, N=160, K=1040, pad=16),
    ScaledCase("rope", make.a_rope(head_dim=64), "cooperative", {"M": 13, "N": 192, "batch": 2}),
    ScaledCase(
        "many, tensors",
        make.many_outputs(),
        "cooperative",
        {"M": 70, "N": 72, "batch": 2, "scales": "tensors"},
    ),
    blocks("swiglu of few rows", make.a_glu("swiglu"), "swapped", M=7, N=448, K=400),
    blocks(
        "swiglu, wide pairs", make.a_glu("swiglu", granularity=64), "swapped", M=7, N=384, K=272
    ),
    blocks(
        "swiglu, halves",
        make.a_glu("swiglu", granularity="halves"),
        "cooperative",
        M=70,
        N=512,
        K=400,
    ),
    blocks(
        "geglu, halves",
        make.a_glu("geglu", granularity="halves"),
        "clusters",
        M=140,
        N=768,
        K=272,
    ),
    blocks(
        "swiglu, halves of 256",
        make.a_glu("swiglu", granularity="halves"),
        "256 columns",
        M=70,
        N=1280,
        K=272,
        of_A=E5M2,
    ),
    blocks(
        "dswiglu, halves",
        make.a_dglu("swiglu", granularity="halves"),
        "cooperative",
        M=13,
        N=192,
        K=272,
    ),
    blocks("norm", make.a_norm, "cooperative", M=13, N=120, batch=2),
    ScaledCase("swiglu", make.a_glu("swiglu"), "swapped meeting", {"M": 9, "N": 192, "K": 784}),
    ScaledCase(
        "gelu, integers",
        make.a_bias_activation("gelu"),
        "parallel",
        {"M": 9, "N": 136, "K": 1552, **INT8},
    ),
    ScaledCase("many, integers", make.many_outputs(), "split", {"M": 13, "N": 72, "batch": 2,
        "K": 528, **INT8}),
    ScaledCase("swiglu, integers", make.a_glu("swiglu"), "pingpong", {"M": 70, "N": 192, **INT8}),
]  # fmt: skip


def named(case):
    return f"{case.name}, {case.how.get('scales', 'rows')}, {case.design}"


TURNS = some(range(len(CASES)), 2)


@pytest.mark.parametrize("turn", TURNS, ids=[named(CASES[turn]) for turn in TURNS])
def test_an_epilogue_sees_the_accumulator_in_units_of_its_scales(turn):
    args = CASES[turn].drawn(turn)
    kernels = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    kernel = smallest(kernels, CASES[turn].design)
    compiled = EmulatedKernel.compile(kernel, args)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=2, seed=turn)
    verdict = judge(args, FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
