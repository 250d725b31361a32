"""Results that do not depend on the order in which warps run."""

from typing import Any

import torch

from kernel_api.verification import FACTOR_REORDERED, judge, poison
from support.ptx.kernel import EmulatedKernel


def assert_same_in_any_order(kernel: Any, args: Any, **options: Any) -> None:
    """Of three orders: a kernel's out is right, and has the same bits; options: of a run."""
    compiled, found = EmulatedKernel.compile(kernel, args), []
    for seed in range(3):
        poison(args.out.tensor)
        compiled.run(args, seed=seed, **options)
        assert judge(args, FACTOR_REORDERED), kernel.metadata.kernel_name
        found.append(args.out.tensor.clone())
    assert all(torch.equal(found[0], other) for other in found[1:])
