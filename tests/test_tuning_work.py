"""How much work problems are, beside products: what is counted, and of what nothing is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import masks
from kernel_api.tuning import Policy, Problem
from kernel_api.tuning._roofs import roofs_of
from kernel_api.tuning._work import least_us, work_of

BF16 = torch.bfloat16


def empty(*shape, element=BF16):
    return torch.empty(shape, dtype=element, device="meta")


def groups(E, T=64, K=32, N=48, **options):
    ends = empty(E, element=torch.int32)
    return ka.GroupedGemmArguments(empty(T, K), empty(E, K, N), empty(T, N), ends, **options)


def attention(S_q=40, S_kv=64, mask=None, **options):
    q, out = empty(2, 6, S_q, 64), empty(2, 6, S_q, 32)
    return ka.SdpaArguments(
        q, empty(2, 3, S_kv, 64), empty(2, 3, S_kv, 32), out, mask=mask, **options
    )


def gradient(S_q=40, S_kv=64, mask=None):
    q, o = empty(2, 6, S_q, 64), empty(2, 6, S_q, 32)
    k, v = empty(2, 3, S_kv, 64), empty(2, 3, S_kv, 32)
    lse = empty(2, 6, S_q, element=torch.float32)
    return ka.SdpaBackwardArguments(
        q, k, v, o, o.clone(), lse, q.clone(), k.clone(), v.clone(), mask=mask
    )


def work(args):
    return work_of(Problem.of(args))


def visible(mask, S_q, S_kv):
    """(S_q, S_kv), by the definition."""
    shift = S_kv - S_q if mask.alignment == "bottom_right" else 0
    left, right = getattr(mask, "left", None), getattr(mask, "right", 0)
    distance = torch.arange(S_kv) - torch.arange(S_q)[:, None] - shift
    seen = torch.ones(S_q, S_kv, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    return seen if right is None else seen & (distance <= right)


def test_products_of_groups_count_each_token_once_and_every_expert():
    found = work(groups(3))
    assert found.operations == 2 * 64 * 32 * 48
    assert found.bytes == 2 * (64 * 32 + 3 * 32 * 48 + 64 * 48) + 3 * 4
    assert found.kind == "float16"


def test_sums_over_tokens_count_each_token_once():
    offsets = empty(3, element=torch.int32)
    args = ka.GroupedGemmArguments(empty(32, 64), empty(64, 48), empty(3, 32, 48), offsets)
    assert work(args).operations == 2 * 64 * 32 * 48


def test_nothing_is_known_where_rows_are_picked_or_experts_may_have_no_tokens():
    assert work(groups(3, row_index=empty(64, element=torch.int32))) is None
    assert work(groups(65)) is None
    assert work(groups(64)) is not None


def test_an_out_that_is_not_stored_is_not_counted():
    x, sums = empty(64, 32), empty(64, element=torch.float32)
    epilogue = ka.EpilogueArguments(lambda accum: (accum, ep.sum(accum, -1)), sums=sums)
    args = ka.ElementwiseArguments(x, None, epilogue=epilogue)
    assert work(args).bytes == 64 * 32 * 2 + 64 * 4


def test_attention_counts_the_products_of_all_heads():
    scores = 2 * 6 * 40 * 64
    assert work(attention()).operations == 2 * scores * (64 + 32)
    assert work(gradient()).operations == 2 * scores * (3 * 64 + 2 * 32)
    assert work(attention()).bytes == 2 * (12 * 40 * (64 + 32) + 6 * 64 * (64 + 32))


bounds = st.none() | st.integers(0, 12)
alignments = st.sampled_from(("top_left", "bottom_right"))
bands = st.builds(masks.Causal, alignments) | st.builds(
    masks.SlidingWindow, bounds, bounds, alignments
)


@given(bands, st.integers(1, 9), st.integers(1, 9))
def test_a_band_counts_what_it_shows_or_nothing_if_it_hides_rows_or_keys_whole(mask, S_q, S_kv):
    seen = visible(mask, S_q, S_kv)
    found = work(attention(S_q, S_kv, mask))
    if seen.any(0).all() and seen.any(1).all():
        assert found.operations == 2 * 12 * int(seen.sum()) * (64 + 32)
    else:
        assert found is None


def test_other_masks_count_bytes_only():
    found = work(attention(mask=masks.MaskMod(lambda b, h, q, kv: q >= kv)))
    assert found.operations is None
    assert found.bytes == work(attention()).bytes


@pytest.mark.parametrize("name", ["cu_seqlens", "page_table", "both"])
def test_nothing_is_known_of_packed_or_paged_sequences(name):
    if name == "cu_seqlens":
        q, ends = empty(70, 6, 64), empty(3, element=torch.int32)
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        args = ka.SdpaArguments(q, q, q, q.clone(), max_seqlen_q=40, max_seqlen_kv=40, **lengths)
    else:
        table, lengths = (empty(*s, element=torch.int32) for s in ((2, 4), (2,)))
        pages = empty(8, 3, 16, 64)
        told = {"page_table": table, "seq_lens_kv": lengths}
        q = empty(2, 6, 1, 64)
        if name == "both":
            q = empty(70, 6, 64)
            told |= {"cu_seqlens_q": empty(3, element=torch.int32), "max_seqlen_q": 69}
        args = ka.SdpaArguments(q, pages, pages, q.clone(), **told)
    assert work(args) is None
    assert least_us(Problem.of(args), "NVIDIA H200", Policy()) == 0


def test_the_least_time_is_that_of_the_slower_of_arithmetic_and_memory():
    roofs = roofs_of("NVIDIA H200")
    args = attention(4096, 4096, masks.Causal())
    problem = Problem.of(args)
    found = work_of(problem)
    least = 1e-6 * least_us(problem, "NVIDIA H200", Policy())
    assert least == pytest.approx(found.operations / roofs.rates["float16"])
    few = Problem.of(attention(1, 4096))
    least = 1e-6 * least_us(few, "NVIDIA H200", Policy())
    assert least == pytest.approx(work_of(few).bytes / roofs.bandwidth)
