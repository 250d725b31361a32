"""The identity of an epilogue: what it computes, in every process, and nothing else."""

import json
import subprocess
import sys

import pytest
import torch
from support.epilogues import with_accumulator

import kernel_api as ka
import kernel_api.epilogue as ep
from kernel_api.epilogue import Graph
from kernel_api.errors import ArgumentError

M, N = 4, 64


def graph(fn, x=None, out=None, **operands):
    return with_accumulator(
        torch.ones(M, N) if x is None else x, fn, out, **operands
    ).epilogue.graph


def bias_gelu(accum, bias, alpha):
    D = alpha * accum
    D += bias
    return ep.gelu(D)


def same_with_other_names(x, bias, alpha):
    unused = x * 17.0  # noqa: F841
    scaled = alpha * x
    shifted = scaled + bias
    return ep.gelu(shifted)


def helper(x):
    return ep.gelu(x)


def same_with_a_helper(accum, alpha, bias):
    return helper(alpha * accum + bias)


def same_by_closure(activation):
    def fn(accum, bias, alpha):
        return activation(alpha * accum + bias)

    return fn


class SameAsAnObject:
    def __call__(self, accum, *, bias, alpha):
        return ep.gelu(alpha * accum + bias)


SAME = [
    same_with_other_names,
    same_with_a_helper,
    same_by_closure(ep.gelu),
    same_by_closure(lambda x: ep.gelu(x)),
    SameAsAnObject(),
    lambda accum, bias, alpha: ep.gelu(alpha * accum + bias),
]
OPERANDS = {"bias": torch.ones(N), "alpha": 0.5}


@pytest.mark.parametrize("fn", SAME)
def test_functions_that_compute_the_same_are_one_epilogue(fn):
    one, other = graph(bias_gelu, **OPERANDS), graph(fn, **OPERANDS)
    assert one == other
    assert hash(one) == hash(other)
    assert one.identity == other.identity
    assert one.nodes == other.nodes


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha": 2.0},
        {"alpha": 3},
        {"bias": torch.zeros(N)},
        {"bias": torch.ones(N, dtype=torch.bfloat16)},
        {"bias": torch.ones(1, N)},
        {"bias": torch.ones(2 * N)[::2]},
    ],
    ids=str,
)
def test_values_types_and_strides_of_operands_play_no_part(changes):
    assert graph(bias_gelu, **OPERANDS) == graph(bias_gelu, **{**OPERANDS, **changes})


def test_sizes_and_batches_play_no_part():
    expected = graph(bias_gelu, **OPERANDS)
    for shape in ((1, 8), (7, 3), (2, 5, 6)):
        operands = {"bias": torch.ones(shape[-1]), "alpha": 0.5}
        assert graph(bias_gelu, torch.ones(shape), **operands) == expected


def test_the_order_of_evaluation_plays_no_part():
    def one(accum, a, b):
        left, right = ep.exp(accum * a), ep.tanh(accum + b)
        return left * right

    def other(accum, a, b):
        right = ep.tanh(accum + b)
        left = ep.exp(accum * a)
        return left * right

    operands = {"a": torch.ones(N), "b": torch.ones(M, 1)}
    assert graph(one, **operands) == graph(other, **operands)


def test_what_is_computed_twice_is_one_node():
    def twice(accum):
        return ep.gelu(accum + 1) * ep.gelu(accum + 1)

    assert [n.op for n in graph(twice).nodes].count("erf") == 1


