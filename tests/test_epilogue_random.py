"""Random epilogues: traced and evaluated, against the same Python function on torch tensors; and
the kernels that are offered for them, whose PTX runs in the emulator.

With KERNEL_API_EMULATE in the environment all 300 of them are, else a sample.
"""

from __future__ import annotations

import math
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.epilogues import reference_kernel, torch_functions
from support.fusion_cases import on_meta
from support.ptx import machine
from support.ptx.kernel import EmulatedKernel
from support.random_epilogues import (
    BINARY,
    OPERATIONS,
    SMOOTH,
    STEPS,
    arguments_for_kernels,
    arguments_of,
    epilogues,
    example,
    function_of,
    product_operands,
)

import kernel_api as ka
from kernel_api.epilogue import Graph
from kernel_api.kernel import Kernel
from kernel_api.providers.cutedsl.epilogue.plan import plan
from kernel_api.verification import FACTOR_REORDERED, judge

repeatedly = settings(max_examples=300, suppress_health_check=list(HealthCheck), deadline=None)


@repeatedly
@given(epilogues())
def test_a_random_epilogue_computes_what_its_function_computes_on_tensors(case):
    A, B = product_operands(case, torch.float64)
    args, inputs = arguments_of(case, A, B, torch.float64)
    kernel: Kernel = reference_kernel(args)
    kernel.run(args)
    tensors = {n: v if torch.is_tensor(v) else torch.tensor(v).double() for n, v in inputs.items()}
    expected = function_of(case, torch_functions, list(inputs))(A @ B, *tensors.values())
    for (name, found), value in zip(args.outputs.items(), expected, strict=True):
        value = value.reshape(found.shape)
        scale = float(value.abs().max().clamp_min(1.0))
        torch.testing.assert_close(
            found.tensor, value, rtol=1e-9, atol=1e-9 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(repeatedly, max_examples=100)
@given(epilogues())
def test_a_random_graph_survives_json_and_tracing_again(case):
    A, B = product_operands(case, torch.float32)
    args, _ = arguments_of(case, A, B, torch.float32)
    again, _ = arguments_of(case, A, B, torch.float32)
    graph = args.epilogue.graph
    assert again.epilogue.graph == graph
    assert again.signature == args.signature
    assert Graph.from_json(graph.to_json()) == graph


@settings(repeatedly, max_examples=100)
@given(epilogues())
def test_verification_passes_a_product_that_is_summed_in_another_order(case):
    """No false alarm, although comparisons and casts make steps of rounding errors."""
    A, B = product_operands(case, torch.float32, K=67)
    args, _ = arguments_of(case, A, B, torch.float32)
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    found = in_float32(args, A[..., order] @ B[..., order, :])
    for name, operand in args.outputs.items():
        operand.tensor.copy_(found[name].reshape(operand.shape))
    verdict = judge(args, 3.0)
    assert verdict, verdict


def test_verification_passes_rests_that_begin_anew_by_a_rounding_error():
    draw = torch.Generator().manual_seed(52)
    A = torch.randn(64, 512, generator=draw).to(torch.bfloat16)
    B = torch.randn(512, 256, generator=draw).to(torch.bfloat16)
    pieces = zip(A.float().split(64, 1), B.float().split(64), strict=True)
    found = sum(a @ b for a, b in pieces) % 1.0
    assert ((found - (A.double() @ B.double()) % 1.0).abs() > 0.5).any()
    args = ka.GemmArguments(A, B, found, epilogue=ka.EpilogueArguments(lambda x: x % 1.0))
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, verdict
    found += 2**-10
    assert not judge(args, FACTOR_REORDERED)


@settings(repeatedly, max_examples=60)
@given(epilogues(), st.integers(0, 5))
def test_verification_finds_a_wrong_output_of_a_random_epilogue(case, which):
    A, B = product_operands(case, torch.float32, K=67)
    args, _ = arguments_of(case, A, B, torch.float32)
    reference_kernel(args).run(args)
    names = list(args.outputs)
    wrong = args.outputs[names[which % len(names)]].tensor
    finite = wrong[torch.isfinite(wrong)]
    wrong.view(-1)[-1] += 1.0 + 0.5 * float(finite.abs().max())
    assert not judge(args, 3.0)


def in_float32(args, product):
    from kernel_api.providers.reference.epilogue import evaluate as evaluated

    epilogue = args.epilogue
    found = evaluated(epilogue.graph, product, epilogue.operands, wide=False)
    return {"out": found.pop("D"), **found}


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_grammar_says_every_operation(name):
    arity = 1 if name in {**SMOOTH, **STEPS} else 2 if name in BINARY else 3
    case = {
        "batched": False, "M": 3, "N": 16, "pairing": None, "order": "gate_up", "granularity": 1,
        "style": "half", "turned": (4, 8), "others": [], "seed": 3, "drops": False,
        "D": (name, *[("accum",), ("bias",), ("row",)][:arity]),
    }  # fmt: skip
    test_a_random_epilogue_computes_what_its_function_computes_on_tensors.hypothesis.inner_test(
        case
    )


# Kernels ---------------------------------------------------------------------------------

TARGETS = {"sm80.gemm": "sm_80", "sm90.gemm": "sm_90a"}
ELEMENTS = (torch.bfloat16, torch.float16)
COUNT = 300
EVERYTHING = bool(os.environ.get("KERNEL_API_EMULATE"))


def kernels_for(family, args):
    kernels = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    return [kernel for kernel in kernels if kernel.family_name() == family]


@pytest.mark.parametrize("turn", range(0, COUNT, 1 if EVERYTHING else 12))
def test_a_random_epilogue_is_offered_or_refused_with_the_reason(turn):
    args = arguments_for_kernels(example(turn), ELEMENTS[turn % 2])
    planned = plan(args.epilogue.graph)
    explanation = ka.explain(on_meta(args), cc=90, providers=["cutedsl"])
    told = {one.family: one for one in explanation.rejected}
    for family in TARGETS:
        if isinstance(planned, str):
            assert planned in told[family].reason
        elif any(args.N * columns % 64 for columns in planned.halves):
            assert "halves of columns" in told[family].reason
        else:
            assert family not in told


#: The 269th gives twice as many columns as it takes, to tiles that 32 columns do not divide.
@pytest.mark.parametrize("turn", range(COUNT) if EVERYTHING else (*range(5, COUNT, 25), 269))
def test_every_kernel_that_is_offered_for_a_random_epilogue_can_be_built(turn):
    args = on_meta(arguments_for_kernels(example(turn), ELEMENTS[turn % 2]))
    for kernel in ka.get_kernels(args, cc=90, providers=["cutedsl"]):
        kernel.implementation_for(args)


@pytest.mark.compile
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("turn", range(COUNT) if EVERYTHING else (21,))
def test_a_random_epilogue_is_computed_by_kernels(turn, family, monkeypatch):
    """Exact functions branch in every element, for which threads take many short turns."""
    monkeypatch.setattr(machine, "_FRUITLESS", 30_000)
    args = arguments_for_kernels(example(turn), ELEMENTS[turn % 2])
    kernels = kernels_for(family, args)
    if not kernels:
        assert not isinstance(plan(args.epilogue.graph), str) or EVERYTHING
        return
    kernel = kernels[turn % len(kernels)] if EVERYTHING else smallest(kernels)
    compiled = EmulatedKernel.compile(kernel, args, TARGETS[family])
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, seed=turn)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


