"""Attention and its gradient."""

from __future__ import annotations

from typing import Any

from kernel_api._options import Options
from kernel_api.arguments import SdpaArguments, SdpaBackwardArguments

#: What torch's function of attention takes, and these do not.
_OF_TORCH = {
    "attn_mask": "bias=tensor, which is added to the scores, or a mask of kernel_api.masks",
    "dropout_p": "dropout=ka.arguments.Dropout(p, seed, offset)",
    "enable_gqa": "K and V as they are: heads of Q share theirs",
    "is_causal": "mask=ka.masks.Causal()",
}
OPTIONS = Options(SdpaArguments, instead=_OF_TORCH)
BACKWARD_OPTIONS = Options(SdpaBackwardArguments, instead=_OF_TORCH)


@OPTIONS.told
def sdpa(Q: Any, K: Any, V: Any, *, out: Any, lse: Any = None, **options: Any) -> SdpaArguments:
    """out = softmax(scale · Q Kᵀ, with masks and what is added to scores) · V.

    Args:
        Q, out: (B, H, S_q, D), or packed (T, H, D).
        K, V: (B, H_kv, S_kv, D), packed (T_kv, H_kv, D), or pages (pages, H_kv, page_size, D).
        lse: (B, H, S_q), or packed (H, T), written: what :func:`sdpa_backward` needs.
        options: Further ones of :class:`~kernel_api.arguments.SdpaArguments`.
    """
    OPTIONS.check("sdpa", options)
    return SdpaArguments(Q, K, V, out, lse, **options)


@BACKWARD_OPTIONS.told
def sdpa_backward(
    Q: Any,
    K: Any,
    V: Any,
    out: Any,
    dO: Any,
    lse: Any,
    *,
    dQ: Any,
    dK: Any,
    dV: Any,
    dBias: Any = None,
    dSink: Any = None,
    **options: Any,
) -> SdpaBackwardArguments:
    """The gradients of Q, K, V, and of bias and sink where they are asked for.

    Args:
        Q, K, V, out, lse: As :func:`sdpa` read and wrote them.
        dO: In the shape of out, its gradient.
        dQ, dK, dV: In the shapes of Q, K, V; written.
        dBias, dSink: In the shapes of bias and sink; written.
        options: Those of the forward pass, and ``deterministic``; see
            :class:`~kernel_api.arguments.SdpaBackwardArguments`.
    """
    BACKWARD_OPTIONS.check("sdpa_backward", options)
    operands = (Q, K, V, out, dO, lse, dQ, dK, dV)
    return SdpaBackwardArguments(*operands, dBias=dBias, dSink=dSink, **options)
