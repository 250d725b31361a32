"""Suite moe-layer: whole layers of experts, beside the same layer of torch, compiled; forward, and
with all gradients.

    python benchmarks/moe_layer.py [--only TEXT] [--rounds N] [--seconds S] [--out FOLDER]

The layers and what they are timed beside are those of ``examples/mixture_of_experts.py``: sorting,
both products, and the sum over each token's experts. Results are compared with a loop in float32,
gradients with each other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import driver
import from_examples
import harness
import rows
import suite
import torch

import kernel_api as ka

Layers = Mapping[str, Callable[..., Any]]
Operands = tuple[torch.Tensor, ...]

NAME, SUBJECT, PEER = "moe-layer", "kernel_api.nn.moe", "torch.compile of torch._grouped_mm"
PEER_OF_ROWS = "torch._scaled_grouped_mm, torch.compile"
#: Of the norm, that quantised tokens and experts may make.
ERROR_OF_8_BITS = 0.1
BLOCK, LARGEST = 128, 448.0
TOKENS = (16, 256, 4096, 16384)
TOKENS_OF_TRAINING = (4096, 16384)


def example() -> Any:
    return from_examples.load("mixture_of_experts")


@dataclass(frozen=True)
class Problem:
    """A layer of the example, for some tokens.

    Attributes:
        learns: Whether all gradients are computed, too.
        scales: Of experts of 8 bits: in ``"blocks"``, for which torch has no product of groups, so
            that its experts have 16 bits; or of ``"rows"``. Without them experts have 16.
        policy: ``"eager"``, or ``"graph"``: of few tokens, whose kernels may take less time than
            their launches.
    """

    layer: str
    tokens: int
    learns: bool = False
    scales: str = ""
    policy: str = "eager"

    @property
    def label(self) -> str:
        of_8_bits = {"": "", "blocks": ", experts of 8 bits", "rows": ", experts of 8 bits by rows"}
        further = ", with gradients" if self.learns else of_8_bits[self.scales]
        graph = ", in a CUDA graph" if self.policy == "graph" else ""
        return f"{self.layer}, {self.tokens} tokens{further}{graph}"

    @property
    def peer(self) -> str:
        return PEER_OF_ROWS if self.scales == "rows" else PEER

    @property
    def operations(self) -> int:
        layer = example().LAYERS[self.layer]
        forward = 6 * self.tokens * layer.chosen * layer.hidden * layer.inner
        return int(forward * (3 if self.learns else 1))


def problems() -> list[Problem]:
    return [
        Problem(layer, tokens, learns)
        for layer in example().LAYERS
        for learns, all_tokens in ((False, TOKENS), (True, TOKENS_OF_TRAINING))
        for tokens in all_tokens
    ]


def measure(problem: Problem, rounds: int, name: str = NAME) -> rows.Row:
    layer = example().LAYERS[problem.layer]
    weights = layer.weights(harness.DEVICE)
    operands = (*layer.tokens(problem.tokens, harness.DEVICE), *weights)
    torch.compiler.reset()  # or sizes that differ from the last ones would become symbols
    layers = {SUBJECT: ka.nn.moe, PEER: torch.compile(example().layer_of_torch)}
    if problem.learns:
        made = _steps(layers, operands)
    elif problem.scales == "rows":
        made = _forward(_of_rows(weights), operands, rough=(SUBJECT, PEER_OF_ROWS))
    elif problem.scales:
        experts = tuple(map(in_blocks, weights))
        made = _forward({**layers, SUBJECT: _of_8_bits(experts)}, operands, rough=(SUBJECT,))
    else:
        made = _forward(layers, operands)
    calls, peer = {name: [call] for name, call in made.items()}, problem.peer
    moved = (4 if problem.learns else 2) * layer.weight_bytes
    found, policy = harness.interleaved(calls, moved, problem.policy, rounds)
    tflops = 1e-6 * problem.operations / found[SUBJECT].median
    return rows.row(
        *(name, problem.label, (SUBJECT, found[SUBJECT]), (peer, found[peer]), True, policy),
        rank=0,
        operations=problem.operations,
        bytes=layer.weight_bytes,
        tflops=round(tflops, 1),
    )


def _of_8_bits(experts: Sequence[ka.ScaledOperand]) -> Callable[..., Any]:
    """The layer of these experts, whatever weights it is called with."""

    def layer(x: Any, index: Any, weight: Any, *_: Any) -> Any:
        return ka.nn.moe(x, index, weight, *experts)

    return layer


def _of_rows(weights: Operands) -> Layers:
    """Layers whose experts have a scale per column, and tokens one of their own. What is around
    torch's products of groups is compiled."""
    experts = tuple(map(by_rows, weights))
    (up, of_up), (down, of_down) = ((one.tensor, one.scale.tensor) for one in experts)
    ahead, between, behind = map(torch.compile, (_sorted_tokens, _gated, example().summed))

    def layer(x: Any, index: Any, weight: Any, *_: Any) -> Any:
        tokens, of_tokens, place, offsets = ahead(x, index, len(up))
        types = {"offs": offsets, "out_dtype": x.dtype, "use_fast_accum": True}
        made = torch._scaled_grouped_mm(tokens, up, of_tokens, of_up, **types)
        hidden, of_hidden = between(made)
        rows = torch._scaled_grouped_mm(hidden, down, of_hidden, of_down, **types)
        return behind(rows, place, weight)

    return {SUBJECT: _of_8_bits(experts), PEER_OF_ROWS: layer}


