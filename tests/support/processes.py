"""Processes that tune, and what is left of them.

They are forked by a process that has imported torch already, and so is the server of each: it is
there at once. (Tests that tune in their own process have a server that is started as usual.)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import kernel_api as ka
from kernel_api import _fork_server
from kernel_api.tuning import Policy, _bench, _search

QUICK = Policy(launches="eager", l2="warm", rounds=8)

#: Stands in the environment of whatever a tuner starts.
MARK = "KERNEL_API_TEST_MARK"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["support.processes", *_bench._IMPORTED])


def arguments(M: int, K: int = 24, N: int = 16) -> ka.GemmArguments:
    """Without data."""
    return ka.GemmArguments(
        *(torch.empty(shape, device="meta") for shape in ((M, K), (K, N), (M, N)))
    )


@contextlib.contextmanager
def registered(kernel_classes: Sequence[type[ka.Kernel]]) -> Iterator[type[ka.Provider]]:
    """A provider that has the same name in all processes."""
    from support.registry import restored_registry

    with restored_registry() as registry:
        provider = registry.provider("mortal")
        for one in kernel_classes:
            provider.register(one)
        yield provider


def tune(kernel_classes: Sequence[type[ka.Kernel]], sizes: Sequence[int], **options: Any) -> Any:
    """In this process; in one thread of it at a time."""
    options.setdefault("policy", QUICK)
    with registered(kernel_classes) as provider:
        return ka.autotune([arguments(M) for M in sizes], providers=[provider], **options)


def hurry() -> None:
    """In a process of its own: fork the server, and measure no longer than it takes."""
    vars(_search).update(_WARM_SECONDS=0.0, _FINAL_SECONDS=0.0)
    vars(_fork_server)["subprocess"] = SimpleNamespace(Popen=_Forked, DEVNULL=None)


def start(target: Callable[..., None], *args: Any, **environment: str) -> Any:
    """A process that runs a function of a module, with more variables in its environment. It sees
    no GPU: a process that is forked from one that uses a GPU cannot."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    process = _context.Process(target=_run, args=(target, args, variables))
    process.start()
    return process


def _run(target: Callable[..., None], args: Any, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # Without exec, /proc shows no new environment; the name is handed down by fork as well.
    ctypes.CDLL(None).prctl(15, environment[MARK][:15].encode())  # PR_SET_NAME
    hurry()
    target(*args)


class _Forked:
    """In place of a process that imports all from the start."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> None:
        path, control, *further = command[-5:]
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for file in map(int, os.listdir("/proc/self/fd")):
                if file > 2 and file not in pass_fds:
                    os.dup2(nothing, file)  # so that no number is used for something else
            sys.path[:] = json.loads(path)
            _fork_server._serve(int(control), *map(json.loads, further))

        self._code: int | None = None

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self._code is None and os.waitpid(self.pid, flags)[0]:
            self._code = 0
        return self._code

    def wait(self) -> None:
        self.poll(flags=0)


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What a condition gives as soon as it holds."""
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, f"still not after {seconds} s"
        time.sleep(0.005)
    return found


def marked(mark: str) -> list[int]:
    """Processes that live and were started with a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            is_named = (path / "comm").read_text().strip() == mark[:15]
            if (is_named and _is_alive(path)) or f"{MARK}={mark}".encode() in variables:
                found.append(int(path.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _is_alive(path: Path) -> bool:
    return (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    """Of a process that is single-threaded."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
