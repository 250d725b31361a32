"""Offsets of groups: made of what else says them, and checked where that is asked."""

from types import SimpleNamespace

import pytest
import torch
from support.grouped import OFFSETS, ends, index, of_rows, of_sums, zeros

import kernel_api as ka
from kernel_api import _launches
from kernel_api.errors import ArgumentError
from kernel_api.offsets import check_groups


@pytest.mark.parametrize("element", [torch.int32, torch.int64, torch.uint8])
def test_offsets_are_made_of_counts_starts_and_boundaries(element):
    def integers(*values):
        return torch.tensor(values, dtype=element)

    expected = ends(4, 4, 18)
    for made in (
        ka.offsets_from_counts(integers(4, 0, 14)),
        ka.offsets_from_starts(integers(0, 4, 4), 18),
        ka.offsets_from_starts(integers(0, 4, 4), torch.tensor(18)),
        ka.offsets_from_boundaries(integers(0, 4, 4, 18)),
    ):
        assert made.dtype is torch.int32
        assert made.is_contiguous()
        assert torch.equal(made, expected)


def test_offsets_are_made_inside_of_a_compiled_graph():
    def made(integers):
        return (
            ka.offsets_from_counts(integers),
            ka.offsets_from_starts(integers, 18),
            ka.offsets_from_boundaries(integers),
        )

    given = torch.tensor([0, 4, 4])
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(given), made(given), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("strict", [True, False])
def test_offsets_are_made_inside_of_an_exported_graph_of_any_number_of_tokens(strict):
    class Made(torch.nn.Module):
        def forward(self, starts, tokens):
            return ka.offsets_from_starts(starts, tokens.shape[0])

    starts = torch.tensor([0, 4, 4])
    rows = {"starts": None, "tokens": {0: torch.export.Dim("rows")}}
    program = torch.export.export(
        Made(), (starts, torch.zeros(18, 2)), dynamic_shapes=rows, strict=strict
    )
    assert torch.equal(program.module()(starts, torch.zeros(5, 2)), ends(4, 4, 5))


def test_starts_are_checked_where_that_is_asked(monkeypatch):
    starts = torch.tensor([3, 4, 4])
    assert torch.equal(ka.offsets_from_starts(starts, 18), ends(4, 4, 18))
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    assert torch.equal(ka.offsets_from_starts(starts - 3, 18), ends(1, 1, 18))
    with pytest.raises(ArgumentError, match="the first group begins at 3; expected 0"):
        ka.offsets_from_starts(starts, 18)
    with pytest.raises(ArgumentError, match="the first group begins at 3; expected 0"):
        ka.offsets_from_boundaries(starts)
    assert torch.equal(ka.offsets_from_boundaries(starts - 3), ends(1, 1))


@pytest.mark.parametrize("T", ["18", None, 18.5, -1, torch.tensor(1.5), ends(4, 18)], ids=str)
@pytest.mark.parametrize("function", [ka.offsets_from_starts, ka.check_offsets])
def test_a_number_of_tokens_that_is_none_is_refused(function, T):
    with pytest.raises(ArgumentError, match=r"T is .*expected (a number of tokens|one integer)"):
        function(ends(0, 4, 4), T)


def test_more_tokens_than_offsets_can_count_are_refused():
    with pytest.raises(ArgumentError, match="expected a number of tokens below 2147483648"):
        ka.offsets_from_starts(ends(0, 4, 4), 2**31)
    ka.check_offsets(ends(0, 4, 4), 2**31)


def test_offsets_are_made_of_integers_in_one_mode():
    for given in (zeros(3), torch.zeros(3, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int8)):
        with pytest.raises(ArgumentError, match=r"counts is .*; expected integers in one mode"):
            ka.offsets_from_counts(given)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((4, 3, 5), "offsets[1] is 3 and offsets[0] is 4; they may not decrease"),
        ((-1, 2, 3), "offsets[0] is -1 and the first group begins at 0"),
        ((1, 21, 5), "offsets[1] is 21; there are T = 20 tokens"),
    ],
)
def test_offsets_are_checked_before_a_run_where_that_is_asked(monkeypatch, values, text):
    with pytest.raises(ArgumentError) as caught:
        ka.check_offsets(ends(*values), 20)
    assert text in str(caught.value)
    ka.check_offsets(OFFSETS, 20)

    args = of_rows()
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    kernel.run(args)
    with pytest.raises(ArgumentError):
        kernel.run(args.rebuilt(*args.tensors[:3], ends(*values)))
    with pytest.raises(ArgumentError):
        ka.ops.grouped_gemm(*args.tensors[:2], ends(*values))


@pytest.fixture
def launched(monkeypatch):
    """What reaches the reference through prepared launches, which check nothing themselves."""
    found = []

    def launcher(kernel, args, artifact):
        return lambda *tensors, stream=None, **others: found.append((tensors, others))

    monkeypatch.setattr(ka.Kernel, "_launcher", launcher)
    return found


