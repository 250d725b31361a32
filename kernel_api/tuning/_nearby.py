"""The kernel for a problem that was not measured, where one of other sizes was.

What is fastest there need not be here: if tiles fill a GPU once, a few more take twice as long. The
performance model knows that, and what was measured knows how wrong the model is. So the three that
were fastest there, and the one that the model would choose, are expected to take what the model
says of them here, times what they took there over what the model says of there. Where the model's
choice is none of the three, it took at least as long as the third. To a kernel without a model a
change of sizes does what it does to the fastest one that has a model; if none has, what was fastest
there is taken.

Each of 159 products that were tuned on an H200 by the nearest one of the others: what is taken so
needs 1.7 % more than the best of all candidates, the model's choice 1.8 %, what was fastest there
10 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from kernel_api._description import described, rebuilt
from kernel_api.arguments import Arguments
from kernel_api.discovery import get_kernels
from kernel_api.kernel import Kernel
from kernel_api.tuning._problem import Problem

#: Kernels that are looked at, of those that were measured: a table has no more.
FASTEST = 3


def expected_fastest(
    args: Arguments, nearby: Problem, measured: Mapping[Kernel, float], cc: Any = None
) -> Kernel:
    """Of the fastest that were measured on a problem that is like the arguments, and take them, in
    microseconds and in that order; and of the one that the model would choose.

    Args:
        cc: As ``get_kernels`` takes it.
    """
    sizes = _Sizes(args, nearby)
    said = {kernel: sizes.said_by(kernel) for kernel in measured}
    modelled = {kernel: one for kernel, one in said.items() if one is not None}
    if not modelled:
        return next(iter(measured))
    wrong = {kernel: measured[kernel] / there for kernel, (_, there) in modelled.items()}
    expected = {kernel: here * wrong[kernel] for kernel, (here, _) in modelled.items()}
    fastest = next(iter(modelled))
    change = expected[fastest] / measured[fastest]
    expected |= {kernel: change * measured[kernel] for kernel in measured if kernel not in modelled}
    choice = get_kernels(args, cc=cc)[0]
    said_of_choice = None if choice in measured else sizes.said_by(choice)
    if said_of_choice is not None:
        here, there = said_of_choice
        least = max(measured.values()) / there if len(measured) == FASTEST else 0.0
        expected[choice] = here * max(statistics.median(wrong.values()), least)
    return min(expected, key=expected.__getitem__)


class _Sizes:
    """Those of arguments, and of a problem that is like them."""

    def __init__(self, args: Arguments, nearby: Problem) -> None:
        description = described(args)
        self._here = rebuilt(description)  # on meta tensors as well, for one and the same GPU
        self._there = rebuilt(_filled(description, nearby.to_dict()["arguments"]))

    def said_by(self, kernel: Kernel) -> tuple[float, float] | None:
        """Seconds by the kernel's model, of the arguments and of the problem; None without one."""
        here, there = kernel.predict(self._here), kernel.predict(self._there)
        return (here, there) if here is not None and there else None


def _filled(description: Any, problem: Any) -> Any:
    """What a problem says in place of what arguments that are like it do; what it leaves out, such
    as numbers and functions, is theirs."""
    if problem is None:
        return description
    if isinstance(description, dict):
        return {name: _filled(value, problem.get(name)) for name, value in description.items()}
    if isinstance(description, list) and any(isinstance(one, dict) for one in description):
        return [_filled(*pair) for pair in zip(description, problem, strict=True)]
    return problem
