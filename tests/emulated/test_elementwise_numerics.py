"""The element-wise family is right: its PTX runs in the emulator, without a GPU.

Outputs are poisoned, what lies between rows is NaN, factors and operands are drawn, and sizes are
no multiples of a tile. The cases take turns with designs, element types, layouts, batches and
alignments. With KERNEL_API_EMULATE=all in the environment every case runs, else a sample of them.
"""

import os
import re

import pytest
import torch
from support import fusion_cases as make
from support.elementwise import (
    BF16,
    BROADCAST,
    arguments_on,
    broadcast,
    drawn,
    matrix,
    of_fusion,
    offered,
)
from support.ptx import EmulationError, machine
from support.ptx.gemm import storage_bytes
from support.ptx.kernel import EmulatedKernel, poison
from support.sampling import some

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.verification import factor_of, judge

pytestmark = pytest.mark.compile

EVERYTHING = os.environ.get("KERNEL_API_EMULATE") in ("designs", "all")
F16, F32, E4M3, I8 = torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8


def chosen(args, turn, cc="sm_80"):
    """Of the kernels that are offered, another one at each turn."""
    kernels = offered(args, cc)
    assert kernels, ka.explain(arguments_on(args), cc=cc)
    return kernels[turn % len(kernels)]


def check(args, turn=0, cc="sm_80", kernel=None):
    """One kernel compiles without spills, and is right."""
    kernel = kernel or chosen(args, turn, cc)
    compiled = EmulatedKernel.compile(kernel, args, cc)
    assert not compiled.artifact.resources.spill_bytes
    for output in args.outputs.values():
        storage_bytes(output.tensor)[:] = 0xFF
    compiled.run(args, multiprocessors=4 if turn % 2 else 1, seed=turn)
    verdict = judge(args, factor_of(kernel))
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
    return compiled


# The catalogue of fusions, on a matrix in place of a product ------------------------------


def many(draw):
    """Operands of every shape, outputs of different types and layouts, and every reduction, over
    all batches too."""

    def fn(accum, row, column, full, batch, scalar, number):
        y = accum * row + number * full
        z = ep.silu(y + column) * scalar - batch
        return (
            z, y, y * 10.0, ep.sum(z, -1), ep.max(y, -1), ep.sum(y * z, -2), ep.min(z, -2),
            ep.mean_square(y, None), ep.amax(z, None),
        )  # fmt: skip

    L, M, N = draw.batch, draw.M, draw.N
    epilogue = ka.EpilogueArguments(
        fn,
        row=draw.random(L, M, 1),
        column=draw.random(N, element=F32),
        full=draw.matrix(),
        batch=draw.random(L, 1, 1),
        scalar=draw.random(element=F32),
        number=2,
        other=matrix((L, M, N), F32, "n", pad=5),
        rounded=matrix((L, M, N), I8, pad=1),
        row_sum=draw.reduced(L, M, element=F32),
        row_max=draw.reduced(L, M, element=BF16),
        column_sum=draw.reduced(L, N, element=F32),
        column_min=draw.reduced(L, N, element=F32),
        mean_square=draw.reduced(L, element=F32),
        amax=draw.reduced(element=F32),
    )
    return ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)


