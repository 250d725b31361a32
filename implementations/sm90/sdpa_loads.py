"""How tiles of attention's operands come to shared memory on Hopper: by TMA, stage by stage."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync


def tma_load(tensor: cute.Tensor, shared_layout, tiler: tuple[int, int]) -> tuple:
    """The atom that copies tiles, and the tensor of their coordinates.

    shared_layout: Of a tile; the stages are behind.
    """
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        tensor,
        cute.slice_(shared_layout, (None, None, 0)),
        tiler,
    )


def tma_pipeline(barriers, stages: int, tx_count: int, readers: int) -> pipeline.PipelineTmaAsync:
    """A stage is full when its bytes have landed, empty when every consumer has released it.

    tx_count: Bytes of a stage.
    readers: Warps of all consumers.
    """
    return pipeline.PipelineTmaAsync.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
        tx_count=tx_count,
        barrier_storage=barriers.data_ptr(),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


def load(tma, tiles: cute.Tensor, index, shared: cute.Tensor, stages, state) -> None:
    """One of (rows, columns, tiles) into its stage, when that is empty."""
    stages.producer_acquire(state)
    _copy(tma, tiles, index, shared, state.index, stages.producer_get_barrier(state))


def scores_modes(tensor: cute.Tensor) -> cute.Tensor:
    """(B,H,S_q,S_kv) of scores, seen as (S_q,S_kv,H,B)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))


def load_scores(
    tma, coordinates: cute.Tensor, tiler, place: tuple, shared, stage, barrier: cute.Pointer
) -> None:
    """A tile of what is added to scores, into a stage that is empty.

    coordinates: (S_q,S_kv,H,B); of modes of extent 1 all have the same.
    place: (batch, head, row, column), the last two counted in tiles.
    """
    batch, head, row, column = place
    head, batch = (
        cutlass.min(index, Int32(extent) - 1)
        for index, extent in zip((head, batch), coordinates.shape[2:], strict=True)
    )
    tiles = cute.local_tile(coordinates[None, None, head, batch], tiler, (row, None))
    _copy(tma, tiles, column, shared, stage, barrier)


def _copy(tma, tiles: cute.Tensor, index, shared: cute.Tensor, stage, barrier) -> None:
    destination, source = cpasync.tma_partition(
        tma,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    cute.copy(tma, source[None, index], destination[None, stage], tma_bar_ptr=barrier)
