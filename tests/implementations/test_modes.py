"""gemm_modes: operands as the user gives them, in the order that tiling wants."""

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor
from on_the_cpu import operand

from kernel_api.implementations.common.modes import gemm_modes


def fake_tensor(rank, unit_mode):
    """Sizes and strides known at run time only, but for one stride of 1."""
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = [cute.sym_int64() for _ in range(rank)]
    stride[unit_mode] = 1
    return make_fake_tensor(Float32, shape, tuple(stride))


def traced(rank, unit_modes):
    """(shape, stride) of A, B and D as compiled code sees them; None: known at run time only."""
    seen = []

    def static(values):
        return tuple(value if isinstance(value, int) else None for value in values)

    @cute.jit
    def look(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
        for tensor in gemm_modes(mA, mB, mD):
            seen.append((static(tensor.shape), static(tensor.stride)))

    cute.compile(look, *(fake_tensor(rank, unit_mode) for unit_mode in unit_modes))
    return seen


def with_unit(unit_mode, batch_stride):
    return (1, None, batch_stride) if unit_mode == 0 else (None, 1, batch_stride)


@pytest.mark.parametrize("last_is_unit", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("rank", [2, 3])
def test_the_stride_of_one_stays_static_and_moves_with_its_mode(rank, last_is_unit):
    unit_mode = -1 if last_is_unit else -2
    extent, stride = (1, 0) if rank == 2 else (None, None)
    a, b, d = traced(rank, [unit_mode] * 3)
    kept, transposed = (1, 0) if last_is_unit else (0, 1)
    assert a == d == ((None, None, extent), with_unit(kept, stride))
    assert b == ((None, None, extent), with_unit(transposed, stride))


@cute.jit
def write_facts(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, facts: cute.Tensor):
    seen = gemm_modes(mA, mB, mD)
    for i in cutlass.range_constexpr(3):
        for mode in cutlass.range_constexpr(3):
            facts[i, 0, mode] = Int32(seen[i].shape[mode])
            facts[i, 1, mode] = Int32(seen[i].stride[mode])


def facts_of(*arrays):
    """[[shape, stride] of A, of B, of D], as they are at run time."""
    facts = np.empty((3, 2, 3), np.int32)
    tensors = [operand(array, array.ndim - 1) for array in (*arrays, facts)]
    cute.compile(write_facts, *tensors)(*tensors)
    return facts.tolist()


M, N, K, L = 5, 6, 7, 3


def test_two_modes_become_three_with_a_batch_of_one():
    a, b, d = (np.zeros(shape, np.float32) for shape in ((M, K), (K, N), (M, N)))
    assert facts_of(a, b, d) == [
        [[M, K, 1], [K, 1, 0]],
        [[N, K, 1], [1, N, 0]],
        [[M, N, 1], [N, 1, 0]],
    ]


def test_the_batch_goes_last():
    a, b, d = (np.zeros(shape, np.float32) for shape in ((L, M, K), (L, K, N), (L, M, N)))
    assert facts_of(a, b, d) == [
        [[M, K, L], [K, 1, M * K]],
        [[N, K, L], [1, N, K * N]],
        [[M, N, L], [N, 1, M * N]],
    ]


def test_operands_without_a_batch_mode_stand_beside_those_with_one():
    a, b, d = (np.zeros(shape, np.float32) for shape in ((M, K), (L, K, N), (L, M, N)))
    assert facts_of(a, b, d)[0] == [[M, K, 1], [K, 1, 0]]
    assert facts_of(a, b, d)[2] == [[M, N, L], [N, 1, M * N]]


def test_a_broadcast_batch_keeps_its_stride_of_zero():
    a = np.broadcast_to(np.zeros((M, K), np.float32), (L, M, K)).view()
    b, d = (np.zeros(shape, np.float32) for shape in ((L, K, N), (L, M, N)))
    a.flags.writeable = True
    assert facts_of(a, b, d)[0] == [[M, K, L], [K, 1, 0]]
