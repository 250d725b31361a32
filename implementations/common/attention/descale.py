"""What 8-bit operands stand for: "descale_q", "descale_k" and "descale_v" of the scores' names are
what Q, K and V are multiplied with, one number, or one per sequence and head of keys."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from .scores import Tile
from .values import Values

_LEAST = 2.0**-126  # that scores are multiplied with: the smallest normal number


def descale(values: Values, name: str, batch: Int32, key_head: Int32) -> Float32:
    tensor = values[name]
    if tensor is None:
        return Float32(1.0)
    if not tensor.shape:
        return Float32(tensor[()])
    return Float32(tensor[batch, key_head])


def descale_of_products(values: Values, batch: Int32, key_head: Int32) -> Float32:
    of_queries = descale(values, "descale_q", batch, key_head)
    return of_queries * descale(values, "descale_k", batch, key_head)


def descaled(multiplier: Float32, values: Values, batch: Int32, key_head: Int32) -> Float32:
    """What products are multiplied with instead."""
    # 0 times the -inf of what is hidden would be no number.
    found = multiplier * descale_of_products(values, batch, key_head)
    return cute.arch.fmax(found, Float32(_LEAST), nan=True)


def descale_products(tile: Tile, values: Values, key_head: Int32) -> None:
    factor = descale_of_products(values, tile.batch, key_head)
    rows, columns = tile.extents
    for row in range(rows):
        for column in range(columns):
            tile.values[row, column] = tile.values[row, column] * factor
