"""Tensors of more elements than 32 bits count, or of more rows or matrices than a grid has blocks.

A kernel computes all of a problem; the reference computes its first and its last rows.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kernel_api as ka
from kernel_api import epilogue, masks
from kernel_api.verification import Expected, compare, factor_of, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 75e9,
        reason="needs 75 GB of GPU memory",
    ),
]

#: Their product is beyond 32 bits.
ROWS, COLUMNS = 2**20 + 77, 4096 + 16
DEPTH = 64
#: Rows that the reference computes at each end.
PART = 300
FIRST, LAST, ALL = slice(0, PART), slice(ROWS - PART, ROWS), slice(0, ROWS)
#: Of a family, the first, the last and those between.
KERNELS = 4

BF16, F32, F8, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8

DEVICE = "cuda"

#: Arguments of some rows of a problem, or of some matrices.
Problem = Callable[[slice], Any]


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    torch.manual_seed(7)
    yield
    torch.cuda.empty_cache()


def empty(*shape: int, element: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=element, device=DEVICE)


def drawn(*shape: int, element: torch.dtype = BF16) -> torch.Tensor:
    found = empty(*shape, element=element)
    if element == F8:
        for rows in found.view(torch.uint8).split(2**16):
            rows.random_(0, 112)
            rows += (rows >= 56).to(torch.uint8) * 72  # from -1 to 1
    elif element == INT8:
        found.random_(-7, 8)
    else:
        found.normal_()
    return found


def of_families(args: Any) -> Iterator[ka.Kernel]:
    """Of the kernels that are offered, some of each family, compiled."""
    offered = ka.get_kernels(args, providers=["cutedsl"])
    assert offered, str(ka.explain(args))
    chosen = []
    for family in dict.fromkeys(kernel.family_name() for kernel in offered):
        kernels = [kernel for kernel in offered if kernel.family_name() == family]
        step = max(1, -(-len(kernels) // KERNELS))
        chosen += kernels[::step]
    ka.compile_all(chosen, args)
    yield from chosen


def ends_of(count: int, part: int) -> tuple[slice, slice]:
    return slice(0, part), slice(count - part, count)


def check(problem: Problem, rows: slice = ALL, parts: tuple[slice, ...] = (FIRST, LAST)) -> None:
    """Every family computes all rows, and is right in the parts."""
    whole = problem(rows)
    ends = [problem(part) for part in parts]
    expected = [Expected(end) for end in ends]
    wrong = {}
    for kernel in of_families(whole):
        for end in ends:
            for operand in end.outputs.values():
                poison(operand.tensor)
        kernel.run(whole)
        torch.cuda.synchronize()
        verdicts = [
            one.judge(end, factor_of(kernel)) for one, end in zip(expected, ends, strict=True)
        ]
        if not all(verdicts):
            wrong[kernel.metadata.kernel_name] = [str(verdict) for verdict in verdicts]
    assert not wrong, f"{whole}: {wrong}"


# Products -----------------------------------------------------------------------------------


LAYOUTS = (
    *((BF16, "".join(layout)) for layout in itertools.product("tn", repeat=3)),
    *((INT8, layout) for layout in ("tnt", "ntn")),
)


@pytest.mark.parametrize(("element", "layout"), LAYOUTS, ids=str)
def test_a_result_of_many_rows(element: torch.dtype, layout: str) -> None:
    a, b, d = layout

    def matrix(rows: int, columns: int, major: str, make: Any, element: Any) -> torch.Tensor:
        if major == "t":
            return make(rows, columns, element=element)
        return make(columns, rows, element=element).t()

    A = matrix(ROWS, DEPTH, a, drawn, element)
    B = matrix(DEPTH, COLUMNS, b, drawn, element)
    out = matrix(ROWS, COLUMNS, d, empty, BF16 if element == BF16 else torch.int32)
    check(lambda part: ka.GemmArguments(A[part], B, out[part]))


@pytest.mark.parametrize("pad", [0, 1])
def test_operands_of_many_rows(pad: int) -> None:
    A, B = drawn(ROWS, COLUMNS + pad)[:, pad:], drawn(48, COLUMNS).t()
    out = empty(ROWS, 48)
    check(lambda part: ka.GemmArguments(A[part], B, out[part]))
    del out
    weights, x, out = A.t(), B.t(), empty(48, ROWS)
    check(lambda part: ka.GemmArguments(x, weights[:, part], out[:, part]))


def test_operands_of_float32() -> None:
    A, B, out = (make(n, k, element=F32) for make, n, k in (
        (drawn, ROWS, COLUMNS), (drawn, 48, COLUMNS), (empty, ROWS, 48),
    ))  # fmt: skip
    check(lambda part: ka.GemmArguments(A[part], B.t(), out[part], fp32_precision="tf32"))


MODES = {
    "tensor": (ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_TENSOR),
    "row": (ka.ScaleMode.PER_ROW, ka.ScaleMode.PER_ROW),
    "blocks": (ka.ScaleMode.BLOCK_1x128, ka.ScaleMode.BLOCK_128x128),
}


@pytest.mark.parametrize("mode", MODES)
def test_operands_with_scales(mode: str) -> None:
    A, B = drawn(ROWS, COLUMNS, element=F8), drawn(48, COLUMNS, element=F8).t()
    out = empty(ROWS, 48)
    a_mode, b_mode = MODES[mode]
    blocks = -(-COLUMNS // 128)
    scales = {
        "tensor": (drawn(element=F32).abs_(), drawn(element=F32).abs_()),
        "row": (drawn(ROWS, element=F32).abs_(), drawn(48, element=F32).abs_()),
        "blocks": (drawn(ROWS, blocks, element=F32).abs_(), drawn(blocks, 1, element=F32).abs_()),
    }
    a, b = scales[mode]

    def problem(part: slice) -> Any:
        return ka.GemmArguments(
            ka.ScaledOperand(A[part], a if a.dim() == 0 else a[part], a_mode),
            ka.ScaledOperand(B, b, b_mode),
            out[part],
        )

    check(problem)


def test_many_matrices() -> None:
    L = 2**20 + 3
    A, B, out = drawn(L, 64, 64), drawn(L, 64, 72), empty(L, 64, 72)
    check(lambda part: ka.GemmArguments(A[part], B[part], out[part]), slice(0, L), ends_of(L, 5))


def test_sums_of_many_terms() -> None:
    K, M, N = 2**26 + 8, 64, 72
    A = empty(K, M).random_(-1, 2).t()
    B = empty(K, N).random_(-1, 2)
    out = empty(M, N, element=F32)
    expected = torch.zeros(M, N, device=DEVICE, dtype=torch.float64)
    for start in range(0, K, 2**20):
        part = slice(start, start + 2**20)
        expected += A[:, part].double() @ B[part].double()
    args = ka.GemmArguments(A, B, out)
    for kernel in of_families(args):
        poison(out)
        kernel.run(args)
        assert torch.equal(out.double(), expected), kernel.metadata.kernel_name


# Fusions ------------------------------------------------------------------------------------


def of_rows(*more: Any) -> tuple[torch.Tensor, ...]:
    return drawn(ROWS, DEPTH), drawn(DEPTH, COLUMNS), empty(ROWS, COLUMNS), *more


def bias_and_activation() -> Problem:
    A, B, out = of_rows()
    before, bias = empty(ROWS, COLUMNS), drawn(COLUMNS, element=F32)
    return lambda part: ka.fusions.gemm_bias_activation(
        A[part], B, out=out[part], bias=bias, preactivation=before[part], alpha=0.3
    )


def residual() -> Problem:
    A, B, out = of_rows()
    C = drawn(ROWS, COLUMNS)
    return lambda part: ka.fusions.gemm_residual(A[part], B, out=out[part], C=C[part], beta=0.7)


def residual_in_columns() -> Problem:
    A, B, out = of_rows()
    C = drawn(COLUMNS, ROWS).t()
    return lambda part: ka.fusions.gemm_residual(A[part], B, out=out[part], C=C[part], beta=0.7)


def swiglu() -> Problem:
    A, B, before = of_rows()
    out = empty(ROWS, COLUMNS // 2)
    return lambda part: ka.fusions.gemm_swiglu(
        A[part], B, out=out[part], preactivation=before[part], granularity=1
    )


def dswiglu() -> Problem:
    A, B, out = drawn(ROWS, DEPTH), drawn(DEPTH, COLUMNS // 2), empty(ROWS, COLUMNS)
    before, prob, dprob = drawn(ROWS, COLUMNS), drawn(ROWS, element=F32), empty(ROWS, element=F32)
    return lambda part: ka.fusions.gemm_dswiglu(
        A[part], B, out=out[part], preactivation=before[part], prob=prob[part],
        dprob=dprob[part], granularity=1,
    )  # fmt: skip


def dactivation() -> Problem:
    A, B, out = of_rows()
    before = drawn(ROWS, COLUMNS)
    return lambda part: ka.fusions.gemm_dactivation(
        A[part], B, out=out[part], preactivation=before[part]
    )


def rope() -> Problem:
    A, B = drawn(ROWS, DEPTH), drawn(DEPTH, 4096)
    out = empty(ROWS, 4096)
    cos, sin = drawn(ROWS, 64, element=F32), drawn(ROWS, 64, element=F32)
    return lambda part: ka.fusions.gemm_rope(
        A[part], B, out=out[part], cos=cos[part], sin=sin[part], head_dim=128
    )


def quantize() -> Problem:
    A, B = drawn(ROWS, DEPTH), drawn(DEPTH, 4096)
    out, scale = empty(ROWS, 4096, element=F8), empty(ROWS, 128, element=torch.float8_e8m0fnu)
    return lambda part: ka.fusions.gemm_quantize(
        A[part], B, out=out[part], scale=scale[part], mode="mx"
    )


FUSIONS = (
    bias_and_activation, residual, residual_in_columns, swiglu, dswiglu, dactivation, rope,
    quantize,
)  # fmt: skip


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda made: made.__name__)
def test_a_fusion_of_many_rows(fusion: Callable[[], Problem]) -> None:
    check(fusion())


def test_dropout_of_many_rows() -> None:
    """Whether an element is kept depends on where it stands."""
    A, B, out = of_rows()
    args = ka.fusions.gemm_dropout(A, B, out=out, p=0.4, seed=3, offset=5)
    plain = {
        part.start: [A[part].to(kind) @ B.to(kind) / 0.6 for kind in (torch.float64, BF16)]
        for part in (FIRST, LAST)
    }
    kept: dict[int, torch.Tensor] = {}
    for kernel in of_families(args):
        for part in (FIRST, LAST):
            poison(out[part])
        kernel.run(args)
        for part in (FIRST, LAST):
            found, name = out[part], kernel.metadata.kernel_name
            mask = found != 0
            assert abs(float(mask.float().mean()) - 0.6) < 0.01, name
            exact, same = (one * mask for one in plain[part.start])
            verdict = compare(found, exact, same, factor=factor_of(kernel))
            assert verdict, (name, str(verdict))
            assert torch.equal(kept.setdefault(part.start, mask), mask), name
    assert not torch.equal(kept[FIRST.start], kept[LAST.start][:PART])


def test_the_maximum_of_many_rows() -> None:
    """Of whole numbers: in the last row, where it is one of few."""
    A, B, out = of_rows()
    A.random_(-3, 4), B.random_(-3, 4)
    A[-1], B[:, -1] = 4.0, 4.0
    amax = empty(element=F32)
    args = ka.fusions.gemm_amax(A, B, out=out, amax=amax)
    for kernel in of_families(args):
        poison(amax)
        kernel.run(args)
        assert float(amax) == 16 * DEPTH, kernel.metadata.kernel_name


# Groups -------------------------------------------------------------------------------------


def inside(ends: list[int], part: slice) -> torch.Tensor:
    """Where groups end in a part of the rows."""
    found = [min(max(end - part.start, 0), part.stop - part.start) for end in ends]
    return torch.tensor(found, dtype=torch.int32, device=DEVICE)


ENDS = [5, 5, ROWS // 2 + 1, ROWS - 200, ROWS - 200, ROWS - 1, ROWS]


def test_groups_of_many_rows() -> None:
    A, B, out = drawn(ROWS, DEPTH), drawn(len(ENDS), DEPTH, COLUMNS), empty(ROWS, COLUMNS)
    check(lambda part: ka.GroupedGemmArguments(A[part], B, out[part], inside(ENDS, part)))


def test_operands_of_groups_of_many_rows() -> None:
    A, B, out = drawn(ROWS, COLUMNS), drawn(len(ENDS), 48, COLUMNS).mT, empty(ROWS, 48)
    check(lambda part: ka.GroupedGemmArguments(A[part], B, out[part], inside(ENDS, part)))


def test_many_experts() -> None:
    E, each = 1100, 2
    A, B, out = drawn(E * each, 2048), drawn(E, 2048, 2048).mT, empty(E * each, 2048)

    def problem(experts: slice) -> Any:
        rows = slice(each * experts.start, each * experts.stop)
        ends = [each * (e + 1) for e in range(E)][experts]
        return ka.GroupedGemmArguments(A[rows], B[experts], out[rows], inside(ends, rows))

    check(problem, slice(0, E), ends_of(E, 8))


@pytest.mark.parametrize("gathers", [True, False])
def test_rows_of_groups_that_lie_far_apart(gathers: bool) -> None:
    T = 1003
    ends = [0, 300, 301, T]
    index = torch.randint(0, ROWS, (T,), device=DEVICE, dtype=torch.int32)
    index[0], index[1] = ROWS - 1, 0
    if gathers:
        A, B, out = drawn(ROWS, COLUMNS), drawn(4, COLUMNS, 64), empty(T, 64)
        args = ka.GroupedGemmArguments(A, B, out, inside(ends, ALL), row_index=index)
        near = ka.GroupedGemmArguments(A[index.long()], B, out, inside(ends, ALL))
        for kernel in of_families(args):
            poison(out)
            kernel.run(args)
            assert Expected(near).judge(near, 3.0), kernel.metadata.kernel_name
        return
    index = torch.randperm(ROWS, device=DEVICE)[:T].int()
    A, B, out = drawn(T, 64), drawn(4, 64, COLUMNS), empty(ROWS, COLUMNS)
    args = ka.GroupedGemmArguments(A, B, out, inside(ends, ALL), out_row_index=index)
    near = ka.GroupedGemmArguments(A, B, empty(T, COLUMNS), inside(ends, ALL))
    for kernel in of_families(args):
        poison(out)
        kernel.run(args)
        near.out.tensor.copy_(out[index.long()])
        assert Expected(near).judge(near, 3.0), kernel.metadata.kernel_name
        assert bool(out[ROWS // 3 : ROWS // 3 + 9].isnan().any())


def test_gradients_of_weights_from_many_rows() -> None:
    A, B, out = drawn(ROWS, COLUMNS), drawn(ROWS, 48), empty(4, COLUMNS, 48)
    ends = [ROWS // 2, ROWS - 1000, ROWS - 1000, ROWS]

    def problem(experts: slice) -> Any:
        rows = ALL if experts.start == 0 else slice(ROWS - 1000, ROWS)
        return ka.GroupedGemmArguments(
            A[rows].t(), B[rows], out[experts], inside(ends[experts], rows)
        )

    check(problem, slice(0, 4), (slice(2, 4),))


def test_gradients_of_many_weights() -> None:
    E, each = 260, 10
    A, B, out = drawn(E * each, 4096), drawn(E * each, COLUMNS), empty(E, 4096, COLUMNS)

    def problem(experts: slice) -> Any:
        rows = slice(each * experts.start, each * experts.stop)
        ends = [each * (e + 1) for e in range(E)][experts]
        return ka.GroupedGemmArguments(A[rows].t(), B[rows], out[experts], inside(ends, rows))

    check(problem, slice(0, E), ends_of(E, 2))


def test_a_fusion_of_groups_of_many_rows() -> None:
    A, B = drawn(ROWS, DEPTH), drawn(len(ENDS), DEPTH, 4096)
    before, out = empty(ROWS, 4096), empty(ROWS, 2048)
    check(
        lambda part: ka.fusions.grouped_gemm_glu(
            A[part], B, inside(ENDS, part), out=out[part], preactivation=before[part]
        )
    )
    del out
    B, out = B[:, :, :2048], empty(ROWS, 4096)
    before.normal_()
    check(
        lambda part: ka.fusions.grouped_gemm_dglu(
            A[part], B, inside(ENDS, part), out=out[part], preactivation=before[part]
        )
    )


# Rows ---------------------------------------------------------------------------------------


def test_norms_of_many_rows() -> None:
    x, out = drawn(ROWS, COLUMNS), empty(ROWS, COLUMNS)
    weight, rstd, mean = drawn(COLUMNS), empty(ROWS, element=F32), empty(ROWS, element=F32)
    check(lambda part: ka.fusions.rmsnorm(x[part], out=out[part], weight=weight, rstd=rstd[part]))
    check(
        lambda part: ka.fusions.layernorm(
            x[part], out=out[part], weight=weight, rstd=rstd[part], mean=mean[part]
        )
    )
    dy = drawn(ROWS, COLUMNS)
    check(
        lambda part: ka.fusions.layernorm_backward(
            dy[part], x[part], dx=out[part], weight=weight, rstd=rstd[part], mean=mean[part]
        )
    )


def test_norms_of_more_rows_than_a_grid_has_blocks() -> None:
    rows = 2**25 + 5
    x, out, weight = drawn(rows, 136), empty(rows, 136), drawn(136)
    check(
        lambda part: ka.fusions.rmsnorm(x[part], out=out[part], weight=weight),
        slice(0, rows),
        ends_of(rows, PART),
    )


@pytest.mark.parametrize("columns", [False, True])
def test_elements_of_many_rows(columns: bool) -> None:
    x = drawn(ROWS, COLUMNS)
    out = empty(COLUMNS, ROWS).t() if columns else empty(ROWS, COLUMNS)
    made = ka.EpilogueArguments(lambda accum: epilogue.gelu(accum * 0.7))
    check(lambda part: ka.ElementwiseArguments(x[part], out[part], epilogue=made))


# Attention ----------------------------------------------------------------------------------

#: A key is seen by the 128 queries from it on.
WINDOW = masks.SlidingWindow(127, 0)
LENGTH, HEADS = 2**19 + 77, 34


def attention(kind: torch.dtype, *operands: torch.Tensor, first: int) -> torch.Tensor:
    """Of queries from `first` on, in the window."""
    q, k, v = (one.to(kind) for one in operands)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    row = torch.arange(q.shape[-2], device=DEVICE)[:, None] + first
    column = torch.arange(k.shape[-2], device=DEVICE)
    hidden = (column > row) | (column < row - 127)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("rows_first", [True, False])
def test_attention_of_many_rows(rows_first: bool) -> None:
    def matrices(make: Any) -> torch.Tensor:
        if rows_first:
            return make(1, LENGTH, HEADS, 128).transpose(1, 2)
        return make(1, HEADS, LENGTH, 128)

    Q, K, V, out = (matrices(make) for make in (drawn, drawn, drawn, empty))
    lse = empty(1, HEADS, LENGTH, element=F32)
    args = ka.SdpaArguments(Q, K, V, out, lse, mask=WINDOW)
    first, last = slice(0, 300), slice(LENGTH - 427, LENGTH)
    chosen = slice(HEADS - 2, HEADS)

    def ends(tensor: torch.Tensor, part: slice) -> torch.Tensor:
        return tensor[:, chosen, part]

    for kernel in of_families(args):
        poison(out)
        kernel.run(args)
        for part, valid in ((first, 0), (last, 127)):
            operands = [ends(one, part) for one in (Q, K, V)]
            exact, same = (attention(kind, *operands, first=0) for kind in (torch.double, BF16))
            found = ends(out, part)
            verdict = compare(found[:, :, valid:], exact[:, :, valid:], same[:, :, valid:])
            assert verdict, (kernel.metadata.kernel_name, str(verdict))
    dO, dQ, dK, dV = (matrices(make) for make in (drawn, empty, empty, empty))
    args = ka.SdpaBackwardArguments(Q, K, V, out, dO, lse, dQ, dK, dV, mask=WINDOW)
    for kernel in of_families(args):
        for one in (dQ, dK, dV):
            poison(one[:, :, :500]), poison(one[:, :, -500:])
        kernel.run(args)
        leaves = [ends(one, last).double().requires_grad_() for one in (Q, K, V)]
        result = attention(torch.double, *leaves, first=0)
        upstream = ends(dO, last).double()
        upstream[:, :, :127] = 0  # they see keys that are not here
        exact = torch.autograd.grad(result, leaves, upstream)
        for name, found, wanted, valid in (
            ("dQ", dQ, exact[0], slice(127, None)),
            ("dK", dK, exact[1], slice(127, None)),
            ("dV", dV, exact[2], slice(127, None)),
        ):
            difference = ends(found, last)[:, :, valid].double() - wanted[:, :, valid]
            error = difference.norm() / wanted[:, :, valid].norm()
            assert error < 0.02, (kernel.metadata.kernel_name, name, float(error))


def test_attention_of_many_sequences() -> None:
    B, S = 70001, 40
    Q, K, V, out = (make(B, 2, S, 64) for make in (drawn, drawn, drawn, empty))
    lse = empty(B, 2, S, element=F32)
    of = slice(0, B), ends_of(B, 3)
    check(lambda part: ka.SdpaArguments(Q[part], K[part], V[part], out[part], lse[part]), *of)
    dO, dQ, dK, dV = (make(B, 2, S, 64) for make in (drawn, empty, empty, empty))
    check(
        lambda part: ka.SdpaBackwardArguments(
            *(one[part] for one in (Q, K, V, out, dO, lse, dQ, dK, dV))
        ),
        *of,
    )


@pytest.mark.parametrize("element", [BF16, F8], ids=str)
def test_many_pages(element: torch.dtype) -> None:
    pages, size, H_kv, D = 2**15 * 3 + 5, 64, 8, 128
    K, V = (drawn(pages, H_kv, size, D, element=element) for _ in range(2))
    B, each = 5, 40
    Q, out = drawn(B, 64, 1, D, element=element), empty(B, 64, 1, D)
    table = torch.randperm(pages, device=DEVICE)[: B * each].reshape(B, each).int()
    table[0, 0], table[0, 1] = pages - 1, pages - 2
    lens = torch.tensor([2560, 100, 1, 2000, 64], dtype=torch.int32, device=DEVICE)
    args = ka.SdpaArguments(Q, K, V, out, page_table=table, seq_lens_kv=lens)
    near_table = torch.arange(B * each, device=DEVICE, dtype=torch.int32).reshape(B, each)
    chosen = table.flatten().long()
    near = ka.SdpaArguments(Q, K[chosen], V[chosen], out, page_table=near_table, seq_lens_kv=lens)
    expected = Expected(near)
    for kernel in of_families(args):
        poison(out)
        kernel.run(args)
        verdict = expected.judge(near, factor_of(kernel))
        assert verdict, (kernel.metadata.kernel_name, str(verdict))
