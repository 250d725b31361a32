"""Every fusion that the Hopper GEMM takes is right: its PTX runs in the emulator, without GPU.

Outputs are poisoned, factors and operands drawn. The cases take turns with schedules, splits,
swapped operands, layouts, batches and element types; sizes are no multiples of a tile.
"""

import os
from math import prod

import pytest
import torch
from support import fusion_cases as make
from support.fusion_cases import E5M2, F16, F32, Case, on_meta
from support.hopper_designs import smallest
from support.ptx.kernel import EmulatedKernel
from support.sampling import EVERY, some

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.verification import FACTOR, FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

GELU, DSILU = make.a_bias_activation("gelu"), make.a_recomputed_dactivation("silu")
DSRELU = make.a_dactivation("squared_relu")
PART_OF_HEADS = {"head_dim": 64, "start": 16, "width": 32, "style": "interleaved"}

CASES = [
    Case("gemm", make.a_gemm, "cooperative", {"M": 70, "N": 72}),
    Case("bias gelu", GELU, "pingpong", {"M": 13, "N": 136, "element": F16}),
    Case("residual", make.a_residual, "swapped", {"M": 13, "N": 136}),
    Case("amax", make.an_amax, "split", {"M": 70, "N": 72, "K": 264}),
    Case("swiglu", make.a_glu("swiglu"), "pingpong", {"M": 70, "N": 192}),
    Case("geglu", make.a_glu("geglu", F32), "cooperative", {"M": 70, "N": 192, "element": F16}),
    Case("reglu", make.a_glu("reglu", granularity=1), "split", {"M": 13, "N": 72, "K": 264}),
    Case(
        "geglu_clamped", make.a_glu("geglu_clamped", limit=0.8), "cooperative", {"M": 70, "N": 64}
    ),
    Case(
        "situglu", make.a_glu("situglu", order="gate_up"), "stream", {"M": 13, "N": 192, "K": 264}
    ),
    Case("dswiglu", make.a_dglu("swiglu"), "cooperative", {"M": 13, "N": 96}),
    Case(
        "dglu",
        make.a_dglu("geglu_clamped", limit=0.8, granularity=8),
        "cooperative",
        {"M": 70, "N": 40},
    ),
    Case("recompute_dswiglu", make.a_recomputed_dglu, "split", {"M": 13, "N": 192, "K": 264}),
    Case("srelu", make.an_srelu, "swapped split", {"M": 13, "N": 136, "K": 264}),
    Case("dsrelu", DSRELU, "cooperative", {"M": 13, "N": 72, "batch": 2}),
    Case("dsilu", DSILU, "cooperative", {"M": 70, "N": 72}),
    Case("rope", make.a_rope(head_dim=64, heads=2), "cooperative", {"M": 13, "N": 192, "batch": 2}),
    Case(
        "rope, part",
        make.a_rope(**PART_OF_HEADS),
        "pingpong",
        {"M": 70, "N": 192, "layout": "n"},
    ),
    Case("dropout", make.a_dropout, "cooperative", {"M": 13, "N": 72}),
    Case("dropout of gates", make.a_dropout_of("split"), "split", {"M": 13, "N": 144, "batch": 2}),
    Case(
        "dropout of shared", make.a_dropout_of("shared"), "stream", {"M": 13, "N": 72, "batch": 2}
    ),
    Case("interleaved", make.a_dropout_of("interleave"), "cooperative", {"M": 70, "N": 96}),
    Case("halves", make.a_glu("swiglu", granularity="halves"), "pingpong", {"M": 70, "N": 192}),
    Case(
        "dswiglu, halves",
        make.a_dglu("swiglu", granularity="halves"),
        "split",
        {"M": 13, "N": 96, "K": 264},
    ),
    Case("many", make.many_outputs(), "stream", {"M": 70, "N": 72, "batch": 2, "K": 264}),
    Case("hadamard", make.a_hadamard, "cooperative", {"M": 13, "N": 80}),
    Case("quantize", make.a_quantize("tensor"), "pingpong", {"M": 70, "N": 80}),
    Case("quantize, mx", make.a_quantize("mx", E5M2), "split", {"M": 13, "N": 160, "K": 264}),
    Case("quantize, row", make.a_quantize("row"), "cooperative", {"M": 70, "N": 48, "pad": 16}),
    Case("norm", make.a_norm, "cooperative", {"M": 13, "N": 120, "batch": 2}),
    Case("blocks", make.repeated_blocks, "cooperative", {"M": 13, "N": 80}),
    Case("swiglu of few rows", make.a_glu("swiglu"), "swapped", {"M": 7, "N": 192}),
    Case(
        "geglu of few rows, halves",
        make.a_glu("geglu", granularity="halves", order="gate_up"),
        "stream of few rows",
        {"M": 33, "N": 448, "K": 264, "batch": 2},
    ),
    Case(
        "reglu of a row",
        make.a_glu("reglu", F32, granularity=64),
        "swapped",
        {"M": 1, "N": 384, "element": F16},
    ),
]


