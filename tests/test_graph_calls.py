"""What calls of graphs are given wrongly is named, and none of it is left out."""

import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.errors import GraphError, GraphNotSupportedError, VariantPackError

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


@pytest.mark.parametrize("names", [3, [3]])
def test_engines_are_barred_by_names(names):
    with pytest.raises(GraphError, match="expected names, or parts of them"):
        planned().deselect_engines(names)
