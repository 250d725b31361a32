"""A product with factors, sums and an activation."""

from __future__ import annotations

import functools
from typing import Any

from kernel_api import epilogue as ep
from kernel_api.arguments import EpilogueArguments, GemmArguments
from kernel_api.errors import ArgumentError
from kernel_api.fusions._shared import (
    Function,
    batches,
    fused,
    matrices,
    one_of,
    per_column,
    real,
    rows,
    shaped,
    times,
)

#: Names that ``activation`` may have; :mod:`kernel_api.epilogue` has the formulas.
ACTIVATIONS = (
    "relu", "leaky_relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "softplus", "elu",
    "hardswish", "squared_relu",
)  # fmt: skip


def gemm(
    A: Any,
    B: Any,
    *,
    out: Any,
    alpha: Any = 1.0,
    C: Any = None,
    beta: Any = 1.0,
    bias: Any = None,
    activation: str | None = None,
    epilogue: EpilogueArguments | None = None,
) -> GemmArguments:
    """out = activation(alpha · acc + beta · C + bias); without any of them the product alone.

    Args:
        C: (M, N), which may be ``out`` itself; it is read whatever ``beta`` is.
        activation: One of :data:`ACTIVATIONS`.
        epilogue: A function of the accumulator in place of all that.
    """
    if C is None and not _is_one(beta):
        raise ArgumentError(f"beta is {beta} and there is no C to multiply with it")
    if _is_one(alpha) and C is None and bias is None and activation is None:
        return GemmArguments(A, B, out, epilogue=epilogue)
    if epilogue is not None:
        raise ArgumentError(
            "epilogue is given and so is one of alpha, C, bias, activation; write them in epilogue"
        )
    return _linear(A, B, out, activation, alpha=alpha, C=C, beta=beta, bias=bias)


def gemm_bias_activation(
    A: Any,
    B: Any,
    *,
    out: Any,
    bias: Any = None,
    activation: str | None = "gelu",
    preactivation: Any = None,
    alpha: Any = 1.0,
) -> GemmArguments:
    """preactivation = alpha · acc + bias, out = activation(alpha · acc + bias).

    Args:
        activation: One of :data:`ACTIVATIONS`, or None.
        preactivation: Written, for a backward pass; ``out`` is computed from what it is before
            it is rounded.
    """
    return _linear(A, B, out, activation, alpha=alpha, bias=bias, preactivation=preactivation)


def gemm_residual(
    A: Any,
    B: Any,
    *,
    out: Any,
    C: Any,
    alpha: Any = 1.0,
    beta: Any = 1.0,
    bias: Any = None,
    activation: str | None = None,
) -> GemmArguments:
    """out = activation(alpha · acc + beta · C + bias).

    Args:
        C: (M, N); ``out`` itself, or of other memory.
    """
    if C is None:
        raise ArgumentError("C is None; gemm_residual adds it, gemm does without")
    return _linear(A, B, out, activation, alpha=alpha, C=C, beta=beta, bias=bias)


def gemm_amax(A: Any, B: Any, *, out: Any, amax: Any, alpha: Any = 1.0) -> GemmArguments:
    """out = alpha · acc, amax = max |alpha · acc|, of the values before they are rounded."""
    if amax is None:
        raise ArgumentError("amax is None; gemm_amax writes it, gemm does without")
    return _linear(A, B, out, None, alpha=alpha, amax=amax)


def _linear(
    A: Any,
    B: Any,
    out: Any,
    activation: str | None,
    *,
    alpha: Any,
    C: Any = None,
    beta: Any = 1.0,
    bias: Any = None,
    preactivation: Any = None,
    amax: Any = None,
) -> GemmArguments:
    A, B = matrices(A, B)
    N = B.shape[-1]
    full = (*rows(A), N)
    if activation is not None:
        one_of("activation", activation, ACTIVATIONS)
    reads = {
        "alpha": real("alpha", alpha),
        "C": shaped("C", C, full),
        "beta": real("beta", beta) if C is not None else None,
        "bias": per_column("bias", bias, A, N),
    }
    writes = {
        "preactivation": shaped("preactivation", preactivation, full),
        "amax": shaped("amax", amax, (), batches(A)),
    }
    out = shaped("out", out, full)
    return fused(_linear_function(activation), A, B, out, reads=reads, writes=writes)


@functools.lru_cache
def _linear_function(activation: str | None) -> Function:
    def fn(
        accum: Any, alpha: Any = None, C: Any = None, beta: Any = None, bias: Any = None
    ) -> dict[str, Any]:
        x = times(alpha, accum)
        if C is not None:
            x = x + times(beta, C)
        if bias is not None:
            x = x + bias
        y = x if activation is None else getattr(ep, activation)(x)
        return {"out": y, "preactivation": x, "amax": ep.amax(y, None)}

    return fn


def _is_one(factor: Any) -> bool:
    """Whether it is absent, or the number that changes nothing; a tensor may hold any."""
    return factor is None or (type(factor) in (float, int) and factor == 1)