#: Epilogues and how they are drawn; those in front are run every time.
CASES = [
    ("halves", make.a_glu("swiglu", granularity="halves"), {"M": 13, "N": 320}),
    ("swiglu", make.a_glu("swiglu"), {"M": 33, "N": 192, "batch": 2}),
    ("many", many, {"M": 37, "N": 72, "batch": 2}),
    ("dswiglu, halves", make.a_dglu("swiglu", granularity="halves"), {"M": 13, "N": 96}),
    ("norm", make.a_norm, {"M": 13, "N": 104, "batch": 2}),
    ("rope", make.a_rope(head_dim=64, heads=2), {"M": 9, "N": 192}),
    ("dropout", make.a_dropout, {"M": 13, "N": 72}),
    ("dropout of gates", make.a_dropout_of("split"), {"M": 13, "N": 144, "batch": 2}),
    ("dropout of interleaved", make.a_dropout_of("interleave"), {"M": 13, "N": 160}),
    ("dropout of shared", make.a_dropout_of("shared"), {"M": 13, "N": 72, "batch": 2}),
    ("quantize, mx", make.a_quantize("mx", E4M3), {"M": 13, "N": 96, "pad": 16}),
    ("gemm", make.a_gemm, {"M": 70, "N": 72}),
    ("bias gelu", make.a_bias_activation("gelu"), {"M": 13, "N": 136, "element": F16}),
    ("residual", make.a_residual, {"M": 13, "N": 136, "layout": "n"}),
    ("amax", make.an_amax, {"M": 260, "N": 40}),
    ("geglu", make.a_glu("geglu", F32), {"M": 13, "N": 192, "element": F16}),
    ("reglu", make.a_glu("reglu", granularity=1), {"M": 13, "N": 72}),
    ("situglu", make.a_glu("situglu", order="gate_up"), {"M": 13, "N": 192}),
    ("dswiglu", make.a_dglu("swiglu"), {"M": 13, "N": 96, "element": F32}),
    ("dglu", make.a_dglu("geglu_clamped", limit=0.8, granularity=8), {"M": 33, "N": 40}),
    ("recompute_dswiglu", make.a_recomputed_dglu, {"M": 13, "N": 128}),
    ("srelu", make.an_srelu, {"M": 13, "N": 136}),
    ("dgelu", make.a_dactivation("gelu"), {"M": 13, "N": 72, "batch": 2}),
    ("recompute_dsilu", make.a_recomputed_dactivation("silu"), {"M": 70, "N": 72}),
    ("rope, wide", make.a_rope(head_dim=128), {"M": 13, "N": 256}),
    (
        "rope, part",
        make.a_rope(head_dim=64, start=16, width=32, style="interleaved"),
        {"M": 13, "N": 192},
    ),
    ("hadamard", make.a_hadamard, {"M": 13, "N": 80}),
    ("quantize", make.a_quantize("tensor", E4M3), {"M": 13, "N": 80, "pad": 16}),
    ("quantize to integers", make.a_quantize("tensor", I8), {"M": 13, "N": 72}),
    ("quantize, row", make.a_quantize("row"), {"M": 33, "N": 112}),
    ("blocks", make.repeated_blocks, {"M": 13, "N": 80}),
]
SAMPLED = CASES if EVERYTHING else CASES[:5]