def emulated(args, design, fits=lambda design: True):
    """The smallest Hopper kernel of such a design that takes them, in the emulator."""
    kernels = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    hopper = [k for k in kernels if k.metadata.targets == ("sm_90a",)]
    fitting = [k for k in hopper if fits(k.metadata.design)]
    return EmulatedKernel.compile(smallest(fitting, design), args)


TURNS = some(range(len(CASES)), 2)


@pytest.mark.parametrize("turn", TURNS, ids=[CASES[turn].name for turn in TURNS])
def test_a_fusion_is_right(turn):
    args = CASES[turn].drawn(turn)
    compiled = emulated(args, CASES[turn].design)
    kernel = compiled.kernel
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=2, seed=turn)
    factor = FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR
    verdict = judge(args, factor)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


#: A multiprocessor has several tiles of several batches.
REDUCED = [
    Case("reduced", make.reduced_matrices, "stream", {"M": 70, "N": 72, "K": 264, "batch": 3}),
    Case("reduced", make.reduced_matrices, "cooperative", {"M": 140, "N": 72, "batch": 2}),
    Case("in clusters", make.reduced_matrices, "clusters", {"M": 70, "N": 264, "batch": 2}),
    Case("reduced", make.reduced_matrices, "pingpong", {"M": 70, "N": 136, "batch": 3}),
    Case("of a tile", make.reduced_matrices, "pingpong", {"M": 13, "N": 8, "batch": 1}),
    Case("reduced", make.reduced_matrices, "split", {"M": 70, "N": 72, "K": 264, "batch": 2}),
    Case("reduced", make.reduced_matrices, "meeting", {"M": 70, "N": 72, "K": 264, "batch": 2}),
    Case("many", make.many_outputs(), "cooperative", {"M": 140, "N": 72, "batch": 2}),
]


@pytest.mark.parametrize(
    "turn",
    some(range(len(REDUCED)), 1),
    ids=some([f"{case.name}, {case.design}" for case in REDUCED], 1),
)
def test_what_is_reduced_over_several_tiles_is_right_and_the_same_again(turn):
    args = REDUCED[turn].drawn(turn)
    compiled = emulated(args, REDUCED[turn].design)
    assert not compiled.artifact.resources.spill_bytes
    found = []
    for seed in (1, 2):
        compiled.run(args, multiprocessors=3, seed=seed)
        assert judge(args, FACTOR_REORDERED), compiled.kernel.metadata.kernel_name
        found.append({n: t.tensor.clone() for n, t in args.epilogue.outputs.items()})
    first, second = found
    assert all(torch.equal(first[name], second[name]) for name in first)


#: (M, N) of the matrix, and rows of a tile: it ends in the first tile, in the second, or behind
#: some of a group's rows of 64 and before others.
ENDS = {
    "cooperative": (72, 72, 64),
    "pingpong": (72, 264, 128),
    "cooperative, 256": (200, 264, 256),
}


ENDING = [
    ("A", "cooperative"),
    ("B", "cooperative"),
    ("B", "pingpong"),
    ("B", "cooperative, 256"),
    ("alpha", "cooperative"),
]


@pytest.mark.parametrize(
    ("operand", "end"),
    ENDING if EVERY else ENDING[:2],
)
def test_what_is_reduced_of_infinite_products_is_infinite(operand, end):
    """Tiles reach beyond the matrix, where zeros times infinity are not a number."""
    M, N, rows = ENDS[end]
    A, B = torch.ones(M, 64).half(), torch.ones(N, 64).half()
    alpha = float("inf") if operand == "alpha" else 0.5
    if operand != "alpha":
        {"A": A, "B": B}[operand][3, 0] = float("inf")

    def fn(accum, alpha):
        x = accum * alpha
        return x, ep.amax(x, None), ep.sum(x, None), ep.amax(x, -1), ep.sum(x, -2)

    written = {"amax": (), "sum": (), "rows": (M,), "columns": (N,)}
    epilogue = ka.EpilogueArguments(
        fn, alpha=alpha, **{name: torch.empty(shape) for name, shape in written.items()}
    )
    args = ka.GemmArguments(A, B.t(), torch.empty(M, N).half(), epilogue=epilogue)
    compiled = emulated(args, end.partition(",")[0], lambda d: d.tile_shape[0] == rows)
    compiled.run(args, multiprocessors=2)
    exact = (A.double() @ B.double().t()) * alpha
    found = {name: epilogue.outputs[name].tensor.double() for name in written}
    assert found["amax"] == found["sum"] == float("inf")
    assert torch.equal(found["rows"], exact.amax(1)) and torch.equal(found["columns"], exact.sum(0))


