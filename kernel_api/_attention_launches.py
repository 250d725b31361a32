"""Launches of attention, found again by what a call looks like, as those of products are (see
:mod:`kernel_api._launches`).

Scale, softcap, dropout and the operands of masks and functions of scores may be new in every call;
bounds of masks, and what functions compute, are part of how it looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from kernel_api import _compile_cache, _locks, provider
from kernel_api._apart import Pair, are_apart, pairs_apart
from kernel_api._launches import NEVER_NEGATIVE, TENSORS, run_best
from kernel_api._made import maker
from kernel_api._overwritten import teller
from kernel_api._readers import Reader, reader_of
from kernel_api._score import ScoreFunction
from kernel_api._settings import raw_setting
from kernel_api.arguments import SdpaArguments, SdpaBackwardArguments
from kernel_api.arguments._attention_checks import LARGEST, LEAST
from kernel_api.arguments.attention import (
    AttentionArguments,
    like_scores,
    score_of,
    values_of_functions,
)
from kernel_api.arguments.dropout import Dropout
from kernel_api.errors import ArgumentError, KernelApiError
from kernel_api.kernel import LauncherInOrder
from kernel_api.masks import BlockSparse, Mask, MaskMod
from kernel_api.operands import MAX_ALIGNMENT, Operand
from kernel_api.provider import PROVIDERS

_KEPT = 1024
_LOW_BITS = MAX_ALIGNMENT - 1
_tell = teller()
_LSE_KINDS = {torch.float64: torch.float64}
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_NUMBERS = ("scale", "softcap")
_COUNTS = ("max_seqlen_q", "max_seqlen_kv")

#: What a backward pass reads, and what it writes: the last two where they are asked for.
READ = ("Q", "K", "V", "out", "dO", "lse")
GRADIENTS = ("dQ", "dK", "dV", "dBias", "dSink")

#: What makes of an option the value that a launcher takes, where it is not the option itself.
_MADE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(_COUNTS, int),
    "bias": like_scores,
}

_Key = tuple[Any, ...]


class _Sources(NamedTuple):
    """Where values that a launcher takes come from.

    Attributes:
        constants: Those that are the same in all such calls.
        given: Names of those that are options of the call.
        has_functions: Whether the mask has a table or operands, or there is a function of scores.
    """

    constants: dict[str, Any]
    given: tuple[str, ...]
    has_functions: bool

    def values(self, options: dict[str, Any]) -> dict[str, Any]:
        """They, for a call with such options, without outputs."""
        values = {name: options[name] for name in self.given}
        if self.has_functions:
            values.update(values_of_functions(options.get("mask"), options.get("score_mod")))
        for name in values.keys() & _MADE.keys():
            values[name] = _MADE[name](values[name])
        values.update(self.constants)
        if options.get("dropout") is not None:
            values.update(options["dropout"].values)
        return values


class _Launch(NamedTuple):
    """What is done for a call.

    Attributes:
        launcher: Of the kernel, on tensors of these sizes, in order.
        in_order: What reads its values by their names.
        sources: Where these come from.
        makers: Of outputs that the call does not give.
        apart: Of the tensors, in the order of the call's look, those that may not share memory.
        written: Which of them are outputs.
    """

    launcher: LauncherInOrder
    in_order: Reader
    sources: _Sources
    makers: dict[str, Callable[[], Any]]
    apart: list[Pair]
    written: tuple[int, ...]


_launches: dict[_Key, _Launch] = {}
_lock = _locks.lock()


def forward(
    Q: Any, K: Any, V: Any, out: Any, lse: Any, with_lse: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """(out, lse), written; lse is None where it is neither given nor wanted."""
    options = _with_function(options)
    try:
        key, tensors, addresses = _look(Q, K, V, out, lse, with_lse, options)
        launch = _launches.get(key)
    except (AttributeError, OverflowError, RuntimeError, TypeError):  # not looked at, or no hash
        key, launch = None, None
    if launch is not None and are_apart(addresses, launch.apart):
        values = launch.sources.values(options)
        out = launch.makers["out"]() if out is None else out
        if with_lse or lse is not None:
            values["lse"] = lse = launch.makers["lse"]() if lse is None else lse
        launch.launcher((Q, K, V, out), launch.in_order(values))
        if launch.written:
            _tell([tensors[place] for place in launch.written])
        return out, lse
    return _first(Q, K, V, out, lse, with_lse, options, None if key is None else (key, tensors))


def _look(
    Q: Any, K: Any, V: Any, out: Any, lse: Any, with_lse: bool, options: dict[str, Any]
) -> tuple[_Key, list[Any], list[int]]:
    """What the call looks like, its tensors in their order and their addresses; raises TypeError
    for what is not looked at."""
    if type(Q) not in TENSORS or type(K) not in TENSORS or type(V) not in TENSORS:
        raise TypeError
    if forward_ad._current_level >= 0:
        raise TypeError
    if Q.dtype is not NEVER_NEGATIVE and (Q.is_neg() or K.is_neg() or V.is_neg()):
        raise TypeError
    # Written out: this is most of what a call costs.
    tensors = [Q, K, V]
    key: _Key = (
        provider._generation, raw_setting(PROVIDERS), _compile_cache._era, with_lse,
        Q.dtype, Q.shape, Q.stride(), Q.device,
        K.dtype, K.shape, K.stride(), K.device,
        V.dtype, V.shape, V.stride(), V.device,
    )  # fmt: skip
    for one in (out, lse):
        if one is not None:
            key += _tensor(one, tensors)
        else:
            key += (None,)
    for name, value in options.items():
        key += (name, *_option(name, value, tensors))
    return _placed(key, tensors)


def _placed(key: _Key, tensors: list[Any]) -> tuple[_Key, list[Any], list[int]]:
    """What a call looks like, its tensors, of which the second and third are K and V, and their
    addresses."""
    addresses, joined = [], 0
    for tensor in tensors:
        address = tensor.data_ptr()
        if not address:  # empty, or freed
            raise TypeError
        addresses.append(address)
        joined |= address
    if addresses[1] == addresses[2]:
        key += (True,)  # of arguments, `values_in_keys`
    if joined & _LOW_BITS:  # else all are as aligned as any kernel asks
        key += (tuple([each & -each & _LOW_BITS for each in addresses]),)
    return key, tensors, addresses


def _with_function(options: dict[str, Any]) -> dict[str, Any]:
    """The function of scores traced, with its operands."""
    if options.get("score_mod") is None:
        return options
    function = score_of(options["score_mod"], options.get("score_operands"))
    return {**options, "score_mod": function, "score_operands": None}


def _tensor(value: Any, tensors: list[Any]) -> tuple[Any, ...]:
    if type(value) not in TENSORS:
        raise TypeError
    if value.dtype is not NEVER_NEGATIVE and value.is_neg():
        raise TypeError
    tensors.append(value)
    return value.dtype, value.shape, value.stride(), value.device


def _mask(mask: Any, tensors: list[Any]) -> tuple[Any, ...]:
    if not isinstance(mask, Mask):
        raise TypeError
    if mask.is_band:
        return (mask,)
    found: tuple[Any, ...] = ()
    for part in mask.parts:
        if isinstance(part, MaskMod):
            found += _function(part.function, tensors)
        elif isinstance(part, BlockSparse):
            found += part.block_shape, *_tensor(part.table.tensor, tensors)
        else:
            found += (part,)
    return found


def _function(function: ScoreFunction, tensors: list[Any]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = (function.graph.identity,)
    for name, value in function.operands.items():
        look = _tensor(value.tensor, tensors) if isinstance(value, Operand) else (type(value),)
        found += name, *look
    return found


def _option(name: str, value: Any, tensors: list[Any]) -> tuple[Any, ...]:
    if value is None:
        return (None,)
    if name in ("scale", "softcap"):  # kernels take positive ones alone
        if type(value) not in (int, float):
            raise TypeError
        held = not value or 1 / LARGEST <= abs(value) <= LARGEST
        return math.isfinite(value), value >= LEAST, held
    if name == "mask":
        return _mask(value, tensors)
    if name == "score_mod":
        return _function(value, tensors)
    if name == "dropout":
        if type(value) is not Dropout:
            raise TypeError
        found: tuple[Any, ...] = ()
        for one in (value.seed, value.offset):
            found += _tensor(one.tensor, tensors) if isinstance(one, Operand) else (None,)
        return found
    if name in _COUNTS:
        return type(value), value
    if name == "deterministic" and type(value) is bool:
        return (value,)
    return _tensor(value, tensors)


# Calls that look like none before ----------------------------------------------------------


def _first(
    Q: Any,
    K: Any,
    V: Any,
    out: Any,
    lse: Any,
    with_lse: bool,
    options: dict[str, Any],
    look: tuple[_Key, list[Any]] | None,
) -> tuple[Any, Any]:
    """look: What the call looks like, and its tensors; None: that is not asked."""
    q, k, v = (Operand(one, name).tensor for one, name in ((Q, "Q"), (K, "K"), (V, "V")))
    made_out = _out_maker(q, v)() if out is None else out
    made_lse = empty_lse(q, options) if lse is None and with_lse else lse
    args = SdpaArguments(q, k, v, made_out, made_lse, **options)
    kernel, artifact = run_best(args)
    if look is not None and look[0] not in _launches and args.writes_anything:
        taken = kernel._launch_operands(args)
        sources = _sources(args, taken, options)
        if sources is not None:
            launcher = kernel._launcher_in_order(args, artifact), reader_of(tuple(taken))
            makers = {"out": _out_maker(Q, V), "lse": _lse_maker(Q, args)}
            outputs = [options[n] for n in args.output_names if options.get(n) is not None]
            _remember(look, (*launcher, sources, makers), (out, lse, *outputs))
    return made_out, made_lse


def _sources(
    args: AttentionArguments,
    taken: dict[str, Any],
    options: dict[str, Any],
    outputs: Sequence[str] = ("lse",),
) -> _Sources | None:
    """Of what the launcher takes by name; None where it cannot be told.

    Args:
        outputs: What it may take by name and write.
    """
    functions = values_of_functions(args.mask, args.score)
    state = {} if args.dropout is None else args.dropout.values
    constants: dict[str, Any] = {}
    given: list[str] = []
    known = args.launch_values
    for name, value in taken.items():
        if name not in known:
            return None
        if options.get(name) is not None:
            given.append(name)
        elif name not in outputs and name not in state and name not in functions:
            if not isinstance(value, (int, float)):
                return None
            constants[name] = value
    needed = (*state, *[name for name in outputs if name in known])
    if any(name not in taken for name in needed):
        return None
    return _Sources(constants, tuple(given), bool(functions))


def _remember(
    look: tuple[_Key, list[Any]],
    launch: tuple[LauncherInOrder, Reader, _Sources, dict[str, Callable[[], Any]]],
    outputs: Sequence[Any],
) -> None:
    """outputs: As they were given."""
    key, tensors = look
    written = {id(one) for one in outputs}
    places = tuple([place for place, one in enumerate(tensors) if id(one) in written])
    spans = {str(place): Operand(one).span for place, one in enumerate(tensors)}
    found = _Launch(*launch, pairs_apart(spans, map(str, places)), places)
    with _lock:
        if len(_launches) >= _KEPT:
            _launches.clear()
        _launches[key] = found


def _out_maker(Q: Any, V: Any) -> Callable[[], Any]:
    return maker(empty_out(Q, V, device="meta"), Q.device)


def _lse_maker(Q: Any, args: SdpaArguments) -> Callable[[], Any]:
    packed = {"cu_seqlens_q": True} if args.is_packed else {}
    return maker(empty_lse(Q, packed))


# Gradients -------------------------------------------------------------------------------


def backward(
    operands: tuple[Any, ...], written: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Every gradient by name, written; None where it is not wanted.

    Args:
        operands: Q, K, V, out, dO and lse.
        written: Where each gradient goes: True, or of the first three None, has it allocated; None
            or False of the others is not wanted.
    """
    given = options
    try:
        options = _with_function(given)
        key, tensors, addresses = _look_backward(operands, written, options)
        launch = _launches.get(key)
    except KernelApiError:  # arguments may have more to say
        return _first_backward(operands, written, given, None)
    except (AttributeError, OverflowError, RuntimeError, TypeError):  # not looked at, or no hash
        key, launch = None, None
    if launch is None or not are_apart(addresses, launch.apart):
        look = None if key is None else (key, tensors)
        return _first_backward(operands, written, options, look)
    found = {name: None if one is False else one for name, one in written.items()}
    found.update((name, make()) for name, make in launch.makers.items())
    values = launch.sources.values(options) | _beside(found)
    launch.launcher((*operands, *_of_operands(found)), launch.in_order(values))
    if launch.written:
        _tell([tensors[place] for place in launch.written])
    return found


