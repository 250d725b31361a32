"""Suite fusion-dense: fused epilogues beside torch.compile, and beside the plain product.

    python benchmarks/fusion_dense.py [--only swiglu] [--candidates N] [--seconds S]

What an epilogue may cost beyond the plain product is said by a limit: a share of the plain
product's time (our own first choice, timed in the same run), and for what it reads and writes
beyond the plain product the time that a copy of so many bytes takes. ``of_limit`` is the time over
that limit. The peer is torch.compile of the formula as one would write it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import harness
import peers
import problems
import rows
import suite
import torch
from peers import Peer

import kernel_api as ka
from kernel_api import fusions
from kernel_api.providers.reference.gemm import ReferenceGemm

PLAIN = "plain product"
HEAD = 128
#: Of the largest value, the error that rounding the product to bfloat16 may make.
ROUNDED = 2**-6

#: New operands: random, or to be written.
Drawn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Fusion:
    """An entry of the catalogue, as a problem.

    Attributes:
        arguments: From A, B, and functions that make operands by shape: random ones, ones to write.
        formula: The outputs, in the order of the epilogue's, from the product and a function that
            gives the operand of a name.
        limit: Of the plain product's time; beside it, what is moved beyond the plain product.
    """

    arguments: Callable[..., ka.GemmArguments]
    formula: Callable[..., tuple[torch.Tensor, ...]]
    limit: float | None = None


def _swiglu(AB: torch.Tensor) -> torch.Tensor:
    """Of blocks of 32 columns, up before gate."""
    up, gate = AB.view(*AB.shape[:-1], -1, 2, 32).unbind(-2)
    return (torch.nn.functional.silu(gate) * up).flatten(-2)


def _halves(AB: torch.Tensor) -> torch.Tensor:
    up, gate = AB.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _dswiglu(dy: torch.Tensor, AB: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pairs = AB.float().view(*AB.shape[:-1], -1, 2, 32)
    up, gate = (half.flatten(-2) for half in pairs.unbind(-2))
    dy, sigmoid = dy.float(), torch.sigmoid(gate)
    silu, scaled = gate * sigmoid, dy * prob[:, None]
    dgate = scaled * up * (sigmoid + silu * (1 - sigmoid))
    both = torch.stack([(scaled * silu).unflatten(-1, (-1, 32)), dgate.unflatten(-1, (-1, 32))], -2)
    return both.flatten(-3).to(AB.dtype), (dy * silu * up).sum(-1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.view(x.shape[0], -1, 2, HEAD // 2).unbind(-2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([left * cos - right * sin, right * cos + left * sin], -2).flatten(1)


def _glu(A: Any, B: Any, drawn: Drawn, out: Drawn, stored: bool, **how: Any) -> ka.GemmArguments:
    M, N = A.shape[0], B.shape[1]
    preactivation = out(M, N) if stored else None
    return fusions.gemm_swiglu(A, B, out=out(M, N // 2), preactivation=preactivation, **how)


def _bias_gelu(A: Any, B: Any, drawn: Drawn, out: Drawn) -> ka.GemmArguments:
    M, N = A.shape[0], B.shape[1]
    return fusions.gemm_bias_activation(A, B, out=out(M, N), bias=drawn(N))


def _amax(A: Any, B: Any, drawn: Drawn, out: Drawn) -> ka.GemmArguments:
    amax = out(dtype=torch.float32)
    return fusions.gemm_amax(A, B, out=out(A.shape[0], B.shape[1]), amax=amax, alpha=0.7)


def _residual(A: Any, B: Any, drawn: Drawn, out: Drawn) -> ka.GemmArguments:
    M, N = A.shape[0], B.shape[1]
    return fusions.gemm_residual(A, B, out=out(M, N), C=drawn(M, N), alpha=0.7, beta=-1.3)


def _dglu(A: Any, B: Any, drawn: Drawn, out: Drawn) -> ka.GemmArguments:
    M, N = A.shape[0], B.shape[1]
    return fusions.gemm_dswiglu(
        A, B, out=out(M, 2 * N), preactivation=drawn(M, 2 * N),
        prob=drawn(M, dtype=torch.float32), dprob=out(M, dtype=torch.float32),
    )  # fmt: skip


def _rope(A: Any, B: Any, drawn: Drawn, out: Drawn) -> ka.GemmArguments:
    M, N = A.shape[0], B.shape[1]
    tables = {"cos": drawn(M, HEAD // 2), "sin": drawn(M, HEAD // 2)}
    return fusions.gemm_rope(A, B, out=out(M, N), head_dim=HEAD, **tables)


FUSIONS = {
    "swiglu": Fusion(
        functools.partial(_glu, stored=False), lambda AB, of: (_swiglu(AB),), limit=1.05
    ),
    "swiglu, preactivation stored": Fusion(
        functools.partial(_glu, stored=True),
        lambda AB, of: (_swiglu(AB), AB),
        limit=1.03,
    ),
    "swiglu of halves": Fusion(
        functools.partial(_glu, stored=False, granularity="halves"),
        lambda AB, of: (_halves(AB),),
        limit=1.05,
    ),
    "bias, gelu": Fusion(
        _bias_gelu,
        lambda AB, of: (torch.nn.functional.gelu(AB + of("bias")),),
        limit=1.04,
    ),
    "amax": Fusion(_amax, lambda AB, of: (D := 0.7 * AB, D.abs().amax().float()), limit=1.02),
    "residual": Fusion(_residual, lambda AB, of: (0.7 * AB - 1.3 * of("C"),), limit=1.10),
    "dswiglu, dprob": Fusion(
        _dglu,
        lambda AB, of: _dswiglu(AB, of("preactivation"), of("prob").view(-1)),
        limit=1.10,
    ),
    "rope": Fusion(_rope, lambda AB, of: (_rotated(AB, of("cos"), of("sin")),)),
}


@dataclass(frozen=True)
class Problem(problems.Problem):
    """A product with a fused epilogue.

    Attributes:
        fusion: Which of FUSIONS.
    """

    fusion: str = ""

    @property
    def label(self) -> str:
        return f"{super().label} {self.fusion}"

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of all operands but scales; what is no matrix may be counted twice."""
        args = self.arguments("meta")
        of_epilogue = args.epilogue.tensors.values() if args.epilogue else ()
        tensors = [*args.tensors, *(operand.tensor for operand in of_epilogue)]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def extra_bytes(self) -> int:
        """Moved beyond the plain product."""
        return max(0, self.bytes - super().bytes)

    def arguments(self, device: str) -> ka.GemmArguments:
        plain = super().arguments(device)
        element = plain.out.tensor.dtype

        def drawn(*shape: int, dtype: torch.dtype = element) -> torch.Tensor:
            return torch.randn(shape, device=device).to(dtype)

        def out(*shape: int, dtype: torch.dtype = element) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        return FUSIONS[self.fusion].arguments(plain.A, plain.B, drawn, out)