@pytest.mark.parametrize("turn", range(len(SAMPLED)), ids=[name for name, *_ in SAMPLED])
def test_an_epilogue_of_a_matrix_is_right(turn):
    _, fused, how = CASES[turn]
    args = of_fusion(fused, **{"pad": 8, "seed": turn, **how})
    kernels = offered(args, "sm_80")
    # From the first one on: designs behind it, then other alignments.
    turns = range(len(kernels)) if EVERYTHING else (turn // 2,)
    for one in turns:
        check(args, one, "sm_90" if turn % 2 else "sm_80")


# Along whole rows ------------------------------------------------------------------------


def over_columns(M, N, L, fn, element=BF16, pad=8, stores_out=True, **reduced):
    """Arguments whose outputs beside out are reduced; by name, with their shapes."""
    x = drawn((L, M, N), element, pad=pad, seed=M + N, scale=1.5)
    out = matrix((L, M, N), element, pad=pad) if stores_out else None
    outputs = {name: matrix(shape, F32) for name, shape in reduced.items()}
    return ka.ElementwiseArguments(x, out, epilogue=ka.EpilogueArguments(fn, **outputs))


#: Rows behind the last, columns behind the last, batches; beside what all blocks have parts of.
WHOLE_ROWS = {
    "sum, max": lambda: over_columns(
        13, 1096, 2, lambda accum: (accum * 0.3, ep.sum(accum, -1), ep.max(accum, -1)),
        sums=(2, 13), largest=(2, 13),
    ),
    "mean square, total": lambda: over_columns(
        21, 1416, 2,
        lambda accum: (
            accum * 1.7, ep.mean_square(accum, -1), ep.sum(accum, None), ep.min(accum, -1),
        ),
        square=(2, 21), total=(2,), least=(2, 21),
    ),
    "elements": lambda: over_columns(
        9, 603, 1, lambda accum: (accum, ep.sum(accum * accum, -1)), pad=1, squares=(1, 9)
    ),
    "nothing stored": lambda: over_columns(
        17, 520, 1, lambda accum: (accum, ep.amax(accum * 1.3, -1)), element=F32, stores_out=False,
        amax=(1, 17),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some(WHOLE_ROWS, 2))
def test_reductions_along_whole_rows_are_right(name):
    args = WHOLE_ROWS[name]()
    kernels = [k for k in offered(args, "sm_90") if k.metadata.design.whole_rows]
    assert kernels
    for kernel in kernels if EVERYTHING else kernels[:1]:
        check(args, 1, "sm_90", kernel=kernel)


def test_sums_of_long_rows_lose_nothing(monkeypatch):
    monkeypatch.setattr(machine, "_FRUITLESS", 10**7)
    x = torch.full((2, 65536), 0.1)
    outputs = {"sums": torch.empty(2), "total": torch.empty(())}
    epilogue = ka.EpilogueArguments(lambda a: (a, ep.sum(a, -1), ep.sum(a, None)), **outputs)
    args = ka.ElementwiseArguments(x, None, epilogue=epilogue)
    kernels = [k for k in offered(args, "sm_90") if k.metadata.design.whole_rows]
    kernel = min(kernels, key=lambda k: k.metadata.design.columns)
    EmulatedKernel.compile(kernel, args, "sm_90").run(args, multiprocessors=1)
    exact = x.double().sum(-1)
    assert float(((outputs["sums"] - exact) / exact).abs().max()) < 3e-7
    assert float(outputs["total"] / exact.sum() - 1) == pytest.approx(0, abs=3e-7)


# Without an epilogue ---------------------------------------------------------------------

#: (x, out), layouts, and padding: vectors of 16 bytes, 4 bytes, elements, and what is transposed.
COPIES = [
    (BF16, BF16, "tt", 8),
    (F32, BF16, "tt", 8),
    (BF16, F32, "tn", 3),
    (torch.bool, BF16, "tt", 0),
    (F32, E4M3, "tt", 16),
    (E4M3, F16, "tt", 16),
    (torch.int64, torch.int64, "nt", 1),
    (F16, F16, "tt", 2),
    (torch.int32, torch.int32, "tt", 4),
    (F32, I8, "tt", 16),
    (I8, F32, "tt", 16),
    (torch.uint8, torch.uint8, "tt", 16),
    (torch.bool, torch.bool, "tn", 5),
    (torch.float8_e5m2, torch.float8_e5m2, "tt", 16),
    (F32, torch.float8_e8m0fnu, "tt", 1),
    (F16, torch.float8_e8m0fnu, "tt", 1),
]


@pytest.mark.parametrize("turn", range(len(COPIES) if EVERYTHING else 4))
def test_a_conversion_and_a_change_of_layout_are_right(turn):
    element, written, layouts, pad = COPIES[turn]
    for cc, shape in (("sm_80", (2, 21, 176)), ("sm_90", (35, 48))):
        x = drawn(shape, element, layouts[0], pad=pad, seed=turn)
        out = matrix(shape, written, layouts[1], pad=pad)
        args = ka.ElementwiseArguments(x, out)
        check(args, 0, cc)
        if element is written:
            assert torch.equal(x.contiguous().view(torch.uint8), out.contiguous().view(torch.uint8))


@pytest.mark.parametrize("modes", BROADCAST)
def test_what_x_broadcasts_is_read_where_it_is(modes):
    shape = (2, 11, 40)
    x = broadcast(shape, modes)
    epilogue = ka.EpilogueArguments(lambda accum, b: 0.7 * accum + b, b=drawn((11, 1), F32))
    args = ka.ElementwiseArguments(x, matrix(shape, pad=8), epilogue=epilogue)
    check(args, 0)


@pytest.mark.parametrize("M", [1, 2, 7])
def test_few_rows_and_odd_columns_are_right(M):
    x = drawn((M, 37), F32)
    column = drawn((37,), BF16, seed=1)
    sums = {"rows": torch.empty(M), "columns": torch.empty(37), "all": torch.empty(())}

    def fn(accum, column, alpha):
        y = alpha * accum + column
        return y, ep.sum(y, -1), ep.max(y, -2), ep.amax(y, None)

    epilogue = ka.EpilogueArguments(fn, column=column, alpha=-1.37, **sums)
    check(ka.ElementwiseArguments(x, matrix((M, 37), F16, pad=1), epilogue=epilogue), M)


# Reductions over many tiles --------------------------------------------------------------


def reduced(M, N, **how):
    """A matrix with everything that may be reduced of it."""

    def fn(accum, weight):
        y = accum * weight
        return y, ep.sum(y, -1), ep.sum(y * accum, -2), ep.min(y, -2), ep.mean_square(y, None)

    outputs = {"rows": (M,), "columns": (N,), "least": (N,), "mean": ()}
    epilogue = ka.EpilogueArguments(
        fn,
        weight=drawn((N,), F32, seed=5),
        **{name: torch.empty(shape) for name, shape in outputs.items()},
    )
    x = drawn((M, N), BF16, pad=8, **how)
    return ka.ElementwiseArguments(x, matrix((M, N), BF16), epilogue=epilogue)


def with_design(args, **fields):
    def fits(metadata):
        return all(getattr(metadata.design, n) == value for n, value in fields.items())

    return offered(args, "sm_80", metadata_filter=fits)[0]


def test_reductions_do_not_depend_on_the_order_of_blocks():
    args = reduced(150, 136)
    compiled = check(args, kernel=with_design(args, columns=64, steps=16))
    results = []
    for seed in (1, 2):
        for output in args.outputs.values():
            poison(output.tensor)
        compiled.run(args, seed=seed)
        results.append([o.tensor.clone() for o in args.outputs.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_sums_of_many_parts_lose_nothing_by_being_rounded():
    """All of one sign: added one by one, the last of 625 parts is a six hundredth of the sum."""
    M, N = 2500, 24
    epilogue = ka.EpilogueArguments(
        lambda accum: (accum + 3.0, ep.sum(accum + 3.0, -2)), columns=torch.empty(N)
    )
    args = ka.ElementwiseArguments(drawn((M, N), BF16), matrix((M, N), BF16), epilogue=epilogue)
    kernel = with_design(args, threads=128, columns=128, turns=1, steps=1)
    check(args, kernel=kernel)
    exact = (args.x.tensor.double() + 3.0).sum(0)
    found = epilogue.outputs["columns"].tensor.double()
    assert (found - exact).abs().max() < 2e-7 * exact.max()


def test_halves_count_nothing_behind_the_end_of_theirs():
    """Beside a half that ends inside of a tile there is the other one, and not nothing."""

    def fn(accum):
        y = accum + 1.0
        up, gate = ep.glu_pair(y, granularity="halves")
        return up * gate, y, ep.sum(y, -1), ep.sum(y, -2)

    M, N = 11, 320
    outputs = {"y": matrix((M, N), F32), "rows": torch.empty(M), "columns": torch.empty(N)}
    args = ka.ElementwiseArguments(
        drawn((M, N), BF16), matrix((M, N // 2)), epilogue=ka.EpilogueArguments(fn, **outputs)
    )
    check(args, kernel=with_design(args, columns=256, steps=1, turns=1))


# Without out -----------------------------------------------------------------------------


def only_reduced(shape, element, layout="t", pad=0, beside=False):
    """Sums of a matrix, and nothing of its size; or a matrix of another type beside them."""
    *batch, M, N = shape

    def fn(accum, weight):
        y = accum * weight
        more = (y * 3.0,) if beside else ()
        return y, *more, ep.sum(y, -1), ep.max(accum, -2), ep.mean_square(y, None)

    outputs = {"matrix": matrix(shape, F16)} if beside else {}
    outputs |= {"rows": torch.empty(*batch, M), "columns": torch.empty(*batch, N)}
    outputs |= {"mean": torch.empty(batch)}
    epilogue = ka.EpilogueArguments(fn, weight=drawn((N,), F32, seed=5), **outputs)
    return ka.ElementwiseArguments(drawn(shape, element, layout, pad=pad), epilogue=epilogue)


#: Shapes, types, layouts, padding, and whether there is a matrix beside.
WITHOUT_OUT = [
    ((150, 136), BF16, "t", 8, False),
    ((2, 37, 71), F32, "t", 0, False),
    ((37, 72), BF16, "t", 0, True),
    ((21, 40), I8, "n", 0, False),
    ((70, 264), F16, "t", 0, False),
    ((33, 96), E4M3, "t", 16, True),
    ((1, 1), F32, "t", 0, False),
]


@pytest.mark.parametrize("turn", range(len(WITHOUT_OUT) if EVERYTHING else 2))
def test_what_is_not_stored_is_read_and_not_written(turn):
    args = only_reduced(*WITHOUT_OUT[turn])
    before = storage_bytes(args.x.tensor).copy()
    for one in range(len(offered(args, "sm_80"))) if EVERYTHING else (turn,):
        compiled = check(args, one, "sm_90" if turn % 2 else "sm_80")
        assert (storage_bytes(args.x.tensor) == before).all()
    stored = ka.ElementwiseArguments(
        args.x.tensor, torch.empty_like(args.x.tensor), epilogue=args.epilogue
    )
    text = EmulatedKernel.compile(compiled.kernel, stored, "sm_80").text
    assert compiled.text.count("@inside st.global") < text.count("@inside st.global")


# What the emulator would see -------------------------------------------------------------

DISORDER = "nothing orders them|with no barrier in between|what was never written"


@pytest.fixture(scope="module")
def summed():
    args = reduced(40, 72)
    kernel = with_design(args, columns=64, steps=1)
    return EmulatedKernel.compile(kernel, args, "sm_80"), args


def broken(compiled, pattern, occurrence, replacement=""):
    found = list(re.finditer(pattern, compiled.text))[occurrence]
    text = compiled.text[: found.start()] + found.expand(replacement) + compiled.text[found.end() :]
    return compiled.with_text(text)


def test_no_edge_can_be_forgotten(summed):
    compiled, args = summed
    store = r"@inside (st\.global)"
    assert re.findall(store, compiled.text)
    with pytest.raises(EmulationError, match=r"writes what is no element of|what another wrote"):
        broken(compiled, store, 0, r"\1").run(args)


def test_the_barrier_in_front_of_what_warps_share_cannot_be_left_out(summed):
    compiled, args = summed
    with pytest.raises(EmulationError, match=DISORDER):
        broken(compiled, r"bar\.sync\s+0;|barrier\.sync\s+0[^;]*;", 0).run(args)
