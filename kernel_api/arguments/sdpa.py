"""Arguments of scaled-dot-product attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from kernel_api._numbers import whether
from kernel_api._sketch import Sketch
from kernel_api.arguments._attention_checks import STATISTICS
from kernel_api.arguments.attention import (
    TENSORS,
    AttentionArguments,
    are_in_keys,
    nothing,
    operand_of,
    scale_of,
)
from kernel_api.arguments.dropout import Dropout
from kernel_api.errors import ArgumentError
from kernel_api.masks import Mask
from kernel_api.operands import Operand


class SdpaArguments(AttentionArguments):
    """out = P · V, with P the softmax of each query's scores over the keys.

    A score is, in this order: ``scale`` · q·k; c · tanh(score / c) with c the ``softcap``; what
    ``score_mod`` makes of it; plus ``bias``; plus ``alibi`` · (j − i); −∞ where the mask does not
    let query i see key j, or where a ``bias`` or ``score_mod`` leaves less than −2²⁶: in float32
    such scores have no digits that tell them apart. With a ``sink``, exp(sink) is added to the sum
    that the softmax divides by. Then ``dropout``. Head h of the queries uses head h // (H / H_kv)
    of K and V.

    A row that sees no key gives zeros, and −∞ as ``lse``, or the sink. Of each row, lse =
    ``score_max`` + ln ``score_sum_exp``.

    ============  =====================  ============================  ========================
    form          Q, out                 K, V                          told by
    ============  =====================  ============================  ========================
    dense         (B, H, S_q, D)         (B, H_kv, S_kv, D)
    packed        (T, H, D)              (T_kv, H_kv, D)               cu_seqlens_q, _kv
    paged         (B, H, S_q, D)         (pages, H_kv, page_size, D)   page_table
    packed paged  (T, H, D)              (pages, H_kv, page_size, D)   cu_seqlens_q, page_table
    ============  =====================  ============================  ========================

    Any strides are taken whose last is 1. V and out may have another last mode, D_v, than Q and K.
    Both are multiples of 8 of 16-bit operands, of 16 of 8-bit ones.

    Args:
        Q, K, V: Of one floating type, or K and V of an 8-bit one where Q has 16 bits, as a cache of
            keys and values may. 8-bit ones with ``descale_*`` give an ``out`` of 16 bits or more.
        out: Written. May not share memory with what is read.
        lse: float32 (float64 where Q is) (B, H, S_q), or packed (H, T), written: the natural
            logarithm of the sum that the softmax divides by.
        score_max: Like lse, written: the largest score of a row, its sink among them; −∞ where
            there is none. NaN, as lse and score_sum_exp are, where one is NaN or +∞.
        score_sum_exp: Like lse, written: Σ exp(score − score_max), the sink among them; 0 where
            there is none.
        scale: 1 / √D by default; a run-time value, as ``softcap`` is.
        mask: One of :mod:`kernel_api.masks`, or several combined with ``&``.
        bias: Broadcastable to (B, H, S_q, S_kv), any floating type; not of packed queries. Kernels
            see four modes, those that lack in front as 1, and so a prepared launch takes it.
        alibi: float32 (H,), slopes.
        softcap: A positive number.
        sink: float32 (H,).
        score_mod: A function of (score, b, h, q, kv, **operands); see :mod:`kernel_api._score`.
        score_operands: What its further parameters are, by name; none is ``max`` or ``sum_exp``,
            as launches take them with ``score_`` in front.
        dropout: A :class:`~kernel_api.arguments.Dropout`.
        seq_lens_q, seq_lens_kv: int32 (B,), of what is not packed. Keys behind a length are not
            visible, and may hold anything; queries behind theirs are rows without keys and without
            a sink.
        cu_seqlens_q, cu_seqlens_kv: int32 (B + 1,), from 0: where packed sequences begin and end;
            the former alone where keys are in pages.
        max_seqlen_q, max_seqlen_kv: Of packed sequences, the longest, or more; the former alone
            where keys are in pages.
        page_table: int32 (B, max_pages): the pages of each sequence, which ``seq_lens_kv`` ends;
            S_kv is max_pages · page_size.
        descale_q, descale_k, descale_v: float32 () or (B, H_kv): what 8-bit operands are
            multiplied with.
        values_in_keys: Whether the values are the first D_v columns of K, as those of multi-head
            latent attention are: kernels that read them once are for this alone. By default, V is
            looked at: ``K[..., :D_v]`` is that, of fewer columns than K has. If True, V says how
            many columns, is not read, and has no gradient.

    Lengths are read by kernels alone, so they may change between replays of a CUDA graph.

    Raises:
        ArgumentError: shapes, types, devices, options or memory contradict each other.
        EpilogueError: a function cannot be traced, or its operands do not fit.
    """

    kind = "sdpa"
    operand_names: ClassVar[tuple[str, ...]] = ("Q", "K", "V", "out")
    output_names: ClassVar[tuple[str, ...]] = ("out", *STATISTICS)
    modes: ClassVar[dict[str, str]] = {"Q": "BHSD", "K": "BHTD", "V": "BHTE", "out": "BHSE"}
    tensor_names: ClassVar[tuple[str, ...]] = tuple(
        name for name in TENSORS if name not in ("blocks", "dBias", "dSink")
    )

    __slots__ = ("lse",)

    lse: Operand | None

    def __init__(
        self,
        Q: Any,
        K: Any,
        V: Any,
        out: Any,
        lse: Any = None,
        *,
        score_max: Any = None,
        score_sum_exp: Any = None,
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
        values_in_keys: bool | None = None,
    ) -> None:
        lse = None if lse is None else operand_of(lse, "lse")
        q, k, v = operand_of(Q, "Q"), operand_of(K, "K"), operand_of(V, "V")
        if values_in_keys is not None and whether("values_in_keys", values_in_keys):
            v = _columns_of(k, v)
        operands = (q, k, v, operand_of(out, "out"))
        self.lse = lse
        self._begin(operands)
        self.values_in_keys = are_in_keys(k, v) if values_in_keys is None else bool(values_in_keys)
        D = operands[0].shape[-1] if operands[0].shape else 0
        self.scale = scale_of(scale, D, self.accumulator_type)
        plain = nothing(
            score_max, score_sum_exp, bias, alibi, softcap, sink, score_mod, score_operands,
            dropout, seq_lens_q, seq_lens_kv, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q,
            max_seqlen_kv, page_table, descale_q, descale_k, descale_v,
        )  # fmt: skip
        look: tuple[Any, ...] = ()
        if plain and (mask is None or (isinstance(mask, Mask) and mask.is_band)):
            every = operands if lse is None else (*operands, lse)
            look = tuple([one.layout for one in every])
            self.further, self.mask = ({} if lse is None else {"lse": lse}), mask
            if self._known(look, every[3:], every):
                return
        self._take(locals())
        if look:
            self._remember(look)

    def _own_options(self) -> dict[str, Any]:
        return {"values_in_keys": True} if self.values_in_keys else {}

    def _lasting_options(self) -> dict[str, Any]:
        return {"values_in_keys": self.values_in_keys}


def columns_in_keys(K: Any, V: Any) -> int:
    """How many of the first columns of K are the values, which V tells."""
    if not K.shape or not V.shape or V.shape[-1] > K.shape[-1]:
        raise ArgumentError(
            f"values_in_keys is True and V has shape {tuple(V.shape)}; expected at most as many "
            f"columns as K, which has shape {tuple(K.shape)}"
        )
    return V.shape[-1]  # type: ignore[no-any-return]


def _columns_of(K: Operand, V: Operand) -> Operand:
    """The first columns of K, as many as V has."""
    whole, columns = K.tensor, columns_in_keys(K, V)
    if isinstance(whole, Sketch):
        return K.viewed(replace(whole, shape=(*whole.shape[:-1], columns)), "V")
    return K.viewed(whole[..., :columns], "V")
