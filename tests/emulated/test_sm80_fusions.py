"""Every fusion that the Ampere GEMM takes is right: its PTX runs in the emulator, without GPU.

Outputs are poisoned, factors and operands drawn. The cases take turns with tiles, splits, layouts,
batches, alignments and element types; sizes are no multiples of a tile.
"""

import os

import pytest
import torch
from support import fusion_cases as make
from support.epilogues import kept
from support.fusion_cases import E4M3, E5M2, F16, F32, Case, on_meta
from support.fusions import Draw
from support.ptx.kernel import EmulatedKernel

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.verification import FACTOR, FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

DESIGNS = {
    "plain": lambda d: not d.splits,
    "split": lambda d: d.splits,
    "four warps along M": lambda d: d.warps == (4, 1),
}

GELU, DSILU = make.a_bias_activation("gelu"), make.a_recomputed_dactivation("silu")

#: Those in front, of every kind of design, are run every time.
CASES = [
    Case(
        "halves in a warp",
        make.a_glu("swiglu", granularity="halves"),
        "four warps along M",
        {"M": 70, "N": 192},
    ),
    Case("many", make.many_outputs(torch.int8), how={"M": 70, "N": 40, "batch": 2}),
    Case("dswiglu", make.a_dglu("swiglu"), "split", {"M": 13, "N": 96, "K": 200}),
    Case("halves", make.a_glu("swiglu", granularity="halves"), how={"M": 70, "N": 192}),
    Case("quantize, mx", make.a_quantize("mx", E4M3), how={"M": 13, "N": 64, "pad": 16}),
    Case("gemm", make.a_gemm, how={"M": 70, "N": 72}),
    Case("bias gelu", GELU, how={"M": 13, "N": 136, "element": F16}),
    Case("residual", make.a_residual, how={"M": 13, "N": 136, "layout": "n"}),
    Case("amax", make.an_amax, "split", {"M": 13, "N": 40, "K": 264}),
    Case("swiglu", make.a_glu("swiglu"), how={"M": 70, "N": 192, "layout": "n"}),
    Case("geglu", make.a_glu("geglu", F32), how={"M": 70, "N": 192, "element": F16}),
    Case("reglu", make.a_glu("reglu", granularity=1), "split", {"M": 13, "N": 72, "K": 264}),
    Case("geglu_clamped", make.a_glu("geglu_clamped", limit=0.8), how={"M": 70, "N": 64}),
    Case("situglu", make.a_glu("situglu", order="gate_up"), how={"M": 13, "N": 192}),
    Case("dglu", make.a_dglu("geglu_clamped", limit=0.8, granularity=8), how={"M": 70, "N": 40}),
    Case("dswiglu, halves", make.a_dglu("swiglu", granularity="halves"), how={"M": 13, "N": 96}),
    Case("recompute_dswiglu", make.a_recomputed_dglu, "split", {"M": 13, "N": 128, "K": 264}),
    Case("srelu", make.an_srelu, "split", {"M": 13, "N": 136, "K": 264}),
    Case("dsrelu", make.a_dactivation("squared_relu"), how={"M": 13, "N": 72, "batch": 2}),
    Case("dsilu", DSILU, how={"M": 70, "N": 72}),
    Case("rope", make.a_rope(head_dim=64, heads=1), how={"M": 13, "N": 192, "batch": 2}),
    Case("rope, wide", make.a_rope(head_dim=128), "four warps along M", {"M": 13, "N": 256}),
    Case(
        "rope, part",
        make.a_rope(head_dim=64, start=16, width=32, style="interleaved"),
        how={"M": 70, "N": 192, "layout": "n"},
    ),
    Case("dropout", make.a_dropout, how={"M": 13, "N": 72}),
    Case("hadamard", make.a_hadamard, how={"M": 13, "N": 80}),
    Case("quantize", make.a_quantize("tensor", E5M2), how={"M": 70, "N": 80}),
    Case("quantize to integers", make.a_quantize("tensor", torch.int8), how={"M": 13, "N": 72}),
    Case("quantize, mx, unaligned", make.a_quantize("mx", E5M2), how={"M": 13, "N": 160}),
    Case("quantize, row", make.a_quantize("row"), "four warps along M", {"M": 70, "N": 112}),
    Case("norm", make.a_norm, "four warps along M", {"M": 13, "N": 120, "batch": 2}),
    Case("blocks", make.repeated_blocks, how={"M": 13, "N": 80}),
    Case("tf32 gemm", make.a_gemm, how={"M": 70, "N": 72, "element": F32}),
    Case(
        "tf32 dswiglu", make.a_dglu("swiglu"), "split", {"M": 13, "N": 96, "element": F32, "K": 200}
    ),
    Case(
        "tf32 halves",
        make.a_glu("glu", granularity="halves"),
        how={"M": 70, "N": 128, "element": F32},
    ),
]


