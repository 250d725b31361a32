"""Sizes that are nearly the same are estimated once, and the first kernel is what all say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_api as ka
from kernel_api import _first_kernel, discovery, fusions, masks
from kernel_api import epilogue as ep
from kernel_api._estimated_sizes import told_apart
from kernel_api._first_kernel import first_kernel
from kernel_api.kernel import Kernel

BF16 = torch.bfloat16


def empty(*shape, element=BF16):
    return torch.empty(shape, dtype=element, device="meta")


def product(M, N=512, K=768):
    return ka.GemmArguments(empty(M, K), empty(N, K).mT, empty(M, N))


def gated(M):
    return fusions.gemm_swiglu(empty(M, 256), empty(1024, 256).mT, out=empty(M, 512))


def scaled(M):
    stored = (
        empty(M, 256, element=torch.float8_e4m3fn),
        empty(512, 256, element=torch.float8_e4m3fn),
    )
    scales = empty(M, element=torch.float32), empty(512, element=torch.float32)
    rows = ka.ScaleMode.PER_ROW
    A = ka.ScaledOperand(stored[0], scales[0], rows)
    return ka.GemmArguments(A, ka.ScaledOperand(stored[1].mT, scales[1], rows), empty(M, 512))


def grouped(T):
    offsets = empty(8, element=torch.int32)
    return ka.GroupedGemmArguments(empty(T, 256), empty(8, 512, 256).mT, empty(T, 512), offsets)


def weight_gradients(T):
    offsets = empty(8, element=torch.int32)
    A, B, out = empty(T, 256).mT, empty(T, 512), empty(8, 256, 512)
    return ka.GroupedGemmArguments(A, B, out, offsets)


def norm(M):
    return fusions.rmsnorm(empty(M, 1280), out=empty(M, 1280), weight=empty(1280))


def norm_of_a_sum(M):
    rows = [empty(M, 1280) for _ in range(4)]
    return fusions.layernorm(rows[0], out=rows[1], residual=rows[2], residual_out=rows[3])


def norm_backward(M):
    rows, rstd = [empty(M, 1280) for _ in range(3)], empty(M, element=torch.float32)
    return fusions.rmsnorm_backward(*rows[:2], dx=rows[2], rstd=rstd, dweight=empty(1280))


def norm_in_8_bits(M):
    out, scale = empty(M, 1280, element=torch.float8_e4m3fn), empty(M, element=torch.float32)
    return fusions.rmsnorm_quantize(empty(M, 1280), out=out, scale=scale, mode="row")


def rows_in_8_bits(M):
    out, scale = empty(M, 1280, element=torch.float8_e4m3fn), empty(M, element=torch.float32)
    return fusions.quantize(empty(M, 1280), out=out, scale=scale, mode="row")


def sums_of_columns(M):
    def fn(x, factor):
        return x * factor, ep.sum(x, -2)

    factor, total = (empty(*shape, element=torch.float32) for shape in ((M, 1), (640,)))
    epilogue = ka.EpilogueArguments(fn, factor=factor, total=total)
    return ka.ElementwiseArguments(empty(M, 640), empty(M, 640), epilogue=epilogue)


def attention(S):
    q, k, v, out = (empty(2, H, S, 128) for H in (32, 8, 8, 32))
    return ka.SdpaArguments(q, k, v, out, mask=masks.Causal())


def packed(T):
    """Three sequences."""
    ends = empty(4, element=torch.int32)
    (q, out), (k, v) = ([empty(T, H, 128) for _ in range(2)] for H in (16, 4))
    return ka.SdpaArguments(
        q, k, v, out, mask=masks.Causal(),
        cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=T, max_seqlen_kv=T,
    )  # fmt: skip


def in_pages(T, S_q, S_kv):
    """T queries of three sequences, the longest of which has S_q, and room for S_kv keys."""
    ends, lengths = empty(4, element=torch.int32), empty(3, element=torch.int32)
    (q, out), (k, v) = ([empty(*shape, 128) for _ in range(2)] for shape in ((T, 16), (900, 4, 64)))
    return ka.SdpaArguments(
        q, k, v, out, mask=masks.Causal("bottom_right"), cu_seqlens_q=ends, max_seqlen_q=S_q,
        seq_lens_kv=lengths, page_table=empty(3, -(-S_kv // 64), element=torch.int32),
    )  # fmt: skip


def packed_in_pages(T):
    return in_pages(T, T, 8192)


def packed_few_queries(S_kv):
    return in_pages(3, 1, S_kv)


def packed_backward(T):
    ends = empty(4, element=torch.int32)
    read, written = ([empty(T, 8, 64) for _ in range(count)] for count in (5, 3))
    return ka.SdpaBackwardArguments(
        *read, empty(8, T, element=torch.float32), *written, mask=masks.Causal(),
        cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=T, max_seqlen_kv=T,
    )  # fmt: skip


def few_queries(S):
    q, k, v, out = (empty(4, H, rows, 128) for H, rows in ((32, 1), (8, S), (8, S), (32, 1)))
    return ka.SdpaArguments(q, k, v, out)


def attention_backward(S):
    read = [empty(2, H, S, 64) for H in (8, 8, 8, 8, 8)]
    lse, written = empty(2, 8, S, element=torch.float32), [empty(2, 8, S, 64) for _ in range(3)]
    return ka.SdpaBackwardArguments(*read, lse, *written, mask=masks.SlidingWindow(256, 0))


ALL = (
    *(product, gated, scaled, grouped, weight_gradients),
    *(norm, norm_of_a_sum, norm_backward, norm_in_8_bits, rows_in_8_bits, sums_of_columns),
    *(attention, few_queries, attention_backward, packed, packed_in_pages, packed_few_queries),
    packed_backward,
)


@given(st.integers(0, 1 << 29))
def test_sizes_are_rounded_up_by_little_and_once(extent):
    rounded = told_apart(extent)
    assert extent <= rounded <= max(1.04 * extent, extent + 15)
    assert told_apart(rounded) == rounded
    assert told_apart(extent + 1) >= rounded


@given(st.integers(1, 1 << 20), st.sampled_from([16, 32, 48, 64, 96, 128, 192, 256]))
def test_as_many_tiles_have_the_rows_as_before(rows, tile):
    if rows <= 1024 or tile % 64 == 0:
        assert -(-told_apart(rows) // tile) == -(-rows // tile)


@pytest.mark.parametrize("make", ALL)
def test_estimates_of_what_is_told_by_the_same_are_the_same(make):
    for few, more in ((113, 128), (1000, 1008), (4097, 4160)):
        one, other = make(few), make(more)
        offered = {kernel.metadata.kernel_name: kernel for kernel in ka.get_kernels(other, cc=90)}
        common = [k for k in ka.get_kernels(one, cc=90) if k.metadata.kernel_name in offered]
        families = {type(kernel) for kernel in common if kernel.provider_name() == "cutedsl"}
        assert families
        for family in families:
            assert family.estimated_by(one) == family.estimated_by(other) is not None
        assert all(kernel.predict(one) == kernel.predict(other) for kernel in common)


@pytest.mark.parametrize("make", ALL)
def test_what_is_estimated_otherwise_is_told_apart(make):
    """By what every estimate is, if not by more."""
    for few, more in ((113, 129), (1000, 1009), (4097, 4161)):
        one, other = make(few), make(more)
        for kernel in ka.get_kernels(one, providers=["cutedsl"], cc=90):
            if kernel.predict(one) != kernel.predict(other):
                assert kernel.estimated_by(one) != kernel.estimated_by(other)


@pytest.fixture
def estimates(monkeypatch):
    """Counts them."""
    monkeypatch.setattr(_first_kernel, "_orders", {})
    found, seconds = [], _first_kernel._seconds

    def counted(kernel, args):
        found.append(kernel)
        return seconds(kernel, args)

    monkeypatch.setattr(_first_kernel, "_seconds", counted)
    return found


@pytest.mark.parametrize("make", ALL)
def test_sizes_that_are_nearly_the_same_are_estimated_once(make, estimates):
    for M in range(2050, 2110, 7):
        discovery._surveys.clear()
        first = first_kernel(make(M), 90)
        if M == 2050:
            assert len(estimates) > 5
            estimates.clear()
        discovery._surveys.clear()
        assert first == ka.get_kernels(make(M), cc=90)[0]
    assert not estimates


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL), st.lists(st.integers(1, 5000), min_size=3, max_size=3))
def test_the_first_is_that_of_all_whatever_was_asked_before(make, sizes):
    for M in sizes:
        for near in (M, M + 1, M + 5):
            discovery._surveys.clear()
            first = first_kernel(make(near), 90)
            discovery._surveys.clear()
            assert first == ka.get_kernels(make(near), cc=90)[0]


def test_one_that_cannot_any_more_is_passed_over(estimates, monkeypatch):
    first = first_kernel(product(2050), 90)
    status = Kernel.status_behind_operands

    def refused(kernel, args, target):
        return ka.Status.fail("it is refused") if kernel == first else status(kernel, args, target)

    monkeypatch.setattr(Kernel, "status_behind_operands", refused)
    discovery._surveys.clear()
    offered = [kernel for kernel in ka.get_kernels(product(2051), cc=90) if kernel != first]
    discovery._surveys.clear()
    estimates.clear()
    assert first_kernel(product(2051), 90) == offered[0] and estimates
    estimates.clear()
    assert first_kernel(product(2052), 90) == offered[0] and not estimates


def test_few_orders_are_kept(estimates, monkeypatch):
    monkeypatch.setattr(_first_kernel, "_KEPT", 3)
    for M in range(64, 640, 64):
        first_kernel(product(M), 90)
        assert len(_first_kernel._orders) <= 3
