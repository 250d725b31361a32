"""Rows that an index names: arguments, what is refused, queries, and the one-call forms."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmarks import script
from support.indexed import GATHER, KINDS, SCATTER, arguments, check, computed
from support.versions import names_sizes, since_torch

import kernel_api as ka
from kernel_api._description import described, rebuilt
from kernel_api.cli._main import main
from kernel_api.errors import ArgumentError

every_kind = pytest.mark.parametrize("kind", KINDS)
FORMS = {GATHER: ka.ops.gather_rows, SCATTER: ka.ops.scatter_rows}
FAMILY = {GATHER: "sm80.gather_rows", SCATTER: "sm80.scatter_rows"}

SCALED = ka.ScaledOperand(torch.zeros(12, 8), torch.ones(()), ka.ScaleMode.PER_TENSOR)


def x(*shape, element=torch.float32):
    return torch.zeros(shape, dtype=element)


def index(*shape, element=torch.int32):
    return torch.zeros(shape, dtype=element)


def given_to(kind, M=5, N=8, k=2, rows=12, **changed):
    matrices = {"x": x(rows, N), "out": x(M, N)}
    if kind is SCATTER:
        matrices = {"x": x(M, N), "out": x(rows, N)}
    return kind(**{**matrices, "row_index": index(M, k), **changed})


# Arguments -------------------------------------------------------------------------------


@every_kind
def test_all_operands_are_named(kind):
    args = arguments(kind, 5, 8, 2, 12)
    assert list(args.named_operands) == ["x", "out", "row_index", "weight"]
    assert list(args.outputs) == ["out"]
    assert args.sizes == {"M": 5, "N": 8, "k": 2, "rows": 12}
    assert "5x2 of 12 rows, N = 8, bf16 -> bf16, weight f32" in repr(args)
    assert list(given_to(kind).further) == ["row_index"]


@every_kind
def test_a_description_makes_the_same_problem(kind):
    args = arguments(kind, 5, 8, 2, 12, weight="float16")
    made = rebuilt(described(args))
    assert (made.signature, made.sizes) == (args.signature, args.sizes)
    assert made.weight.stride == args.weight.stride


@pytest.mark.parametrize(
    ("kind", "expanded"),
    [(GATHER, index(5, 1).expand(5, 2)), (GATHER, index(1, 2).expand(5, 2)),
     (SCATTER, index(5, 1).expand(5, 2))],
)  # fmt: skip
def test_indices_may_be_drawn_where_one_stands_for_several(kind, expanded):
    args = given_to(kind, row_index=expanded.clone().as_strided(expanded.shape, expanded.stride()))
    args.draw_indices(torch.Generator().manual_seed(0))
    drawn = args.row_index.tensor
    assert drawn.stride() == expanded.stride() and drawn.amax() > 0
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert ka.verify(kernel, args)


def test_rows_that_share_an_index_are_drawn_no_place():
    args = given_to(SCATTER, row_index=index(1, 2).clone().expand(5, 2))
    args.draw_indices(torch.Generator().manual_seed(0))
    assert (args.row_index.tensor == -1).all()


@every_kind
def test_sizes_are_no_part_of_what_is_compiled_but_types_are(kind):
    args = arguments(kind, 5, 8, 2, 12)
    assert args.signature == arguments(kind, 6, 16, 3, 40).signature
    assert args.signature != arguments(kind, 5, 8, 2, 12, weight=None).signature
    assert args.signature != arguments(kind, 5, 8, 2, 12, weight="float16").signature
    assert args.key != arguments(kind, 5, 8, 3, 12).key


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        (GATHER, {"row_index": index(5, 2, element=torch.int64)}, "row_index is int64; expected i"),
        (GATHER, {"row_index": index(5)}, r"shape \(5,\); expected \(M, k\).*unsqueeze\(1\)"),
        (GATHER, {"row_index": index()}, r"row_index has shape \(\); expected \(M, k\)$"),
        (GATHER, {"row_index": None}, r"row_index is None; expected int32 \(M, k\)"),
        (GATHER, {"row_index": index(4, 2)}, r"out has 5 rows but row_index \(M, k\) = \(4, 2\)"),
        (SCATTER, {"row_index": index(4, 2)}, r"x has 5 rows but row_index \(M, k\) = \(4, 2\)"),
        (GATHER, {"out": x(5, 7)}, "out has N = 7 but x has N = 8"),
        (GATHER, {"x": x(3, 4, 8)}, r"shape \(3, 4, 8\); expected \(rows, N\).*x.flatten\(1\)"),
        (SCATTER, {"out": x(8)}, r"out has shape \(8,\); expected \(rows, N\)$"),
        (GATHER, {"weight": x(5, 3)}, r"weight has shape \(5, 3\) but row_index"),
        (GATHER, {"weight": index(5, 2)}, "weight is int32; expected a floating type"),
        (GATHER, {"x": index(12, 8)}, "x is int32; expected a floating type"),
        (SCATTER, {"out": index(12, 8)}, "out is int32; expected a floating type"),
        (GATHER, {"out": x(1, 8).expand(5, 8)}, "several of its elements are one in memory"),
        (GATHER, {"weight": x(5, 2).to("meta")}, "weight is on meta but x is on cpu"),
        (GATHER, {"x": SCALED}, "x is a ScaledOperand; expected a plain tensor"),
    ],
)
def test_what_contradicts_is_refused_by_name(kind, changed, words):
    with pytest.raises(ArgumentError, match=words):
        given_to(kind, **changed)


@every_kind
def test_out_may_not_share_memory_with_what_is_read(kind):
    matrix = x(12, 8)
    with pytest.raises(ArgumentError, match="out shares memory with x"):
        kind(matrix[:5], matrix[:5], index(5, 2))


# Queries ---------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("cc", [80, 89, 90, 100, 120])
def test_every_gpu_from_ampere_on_is_served(kind, cc):
    args = arguments(kind, 64, 512, 2, 300, device="meta")
    first = ka.get_kernels(args, cc=cc)[0]
    assert (first.family, first.metadata.operands.x.alignment) == (FAMILY[kind], 16)


@every_kind
@settings(max_examples=60, deadline=None)
@given(
    M=st.integers(0, 300),
    N=st.integers(0, 5000),
    k=st.integers(0, 9),
    rows=st.integers(0, 700),
    types=st.tuples(*2 * [st.sampled_from(["bfloat16", "float16", "float32"])]),
    pads=st.tuples(*2 * [st.integers(0, 9)]),
    offset=st.integers(0, 3),
)
def test_any_problem_has_a_kernel_that_supports_it(kind, M, N, k, rows, types, pads, offset):
    how = {"pads": pads, "offset": offset}
    args = rebuilt(described(arguments(kind, M, N, k, max(rows, M * k), types, **how)))
    kernels = ka.get_kernels(args, cc=90)
    assert kernels
    assert all(kernel.supports(args) for kernel in kernels)
    assert kernels[0].metadata.provider == "cutedsl" or N == 0


@every_kind
def test_long_rows_have_many_threads_and_short_ones_few(kind):
    def threads(N):
        args = arguments(kind, 256, N, 2, 600, device="meta")
        return ka.get_kernels(args, cc=90)[0].metadata.design.threads_per_row

    assert [threads(N) for N in (64, 512, 7168)] == [8, 32, 128]


@every_kind
def test_what_a_kernel_lacks_is_told(kind):
    told = str(ka.explain(arguments(kind, 4, 64, 2, 9, ("float64", "float64")), cc=90))
    assert re.search(rf"no:.*{FAMILY[kind]}", told)
    args = arguments(kind, 4, 64, 2, 9, weight="float64", device="meta")
    (told,) = [r for r in ka.explain(args, cc=90).rejected if r.family == FAMILY[kind]]
    assert told.rule == "weight is float32, float16 or bfloat16"
    assert "it is float64" in told.reason


# Results on the CPU ----------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("types", ["float32 float32", "bfloat16 float32", "float64 float64",
                                   "float16 bfloat16", "float8_e4m3fn float8_e4m3fn"])  # fmt: skip
@pytest.mark.parametrize("weight", [None, "float32"])
def test_every_provider_computes_the_same(kind, types, weight):
    args = arguments(kind, 9, 20, 3, 31, types.split(), weight=weight)
    kernels = ka.get_kernels(args)
    assert kernels[-1].metadata.provider == "reference"
    for kernel in kernels:
        args.out.tensor.fill_(float("nan"))
        kernel.run(args)
        check(args)
        verdict = ka.verify(kernel, args)
        assert verdict, verdict


@since_torch("2.10", "takes no rows of 8-bit floats on the CPU")
def test_scales_of_blocks_move_as_their_rows_do():
    scales = torch.tensor([[0.25, 1.0], [2.0, 8.0], [0.5, 4.0]]).to(torch.float8_e8m0fnu)
    places = torch.tensor([[3], [-1], [0]], dtype=torch.int32)
    moved = ka.ops.scatter_rows(scales, places, rows=4)
    assert torch.equal(moved[[3, 0]].float(), scales[[0, 2]].float())
    back = ka.ops.gather_rows(moved, places[[0, 2]])
    assert torch.equal(back.float(), scales[[0, 2]].float())


@every_kind
@pytest.mark.parametrize(("M", "k", "rows"), [(0, 2, 4), (3, 0, 4), (3, 2, 0), (0, 0, 0)])
def test_there_may_be_nothing_to_move(kind, M, k, rows):
    args = arguments(kind, M, 4, k, rows, ("float32", "float32"))
    for kernel in ka.get_kernels(args):
        args.out.tensor.fill_(float("nan"))
        kernel.run(args)
        check(args)


@every_kind
def test_the_one_call_form_is_the_kernel(kind):
    args = arguments(kind, 9, 20, 3, 31)
    operands = args.x.tensor, args.row_index.tensor
    out = args.out.tensor
    assert FORMS[kind](*operands, weight=args.weight.tensor, out=out) is out
    check(args)


@every_kind
def test_prepared_launches_take_operands_by_their_places(kind):
    args = arguments(kind, 9, 20, 3, 31, ("float32", "float32"))
    for kernel in ka.get_kernels(args):
        args.out.tensor.fill_(float("nan"))
        kernel.prepare(args)(*(operand.tensor for operand in args.named_operands.values()))
        check(args)


@every_kind
def test_fusions_have_them_too(kind):
    args = arguments(kind, 9, 20, 3, 31)
    x, out, row_index, weight = (one.tensor for one in args.named_operands.values())
    made = getattr(ka.fusions, kind.kind)(x, row_index, out=out, weight=weight)
    assert (type(made), made.key) == (kind, args.key)


@pytest.mark.parametrize("named", [[[0, 1], [1, 5]], [[3, 4], [4, 3]]])
def test_rows_that_are_scattered_to_one_place_are_found_where_that_is_asked(monkeypatch, named):
    rows, index = torch.randn(2, 4), torch.tensor(named, dtype=torch.int32)
    ka.ops.scatter_rows(rows, index, rows=6)  # not asked
    absent = torch.tensor([[-1, 0], [-1, 9]], dtype=torch.int32)
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "1")
    ka.ops.scatter_rows(rows, absent, rows=6)
    words = r"row_index.flatten\(\)\[[01]\] and row_index.flatten\(\)\[[23]\] are [13]; expected a"
    with pytest.raises(ArgumentError, match=words):
        ka.ops.scatter_rows(rows, index, rows=6)
    args = SCATTER(rows, torch.empty(6, 4), absent)
    launch = ka.get_kernels(args)[0].prepare(args)
    launch(rows, args.out.tensor, row_index=absent)
    with pytest.raises(ArgumentError, match=words):
        launch(rows, args.out.tensor, row_index=index)


@pytest.mark.parametrize("operation", ["gather_rows", "scatter_rows"])
def test_the_command_line_has_them(capsys, operation):
    sizes = ["--dtype", "float32", "--device", "cpu", "--shapes", "odd"]
    assert main(["verify", "--operation", operation, *sizes]) == 0
    assert "16 of 16 passed" in capsys.readouterr().out
    meta = ["--m", "64", "--n", "128", "--k", "8", "--device", "meta", "--cc", "90"]
    assert main(["explain", "--operation", operation, *meta]) == 0
    assert "64x8 of 512 rows, N = 128" in capsys.readouterr().out
    assert main(["explain", "--operation", operation, *meta, "--with", "bias"]) == 2
    assert "has a weight of each row already" in capsys.readouterr().err


def test_outputs_are_allocated_as_large_as_they_are():
    rows, places = torch.randn(12, 8), torch.tensor([[3, 4], [0, -1]], dtype=torch.int32)
    found = ka.ops.gather_rows(rows, places)
    assert torch.equal(found, torch.stack([rows[3] + rows[4], rows[0]]))
    assert ka.ops.gather_rows(rows, places, out_dtype=torch.bfloat16).dtype is torch.bfloat16
    assert ka.ops.scatter_rows(rows[:2], places).shape == (4, 8)
    assert ka.ops.scatter_rows(rows[:2], places, rows=5).shape == (5, 8)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"rows": 3, "out": torch.zeros(3, 8)}, "out and rows = 3 are given; one of them"),
        ({"rows": -1}, "rows is -1; expected a number of rows"),
        ({"rows": 2.0}, "rows is 2.0; expected a number of rows"),
        ({"out": torch.zeros(3, 8), "out_dtype": "float16"}, "out is float32 and out_dtype float1"),
        ({"out": torch.zeros(3, 8, requires_grad=True)}, "out"),
    ],
)
def test_outputs_that_contradict_are_refused(how, words):
    with pytest.raises(ArgumentError, match=words):
        ka.ops.scatter_rows(torch.randn(2, 8), index(2, 1), **how)


@every_kind
def test_graphs_of_torch_hold_the_forms(kind):
    args = arguments(kind, 9, 20, 3, 27, ("float32", "float32"), weight="float32")
    operands = args.x.tensor, args.row_index.tensor, args.weight.tensor

    def form(x, row_index, weight):
        return FORMS[kind](2 * x, row_index, weight=weight)

    written = ~computed(args).isnan()
    expected = form(*operands)[written]
    compiled = torch.compile(form, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(*operands)[written], expected)
    exported = torch.export.export(_Module(form), operands)
    assert torch.equal(exported.module()(*operands)[written], expected)

    fewer = operands[0], *(one[:5] for one in operands[1:])
    if kind is SCATTER:
        every = torch.arange(15, dtype=torch.int32).view(5, 3)
        fewer = operands[0][:5], every, fewer[2].nan_to_num()
    assert torch.equal(compiled(*fewer), form(*fewer))


@names_sizes
def test_exported_graphs_may_have_any_number_of_rows():
    def form(x, row_index):
        return ka.ops.scatter_rows(x, row_index, rows=2 * x.shape[0] + 1)

    x, index = torch.randn(4, 8), torch.arange(8, dtype=torch.int32).view(4, 2)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    how = {"dynamic_shapes": (({0: tokens}, {0: tokens}),), "strict": False}
    exported = torch.export.export(_Module(form), (x, index), **how).module()
    found = exported(torch.cat([x, x]), torch.arange(16, dtype=torch.int32).view(8, 2))
    assert found.shape == (17, 8)
    assert torch.equal(found[:16], torch.cat([x, x]).repeat_interleave(2, 0))


class _Module(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, *operands):
        return self.form(*operands)


# The suite -------------------------------------------------------------------------------


def test_the_suite_has_problems_and_peers_that_compute_the_same(monkeypatch, capsys):
    rows = script("indexed_rows")
    assert rows.main(["--dry-run", "--cc", "90"]) == 0
    assert capsys.readouterr().out.count("us expected") == len(rows.PROBLEMS)
    monkeypatch.setattr(rows, "_compiled", lambda function: function)
    for operation in ("gather", "scatter"):
        args = rows.Problem(operation, 20, 3, 16).arguments("cpu")
        expected = computed(args)
        for call in rows.peers_of(rows.Problem(operation, 20, 3, 16), args).values():
            torch.testing.assert_close(call().double(), expected, rtol=0.02, atol=0.02)
