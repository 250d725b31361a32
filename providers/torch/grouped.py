"""Products of groups by torch._grouped_mm and torch._scaled_grouped_mm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from kernel_api.arguments import GroupedGemmArguments
from kernel_api.metadata import DesignMetadata, GroupedGemmOperandsMetadata
from kernel_api.offsets import check_offsets
from kernel_api.providers.torch import TorchProvider
from kernel_api.providers.torch.gemm import TorchProduct
from kernel_api.space import Miss, Operands, Space, rule
from kernel_api.targets import Target

#: Major compute capabilities whose kernels read the offsets on the device.
_CAPABILITIES = (9, 10)

_WHOLE_VECTORS = "torch groups operands in multiples of 16 bytes"


class TorchGroupedProduct(TorchProduct):
    """One of torch's functions. It returns its result, which is copied to where it belongs."""

    arguments = GroupedGemmArguments
    operands_metadata = GroupedGemmOperandsMetadata
    space = Space()
    design = DesignMetadata

    #: Its name in torch.
    function: ClassVar[str] = "_grouped_mm"

    @rule("torch takes tokens and writes results in their own order")
    def _(args: Any) -> bool | Miss:
        return not args.indices or Miss(f"{' and '.join(args.indices)} is given")

    @rule("torch groups at least one row, column and product")
    def _(args: Any) -> bool | Miss:
        empty = [name for name in ("T", "M", "N", "K") if getattr(args, name) == 0]
        return not empty or Miss(f"{empty[0]} is 0")

    @rule("torch reads operands whose rows, or columns, do not overlap")
    def _(args: Any) -> bool | Miss:
        for name in ("A", "B"):
            operand = getattr(args, name)
            inner = operand.unit_mode
            outer = -2 if inner == -1 else -1
            if operand.stride[outer] < operand.shape[inner]:
                return Miss(f"{name} has shape {operand.shape} and stride {operand.stride}")
        return True

    @rule("on a GPU torch cuts tokens that lie side by side at multiples of 16 bytes alone")
    def _(args: Any) -> bool | Miss:
        if args.device.type == "cpu":
            return True
        # The mode beside the tokens, of what is cut into groups.
        beside = {"A": -1} if args.ragged == "M" else {"A": -2, "B": -1}
        for name, mode in beside.items():
            if getattr(args, name).unit_mode != mode:
                return Miss(f"{name} has stride 1 along the tokens")
        return True

    @rule("torch groups products without waiting on compute capability 9 and 10")
    def _(args: Any) -> bool | Miss:
        if args.device.type != "cuda":
            return True
        capability = torch.cuda.get_device_capability(args.device)
        return capability[0] in _CAPABILITIES or Miss(f"the device has {capability}")

    @classmethod
    def class_status(
        cls, args: Any, target: Target | None = None, *, compiled: bool = False
    ) -> Any:
        status = super().class_status(args, target, compiled=compiled)
        if status and not hasattr(torch, cls.function):
            return type(status).fail(f"torch {torch.__version__} has no {cls.function}")
        return status


_SIXTEEN_BITS = Operands(
    A="bf16",
    B="bf16",
    out="bf16",
    offsets="i32",
    accumulator="f32",
    alignments=({"A": 16, "B": 16},),
    why_aligned=_WHOLE_VECTORS,
)


@TorchProvider.register
class TorchGroupedGemm(TorchGroupedProduct):
    """The rows of each group times its expert, by torch._grouped_mm."""

    family: ClassVar[str] = "torch.grouped_mm"
    ragged = "M"
    operands = (_SIXTEEN_BITS,)

    def product(self, args: Any) -> Callable[..., None]:
        return _of_rows


@TorchProvider.register
class TorchGroupedSum(TorchGroupedProduct):
    """The sums over the tokens of each group, by torch._grouped_mm."""

    family: ClassVar[str] = "torch.grouped_mm_sum"
    ragged = "K"
    operands = (_SIXTEEN_BITS,)

    @rule("torch writes its result and adds to nothing")
    def _(args: Any) -> bool:
        return not args.accumulate

    def product(self, args: Any) -> Callable[..., None]:
        return _of_sums


@TorchProvider.register
class TorchScaledGroupedGemm(TorchGroupedProduct):
    """The rows of each group times its expert, of 8-bit floats with a scale for each row and for
    each expert's column, by torch._scaled_grouped_mm."""

    family: ClassVar[str] = "torch.scaled_grouped_mm"
    devices = ("cuda",)
    ragged = "M"
    function = "_scaled_grouped_mm"
    operands = (
        Operands(
            A="e4m3",
            B="e4m3",
            out="bf16",
            offsets="i32",
            accumulator="f32",
            majors="A:k B:k",
            scales={"A": "per_row", "B": "per_row"},
            alignments=({"A": 16, "B": 16},),
            why_aligned=_WHOLE_VECTORS,
        ),
    )

    @rule("torch reads scales without gaps")
    def _(args: Any) -> bool:
        return all(one.scale.tensor.is_contiguous() for one in (args.A, args.B))

    def product(self, args: Any) -> Callable[..., None]:
        scale_a, scale_b = args.A.scale.tensor, args.B.scale.tensor

        def multiply(A: Any, B: Any, out: Any, offsets: Any) -> None:
            with torch.no_grad():
                found = torch._scaled_grouped_mm(
                    A, B, scale_a, scale_b, offs=offsets, out_dtype=out.dtype
                )
                _keep_rest(found, out, offsets)

        return multiply


def _of_rows(A: Any, B: Any, out: Any, offsets: Any) -> None:
    _check_on_host(offsets, A.shape[0])
    with torch.no_grad():
        _keep_rest(torch._grouped_mm(A, B, offs=offsets), out, offsets)


def _of_sums(A: Any, B: Any, out: Any, offsets: Any) -> None:
    _check_on_host(offsets, A.shape[1])
    with torch.no_grad():
        out.copy_(torch._grouped_mm(A, B, offs=offsets))


def _check_on_host(offsets: Any, T: int) -> None:
    """torch computes something of any offsets. Those of the host are read without a wait."""
    if offsets.device.type == "cpu":
        check_offsets(offsets, T)


def _keep_rest(found: Any, out: Any, offsets: Any) -> None:
    """Copy the rows of tokens that belong to a group, and leave the others as they are."""
    rows = torch.arange(len(out), device=out.device) < offsets[-1]
    torch.where(rows.unsqueeze(1), found, out, out=out)
