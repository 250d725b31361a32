"""What the performance model knows of operands that are contiguous along M or N."""

import dataclasses

import pytest
from support.data import gemm_arguments

import kernel_api as ka
from kernel_api.providers.cutedsl.gemm import machine, model
from kernel_api.providers.cutedsl.gemm.model import Candidate, Problem

SHIPPED = machine.constants("sm90.gemm")


def of_layout(M, N, K, layouts):
    return gemm_arguments(M, N, K, types=("bfloat16",) * 3, layouts=layouts, device="meta")


@pytest.mark.parametrize(
    ("candidate", "longer"),
    [
        (Candidate((192, 112, 64), (2, 1), "cooperative", 5), 1.13),
        (Candidate((128, 160, 64), (2, 1), "pingpong", 5), 1.07),
        (Candidate((64, 160, 64), (4, 1), "cooperative", 7, swap_ab=True), 1.04),
        (Candidate((192, 128, 64), (2, 1), "cooperative", 5), 1.0),
    ],
)
def test_what_is_contiguous_along_columns_arrives_slowly_in_parts_of_lines(candidate, longer):
    """Medians of what up to twelve problems took on an H100, of what K-major operands do."""
    turned, plain = (Problem.of(of_layout(3072, 768, 16384, one)) for one in ("ntt", "tnt"))
    assert (turned.A_turned, turned.B_turned) == (True, True)
    assert (plain.A_turned, plain.B_turned) == (False, False)
    ratio = model.seconds(turned, candidate, SHIPPED) / model.seconds(plain, candidate, SHIPPED)
    assert ratio == pytest.approx(longer, rel=0.12)


def test_rows_along_m_that_begin_within_a_line_take_l2_longer():
    """200x4096x4096 in 128x64 takes 17.7 us where A is K-major, and 30.0 us where its rows of 400
    bytes are 200 of M. Kernels that read the same k tile at one time do not take as much longer:
    24.6 and 27.9 us."""
    small = Candidate((128, 64, 64), (2, 1), "cooperative", 8)
    even = Candidate((128, 128, 64), (2, 1), "cooperative", 6, even_k=True, parallel=True)
    split, plain = (Problem.of(of_layout(200, 4096, 4096, one)) for one in ("nnt", "tnt"))
    assert split.A_straddles
    for candidate, longer in ((small, 1.70), (even, 1.14)):
        ratio = model.seconds(split, candidate, SHIPPED) / model.seconds(plain, candidate, SHIPPED)
        assert ratio == pytest.approx(longer, rel=0.2)


def test_other_tiles_are_first_for_what_is_contiguous_along_columns():
    """128x192 takes 159 us there, 128x160 takes 172."""
    for layouts, first in (("ntt", (128, 192)), ("tnt", (128, 160))):
        kernel = ka.get_kernels(of_layout(4096, 14336, 1024, layouts), cc=90)[0]
        assert kernel.metadata.design.tile_shape[:2] == first


def test_a_transposed_product_has_its_rows_where_it_reads_them():
    """Kernels that compute the transposed product read B as their rows."""
    turned = Problem.of(of_layout(4096, 4096, 4096, "nnt"))  # A alone is along M
    swapped = Candidate((256, 144, 64), (2, 1), "cooperative", 4, swap_ab=True)
    plain = Candidate((256, 144, 64), (2, 1), "cooperative", 4)
    straight = dataclasses.replace(turned, A_turned=False)
    assert model.seconds(turned, swapped, SHIPPED) > model.seconds(straight, swapped, SHIPPED)
    assert model.seconds(turned, plain, SHIPPED) == model.seconds(straight, plain, SHIPPED)


def test_what_is_turned_before_has_rows_of_whole_lines():
    for types in (("float8_e4m3fn", "float8_e4m3fn", "bfloat16"), ("float32",) * 3):
        args = gemm_arguments(256, 256, 256, types=types, layouts="ntt", device="meta")
        assert not Problem.of(args).A_turned
        assert not Problem.of(args).B_turned


@pytest.mark.parametrize(
    ("sizes", "layouts", "family"),
    [
        ((300, 300, 50000), "ntt", "sm90.gemm_repacked"),
        ((66, 514, 8002), "tnt", "sm90.gemm_repacked"),
        ((1002, 1002, 4000), "ntt", "sm90.gemm_repacked"),
        ((50, 50, 200000), "ntt", "sm80.gemm"),
    ],
)
def test_rows_of_half_vectors_are_copied_before_long_products(sizes, layouts, family):
    """On an H100: 82 us and 103 where threads copy 4 bytes at a time; 16 and 24; 35 and 44; 63 and
    37, where there are few rows to copy."""
    first = ka.get_kernels(of_layout(*sizes, layouts), cc=90, providers=["cutedsl"])[0]
    assert first.family == family


def test_a_step_of_narrow_copies_takes_longer_and_less_so_in_large_tiles():
    """Per launch there is nothing more to do; per step twice as much, or half of that in tiles
    whose operands are shared by twice as many products."""
    sm80 = machine.constants("sm80.gemm")
    short, long = (Problem.of(of_layout(258, 258, K, "ntt")) for K in (64, 64000))
    plain = Candidate((64, 64, 64), stages=4)
    narrow = dataclasses.replace(plain, load_cost=2.0)
    assert model.seconds(short, narrow, sm80) < 1.1 * model.seconds(short, plain, sm80)
    assert model.seconds(long, narrow, sm80) > 1.9 * model.seconds(long, plain, sm80)
    costs = {
        (kernel.metadata.operands.A.alignment, kernel.metadata.design.tile_shape[:2]): (
            kernel.candidate.load_cost
        )
        for kernel in ka.get_kernels(of_layout(258, 258, 264, "ntt"), cc=80, providers=["cutedsl"])
    }
    assert costs[4, (64, 64)] == costs[4, (16, 64)] == 2
    assert costs[4, (128, 128)] == 1.5
    assert costs[2, (64, 64)] > costs[4, (64, 64)]
