"""Suite graph: graphs beside the direct calls that they become, and a whole block beside torch.

    python benchmarks/graph.py [--only TEXT] [--rounds N] [--seconds S] [--out FOLDER]

A graph that is one kernel is timed beside the one call of ``kernel_api.ops`` that says the same:
the GPU must not tell them apart. The block of ``examples/transformer_graph.py`` is timed beside
torch.compile of the same, with kernels by the model and with those that the tuner finds. Host
times are of the CPU: building a graph of ten nodes without compilation, and executing one that is
built.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import driver
import from_examples
import harness
import rows
import torch

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api.verification import compare

NAME = "graph"
BF16, FLOAT = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
A, FIND = cudnn.heur_mode.A, cudnn.heur_mode.CUDNN_FIND

Calls = tuple[Callable[[], Any], Callable[[], Any]]


@dataclass(frozen=True)
class Problem:
    """A graph, and what it is timed beside.

    Attributes:
        make: Makes both calls on new operands, with what each has written.
        peer: Name of the other one.
    """

    label: str
    make: Callable[[], tuple[Calls, Callable[[], None]]]
    peer: str
    bytes: int


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=harness.DEVICE).bfloat16()


def new_graph() -> Any:
    return cudnn.pygraph("", BF16, FLOAT, FLOAT, handle=cudnn.create_handle())


def executed(graph: Any, pack: dict[Any, torch.Tensor], mode: Any = A) -> Callable[[], None]:
    graph.build([mode])
    size = graph.get_workspace_size()
    workspace = torch.empty(size, dtype=torch.uint8, device=harness.DEVICE)
    return functools.partial(graph.execute, pack, workspace)


def agree(found: torch.Tensor, other: torch.Tensor) -> None:
    """Both are one kernel on the same operands, but for what the tuner knows of the direct call."""
    error = (found.float() - other.float()).abs().max() / other.float().abs().max()
    if not error < 0.01:
        raise RuntimeError(f"the graph and the direct call differ by {float(error):.3g}")


# One kernel ------------------------------------------------------------------------------


def bias_gelu(M: int, N: int, K: int) -> tuple[Calls, Callable[[], None]]:
    graph, (a, b, bias) = new_graph(), (drawn(M, K), drawn(N, K).t(), drawn(N))
    ga, gb, gc = graph.tensor_like(a), graph.tensor_like(b), graph.tensor((1, N))
    y = graph.gelu(graph.bias(graph.matmul(ga, gb), gc)).set_output(True)
    own, other = drawn(M, N), drawn(M, N)
    call = executed(graph, {ga: a, gb: b, gc: bias.view(1, N), y: own})
    direct = functools.partial(
        ka.ops.gemm_bias_activation, a, b, out=other, bias=bias, activation="gelu"
    )
    return (call, direct), lambda: agree(own, other)


def scale_amax(M: int, N: int, K: int) -> tuple[Calls, Callable[[], None]]:
    graph, (a, b) = new_graph(), (drawn(M, K), drawn(N, K).t())
    ga, gb = graph.tensor_like(a), graph.tensor_like(b)
    y = graph.scale(graph.matmul(ga, gb), 0.37).set_output(True)
    largest = graph.reduction(y, cudnn.reduction_mode.AMAX).set_dim((1, 1))
    largest.set_output(True).set_data_type(FLOAT)
    own, other = drawn(M, N), drawn(M, N)
    amax, other_amax = (torch.zeros(1, 1, device=harness.DEVICE) for _ in range(2))
    call = executed(graph, {ga: a, gb: b, y: own, largest: amax})
    direct = functools.partial(
        ka.ops.gemm_amax, a, b, out=other, amax=other_amax.view(()), alpha=0.37
    )
    return (call, direct), lambda: agree(own, other)


def swiglu(M: int, N: int, K: int) -> tuple[Calls, Callable[[], None]]:
    graph, (a, b) = new_graph(), (drawn(M, K), drawn(N, K).t())
    ga, gb = graph.tensor_like(a), graph.tensor_like(b)
    up, gate = graph.glu_pair(graph.matmul(ga, gb), granularity=32)
    y = graph.mul(graph.silu(gate), up).set_output(True)
    own, other = drawn(M, N // 2), drawn(M, N // 2)
    call = executed(graph, {ga: a, gb: b, y: own})
    direct = functools.partial(ka.ops.gemm_swiglu, a, b, out=other)
    return (call, direct), lambda: agree(own, other)


def softcapped(B: int, H: int, S: int, D: int) -> tuple[Calls, Callable[[], None]]:
    graph, (q, k, v) = new_graph(), [drawn(B, H, S, D) for _ in range(3)]
    tensors = [graph.tensor_like(t) for t in (q, k, v)]
    y, _ = graph.sdpa(
        *tensors,
        attn_scale=D**-0.5,
        use_causal_mask=True,
        generate_stats=False,
        score_mod=lambda g, score: g.mul(g.tanh(g.mul(score, 1 / 30.0)), 30.0),
    )
    y.set_output(True)
    own, other = drawn(B, H, S, D), drawn(B, H, S, D)
    call = executed(graph, {**dict(zip(tensors, (q, k, v), strict=True)), y: own})

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return ka.epilogue.tanh(score * (1 / 30.0)) * 30.0

    direct = functools.partial(
        ka.ops.sdpa, q, k, v, out=other, mask=ka.masks.Causal(), score_mod=capped
    )
    return (call, direct), lambda: agree(own, other)


# The block -------------------------------------------------------------------------------


def example() -> Any:
    return from_examples.load("transformer_graph")


def block(tokens: int, mode: Any = A) -> tuple[Calls, Callable[[], None]]:
    sizes = example().Sizes()
    given = example().operands(sizes, tokens, harness.DEVICE)
    graph, tensors = example().graph_of(sizes, given)
    y = torch.full_like(given["x"], float("nan"))
    call = executed(graph, {**example().pack(tensors, given), tensors["y"]: y}, mode)
    compiled = torch.compile(functools.partial(example().block_of_torch, sizes))
    peer: Callable[[], Any] = functools.partial(compiled, given)

    def check() -> None:
        exact = example().block_of_torch(sizes, given, torch.float32)
        verdict = compare(y, exact, peer(), factor=3.0)
        if not verdict:
            raise RuntimeError(f"the block is wrong: {verdict.reason}")

    return (call, peer), check


PROBLEMS = (
    Problem(
        "bias + gelu 4096x4096x4096", lambda: bias_gelu(4096, 4096, 4096), "ops", 3 * 4096**2 * 2
    ),
    Problem("scale + amax 4096x4096x4096", lambda: scale_amax(4096, 4096, 4096), "ops", 3 * 2**25),
    Problem("SwiGLU 4096x8192x4096", lambda: swiglu(4096, 8192, 4096), "ops", 4 * 2**25),
    Problem("softcap sdpa 4x32x2048x128", lambda: softcapped(4, 32, 2048, 128), "ops", 4 * 2**26),
    Problem("Llama-3-8B block, 4096 tokens", lambda: block(4096), "torch.compile", 2**29),
    Problem(
        "Llama-3-8B block, 4096 tokens, tuned", lambda: block(4096, FIND), "torch.compile", 2**29
    ),
    Problem("Llama-3-8B block, 1024 tokens", lambda: block(1024), "torch.compile", 2**29),
)


# Measured --------------------------------------------------------------------------------


@torch.no_grad()
def measure(problem: Problem, rounds: int) -> rows.Row:
    (call, other), check = problem.make()
    call(), other()
    harness.synchronize()
    check()
    calls = {"kernel_api.graph": [call], problem.peer: [other]}
    found, policy = harness.interleaved(calls, problem.bytes, "auto", rounds)
    return rows.row(
        NAME,
        problem.label,
        ("kernel_api.graph", found["kernel_api.graph"]),
        (problem.peer, found[problem.peer]),
        True,
        policy,
        rank=0,
    )


def line(row: rows.Row) -> str:
    return (
        f"{row['problem']:34} {row['subject_us']:9.2f} us, {row['peer']} {row['peer_us']:9.2f} us, "
        f"ratio {row['ratio']:.3f} +-{100 * row['spread']:.1f} %"
    )


def ten_nodes() -> Any:
    graph = new_graph()
    x = graph.tensor((512, 512))
    value = graph.bias(graph.matmul(x, graph.tensor((512, 512))), graph.tensor((1, 512)))
    for step in ("gelu", "tanh", "relu", "sigmoid", "silu", "abs"):
        value = getattr(graph, step)(value)
    graph.add(value, x).set_output(True)
    return graph


def host() -> Iterator[str]:
    """Milliseconds to build a graph of ten nodes that is compiled, microseconds to execute one."""
    gc.collect()
    gc.freeze()  # or what torch.compile left behind would be looked through now and then
    ten_nodes().build([A])
    spent = []
    for _ in range(20):
        started = time.perf_counter()
        graph = ten_nodes()
        graph.build([A])
        spent.append(1e3 * (time.perf_counter() - started))
    built = harness.Timing(spent)
    yield f"build a graph of ten nodes: {built.median:.2f} ms (limit 5)"
    small = (
        bias_gelu(64, 64, 64)[0][0],
        scale_amax(64, 64, 64)[0][0],
        softcapped(1, 1, 64, 64)[0][0],
    )
    for name, call in zip(("bias + gelu", "scale + amax", "sdpa"), small, strict=True):
        yield f"execute {name}: {_microseconds(call):.2f} us (limit 10)"
    a, b, out = (drawn(64, 64) for _ in range(3))
    beside = _microseconds(functools.partial(torch.mm, a, b, out=out))
    yield f"torch.mm beside, with out given: {beside:.2f} us"


def _microseconds(call: Callable[[], Any]) -> float:
    samples = []
    for _ in range(11):
        harness.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            call()
        samples.append((time.perf_counter() - started) / 200 * 1e6)
    harness.synchronize()
    return harness.Timing(samples).median


def main(arguments: Sequence[str] | None = None) -> int:
    options = driver.few_options(__doc__, rounds=20).parse_args(arguments)
    return driver.in_turn(NAME, PROBLEMS, options, measure, line, lambda found: host())


if __name__ == "__main__":
    sys.exit(main())
