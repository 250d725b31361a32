"""The norm families compute the right rows: their PTX runs in the emulator, without a GPU.

Of every design, element types and alignments take turns; options do, too. Outputs are poisoned,
what lies between rows is NaN, and the emulator refuses every access outside of an operand, every
race between warps, and what one block reads of another's without order. With
KERNEL_API_EMULATE=designs in the environment every case runs, else a sample of them.
"""

import os
import re

import pytest
import torch
from support.norms import (
    LAYER,
    LAYER_BACKWARD,
    RMS,
    RMS_BACKWARD,
    Draw,
    arguments_for,
    block_maxima,
    columns_for,
    dresidual_for,
    gradients,
    hadamard,
    norm,
    rows_beside,
    statistics,
    weight_type,
)
from support.ptx import EmulationError
from support.ptx.kernel import EmulatedKernel, poison

from kernel_api import provider
from kernel_api._description import described, rebuilt
from kernel_api.verification import FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

EVERYTHING = os.environ.get("KERNEL_API_EMULATE") in ("designs", "all")
SPARSELY = 11  # of the staged cases, one of so many is run
EPS = 0.03

(CUTEDSL,) = provider.providers(["cutedsl"])
FAMILIES = [
    f for f in CUTEDSL.families() if f.arguments in (RMS, LAYER, RMS_BACKWARD, LAYER_BACKWARD)
]


def cases():
    """(kernel, index): of every family all designs, with types and alignments in turns."""
    found = []
    for family in FAMILIES:
        kernels = family.generate_kernels(lambda metadata: True)
        for design in dict.fromkeys(kernel.metadata.design for kernel in kernels):
            of_design = [k for k in kernels if k.metadata.design == design]
            found.append((of_design[7 * len(found) % len(of_design)], len(found)))
    return found


def name(case):
    return case[0].metadata.kernel_name.removeprefix("sm80_")


def sampled():
    """Long rows take the emulator long; the others have all that these have."""
    if EVERYTHING:
        return cases()
    chosen = [case for case in cases() if case[0].metadata.design.threads <= 256]
    staged = [case for case in chosen if 0 < case[0].metadata.design.room <= 512]
    streamed = [case for case in chosen if not case[0].metadata.design.room]
    return staged[::SPARSELY] + streamed[::4]


def emulated(kernel, args):
    return EmulatedKernel.compile(kernel, args, "sm_80")


# Forward ---------------------------------------------------------------------------------


