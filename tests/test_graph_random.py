"""Random graphs: planned onto kernels they compute what torch does, step by step."""

from __future__ import annotations

import hypothesis
import pytest
from support.random_graphs import cases, data_of, disagreement, example, graph_of

import kernel_api.graph as cudnn

A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK


def run(made, mode, seed=0):
    graph, _ = graph_of(made, handle=cudnn.create_handle("cpu"))
    graph.build([mode])
    data = data_of(made, seed=seed)
    pack = {uid: data[name] for uid, name in enumerate([*made.inputs, *made.outputs])}
    graph.execute(pack)
    return graph, data


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(cases())
@pytest.mark.parametrize("mode", [A, FALLBACK], ids=lambda mode: mode.name)
def test_a_graph_computes_what_torch_does(mode, made):
    graph, data = run(made, mode)
    assert disagreement(made, data) is None, str(graph.explain())


@pytest.mark.parametrize("seed", range(8))
def test_every_node_is_in_one_step(seed):
    graph, _ = graph_of(example(seed), sm_version=90)
    graph.validate()
    graph.create_execution_plans([A])
    for plan in graph.plans:
        computed = [node.name for step in plan.steps for node in step.nodes]
        assert len(set(computed)) == len(computed)
        written = {id(t) for step in plan.steps for node in step.nodes for t in node.writes}
        assert written >= {id(tensor) for tensor in graph.outputs}
