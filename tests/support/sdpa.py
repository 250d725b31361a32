"""Operands of attention, and attention written as loops over single scores.

What is written is NaN before, and so is what must not be read.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import kernel_api as ka
from kernel_api.dtypes import dtype

SDPA, BACKWARD = ka.SdpaArguments, ka.SdpaBackwardArguments

NAN = float("nan")


class Draw:
    """Operands of one problem, (B, H, S, D) in memory (B, S, H, D) with room between rows.

    Args:
        element: Type of what is read.
        pad: Elements between rows.
    """

    def __init__(
        self,
        B: int = 2,
        H: int = 4,
        H_kv: int = 2,
        S_q: int = 5,
        S_kv: int = 7,
        D: int = 8,
        D_v: int = 16,
        *,
        element: Any = "float64",
        pad: int = 0,
        device: Any = "cpu",
        seed: int = 0,
    ) -> None:
        self.B, self.H, self.H_kv, self.S_q, self.S_kv = B, H, H_kv, S_q, S_kv
        self.D, self.D_v, self.pad = D, D_v, pad
        self.element, self.device = dtype(element).torch, torch.device(device)
        self.wide = torch.float64 if self.element is torch.float64 else torch.float32
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, element: Any = None) -> torch.Tensor:
        element = element or self.element
        if self.device.type == "meta":  # it would take a while, and nobody sees it
            return torch.empty(shape, dtype=element, device=self.device)
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return drawn.to(element).to(self.device)

    def wides(self, *shape: int) -> torch.Tensor:
        """Numbers in the type of the arithmetic."""
        return self.random(*shape, element=self.wide)

    def heads(self, heads: int, rows: int, columns: int, *, read: bool = True) -> torch.Tensor:
        """(B, heads, rows, columns)"""
        shape = (self.B, rows, heads, columns + self.pad)
        whole = torch.full(shape, NAN, device=self.device).to(self.element)
        found = whole[..., :columns].transpose(1, 2)
        return found.copy_(self.random(*found.shape)) if read else found

    def queries(self, **how: Any) -> torch.Tensor:
        return self.heads(self.H, self.S_q, self.D, **how)

    def keys(self, **how: Any) -> torch.Tensor:
        return self.heads(self.H_kv, self.S_kv, self.D, **how)

    def values(self, **how: Any) -> torch.Tensor:
        return self.heads(self.H_kv, self.S_kv, self.D_v, **how)

    def results(self, **how: Any) -> torch.Tensor:
        return self.heads(self.H, self.S_q, self.D_v, **how)

    def lse(self) -> torch.Tensor:
        shape = (self.B, self.H, self.S_q)
        return torch.full(shape, NAN, dtype=self.wide, device=self.device)

    def arguments(self, **options: Any) -> Any:
        """Of a forward pass; ``options`` replace operands, too."""
        given = {
            "Q": self.queries(),
            "K": self.keys(),
            "V": self.values(),
            "out": self.results(read=False),
            "lse": self.lse(),
        }
        return SDPA(**{**given, **options})


def run(args: Any, provider: str = "reference") -> dict[str, torch.Tensor]:
    """Every output, by the first kernel of a provider."""
    kernel = ka.get_kernels(args, providers=[provider])[0]
    for output in args.outputs.values():
        output.tensor.fill_(NAN)
    kernel.run(args)
    return {name: output.tensor for name, output in args.outputs.items()}


def backward_of(args: Any, dO: torch.Tensor, **more: Any) -> Any:
    """The arguments of the gradient, of arguments that were run."""
    operands = {name: getattr(args, name).tensor for name in ("Q", "K", "V", "out", "lse")}
    written = {f"d{name}": torch.full_like(operands[name], NAN) for name in "QKV"}
    options = {name: one for name, one in args._keywords().items() if name != "lse"}
    return BACKWARD(**operands, dO=dO, **written, **{**options, **more})


# For kernels -----------------------------------------------------------------------------


def arguments_for(
    kernel: Any, S_q: int, S_kv: int, B: int | None = None, *, device: Any = "cpu", seed: int = 0
) -> Any:
    """Plain arguments that a kernel takes, at no more than the alignment that it asks."""
    asked = kernel.metadata.operands
    D, D_v = getattr(kernel.metadata.design, "head_dim", (64, 64))
    element = asked.K.dtype or "float32"
    sizes = (B or 1, 2, 2, S_q, S_kv, D, D_v)
    # torch's operators take any majors and say in a rule that they read vectors.
    pad = 8 if asked.Q.stride is None else asked.K.divisibility
    how = {"element": element, "pad": pad, "device": device, "seed": seed}
    draw = Draw(*sizes, **how)
    Q = draw.queries().to(dtype(asked.Q.dtype or element).torch)
    out = draw.results(read=False).to(dtype(asked.out.dtype or element).torch)
    within = True if kernel.family == "sm90.sdpa_latent" else None
    options: dict[str, Any] = {"values_in_keys": within}
    if (how_biased := getattr(kernel.metadata.design, "bias", "read")) != "read":
        options["bias"] = draw.random(B or 1, 2, S_q if how_biased == "tiles" else 1, S_kv)
    forward = draw.arguments(Q=Q, out=out, lse=None, **options)
    if kernel.arguments is SDPA:
        return forward
    lse = draw.lse().fill_(math.log(max(S_kv, 1)) + 0.5)
    tensors = [operand.tensor for operand in forward.operands]
    dO = draw.results().to(out.dtype)
    written = draw.queries(read=False), draw.keys(read=False), draw.values(read=False)
    further = {"bias": options["bias"]} if "bias" in options else {}
    if getattr(kernel.metadata.design, "bias_gradient", "again") != "again":
        further["dBias"] = torch.empty_like(options["bias"])
    return BACKWARD(*tensors[:3], tensors[3].copy_(draw.results()), dO, lse, *written, **further)


# Loops -----------------------------------------------------------------------------------


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    visible: Any = None,
    modify: Any = None,
    bias: Any = None,
    alibi: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    keep: Any = None,
    lens_q: Any = None,
    lens_kv: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of (B, H, S, D) in float64, score by score; gradients pass through.

    Args:
        visible, modify: Functions of (b, h, i, j), and of (score, b, h, i, j).
        keep: (B, H, S_q, S_kv), what probabilities are multiplied with.
        lens_q, lens_kv: Lists.
    """
    (B, H, S_q, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    out = [[[v.new_zeros(v.shape[3]) for _ in range(S_q)] for _ in range(H)] for _ in range(B)]
    lse = [[[q.new_tensor(-math.inf) for _ in range(S_q)] for _ in range(H)] for _ in range(B)]
    for b in range(B):
        queries = S_q if lens_q is None else lens_q[b]
        keys = S_kv if lens_kv is None else lens_kv[b]
        for h in range(H):
            group = h // (H // H_kv)
            for i in range(queries):
                seen, scores = [], []
                for j in range(keys):
                    if visible is not None and not visible(b, h, i, j):
                        continue
                    s = scale * (q[b, h, i] * k[b, group, j]).sum()
                    s = s if softcap is None else softcap * torch.tanh(s / softcap)
                    s = s if modify is None else modify(s, b, h, i, j)
                    s = s if bias is None else s + bias.expand(B, H, S_q, S_kv)[b, h, i, j]
                    s = s if alibi is None else s + alibi[h] * (j - i)
                    seen.append(j)
                    scores.append(s)
                terms = scores if sink is None else [*scores, sink[h]]
                if not terms:
                    continue
                lse[b][h][i] = torch.logsumexp(torch.stack(terms), 0)
                for j, s in zip(seen, scores, strict=True):
                    p = torch.exp(s - lse[b][h][i])
                    p = p if keep is None else p * keep[b, h, i, j]
                    out[b][h][i] = out[b][h][i] + p * v[b, group, j]
    return _stacked(out), _stacked(lse)


def _stacked(rows: Any) -> torch.Tensor:
    """Lists of lists of tensors as one."""
    return rows if torch.is_tensor(rows) else torch.stack([_stacked(one) for one in rows])


def kept(B: int, H: int, S_q: int, S_kv: int, p: float, seed: int, offset: int) -> torch.Tensor:
    """What dropout multiplies probabilities with, by Philox in plain integers."""
    found = torch.zeros(B, H, S_q, S_kv, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            stream = offset + b * H + h
            for i in range(S_q):
                for j in range(S_kv):
                    found[b, h, i, j] = (uniform(i, j, stream, seed) >= p) / (1 - p)
    return found


def uniform(i: int, j: int, stream: int, seed: int) -> float:
    """What dropout draws for query i and key j; stream: its offset, and which head it is."""
    counter = (j // 32 * 4 + j % 8 // 2, i, stream & 0xFFFFFFFF, stream >> 32)
    word = philox(counter, seed)[j % 32 // 8]
    return (word >> 16 if j % 2 else word & 0xFFFF) * 2.0**-16


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Four words of Philox4x32-10."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = seed & mask, seed >> 32
    for _ in range(10):
        one, other = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (other >> 32) ^ c1 ^ k0, other & mask, (one >> 32) ^ c3 ^ k1, one & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
