"""What a query asks anew: not what metadata alone decide, nor whether types fit."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from support.data import gemm_arguments
from support.kernels import CpuGemm, CudaGemm

import kernel_api as ka
from kernel_api import _catalogue
from kernel_api.space import Miss, Operands, Space, rule

TYPES = ("bf16", "bf16", "f32")


def problem(M: int = 64, epilogue=None):
    args = gemm_arguments(M, 64, 64, types=TYPES, device="meta")
    return args if epilogue is None else ka.GemmArguments(*args.tensors, epilogue=epilogue)


def relu(bias: float):
    return ka.EpilogueArguments(lambda accum, bias: ka.epilogue.relu(accum + bias), bias=bias)


def counting(asked: list):
    """A family whose rules note what they are asked, in their order."""

    class Counting(CudaGemm):
        fuses = True
        space = Space(tile_shape=((64, 64, 32),), cluster_shape=((1, 1, 1), (2, 1, 1)))

        @rule("M is below 1000")
        def _(design, args):
            asked.append(("size", args.M))
            return args.M < 1000 or Miss(f"M is {args.M}")

        @rule("a cluster computes no epilogue")
        def _(design, graph):
            asked.append(("graph", graph))
            return graph is None or design.cluster_shape == (1, 1, 1)

        @rule("M is even")
        def _(design, args):
            asked.append(("even", args.M))
            return args.M % 2 == 0

    return Counting


def test_what_a_graph_decides_is_asked_once_per_kernel(registry):
    asked = []
    provider = registry.register(counting(asked))
    first = ka.get_kernels(problem(64), providers=[provider])
    assert len(first) == 4
    assert [what for what, _ in asked].count("graph") == 4
    asked.clear()
    assert ka.get_kernels(problem(66), providers=[provider]) == first
    assert asked == 4 * [("size", 66), ("even", 66)]


def test_a_rule_over_the_graph_decides_queries_and_not_the_enumeration(registry):
    provider = registry.register(counting([]))
    plain, fused = problem(64), problem(64, relu(0.5))
    everything = ka.get_kernels(providers=[provider])
    assert {k.metadata.design.cluster_shape for k in everything} == {(1, 1, 1), (2, 1, 1)}
    assert len(ka.get_kernels(plain, providers=[provider])) == 4
    found = ka.get_kernels(fused, providers=[provider])
    assert {k.metadata.design.cluster_shape for k in found} == {(1, 1, 1)}
    (other,) = {k.metadata.operands for k in found if k.metadata.operands.A.divisibility > 1}
    (cluster,) = [
        kernel
        for kernel in type(found[0]).kernels_for(other, fused.epilogue.graph)
        if kernel.metadata.design.cluster_shape != (1, 1, 1)
    ]
    assert cluster.supports(fused).rule == "a cluster computes no epilogue"


def test_rules_are_told_in_their_order_whichever_is_asked_first(registry):
    asked = []
    provider = registry.register(counting(asked))
    fused = ka.get_kernels(problem(64, relu(0.5)), providers=[provider])[0]
    cluster = next(
        kernel
        for kernel in type(fused).kernels_for(fused.metadata.operands, fused.metadata.epilogue)
        if kernel.metadata.design.cluster_shape != (1, 1, 1)
    )
    cases = {1001: "M is below 1000", 63: "a cluster computes no epilogue"}
    statuses = {M: cluster.supports(problem(M, relu(0.5))) for M in cases}
    assert {M: status.rule for M, status in statuses.items()} == cases
    assert statuses[63].progress == statuses[1001].progress + 1
    assert ("even", 63) not in asked


def test_a_kernel_that_knows_its_epilogue_by_name_asks_the_graph_of_the_arguments(registry):
    asked = []
    provider = registry.register(counting(asked))
    fused = problem(64, relu(0.5))
    kernel = ka.get_kernels(fused, providers=[provider])[0]
    named = replace(kernel.metadata, epilogue=fused.epilogue.graph.identity).rebuild()
    asked.clear()
    assert named.supports(fused)
    assert ("graph", fused.epilogue.graph) in asked
    assert not named.supports(problem(64))


def test_a_family_of_any_epilogue_is_asked_about_that_of_the_arguments(registry):
    class Plain(CpuGemm):
        any_epilogue = True

        @rule("no epilogue is computed")
        def _(graph):
            return graph is None

    provider = registry.register(Plain)
    args = gemm_arguments(4, 4, 4)
    fused = ka.GemmArguments(*args.tensors, epilogue=relu(0.5))
    assert ka.get_kernels(args, providers=[provider])
    assert ka.get_kernels(fused, providers=[provider]) == []
    assert ka.get_kernels(args, providers=[provider])


def test_a_rule_over_the_graph_that_raises_leaves_the_family_out_every_time(registry):
    class Raising(CudaGemm):
        @rule("nothing is divided by zero")
        def _(design, graph):
            return 1 // 0

    provider = registry.register(Raising)
    with pytest.warns(ka.errors.PluginWarning, match="Raising.* ZeroDivisionError"):
        assert ka.get_kernels(problem(64), providers=[provider]) == []
    assert ka.get_kernels(problem(66), providers=[provider]) == []
    (rejected,) = ka.explain(problem(66), providers=[provider]).rejected
    assert rejected.rule == "plug-in fault"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))]
)
def test_a_kernel_that_was_asked_can_be_copied(copied):
    args = problem()
    kernel = ka.get_kernels(args, cc="90a", providers=["cutedsl"])[0]
    found = copied(kernel)
    assert found == kernel
    assert found.supports(args)


def test_types_are_matched_once_for_all_sizes(registry, monkeypatch):
    class OfFloats(CpuGemm):
        operands = (
            Operands(A="f32 | f64", B="like A", out="like A", accumulator="any", majors="strided"),
        )

    provider = registry.register(OfFloats)
    matched = []
    match = _catalogue.match_types
    monkeypatch.setattr(
        _catalogue, "match_types", lambda one, *how: matched.append(one) or match(one, *how)
    )

    def accepts(M, element):
        A, B, out = torch.ones(M, 4), torch.ones(4, 4), torch.ones(M, 4)
        args = ka.GemmArguments(*[one.to(element) for one in (A, B, out)])
        found, reason = (
            ka.get_kernels(args, providers=[provider]),
            ka.explain(args, providers=[provider]),
        )
        assert len(found) == sum(one.family == "OfFloats" for one in reason.accepted)
        return len(found)

    assert accepts(3, torch.float32) == 1
    asked = len(matched)
    assert asked
    assert accepts(5, torch.float32) == 1
    assert len(matched) == asked
    assert accepts(3, torch.float64) == 1
    assert len(matched) > asked
    assert accepts(3, torch.float16) == 0


@pytest.mark.parametrize("precision", ["tf32", "ieee", "tf32x3", "tf32"])
def test_types_that_fit_by_a_precision_are_those_of_that_precision(precision):
    operands = [torch.empty(64, 64, device="meta") for _ in range(3)]
    operands[1] = operands[1].t()
    args = ka.GemmArguments(*operands, fp32_precision=precision)
    found = ka.get_kernels(args, cc="90a", providers=["cutedsl"])
    multiplied = {str(getattr(k.metadata.operands, "multiplication_type", None)) for k in found}
    assert ("tfloat32" in multiplied) == (precision == "tf32")
    assert ("tfloat32x3" in multiplied) == (precision != "ieee")