def _sorted_tokens(x: Any, index: Any, experts: int) -> Any:
    place, offsets = example().sorted_by_expert(index, experts)
    stored, scale = _rows_of_8_bits(x)
    token = place // index.shape[1]
    return stored[token], scale[token], place, offsets


def _gated(made: Any) -> Any:
    gate, up = made.chunk(2, -1)
    return _rows_of_8_bits(torch.nn.functional.silu(gate.float()) * up.float())


def _rows_of_8_bits(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True).float() / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def by_rows(weight: torch.Tensor) -> ka.ScaledOperand:
    """Of (E, K, N), stored (E, N, K), a scale for each column of each expert."""
    stored, scales = zip(*map(_rows_of_8_bits, weight.mT), strict=True)
    return ka.ScaledOperand(torch.stack(stored).mT, torch.stack(scales), ka.ScaleMode.PER_ROW)


def in_blocks(weight: torch.Tensor) -> ka.ScaledOperand:
    """In blocks of 128 x 128 of (E, K, N), stored (E, N, K)."""
    stored, scales = [], []
    for one in weight.mT:
        blocks = one.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
        stored.append((blocks / scale).to(torch.float8_e4m3fn).view(one.shape))
        scales.append(scale[:, 0, :, 0])
    mode = ka.ScaleMode.BLOCK_128x128
    return ka.ScaledOperand(torch.stack(stored).mT, torch.stack(scales).mT, mode)


def _forward(
    layers: Layers, operands: Operands, rough: tuple[str, ...] = ()
) -> dict[str, Callable[[], Any]]:
    """Calls without gradients, which are near a loop in float32; rough: those of 8 bits."""
    calls = {name: functools.partial(_without_gradients, f, operands) for name, f in layers.items()}
    with torch.no_grad():
        exact = example().layer_by_expert(*operands)
    for name, call in calls.items():
        error = example().error(call(), exact)
        if not error <= (ERROR_OF_8_BITS if name in rough else example().ERROR_ALLOWED):
            raise RuntimeError(f"{name} is off by {error:.3g} of the norm")
    return calls


@torch.no_grad()
def _without_gradients(layer: Callable[..., Any], operands: Operands) -> Any:
    return layer(*operands)


def _steps(layers: Layers, operands: Operands) -> dict[str, Callable[[], Any]]:
    """Calls that leave all gradients, which are near each other."""
    x, index, weight, up, down = operands
    learning = [one.detach().requires_grad_() for one in (x, weight, up, down)]
    dy = torch.randn_like(x)

    def step(layer: Callable[..., Any]) -> list[Any]:
        x, weight, up, down = learning
        y = layer(x, index, weight, up, down)
        return list(torch.autograd.grad(y, learning, dy))

    calls = {name: functools.partial(step, layer) for name, layer in layers.items()}
    of_layers = zip(*(call() for call in calls.values()), strict=True)
    for name, (one, other) in zip(("x", "weight", "w_up", "w_down"), of_layers, strict=True):
        error = max(map(example().error, one.split(8), other.split(8)))
        if not error <= 2 * example().ERROR_ALLOWED:
            raise RuntimeError(f"gradients of {name} differ by {error:.3g} of the norm")
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    options = driver.few_options(__doc__, rounds=12).parse_args(arguments)
    return driver.in_turn(NAME, problems(), options, measure, suite.line, suite.mean_ratio)


if __name__ == "__main__":
    sys.exit(main())
