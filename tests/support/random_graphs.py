"""Random graphs, and what plain torch computes of the same steps.

A case is a list of steps in the terms of the graph's operations. It is built as a graph, and walked
through with torch twice: in float64, and in float32 with every tensor rounded to its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import hypothesis.strategies as st
import torch

import kernel_api.graph as cudnn
from kernel_api.verification import compare

Choose = Callable[[Sequence[Any]], Any]

_F = torch.nn.functional

UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "gelu": _F.gelu,
    "gelu_approx_tanh": lambda x: _F.gelu(x, approximate="tanh"),
    "silu": _F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": _F.softplus,
    "elu": _F.elu,
    "abs": torch.abs,
    "neg": torch.neg,
    "erf": torch.erf,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
REDUCTIONS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "ADD": lambda x, axes: x.sum(axes, keepdim=True),
    "MAX": lambda x, axes: x.amax(axes, keepdim=True),
    "MIN": lambda x, axes: x.amin(axes, keepdim=True),
    "AMAX": lambda x, axes: x.abs().amax(axes, keepdim=True),
    "AVG": lambda x, axes: x.mean(axes, keepdim=True),
    "NORM1": lambda x, axes: x.abs().sum(axes, keepdim=True),
    "NORM2": lambda x, axes: x.square().sum(axes, keepdim=True).sqrt(),
}

_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Case:
    """One graph.

    Attributes:
        element: Type of the caller's tensors.
        between: Type of virtual tensors.
        inputs: Name and extents of what is read.
        steps: (result, operation, operands, options): operands are names or numbers.
        outputs: Name and element type of what the caller gets.
    """

    element: str
    between: str
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = [f"{self.element} between {self.between}"]
        lines += [f"  {name}: {shape}" for name, shape in self.inputs.items()]
        lines += [f"  {r} = {op}{operands} {options}" for r, op, operands, options in self.steps]
        return "\n".join([*lines, f"  -> {self.outputs}"])


# Making one ------------------------------------------------------------------------------


def case(choose: Choose) -> Case:
    made = Case(choose(("float16", "bfloat16", "float32")), choose(("float32", "same")))
    if made.between == "same":
        made.between = made.element
    shape = choose((_matmul, _matmul, _matmul, _sdpa, _chain))(choose, made)
    names = [made.steps[-1][0]]
    for _ in range(choose((0, 1, 2, 3, 4))):
        names.append(_tail(choose, made, names, shape))
    made.outputs[names[-1]] = choose((made.element, "float32"))
    for name in names[:-1]:
        if choose((False, False, True)):
            made.outputs[name] = made.element
    for _ in range(choose((0, 0, 1, 2))):
        _reduction(choose, made, choose(names), shape)
    return made


def _matmul(choose: Choose, made: Case) -> tuple[int, ...]:
    M, N, K = (choose((8, 17, 40, 64, 129)) for _ in range(3))
    batch = choose(((), (), (3,), (2, 2)))
    made.inputs["a"] = (*batch, M, K)
    weights = choose((True, False))
    made.inputs["b"] = ((1,) * len(batch) if weights else batch) + (K, N)
    made.steps.append(("c", "matmul", ("a", "b"), {}))
    return (*batch, M, N)


def _chain(choose: Choose, made: Case) -> tuple[int, ...]:
    M, N = _matmul(choose, made)[-2:]
    batch = made.inputs["a"][:-2]
    made.steps.append(("h", choose(tuple(UNARY)), ("c",), {}))
    made.inputs["d"] = ((1,) * len(batch)) + (N, choose((16, 33)))
    made.steps.append(("e", "matmul", ("h", "d"), {}))
    return (*batch, M, made.inputs["d"][-1])


def _sdpa(choose: Choose, made: Case) -> tuple[int, ...]:
    if made.element == "float32":
        made.element = made.between = "bfloat16"
    B, H, group = choose((1, 2)), choose((1, 2)), choose((1, 2))
    q, kv, D = choose((5, 64, 100)), choose((33, 64, 130)), choose((32, 64))
    made.inputs |= {"q": (B, H * group, q, D), "k": (B, H, kv, D), "v": (B, H, kv, D)}
    options = {"causal": choose((False, True)), "scale": choose((0.125, 0.2))}
    made.steps.append(("o", "sdpa", ("q", "k", "v"), options))
    return (B, H * group, q, D)


def _tail(choose: Choose, made: Case, names: list[str], shape: tuple[int, ...]) -> str:
    name, value = f"t{len(made.steps)}", choose(names[-2:])
    if choose((True, False)):
        made.steps.append((name, choose(tuple(UNARY)), (value,), {}))
        return name
    other = choose(("full", "row", "column", "number", "value", "one"))
    if other == "value":
        operand: Any = choose(names)
    elif other == "number":
        operand = choose((0.75, -1.5))
    else:
        operand = f"i{len(made.inputs)}"
        kept = {"full": (1, 1), "row": (0, 1), "column": (1, 0), "one": (0, 0)}[other]
        batch = shape[:-2] if other == "full" else (1,) * (len(shape) - 2)
        last = [n if keep else 1 for n, keep in zip(shape[-2:], kept, strict=True)]
        made.inputs[operand] = (*batch, *last)
    made.steps.append((name, choose(tuple(BINARY)), (value, operand), {}))
    return name


def _reduction(choose: Choose, made: Case, value: str, shape: tuple[int, ...]) -> None:
    rank, name = len(shape), f"r{len(made.steps)}"
    axes = choose(((rank - 1,), (rank - 2,), (rank - 2, rank - 1), tuple(range(rank))))
    made.steps.append(
        (name, "reduction", (value,), {"mode": choose(tuple(REDUCTIONS)), "axes": axes})
    )
    made.outputs[name] = "float32"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return case(lambda options: draw(st.sampled_from(list(options))))


def example(seed: int) -> Case:
    return case(Random(seed).choice)


# As a graph ------------------------------------------------------------------------------


def graph_of(made: Case, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The graph, and its tensors by name; uids are the places of the names."""
    graph = cudnn.pygraph(
        io_data_type=made.element,
        intermediate_data_type=made.between,
        compute_data_type="float32",
        **options,
    )
    tensors: dict[str, Any] = {}
    for name, shape in made.inputs.items():
        tensors[name] = graph.tensor(shape, name=name)
    for name, op, operands, extra in made.steps:
        given = [tensors[o] if isinstance(o, str) else o for o in operands]
        tensors[name] = _node(graph, op, given, extra)
    for name, element in made.outputs.items():
        tensors[name].set_output(True).set_data_type(element).set_name(name)
    for uid, name in enumerate([*made.inputs, *made.outputs]):
        tensors[name].set_uid(uid)
    return graph, tensors


