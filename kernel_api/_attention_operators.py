"""Attention with gradients: in eager mode, and as operators of torch for the graphs of
torch.compile and torch.export, ``torch.ops.kernel_api.sdpa`` and ``sdpa_backward``.

The operators take bounds of masks as numbers, and blocks as a table, and give out and lse. A third
one, ``state_of_now``, keeps the state of dropout for the backward pass.
Functions of scores and indices are nothing that a graph of torch holds: they break it, and so do
the other statistics of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_api import masks
from kernel_api._attention_launches import (
    GRADIENTS,
    READ,
    arguments_of_gradients,
    backward,
    empty_like,
    empty_lse,
    empty_out,
    forward,
)
from kernel_api._autograd import (
    changeable,
    check_outputs,
    differentiable_once,
    without_gradient,
)
from kernel_api._numbers import known_or_wide, python_number, whether
from kernel_api._results import results_type, serialize_all
from kernel_api._transforms import are_known, check_traced
from kernel_api.arguments import SdpaArguments
from kernel_api.arguments._attention_checks import instance_of
from kernel_api.arguments.attention import operands_of_score, score_of, values_of_functions
from kernel_api.arguments.dropout import Dropout
from kernel_api.arguments.sdpa import columns_in_keys
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand, as_torch, becomes_node

_Options = dict[str, Any]

_BESIDE_LSE = ("score_max", "score_sum_exp")
_WITHIN = "values_in_keys"
_Sdpa: Any = results_type("sdpa", ("out", "lse"))
_SdpaStatistics: Any = results_type("sdpa", ("out", "lse", *_BESIDE_LSE))
_WITHOUT_GRADIENT = ("alibi", "page_table", "descale_q", "descale_k", "descale_v")
_RESULTS: dict[tuple[str, ...], Any] = {
    names: results_type("sdpa_backward", names)
    for names in (GRADIENTS[:3], GRADIENTS[:4], (*GRADIENTS[:3], "dSink"), GRADIENTS)
}


def sdpa(Q: Any, K: Any, V: Any, out: Any, lse: Any, return_lse: bool, options: _Options) -> Any:
    """See :func:`kernel_api.ops.sdpa`."""
    wants_lse = return_lse or lse is True
    lse = None if isinstance(lse, bool) else lse
    if _WITHIN in options:
        V, options = _values_of(K, V, options)
    learns = torch.is_grad_enabled()
    if learns:
        _check_operands(options)
        check_outputs((("out", out), ("lse", lse), *_named(options, _BESIDE_LSE).items()))
    if learns and _need_gradient(Q, K, V, options):
        _check_outputs(out, lse)
        found = _learned(Q, K, V, options)
    elif becomes_node(Q):
        values = dict(zip(("out", "lse"), _traced(Q, K, V, options), strict=True))
        operands = {"Q": Q, "K": K, "V": V}
        found = (*_written(values, {"out": out, "lse": lse}, operands).values(),)
    else:
        found = forward(Q, K, V, out, lse, wants_lse, options)
    return _Sdpa(*found) if return_lse else found[0]


def _values_of(K: Any, V: Any, options: _Options) -> tuple[Any, _Options]:
    """V and the options, where values may be said to be columns of K: they are given as such, so
    gradients of K are those of both. A node says it again, as torch's compiler may compute keys,
    and their columns apart from them."""
    rest = {name: one for name, one in options.items() if name != _WITHIN}
    if options[_WITHIN] is None:
        return V, rest
    if not whether(_WITHIN, options[_WITHIN]):
        return V, {**rest, _WITHIN: False}
    K, V = as_torch(K, "K"), as_torch(V, "V")
    columns = K[..., : columns_in_keys(K, V)]
    return columns, {**rest, _WITHIN: True} if becomes_node(K) else rest


def sdpa_with_statistics(Q: Any, K: Any, V: Any, out: Any, lse: Any, options: _Options) -> Any:
    """The same where ``return_statistics`` is."""
    q = Q if isinstance(Q, torch.Tensor) else Operand(Q, "Q").tensor
    made = {name: options.get(name) for name in _BESIDE_LSE}
    made = {n: empty_lse(q, options) if one is None else one for n, one in made.items()}
    found = sdpa(Q, K, V, out, lse, True, {**options, **made})
    return _SdpaStatistics(*found, **made)


def _need_gradient(Q: Any, K: Any, V: Any, options: _Options) -> bool:
    for one in (Q, K, V, options.get("bias"), options.get("sink")):
        if one is not None and getattr(one, "requires_grad", False):
            return True
    return False


def _check_outputs(out: Any, lse: Any) -> None:
    """Raise where the gradient of an output would be lost."""
    for name, one in (("out", out), ("lse", lse)):
        if one is not None:
            raise ArgumentError(
                f"{name} is given and an operand needs a gradient; leave it to be allocated, or "
                f"call within torch.no_grad()"
            )


def _check_operands(options: _Options) -> None:
    """Raise where an operand has no gradient and needs one."""
    given = _named(options, _WITHOUT_GRADIENT)
    score = options.get("score_mod")
    operands = operands_of_score(options.get("score_operands")) or getattr(score, "operands", {})
    for name, one in operands.items():
        given[f"the operand {name} of score_mod"] = one
    for name, one in given.items():
        one = getattr(one, "tensor", one)
        if isinstance(one, torch.Tensor) and one.requires_grad:
            raise ArgumentError(f"{name} needs a gradient, and there is none; pass it detached")


def _named(options: _Options, names: tuple[str, ...]) -> _Options:
    return {name: one for name, one in options.items() if name in names}


def _learned(Q: Any, K: Any, V: Any, options: _Options) -> tuple[Any, Any]:
    if becomes_node(Q):
        return _traced(Q, K, V, options, learns=True)
    check_traced(Q=Q, K=K, V=V, bias=options.get("bias"), sink=options.get("sink"))
    rest = dict(options)
    if rest.get("score_mod") is not None:  # traced once: both passes are of one function
        rest["score_mod"] = score_of(rest["score_mod"], rest.pop("score_operands", None))
    tensors = (Q, K, V, rest.pop("bias", None), rest.pop("sink", None))
    return _Attention.apply(*tensors, rest)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    """In eager mode."""

    @staticmethod
    def forward(ctx: Any, Q: Any, K: Any, V: Any, bias: Any, sink: Any, options: _Options) -> Any:
        given = _present(bias=bias, sink=sink)
        out, lse = forward(Q, K, V, None, None, True, {**options, **given})
        ctx.save_for_backward(Q, K, V, out, lse, bias, sink)
        ctx.options = _kept(options)
        ctx.versions = _versions(ctx.options)
        ctx.mark_non_differentiable(lse)
        return changeable(out), lse

    @staticmethod
    @differentiable_once("attention")
    def backward(ctx: Any, saved: Any, dO: Any, _: Any) -> Any:
        Q, K, V, out, lse, bias, sink = saved
        _check_versions(ctx.options, ctx.versions)
        given = _present(bias=bias, sink=sink)
        wanted = dict(zip(("dBias", "dSink"), ctx.needs_input_grad[3:5], strict=True))
        found = _gradients(Q, K, V, out, lse, dO, {**ctx.options, **given}, wanted)
        return *found, None


def _present(**values: Any) -> _Options:
    return {name: value for name, value in values.items() if value is not None}


def _kept(options: _Options) -> _Options:
    """The options of the backward pass, whose dropout is that of now."""
    forward_alone = (*_BESIDE_LSE, _WITHIN)
    options = {name: one for name, one in options.items() if name not in forward_alone}
    dropout = options.get("dropout")
    if dropout is None or not dropout.tensors:
        return options
    state = [
        one.tensor.clone() if isinstance(one, Operand) else one
        for one in (dropout.seed, dropout.offset)
    ]
    return {**options, "dropout": Dropout(dropout.p, *state)}


def _versions(options: _Options) -> dict[str, int]:
    """How often each tensor beside the operands has been written."""
    return {name: one._version for name, one in _tensors_of(options) if not one.is_inference()}


def _check_versions(options: _Options, versions: dict[str, int]) -> None:
    """Raise as torch does of what it keeps itself."""
    for name, one in _tensors_of(options):
        if name in versions and one._version != versions[name]:
            raise RuntimeError(
                f"{name} is needed for the gradient of attention and has been modified by an "
                f"inplace operation: it is at version {one._version}, and was at {versions[name]}"
            )


def _tensors_of(options: _Options) -> list[tuple[str, Any]]:
    named = {
        **{name: getattr(one, "tensor", one) for name, one in options.items()},
        **values_of_functions(options.get("mask"), options.get("score_mod")),
    }
    return [(name, one) for name, one in named.items() if isinstance(one, torch.Tensor)]


def _gradients(
    Q: Any,
    K: Any,
    V: Any,
    out: Any,
    lse: Any,
    dO: Any,
    options: _Options,
    wanted: Mapping[str, bool],
) -> tuple[Any, ...]:
    """Those of Q, K, V, bias and sink; None of the latter two where they are not wanted."""
    options = dict(options)
    options.setdefault("deterministic", torch.are_deterministic_algorithms_enabled())
    # A gradient may be one number for all.
    dO = dO if dO.stride(-1) == 1 and 0 not in dO.stride() else dO.contiguous()
    written = {"dQ": None, "dK": None, "dV": None, **wanted}
    found = _computed((Q, K, V, out, dO, lse), written, options)
    return tuple(found[name] for name in GRADIENTS)


# Backward --------------------------------------------------------------------------------


def sdpa_backward(operands: tuple[Any, ...], written: _Options, options: _Options) -> Any:
    """See :func:`kernel_api.ops.sdpa_backward`."""
    for name in GRADIENTS[:3]:
        if written[name] is False:
            raise ArgumentError(
                f"{name} is False; dQ, dK and dV are always computed: pass a tensor, or None to "
                f"have it allocated"
            )
    check_outputs(written.items())
    found = _computed(operands, written, options)
    names = tuple(name for name in GRADIENTS if found[name] is not None)
    results = _RESULTS[names](*[found[name] for name in names])
    of_functions = (options.get("score_operands") or {}).values()
    given = (*operands, *written.values(), *options.values(), *of_functions)
    return without_gradient("sdpa_backward", results, given)


def _computed(operands: tuple[Any, ...], written: _Options, options: _Options) -> _Options:
    """Every gradient by name, None where it is not wanted."""
    compute = _traced_backward if becomes_node(operands[0]) else backward
    return compute(operands, written, options)


# Operators of torch ----------------------------------------------------------------------

_TENSORS = (
    "bias", "sink", "alibi", "seq_lens_q", "seq_lens_kv", "cu_seqlens_q", "cu_seqlens_kv",
    "page_table", "descale_q", "descale_k", "descale_v", "blocks", "seed_tensor", "offset_tensor",
)  # fmt: skip
_FLOATS = ("scale", "softcap", "dropout_p")
_INTEGERS = (
    "dropout_seed", "dropout_offset", "left", "right", "left_end", "right_end", "block_rows",
    "block_columns", "max_seqlen_q", "max_seqlen_kv",
)  # fmt: skip
_NAMES = (*_TENSORS, *_FLOATS, *_INTEGERS, "padding", _WITHIN)
_STATE = ("seed_tensor", "offset_tensor")
#: Outputs of one type alone.
_EXACT = ("lse", "dSink")
_WHY = "a graph of torch holds no function of scores or indices, and no score_max or score_sum_exp"

_OPTIONS = ", ".join(
    [f"Tensor? {name}" for name in _TENSORS]
    + [f"float? {name}" for name in _FLOATS]
    + [f"SymInt? {name}" for name in _INTEGERS]
    + ["bool padding", f"bool? {_WITHIN}"]
)
_FORWARD = f"(Tensor Q, Tensor K, Tensor V, {_OPTIONS}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor Q, Tensor K, Tensor V, Tensor out, Tensor dO, Tensor lse, bool deterministic, "
    f"bool dBias, bool dSink, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _traced(Q: Any, K: Any, V: Any, options: _Options, learns: bool = False) -> tuple[Any, Any]:
    """(out, lse) in a graph."""
    check_traced(Q=Q, K=K, V=V)
    _check_objects(options)
    if _is_outside(options) and torch.compiler.is_dynamo_compiling():
        found = _outside(Q, K, V, options)
    else:
        packed = _packed(options)
        if learns:
            packed = [
                _state_of_now(one) if name in _STATE and one is not None else one
                for name, one in zip(_NAMES, packed, strict=True)
            ]
        found = _operator(Q, K, V, *packed)
    return found  # type: ignore[no-any-return]


def _traced_backward(operands: tuple[Any, ...], written: _Options, options: _Options) -> _Options:
    check_traced(**dict(zip(READ, operands, strict=True)))
    _check_objects(options)
    if _is_outside(options) and torch.compiler.is_dynamo_compiling():
        return _outside_backward(operands, written, options)  # type: ignore[no-any-return]
    packed = _packed({name: one for name, one in options.items() if name != "deterministic"})
    if not torch.compiler.is_dynamo_compiling() and are_known((*operands, *packed)):
        arguments_of_gradients(operands, written, options)  # raises what the call would
    deterministic = whether("deterministic", options.get("deterministic", False))
    left_out = [n for n in GRADIENTS[3:] if written[n] is None or written[n] is False]
    wanted = [name not in left_out for name in GRADIENTS[3:]]
    given = _backward_operator(*operands, deterministic, *wanted, *packed)
    values = {n: one for n, one in zip(GRADIENTS, given, strict=True) if n not in left_out}
    named = dict(zip(READ, operands, strict=True))
    return {**dict.fromkeys(left_out), **_written(values, written, named)}


def _written(values: _Options, given: _Options, operands: _Options) -> _Options:
    """Outputs by name, in the tensors that are given for them; these are checked as arguments
    are, which a graph has none of."""
    targets = {n: given[n] for n in values if given[n] is not None and given[n] is not True}
    for name, target in targets.items():
        _check_target(name, target, values[name])
        for other, one in {**operands, **targets}.items():
            if other != name and one is target:
                raise ArgumentError(f"{name} and {other} are one tensor; {name} is written")
    found = dict(values)
    for name, target in targets.items():
        found[name] = target.copy_(values[name].view(target.shape))
    return found


def _check_target(name: str, target: Any, value: Any) -> None:
    if not isinstance(target, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(target).__name__}; expected a torch tensor")
    if name in _EXACT:
        fits, expected = target.dtype is value.dtype, value.dtype
    else:
        fits = target.dtype.is_floating_point and target.dtype.itemsize > 1
        expected = "a floating type of 16 bits or more"
    if not fits:
        raise ArgumentError(f"{name} is {target.dtype}; expected {expected}")
    shape, own = tuple(value.shape), tuple(target.shape)
    lacking = len(shape) - len(own) if name == "dBias" else 0
    if (1,) * lacking + own != shape:
        raise ArgumentError(f"{name} has shape {own}; expected {shape}")
    if target.device != value.device:
        raise ArgumentError(f"{name} is on {target.device}; expected {value.device}")


def _check_objects(options: _Options) -> None:
    """Raise as arguments do, which come later, for what is taken apart before."""
    instance_of("mask", options.get("mask"), masks.Mask)
    instance_of("dropout", options.get("dropout"), Dropout)


def _is_outside(options: _Options) -> bool:
    for name in ("score_mod", "score_operands", *_BESIDE_LSE):
        if options.get(name) is not None:
            return True
    mask = options.get("mask")
    return mask is not None and len(mask.functions) > 0


def _untraced(Q: Any, K: Any, V: Any, options: _Options) -> tuple[Any, Any]:
    if torch.is_grad_enabled() and _need_gradient(Q, K, V, options):
        return _learned(Q, K, V, options)
    return forward(Q, K, V, None, None, True, options)


_outside: Callable[..., Any] = torch.compiler.disable(_untraced, reason=_WHY)  # type: ignore[no-untyped-call]
_outside_backward: Callable[..., Any] = torch.compiler.disable(backward, reason=_WHY)  # type: ignore[no-untyped-call]


def _packed(options: _Options) -> list[Any]:
    """Options in the order of the operators' parameters."""
    if _is_outside(options):
        raise ArgumentError(f"{_WHY}; call it outside of torch.export")
    known = {name: options[name] for name in _NAMES if name in options}
    mask, dropout = options.get("mask"), options.get("dropout")
    known["padding"] = False
    if mask is not None:
        known.update(mask.bounds)
        known["padding"] = mask.is_padding
        if mask.blocks is not None:
            known["blocks"] = mask.blocks.table.tensor
            known["block_rows"], known["block_columns"] = mask.blocks.block_shape
    if dropout is not None:
        known["dropout_p"] = dropout.p
        for name, one in (("seed", dropout.seed), ("offset", dropout.offset)):
            if isinstance(one, Operand):
                known[f"{name}_tensor"] = one.tensor
            else:
                known[f"dropout_{name}"] = one
    for name in _INTEGERS:
        known[name] = python_number(known.get(name))
    for name in _FLOATS:
        known[name] = known_or_wide(known.get(name))
        if isinstance(known[name], int):
            known[name] = float(known[name])
    return [known.get(name) for name in _NAMES]


