"""Hopper GEMMs that copy operands first: when they are offered, and what room they take."""

import pytest
from support.data import gemm_arguments

import kernel_api as ka
from kernel_api._workspaces import ZEROED
from kernel_api.providers.cutedsl.gemm.sm90_repacked import RepackedGemmFamily

BF16 = ("bfloat16",) * 3


def repacked(args):
    offered = ka.get_kernels(args, cc="90a", providers=["cutedsl"])
    return [kernel for kernel in offered if isinstance(kernel, RepackedGemmFamily)]


def reason(args, family):
    rejected = ka.explain(args, cc="90a").rejected
    return next(str(one) for one in rejected if one.family == family)


def test_operands_that_tma_reads_are_not_copied():
    args = gemm_arguments(512, 512, 1024, types=BF16, layouts="tnt", device="meta")
    assert repacked(args) == []
    assert "operands are copied only where TMA cannot read them as they are" in reason(
        args, "sm90.gemm_repacked"
    )


@pytest.mark.parametrize(
    ("sizes", "layouts", "pads", "expected"),
    [
        ((512, 512, 1001), "tnt", (0, 0, 0), (True, True)),
        ((512, 512, 1024), "tnt", (1, 0, 0), (True, False)),
        ((512, 513, 1024), "ttt", (0, 0, 0), (False, True)),
        ((511, 512, 1024), "nnt", (0, 0, 0), (True, False)),
    ],
)
def test_only_what_needs_it_is_copied(sizes, layouts, pads, expected):
    args = gemm_arguments(*sizes, types=BF16, layouts=layouts, pads=pads, device="meta")
    kernels = repacked(args)
    assert kernels
    assert {kernel.repacked for kernel in kernels} == {expected}


@pytest.mark.parametrize(
    ("types", "family"),
    [
        (("int8", "int8", "int32"), "sm90.gemm_int8_repacked"),
        (("float8_e4m3fn", "float8_e5m2", "float32"), "sm90.gemm_fp8_repacked"),
    ],
)
@pytest.mark.parametrize(
    ("layouts", "copied"),
    [("ntt", (True, True)), ("ttt", (False, True)), ("nnt", (True, False)), ("ntn", (True, True))],
)
@pytest.mark.parametrize("K", [512, 528])
def test_8_bit_operands_that_are_not_along_k_are_turned_and_no_others(
    types, family, layouts, copied, K
):
    args = gemm_arguments(256, 256, K, types=types, layouts=layouts, device="meta")
    offered = repacked(args)
    assert {kernel.family_name() for kernel in offered} == {family}
    assert {kernel.repacked for kernel in offered} == {copied}
    assert ka.get_kernels(args, cc=90)[0] == offered[0]


def test_a_copy_has_rows_of_whole_lines_and_begins_at_a_multiple_of_128():
    M, N, K, L = 33, 70, 1001, 3
    args = gemm_arguments(M, N, K, L, types=BF16, layouts="tnt", device="meta")
    kernel = repacked(args)[0]
    row = 2048  # of 2002 bytes, whole lines
    a, b = (-(-row * rows * L // 128) * 128 for rows in (M, N))
    assert kernel.get_workspace_size(args) == ZEROED + a + b


def test_a_copy_of_16_bit_elements_keeps_what_is_contiguous():
    M, N, K = 65, 64, 1024
    args = gemm_arguments(M, N, K, types=BF16, layouts="nnt", device="meta")
    (kernel, *_) = repacked(args)
    assert kernel.repacked == (True, False)
    assert kernel.get_workspace_size(args) == ZEROED + 2 * 72 * K


def test_partial_sums_have_their_place_behind_copies():
    args = gemm_arguments(300, 300, 50000, types=BF16, layouts="ntt", device="meta")
    first = repacked(args)[0]
    assert first.metadata.design.even_k
    assert first.metadata.design.parallel
    alone = first.metadata.design.workspace_bytes(300, 300, 50000, 1, 132) - ZEROED
    assert alone > 300 * 300 * 4
    assert first.get_workspace_size(args) == ZEROED + 2 * (640 * 50000) + alone


def test_counters_and_copies_do_not_share_a_workspace():
    cutlass = pytest.importorskip("cutlass")
    from kernel_api.implementations.sm90.gemm import Gemm

    with pytest.raises(ValueError, match="leave no room for counters in the workspace"):
        Gemm(
            (128, 128, 64),
            a_type=cutlass.BFloat16,
            b_type=cutlass.BFloat16,
            output_types=(cutlass.BFloat16,),
            split_k=2,
            repacked=(True, False),
        )
