"""Layers of experts, forward and backward: Mixtral-8x7B's and DeepSeek-V3's, beside torch.

    python examples/mixture_of_experts.py

Every layer is checked at a small size, with its gradients, against a loop over experts in float32.
On a GPU it is then timed at its own size, for several numbers of tokens, beside the same layer
written with torch._grouped_mm and compiled by torch.compile; caches are cold, and the two take
turns. Without a GPU the layers are only checked, on the CPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import kernel_api as ka

TOKENS = (16, 256, 4096, 16384)
TOKENS_CHECKED = 40
ROUNDS, WARM_UP_ROUNDS = 11, 3
L2_FLUSH_BYTES = 256 << 20
#: Over the norm: the layer rounds to bfloat16 what the loop keeps.
ERROR_ALLOWED = torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer.

    Attributes:
        experts: E.
        chosen: Experts of each token, k.
        hidden: Columns of a token, K.
        inner: Columns between the two products, I.
    """

    experts: int
    chosen: int
    hidden: int
    inner: int

    @property
    def weight_bytes(self) -> int:
        return 2 * 3 * self.experts * self.hidden * self.inner

    def small(self) -> Layer:
        return Layer(self.experts, self.chosen, 128, 64)

    def weights(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """w_up (E, K, 2I) and w_down (E, I, K), stored as torch.nn.Linear does: K-major."""
        element: Any = {"dtype": torch.bfloat16, "device": device}
        up = torch.randn(self.experts, 2 * self.inner, self.hidden, **element)
        down = torch.randn(self.experts, self.hidden, self.inner, **element)
        return up.mul_(self.hidden**-0.5).mT, down.mul_(self.inner**-0.5).mT

    def tokens(self, count: int, device: str) -> tuple[torch.Tensor, ...]:
        """x, expert_index and expert_weight, of a router that likes all experts equally."""
        x = torch.randn(count, self.hidden, dtype=torch.bfloat16, device=device)
        scores = torch.randn(count, self.experts, device=device).softmax(-1)
        weight, index = scores.topk(self.chosen)
        return x, index, weight / weight.sum(-1, keepdim=True)


LAYERS = {
    "Mixtral-8x7B": Layer(experts=8, chosen=2, hidden=4096, inner=14336),
    "DeepSeek-V3": Layer(experts=256, chosen=8, hidden=7168, inner=2048),
}


def main(device: str | None = None) -> int:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU: there is no GPU here"
    print(f"Layers of experts in bfloat16, on {where}.\n")
    passed = True
    for name, layer in LAYERS.items():
        errors = errors_of(layer.small(), TOKENS_CHECKED, device)
        passed &= max(errors.values()) <= ERROR_ALLOWED
        listed = ", ".join(f"{what} {error:.4f}" for what, error in errors.items())
        print(f"{name}: errors over norms, at most {ERROR_ALLOWED:.4f} allowed: {listed}")
    if device == "cuda":
        compare_times()
    if not passed:
        print("At least one result is wrong.", file=sys.stderr)
    return 0 if passed else 1


# The same layer, in torch ----------------------------------------------------------------


def layer_of_torch(
    x: torch.Tensor,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """What ka.nn.moe computes, of torch's grouped products; made to be compiled."""
    place, offsets = sorted_by_expert(expert_index, len(w_up))
    tokens = x[place // expert_index.shape[1]]
    gate, up = torch._grouped_mm(tokens, w_up, offs=offsets).chunk(2, -1)
    rows = torch._grouped_mm(functional.silu(gate) * up, w_down, offs=offsets)
    return summed(rows, place, expert_weight)


def sorted_by_expert(expert_index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of pairs of a token and an expert, sorted by that, and where each expert's end."""
    expert, place = expert_index.flatten().sort(stable=True)
    every = torch.arange(experts, device=place.device)
    return place, torch.searchsorted(expert, every, right=True, out_int32=True)


def summed(rows: torch.Tensor, place: torch.Tensor, expert_weight: torch.Tensor) -> torch.Tensor:
    """Of sorted pairs, the weighted sum of each token's."""
    pair = torch.empty_like(place).scatter_(0, place, torch.arange(len(place), device=place.device))
    of_token = rows[pair].view(*expert_weight.shape, rows.shape[-1])
    return (of_token * expert_weight.unsqueeze(-1)).sum(1).to(rows.dtype)


def layer_by_expert(
    x: torch.Tensor,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """The same as a loop, in float32."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(w_up)):
        token, choice = (expert_index == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w_up[expert].float()).chunk(2, -1)
        rows = (functional.silu(gate) * up) @ w_down[expert].float()
        y = y.index_add(0, token, rows * expert_weight[token, choice, None])
    return y


# Check -----------------------------------------------------------------------------------


def errors_of(layer: Layer, tokens: int, device: str) -> dict[str, float]:
    """Norms of errors of the result and all gradients, over the norms of what is right."""
    x, index, weight = layer.tokens(tokens, device)
    operands = [one.requires_grad_() for one in (x, weight, *layer.weights(device))]
    dy = torch.randn_like(x)
    found, exact = (
        results(function, operands, index, dy) for function in (ka.nn.moe, layer_by_expert)
    )
    names = ("y", "dx", "dexpert_weight", "dw_up", "dw_down")
    return {name: error(*pair) for name, *pair in zip(names, found, exact, strict=True)}


def results(
    function: Callable[..., torch.Tensor],
    operands: list[torch.Tensor],
    index: torch.Tensor,
    dy: torch.Tensor,
) -> list[torch.Tensor]:
    x, *others = operands
    y = function(x, index, *others)
    return [y.detach(), *torch.autograd.grad(y, operands, dy.to(y.dtype))]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm
    return float(norm(found.float() - exact.float()) / norm(exact.float()))


# Time ------------------------------------------------------------------------------------


def compare_times() -> None:
    print(f"\n{'layer':<14}{'tokens':>8}{'us':>12}{'torch us':>12}{'torch/ours':>12}")
    for name, layer in LAYERS.items():
        free, _ = torch.cuda.mem_get_info()
        if 1.5 * layer.weight_bytes > free:
            print(f"{name:<14} is left out: its weights take {layer.weight_bytes >> 30} GiB")
            continue
        for tokens, ours, theirs in layer_times(layer):
            print(f"{name:<14}{tokens:>8}{ours:>12.1f}{theirs:>12.1f}{theirs / ours:>12.2f}")


def layer_times(layer: Layer) -> Iterator[tuple[int, float, float]]:
    """Tokens, and median microseconds of both forward passes."""
    weights = layer.weights("cuda")
    for tokens in TOKENS:
        operands = (*layer.tokens(tokens, "cuda"), *weights)
        torch.compiler.reset()  # or sizes that differ from the last ones would become symbols
        theirs = torch.compile(layer_of_torch)
        yield (tokens, *microseconds(operands, ka.nn.moe, theirs))


@torch.no_grad()
def microseconds(
    operands: tuple[torch.Tensor, ...], *layers: Callable[..., torch.Tensor]
) -> list[float]:
    """The median of each, which take turns."""
    spent: list[list[float]] = [[] for _ in layers]
    for turn in range(-WARM_UP_ROUNDS, ROUNDS):
        for layer, times in zip(layers, spent, strict=True):
            once = one_call(layer, operands)
            if turn >= 0:
                times.append(once)
    return [statistics.median(times) for times in spent]


def one_call(layer: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]) -> float:
    """With a cold L2 cache, by events on the stream."""
    torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    layer(*operands)
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


if __name__ == "__main__":
    sys.exit(main())
