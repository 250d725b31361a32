"""The one-call forms of attention, see :mod:`kernel_api.ops`."""

from __future__ import annotations

import sys
from typing import Any

from kernel_api._numbers import whether
from kernel_api.fusions._attention import BACKWARD_OPTIONS, OPTIONS

__all__ = ["sdpa", "sdpa_backward"]


@OPTIONS.told
def sdpa(
    Q: Any,
    K: Any,
    V: Any,
    *,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    return_statistics: bool = False,
    **options: Any,
) -> Any:
    """out = softmax(scale · Q Kᵀ, with masks and what is added to scores) · V.

        out = ka.ops.sdpa(q, k, v, mask=ka.masks.Causal())
        out, lse = ka.ops.sdpa(q, k, v, return_lse=True, softcap=30.0)

    Where Q, K, V, ``bias`` or ``sink`` need a gradient, ``out`` has one, and nothing else; the
    backward pass gives the same bits every time where torch is told to be deterministic.

    Args:
        Q: (B, H, S_q, D), or packed (T, H, D).
        K, V: (B, H_kv, S_kv, D), packed (T_kv, H_kv, D), or pages (pages, H_kv, page_size, D).
        out: Allocated if absent, with the modes in memory in the order of those of Q, in the type
            of Q, or bfloat16 where that has 8 bits.
        lse: Of the log-sum-exp, allocated if absent and asked for; True is ``return_lse=True``.
        return_lse: Whether to return (out, lse).
        return_statistics: Whether to return (out, lse, score_max, score_sum_exp); those that are
            not given are allocated. A graph of torch is broken there.
        options: Those of :class:`~kernel_api.arguments.SdpaArguments`.

    Raises:
        ArgumentError: operands or options contradict each other, or an output is given where a
            gradient is needed, or one that needs a gradient itself.
        EpilogueError: a function cannot be traced.
        NoKernelError: no kernel takes the operands; says why.
    """
    OPTIONS.check("sdpa", options)
    found = _implementation or _loaded()
    if lse is True:
        lse, return_lse = None, True
    if not type(return_lse) is type(return_statistics) is bool:
        return_lse = whether("return_lse", return_lse)
        return_statistics = whether("return_statistics", return_statistics)
    if return_statistics:
        return found.sdpa_with_statistics(Q, K, V, out, lse, options)
    return found.sdpa(Q, K, V, out, lse, return_lse, options)


@BACKWARD_OPTIONS.told
def sdpa_backward(
    Q: Any,
    K: Any,
    V: Any,
    out: Any,
    dO: Any,
    lse: Any,
    *,
    dQ: Any = None,
    dK: Any = None,
    dV: Any = None,
    dBias: Any = None,
    dSink: Any = None,
    **options: Any,
) -> Any:
    """The gradients (dQ, dK, dV) of :func:`sdpa`, then dBias and dSink where they are asked for.

    Args:
        Q, K, V, out, lse: As the forward pass read and wrote them.
        dO: The gradient of out.
        dQ, dK, dV: Allocated if absent.
        dBias, dSink: Allocated if True.
        options: Those of the forward pass, and ``deterministic``.

    Raises what :func:`sdpa` does.
    """
    BACKWARD_OPTIONS.check("sdpa_backward", options)
    operands = (Q, K, V, out, dO, lse)
    written = {"dQ": dQ, "dK": dK, "dV": dV, "dBias": dBias, "dSink": dSink}
    return (_implementation or _loaded()).sdpa_backward(operands, written, options)


# What needs torch ------------------------------------------------------------------------

_implementation: Any = None


def _loaded() -> Any:
    """The functions need torch, which importing this module does not load."""
    global _implementation
    from kernel_api import _attention_operators as found

    _implementation = found
    return found


if "torch" in sys.modules:  # a tracer that came before the first call would see it change
    _loaded()