def options(draw, kernel, index):
    """What is asked for beside out, another thing in each case."""
    given = {"eps": EPS}
    if index % 4:
        element = weight_type(kernel, ("float32", None, "float16")[index % 3])
        given["weight"] = draw.columns(element=element)
    if index % 3 == 0:
        given["bias"] = draw.columns(element="bfloat16")
    if index % 2:
        given["rstd"] = draw.statistic()
    if kernel.arguments is LAYER and index % 3:
        given["mean"] = draw.statistic()
    if index % 3 == 1:
        given |= residual(draw, kernel, index)
    if kernel.family == "sm80.rmsnorm_rht_amax":
        rows = 1 + index % 7
        given |= {"rows_per_block": rows, "hadamard": index % 5 > 0}
        if index % 5 > 1:
            given["signs"] = draw.statistic((16,)).copy_(draw.random((16,)).sign())
        if index % 2:
            given["amax"] = draw.statistic((-(-draw.M // rows),))
        if index % 2 == 0 or index % 3:
            given["global_amax"] = draw.statistic(())
    return given


def residual(draw, kernel, index):
    """And its sum, stored somewhere else, or nowhere."""
    element = ("bfloat16", "float32", "float16")[index // 3 % 3]
    found = {"residual": rows_beside(kernel, draw, element)}
    if index % 2:
        found["residual_out"] = rows_beside(kernel, draw, element, read=False)
    return found


def computed(args):
    """Every output in float64, from the formulas."""
    tensor = {name: operand.tensor for name, operand in args.named_operands.items()}
    centred = isinstance(args, LAYER)
    if args.residual is not None:
        more = tensor["residual"]
        tensor["x"] = (tensor["x"].float() + more.float()).to(more.dtype)
    mean, rstd = statistics(tensor["x"], centred, EPS)
    weight, bias = tensor.get("weight"), tensor.get("bias")
    y = norm(tensor["x"], weight, bias, centred=centred, eps=EPS)
    if getattr(args, "hadamard", False):
        y = hadamard(y, tensor.get("signs"))
    found = {"out": y, "mean": mean, "rstd": rstd, "residual_out": tensor["x"].double()}
    if isinstance(args, RMS):
        found |= {"amax": block_maxima(y, args.rows_per_block), "global_amax": y.abs().max()}
    return {name: found[name] for name in args.outputs}


def check(args, exact):
    """By the rule of verify, and against the formulas: one rounding of out, a few of float32."""
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, verdict
    for name, value in exact.items():
        out = args.outputs[name].tensor
        scale = value.abs().max() * torch.tensor(1.0).double()
        off = (out.double() - value).abs().max()
        assert off <= scale * (torch.finfo(out.dtype).eps + 2e-6), f"{name} is off by {off}"


@pytest.mark.parametrize("case", [c for c in sampled() if c[0].arguments in (RMS, LAYER)], ids=name)
def test_rows_are_right(case):
    kernel, index = case
    design = kernel.metadata.design
    compiled = None
    for M, N in ((3 + index % 5, 20 + 37 * index % 400), (1 + 2 * design.rows, 1)):
        draw = Draw(M, columns_for(kernel, N), kernel.metadata.operands.x.dtype, seed=index)
        given = {"weight": None, "hadamard": False, **options(draw, kernel, index)}
        if kernel.arguments is LAYER:
            del given["hadamard"]
        args = arguments_for(kernel, M, N, seed=index, **given)
        compiled = compiled or emulated(kernel, args)
        compiled.run(args, multiprocessors=2, seed=index)
        check(args, computed(args))


def test_what_is_behind_short_rows_of_large_numbers_does_not_count():
    """Its distance from their mean has no square in float32."""
    kernel = chosen("sm80.layernorm", lambda d: d.room == 128 and d.turns == 1)
    args = arguments_for(kernel, 3, 24, seed=1, eps=EPS)
    args.x.tensor[:2] = torch.tensor([[3e19], [-(2.0**100)]])
    emulated(kernel, args).run(args)
    check(args, computed(args))
    assert args.out.tensor[:2].eq(0).all()


@pytest.mark.parametrize("elements", [0, 8, 16])
@pytest.mark.parametrize("element", ["bfloat16", "float32"])
def test_a_sum_may_be_stored_where_the_residual_is(element, elements):
    """Without stages rows are read again after none of it is written."""
    kernel = chosen("sm80.rmsnorm", lambda d: d.elements == elements and d.threads_per_row <= 32)
    N = columns_for(kernel, 700)
    draw = Draw(9, N, "bfloat16")
    shared = rows_beside(kernel, draw, element)
    args = arguments_for(kernel, 9, N, residual=shared, residual_out=shared, eps=EPS)
    args.x.tensor.copy_(draw.random((9, N)))
    before = shared.clone()
    assert args.in_place == ("residual",)
    emulated(kernel, args).run(args)
    expected = (args.x.tensor.float() + before.float()).to(before.dtype)
    assert torch.equal(shared, expected)
    y = norm(expected, args.weight.tensor, centred=False, eps=EPS)
    off = (args.out.tensor.double() - y).abs().max()
    assert off <= y.abs().max() * (torch.finfo(torch.bfloat16).eps + 2e-6)


# Backward --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [c for c in sampled() if c[0].arguments in (RMS_BACKWARD, LAYER_BACKWARD)], ids=name
)
def test_gradients_are_right(case):
    kernel, index = case
    centred = kernel.arguments is LAYER_BACKWARD
    # Blocks have two or three turns, and the last one is not whole.
    design = kernel.metadata.design
    M = (2 * design.resident + 1) * design.rows - index % 3
    N = columns_for(kernel, 20 + 37 * index % 400)
    draw = Draw(M, N, kernel.metadata.operands.x.dtype, seed=index)
    given = {"weight": draw.columns(element="float32") if index % 3 else None}
    if index % 5:
        given["dweight"] = draw.columns(read=False, element="float32")
    if index % 2:
        given["dbias"] = draw.columns(read=False, element=("bfloat16", "float32")[index % 4 // 2])
    plain = arguments_for(kernel, M, N, seed=index, dresidual=None)
    more = dresidual_for(kernel, draw, plain, (None, "bfloat16", "float32")[index % 3])
    given["dresidual"] = more
    args = arguments_for(kernel, M, N, seed=index, **given)
    if not kernel.supports(rebuilt(described(args))):  # registers for one of the sums
        given.pop("dbias" if "dweight" in given else "", None)
        args = arguments_for(kernel, M, N, seed=index, **given)
    emulated(kernel, args).run(args, multiprocessors=1, seed=index)
    weight = args.weight.tensor if args.weight is not None else None
    exact = gradients(args.dy.tensor, args.x.tensor, weight, centred=centred, eps=1e-5)
    if more is not None:
        exact["dx"] = exact["dx"] + more.double()
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, verdict
    for name, output in args.outputs.items():
        off = (output.tensor.double() - exact[name]).abs().max()
        assert off <= exact[name].abs().max() * (torch.finfo(output.tensor.dtype).eps + 1e-5)


# Order -----------------------------------------------------------------------------------

DISORDER = "nothing orders them|with no barrier in between|what was never written"


def chosen(family, condition):
    (found,) = (f for f in FAMILIES if f.family == family)
    kernels = found.generate_kernels(lambda m: m.operands.x.alignment == 16 and condition(m.design))
    return next(k for k in kernels if k.metadata.operands.x.dtype == torch.bfloat16)


@pytest.fixture(scope="module")
def transform():
    """Several blocks share the maximum of a block of rows, and all of them that of all rows."""
    kernel = chosen(
        "sm80.rmsnorm_rht_amax",
        lambda d: d.room == 1024 and d.threads_per_row == 128 and d.turns == 4,
    )
    draw = Draw(12, columns_for(kernel, 600), "bfloat16")
    given = {"amax": draw.statistic((3,)), "global_amax": draw.statistic(())}
    args = arguments_for(kernel, 12, 600, hadamard=True, rows_per_block=5, **given)
    return emulated(kernel, args), args


def test_maxima_do_not_depend_on_the_order_of_blocks_and_hold_a_nan(transform):
    compiled, args = transform
    args.x.tensor[6, 3] = 0.0
    results = []
    for seed in range(3):
        compiled.run(args, seed=seed)
        results.append([args.amax.tensor.clone(), args.global_amax.tensor.clone()])
    assert judge(args, FACTOR_REORDERED)
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))
    args.x.tensor[6, 3] = float("nan")
    compiled.run(args)
    args.x.tensor[6, 3] = 0.0
    assert args.amax.tensor.isnan().tolist() == [False, True, False]
    assert args.global_amax.tensor.isnan()


def broken(compiled, pattern, occurrence, replacement=""):
    found = list(re.finditer(pattern, compiled.text))[occurrence]
    text = compiled.text[: found.start()] + found.expand(replacement) + compiled.text[found.end() :]
    return compiled.with_text(text)


def occurrences(compiled, pattern):
    return range(len(re.findall(pattern, compiled.text)))


def test_no_barrier_can_be_left_out(transform):
    compiled, args = transform
    barrier = r"bar\.sync\s+0;"
    assert len(occurrences(compiled, barrier)) == 2  # of a row's sum, of the block's maximum
    for i in occurrences(compiled, barrier):
        with pytest.raises(EmulationError, match=DISORDER):
            broken(compiled, barrier, i).run(args)


def test_no_wait_can_be_shorter(transform):
    compiled, args = transform
    wait = r"cp\.async\.wait_group\s+1;"
    assert len(occurrences(compiled, wait)) == 1
    with pytest.raises(EmulationError, match="reads what an asynchronous copy is on its way to"):
        broken(compiled, wait, 0, "cp.async.wait_group 2;").run(args)


def test_no_edge_can_be_forgotten(transform):
    compiled, args = transform
    store = r"@inside (st\.global)"
    assert occurrences(compiled, store)
    with pytest.raises(EmulationError, match="writes what is no element of an output"):
        broken(compiled, store, 0, r"\1").run(args)


def test_the_same_rows_give_the_same_sums_over_them_in_every_order():
    kernel = chosen("sm80.rmsnorm_backward", lambda d: d.threads_per_row == 8 and d.elements == 8)
    draw = Draw(100, 64, "bfloat16")
    sums = {n: draw.columns(read=False, element="float32") for n in ("dweight", "dbias")}
    args = arguments_for(kernel, 100, 64, **sums)
    compiled, results = emulated(kernel, args), []
    for seed in range(2):
        for one in sums.values():
            poison(one)
        compiled.run(args, multiprocessors=1, seed=seed)
        results.append([one.clone() for one in sums.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
