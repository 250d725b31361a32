"""Arrays of other libraries, by DLPack alone, wherever a tensor may be given."""

import numpy as np
import pytest
import torch
from support.arrays import Array

import kernel_api as ka
from kernel_api.errors import ArgumentError


def test_products_take_them_as_operands_and_as_out():
    A, B, out = torch.randn(4, 5), torch.randn(5, 6), torch.empty(4, 6)
    ka.ops.gemm(Array(A), Array(B), out=Array(out))
    torch.testing.assert_close(out, A @ B)


def test_products_of_groups_take_them_as_offsets_and_indices():
    A, B = torch.randn(4, 5), torch.randn(2, 5, 6)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    order = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
    found = ka.ops.grouped_gemm(A, B, Array(offsets), row_index=Array(order))
    torch.testing.assert_close(found, ka.ops.grouped_gemm(A, B, offsets, row_index=order))


def test_rows_that_an_index_names_are_in_them():
    rows, index = torch.randn(6, 4), torch.tensor([[5, 0], [-1, 2]], dtype=torch.int32)
    found = ka.ops.gather_rows(Array(rows), Array(index))
    assert torch.equal(found, ka.ops.gather_rows(rows, index))
    scattered = ka.ops.scatter_rows(Array(rows[:2]), Array(index[:, :1].clone()), rows=7)
    assert torch.equal(scattered[5], rows[0])


X, EXPERTS, ENDS = torch.randn(4, 8), torch.randn(2, 8, 2), torch.tensor([1, 4]).int()


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((2, 2, 8), lambda out: ka.ops.rmsnorm(X.view(2, 2, 8), out=out)),
        ((2, 2), lambda mean: ka.ops.layernorm(X.view(2, 2, 8), mean=mean)),
        (
            (2, 2),
            lambda amax: ka.ops.grouped_gemm_dglu(
                X, EXPERTS, ENDS, preactivation=X[:, :4], granularity=1, amax=amax
            ),
        ),
        ((8, 3), lambda out: ka.ops.grouped_gemm_wgrad(X.t(), X[:, :3], ENDS, out=[out, out])),
    ],
    ids=["norm", "statistics", "one part of it", "a list"],
)
def test_what_may_not_be_written_is_not_seen_through_either(shape, call):
    given = np.zeros(shape, np.float32)
    given.flags.writeable = False
    with pytest.raises(ArgumentError, match="is an array that may not be written"):
        call(given)
    assert not given.any()


@pytest.mark.parametrize("element", [np.float32, np.int8])
def test_a_prepared_product_takes_the_arrays_that_it_was_prepared_with(element):
    A, B = np.ones((32, 32), element), np.ones((32, 32), element)
    out = np.zeros((32, 32), np.int32 if element is np.int8 else element)
    args = ka.GemmArguments(A, B, out)
    for kernel in ka.get_kernels(args):
        out[:] = 0
        kernel.prepare(args)(A, B, out)
        assert (out == 32).all(), kernel


@pytest.mark.parametrize("wrap", [Array, np.asarray])
def test_prepared_attention_takes_them(wrap):
    q, k, v, out = (torch.randn(1, 2, 3, 8) for _ in range(4))
    args = ka.SdpaArguments(q, k, v, out)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for kernel in ka.get_kernels(args):
        out.zero_()
        kernel.prepare(args)(*map(wrap, (q, k, v, out)))
        torch.testing.assert_close(out, expected)
