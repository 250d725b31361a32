"""Rows sorted by group on a GPU: by every kernel, replayed, and behind other kernels."""

import pytest
import torch
from support.grouping import arguments, check, computed

import kernel_api as ka

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("M", "k", "E"),
    [(1, 1, 1), (16, 2, 8), (37, 3, 255), (129, 8, 256), (4095, 8, 256), (700, 4, 1000),
     (50, 2, 2047), (0, 2, 5), (5, 0, 5)],
)  # fmt: skip
@pytest.mark.parametrize("element", [torch.int64, torch.int32])
def test_every_kernel_is_right_and_repeatable(M, k, E, element):
    weight = (None, torch.float32, torch.bfloat16)[(M + k) % 3]
    args = arguments(M, k, E, element=element, weight=weight, device="cuda", seed=M)
    kernels = ka.get_kernels(args)
    assert [one.metadata.provider for one in kernels] == ["cutedsl", "torch", "reference"]
    for kernel in kernels:
        for _ in range(10 if kernel is kernels[0] else 1):
            for operand in args.outputs.values():
                operand.tensor.fill_(-7)
            kernel.run(args)
            check(args)


def test_prepared_launches_take_operands_by_their_places():
    args = arguments(90, 3, 5, device="cuda")
    for kernel in ka.get_kernels(args):
        for operand in args.outputs.values():
            operand.tensor.fill_(-7)
        kernel.prepare(args)(*(operand.tensor for operand in args.named_operands.values()))
        check(args)


def test_more_pairs_than_one_block_sorts_are_sorted_by_torch():
    args = arguments(8193, 8, 64, device="cuda")
    kernels = ka.get_kernels(args)
    assert [one.metadata.provider for one in kernels] == ["torch", "reference"]
    kernels[0].run(args)
    check(args)


def test_indices_may_change_between_replays_of_a_graph():
    one, other = (arguments(300, 8, 64, device="cuda", seed=seed) for seed in range(2))
    kernel = ka.get_kernels(one)[0]
    kernel.run(one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(one)
    for name in ("index", "weight"):
        getattr(one, name).tensor.copy_(getattr(other, name).tensor)
    graph.replay()
    check(one)


def test_what_was_written_just_before_is_sorted():
    """The kernel begins while the one before ends."""
    index = torch.empty(4096, 8, dtype=torch.int64, device="cuda")
    scores = torch.randn(20, 4096, 64, device="cuda")
    for of_turn in scores:
        index.copy_(of_turn.topk(8).indices)
        found = ka.ops.group_rows(index, 64)
        sizes = torch.bincount(index.flatten(), minlength=64)
        assert torch.equal(found.offsets, sizes.cumsum(0).int())
        moved = index.flatten()[found.place.long()]
        assert torch.equal(moved, index.flatten().sort(stable=True).values)


def test_other_devices_and_arrays_give_the_same():
    args = arguments(90, 4, 30)
    found = ka.ops.group_rows(args.index.tensor.cuda(), 30, weight=args.weight.tensor.cuda())
    for one, expected in zip(found, computed(args).values(), strict=True):
        assert torch.equal(one.cpu().double(), expected.double())
