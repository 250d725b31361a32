"""One-call forms of products of groups: ka.ops, eager and in graphs of torch."""

import pytest
import torch
from support.fusions import GLU, close, pairs
from support.grouped import GroupedDraw, ends
from torch.fx.experimental.proxy_tensor import make_fx

import kernel_api as ka
from kernel_api import _launches
from kernel_api.errors import ArgumentError, NoKernelError


@pytest.fixture
def draw():
    return GroupedDraw([4, 4, 9], 11, 64, 5)


def test_outputs_are_allocated_row_major_of_the_type_of_a(draw):
    A, B = draw.A, draw.B
    out = ka.ops.grouped_gemm(A, B, draw.offsets)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((11, 64), torch.float64, True)
    close(out[:9], draw.product(A, B))
    wide = ka.ops.grouped_gemm(A.float(), B.float(), draw.offsets, out_dtype="f64")
    assert wide.dtype is torch.float64


def test_an_out_that_is_given_is_written_and_returned(draw):
    out = draw.written(11, 64)
    assert ka.ops.grouped_gemm(draw.A, draw.B, draw.offsets, out=out) is out
    assert out[9:].isnan().all()


def test_what_is_true_is_allocated_and_comes_back_by_name(draw):
    A, B, prob = draw.A, draw.B, draw.per_token()
    forward = ka.ops.grouped_gemm_glu(A, B, draw.offsets, prob=prob, preactivation=True, amax=True)
    assert forward._fields == ("out", "preactivation", "amax")
    assert [tuple(one.shape) for one in forward] == [(11, 32), (11, 64), (3,)]
    x = draw.product(A, B)
    y = GLU["swiglu"](*pairs(x, "gate_up", 32)) * prob[:9, None]
    close(forward.out[:9], y)
    close(forward.preactivation[:9], x)
    close(forward.amax, draw.largest(y))
    down = draw.random(3, 5, 32)
    backward = ka.ops.grouped_gemm_dglu(
        draw.per_token(5), down, draw.offsets, preactivation=forward.preactivation, dprob=True,
        dbias=True, amax=True,
    )  # fmt: skip
    assert backward._fields == ("out", "dprob", "dbias", "amax")
    assert [tuple(one.shape) for one in backward] == [(11, 64), (11,), (3, 64), (3, 2)]


@pytest.mark.parametrize("name", ["srelu", "dsrelu", "glu_hadamard"])
def test_every_form_allocates_what_its_fusion_writes(name, draw):
    A, B = draw.A, draw.B
    saved = {"preactivation": draw.per_token(64)} if name == "dsrelu" else {}
    optional = ("dprob", "dbias", "amax") if saved else ("preactivation", "amax")
    fusion = getattr(ka.fusions, f"grouped_gemm_{name}")
    found = getattr(ka.ops, f"grouped_gemm_{name}")(
        A, B, draw.offsets, **saved, **dict.fromkeys(optional, True)
    )  # fmt: skip
    given = {field: torch.empty_like(one) for field, one in found._asdict().items()}
    args = fusion(A, B, draw.offsets, **saved, **given)
    ka.get_kernels(args, providers=["reference"])[0].run(args)
    for field, one in given.items():
        rows = slice(0, 9) if len(one) == 11 else slice(None)
        assert torch.equal(getattr(found, field)[rows], one[rows]), field


def test_scales_are_allocated_where_they_are_written(draw):
    A, B = draw.A.float(), draw.B.float()
    out = ka.ops.grouped_gemm_quantize(A, B, draw.offsets, scale=0.5)
    assert out.dtype is torch.float8_e4m3fn
    by_row = ka.ops.grouped_gemm_quantize(A, B, draw.offsets, mode="row", amax=True)
    assert by_row._fields == ("out", "scale", "amax")
    assert (by_row.scale.shape, by_row.amax.shape) == ((11,), (3,))
    by_block = ka.ops.grouped_gemm_quantize(A, B, draw.offsets, mode="mx")
    assert (by_block.scale.shape, by_block.scale.dtype) == ((11, 2), torch.float8_e8m0fnu)


def test_picked_tokens_give_the_rows_of_out(draw):
    pick = torch.tensor([0, 0, 1, 2, 3, 1], dtype=torch.int32)
    A, B = draw.random(4, 5), draw.B
    out = ka.ops.grouped_gemm(A, B, ends(2, 3, 6), row_index=pick)
    assert out.shape == (6, 64)
    close(out[3:], A[pick[3:].long()] @ B[2])


@pytest.mark.parametrize("form", [ka.ops.grouped_gemm_wgrad, ka.ops.grouped_gemm])
def test_gradients_of_weights_are_allocated_and_added_to_what_is_given(form, draw):
    A, B = draw.A.t(), draw.per_token(7)
    out = form(A, B, draw.offsets)
    close(form(A, B, draw.offsets, alpha=2.0), 2 * out)
    assert out.shape == (3, 5, 7)
    assert not out[1].any()
    doubled = form(A, B, draw.offsets, out=out.clone(), accumulate=True)
    close(doubled, 2 * out)


