"""Random epilogues: traced and evaluated, against the same Python function on torch tensors."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.epilogues import normal, reference_kernel, torch_functions

import kernel_api as ka
import kernel_api.epilogue as ep
from kernel_api.epilogue import Graph
from kernel_api.kernel import Kernel
from kernel_api.verification import judge

# An expression is a tuple: what it does, then its operands, expressions or parameters. It is
# written down by `evaluate` with the functions of a namespace: those of kernel_api.epilogue on
# traced values, or those of torch on tensors.

_LEAVES = ("accum", "bias", "row", "full", "alpha", "scalar", "batch")
_CONSTANTS = (0.5, -1.25, 2, 3.0)

_SMOOTH = {
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
_STEPS = {
    "drelu": lambda f, x: f.derivative("relu")(x),
    "cast": lambda f, x: f.cast(x, torch.bfloat16),
    "quantize": lambda f, x: f.quantize(x, torch.int8, 0.125),
}
_BINARY = {
    "add": lambda f, a, b: a + b,
    "sub": lambda f, a, b: a - b,
    "mul": lambda f, a, b: a * b,
    "div": lambda f, a, b: a / (f.abs(b) + 1.0),
    "minimum": lambda f, a, b: f.minimum(a, b),
    "maximum": lambda f, a, b: f.maximum(a, b),
}
_TERNARY = {
    "where": lambda f, a, b, c: f.where(a > b, b, c),
    "between": lambda f, a, b, c: f.where((a > b) & ~(a >= c), a, c),
}
_OPERATIONS = {**_SMOOTH, **_STEPS, **_BINARY, **_TERNARY}
_REDUCTIONS = ("sum", "max", "min", "amax", "mean_square")


def expressions(leaves: tuple[str, ...]) -> st.SearchStrategy[tuple]:
    atoms = st.sampled_from([(leaf,) for leaf in leaves] + [("accum",)] * 4)

    def grown(inner: st.SearchStrategy[tuple]) -> st.SearchStrategy[tuple]:
        either = st.one_of(inner, st.sampled_from(_CONSTANTS))
        return st.one_of(
            st.tuples(st.sampled_from([*_SMOOTH] * 3 + [*_STEPS]), inner),
            st.tuples(st.sampled_from([*_BINARY] * 2), inner, either),
            st.tuples(st.sampled_from([*_TERNARY]), inner, inner, inner),
        )

    return st.recursive(atoms, grown, max_leaves=8)


def evaluate(functions, expression, values):
    if not isinstance(expression, tuple):
        return expression
    name, *inner = expression
    if name in values:
        return values[name]
    return _OPERATIONS[name](functions, *(evaluate(functions, e, values) for e in inner))


def leaves_of(expression) -> set[str]:
    if not isinstance(expression, tuple):
        return set()
    name, *inner = expression
    return {name} if not inner else set().union(*map(leaves_of, inner))


@st.composite
def epilogues(draw: st.DrawFn) -> dict:
    """A whole epilogue: D, other outputs, and how the columns are paired before or after."""
    batched = draw(st.booleans())
    leaves = _LEAVES if batched else _LEAVES[:-1]
    pairing = draw(st.sampled_from((None, None, None, "split", "interleave", "turn", "hadamard")))
    body = expressions(leaves).map(lambda e: ("add", ("mul", e, 0.5), ("accum",)))
    outputs = st.one_of(st.tuples(st.just("store"), body), st.tuples(*_reduced(body)))
    return {
        "batched": batched,
        "M": draw(st.integers(1, 6)),
        "N": 16 * draw(st.integers(1, 3)),
        "pairing": pairing,
        "order": draw(st.sampled_from(("gate_up", "up_gate"))),
        "granularity": draw(st.sampled_from((1, 2, 8, "halves"))),
        "style": draw(st.sampled_from(("half", "interleaved"))),
        "D": draw(body),
        "others": draw(st.lists(outputs, max_size=3)),
        "seed": draw(st.integers(0, 100)),
    }


def _reduced(body):
    return st.sampled_from(_REDUCTIONS), body, st.sampled_from((-1, -2, None))


def function_of(case, functions, names):
    """The Python function of a random epilogue, with the parameters that it needs."""

    def fn(accum, values):
        if case["pairing"] == "split":
            gate, up = functions.glu_pair(accum, case["order"], case["granularity"])
            accum = functions.silu(gate) * up
        if case["pairing"] == "hadamard":
            accum = functions.hadamard(accum)
        if case["pairing"] == "turn":
            cos, sin = values["cos"], values["sin"]
            accum = functions.rotate(accum, cos, sin, 16, 4, 8, case["style"])
        values = {**values, "accum": accum}
        D = evaluate(functions, case["D"], values)
        others = []
        for kind, body, *axis in case["others"]:
            value = evaluate(functions, body, values)
            others.append(getattr(functions, kind)(value, *axis) if axis else value)
        if case["pairing"] == "interleave":
            D = functions.interleave(D, accum * 2, case["order"], case["granularity"])
        return (D, *others)

    scope = {"fn": fn}
    parameters = ", ".join(["accum", *names])
    taken = ", ".join(f"{name!r}: {name}" for name in names)
    exec(f"def epilogue({parameters}):\n    return fn(accum, {{{taken}}})", scope)
    return scope["epilogue"]


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
        angles = normal(M, 4, seed=seed + 6, dtype=element)
        found.update(cos=angles.cos(), sin=angles.sin())
    return found


def arguments_of(case, A, B, element):
    """Arguments of a random epilogue; also the operands that it reads."""
    inputs = operands_of(case, element)
    fn = function_of(case, ep, list(inputs))
    batch, M, N = ((2,) if case["batched"] else ()), case["M"], case["N"]
    width = {"split": N // 2}.get(case["pairing"], N)
    out = torch.empty(*batch, M, 2 * N if case["pairing"] == "interleave" else width, dtype=element)
    shapes = {-1: (*batch, M), -2: (*batch, width), None: batch}
    outputs = {
        f"output{i}": torch.empty(shapes[axis[0]] if axis else (*batch, M, width), dtype=element)
        for i, (_, _, *axis) in enumerate(case["others"])
    }
    epilogue = ka.EpilogueArguments(fn, **inputs, **outputs)
    return ka.GemmArguments(A, B, out, epilogue=epilogue), inputs


def product_operands(case, element, K=5):
    batch, M, N = ((2,) if case["batched"] else ()), case["M"], case["N"]
    A = normal(*batch, M, K, seed=case["seed"], dtype=element)
    return A, normal(*batch, K, N, seed=case["seed"] + 9, dtype=element)


repeatedly = settings(max_examples=300, suppress_health_check=list(HealthCheck), deadline=None)


@repeatedly
@given(epilogues())
def test_a_random_epilogue_computes_what_its_function_computes_on_tensors(case):
    A, B = product_operands(case, torch.float64)
    args, inputs = arguments_of(case, A, B, torch.float64)
    kernel: Kernel = reference_kernel(args)
    kernel.run(args)
    tensors = {n: v if torch.is_tensor(v) else torch.tensor(v).double() for n, v in inputs.items()}
    expected = function_of(case, torch_functions, list(inputs))(A @ B, *tensors.values())
    for (name, found), value in zip(args.outputs.items(), expected, strict=True):
        value = value.reshape(found.shape)
        scale = float(value.abs().max().clamp_min(1.0))
        torch.testing.assert_close(
            found.tensor, value, rtol=1e-9, atol=1e-9 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(repeatedly, max_examples=100)
@given(epilogues())
def test_a_random_graph_survives_json_and_tracing_again(case):
    A, B = product_operands(case, torch.float32)
    args, _ = arguments_of(case, A, B, torch.float32)
    again, _ = arguments_of(case, A, B, torch.float32)
    graph = args.epilogue.graph
    assert again.epilogue.graph == graph
    assert again.signature == args.signature
    assert Graph.from_json(graph.to_json()) == graph


@settings(repeatedly, max_examples=100)
@given(epilogues())
def test_verification_passes_a_product_that_is_summed_in_another_order(case):
    """No false alarm, although comparisons and casts make steps of rounding errors."""
    A, B = product_operands(case, torch.float32, K=67)
    args, _ = arguments_of(case, A, B, torch.float32)
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    found = in_float32(args, A[..., order] @ B[..., order, :])
    for name, operand in args.outputs.items():
        operand.tensor.copy_(found[name].reshape(operand.shape))
    verdict = judge(args, 3.0)
    assert verdict, verdict


@settings(repeatedly, max_examples=60)
@given(epilogues(), st.integers(0, 5))
def test_verification_finds_a_wrong_output_of_a_random_epilogue(case, which):
    A, B = product_operands(case, torch.float32, K=67)
    args, _ = arguments_of(case, A, B, torch.float32)
    reference_kernel(args).run(args)
    names = list(args.outputs)
    wrong = args.outputs[names[which % len(names)]].tensor
    finite = wrong[torch.isfinite(wrong)]
    wrong.view(-1)[-1] += 1.0 + 0.5 * float(finite.abs().max())
    assert not judge(args, 3.0)


def in_float32(args, product):
    from kernel_api.providers.reference.epilogue import evaluate as evaluated

    epilogue = args.epilogue
    found = evaluated(epilogue.graph, product, epilogue.operands, wide=False)
    return {"out": found.pop("D"), **found}


@pytest.mark.parametrize("name", sorted(_OPERATIONS))
def test_the_grammar_says_every_operation(name):
    arity = 1 if name in {**_SMOOTH, **_STEPS} else 2 if name in _BINARY else 3
    case = {
        "batched": False, "M": 3, "N": 16, "pairing": None, "order": "gate_up", "granularity": 1,
        "style": "half", "D": (name, *[("accum",), ("bias",), ("row",)][:arity]), "others": [],
        "seed": 3,
    }  # fmt: skip
    test_a_random_epilogue_computes_what_its_function_computes_on_tensors.hypothesis.inner_test(
        case
    )
