"""Graphs that are serialised here, and executed by a process that has only their file.

The process is told by the file alone: it reads serialised graphs, what to give them and what they
gave, executes them one after the other, and says which gave other bits, and whether it loaded the
compiler.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import kernel_api.graph as cudnn


def stored(modes: Mapping[int, list[Any]], device: str, path: Path) -> list[list[str]]:
    """Random graphs, executed on a device and put into a file.

    Args:
        modes: By the graph's number those that it is planned with.

    Returns the titles of what each one's plan launches.
    """
    from support.random_graphs import data_of, example, graph_of

    graphs, titles = [], []
    for number, own in modes.items():
        made = example(number)
        graph, _ = graph_of(made, handle=cudnn.create_handle(device))
        graph.build(own)
        data = data_of(made, device, number)
        pack = {uid: data[name] for uid, name in enumerate([*made.inputs, *made.outputs])}
        with one_thread():
            graph.execute(pack)
        count = len(made.inputs)
        one = {
            "number": number,
            "graph": graph.serialize(as_bytes=True),
            "given": {uid: tensor.cpu() for uid, tensor in pack.items() if uid < count},
            "expected": {uid: tensor.cpu() for uid, tensor in pack.items() if uid >= count},
        }
        graphs.append(one)
        titles.append(graph.explain().kernels)
    torch.save({"device": device, "graphs": graphs}, path)
    return titles


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """On the CPU: with others, torch's bits depend on where each one's part of a tensor ends, and
    processes may have another number of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def restarted(path: Path) -> dict[str, Any]:
    """What a new process finds of the graphs in a file.

    Returns:
        ``executed``: how many; ``wrong``: [number, what] of those that failed or gave other bits;
        ``compiler``: whether it was loaded.
    """
    call = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
    call += "; from support.graph_restarts import main; main(sys.argv[2])"
    arguments = [json.dumps(sys.path), str(path)]
    ran = subprocess.run([sys.executable, "-c", call, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main(path: str) -> None:
    held = torch.load(path)
    wrong = [
        [one["number"], what] for one in held["graphs"] for what in _wrong(one, held["device"])
    ]
    found = {
        "executed": len(held["graphs"]),
        "wrong": wrong,
        "compiler": "cutlass" in sys.modules,
    }
    print(json.dumps(found))


def _wrong(one: dict[str, Any], device: str) -> Iterator[str]:
    try:
        found = _executed(one, device)
    except Exception as error:
        yield repr(error)
        return
    for uid, expected in one["expected"].items():
        same = found[uid].cpu().view(torch.uint8) == expected.view(torch.uint8)
        if not bool(same.all()):
            yield f"{int((~same).sum())} bytes of tensor {uid} are others"


def _executed(one: dict[str, Any], device: str) -> dict[int, torch.Tensor]:
    graph = cudnn.pygraph(handle=cudnn.create_handle(device)).deserialize(one["graph"])
    found = {uid: torch.full_like(t, float("nan")).to(device) for uid, t in one["expected"].items()}
    given = {uid: t.to(device) for uid, t in one["given"].items()}
    with one_thread():
        graph.execute({**given, **found})
    return found
