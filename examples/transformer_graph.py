"""A Llama block as one graph: seven kernels, found, explained, run and compared with torch.

    python examples/transformer_graph.py [--tokens N] [--small]

rmsnorm, the projections to queries, keys and values, their rotation, causal attention, the output
projection with the residual, rmsnorm, and a SwiGLU layer with the residual.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

import kernel_api.graph as cudnn

EPS = 1e-5
#: Columns of gate, then as many of up.
PAIRED = 32
BF16, FLOAT = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT


@dataclass(frozen=True)
class Sizes:
    """Of a block; the default is Llama-3-8B's."""

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336

    @property
    def projected(self) -> int:
        """Columns of queries, keys and values side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def rotated(self) -> int:
        """Columns of queries and keys."""
        return (self.heads + self.kv_heads) * self.head_dim


SMALL = Sizes(256, 4, 2, 64, 384)


def operands(sizes: Sizes, tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Random activations and weights; weights are stored (out, in), as torch's are."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        found = torch.randn(shape, generator=generator, device=device) * scale
        return found.bfloat16()

    width, inner = sizes.width, sizes.inner
    angles = torch.outer(
        torch.arange(tokens, device=device),
        500000.0 ** (-torch.arange(0, sizes.head_dim, 2, device=device) / sizes.head_dim),
    )
    return {
        "x": drawn(tokens, width),
        "attention_norm": drawn(width, scale=0.1) + 1,
        "qkv": drawn(sizes.projected, width, scale=width**-0.5),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "project": drawn(width, sizes.heads * sizes.head_dim, scale=width**-0.5),
        "layer_norm": drawn(width, scale=0.1) + 1,
        "gate_up": drawn(2 * inner, width, scale=width**-0.5),
        "down": drawn(width, inner, scale=inner**-0.5),
    }


def graph_of(
    sizes: Sizes, given: dict[str, torch.Tensor], **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The block as a graph, with its tensors by name; ``y`` is what it computes."""
    graph = cudnn.pygraph("block", BF16, FLOAT, FLOAT, **options)
    tensors = {
        name: graph.tensor_like(operand.t() if name in _WEIGHTS else operand, name=name)
        for name, operand in given.items()
    }
    tokens, every = given["x"].shape[0], slice(None)
    x = tensors["x"]

    hidden, _ = graph.rmsnorm(x, tensors["attention_norm"], epsilon=EPS)
    # One product; queries and keys are rotated as they are written, values are not.
    projected = graph.rope(
        graph.matmul(hidden, tensors["qkv"]),
        tensors["cos"],
        tensors["sin"],
        head_dim=sizes.head_dim,
        heads=sizes.heads + sizes.kv_heads,
    )
    parts, end = [], sizes.heads * sizes.head_dim
    for columns, heads in (
        (slice(0, end), sizes.heads),
        (slice(end, sizes.rotated), sizes.kv_heads),
        (slice(sizes.rotated, None), sizes.kv_heads),
    ):
        part = graph.slice(projected, slices=[every, columns])
        part = graph.reshape(part, shape=(1, tokens, heads, sizes.head_dim))
        parts.append(graph.transpose(part, permutation=[0, 2, 1, 3]))
    q, k, v = parts
    out, _ = graph.sdpa(
        q=q, k=k, v=v, attn_scale=sizes.head_dim**-0.5, use_causal_mask=True, generate_stats=False
    )
    out = graph.transpose(out, permutation=[0, 2, 1, 3])
    out = graph.reshape(out, shape=(tokens, sizes.heads * sizes.head_dim))
    x = graph.add(graph.matmul(out, tensors["project"]), x).set_data_type(BF16)

    hidden, _ = graph.rmsnorm(x, tensors["layer_norm"], epsilon=EPS)
    gate, up = graph.glu_pair(graph.matmul(hidden, tensors["gate_up"]), granularity=PAIRED)
    down = graph.matmul(graph.mul(graph.silu(gate), up), tensors["down"])
    tensors["y"] = graph.add(down, x).set_output(True).set_name("y")
    return graph, tensors


def pack(tensors: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """What the graph reads."""
    own = {**given, "gate_up": paired(given["gate_up"])}
    return {
        tensors[name]: operand.t() if name in _WEIGHTS else operand for name, operand in own.items()
    }


def paired(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up in turns, PAIRED of each, as a kernel has both at once: a layout of
    weights that is chosen when they are loaded."""
    gate, up = (half.unflatten(0, (-1, PAIRED)) for half in gate_up.chunk(2))
    return torch.stack((gate, up), dim=1).flatten(0, 2)


_WEIGHTS = ("qkv", "project", "gate_up", "down")


def block_of_torch(
    sizes: Sizes, given: dict[str, torch.Tensor], kind: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The same in torch, computed in a type."""
    own = {name: operand.to(kind) for name, operand in given.items()}
    functional, tokens, x = torch.nn.functional, given["x"].shape[0], own["x"]
    hidden = functional.rms_norm(x, (sizes.width,), own["attention_norm"], EPS)
    q, k, v = functional.linear(hidden, own["qkv"]).split(
        [sizes.heads * sizes.head_dim, *[sizes.kv_heads * sizes.head_dim] * 2], dim=-1
    )
    q, k, v = (t.view(1, tokens, -1, sizes.head_dim).transpose(1, 2) for t in (q, k, v))
    q, k = (rotated(t, own["cos"], own["sin"]) for t in (q, k))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).reshape(tokens, -1)
    x = functional.linear(out, own["project"]) + x
    hidden = functional.rms_norm(x, (sizes.width,), own["layer_norm"], EPS)
    gate, up = functional.linear(hidden, own["gate_up"]).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, own["down"]) + x


def rotated(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = t.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--small", action="store_true", help="a block for the CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = SMALL if options.small or device == "cpu" else Sizes()
    given = operands(sizes, options.tokens, device)
    graph, tensors = graph_of(sizes, given)
    graph.build([cudnn.heur_mode.A])
    print(graph.explain())
    y = torch.empty_like(given["x"])
    graph.execute({**pack(tensors, given), tensors["y"]: y})
    exact = block_of_torch(sizes, given, torch.float64)
    plain = block_of_torch(sizes, given)
    scale = exact.abs().max()
    for name, found in (("graph", y), ("torch", plain)):
        print(f"{name}: largest error {float((found.double() - exact).abs().max() / scale):.2e}")


if __name__ == "__main__":
    main()