DIFFERENT = [
    (lambda x, b: x + b, {}),
    (lambda x, b: b + x, {}),
    (lambda x, b: x - b, {}),
    (lambda x, b: x * b, {}),
    (lambda x, b: ep.relu(x + b), {}),
    (lambda x, b: ep.relu(x + b, 0.1), {}),
    (lambda x, b: ep.relu(x + b, 0.2), {}),
    (lambda x, b: x + b + 0.0, {}),
    (lambda x, b: x + b + -0.0, {}),
    (lambda x, b: x + b + 1e-30, {}),
    (lambda x, b: ep.cast(x, "bf16") + b, {}),
    (lambda x, b: ep.cast(x, "f16") + b, {}),
    (lambda x, b: x + b, {"b": torch.ones(M, 1)}),
    (lambda x, b: x + b, {"b": torch.ones(M, N)}),
    (lambda x, b: x + b, {"b": torch.ones(())}),
    (lambda x, b: x + b, {"b": 1.0}),
    (lambda x, b: (x + b, x), {"aux": torch.empty(M, N)}),
    (lambda x, b: (x + b, x), {"other": torch.empty(M, N)}),
    (lambda x, b: (x + b, x + b), {"aux": torch.empty(M, N)}),
    (lambda x, b: (x + b, ep.sum(x, -1)), {"total": torch.empty(M)}),
    (lambda x, b: (x + b, ep.max(x, -1)), {"total": torch.empty(M)}),
    (lambda x, b: (x + b, ep.sum(x, -2)), {"total": torch.empty(N)}),
    (lambda x, b: (x + b, ep.sum(x, None)), {"total": torch.empty(())}),
    (lambda x, b: ep.interleave(*ep.glu_pair(x, granularity=1), granularity=2) + b, {}),
    (lambda x, b: ep.interleave(*ep.glu_pair(x, granularity=2), granularity=1) + b, {}),
    (lambda x, b: ep.interleave(*ep.glu_pair(x, "up_gate")[::-1]) + b, {}),
    (lambda x, b: ep.interleave(*ep.glu_pair(x)[::-1]) + b, {}),
]


def test_different_epilogues_differ():
    found = {graph(fn, **{"b": torch.ones(N), **more}).identity for fn, more in DIFFERENT}
    # Naming up first and then swapping the pair is the one thing said twice.
    assert len(found) == len(DIFFERENT)