#: Sizes end within what a quad loads of a row, and within an instruction's rows.
READING = [
    Case("residual", make.a_residual, "cooperative", {"M": 70, "N": 136, "batch": 2}),
    Case("dswiglu", make.a_dglu("swiglu"), "cooperative", {"M": 70, "N": 96}),
    Case("residual", make.a_residual, "pingpong", {"M": 13, "N": 72, "element": F16}),
    Case("recompute_dswiglu", make.a_recomputed_dglu, "pingpong", {"M": 13, "N": 192}),
]
#: Cases whose rows are aligned, and the same where they are not, those of the other schedule first.
ALIGNED = [(case, True) for case in READING] + [(case, False) for case in READING[2:] + READING[:2]]


@pytest.mark.parametrize(
    ("case", "aligned"),
    some(ALIGNED, 2),
    ids=lambda one: f"{one.name}, {one.design}" if isinstance(one, Case) else str(one),
)
def test_matrices_are_read_in_vectors_of_their_rows_where_these_are_aligned(case, aligned):
    args = case.drawn(turn=int(aligned))
    compiled = emulated(args, case.design, lambda d: d.tile_shape[1] % 64 == 0 and not d.swap_ab)
    assert not compiled.artifact.resources.spill_bytes
    assert ("ld.global.v4.b32" in compiled.text) == aligned
    compiled.run(args, multiprocessors=2, seed=1)
    assert judge(args, FACTOR_REORDERED), compiled.kernel.metadata.kernel_name


@pytest.mark.parametrize(("element", "off"), some([(F16, 2.0**-10), (make.BF16, 2.0**-8)], 1))
def test_gelu_keeps_the_digits_of_what_is_nearly_nothing(element, off):
    """1 + erf(x) of negative x is small: its error is a share of it, not of 1."""
    x = torch.cat([torch.linspace(-9, 9, 58), torch.tensor([0.0, -0.0, 1e-4, -1e-4])])
    x = torch.cat([x, torch.tensor([float("inf"), float("nan")])]).to(element)
    A, B = torch.zeros(64, 64, dtype=element), torch.zeros(64, 64, dtype=element)
    A[:, 0], B[:, 0] = x, 1.0
    out, bias = torch.empty(64, 64, dtype=element), torch.zeros(64, dtype=element)
    args = ka.fusions.gemm_bias_activation(A, B.t(), out=out, bias=bias, activation="gelu")
    emulated(args, "cooperative").run(args, multiprocessors=2)
    found, exact = out[:, 7].double(), torch.nn.functional.gelu(x.double())
    near = (x.abs() < 5.6) & (exact.abs() > torch.finfo(element).tiny)
    share = ((found - exact) / exact)[near].abs().max()
    assert share < off, f"off by {share:.3g} of it"
    assert (found - exact)[exact.isfinite() & (exact < 1) & ~near].abs().max() < 1e-7
    assert found[-2] == float("inf") and found[-1].isnan()


def test_what_gelu_is_off_by_does_not_add_up_in_sums_of_more_digits():
    """Of rows of equal values, where all errors are one."""
    x = torch.linspace(-4, 4, 64).bfloat16()
    A, B = torch.zeros(64, 64, dtype=make.BF16), torch.zeros(64, 64, dtype=make.BF16)
    A[:, 0], B[:, 0] = x, 1.0

    def fn(accum):
        gelu = ep.gelu(accum)
        return gelu, ep.sum(gelu, -1)

    out, total = torch.empty(64, 64, dtype=make.BF16), torch.full((64,), torch.nan)
    args = ka.GemmArguments(A, B.t(), out, epilogue=ka.EpilogueArguments(fn, total=total))
    emulated(args, "cooperative").run(args, multiprocessors=2)
    off = (total.double() / 64 - torch.nn.functional.gelu(x.double())).abs() / (
        1 + x.double().abs()
    )
    assert off.max() < 1e-7, f"off by {off.max():.3g} of 1 + |x|"


