"""Attention with functions of scores by torch's flex_attention, which compiles them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from kernel_api.arguments import SdpaArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue.graph import Graph, Node
from kernel_api.kernel import Kernel
from kernel_api.masks import HIDDEN_BELOW
from kernel_api.metadata import DesignMetadata, SdpaOperandsMetadata
from kernel_api.operands import Operand
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.providers.torch.sdpa import no_statistics
from kernel_api.space import Miss, Operands, Space, rule

_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
_PREFIXES = {"neg": "-", "not": "~"}


@TorchProvider.register
class TorchFlexAttention(Kernel):
    """Attention with masks and functions of scores by torch's flex_attention, compiled."""

    family: ClassVar[str] = "torch.flex_attention"
    arguments = SdpaArguments
    operands = (
        Operands(
            Q="f16 | bf16 | f32",
            K="like Q",
            V="like Q",
            out="like Q",
            accumulator="f32",
            majors="strided",
        ),
    )
    operands_metadata = SdpaOperandsMetadata
    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    space = Space()
    design = DesignMetadata
    compiles_as_it_runs = True
    gives_no_statistics = no_statistics

    @rule("flex_attention is compiled by Triton, which is not installed")
    def _(args: SdpaArguments) -> bool:
        return args.device.type == "meta" or importlib.util.find_spec("triton") is not None

    @rule("flex_attention is given dense sequences of one length")
    def _(args: SdpaArguments) -> bool:
        return not (args.is_packed or args.is_paged or args.is_padded)

    @rule("flex_attention has no dropout and no sink")
    def _(args: SdpaArguments) -> bool:
        return args.dropout is None and "sink" not in args.further

    @rule("flex_attention's heads have 16 elements or more")
    def _(args: SdpaArguments) -> bool | Miss:
        return min(args.D, args.D_v) >= 16 or Miss(f"they have {args.D} and {args.D_v}")

    @rule("flex_attention is given no function that casts")
    def _(args: SdpaArguments) -> bool:
        graphs = [graph for graph in (args.mask_graph, args.score_graph) if graph is not None]
        return all(node.op != "cast" for graph in graphs for node in graph.nodes)

    @rule("flex_attention is given whole numbers that are computed in 32 bits, or tensors of 64")
    def _(args: SdpaArguments) -> bool | Miss:
        for part in (args.mask, args.score):
            for name, one in ({} if part is None else part.operands).items():
                if isinstance(one, Operand) and one.dtype.kind == "uint" and one.dtype.bits > 8:
                    return Miss(f"{name} is {one.dtype}")
        graphs = [graph for graph in (args.mask_graph, args.score_graph) if graph is not None]
        for number in (one for graph in graphs for one in _written(graph)):
            if not -(2**31) <= number < 2**31:
                return Miss(f"{number} is beyond them")
        return True

    @rule("flex_attention chooses between numbers that it is given, not between constants")
    def _(args: SdpaArguments) -> bool:
        graphs = [graph for graph in (args.mask_graph, args.score_graph) if graph is not None]
        return not any(_chooses_of_constants(graph) for graph in graphs)

    @rule("flex_attention needs a key")
    def _(args: SdpaArguments) -> bool:
        return args.S_kv > 0

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            for name, values in computed(args, compiled=True).items():
                if name in args.outputs:
                    args.outputs[name].tensor.copy_(values)


def computed(args: SdpaArguments, *, compiled: bool) -> dict[str, Any]:
    """out and lse; or the same by torch's own evaluation of it."""
    from torch.nn.attention.flex_attention import AuxRequest

    attend, block_mask_of = _functions(compiled)
    score_mod, mask_mod = _modifications(args)
    block_mask = None
    if mask_mod is not None:
        block_mask = block_mask_of(mask_mod, args.B, args.H, args.S_q, args.S_kv, args.device)
    q, k, v, _ = args.tensors
    out, aux = attend(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=args.scale,
        enable_gqa=args.H_kv != args.H,
        return_aux=AuxRequest(lse=True),
    )
    return {"out": out, "lse": aux.lse}


@functools.cache
def _functions(compiled: bool) -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention), torch.compile(create_block_mask)


# Functions for torch ---------------------------------------------------------------------


def _modifications(args: SdpaArguments) -> tuple[Any, Any]:
    """score_mod and mask_mod; None where there is nothing to do."""
    values = {n: _tensor(one, args) for n, one in args.launch_values.items() if n != "lse"}
    values["beyond"] = _tensor(args.S_kv - args.S_q, args)
    # Not every torch takes numbers beside the indices of a score: other modes are not there.
    for name, modes in (("bias", (0, 1, 2, 3)), ("blocks", (0, 1))):
        if name in values:
            values[name] = values[name].squeeze(modes)
    score, mask = _score_text(args), _mask_text(args)
    return tuple(  # type: ignore[return-value]
        None if text is None else _made(text, tuple(values))(**values) for text in (score, mask)
    )


def _tensor(value: Any, args: SdpaArguments) -> Any:
    """What a function captures: numbers as tensors, because others would be compiled in."""
    if not isinstance(value, torch.Tensor):
        element = torch.int64 if isinstance(value, int) else torch.float32
        return torch.tensor(value, dtype=element, device=args.device)
    return value.float() if value.dtype.is_floating_point else value


