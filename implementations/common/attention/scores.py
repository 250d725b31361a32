"""What becomes of a product of a query and a key before the softmax, and after it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64

from ..conversion import select
from ..functions import functions_for
from .dropout import Halves, kept_factor, least_half
from .sequences import Sequence
from .values import Values

#: What changes scores beside the scale.
_CHANGES = ("softcap", "bias", "alibi")

#: Scores below are -inf, so that a row has others or sees nothing: float32 has no digits that tell
#: such scores apart, and their exponentials relative to the largest would be any powers.
LEAST = -(2.0**26)

_COLUMNS = 8  # of an accumulator, of which a thread has two side by side


class Place(NamedTuple):
    """Of a score. query, key: Within their sequences."""

    batch: Int32
    head: Int32
    query: Int32
    key: Int32


@dataclass(frozen=True)
class ScoreFunctions:
    """What graphs say, as functions of (score, place, operands by name).

    score: The score that takes its place; None: as it is.
    slope: Its derivative by the score.
    visible: Without the score: whether the query sees the key; None: all that it else does.
    """

    score: Callable | None = None
    slope: Callable | None = None
    visible: Callable | None = None


class Tile(NamedTuple):
    """Scores that a thread has, and where they stand.

    values: (rows, columns); of one accumulator.
    local: The same of coordinates: (query, key) from the first of the tile, (key, query) if
        transposed.
    first_query, first_key: Of the tile.
    head: Of its queries; of its keys where there is a group.
    group: Heads of queries that share the head of keys, if all of them have rows, query by query:
        what is said of queries in `local` and `first_query` is said of such rows. None: the rows
        are queries.
    factors: Of the rows: what products with their query are multiplied with; None: 1.
    bias: Of the scores, (rows, columns); None: it is read where it lies.
    """

    values: cute.Tensor
    local: cute.Tensor
    first_query: Int32
    first_key: Int32
    batch: Int32
    head: Int32
    transposed: bool = False
    group: Int32 | None = None
    factors: cute.Tensor | None = None
    bias: cute.Tensor | None = None

    @property
    def extents(self) -> tuple[int, int]:
        return cute.size(self.values, mode=[0]), cute.size(self.values, mode=[1])

    def place(self, row: int, column: int) -> Place:
        (query, key), (queries, keys) = self.first, self._queries_and_keys(self.offset(row, column))
        query, head = query + queries, self.head
        if self.group is not None:
            query, head = query // self.group, head * self.group + query % self.group
        return Place(self.batch, head, query, key + keys)

    @property
    def first(self) -> tuple[Int32, Int32]:
        """(query, key) of the first score of this thread."""
        query, key = self._queries_and_keys(self.local[0, 0])
        return self.first_query + query, self.first_key + key

    def offset(self, row: int, column: int) -> tuple[int, int]:
        """How far a score stands from the first one of this thread, known as it is traced: the
        compiler would keep sums with what is not in registers."""
        along, across = cute.crd2idx((row, column), self.local.layout)
        return int(along), int(across)

    @property
    def lines(self) -> list[list[tuple[int, int]]]:
        """(row, column) of all scores, query by query."""
        rows, columns = map(range, self.extents)
        if self.transposed:
            return [[(row, column) for row in rows] for column in columns]
        return [[(row, column) for column in columns] for row in rows]

    def keys_behind(self, row: int, column: int) -> int:
        """How far the key of a score is behind the first one of this thread."""
        _, keys = self._queries_and_keys(self.offset(row, column))
        return keys

    def _queries_and_keys(self, pair: tuple) -> tuple:
        return pair[:: -1 if self.transposed else 1]

    def of(self, values: cute.Tensor) -> "Tile":
        """Other numbers at the same places."""
        return self._replace(values=values)


def rows_and_columns(accumulators: cute.Tensor) -> cute.Tensor:
    """(rows, columns) of ((2, 2, ...), M, N), as mma.sync and wgmma leave them to a thread."""
    (pair, half, *blocks), m, n = accumulators.layout.shape
    (pair_step, half_step, *steps), m_step, n_step = accumulators.layout.stride
    layout = cute.make_layout(
        ((half, m), (pair, *blocks, n)), stride=((half_step, m_step), (pair_step, *steps, n_step))
    )
    return cute.make_tensor(accumulators.iterator, layout)


class Scores:
    """softmax's argument: s = scale · product -> softcap -> score function -> + bias -> + alibi,
    of those that are there, and -inf where a query does not see a key; or as good as does not, by a
    bias or a function.

    names: Of `Values`.
    block_shape: (queries, keys) of an entry of the table "blocks".
    full: The entry that says that functions show all; None: there is none.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        functions: ScoreFunctions | None = None,
        block_shape: tuple[int, int] | None = None,
        *,
        full: int | None = None,
    ):
        self.names = names
        self.functions = functions or ScoreFunctions()
        self.block_shape = block_shape
        self.full = None if self.functions.visible is None else full
        #: Whether scores are products times a scale, which may be applied later.
        self.plain = self.functions.score is None and not set(_CHANGES) & set(names)
        #: Whether any key may be hidden, wherever it stands.
        self.hides_anywhere = self.functions.visible is not None or "blocks" in names
        #: Whether a score depends on where it stands.
        self.placed = self.functions.score is not None or bool({"bias", "alibi"} & set(names))
        #: Whether scores below `LEAST` are as good as hidden.
        self.hides_by_value = self.functions.score is not None or "bias" in names
        self.drops = "dropout_p" in names
        self._tanh = functions_for((Float16,), (Float16,))[0]["tanh"]

    def change(self, tile: Tile, values: Values, *, by_rows: bool = False) -> None:
        """Products into scores; unless they are plain.

        by_rows: A row whose scores are all below `LEAST` is taken as one that sees nothing, and
            none is hidden by itself: beside larger ones such scores have powers of 0 as they are,
            but for those that are nearly as large as the largest.
        """
        hides = self.hides_by_value and not by_rows
        for row, column in _order(tile, by_columns=self.placed and tile.group is not None):
            place = tile.place(row, column)
            bias = None if tile.bias is None else tile.bias[row, column]
            score = self._score(tile.values[row, column], place, values, bias)
            if hides:
                score = select(score < Float32(LEAST), Float32(-math.inf), score)
            tile.values[row, column] = score

    def hide(
        self,
        tile: Tile,
        sequence: Sequence,
        values: Values,
        *,
        by_table: bool = True,
        by_functions: bool = True,
        keys: int = 1,
    ) -> None:
        """-inf where a query does not see a key.

        by_table, by_functions: Whether the table "blocks", or functions, may hide one.
        keys: That `first_key` is a multiple of.
        """
        by_table = by_table and "blocks" in values
        by_functions = by_functions and self.functions.visible is not None
        span = self._span(keys) if by_table else None
        entries = None if span is None else self._entries(tile, values, span)
        seen = {}
        for row, column in _order(tile, by_columns=tile.group is not None):
            if row not in seen:
                seen[row] = self._seen_in_row(tile, row, sequence)
            first, last = seen[row]
            _, other = tile.offset(row, column)
            hidden = last < other
            if first is not None:
                hidden = hidden | (first > other)
            place = tile.place(row, column) if by_table or by_functions else None
            if by_table:
                if entries is None:
                    entry = self._entry(place, values)
                else:
                    entry = ((entries[row] >> (other // span)) & 1) != 0
                hidden = hidden | (entry == Boolean(False))
            if by_functions:
                visible = self.functions.visible(place, values.with_prefix("mask_"))
                hidden = hidden | (visible == Boolean(False))
            score = tile.values[row, column]
            tile.values[row, column] = select(hidden, Float32(-math.inf), score)

    def multiply_by_slopes(self, tile: Tile, products: cute.Tensor, values: Values) -> None:
        """Derivatives by scores into those by scale · product; products: as before `change`."""
        rows, columns = tile.extents
        for row in range(rows):
            for column in range(columns):
                slope = self._slope(products[row, column], tile.place(row, column), values)
                before = tile.values[row, column]
                found = before * slope
                if self.functions.score is not None:
                    # The slope of a score that is not seen may be anything.
                    found = select(before == Float32(0.0), Float32(0.0), found)
                tile.values[row, column] = found

    def drop(
        self, tile: Tile, heads: Int32, values: Values, *, keys: int, scaled: bool = True
    ) -> None:
        """What is dropped becomes 0.

        keys: That the first key of each warp is a multiple of.
        scaled: Whether what is kept is divided by the probability that it is, see `kept_factor`.
        """
        least = least_half(values.number("dropout_p"))
        factor = self.kept_factor(values) if scaled else None
        for line in tile.lines:
            halves = self._halves(tile, line[0], heads, values, keys)
            for at in line:
                kept = tile.values[at] * factor if scaled else tile.values[at]
                drawn = halves(tile.keys_behind(*at))
                tile.values[at] = select(drawn >= least, kept, Float32(0.0))

    def kept_factor(self, values: Values) -> Float32:
        """Of what is kept."""
        return kept_factor(values.number("dropout_p"))

    # Elements ----------------------------------------------------------------------------

    def _score(self, product: Float32, place: Place, values: Values, bias=None) -> Float32:
        """bias: None: it is read where it lies, if there is one."""
        if bias is None and "bias" in values:
            bias = values.element("bias", *place)
        scale = values.number("scale")
        if bias is not None and self.functions.score is None and "softcap" not in values:
            score = cute.math.fma(product, scale, Float32(bias))
        else:
            score = self._capped(product * scale, values)
            if self.functions.score is not None:
                score = self.functions.score(score, place, values.with_prefix("score_"))
            if bias is not None:
                score = score + Float32(bias)
        if "alibi" in values:
            distance = Float32(place.key - place.query)
            score = score + Float32(values.element("alibi", place.head)) * distance
        return score

    def _capped(self, score: Float32, values: Values) -> Float32:
        if "softcap" not in values:
            return score
        cap = values.number("softcap")
        return cap * self._tanh(score * (1.0 / cap))

    def _slope(self, product: Float32, place: Place, values: Values) -> Float32:
        score = product * values.number("scale")
        slope = Float32(1.0)
        if "softcap" in values:
            capped = self._capped(score, values)
            part = capped * (1.0 / values.number("softcap"))
            score, slope = capped, 1.0 - part * part
        if self.functions.score is not None:
            slope = slope * self.functions.slope(score, place, values.with_prefix("score_"))
        return slope

    def _span(self, keys: int) -> int | None:
        """Keys side by side that share an entry of the table, from a multiple of so many on. None:
        they may not be those that a thread has of 8 columns."""
        span = math.gcd(keys, self.block_shape[1]) if self.block_shape else 1
        return span if span % _COLUMNS == 0 else None

    def _entries(self, tile: Tile, values: Values, span: int) -> list[Int32]:
        """Of each row: a bit for every so many keys from the first of the tile."""
        rows, columns = tile.extents
        found = [Int32(0)] * rows
        firsts = {tile.offset(0, column)[1] // span: column for column in reversed(range(columns))}
        for bit, column in sorted(firsts.items()):
            for row in range(rows):
                entry = self._entry(tile.place(row, column), values)
                found[row] = found[row] | (Int32(entry) << bit)
        return found

    def _entry(self, place: Place, values: Values) -> Boolean:
        """Whether the table lets the query see the key."""
        queries, keys = self.block_shape
        indices = place.batch, place.head, place.query // queries, place.key // keys
        return values.element("blocks", *indices) != 0

    def _seen_in_row(self, tile: Tile, row: int, sequence: Sequence) -> tuple:
        """(first, last) that are seen in a row, counted from its first score of this thread; first
        may be None: all."""
        low, high = sequence.low, sequence.high
        (query, key), (own, _) = tile.first, tile.offset(row, 0)
        if not tile.transposed:
            query = query + own
            if tile.group is not None:
                query = query // tile.group
            last = sequence.keys - 1
            if high is not None:
                last = _least(last, query + high)
            return None if low is None else query + low - key, last - key
        key = key + own
        last = sequence.queries - 1
        if low is not None:
            last = _least(last, key - low)
        last = select(key < sequence.keys, last - query, Int32(-1))
        return None if high is None else key - high - query, last

    def _halves(
        self, tile: Tile, at: tuple[int, int], heads: Int32, values: Values, keys: int
    ) -> Halves:
        """Random numbers of the query that a score has."""
        place, (_, first) = tile.place(*at), tile.first
        seed = Int64(values.integer("dropout_seed"))
        offset = Int64(values.integer("dropout_offset")) + Int64(place.batch * heads + place.head)
        return Halves(first, place.query, offset, seed, pairs=not tile.transposed, keys=keys)


def _order(tile: Tile, *, by_columns: bool) -> list[tuple[int, int]]:
    """(row, column) of all scores. By columns, nothing of one is kept for the next row."""
    rows, columns = tile.extents
    if by_columns:
        return [(row, column) for column in range(columns) for row in range(rows)]
    return [(row, column) for row in range(rows) for column in range(columns)]


def _least(a: Int32, b: Int32) -> Int32:
    return select(a < b, a, b)
