"""Suite sdpa-options-backward: gradients of attention whose scores are changed or hidden.

    python benchmarks/sdpa_options_backward.py [--only TEXT] [--candidates N | --all] [--seconds S]

Problems are those of the suite sdpa-options, and some whose bias has a gradient, which the label
says. Peers are torch.autograd's gradients of what those of that suite computed, whose forward pass
is not timed. ``tflops`` counts 2.5 times the operations of the forward pass.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import sdpa_options
import torch
from sdpa_options import OF_ALL, OF_HEADS, OF_PAIRS

import kernel_api as ka


@dataclass(frozen=True)
class Problem(sdpa_options.Problem):
    """A backward pass: dQ, dK and dV, dSink where there is one, and dBias where `of_bias`."""

    of_bias: bool = False

    @property
    def label(self) -> str:
        return super().label + (", dBias" if self.of_bias else "")

    @property
    def operations(self) -> int:
        return super().operations * 5 // 2

    @property
    def bytes(self) -> int:
        """Q, K, V, out and dO are read, dQ, dK and dV written, a bias once or twice."""
        D_v = self.D_v or self.D
        rows = self.B * self.S
        heads = self.H * (2 * self.D + 2 * D_v) + self.H_kv * 2 * (self.D + D_v)
        return 2 * rows * heads + 4 * rows * self.H + self.option.bytes(self) * (1 + self.of_bias)

    def arguments(self, device: str) -> Any:
        given = self.keywords(device)
        Q, K, V, out = tensors = (
            *(self.queries(device), self.keys(device)),
            *(self.values(device), self.empty(device)),
        )
        lse = torch.empty(Q.shape[:3], dtype=torch.float32, device=device)
        forward = ka.SdpaArguments(*tensors, lse, **given)
        if device != "meta":
            ka.get_kernels(forward)[0].run(forward)
        if self.of_bias:
            given["dBias"] = torch.empty_like(given["bias"])
        if "sink" in given:
            given["dSink"] = torch.empty_like(given["sink"])
        dO = torch.randn_like(out)
        gradients = (torch.empty_like(one) for one in (Q, K, V))
        return ka.SdpaBackwardArguments(*tensors, dO, lse, *gradients, **given)

    def peers(self) -> dict[str, attention.Peer]:
        return {
            name: Gradients(peer, self.of_bias, rough=int("sink" in self.option.name))
            for name, peer in super().peers().items()
            # Behind this operator there are no gradients; cuDNN has none of a bias.
            if getattr(peer, "func", peer) is not sdpa_options.by_flash
            and not (self.of_bias and name == "cuDNN")
        }

    def compared(self, args: Any) -> list[torch.Tensor]:
        names = ("dQ", "dK", "dV", *(("dBias",) if self.of_bias else ()))
        return [args.outputs[name].tensor for name in names]

    def parts(self, args: Any) -> Iterator[Any]:
        group = self.H // self.H_kv
        for b, h_kv in self.ends(self.H_kv):
            heads = slice(h_kv * group, (h_kv + 1) * group)
            of_keys, of_queries = (b, slice(h_kv, h_kv + 1)), (b, heads)
            operands = (
                tensor[of_keys if name in ("K", "V", "dK", "dV") else of_queries]
                for name, tensor in zip(args.operand_names, args.tensors, strict=False)
            )
            given = sdpa_options.of_heads(args, b, heads)
            if self.of_bias and args.further["bias"].shape[:2] == (self.B, self.H):
                given["dBias"] = args.further["dBias"].tensor[of_queries]  # others are sums
            yield ka.SdpaBackwardArguments(*operands, **given)


class Gradients:
    """Of what a peer computes, by torch.autograd.

    rough: How many of the first are not to be compared with. Beside a sink it is dQ: that of
        flex_attention is of an O that was rounded before the sink took its share, and of the first
        rows not much is left.
    """

    def __init__(self, peer: attention.Peer, of_bias: bool, rough: int) -> None:
        self._peer, self._of_bias, self._rough = peer, of_bias, rough
        self.comparable = getattr(peer, "comparable", True)

    def __call__(self, args: Any) -> Callable[[], Any]:
        import torch._functorch.config  # is loaded with a compiler

        # Else what is compiled has gradients once alone.
        torch._functorch.config.donated_buffer = False
        seen = _Differentiable(args, self._of_bias)
        out, dO = self._peer(seen)(), args.dO.tensor
        rough = self._rough if dO.is_cuda else 0  # the CPU rounds nothing before

        def call() -> list[torch.Tensor | None]:
            found = torch.autograd.grad(out, seen.leaves, dO, retain_graph=True)
            return [*[None] * rough, *found[rough:]]

        return call


class _Differentiable:
    """Arguments as a peer sees them, of tensors that torch has gradients of."""

    def __init__(self, args: Any, of_bias: bool) -> None:
        self._args = args
        self.tensors = [one.detach().requires_grad_() for one in args.tensors[:3]]
        self.Q = types.SimpleNamespace(tensor=self.tensors[0])
        self.further, self.leaves = args.further, list(self.tensors)
        if of_bias:
            bias = args.further["bias"].tensor.detach().requires_grad_()
            self.further = {**args.further, "bias": types.SimpleNamespace(tensor=bias)}
            self.leaves.append(bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


#: (B, H, H_kv, S, D, causal, option, D_v, whether dBias is computed)
WITH_GRADIENT_OF_BIAS = (
    (4, 16, 16, 1024, 64, False, OF_ALL, 0, True),
    (8, 16, 16, 2048, 64, False, OF_HEADS, 0, True),
    (4, 16, 16, 2048, 128, False, OF_PAIRS, 0, True),
)
SIZES = (*sdpa_options.SIZES, *WITH_GRADIENT_OF_BIAS)

SUITE = attention.Suite(
    "sdpa-options-backward",
    problems=tuple(Problem(*sizes) for sizes in SIZES),
    quick=tuple(Problem(*sizes) for sizes in SIZES[:4]),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
