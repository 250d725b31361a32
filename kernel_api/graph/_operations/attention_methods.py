"""Methods of a graph for attention, and one form for what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kernel_api._numbers import truth
from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import (
    attention_implementation,
    data_type,
    diagonal_alignment,
    member_of,
)
from kernel_api.graph._node import Body, Node
from kernel_api.graph._operations.attention import check_alibi
from kernel_api.graph._operations.pointwise import POINTWISE
from kernel_api.graph._options import as_number, number, one_whole, optional_whole
from kernel_api.graph._tensor import Tensor

_Alignment = diagonal_alignment


class AttentionMethods(Builder):
    """Attention, in the options of cuDNN's frontend.

    A score is attn_scale · q·k, then what ``score_mod`` makes of it, plus bias, plus ALiBi's
    slope · (j − i); −∞ where the masks do not let query i see key j. O = P · V with P the softmax
    of scores, after dropout. A row that sees no key gives zeros, and −∞ as Stats.

    ===========================  ==================================================================
    tensor                       dim
    ===========================  ==================================================================
    q, O, dO, dQ                 (B, H_q, S_q, D); O and dO have D_v
    k, v, dK, dV                 (B, H_kv, S_kv, D), (B, H_kv, S_kv, D_v); H_q a multiple of H_kv
    Stats, score_max, _sum_exp   FLOAT (B, H_q, S_q, 1)
    bias, dBias                  (1 or B, 1 or H_q, 1 or S_q, 1 or S_kv)
    seq_len_q, seq_len_kv        INT32 (B, 1, 1, 1)
    sink_token, dSink_token      FLOAT (1, H_q, 1, 1)
    paged_attention_*_table      INT32 (B, 1, pages, 1); k, v are then (blocks, H_kv, size, D)
    block_mask                   UINT8 (B or 1, H_q or 1, ⌈S_q / 128⌉, ⌈⌈S_kv / 128⌉ / 8⌉), the
                                 lowest bit for the first 128 keys
    ===========================  ==================================================================

    Options that both directions share:

    Args:
        attn_scale: A number, or a tensor of one; 1 by default.
        bias: Added to scores; ``attn_bias`` is another name of it.
        use_causal_mask: Key j is seen by query i iff j ≤ i.
        use_causal_mask_bottom_right: Iff j ≤ i + S_kv − S_q, by the lengths of each sequence.
        sliding_window_length, diagonal_band_left_bound: Only keys j > i − bound; the bound counts
            the diagonal, and is 1 or more.
        diagonal_band_right_bound: Only keys j ≤ i + bound.
        diagonal_alignment: Where the diagonal of both bounds starts: BOTTOM_RIGHT puts
            i + S_kv − S_q for i.
        use_padding_mask: Sequences have the lengths ``seq_len_q`` and ``seq_len_kv``.
        use_alibi_mask: With the slopes of Press, Smith and Lewis (2022); asks for a right bound
            of 0.
        dropout: A probability, with ``dropout_seed`` and ``dropout_offset``, or a tuple of all
            three; whole numbers or tensors of one INT64. A mask of one's own, (mask, scale), is
            refused: attention that is written out takes it as a factor of the softmax.
        score_mod: ``score_mod(graph, score)`` adds pointwise operations to the graph that it is
            given, and returns the changed score; ``score`` is (B, H_q, S_q, S_kv), and
            ``gen_index(score, axis)`` are its indices. The gradient is derived of it.
        sink_token: exp(sink) is added to the sum that the softmax divides by.
        block_mask: Only blocks of 128 queries and 128 keys whose bit is 1.
        implementation, unfuse_fma: Kept for compatibility.

    Raises:
        GraphError: options contradict each other.
    """

    def sdpa(
        self,
        q: Any,
        k: Any,
        v: Any,
        attn_scale: Any = None,
        is_inference: bool | None = None,
        use_causal_mask: bool = False,
        generate_stats: bool | None = None,
        attn_bias: Any = None,
        dropout: Any = None,
        dropout_seed: Any = None,
        dropout_offset: Any = 0,
        name: str | None = None,
        *,
        bias: Any = None,
        block_mask: Any = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: Any = None,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        rng_dump: Any = None,
        paged_attention_k_table: Any = None,
        paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: int | None = None,
        score_mod: Callable[[Any, Tensor], Tensor] | None = None,
        implementation: Any = None,
        score_max: Any = None,
        score_sum_exp: Any = None,
        sink_token: Any = None,
        unfuse_fma: bool = False,
        compute_data_type: Any = None,
    ) -> Any:
        """(O, Stats) of scaled-dot-product attention.

        Stats, the logarithm of the sum that the softmax divides by, is None unless
        ``generate_stats``, or ``is_inference=False``. ``score_max`` and ``score_sum_exp`` are
        tensors that the largest score m of each row, and Σ exp(score − m), are written to;
        ``rng_dump`` one (B, H_q, S_q, S_kv) for what dropout keeps, 1 or 0. Options are those of
        :class:`AttentionMethods`. Unless strides are set, O lies in the memory order of q.
        """
        options = self._attention_options("sdpa", locals())
        tables = {
            "paged_attention_k_table": paged_attention_k_table,
            "paged_attention_v_table": paged_attention_v_table,
        }
        longest = optional_whole(
            "sdpa", "paged_attention_max_seq_len_kv", paged_attention_max_seq_len_kv
        )
        _check_pages(tables, longest, options)
        written = {"Max": score_max, "Sum_exp": score_sum_exp, "Rng_dump": rng_dump}
        if rng_dump is not None and options.attributes["dropout"] is None:
            raise GraphError("rng_dump is given and there is no dropout; it is what dropout keeps")
        found = self._add(
            "sdpa",
            {"q": q, "k": k, "v": v, **options.inputs, **tables},
            name=name,
            compute=compute_data_type,
            results=_results(is_inference, generate_stats, "O"),
            given_results=written,
            body=options.body,
            **options.attributes,
            max_seq_len_kv=longest,
        )
        return found[:2]

    def sdpa_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        dO: Any,
        stats: Any,
        attn_scale: Any = None,
        use_causal_mask: bool = False,
        attn_bias: Any = None,
        dropout: Any = None,
        dropout_seed: Any = None,
        dropout_offset: Any = 0,
        name: str | None = None,
        *,
        bias: Any = None,
        dBias: Any = None,
        block_mask: Any = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: Any = None,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        score_mod: Callable[[Any, Tensor], Tensor] | None = None,
        score_mod_bprop: Any = None,
        sink_token: Any = None,
        dSink_token: Any = None,
        implementation: Any = None,
        compute_data_type: Any = None,
    ) -> Any:
        """(dQ, dK, dV), the gradients of :meth:`sdpa`.

        ``o`` and ``stats`` are what it gave, ``dO`` the gradient of O. ``dBias`` and
        ``dSink_token`` are tensors that those gradients are written to. Options are those of
        :class:`AttentionMethods`; ``score_mod_bprop`` is not needed, the gradient is derived of
        ``score_mod``. With ``use_deterministic_algorithm`` two runs give the same bits.
        """
        options = self._attention_options("sdpa_backward", locals())
        for gradient, of, given in (
            ("dBias", "bias", dBias),
            ("dSink_token", "sink_token", dSink_token),
        ):
            if given is not None and of not in options.inputs:
                raise GraphError(f"{gradient} is given and {of} is None; it is the gradient of it")
        totals = {
            "max_total_seq_len_q": max_total_seq_len_q,
            "max_total_seq_len_kv": max_total_seq_len_kv,
        }
        longest = {key: optional_whole("sdpa_backward", key, n) for key, n in totals.items()}
        found = self._add(
            "sdpa_backward",
            {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats, **options.inputs},
            name=name,
            compute=compute_data_type,
            results=("dQ", "dK", "dV"),
            given_results={"dBias": dBias, "dSink": dSink_token},
            body=options.body,
            **options.attributes,
            deterministic=bool(use_deterministic_algorithm),
            **longest,
        )
        return found[:3]

    def sdpa_fp8(
        self,
        q: Any,
        k: Any,
        v: Any,
        descale_q: Any,
        descale_k: Any,
        descale_v: Any,
        descale_s: Any,
        scale_s: Any,
        scale_o: Any,
        attn_scale: Any = None,
        is_inference: bool | None = None,
        use_causal_mask: bool = False,
        generate_stats: bool | None = None,
        dropout: Any = None,
        dropout_seed: Any = None,
        dropout_offset: Any = 0,
        name: str | None = None,
        *,
        bias: Any = None,
        block_mask: Any = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: Any = None,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        score_mod: Callable[[Any, Tensor], Tensor] | None = None,
        implementation: Any = None,
        sink_token: Any = None,
        compute_data_type: Any = None,
    ) -> Any:
        """(O, Stats, amax_S, amax_O) of attention between 8-bit floats.

        Scores are q·k · descale_q · descale_k · attn_scale; amax_S is the largest P; P · scale_s is
        rounded to the type of q; O = P · v · descale_v · descale_s, whose largest magnitude is
        amax_O, is stored times scale_o. Each scale is FLOAT, one number; so are both maxima
        (1, 1, 1, 1). Kernels, which give no maxima and no O of 8 bits, round P · 256 instead, and
        multiply by scale_s / 256. Options are those of :class:`AttentionMethods`.
        """
        options = self._attention_options("sdpa_fp8", locals())
        scales = {
            "descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v,
            "descale_s": descale_s, "scale_s": scale_s, "scale_o": scale_o,
        }  # fmt: skip
        results = _results(is_inference, generate_stats, "O", "Amax_S", "Amax_O")
        return self._add(
            "sdpa_fp8",
            {"q": q, "k": k, "v": v, **scales, **options.inputs},
            name=name,
            compute=compute_data_type,
            results=results,
            body=options.body,
            **options.attributes,
        )

    # One form for the options ------------------------------------------------------------

    def _attention_options(self, op: str, given: Mapping[str, Any]) -> _Options:
        """What the three operations share.

        Args:
            op: Which of them it is.
            given: Arguments by name; those that are not there are not set.
        """
        inputs: dict[str, Any] = {}
        attributes: dict[str, Any] = {"scale": self._scale(op, given["attn_scale"], inputs)}
        bias = _either(given, "bias", "attn_bias")
        inputs.update(bias=bias, block_mask=given.get("block_mask"), sink_token=given["sink_token"])
        attributes["band"] = band = _band(op, given)
        attributes["alibi"] = bool(given["use_alibi_mask"])
        check_alibi(attributes["alibi"], band)
        attributes["padding"] = _padding(given, inputs)
        attributes["dropout"] = self._dropout(op, given, inputs)
        if given.get("implementation") is not None:
            member_of(attention_implementation, given["implementation"])
        body = self._score_body(given, inputs)
        present = {key: value for key, value in inputs.items() if value is not None}
        return _Options(present, attributes, body)

    def _scale(self, op: str, scale: Any, inputs: dict[str, Any]) -> float | None:
        if isinstance(scale, Tensor) and scale.value is None:
            inputs["attn_scale"] = scale
            return None
        if isinstance(scale, Tensor):
            scale = scale.value
        return 1.0 if scale is None else number(op, "attn_scale", scale)

    def _dropout(self, op: str, given: Mapping[str, Any], inputs: dict[str, Any]) -> float | None:
        dropout = given["dropout"]
        state = [given["dropout_seed"], given["dropout_offset"]]
        if isinstance(dropout, (tuple, list)):
            if len(dropout) != 3 or (isinstance(dropout[0], Tensor) and dropout[0].value is None):
                raise GraphError(
                    "dropout is a mask of your own; expected a probability, or (probability, seed, "
                    "offset). A mask is for attention that is written out: mul of the softmax and "
                    "the mask, in front of the second matmul"
                )
            dropout, *state = dropout
        if isinstance(dropout, Tensor) and dropout.value is not None:
            dropout = dropout.value
        if dropout is None or truth(dropout) is False:
            return None
        probability = as_number(dropout)
        if probability == 0:
            return None
        if probability is None or not 0 < probability < 1:
            raise GraphError(
                f"dropout is {dropout!r}; expected a probability from 0 up to, not including, 1, "
                f"which would leave nothing to scale"
            )
        for key, value in zip(("dropout_seed", "dropout_offset"), state, strict=True):
            if value is None:
                raise GraphError(f"dropout is {dropout} and {key} is None; it needs a seed")
            if not isinstance(value, Tensor):
                value = self._constant(one_whole(op, key, value), key, data_type.INT64)
            inputs[key] = value
        return probability

    def _score_body(self, given: Mapping[str, Any], inputs: dict[str, Any]) -> Body | None:
        """What ``score_mod`` adds to the graph, taken out of it."""
        score_mod = given["score_mod"]
        if score_mod is None:
            return None
        if not callable(score_mod):
            raise GraphError(f"score_mod is a {type(score_mod).__name__}; expected a function")
        self.check_open("score_mod cannot be added")
        known, before = len(self.tensors), len(self.nodes)
        dim = _score_dim(given["q"], given["k"])
        score = Tensor(self, name="score", dim=dim, element=data_type.FLOAT, is_virtual=True)
        try:
            result = score_mod(self, score)
        finally:
            nodes = tuple(self.nodes[before:])
            del self.nodes[before:]
            # What the function computes is its own; what it reads is the graph's.
            made = self.tensors[known:]
            self.tensors[known:] = [t for t in made if t.is_input and not t.is_constant]
        own = {id(tensor) for node in nodes for tensor in node.writes}
        if not isinstance(result, Tensor) or id(result) not in {*own, id(score)}:
            raise GraphError(
                f"score_mod returns {result!r}; expected a tensor that it computes from the score"
            )
        wrong = [node for node in nodes if node.op not in POINTWISE]
        if wrong:
            raise GraphError(f"score_mod adds {wrong[0]}; expected pointwise operations only")
        nodes = _needed(nodes, result)
        operands: list[Tensor] = []
        for tensor in (one for node in nodes for one in node.reads):
            known = tensor is score or id(tensor) in own or tensor.is_constant
            if not known and all(tensor is not one for one in operands):
                operands.append(tensor)
        inputs["score_operands"] = tuple(operands) or None
        return Body(nodes, score, result)


def _needed(nodes: tuple[Node, ...], result: Tensor) -> tuple[Node, ...]:
    """Those that a tensor is computed of."""
    found: list[Node] = []
    needed = {id(result)}
    for node in reversed(nodes):
        if any(id(tensor) in needed for tensor in node.writes):
            found.append(node)
            needed.update(id(tensor) for tensor in node.reads)
    return tuple(reversed(found))


class _Options(NamedTuple):
    """Inputs that are there, attributes, and the function of scores."""

    inputs: dict[str, Any]
    attributes: dict[str, Any]
    body: Body | None


def _score_dim(q: Any, k: Any) -> tuple[int, ...]:
    """Of the scores, if it is known already; of pages it is not."""
    known = all(isinstance(one, Tensor) and one.rank == 4 for one in (q, k))
    return (*q.dim[:3], k.dim[2]) if known and q.dim[0] == k.dim[0] else ()


def _either(given: Mapping[str, Any], name: str, other: str) -> Any:
    if given.get(name) is not None and given.get(other) is not None:
        raise GraphError(f"{name} and {other} are given, which are the same; expected one")
    return given.get(other) if given.get(name) is None else given.get(name)


def _results(is_inference: Any, generate_stats: Any, *names: str) -> tuple[str, ...]:
    stats = not is_inference if generate_stats is None else generate_stats
    if generate_stats is None and is_inference is None:
        stats = False
    return (*names, "Stats") if stats else names


def _band(op: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Key j is visible to query i iff i + d − left ≤ j ≤ i + d + right; d as of
    :class:`kernel_api.masks.SlidingWindow`."""
    causal, bottom = given["use_causal_mask"], given["use_causal_mask_bottom_right"]
    if causal and bottom:
        raise GraphError(
            "use_causal_mask and use_causal_mask_bottom_right are both set; expected one of them"
        )
    alignment = given["diagonal_alignment"]
    aligned = None if alignment is None else member_of(_Alignment, alignment)
    if bottom and aligned is _Alignment.TOP_LEFT:
        raise GraphError(
            "use_causal_mask_bottom_right is set and diagonal_alignment is TOP_LEFT; expected "
            "BOTTOM_RIGHT, or neither"
        )
    if causal and aligned is _Alignment.BOTTOM_RIGHT:
        raise GraphError(
            "use_causal_mask is set, which is aligned TOP_LEFT, and diagonal_alignment is "
            "BOTTOM_RIGHT; use diagonal_band_right_bound = 0 with it"
        )
    bound = _either(given, "diagonal_band_left_bound", "sliding_window_length")
    left = optional_whole(op, "diagonal_band_left_bound (sliding_window_length)", bound)
    name = "diagonal_band_right_bound"
    right = optional_whole(op, name, given[name])
    if left is not None and left < 1:
        raise GraphError(
            f"diagonal_band_left_bound (sliding_window_length) is {left}; expected 1 or more, "
            f"because it counts the diagonal"
        )
    if right is not None and right < 0:
        raise GraphError(f"diagonal_band_right_bound is {right}; expected 0 or more")
    if causal or bottom:
        if right:
            raise GraphError(
                f"a causal mask is set and diagonal_band_right_bound is {right}; expected 0"
            )
        right = 0
    if left is None and right is None:
        return None
    at_end = bottom or aligned is _Alignment.BOTTOM_RIGHT
    return {
        "left": None if left is None else left - 1,
        "right": right,
        "alignment": "bottom_right" if at_end else "top_left",
    }


def _padding(given: Mapping[str, Any], inputs: dict[str, Any]) -> bool:
    lengths = {name: given[name] for name in ("seq_len_q", "seq_len_kv")}
    missing = [name for name, one in lengths.items() if one is None]
    if given["use_padding_mask"] and missing:
        raise GraphError(
            f"use_padding_mask is set and {missing[0]} is None; it needs seq_len_q and seq_len_kv"
        )
    inputs.update(lengths)
    return len(missing) < 2


def _check_pages(tables: Mapping[str, Any], longest: Any, options: _Options) -> None:
    given = [name for name, one in tables.items() if one is not None]
    if given and "seq_len_kv" not in options.inputs:
        raise GraphError(
            f"{given[0]} is given and seq_len_kv is None; pages hold whole sequences only by their "
            f"lengths"
        )
    if longest is not None and not given:
        raise GraphError(
            f"paged_attention_max_seq_len_kv is {longest} and there are no page tables; it is the "
            f"longest sequence that they hold"
        )
