"""Tune many problems with dask: by the processes of this machine, or of many machines.

    pip install 'kernel-api[distributed]'
    python examples/tune_on_a_cluster.py

starts a cluster on this machine, with one process for each GPU, or two without any, where the
kernels of the CPU are tuned. On several machines, start a scheduler on one, and on each of them as
many single-threaded workers as it has GPUs; each worker takes a GPU that no other one is using:

    dask scheduler
    dask worker tcp://<first machine>:8786 --nworkers 8 --nthreads 1
    python examples/tune_on_a_cluster.py tcp://<first machine>:8786

All machines have the same versions of this package and of its compiler. GPUs of different kinds
are different environments: let a cluster have one kind. What the workers measure comes back and is
kept in the cache of the process that asked, where kernel_api.tuned finds it; a worker that dies
loses the problem that it was at, which is tuned again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch
from distributed import Client, LocalCluster

import kernel_api as ka

N, K = 512, 256
TOKENS = (1, 16, 64)


def main(arguments: Sequence[str]) -> int:
    problems = [problem(tokens) for tokens in TOKENS]
    with client(arguments[0] if arguments else None) as cluster:
        found = ka.autotune(problems, executor=cluster.get_executor(), progress=True)
    for args, result in zip(problems, found, strict=True):
        print(f"{args.M}x{args.N}x{args.K}: {result}")
    return 1 if any(isinstance(result, ka.errors.KernelApiError) for result in found) else 0


def problem(tokens: int) -> ka.GemmArguments:
    """Meta tensors have no data: nothing is allocated, nor sent to anyone."""
    shapes = (tokens, K), (K, N), (tokens, N)
    return ka.GemmArguments(*(torch.empty(shape, device="meta") for shape in shapes))


@contextlib.contextmanager
def client(scheduler: str | None) -> Iterator[Client]:
    """Of the cluster at an address; without one, of a new one on this machine."""
    if scheduler is not None:
        with Client(scheduler) as found:
            yield found
        return
    workers = torch.cuda.device_count() or 2
    # In processes, each with one thread: whatever is tuned at once must not share a process.
    cluster = LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None
    )
    with cluster, Client(cluster) as found:
        yield found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