@pytest.mark.compile
@pytest.mark.parametrize("family", TARGETS)
def test_whole_quotients_are_exact_in_outputs_of_16_bits(family):
    """3 // 0.1 is 29, as in Python, though 3 / 0.1 is rounded to 30."""
    draw = torch.Generator().manual_seed(4)
    A = torch.randint(-2, 3, (7, 32), generator=draw).to(torch.bfloat16)
    B = torch.randint(-1, 2, (32, 24), generator=draw).to(torch.bfloat16)
    by = torch.tensor([0.1, -0.1, 0.3, 0.7, 7.0, 49.0]).repeat(4)
    out = torch.full((7, 24), math.nan, dtype=torch.bfloat16)
    rest = torch.full((7, 24), math.nan, dtype=torch.bfloat16)

    def fn(accum, by):
        whole, rest = divmod(accum, by)
        return whole, rest

    args = ka.GemmArguments(A, B, out, epilogue=ka.EpilogueArguments(fn, by=by, rest=rest))
    kernel = smallest(kernels_for(family, args))
    EmulatedKernel.compile(kernel, args, TARGETS[family]).run(args, seed=1)
    accumulator = A.float() @ B.float()
    assert (torch.floor(accumulator / by) != accumulator // by).any()
    assert torch.equal(out, (accumulator // by).bfloat16())
    assert judge(args, FACTOR_REORDERED)


@pytest.mark.compile
def test_quotients_and_rests_are_torchs_whatever_is_divided(family="sm80.elementwise"):
    """Rests also where a quotient has more digits than float32."""
    inf, nan = math.inf, math.nan
    pairs = [
        (76478680, 3), (541765760, 3), (15668998, 0.7), (1e14, 7), (5, -1e-9), (5, inf), (-5, inf),
        (7, -inf), (inf, 1), (3, 0), (0, 0), (nan, 1), (-0.0, 3), (3, 0.1), (-7.5, -2.5), (49, 49),
    ]  # fmt: skip
    x, by = torch.tensor(pairs).T.contiguous()
    out, rest = (torch.full((1, 16), nan) for _ in range(2))
    epilogue = ka.EpilogueArguments(lambda accum, by: divmod(accum, by), by=by, rest=rest)
    args = ka.ElementwiseArguments(x.view(1, 16), out, epilogue=epilogue)
    (kernel, *_) = kernels_for(family, args)
    EmulatedKernel.compile(kernel, args, "sm_80").run(args)
    torch.testing.assert_close(rest[0], torch.remainder(x, by), rtol=0, atol=0, equal_nan=True)
    right, most = torch.floor_divide(x, by), torch.finfo(torch.float32).eps
    torch.testing.assert_close(out[0], right, rtol=most, atol=0, equal_nan=True)
    whole = ~(right.abs() >= 2**24)
    assert torch.equal(out[0].nan_to_num()[whole], right.nan_to_num()[whole])


def smallest(kernels):
    return min(
        kernels, key=lambda k: k.metadata.design.tile_shape[0] * k.metadata.design.tile_shape[1]
    )
