"""What grouped products take of a workspace, and which of them there are not."""

import pytest
from cutlass import BFloat16, Float32

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.arguments.grouped import GroupedGemmArguments
from kernel_api.implementations.common.accumulated import Accumulated
from kernel_api.implementations.common.epilogue import Epilogue, Finish, Reduced
from kernel_api.implementations.common.grouped_reductions import GroupedReductions
from kernel_api.implementations.common.grouped_tiles import most_row_tiles
from kernel_api.implementations.common.reductions import Reductions
from kernel_api.implementations.sm80.grouped_gemm import GroupedGemm, GroupedSumGemm

torch = pytest.importorskip("torch")


def reduced_arguments(T, N, E, K=64):
    """Groups of rows with one reduction of each kind."""

    def fn(accum):
        return accum, ep.sum(accum, -1), ep.amax(accum, -2), ep.max(accum, None)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    A, B = empty(T, K, dtype=torch.bfloat16), empty(E, K, N, dtype=torch.bfloat16)
    epilogue = ka.EpilogueArguments(fn, rows=empty(T), columns=empty(E, N), groups=empty(E))
    offsets = empty(E, dtype=torch.int32)
    return GroupedGemmArguments(A, B, empty(T, N, dtype=torch.bfloat16), offsets, epilogue=epilogue)


@pytest.mark.parametrize(("T", "N", "E"), [(1000, 136, 7), (3, 64, 200), (4096, 256, 1)])
def test_kernels_ask_for_as_much_workspace_as_their_reductions_take(T, N, E):
    args = reduced_arguments(T, N, E)
    kernels = ka.get_kernels(args, cc=80, providers=["cutedsl"])
    asked = [k for k in kernels if k.metadata.targets == ("sm_80",)]
    assert len({kernel.metadata.design for kernel in asked}) > 3
    for kernel in asked:
        gemm = kernel.implementation_for(args)
        tile_m, tile_n, _ = gemm.tile_shape
        reductions = Reductions(
            gemm.epilogue, (tile_m, tile_n), rows=tile_m, groups=1, threads=gemm.threads
        )
        taken = GroupedReductions(reductions).sizes(
            most_row_tiles(T, E, tile_m), -(-N // tile_n), E
        )
        assert kernel._reductions(T, N, E) == taken
        counters, parts = taken
        assert kernel.get_workspace_size(args) == kernel.workspace_for(*args.tensors)
        assert kernel.get_workspace_size(args) >= 4 * (counters + parts)


class OverAll(Epilogue):
    reduced = (Reduced("sum", "all"),)


def test_nothing_is_reduced_over_all_groups():
    reductions = Reductions(OverAll(), (64, 64), rows=64, groups=1, threads=128)
    with pytest.raises(ValueError, match="per row, per column and group, or per group"):
        GroupedReductions(reductions)


@pytest.mark.parametrize("gemm", [GroupedGemm, GroupedSumGemm])
def test_groups_leave_k_whole(gemm):
    with pytest.raises(ValueError, match="K is"):
        gemm((64, 64, 64), (2, 2), 3, Float32, split_k=2)


def test_what_is_added_to_is_the_last_operand():
    added = Accumulated(Finish(("n", "l"), lambda accumulator, *_: accumulator))
    assert added.kinds == ("n", "l", "lmn")
    assert GroupedSumGemm((64, 64, 64), (2, 2), 3, Float32, accumulate=True).fused


def test_the_place_of_a_tile_is_in_shared_memory():
    dense_bytes = 3 * (64 + 64) * 64 * 2
    gemm = GroupedGemm((64, 64, 64), (2, 2), 3, Float32)
    assert gemm.shared_memory_bytes(BFloat16, BFloat16) == dense_bytes + 4 * gemm.place
