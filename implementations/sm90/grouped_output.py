"""Output tiles of grouped products, where dense ones have no such thing: on their way to rows or
to matrices that lie anywhere."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ..common.expert_matrices import ExpertMatrices
from .descriptors import descriptor_of
from .output import Output


class ScatteredOutput(Output):
    """An output whose D has more or fewer columns than the accumulators, and rows that lie
    anywhere."""

    def _scatter(self, tid, sD, mD, rows, at, group):
        first, extent, _ = group
        super()._scatter(tid, sD, mD, rows, at, (first, extent, mD.shape[1]))


class ExpertsOutput(Output):
    """An output whose D lies anywhere, a matrix per group: TMA takes a descriptor of each, threads
    its address.

    What the epilogue reads has one more element: (addresses, (M, N), pitch, address of the first
    descriptor).

    Attributes:
        experts: What is known of D.
        accumulate: Whether the epilogue reads D, as its last operand.
        atom: Of TMA, for one of the matrices; the descriptors are made of it.
    """

    experts: ExpertMatrices
    accumulate: bool
    atom: cute.CopyAtom | None = None

    def tma(self, mD: tuple, shared_layouts: tuple) -> tuple:
        atoms, tensors = super().tma(mD, shared_layouts)
        self.atom = atoms[0]
        return atoms, tensors

    def operands_of(self, operands, batch):
        *operands, (addresses, shape, pitch, _) = operands
        if self.accumulate:
            operands[-1] = self.experts.at(addresses[batch], shape, pitch)
        return tuple(operands)

    def write(
        self, consumer, accumulators, tma_d, mD, sD, operands, majors, place, *further, **more
    ):
        group, (addresses, shape, pitch, first) = place[2], operands[-1]
        if self.tma_stores[0]:
            descriptor = descriptor_of(first, group)
            cpasync.fence_tma_desc_acquire(descriptor)
            tma_d = ((tma_d[0], descriptor), *tma_d[1:])
            # The descriptor tells the group, and has one batch.
            D = cute.domain_offset((0, 0, -group), mD[0])
        else:
            D = self.experts.at(addresses[group], shape, pitch)
        outputs = (D, *mD[1:])
        super().write(
            *(consumer, accumulators, tma_d, outputs, sD, operands, majors, place, *further), **more
        )

    def _store_by_tma(self, tma_d, sD, gD):
        if not isinstance(tma_d, tuple):
            super()._store_by_tma(tma_d, sD, gD)
            return
        atom, descriptor = tma_d
        source, destination = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(atom, source, destination, tma_desc_ptr=descriptor)
        cute.arch.cp_async_bulk_commit_group()


def written_as(kind: type[Output], output: Output, **attributes) -> Output:
    """An output that is planned, as one of another kind."""
    found = object.__new__(kind)
    vars(found).update(vars(output), **attributes)
    return found