def _unpacked(values: tuple[Any, ...]) -> _Options:
    """Inverse of :func:`_packed`."""
    known = {n: one for n, one in zip(_NAMES, values, strict=True) if one is not None}
    parts: list[masks.Mask] = []
    for alignment, names in masks.BOUNDS.items():
        left, right = (known.pop(name, None) for name in names)
        if left is not None or right is not None:
            parts.append(masks.SlidingWindow(left, right, alignment))
    if known.pop("padding"):
        parts.append(masks.Padding())
    shape = known.pop("block_rows", 0), known.pop("block_columns", 0)
    if "blocks" in known:
        parts.append(masks.BlockSparse(known.pop("blocks"), shape))
    if parts:
        known["mask"] = masks.all_of(parts)
    p = known.pop("dropout_p", None)
    state = [
        known.pop(f"{name}_tensor", known.pop(f"dropout_{name}", 0)) for name in ("seed", "offset")
    ]
    if p is not None:
        known["dropout"] = Dropout(p, *state)
    return known


def _without_columns(options: _Options) -> _Options:
    """Without what is said of values to the forward pass alone, and not to arguments."""
    return {name: one for name, one in options.items() if name != _WITHIN}


@torch.library.custom_op("kernel_api::state_of_now", mutates_args=())
def _state_of_now(state: torch.Tensor) -> torch.Tensor:
    """A copy of dropout's seed or offset for the backward pass. torch's compiler would make a plain
    clone only there, of what the tensor has then."""
    return state.clone()


