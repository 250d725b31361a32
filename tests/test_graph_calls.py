"""What calls of graphs are given wrongly is named, and none of it is left out."""

import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.errors import (
    GraphError,
    GraphNotSupportedError,
    GraphStateError,
    VariantPackError,
)
from kernel_api.graph._execution import Execution

X, Y = torch.randn(4, 8), torch.randn(4, 8)


def new():
    kind = cudnn.data_type.FLOAT
    return cudnn.pygraph(io_data_type=kind, compute_data_type=kind)


@pytest.fixture
def graph():
    found = new()
    a = found.tensor((4, 8), name="a").set_uid(1)
    found.relu(a).set_output(True).set_uid(2)
    found.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return found


def test_a_tensor_that_is_given_twice_is_refused(graph):
    words = "is given twice, as 1 and as 'a'"
    with pytest.raises(VariantPackError, match=words):
        graph.execute({1: X, "a": Y, 2: torch.empty(4, 8)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"override_shapes": [(9, 8)]}, "override_uids, which is missing"),
        ({"override_strides": [(8, 1)]}, "override_uids, which is missing"),
        (
            {"override_uids": [1], "override_shapes": [(-9, 8)]},
            r"override_shapes has \(-9, 8\); expected whole numbers from 0 on",
        ),
        ({"override_uids": [1], "override_shapes": [(9.5, 8)]}, "expected whole numbers"),
        ({"override_uids": [1], "override_shapes": [9]}, "override_shapes has 9; expected whole"),
        ({"override_uids": [1], "override_shapes": 9}, "override_shapes is 9; expected an entry"),
        ({"override_uids": 1, "override_shapes": [(9, 8)]}, "override_uids is 1; expected uids"),
        (
            {"override_uids": [1, 1], "override_shapes": [(9, 8), (9, 8)]},
            "expected every uid once",
        ),
        (
            {"override_uids": [1], "override_shapes": [(9, 8)], "override_strides": [(8, "1")]},
            "override_strides has",
        ),
    ],
)
def test_other_extents_are_for_tensors_that_are_named(graph, given, words):
    with pytest.raises(GraphError, match=words):
        graph.execute({1: X, 2: torch.empty(4, 8)}, **given)


def test_other_extents_are_taken(graph):
    x, out = torch.randn(9, 8), torch.empty(9, 8)
    graph.execute({1: x, 2: out}, override_uids=[1], override_shapes=[torch.Size([9, 8])])
    assert torch.equal(out, x.relu())


def test_what_is_no_handle_is_refused(graph):
    with pytest.raises(GraphError, match="handle is a str; expected what create_handle"):
        graph.execute({1: X, 2: torch.empty(4, 8)}, None, "x")


@pytest.mark.parametrize("index", ["x", 0.0, True, 9, -1])
def test_a_plan_that_is_not_there_is_refused(graph, index):
    with pytest.raises(GraphError, match=f"there is no plan {index!r}; there are 2"):
        graph.select_plan(index)


@pytest.mark.parametrize("data", [(), (None, None, b"")])
def test_deserialize_takes_data_and_a_handle(data):
    with pytest.raises(GraphError, match=f"was given {len(data)} values; expected data, or a han"):
        cudnn.pygraph().deserialize(*data)


def planned():
    found = new()
    found.relu(found.tensor((4, 8))).set_output(True)
    found.validate()
    found.build_operation_graph()
    found.create_execution_plans([cudnn.heur_mode.FALLBACK])
    return found


def test_one_name_bars_engines_as_a_list_of_it_does():
    found = planned().deselect_engines("sm90.gemm")
    found.build_plans()
    with pytest.raises(GraphNotSupportedError, match=r"deselect_engines\('torch'\)"):
        planned().deselect_engines("torch").build_plans()


@pytest.fixture
def product():
    found = new()
    a = found.tensor((8, 8), name="a").set_uid(1)
    found.relu(found.matmul(a, a)).set_output(True).set_uid(2)
    found.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return found


def run_plan(graph, monkeypatch):
    """Names of the plans that an execution runs."""
    x, out = torch.randn(8, 8), torch.empty(8, 8)
    launched = []
    launch = Execution._launch
    monkeypatch.setattr(
        Execution,
        "_launch",
        lambda self, *given: (launched.append(self._plan.name), launch(self, *given)),
    )
    graph.execute({1: x, 2: out})
    torch.testing.assert_close(out, (x @ x).relu())
    return launched


def test_a_plan_that_is_barred_when_it_is_built_is_not_executed(product, monkeypatch):
    first, second = (product.get_plan_name_at_index(i) for i in (0, 1))
    assert product.get_plan_name() == first
    product.deselect_engines([first])
    assert product.get_plan_name() == second
    assert run_plan(product, monkeypatch) == [second]
    with pytest.raises(GraphNotSupportedError, match="can be built") as caught:
        product.deselect_workspace_greater_than(-1)
    assert set(caught.value.reasons) == {first, second}
    with pytest.raises(GraphStateError, match="no plan of the graph is built"):
        product.execute({1: torch.randn(8, 8), 2: torch.empty(8, 8)})


def test_barring_another_plan_keeps_what_is_selected(product, monkeypatch):
    first, second = (product.get_plan_name_at_index(i) for i in (0, 1))
    product.deselect_engines([second])
    assert run_plan(product, monkeypatch) == [first]


def test_calls_of_a_block_run_no_plan_that_is_barred():
    x = torch.randn(8, 8)
    with cudnn.Graph() as graph:
        graph.relu(graph.matmul(x, x)).set_output(True)
    first = graph.get_plan_name()
    graph.deselect_engines(first)
    assert graph.get_plan_name() != first
    torch.testing.assert_close(graph(x), (x @ x).relu())


def test_a_name_that_bars_no_plan_is_logged(product, caplog):
    product.deselect_engines(["sm90.nothing", "reference"])
    (record,) = caplog.records
    assert "deselect_engines('sm90.nothing') bars none of the plans" in record.getMessage()
    assert "reference_gemm" in record.getMessage()


@pytest.mark.parametrize("names", [3, [3]])
def test_engines_are_barred_by_names(names):
    with pytest.raises(GraphError, match="expected names, or parts of them"):
        planned().deselect_engines(names)
