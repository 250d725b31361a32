"""What is done to a product as it is stored: rotation, quantisation, dropout."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from typing import Any, NamedTuple

from kernel_api import epilogue as ep
from kernel_api._numbers import size_or_whole_number
from kernel_api.arguments import GemmArguments
from kernel_api.arguments.scaled import BLOCK
from kernel_api.epilogue import Graph
from kernel_api.epilogue.shape import SCALAR, Problem
from kernel_api.epilogue.tracing import Output, parameters_of, trace
from kernel_api.epilogue.value import Input
from kernel_api.errors import ArgumentError
from kernel_api.fusions._shared import (
    Extents,
    Function,
    above_0,
    batches,
    fused,
    matrices,
    one_of,
    per_column,
    real,
    required,
    rows,
    shaped,
    times,
    typed,
    weighted,
    whole,
    writing,
)
from kernel_api.operands import Operand

#: Largest values of the types that are quantised to.
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
#: Columns that share a scale of mode ``"mx"``; of ``"block"`` they are BLOCK.
MX_BLOCK = 32
#: Columns that share a scale, of the modes in which not all of a row do.
WIDTHS = {"mx": MX_BLOCK, "block": BLOCK}
#: The smallest normal float32: what is divided by less is no number, or not near it.
_LEAST_SCALE = 2.0**-126
MODES = ("tensor", "row", "mx", "block")


def gemm_rope(
    A: Any,
    B: Any,
    *,
    out: Any,
    cos: Any,
    sin: Any,
    head_dim: int,
    start: int = 0,
    width: int | None = None,
    style: str = "half",
    heads: int | None = None,
) -> GemmArguments:
    """Rotary position embedding (Su et al., RoFormer) of heads of acc: pairs (a, b) of
    columns become (a · cos − b · sin, b · cos + a · sin).

    Args:
        cos, sin: (M, width / 2), or (L, M, width / 2): an angle per row and pair.
        head_dim: Columns of a head; heads stand side by side.
        start: First column of a head that is rotated; those that are not stay as they are.
        width: How many are rotated; all from ``start`` on by default.
        style: ``"half"``: columns i and i + width / 2 are a pair; ``"interleaved"``: 2i, 2i + 1.
        heads: How many are rotated, from the first on; by default all. Where B projects to
            queries, keys and values, the values stay as they are.
    """
    A, B = matrices(A, B)
    N, head_dim, start = B.shape[-1], whole("head_dim", head_dim), whole("start", start)
    if head_dim < 1:
        raise ArgumentError(f"head_dim is {head_dim}; expected the columns of a head, 2 or more")
    if N % head_dim:
        raise ArgumentError(f"B has N = {N}; heads of {head_dim} columns need a multiple of it")
    turned = head_dim - start if width is None else whole("width", width)
    if turned < 2 or turned % 2 or start < 0 or start + turned > head_dim:
        raise ArgumentError(
            f"width is {turned} and start {start}; expected an even width that fits head_dim = "
            f"{head_dim}"
        )
    one_of("style", style, ("half", "interleaved"))
    rotated = None if heads is None else whole("heads", heads, "heads")
    if rotated is not None and not 1 <= rotated <= N // head_dim:
        raise ArgumentError(
            f"heads is {rotated}; expected 1 to {N // head_dim}, the heads of {head_dim} columns "
            f"in N = {N}, or None for all"
        )
    tables = (*rows(A), turned // 2), (A.shape[-2], turned // 2)
    reads = {"cos": required("cos", cos, *tables), "sin": required("sin", sin, *tables)}
    out = shaped("out", out, (*rows(A), N))
    return fused(_rope(head_dim, start, turned, style, rotated), A, B, out, reads=reads)


@functools.lru_cache
def _rope(head_dim: int, start: int, width: int, style: str, heads: int | None) -> Function:
    def fn(accum: Any, cos: Any = None, sin: Any = None) -> dict[str, Any]:
        return {"out": ep.rotate(accum, cos, sin, head_dim, start, width, style, heads)}

    return fn


def gemm_quantize(
    A: Any,
    B: Any,
    *,
    out: Any,
    scale: Any,
    mode: str = "tensor",
    amax: Any = None,
    alpha: Any = 1.0,
    bias: Any = None,
) -> GemmArguments:
    """out = round(x / scale) of x = alpha · acc + bias, so that x ≈ out × scale; it saturates.

    Args:
        out: (M, N) of float8_e4m3fn, float8_e5m2 or int8, whose largest value is called top.
        mode: ``"tensor"``: ``scale`` is read, a number or a tensor (), from 2⁻¹²⁶ up: kernels
            multiply with its inverse, which is infinite of what is much smaller. ``"row"``: it is
            written, (M,) float32: max |x| of the row / top, 2⁻¹²⁶ at least, 1 where x is 0; kernels
            compute it of up to 256 columns, which a tile holds. ``"mx"``: it is written,
            (M, N / 32) float8_e8m0fnu: max |x| of 32 columns / top, rounded up to a power of two
            (OCP Microscaling Formats, whose scales are rounded down, so that the largest values
            saturate). ``"block"``: it is written, (M, N / 128) float32: what ``"row"`` writes, of
            128 columns; out and scale are then what the next product takes as
            ``ScaledOperand(out, scale, ScaleMode.BLOCK_1x128)``. int8 saturates at −128.
        amax: max |x|, whatever the mode.
    """
    A, B = matrices(A, B)
    N = B.shape[-1]
    one_of("mode", mode, MODES)
    out = required("out", out, (*rows(A), N))
    reads = {"alpha": real("alpha", alpha), "bias": per_column("bias", bias, A, N)}
    writes = {"amax": shaped("amax", amax, (), batches(A))}
    if mode == "tensor":
        if scale is None:
            raise ArgumentError("scale is None; it is read if mode is 'tensor'")
        reads["scale"] = above_0("scale", scale)
    else:
        writes["scale"] = written_scale(mode, scale, rows(A), N)
    return fused(quantized(mode, out), A, B, out, reads=reads, writes=writes)


def written_scale(mode: str, scale: Any, of_rows: Extents, N: int, name: str = "B") -> Operand:
    """The scales that a quantisation by rows or by blocks writes; name: of what has N columns."""
    if mode == "row":
        return typed("scale", required("scale", scale, of_rows), "float32")
    if mode == "block":
        return scale_of_blocks(scale, of_rows, N, f"{name} has N = {N}")
    if N % MX_BLOCK:
        raise ArgumentError(f"{name} has N = {N}; blocks of {MX_BLOCK} columns need a multiple")
    return typed("scale", required("scale", scale, (*of_rows, N // MX_BLOCK)), "float8_e8m0fnu")


def scale_of_blocks(scale: Any, of_rows: Extents, columns: int, told: str) -> Operand:
    """Those that are written of blocks of columns; told: how many there are, as messages say it."""
    if columns % BLOCK:
        raise ArgumentError(f"{told}; blocks of {BLOCK} columns need a multiple")
    return typed("scale", required("scale", scale, (*of_rows, columns // BLOCK)), "float32")


def largest_of(out: Operand) -> float:
    """The largest value of the type that is quantised to; raises ArgumentError for others."""
    return _LARGEST[one_of("out's type", out.dtype.name, _LARGEST)]


def quantized(mode: str, out: Operand) -> Function:
    """What a quantisation computes for an ``out`` of this type."""
    top = largest_of(out)
    return _quantize_by_tensor if mode == "tensor" else _quantize_by(mode, top)


class Quantization(NamedTuple):
    """What a quantisation does.

    Attributes:
        mode: As :func:`gemm_quantize` has it.
        top: The largest value of the type that is quantised to; not known in mode ``"tensor"``.
    """

    mode: str
    top: float


def quantization_of(graph: Graph) -> Quantization | None:
    """What an epilogue does that is a quantisation and nothing else, without ``amax``."""
    return _quantizations().get(graph)


@functools.cache
def _quantizations() -> dict[Graph, Quantization]:
    found = {}
    for is_number in (True, False):
        scale = Input("scale", "real", is_number, SCALAR, None, 0)
        found[_graph(_quantize_by_tensor, (scale,), ())] = Quantization("tensor", math.nan)
    for mode, top in itertools.product(("row", "mx", "block"), _LARGEST.values()):
        found[_graph(_quantize_by(mode, top), (), ("scale",))] = Quantization(mode, top)
    return found


def _graph(function: Function, reads: tuple[Input, ...], writes: tuple[str, ...]) -> Graph:
    """What a function computes of a matrix, whatever its size."""
    fn = writing(function, writes).fn
    outputs = [Output(name, 1) for name in writes]
    return trace(fn, parameters_of(fn), reads, outputs, {}, Problem(None, 1, BLOCK)).graph


def _quantize_by_tensor(
    accum: Any,
    alpha: Any = None,
    bias: Any = None,
    scale: Any = None,
    prob: Any = None,
    row_scale: Any = None,
) -> dict[str, Any]:
    x = weighted(accum, alpha, bias, prob, row_scale)
    return {"out": x if scale is None else x / scale, "amax": ep.amax(x, None)}


@functools.lru_cache
def _quantize_by(mode: str, top: float) -> Function:
    def fn(
        accum: Any, alpha: Any = None, bias: Any = None, prob: Any = None, row_scale: Any = None
    ) -> dict[str, Any]:
        x = weighted(accum, alpha, bias, prob, row_scale)
        if mode == "mx":
            scale = ep.cast(ep.amax(x, -1, MX_BLOCK) / top, "float8_e8m0fnu")
            stored = x / ep.repeat(scale, MX_BLOCK)
        elif mode == "block":
            stored, scale = in_blocks(x, top)
        else:
            scale = scale_of(ep.amax(x, -1), top)
            stored = x / scale
        return {"out": stored, "scale": scale, "amax": ep.amax(x, None)}

    return fn


def in_blocks(x: Any, top: float) -> tuple[Any, Any]:
    """x in units of the scales of blocks of columns, and these."""
    scale = scale_of(ep.amax(x, -1, BLOCK), top)
    return x / ep.repeat(scale, BLOCK), scale


def scale_of(largest: Any, top: float) -> Any:
    """With which the largest magnitude becomes the largest value of the type."""
    return ep.where(largest == 0.0, 1.0, ep.maximum(largest / top, _LEAST_SCALE))


def gemm_dropout(
    A: Any, B: Any, *, out: Any, p: Any, seed: Any, offset: Any, alpha: Any = 1.0
) -> GemmArguments:
    """out = alpha · acc / (1 − p) with probability 1 − p, else 0 (Srivastava et al., Dropout).

    Args:
        p: Probability of a zero, from 0 to 1.
        seed, offset: Integers, or tensors () of one; which elements stay depends on them and the
            place in ``out`` alone, see :func:`kernel_api.epilogue.dropout`.
    """
    A, B = matrices(A, B)
    p = real("p", p)
    if isinstance(p, float) and not 0 <= p <= 1:
        raise ArgumentError(f"p is {p}; expected a probability from 0 to 1")
    out = shaped("out", out, (*rows(A), B.shape[-1]))
    state = {"seed": _state("seed", seed), "offset": _state("offset", offset)}
    return fused(_dropout, A, B, out, reads={"p": p, **state, "alpha": real("alpha", alpha)})


def _state(name: str, value: Any) -> Any:
    """Of random numbers; what a tensor holds is not looked at."""
    number = size_or_whole_number(value)
    if number is None and (value is None or isinstance(value, numbers.Real)):
        raise ArgumentError(f"{name} is {value!r}; expected a whole number, or a tensor () of one")
    if number is not None and not -(2**63) <= number < 2**64:
        raise ArgumentError(f"{name} is beyond all whole numbers of 64 bits")
    return value


def _dropout(
    accum: Any, p: Any = None, seed: Any = None, offset: Any = None, alpha: Any = None
) -> dict[str, Any]:
    return {"out": ep.dropout(times(alpha, accum), p, seed, offset)}