def test_gradients_of_weights_are_no_rows(draw):
    rows = ka.ops.grouped_gemm(draw.A, draw.B, draw.offsets)
    refusal = r"out has shape \(.*\); expected \(E, M, N\), a sum of each group"
    with pytest.raises(ArgumentError, match=refusal):
        ka.ops.grouped_gemm_wgrad(draw.A, draw.B, draw.offsets, out=rows)
    with pytest.raises(ArgumentError, match="B rank 3, out rank 3; expected"):
        ka.ops.grouped_gemm_wgrad(draw.A, draw.B, draw.offsets)


@pytest.mark.parametrize("form", [ka.ops.grouped_gemm_wgrad, ka.ops.grouped_gemm])
def test_gradients_of_weights_are_written_to_a_list(form, draw):
    A, B = draw.A.t(), draw.per_token(7)
    expected = ka.ops.grouped_gemm_wgrad(A, B, draw.offsets)
    outs = [torch.ones(5, 7, dtype=torch.float64) for _ in range(3)]
    assert form(A, B, draw.offsets, out=outs, out_dtype="f64") is outs
    close(torch.stack(outs), expected)
    assert form(A, B, draw.offsets, out=tuple(outs), accumulate=True)[0] is outs[0]
    close(torch.stack(outs), 2 * expected)
    with pytest.raises(ArgumentError, match="out is float64 and out_dtype float32"):
        form(A, B, draw.offsets, out=outs, out_dtype="f32")
    outs[1].requires_grad_()
    with pytest.raises(ArgumentError, match=r"out\[1\] is given and needs a gradient"):
        form(A, B, draw.offsets, out=outs)


def test_rows_are_not_written_to_a_list(draw):
    with pytest.raises(ArgumentError, match="out is a list"):
        ka.ops.grouped_gemm_glu(draw.A, draw.B, draw.offsets, out=[draw.written(11, 32)])


@pytest.mark.parametrize("anywhere", ["list", "addresses"])
def test_an_out_that_lies_anywhere_breaks_a_graph(anywhere, draw):
    torch._dynamo.reset()
    A, B = draw.A.t(), draw.per_token(7)
    outs = [torch.ones(5, 7, dtype=torch.float64) for _ in range(3)]
    addresses = torch.tensor([one.data_ptr() for one in outs])

    def sums(A, B, offsets, addresses, *outs):
        layout = {"shape": (5, 7), "stride": (7, 1), "dtype": "f64"}
        out = list(outs) if anywhere == "list" else ka.ExpertPointers(addresses, **layout)
        ka.ops.grouped_gemm_wgrad(A, B, offsets, out=out)

    torch.compile(sums, backend="aot_eager")(A, B, draw.offsets, addresses, *outs)
    close(torch.stack(outs), ka.ops.grouped_gemm_wgrad(A, B, draw.offsets))


@pytest.mark.parametrize("option", ["accumulate", "out_row_index"])
def test_what_needs_an_out_says_so(option, draw):
    value = True if option == "accumulate" else torch.arange(11, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=f"{option} is given and there is no out"):
        ka.ops.grouped_gemm(draw.A, draw.B, draw.offsets, **{option: value})


@pytest.mark.parametrize("offsets", [None, torch.tensor(3, dtype=torch.int32), [3, 9, 9]], ids=str)
@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_srelu", "grouped_gemm_wgrad"])
def test_offsets_that_are_none_are_refused_by_name(name, offsets, draw):
    sums = name == "grouped_gemm_wgrad"
    A, B = (draw.A.t(), draw.per_token(7)) if sums else (draw.A, draw.B)
    options = {"amax": True} if name == "grouped_gemm_srelu" else {}
    with pytest.raises(ArgumentError, match=r"offsets (is a|has shape \(\))"):
        getattr(ka.ops, name)(A, B, offsets, **options)


def test_experts_may_be_a_list(draw):
    A, B = draw.A, draw.B
    listed = ka.ops.grouped_gemm_glu(A, list(B), draw.offsets)
    assert torch.equal(listed[:9], ka.ops.grouped_gemm_glu(A, B, draw.offsets)[:9])


def test_no_kernel_is_an_error_with_the_reasons(draw):
    A, B = draw.A.to(torch.complex64), draw.B.to(torch.complex64)
    with pytest.raises(NoKernelError, match=r"reference\.grouped_gemm"):
        ka.ops.grouped_gemm(A, B, draw.offsets, out=draw.written(11, 64))


