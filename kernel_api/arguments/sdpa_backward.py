"""Arguments of the gradient of scaled-dot-product attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kernel_api._numbers import whether
from kernel_api.arguments._attention_checks import STATISTICS
from kernel_api.arguments.attention import (
    TENSORS,
    AttentionArguments,
    nothing,
    operand_of,
    scale_of,
)
from kernel_api.arguments.dropout import Dropout
from kernel_api.errors import ArgumentError
from kernel_api.masks import Mask
from kernel_api.operands import Operand


class SdpaBackwardArguments(AttentionArguments):
    """With P and the scores of :class:`SdpaArguments`, keep = what dropout multiplies P with, and Δ
    = the row sums of out · dO::

        dV    = (P · keep)ᵀ dO
        dS    = P · (keep · dO Vᵀ − Δ)
        dBias = dS, summed over the modes that bias broadcasts
        dSink = −Σ over batch and queries of exp(sink − lse) · Δ, per head

    then through ``score_mod`` and ``softcap``, dQ = scale · dS K and dK = scale · dSᵀ Q; dK and dV
    are summed over the heads of queries that share them. Gradients of rows behind a sequence's
    length are zeros.

    Args:
        Q, K, V, out, lse: What the forward pass read and wrote.
        dO: The gradient of out.
        dQ, dK, dV: Written, in the shapes of Q, K, V. May not share memory with what is read.
        dBias: In the shape of bias, any floating type; written.
        dSink: (H,), written.
        deterministic: Whether two runs have to give the same bits.

    All other options are those of :class:`SdpaArguments`. Pages and 8-bit operands have no
    gradient.

    Raises:
        ArgumentError: shapes, types, devices, options or memory contradict each other.
        EpilogueError: a function cannot be traced, or its operands do not fit.
    """

    kind = "sdpa_backward"
    operand_names: ClassVar[tuple[str, ...]] = (
        "Q", "K", "V", "out", "dO", "lse", "dQ", "dK", "dV",
    )  # fmt: skip
    output_names: ClassVar[tuple[str, ...]] = ("dQ", "dK", "dV", "dBias", "dSink")
    modes: ClassVar[dict[str, str]] = {
        "Q": "BHSD",
        "K": "BHTD",
        "V": "BHTE",
        "out": "BHSE",
        "dO": "BHSE",
        "lse": "BHS",
        "dQ": "BHSD",
        "dK": "BHTD",
        "dV": "BHTE",
    }
    tensor_names: ClassVar[tuple[str, ...]] = tuple(
        name
        for name in TENSORS
        if name not in (*STATISTICS, "blocks", "page_table") and not name.startswith("descale")
    )

    __slots__ = ("dK", "dO", "dQ", "dV", "deterministic", "lse")

    lse: Operand
    dO: Operand
    dQ: Operand
    dK: Operand
    dV: Operand
    deterministic: bool

    def __init__(
        self,
        Q: Any,
        K: Any,
        V: Any,
        out: Any,
        dO: Any,
        lse: Any,
        dQ: Any,
        dK: Any,
        dV: Any,
        *,
        dBias: Any = None,
        dSink: Any = None,
        deterministic: bool = False,
        scale: float | None = None,
        mask: Mask | None = None,
        bias: Any = None,
        alibi: Any = None,
        softcap: float | None = None,
        sink: Any = None,
        score_mod: Callable[..., Any] | None = None,
        score_operands: Mapping[str, Any] | None = None,
        dropout: Dropout | None = None,
        seq_lens_q: Any = None,
        seq_lens_kv: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        page_table: Any = None,
        descale_q: Any = None,
        descale_k: Any = None,
        descale_v: Any = None,
    ) -> None:
        if lse is None:
            raise ArgumentError(
                "lse is None; the backward pass needs the log-sum-exp that the forward pass wrote: "
                "pass lse to SdpaArguments"
            )
        if not nothing(page_table, descale_q, descale_k, descale_v):
            raise ArgumentError(
                "page_table or descale is given; pages and 8-bit operands have no gradient"
            )
        self.deterministic = whether("deterministic", deterministic)
        given = zip(self.operand_names, (Q, K, V, out, dO, lse, dQ, dK, dV), strict=True)
        operands = tuple([operand_of(value, name) for name, value in given])
        self._begin(operands)
        self.dO, self.lse, self.dQ, self.dK, self.dV = operands[4:]
        D = self.Q.shape[-1] if self.Q.shape else 0
        self.scale = scale_of(scale, D, self.accumulator_type)
        plain = nothing(
            bias, alibi, softcap, sink, score_mod, score_operands, dropout, seq_lens_q, seq_lens_kv,
            cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, dBias, dSink,
        )  # fmt: skip
        look: tuple[Any, ...] = ()
        if plain and (mask is None or (isinstance(mask, Mask) and mask.is_band)):
            self.further, self.mask = {}, mask
            look = tuple([one.layout for one in operands])
            if self._known(look, operands[6:], operands):
                return
        self._take({**locals(), "lse": None})  # which is an operand here
        if look:
            self._remember(look)

    def _own_options(self) -> dict[str, Any]:
        return {"deterministic": self.deterministic}