def _look_backward(
    operands: tuple[Any, ...], written: dict[str, Any], options: dict[str, Any]
) -> tuple[_Key, list[Any], list[int]]:
    """As :func:`_look`."""
    if forward_ad._current_level >= 0:
        raise TypeError
    tensors: list[Any] = []
    key: _Key = (provider._generation, raw_setting(PROVIDERS), _compile_cache._era, "backward")
    for one in operands:
        key += _tensor(one, tensors)
    for name in GRADIENTS:
        one = written[name]
        key += (one,) if one is None or type(one) is bool else _tensor(one, tensors)
    for name, value in options.items():
        key += (name, *_option(name, value, tensors))
    return _placed(key, tensors)


def _first_backward(
    operands: tuple[Any, ...],
    written: dict[str, Any],
    options: dict[str, Any],
    look: tuple[_Key, list[Any]] | None,
) -> dict[str, Any]:
    args, found = arguments_of_gradients(operands, written, options)
    kernel, artifact = run_best(args)
    if look is None or look[0] in _launches or not args.writes_anything:
        return found
    taken = kernel._launch_operands(args)
    sources = _sources(args, taken, options, GRADIENTS[3:])
    if sources is None or not _are_same(sources.values(options) | _beside(found), taken):
        return found
    launcher = kernel._launcher_in_order(args, artifact), reader_of(tuple(taken))
    given = {name: one for name, one in written.items() if isinstance(one, torch.Tensor)}
    makers = {
        name: maker(one) for name, one in found.items() if one is not None and name not in given
    }
    _remember(look, (*launcher, sources, makers), (*given.values(),))
    return found


