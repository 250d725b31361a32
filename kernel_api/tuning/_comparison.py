"""Kernels of one problem timed beside each other, as the tuner does it, for whoever wants to see:
all of them to the end, and nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_api._description import described
from kernel_api.arguments import Arguments
from kernel_api.kernel import Kernel
from kernel_api.parallel import progress_bar
from kernel_api.tuning._autotune import Builder, Task, alone_on, measure, measurement
from kernel_api.tuning._choice import Candidates, Choice
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._search import Candidate


def compared(
    args: Arguments,
    kernels: Sequence[Kernel],
    environment: Environment,
    device: str,
    choice: Choice,
    *,
    verify: bool = True,
    progress: bool = False,
) -> list[Measurement]:
    """What comes of each kernel: those that passed first, from fast to slow.

    Args:
        args: What they compute, of which the data is not looked at.
        environment: Of the device, by the policy that they are timed by.
        choice: Says for which architecture they compile, and how long they may take.
        verify: Whether results are compared with the reference before anything is timed.
        progress: Draw a bar on stderr, where rich is installed.

    Raises BenchError; ArgumentError for arguments that cannot be described.
    """
    description, problem = described(args), Problem.of(args)
    candidates = Candidates(kernels, kernels[0])
    limits = None, choice.timeout_s
    task = Task(description, problem, candidates, device, environment, None, {}, *limits)
    # Those that are seeded take part in all rounds.
    all_of_them = [Candidate(index, one, is_seeded=True) for index, one in enumerate(kernels)]
    rows: list[Measurement] = []
    builder = Builder([task], choice.cc)
    try:
        with progress_bar("measuring", len(kernels), shown=progress) as advance:

            def done(one: Candidate) -> None:
                rows.append(measurement(one, task))
                advance()

            with alone_on(device, builder.halt):
                measure(task, all_of_them, builder, done, verify=verify, recheck=False)
    finally:
        builder.close()
    return sorted(rows, key=lambda row: row.place(task.rounds))