@pytest.mark.parametrize(
    "options",
    [{}, {"alpha": "per expert"}, {"bias": "given", "alpha": 0.5}, {"row_index": "given"}],
    ids=str,
)
def test_a_repeated_call_is_recognised_and_takes_new_data_and_offsets(options, draw, monkeypatch):
    tensors = {
        "alpha": lambda: draw.random(3),
        "bias": lambda: draw.random(3, 64),
        "row_index": lambda: torch.randint(0, 11, (11,), dtype=torch.int32),
    }
    given = {n: tensors[n]() if isinstance(v, str) else v for n, v in options.items()}
    A, B, offsets, out = draw.random(11, 5), draw.B, draw.offsets, draw.written(11, 64)
    for turn, other in enumerate((ends(4, 4, 9), ends(1, 2, 11), ends(0, 0, 3))):
        A.copy_(draw.random(11, 5))
        offsets.copy_(other)
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                value.copy_(tensors[name]())
        ka.ops.grouped_gemm(A, B, offsets, out=out, **given)
        expected = torch.empty_like(out)
        args = ka.fusions.grouped_gemm(A, B, offsets, out=expected, **given)
        ka.get_kernels(args, providers=["reference"])[0].run(args)
        used = int(offsets[-1])
        assert torch.equal(out[:used], expected[:used])
        if turn == 0:
            monkeypatch.setattr(_launches, "first", None)


def test_a_repeated_gradient_writes_both_largest_values_where_they_belong(draw, monkeypatch):
    A, B, saved = draw.per_token(5), draw.random(3, 5, 32), draw.per_token(64)
    given = {"preactivation": saved, "amax": draw.written(3, 2), "out": draw.written(11, 64)}
    offsets = draw.offsets
    first = ka.ops.grouped_gemm_dglu(A, B, offsets, **given).amax.clone()
    monkeypatch.setattr(_launches, "first", None)
    given["amax"].zero_()
    assert torch.equal(ka.ops.grouped_gemm_dglu(A, B, offsets, **given).amax, first)


def compiled(fn):
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def test_a_compiled_call_is_an_operator_and_gives_the_same(draw):
    A, B, alpha, prob = draw.A, draw.B, draw.random(3), draw.per_token()

    def fn(A, B, offsets):
        return ka.ops.grouped_gemm_glu(
            A, B, offsets, alpha=alpha, prob=prob, preactivation=True, amax=True
        )  # fmt: skip

    eager, found = fn(A, B, draw.offsets), compiled(fn)(A, B, draw.offsets)
    assert type(found)._fields == ("out", "preactivation", "amax")
    for one, other in zip(found, eager, strict=True):
        rows = slice(0, 9) if len(one) == 11 else slice(None)
        assert torch.equal(one[rows], other[rows])


def test_a_graph_has_one_operator(draw):
    traced = make_fx(lambda *given: ka.ops.grouped_gemm(*given), tracing_mode="fake")
    graph = traced(draw.A, draw.B, draw.offsets).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["kernel_api.grouped_gemm.default", "<built-in function getitem>"]


def test_gradients_of_weights_accumulate_in_a_graph(draw):
    A, B = draw.A.t(), draw.per_token(7)

    def fn(A, B, offsets, out):
        return ka.ops.grouped_gemm_wgrad(A, B, offsets, out=out, accumulate=True)

    out = draw.random(3, 5, 7)
    eager, found = (call(A, B, draw.offsets, out.clone()) for call in (fn, compiled(fn)))
    assert torch.equal(eager, found)


@pytest.mark.parametrize(
    ("ends", "rows", "words"),
    [
        ([3, 1], None, "offsets[1] is 1 and offsets[0] is 3; they may not decrease"),
        ([3, 99], None, "offsets[1] is 99; there are T = 4 tokens"),
        ([3, 4], [0, 1, 9, 3], "row_index[2] is 9; A has 4 rows"),
        ([3, 4], [0, -1, 2, 3], "row_index[1] is -1; A has 4 rows"),
    ],
)
def test_the_reference_checks_what_it_reads_of_groups(ends, rows, words):
    given = {} if rows is None else {"row_index": torch.tensor(rows, dtype=torch.int32)}
    offsets = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ArgumentError) as caught:
        ka.ops.grouped_gemm(torch.randn(4, 8), torch.randn(2, 8, 6), offsets, **given)
    assert words in str(caught.value)


def test_the_switch_for_checks_is_0_or_1(monkeypatch):
    monkeypatch.setenv("KERNEL_API_CHECK_OFFSETS", "yes")
    with pytest.raises(ArgumentError, match="KERNEL_API_CHECK_OFFSETS is 'yes'; expected 1, or 0"):
        offsets = torch.tensor([3, 4], dtype=torch.int32)
        ka.ops.grouped_gemm(torch.randn(4, 8), torch.randn(2, 8, 6), offsets)