def arguments_of_gradients(
    operands: tuple[Any, ...], written: dict[str, Any], options: dict[str, Any]
) -> tuple[SdpaBackwardArguments, dict[str, Any]]:
    """Of a backward pass, with its gradients by name."""
    given = zip(operands, READ, strict=True)
    tensors: dict[str, Any] = {
        n: None if one is None else Operand(one, n).tensor for one, n in given
    }
    sources = {**tensors, "Bias": options.get("bias"), "Sink": options.get("sink")}
    found: dict[str, Any] = {n: _target(n, written, sources[n[1:]]) for n in GRADIENTS}
    return SdpaBackwardArguments(**tensors, **found, **options), found


def _target(name: str, written: Mapping[str, Any], source: Any) -> Any:
    """What a gradient is written to."""
    given = written[name]
    if isinstance(given, bool) or given is None:
        if given is False or (given is None and name in GRADIENTS[3:]):
            return None
        if source is None:
            raise ArgumentError(f"{name} is asked for and {name[1:].lower()} is None")
        if name in GRADIENTS[3:]:
            return torch.empty(source.shape, dtype=source.dtype, device=source.device)
        return maker(empty_like(source, source.shape, device="meta"), source.device)()
    return given


def _of_operands(found: Mapping[str, Any]) -> list[Any]:
    """Gradients that a launch takes by place."""
    return [found[name] for name in GRADIENTS[:3]]


