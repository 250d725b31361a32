"""The layer of experts with gradients, see :func:`kernel_api.nn.moe`.

Pairs of a token and one of its k choices are sorted by expert on the device, and nobody waits for
their sizes. Then a layer is a copy of rows to where their groups lie, two products of
groups and a sum of rows. The first product multiplies its results with the weights of the pairs.
Pairs without an expert are sorted behind all groups: nothing reads or writes their rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from kernel_api import _again, _float32, ops
from kernel_api._autocast import cast
from kernel_api._autograd import differentiable_once, zeros
from kernel_api._launches import is_read_by_dynamo
from kernel_api._moe_8_bits import both_of_8_bits
from kernel_api._moe_8_bits import check as check_8_bits
from kernel_api._moe_8_bits import moe as moe_of_8_bits
from kernel_api._moe_routing import Routing
from kernel_api.arguments import ScaledOperand
from kernel_api.errors import ArgumentError, GradientError
from kernel_api.fusions._glu import check_halves, checked_pairs
from kernel_api.operands import becomes_node, require_one_device, require_tensors

__all__ = ["moe"]

#: Integers without a sign that torch only stores.
_STORED = (torch.uint16, torch.uint32, torch.uint64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, *_STORED)


def moe(
    x: torch.Tensor,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    w_up: torch.Tensor | ScaledOperand,
    w_down: torch.Tensor | ScaledOperand,
    *,
    kind: str = "swiglu",
    order: str = "gate_up",
    granularity: int | str = "halves",
) -> torch.Tensor:
    """Σ over k of expert_weight · (glu(x · w_up[e]) · w_down[e]) with e = expert_index, (T, K), of
    x's element type; int32 or bfloat16 where that has 8 bits.

    Args:
        x: Tokens (T, K).
        expert_index: Integers (T, k). From 0 to E - 1 they name experts; any other, such as -1 or
            E, says that the pair has none: it adds nothing, and its weight has a gradient of zero.
        expert_weight: (T, k).
        w_up: (E, K, 2I), gate and up paired along 2I as ``order`` and ``granularity`` say.
        w_down: (E, I, K). Weights may have any strides; stored as torch.nn.Linear does, (E, 2I, K)
            and (E, K, I), they are passed as ``w_up.mT`` and ``w_down.mT``.
        kind, order, granularity: See :func:`kernel_api.fusions.gemm_glu`.

    Weights may both be a :class:`~kernel_api.ScaledOperand` of 8-bit floats or int8, w_up (E, K,
    2I) with a scale per expert (E,) or column (E, 2I), w_down (E, I, K) the same; or of 8-bit
    floats for each block of 128 x 128, where what is multiplied with has columns in whole blocks.
    Then tokens, and what the first product makes of them, are quantised: whole rows, in the type of
    8 bits that the expert has (of floats float8_e4m3fn), or for experts in blocks, blocks of 128
    columns (DeepSeek-V3 technical report, section 3.3). There are no gradients. Kernels take such
    weights stored as torch.nn.Linear does, of floats with K and I in multiples of 16.

    Nothing waits for the device, so a CUDA graph can hold the layer, and equal inputs give equal
    results; but for other weights of 8 bits, float64, and float32 unless it may be multiplied as
    tf32 (by ``torch.set_float32_matmul_precision("high")``), there is only the reference, which
    does wait.
    All gradients but that of ``expert_index`` are there, as far as they are asked for.

    Raises:
        ArgumentError: operands or options contradict each other.
        GradientError: weights have 8 bits, and a gradient is asked for.
        NoKernelError: no kernel takes the operands; says why.
    """
    given = x, expert_index, expert_weight, w_up, w_down
    options = kind, order, granularity
    is_read = is_read_by_dynamo()
    is_cast = is_read or torch._C._is_any_autocast_enabled()
    if is_cast:
        _check(*given, *options)
        given = _cast(*given)
    read = *given[:3], *_tensors(given[3]), *_tensors(given[4])
    learns = _learns(*given)
    is_node = is_read or becomes_node(x)
    key = None if is_node else _key(read, learns, given, options)
    if not (is_cast or _again.is_known(key)):
        _check(*given, *options)
    if isinstance(w_up, ScaledOperand):
        if learns:
            raise GradientError(
                "experts of 8 bits have no gradients; call the layer within torch.no_grad(), or "
                "pass weights of 16 bits"
            )
    elif is_node:
        return _traced(*given, _function(*options), learns)
    elif learns:
        y: torch.Tensor = _Moe.apply(  # type: ignore[no-untyped-call]
            *given, _function(*options), key
        )
        return y
    found: torch.Tensor = _again.as_one(key, read, lambda: _computed(*given, _function(*options)))
    return found


def _computed(
    x: Any, expert_index: Any, expert_weight: Any, w_up: Any, w_down: Any, function: Function
) -> torch.Tensor:
    """Of checked operands, without gradients."""
    if isinstance(w_up, ScaledOperand):
        return moe_of_8_bits(x, expert_index, expert_weight, w_up, w_down, **function._asdict())
    routing = Routing.of(expert_index, expert_weight, w_up.shape[0])
    return routing.summed(_hidden(x, routing, w_up, function), w_down)


# Which call it is ------------------------------------------------------------------------


def _cast(x: Any, expert_index: Any, expert_weight: Any, w_up: Any, w_down: Any) -> tuple[Any, ...]:
    """As autocast asks."""
    if not isinstance(w_up, ScaledOperand):
        x, w_up, w_down = cast(x, w_up, w_down)
    return x, expert_index, expert_weight, w_up, w_down


def _tensors(experts: Any) -> tuple[Any, ...]:
    if isinstance(experts, ScaledOperand):
        return experts.tensor, experts.scale.tensor
    return (experts,)


def _learns(x: Any, expert_index: Any, expert_weight: Any, w_up: Any, w_down: Any) -> bool:
    """Whether gradients are asked for."""
    if not torch.is_grad_enabled():
        return False
    read = x, expert_weight, _tensors(w_up)[-1], _tensors(w_down)[-1]
    return any(getattr(one, "requires_grad", False) for one in read)


def _key(read: Any, learns: bool, given: Any, options: Any) -> Any:
    """What the call looks like; None: it is not looked at."""
    if any(type(option) not in (str, int) for option in options):
        return None
    modes = [one.mode if isinstance(one, ScaledOperand) else None for one in given[3:]]
    return _again.look(read, "nn.moe", learns, *options, *modes, _float32.setting())


def _function(kind: str, order: str, granularity: int | str) -> Function:
    return Function(kind, order, checked_pairs(kind, order, granularity))


# What is checked -------------------------------------------------------------------------


def _check(
    x: Any, expert_index: Any, expert_weight: Any, w_up: Any, w_down: Any, *options: Any
) -> None:
    function = _function(*options)
    has_8_bits = isinstance(w_up, ScaledOperand) or isinstance(w_down, ScaledOperand)
    up, down = both_of_8_bits(w_up, w_down) if has_8_bits else (w_up, w_down)
    stored = {"w_up": _tensors(up)[0], "w_down": _tensors(down)[0]}
    given = {"x": x, "expert_index": expert_index, "expert_weight": expert_weight, **stored}
    require_tensors(**given)
    require_one_device(**given)
    _check_tokens(x, expert_index, expert_weight)
    _check_weights(x, **stored)
    check_halves("w_up has 2I", w_up.shape[2], function.granularity)
    if has_8_bits:
        check_8_bits(x, up, down)


def _check_tokens(x: Any, expert_index: Any, expert_weight: Any) -> None:
    if x.dim() != 2 or expert_index.dim() != 2 or x.shape[0] != expert_index.shape[0]:
        raise ArgumentError(
            f"x has shape {tuple(x.shape)} and expert_index {tuple(expert_index.shape)}; expected "
            f"(T, K) and (T, k)"
        )
    if expert_index.dtype not in _INTEGERS:
        raise ArgumentError(f"expert_index is {expert_index.dtype}; expected integers")
    if not expert_index.shape[1]:
        raise ArgumentError(
            f"expert_index has shape {tuple(expert_index.shape)}; expected at least one expert per "
            f"token"
        )
    if expert_weight.dtype.is_complex or expert_weight.dtype in _STORED:
        raise ArgumentError(f"expert_weight is {expert_weight.dtype}; expected a floating type")
    if expert_weight.shape != expert_index.shape:
        raise ArgumentError(
            f"expert_weight has shape {tuple(expert_weight.shape)}; expected "
            f"{tuple(expert_index.shape)}, that of expert_index"
        )


def _check_weights(x: Any, w_up: Any, w_down: Any) -> None:
    if w_up.dim() != 3 or w_up.shape[1] != x.shape[1] or w_up.shape[2] % 2:
        raise ArgumentError(
            f"w_up has shape {tuple(w_up.shape)}; expected (E, {x.shape[1]}, 2I), the columns of x "
            f"by pairs"
        )
    if not w_up.shape[0]:
        raise ArgumentError(
            f"w_up has shape {tuple(w_up.shape)}; expected the matrix of at least one expert"
        )
    expected = (w_up.shape[0], w_up.shape[2] // 2, x.shape[1])
    if w_down.shape != expected:
        raise ArgumentError(
            f"w_down has shape {tuple(w_down.shape)}; expected {expected}, because w_up has shape "
            f"{tuple(w_up.shape)}"
        )


class Function(NamedTuple):
    """What is done to pairs of columns, see :func:`kernel_api.fusions.gemm_glu`."""

    kind: str
    order: str
    granularity: int | str


def _hidden(
    x: torch.Tensor,
    routing: Routing,
    w_up: torch.Tensor,
    function: Function,
    **outputs: Any,
) -> Any:
    """Per pair, its weight times the gated linear unit; and further outputs.

    Rows that lie side by side are multiplied so much faster that they are worth the copy; and a
    token is read once, where it is copied to all of its places.
    """
    return ops.grouped_gemm_glu(
        routing.scattered(x),
        w_up,
        routing.offsets,
        prob=routing.weight,
        **function._asdict(),
        **outputs,
    )


# With gradients --------------------------------------------------------------------------


class _Moe(torch.autograd.Function):
    """In eager mode. It keeps its operands, and of each pair the pre-activation and what it
    became."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        expert_index: Any,
        expert_weight: Any,
        w_up: Any,
        w_down: Any,
        function: Function,
        key: Any,
    ) -> Any:
        given = x, expert_index, expert_weight, w_up, w_down
        y, hidden, preactivation, *routing = _forward(*given, function, key)
        kept = hidden if ctx.needs_input_grad[4] else None
        ctx.save_for_backward(x, expert_weight, w_up, w_down, preactivation, kept, *routing)
        ctx.function = function
        return y

    @staticmethod
    @differentiable_once("a layer of experts")
    def backward(ctx: Any, saved: Any, dy: Any) -> Any:
        wants_x, _, *wants_others = ctx.needs_input_grad[:5]
        dx, *others = _backward(ctx.function, (wants_x, *wants_others), dy, saved)
        return dx, None, *others, None, None


