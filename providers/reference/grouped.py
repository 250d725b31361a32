"""Products of groups, each as the dense product that it is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from kernel_api._cached_property import cached_property
from kernel_api.arguments import (
    ExpertPointers,
    GemmArguments,
    GroupedGemmArguments,
    ScaledOperand,
)
from kernel_api.arguments.experts import Experts, ExpertTensors
from kernel_api.arguments.scaled import expanded_scale
from kernel_api.metadata import GroupedGemmOperandsMetadata
from kernel_api.offsets import check_groups
from kernel_api.operands import Layout, Operand
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.epilogue import evaluate, put
from kernel_api.providers.reference.gemm import exact_product, float32_product, rounding
from kernel_api.providers.reference.oracle import ProductOracle, ReferenceProduct
from kernel_api.space import Miss, Operands, rule
from kernel_api.verification import taken


class GroupedOracle(ProductOracle):
    """Of groups of rows (ragged M), or of what is summed over (ragged K). It reads the offsets."""

    args: GroupedGemmArguments

    @cached_property
    def groups(self) -> tuple[slice, ...]:
        """The tokens of each. Whoever reads offsets has waited for them, so they are checked."""
        check_groups(self.args.tensors, self.args.launch_values, self.args.ragged)
        ends = self.args.offsets.tensor.tolist()
        return tuple(map(slice, (0, *ends), ends))

    @cached_property
    def products(self) -> tuple[GemmArguments, ...]:
        """The dense product of each group."""
        made = self._rows_of if self.args.ragged == "M" else self._sum_over
        return tuple(made(group, tokens) for group, tokens in enumerate(self.groups))

    def exact_product(self) -> Any:
        return self._joined(exact_product)

    def float32_product(self) -> Any:
        return self._joined(float32_product)

    def rounding(self) -> Any:
        return self._joined(rounding)

    def out_scale(self, wide: Any) -> Any:
        args = self.args
        assert isinstance(args.out, ScaledOperand)
        scale = expanded_scale(args.out, args.modes["out"], args.contracted).to(wide)
        return scale[args.rows_written().get("out", ...)] if len(scale) > 1 else scale

    def out_before(self) -> Any:
        return torch.stack([_expert(self.args.out, group).tensor for group in range(self.args.L)])

    def evaluated(self, product: Any, *, wide: bool) -> dict[str, Any]:
        if self.args.ragged == "K":
            return super().evaluated(product, wide=wide)
        epilogue, double = self.args.epilogue, self.args.accumulator_type.bits == 64
        assert epilogue is not None
        return evaluate(
            epilogue.graph,
            product,
            epilogue.operands,
            wide=wide,
            double=double,
            groups=self.groups,
        )

    def shape_of(self, name: str, operand: Operand) -> tuple[int, ...]:
        partly = name in self.args.rows_written()
        return (self.groups[-1].stop, *operand.shape[1:]) if partly else operand.shape

    def _joined(self, compute: Callable[[GemmArguments], Any]) -> Any:
        """Something of every group, one after the other or as a batch."""
        found = [compute(product) for product in self.products]
        return torch.cat(found) if self.args.ragged == "M" else torch.stack(found)

    def _rows_of(self, group: int, tokens: slice) -> GemmArguments:
        args = self.args
        rows: Any = tokens
        if args.row_index is not None:
            rows = args.row_index.tensor[tokens].long()
        return self._product(_part(args.A, rows), _expert(args.B, group))

    def _sum_over(self, group: int, tokens: slice) -> GemmArguments:
        A, B = self.args.A, self.args.B
        return self._product(
            _like(A, A.tensor[:, tokens], _scale(A)), _like(B, B.tensor[tokens], _scale(B))
        )

    def _product(self, A: Any, B: Any) -> GemmArguments:
        args = self.args
        rows, columns = A.shape[0], B.shape[1]
        return GemmArguments(
            A,
            B,
            torch.empty((rows, columns), dtype=args.out.dtype.torch, device=args.device),
            args.accumulator_type,
            fp32_precision=args.fp32_precision,
        )


def _expert(experts: Operand, group: int) -> Operand:
    """The matrix of a group, with its scales."""
    if not isinstance(experts, Experts):
        return _part(experts, group)
    if isinstance(experts, ExpertTensors):
        matrix = experts.memory[group]
    else:
        matrix = _at(experts, int(experts.tensor[group]))
    return matrix if experts.mode is None else _like(experts, matrix.tensor, _scale(experts, group))


def _at(experts: Operand, address: int) -> Operand:
    """The matrix at an address of the CPU."""
    element = experts.dtype
    layout = Layout(experts.shape[1:], experts.stride[1:], element, experts.device)
    if not layout.span:
        return Operand(torch.empty(layout.shape, dtype=element.torch))
    memory = (ctypes.c_char * layout.span).from_address(address)
    elements = torch.frombuffer(memory, dtype=element.torch)
    return Operand(elements.as_strided(layout.shape, layout.stride))


def _part(operand: Operand, index: Any) -> Operand:
    """Of the first mode, with the scales of that."""
    return _like(operand, taken(operand.tensor, index), _scale(operand, index))


def _scale(operand: Any, index: Any = ...) -> Any:
    """The scales of a part, one for all if there is one; None without any."""
    if operand.mode is None:
        return None
    scale = operand.scale.tensor
    return scale[index] if scale.dim() else scale


def _like(operand: Operand, tensor: Any, scale: Any) -> Operand:
    return Operand(tensor) if scale is None else ScaledOperand(tensor, scale, operand.mode)


@ReferenceProvider.register
class ReferenceGroupedGemm(ReferenceProduct):
    """The products of all groups, computed in float64 (int64 for integers) and rounded once.

    Either form, with any scales, indices and epilogue. It waits for the device to read offsets.
    """

    family: ClassVar[str] = "reference.grouped_gemm"
    arguments = GroupedGemmArguments
    operands_metadata = GroupedGemmOperandsMetadata
    ragged = "any"
    experts = "any"
    oracle = GroupedOracle
    operands = (
        Operands(
            A="any",
            B="any",
            out="any",
            offsets="i32",
            accumulator="any",
            majors="strided",
            scales={"A": "any", "B": "any", "out": "any"},
        ),
    )

    @rule("the reference reads addresses of the CPU, or tensors")
    def _(args: Any) -> bool | Miss:
        given = [name for name in ("B", "out") if isinstance(getattr(args, name), ExpertPointers)]
        if not given or args.device.type == "cpu":
            return True
        name = given[0]
        return Miss(f"{name}'s are on {args.device}", f"would match with {name} as a list")

    @staticmethod
    def store(out: Operand, rows: Any, values: Any) -> None:
        if not out.discrete:
            put(out.tensor, rows, values)
            return
        for group, matrix in enumerate(values):
            _expert(out, group).tensor.copy_(matrix)
