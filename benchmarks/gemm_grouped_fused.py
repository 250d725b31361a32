"""Suite grouped-fusion: fused products of groups, beside the plain one and torch.compile.

    python benchmarks/gemm_grouped_fused.py [--only TEXT] [--candidates N | --all] [--seconds S]

``of_plain`` is the time over that of the best ranked kernel of the plain product of the same
operands; ``of_limit`` over LIMIT times that, plus the bytes that the fusion moves beyond as fast
as a copy. The peer is torch._grouped_mm with the formula behind it, compiled as one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import fusion_dense
import gemm_grouped
import harness
import problems
import suite
import torch
from peers import Peer

import kernel_api as ka
from kernel_api import fusions

LIMIT = 1.05
F32 = torch.float32


def _swiglu(AB: torch.Tensor) -> torch.Tensor:
    gate, up = AB.view(*AB.shape[:-1], -1, 2, 32).unbind(-2)
    return (torch.nn.functional.silu(gate) * up).flatten(-2)


def _weighted(AB: torch.Tensor, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
    rows = read["prob"].view(-1, 1)
    return (_swiglu(AB) * rows).to(AB.dtype)


def _glu(A: Any, B: Any, offsets: Any, new: Callable[..., torch.Tensor], **more: Any) -> Any:
    T, N = A.shape[0], B.shape[-1]
    return fusions.grouped_gemm_glu(A, B, offsets, out=new(T, N // 2), **more)


def _with_prob(A: Any, B: Any, offsets: Any, new: Callable[..., torch.Tensor]) -> Any:
    T, N = A.shape[0], B.shape[-1]
    return _glu(A, B, offsets, new, prob=new(T, dtype=F32).fill_(0.7), preactivation=new(T, N))


@dataclass(frozen=True)
class Fusion:
    """How it is asked for, and the formula of out behind the product."""

    arguments: Callable[..., Any]
    formula: Callable[..., torch.Tensor]


FUSIONS = {
    "swiglu": Fusion(_glu, lambda AB, read: _swiglu(AB)),
    "swiglu, prob, preactivation stored": Fusion(_with_prob, _weighted),
}


@dataclass(frozen=True)
class Problem(gemm_grouped.Problem):
    """A product of groups with a fused epilogue.

    Attributes:
        fusion: Which of FUSIONS.
    """

    fusion: str = ""

    @property
    def label(self) -> str:
        types = f" e4m3 {self.scales.replace('_', ' ')}" if self.scales else ""
        return f"{super().label}{types} {self.fusion}"

    @functools.cached_property
    def extra_bytes(self) -> int:
        """Moved beyond the plain product."""
        args = self.arguments("meta")
        written = sum(o.tensor.numel() * o.tensor.element_size() for o in args.outputs.values())
        return max(0, written - 2 * self.M * self.N)

    def arguments(self, device: str) -> Any:
        A, B, offsets = self.operands(device)
        new = functools.partial(torch.empty, device=device)
        element = A.dtype
        if self.scales:
            A, B = _per_row(A), _per_row(B.mT, "B")

        def empty(*shape: int, dtype: torch.dtype = element) -> torch.Tensor:
            return new(shape, dtype=dtype)

        return FUSIONS[self.fusion].arguments(A, B, offsets, empty)


def _per_row(matrix: torch.Tensor, name: str = "A") -> ka.ScaledOperand:
    """In units of a scale per row, of a token or a column of B."""
    scale = torch.rand(matrix.shape[:-1], device=matrix.device) + 0.5
    stored = matrix.to(torch.float8_e4m3fn)
    stored = stored if name == "A" else stored.mT
    return ka.ScaledOperand(stored, scale, ka.ScaleMode.PER_ROW)


def peers_of(problem: problems.Problem) -> dict[str, Peer]:
    torch.compiler.reset()  # sizes of the problem before would make this one's dynamic
    formula = FUSIONS[cast(Problem, problem).fusion].formula

    def written(A: Any, B: Any, offsets: Any, read: Any, out: torch.Tensor) -> None:
        out.copy_(formula(torch._grouped_mm(A, B, offs=offsets), read))

    def behind(AB: Any, read: Any, out: torch.Tensor) -> None:
        out.copy_(formula(AB, read))

    compiled = torch.compile(behind if problem.scales else written)

    def bound(args: Any) -> Callable[[], Any]:
        (A, B, out, offsets), (read, _) = args.tensors, fusion_dense.of_epilogue(args)
        return functools.partial(compiled, A, B, offsets, read, out)

    def bound_behind(args: Any) -> Callable[[], Any]:
        (A, B, out, offsets), (read, _) = args.tensors, fusion_dense.of_epilogue(args)
        scales = args.A.scale.tensor, args.B.scale.tensor
        types = {"offs": offsets, "out_dtype": out.dtype}

        def call() -> None:
            compiled(torch._scaled_grouped_mm(A, B, *scales, **types), read, out)

        return call

    if problem.scales:
        return {"torch._scaled_grouped_mm, torch.compile": bound_behind}
    return {"torch.compile": bound}


def wrong(args: Any) -> str | None:
    """What a peer rounds before anything else is done with it; and it stores out alone."""
    from kernel_api.providers.reference.grouped import ReferenceGroupedGemm

    exact = ReferenceGroupedGemm.exact(args)["out"].double()
    error = (args.out.tensor.double() - exact).abs().max()
    return None if error <= fusion_dense.ROUNDED * exact.abs().max() else f"off by {error:.3g}"


def beside(problem: problems.Problem, args: Sequence[Any]) -> Mapping[str, harness.Calls]:
    """The plain product on the same A and B, and a copy."""
    products = [
        ka.GroupedGemmArguments(a.A, a.B, a.out.tensor.new_empty(a.T, a.N), a.offsets) for a in args
    ]
    kernel = suite.candidates(products[0], suite.options("", None).parse_args([]))[0]
    calls = [functools.partial(kernel.prepare(a), *a.tensors) for a in products]
    return {fusion_dense.PLAIN: calls, harness.COPY: harness.copy()}


def extra(
    problem: problems.Problem, microseconds: float, medians: Mapping[str, float]
) -> Mapping[str, Any]:
    plain = medians[fusion_dense.PLAIN]
    pace = medians[harness.COPY] / (2 * harness.COPIED_BYTES)
    copied = cast(Problem, problem).extra_bytes * pace
    return {
        "plain_us": round(plain, 2),
        "of_plain": round(microseconds / plain, 4),
        "extra_bytes_us": round(copied, 2),
        "of_limit": round(microseconds / (LIMIT * plain + copied), 4),
    }


SUITE = suite.Suite(
    "grouped-fusion",
    (
        *(
            Problem(T, N, K, groups=E, sizes=sizes, fusion=fusion)
            for E, T, N, K in gemm_grouped.LARGE
            for sizes in ("even", "zipf")
            for fusion in FUSIONS
        ),
        *(
            Problem(T, N, K, groups=E, sizes="routed", scales="per_row", fusion="swiglu")
            for E, T, N, K in (*gemm_grouped.LARGE, (8, 256, 28672, 4096))
        ),
    ),
    peers=peers_of,
    wrong=wrong,
    beside=beside,
    extra=extra,
    report=fusion_dense.report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