def _forward(
    x: Any,
    expert_index: Any,
    expert_weight: Any,
    w_up: Any,
    w_down: Any,
    function: Function,
    key: Any,
) -> tuple[torch.Tensor, ...]:
    """The result, and what a backward pass asks for: of each pair what it became and the
    pre-activation, and the routing."""

    def make() -> Any:
        routing = Routing.of(expert_index, expert_weight, w_up.shape[0])
        hidden, preactivation = _hidden(x, routing, w_up, function, preactivation=True)
        return routing.summed(hidden, w_down), hidden, preactivation, *routing

    read = x, expert_index, expert_weight, w_up, w_down
    found: tuple[torch.Tensor, ...] = _again.as_one(key, read, make)
    return found


def _backward(
    function: Function, wanted: tuple[bool, ...], dy: Any, saved: tuple[Any, ...]
) -> tuple[Any, ...]:
    """See :func:`_gradients`."""
    x, expert_weight, w_up, w_down, *_ = saved
    if not w_down.shape[1]:  # every width of pairs of columns is the same
        nothing: tuple[Any, ...] = zeros((x, expert_weight, w_up, w_down), wanted)
        return nothing
    read = [one for one in (*saved, dy) if one is not None]
    key = None
    if not is_read_by_dynamo():
        how = *wanted, *function, _float32.setting()
        key = _again.look(read, "gradients of nn.moe", *how)
    make = functools.partial(_gradients, function, wanted, dy, *saved)
    found: tuple[Any, ...] = _again.as_one(key, read, make)
    return found