def of_picked_rows():
    """Rows 0 to 9 of A, written to rows 29 to 10 of out."""
    return ka.GroupedGemmArguments(
        zeros(10, 8), zeros(3, 8, 6), zeros(30, 6), OFFSETS,
        row_index=index(*range(10), *range(10)), out_row_index=index(*range(29, 9, -1)),
    )  # fmt: skip


def changed(values, *changes):
    found = values.clone()
    for place, value in changes:
        found[place] = value
    return found


def prepared(args):
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    return kernel.prepare(args)


@pytest.mark.parametrize("make", [of_rows, of_sums, of_picked_rows])
def test_prepared_launches_check_offsets_where_that_is_asked(make, launched, monkeypatch):
    args = make()
    A, B, out, _ = args.tensors
    prepared(args)(A, B, out, ends(4, 3, 5))
    assert len(launched) == 1  # not asked
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    launch = prepared(args)
    monkeypatch.delenv("KERNEL_API_CHECK_OFFSETS")  # it counts while they are prepared
    with pytest.raises(ArgumentError, match=r"offsets\[1\] is 3 and offsets\[0\] is 4"):
        launch(A, B, out, ends(4, 3, 5))
    with pytest.raises(ArgumentError, match=r"offsets\[2\] is 21; there are T = 20 tokens"):
        launch(A, B, out, ends(4, 4, 21), stream=None)
    assert len(launched) == 1
    launch(A, B, out, ends(0, 0, 20))
    assert launched[1][0][3].tolist() == [0, 0, 20]


def test_a_prepared_launch_counts_the_tokens_that_it_is_given(launched, monkeypatch):
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    launch = prepared(of_rows())
    with pytest.raises(ArgumentError, match="there are T = 17 tokens"):
        launch(zeros(17, 8), zeros(3, 8, 6), zeros(17, 6), OFFSETS)
    launch(zeros(18, 8), zeros(3, 8, 6), zeros(18, 6), OFFSETS)
    assert len(launched) == 1


def test_one_call_forms_check_such_calls_as_they_first_saw_while_it_was_asked(
    launched, monkeypatch
):
    monkeypatch.setattr(_launches, "_launches", {})
    A, B, out, _ = of_rows().tensors
    right, wrong, offsets = OFFSETS, ends(4, 3, 5), OFFSETS.clone()

    def call(values):  # in the same place, because its alignment counts
        ka.ops.grouped_gemm(A, B, offsets.copy_(values), out=out)

    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    for _ in range(2):
        call(right)
        with pytest.raises(ArgumentError, match=r"offsets\[1\] is 3 and offsets\[0\] is 4"):
            call(wrong)
    assert launched == []  # what is not remembered is run
    monkeypatch.delenv("KERNEL_API_CHECK_OFFSETS")
    call(right)
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    call(wrong)
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("row_index", [(3, 10)], "row_index[3] is 10; A has 10 rows"),
        ("row_index", [(17, -1), (19, 99)], "row_index[17] is -1; A has 10 rows"),
        ("out_row_index", [(3, 30)], "out_row_index[3] is 30; out has 30 rows"),
        ("out_row_index", [(3, -2)], "out_row_index[3] is -2; out has 30 rows"),
        ("out_row_index", [(9, 26)], "out_row_index[3] and out_row_index[9] are 26; expected a r"),
    ],
)
def test_indices_are_checked_where_that_is_asked(name, changes, text, launched, monkeypatch):
    args = of_picked_rows()
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    given = changed(getattr(args, name).tensor, *changes)
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    with pytest.raises(ArgumentError) as caught:
        kernel.run(args.rebuilt(*args.tensors, **{name: given}))
    assert text in str(caught.value)
    with pytest.raises(ArgumentError) as caught:
        kernel.prepare(args)(*args.tensors, **{name: given})
    assert text in str(caught.value)
    assert launched == []


def test_indices_of_tokens_that_belong_to_no_group_may_be_anything(launched, monkeypatch):
    args = of_picked_rows()
    pick, place = (args.launch_values[name] for name in ("row_index", "out_row_index"))
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    launch = prepared(args)
    given = {"row_index": changed(pick, (18, 99)), "out_row_index": changed(place, (19, 29))}
    launch(*args.tensors, **given)
    ((_, others),) = launched
    assert others["row_index"] is given["row_index"]


def test_nothing_is_checked_while_a_graph_is_captured_on_the_stream(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    asked = []
    monkeypatch.setattr("kernel_api.devices.capturing", lambda *given: asked.append(given) or True)
    check_groups((None, None, None, on_gpu), {}, "M", stream=7)
    assert asked == [(0, 7)]
