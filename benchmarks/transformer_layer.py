"""Suite transformer-layer: a whole Llama layer, beside torch's, compiled: prompts, decoding over a
cache, and training.

    python benchmarks/transformer_layer.py [--only TEXT] [--rounds N] [--seconds S] [--out FOLDER]

Both layers are those of ``examples/llama_layer.py``. Decoding is timed in CUDA graphs, as it runs
there. In training both are compiled by torch. Results are compared with float32 before, gradients
with each other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import driver
import from_examples
import harness
import rows
import suite
import torch

NAME, SUBJECT, PEER = "transformer-layer", "kernel_api", "torch.compile"
#: Of the norm; gradients of norms' weights are sums of what nearly cancels.
ERROR_ALLOWED = 0.03
SIZES = {"Llama-3-8B": (4096, 32, 8, 128, 14336), "Llama-3-70B": (8192, 64, 8, 128, 28672)}

Calls = dict[str, Callable[[], Any]]


def example() -> Any:
    return from_examples.load("llama_layer")


@dataclass(frozen=True)
class Problem:
    """A layer of a model.

    Attributes:
        kind: ``"prompts"``, ``"decode"`` or ``"training"``.
        batch: Sequences.
        length: Tokens of each; of decoding, those in the cache.
    """

    model: str
    kind: str
    batch: int
    length: int

    @property
    def label(self) -> str:
        return f"{self.model}, {self.kind}, {self.batch}x{self.length}"

    @property
    def tokens(self) -> int:
        return self.batch * (1 if self.kind == "decode" else self.length)

    @property
    def policy(self) -> str:
        return "graph" if self.kind == "decode" else "eager"

    @property
    def sizes(self) -> Any:
        return example().Sizes(*SIZES[self.model])

    @property
    def weights(self) -> int:
        """Elements of the weights of products."""
        sizes = self.sizes
        columns = sizes.projected + sizes.heads * sizes.head_dim + 3 * sizes.inner
        return int(columns * sizes.width)

    @property
    def bytes(self) -> int:
        """Of weights and of the cache."""
        cached = 2 * self.batch * self.length * self.sizes.kv_heads * self.sizes.head_dim
        return 2 * (self.weights + (cached if self.kind == "decode" else 0))

    @property
    def operations(self) -> int:
        """Of products, and of attention where half of the scores are masked."""
        seen = self.length if self.kind == "decode" else self.length / 2
        attended = 4 * self.tokens * seen * self.sizes.heads * self.sizes.head_dim
        products = 2 * self.tokens * self.weights
        learns = self.kind == "training"
        return int((3 if learns else 1) * products + (3.5 if learns else 1) * attended)


PROBLEMS = tuple(
    Problem(model, kind, batch, length)
    for model in SIZES
    for kind, shapes in (
        ("prompts", ((1, 512), (1, 2048), (4, 2048), (1, 8192))),
        ("decode", ((1, 4096), (8, 4096), (32, 4096), (64, 1024))),
        ("training", ((1, 2048), (2, 4096))),
    )
    for batch, length in shapes
)


def calls_of(problem: Problem, device: str) -> Calls:
    """What is timed, compared with float32."""
    layers = example()
    torch.compiler.reset()  # or sizes that differ from the last ones would become symbols
    given = layers.operands(problem.sizes, max(problem.length, problem.tokens), device)
    if problem.kind == "training":
        return _learning(problem, layers, layers.of_prompts(given, problem.batch))
    if problem.kind == "prompts":
        own, last = layers.of_prompts(given, problem.batch), problem.batch
        of_ours, of_torch = layers.fused_prompt, layers.plain_prompt
    else:
        own = layers.of_steps(given, problem.batch)
        last = layers.cache_of(problem.sizes, problem.batch, problem.length, device)
        of_ours, of_torch = layers.fused_step, layers.plain_step
    ours, compiled = (own["x"], layers.with_pairs(own)), torch.compile(of_torch)
    calls = {
        SUBJECT: functools.partial(_inferred, of_ours, *ours, problem.sizes, last),
        PEER: functools.partial(_inferred, compiled, own["x"], own, problem.sizes, last),
    }
    wide = layers.in_float32(own)
    if problem.kind == "decode":
        last = layers.Cache(last.stored.float(), last.position)
    exact = _inferred(of_torch, wide["x"], wide, problem.sizes, last)
    for name, call in calls.items():
        _check(name, layers.error(call(), exact))
    return calls


@torch.no_grad()
def _inferred(layer: Callable[..., Any], *operands: Any) -> Any:
    return layer(*operands)


def _learning(problem: Problem, layers: Any, own: Any) -> Calls:
    """Steps that leave all gradients, which are near each other."""
    dy, rest = torch.randn_like(own["x"]), (problem.sizes, problem.batch)
    ours, compiled = torch.compile(layers.learning), torch.compile(layers.plain_prompt)
    calls = {
        SUBJECT: functools.partial(layers.gradients, ours, layers.with_pairs(own), *rest, dy),
        PEER: functools.partial(layers.gradients, compiled, own, *rest, dy),
    }
    found, other = (call() for call in calls.values())
    other["gate_up"] = layers.paired(other["gate_up"])
    for name, one in other.items():
        _check(f"the gradient of {name}", layers.error(found[name], one))
    return calls


def _check(what: str, error: float) -> None:
    if not error <= ERROR_ALLOWED:
        raise RuntimeError(f"{what} is off by {error:.3g} of the norm")


def measure(problem: Problem, rounds: int) -> rows.Row:
    calls = {name: [call] for name, call in calls_of(problem, harness.DEVICE).items()}
    found, policy = harness.interleaved(calls, problem.bytes, problem.policy, rounds)
    return rows.row(
        *(NAME, problem.label, (SUBJECT, found[SUBJECT]), (PEER, found[PEER]), True, policy),
        rank=0,
        operations=problem.operations,
        bytes=problem.bytes,
        tflops=round(1e-6 * problem.operations / found[SUBJECT].median, 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = driver.few_options(__doc__, rounds=12).parse_args(arguments)
    return driver.in_turn(NAME, PROBLEMS, options, measure, suite.line, suite.mean_ratio)


if __name__ == "__main__":
    sys.exit(main())
