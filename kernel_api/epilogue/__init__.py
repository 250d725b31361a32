"""Epilogues: plain Python functions of the accumulator, traced once into an expression graph.

    from kernel_api import epilogue as ep

    def fn(accum, bias, alpha):
        D = alpha * accum
        D += bias
        return ep.gelu(D), D

    ka.EpilogueArguments(fn, bias=bias, alpha=0.5, preactivation=preactivation)

``fn`` is called with symbolic values, so that helpers, closures and lambdas work. What has no
value yet cannot decide an ``if``, be looped over or be handed to torch: that is an EpilogueError
with the line. Plain numbers in ``fn`` are constants; those passed as operands are run-time values.

The graph is a tuple of nodes in topological order. Arithmetic is in float32 (float64 where the
accumulator is); operands are converted when they are read, outputs when they are written, as
``cast`` does. Where no matrix that is written has more than 16 bits, kernels may multiply by a
reciprocal in place of dividing: a divisor nearer to 0 than 2⁻¹²⁶ may then count as 0. Keep scales
that ``fn`` computes above that, as in ``ep.maximum(ep.amax(x, -1, 32), 1e-30)``.

A value has a shape: which of the modes batch, rows and columns it has, and how many columns in
units of N; missing modes are broadcast. Where groups of rows are batches, what has rows has the
batch mode in the graph and none in memory. The nodes are

==================================  ============================================================
``accumulator``                     the matrix product, (L, M, N)
``constant`` value                  a number, in hexadecimal text; rounded to the arithmetic's type
``operand`` name, type              a tensor, read as ``real``, ``bool`` or ``integer``
``scalar`` name, type               a Python number that is passed at run time
``table`` name, columns             a tensor that ``rotate`` or ``hadamard`` read, and nothing else
``neg abs floor exp expm1 log``     of each element
``log1p sqrt rsqrt tanh``           of each element
``sigmoid erf``                     of each element
``add sub mul div``                 of two
``floor_divide modulo``             of two: the quotient, rounded down, and the rest; of quotients
                                    beyond 2⁴⁷ kernels give no rest
``minimum maximum``                 of two; NaN if either is
``lt le gt ge eq ne``               truth values of two numbers
``and or not``                      truth values of truth values
``where``                           condition, a, b
``cast`` to                         rounded to an element type; see :func:`cast`
``split`` part, granularity         of pairs of column blocks, the first (part 0) or second (1)
``interleave`` granularity          the inverse: first, second → twice as many columns
``repeat`` times                    every column so often, side by side
``rotate`` head_dim, start,         x, cos, sin; see :func:`rotate`
width, style
``hadamard``                        x, or x and signs: blocks of 16 columns times ±1, not divided
``uniform``                         seed, offset → random numbers in [0, 1); see :func:`dropout`
``reduce`` kind, axis[, block]      ``sum``, ``mean``, ``max``, ``min`` or ``amax`` over
                                    ``columns``, ``rows``, the ``matrix``, ``all`` batches, or
                                    each ``block`` of so many columns
==================================  ============================================================

Everything else (activations, derivatives, dropout, mean squares, powers) is composed of these.
Beside ``floor``, ``floor_divide`` and ``modulo`` kernels approximate nothing; but x ** 0.3 and
2 ** x are exp(y · log(x)), so that a floor of them may be one less where they should be whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_api._lazy import attribute

if TYPE_CHECKING:
    from kernel_api.epilogue.functions import (
        abs,
        cast,
        ceil,
        clamp,
        derivative,
        elu,
        erf,
        exp,
        floor,
        gelu,
        gelu_tanh,
        hardswish,
        leaky_relu,
        log,
        maximum,
        minimum,
        quantize,
        reciprocal,
        relu,
        rsqrt,
        sigmoid,
        silu,
        softcap,
        softplus,
        sqrt,
        squared_relu,
        tanh,
        where,
    )
    from kernel_api.epilogue.graph import Graph, Node
    from kernel_api.epilogue.shape import Problem, Shape
    from kernel_api.epilogue.structure import (
        amax,
        dropout,
        glu_pair,
        hadamard,
        interleave,
        max,
        mean_square,
        min,
        repeat,
        rotate,
        sum,
    )

__all__ = [
    "Graph",
    "Node",
    "Problem",
    "Shape",
    "abs",
    "amax",
    "cast",
    "ceil",
    "clamp",
    "derivative",
    "dropout",
    "elu",
    "erf",
    "exp",
    "floor",
    "gelu",
    "gelu_tanh",
    "glu_pair",
    "hadamard",
    "hardswish",
    "interleave",
    "leaky_relu",
    "log",
    "max",
    "maximum",
    "mean_square",
    "min",
    "minimum",
    "quantize",
    "reciprocal",
    "relu",
    "repeat",
    "rotate",
    "rsqrt",
    "sigmoid",
    "silu",
    "softcap",
    "softplus",
    "sqrt",
    "squared_relu",
    "sum",
    "tanh",
    "where",
]

#: Loaded on first use: a thread that imports one of the modules first waits for this package, which
#: may not wait for it at the same time.
_HOME_OF = {
    **dict.fromkeys(__all__, "epilogue.functions"),
    **dict.fromkeys(("Graph", "Node"), "epilogue.graph"),
    **dict.fromkeys(("Problem", "Shape"), "epilogue.shape"),
    **dict.fromkeys(
        ("amax", "dropout", "glu_pair", "hadamard", "interleave", "max", "mean_square", "min"),
        "epilogue.structure",
    ),
    **dict.fromkeys(("repeat", "rotate", "sum"), "epilogue.structure"),
}


if not TYPE_CHECKING:  # to which every name would be there, and of any type

    def __getattr__(name: str) -> Any:
        return attribute(__name__, name, _HOME_OF)


def __dir__() -> list[str]:
    return sorted(__all__)
