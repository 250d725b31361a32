"""How a Hopper GEMM is built, and which designs are offered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

from kernel_api.providers.cutedsl.gemm.splitting import SplitDesign

#: Shared memory of a CTA on every Hopper GPU.
SHARED_MEMORY_BYTES = 227 * 1024

#: Rows, and at most so many columns, that a warp group stages in each of two buffers.
SUBTILE = (64, 32)
_BARRIER_BYTES = 16
_FLAG_BYTES = 32
#: A ring of 16 tile numbers, each with an mbarrier.
_RING_BYTES = 16 * (8 + 4)

#: Of every operand row that a tile holds, or half of them: a swizzle of shared memory.
ROW_BYTES = 128

#: Columns of 16 bits that lie side by side in shared memory, as wide as the swizzles are.
_PANEL, _HALF_PANEL = 64, 32


#: Clusters of a size that run at once on an H200, as the driver says
#: (cuOccupancyMaxActiveClusters): one lies in one GPC, and those have different numbers of
#: multiprocessors.
_RESIDENT = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
_MULTIPROCESSORS = _RESIDENT[1]


def resident_clusters(multiprocessors: int, size: int) -> int:
    """How many clusters of a size run at once; of other GPUs a share of an H200's."""
    on_h200 = _RESIDENT.get(size, _MULTIPROCESSORS * 10 // (11 * size))
    return max(multiprocessors * on_h200 // _MULTIPROCESSORS, 1)


@dataclass(frozen=True)
class Sm90GemmDesign(SplitDesign):
    """A persistent, warp-specialised kernel. Tile and cluster are those of out; a cluster of
    (1, 1, split_k) has the parts of one tile, or if even_k, those of one part of it.

    Attributes:
        schedule: ``cooperative``: the consumer warp groups share a tile; ``pingpong``: each has
            its own, and one writes out while the other multiplies.
        stages: Tiles of A and B that shared memory holds.
        swap_ab: The transposed product is computed: few rows of out are few columns there, of
            which the instruction takes 16 at a time instead of 64.
        stream_k: Whether all CTAs get the same number of k tiles, across the borders of tiles.
        even_k: Whether each tile is cut into as many equal parts as are resident together; of
            CTAs that read the same k tile of different tiles, one finds it in L2.
        parallel: Whether partial sums are added up by a kernel that is launched behind, on all
            multiprocessors, instead of by the CTA that comes last to a tile.
        dependent_launch: Whether CTAs may start while the kernel before still ends, and let those
            of the next one do so where there is room (programmatic dependent launch).
        scheduler: ``static``: a cluster has every so many tiles; ``dynamic``: it takes another one
            as soon as it is free, from a counter in the workspace.
    """

    schedule: str = "cooperative"
    stages: int = 4
    swap_ab: bool = False
    stream_k: bool = False
    even_k: bool = False
    parallel: bool = False
    dependent_launch: bool = True
    scheduler: str = "static"

    @property
    def kernel_tile(self) -> tuple[int, int, int]:
        """The tile of the product that is computed, which is the transposed one if swapped."""
        m, n, k = self.tile_shape
        return (n, m, k) if self.swap_ab else (m, n, k)

    @property
    def kernel_cluster(self) -> tuple[int, int]:
        m, n, _ = self.cluster_shape
        return (n, m) if self.swap_ab else (m, n)

    @property
    def consumers(self) -> int:
        """Warp groups that multiply."""
        rows = self.kernel_tile[0]
        return 2 if self.schedule == "pingpong" or rows == 256 else rows // 64

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold a tile, or its share of one."""
        tile_m, tile_n, _ = self.kernel_tile
        sharing = 1 if self.schedule == "pingpong" else self.consumers
        return tile_m * tile_n // (128 * sharing)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def meets_in_workspace(self) -> bool:
        return super().meets_in_workspace or self.even_k

    @property
    def takes_tiles(self) -> bool:
        return self.scheduler == "dynamic"

    @property
    def uses_workspace(self) -> bool:
        return super().uses_workspace or self.takes_tiles

    @property
    def summing_groups(self) -> int:
        return self.consumers

    @property
    def splits(self) -> bool:
        """Whether a tile may be the work of several CTAs."""
        return self.stream_k or self.even_k or self.split_k > 1

    def resident(self, multiprocessors: int) -> int:
        """Clusters that run at once."""
        return resident_clusters(multiprocessors, self.cluster_size)

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory, however many stages there are."""
        return _FLAG_BYTES + (_RING_BYTES if self.takes_tiles else 0)

    def loaded_columns(self, contiguous: bool) -> int:
        """Columns of the product whose operand a stage holds. Of 16 bits and contiguous along them,
        it lies in panels that are copied row by row. Whole ones are copied, with what is beside the
        tile, where only quarters divide it: their rows take as long as longer ones. Halves that
        divide it have theirs in one line of L2 each, and take less than whole ones that do not."""
        columns = self.kernel_tile[1]
        if not contiguous or columns <= _HALF_PANEL or columns % _HALF_PANEL == 0:
            return columns
        return -(-columns // _PANEL) * _PANEL

    def most_stages(
        self,
        operand_bytes: int,
        out_bytes: int,
        small_parts: bool = False,
        columns_contiguous: bool = False,
    ) -> int:
        """As many as shared memory holds beside the buffers of the epilogue, by element sizes;
        small_parts: and beside two buffers of what is cut off float32; columns_contiguous: see
        `loaded_columns`."""
        tile_m, tile_n, tile_k = self.kernel_tile
        stage = (tile_m + self.loaded_columns(columns_contiguous)) * tile_k * operand_bytes
        beside = 2 * self.consumers * SUBTILE[0] * gcd(SUBTILE[1], tile_n) * out_bytes
        if small_parts:
            beside += 2 * stage
        return (SHARED_MEMORY_BYTES - beside - self.fixed_bytes) // (stage + _BARRIER_BYTES)

    def partial_tiles(self, M: int, N: int, K: int, L: int, multiprocessors: int) -> int:
        """Two of a cluster that may begin in the middle of one and end in the middle of another;
        one of every resident cluster where tiles are cut evenly."""
        resident = self.resident(multiprocessors)
        if self.even_k:
            return max(resident, self.clusters(M, N, L))
        if not self.stream_k:
            return super().partial_tiles(M, N, K, L, multiprocessors)
        return 2 * min(resident, self.clusters(M, N, L) * self.k_tiles(K))

    def label(self) -> str:
        parts = [super().label(), self.schedule, f"stages{self.stages}"]
        if self.swap_ab:
            parts.append("swap")
        if self.split_k > 1:
            parts.append(f"split{self.split_k}")
        if self.stream_k:
            parts.append("stream")
        if self.even_k:
            parts.append("even")
        if self.parallel:
            parts.append("parallel")
        if not self.dependent_launch:
            parts.append("independent")
        if self.takes_tiles:
            parts.append("dynamic")
        return "_".join(parts)


#: Words of a design that say yes.
_FLAGS = {"swap": "swap_ab", "stream": "stream_k", "even": "even_k", "parallel": "parallel"}


def _point(text: str, operand_bytes: int) -> dict[str, Any]:
    """``"128x256 2x1 pingpong swap deep split4 stream"``: tile and cluster, then what else there
    is. A deep tile has twice the K, for tiles so small that waiting for each takes longer. A
    cluster of ``1x1x4`` with ``split4`` has the parts of a tile, and with ``even`` those of one
    part. ``independent`` is what is launched when the kernel before has ended."""
    tile, cluster, *rest = text.split()
    k = ROW_BYTES // operand_bytes * (2 if "deep" in rest else 1)
    point: dict[str, Any] = {
        "tile_shape": (*map(int, tile.split("x")), k),
        "cluster_shape": (*map(int, cluster.split("x")), 1)[:3],
    }
    for word in rest:
        if word == "pingpong":
            point["schedule"] = word
        elif word == "dynamic":
            point["scheduler"] = word
        elif word == "independent":
            point["dependent_launch"] = False
        elif word in _FLAGS:
            point[_FLAGS[word]] = True
        elif word.startswith("split"):
            point["split_k"] = int(word.removeprefix("split"))
    return point


def points(
    texts: Iterable[str],
    operand_bytes: int,
    small_parts: bool = False,
    design: type[Sm90GemmDesign] = Sm90GemmDesign,
) -> Iterator[dict[str, Any]]:
    """Points of a design, each with as many stages as fit beside outputs of every width, and of
    elements of 16 bits in either order."""
    orders = (False, True) if operand_bytes == 2 else (False,)
    for text in texts:
        point = _point(text, operand_bytes)
        found = design(**point)
        most = {
            found.most_stages(operand_bytes, out, small_parts, contiguous)
            for out, contiguous in product((1, 2, 4), orders)
        }
        for stages in sorted(most):
            yield {**point, "stages": stages}


#: Tiles for much work: the more of them run at once, the better the wider ones. They have many
#: widths, so that the last wave of most problems is nearly full.
_WIDE = (
    "128x256 2x1",
    "128x256 1x2",
    "256x128 2x1",
    "256x128 1x2 swap",
    "128x224 2x1",
    "144x256 1x2 swap",
    "160x256 1x2 swap",
    "176x192 1x2 swap",
    "192x192 2x1",
    "192x160 2x1",
    "192x128 2x1",
    "192x128 1x2 swap",
    "192x144 1x2",
    "192x112 2x1",
    "192x80 1x2",
    "256x112 2x1",
    "128x192 2x1 pingpong",
    "128x160 2x1 pingpong",
    "128x160 1x2 pingpong",
    "144x128 1x2 pingpong swap",
    "128x128 2x1 pingpong",
    "128x128 1x2 pingpong",
    "128x112 2x1 pingpong",
    "128x112 1x2 pingpong",
    "64x256 2x1 pingpong",
    "64x256 1x2 pingpong",
    "128x224 1x1",
    "176x192 1x1 swap",
    "192x128 1x1 pingpong swap",
    "160x128 1x1 pingpong swap",
    "128x176 1x1 pingpong",
    "128x160 1x1 pingpong",
)
#: For about as many tiles as there are multiprocessors.
_NARROW = (
    "128x128 1x1",
    "128x128 1x1 pingpong",
    "64x256 1x1",
    "192x96 1x1",
    "128x96 1x1",
    "128x80 1x1",
    "96x128 1x1 swap",
    "64x48 1x1 deep",
    "64x224 2x1",
    "64x176 2x2 pingpong",
    "192x96 2x1",
    "192x96 1x2",
    "128x144 2x1",
    "128x144 1x2",
    "128x112 2x1",
    "128x96 2x1",
    "128x96 4x1",
    "128x80 2x1",
    "96x128 2x1 swap",
    "96x128 1x4 swap",
    "160x64 1x4 swap",
    "144x64 1x1 swap",
    "128x64 2x1",
    "128x64 1x2 swap",
    "64x128 2x2",
    "64x128 1x2 pingpong",
    "64x128 1x1",
    "64x112 2x1",
    "64x64 2x2",
    "64x64 1x1",
    "64x48 2x1 deep",
    "64x64 2x1 deep",
    "64x80 2x1 deep",
    "64x80 2x2 deep",
    "64x96 2x2 deep",
    "64x112 2x2 deep",
    "48x128 1x1 swap",
    "96x64 2x1 pingpong swap",
    "256x32 1x1",
)
#: For few tiles, or a last wave of few.
_SPLIT = (
    "128x256 2x1 stream",
    "192x128 1x2 swap stream",
    "128x128 1x1 stream",
    "128x256 1x2 split4",
    "192x128 1x2 swap split3",
    "128x128 1x1 split4",
    "64x64 2x2 split4",
    "64x112 2x1 split3 deep",
    "128x64 2x1 split3",
)
#: For few rows: a weight matrix is read as fast as it comes.
_FEW_ROWS = (
    "64x64 1x1 deep",
    "64x64 1x2 deep",
    "16x64 1x1 swap deep",
    "16x64 1x2 swap deep",
    "16x128 1x1 swap deep",
    "32x64 1x1 swap deep",
    "32x128 1x1 swap deep",
    "64x128 1x1 swap",
    "16x64 1x1 swap deep split4",
    "16x64 1x1 swap deep stream",
    "64x128 1x1 swap stream",
)
#: For few columns: the rows are read as fast as they come.
_FEW_COLUMNS = (
    "64x16 2x1 deep",
    "64x32 2x1 deep",
    "128x16 2x1 deep",
)
#: For few tiles of many products: as many parts as find room at once.
_MEETING = (
    "128x128 1x1x3 split3",
    "128x128 1x1x4 split4",
    "128x96 1x1x4 split4",
    "128x64 1x1x2 split2",
    "64x128 1x1x4 split4",
    "64x64 1x1x2 split2 deep",
    "64x64 1x1x4 split4 deep",
    "64x64 1x1x8 split8 deep",
    "64x32 1x1x8 split8 deep",
    "32x64 1x1x4 swap split4 deep",
    "32x64 1x1x8 swap split8 deep",
    "64x16 1x1x2 split2 deep",
    "64x16 1x1x4 split4 deep",
    "64x16 1x1x8 split8 deep",
    "16x64 1x1x2 swap split2 deep",
    "16x64 1x1x4 swap split4 deep",
    "16x64 1x1x8 swap split8 deep",
)
#: For so few tiles of so many products that a cluster of each leaves most multiprocessors idle.
_EVEN = (
    "128x256 2x1 even parallel",
    "128x160 1x2 even parallel",
    "192x192 2x1 even parallel",
    "64x160 1x2 even parallel",
    "128x224 2x1 even parallel",
    "128x128 2x1 even parallel",
    "128x128 2x2 even parallel",
    "64x128 2x2 even parallel",
    "64x64 2x2 even parallel",
    "64x64 1x1x8 split8 even deep",
    "16x64 1x1x8 swap split8 even deep",
)

#: Those of many tiles: beside another kernel, which has some of the multiprocessors, a static share
#: of them takes up to 1.6 times as long, and alone as long as tiles that are taken.
TAKEN = tuple(
    f"{one} dynamic"
    for one in (
        "128x256 2x1",
        "128x224 2x1",
        "144x256 1x2 swap",
        "160x256 1x2 swap",
        "192x192 2x1",
        "192x160 2x1",
        "192x128 2x1",
        "128x192 2x1 pingpong",
        "128x160 2x1 pingpong",
        "128x160 1x2 pingpong",
        "144x128 1x2 pingpong swap",
        "128x128 2x1 pingpong",
        "128x128 1x2 pingpong",
    )
)

ALL = (*_WIDE, *_NARROW, *_SPLIT, *_FEW_ROWS, *_FEW_COLUMNS, *_MEETING, *_EVEN)


def _columns(text: str) -> int:
    """Of the instruction."""
    return Sm90GemmDesign(**_point(text, operand_bytes=4)).kernel_tile[1]


#: Slower than the model of tfloat32 has them, where it has them first.
_SLOW_IN_TF32 = ("128x256 1x2 split4",)
#: Those whose instructions the DSL has for tfloat32.
TF32 = tuple(
    text
    for text in ALL
    if (_columns(text) == 16 or _columns(text) % 32 == 0) and text not in _SLOW_IN_TF32
)
#: Those whose accumulators leave room for the products to be promoted.
PROMOTED = (
    "128x256 2x1",
    "128x256 1x2",
    "128x224 2x1",
    "128x192 2x1",
    "128x176 2x1",
    "128x160 2x1",
    "128x144 2x1",
    "128x144 1x2",
    "192x128 2x1",
    "192x112 1x2",
    "192x80 1x2 deep",
    "128x128 2x1",
    "128x112 2x1",
    "128x96 2x1",
    "96x128 2x1 swap",
    "128x80 1x2 deep",
    "80x128 2x1 swap deep",
    "144x64 1x1 swap",
    "128x128 1x1",
    "128x64 2x1",
    "128x64 1x2",
    "128x64 1x1",
    "64x256 1x1",
    "64x128 2x2",
    "64x128 1x1",
    "64x96 2x1",
    "64x64 1x1",
    "128x128 1x1 stream",
    "64x128 1x1 stream",
    "128x128 1x1 split4",
    "64x64 2x2 split4",
    "64x128 1x1 swap",
    "64x128 2x1 swap",
    "16x64 1x1 swap stream",
    "16x128 1x1 swap stream",
    "32x128 1x1 swap stream",
    "64x128 1x1 swap stream",
    "16x64 1x1 swap split4",
    "64x64 1x1 deep",
    "64x64 2x1 deep",
    "16x64 1x1 swap deep",
    "32x64 1x1 swap deep",
    "32x64 2x1 swap deep",
    "48x64 2x1 swap deep",
    "80x64 2x1 swap deep",
    "128x64 1x1 deep",
    "64x128 2x1 swap deep",
    "64x128 1x1x2 split2 deep",
    "128x80 1x1x2 split2 deep",
    "192x80 1x1x2 split2 deep",
    "32x64 1x1x2 swap split2 deep",
    "64x48 1x1x8 split8 deep",
    "128x64 1x1x2 split2",
    "128x64 1x1x4 split4",
    "128x128 1x1x2 split2",
    "128x128 1x1x4 split4",
    "64x128 1x1x2 split2",
    "64x128 1x1x4 split4",
    "64x64 1x1x4 split4",
    "16x64 1x1x4 swap split4",
    "64x256 1x1x2 split2",
    "64x256 1x1x4 split4",
    "64x256 1x1x8 split8",
)
PROMOTED_TAKEN = tuple(f"{one} dynamic" for one in ("128x256 2x1", "128x192 2x1", "128x128 2x1"))
#: Those that have two stages beside the small parts of float32.
SPLIT_FLOAT32 = (
    "128x128 2x1",
    "128x128 1x1",
    "64x128 2x1 pingpong",
    "64x128 1x1",
    "64x64 1x1",
    "128x128 1x1 stream",
    "64x64 1x1 split4",
    "16x64 1x1 swap",
    "32x64 1x1 swap",
    "16x64 1x1 swap stream",
    "64x128 1x1 swap stream",
)
#: For operands that are copied before: every problem has one that is not far from its best.
REPACKED = (
    "128x256 2x1",
    "128x192 2x1 pingpong",
    "128x128 2x1 pingpong",
    "64x256 2x1 pingpong",
    "128x128 1x1",
    "128x64 2x1",
    "64x64 1x1",
    "16x64 1x1 swap deep",
    "64x128 1x1 swap",
    "128x256 2x1 even parallel",
    "128x160 1x2 even parallel",
    "64x128 2x2 even parallel",
    "64x64 2x2 even parallel",
)
REPACKED_PROMOTED = (
    "128x192 2x1",
    "128x128 2x1",
    "128x128 1x1",
    "64x64 1x1",
    "16x64 1x1 swap",
    "64x128 1x1 swap",
)