@pytest.mark.parametrize("out", some([F32, make.BF16, F16], 1))
def test_one_plus_erf_is_right_in_either_order_and_beside_erf_itself(out):
    def fn(accum, first, second):
        x = accum * 0.1
        return 1.0 + ep.erf(x), (ep.erf(x * first) + 1.0) * second, ep.erf(x)

    draw = make.Draw(M=70, N=72, K=72, element=make.BF16)
    more = {"second_order": draw.written(element=out), "itself": draw.written(element=out)}
    epilogue = ka.EpilogueArguments(fn, first=-0.7, second=1.3, **more)
    args = ka.GemmArguments(draw.A, draw.B, draw.written(element=out), epilogue=epilogue)
    compiled = emulated(args, "swapped")  # has the fewest elements for each thread to compute
    compiled.run(args, multiprocessors=2)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{compiled.kernel.metadata.kernel_name}: {verdict}"


#: Of parts that meet in a cluster.
MEETING = [
    Case("bias gelu", GELU, "meeting", {"M": 70, "N": 136, "K": 264}),
    Case("swiglu", make.a_glu("swiglu"), "meeting", {"M": 70, "N": 192, "K": 520}),
    Case(
        "halves",
        make.a_glu("swiglu", granularity="halves"),
        "meeting",
        {"M": 140, "N": 192, "K": 264, "batch": 2},
    ),
    Case("quantize, mx", make.a_quantize("mx", E5M2), "meeting", {"M": 13, "N": 160, "K": 264}),
    Case("srelu", make.an_srelu, "swapped meeting", {"M": 13, "N": 136, "K": 520}),
    Case("geglu of few rows", make.a_glu("geglu"), "swapped meeting", {"M": 7, "N": 192, "K": 520}),
    Case("amax", make.an_amax, "meeting", {"M": 140, "N": 72, "K": 600, "batch": 2}),
    Case(
        "dswiglu",
        make.a_dglu("swiglu"),
        "meeting",
        {"M": 70, "N": 96, "K": 264, "element": F16},
    ),
]


@pytest.mark.parametrize(
    "turn", some(range(len(MEETING)), 2), ids=some([case.name for case in MEETING], 2)
)
def test_a_fusion_of_parts_that_meet_is_right(turn):
    args = MEETING[turn].drawn(turn)
    compiled = emulated(args, MEETING[turn].design)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=2, seed=turn)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{compiled.kernel.metadata.kernel_name}: {verdict}"


HALVES = Case("halves", make.a_glu("swiglu", granularity="halves"), how={"M": 70, "N": 448})


def designs_for_halves():
    """One kernel of each design that is offered, those whose blocks share operands first."""
    args = on_meta(HALVES.drawn(1))
    kernels = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    hopper = {k.metadata.design: k for k in kernels if k.metadata.targets == ("sm_90a",)}
    return sorted(hopper.values(), key=lambda k: -prod(k.metadata.design.kernel_cluster))


def test_blocks_of_a_cluster_cut_no_pair_of_halves_but_in_the_middle():
    shares = {
        k.metadata.design.kernel_tile[1] // k.metadata.design.kernel_cluster[0]
        for k in designs_for_halves()
        if not k.metadata.design.swap_ab
    }
    assert all(share % 64 == 0 or 64 % share == 0 for share in shares), shares
    assert max(shares) > 64 > min(shares)


def test_halves_are_right_in_every_design():
    args = HALVES.drawn(1)
    most = None if os.environ.get("KERNEL_API_EMULATE") else 1
    for kernel in designs_for_halves()[:most]:
        EmulatedKernel.compile(kernel, args).run(args, multiprocessors=2, seed=1)
        assert judge(args, FACTOR_REORDERED), kernel.metadata.kernel_name


def test_rows_side_by_side_need_not_be_whole_vectors_where_they_become_columns():
    draw = make.Draw(M=17, N=40, K=64, element=make.BF16)
    row = torch.randn(17).bfloat16().as_strided((17, 1), (1, 19))
    C = torch.randn(40, 17).bfloat16().t()
    epilogue = ka.EpilogueArguments(lambda accum, row, C: accum * row + C, row=row, C=C)
    args = ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)
    kernels = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    kernel = smallest(kernels, "swapped")
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=2, seed=1)
    assert judge(args, FACTOR_REORDERED)


def test_a_new_factor_compiles_nothing():
    draw = make.Draw(M=70, N=72, K=72, element=make.BF16)
    operands = draw.A, draw.B, draw.written(), draw.reduced(element=F32)

    def arguments(alpha):
        A, B, out, amax = operands
        return on_meta(ka.fusions.gemm_amax(A, B, out=out, amax=amax, alpha=alpha))

    kernel = smallest(ka.get_kernels(arguments(0.5), cc=90, providers=["cutedsl"]), "cooperative")
    artifact = kernel.compile(arguments(0.5), cc=90)
    for alpha in (1.0, 2, -0.25):
        assert kernel.compile(arguments(alpha), cc=90) is artifact