@_state_of_now.register_fake
def _(state: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(state)


@torch.library.custom_op("kernel_api::sdpa", mutates_args=(), schema=_FORWARD)
def _operator(Q: Any, K: Any, V: Any, *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = _unpacked(values)
    if _WITHIN in options:
        V, options = _values_of(K, V, options)
    return forward(Q, K, V, None, None, True, options)


@_operator.register_fake
def _(Q: Any, K: Any, V: Any, *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    packed = {"cu_seqlens_q": values[_NAMES.index("cu_seqlens_q")]}
    found = empty_out(Q, V), empty_lse(Q, packed)
    if are_known((Q, K, V, *values)):  # raises what the call would
        SdpaArguments(Q, K, V, *found, **_without_columns(_unpacked(values)))
    return found


@torch.library.custom_op("kernel_api::sdpa_backward", mutates_args=(), schema=_BACKWARD)
def _backward_operator(
    Q: Any,
    K: Any,
    V: Any,
    out: Any,
    dO: Any,
    lse: Any,
    deterministic: bool,
    dBias: bool,
    dSink: bool,
    *values: Any,
) -> tuple[torch.Tensor, ...]:
    options = {**_without_columns(_unpacked(values)), "deterministic": deterministic}
    wanted = {"dBias": dBias, "dSink": dSink}
    found = _gradients(Q, K, V, out, lse, dO, options, wanted)
    return tuple(Q.new_empty(0) if one is None else one for one in found)


@_backward_operator.register_fake
def _(
    Q: Any,
    K: Any,
    V: Any,
    out: Any,
    dO: Any,
    lse: Any,
    deterministic: bool,
    dBias: bool,
    dSink: bool,
    *values: Any,
) -> tuple[torch.Tensor, ...]:
    # What has no gradient is not refused here: autograd asks while it traces the forward pass.
    found = [empty_like(one, one.shape) for one in (Q, K, V)]
    for wanted, one in ((dBias, values[0]), (dSink, values[1])):
        found.append(one.new_empty(one.shape) if wanted and one is not None else Q.new_empty(0))
    return tuple(found)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    tensors = inputs[: 3 + len(_TENSORS)]
    ctx.save_for_backward(*output, *tensors)
    ctx.numbers = inputs[3 + len(_TENSORS) :]
    ctx.mark_non_differentiable(output[1])


def _operator_backward(ctx: Any, dO: Any, _: Any) -> Any:
    out, lse, Q, K, V, *others = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3:5]
    deterministic = torch.are_deterministic_algorithms_enabled()
    values = (*others, *ctx.numbers)
    found = _backward_operator(Q, K, V, out, dO, lse, deterministic, *wanted, *values)
    asked = ctx.needs_input_grad[:5]
    gradients = [one if needed else None for one, needed in zip(found, asked, strict=True)]
    return *gradients, *(None for _ in range(len(_NAMES) - 2))


_operator.register_autograd(_operator_backward, setup_context=_keep)
serialize_all()
