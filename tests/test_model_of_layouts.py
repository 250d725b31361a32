"""What the performance model knows of operands that are contiguous along M or N."""

import dataclasses

import pytest
from support.data import gemm_arguments

import kernel_api as ka
from kernel_api.providers.cutedsl.gemm import model
from kernel_api.providers.cutedsl.gemm.model import Candidate, Problem

SHIPPED = model.constants("sm90.gemm")


def of_layout(M, N, K, layouts):
    return gemm_arguments(M, N, K, types=("bfloat16",) * 3, layouts=layouts, device="meta")


def test_short_rows_of_what_is_contiguous_along_n_arrive_slowly():
    """768x3072x16384 of A along M and B along N takes 171 us in tiles of 128x144, whose rows of B
    are 32 bytes each, and 110 us in 128x160 ping-pong; K-major 144 columns would be the best."""
    turned, plain = (Problem.of(of_layout(768, 3072, 16384, one)) for one in ("ntt", "tnt"))
    assert (turned.A_turned, turned.B_turned) == (True, True)
    assert (plain.A_turned, plain.B_turned) == (False, False)
    narrow = Candidate((128, 144, 64), (2, 1), "cooperative", 6)
    wide = Candidate((128, 160, 64), (2, 1), "pingpong", 5)
    assert model.seconds(turned, narrow, SHIPPED) == pytest.approx(171e-6, rel=0.08)
    assert model.seconds(turned, wide, SHIPPED) == pytest.approx(110e-6, rel=0.08)
    assert model.seconds(plain, narrow, SHIPPED) < model.seconds(plain, wide, SHIPPED)
    for layouts, first in (("ntt", (128, 160)), ("tnt", (128, 144))):
        kernel = ka.get_kernels(of_layout(768, 3072, 16384, layouts), cc=90)[0]
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
