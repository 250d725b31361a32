"""Attention of 16-bit queries to keys and values of 8 bits, as a cache may hold them."""

from __future__ import annotations

import pytest
import torch
from support.sampling import some
from support.sdpa_cases import on_meta
from support.sdpa_fp8 import fp8_arguments, packed_fp8_arguments, paged_fp8_arguments

import kernel_api as ka
from kernel_api import masks
from kernel_api.errors import ArgumentError
from kernel_api.providers.cutedsl.sdpa import model
from kernel_api.verification import compare

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FEW, MANY = "sm90.sdpa_decode_fp8", "sm90.sdpa_forward_mixed"
ANY = "sm80.sdpa_forward_fp8"


def operands(S_q=3, device="cpu"):
    random = torch.Generator().manual_seed(0)
    Q = torch.randn((2, 8, S_q, 64), generator=random).to(BF16)
    K, V = (torch.randn((2, 2, 40, 64), generator=random).to(E4M3) for _ in range(2))
    return tuple(one.to(device) for one in (Q, K, V))


def by_torch(Q, K, V, of_keys, of_values, element):
    keys, values = (one.to(element) * scale for one, scale in ((K, of_keys), (V, of_values)))
    return torch.nn.functional.scaled_dot_product_attention(
        Q.to(element), keys, values, enable_gqa=True
    )


def test_numbers_are_those_of_wide_keys_and_values():
    Q, K, V = operands()
    found = ka.ops.sdpa(Q, K, V, descale_k=torch.tensor(0.5), descale_v=torch.tensor(3.0))
    assert found.dtype is BF16
    exact, plain = (by_torch(Q, K, V, 0.5, 3.0, element) for element in (torch.float64, BF16))
    assert compare(found, exact, plain)


def test_torch_compiles_it():
    Q, K, V = operands()
    own = torch.compile(lambda *qkv: ka.ops.sdpa(*qkv), backend="aot_eager", fullgraph=True)
    assert torch.equal(own(Q, K, V), ka.ops.sdpa(Q, K, V))


def test_there_are_no_gradients():
    Q, K, V = operands()
    found = ka.ops.sdpa(Q.requires_grad_(), K, V)
    with pytest.raises(ArgumentError, match="K is float8_e4m3fn; gradients are of 16-bit types"):
        found.sum().backward()


def families(args):
    kernels = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    return list(dict.fromkeys(kernel.family for kernel in kernels))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (fp8_arguments((2, 8, 2, 1, 4096, 128), queries=BF16), [FEW, MANY]),
        (fp8_arguments((1, 32, 8, 2048, 2048, 128), queries=BF16, statistics=()), [MANY, FEW]),
        (paged_fp8_arguments((2, 8, 2, 3, 128), (300, 90), 16, queries=BF16), [FEW, MANY]),
        (paged_fp8_arguments((2, 8, 2, 3, 128), (300, 90), 24, queries=BF16), [MANY]),
        (packed_fp8_arguments((4, 2, 64), ((40, 0), (70, 20)), queries=torch.float16), [FEW, MANY]),
        (
            paged_fp8_arguments((2, 8, 2, 3, 128), (90, 3), 16, queries=BF16, rows=(1, 9)),
            [FEW, MANY],
        ),
    ],
    ids=["few", "many", "pages", "pages of 24", "packed", "packed, pages"],
)
def test_few_queries_read_keys_as_they_are_and_many_wide_ones(args, expected):
    assert families(on_meta(args)) == [*expected, ANY]


def test_room_for_wide_keys_and_values_is_asked_for():
    """That of all pages that the table has places for, not of those that there are."""
    args = on_meta(paged_fp8_arguments((2, 8, 2, 300, 64), (300, 90), 16, queries=BF16))
    (kernel, *_) = (k for k in ka.get_kernels(args, cc=90) if k.family == MANY)
    keys = args.further["page_table"].shape[1] * 16
    assert kernel.get_workspace_size(args) == 65536 + 2 * 2 * keys * (64 + 64) * 2


