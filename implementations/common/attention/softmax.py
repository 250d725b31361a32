"""Softmax of rows that arrive block by block.

Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import math
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from ..conversion import select
from ..threads import QUAD

LOG2_E = 1.0 / math.log(2.0)
LN_2 = math.log(2.0)
_LN_2_FLOAT = 0.693147182464599609375  # as float32 has it
_LN_2_REST = LN_2 - _LN_2_FLOAT

_CHAINS = 4  # independent maxima or sums of a row, so that they do not wait for each other


class OnlineSoftmax(NamedTuple):
    """Of the rows of a thread; four threads side by side share each.

    maxima: The largest score so far of each row.
    bases: What is taken from the exponents of each row: its maximum as an exponent of 2, rounded.
    sums: Of the powers of each row, of this thread's columns.
    multiplier: Of scores: what makes them exponents of 2. Positive.
    largest: The exponent of the largest power of a row so far, where 1 would leave no room for
        small ones in the type that they are rounded to.
    slack: By how much exponents may be larger before the maximum of a row is replaced: until then
        nothing that was computed with it has to change.
    least: Rows whose scores are all smaller see nothing; None: those whose scores are all -inf.
    """

    maxima: cute.Tensor
    bases: cute.Tensor
    sums: cute.Tensor
    multiplier: Float32
    largest: float = 0.0
    slack: float = 0.0
    least: float | None = None


#: What a row that sees nothing has of each statistic, by the names of launch values.
STATISTICS = {"lse": -math.inf, "score_max": -math.inf, "score_sum_exp": 0.0}


class Finished(NamedTuple):
    """A row that all its scores were added to.

    factor: What the sum of powers times values is to be multiplied with; 0 of a row that sees
        nothing.
    lse: The natural log of the sum of exponentials.
    score_max: The largest score.
    score_sum_exp: The sum of exponentials, divided by the largest one.
    """

    factor: Float32
    lse: Float32
    score_max: Float32
    score_sum_exp: Float32


def softmax_of(
    rows: int,
    multiplier: Float32,
    largest: float = 0.0,
    slack: float = 0.0,
    least: float | None = None,
) -> OnlineSoftmax:
    """Nothing has arrived."""
    maxima, bases, sums = (cute.make_rmem_tensor((rows,), Float32) for _ in range(3))
    maxima.fill(-math.inf)
    bases.fill(0.0)
    sums.fill(0.0)
    return OnlineSoftmax(maxima, bases, sums, multiplier, largest, slack, least)


def update(softmax: OnlineSoftmax, scores: cute.Tensor, factors: cute.Tensor | None) -> None:
    """Scores (rows, columns) into powers, of which the largest of a row so far is 2 ** largest, or
    2 ** slack times as much.

    factors: Written, per row: what older powers are to be multiplied with, 1 where the maximum
        stays. None: there are none.
    """
    columns = cute.size(scores, mode=[1])
    for row in range(cute.size(scores, mode=[0])):
        largest = largest_of_quad(_largest([scores[row, c] for c in range(columns)]))
        if softmax.least is not None:
            largest = select(largest < Float32(softmax.least), Float32(-math.inf), largest)
        before, base_before = softmax.maxima[row], softmax.bases[row]
        if factors is not None:
            largest = cute.arch.fmax(largest, before)
            if softmax.slack:
                more = (largest - before) * softmax.multiplier
                largest = select(more <= softmax.slack, before, largest)
        base = finite(largest) * softmax.multiplier
        softmax.maxima[row], softmax.bases[row] = largest, base
        subtrahend = base - softmax.largest
        sums = [Float32(0.0)] * _CHAINS
        for column in range(columns):
            exponent = cute.math.fma(scores[row, column], softmax.multiplier, -subtrahend)
            power = power_of_two(exponent)
            scores[row, column] = power
            sums[column % _CHAINS] = sums[column % _CHAINS] + power
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        if factors is not None:
            # Of two bases as they were taken: where the maximum stays, it is 1.
            factor = power_of_two(base_before - base)
            factors[row] = select(before == Float32(-math.inf), Float32(0.0), factor)
            total = cute.math.fma(softmax.sums[row], factors[row], total)
        softmax.sums[row] = total


def adopt(softmax: OnlineSoftmax, largest: list, factors: cute.Tensor) -> None:
    """Other threads had the scores behind these: of each row, the largest one so far.

    factors: Written, as by `update`.
    """
    for row, most in enumerate(largest):
        before, base_before = softmax.maxima[row], softmax.bases[row]
        base = finite(most) * softmax.multiplier
        factor = power_of_two(base_before - base)
        factors[row] = select(before == Float32(-math.inf), Float32(0.0), factor)
        softmax.maxima[row], softmax.bases[row] = most, base
        softmax.sums[row] = softmax.sums[row] * factors[row]


def finished(softmax: OnlineSoftmax, row: int, sink: Float32 | None = None) -> Finished:
    """Its largest score is that of all only without slack.

    sink: Of a further score whose value is 0.
    """
    total = sum_of_quad(softmax.sums[row])
    base, factor = softmax.bases[row], Float32(1.0)
    if sink is not None:
        further = sink * LOG2_E
        nothing = softmax.maxima[row] == Float32(-math.inf)
        most = cute.arch.fmax(select(nothing, Float32(-math.inf), base), further)
        # Without scores, base is 0 and may be far above the sink: 0 times infinity is no number.
        factor = power_of_two(cute.arch.fmin(base - finite(most), Float32(0.0)))
        base = finite(most)
        total = cute.math.fma(total, factor, power_of_two(further - base + softmax.largest))
    nothing = total == 0.0
    scale = select(nothing, Float32(0.0), factor / total)
    lse = natural(base, cute.math.log2(total) - softmax.largest)
    score_max = natural(base, total - total)  # of what is no number, maxima do not tell
    return Finished(
        scale,
        select(nothing, Float32(-math.inf), lse),
        select(nothing, Float32(-math.inf), score_max),
        total * 2.0**-softmax.largest,
    )


def natural(large: Float32, small: Float32) -> Float32:
    """The sum of two logarithms to base 2, as a natural one: exact to half a unit but for what is
    lost of the small one."""
    rest = cute.math.fma(large, Float32(_LN_2_REST), small * LN_2)
    return cute.math.fma(large, Float32(_LN_2_FLOAT), rest)


def power_of_two(x: Float32) -> Float32:
    return cute.math.exp2(x, approx=True, ftz=True)


def finite(x: Float32) -> Float32:
    """0 in place of -inf: a row that sees nothing has powers of 0, not of NaN."""
    return select(x == Float32(-math.inf), Float32(0.0), x)


def largest_of_quad(value: Float32) -> Float32:
    return _of_quad(value, cute.arch.fmax)


def sum_of_quad(value: Float32) -> Float32:
    return _of_quad(value, lambda a, b: a + b)


def _largest(values: list) -> Float32:
    chains = values[:_CHAINS]
    for i, value in enumerate(values[_CHAINS:]):
        chains[i % _CHAINS] = cute.arch.fmax(chains[i % _CHAINS], value)
    while len(chains) > 1:
        chains = [cute.arch.fmax(*chains[:2]), *chains[2:]]
    return chains[0]


def _of_quad(value: Float32, combine) -> Float32:
    for offset in (1, QUAD // 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value
