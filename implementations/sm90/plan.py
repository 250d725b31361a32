"""What follows from a design of the Hopper GEMM before anything is traced."""

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Float32, Int32

from ..common.epilogue import Epilogue, Finish
from ..common.threads import GROUP
from ..common.work_split import PartialSums
from .cluster_sums import ClusterSums
from .mainloop import Mainloop
from .mma import K_BYTES, WGMMA_M, check_types
from .output import Output
from .paired_output import PairedOutput
from .parallel_sums import ParallelSums
from .promotion import (
    MOST_SCALED_COLUMNS,
    SCALE_BLOCK,
    BlockScales,
    ColumnScales,
    HalvedRowScales,
    RowScales,
    StraddlingRowScales,
    promoted_columns,
    straddled_blocks,
    straddling_pieces,
)
from .split_float32 import SMALL_BUFFERS, FloatSplitter
from .tile_queue import BYTES as QUEUE_BYTES

SHARED_MEMORY = 227 * 1024  # per block, on every Hopper GPU

CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))

MOST_COLUMNS = 256  # of wgmma

MOST_ALONG_K = 8  # blocks of a cluster: as many as every GPU takes

#: Registers of a thread for what is read early, and together with its accumulators.
MOST_EARLY, EARLY_AND_ACCUMULATORS = 64, 212

#: Of a thread's registers, for accumulators and the products of two steps.
MOST_AHEAD = 192

CONSUMER_BARRIERS = 1  # named barriers 1, 2, 3: one per consumer group

OUTPUT_TYPES = (Float16, BFloat16, Float32, Int32, Float8E4M3FN, Float8E5M2)


