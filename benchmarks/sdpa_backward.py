"""Suite sdpa-backward: gradients of attention in bf16, beside cuDNN's through torch.

    python benchmarks/sdpa_backward.py [--quick] [--candidates N | --all] [--seconds S]

The problems are of the kind of the suite sdpa-forward, up to sequences of 8192. What the forward
pass gives is there before, and the same for all; a peer is called as the operator behind
torch's autograd, so that nothing but the backward pass is timed. ``tflops`` counts 2.5 times the
operations of the forward pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import flash
import sdpa_forward
import torch

import kernel_api as ka

_aten: Any = torch.ops.aten

LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True)
class Problem(attention.Problem):
    """A backward pass: dQ, dK and dV."""

    @property
    def operations(self) -> int:
        return super().operations * 5 // 2

    @property
    def bytes(self) -> int:
        """Q, K, V, out and dO are read, dQ, dK and dV written."""
        rows = self.B * self.S
        return 2 * rows * self.D * 4 * (self.H + self.H_kv) + 4 * rows * self.H

    def arguments(self, device: str) -> Any:
        Q, K, V = self.queries(device), self.keys(device), self.keys(device)
        lse = torch.empty(Q.shape[:3], dtype=torch.float32, device=device)
        forward = ka.SdpaArguments(Q, K, V, torch.empty_like(Q), lse, **self.options)
        if device != "meta":
            ka.get_kernels(forward, providers=["torch", "reference"])[0].run(forward)
        gradients = (torch.empty_like(one) for one in (Q, K, V))
        operands = (*forward.tensors, self.queries(device), lse, *gradients)
        return ka.SdpaBackwardArguments(*operands, **self.options)

    def peers(self) -> dict[str, attention.Peer]:
        return {"cuDNN": cudnn, "torch's flash": torchs_flash, "torch.autograd": by_autograd}

    def libraries(self) -> dict[str, attention.Peer]:
        return {flash.NAME: flash.backward} if flash.is_here() else {}

    def compared(self, args: Any) -> list[torch.Tensor]:
        return [one.tensor for one in args.outputs.values()]

    def parts(self, args: Any) -> Iterator[Any]:
        group = self.H // self.H_kv
        for b, h_kv in self.ends(self.H_kv):
            of_keys = (b, slice(h_kv, h_kv + 1))
            of_queries = (b, slice(h_kv * group, (h_kv + 1) * group))
            operands = (
                tensor[of_keys if name in ("K", "V", "dK", "dV") else of_queries]
                for name, tensor in zip(args.operand_names, args.tensors, strict=True)
            )
            yield ka.SdpaBackwardArguments(*operands, **self.options)


def cudnn(args: Any) -> Callable[[], Any]:
    Q, K, V, out, dO, lse, *_ = args.tensors
    state = torch.zeros((), dtype=torch.int64, device=Q.device)
    return functools.partial(
        _aten._scaled_dot_product_cudnn_attention_backward,
        *(dO, Q, K, V, out, lse.unsqueeze(-1), state, state, None, None, None),
        *(args.S_q, args.S_kv, 0.0, bool(args.bounds)),
        scale=args.scale,
    )


def torchs_flash(args: Any) -> Callable[[], Any]:
    Q, K, V, out, dO, lse, *_ = args.tensors
    state = torch.zeros((), dtype=torch.int64, device=Q.device)
    return functools.partial(
        _aten._scaled_dot_product_flash_attention_backward,
        *(dO, Q, K, V, out, lse, None, None, args.S_q, args.S_kv, 0.0, bool(args.bounds)),
        *(state, state),
        scale=args.scale,
    )


def by_autograd(args: Any) -> Callable[[], Any]:
    """Of the function, whatever computes it: where nothing else is there."""
    leaves = [one.detach().requires_grad_() for one in args.tensors[:3]]
    how = {"is_causal": bool(args.bounds), "enable_gqa": args.H_kv != args.H, "scale": args.scale}
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, **how)
    dO = args.dO.tensor
    return lambda: torch.autograd.grad(out, leaves, dO, retain_graph=True)


SIZES = (*sdpa_forward.grid(LENGTHS, (1,)), *sdpa_forward.grid(LENGTHS[1:], (4,)))

SUITE = attention.Suite(
    "sdpa-backward",
    problems=tuple(Problem(*sizes) for sizes in dict.fromkeys((*sdpa_forward.NAMED, *SIZES))),
    quick=tuple(Problem(*sizes) for sizes in sdpa_forward.NAMED),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
