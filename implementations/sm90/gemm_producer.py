"""How a product for Hopper brings A and B to its consumers."""

from fractions import Fraction
from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .edge_loads import Edge, EdgeLoad, HeadLoad, PanelLoad
from .mma import WGMMA_M, multiplied_as
from .paired_output import ROWS, dealt_out, in_order
from .plan import GemmPlan


class GemmProducer(GemmPlan):
    """The producer's part of `Gemm`: descriptors of A and B, and the loads of their tiles."""

    producer_warps = 1
    gathered = False  # whether threads copy A
    cuts_edges = True  # whether rows beyond the last one of a matrix stay out of loads

    def _tma_load_a(self, tensor, major, shared_layout):
        """Whole tiles; of rows that are pairs, 64 at a time."""
        tile_m, _, tile_k = self.tile_shape
        layout = cute.slice_(shared_layout, (None, None, 0))
        pairs, sharers = self.output.epilogue.row_pairs, self.cluster_shape[1]
        if pairs is None or pairs.granularity == ROWS:
            return self._tma_load(tensor, layout, (tile_m, tile_k), sharers)
        piece = sm90.make_smem_layout_a(
            major, (WGMMA_M, *self.tile_shape[1:]), multiplied_as(tensor.element_type), 1
        )
        tma, coordinates = self._tma_load(
            dealt_out(tensor, pairs),
            cute.slice_(piece, (None, None, 0)),
            (WGMMA_M, tile_k),
            sharers,
        )
        return tma, in_order(coordinates, pairs, tensor.shape[0])

    def _edge_loads(self, a_major, b_major) -> tuple:
        """Of A and B; None where all tiles are loaded whole: what is beside one is loaded with it,
        or its rows are no neighbours, or threads read all of it."""
        pairs, halves = self.output.epilogue.row_pairs, self.output.epilogue.halves
        heads = self.output.epilogue.heads
        if heads is not None and not (self.cuts_edges and b_major.is_k_major_b()):
            raise ValueError("columns of heads are dealt out where B is K-major and not grouped")
        if not self.cuts_edges or self.split_float32:
            return None, None
        (tile_m, tile_n, _), (cluster_m, cluster_n) = self.tile_shape, self.cluster_shape
        a = (EdgeLoad if a_major.is_k_major_a() else PanelLoad)(tile_m, cluster_n)
        b = (EdgeLoad if b_major.is_k_major_b() else PanelLoad)(tile_n, cluster_m)
        if heads is not None:
            b = HeadLoad(tile_n, cluster_m, heads)
        a_cut = pairs is None or pairs.granularity == ROWS
        b_cut = self.loaded_columns == tile_n and Fraction(1) not in halves
        return a if a_cut else None, b if b_cut else None

    def _tma_edge(self, tensor, load):
        """(what copies pieces of tiles, the matrix as it sees it)"""
        if load is None:
            return None
        tile_k = self.tile_shape[2]
        layout = load.shared_layout(multiplied_as(tensor.element_type), tile_k)
        return self._tma_load(tensor, layout, load.box(tile_k), 1, multicast=load.sharers > 1)

    def _tma_load(self, tensor, shared_layout, tiler, sharers, multicast=False):
        op = cpasync.CopyBulkTensorTileG2SOp()
        if sharers > 1 or multicast:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        stored = multiplied_as(tensor.element_type)
        internal = None
        if stored is not tensor.element_type and not self.split_float32:
            internal = stored
        return cpasync.make_tiled_tma_atom(
            op, tensor, shared_layout, tiler, num_multicast=sharers, internal_type=internal
        )

    @cute.jit
    def _produce(
        self,
        tma_a,
        mA,
        sA,
        tma_b,
        mB,
        sB,
        cluster_layout,
        pipeline_ab,
        k_tiles,
        order,
        split,
        queue,
        tma_edges,
        begin,
        leaves_room,
    ):
        """One warp: every stage of every tile of this block, in order. It knows where to begin by
        the time that it may load."""
        tile_m, _, tile_k = self.tile_shape
        block_n = cute.arch.block_idx()[1]
        gA = cute.local_tile(mA, (tile_m, tile_k), (None, None, None))
        # Blocks of the cluster that load parts of one tile are told apart by their coordinate.
        tAsA, tAgA = self._partition_load(tma_a, sA, gA, block_n, self.cluster_shape[1])
        masks = self._multicast_masks(cluster_layout)
        extents = cute.size(mA, mode=[0]), cute.size(mB, mode=[0])
        pieces = self._pieces(tma_edges, (sA, sB))
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        work = (
            *(tma_a, tAgA, tAsA, tma_b, mB, sB, masks, pipeline_ab),
            *(k_tiles, split, pieces, extents, leaves_room, queue),
        )
        stage = self._produce_tiles(*begin, order, queue, stage, work)
        if const_expr(self.cluster_k == 1):
            # Others of the cluster still signal this one's barriers: stay until they are done.
            pipeline_ab.producer_tail(stage)

    @cute.jit
    def _produce_tiles(self, tiles, place, order, queue, stage, work):
        """All of this block; place: coordinates of the first one. Returns the stage behind them."""
        first, end, step = tiles
        for tile in cutlass.range(first, end, step, unroll=1):
            stage, _ = self._produce_tile(tile, place, tile == first, stage, *work)
            place = order.coordinates(tile + step)
        return stage

    @cute.jit
    def _produce_tile(
        self,
        tile,
        place,
        begins,
        stage,
        tma_a,
        tAgA,
        tAsA,
        tma_b,
        mB,
        sB,
        masks,
        pipeline_ab,
        k_tiles,
        split,
        pieces,
        extents,
        leaves_room,
        queue,
    ):
        """(the stage behind a tile, what `_load_and_ask` has of the next one); begins: whether it
        is the first one of this block."""
        block_m, block_n, _ = cute.arch.block_idx()
        of_cluster_m, of_cluster_n, batch = place
        first_k, count = self._k_range(k_tiles, split, tile, batch)
        m = of_cluster_m * self.cluster_shape[0] + block_m
        n = of_cluster_n * self.cluster_shape[1] + block_n
        gB = self._columns_of_tile(mB, n, batch)
        tBsB, tBgB = self._partition_load(tma_b, sB, gB, block_m, self.cluster_shape[0])
        loads = tma_a, tAgA[None, m, None, batch], tAsA, tma_b, tBgB, tBsB, masks, pipeline_ab
        edges, bytes_inside = self._edges_of(pieces, (m, n), batch, extents)
        if begins:
            self._await_inputs(leaves_room)
        load = partial(self._load_inside, loads, edges, bytes_inside)
        return self._load_and_ask(queue, load, first_k, count, stage)

    def _load_and_ask(self, queue, load, first_k, count, state) -> tuple:
        """(what `load` returns of the last k tiles, nothing: no tile is asked for); load: takes the
        first of some k tiles, their number and what it returned before."""
        return load(first_k, count, state), None

    def _columns_of_tile(self, mB, n, batch):
        """Its k tiles, with all columns that are loaded."""
        tile_n, tile_k = self.tile_shape[1:]
        if self.loaded_columns == tile_n:
            return cute.local_tile(mB, (tile_n, tile_k), (n, None, batch))
        return cute.local_tile(
            cute.domain_offset((n * tile_n, 0, 0), mB),
            (self.loaded_columns, tile_k),
            (0, None, batch),
        )

    def _pieces(self, tma_edges, shared) -> tuple:
        """Of A and B, what `EdgeLoad` copies: (atom, source, target), or None."""
        return tuple(
            None if load is None else (edge[0], *load.partition(*edge, sX))
            for load, edge, sX in zip(self.edge_loads, tma_edges, shared, strict=True)
        )

    def _edges_of(self, pieces, tiles, batch, extents) -> tuple:
        """(of the tiles of A and B an `Edge`, or None where all are whole; bytes of a stage)"""
        ranks, tile_k = cute.arch.block_idx()[1::-1], self.tile_shape[2]
        loaded = self.tile_shape[0], self.loaded_columns
        edges, bytes_inside = [], Int32(0)
        for operand, load in enumerate(self.edge_loads):
            row_bytes = tile_k * self.operand_types[operand].width // 8
            if load is None:
                edges.append(None)
                bytes_inside += loaded[operand] * row_bytes
            else:
                tma, source, target = pieces[operand]
                inside = load.pieces_inside(tiles[operand], extents[operand])
                if operand == 0 and min(self.cluster_shape) > 1:
                    # A block that waits for its own loads alone releases a stage twice while the
                    # one across still reads it, whose data is written there then. It waits for a
                    # piece of A of a neighbour, which is behind that one.
                    inside = cutlass.max(inside, load.pieces_of_all)
                of_batch = tma, source[None, None, None, batch], target
                edges.append(Edge(*of_batch, tiles[operand], inside, ranks[operand]))
                bytes_inside += inside * (load.piece * row_bytes)
        return tuple(edges), bytes_inside

    @cute.jit
    def _load_inside(self, loads, edges, bytes_inside, first_k, count, stage, cut=()):
        """`_load_tile`, in a loop for each of the cases: one that asks in every step takes longer
        than the loads of few rows. cut: of A, then of B: their edge if they have one, or None."""
        steps = first_k, count
        if const_expr(len(cut) == 2):
            stage = self._load_tile(*loads, *steps, stage, edges=cut, bytes_inside=bytes_inside)
        elif const_expr(edges[len(cut)] is None):
            stage = self._load_inside(loads, edges, bytes_inside, *steps, stage, (*cut, None))
        else:
            edge = edges[len(cut)]
            if const_expr(self.edge_loads[len(cut)].always):
                stage = self._load_inside(loads, edges, bytes_inside, *steps, stage, (*cut, edge))
            elif edge.inside == self.edge_loads[len(cut)].pieces:
                stage = self._load_inside(loads, edges, bytes_inside, *steps, stage, (*cut, None))
            else:
                stage = self._load_inside(loads, edges, bytes_inside, *steps, stage, (*cut, edge))
        return stage

    def _multicast_masks(self, cluster_layout) -> tuple:
        """Of the loads of A and B: the blocks that each goes to; None for this one alone."""
        block_m, block_n, _ = cute.arch.block_idx()
        coordinate = (0, block_m, block_n, 0)
        a_mask, b_mask = None, None
        if self.cluster_shape[1] > 1:
            a_mask = cpasync.create_tma_multicast_mask(cluster_layout, coordinate, mcast_mode=2)
        if self.cluster_shape[0] > 1:
            b_mask = cpasync.create_tma_multicast_mask(cluster_layout, coordinate, mcast_mode=1)
        return a_mask, b_mask

    @cute.jit
    def _load_tile(
        self,
        tma_a,
        tAgA,
        tAsA,
        tma_b,
        tBgB,
        tBsB,
        masks,
        pipeline_ab,
        first_k,
        count,
        stage,
        descriptors=(None, None),
        edges=(None, None),
        bytes_inside=None,
    ):
        """Some k tiles of an output tile, one stage each; returns the stage behind them.

        descriptors: Of A and B, in place of those of the tensors as a whole; edges: of
        those that are not whole; bytes_inside: of a stage, if any is not.
        """
        a_edge, b_edge = edges
        for k in cutlass.range(first_k, first_k + count, unroll=1):
            if const_expr(a_edge is None and b_edge is None):
                pipeline_ab.producer_acquire(stage)
            else:
                pipeline_ab.sync_object_empty.wait(stage.index, stage.phase)
                pipeline_ab.sync_object_full.arrive_and_expect_tx(stage.index, bytes_inside)
            full = pipeline_ab.producer_get_barrier(stage)
            a = tAgA[None, k], tAsA[None, stage.index]
            b = tBgB[None, k], tBsB[None, stage.index]
            if const_expr(a_edge is None):
                cute.copy(tma_a, *a, **tma_copy_options(full, masks[0], descriptors[0]))
            else:
                self.edge_loads[0].copy(a_edge, k, stage.index, full, masks[0])
            if const_expr(b_edge is None):
                cute.copy(tma_b, *b, **tma_copy_options(full, masks[1], descriptors[1]))
            else:
                self.edge_loads[1].copy(b_edge, k, stage.index, full, masks[1])
            stage.advance()
        return stage

    def _partition_load(self, tma, shared, tiles, coordinate, sharers):
        return cpasync.tma_partition(
            tma,
            coordinate,
            cute.make_layout(sharers),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )


def tma_copy_options(full, mask, descriptor) -> dict:
    """Of a load: its barrier, the blocks that it goes to, a descriptor in place of the atom's."""
    options = {"tma_bar_ptr": full, "mcast_mask": mask}
    return options if descriptor is None else {**options, "tma_desc_ptr": descriptor}