def _gradients(
    function: Function,
    wanted: tuple[bool, ...],
    dy: Any,
    x: Any,
    expert_weight: Any,
    w_up: Any,
    w_down: Any,
    preactivation: Any,
    hidden: Any,
    *routed: Any,
) -> tuple[Any, ...]:
    """Those that are wanted of x, expert_weight, w_up and w_down; None for the others."""
    routing = Routing(*routed)
    wants_x, wants_weight, wants_up, wants_down = wanted
    dy = routing.scattered(dy)
    dx = dweight = dw_up = dw_down = None
    if wants_down:
        dw_down = routing.gradient_of(w_down, hidden, dy)
    if wants_x or wants_weight or wants_up:
        found = ops.grouped_gemm_dglu(
            dy,
            w_down.mT,
            routing.offsets,
            preactivation=preactivation,
            prob=routing.weight,
            dprob=wants_weight,
            **function._asdict(),
        )
        dz = found.out if wants_weight else found
    if wants_x:
        dx = routing.summed(dz, w_up.mT)
    if wants_weight:
        dweight = routing.unsorted(found.dprob, expert_weight.dtype)
    if wants_up:
        dw_up = routing.gradient_of(w_up, routing.scattered(x), dz)
    return dx, dweight, dw_up, dw_down


# Operators of torch ----------------------------------------------------------------------

