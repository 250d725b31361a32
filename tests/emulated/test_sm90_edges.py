"""What lies beyond the last row of a matrix is not loaded, and never reaches what is stored."""

import re

import pytest
from support.kernels import generated_by
from support.ptx import bulk, machine
from support.ptx.kernel import EmulatedKernel
from support.ptx.problems import awkward_arguments

from kernel_api import provider
from kernel_api.implementations.sm90.edge_loads import EdgeLoad
from kernel_api.verification import judge

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])
FAMILY = next(one for one in CUTEDSL.families() if one.family == "sm90.gemm")
ROW_BYTES = 128  # of a k tile of 64


@pytest.fixture
def loaded(monkeypatch):
    """Bytes of every load, in each block of a cluster that it goes to."""
    sizes = []

    class Load(bulk._Load):
        def advance(self, machine):
            sizes.append(self.data.size)
            return super().advance(machine)

    monkeypatch.setattr(bulk, "_Load", Load)
    return sizes


def products(design: str, M: int, N: int, K: int, layout: str = "tnt"):
    """A product by the kernel of a design, which is right."""
    name = rf"sm90_gemm_bf16_bf16_bf16_f32_{layout}_tile{design}_.*align16x16x16"
    kernel = next(k for k in generated_by(FAMILY) if re.fullmatch(name, k.metadata.kernel_name))
    args = awkward_arguments(kernel, M, N, K, values="integers")
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=8)
    assert judge(args)


@pytest.mark.parametrize(
    ("design", "M", "N", "rows", "copies"),
    [
        ("64x64x64_cluster1x1_cooperative", 64, 64, 64 + 64, 2),
        ("64x64x64_cluster1x1_cooperative", 5, 64, 16 + 64, 2),
        ("64x64x64_cluster1x1_cooperative", 64, 40, 64 + 48, 1 + 3),
        ("64x64x64_cluster1x1_cooperative", 17, 49, 32 + 64, 2 + 1),
        # Both blocks have A, in pieces of 8 rows that one of them loads; the second has none of B.
        # A row of a k tile of 128 is two of 64.
        ("64x64x128_cluster1x2_cooperative", 20, 8, 2 * (2 * 24 + 16), None),
        # Both have B; the second has none of A.
        ("128x64x64_cluster2x1_cooperative", 20, 40, 32 + 2 * 40, None),
        # Two blocks have A, two have B, one has neither: of A they have the first piece that its
        # second sharer loads, too, without which one of them would overtake the others.
        ("64x64x64_cluster2x2_cooperative", 20, 8, 4 * 40 + 2 * 8, None),
    ],
)
def test_only_pieces_with_rows_of_the_matrix_are_loaded(loaded, design, M, N, rows, copies):
    k_tiles = 3
    K = k_tiles * int(re.match(r"\d+x\d+x(\d+)", design)[1])
    products(design, M, N, K)
    assert sum(loaded) == k_tiles * rows * ROW_BYTES
    assert copies is None or len(loaded) == k_tiles * copies


@pytest.mark.parametrize(
    ("layout", "design", "M", "N", "rows"),
    [
        ("ntt", "128x128x64_cluster1x1_cooperative", 64, 65, 64 + 128),
        ("nnt", "128x128x64_cluster1x1_cooperative", 129, 128, 128 + 64 + 2 * 128),
        # Each of two blocks has half of the k tile of what both of them need.
        ("ntt", "64x64x64_cluster1x1_cooperative", 72, 8, 2 * (64 + 64)),
        ("ntt", "128x128x64_cluster1x2_pingpong", 64, 200, 2 * 64 + 128 + 128),
        ("ntt", "128x128x64_cluster1x2_pingpong", 64, 64, 2 * 64 + 64),
        ("ntt", "128x160x64_cluster2x1_pingpong", 8, 97, 64 + 2 * 128),
        ("ntt", "64x64x64_cluster2x2_cooperative", 20, 8, 2 * 64 + 2 * 64 + 2 * 64),
    ],
)
def test_only_panels_with_rows_of_the_matrix_are_loaded(loaded, layout, design, M, N, rows):
    k_tiles = 3
    products(design, M, N, k_tiles * 64, layout)
    assert sum(loaded) == k_tiles * rows * ROW_BYTES


@pytest.fixture
def last_block_is_late(monkeypatch):
    """The last block of a cluster seldom runs while others can, as where the GPU does something
    else between them."""
    ready = machine.Machine._ready

    def others_first(self):
        for number in self.random.permutation(len(self.warps)):
            warp = self.warps[number]
            late = warp.block.rank == self.cluster_size - 1 and self.random.random() < 0.995
            if not late and warp.ready():
                return warp
        return ready(self)

    monkeypatch.setattr(machine.Machine, "_ready", others_first)


@pytest.mark.parametrize(
    ("layout", "M", "N"), [("tnt", 20, 8), ("tnt", 20, 40), ("tnt", 40, 8), ("ntt", 20, 8)]
)
def test_blocks_wait_for_one_that_is_late(last_block_is_late, layout, M, N):
    products("64x64x64_cluster2x2_cooperative", M, N, 28 * 64, layout)


@pytest.mark.parametrize("share", range(8, 257, 8))
@pytest.mark.parametrize("sharers", (1, 2, 4))
def test_a_share_is_cut_into_a_few_pieces_of_whole_swizzles(share, sharers):
    rows = share * sharers
    load = EdgeLoad(rows, sharers)
    assert load.piece % 8 == 0
    assert share % load.piece == 0
    assert share // load.piece <= 6
    smaller = [piece for piece in range(8, load.piece, 8) if share % piece == 0]
    assert all(share // piece > 6 for piece in smaller)
    assert load.pieces * load.piece == rows
