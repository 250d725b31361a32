"""Operands of products of groups, made from the options that describe a problem."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernel_api.cli._fused_problem import Operands
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api._forms import Form
    from kernel_api.arguments import GroupedGemmArguments
    from kernel_api.cli._problem import Maker

#: Names of :mod:`kernel_api.fusions`.
GROUPED = (
    "grouped_gemm", "grouped_gemm_wgrad", "grouped_gemm_glu", "grouped_gemm_dglu",
    "grouped_gemm_glu_hadamard", "grouped_gemm_srelu", "grouped_gemm_dsrelu",
    "grouped_gemm_quantize",
)  # fmt: skip

_GROUPS = 8
_INT32 = dtype("int32")

#: A and B, with scales where these are asked for.
Scaled = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def grouped_arguments(
    options: argparse.Namespace,
    maker: Maker,
    sizes: tuple[int, int, int],
    layout: str,
    scaled: Scaled,
) -> GroupedGemmArguments:
    """Of M tokens and experts (K, N); of ``grouped_gemm_wgrad`` out (M, N) of each expert, which
    sums over K tokens. Groups end anywhere, some where they begin.

    Raises:
        ArgumentError: the options contradict each other, or name what the operation does not take.
    """
    if options.batch is not None:
        raise ArgumentError(
            f"--batch is {options.batch}; grouped products have --groups, leave it out"
        )
    m, n, k = sizes
    element, groups = dtype(options.dtype), options.groups or _GROUPS
    sums = options.operation == "grouped_gemm_wgrad"
    A = maker.matrices((m, k), element, layout[0], None, fill=True)
    B = maker.matrices((k, n), element, layout[1], None if sums else groups, fill=True)
    matrices = scaled(options.scales, maker, A, B)
    offsets = _ends(maker, k if sums else m, groups)
    if options.operation in GROUPED[:2] and not options.beside:
        return _plain(options, maker, matrices, offsets, layout[2])
    from kernel_api.ops import GROUPED_FORMS

    form = next(form for form, _ in GROUPED_FORMS if form.name == options.operation)
    made = _GroupedOperands(form, options, maker, matrices, offsets)
    args: GroupedGemmArguments = made.arguments(layout[2])
    return args


def _ends(maker: Maker, tokens: int, groups: int) -> Any:
    """Of groups, at random; the last ends with the tokens."""
    import torch

    if maker.random is None:
        return torch.empty(groups, dtype=torch.int32, device=maker.device)
    ends = torch.randint(tokens + 1, (groups,), generator=maker.random, device=maker.device)
    ends[-1] = tokens
    return ends.sort().values.int()


def _plain(
    options: argparse.Namespace, maker: Maker, matrices: tuple[Any, Any], offsets: Any, letter: str
) -> GroupedGemmArguments:
    import kernel_api as ka

    A, B = matrices
    element = dtype(options.out_dtype or options.dtype)
    groups = offsets.shape[0] if len(B.shape) == 2 else None
    out = maker.matrices((A.shape[-2], B.shape[-1]), element, letter, groups, fill=False)
    precision = options.fp32_precision
    return ka.GroupedGemmArguments(
        A, B, out, offsets, options.accumulator, fp32_precision=precision
    )


class _GroupedOperands(Operands):
    """Those of a fusion."""

    def __init__(
        self,
        form: Form,
        options: argparse.Namespace,
        maker: Maker,
        matrices: tuple[Any, Any],
        offsets: Any,
    ) -> None:
        super().__init__(form, options, maker, matrices)
        self.offsets, self.groups = offsets, offsets.shape[0]

    def out(self, letter: str) -> Any:
        groups = self.groups if self.form.name == "grouped_gemm_wgrad" else None
        shape = self.M, self.columns
        return self.maker.matrices(shape, self.out_element, letter, groups, fill=False)

    def operand(self, name: str) -> Any:
        if name == "offsets":
            return self.offsets
        if name == "bias":
            shape = 1, self.N
            return self.maker.matrices(shape, self.element, "t", self.groups, fill=True)[:, 0]
        if name in ("row_index", "out_row_index"):
            return self._rows(name)
        return super().operand(name)

    def _rows(self, name: str) -> Any:
        """Each of them once, in any order."""
        import torch

        random, device = self.maker.random, self.maker.device
        if random is None:
            return torch.empty(self.M, dtype=_INT32.torch, device=device)
        return torch.randperm(self.M, generator=random, device=device).int()
