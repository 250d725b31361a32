"""Do the operands of attention fit each other?"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from kernel_api._numbers import real_number, whole_number
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand

if TYPE_CHECKING:
    from kernel_api._score import ScoreFunction
    from kernel_api.arguments.attention import AttentionArguments
    from kernel_api.masks import Mask

_INT32, _FLOAT32 = dtype("int32"), dtype("float32")
#: What scores of float32 may be scaled with, at most: times log2(e) float32 holds it, which kernels
#: compute powers of two for.
LARGEST = 3.4028234663852886e38 / math.log2(math.e)
#: The least positive number of float32.
LEAST = 2.0**-149
_T = TypeVar("_T")

#: Numbers of each row of scores that a forward pass may write.
STATISTICS = ("lse", "score_max", "score_sum_exp")

#: Letters of the modes of operands that are not packed.
_LETTERS = {
    "Q": "(B, H, S_q, D)",
    "K": "(B, H_kv, S_kv, D)",
    "V": "(B, H_kv, S_kv, D_v)",
    "out": "(B, H, S_q, D_v)",
}
_PACKED = {"Q": "(T, H, D)", "K": "(T_kv, H_kv, D)", "V": "(T_kv, H_kv, D_v)", "out": "(T, H, D_v)"}
#: Of keys and values in pages, whatever form the queries have.
_PAGED = {"K": "(pages, H_kv, page_size, D)", "V": "(pages, H_kv, page_size, D_v)"}

#: Operands that look like others.
_LIKE = {"dO": "out", "dQ": "Q", "dK": "K", "dV": "V"}


def check(args: AttentionArguments) -> None:
    """Raise ArgumentError for what contradicts itself, with both values."""
    _check_form(args)
    _check_types(args)
    _check_shapes(args)
    _check_head_dims(args)
    _check_lengths(args)
    _check_beside(args)


# Numbers and objects ---------------------------------------------------------------------


def softcap_of(softcap: Any, scores: DType) -> float | None:
    """scores: The type that they are computed in."""
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise ArgumentError(f"softcap is {softcap!r}; expected a positive number, or None")
    found = real_number("softcap", softcap)
    if not (math.isfinite(found) and found > 0):
        raise ArgumentError(f"softcap is {softcap!r}; expected a positive number, or None")
    require_held("softcap", found, scores)
    require_held("1 / softcap", 1.0 / found, scores)
    return found


def require_held(name: str, value: float, scores: DType) -> None:
    """Raise ArgumentError for a number that scores of the type cannot be multiplied with."""
    if math.isinf(value) or (abs(value) > LARGEST and scores.bits == 32):
        raise ArgumentError(
            f"{name} is {value!r}; scores of {scores.name} take numbers up to {LARGEST:.2e}"
        )


def instance_of(name: str, value: Any, kind: type[_T]) -> _T | None:
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, type) and issubclass(value, kind):
        raise ArgumentError(
            f"{name} is the class {value.__name__}; expected one, {value.__name__}()"
        )
    home = "kernel_api.masks" if name == "mask" else "kernel_api.arguments"
    raise ArgumentError(f"{name} is a {type(value).__name__}; expected a {kind.__name__} of {home}")


# Form ------------------------------------------------------------------------------------


def _check_form(args: AttentionArguments) -> None:
    further, in_pages = args.further, args.is_paged
    cumulative = [n for n in ("cu_seqlens_q", "cu_seqlens_kv") if n in further]
    if in_pages:
        _check_no_packed_keys(args)
    elif len(cumulative) == 1:
        is_query = cumulative == ["cu_seqlens_q"]
        missing = "cu_seqlens_kv" if is_query else "cu_seqlens_q"
        has_pages = is_query and "page_table" in args.tensor_names
        unless = ", unless keys are in pages (page_table)" if has_pages else ""
        raise ArgumentError(
            f"{cumulative[0]} is given and {missing} is None; packed sequences need both{unless}"
        )
    _check_longest("max_seqlen_q", args.max_seqlen_q, packed=bool(cumulative))
    if not in_pages:
        _check_longest("max_seqlen_kv", args.max_seqlen_kv, packed=bool(cumulative))
    if cumulative:
        for name in ("seq_lens_q",) if in_pages else ("seq_lens_q", "seq_lens_kv"):
            if name in further:
                raise ArgumentError(
                    f"{name} and cu_seqlens are given; packed sequences are as long as cu_seqlens "
                    f"say"
                )
        if "bias" in further:
            raise ArgumentError(
                "bias and cu_seqlens are given; a bias (B, H, S_q, S_kv) is for sequences that "
                "are not packed, add it in score_mod"
            )
    if in_pages and "seq_lens_kv" not in further:
        raise ArgumentError(
            "page_table is given and seq_lens_kv is None; pages hold whole sequences only by their "
            "lengths"
        )
    if args.mask is not None and args.mask.is_padding:
        missing_lens = [n for n in ("seq_lens_q", "seq_lens_kv") if n not in further]
        if missing_lens:
            instead = "; cu_seqlens alone say it of packed sequences" if cumulative else ""
            if cumulative and in_pages:
                instead = "; cu_seqlens_q and seq_lens_kv alone say it of packed queries"
            raise ArgumentError(
                f"the mask has Padding() and {missing_lens[0]} is None; it needs seq_lens_q and "
                f"seq_lens_kv{instead}"
            )


def _check_no_packed_keys(args: AttentionArguments) -> None:
    """Of keys in pages: raise for what tells where packed ones lie."""
    if "cu_seqlens_kv" in args.further:
        raise ArgumentError(
            "cu_seqlens_kv and page_table are given; the lengths of keys in pages are told by "
            "seq_lens_kv: leave cu_seqlens_kv out"
        )
    if args.max_seqlen_kv is not None:
        raise ArgumentError(
            f"max_seqlen_kv is {args.max_seqlen_kv!r} and page_table is given; page_table and "
            f"seq_lens_kv say how many keys there are: leave it out"
        )


def _check_longest(name: str, value: Any, packed: bool) -> None:
    if not packed:
        if value is not None:
            raise ArgumentError(
                f"{name} is {value!r} and there are no cu_seqlens; it is for packed sequences"
            )
        return
    if value is None:
        raise ArgumentError(
            f"{name} is None; packed sequences need the length of the longest, because the "
            f"lengths themselves are not read on the host"
        )
    if whole_number(value) is None or value < 0:
        raise ArgumentError(f"{name} is {value!r}; expected a whole number from 0")


# Types and shapes ------------------------------------------------------------------------


def _check_types(args: AttentionArguments) -> None:
    Q = args.Q
    for name in args.operand_names:
        operand = getattr(args, name)
        if operand.dtype.kind != "float":
            raise ArgumentError(f"{name} is {operand.dtype}; expected a floating type")
    _check_keys(Q.dtype, args.K.dtype, args.V.dtype)
    for name in ("Q", "K"):
        element = getattr(args, name).dtype
        if element.bits == 8 and "dQ" in args.operand_names:
            raise ArgumentError(
                f"{name} is {element}; gradients are of 16-bit types and wider ones"
            )
    for name in args.operand_names[3:]:
        operand = getattr(args, name)
        if operand.dtype.bits == 8:
            raise ArgumentError(f"{name} is {operand.dtype}; expected 16 bits or more")
    for name, of in (("descale_q", "Q"), ("descale_k", "K"), ("descale_v", "V")):
        element = getattr(args, of).dtype
        if name in args.further and element.bits != 8:
            raise ArgumentError(f"{name} is given and {of} is {element}; it is for 8-bit floats")


def _check_keys(Q: DType, K: DType, V: DType) -> None:
    """Keys and values that are kept for later may have 8 bits where queries have 16."""
    kept = Q.bits == 16 and K.bits == 8
    if K is not Q and not kept:
        raise ArgumentError(
            f"K is {K} but Q is {Q}; expected the same, or 8-bit keys of 16-bit queries"
        )
    if V is not K:
        raise ArgumentError(f"V is {V} but K is {K}")


def _check_shapes(args: AttentionArguments) -> None:
    pages = _PAGED if args.is_paged else {}
    letters = {**(_PACKED if args.is_packed else _LETTERS), **pages}
    Q, K, V, out = args.Q.shape, args.K.shape, args.V.shape, args.out.shape
    packed = "" if args.is_packed else "; of packed sequences (T, H, D), pass cu_seqlens"
    for name, shape in zip(("Q", "K", "V", "out"), (Q, K, V, out), strict=True):
        if len(shape) != letters[name].count(",") + 1:
            hint = "" if name in pages else packed
            raise ArgumentError(f"{name} has shape {shape}; expected {letters[name]}{hint}")

    def shown(*names: str) -> str:
        return ", ".join(f"{n} {letters[n]} = {getattr(args, n).shape}" for n in names)

    if K[-1] != Q[-1]:
        raise ArgumentError(f"Q has D = {Q[-1]} but K has D = {K[-1]} ({shown('Q', 'K')})")
    if K[1] != V[1]:
        raise ArgumentError(f"K has H_kv = {K[1]} but V has H_kv = {V[1]} ({shown('K', 'V')})")
    if (Q[1] % K[1] if K[1] else Q[1]) != 0:
        raise ArgumentError(
            f"Q has H = {Q[1]} heads and K has H_kv = {K[1]}; for grouped-query attention, H must "
            f"be a multiple of H_kv"
        )
    if args.is_packed and not args.is_paged:
        if K[0] != V[0]:
            raise ArgumentError(f"K has T_kv = {K[0]} but V has T_kv = {V[0]} ({shown('K', 'V')})")
    else:
        length = "page_size" if args.is_paged else "S_kv"
        if K[2] != V[2]:
            raise ArgumentError(
                f"K has {length} = {K[2]} but V has {length} = {V[2]} ({shown('K', 'V')})"
            )
        if args.is_paged and not K[2]:
            raise ArgumentError(f"K has page_size = 0; expected a key at least ({shown('K')})")
        batch = "pages" if args.is_paged else "B"
        if K[0] != V[0]:
            raise ArgumentError(
                f"K has {batch} = {K[0]} but V has {batch} = {V[0]} ({shown('K', 'V')})"
            )
        if not args.is_paged and Q[0] != K[0]:
            raise ArgumentError(
                f"Q has B = {Q[0]} but K has B = {K[0]} ({shown('Q', 'K')}); broadcast one with "
                f"expand"
            )
    expected = (*Q[:-1], V[-1])
    if out != expected:
        raise ArgumentError(
            f"out has shape {out}; expected {letters['out']} = {expected} ({shown('Q', 'V')})"
        )
    for name, like in _LIKE.items():
        if name in args.operand_names and getattr(args, name).shape != getattr(args, like).shape:
            raise ArgumentError(
                f"{name} has shape {getattr(args, name).shape}; expected that of {like}, "
                f"{getattr(args, like).shape}"
            )


def _check_head_dims(args: AttentionArguments) -> None:
    for name, letter in (("Q", "D"), ("K", "D"), ("V", "D_v")):
        operand = getattr(args, name)
        multiple = max(16 // operand.dtype.itemsize, 1) if operand.dtype.bits <= 16 else 1
        if operand.shape[-1] % multiple or not operand.shape[-1]:
            raise ArgumentError(
                f"{name} has {letter} = {operand.shape[-1]}; expected a multiple of {multiple} for "
                f"{operand.dtype}: pad the last mode with zeros (and keep scale)"
            )
    for name in ("Q", "K", "V", "out", *_LIKE):
        if name not in args.operand_names:
            continue
        operand = getattr(args, name)
        if operand.stride[-1] != 1 and operand.shape[-1] != 1 and 0 not in operand.shape:
            raise ArgumentError(
                f"{name} has strides {operand.stride}; the last one must be 1: pass "
                f"{name}.contiguous(), or a view whose last mode lies side by side"
            )


# Lengths, and what is beside the operands ------------------------------------------------


def _check_lengths(args: AttentionArguments) -> None:
    further = args.further
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):  # the former tells B
        if name in further:
            count = further["cu_seqlens_q"].shape[:1]
            if further[name].rank == 1 and not further[name].shape[0]:
                raise ArgumentError(f"{name} is empty; expected (B + 1,), from 0 to the last end")
            _check_integers(name, further[name], f"(B + 1,) = {count}", count)
    for name in ("seq_lens_q", "seq_lens_kv"):
        if name in further:
            _check_integers(name, further[name], f"(B,) = ({args.B},)", (args.B,))
    if args.is_paged:
        table = further["page_table"]
        if table.dtype is not _INT32:
            raise ArgumentError(f"page_table is {table.dtype}; expected int32")
        if table.rank != 2 or table.shape[0] != args.B:
            raise ArgumentError(
                f"page_table has shape {table.shape}; expected (B, max_pages) with B = {args.B}"
            )
        if table.stride[1] != 1 and table.shape[1] > 1:
            raise ArgumentError(
                f"page_table has strides {table.stride}; the pages of a sequence must lie side by "
                f"side"
            )


def _check_integers(name: str, operand: Operand, text: str, shape: tuple[int, ...]) -> None:
    if operand.dtype is not _INT32:
        raise ArgumentError(f"{name} is {operand.dtype}; expected int32")
    if operand.rank != 1 or operand.shape != shape:
        raise ArgumentError(f"{name} has shape {operand.shape}; expected {text}")
    if operand.stride != (1,) and operand.shape[0] > 1:
        raise ArgumentError(f"{name} has stride {operand.stride[0]}; expected 1, without gaps")


def _check_beside(args: AttentionArguments) -> None:
    wide, further = args.accumulator_type, args.further
    rows = (args.H, args.Q.shape[0]) if args.is_packed else args.Q.shape[:3]
    for name in STATISTICS:
        one = getattr(args, name)
        if one is not None:
            _check_statistic(name, one, wide, "(H, T)" if args.is_packed else "(B, H, S_q)", rows)
    for name in ("alibi", "sink", "dSink"):
        if name in further:
            _check_statistic(name, further[name], wide, "(H,)", (args.H,))
    for name in ("descale_q", "descale_k", "descale_v"):
        if name in further:
            _check_descale(name, further[name], (args.B, args.H_kv))
    if "bias" in further:
        _check_bias(args, further["bias"])
    if "blocks" in further:
        _check_blocks(args, further["blocks"])
    for name, of in (("dBias", "bias"), ("dSink", "sink")):
        if name not in further:
            continue
        if of not in further:
            raise ArgumentError(f"{name} is given and {of} is None; it is the gradient of {of}")
        if _of_scores(further[name].shape) != _of_scores(further[of].shape):
            raise ArgumentError(
                f"{name} has shape {further[name].shape}; expected that of {of}, "
                f"{further[of].shape}"
            )
    if "dBias" in further and not further["dBias"].dtype.is_float:
        raise ArgumentError(f"dBias is {further['dBias'].dtype}; expected a floating type")
    if 0 not in (*args.Q.shape, *args.K.shape):
        check_read("the mask", args.mask)
        check_read("score_mod", args.score)


def check_read(reader: str, function: Mask | ScoreFunction | None) -> None:
    """Raise where a function, which needs all of its operands, has one without an element."""
    operands = {} if function is None else function.operands
    for name, operand in operands.items():
        if isinstance(operand, Operand) and 0 in operand.shape:
            raise ArgumentError(
                f"{name} has shape {operand.shape}; {reader} reads it: expected an element at least"
            )


def _check_statistic(
    name: str, operand: Operand, wide: DType, letters: str, shape: tuple[int, ...]
) -> None:
    if operand.dtype is not wide:
        raise ArgumentError(f"{name} is {operand.dtype}; expected {wide}")
    if operand.shape != shape:
        raise ArgumentError(f"{name} has shape {operand.shape}; expected {letters} = {shape}")


def _check_descale(name: str, operand: Operand, shape: tuple[int, int]) -> None:
    if operand.dtype is not _FLOAT32:
        raise ArgumentError(f"{name} is {operand.dtype}; expected float32")
    if operand.shape not in ((), shape):
        raise ArgumentError(
            f"{name} has shape {operand.shape}; expected (), or (B, H_kv) = {shape}"
        )


def _check_bias(args: AttentionArguments, bias: Operand) -> None:
    if not bias.dtype.is_float:
        raise ArgumentError(
            f"bias is {bias.dtype}; expected a floating type (a mask of truth values is "
            f"masks.MaskMod)"
        )
    full = (args.B, args.H, args.S_q, args.S_kv)
    own = _of_scores(bias.shape)
    fits = len(own) == len(full) and all(
        one in (1, extent) for one, extent in zip(own, full, strict=True)
    )
    if not fits:
        raise ArgumentError(
            f"bias has shape {bias.shape}; expected one that broadcasts to (B, H, S_q, S_kv) = "
            f"{full}"
        )


def _of_scores(shape: tuple[int, ...]) -> tuple[int, ...]:
    """With the modes that lack in front of four."""
    return (*(1,) * (4 - len(shape)), *shape)


def _check_blocks(args: AttentionArguments, table: Operand) -> None:
    assert args.block_shape is not None
    rows, columns = args.block_shape
    blocks = (-(-args.S_q // rows), -(-args.S_kv // columns))
    B, H = table.shape[:2]
    if B not in (1, args.B) or H not in (1, args.H) or table.shape[2:] != blocks:
        raise ArgumentError(
            f"table of BlockSparse has shape {table.shape}; expected (B or 1, H or 1, ceil(S_q / "
            f"{rows}), ceil(S_kv / {columns})) = ({args.B} or 1, {args.H} or 1, {blocks[0]}, "
            f"{blocks[1]})"
        )


# Memory ----------------------------------------------------------------------------------


def all_apart(operands: Iterable[Operand]) -> bool:
    """Whether no two operands can share memory, told by where they begin and end."""
    spans = sorted([(one._address or 0, one.layout.span) for one in operands])
    end = 0
    for start, span in spans:
        if start < end:
            return False
        end = start + span
    return True