@pytest.mark.parametrize("element", [BF16, E4M3])
def test_a_table_without_pages_is_for_kernels_that_write_no_keys_or_values(element):
    def empty(*shape, element=torch.int32):
        return torch.empty(shape, dtype=element, device="meta")

    K, out = empty(5, 2, 16, 64, element=E4M3), empty(2, 4, 300, 64, element=BF16)
    table, lengths = empty(2, 0), empty(2)
    Q = empty(2, 4, 300, 64, element=element)
    args = ka.SdpaArguments(Q, K, K, out, page_table=table, seq_lens_kv=lengths)
    assert families(args) == ([FEW] if element is BF16 else [])
    assert "the page table has no place for one" in str(ka.explain(args, cc=90))


def test_other_types_of_a_cache_are_for_the_kernel_of_all_gpus():
    Q, K, V = (one.to("meta") for one in operands())
    args = ka.SdpaArguments(Q, K.to(torch.float8_e5m2), V.to(torch.float8_e5m2), Q)
    assert families(args) == [ANY]
    assert "K is float8_e5m2; expected float8_e4m3fn" in str(ka.explain(args, cc=90))


@pytest.mark.parametrize("cc", [80, 89, 120])
@pytest.mark.parametrize("queries", [None, BF16])
def test_other_gpus_have_a_kernel_of_8_bits(cc, queries):
    args = on_meta(fp8_arguments((2, 8, 2, 5, 300, 128), queries=queries))
    kernels = ka.get_kernels(args, cc=cc, providers=["cutedsl"])
    assert {kernel.family for kernel in kernels} == {ANY}
    sizes = {kernel.get_workspace_size(args) for kernel in kernels}
    of_queries = 2 * 8 * 5 * 128 if queries is None else 0
    assert sizes == {65536 + 2 * (2 * 2 * 300 * (128 + 128) + of_queries)}


@pytest.mark.compile
@pytest.mark.parametrize("sizes", some([(1, 8, 2, 512, 512, 64), (2, 8, 2, 1, 4096, 128)], 1))
def test_kernels_spill_nothing(sizes):
    args = on_meta(fp8_arguments(sizes, queries=BF16, mask=masks.Causal("bottom_right")))
    first = ka.get_kernels(args, cc=90, providers=["cutedsl"])[0]
    assert first.compile(args, cc="90a").resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize(("queries", "D"), some([(torch.float16, 256), (BF16, 256), (BF16, 64)], 1))
def test_few_queries_of_16_bits_spill_nothing(queries, D):
    args = on_meta(fp8_arguments((2, 4, 2, 1, 300, D), queries=queries))
    (kernel, *_) = (k for k in ka.get_kernels(args, cc=90) if k.family == "sm90.sdpa_decode_fp8")
    assert kernel.compile(args, cc="90a").resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ((1, 64, 8, 128, 8192, 128), FEW),
        ((1, 64, 8, 512, 8192, 128), MANY),
        ((1, 32, 8, 512, 8192, 256), MANY),
        ((1, 32, 8, 2048, 2048, 64), MANY),
    ],
)
def test_what_was_faster_on_an_h100_is_first(sizes, first):
    B, H, H_kv, S_q, S_kv, D = sizes
    Q, K = (
        torch.empty(shape, dtype=element, device="meta")
        for shape, element in (((B, H, S_q, D), BF16), ((B, H_kv, S_kv, D), E4M3))
    )
    args = ka.SdpaArguments(Q, K, K, torch.empty_like(Q), mask=masks.Causal("bottom_right"))
    assert families(args)[0] == first


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("S_q", "S_kv"), [(100, 100), (1, 1000), (100, 1000), (1000, 100)])
def test_the_model_knows_how_much_a_causal_mask_hides(S_q, S_kv, alignment):
    Q, K = (torch.empty(1, 1, rows, 64, dtype=BF16, device="meta") for rows in (S_q, S_kv))
    mask = masks.Causal(alignment)
    args = ka.SdpaArguments(Q, K, K.clone(), torch.empty_like(Q), mask=mask)
    visible = torch.ones(S_q, S_kv).tril(0 if alignment == "top_left" else S_kv - S_q)
    assert model.seen(args) == pytest.approx(visible.mean().item())
