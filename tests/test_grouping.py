"""Rows that are sorted by group: arguments, what is refused, queries, and the one-call form."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grouping import arguments, check, computed

import kernel_api as ka
from kernel_api._description import described, rebuilt
from kernel_api.cli._main import main
from kernel_api.errors import ArgumentError
from kernel_api.providers.cutedsl.kernel import CuteDslKernel

FAMILY = "sm80.group_rows"


def empty(*shape, element=torch.int32):
    return torch.empty(shape, dtype=element)


def given_to(M=5, k=2, E=3, **changed):
    operands = {
        "index": torch.zeros(M, k, dtype=torch.int64),
        "offsets": empty(E),
        "row_index": empty(M, k),
        "place": empty(M * k),
        "weight": torch.zeros(M, k),
        "grouped": torch.zeros(M * k),
    }
    return ka.GroupRowsArguments(**{**operands, **changed})


# Arguments -------------------------------------------------------------------------------


def test_all_operands_are_named():
    args = arguments(5, 2, 3)
    names = ["index", "offsets", "row_index", "place", "weight", "grouped"]
    assert list(args.named_operands) == names
    assert list(args.outputs) == ["offsets", "row_index", "place", "grouped"]
    assert list(arguments(5, 2, 3, weight=None).outputs) == ["offsets", "row_index", "place"]
    assert args.sizes == {"M": 5, "k": 2, "L": 3}
    assert repr(args) == "GroupRowsArguments(5x2 of 3 groups, i64, weight f32, on cpu)"


def test_a_description_makes_the_same_problem():
    args = arguments(5, 2, 3, weight=torch.float16)
    made = rebuilt(described(args))
    assert (made.signature, made.sizes) == (args.signature, args.sizes)
    assert made.weight.stride == args.weight.stride


def test_sizes_are_no_part_of_what_is_compiled_but_types_are():
    args = arguments(5, 2, 3)
    assert args.signature == arguments(7, 4, 9).signature
    assert args.signature != arguments(5, 2, 3, element=torch.int32).signature
    assert args.signature != arguments(5, 2, 3, weight=None).signature
    assert args.key != arguments(5, 2, 4).key


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"index": torch.zeros(5, 2)}, "index is float32; expected integers"),
        ({"index": empty(5)}, r"shape \(5,\); expected \(M, k\).*index.unsqueeze\(1\)"),
        ({"index": empty()}, r"index has shape \(\); expected \(M, k\)$"),
        ({"offsets": empty(0)}, r"offsets has shape \(0,\); expected \(E,\)"),
        ({"offsets": empty(3, 1)}, r"offsets has shape \(3, 1\); expected \(E,\)"),
        ({"offsets": empty(3, element=torch.int64)}, "offsets is int64; expected int32"),
        ({"row_index": empty(5, 3)}, r"row_index has shape \(5, 3\); expected \(M, k\) = \(5, 2\)"),
        ({"place": empty(9)}, r"place has shape \(9,\); expected \(M · k,\) = \(10,\)"),
        ({"place": empty(10, element=torch.int64)}, "place is int64; expected int32"),
        ({"weight": None}, "grouped is given and weight is None; expected both, or neither"),
        ({"grouped": None}, "weight is given and grouped is None; expected both, or neither"),
        ({"weight": empty(5, 2)}, "weight is int32; expected a floating type"),
        ({"weight": torch.zeros(2, 5)}, r"weight has shape \(2, 5\); expected \(M, k\) = \(5, 2\)"),
        ({"grouped": torch.zeros(10).half()}, "grouped is float16; expected float32, the type of"),
        ({"grouped": torch.zeros(1).expand(10)}, "several of its elements are one in memory"),
        ({"offsets": empty(3).to("meta")}, "offsets is on meta but index is on cpu"),
    ],
)
def test_what_contradicts_is_refused_by_name(changed, words):
    given_to()
    with pytest.raises(ArgumentError, match=words):
        given_to(**changed)


def test_outputs_may_not_share_memory_with_what_is_read():
    memory = empty(5, 2)
    for _ in range(2):  # sizes that were checked before, too
        with pytest.raises(ArgumentError, match="row_index shares memory with index"):
            given_to(index=memory, row_index=memory)
        given_to(index=empty(5, 2))


# Queries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", [80, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("E", "room"), [(1, 255), (255, 255), (256, 511), (800, 1023), (2047, 2047)]
)
def test_every_gpu_from_ampere_on_is_served(cc, E, room):
    args = arguments(64, 2, E, device="meta")
    first = ka.get_kernels(args, cc=cc)[0]
    assert (first.family, first.metadata.design.most_groups) == (FAMILY, room)


@pytest.mark.parametrize(
    ("M", "E", "how", "words"),
    [
        (4096, 8, {"k": 9}, "one CTA sorts 32768 pairs at most.*there are 36864"),
        (4, 2048, {}, "would match with 2047 or fewer"),
        (4, 8, {"element": torch.uint8}, "index is uint8; expected int32 or int64"),
        (4, 8, {"weight": torch.float64}, "it is float64"),
    ],
)
def test_what_our_kernel_lacks_is_told_and_torch_has_it(M, E, how, words):
    args = arguments(M, E=E, device="meta", **{"k": 2, **how})
    (told,) = [one for one in ka.explain(args, cc=90).rejected if one.family == FAMILY]
    assert re.search(words, f"{told.rule}: {told.reason}: {told.nearest}")
    assert ka.get_kernels(args, cc=90)[0].family == "torch.group_rows"


@settings(max_examples=60, deadline=None)
@given(
    M=st.integers(0, 70),
    k=st.integers(0, 9),
    E=st.integers(1, 300),
    element=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    weight=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_problem_has_kernels_that_sort_it(M, k, E, element, weight):
    E = min(E, torch.iinfo(element).max)
    args = arguments(M, k, E, element=element, weight=weight)
    for kernel in ka.get_kernels(args):
        assert kernel.supports(args)
        kernel.run(args)
        check(args)
        assert ka.verify(kernel, args)


# The one-call form -----------------------------------------------------------------------


def test_the_one_call_form_is_the_kernel():
    args = arguments(9, 3, 5)
    found = ka.ops.group_rows(args.index.tensor, 5, weight=args.weight.tensor)
    for one, expected in zip(found, computed(args).values(), strict=True):
        assert torch.equal(one.double(), expected.double())
    assert ka.ops.group_rows(args.index.tensor, 5).grouped is None


def test_the_form_and_the_arguments_of_products_fit_together():
    index, rows = torch.tensor([[1, 0], [-1, 1], [0, 3]]), torch.randn(3, 4)
    found = ka.ops.group_rows(index, 3, weight=torch.ones(3, 2))
    assert found.offsets.tolist() == [2, 4, 4]
    moved = ka.ops.scatter_rows(rows, found.row_index)
    assert torch.equal(moved[:4], rows[[0, 2, 0, 1]])
    assert torch.equal(
        ka.ops.gather_rows(moved, found.row_index), rows * torch.tensor([[2], [1], [1]])
    )


def test_prepared_launches_take_operands_by_their_places():
    args = arguments(9, 3, 5)
    for kernel in ka.get_kernels(args):
        for operand in args.outputs.values():
            operand.tensor.fill_(-7)
        kernel.prepare(args)(*(operand.tensor for operand in args.named_operands.values()))
        check(args)


def normed():
    x, weight = torch.empty(9, 64, device="meta"), torch.empty(64, device="meta")
    return ka.RmsNormArguments(x, x.clone(), weight, rstd=torch.empty(9, device="meta"))


def moved():
    x, index = torch.empty(9, 64, device="meta"), torch.empty(9, 2, device="meta").int()
    return ka.GatherRowsArguments(x, x.clone(), index, torch.empty(9, 2, device="meta"))


@pytest.mark.parametrize("make", [lambda: arguments(9, 3, 5, device="meta"), normed, moved])
@pytest.mark.parametrize("by_name", [False, True])
def test_our_launches_take_what_is_beside_the_operands_by_place_and_by_name(
    monkeypatch, make, by_name
):
    given = []

    def launcher(self, args, artifact):
        return lambda *tensors, **others: given.append((tensors, others))

    monkeypatch.setattr(CuteDslKernel, "_launcher", launcher)
    args = make()
    kernel = ka.get_kernels(args, cc=90, providers=["cutedsl"])[0]
    launch = kernel._launcher(args, None)
    tensors = tuple(operand.tensor for operand in args.operands)
    further = {name: operand.tensor for name, operand in args.further.items()}
    assert further
    launch(*tensors, **further) if by_name else launch(*tensors, *further.values())
    ((matrices, others),) = given
    assert all(one is other for one, other in zip(matrices, tensors, strict=True))
    assert {name for name in further if others[name] is further[name]} == {*further}


def test_fusions_have_it_too():
    args = arguments(9, 3, 5)
    operands = {name: operand.tensor for name, operand in args.named_operands.items()}
    made = ka.fusions.group_rows(operands.pop("index"), **operands)
    assert (type(made), made.key) == (ka.GroupRowsArguments, args.key)


@pytest.mark.parametrize("groups", [0, -1, 2.5, "3"])
def test_the_number_of_groups_is_checked(groups):
    with pytest.raises(ArgumentError, match=r"groups is .*; expected a number of groups, 1 at le"):
        ka.ops.group_rows(empty(3, 2), groups)


def test_graphs_of_torch_hold_the_form():
    def form(index, weight):
        found = ka.ops.group_rows(index + 1, 5, weight=2 * weight)
        return found.offsets, found.row_index, found.place, found.grouped

    args = arguments(9, 3, 4)
    operands = args.index.tensor.clamp(-2, 7), args.weight.tensor
    expected = form(*operands)
    compiled = torch.compile(form, backend="aot_eager", fullgraph=True, dynamic=True)
    exported = torch.export.export(_Module(form), operands).module()
    for call in (compiled, exported):
        assert all(map(torch.equal, call(*operands), expected))
    fewer = tuple(one[:4] for one in operands)
    assert all(map(torch.equal, compiled(*fewer), form(*fewer)))


class _Module(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, *operands):
        return self.form(*operands)


def test_the_command_line_has_it(capsys):
    sizes = ["--dtype", "float32", "--device", "cpu", "--shapes", "odd"]
    assert main(["verify", "--operation", "group_rows", *sizes]) == 0
    assert "passed" in capsys.readouterr().out
    meta = ["--m", "64", "--n", "128", "--k", "8", "--device", "meta", "--cc", "90"]
    assert main(["explain", "--operation", "group_rows", *meta]) == 0
    assert "64x8 of 128 groups" in capsys.readouterr().out
