"""Random epilogues: a grammar of expressions, and the arguments that they make.

An expression is a tuple: what it does, then its operands, expressions or parameters. It is written
down by `evaluate` with the functions of a namespace: those of kernel_api.epilogue on traced values,
or those of torch on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import hypothesis.strategies as st
import torch

import kernel_api as ka
import kernel_api.epilogue as ep
from support.epilogues import normal

_LEAVES = ("accum", "bias", "row", "full", "alpha", "scalar", "batch")
_CONSTANTS = (0.5, -1.25, 2, 3.0)

SMOOTH = {
    "exp": lambda f, x: f.exp(f.clamp(x, -4.0, 4.0)),
    "log": lambda f, x: f.log(f.abs(x) + 0.5),
    "sqrt": lambda f, x: f.sqrt(f.abs(x) + 0.1),
    "rsqrt": lambda f, x: f.rsqrt(x * x + 0.25),
    "reciprocal": lambda f, x: f.reciprocal(f.abs(x) + 0.5),
    "tanh": lambda f, x: f.tanh(x),
    "sigmoid": lambda f, x: f.sigmoid(x),
    "erf": lambda f, x: f.erf(x),
    "abs": lambda f, x: f.abs(x),
    "neg": lambda f, x: -x,
    "square": lambda f, x: f.softcap(x, 10.0) ** 2,
    "relu": lambda f, x: f.relu(x),
    "relu of a slope": lambda f, x: f.relu(x, 0.1, -0.5, 2.0),
    "leaky_relu": lambda f, x: f.leaky_relu(x, 0.2),
    "silu": lambda f, x: f.silu(x, 1.5),
    "gelu": lambda f, x: f.gelu(x),
    "gelu_tanh": lambda f, x: f.gelu_tanh(x),
    "softplus": lambda f, x: f.softplus(x),
    "elu": lambda f, x: f.elu(x),
    "hardswish": lambda f, x: f.hardswish(x),
    "squared_relu": lambda f, x: f.squared_relu(f.clamp(x, -9.0, 9.0)),
    "softcap": lambda f, x: f.softcap(x, 3.0),
    "clamp": lambda f, x: f.clamp(x, -1.0, 2.0),
    "dsilu": lambda f, x: f.derivative("silu")(x),
    "dgelu": lambda f, x: f.derivative("gelu")(x),
    "dgelu_tanh": lambda f, x: f.derivative("gelu_tanh")(x),
    "dsoftplus": lambda f, x: f.derivative("softplus")(x),
}
STEPS = {
    "drelu": lambda f, x: f.derivative("relu")(x),
    "cast": lambda f, x: f.cast(x, torch.bfloat16),
    "quantize": lambda f, x: f.quantize(x, torch.int8, 0.125),
    "floor": lambda f, x: f.floor(x),
    "ceil": lambda f, x: f.ceil(3.0 * x),
}
BINARY = {
    "add": lambda f, a, b: a + b,
    "sub": lambda f, a, b: a - b,
    "mul": lambda f, a, b: a * b,
    "div": lambda f, a, b: a / (f.abs(b) + 1.0),
    "minimum": lambda f, a, b: f.minimum(a, b),
    "maximum": lambda f, a, b: f.maximum(a, b),
    "whole quotient": lambda f, a, b: a // (f.abs(b) + 1.0),
    "remainder": lambda f, a, b: a % (f.abs(b) + 1.0),
    "power": lambda f, a, b: f.minimum(a, b) + 1.5 ** f.minimum(f.abs(b), 3.0),
}
TERNARY = {
    "where": lambda f, a, b, c: f.where(a > b, b, c),
    "between": lambda f, a, b, c: f.where((a > b) & ~(a >= c), a, c),
}
OPERATIONS = {**SMOOTH, **STEPS, **BINARY, **TERNARY}
_REDUCTIONS = ("sum", "max", "min", "amax", "mean_square")


#: Draws one of several values: by hypothesis, or by a seed.
Choose = Callable[[Sequence[Any]], Any]


def expression(choose: Choose, leaves: tuple[str, ...], size: int) -> tuple:
    """Of about so many operations."""
    if size < 1:
        return (choose([*leaves, *["accum"] * 4]),)
    arity = choose((1, 1, 1, 2, 2, 3))
    if arity == 1:
        return choose([*SMOOTH] * 3 + [*STEPS]), expression(choose, leaves, size - 1)
    inner = [expression(choose, leaves, (size - 1) // arity) for _ in range(arity)]
    if arity == 2 and choose((False, False, True)):
        inner[1] = choose(_CONSTANTS)
    return choose([*BINARY] if arity == 2 else [*TERNARY]), *inner


def evaluate(functions, expression, values):
    if not isinstance(expression, tuple):
        return expression
    name, *inner = expression
    if name in values:
        return values[name]
    return OPERATIONS[name](functions, *(evaluate(functions, e, values) for e in inner))


def leaves_of(expression) -> set[str]:
    if not isinstance(expression, tuple):
        return set()
    name, *inner = expression
    return {name} if not inner else set().union(*map(leaves_of, inner))


def epilogue(choose: Choose) -> dict[str, Any]:
    """A whole epilogue: D, other outputs, and how the columns are paired before or after."""
    batched = choose((False, True))
    leaves = _LEAVES if batched else _LEAVES[:-1]
    granularity = choose((1, 2, 8, 32, "halves"))

    def body():
        return "add", ("mul", expression(choose, leaves, choose(range(8))), 0.5), ("accum",)

    def other():
        if choose((False, True)):
            return "store", body()
        return choose(_REDUCTIONS), body(), choose((-1, -2, None))

    return {
        "batched": batched,
        "M": choose(range(1, 7)),
        "N": (64 if granularity == 32 else 16) * choose((1, 2, 3)),
        "pairing": choose((None, None, None, *_PAIRINGS)),
        "order": choose(("gate_up", "up_gate")),
        "granularity": granularity,
        "style": choose(("half", "interleaved")),
        "turned": choose(((4, 8), (0, 16))),
        "D": body(),
        "others": [other() for _ in range(choose(range(4)))],
        "seed": choose(range(100)),
        "drops": choose((False, True)),
    }


@st.composite
def epilogues(draw: st.DrawFn) -> dict[str, Any]:
    return epilogue(lambda values: draw(st.sampled_from(list(values))))


def example(seed: int) -> dict[str, Any]:
    """The same every time."""
    return epilogue(Random(seed).choice)


_PAIRINGS = ("split", "interleave", "turn", "hadamard", "blocks")
_HEAD = _BLOCK = 16  # columns


def enlarged(case: dict[str, Any]) -> dict[str, Any]:
    """With more than a tile of rows and columns."""
    return {**case, "M": 61 * case["M"] + 3, "N": 4 * case["N"]}


def function_of(case, functions, names):
    """The Python function of a random epilogue, with the parameters that it needs."""

    def fn(accum, values):
        accum = _paired(case, functions, accum, values)
        values = {**values, "accum": accum}
        D = evaluate(functions, case["D"], values)
        others = []
        for kind, body, *axis in case["others"]:
            value = evaluate(functions, body, values)
            others.append(getattr(functions, kind)(value, *axis) if axis else value)
        if case["pairing"] == "interleave":
            D = functions.interleave(D, accum * 2, case["order"], case["granularity"])
        if _drops(case):
            D = functions.dropout(D, 0.25, values["key"], values["offset"])
        return (D, *others)

    scope = {"fn": fn}
    parameters = ", ".join(["accum", *names])
    taken = ", ".join(f"{name!r}: {name}" for name in names)
    exec(f"def epilogue({parameters}):\n    return fn(accum, {{{taken}}})", scope)
    return scope["epilogue"]


def _paired(case, functions, accum, values):
    """The accumulator, after what is done to its columns together."""
    if case["pairing"] == "split":
        gate, up = functions.glu_pair(accum, case["order"], case["granularity"])
        return functions.silu(gate) * up
    if case["pairing"] == "hadamard":
        return functions.hadamard(accum)
    if case["pairing"] == "turn":
        cos, sin = values["cos"], values["sin"]
        return functions.rotate(accum, cos, sin, _HEAD, *case["turned"], case["style"])
    if case["pairing"] == "blocks":
        largest = functions.amax(accum, -1, _BLOCK)
        return accum / functions.repeat(largest + 1.0, _BLOCK)
    return accum


def _drops(case) -> bool:
    """Whether some of what pairs become is dropped; few outputs leave registers to draw with."""
    return case["drops"] and case["pairing"] in ("split", "interleave") and len(case["others"]) < 2


def operands_of(case, element):
    M, N, seed = case["M"], case["N"], case["seed"]
    width = N // 2 if case["pairing"] == "split" else N
    drawn = {
        "bias": normal(width, seed=seed + 1, dtype=element),
        "row": normal(M, 1, seed=seed + 2, dtype=element),
        "full": normal(M, width, seed=seed + 3, dtype=element),
        "alpha": 0.75,
        "scalar": normal(seed=seed + 4, dtype=element),
        "batch": normal(2, 1, 1, seed=seed + 5, dtype=element),
    }
    bodies = [case["D"], *(other[1] for other in case["others"])]
    used = set().union(*map(leaves_of, bodies))
    found = {name: value for name, value in drawn.items() if name in used}
    if case["pairing"] == "turn":
        angles = normal(M, case["turned"][1] // 2, seed=seed + 6, dtype=element)
        found.update(cos=angles.cos(), sin=angles.sin())
    if _drops(case):
        found.update(key=seed - 50, offset=torch.tensor(2**33 - seed))
    return found


def arguments_of(case, A, B, element, device="cpu", reduced=None):
    """Arguments of a random epilogue; also the operands that it reads.

    reduced: element type of what is reduced; that of all others by default.
    """
    inputs = {
        name: value.to(device) if torch.is_tensor(value) else value
        for name, value in operands_of(case, element).items()
    }
    fn = function_of(case, ep, list(inputs))
    batch, M, N = ((2,) if case["batched"] else ()), case["M"], case["N"]
    width = {"split": N // 2}.get(case["pairing"], N)
    wide = 2 * N if case["pairing"] == "interleave" else width
    out = torch.empty(*batch, M, wide, dtype=element, device=device)
    shapes = {-1: (*batch, M), -2: (*batch, width), None: batch}
    outputs = {}
    for i, (_, _, *axis) in enumerate(case["others"]):
        shape = shapes[axis[0]] if axis else (*batch, M, width)
        kind = (reduced or element) if axis else element
        outputs[f"output{i}"] = torch.empty(shape, dtype=kind, device=device)
    epilogue = ka.EpilogueArguments(fn, **inputs, **outputs)
    return ka.GemmArguments(A.to(device), B.to(device), out, epilogue=epilogue), inputs


def product_operands(case, element, K=5):
    batch, M, N = ((2,) if case["batched"] else ()), case["M"], case["N"]
    A = normal(*batch, M, K, seed=case["seed"], dtype=element)
    return A, normal(*batch, K, N, seed=case["seed"] + 9, dtype=element)


def arguments_for_kernels(case, element, device="cpu", K=72):
    """Of the size that kernels take: B as weights are stored, sums in float32."""
    A, B = product_operands(case, torch.float64, K)
    B = (B / K**0.5).to(element).transpose(-1, -2).contiguous().transpose(-1, -2)
    return arguments_of(case, A.to(element), B, element, device, torch.float32)[0]
