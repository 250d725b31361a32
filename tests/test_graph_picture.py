"""Pictures of graphs: valid SVG in which every operation, tensor and kernel is."""

import shutil
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.random_graphs import cases, graph_of

import kernel_api.graph as cudnn
from kernel_api.graph import _picture
from kernel_api.graph._node import Node

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=["own", "graphviz"])
def drawn_by(request, monkeypatch):
    """Both ways to draw; what has no graphviz here is drawn by the other."""
    if request.param == "own":
        monkeypatch.setattr(_picture.shutil, "which", lambda name: None)
    elif shutil.which("dot") is None:
        pytest.skip("graphviz is not installed")
    return request.param


def words(svg):
    """All texts of a picture; raises if it is no XML."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return " | ".join(text.text or "" for text in root.iter(f"{SVG}text"))


def layer():
    """A graph with branches, two results of one operation, a residual and numbers."""
    x, gamma = torch.randn(33, 48), torch.randn(48)
    up, down = torch.randn(48, 64), torch.randn(32, 48)
    with cudnn.Graph(name="a layer") as graph:
        norm, inv_rms = graph.rmsnorm(x, gamma, epsilon=3e-4, name="norm")
        gate, linear = graph.glu_pair(graph.matmul(norm, up, name="up"), name="split")
        hidden = graph.mul(graph.swish(gate, name="act"), linear, name="gated")
        product = graph.matmul(hidden, down, name="down")
        out = graph.add(graph.mul(product, 0.625, name="damped"), x, name="residual")
        out.set_output(True).set_name("result")
        inv_rms.set_output(True)
    return graph


def test_every_operation_tensor_and_kernel_is_in_the_picture(drawn_by):
    graph = layer()
    found = words(graph.to_svg())
    for node in graph.nodes:
        assert node.name in found
        assert node.op in found
    for tensor in [*graph.inputs, *graph.outputs]:
        assert str(tensor) in found
    for step in graph.selected.steps:
        assert step.title in found
    assert "f32 33×48" in found
    assert "epsilon = 0.0003" in found
    assert "b = 0.625" in found


def test_a_graph_without_plans_is_drawn_without_kernels(drawn_by):
    graph = cudnn.pygraph(name="two")
    a = graph.tensor(dim=(3, 5), data_type=cudnn.data_type.FLOAT, name="a")
    graph.relu(graph.neg(a, name="minus"), name="zero or more")
    found = words(graph.to_svg())
    assert "minus" in found
    assert "zero or more" in found
    assert "f32 3×5" in found


@pytest.mark.parametrize("name", ['<&>"', "a\\nb\\", "&amp;", "\x00\x1b\ud800", "été 漢"])
def test_names_are_text_whatever_is_in_them(drawn_by, name):
    graph = cudnn.pygraph(name=name)
    a = graph.tensor(dim=(3, 5), data_type=cudnn.data_type.FLOAT, name=f"in {name}")
    graph.relu(a, name=name).set_output(True)
    graph.build()
    shown = _picture._clean(name)
    assert shown in words(graph.to_svg())


def test_an_empty_graph_has_a_picture(drawn_by):
    assert words(cudnn.pygraph().to_svg()) == ""


def test_a_notebook_shows_the_picture():
    graph = layer()
    assert graph._repr_svg_() == graph.to_svg()
    assert words(graph._repr_svg_())


def test_it_is_drawn_without_graphviz_where_that_fails(monkeypatch):
    graph = layer()
    monkeypatch.setattr(_picture.shutil, "which", lambda name: "dot")
    monkeypatch.setattr(_picture, "_by_graphviz", lambda text: None)
    assert "residual" in words(graph.to_svg())
    monkeypatch.undo()

    def fails(*args, **options):
        raise FileNotFoundError("dot")

    monkeypatch.setattr(_picture.subprocess, "run", fails)
    assert _picture._by_graphviz("digraph {}") is None


def rectangles(svg):
    for one in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if "x" in one.attrib:
            x, y, width, height = (float(one.attrib[k]) for k in ("x", "y", "width", "height"))
            yield x, y, x + width, y + height


def check_places(svg):
    """Everything is within the picture, and nothing covers another."""
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    found = list(rectangles(svg))
    for i, (left, top, right, bottom) in enumerate(found):
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        for other in found[:i]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            # The nodes of a kernel are in its box, which is drawn before.
            inside = other[0] <= left and right <= other[2] and other[1] <= top
            assert apart or (inside and bottom <= other[3])
    return found


def test_nothing_covers_another(monkeypatch):
    monkeypatch.setattr(_picture.shutil, "which", lambda name: None)
    assert len(check_places(layer().to_svg())) > 15


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_random_graphs_have_pictures(monkeypatch, case):
    monkeypatch.setattr(_picture.shutil, "which", lambda name: None)
    graph, _ = graph_of(case, sm_version=90)
    graph.validate()
    assert check_places(graph.to_svg())
    graph.create_execution_plans([cudnn.heur_mode.A])
    svg = _picture.draw(graph, graph.plans[0])
    assert check_places(svg)
    for node in graph.nodes:
        assert node.name in words(svg)


def test_what_a_plan_computes_as_part_of_another_operation_is_named_there(drawn_by):
    graph = cudnn.pygraph()
    a, b = (graph.tensor(dim=(8, 8), data_type="float32", name=name) for name in "ab")
    scores = graph.exp(graph.matmul(a, b, name="first"), name="softmax")
    graph.matmul(scores, b, name="second").set_output(True).set_name("out")
    graph.relu(scores, name="unused")
    merged = Node("sdpa", "pattern", {"q": a, "k": b}, {})
    merged.outputs["O"] = graph.nodes[2].outputs["C"]
    step = SimpleNamespace(title="a_kernel", kind="kernel", nodes=(merged,))
    found = words(_picture.draw(graph, SimpleNamespace(steps=[step])))
    assert "a_kernel" in found
    assert "of first, softmax, second" in found
    # What nothing comes of is drawn, in no kernel.
    assert "unused" in found


def rewritten():
    """Attention that is written out and whose probabilities are kept, and a norm of its result."""
    g = cudnn.pygraph("written out", "bfloat16", "float32", "float32", sm_version=90)
    q, k, v = (
        g.tensor((2, 4, n, 64), name=name) for name, n in zip("qkv", (70, 90, 90), strict=True)
    )
    p = g.matmul(q, g.transpose(k, [0, 1, 3, 2]), name="scores")
    p = g.exp(g.sub(p, g.reduction(p, "MAX", axis=-1, name="largest"), name="shifted"), name="e")
    p = g.div(p, g.reduction(p, "ADD", axis=-1, name="total"), name="p").set_output(True)
    o = g.matmul(p.set_data_type("bfloat16"), v, name="values").set_output(True)
    g.relu(g.reduction(o, "NORM2", axis=-1, name="norm"), name="relu").set_output(True)
    g.validate()
    g.create_execution_plans([cudnn.heur_mode.A])
    return g


def test_what_planning_made_has_a_box_that_says_of_what(drawn_by):
    graph = rewritten()
    svg = _picture.draw(graph, graph.plans[0])
    found = words(svg)
    assert "made of norm" in found and found.count("norm::") == 3
    assert "made of values" in found
    assert "made of largest, shifted, e, total, p" in found
    assert found.count("made of") == 3
    boxes = (
        "stroke-dasharray" if drawn_by == "graphviz" else 'fill="none" stroke="#7b8794" stroke-d'
    )
    assert svg.count(boxes) == 3


def test_boxes_of_what_planning_made_cover_nothing(monkeypatch):
    monkeypatch.setattr(_picture.shutil, "which", lambda name: None)
    graph = rewritten()
    assert check_places(_picture.draw(graph, graph.plans[0]))


def test_a_score_modification_is_named_in_its_node(drawn_by):
    q = torch.randn(1, 2, 9, 16)
    with cudnn.Graph() as graph:
        out, _ = graph.sdpa(
            q=q, k=q, v=q, score_mod=lambda g, score: g.tanh(g.mul(score, 0.3)), name="attn"
        )
        out.set_output(True)
    found = words(graph.to_svg())
    assert "with mul, tanh" in found
