"""Executions: what they keep of the tensors that they were given, and what they cost."""

import gc
import itertools
import sys
import weakref

import numpy
import pytest
import torch
from torch.autograd import forward_ad

import kernel_api.graph as cudnn
from kernel_api.errors import VariantPackError
from kernel_api.graph import _execution, _likeness

FLOAT = cudnn.data_type.FLOAT
A = cudnn.heur_mode.A
M, N, K = 8, 16, 24


def new_graph():
    graph = cudnn.pygraph("", FLOAT, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"))
    a, b = graph.tensor((M, K), name="a"), graph.tensor((K, N), name="b")
    return graph, a, b


@pytest.fixture
def reducing():
    """A · B and its largest magnitude, of which the kernel takes a view without modes."""
    graph, a, b = new_graph()
    y = graph.matmul(a, b).set_output(True).set_name("y")
    largest = graph.reduction(y, cudnn.reduction_mode.AMAX).set_dim((1, 1)).set_name("largest")
    largest.set_output(True).set_data_type(FLOAT)
    graph.build([A])
    assert [step.kind for step in graph.selected.steps] == ["kernel"]
    return graph


@pytest.fixture
def scaled():
    """A · B times a number that the host gives."""
    graph, a, b = new_graph()
    factor = graph.tensor((1, 1), name="factor").set_is_pass_by_value(True)
    graph.mul(graph.matmul(a, b), factor).set_output(True).set_name("y")
    graph.build([A])
    return graph


def operands(seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(s, generator=generator) for s in ((M, K), (K, N)))
    return {"a": a, "b": b, "y": torch.full((M, N), torch.nan)}


def owned():
    """A tensor (1, 1), and what is gone when its memory is."""
    memory = numpy.full((1, 1), numpy.nan, dtype=numpy.float32)
    return torch.from_numpy(memory), weakref.ref(memory)


def check(pack, largest):
    expected = pack["a"] @ pack["b"]
    torch.testing.assert_close(pack["y"], expected)
    torch.testing.assert_close(largest.view(()), expected.abs().max())


# Views that kernels take ------------------------------------------------------------------


def test_views_follow_their_tensors(reducing):
    """To another tensor, to another place of the same one, and back."""
    one, other = torch.zeros(1, 1), torch.zeros(1, 1)
    for seed, largest in enumerate((one, one, other, one)):
        pack = operands(seed)
        reducing.execute({**pack, "largest": largest})
        check(pack, largest)
    places = torch.zeros(4)
    for seed, place in enumerate((0, 3, 0)):
        pack = operands(seed)
        one.set_(places[place : place + 1].view(1, 1))
        reducing.execute({**pack, "largest": one})
        check(pack, places[place])
        pack = operands(seed + 10)
        one.data = torch.zeros(1, 1)
        reducing.execute({**pack, "largest": one})
        check(pack, one)


def test_views_follow_memory_that_is_given_back_and_taken_again(reducing):
    largest = torch.zeros(1, 1)
    for seed in range(3):
        pack = operands(seed)
        reducing.execute({**pack, "largest": largest})
        check(pack, largest)
        largest.untyped_storage().resize_(0)
        largest.untyped_storage().resize_(4)


def test_views_tell_the_tensor_that_it_is_written(reducing):
    """Each of two tensors that lie in the same memory: gradients ask that of it."""
    memory = numpy.zeros((1, 1), dtype=numpy.float32)
    for seed, largest in enumerate([torch.from_numpy(memory) for _ in range(2)]):
        pack, before = operands(seed), largest._version
        reducing.execute({**pack, "largest": largest})
        check(pack, largest)
        assert largest._version > before


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_no_memory_is_kept(reducing, needs_gradient):
    """Also where gradients are recorded: then a view keeps the tensor that it is of."""
    gc.disable()
    try:
        for seed in range(2):
            pack, (largest, memory) = operands(seed), owned()
            largest.requires_grad_(needs_gradient)
            reducing.execute({**pack, "largest": largest})
            reducing.execute({**pack, "largest": largest})
            check(pack, largest.detach())
            pack["a"].requires_grad_(needs_gradient)
            factor = weakref.ref(pack["a"])
            del largest, pack
            assert memory() is None
            assert factor() is None
    finally:
        gc.enable()


# Variant packs ----------------------------------------------------------------------------


def test_keys_of_every_kind_in_every_order(reducing):
    tensors = {t.name: t for t in reducing.tensors}
    kinds = (lambda name: name, lambda name: tensors[name], lambda name: tensors[name].uid)
    for seed, names in enumerate(itertools.permutations(("a", "b", "y", "largest"))):
        pack, largest = operands(seed), torch.zeros(1, 1)
        key = kinds[seed % len(kinds)]
        values = {**pack, "largest": largest}
        reducing.execute({key(name): values[name] for name in names})
        check(pack, largest)


def test_sets_of_keys_that_are_remembered_are_bounded(reducing, monkeypatch):
    monkeypatch.setattr(_execution, "_MOST_READERS", 3)
    for names in itertools.permutations(("a", "b", "y", "largest")):
        values = {**operands(), "largest": torch.zeros(1, 1)}
        reducing.execute({name: values[name] for name in names})
        assert len(reducing._execution._readers) <= 3


@pytest.fixture(params=[True, False], ids=["at once", "one by one"])
def looked_at(request, monkeypatch):
    """Torch's look at all tensors, and none."""
    if not request.param:
        monkeypatch.setattr(_likeness, "_guards", lambda: None)
    return request.param


def test_every_execution_looks_at_its_tensors(reducing, looked_at):
    """Those of an execution before may have changed in place."""
    pack = {**operands(), "largest": torch.zeros(1, 1)}
    reducing.execute(pack)
    assert (reducing._execution._alike is not None) == looked_at
    pack["y"].fill_(7.0)
    pack["a"].t_()
    with pytest.raises(VariantPackError, match=r"a .* is float32\[24, 8\] on cpu"):
        reducing.execute(pack)
    pack["a"].t_()
    pack["b"].data = torch.randn(N, K).t()
    with pytest.raises(VariantPackError, match=r"b .* has stride \[1, 24\]"):
        reducing.execute(pack)
    pack["b"] = None
    with pytest.raises(VariantPackError, match="b was given as a NoneType"):
        reducing.execute(pack)
    del pack["b"]
    with pytest.raises(VariantPackError, match=r"not found in variant pack: \['b'\]"):
        reducing.execute(pack)
    assert (pack["y"] == 7.0).all()


def test_other_tensors_than_those_compared_with(reducing, looked_at, monkeypatch):
    """Torch's look tells more apart than counts here."""
    monkeypatch.setattr(_execution, "_MOST_LIKENESSES", 3)
    for turn in range(8):
        pack, largest = operands(turn), torch.zeros(1, 1)
        if turn % 2:
            pack["a"] = torch.nn.Parameter(pack["a"])
        with torch.no_grad():
            reducing.execute({**pack, "largest": largest})
            check(pack, largest)
    assert reducing._execution._alike is None  # they were not worth it
    with pytest.raises(VariantPackError, match=r"y .* is float64"):
        reducing.execute({**pack, "largest": largest, "y": pack["y"].double()})


def test_a_tensor_in_two_places(looked_at):
    graph = cudnn.pygraph("", FLOAT, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"))
    a, b = (graph.tensor((M, M), name=name) for name in "ab")
    graph.matmul(a, b).set_output(True).set_name("y")
    graph.build([A])
    x, y = torch.randn(M, M), torch.empty(M, M)
    for _ in range(3):
        graph.execute({"a": x, "b": x, "y": y.fill_(torch.nan)})
        torch.testing.assert_close(y, x @ x)


class Guards:
    """Of torch's making, but one that tells nothing apart, or has another form."""

    def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
        pass

    def check(self, *tensors):
        return True


def test_torchs_look_is_tried_before_it_is_relied_on(monkeypatch, caplog):
    from torch._C._dynamo import guards

    assert _likeness._guards.__wrapped__() is guards.TensorGuards
    reasons = {Guards: "alike that are not", len: "TypeError", None: "TypeError"}
    for other, reason in reasons.items():
        monkeypatch.setattr(guards, "TensorGuards", other)
        caplog.clear()
        with caplog.at_level("INFO", logger="kernel_api"):
            assert _likeness._guards.__wrapped__() is None
        assert reason in caplog.text
    monkeypatch.delattr(guards, "TensorGuards")
    assert _likeness._guards.__wrapped__() is None


def test_numbers_and_addresses_that_are_no_multiples_of_16(scaled):
    shifted = torch.randn(M * K + 1)[1:].view(M, K)
    for seed, number in enumerate((2.0, -1, torch.tensor(0.5), numpy.float32(4.0))):
        for aligned in (True, False):
            pack = operands(seed)
            if not aligned:
                pack["a"] = shifted
            scaled.execute({**pack, "factor": number})
            torch.testing.assert_close(pack["y"], float(number) * (pack["a"] @ pack["b"]))
    # Of each address: for numbers below 0, from 0 to 1 and above.
    assert len(scaled._execution._programs) == 2 * 3
    with pytest.raises(VariantPackError, match="factor is a number of the host's; a str"):
        scaled.execute({**operands(), "factor": "two"})
    for several in (torch.ones(2), numpy.ones((3, 0))):
        with pytest.raises(VariantPackError, match=r"number of the host's; a tensor of \[[23]"):
            scaled.execute({**operands(), "factor": several})


@pytest.mark.parametrize("number", [True, False, 1, 0, 0.5, torch.tensor(True), numpy.bool_(0)])
@pytest.mark.parametrize("mode", [A, cudnn.heur_mode.FALLBACK])
def test_a_flag_of_the_host_selects_behind_a_product(number, mode):
    graph, a, b = new_graph()
    flag = graph.tensor((1, 1), name="flag").set_is_pass_by_value(True)
    flag.set_data_type(cudnn.data_type.BOOLEAN)
    product = graph.matmul(a, b)
    graph.binary_select(product, graph.neg(product), flag).set_output(True).set_name("y")
    graph.build([mode])
    pack = operands()
    graph.execute({**pack, "flag": number})
    product = pack["a"] @ pack["b"]
    torch.testing.assert_close(pack["y"], product if number else -product)


@pytest.mark.parametrize("mode", [A, cudnn.heur_mode.FALLBACK])
def test_numbers_that_their_type_does_not_hold(mode):
    graph, a, b = new_graph()
    number = graph.tensor((1, 1), name="number").set_is_pass_by_value(True)
    number.set_data_type(cudnn.data_type.INT32)
    graph.mul(graph.matmul(a, b), number).set_output(True).set_name("y")
    graph.build([mode])
    pack = operands()
    for value in (3, 3.0, torch.tensor(3), -(2**20), True):
        graph.execute({**pack, "number": value})
        torch.testing.assert_close(pack["y"] / float(value), pack["a"] @ pack["b"])
    for value in (2.5, float("nan"), float("inf"), 2**31, -(2**40)):
        with pytest.raises(VariantPackError, match=r"was given and torch\.int32 holds whole"):
            graph.execute({**pack, "number": value})


@pytest.mark.parametrize("name", ["a", "b", "y"])
@pytest.mark.parametrize("first", [True, False])
def test_negated_views_are_refused_at_every_execution(reducing, looked_at, name, first):
    """Kernels read memory, which holds the opposite."""
    plain = {**operands(), "largest": torch.zeros(1, 1)}
    negated = {**plain, name: torch._neg_view(plain[name])}
    for turn in range(4):
        if (turn + first) % 2:
            with pytest.raises(VariantPackError, match=rf"{name} .* has torch's negative bit set"):
                reducing.execute(negated)
        else:
            reducing.execute(plain)
            check(plain, plain["largest"])


def test_what_a_negated_view_is_to_be_replaced_by(reducing):
    plain = {**operands(), "largest": torch.zeros(1, 1)}
    for name, own in (("a", "its resolve_neg"), ("y", "a tensor of its own, and copy it back")):
        with pytest.raises(VariantPackError, match=rf"{name} .*; pass {own}"):
            reducing.execute({**plain, name: torch._neg_view(plain[name])})


@pytest.mark.parametrize("form", ["vmap", "grad", "torch.sparse_csr", "torch.sparse_coo"])
def test_tensors_without_strides_or_memory_are_refused_by_name(reducing, looked_at, form):
    plain = {**operands(), "largest": torch.zeros(1, 1)}

    def execute(a):
        reducing.execute({**plain, "a": a})
        return a.sum()

    a = plain["a"]
    execute(a)
    expected = r"no memory of its own.*execute it outside"
    if form.startswith("torch"):
        expected = f"is a {form} tensor; expected a strided one"
        call = lambda: execute(a.to_sparse(layout=getattr(torch, form.split(".")[1])))  # noqa: E731
    elif form == "vmap":
        call = lambda: torch.func.vmap(execute)(a.expand(2, M, K))  # noqa: E731
    else:
        call = lambda: torch.func.grad(execute)(a)  # noqa: E731
    with pytest.raises(VariantPackError, match=rf"^a \(uid 0\) .*{expected}"):
        call()


@pytest.mark.parametrize("mode", [A, cudnn.heur_mode.FALLBACK])
def test_neither_gradients_nor_tangents_are_followed(mode):
    """Whatever a plan consists of."""
    graph, a, b = new_graph()
    out = graph.add(graph.sin(graph.matmul(a, b)), graph.matmul(a, b))
    out.set_output(True).set_name("y")
    graph.build([mode])
    assert "torch" in {step.kind for step in graph.selected.steps}
    for _ in range(2):
        pack = operands()
        expected = torch.sin(pack["a"] @ pack["b"]) + pack["a"] @ pack["b"]
        pack["b"] = torch.nn.Parameter(pack["b"])
        with forward_ad.dual_level():
            pack["a"] = forward_ad.make_dual(pack["a"], torch.ones(M, K))
            graph.execute(pack)
            assert forward_ad.unpack_dual(pack["y"]).tangent is None
        assert not pack["y"].requires_grad
        torch.testing.assert_close(pack["y"], expected)


# What it costs ----------------------------------------------------------------------------


def test_an_execution_enters_few_functions(reducing, monkeypatch):
    """Counted, because a count is the same on every machine; benchmarks/graph.py has the times."""
    launched = []

    def launch(tensors, values):
        launched.append((tensors, values))

    monkeypatch.setattr(
        _execution.Execution, "_kernel_for", lambda self, step, args: Stub(step.kernel, launch)
    )
    pack = {**operands(), "largest": torch.zeros(1, 1)}
    reducing.execute(pack), reducing.execute(pack)
    entered = python_calls(lambda: reducing.execute(pack))
    torchs = ("is_compiling", "is_scripting")
    entered = [name for name in entered if name not in torchs]
    assert entered == ["execute", "execute", "_taken", "check", "_launch", "run_with_values",
                       "<lambda>", "read", "launch"]  # fmt: skip
    assert len(launched) == 3
    tensors, values = launched[-1]
    assert [t.data_ptr() for t in tensors] == [pack[name].data_ptr() for name in ("a", "b", "y")]
    assert [t.shape for t in values] == [()]


class Stub:
    """A kernel whose launcher is another one."""

    def __init__(self, kernel, launch):
        self._kernel, self._launch = kernel, launch
        self._launch_operands = kernel._launch_operands

    def _artifact_to_run(self, args):
        return None

    def _launcher_in_order(self, args, artifact):
        return self._launch


def python_calls(call):
    """Names of the functions of Python that a call enters, itself left out."""
    entered = []

    def note(frame, event, argument):
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]


def test_a_workspace_may_go_when_its_owner_lets_it():
    graph, a, b = new_graph()
    hidden = graph.relu(graph.matmul(a, b))
    c = graph.tensor((N, K), name="c")
    graph.matmul(hidden, c).set_output(True).set_name("y")
    graph.build([A])
    size = graph.get_workspace_size()
    assert size
    memory = numpy.zeros(size + 512, dtype=numpy.uint8)
    kept = weakref.ref(memory)
    first = -memory.ctypes.data % 256
    workspace = torch.from_numpy(memory)[first : first + size]
    del memory
    tensors = {**operands(), "c": torch.randn(N, K), "y": torch.empty(M, K)}
    for _ in range(2):
        graph.execute(tensors, workspace)
    expected = (tensors["a"] @ tensors["b"]).relu() @ tensors["c"]
    torch.testing.assert_close(tensors["y"], expected)
    del workspace
    gc.collect()
    assert kept() is None
    graph.execute(tensors, torch.empty(size, dtype=torch.uint8))


def test_executions_for_other_extents_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(_execution, "_MOST_OVERRIDDEN", 4)
    graph, a, b = new_graph()
    y = graph.matmul(a, b).set_output(True).set_name("y")
    for uid, tensor in enumerate((a, b, y), 1):
        tensor.set_uid(uid)
    graph.build([A])
    for rows in (*range(1, 9), 2):
        left, right = torch.randn(rows, K), torch.randn(K, N)
        y = torch.empty(rows, N)
        given = {"override_uids": [1, 3]}
        given |= {"override_shapes": [(rows, K), (rows, N)]}
        given |= {"override_strides": [(K, 1), (N, 1)]}
        graph.execute({"a": left, "b": right, "y": y}, **given)
        torch.testing.assert_close(y, left @ right)
    found = [one for one in gc.get_objects() if isinstance(one, _execution.Execution)]
    assert max(len(one._overridden) for one in found) <= 4
