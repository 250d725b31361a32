"""The one-call form of quantisation, see :mod:`kernel_api.ops`."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from kernel_api import epilogue as ep
from kernel_api._lazy import module
from kernel_api.arguments import ElementwiseArguments, EpilogueArguments, ScaledOperand, ScaleMode
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.fusions import quantize as arguments_of
from kernel_api.fusions._shared import matrix, one_of
from kernel_api.fusions._store import MODES, WIDTHS, largest_of, scale_of
from kernel_api.operands import Operand, becomes_node

__all__ = ["Quantized", "quantize"]

_MODES = {
    "tensor": ScaleMode.PER_TENSOR,
    "row": ScaleMode.PER_ROW,
    "block": ScaleMode.BLOCK_1x128,
}


class Quantized(NamedTuple):
    """What :func:`quantize` returns.

    Attributes:
        out: (M, N), of 8 bits.
        scale: () in mode ``"tensor"``, (M,) in ``"row"``, (M, N / 128) in ``"block"``, all float32;
            (M, N / 32) of float8_e8m0fnu in ``"mx"``. One that was given is as it was.
        mode: That one.
    """

    out: Any
    scale: Any
    mode: str

    @property
    def operand(self) -> ScaledOperand:
        """Both, as a product takes its A. Of B (K, N), stored (N, K) as torch.nn.Linear does, it is
        ``ScaledOperand(q.out.t(), q.scale, ScaleMode.PER_ROW)`` in mode ``"row"``.

        Raises ArgumentError in mode ``"mx"``, whose scales no product takes yet.

        In graphs of torch.compile from torch 2.11 on; before, they hold
        ``ScaledOperand(q.out, q.scale, ScaleMode.PER_ROW)``.
        """
        return operand_of(self)


def operand_of(found: Quantized) -> ScaledOperand:
    """:attr:`Quantized.operand`, which Dynamo does not read before torch 2.11."""
    if found.mode not in _MODES:
        raise ArgumentError(f"mode is {found.mode!r}; products take {', '.join(_MODES)}")
    return ScaledOperand.unread(found.out, _stored_scale(found), _MODES[found.mode])


def _stored_scale(found: Quantized) -> Any:
    """As products take it."""
    import torch

    if found.mode != "tensor":
        return found.scale
    if not isinstance(found.scale, torch.Tensor):
        return torch.full((), found.scale, dtype=torch.float32, device=found.out.device)
    return found.scale.view(()).float()


def quantize(
    x: Any, mode: str = "block", *, scale: Any = None, out: Any = None, out_dtype: Any = None
) -> Quantized:
    """round(x / scale), so that x ≈ out × scale; it saturates. The results are constants, of
    an x that needs a gradient, too.

    See :func:`kernel_api.fusions.quantize`. One launch; but three where the scale of the whole
    matrix is to be found, or those of rows that no kernel takes: for the largest magnitudes, the
    scales, and ``out``.

    Args:
        x: (M, N), or (L, M, N).
        mode: Which elements share a scale: ``"block"``, 128 columns of a row; ``"mx"``, 32 of
            them; ``"row"``; ``"tensor"``, all, of all matrices.
        scale: Of mode ``"tensor"``: a number or float32 (), what is known from elsewhere; by
            default it is found.
        out: (M, N) of ``out_dtype``, float8_e4m3fn by default; also float8_e5m2 or int8.
    """
    import torch

    checked_mode(mode, scale)
    if not isinstance(x, torch.Tensor) or x.is_nested or x.dim() not in (2, 3):
        x = matrix(x, "x").tensor  # or it is refused
    is_read, is_made, is_node = scale is not None, out is None, becomes_node(x)
    if is_made and not is_read and mode == "tensor" and not is_node:
        return _with_scale_of_all(x, out_dtype)
    if is_node and is_made:
        from kernel_api import _row_operators

        return _row_operators.traced_quantize(x, mode, scale, element_of(out_dtype).torch)
    out = quantized_like(x, out, out_dtype)
    found = Quantized(out, scale if is_read else scales_of(mode, x), mode)
    if is_node:
        from kernel_api import _row_operators

        _row_operators.traced_quantize_into(x, found, is_read)
    else:
        run(x, found, is_read, () if is_made else ("out",))
    return found


def _with_scale_of_all(x: Any, out_dtype: Any) -> Quantized:
    _again = module("_again")

    def make() -> tuple[Any, Any]:
        found = Quantized(quantized_like(x, None, out_dtype), scales_of("tensor", x), "tensor")
        _run_in_three(x, found)
        return found.out, found.scale

    key = _again.look((x,), "quantize", "tensor", element_of(out_dtype))
    out, scale = _again.as_one(key, (x,), make)
    return Quantized(out, scale, "tensor")


def _as_one_matrix(x: Any, found: Quantized) -> tuple[Any, Quantized]:
    """Rows of several matrices as those of one, where they have scales of their own and that is a
    view."""
    import torch

    out, scale, mode = found
    if mode != "row" or x.dim() == 2 or not isinstance(out, torch.Tensor):
        return x, found
    if out.shape != x.shape or not (x.is_contiguous() and out.is_contiguous()):
        return x, found
    return x.flatten(0, 1), Quantized(out.flatten(0, 1), scale.flatten(), mode)


def _in_one_launch(args: ElementwiseArguments, mode: str) -> bool:
    """Whether another than the reference does it, which waits for the device."""
    from kernel_api._first_kernel import first_kernel

    if mode != "row" or args.device.type == "cpu":
        return True
    first = first_kernel(args)
    return first is None or first.provider_name() != "reference"


def checked_mode(mode: str, scale: Any) -> None:
    """Raise ArgumentError for a mode that does not exist, or that a scale is not for."""
    one_of("mode", mode, MODES)
    if scale is not None and mode != "tensor":
        raise ArgumentError(f"scale is given and mode is {mode!r}, which finds its own")


def quantized_like(x: Any, out: Any, out_dtype: Any) -> Any:
    """``out``, or one of x's shape where there is none."""
    from kernel_api._autograd import check_outputs
    from kernel_api._launches import check_type

    if out is None:
        out = x.new_empty(x.shape, dtype=element_of(out_dtype).torch)
    elif out_dtype is not None:
        check_type(out, out_dtype)
    check_outputs([("out", out)])
    return out