@functools.lru_cache(maxsize=256)
def _made(text: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """Makes the function of a text of the values that it captures. Functions of one text share
    their code, by which torch knows them again."""
    lines = [f"def make({', '.join(names)}):", *(f"    {line}" for line in text.splitlines())]
    namespace: dict[str, Any] = {"torch": torch}
    exec("\n".join([*lines, "    return fn"]), namespace)
    made: Callable[..., Any] = namespace["make"]
    return made


def _score_text(args: SdpaArguments) -> str | None:
    lines: list[str] = []
    if args.softcap is not None:
        lines.append("score = softcap * torch.tanh(score / softcap)")
    if args.score is not None:
        lines += [*_lines("score", args.score.graph, args.score.operands)]
    if "bias" in args.further:
        modes = zip(("b", "h", "q", "kv"), args.further["bias"].shape, strict=True)
        places = [name for name, extent in modes if extent > 1]
        index = f"[{', '.join(places)}]" if places else ""
        lines.append(f"score = score + bias{index}")
    if "alibi" in args.further:
        lines.append("score = score + alibi[h] * (kv - q)")
    if args.score is not None or "bias" in args.further:
        lines.append(f"score = torch.where(score < {HIDDEN_BELOW}, -float('inf'), score)")
    return _text("def fn(score, b, h, q, kv):", lines, "score") if lines else None


def _mask_text(args: SdpaArguments) -> str | None:
    tests = {
        "left": "kv - q >= -left",
        "right": "kv - q <= right",
        "left_end": "kv - q >= beyond - left_end",
        "right_end": "kv - q <= beyond + right_end",
    }
    lines = [f"seen = seen & ({tests[name]})" for name in args.bounds]
    if args.block_shape is not None:
        modes = zip("bh", args.further["blocks"].shape[:2], strict=True)
        places = [name for name, extent in modes if extent > 1]
        rows, columns = args.block_shape
        places += [f"q // {rows}", f"kv // {columns}"]
        lines.append(f"seen = seen & (blocks[{', '.join(places)}] != 0)")
    if args.mask is not None and args.mask_graph is not None:
        lines += [*_lines("mask", args.mask_graph, args.mask.operands), "seen = seen & mask"]
    return _text("def fn(b, h, q, kv):", ["seen = q >= 0", *lines], "seen") if lines else None


def _text(head: str, lines: list[str], result: str) -> str:
    return "\n".join([head, *(f"    {line}" for line in [*lines, f"return {result}"])])


def _lines(prefix: str, graph: Graph, operands: dict[str, Operand | float]) -> list[str]:
    """A graph as statements; what it gives is called as the prefix is."""
    texts: list[str] = []
    lines = []
    for index, node in enumerate(graph.nodes):
        inputs = [texts[i] for i in node.inputs]
        constants = [graph.nodes[i].op == "constant" for i in node.inputs]
        text = _expression(prefix, node, inputs, operands)
        if node.inputs and not all(constants):
            lines.append(f"{prefix}_v{index} = {text}")
            text = f"{prefix}_v{index}"
        texts.append(text)
    return [*lines, f"{prefix} = {texts[graph.outputs[0][1]]}"]


def _constant(node: Node) -> float:
    number = float.fromhex(node["value"])
    return int(number) if dict(node.attributes).get("type") == "integer" else number


def _chooses_of_constants(graph: Graph) -> bool:
    """Whether anything is chosen by constants alone, which are no tensors."""
    constant: list[bool] = []
    for node in graph.nodes:
        of_constants = [constant[i] for i in node.inputs]
        constant.append(node.op == "constant" or (bool(node.inputs) and all(of_constants)))
        if node.op in ("minimum", "maximum", "where") and constant[-1]:
            return True
        if node.op == "where" and of_constants[0]:
            return True
    return False


def _written(graph: Graph) -> Iterator[int]:
    """Whole numbers that stand in the function."""
    for node in graph.nodes:
        number = _constant(node) if node.op == "constant" else dict(node.attributes).get("divisor")
        if isinstance(number, int):
            yield number


def _place(index: str, extent: int) -> str:
    """An index, or the end that it is beyond; of a constant, which is no tensor, the number."""
    if index[0] != "(":
        return f"torch.clamp({index}, 0, {extent - 1})"
    return str(min(max(int(index[1:-1]), 0), extent - 1))


def _widened(operand: Operand | float) -> str:
    """Whole numbers of less than 32 bits are computed in 32."""
    narrow = isinstance(operand, Operand) and operand.dtype.is_integer and operand.dtype.bits < 32
    return ".int()" if narrow else ""


def _expression(
    prefix: str, node: Node, inputs: list[str], operands: dict[str, Operand | float]
) -> str:
    op = node.op
    if op == "score":
        return "score"
    if op == "index":
        return str(node["name"])
    if op == "constant":
        return f"({_constant(node)!r})"
    if op in ("operand", "scalar"):
        return f"{prefix}_{node['name']}{_widened(operands[node['name']])}"
    if op == "lookup":
        operand = operands[node["name"]]
        assert isinstance(operand, Operand)
        extents = zip(inputs, operand.shape, strict=True)
        places = [_place(index, extent) for index, extent in extents]
        return f"{prefix}_{node['name']}[{', '.join(places)}]{_widened(operand)}"
    if op in _SYMBOLS:
        return f"({inputs[0]} {_SYMBOLS[op]} {inputs[1]})"
    if op in _PREFIXES:
        return f"({_PREFIXES[op]}{inputs[0]})"
    if op in ("floordiv", "remainder"):
        return f"({inputs[0]} {'//' if op == 'floordiv' else '%'} {node['divisor']})"
    if op in ("minimum", "maximum"):
        a, b = inputs
        return f"torch.where({a} {'<' if op == 'minimum' else '>'} {b}, {a}, {b})"
    if inputs[0][0] == "(" and op != "where":  # of a constant, which is no tensor
        return f"torch.{op}(torch.tensor({inputs[0]}))"
    return f"torch.{op}({', '.join(inputs)})"