def behind(fusion: Fusion) -> Callable[..., None]:
    """The formula as one would write it behind a product, into the outputs of the arguments."""

    def written(AB: torch.Tensor, read: Any, outputs: Any) -> None:
        found = fusion.formula(AB, read.__getitem__)
        for output, value in zip(outputs, found, strict=True):
            output.copy_(value)

    return written


def writer(fusion: Fusion) -> Callable[..., None]:
    """The same with the product, of operands without scales."""
    formula = behind(fusion)

    def written(A: torch.Tensor, B: torch.Tensor, read: Any, outputs: Any) -> None:
        formula(A @ B, read, outputs)

    return written


def of_epilogue(args: ka.GemmArguments) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """What it reads, by name, and all outputs."""
    assert args.epilogue is not None
    read = {name: operand.tensor for name, operand in args.epilogue.inputs.items()}
    return read, [operand.tensor for operand in args.outputs.values()]


def bound(written: Callable[..., None], args: ka.GemmArguments) -> Callable[[], Any]:
    return functools.partial(written, args.A.tensor, args.B.tensor, *of_epilogue(args))


def bound_behind(formula: Callable[..., None], args: ka.GemmArguments) -> Callable[[], Any]:
    """torch.compile leaves a product of scaled operands as it is: it is called by itself."""
    AB = args.out.tensor.new_empty(args.M, args.N)
    product = peers.scaled_mm(ka.GemmArguments(args.A, args.B, AB))
    read, outputs = of_epilogue(args)

    def call() -> None:
        product()
        formula(AB, read, outputs)

    return call


