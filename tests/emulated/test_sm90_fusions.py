"""Every fusion that the Hopper GEMM takes is right: its PTX runs in the emulator, without GPU.

Outputs are poisoned, factors and operands drawn. The cases take turns with schedules, splits,
swapped operands, layouts, batches and element types; sizes are no multiples of a tile.
"""

import os

import pytest
import torch
from support.fusions import Draw
from support.ptx.kernel import EmulatedKernel

import kernel_api as ka
from kernel_api.verification import FACTOR, FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

F16, BF16, F32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int64

DESIGNS = {
    "cooperative": lambda d: d.schedule == "cooperative" and not d.splits and not d.swap_ab,
    "pingpong": lambda d: d.schedule == "pingpong",
    "split": lambda d: d.split_k > 1 and not d.swap_ab,
    "stream": lambda d: d.stream_k,
    "swapped": lambda d: d.swap_ab and not d.splits,
    "swapped split": lambda d: d.swap_ab and d.splits,
}


def a_gemm(draw):
    given = {"alpha": 0.7, "C": draw.matrix(), "beta": -1.3, "bias": draw.columns()}
    return ka.fusions.gemm(draw.A, draw.B, out=draw.written(), activation="leaky_relu", **given)


def a_bias_activation(activation):
    def make(draw):
        return ka.fusions.gemm_bias_activation(
            draw.A,
            draw.B,
            out=draw.written(),
            bias=draw.columns().float(),
            activation=activation,
            preactivation=draw.written(element=F32),
            alpha=0.7,
        )

    return make


def a_residual(draw):
    given = {"alpha": torch.tensor(0.7), "C": draw.matrix(), "beta": -1.3}
    return ka.fusions.gemm_residual(draw.A, draw.B, out=draw.written(), activation="relu", **given)


def an_amax(draw):
    amax = draw.reduced(element=F32)
    return ka.fusions.gemm_amax(draw.A, draw.B, out=draw.written(), amax=amax, alpha=-0.7)


