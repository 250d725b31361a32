"""How a Hopper grouped GEMM is built, and which designs are offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernel_api.providers.cutedsl.gemm import sm90_design
from kernel_api.providers.cutedsl.gemm.sm90_design import Sm90GemmDesign
from kernel_api.providers.cutedsl.grouped_gemm.base import most_row_tiles


@dataclass(frozen=True)
class Sm90GroupedGemmDesign(Sm90GemmDesign):
    """A :class:`Sm90GemmDesign` whose tiles end with their group."""

    @property
    def rows_per_tile(self) -> int:
        """Of a cluster's tiles."""
        return self.tile_shape[0] * self.cluster_shape[0]

    def most_clusters(self, args: Any) -> int:
        """Where groups may end anywhere."""
        if args.ragged == "K":
            return super().most_clusters(args)
        return most_row_tiles(args.T, args.L, self.rows_per_tile) * self.clusters(1, args.N, 1)


# What takes tiles stands behind what has a static share of them: the first of those that are
# expected to take as long is offered first. 192 accumulators leave a producer 24 registers, which
# are too few to take tiles.

#: Wide tiles for large groups, few rows for small ones. Clusters along N share rows of one group,
#: whatever its size; those along M lie idle in part where a group ends. Groups of up to some 130
#: rows take as long as their matrices are read, which is soonest in steps of 256 bytes along K.
#: What is independent asks most of L2, which sends it once to blocks that lie side by side: they do
#: on a GPU that is empty. One or two groups of few rows have fewer tiles than there are
#: multiprocessors: clusters along K have the parts of each.
OF_ROWS = (
    "128x128 1x2 pingpong",
    "128x128 1x2 pingpong dynamic",
    "128x192 2x1 pingpong",
    "128x160 1x2 pingpong dynamic",
    "128x256 1x2",
    "128x256 1x2 dynamic",
    "256x128 1x2",
    "256x128 1x2 dynamic",
    "128x256 1x1",
    "128x256 1x1 dynamic",
    "64x256 1x1 pingpong independent",
    "64x192 1x1 pingpong independent",
    "64x256 1x1 pingpong dynamic",
    "64x128 1x1 pingpong",
    "128x128 1x1",
    "128x128 1x1 dynamic",
    "64x128 1x1",
    "16x128 1x1 swap deep",
    "16x128 1x1 swap deep dynamic",
    "48x128 1x1 swap deep",
    "80x128 1x1 swap deep",
    "96x128 1x1 swap deep dynamic",
    "128x128 1x2 deep dynamic",
    "16x64 1x1x2 swap split2 deep",
    "64x64 1x1x2 split2 deep",
    "64x128 1x1x2 split2",
    "128x64 1x1x2 split2",
    "128x128 1x1x2 split2",
)
#: Those whose accumulators leave room for the products to be promoted.
PROMOTED_OF_ROWS = (
    "128x256 1x2",
    "128x256 1x2 dynamic",
    "128x256 1x1",
    "128x192 1x2",
    "128x128 1x2",
    "128x128 1x1",
    "128x128 1x1 dynamic",
    "64x256 1x1",
    "64x256 1x1 dynamic",
    "64x128 1x1",
    "64x64 1x1",
    "16x128 1x1 swap",
    "16x128 1x1 swap dynamic",
    "32x128 1x1 swap",
    "16x64 1x1x2 swap split2 deep",
    "64x64 1x1x2 split2",
    "128x64 1x1x2 split2",
    "128x128 1x1x2 split2",
)
#: Groups that are summed over have tiles of different lengths.
OF_SUMS = (
    "128x256 2x1",
    "128x256 2x1 dynamic",
    "256x128 1x2",
    "256x128 1x2 dynamic",
    "128x256 1x2",
    "128x192 2x1",
    "128x128 2x1",
    "128x128 1x1",
    "128x128 1x1 dynamic",
    "64x128 1x1",
)


def points(texts: tuple[str, ...], operand_bytes: int) -> Iterator[dict[str, Any]]:
    """Points of the design, see :func:`sm90_design.points`."""
    return sm90_design.points(texts, operand_bytes, design=Sm90GroupedGemmDesign)
