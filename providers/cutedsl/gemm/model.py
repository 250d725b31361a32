"""How long a GEMM design is expected to take.

A launch takes its overhead, the filling of the first pipeline, and then as long as its slowest
part (the sum of n-th powers, so that parts of equal length slow each other down):

    blocks   the multiprocessor with the most tiles: rounds of tiles, each as long as its steps
             along K and its epilogue. A step takes the slowest of the arithmetic, the operands'
             way from L2 and the tensor cores' reads of shared memory. What overlaps (blocks that
             share a multiprocessor, the two tiles of ``pingpong``) hides the waits of one behind
             the work of another.
    DRAM     the operands once, more if several clusters ask for what is still on its way, and
             again where L2 forgets them between two visits
    L2       A once per column of clusters, B once per row of clusters, partial sums that go
             through the workspace
    power    the arithmetic at the rate that the GPU sustains

and behind that, where a kernel of its own adds up the parts of tiles, that one.

Constants are per GPU and family (see ``machine``). A query asks for tens of designs at once: what
depends on the problem alone is computed once.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from kernel_api._cached_property import cached_property
from kernel_api._estimated_sizes import told_apart
from kernel_api.arguments import GemmArguments
from kernel_api.epilogue.graph import Graph, Node
from kernel_api.providers.cutedsl.gemm import machine
from kernel_api.providers.cutedsl.gemm.machine import Constants
from kernel_api.providers.cutedsl.gemm.sm90_design import SUBTILE, resident_clusters

#: Rows of out whose products one instruction forms; it reads the columns' operand once.
_INSTRUCTION_ROWS = 64
_PARTIAL_SUM_BYTES = 4
#: Elements along K whose products are formed apart where they are promoted.
_PROMOTED_K = 128
#: Steps that are promoted in a row while the next ones are formed.
_AHEAD = 4
#: Operations of an epilogue per second of one multiprocessor. Where it reads a value per row,
#: reduces, or writes more than one output, what it waits for is as much as so many of them; where
#: it only reads matrices, which it does in vectors, less.
_ELEMENTWISE, _WAITS, _WAITS_FOR_MATRIX = 8e10, 5, 2
#: Operations that take as long as several others; those that only name elements take nothing.
_COSTS = {"reduce": 2, "rotate": 5, "erf": 2, "sigmoid": 2, "tanh": 2, "exp": 2, "log": 2}
#: What is reduced over both sides leaves a multiprocessor once.
_CARRIED = ("matrix", "all")
_NAMING = ("split", "interleave", "repeat", "store")

#: Bytes of an element that a consumer reads in time though it has no registers to read ahead, and
#: more than what only vectors make of it.
_READ_IN_TIME, _VECTORS = 2, 1

#: Of the time with a static share of several tiles, what clusters need that take theirs, and where
#: tiles have so few steps that the next one is asked for at once; measured on an H200.
TAKEN, _TAKEN_AT_ONCE, _FEW_STEPS = 0.9956, 1.01, 8

#: Of what so many multiprocessors of a GPC read, what L2 spares if it sends it once to up to four.
_SPARED = (0.0, 0.0, 1 / 2, 2 / 3, 3 / 4)
#: Clusters that read an operand until both halves of L2 have it.
_UNTIL_NEAR = 8
#: Of the clusters that run at once, the share whose CTAs wait for each other no longer than those
#: of one alone do, and the share from which on they wait as long as they ever do.
_SPARSE, _CROWDED = 0.25, 0.65

#: Bytes of a row of a stage, and of a line of L2.
_LINE_BYTES = 128
#: Bytes of a row of a stage of what is contiguous along M or N: the most that divide a tile's.
_ROW_BYTES = (128, 64, 32)
#: Bytes of a row in a step along K of which neighbours are read together.
_LONG_STEP = 256
#: Of an element that a stage has in that order: others are turned before.
_TURNED_SIZE = 2

#: Bytes of an element of A and of B; of an element of the product, bytes that its epilogue moves,
#: bytes of them that it reads, and operations; the kind of arithmetic; whether rows of A straddle
#: lines, and those of B; whether A is contiguous along M, and B along N; the share of rows that is
#: multiplied.
Types = tuple[int, int, float, float, int, str, bool, bool, bool, bool, float]


@dataclass(frozen=True, eq=False)
class Candidate:
    """What of a design decides how long it takes; equal to itself alone, which is quick to find.

    Attributes:
        tile_shape: (M, N, K) that one CTA computes at a time, as the kernel sees the problem.
        cluster_shape: CTAs along M and N that load operands for each other; of the parts that K is
            cut into, those along K, if there is a third extent: 1, or all that are not of other
            clusters.
        schedule: ``multistage``: one tile per CTA, whose warps load and multiply.
            ``cooperative``: persistent, the consumers share a tile. ``pingpong``: persistent,
            two consumers with a tile each, one writes out while the other multiplies.
        stages: Steps along K that shared memory holds.
        blocks_per_multiprocessor: CTAs that share one.
        split_k: Parts that K is cut into, each a unit of work of its own.
        stream_k: Whether the CTAs share all steps evenly, across the borders of tiles.
        even_k: Whether each tile is cut into as many equal parts as run at once.
        parallel: Whether a kernel that is launched behind adds up their partial sums.
        swap_ab: Whether the kernel computes the transposed product, its M being N of out.
        column_blocks: Parts of the tile's columns that are multiplied one after the other.
        ahead: Whether products are promoted while the next ones are formed, four steps in a row.
        in_pieces: Whether threads write out, in pieces of rows that begin anywhere.
        reads_early: Whether a matrix of 16 bits that an epilogue reads is there when the tile has
            been multiplied.
        load_cost: How much longer a step takes because threads load it in pieces.
        taken: Whether clusters take their tiles, in place of a static share of them.
    """

    tile_shape: tuple[int, int, int]
    cluster_shape: tuple[int, ...] = (1, 1)
    schedule: str = "multistage"
    stages: int = 4
    blocks_per_multiprocessor: int = 1
    split_k: int = 1
    stream_k: bool = False
    even_k: bool = False
    parallel: bool = False
    swap_ab: bool = False
    column_blocks: int = 1
    ahead: bool = False
    in_pieces: bool = False
    reads_early: bool = False
    load_cost: float = 1.0
    taken: bool = False

    @property
    def meets(self) -> bool:
        """Whether the CTAs that have the parts of a tile are a cluster."""
        return self.cluster_shape[2:] not in ((), (1,))


@dataclass(frozen=True)
class Problem:
    """What of the arguments decides how long they take; sizes in elements, L matrices. Those that
    are nearly the same are one, see :func:`told_apart`.

    Attributes:
        A_size, B_size, out_size: Bytes of an element.
        A_bytes, B_bytes, out_bytes: Bytes in memory; a broadcast operand counts once.
        epilogue_bytes: Read and written beside these by a fused epilogue.
        epilogue_reads: Bytes of them that are read.
        epilogue_operations: Of a fused epilogue, per element of the product.
        kind: The element type of A as far as arithmetic goes: ``float16``, ``float8``, ``int8``,
            ``float32``.
        A_straddles, B_straddles: Whether rows begin within a line of L2, so that what is loaded of
            one is in two.
        A_turned, B_turned: Whether what lies side by side is along M, and along N, in 16 bits.
        filled: Of the rows, those that are multiplied.
    """

    M: int
    N: int
    K: int
    L: int
    A_size: int
    B_size: int
    out_size: int
    A_bytes: int
    B_bytes: int
    out_bytes: int
    kind: str
    epilogue_bytes: int = 0
    epilogue_reads: int = 0
    epilogue_operations: int = 0
    A_straddles: bool = False
    B_straddles: bool = False
    A_turned: bool = False
    B_turned: bool = False
    filled: float = 1.0

    @classmethod
    def of(cls, args: GemmArguments) -> Problem:
        A, B, out = args.operands
        fused = args.epilogue
        return cls(
            *(told_apart(args.M), told_apart(args.N), told_apart(args.K), args.L),
            *(A.dtype.itemsize, B.dtype.itemsize, out.dtype.itemsize),
            *(_bytes(A), _bytes(B), _bytes(out)),
            kind=f"{'int' if A.dtype.is_integer else 'float'}{A.dtype.bits}",
            epilogue_bytes=sum(map(_bytes, fused.tensors.values())) if fused else 0,
            epilogue_reads=sum(map(_bytes, fused.inputs.values())) if fused else 0,
            epilogue_operations=_operations_and_waits(fused.graph) if fused else 0,
            A_straddles=_straddles(A),
            B_straddles=_straddles(B),
            A_turned=A.unit_mode == -2 and A.dtype.itemsize == _TURNED_SIZE,
            B_turned=B.unit_mode == -1 and B.dtype.itemsize == _TURNED_SIZE,
        )

    @cached_property
    def types(self) -> Types:
        """Bytes of elements of A and B, what a tile takes per element, and the rest of them."""
        elements = max(self.M * self.N * self.L, 1)
        moved = (self.out_bytes + self.epilogue_bytes) / elements
        read = self.epilogue_reads / elements
        work = (moved, read, self.epilogue_operations, self.kind)
        lines = (self.A_straddles, self.B_straddles, self.A_turned, self.B_turned)
        return self.A_size, self.B_size, *work, *lines, self.filled

    @cached_property
    def facts(self) -> tuple[int, int, int, int, int, int, int, int, int, float]:
        """What an estimate starts from: sizes, bytes of each operand and of all, operations."""
        all_bytes = self.A_bytes + self.B_bytes + self.out_bytes + self.epilogue_bytes
        amounts = (self.A_bytes, self.B_bytes, all_bytes)
        operations = 2 * self.M * self.N * self.K * self.L * self.filled
        return self.M, self.N, self.K, self.L, self.A_size, self.B_size, *amounts, operations


#: The key of the last arguments asked about, their problem, and constants of families on their
#: device: a query asks for many kernels.
_last: tuple[Any, Problem | None, dict[str, Constants]] = (None, None, {})


def _found(args: GemmArguments) -> tuple[Problem, dict[str, Constants]]:
    """Of arguments that were the last asked about, what was found then."""
    global _last
    key, problem, constants = _last
    if problem is None or key is not args.key:
        problem, constants = Problem.of(args), {}
        _last = (args.key, problem, constants)
    return problem, constants


def problem_of(args: GemmArguments) -> Problem:
    """What estimates of the arguments start from."""
    return _found(args)[0]


def predict(args: GemmArguments, candidate: Candidate, family: str) -> float:
    """Seconds for one design of a family."""
    problem, constants = _found(args)
    of_family = constants.get(family)
    if of_family is None:
        of_family = constants[family] = machine.constants_on(args.device, family)
    return seconds(problem, candidate, of_family)


def seconds(problem: Problem, candidate: Candidate, constants: Constants) -> float:
    """Seconds for one design; see the module for how."""
    (
        rows, columns, slots, overlapping, step, alone, epilogue, late, partial, exposed, lines,
        paged, reads_at_once,
    ) = _plan(candidate, constants, problem.types)  # fmt: skip
    m, n, k, matrices, a_size, b_size, a_bytes, b_bytes, dram, operations = problem.facts
    if candidate.swap_ab:
        m, n, a_size, b_size = n, m, b_size, a_size
        a_bytes, b_bytes = b_bytes, a_bytes
    parts, power = candidate.split_k, constants.sharpness
    split = 1 if candidate.meets else parts  # through the workspace

    # The tiles: how many clusters of them, how many each multiprocessor has, how many overlap.
    clusters_m, clusters_n = -(-m // rows), -(-n // columns)
    clusters = clusters_m * clusters_n * matrices * split
    each = -(-clusters // slots)
    k_tiles = -(-k // (candidate.tile_shape[2] * parts))
    steps: float = k_tiles
    sharing = 1
    if candidate.even_k:
        sharing = max(min(slots // max(clusters, 1), k_tiles), 1)
        steps = -(-k_tiles // sharing)
    elif candidate.stream_k:
        steps = max(k_tiles * clusters / (slots * max(each, 1)), 1.0)
    tile = steps * alone + epilogue
    if overlapping == 1:
        blocks = each * tile
    else:
        rounds = -(-each // overlapping)
        last = (each - (rounds - 1) * overlapping) * (steps * step + late)
        full = overlapping * (steps * step + late)
        blocks = (rounds - 1) * (full if full > tile else tile) + (last if last > tile else tile)

    # What all of them move: through L2, and from device memory where L2 has forgotten it.
    of_a, of_b = m * a_size * clusters_n * lines[0], n * b_size * clusters_m * lines[1]
    if reads_at_once and each == 1:  # later they read at other times
        of_a *= 1 - constants.at_once * _SPARED[min(clusters_n, len(_SPARED) - 1)]
        of_b *= 1 - constants.at_once * _SPARED[min(clusters_m, len(_SPARED) - 1)]
    smaller, readers = (of_a, clusters_n) if a_bytes < b_bytes else (of_b, clusters_m)
    l2 = of_a + of_b
    if readers > _UNTIL_NEAR:
        l2 -= smaller * (1 - constants.near) * (1 - _UNTIL_NEAR / readers)
    l2 *= k * matrices
    crossing = 0.0
    if not candidate.parallel:  # those that read the same k tile do so at one time
        crossing = a_bytes * _others(clusters_n) + b_bytes * _others(clusters_m)
    if split > 1:
        blocks += each * (constants.handover + split * partial)
        l2 += 2 * split * m * n * matrices * _PARTIAL_SUM_BYTES
    elif candidate.parallel:
        parts_bytes = sharing * clusters * rows * columns * _PARTIAL_SUM_BYTES
        exposed += constants.behind + parts_bytes / constants.summed
    elif sharing > 1:
        # Each CTA of the last cluster adds up a share of what all have left.
        blocks += constants.meeting + constants.crowd + (1 + sharing) / parts * partial
        l2 += 2 * sharing * m * n * matrices * _PARTIAL_SUM_BYTES
    elif candidate.stream_k and clusters % slots:
        # Tiles are cut in two where one CTA ends and the next begins; a few tiles in more.
        blocks += constants.seam + (1 + min(slots / clusters, k_tiles)) * partial
        l2 += 2 * slots * rows * columns * _PARTIAL_SUM_BYTES
        # Others read the same k tile at other times, when L2 may have forgotten it.
        if clusters_n > 1 and a_bytes > constants.l2_bytes:
            dram += a_bytes
        if clusters_m > 1 and b_bytes > constants.l2_bytes:
            dram += b_bytes
    if candidate.meets:
        crowded = (sharing * clusters / slots - _SPARSE) / (_CROWDED - _SPARSE)
        blocks += constants.crowd * min(max(crowded, 0.0), 1.0)
    if candidate.in_pieces:
        blocks += problem.out_bytes / constants.pieces
    arrives = dram + constants.crossing * crossing
    if dram > constants.l2_bytes:
        side = (slots * rows * columns) ** 0.5
        along = sorted(((n, b_size, b_bytes), (m, a_size, a_bytes)), key=_extent)
        arrives += _read_again(side, k, constants.l2_bytes, *along)

    sustained = constants.sustained[problem.kind]
    if candidate.tile_shape[0] > _INSTRUCTION_ROWS:
        sustained *= constants.spared.get(candidate.schedule, 1.0)
    slowest: float = (
        blocks**power
        + (arrives * paged / constants.bandwidth) ** power
        + (l2 / constants.l2_bandwidth) ** power
        + (operations / sustained) ** power
    ) ** (1 / power)
    found = constants.overhead + exposed + slowest
    if candidate.taken and each > 1:
        found *= TAKEN if k_tiles > _FEW_STEPS else _TAKEN_AT_ONCE
    return found


_extent = operator.itemgetter(0)


def _read_again(
    side: float, k: int, kept: float, short: tuple[int, int, int], long: tuple[int, int, int]
) -> float:
    """Bytes that L2, of which so many are kept, forgets between two visits. Tiles that run at once
    cover about a square of that side; bands of its width cut the short side of out.

    short, long: The extent of out, and bytes of an element and of all, of the operand that has it.
    """
    extent, size, of_short = short
    along, _, of_long = long
    again = 0.0
    if extent > side and of_long > kept:
        again += (extent / side - 1) * of_long
    if along > side and min(extent, side) * k * size > kept:
        again += (along / side - 1) * of_short
    return again


def _others(clusters: int) -> float:
    """How likely it is that of so many that read an operand, some are not in the half of L2 where
    the first one is."""
    return _OTHERS[clusters] if clusters < len(_OTHERS) else 1.0


_OTHERS = tuple(1 - 0.5 ** max(clusters - 1, 0) for clusters in range(32))


class _Plan(NamedTuple):
    """What a design takes whatever the size of the problem; times in seconds.

    Attributes:
        rows, columns: Of a cluster's tiles.
        slots: Clusters that run at once.
        overlapping: Tiles of a multiprocessor that overlap.
        step: The work of a step along K.
        alone: A step of a CTA that has nothing else to do.
        epilogue: What its tile takes beside its steps.
        late: What of that others do not hide.
        partial: The writing or reading of a tile of partial sums.
        exposed: The filling of the first pipeline.
        lines: What straddling makes of the time in which the kernel's A comes from L2, and its B.
        paged: What long steps make of the time in which both come from device memory.
        reads_at_once: Whether blocks of a GPC, which are in no cluster, have tiles that share.
    """

    rows: int
    columns: int
    slots: int
    overlapping: int
    step: float
    alone: float
    epilogue: float
    late: float
    partial: float
    exposed: float
    lines: tuple[float, ...]
    paged: float
    reads_at_once: bool


@lru_cache(maxsize=4096)
def _plan(candidate: Candidate, constants: Constants, types: Types) -> _Plan:
    c = constants
    a_size, b_size, moved, read, operations, kind, *straddle, a_turned, b_turned, filled = types
    if candidate.swap_ab:
        a_size, b_size = b_size, a_size
        straddle, a_turned, b_turned = straddle[::-1], b_turned, a_turned
    lines_a, lines_b = (c.straddling if one else 1.0 for one in straddle)
    l2_lines: tuple[float, ...] = lines_a, lines_b
    if not candidate.parallel:
        turned = zip(straddle, (a_turned, b_turned), l2_lines, strict=True)
        l2_lines = tuple(c.split_rows if all(both) else lines for *both, lines in turned)
    tile_m, tile_n, tile_k = candidate.tile_shape
    cluster_m, cluster_n = candidate.cluster_shape[:2]
    # Rows that take longer are copied once for all CTAs that share them.
    row_cost = 1 + (_row_cost(tile_n * b_size, c) - 1) / cluster_m if b_turned else 1.0
    schedule, power = candidate.schedule, c.sharpness

    arithmetic = 2 * tile_m * tile_n * tile_k / (c.rate[kind] * c.share.get(schedule, 1.0))
    arithmetic *= filled
    if schedule == "pingpong" and cluster_n > cluster_m:
        arithmetic *= c.in_turn
    cut = (
        candidate.split_k > 1 or candidate.stream_k or candidate.even_k or schedule == "multistage"
    )
    reads_at_once = not cut and math.prod(candidate.cluster_shape) == 1
    column_bytes = tile_n * tile_k * b_size
    tile_bytes = tile_m * tile_k * a_size + column_bytes
    groups = max(tile_m / _INSTRUCTION_ROWS, 1.0)
    row_bytes = tile_bytes - column_bytes
    feed = (
        c.arrival * tile_bytes + row_bytes * candidate.column_blocks + groups * column_bytes
    ) / c.feed  # written once, read by every group of instructions
    load = (row_bytes * lines_a + column_bytes * lines_b * row_cost) / c.load
    step = (arithmetic**power + feed**power + load**power) ** (1 / power)
    waits = float(candidate.column_blocks)
    if candidate.ahead:
        waits /= _AHEAD
    else:  # A group's own products, and what it makes of them, follow each other.
        own = arithmetic / groups + c.promotion * tile_n * tile_k / _PROMOTED_K
        step = max(step, own)
    on_their_way = max(candidate.stages - c.held, 1.0)
    alone = max(step, c.latency / on_their_way) + c.step * waits
    step, alone = step * candidate.load_cost, alone * candidate.load_cost

    if candidate.reads_early and _VECTORS < read <= _READ_IN_TIME:
        moved, operations = moved - read, operations - _WAITS_FOR_MATRIX
    written = tile_m * tile_n * (moved / c.store + operations / _ELEMENTWISE)
    epilogue = c.epilogue + written * (c.narrow if tile_n % SUBTILE[1] else 1.0)
    consumers = 1 if schedule == "pingpong" else 2
    late = 0.0
    if schedule != "multistage" and tile_m > _INSTRUCTION_ROWS * consumers:
        late = c.late * tile_m * tile_n * max(read - _READ_IN_TIME, 0.0) / c.store
    epilogue += late
    partial = tile_m * tile_n * _PARTIAL_SUM_BYTES / c.store
    overlapping, exposed = candidate.blocks_per_multiprocessor, c.latency
    if schedule == "multistage":
        epilogue, exposed = epilogue + c.latency, 0.0
    elif schedule == "pingpong":
        # The two tiles take turns in the main loop, waits included; epilogues are hidden.
        overlapping, step = 2 * overlapping, alone
    if candidate.meets:
        # Each CTA reads a share of every part: together as much as one has.
        epilogue += c.meeting + partial
    slots = resident_clusters(c.multiprocessors, math.prod(candidate.cluster_shape))
    rows, columns = tile_m * cluster_m, tile_n * cluster_n
    times = (step, alone, epilogue, late, partial, exposed)
    paged = c.long_steps if tile_k * min(a_size, b_size) >= _LONG_STEP else 1.0
    return _Plan(rows, columns, slots, overlapping, *times, l2_lines, paged, reads_at_once)


def _row_cost(extent: int, constants: Constants) -> float:
    """Of the time of a load, what it takes if a tile has so many bytes along what is contiguous: in
    the longest rows that divide them, or in whole ones with what is beside the tile."""
    row = next(filter(lambda one: extent % one == 0, _ROW_BYTES), _ROW_BYTES[-1])
    return constants.short_rows.get(str(row), 1.0)


def operations(graph: Graph) -> int:
    """Of an epilogue, per element of the product: of a matrix half as wide, half as many."""
    each = (
        _cost(node) * float(node.shape.columns or 1)
        for node in graph.nodes
        if node.inputs and node.op not in _NAMING
    )
    return math.ceil(sum(each))


def _cost(node: Node) -> int:
    """Of heads of which some stay as they are, each element is chosen."""
    return _COSTS.get(node.op, 1) + ("heads" in dict(node.attributes))


def _operations_and_waits(graph: Graph) -> int:
    nodes, leaves = graph.nodes, graph.leaves.values()
    leave = any(n.op == "reduce" and n["axis"] not in _CARRIED for n in nodes)
    written = sum(nodes[index].op != "reduce" for _, index in graph.outputs)
    by_row = any(leaf.shape.rows and not leaf.shape.columns for leaf in leaves)
    matrices = any(leaf.shape.rows and leaf.shape.columns for leaf in leaves)
    waits = _WAITS if leave or by_row or written > 1 else _WAITS_FOR_MATRIX * matrices
    return operations(graph) + waits


def _straddles(operand: Any) -> bool:
    size, modes = operand.dtype.itemsize, zip(operand.shape, operand.stride, strict=True)
    pitches = (size * stride for extent, stride in modes if extent > 1 and stride > 1)
    return any(pitch % _LINE_BYTES and _LINE_BYTES % pitch for pitch in pitches)


def _bytes(operand: Any) -> int:
    """What must move at least once: a broadcast matrix is one matrix."""
    count, matrices = operand.dtype.itemsize, len(operand.shape) - 2
    for mode, (extent, stride) in enumerate(zip(operand.shape, operand.stride, strict=True)):
        if stride or not extent:
            count *= extent if mode < matrices else told_apart(extent)
    return int(count)
