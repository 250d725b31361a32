"""Serialised graphs: what comes back is what was, and whatever is damaged is refused."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graph_restarts import main, restarted, stored
from support.random_graphs import cases, data_of, graph_of

import kernel_api.graph as cudnn
from kernel_api.errors import GraphError, GraphStateError, SerializedGraphError
from kernel_api.graph._serialization import (
    FORMAT,
    VERSION,
    graph_from_dict,
    graph_to_dict,
    pack,
    unpack,
)

A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK

X, W, B = (torch.randn(*shape) for shape in ((5, 17), (17, 9), (9,)))


def product(**options):
    """A product with an epilogue, built; uids 10, 11, 12 → 13."""
    graph = cudnn.pygraph(name="product", compute_data_type="float32", **options)
    a, b, bias = (graph.tensor_like(t, name).set_uid(uid)
                  for t, name, uid in ((X, "a", 10), (W, "b", 11), (B, "bias", 12)))  # fmt: skip
    ab = graph.matmul(a, b, name="mm")
    out = graph.relu(graph.bias(ab, bias, name="shift"), negative_slope=0.3, name="act")
    graph.mul(out, 1.7, name="scaled").set_output(True).set_uid(13).set_name("y")
    graph.build()
    return graph


def run(graph):
    out = torch.empty(5, 9)
    graph.execute({10: X, 11: W, 12: B, 13: out})
    return out


@pytest.fixture(scope="module")
def built():
    return product()


@pytest.fixture(scope="module")
def data(built):
    return built.serialize(as_bytes=True)


def as_dict(graph):
    return json.loads(json.dumps(graph_to_dict(graph)))


# There and back ------------------------------------------------------------------------------


def test_bytes_lists_and_text_come_back_as_the_same_graph(built, data):
    assert built.serialize() == list(data)
    for form in (data, list(data), bytearray(data), memoryview(data), data.decode()):
        again = cudnn.pygraph()
        assert again.deserialize(form) is again
        assert as_dict(again) == as_dict(built)
        assert again.get_plan_name() == built.get_plan_name()
        assert torch.equal(run(again), run(built))


def test_a_graph_that_came_back_is_serialised_to_the_same_bytes(data):
    assert cudnn.pygraph().deserialize(data).serialize(as_bytes=True) == data


@settings(max_examples=15)
@given(cases())
def test_random_graphs_come_back_and_compute_the_same_bits(case):
    results = []
    handle = cudnn.create_handle("cpu")
    graph, _ = graph_of(case, handle=handle)
    graph.build()
    again = cudnn.pygraph().deserialize(handle, graph.serialize())
    assert as_dict(again) == as_dict(graph)
    for one in (graph, again):
        data = data_of(case)
        one.execute({uid: data[name] for uid, name in enumerate([*case.inputs, *case.outputs])})
        results.append([data[name] for name in case.outputs])
    for own, other in zip(*results, strict=True):
        assert torch.equal(own.double().nan_to_num(3), other.double().nan_to_num(3))


def test_another_process_computes_the_same_bits_without_the_compiler(tmp_path):
    modes = {number: [FALLBACK if number % 8 else A] for number in range(0, 200, 4)}
    titles = stored(modes, "cpu", tmp_path / "graphs.pt")
    by_torch = [one for names in titles for one in names if one.startswith("torch: ")]
    assert len(by_torch) >= 25 and sum(map(len, titles)) > len(titles)
    found = restarted(tmp_path / "graphs.pt")
    assert found == {"executed": len(modes), "wrong": [], "compiler": False}


def test_a_graph_that_gives_other_bits_in_another_process_is_found(tmp_path, capsys):
    stored({3: [A], 4: [A]}, "cpu", tmp_path / "graphs.pt")
    held = torch.load(tmp_path / "graphs.pt")
    next(iter(held["graphs"][0]["expected"].values())).view(torch.uint8)[0] += 1
    held["graphs"][1]["graph"] = b"{}"
    torch.save(held, tmp_path / "graphs.pt")
    main(tmp_path / "graphs.pt")
    (one, why), (other, failure) = json.loads(capsys.readouterr().out)["wrong"]
    assert one == 3 and "bytes of tensor" in why
    assert other == 4 and "SerializedGraphError" in failure


def test_a_handle_may_be_given_first(data):
    handle = cudnn.create_handle("cpu")
    again = cudnn.pygraph().deserialize(handle, data)
    assert again.handle is handle


def test_the_file_is_one_line_of_json_with_format_version_and_checksum(data):
    assert b"\n" not in data
    found = json.loads(data)
    assert (found["format"], found["version"]) == (FORMAT, VERSION)
    assert re.fullmatch("[0-9a-f]{64}", found["sha256"])
    # Alike on every machine: keys are sorted.
    assert list(found) == sorted(found)


@pytest.mark.parametrize("value", [0.1, 1e-320, -0.0, float("inf"), 3, True, 2**70])
def test_numbers_are_exact(value):
    graph = cudnn.pygraph()
    a = graph.tensor(dim=(3,), data_type="float64", name="a")
    graph.add(a, graph.tensor_scalar(value, "float64"))
    again = cudnn.pygraph()
    graph_from_dict(again, as_dict(graph))
    (number,) = (t.value for t in again.tensors if t.is_constant)
    assert (type(number), repr(number)) == (type(value), repr(value))


def test_everything_of_tensors_comes_back():
    graph = cudnn.pygraph(name="all", io_data_type="float16", intermediate_data_type="float32")
    offsets = graph.tensor(dim=(3, 1, 1, 1), data_type="int32", name="offsets")
    a = graph.tensor(
        dim=(2, 3, 4), stride=(40, 1, 3), data_type="bfloat16", ragged_offset=offsets, name="a",
        uid=-7, reordering_type=cudnn.tensor_reordering.F16x16,
    )  # fmt: skip
    graph.tensor(dim=(1,), is_pass_by_value=True, data_type="float32", name="number")
    graph.relu(a, negative_slope=0.1, name="act").set_name("out é\x00")
    again = cudnn.pygraph()
    graph_from_dict(again, as_dict(graph))
    assert as_dict(again) == as_dict(graph)
    copy = again.tensors[1]
    assert (copy.dim, copy.stride, copy.uid) == ((2, 3, 4), (40, 1, 3), -7)
    assert copy.ragged_offset is again.tensors[0]
    assert copy.reordering is cudnn.tensor_reordering.F16x16
    assert again.tensors[2].is_pass_by_value
    assert again.query_tensor_attributes_of_uid(-7) is copy
    with pytest.raises(GraphError, match="cannot have uid -7, which a has"):
        again.tensors[0].set_uid(-7)


@pytest.mark.parametrize(
    "value", [None, True, 3, "text", 0.25, (1, (2.5, None)), [1, [0.5]], {"a": (1,), "float": 2.0}]
)
def test_attributes_keep_their_types(value):
    graph = cudnn.pygraph()
    a = graph.tensor(dim=(3,), data_type="float32", name="a")
    graph.relu(a)
    graph.nodes[0].attributes["own"] = value
    again = cudnn.pygraph()
    graph_from_dict(again, as_dict(graph))
    assert again.nodes[0]["own"] == value
    assert repr(again.nodes[0]["own"]) == repr(value)


def test_an_attribute_that_json_cannot_hold_is_an_error_that_names_it():
    graph = cudnn.pygraph()
    graph.relu(graph.tensor(dim=(3,), data_type="float32", name="a"), name="act")
    graph.nodes[0].attributes["odd"] = object()
    with pytest.raises(GraphError, match="odd of relu 'act' is a object, which cannot be"):
        graph_to_dict(graph)


def test_a_function_of_scores_comes_back():
    q, slope = torch.randn(2, 3, 17, 32), torch.randn(1, 3, 1, 1)
    with cudnn.Graph() as graph:
        out, _ = graph.sdpa(
            q=q, k=q, v=q, attn_scale=0.3, name="attn",
            score_mod=lambda g, s: g.add(g.mul(g.tanh(g.mul(s, 0.2)), 4.5), g.mul(s, slope)),
        )  # fmt: skip
        out.set_output(True)
    assert [n.op for n in graph.nodes[0].body.nodes] == ["mul", "tanh", "mul", "mul", "add"]
    again = cudnn.Graph.deserialize(graph.serialize())
    body = again.nodes[0].body
    assert [n.op for n in body.nodes] == ["mul", "tanh", "mul", "mul", "add"]
    assert body.result.producer is body.nodes[-1]
    assert any(body.argument is tensor for tensor in body.nodes[0].reads)
    assert torch.equal(again(q, slope), graph(q, slope))


def test_a_wrapped_graph_keeps_the_names_and_order_of_its_tensors():
    with cudnn.Graph(inputs=["shift::bias", "mm::A", "mm::B"], outputs=["y", "mm::C"]) as graph:
        c = graph.matmul(X, W, name="mm").set_output(True)
        graph.bias(c, B, name="shift").set_output(True).set_name("y")
    again = cudnn.Graph.deserialize(graph.serialize(as_bytes=True))
    for own, other in zip(graph(B, X, W), again(B, X, W), strict=True):
        assert torch.equal(own, other)
    found = again({"mm::0": X, "mm::B": W, "shift::1": B})
    assert torch.equal(found["shift::OUT_0"], found["y"])
    assert again.serialize() == graph.serialize()


def test_a_graph_of_single_steps_can_be_called_when_it_came_back(data):
    graph = cudnn.Graph.deserialize(data)
    found = graph({"mm::A": X, "b": W, 12: B})
    assert torch.equal(found["y"], found["scaled::OUT_0"])
    assert torch.equal(found["y"], graph(X, W, B))
    assert torch.equal(found["y"], run(product()))


def test_only_an_empty_graph_can_become_another(built, data):
    with pytest.raises(GraphStateError, match="empty"):
        built.deserialize(data)
    graph = cudnn.pygraph()
    graph.tensor_like(X)
    with pytest.raises(GraphStateError, match="empty"):
        graph.deserialize(data)


def test_a_graph_that_is_not_built_cannot_be_serialised():
    graph = cudnn.pygraph()
    graph.relu(graph.tensor_like(X)).set_output(True)
    with pytest.raises(GraphStateError, match="build"):
        graph.serialize()


# Damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "no JSON"),
        (b"\x00\x01\x02", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        ([1, 2, 300], "no JSON"),
        (b"[1, 2]", "its format is not 'kernel_api.graph'"),
        (b'{"format": "other"}', "its format is not"),
        (b"null", "its format is not"),
        (b"[" * 200_000, "no JSON"),
        (7, "the data is a int; expected what serialize"),
        (None, "the data is a NoneType"),
        ([object()], "the data is a list"),
        ({"a": 1}, "the data is a dict"),
    ],
)
def test_foreign_data_is_refused(data, what):
    with pytest.raises(SerializedGraphError, match=re.escape(what)):
        cudnn.pygraph().deserialize(data)
    with pytest.raises(SerializedGraphError, match=re.escape(what)):
        cudnn.Graph.deserialize(data)


@pytest.mark.parametrize("version", [0, 2, "1", True, None, 1.0])
def test_another_version_is_refused_by_its_number(data, version):
    found = json.loads(data)
    found["version"] = version
    with pytest.raises(SerializedGraphError, match=f"version {version!r}; this library reads"):
        unpack(json.dumps(found))


@pytest.mark.parametrize("key", ["content", "sha256"])
def test_a_part_that_is_missing_is_noticed(data, key):
    found = json.loads(data)
    del found[key]
    with pytest.raises(SerializedGraphError, match="expected content, format, sha256"):
        unpack(json.dumps(found))


def test_a_key_that_comes_twice_is_noticed(data):
    twice = data.replace(b'{"content":', b'{"content":{},"content":', 1)
    with pytest.raises(SerializedGraphError, match="a key comes twice"):
        unpack(twice)


@given(st.data())
def test_every_changed_byte_is_noticed_or_changes_nothing(data, drawn):
    place = drawn.draw(st.integers(0, len(data) - 1))
    byte = drawn.draw(st.integers(0, 255))
    changed = bytearray(data)
    changed[place] = byte
    try:
        found = unpack(changed)
    except SerializedGraphError:
        return
    assert found == unpack(data)


@given(st.data())
def test_whatever_is_cut_off_is_noticed(data, drawn):
    end = drawn.draw(st.integers(0, len(data) - 1))
    with pytest.raises(SerializedGraphError):
        unpack(data[:end])
    with pytest.raises(SerializedGraphError):
        unpack(data + data[:end] if end else data + b"x")


# Content with the right checksum, that describes no graph.


def changed(data, change):
    content = unpack(data)
    change(content)
    return pack(content)


def node(content, name):
    return next(one for one in content["graph"]["nodes"] if one["name"] == name)


def set_at(*path):
    *path, value = path

    def change(content):
        for key in path[:-1]:
            content = node(content, key[1:]) if str(key).startswith("@") else content[key]
        content[path[-1]] = value

    return change


def circle(content):
    """The product reads what is computed from it."""
    first, last = node(content, "mm"), node(content, "act")
    first["inputs"][0][1] = last["outputs"][0][1]


def written_twice(content):
    node(content, "act")["outputs"][0][1] = node(content, "mm")["outputs"][0][1]


def unwritten(content):
    content["graph"]["nodes"] = content["graph"]["nodes"][:1]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (set_at("@mm", "op", "matmull"), "there is no operation 'matmull'"),
        (set_at("@mm", "op", 3), "expected text, got 3"),
        (set_at("@mm", "inputs", 0, 1, 99), "mm uses tensor 99 of"),
        (set_at("@mm", "inputs", 0, 1, -1), "mm uses tensor -1 of"),
        (set_at("@mm", "inputs", 0, 1, "0"), "mm uses tensor '0' of"),
        (set_at("@mm", "inputs", 0, 1, True), "mm uses tensor True of"),
        (set_at("@mm", "inputs", None), "damaged"),
        (set_at("@mm", "outputs", 0, 0, "Z"), "expected results of matmul: C, got 'Z'"),
        (set_at("@mm", "name", "act"), "nodes with names of their own"),
        (set_at("@mm", "compute", "FLOATS"), "expected a data_type, got 'FLOATS'"),
        (set_at("@act", "attributes", 0, 1, {"float": "zero"}), "damaged"),
        (set_at("@act", "attributes", 0, 1, {"pickle": "..."}), "one of the tags float, tuple"),
        (set_at("@act", "attributes", 0, 1, {"float": "1", "b": 2}), "with one tag"),
        (set_at("graph", "tensors", 0, "dim", [5, -1]), "expected a whole number, got -1"),
        (set_at("graph", "tensors", 0, "dim", [5, 17.0]), "expected a whole number, got 17.0"),
        (set_at("graph", "tensors", 0, "uid", 11), "uid [11] comes twice"),
        (set_at("graph", "tensors", 0, "is_virtual", True), "no operation writes a, which is"),
        (set_at("graph", "tensors", 0, "is_virtual", 1), "expected true or false, got 1"),
        (set_at("graph", "tensors", 0, "reordering", "ODD"), "a tensor_reordering, got 'ODD'"),
        (set_at("graph", "tensors", 0, "device", "abacus"), "'abacus' is no kind of device"),
        (set_at("graph", "tensors", 0, "ragged_offset", 99), "a uses tensor 99"),
        (set_at("graph", "tensors", 0, "value", {"tuple": [1]}), "expected a number"),
        (set_at("graph", "tensors", 3, "is_pass_by_value", True), "a number of the host's"),
        (set_at("graph", "own_tensors", 99), "99 tensors or more"),
        (set_at("graph", "tensors", {}), "damaged"),
        (set_at("graph", "name", None), "expected text, got None"),
        (set_at("graph", None), "expected a graph in it, got None"),
        (set_at("graph", {}), "there is no 'io_data_type'"),
        (circle, "the graph goes in a circle"),
        (written_twice, "is written by"),
        (unwritten, "no operation writes"),
        (set_at("plan", {}), "the plan is damaged"),
        (set_at("plan", "steps", 0, 3), "the plan is damaged"),
    ],
)
def test_content_that_describes_no_graph_is_refused(data, change, what):
    graph = cudnn.pygraph(name="mine")
    with pytest.raises(SerializedGraphError, match=re.escape(what)):
        graph.deserialize(changed(data, change))
    if not what.startswith("the plan"):
        # It can be used as if nothing had been.
        assert (graph.name, graph.nodes, graph.tensors) == ("mine", [], [])


@pytest.mark.parametrize("key", ["graph", "plan"])
def test_content_without_graph_or_plan_is_refused(data, key):
    def change(content):
        del content[key]

    with pytest.raises(SerializedGraphError, match=key):
        cudnn.pygraph().deserialize(changed(data, change))


@pytest.mark.parametrize(
    "interface",
    [
        {},
        3,
        {"inputs": [10], "outputs": [13], "names": {}},
        {"inputs": [10, 11, 99], "outputs": [13], "names": {}},
        {"inputs": [10, 11, 12], "outputs": [], "names": {}},
        {"inputs": [10, 11, 12], "outputs": [13], "names": {"x": 99}},
        {"inputs": [10, 11, 12], "outputs": [13], "names": []},
    ],
)
def test_names_that_are_not_of_the_graph_are_refused(data, interface):
    with pytest.raises(SerializedGraphError, match="damaged"):
        cudnn.Graph.deserialize(changed(data, set_at("interface", interface)))


def test_what_json_cannot_hold_is_not_packed():
    for content in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises(GraphError, match="cannot be serialised"):
            pack(content)
    content = {10: "ten", 9: "nine", "é": [0.1], "graph": {}, "plan": {}}
    assert unpack(pack(content)) == {str(key): value for key, value in content.items()}
