"""What follows from a design of the Hopper attention gradient before anything is traced."""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource, SmemLayoutAtomKind

from ..common.attention.blocks import are_searched
from ..common.attention.entries import are_whole
from ..common.attention.scores import Scores
from ..common.attention.values import Values
from ..common.threads import GROUP, WARP
from .mma import WGMMA_M
from .plan import SHARED_MEMORY
from .sdpa_backward_shares import ALIGNMENT, may_share, share_bytes

CONSUMERS = 2  # warp groups that multiply

#: Places for tiles that the producer finds, in turn: more than stages of Q, so that it can write
#: one before it asks for the stage.
FOUND = 4

#: Tiles, at most, for which dropout's numbers are drawn ahead.
DRAWN = 4
#: Queries of a tile for which warps draw random numbers ahead.
DRAWN_QUERIES = 64

_BARRIER_BYTES = 256  # and those places

_FLOAT_BYTES = 4
_WORD_BYTES = 4
_COUNTER_BYTES = 4


class Known:
    """All is known while tracing: branches and loops carry nothing of it."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> "Known":
        return self


@dataclass(frozen=True)
class Product(Known):
    """wgmma of the consumers together: which operands are K-major, and who has what of the result.

    shape: (rows, columns) of the result.
    by_rows: Whether consumers share rows, a multiple of 64 each, or columns.
    from_registers: Whether A is there.
    parts: Of the columns of a consumer, formed one after the other in the same accumulators.
    """

    element_type: type[cutlass.Numeric]
    shape: tuple[int, int]
    by_rows: bool
    a_k_major: bool
    b_k_major: bool
    from_registers: bool = False
    parts: int = 1

    def mma(self, accumulate: bool = True) -> cute.TiledMma:
        atoms = (CONSUMERS, 1, 1) if self.by_rows else (1, CONSUMERS, 1)
        majors = OperandMajorMode.MN, OperandMajorMode.K
        found = sm90.make_trivial_tiled_mma(
            *(self.element_type, self.element_type),
            *(majors[self.a_k_major], majors[self.b_k_major]),
            *(Float32, atoms, (WGMMA_M, self.columns)),
            OperandSource.RMEM if self.from_registers else OperandSource.SMEM,
        )
        found.set(warpgroup.Field.ACCUMULATE, accumulate)
        return found

    @property
    def columns(self) -> int:
        """Of one wgmma."""
        columns = self.shape[1] if self.by_rows else self.shape[1] // CONSUMERS
        return columns // self.parts

    def accumulators(self, whole: bool = False) -> cute.Tensor:
        """Of one part, or of all."""
        shape = (self.shape[0], self.shape[1] // (1 if whole else self.parts))
        return cute.make_rmem_tensor(self.mma().partition_shape_C(shape), Float32)

    def own_part(self, tensor: cute.Tensor, thread: Int32) -> cute.Tensor:
        """Of what has the shape of the result: where the accumulators of a thread are."""
        return self.mma().get_slice(thread).partition_C(tensor)

    def operand_a(self, shared: cute.Tensor, consumer: Int32) -> cute.Tensor:
        mma = self.mma()
        return mma.make_fragment_A(mma.get_slice(consumer * GROUP).partition_A(shared))

    def operand_b(self, shared: cute.Tensor, consumer: Int32) -> cute.Tensor:
        mma = self.mma()
        return mma.make_fragment_B(mma.get_slice(consumer * GROUP).partition_B(shared))

    def issue(
        self, result: cute.Tensor, a: cute.Tensor, b: cute.Tensor, fresh: bool, part: int = 0
    ) -> None:
        """As one wgmma group. fresh: the result is overwritten, else added to."""
        if self.parts > 1:
            b = cute.logical_divide(b, (None, 1, None))[None, (None, part), None]
        first, further = self.mma(accumulate=not fresh), self.mma()
        warpgroup.fence()
        for k in range(cute.size(b, mode=[2])):
            mma = further if k else first
            cute.gemm(mma, result, a[None, None, k], b[None, None, k], result)
        warpgroup.commit_group()


class Space(NamedTuple):
    """Where in the workspace things are, tile of queries by tile of queries.

    address: Of the log-sum-exps in base 2. The row sums of out · dO follow, then the gradients of
        queries in float32, then how many blocks have added to a tile, for each consumer, and what
        is left of dK and dV where blocks share keys.
    tiles: Of a head: of a sequence, or of all together if they are packed.
    heads: Of queries.
    rows: Of all tiles.
    """

    address: Int64
    tiles: Int32
    heads: Int32
    rows: Int64


class BackwardPlan(Known):
    """A design that is checked, with its products and its memory.

    The arguments are described with the kernel, `SdpaBackward`.

    Attributes:
        transposed: Whether scores stand as keys × queries. Then each consumer has 64 keys, and
            their probabilities and those' gradients are operands from its registers; else they
            are from shared memory, and consumers share the columns of dK and dV.
        shares_keys: Whether several blocks may have some of the heads of the same keys each.
        searches: Whether tiles that a table hides are left out.
        hides_by_table: Whether a tile that is computed may have keys that the table hides.
        draws_ahead: Whether other warps draw the random numbers of dropout, see `DrawsAhead`.
        swaps_dkv, swaps_dq: Whether gradients stand as head dimension × keys or queries.
        with_queries: Bytes of a stage of Q that are for something else.
        shared_memory_bytes: Of a block.

    Raises ValueError for a design that cannot be built.
    """

    with_queries = 0

    def __init__(
        self,
        head_dims: tuple[int, int],
        tile: tuple[int, int],
        stages: tuple[int, int, int],
        element_type: type[cutlass.Numeric],
        scores: Scores,
        *,
        early: frozenset[str] = frozenset(),
        staged: bool = False,
        deterministic: bool = False,
    ):
        self.head_dim, self.head_dim_v = head_dims
        self.tile_m, self.tile_n = tile
        self.q_stages, self.do_stages, self.ds_stages = stages
        self.element_type = element_type
        self.scores = scores
        self.early = early
        self.staged = staged
        self.deterministic = deterministic
        hides_later = bool({"right", "right_end"} & set(scores.names))
        #: Whether the last keys come first: where keys behind a query are hidden, blocks that add
        #: to the same queries then reach them one after the other.
        self.last_first = deterministic and hides_later
        #: Whether the last queries come first: where keys behind a query are hidden, all blocks of
        #: keys have those, and read them at about the same time.
        self.descends = hides_later and not deterministic
        #: Whether heads give their first blocks together, then their second ones.
        self.takes_turns = hides_later != deterministic
        self.threads = GROUP * (1 + CONSUMERS)
        self.transposed = self.tile_n == CONSUMERS * WGMMA_M
        self.draws_ahead = scores.drops and self.transposed
        self.swaps_dkv = self.tile_n % WGMMA_M != 0
        self.swaps_dq = self.tile_m % WGMMA_M != 0
        self.packed = "cu_seqlens_q" in scores.names
        self.shares_keys = may_share(tile, head_dims, self.packed)
        names = scores.names
        self.queries_end_early = self.packed or "seq_lens_q" in names
        self.keys_end_early = self.packed or "seq_lens_kv" in names
        self.has_slopes = "softcap" in names or scores.functions.score is not None
        self.searches = are_searched(scores.block_shape, tile)
        found_whole = self.searches and are_whole(scores.block_shape, tile)
        self.hides_by_table = "blocks" in names and not found_whole
        self._check()
        self._plan_products()
        self.shared_memory_bytes = self._shared_memory_bytes()
        if self.shared_memory_bytes > SHARED_MEMORY:
            raise ValueError(f"a block takes {self.shared_memory_bytes} bytes of shared memory")

    @property
    def warp_keys(self) -> int:
        """Side by side among its scores."""
        return WGMMA_M * WARP // GROUP if self.transposed else self.tile_n // CONSUMERS

    @property
    def drawn_bytes(self) -> int:
        """Two words for each thread and tile."""
        return DRAWN * CONSUMERS * GROUP * 2 * _WORD_BYTES * self.draws_ahead

    def _check(self) -> None:
        if self.q_stages >= FOUND:
            raise ValueError(f"there are no more than {FOUND - 1} stages of Q")
        if "scores" in self.early and self.q_stages < 2:
            raise ValueError("scores of the next queries need a second stage of Q")
        if "values" in self.early and not self.transposed:
            raise ValueError("dV starts early only where probabilities are in registers")
        if not self.transposed and self.tile_m != WGMMA_M:
            raise ValueError(f"tile N {self.tile_n} takes a tile M of 64, not {self.tile_m}")
        if self.draws_ahead and self.tile_m != DRAWN_QUERIES:
            raise ValueError(f"numbers are drawn for {DRAWN_QUERIES} queries, not {self.tile_m}")
        if self.draws_ahead and self.deterministic:
            raise ValueError("the warps that draw numbers keep turns in a fixed order")
        if self.staged and self.deterministic:
            raise ValueError("bulk copies do not tell when they have added dQ")
        if self.staged and self.swaps_dkv:
            raise ValueError("dQ that is formed in parts does not go through shared memory")
        if self.swaps_dq and self.head_dim != CONSUMERS * WGMMA_M:
            raise ValueError(f"tile M {self.tile_m} takes a head dimension of 128")

    def _plan_products(self) -> None:
        m, n, d, e = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        scores_shape = (n, m) if self.transposed else (m, n)
        one = self.element_type
        self.score_product = Product(one, scores_shape, self.transposed, True, True)
        if self.transposed:
            self.dk_product = Product(one, (n, d), True, True, False, from_registers=True)
            self.dv_product = Product(one, (n, e), True, True, False, from_registers=True)
        elif self.swaps_dkv:
            self.dk_product, self.dv_product = (
                Product(one, (wide, n), wide % (CONSUMERS * WGMMA_M) == 0, False, True)
                for wide in (d, e)
            )
        else:
            self.dk_product = Product(one, (n, d), False, True, False)
            self.dv_product = Product(one, (n, e), False, True, False)
        if self.swaps_dq:
            self.dq_product = Product(one, (d, m), True, False, True)
        else:
            by_rows = m == CONSUMERS * WGMMA_M
            parts = 2 if self.swaps_dkv and d % (CONSUMERS * 2 * WGMMA_M) == 0 else 1
            self.dq_product = Product(one, (m, d), by_rows, self.transposed, False, parts=parts)

    def span(self, columns: int) -> int:
        """Columns of rows that are side by side in shared memory: a consumer has whole ones."""
        if self.transposed or (self.swaps_dkv and columns % 128 == 0):
            return gcd(columns, 64)
        return gcd(columns // CONSUMERS, 64)

    def _shared_memory_bytes(self) -> int:
        m, n, d, e = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        elements = n * (d + e) + m * (self.q_stages * d + self.do_stages * e)
        elements += self.ds_stages * m * n * (1 if self.transposed else 2)
        floats = m * (self.q_stages + self.do_stages) + (m * d if self.staged else 0)
        found = elements * self.element_type.width // 8 + floats * _FLOAT_BYTES
        return found + self.q_stages * self.with_queries + self.drawn_bytes + _BARRIER_BYTES

    def _values(self, operands: tuple) -> Values:
        """What the main launch takes beside matrices."""
        return Values(self.scores.names, operands)

    # The workspace -----------------------------------------------------------------------

    def space(self, workspace: Int64, mQ: cute.Tensor, values: Values) -> Space:
        """mQ: (S,D,H,B)"""
        rows, _, heads, batches = mQ.shape
        if self.packed:
            sequences = values["cu_seqlens_q"].shape[0] - 1
            tiles = (rows + sequences * self.tile_m) // self.tile_m
            all_tiles = Int64(tiles) * heads
        else:
            tiles = cute.ceil_div(rows, self.tile_m)
            all_tiles = Int64(tiles) * heads * batches
        return Space(workspace, Int32(tiles), Int32(heads), all_tiles * self.tile_m)

    def tile_index(self, space: Space, batch: Int32, head: Int32, first: Int32, block: Int32):
        """Of a block of queries.

        first: Row where its sequence begins, if they are packed: its tiles are where they would be
            if every sequence before took one more.
        """
        if self.packed:
            before = (first + batch * self.tile_m) // self.tile_m
            return head * space.tiles + before + block
        return (batch * space.heads + head) * space.tiles + block

    def lse_address(self, space: Space, tile: Int32) -> Int64:
        return space.address + Int64(tile) * (self.tile_m * _FLOAT_BYTES)

    def delta_address(self, space: Space, tile: Int32) -> Int64:
        return self.lse_address(space, tile) + space.rows * _FLOAT_BYTES

    def dq_address(self, space: Space, tile: Int32) -> Int64:
        offset = 2 * space.rows + Int64(tile) * (self.tile_m * self.head_dim)
        return space.address + offset * _FLOAT_BYTES

    def counter_address(self, space: Space, tile: Int32, consumer: Int32) -> Int64:
        behind = space.address + (2 + self.head_dim) * space.rows * _FLOAT_BYTES
        return behind + (Int64(tile) * CONSUMERS + consumer) * _COUNTER_BYTES

    def left_address(self, space: Space) -> Int64:
        """Of what blocks that share keys leave: of each dK, behind which dV is."""
        tiles = Int32(space.rows // self.tile_m)
        end = self.counter_address(space, tiles, Int32(0))
        return (end + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT

    @property
    def share_bytes(self) -> int:
        return share_bytes(self.tile_n, (self.head_dim, self.head_dim_v))

    @property
    def share_of_dk_bytes(self) -> int:
        return share_bytes(self.tile_n, (self.head_dim, 0))


# Tiles in shared memory --------------------------------------------------------------------


_KINDS = {
    64: (SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.MN_SW128),
    32: (SmemLayoutAtomKind.K_SW64, SmemLayoutAtomKind.MN_SW64),
}  # of elements of 16 bits: by columns that are side by side, of a tile and of it transposed


def tile_layout(
    element_type, rows: int, columns: int, stages: int = 1, span: int | None = None
) -> cute.ComposedLayout:
    """(rows, columns, stages). span: Columns that are side by side."""
    kind, _ = _KINDS[span or gcd(columns, 64)]
    atom = warpgroup.make_smem_layout_atom(kind, element_type)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def transposed_layout(
    element_type, rows: int, columns: int, stages: int = 1, span: int | None = None
) -> cute.ComposedLayout:
    """(columns, rows, stages) of the same memory."""
    _, kind = _KINDS[span or gcd(columns, 64)]
    atom = warpgroup.make_smem_layout_atom(kind, element_type)
    return cute.tile_to_shape(atom, (columns, rows, stages), order=(1, 0, 2))


def floats_at(address: Int64, count: int) -> cute.Tensor:
    """In global memory, from a multiple of 16 bytes on."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(count))
