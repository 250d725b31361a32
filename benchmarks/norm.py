"""Suite norm: norms of rows and their gradients beside torch's, and beside a copy in the same run.

    python benchmarks/norm.py [--only rmsnorm] [--candidates N | --all] [--seconds S]

A norm can only be as fast as its matrices are moved, see streams.py. Peers are torch's operators,
which allocate what they return; that of ``rmsnorm_rht_amax`` is three of them. ``--all`` gives rows
of all designs for the problem's alignment, best ranked first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streams
import torch

import kernel_api as ka
from kernel_api.arguments.norm import NormArguments, default_rows_per_block
from kernel_api.dtypes import dtype

NAME = "norm"
EPS = 1e-5

KINDS = {
    "rmsnorm": ka.RmsNormArguments,
    "rmsnorm_rht_amax": ka.RmsNormArguments,
    "layernorm": ka.LayerNormArguments,
    "rmsnorm_backward": ka.RmsNormBackwardArguments,
    "layernorm_backward": ka.LayerNormBackwardArguments,
}


@dataclass(frozen=True)
class Problem:
    """Rows of x (M, N), with a weight, and a bias of a layer norm; gradients with their sums.

    Attributes:
        element: Type of all that is no statistic.
        residual: Whether a residual is added to x and the sum stored; of a gradient, whether that
            of the sum is added.
    """

    operation: str
    M: int
    N: int
    element: str = "bfloat16"
    residual: bool = False

    @property
    def label(self) -> str:
        """What rows call it."""
        residual = ", residual" if self.residual else ""
        return f"{self.operation} {self.M}x{self.N} (M x N) {dtype(self.element).short}{residual}"

    @property
    def origin(self) -> str:
        return ""

    @property
    def bytes(self) -> int:
        """What must move at least: each element of a matrix once."""
        is_backward = "backward" in self.operation
        matrices = 2 + is_backward + self.residual * (1 if is_backward else 2)
        return matrices * self.M * self.N * dtype(self.element).itemsize

    def arguments(self, device: str) -> NormArguments:
        """The problem on new random operands."""
        M, N, kind = self.M, self.N, KINDS[self.operation]
        element = dtype(self.element).torch

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=element)

        def written(*shape: int, wide: bool = True) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=torch.float32 if wide else element)

        statistics = {"rstd": written(M)}
        if "layer" in self.operation:
            statistics["mean"] = written(M)
        if "backward" in self.operation:
            for one in statistics.values():
                one.normal_().abs_()
            sums = {"dweight": written(N, wide=False)}
            if "layer" in self.operation:
                sums["dbias"] = written(N, wide=False)
            matrices = {"dy": drawn(M, N), "x": drawn(M, N), "dx": written(M, N, wide=False)}
            more = {"dresidual": drawn(M, N)} if self.residual else {}
            return kind(**matrices, **statistics, weight=drawn(N), **sums, **more)
        out = written(M, N, wide=False)
        given: dict[str, Any] = {"weight": drawn(N), "eps": EPS}
        if self.operation == "rmsnorm_rht_amax":
            blocks = -(-M // default_rows_per_block(M))
            return kind(
                drawn(M, N), out, **given, hadamard=True, amax=written(blocks),
                global_amax=written(), signs=torch.ones(16, device=device),
            )  # fmt: skip
        if self.operation == "layernorm":
            given["bias"] = drawn(N)
        if self.residual:
            given |= {"residual": drawn(M, N), "residual_out": written(M, N, wide=False)}
        return kind(drawn(M, N), out, **given, **statistics)


SIZES = ((8192, 8192), (16384, 4096), (4096, 5120), (32768, 1024), (262144, 128), (4096, 16384))

PROBLEMS = (
    *(Problem(operation, M, N) for M, N in SIZES for operation in KINDS),
    Problem("rmsnorm", 1024, 8192),
    Problem("rmsnorm", 64, 8192),
    Problem("rmsnorm", 8192, 65536),
    *(Problem(f"{kind}_backward", 4096, 32768) for kind in ("rmsnorm", "layernorm")),
    Problem("rmsnorm", 8192, 8192, "float32"),
    Problem("layernorm", 8192, 8192, "float32"),
    Problem("layernorm_backward", 8192, 8192, "float32"),
    *(
        Problem(operation, M, N, residual=True)
        for M, N in ((8192, 8192), (16384, 4096), (4096, 5120))
        for operation in ("rmsnorm", "layernorm", "rmsnorm_backward", "layernorm_backward")
    ),
    Problem("rmsnorm", 64, 8192, residual=True),
)


# Peers -----------------------------------------------------------------------------------


def peer_of(problem: Problem, args: Any) -> tuple[str, Callable[[], Any]]:
    """What torch has, by name, on the operands of the arguments."""
    functional, aten = torch.nn.functional, torch.ops.aten
    extent, x = [problem.N], args.x.tensor
    weight = args.weight.tensor
    if problem.residual:
        return "torch.compile", functools.partial(*_with_residual(problem, args))
    if problem.operation == "rmsnorm":
        return "torch.rms_norm", functools.partial(functional.rms_norm, x, extent, weight, EPS)
    if problem.operation == "layernorm":
        bias = args.bias.tensor
        layer_norm = functools.partial(functional.layer_norm, x, extent, weight, bias, EPS)
        return "torch.layer_norm", layer_norm
    if problem.operation == "rmsnorm_rht_amax":
        return "torch, 3 operators", functools.partial(_transformed, x, weight, args.rows_per_block)
    statistics = [
        getattr(args, n).tensor.unsqueeze(1) for n in ("mean", "rstd") if n in args.further
    ]
    given = (args.dy.tensor, x, extent, *statistics, weight)
    if problem.operation == "rmsnorm_backward":
        backward = functools.partial(aten._fused_rms_norm_backward, *given, [True, True])
        return "torch.rms_norm backward", backward
    backward = functools.partial(aten.native_layer_norm_backward, *given, weight, [True] * 3)
    return "torch.layer_norm backward", backward


def _with_residual(problem: Problem, args: Any) -> tuple[Any, ...]:
    """What torch compiles of the formulas, with its operands."""
    named = {name: one.tensor for name, one in args.further.items()}
    beside = [named[name] for name in ("mean", "rstd", "weight", "bias") if name in named]
    torch.compiler.reset()
    if "backward" in problem.operation:
        compiled = torch.compile(_gradients)
        return compiled, args.dy.tensor, args.x.tensor, named["dresidual"], *beside
    if problem.operation == "rmsnorm":
        return torch.compile(_rms_norm_of_sum), args.x.tensor, named["residual"], named["weight"]
    beside = named["weight"], named["bias"]
    return torch.compile(_layer_norm_of_sum), args.x.tensor, named["residual"], *beside


def _rms_norm_of_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    summed = x + residual
    return torch.nn.functional.rms_norm(summed, summed.shape[1:], weight, EPS), summed


def _layer_norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Any:
    summed = x + residual
    return torch.nn.functional.layer_norm(summed, summed.shape[1:], weight, bias, EPS), summed


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, dresidual: torch.Tensor, *beside: torch.Tensor
) -> Any:
    """beside: the mean of a layer norm, the reciprocal deviation, and the weight."""
    *mean, rstd, weight = (one.float() for one in beside)
    wide = x.float() - mean[0][:, None] if mean else x.float()
    normal, g = wide * rstd[:, None], dy.float() * weight
    found = g - normal * (g * normal).mean(1, keepdim=True)
    if mean:
        found = found - g.mean(1, keepdim=True)
    dx = (found * rstd[:, None] + dresidual).to(x.dtype)
    dweight = (dy.float() * normal).sum(0).to(x.dtype)
    return (dx, dweight, dy.float().sum(0).to(x.dtype)) if mean else (dx, dweight)


def _transformed(x: torch.Tensor, weight: torch.Tensor, rows_per_block: int) -> Any:
    y = torch.nn.functional.rms_norm(x, x.shape[1:], weight, EPS)
    h = y.view(-1, 16) @ _hadamard(x.device, x.dtype)
    return h, h.view(-1, rows_per_block * x.shape[1]).abs().amax(1)


@functools.lru_cache(maxsize=4)
def _hadamard(device: Any, element: Any) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / 4).to(device, element)


def _peers(problem: Problem, args: Any) -> dict[str, Callable[[], Any]]:
    return dict([peer_of(problem, args)])


SUITE = streams.Suite(NAME, PROBLEMS, _peers)


def main(arguments: Sequence[str] | None = None) -> int:
    return streams.main(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