def smallest(kernels, design):
    """Of the kernels with such a design, the one with the smallest tiles."""
    ampere = [k for k in kernels if k.metadata.targets == ("sm_80",)]
    fitting = [k for k in ampere if DESIGNS[design](k.metadata.design)]
    assert fitting, f"{design} is not among {len(kernels)} kernels"

    def size(kernel):
        rows, columns, _ = kernel.metadata.design.tile_shape
        return rows * columns

    return min(fitting, key=size)


TURNS = range(len(CASES) if os.environ.get("KERNEL_API_EMULATE") else len(DESIGNS))


@pytest.mark.parametrize("turn", TURNS, ids=[CASES[turn].name for turn in TURNS])
def test_a_fusion_is_right(turn):
    case = CASES[turn]
    args = case.drawn(turn)
    kernels = ka.get_kernels(on_meta(args), cc=80, providers=["cutedsl"])
    kernel = smallest(kernels, case.design)
    compiled = EmulatedKernel.compile(kernel, args, "sm_80")
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, seed=turn)
    factor = FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR
    verdict = judge(args, factor)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def test_a_sum_ends_where_each_half_of_the_columns_does():
    def fn(accum):
        shifted = accum + 1.0  # so that columns behind the end would count
        gate, up = ep.glu_pair(shifted, granularity="halves")
        return gate * up, ep.sum(shifted, -1)

    draw = Draw(M=13, N=192, K=40, element=torch.bfloat16)
    epilogue = ka.EpilogueArguments(fn, total=draw.reduced(13, element=torch.float32))
    args = ka.GemmArguments(draw.A, draw.B, draw.written(96), epilogue=epilogue)
    kernels = ka.get_kernels(on_meta(args), cc=80, providers=["cutedsl"])
    kernel = next(k for k in kernels if k.metadata.design.tile_shape[1] == 128)
    EmulatedKernel.compile(kernel, args, "sm_80").run(args)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, verdict.reason


@pytest.mark.parametrize("what", ["split", "interleave", "shared"])
def test_dropout_draws_by_the_counters_of_what_it_is_given(what):
    args = make.a_dropout_of(what)(Draw(M=13, N=160, K=40, element=torch.bfloat16, batch=2))
    kernel = smallest(ka.get_kernels(on_meta(args), cc=80, providers=["cutedsl"]), "plain")
    compiled = EmulatedKernel.compile(kernel, args, "sm_80")
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args)
    seed, offset = (int(args.epilogue.inputs[n].tensor) % 2**64 for n in ("seed", "offset"))
    shape = args.out.shape[1:] if what == "shared" else args.out.shape
    expected = kept(shape, 0.25, seed, offset).expand(args.out.shape)
    assert torch.equal(args.out.tensor != 0, expected)


def test_small_values_of_tanh_keep_their_digits():
    """Where a multiple of it is written: 1 less what is nearly 1 would have few."""
    draw = Draw(M=16, N=64, K=64, element=F16)
    epilogue = ka.EpilogueArguments(lambda accum: ep.softcap(accum * 1e-4, 50.0))
    args = ka.GemmArguments(draw.A, draw.B, draw.written(64), epilogue=epilogue)
    kernel = smallest(ka.get_kernels(on_meta(args), cc=80, providers=["cutedsl"]), "plain")
    EmulatedKernel.compile(kernel, args, "sm_80").run(args)
    verdict = judge(args, FACTOR)
    assert verdict, verdict.reason
