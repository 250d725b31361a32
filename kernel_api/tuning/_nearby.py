"""The kernel for a problem that was not measured, where one of other sizes was.

What is fastest there need not be here: if tiles fill a GPU once, a few more take twice as long. The
performance model knows that, and what was measured knows how wrong the model is. So the three that
were fastest there, and the one that the model would choose, are expected to take what the model
says of them here, times what they took there over what the model says of there.

The model's choice may have no row. If it could have run there it is none of the three fastest, of
which a table has no more: it took at least as long as the third. To a kernel without a model a
change of sizes does what it does to the fastest one that has a model; if none has, what was fastest
there is taken.

Each of 203 products that were tuned on an H200 by the nearest one of the others
(``benchmarks/nearby.py``): what is taken so needs 1.9 % more than the best of all candidates, as
the model's choice does; what was fastest there, where it is a candidate at all, 8 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_api._description import described, rebuilt
from kernel_api.arguments import Arguments
from kernel_api.discovery import predicted
from kernel_api.kernel import Kernel
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._problem import Problem

#: Kernels that are looked at, of those that were measured: a table has no more.
FASTEST = 3


def expected_fastest(
    args: Arguments,
    rows: Sequence[Measurement],
    taken: Mapping[Kernel, Measurement],
    choice: Kernel | None,
) -> Kernel:
    """The one that is expected to be.

    Args:
        rows: Of a problem that is like the arguments, fastest first.
        taken: Those of them whose kernels passed and take the arguments: the first ``FASTEST``, or
            fewer if there are no more.
        choice: Of the performance model, for the arguments.
    """
    sizes = _Sizes(args, rows[0].problem)
    measured = {kernel: row.median_us for kernel, row in taken.items()}
    kernels = [*taken] if choice is None or choice in taken else [*taken, choice]
    said = sizes.said_by(kernels)
    modelled = {kernel: one for kernel, one in said.items() if kernel in taken}
    if not modelled:
        return next(iter(taken))
    wrong = {kernel: measured[kernel] / there for kernel, (_, there) in modelled.items()}
    expected = {kernel: here * wrong[kernel] for kernel, (here, _) in modelled.items()}
    fastest = next(iter(modelled))
    change = expected[fastest] / measured[fastest]
    expected |= {kernel: change * measured[kernel] for kernel in taken if kernel not in modelled}
    if choice is not None and choice not in taken and choice in said:
        usual = statistics.median(wrong.values())
        seconds = _expected_of_choice(choice, said[choice], sizes, rows, taken, usual)
        if seconds is not None:
            expected[choice] = seconds
    return min(expected, key=expected.__getitem__)


def _expected_of_choice(
    choice: Kernel,
    said: tuple[float, float],
    sizes: _Sizes,
    rows: Sequence[Measurement],
    taken: Mapping[Kernel, Measurement],
    usual: float,
) -> float | None:
    """None for one that failed. The usual ratio of a time to what a model says is that of one
    without a row, unless it must have been slower."""
    here, there = said
    row = next((one for one in rows if one.kernel.name == choice.metadata.kernel_name), None)
    if row is not None:
        return here * row.median_us / there if row.passed else None
    first = [*taken.values()]
    are_fastest = len(first) == FASTEST and first == [*rows[:FASTEST]]
    could_be_faster = not are_fastest or not sizes.suit(choice)
    return here * (usual if could_be_faster else max(usual, first[-1].median_us / there))


class _Sizes:
    """Those of arguments, and of a problem that is like them."""

    def __init__(self, args: Arguments, nearby: Problem) -> None:
        description = described(args)
        self._here = rebuilt(description)  # on meta tensors as well, for one and the same GPU
        self._there = rebuilt(_filled(description, nearby.to_dict()["arguments"]))

    def said_by(self, kernels: Sequence[Kernel]) -> dict[Kernel, tuple[float, float]]:
        """Seconds by the models of those that have one, of the arguments and of the problem: of one
        after the other, as models remember what they were last asked about."""
        here, there = (
            [predicted(kernel, sizes) for kernel in kernels] for sizes in (self._here, self._there)
        )
        return {
            kernel: (one, other)
            for kernel, one, other in zip(kernels, here, there, strict=True)
            if one is not None and other
        }

    def suit(self, kernel: Kernel) -> bool:
        """Whether a kernel could run on the problem's."""
        return bool(kernel.supports(self._there))


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