def test_orders_of_a_pair_are_what_they_compute():
    def by_name(accum):
        gate, up = ep.glu_pair(accum, "up_gate")
        return ep.silu(gate) * up

    def by_hand(accum):
        first, second = ep.glu_pair(accum, "gate_up")
        return ep.silu(second) * first

    out = torch.empty(M, N // 2)
    assert graph(by_name, out=out) == graph(by_hand, out=out)


def test_a_reduction_over_all_batches_is_another_epilogue_than_one_per_batch():
    x = torch.ones(3, M, N)

    def total(accum):
        return accum, ep.sum(accum, None)

    per_batch, whole = (graph(total, x, total=torch.empty(shape)) for shape in ((3,), ()))
    assert per_batch != whole
    # Where there is no batch, it is the one per batch.
    assert graph(total, total=torch.empty(())) == per_batch


IN_A_FRESH_INTERPRETER = """
import torch, kernel_api as ka, kernel_api.epilogue as ep
def renamed(product, bias, alpha):
    x = alpha * product + bias
    return ep.gelu(x)
A, B, out = torch.ones(3, 5), torch.ones(5, 7), torch.empty(3, 7)
epilogue = ka.EpilogueArguments(renamed, alpha=9.0, bias=torch.ones(7))
print(ka.GemmArguments(A, B, out, epilogue=epilogue).epilogue.identity)
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_the_identity_is_the_same_in_every_process(seed):
    import os

    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_INTERPRETER],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert done.stdout.strip() == graph(bias_gelu, **OPERANDS).identity


def test_importing_the_functions_loads_no_torch():
    code = "import sys, kernel_api.epilogue; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_identity_of_a_known_epilogue_does_not_change():
    # Cached kernels are found by it: a change of this number forgets them all.
    found = graph(lambda accum, bias: ep.relu(accum + bias), bias=torch.ones(N))
    assert found.identity.startswith(KNOWN)


KNOWN = "f1c46558"


# JSON ------------------------------------------------------------------------------------


def everything(accum, bias, alpha, C, cos, signs, seed, mask):
    gate, up = ep.glu_pair(ep.interleave(accum, C), "up_gate")
    turned = ep.rotate(gate + ep.cast(up, "bf16"), cos, cos, 32, style="interleaved")
    mixed = ep.hadamard(turned, signs=signs)
    dropped = ep.dropout(mixed * alpha + bias, 0.1, seed, seed)
    chosen = ep.where(mask & (dropped > 0) | ~mask, dropped, float("-inf"))
    return chosen, ep.amax(dropped, -1), ep.sqrt(ep.mean_square(dropped, None))


def everything_graph():
    return graph(
        everything,
        bias=torch.ones(N),
        alpha=1.0,
        C=torch.ones(M, N),
        cos=torch.ones(M, 16),
        signs=torch.ones(16),
        seed=3,
        mask=torch.ones(M, N, dtype=torch.bool),
        amax=torch.empty(M),
        rms=torch.empty(()),
    )


def test_a_graph_survives_json():
    before = everything_graph()
    after = Graph.from_json(before.to_json())
    assert after == before
    assert after.nodes == before.nodes
    assert after.outputs == before.outputs
    assert after.to_json() == before.to_json()
    assert Graph.from_json(json.dumps(json.loads(before.to_json()), indent=2)) == before


def test_a_graph_tells_what_it_reads_and_writes():
    found = everything_graph()
    assert [name for name, _ in found.outputs] == ["D", "amax", "rms"]
    assert set(found.leaves) == {"bias", "alpha", "C", "cos", "signs", "seed", "mask"}
    assert found.leaves["cos"].op == "table"
    assert found.leaves["alpha"].op == "scalar"
    assert found.leaves["seed"]["type"] == "integer"
    assert found.leaves["mask"]["type"] == "bool"
    assert str(found).startswith(f"epilogue {found.identity[:8]} (D, amax, rms of accum, ")
    assert found.listing.splitlines()[-1].startswith("rms = %")
    assert len(found.listing.splitlines()) == len(found.nodes) + 3


def test_inputs_stand_before_the_nodes_that_use_them():
    for index, node in enumerate(everything_graph().nodes):
        assert all(i < index for i in node.inputs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "this is not JSON"),
        ("[]", "describes no epilogue graph"),
        ('{"nodes": [], "outputs": [["D", 0]]}', "names no node"),
        (
            '{"nodes": [{"op": "sinh", "inputs": [], "shape": [1, 1, "1"], "attributes": {}}],'
            ' "outputs": []}',
            "'sinh' of 0 inputs, which is no operation",
        ),
        (
            '{"nodes": [{"op": "neg", "inputs": [0], "shape": [1, 1, "1"], "attributes": {}}],'
            ' "outputs": []}',
            "stands before its inputs",
        ),
    ],
)
def test_what_describes_no_graph_is_refused(text, expected):
    with pytest.raises(ArgumentError, match=expected):
        Graph.from_json(text)


# In metadata and queries -----------------------------------------------------------------


def fused(kernel, epilogue):
    from dataclasses import replace

    return type(kernel)(replace(kernel.metadata, epilogue=epilogue))


def plain_kernel():
    args = ka.GemmArguments(torch.ones(M, N), torch.ones(N, N), torch.empty(M, N))
    (kernel,) = ka.get_kernels(args, providers=["torch"])
    return kernel


@pytest.mark.parametrize("as_identity", [False, True])
def test_a_kernel_of_an_epilogue_takes_that_one_and_refuses_others(as_identity):
    args = with_accumulator(torch.ones(M, N), bias_gelu, **OPERANDS)
    found = args.epilogue.graph
    kernel = fused(plain_kernel(), found.identity if as_identity else found)
    assert kernel.supports(args)
    other = with_accumulator(torch.ones(M, N), lambda x: ep.relu(x))
    status = kernel.supports(other)
    assert status.rule == "epilogue"
    assert f"another epilogue is asked for, {other.epilogue.graph}" in status.error
    assert not kernel.supports(ka.GemmArguments(*args.tensors))


def test_metadata_keeps_the_graph_through_json():
    kernel = fused(plain_kernel(), everything_graph())
    metadata = ka.metadata.KernelMetadata.from_json(kernel.metadata.to_json())
    assert metadata == kernel.metadata
    assert hash(metadata) == hash(kernel.metadata)
    assert metadata.rebuild().metadata.epilogue == everything_graph()
    assert metadata != fused(kernel, graph(lambda x: x * 2)).metadata


def test_families_without_epilogues_say_so():
    args = with_accumulator(torch.ones(M, N), lambda x: x * 2)
    explanation = ka.explain(args)
    assert [a.family for a in explanation.accepted] == ["reference.gemm"]
    told = {r.family: r for r in explanation.rejected}
    assert told["torch.mm"].rule == "epilogue"
    assert "stores the accumulator as it is" in told["torch.mm"].reason