def _beside(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those that it takes by name."""
    values = {name: found[name] for name in GRADIENTS[3:] if found[name] is not None}
    if "dBias" in values:
        values["dBias"] = like_scores(values["dBias"])
    return values


def _are_same(values: dict[str, Any], taken: dict[str, Any]) -> bool:
    """Whether values are what a launch took: the same numbers, and the same memory."""

    def look(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return one.data_ptr(), one.dtype, one.shape, one.stride()
        return type(one), one

    return all(name in values and look(values[name]) == look(one) for name, one in taken.items())


# Outputs ---------------------------------------------------------------------------------


def empty_out(Q: Any, V: Any, device: Any = None) -> Any:
    """In the type of Q, with the modes in memory in the order of those of Q."""
    element = torch.bfloat16 if Q.dtype in _EIGHT_BITS else Q.dtype
    shape = (*Q.shape[:-1], *V.shape[-1:])
    return empty_like(Q, shape, element, device)


def empty_like(tensor: Any, shape: tuple[int, ...], element: Any = None, device: Any = None) -> Any:
    """Of a shape, without gaps, with the modes in memory in the order of those of a tensor, the
    last one side by side."""
    if not shape:
        raise ArgumentError("an operand has shape (); expected (B, H, S, D), or packed (T, H, D)")
    stride = tensor.stride()
    order = sorted(range(len(shape) - 1), key=lambda mode: -stride[mode])
    places = [*order, len(shape) - 1]
    whole = tensor.new_empty([shape[mode] for mode in places], dtype=element, device=device)
    return whole.permute([places.index(mode) for mode in range(len(shape))])


def empty_lse(Q: Any, options: dict[str, Any]) -> Any:
    """(B, H, S_q), or packed (H, T)."""
    if Q.dim() not in (3, 4):
        raise ArgumentError(f"Q has shape {tuple(Q.shape)}; expected (B, H, S_q, D), or (T, H, D)")
    packed = options.get("cu_seqlens_q") is not None
    shape = (Q.shape[1], Q.shape[0]) if packed else Q.shape[:3]
    return Q.new_empty(shape, dtype=_LSE_KINDS.get(Q.dtype, torch.float32))