def _node(graph: Any, op: str, given: list[Any], extra: dict[str, Any]) -> Any:
    if op == "sdpa":
        q, k, v = given
        return graph.sdpa(
            q=q,
            k=k,
            v=v,
            attn_scale=extra["scale"],
            use_causal_mask=extra["causal"],
            generate_stats=False,
        )[0]
    if op == "reduction":
        return graph.reduction(given[0], extra["mode"], axis=extra["axes"])
    return getattr(graph, op)(*given)


# In torch --------------------------------------------------------------------------------


def data_of(made: Case, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs, and outputs full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes_of(made)
    data = {
        name: torch.randn(shape, generator=generator).to(_TYPES[made.element])
        for name, shape in made.inputs.items()
    }
    for name, element in made.outputs.items():
        data[name] = torch.full(shapes[name], float("nan"), dtype=_TYPES[element])
    return {name: tensor.to(device) for name, tensor in data.items()}


def shapes_of(made: Case) -> dict[str, tuple[int, ...]]:
    zeros = {name: torch.zeros(shape) for name, shape in made.inputs.items()}
    return {name: tuple(value.shape) for name, value in _walk(made, zeros, _as_is).items()}


def _as_is(name: str, value: torch.Tensor) -> torch.Tensor:
    return value


def _walk(made: Case, inputs: dict[str, torch.Tensor], rounded: Any) -> dict[str, torch.Tensor]:
    values = dict(inputs)
    for name, op, operands, extra in made.steps:
        given = [values[o] if isinstance(o, str) else o for o in operands]
        values[name] = rounded(name, _computed(op, given, extra))
    return values


def _computed(op: str, given: list[Any], extra: dict[str, Any]) -> torch.Tensor:
    if op == "matmul":
        return torch.matmul(*given)
    if op == "sdpa":
        return _attention(*given, **extra)
    if op == "reduction":
        return REDUCTIONS[extra["mode"]](given[0], extra["axes"])
    if op in UNARY:
        return UNARY[op](*given)
    a, b = (torch.as_tensor(x, dtype=given[0].dtype, device=given[0].device) for x in given)
    return BINARY[op](a, b)


def _attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def disagreement(made: Case, data: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with the outputs by the error-ratio rule; None if nothing is."""
    inputs = {name: data[name] for name in made.inputs}
    exact = _walk(made, {n: t.double() for n, t in inputs.items()}, _as_is)

    # Wherever a sum is formed, the baseline is what the type of the caller's tensors gives.
    narrow = _TYPES[made.element]

    def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
        return value.to(narrow).float()

    plain = _walk(made, {n: t.float() for n, t in inputs.items()}, rounded)
    for name in made.outputs:
        base, spread = plain[name].to(data[name].dtype), _spread(made, name, exact, plain)
        # In float32 the baseline rounds no more often than we do, only otherwise.
        factor = 6.0 if narrow is torch.float32 else 3.0
        verdict = compare(data[name], exact[name], base, factor=factor, allowance=spread)
        if not verdict:
            return f"{name}: {verdict.reason}"
    return None


#: What errors of the elements make of a reduction's error at most.
_SPREADS = {"ADD": "ADD", "NORM1": "ADD", "AVG": "AVG", "NORM2": "NORM2"}


def _spread(made: Case, name: str, exact: Any, plain: Any) -> torch.Tensor | None:
    """What a reduction may be off by, as its elements are in the baseline.

    The baseline's own error says nothing where a few numbers are left: errors cancel by chance.
    """
    step = next(step for step in made.steps if step[0] == name)
    if step[1] != "reduction":
        return None
    (operand,), extra = step[2], step[3]
    errors = (plain[operand].double() - exact[operand]).abs()
    spread = REDUCTIONS[_SPREADS.get(extra["mode"], "MAX")](errors, extra["axes"])
    return spread.reshape(-1, spread.shape[-1])[:, :1] if spread.shape[-1] == 1 else spread
