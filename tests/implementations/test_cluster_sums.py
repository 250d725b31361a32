"""Which products split K in a cluster, and which of them there are not."""

import pytest
from cutlass import BFloat16

from kernel_api.implementations.common.epilogue import Epilogue
from kernel_api.implementations.sm90.cluster_sums import ClusterSums
from kernel_api.implementations.sm90.gemm import Gemm
from kernel_api.implementations.sm90.grouped_gemm import GroupedGemm
from kernel_api.implementations.sm90.grouped_sum_gemm import GroupedSumGemm


class LooksAtPairs(Epilogue):
    bundle = 64


def gemm(tile=(128, 128, 64), cluster=(1, 1), schedule="cooperative", kind=Gemm, **options):
    types = {"a_type": BFloat16, "b_type": BFloat16, "output_types": (BFloat16,)}
    return kind(tile, cluster, schedule, **{**types, **options})


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_parts_are_left_where_the_stages_were(size):
    built = gemm(split_k=size, cluster_k=size)
    assert built.cluster_sums == ClusterSums(parts=size, threads=256, values=64)
    assert built.cluster_sums.bytes == 128 * 128 * 4
    assert built.shared_memory_bytes == gemm().shared_memory_bytes
    assert gemm(split_k=size).cluster_sums is None
    assert not built.meets_in_workspace
    assert all(gemm(split_k=parts).meets_in_workspace for parts in (1, size, "even"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"split_k": 9, "cluster_k": 9}, "has 2 to 8 blocks along K, not 9"),
        ({"split_k": 16, "cluster_k": 16}, "has 2 to 8 blocks along K, not 16"),
        (
            {"cluster": (2, 1), "split_k": 4, "cluster_k": 4},
            r"share no operands: it is \(1, 1\) along M and N, not \(2, 1\)",
        ),
        ({"cluster_k": 4}, "split_k is 4, or 'even', not None"),
        ({"split_k": 2, "cluster_k": 4}, "split_k is 4, or 'even', not 2"),
        ({"split_k": "stream", "cluster_k": 4}, "split_k is 4, or 'even', not 'stream'"),
        ({"split_k": 4, "cluster_k": 4, "schedule": "pingpong"}, "do not split tiles along K"),
        ({"parallel": True}, "adds up equal parts of tiles.*split_k is None"),
        ({"parallel": True, "split_k": "stream"}, "split_k is 'stream', cluster_k 1"),
        ({"parallel": True, "split_k": "even", "cluster_k": 4}, "not those of a cluster"),
        (
            {"parallel": True, "split_k": "even", "epilogue": LooksAtPairs()},
            "computes elements that stand alone",
        ),
        (
            {"tile": (128, 256, 16), "stages": 2, "split_k": 4, "cluster_k": 4},
            "a part of a tile takes 131072 bytes, the 2 stages where it is left have 24576",
        ),
    ],
)
def test_others_are_refused_with_what_they_may_be_instead(options, reason):
    with pytest.raises(ValueError, match=reason):
        gemm(**options)


def test_groups_of_rows_are_cut_in_a_cluster_alone():
    built = gemm(kind=GroupedGemm, split_k=2, cluster_k=2)
    assert built.cluster_sums == gemm(split_k=2, cluster_k=2).cluster_sums
    assert not built.meets_in_workspace


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (GroupedGemm, {"split_k": 2}, "split K among the blocks of a cluster alone"),
        (GroupedGemm, {"split_k": "stream"}, "split K among the blocks of a cluster alone"),
        (GroupedGemm, {"split_k": "even", "cluster_k": 2}, "among the blocks of a cluster alone"),
        (
            GroupedGemm,
            {"split_k": 2, "cluster_k": 2, "scheduler": "dynamic"},
            "clusters along K have a tile each, and take none",
        ),
        (GroupedSumGemm, {"split_k": 2, "cluster_k": 2}, "are cooperative, not split"),
    ],
)
def test_groups_are_cut_in_no_other_way(kind, options, reason):
    with pytest.raises(ValueError, match=reason):
        gemm(kind=kind, **options)


def test_accumulators_are_moved_in_vectors_of_four():
    with pytest.raises(ValueError, match="6 accumulators per thread are no multiple of 4"):
        ClusterSums(parts=2, threads=128, values=6)
