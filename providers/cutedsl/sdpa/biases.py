"""Whether TMA moves a bias of scores, or its gradient, for the Hopper families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand
from kernel_api.space import Miss

VECTOR = 16  # bytes that TMA asks addresses and pitches to be multiples of


def comes_by_tma(args: Any, *, of_queries: bool) -> bool | Miss:
    """Of the bias; of_queries: in tiles with a row for each query."""
    bias = args.further.get("bias")
    if bias is None:
        return Miss("there is none")
    if bias.dtype.bits != 16:
        return Miss(f"bias is {bias.dtype}", "would match with bias of bfloat16")
    *_, rows, keys = bias.shape
    if keys != args.S_kv or of_queries == _is_one_row(bias.shape, bias.stride):
        return Miss(f"bias has {rows} x {keys} for {args.S_q} queries and {args.S_kv} keys")
    return _in_whole_vectors(bias, "bias")


def goes_by_tma(args: Any) -> bool | Miss:
    """Of its gradient, which is what scores' is."""
    gradient = args.further["dBias"]
    if gradient.dtype is not args.Q.dtype:
        return Miss(f"dBias is {gradient.dtype}", f"would match with dBias of {args.Q.dtype}")
    if gradient.shape != (expected := _of_scores(args)):
        return Miss(f"dBias has shape {gradient.shape}; scores have {expected}")
    return _in_whole_vectors(gradient, "dBias")


def _of_scores(args: Any) -> tuple[int, ...]:
    return args.B, args.H, args.S_q, args.S_kv


def _in_whole_vectors(tensor: Operand, name: str) -> bool | Miss:
    whole = tensor.shape[-1] % (VECTOR // tensor.dtype.itemsize) == 0
    fits = whole and tensor.unit_mode == -1 and tensor.alignment >= VECTOR
    near = f"would match with rows at multiples of {VECTOR} bytes"
    return fits or Miss(f"{name} is {tensor}", near)


def _is_one_row(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Of a bias, whether all queries have the same."""
    return shape[-2] == 1 or stride[-2] == 0


def checked(launch: Callable[..., None], *, of_queries: bool) -> Callable[..., None]:
    """A launch that refuses a bias which comes another way than the one that it is for."""

    def launch_biased(*tensors: Any, **others: Any) -> None:
        bias = others["bias"]
        if len(bias.shape) == 4 and of_queries == _is_one_row(bias.shape, bias.stride()):
            expected = "a row for each query" if of_queries else "one row for all queries"
            raise ArgumentError(
                f"bias has shape {tuple(bias.shape)} and strides {bias.stride()}; the launch is "
                f"prepared for {expected}: prepare another one"
            )
        launch(*tensors, **others)

    return launch_biased


def checked_gradient(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch that refuses a dBias which is a sum of what scores have."""

    def launch_whole(*tensors: Any, **others: Any) -> None:
        (B, H, S_q, _), S_kv = tensors[0].shape, tensors[1].shape[2]
        if tuple(others["dBias"].shape) != (B, H, S_q, S_kv):
            raise ArgumentError(
                f"dBias has shape {tuple(others['dBias'].shape)}; the launch is prepared for one "
                f"of all scores, {(B, H, S_q, S_kv)}: prepare another one"
            )
        launch(*tensors, **others)

    return launch_whole
