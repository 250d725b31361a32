"""Where the sequences of a batch lie, and which keys a query sees."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..conversion import select
from .values import Values


class Sequence(NamedTuple):
    """One of a batch.

    first_query, first_key: Rows of the tensors where it begins: 0 unless sequences are packed.
    queries, keys: Its lengths.
    query_rows: Rows that are its own, `queries` of them in use: what is written to the others is 0.
    low, high: Query i sees key j if low <= j - i <= high; None: any.
    """

    first_query: Int32
    first_key: Int32
    queries: Int32
    keys: Int32
    query_rows: Int32
    low: Int32 | None
    high: Int32 | None


class Range(NamedTuple):
    """Blocks of keys that some queries, side by side, see; or of queries that see some keys.

    begin, end: Those with a pair of a query and a key that it may see.
    full_begin, full_end: Those of which every query sees every key:
        begin <= full_begin <= full_end <= end.
    """

    begin: Int32
    end: Int32
    full_begin: Int32
    full_end: Int32


def sequence_of(values: Values, batch: Int32, query_rows: Int32, key_rows: Int32) -> Sequence:
    """query_rows, key_rows: Of the tensors, or of a cache: where lengths are not given."""
    first_query, first_key = Int32(0), Int32(0)
    queries, keys = Int32(query_rows), Int32(key_rows)
    own = queries
    if "cu_seqlens_q" in values:
        starts = values["cu_seqlens_q"]
        first_query, own = starts[batch], starts[batch + 1] - starts[batch]
        queries = own
    if "cu_seqlens_kv" in values:
        starts = values["cu_seqlens_kv"]
        first_key, keys = starts[batch], starts[batch + 1] - starts[batch]
    if "seq_lens_q" in values:
        queries = cutlass.min(queries, values["seq_lens_q"][batch])
    if "seq_lens_kv" in values:
        keys = cutlass.min(keys, values["seq_lens_kv"][batch])
    low, high = _band(values, keys - queries)
    return Sequence(first_query, first_key, queries, keys, own, low, high)


def _band(values: Values, behind: Int32) -> tuple:
    """behind: How many positions later the last key stands than the last query."""
    low = high = None
    if "left" in values:
        low = -values.bound("left")
    if "left_end" in values:
        other = behind - values.bound("left_end")
        low = other if low is None else cutlass.max(low, other)
    if "right" in values:
        high = values.bound("right")
    if "right_end" in values:
        other = behind + values.bound("right_end")
        high = other if high is None else cutlass.min(high, other)
    return low, high


def keys_in_pages(values: Values, page_size: int) -> Int32:
    """Of a sequence, at most."""
    return Int32(values["page_table"].shape[1]) * page_size


def keys_seen(sequence: Sequence, first: Int32, rows: int, block: int) -> Range:
    """By queries first, first + 1, ... first + rows - 1, in blocks of keys.

    first: Less than the number of queries.
    """
    last = cutlass.min(first + rows, sequence.queries) - 1
    seen_end, full_end = sequence.keys, sequence.keys
    seen_begin, full_begin = Int32(0), Int32(0)
    if const_expr(sequence.high is not None):
        seen_end = cutlass.min(seen_end, last + sequence.high + 1)
        full_end = cutlass.min(full_end, first + sequence.high + 1)
    if const_expr(sequence.low is not None):
        seen_begin = cutlass.max(seen_begin, first + sequence.low)
        full_begin = cutlass.max(full_begin, last + sequence.low)
    return _blocks(seen_begin, seen_end, full_begin, full_end, block)


def queries_seeing(sequence: Sequence, first: Int32, keys: int, block: int) -> Range:
    """Blocks of queries that see keys first, ... first + keys - 1: as `keys_seen` with the roles
    changed.

    first: Less than the number of keys.
    """
    last = cutlass.min(first + keys, sequence.keys) - 1
    seen_end, full_end = sequence.queries, sequence.queries
    seen_begin, full_begin = Int32(0), Int32(0)
    if const_expr(sequence.low is not None):
        seen_end = cutlass.min(seen_end, last - sequence.low + 1)
        full_end = cutlass.min(full_end, first - sequence.low + 1)
    if const_expr(sequence.high is not None):
        seen_begin = cutlass.max(seen_begin, first - sequence.high)
        full_begin = cutlass.max(full_begin, last - sequence.high)
    # Not all keys of the last block may be there.
    full_end = select(first + keys > sequence.keys, Int32(0), full_end)
    return _blocks(seen_begin, seen_end, full_begin, full_end, block)


def _blocks(seen_begin, seen_end, full_begin, full_end, block: int) -> Range:
    begin = seen_begin // block
    end = cutlass.max(begin, cute.ceil_div(cutlass.max(seen_end, 0), block))
    inner_begin = cutlass.min(cute.ceil_div(full_begin, block), end)
    inner_end = cutlass.max(inner_begin, cutlass.max(full_end, 0) // block)
    return Range(begin, end, inner_begin, cutlass.min(inner_end, end))