class GemmPlan:
    """A design that is checked, with its consumers, registers, stages and shared memory.

    The arguments are described with the kernel, `Gemm`.

    Attributes:
        consumers: Warp groups that multiply; groups_per_tile of them share a tile.
        row_blocks: Of 64 rows of a tile, per consumer.
        accumulators: Per thread of a consumer.
        columns: Of one wgmma.
        registers: (producer, each consumer), or None: as launched.
        shared_memory_bytes: Of a block.

    Raises ValueError for a design that cannot be built, with what it may be instead.
    """

    dynamic = False  # whether tiles are taken from a counter

    def __init__(
        self,
        tile_shape: tuple[int, int, int],
        cluster_shape: tuple[int, int] = (1, 1),
        schedule: str = "cooperative",
        *,
        a_type: type[cutlass.Numeric],
        b_type: type[cutlass.Numeric],
        output_types: tuple[type[cutlass.Numeric], ...],
        accumulator_type: type[cutlass.Numeric] = Float32,
        stages: int | None = None,
        tma_stores: tuple[bool, ...] = (True,),
        swap_ab: bool = False,
        split_k: int | str | None = None,
        cluster_k: int = 1,
        parallel: bool = False,
        promoted: bool = False,
        block_scales: bool = False,
        split_float32: bool = False,
        repacked: tuple[bool, bool] = (False, False),
        loaded_columns: int | None = None,
        dependent_launch: bool = True,
        epilogue: Epilogue | None = None,
    ):
        self.tile_shape = tuple(tile_shape)
        self.cluster_shape = tuple(cluster_shape)
        self.schedule = schedule
        self.operand_types = (b_type, a_type) if swap_ab else (a_type, b_type)
        self.output_types = output_types
        self.accumulator_type = accumulator_type
        self.tma_stores = tma_stores
        self.swap_ab = swap_ab
        self.split_k = split_k
        self.cluster_k = cluster_k
        self.parallel = parallel
        self.promoted = promoted or block_scales or split_float32
        self.split_float32 = split_float32
        self.block_scales = block_scales
        self.repacked = repacked
        self.loaded_columns = loaded_columns or self.tile_shape[1]
        self.dependent_launch = dependent_launch
        self.epilogue = epilogue or Finish()
        self._check()

        tile_m, tile_n, tile_k = self.tile_shape
        self.pingpong = schedule == "pingpong"
        self.consumers = 2 if self.pingpong else consumers_of(tile_m)
        self.groups_per_tile = 1 if self.pingpong else self.consumers
        self.row_blocks = tile_m // WGMMA_M // self.groups_per_tile  # of a tile, per consumer
        self.threads = GROUP * (1 + self.consumers)
        self.accumulators = self.row_blocks * tile_n // 2  # per thread
        self.columns = tile_n  # of one wgmma
        if self.promoted:
            self.columns = promoted_columns(tile_n, block_scales and not swap_ab)
        if self.row_blocks > 1 and (block_scales or self.columns < tile_n):
            raise ValueError(
                f"tile {tile_m}x{tile_n}, {schedule}: {self.row_blocks} blocks of rows "
                "per consumer cannot be promoted"
            )
        #: Whether registers hold the products of two steps, where no other group multiplies while
        #: one promotes.
        self.ahead = (
            self.promoted
            and not split_float32
            and self.consumers == 1
            and self.accumulators + 2 * (self.columns // 2) <= MOST_AHEAD
        )
        self.registers = self._plan_registers()
        written = self.epilogue.transposed() if swap_ab else self.epilogue
        self.output = (Output if written.row_pairs is None else PairedOutput)(
            output_types,
            written,
            tile=(tile_m, tile_n),
            row_blocks=self.row_blocks,
            row_step=self.groups_per_tile,
            tma_stores=tma_stores,
            first_barrier=CONSUMER_BARRIERS,
        )
        self.stages, self.output.buffers, self.shared_memory_bytes = self._plan_shared_memory(
            stages
        )
        splitter = None
        if split_float32:
            splitter = FloatSplitter(
                (tile_m * tile_k, tile_n * tile_k), GROUP * self.groups_per_tile
            )
        #: Registers for what an epilogue reads while its tile is multiplied: nothing else hides
        #: how long that takes. 0: it does not.
        self.early_registers = 0
        if self.consumers == self.groups_per_tile == 2 and not split_k:
            self.early_registers = min(MOST_EARLY, EARLY_AND_ACCUMULATORS - self._accumulated())
        self.mainloop = Mainloop(self._plan_scales(), splitter, self._plan_parts(), self.ahead)
        self.partial_sums = PartialSums(
            threads=GROUP,
            groups=self.consumers * self.cluster_shape[0] * self.cluster_shape[1],
            values=self.accumulators,
            slots=2 if split_k == "stream" else 1,
        )
        self.cluster_sums = self._plan_cluster_sums() if cluster_k > 1 else None
        self.parallel_sums = self._plan_parallel_sums(written) if parallel else None
        #: Whether a tile may be cut among clusters, whose sums meet in the workspace.
        of_a_cluster = cluster_k > 1 and split_k == cluster_k
        self.meets_in_workspace = split_k is not None and not of_a_cluster

    def _check(self) -> None:
        tile_m, tile_n, tile_k = self.tile_shape
        if self.schedule not in ("cooperative", "pingpong"):
            raise ValueError(f"schedule is cooperative or pingpong, not {self.schedule!r}")
        rows = (64, 128) if self.schedule == "pingpong" else (64, 128, 192, 256)
        if tile_m not in rows:
            raise ValueError(f"{self.schedule} takes a tile M of {rows}, not {tile_m}")
        if tile_n not in range(16, MOST_COLUMNS + 1, 16):
            raise ValueError(f"tile N is a multiple of 16 up to {MOST_COLUMNS}, not {tile_n}")
        check_types(*self.operand_types, self.accumulator_type)
        instruction_k = K_BYTES * 8 // self.operand_types[0].width
        if tile_k <= 0 or tile_k % instruction_k:
            raise ValueError(f"tile K is a multiple of wgmma's {instruction_k}, not {tile_k}")
        if self.operand_types[0] is Float32 and tile_n != 16 and tile_n % 32:
            # The DSL ends the process over others.
            raise ValueError(f"tfloat32 takes a tile N of 16, or a multiple of 32, not {tile_n}")
        cluster_m, cluster_n = self.cluster_shape
        if self.cluster_shape not in CLUSTERS:
            raise ValueError(f"cluster is one of {CLUSTERS}, not {self.cluster_shape}")
        if tile_m % (8 * cluster_n) or tile_n % (8 * cluster_m):
            raise ValueError(
                f"blocks of a cluster of {self.cluster_shape} load shares of 8 rows or a multiple, "
                f"which a tile of {tile_m}x{tile_n} has not"
            )
        for output_type in self.output_types:
            if output_type not in OUTPUT_TYPES:
                raise ValueError(f"an output is one of {OUTPUT_TYPES}, not {output_type}")
        if self.split_k is not None and self.schedule == "pingpong":
            raise ValueError("consumers that take turns do not split tiles along K")
        self._check_cluster_along_k()
        self._check_parallel()
        if self.block_scales:
            self._check_scales()
        counts = (self.split_k is not None and not self.parallel) or self.epilogue.reduced
        if any(self.repacked) and counts:
            raise ValueError("copies of operands leave no room for counters in the workspace")
        if self.loaded_columns not in range(tile_n, MOST_COLUMNS + 1):
            raise ValueError(
                f"columns that are loaded are those of the tile, {tile_n}, and others up to "
                f"{MOST_COLUMNS}, not {self.loaded_columns}"
            )
        if self.split_float32 and self.operand_types != (Float32, Float32):
            raise ValueError(f"{self.operand_types} are not split, Float32 is")

    def _check_loads_tiles_alone(self) -> None:
        """Of products that find the columns of their tiles in ways of their own."""
        if self.loaded_columns != self.tile_shape[1]:
            raise ValueError(
                f"grouped products load the {self.tile_shape[1]} columns of a tile alone, not "
                f"{self.loaded_columns}"
            )

    def _check_scales(self) -> None:
        _, tile_n, tile_k = self.tile_shape
        if tile_k % SCALE_BLOCK:
            raise ValueError(f"block scales take a tile K of whole {SCALE_BLOCK}, not {tile_k}")
        if self.swap_ab:
            if tile_n > MOST_SCALED_COLUMNS:
                raise ValueError(
                    f"{tile_n} columns with block scales of their own take longer than their "
                    f"products; at most {MOST_SCALED_COLUMNS} do not"
                )
        elif straddled_blocks(tile_n) > 2:
            raise ValueError(
                f"a tile N of {tile_n} straddles {straddled_blocks(tile_n)} blocks of scales, at "
                "most 2 are chosen from"
            )

    def _plan_parts(self) -> int:
        """Of a k tile that are promoted one after the other: 8-bit floats stay apart for as many
        elements as have a scale."""
        return max(self.tile_shape[2] // SCALE_BLOCK, 1) if self.promoted else 1

    def _plan_scales(self) -> BlockScales | None:
        if not self.block_scales:
            return None
        tile_n = self.tile_shape[1]
        if self.swap_ab:
            return ColumnScales(tile_n)
        if 1 in self.epilogue.halves:
            return HalvedRowScales()
        if straddling_pieces(tile_n) > 1:
            return StraddlingRowScales(tile_n)
        return RowScales(tile_n // self.columns)

    def _check_cluster_along_k(self) -> None:
        if self.cluster_k == 1:
            return
        if self.cluster_k not in range(2, MOST_ALONG_K + 1):
            raise ValueError(
                f"a cluster has 2 to {MOST_ALONG_K} blocks along K, not {self.cluster_k}"
            )
        if self.cluster_shape != (1, 1):
            raise ValueError(
                "blocks of a cluster along K share no operands: it is (1, 1) along M and N, not "
                f"{self.cluster_shape}"
            )
        if self.split_k not in (self.cluster_k, "even"):
            raise ValueError(
                f"the {self.cluster_k} blocks of a cluster along K have all parts of a tile, or "
                f"those of one of the clusters that share it: split_k is {self.cluster_k}, or "
                f"'even', not {self.split_k!r}"
            )

    def _check_parallel(self) -> None:
        if not self.parallel:
            return
        if self.split_k in (None, "stream") or self.cluster_k > 1:
            raise ValueError(
                "a kernel of its own adds up equal parts of tiles, which are not those of a "
                f"cluster: split_k is {self.split_k!r}, cluster_k {self.cluster_k}"
            )

    def _plan_cluster_sums(self) -> ClusterSums:
        sums = ClusterSums(self.cluster_k, GROUP * self.groups_per_tile, self.accumulators)
        room = self.stages * self._stage_bytes()
        if sums.bytes > room:
            raise ValueError(
                f"a part of a tile takes {sums.bytes} bytes, the {self.stages} stages where it is "
                f"left have {room}: it takes more of them"
            )
        return sums

    def _plan_parallel_sums(self, written: Epilogue) -> ParallelSums:
        return ParallelSums(
            self.partial_sums,
            self.accumulator_type,
            written,
            self.tile_shape[:2],
            self.cluster_shape,
            self.consumers,
            self.dependent_launch,
        )

    def _plan_registers(self) -> tuple[int, int] | None:
        """(producer, each consumer) of the 65536 there are; None: as launched."""
        if self.consumers == 1:
            return None
        tile_m, tile_n, _ = self.tile_shape
        limit, producer, consumer = {2: (208, 40, 232), 3: (128, 32, 160)}[self.consumers]
        accumulated = self._accumulated()
        if accumulated > limit:
            raise ValueError(
                f"tile {tile_m}x{tile_n}, {self.schedule}, needs {accumulated} accumulators per "
                f"thread; at most {limit} leave room for the rest"
            )
        if self.consumers == 2 and accumulated >= 192:
            producer, consumer = 24, 240
        return producer, consumer

    def _accumulated(self) -> int:
        """Registers of a thread: its accumulators, and products that are promoted."""
        products = self.row_blocks * self.columns // 2 if self.promoted else 0
        return self.accumulators + products * (2 if self.ahead else 1)

    def _plan_shared_memory(self, stages: int | None) -> tuple[int, int, int]:
        """(stages, store buffers, bytes). In this order: A stages, B stages, D buffers, small parts
        of A and B if float32 is split, barriers, and the ring of numbers of tiles.

        The main loop gets all stages that fit beside two buffers of D per consumer; what is left
        becomes more buffers, up to four.
        """
        stage = self._stage_bytes()
        store = self.consumers * self.output.slot_bytes
        fixed = 2 * 8 + 4 * 4  # turns and flags
        if self.split_float32:
            fixed += SMALL_BUFFERS * stage
        if self.dynamic:
            fixed += QUEUE_BYTES

        def size(stages, buffers):
            return stages * (stage + 2 * 8) + buffers * store + fixed

        most = (SHARED_MEMORY - size(0, 2)) // (stage + 2 * 8)
        stages = most if stages is None else stages
        if not 2 <= stages <= most:
            raise ValueError(
                f"tile {self.tile_shape} has room for 2 to {most} stages, not {stages}"
            )
        buffers = 2
        while any(self.tma_stores) and buffers < 4 and size(stages, buffers + 1) <= SHARED_MEMORY:
            buffers += 1
        bytes_needed = size(stages, buffers)
        return stages, buffers, -(-bytes_needed // 1024) * 1024  # the swizzles' alignment

    def _stage_bytes(self) -> int:
        tile_m, _, tile_k = self.tile_shape
        a_type, b_type = self.operand_types
        return (tile_m * a_type.width + self.loaded_columns * b_type.width) * tile_k // 8


def consumers_of(tile_m: int) -> int:
    """Consumers that share a tile; two of them hold up to 256 rows."""
    return 2 if tile_m == 256 else tile_m // WGMMA_M
