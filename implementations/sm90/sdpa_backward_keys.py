"""What the gradient of attention does behind its main part where blocks share keys."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ..common.attention.values import Values
from ..common.flat_grid import flat_block_idx, flat_grid
from ..common.threads import GROUP
from .sdpa_backward_plan import CONSUMERS, BackwardPlan
from .sdpa_backward_rows import RowTile, load_accumulators


class KeyGradients:
    """dK and dV: what blocks that share keys have left in the workspace, added up in their order,
    scaled and rounded. It lies there as accumulators do, see `QueryGradients`."""

    threads = CONSUMERS * GROUP

    def __init__(self, plan: BackwardPlan):
        self.plan = plan

    @cute.jit
    def __call__(self, mdK, mdV, operands, left: Int64, shares: Int32, stream):
        """mdK, mdV: (S,D,H,B); left: an address; shares: one if there is nothing to do."""
        plan = self.plan
        elements = plan.tile_n * max(plan.head_dim, plan.head_dim_v)

        @cute.struct
        class SharedStorage:
            rows: cute.struct.Align[cute.struct.MemRange[plan.element_type, elements], 1024]

        self.shared_storage = SharedStorage
        if shares > 1:
            keys, _, heads, batches = mdK.shape
            blocks = cute.ceil_div(keys, plan.tile_n)
            self.kernel(mdK, mdV, operands, left, blocks, shares).launch(
                grid=flat_grid(2 * blocks, heads, batches),
                block=(self.threads, 1, 1),
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(self, mdK, mdV, operands, left: Int64, blocks: Int32, shares: Int32):
        """A block of keys, of dK or of dV, by each block."""
        plan = self.plan
        storage = SmemAllocator().allocate(self.shared_storage)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(plan.scores.names, operands)
        index, head, batch = flat_block_idx(2 * blocks, mdK.shape[2])
        block, is_of_values = index // 2, index % 2
        first = (batch * mdK.shape[2] + head) * shares * blocks + block
        address = left + Int64(first) * plan.share_bytes
        if is_of_values == 1:
            target = mdV[None, None, head, batch]
            self._add_up(
                *(storage, plan.dv_product, plan.head_dim_v),
                *(address + plan.share_of_dk_bytes, target),
                *(Float32(1.0), block, blocks, shares),
            )
        else:
            target = mdK[None, None, head, batch]
            self._add_up(
                *(storage, plan.dk_product, plan.head_dim, address, target),
                *(values.number("scale"), block, blocks, shares),
            )

    @cute.jit
    def _add_up(
        self,
        storage,
        product,
        columns: cutlass.Constexpr,
        address: Int64,
        target,
        factor,
        block: Int32,
        blocks: Int32,
        shares: Int32,
    ):
        """address: Of the first share, behind which the others are."""
        plan = self.plan
        thread = cute.arch.thread_idx()[0]
        sums, further = product.accumulators(), product.accumulators()
        load_accumulators(sums, address, thread)
        step = Int64(blocks) * plan.share_bytes
        for i in cutlass.range(1, shares, unroll=1):
            load_accumulators(further, address + i * step, thread)
            sums.store(sums.load() + further.load())
        rows = RowTile(plan, plan.tile_n, columns)
        rows.put(storage.rows, product, sums, factor, thread, plan.swaps_dkv)
        cute.arch.sync_threads()
        first = block * plan.tile_n
        rows.copy_out(storage.rows, target, first, Int32(target.shape[0]), thread)
