"""Processes that share a GPU: it stops kernels in the middle to let others run, and blocks of a
cluster go on at different times."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernel_api as ka

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

PROCESSES, RUNS = 8, 200
GROUPS, M, N = 150, 520, 640


def whole(*shape):
    """Small whole numbers: their sums are exact in any order."""
    return torch.randint(-2, 3, shape, device="cuda").float()


def problem():
    """(arguments that add to out, what out begins with, the result)"""
    sizes = random.Random(7).choices((0, 1, 7, 63, 64, 65, 127, 129, 1000), k=GROUPS)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    A, B, before = whole(ends[-1], M), whole(ends[-1], N), whole(GROUPS, M, N)
    starts = [0, *ends[:-1]]
    sums = [A[first:end].T @ B[first:end] for first, end in zip(starts, ends, strict=True)]
    args = ka.GroupedGemmArguments(
        *(A.bfloat16().T, B.bfloat16(), torch.empty_like(before)),
        torch.tensor(ends, dtype=torch.int32, device="cuda"),
        accumulate=True,
    )
    return args, before, before + torch.stack(sums)


def in_clusters(args):
    """The kernels whose clusters take tiles as they become free, and of others the best."""
    found = ka.get_kernels(args, providers=["cutedsl"])
    designs = [(kernel, kernel.metadata.design) for kernel in found]
    taking = [
        kernel
        for kernel, design in designs
        if getattr(design, "scheduler", None) == "dynamic" and design.cluster_shape != (1, 1, 1)
    ]
    return [*taking, found[0]]


def wrong_results():
    """By the names of kernels, how many of their runs went wrong."""
    args, before, expected = problem()
    wrong = {}
    for kernel in in_clusters(args):
        artifact = kernel.compile(args)
        for _ in range(RUNS):
            args.out.tensor.copy_(before)
            kernel.run(args, artifact)
            if not torch.equal(args.out.tensor, expected):
                name = kernel.metadata.kernel_name
                wrong[name] = wrong.get(name, 0) + 1
    return wrong


def test_results_are_right_where_processes_share_the_gpu():
    args, _, _ = problem()
    for kernel in in_clusters(args):
        kernel.compile(args)  # for all: the others find it in the cache
    started = [
        subprocess.Popen([sys.executable, str(Path(__file__))], stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    try:
        told = [process.communicate(timeout=300)[0].strip() for process in started]
    finally:
        for process in started:
            process.kill()
    assert told == ["{}"] * PROCESSES


if __name__ == "__main__":
    sys.stdout.write(f"{wrong_results()}\n")