def a_glu(kind, element=None, **options):
    def make(draw):
        return ka.fusions.gemm_glu(
            draw.A,
            draw.B,
            out=draw.written(draw.N // 2, element),
            kind=kind,
            preactivation=draw.written(),
            bias=draw.columns(),
            prob=draw.rows().float(),
            alpha=0.7,
            **options,
        )

    return make


def a_dglu(kind, **options):
    def make(draw):
        wide = 2 * draw.N
        return ka.fusions.gemm_dglu(
            draw.A,
            draw.B,
            out=draw.written(wide),
            preactivation=draw.matrix(wide),
            kind=kind,
            prob=draw.rows().float(),
            dprob=draw.reduced(*draw.batches, draw.M, element=F32),
            dbias=draw.reduced(*draw.batches, wide, element=F32),
            alpha=0.7,
            **options,
        )

    return make


def a_recomputed_dglu(draw):
    return ka.fusions.gemm_recompute_dglu(
        draw.A,
        draw.B,
        out=draw.written(),
        upstream=draw.matrix(draw.N // 2),
        bias=draw.columns(),
        dbias=draw.reduced(*draw.batches, draw.N, element=F32),
        alpha=0.7,
    )


def an_srelu(draw):
    return ka.fusions.gemm_srelu(
        draw.A,
        draw.B,
        out=draw.written(),
        preactivation=draw.written(),
        prob=draw.rows().float(),
        alpha=0.7,
    )


def a_dactivation(activation):
    def make(draw):
        return ka.fusions.gemm_dactivation(
            draw.A,
            draw.B,
            out=draw.written(),
            preactivation=draw.matrix(),
            activation=activation,
            prob=draw.rows(),
            dprob=draw.reduced(*draw.batches, draw.M, element=F32),
            dbias=draw.reduced(*draw.batches, draw.N, element=F32),
            alpha=0.7,
        )

    return make


def a_recomputed_dactivation(activation):
    def make(draw):
        return ka.fusions.gemm_recompute_dactivation(
            draw.A,
            draw.B,
            out=draw.written(),
            upstream=draw.matrix(),
            activation=activation,
            bias=draw.columns(),
            prob=draw.rows().float(),
            dprob=draw.reduced(*draw.batches, draw.M, element=F32),
            dbias=draw.reduced(*draw.batches, draw.N, element=F32),
            alpha=0.7,
        )

    return make


def a_rope(**how):
    def make(draw):
        width = how.get("width", how["head_dim"] - how.get("start", 0))
        angle = draw.random(*draw.batches, draw.M, width // 2, element=F32)
        tables = {"cos": angle.cos(), "sin": angle.sin()}
        return ka.fusions.gemm_rope(draw.A, draw.B, out=draw.written(), **tables, **how)

    return make


def a_dropout(draw):
    state = {"p": 0.3, "seed": torch.tensor(2**40 + 17), "offset": 2**33 + 5}
    return ka.fusions.gemm_dropout(draw.A, draw.B, out=draw.written(), alpha=0.7, **state)


#: (name, arguments of a draw, design, how it is drawn)
CASES = [
    ("gemm", a_gemm, "cooperative", {"M": 70, "N": 72}),
    ("bias gelu", a_bias_activation("gelu"), "pingpong", {"M": 13, "N": 136, "element": F16}),
    ("residual", a_residual, "swapped", {"M": 13, "N": 136}),
    ("amax", an_amax, "split", {"M": 70, "N": 72, "K": 264}),
    ("swiglu", a_glu("swiglu"), "pingpong", {"M": 70, "N": 192}),
    ("geglu", a_glu("geglu", F32), "cooperative", {"M": 70, "N": 192, "element": F16}),
    ("reglu", a_glu("reglu", granularity=1), "split", {"M": 13, "N": 72, "K": 264}),
    ("geglu_clamped", a_glu("geglu_clamped", limit=0.8), "cooperative", {"M": 70, "N": 64}),
    ("situglu", a_glu("situglu", order="gate_up"), "stream", {"M": 13, "N": 192, "K": 264}),
    ("dswiglu", a_dglu("swiglu"), "cooperative", {"M": 13, "N": 96}),
    ("dglu", a_dglu("geglu_clamped", limit=0.8, granularity=8), "cooperative", {"M": 70, "N": 40}),
    ("recompute_dswiglu", a_recomputed_dglu, "split", {"M": 13, "N": 192, "K": 264}),
    ("srelu", an_srelu, "swapped split", {"M": 13, "N": 136, "K": 264}),
    ("dsrelu", a_dactivation("squared_relu"), "cooperative", {"M": 13, "N": 72, "batch": 2}),
    ("dsilu", a_recomputed_dactivation("silu"), "cooperative", {"M": 70, "N": 72}),
    ("rope", a_rope(head_dim=64), "cooperative", {"M": 13, "N": 192, "batch": 2}),
    (
        "rope, part",
        a_rope(head_dim=64, start=16, width=32, style="interleaved"),
        "pingpong",
        {"M": 70, "N": 192, "layout": "n"},
    ),
    ("dropout", a_dropout, "cooperative", {"M": 13, "N": 72}),
]


def on_meta(args):
    """The same for any device: a query asks tensors of a GPU or of none."""

    def meta(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    epilogue = {name: meta(one.tensor) for name, one in args.epilogue.tensors.items()}
    return args.rebuilt(*map(meta, args.tensors), **epilogue)


def smallest(kernels, design):
    """Of the kernels with such a design, the one with the smallest tiles."""
    fitting = [k for k in kernels if DESIGNS[design](k.metadata.design)]
    assert fitting, f"{design} is not among {len(kernels)} kernels"

    def size(kernel):
        one = kernel.metadata.design
        rows, columns, _ = one.tile_shape
        return one.cluster_size, rows * columns

    return min(fitting, key=size)


def drawn(turn, how):
    """Every other output is not aligned to 16 bytes."""
    how = {"K": 72, "element": BF16, "pad": 8 if turn % 2 else 3, "seed": turn, **how}
    return Draw(**how)


#: With KERNEL_API_EMULATE in the environment all of them, else one of two.
TURNS = range(0, len(CASES), 1 if os.environ.get("KERNEL_API_EMULATE") else 2)


@pytest.mark.parametrize("turn", TURNS, ids=[CASES[turn][0] for turn in TURNS])
def test_a_fusion_is_right(turn):
    _, make, design, how = CASES[turn]
    args = make(drawn(turn, how))
    kernel = smallest(ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"]), design)
    compiled = EmulatedKernel.compile(kernel, args)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=2, seed=turn)
    factor = FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR
    verdict = judge(args, factor)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


def test_a_new_factor_compiles_nothing():
    draw = drawn(0, {"M": 70, "N": 72})
    operands = draw.A, draw.B, draw.written(), draw.reduced(element=F32)

    def arguments(alpha):
        A, B, out, amax = operands
        return on_meta(ka.fusions.gemm_amax(A, B, out=out, amax=amax, alpha=alpha))

    kernel = smallest(ka.get_kernels(arguments(0.5), cc=90, providers=["cutedsl"]), "cooperative")
    artifact = kernel.compile(arguments(0.5), cc=90)
    for alpha in (1.0, 2, -0.25):
        assert kernel.compile(arguments(alpha), cc=90) is artifact
