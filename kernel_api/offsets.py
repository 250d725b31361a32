"""Where groups of tokens end, as :class:`~kernel_api.arguments.GroupedGemmArguments` take it, of
what else says it; and checks for when results are odd.

Nothing here but the checks waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_api._numbers import whole_number
from kernel_api._settings import setting
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand

#: Set to 1, runs of products of groups, one-call forms that saw no such call without it, and
#: launches that were prepared meanwhile, check offsets and row indices before, and what makes
#: offsets of starts or boundaries checks these, which waits for the device.
VARIABLE = "KERNEL_API_CHECK_OFFSETS"
_RAW = os.fsencode(VARIABLE)

_INT32_ENDS = 2**31  # what no offset reaches


def offsets_from_counts(counts: Any) -> Any:
    """int32 (E,): the ends of groups of so many tokens.

    Args:
        counts: Integers (E,).
    """
    import torch

    return _integers("counts", counts).cumsum(0, dtype=torch.int32)


def offsets_from_starts(starts: Any, T: Any) -> Any:
    """int32 (E,): the ends of groups that begin there.

    Args:
        starts: Integers (E,), the first of them 0.
        T: Where the last group ends: an integer, or a tensor of one.

    Raises:
        ArgumentError: T is no number of tokens; with KERNEL_API_CHECK_OFFSETS=1, the first is
            not 0.
    """
    import torch

    given = _integers("starts", starts)
    _check_tokens(T, _INT32_ENDS)
    _check_first(given)
    found = given.to(torch.int32).roll(-1)
    found[-1:] = T
    return found


def offsets_from_boundaries(boundaries: Any) -> Any:
    """int32 (E,): the ends of groups, of 0 and these.

    Args:
        boundaries: Integers (E + 1,), the first of them 0.

    Raises:
        ArgumentError: with KERNEL_API_CHECK_OFFSETS=1, the first is not 0.
    """
    import torch

    given = _integers("boundaries", boundaries)
    _check_first(given)
    return given[1:].to(torch.int32, copy=True)


def check_starts(starts: Any) -> None:
    """Raise ArgumentError unless the first group begins at 0. It waits for the device."""
    first = int(_integers("starts", starts)[0])
    if first:
        raise ArgumentError(
            f"the first group begins at {first}; expected 0, as the rows in front of it would "
            f"belong to no group: pass what lies behind them"
        )


def check_offsets(offsets: Any, T: int) -> None:
    """Raise ArgumentError, with the first bad place, unless offsets never decrease and lie between
    0 and T. It waits for the device."""
    _check_tokens(T)
    before = 0
    for place, end in enumerate(_integers("offsets", offsets).tolist()):
        if end < before:
            said = f"offsets[{place - 1}] is {before}" if place else "the first group begins at 0"
            raise ArgumentError(f"offsets[{place}] is {end} and {said}; they may not decrease")
        if end > T:
            raise ArgumentError(f"offsets[{place}] is {end}; there are T = {T} tokens")
        before = end


def check_is_asked() -> bool:
    """By the environment; ArgumentError if that says something else."""
    asked = setting(_RAW) or b""
    if asked not in (b"", b"0", b"1"):
        said = os.fsdecode(asked)
        raise ArgumentError(f"{VARIABLE} is {said!r}; expected 1, or 0 for no checks")
    return asked == b"1"


def check_groups(
    tensors: Sequence[Any], indices: Mapping[str, Any], ragged: str, stream: Any = None
) -> None:
    """Check the offsets and row indices of a product of groups as its kernel will find them on a
    stream; nothing is checked while a CUDA graph is captured.

    Args:
        tensors: A, B, out and the offsets.
        indices: ``row_index`` and ``out_row_index``, those that there are.
        ragged: The mode that is cut into groups.

    Raises:
        ArgumentError: offsets decrease or lie outside, an index names no row, or two tokens are
            written to one.
    """
    from kernel_api.providers.streams import on_stream

    A, _, out, offsets = tensors
    on_gpu = offsets.device.type == "cuda"
    if _is_captured(offsets, stream):
        return
    per_token = next(iter(indices.values()), A)
    T = per_token.shape[0 if ragged == "M" else 1]
    with on_stream(stream if on_gpu else None, offsets.device.index):
        check_offsets(offsets, T)
        used = slice(0, int(_integers("offsets", offsets)[-1]))
        if "row_index" in indices:
            _check_rows("row_index", "A", indices["row_index"][used], A.shape[0])
        if "out_row_index" in indices:
            written = indices["out_row_index"][used]
            _check_rows("out_row_index", "out", written, out.shape[0])
            _check_distinct("out_row_index", written)


def check_scattered(row_index: Any, rows: int, stream: Any = None) -> None:
    """Check that no row of so many is named twice, as :func:`check_groups` does.

    Args:
        row_index: Of any shape; what is no row is not looked at.

    Raises ArgumentError: two places are written to one row.
    """
    import torch

    from kernel_api.providers.streams import on_stream

    if _is_captured(row_index, stream):
        return
    with on_stream(stream if row_index.is_cuda else None, row_index.device.index):
        index = row_index.flatten().long()
        absent = -1 - torch.arange(len(index), device=index.device)  # each a number of its own
        there = (index >= 0) & (index < rows)
        _check_distinct("row_index.flatten()", index.where(there, absent))


def _check_first(starts: Any) -> None:
    """:func:`check_starts`, where that is asked and can be."""
    import torch

    if not torch.compiler.is_compiling() and check_is_asked() and not _is_captured(starts):
        check_starts(starts)


def _check_tokens(T: Any, beyond: int | None = None) -> None:
    """Raise ArgumentError for what is no number of tokens, or not below another."""
    import torch

    if torch.compiler.is_compiling():  # a comparison would narrow what torch.export may see there
        return
    if isinstance(T, torch.Tensor):
        if T.numel() != 1 or T.is_floating_point() or T.is_complex() or T.dtype is torch.bool:
            raise ArgumentError(f"T is {Operand(T, 'T')!r}; expected one integer")
        return
    if isinstance(T, torch.SymInt):
        return
    whole = whole_number(T)
    if whole is None or whole < 0 or (beyond is not None and whole >= beyond):
        below = "" if beyond is None else f" below {beyond}"
        raise ArgumentError(f"T is {T!r}; expected a number of tokens{below}")


def _is_captured(tensor: Any, stream: Any = None) -> bool:
    """Whether what is done with it on the stream becomes part of a CUDA graph."""
    from kernel_api.devices import capturing

    return tensor.device.type == "cuda" and capturing(tensor.device.index, stream)


def _check_rows(name: str, of: str, index: Any, rows: int) -> None:
    outside = ((index < 0) | (index >= rows)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise ArgumentError(f"{name}[{place}] is {int(index[place])}; {of} has {rows} rows")


def _check_distinct(name: str, index: Any) -> None:
    row, place = index.sort(stable=True)
    equal = (row[1:] == row[:-1]).nonzero()
    if len(equal):
        first = int(equal[0])
        one, other = place[first : first + 2].tolist()
        raise ArgumentError(
            f"{name}[{one}] and {name}[{other}] are {int(row[first])}; expected a row of its own "
            f"for each token"
        )


def _integers(name: str, value: Any) -> Any:
    import torch

    tensor = value
    if not isinstance(value, torch.Tensor):
        tensor = (value if isinstance(value, Operand) else Operand(value, name)).tensor
    # Of torch's types: torch.compile can follow this into its graph.
    kind = tensor.dtype
    are_integers = not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
    if not are_integers or tensor.dim() != 1 or not tensor.shape[0]:
        raise ArgumentError(f"{name} is {Operand(tensor, name)!r}; expected integers in one mode")
    return tensor
