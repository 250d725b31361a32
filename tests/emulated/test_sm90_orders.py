"""Clusters of a GPC have tiles that share operands: whatever the number of tiles and of clusters,
each is computed once. The PTX runs in the emulator, which knows no GPCs.

With KERNEL_API_EMULATE in the environment every case runs, else a sample.
"""

import pytest
import torch
from support.kernels import generated_by
from support.ptx.kernel import EmulatedKernel
from support.ptx.problems import awkward_arguments
from support.sampling import EVERY

from kernel_api import provider

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])
(GEMM,) = (one for one in CUTEDSL.families() if one.family == "sm90.gemm")
CLUSTERS = [(1, 1), (2, 1), (1, 2), (4, 1)]
TURNS = [(cluster, multiprocessors) for cluster in CLUSTERS for multiprocessors in (4, 132)]
#: Clusters along each mode all at once; of those without fellows, and of the longest, a few.
SAMPLE = TURNS if EVERY else [TURNS[index] for index in (0, 3, 6)]


def smallest(cluster):
    """Of the kernels of whole tiles that share in a GPC, the one with the smallest tile."""
    found = [
        kernel
        for kernel in generated_by(GEMM)
        if kernel.metadata.design.kernel_cluster == cluster
        and kernel.metadata.design.kernel_tile[1] >= 64
        and not kernel.metadata.design.splits
    ]
    return min(found, key=lambda kernel: kernel.metadata.design.tile_shape[:2])


@pytest.mark.parametrize(("cluster", "multiprocessors"), SAMPLE, ids=str)
def test_every_tile_is_computed_once(cluster, multiprocessors):
    """9 by 3 clusters: a few of them in turns, and all at once."""
    kernel = smallest(cluster)
    tile_m, tile_n, _ = kernel.metadata.design.tile_shape
    cluster_m, cluster_n, _ = kernel.metadata.design.cluster_shape
    M, N = 8 * tile_m * cluster_m + 5, 2 * tile_n * cluster_n + 9
    args = awkward_arguments(kernel, M, N, 24, values="integers", seed=tile_n)
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=multiprocessors, seed=tile_n)
    product = args.A.tensor.double() @ args.B.tensor.double()
    assert torch.equal(args.out.tensor, product.to(args.out.tensor.dtype))