_FUNCTION = "str kind, str order, str granularity"
_MOE = (
    "(Tensor x, Tensor expert_index, Tensor expert_weight, Tensor w_up, Tensor w_down, "
    f"{_FUNCTION}, bool keeps) -> Tensor[]"
)
_MOE_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor expert_weight, Tensor w_up, Tensor w_down, "
    "Tensor preactivation, Tensor? hidden, Tensor offsets, Tensor place, Tensor rank, "
    f"Tensor weight, bool[] wanted, {_FUNCTION}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _traced(
    x: Any,
    expert_index: Any,
    expert_weight: Any,
    w_up: Any,
    w_down: Any,
    function: Function,
    learns: bool,
) -> torch.Tensor:
    """The layer in a graph: one operator."""
    kind, order, granularity = function
    given = x, expert_index, expert_weight, w_up, w_down
    found: torch.Tensor = _operator(*given, kind, order, str(granularity), learns)[0]
    return found


def _make(
    x: Any,
    expert_index: Any,
    expert_weight: Any,
    w_up: Any,
    w_down: Any,
    kind: str,
    order: str,
    granularity: str,
    keeps: bool,
) -> list[torch.Tensor]:
    """The result, with what a backward pass asks for if that is likely."""
    given = x, expert_index, expert_weight, w_up, w_down
    function = _function_of(kind, order, granularity)
    key = _key(given, keeps, given, function)
    if keeps:
        return [*_forward(*given, function, key)]
    return [_again.as_one(key, given, lambda: _computed(*given, function))]


def _function_of(kind: str, order: str, granularity: str) -> Function:
    return Function(kind, order, int(granularity) if granularity.isdecimal() else granularity)


_operator = torch.library.custom_op("kernel_api::moe", _make, mutates_args=(), schema=_MOE)
_operator.register_fake(_make)


def _make_gradients(dy: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    *saved, wanted, kind, order, granularity = given
    function = _function_of(kind, order, granularity)
    found = _backward(function, tuple(wanted), dy, tuple(saved))
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in found)


_backward_operator = torch.library.custom_op(
    "kernel_api::moe_backward", _make_gradients, mutates_args=(), schema=_MOE_BACKWARD
)
_backward_operator.register_fake(_make_gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    *operands, kind, order, granularity, _ = inputs
    kept: list[Any] = output[1:]
    ctx.mark_non_differentiable(*kept)
    if kept and not ctx.needs_input_grad[4]:
        kept[0] = None
    ctx.save_for_backward(*operands, *kept)
    ctx.function = kind, order, granularity


def _operator_backward(ctx: Any, upstream: list[Any]) -> Any:
    x, expert_index, expert_weight, w_up, w_down, *kept = ctx.saved_tensors
    if not kept:
        operands = x, expert_index, expert_weight, w_up, w_down
        _, *kept = _operator(*operands, *ctx.function, True)
    hidden, preactivation, *routing = kept
    wants_x, _, *wants_others = ctx.needs_input_grad[:5]
    wanted = [wants_x, *wants_others]
    saved = x, expert_weight, w_up, w_down, preactivation, hidden, *routing
    found = _backward_operator(upstream[0], *saved, wanted, *ctx.function)
    dx, *others = [one if asked else None for one, asked in zip(found, wanted, strict=True)]
    return dx, None, *others, None, None, None, None


_operator.register_autograd(_operator_backward, setup_context=_keep)