def element_of(out_dtype: Any) -> Any:
    """Of ``out``, for what a call says of it."""
    return dtype("float8_e4m3fn" if out_dtype is None else out_dtype)


def scales_of(mode: str, x: Any) -> Any:
    """Room for scales of a tensor."""
    import torch

    new, (*of_rows, columns) = x.new_empty, x.shape
    element = torch.float8_e8m0fnu if mode == "mx" else torch.float32
    if mode in WIDTHS:
        return new((*of_rows, columns // WIDTHS[mode]), dtype=element)
    return new(of_rows if mode == "row" else (), dtype=element)


def run(x: Any, found: Quantized, is_read: bool, into: Sequence[str]) -> None:
    """By the best kernels, or as is known of such calls.

    Args:
        is_read: Whether the scale is, in place of being written.
        into: Names of what is written that was not made for this call.
    """
    _again = module("_again")

    if found.mode == "tensor" and not is_read:
        _run_in_three(x, found)
        return
    matrix, one = _as_one_matrix(x, found)
    key = look_of_quantized("quantize", one, is_read, into, {"x": matrix})
    if _again.repeated(key, (matrix, one.out), (one.scale,)):
        return
    args = arguments_of(matrix, out=one.out, scale=one.scale, mode=one.mode)
    if _in_one_launch(args, one.mode):
        _again.run(key, args, ("scale",), into)
    else:
        _run_in_three(x, found)


def look_of_quantized(
    name: str,
    found: Quantized,
    is_read: bool,
    into: Sequence[str],
    read: dict[str, Any],
    *how: Hashable,
) -> Any:
    """What a call looks like, see :func:`kernel_api._again.look`; read: tensors beside a scale."""
    import torch

    _again = module("_again")

    scale, given = found.scale, dict(read)
    if not isinstance(found.out, torch.Tensor):
        return None
    is_number = isinstance(scale, (int, float))
    if is_number and not (type(scale) is float and 0 < scale < math.inf):
        return None  # which is refused, or launched as another number
    if is_read and not is_number:
        given["scale"] = scale
    outputs = {"out": found.out, "scale": scale}
    given |= {one: outputs[one] for one in into if one in outputs}
    what = (name, found.mode, found.out.dtype, is_read, is_number, *how, *given)
    return _again.look([*given.values()], *what, written=[given[one] for one in into])


def _run_in_three(x: Any, found: Quantized) -> None:
    """Largest magnitudes, scales, and ``out``; of rows, or of the whole matrix."""
    from kernel_api._launches import run_best

    out = Operand(found.out, "out")
    largest, top = found.scale.new_empty(found.scale.shape), largest_of(out)
    by_row = found.mode == "row"
    run_best(ElementwiseArguments(x, epilogue=EpilogueArguments(_largest(by_row), largest=largest)))
    # As a matrix of one row, which many threads have.
    flat = largest.reshape(1, -1), found.scale.view(1, -1)
    run_best(ElementwiseArguments(*flat, epilogue=EpilogueArguments(_scale(top))))
    scale = found.scale.unsqueeze(-1) if by_row else found.scale
    run_best(ElementwiseArguments(x, out, epilogue=EpilogueArguments(_divided, scale=scale)))


# Scales of rows and of all ------------------------------------------------------------------


@functools.lru_cache
def _largest(by_row: bool) -> Any:
    axis = -1 if by_row else None

    def largest(x: Any) -> tuple[Any, Any]:
        return x, ep.amax(x, axis)

    return largest


@functools.lru_cache
def _scale(top: float) -> Any:
    def scale(largest: Any) -> Any:
        return scale_of(largest, top)

    return scale


def _divided(x: Any, scale: Any) -> Any:
    return x / scale