def peers_of(problem: problems.Problem) -> dict[str, Peer]:
    torch.compiler.reset()  # sizes of the problem before would make this one's dynamic
    fusion = FUSIONS[cast(Problem, problem).fusion]
    if problem.scales:
        compiled = torch.compile(behind(fusion), fullgraph=True)
        return {"torch._scaled_mm, torch.compile": functools.partial(bound_behind, compiled)}
    # Compiled as one, it writes into the outputs from the kernel that it makes.
    written = torch.compile(writer(fusion), fullgraph=True)
    return {"torch.compile": functools.partial(bound, written)}


def wrong(args: ka.GemmArguments) -> str | None:
    """A peer's product is rounded before anything else is done with it; float32 outputs, too."""
    exact = ReferenceGemm.exact(args)
    for name, output in args.outputs.items():
        error = (output.tensor.double() - exact[name].double()).abs().max()
        if not error <= ROUNDED * exact[name].abs().max():
            return f"{name}: largest error {error:.3g}"
    return None


def beside(
    problem: problems.Problem, args: Sequence[ka.GemmArguments]
) -> Mapping[str, harness.Calls]:
    """The plain product on the same A and B, and a copy."""
    M, N = problem.M, problem.N
    products = [ka.GemmArguments(a.A, a.B, a.out.tensor.new_empty(M, N)) for a in args]
    kernel = suite.candidates(products[0], suite.options("", None).parse_args([]))[0]
    calls = [functools.partial(kernel.prepare(a), *a.tensors) for a in products]
    return {PLAIN: calls, harness.COPY: harness.copy()}


def extra(
    problem: problems.Problem, microseconds: float, medians: Mapping[str, float]
) -> Mapping[str, Any]:
    problem = cast(Problem, problem)
    plain, limit = medians[PLAIN], FUSIONS[problem.fusion].limit
    copied = problem.extra_bytes * medians[harness.COPY] / (2 * harness.COPIED_BYTES)
    found = {
        "plain_us": round(plain, 2),
        "of_plain": round(microseconds / plain, 4),
        "extra_bytes_us": round(copied, 2),
    }
    if limit is not None:
        found["of_limit"] = round(microseconds / (limit * plain + copied), 4)
    return found


def report(measured: list[rows.Row]) -> list[str]:
    said = []
    for row in measured:
        if row["rank"]:
            continue
        verdict = "" if "of_limit" not in row else ("ok" if row["of_limit"] <= 1 else "NO")
        said.append(
            f"{row['problem']}: {row['of_plain']:.3f} of the plain {row['plain_us']:.1f} us, "
            f"{row['extra_bytes_us']:.1f} us of bytes beyond, {row.get('of_limit', 0):.3f} of the "
            f"limit {verdict}, {row['ratio']:.3f} of the peer"
        )
    return said + suite.mean_ratio(measured)


SHAPES = ((8192, 8192, 4096), (4096, 4096, 4096))
#: Of 8 bits, with their scales: an activation, pairs, and a matrix beside.
SCALED = tuple(
    Problem(*shape, element="float8_e4m3fn", out="bfloat16", scales=scales, fusion=fusion)
    for shape in ((64, 8192, 4096), (4096, 4096, 4096))
    for scales in ("per_row", "blocks")
    for fusion in ("bias, gelu", "swiglu", "residual")
)

SUITE = suite.Suite(
    "fusion-dense",
    (*(Problem(*shape, fusion=fusion) for shape in SHAPES for fusion in FUSIONS), *SCALED),
    peers=peers_of,
    wrong=wrong,
    beside=beside,
    extra=extra,
    report=report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
