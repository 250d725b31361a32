"""What the GEMM families share that may cut their work along K as well, and scale what comes out.

Parts of a tile go through a workspace: first a counter per tile and group of threads that sums it
up, zero before and after every launch, then the partial sums. Those that CTAs of one cluster have
meet in shared memory instead; clusters that share a tile leave their sums in the workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api._workspaces import COUNTER_BYTES, PART_BYTES, ZEROED
from kernel_api.arguments import GemmArguments
from kernel_api.devices import multiprocessors_of
from kernel_api.metadata import BLASDesignMetadata, KernelMetadata
from kernel_api.providers.cutedsl.gemm.base import CuteDslGemm
from kernel_api.providers.cutedsl.gemm.scaling import aligned_scales
from kernel_api.space import Miss, rule


@dataclass(frozen=True)
class SplitDesign(BLASDesignMetadata):
    """A tile that several CTAs may share, each with a part of K.

    Attributes:
        split_k: Parts that K is cut into; CTAs compute one part of a tile each. Where the cluster
            has as many CTAs along K, they are the CTAs of a tile, and need no workspace unless
            several clusters share a tile.
    """

    split_k: int = 1

    @property
    def splits(self) -> bool:
        """Whether a tile may be the work of several CTAs."""
        return self.split_k > 1

    @property
    def meets_in_workspace(self) -> bool:
        """Whether what CTAs compute of a tile is added up there."""
        return self.splits and self.cluster_shape[2] == 1

    @property
    def uses_workspace(self) -> bool:
        return self.meets_in_workspace

    @property
    def cluster_size(self) -> int:
        return prod(self.cluster_shape)

    @property
    def summing_groups(self) -> int:
        """Groups of a CTA's threads that each sum up a share of a tile."""
        return 1

    def clusters(self, M: int, N: int, L: int) -> int:
        """Tiles of out, in units of those that a cluster has at a time."""
        rows = self.tile_shape[0] * self.cluster_shape[0]
        columns = self.tile_shape[1] * self.cluster_shape[1]
        return -(-M // rows) * -(-N // columns) * L

    def most_clusters(self, args: Any) -> int:
        """The same of arguments."""
        return self.clusters(args.M, args.N, args.L)

    def k_tiles(self, K: int) -> int:
        return -(-K // self.tile_shape[2])

    def partial_tiles(self, M: int, N: int, K: int, L: int, multiprocessors: int) -> int:
        """That a workspace has room for, in units of a cluster."""
        return self.clusters(M, N, L) * self.split_k

    def workspace_bytes(self, M: int, N: int, K: int, L: int, multiprocessors: int) -> int:
        if not self.meets_in_workspace or not M * N * K * L:
            return 0
        tile_m, tile_n, _ = self.tile_shape
        of_cluster = prod(self.cluster_shape[:2])
        tiles = self.partial_tiles(M, N, K, L, multiprocessors) * of_cluster
        return ZEROED + tiles * tile_m * tile_n * PART_BYTES


class SplitGemm(CuteDslGemm):
    """A family whose designs are :class:`SplitDesign`, and whose operands may carry scales."""

    _design: SplitDesign

    def __init__(self, metadata: KernelMetadata) -> None:
        super().__init__(metadata)
        self.reorders_accumulation = self._design.splits

    @rule("every part of K has a k tile")
    def _(design: SplitDesign, args: GemmArguments) -> bool | Miss:
        if design.split_k == 1 or design.split_k <= design.k_tiles(args.K):
            return True
        least = (design.split_k - 1) * design.tile_shape[2] + 1
        return Miss(f"K is {args.K}", f"would match with K of {least} or more")

    @rule("a workspace has room for 16384 counters, one per group of threads that sums up a tile")
    def _(design: SplitDesign, args: GemmArguments) -> bool | Miss:
        if not design.meets_in_workspace:
            return True
        groups = design.cluster_size * design.summing_groups
        counters = design.clusters(args.M, args.N, args.L) * groups
        return counters * COUNTER_BYTES <= ZEROED or Miss(f"{counters} are needed")

    @rule("a split along K is for less than 512 parts of tiles")
    def _(design: SplitDesign, args: GemmArguments) -> bool | Miss:
        if design.split_k == 1:
            return True
        parts = design.most_clusters(args) * design.split_k
        return parts < 512 or Miss(f"there would be {parts}")

    @cached_property
    def takes_more(self) -> bool:
        scaled = any(tensor.scale is not None for tensor in self.metadata.operands.tensors.values())
        return scaled or self._design.uses_workspace

    def more_values(self, args: Any) -> dict[str, Any]:
        return {f"{name}_scale": scale for name, scale in aligned_scales(args).items()}

    def workspace_for(self, *tensors: Any) -> int:
        if not self._design.uses_workspace:
            return 0
        A, B, _ = (tensor.shape for tensor in tensors)
        L = A[0] if len(A) == 3 else 1
        multiprocessors = multiprocessors_of(tensors[0].device)
        return self._design.workspace_bytes(A[-2], B[-1], A[-1], L, multiprocessors)

    def get_workspace_size(self, args: Any) -> int:
        multiprocessors = multiprocessors_of(args.device)
        return self._design.workspace_bytes(args.M, args.N, args.K, args.L, multiprocessors)
