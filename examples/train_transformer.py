"""A small transformer, trained with torch's attention and with this package's, to the same curve.

    python examples/train_transformer.py

The model learns to say random sequences a second time. It is trained from the same seed, on the
same data, once per way of computing attention: by several backends of torch, and by
``kernel_api.nn.attention``. All of them round differently, so curves of the loss part. How far
curves of torch are from each other (root mean square over all steps, the largest of all pairs) is
noise that everyone has who chooses a backend. The curve of this package is within it where it is
at most FACTOR times that far from the curves of torch, on average.

On a GPU these are 200 steps, and torch's cuDNN, flash and efficient kernels; without one a few
steps of a smaller model, and torch's two ways for the CPU. Products are of bfloat16.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernel_api as ka

FACTOR = 2.0
SEED = 0
#: Steps at the end that a printed loss is the mean of.
LAST = 10

#: From q, k and v, (B, H, S, D), to what each query sees of itself and of what came before.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Task:
    """What is learnt, and how.

    Attributes:
        half: Tokens that are said twice.
    """

    steps: int
    batch: int
    half: int
    layers: int
    width: int
    heads: int = 4
    vocabulary: int = 64
    rate: float = 1e-3

    def data(self, device: str) -> torch.Tensor:
        """(steps, batch, 2 · half): the same every time."""
        drawn = torch.Generator().manual_seed(SEED)
        shape = (self.steps, self.batch, self.half)
        once = torch.randint(self.vocabulary, shape, generator=drawn)
        return torch.cat([once, once], -1).to(device)


TASKS = {
    "cuda": Task(steps=200, batch=64, half=64, layers=3, width=256),
    "cpu": Task(steps=10, batch=4, half=16, layers=2, width=64),
}
BACKENDS = {
    "cuda": ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"),
    "cpu": ("FLASH_ATTENTION", "MATH"),
}


def main(device: str | None = None, task: Task | None = None) -> int:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    task = task or TASKS[device]
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU: there is no GPU here"
    print(f"{task.layers} layers of width {task.width}, {task.steps} steps, on {where}.\n")
    theirs = {}
    for name in BACKENDS[device]:
        theirs[f"torch, {name}"] = losses_of(task, torchs(getattr(SDPBackend, name)), device)
    own = losses_of(task, ours, device)
    for name, losses in {**theirs, "kernel_api": own}.items():
        print(f"{name:<28} loss {losses[0]:.4f} -> {mean(losses[-LAST:]):.4f}")
    noise = max(distance(*pair) for pair in itertools.combinations(theirs.values(), 2))
    away = mean([distance(own, one) for one in theirs.values()])
    within = away <= FACTOR * noise
    print(f"\nCurves of torch are up to {noise:.3g} apart; ours is {away:.3g} from them:", end=" ")
    print("within the noise." if within else f"more than {FACTOR:g} times as far.")
    return 0 if within else 1


# Attention -------------------------------------------------------------------------------


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ka.nn.attention(q, k, v, mask=ka.masks.Causal())


def torchs(backend: SDPBackend) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


# The model -------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Attention, and two products with a GELU between them; a norm before each."""

    def __init__(self, task: Task, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = task.heads, attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(task.width) for _ in range(2))
        self.qkv = torch.nn.Linear(task.width, 3 * task.width, bias=False)
        self.out = torch.nn.Linear(task.width, task.width, bias=False)
        self.up = torch.nn.Linear(task.width, 4 * task.width)
        self.down = torch.nn.Linear(4 * task.width, task.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (rows[:, :, part].transpose(1, 2) for part in range(3))  # no copies
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    """From tokens (B, S) to scores of the next ones, (B, S, vocabulary)."""

    def __init__(self, task: Task, attention: Attention) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(task.vocabulary, task.width)
        self.places = torch.nn.Embedding(2 * task.half, task.width)
        self.blocks = torch.nn.ModuleList(Block(task, attention) for _ in range(task.layers))
        self.norm = torch.nn.LayerNorm(task.width)
        self.scores = torch.nn.Linear(task.width, task.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.scores(self.norm(x))
        return scores


def losses_of(task: Task, attention: Attention, device: str) -> list[float]:
    """Of every step."""
    torch.manual_seed(SEED)
    model = Transformer(task, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    losses = []
    for tokens in task.data(device):
        with torch.autocast(device, torch.bfloat16):
            scores = model(tokens[:, :-1])
        second = scores[:, task.half - 1 :].flatten(0, 1).float()
        loss = functional.cross_entropy(second, tokens[:, task.half :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


# Curves ----------------------------------------------------------------------------------


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square over steps."""
    return math.sqrt(mean([(a - b) ** 2 for a, b in zip(one, other, strict=True)]))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
