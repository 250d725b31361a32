"""Probabilities and gradients of scores, made again tile by tile of what the forward pass left."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ..common.attention.scores import Scores, Tile, rows_and_columns
from ..common.attention.sequences import Sequence
from ..common.attention.softmax import LOG2_E, power_of_two
from ..common.attention.values import Values


class TileStatistics(NamedTuple):
    """Of the queries that a thread has in a tile, see `RowStatistics`."""

    lse: cute.Tensor
    delta: cute.Tensor


class Recomputed(NamedTuple):
    """A tile of accumulators, in the layout of those of a product.

    products: Of queries and keys; None if scores are a multiple of them.
    powers: Probabilities before dropout.
    keep: What dropout multiplies them with; None: nothing.
    """

    products: cute.Tensor | None
    powers: cute.Tensor
    keep: cute.Tensor | None

    @property
    def kept(self) -> cute.Tensor:
        """Probabilities behind dropout."""
        return self.powers if self.keep is None else _product(self.powers, self.keep)


@cute.jit
def recomputed(
    scores: Scores,
    tile: Tile,
    accumulators: cute.Tensor,
    statistics: TileStatistics,
    sequence: Sequence,
    values: Values,
    heads: Int32,
    partly: Boolean,
    keys: int,
) -> Recomputed:
    """Of products, which become probabilities.

    tile: Of the accumulators.
    partly: Whether a query may not see a key.
    keys: That the first key of each warp is a multiple of.
    """
    products, multiplier = None, Float32(LOG2_E)
    if const_expr(scores.plain):
        multiplier = values.number("scale") * LOG2_E
    else:
        products = cute.make_rmem_tensor(accumulators.layout, Float32)
        products.store(accumulators.load())
        scores.change(tile, values)
    if const_expr(scores.hides_anywhere):
        partly = Boolean(True)
    if partly:
        _hide(scores, tile, sequence, values)
    _exponentiate(tile, statistics.lse, multiplier)
    keep = None
    if const_expr(scores.drops):
        keep = cute.make_rmem_tensor(accumulators.layout, Float32)
        keep.fill(1.0)
        scores.drop(tile.of(rows_and_columns(keep)), heads, values, keys=keys)
    return Recomputed(products, accumulators, keep)


def _hide(scores: Scores, tile: Tile, sequence: Sequence, values: Values) -> None:
    scores.hide(tile, sequence, values)


def _exponentiate(tile: Tile, lse: cute.Tensor, multiplier: Float32) -> None:
    rows, columns = tile.extents
    for row in range(rows):
        for column in range(columns):
            logarithm = lse[column if tile.transposed else row]
            exponent = cute.math.fma(tile.values[row, column], multiplier, -logarithm)
            tile.values[row, column] = power_of_two(exponent)


def differentiate(tile: Tile, found: Recomputed, gradients: cute.Tensor, delta: cute.Tensor):
    """Probabilities into derivatives by scores, before anything changed these.

    gradients: dO · Vᵀ.
    """
    if found.keep is not None:
        gradients = _product(gradients, found.keep)
    gradients = rows_and_columns(gradients)
    rows, columns = tile.extents
    for row in range(rows):
        for column in range(columns):
            own = delta[column if tile.transposed else row]
            power = tile.values[row, column]
            tile.values[row, column] = power * (gradients[row, column] - own)


def differentiate_changes(scores: Scores, tile: Tile, found: Recomputed, values: Values) -> None:
    """Derivatives by scores into those by scale · products."""
    if found.products is None:
        return
    scores.multiply_by_slopes(tile, rows_and_columns(found.products), values)


def _product(a: cute.Tensor, b: cute.Tensor) -> cute.Tensor:
    found = cute.make_rmem_tensor(a.layout, Float32)
    found.store(a.load() * b.load())
    return found
