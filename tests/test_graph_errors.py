"""What graphs refuse, with which error and words; nothing is launched then."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.errors import (
    ArgumentError,
    GraphError,
    GraphNotSupportedError,
    GraphStateError,
    SerializedGraphError,
    VariantPackError,
    WorkspaceError,
)

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT
A = cudnn.heur_mode.A


def on_cpu():
    """A handle of what the tensors here are on, wherever there is a GPU as well."""
    return cudnn.create_handle("cpu")


def new_graph(**options):
    types = {"io_data_type": HALF, "intermediate_data_type": FLOAT, "compute_data_type": FLOAT}
    return cudnn.pygraph(**{**types, "handle": on_cpu(), **options})


def product(M=8, N=16, K=24, **options):
    """A · B + bias, as a graph with its tensors, built, and what it is executed on."""
    graph = new_graph(**options)
    a, b, bias = (graph.tensor(s, name=n) for s, n in (((M, K), "a"), ((K, N), "b"), ((1, N), "c")))
    y = graph.bias(graph.matmul(a, b, name="mm"), bias, name="add").set_output(True).set_name("y")
    graph.build([A])
    data = [torch.randn(t.dim).half() for t in (a, b, bias)]
    return graph, dict(zip((a, b, bias, y), (*data, torch.full((M, N), 7.0).half()), strict=True))


def untouched(pack):
    return bool((list(pack.values())[-1] == 7.0).all())


# The graph -------------------------------------------------------------------------------


def test_nodes_that_need_each_other_go_in_a_circle():
    graph = new_graph()
    a = graph.tensor((4, 4))
    first = graph.add(a, a, name="first")
    second = graph.mul(first, a, name="second")
    graph.nodes[0].inputs["b"] = second
    with pytest.raises(GraphError, match="in a circle through add 'first', mul 'second'"):
        graph.validate()


def test_what_is_written_twice():
    graph = new_graph()
    a = graph.tensor((4, 4))
    first = graph.relu(a, name="first")
    graph.tanh(a, name="second")
    graph.nodes[1].outputs["OUT_0"] = first
    with pytest.raises(GraphError, match="is written by relu 'first' and by tanh 'second'"):
        graph.validate()


def test_a_tensor_of_another_graph():
    other = new_graph().tensor((4, 4), name="theirs")
    with pytest.raises(GraphError, match="theirs, a tensor of another graph"):
        new_graph().relu(other)


def test_a_name_or_a_uid_that_is_taken():
    graph = new_graph()
    a, b = graph.tensor((4, 4), name="a").set_uid(3), graph.tensor((4, 4), name="b")
    with pytest.raises(GraphError, match="b cannot have uid 3, which a has"):
        b.set_uid(3)
    graph.relu(a, name="once")
    with pytest.raises(GraphError, match="Node name once already used"):
        graph.relu(b, name="once")
    b.set_name("a")
    with pytest.raises(GraphError, match="two tensors are called 'a'"):
        graph.validate()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((4, 6), (5, 7)), "K = 6 but B with K = 5"),
        (((4,), (4, 7)), "matrices have two modes at least"),
        (((3, 4, 6), (2, 6, 7)), "one must be a multiple of the other"),
    ],
)
def test_products_whose_extents_contradict_each_other(shapes, words):
    graph = new_graph()
    graph.matmul(*map(graph.tensor, shapes)).set_output(True)
    with pytest.raises(GraphError, match=words):
        graph.validate()


def test_extents_that_cannot_be_inferred():
    graph = new_graph()
    graph.reduction(graph.tensor((4, 6)), cudnn.reduction_mode.ADD).set_output(True)
    with pytest.raises(GraphError, match="set_dim says which"):
        graph.validate()


def test_extents_that_are_not_what_the_inputs_give():
    graph = new_graph()
    graph.add(graph.tensor((4, 6)), graph.tensor((1, 6))).set_output(True).set_dim((5, 6))
    with pytest.raises(GraphError, match=r"has dim \[5, 6\]; its inputs give it \[4, 6\]"):
        graph.validate()


def test_inputs_without_type_and_types_that_nothing_stores():
    graph = cudnn.pygraph()
    graph.relu(graph.tensor((4, 4), name="plain")).set_output(True)
    with pytest.raises(GraphError, match="plain has no data type; set_data_type"):
        graph.validate()
    graph = new_graph()
    packed = graph.tensor((4, 4), data_type=cudnn.data_type.INT8x32, name="packed")
    graph.relu(packed).set_output(True)
    with pytest.raises(GraphError, match=r"packed: data_type.INT8x32 is not supported"):
        graph.validate()


def test_a_graph_of_nothing():
    with pytest.raises(GraphNotSupportedError, match="nothing to plan"):
        new_graph().build([A])


# Its life --------------------------------------------------------------------------------


def test_execution_before_it_is_built():
    graph = new_graph()
    graph.relu(graph.tensor((4, 4))).set_output(True)
    with pytest.raises(GraphStateError, match=r"is not planned; call create_execution_plans\(\)"):
        graph.execute({})
    graph.validate()
    graph.create_execution_plans([A])
    with pytest.raises(GraphStateError, match=r"no plan of the graph is built; call build_plans"):
        graph.execute({})
    with pytest.raises(GraphStateError, match="already called"):
        graph.create_execution_plans([A])


def test_changes_after_planning():
    graph, pack = product()
    y = list(pack)[-1]
    with pytest.raises(GraphStateError, match="y cannot be changed: the graph is planned"):
        y.set_data_type(FLOAT)
    with pytest.raises(GraphStateError, match="relu cannot be added"):
        graph.relu(y)


def test_plans_that_are_barred():
    graph = new_graph()
    graph.relu(graph.tensor((4, 4))).set_output(True)
    graph.validate()
    graph.create_execution_plans([A, cudnn.heur_mode.FALLBACK])
    graph.deselect_engines([""])  # part of every name
    with pytest.raises(GraphNotSupportedError, match="no plan is left") as caught:
        graph.check_support()
    assert len(caught.value.reasons) == graph.get_execution_plan_count()
    with pytest.raises(GraphError, match="is excluded: deselect_engines"):
        graph.build_plan_at_index(0)
    with pytest.raises(GraphError, match="there is no plan 99"):
        graph.get_plan_name_at_index(99)


# Executions ------------------------------------------------------------------------------


def test_tensors_that_are_missing_or_unknown():
    graph, pack = product()
    a, _b, _bias, _y = pack
    for missing in pack:
        rest = {tensor: data for tensor, data in pack.items() if tensor is not missing}
        with pytest.raises(VariantPackError, match=rf"not found in variant pack: \['{missing}'\]"):
            graph.execute(rest)
    with pytest.raises(VariantPackError, match="has 99, which is no tensor, uid or name"):
        graph.execute({**pack, 99: pack[a]})
    virtual = graph.nodes[0].outputs["C"]
    with pytest.raises(VariantPackError, match="a virtual tensor"):
        graph.execute({**pack, virtual: pack[a]})
    with pytest.raises(VariantPackError, match="a tensor of another graph"):
        graph.execute({**pack, new_graph().tensor((8, 24), name="a"): pack[a]})
    with pytest.raises(VariantPackError, match="expected a dict"):
        graph.execute(list(pack.values()))
    assert untouched(pack)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[:-1], r"is float16\[7, 24\] on cpu; the graph says float16\[8, 24\]"),
        (lambda t: t.float(), r"is float32\[8, 24\] on cpu"),
        (lambda t: t.to("meta"), r"is float16\[8, 24\] on meta"),
        (lambda t: t.t().contiguous().t(), r"has stride \[1, 8\]; the graph says \[24, 1\]"),
        (lambda t: "a tensor", "was given as a str"),
    ],
)
def test_tensors_that_are_not_as_described(change, words):
    graph, pack = product()
    a = next(iter(pack))
    with pytest.raises(VariantPackError, match=words):
        graph.execute({**pack, a: change(pack[a])})
    assert untouched(pack)


def test_arrays_that_torch_cannot_view():
    graph, pack = product()
    a, _b, _bias, y = pack
    turned = pack[a].numpy()[::-1]
    with pytest.raises(VariantPackError, match=r"a \(uid 0\) has strides of \(-48, 2\) bytes"):
        graph.execute({**pack, a: turned})
    fixed = pack[y].numpy().copy()
    fixed.flags.writeable = False
    with pytest.raises(VariantPackError, match=r"y .* is a read-only array, and the graph writes"):
        graph.execute({**pack, y: fixed})
    assert untouched(pack)
    given = pack[a].numpy()
    given.flags.writeable = False
    graph.execute({**pack, a: given})
    assert not untouched(pack)


@pytest.mark.parametrize("address", [0, -5, 3, 2**64, 1 << 70])
def test_numbers_that_are_no_addresses(address):
    graph, pack = product()
    a, *_, y = pack
    for tensor in (a, y):
        with pytest.raises(VariantPackError, match=f"was given as the address {address}; expected"):
            graph.execute({**pack, tensor: address})
    assert untouched(pack)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_graphs_are_not_copied(make):
    graph, pack = product()
    with cudnn.Graph(handle=on_cpu()) as other:
        other.relu(torch.randn(3, 4)).set_output(True)
    for one in (graph, next(iter(pack)), graph.nodes[0], other):
        with pytest.raises(GraphError, match=r"cannot be copied or pickled; serialize\(\) of"):
            make(one)


# What is written has memory of its own, whichever plan runs: some would be right without.


@pytest.fixture(params=[A, cudnn.heur_mode.FALLBACK], ids=["fused", "torch"])
def mode(request):
    return request.param


def gated(mode):
    """hidden + relu(a · b), with relu(a · b) as an output as well; and what it is executed on."""
    graph = new_graph()
    a, b, hidden = (graph.tensor((8, 8), name=name) for name in ("a", "b", "hidden"))
    act = graph.relu(graph.matmul(a, b), name="act").set_output(True).set_name("act")
    graph.add(hidden, act).set_output(True).set_name("out")
    graph.build([mode])
    names = ("a", "b", "hidden", "act", "out")
    return graph, {name: torch.randn(8, 8).half() for name in names}


@pytest.mark.parametrize(
    ("written", "other", "words"),
    [
        ("out", "hidden", r"out \(uid 5\), which .*hidden \(uid 2\), which it reads; give out mem"),
        ("act", "a", r"act .* shares memory with a .*, which it reads; give act memory of its own"),
        ("out", "act", r"act .* shares memory with out .*, which it writes, too"),
    ],
)
def test_memory_that_is_shared(mode, written, other, words):
    graph, pack = gated(mode)
    graph.execute(pack)  # later executions are looked at as well
    before = {name: tensor.clone() for name, tensor in pack.items()}
    shared = pack[other].view(8, 8)
    for _ in range(2):
        with pytest.raises(VariantPackError, match=words):
            graph.execute({**pack, written: shared})
    for name, tensor in pack.items():
        assert torch.equal(tensor, before[name])


def test_memory_that_is_shared_in_part_or_by_rows_side_by_side(mode):
    graph, pack = gated(mode)
    memory = torch.randn(3, 8, 8).half()
    with pytest.raises(VariantPackError, match="shares memory"):
        graph.execute({**pack, "b": memory[0], "out": memory.view(-1)[56:120].view(8, 8)})
    graph.execute({**pack, "b": memory[0], "act": memory[1], "out": memory[2]})
    expected = (pack["a"].float() @ memory[0].float()).relu() + pack["hidden"].float()
    assert (memory[2].float() - expected).abs().max() < 2e-2


def test_columns_of_one_matrix_share_no_memory(mode):
    graph = new_graph()
    x = graph.tensor((8, 16), (48, 1), name="x", data_type=FLOAT)
    for name in ("y", "z"):
        y = graph.relu(x, name=name).set_output(True).set_name(name)
        y.set_stride((48, 1)).set_data_type(FLOAT)
    graph.build([mode])
    matrix = torch.randn(8, 48)
    x, y, z = matrix.split(16, 1)
    graph.execute({"x": x, "y": y, "z": z})
    assert torch.equal(y, x.relu()) and torch.equal(z, x.relu())
    with pytest.raises(VariantPackError, match=r"z .* shares memory with y|y .* with z"):
        graph.execute({"x": x, "y": y, "z": matrix[:, 24:40]})


def test_tensors_without_elements_share_no_memory(mode):
    graph = new_graph()
    x, none = graph.tensor((4, 4), name="x"), graph.tensor((0, 4), name="none")
    graph.relu(x).set_output(True).set_name("y")
    graph.relu(none).set_output(True).set_name("nothing")
    graph.build([mode])
    given = torch.randn(4, 4).half()
    pack = {"x": given, "none": given[1:1], "y": torch.empty_like(given), "nothing": given[2:2]}
    graph.execute(pack)
    assert torch.equal(pack["y"], given.relu())


def test_a_workspace_that_is_too_small():
    graph = new_graph()
    x = graph.tensor((64, 64))
    hidden = graph.relu(graph.matmul(x, graph.tensor((64, 64))))
    y = graph.matmul(hidden, graph.tensor((64, 64))).set_output(True)
    graph.build([A])
    size = graph.get_workspace_size()
    assert size >= 64 * 64 * 2
    pack = {t: torch.randn(64, 64).half() for t in graph.inputs}
    pack[y] = torch.full((64, 64), 7.0).half()
    with pytest.raises(WorkspaceError, match=f"has {size - 1} bytes; {size} are needed"):
        graph.execute(pack, torch.empty(size - 1, dtype=torch.uint8))
    with pytest.raises(WorkspaceError, match="is a int"):
        graph.execute(pack, 12345)
    assert untouched(pack)
    graph.execute(pack, torch.empty(size, dtype=torch.uint8))
    assert not untouched(pack)


def test_a_handle_that_is_destroyed():
    graph, pack = product()
    handle = cudnn.create_handle()
    cudnn.destroy_handle(handle)
    with pytest.raises(GraphError, match="the handle is destroyed"):
        graph.execute(pack, handle=handle)
    assert untouched(pack)


def test_extents_that_are_overridden_and_do_not_fit():
    graph, pack = product()
    a, _b, _, y = pack
    with pytest.raises(GraphError, match="override_shapes 1"):
        graph.execute(pack, override_uids=[a.uid, y.uid], override_shapes=[(4, 24)])
    with pytest.raises(GraphError, match="99, which is no uid"):
        graph.execute(pack, override_uids=[99], override_shapes=[(4, 24)])
    with pytest.raises(GraphError, match="K = 25 but B with K = 24"):
        graph.execute(pack, override_uids=[a.uid], override_shapes=[(8, 25)])
    assert untouched(pack)


def test_extents_that_are_overridden():
    graph, pack = product()
    tensors, (a, b, bias, _) = list(pack), pack.values()
    rows = torch.randn(5, 24).half()
    y = torch.full((5, 16), float("nan")).half()
    graph.execute(
        {**dict(zip(tensors, (rows, b, bias, y), strict=True))},
        override_uids=[tensors[0].uid],
        override_shapes=[rows.shape],
    )
    expected = rows.double() @ b.double() + bias.double()
    assert (y.double() - expected).abs().max() < 2e-2
    graph.execute(pack)  # as it is described, too
    assert not untouched(pack)
    del a


def test_a_reduction_whose_input_is_overridden_alone():
    graph = new_graph()
    x = graph.tensor((4, 8), name="x", data_type=FLOAT)
    largest = graph.reduction(x, cudnn.reduction_mode.MAX).set_dim((4, 1)).set_stride((1, 1))
    y = graph.sub(x, largest).set_output(True).set_name("y").set_data_type(FLOAT)
    graph.build()
    given, found = torch.randn(6, 5), torch.empty(6, 5)
    graph.execute({x: given, y: found}, override_uids=[x.uid], override_shapes=[(6, 5)])
    torch.testing.assert_close(found, given - given.amax(1, keepdim=True))


# Serialised data -------------------------------------------------------------------------


def test_foreign_and_damaged_data():
    graph, _ = product()
    data = graph.serialize(as_bytes=True)
    for foreign in (b"", b"\x80\x04\x95", b"{}", [1, 2, 3], "graph", data[:-9]):
        with pytest.raises(SerializedGraphError):
            cudnn.pygraph(handle=on_cpu()).deserialize(foreign)
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    empty = cudnn.pygraph(handle=on_cpu())
    with pytest.raises(SerializedGraphError):
        empty.deserialize(bytes(damaged))
    assert not empty.nodes and not empty.tensors
    empty.deserialize(data)
    with pytest.raises(GraphStateError, match="needs a graph that is empty"):
        empty.deserialize(data)


def test_what_is_deserialised_takes_uids():
    graph, pack = product()
    again = cudnn.pygraph(handle=on_cpu()).deserialize(graph.serialize())
    with pytest.raises(VariantPackError, match="a tensor of another graph"):
        again.execute(pack)
    again.execute({tensor.uid: data for tensor, data in pack.items()})
    assert not untouched(pack)


@pytest.mark.parametrize("version", [(9, 0), "x", object()], ids=["pair", "text", "object"])
def test_an_architecture_is_one(version):
    with pytest.raises(ArgumentError, match="names no GPU architecture"):
        cudnn.pygraph(sm_version=version)


HANDLES = {
    "of a graph": lambda: cudnn.pygraph(handle="cuda"),
    "of a stream": lambda: cudnn.set_stream("cuda", None),
    "of a call": lambda: called(handle="cuda"),
}


def called(**options):
    x = torch.randn(4, 4)
    with cudnn.Graph(io_data_type=FLOAT, compute_data_type=FLOAT) as graph:
        graph.relu(x, name="y").set_output(True)
    return graph(x, **options)


@pytest.mark.parametrize("name", HANDLES)
def test_a_handle_is_one(name):
    with pytest.raises(GraphError, match="expected a handle of create_handle"):
        HANDLES[name]()


def test_a_handle_is_of_a_device():
    with pytest.raises(GraphError, match="device is 'gpu'; expected a device of torch"):
        cudnn.create_handle("gpu")


SEVERAL = {
    "modes": lambda graph: graph.create_execution_plans(None),
    "notes": lambda graph: graph.deselect_behavior_notes(3),
    "inputs": lambda graph: cudnn.Graph(inputs=3),
    "heur_modes": lambda graph: cudnn.jit(heur_modes=None),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_things_are_asked_for_as_several(name):
    graph = new_graph()
    graph.relu(graph.tensor((4, 4))).set_output(True)
    with pytest.raises(GraphError, match=f"has {name} = "):
        SEVERAL[name](graph)
