"""How tiles of attention's operands come to shared memory on Hopper: by TMA, stage by stage."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
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
    destination, source = cpasync.tma_partition(
        tma,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    cute.copy(
        tma,
        source[None, index],
        destination[None, state.index],
        tma_bar_ptr=stages.producer_get_barrier(state),
    )
