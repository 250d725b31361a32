"""Operands of norms, and what norms compute, written in torch from the formulas.

Matrices stand in storages of NaN, their rows apart; what is written is NaN before.
"""

from __future__ import annotations

from typing import Any

import torch

import kernel_api as ka
from kernel_api._description import described, rebuilt
from kernel_api.arguments.norm import NormArguments
from kernel_api.dtypes import dtype
from support.data import strided_empty

RMS, LAYER = ka.RmsNormArguments, ka.LayerNormArguments
RMS_BACKWARD, LAYER_BACKWARD = ka.RmsNormBackwardArguments, ka.LayerNormBackwardArguments
KINDS = (RMS, LAYER, RMS_BACKWARD, LAYER_BACKWARD)


class Draw:
    """Operands of one problem.

    Args:
        element: Type of what is read; statistics are float32, or float64 if it is.
        pad: Elements between rows.
        offset: Elements in front of each matrix.
        shift: What is added to x: a mean that is large beside the deviations from it.
    """

    def __init__(
        self,
        M: int,
        N: int,
        element: Any = "float32",
        *,
        pad: int = 0,
        offset: int = 0,
        device: Any = "cpu",
        seed: int = 0,
        shift: float = 0.25,
    ) -> None:
        self.M, self.N, self.element = M, N, dtype(element).torch
        self.pad, self.offset, self.device, self.shift = pad, offset, torch.device(device), shift
        self.wide = torch.float64 if self.element is torch.float64 else torch.float32
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, shape: Any, element: Any = None, shift: float = 0.0) -> torch.Tensor:
        element = dtype(element or self.element).torch
        if self.device.type == "meta":
            return torch.empty(shape, dtype=element, device="meta")
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64) + shift
        return drawn.to(element).to(self.device)

    def matrix(self, *, read: bool = True, element: Any = None, pad: int | None = None) -> Any:
        """(M, N)"""
        element = dtype(element or self.element).torch
        pad = self.pad if pad is None else pad
        shape = (self.M, self.N)
        tensor = strided_empty(shape, element, pad=pad, offset=self.offset, device=self.device)
        if self.device.type != "meta":
            everything = torch.empty(0, dtype=torch.uint8, device=self.device)
            everything.set_(tensor.untyped_storage()).fill_(0xFF)
            if read:
                tensor.copy_(self.random(shape, element, self.shift))
        return tensor

    def columns(self, *, read: bool = True, element: Any = None) -> Any:
        """(N,)"""
        found = self.random((self.N,), element)
        return found if read else poisoned(found)

    def statistic(self, shape: Any = None) -> Any:
        """(M,), or another shape; written."""
        return poisoned(self.random((self.M,) if shape is None else shape, self.wide))

    def arguments(self, kind: type[NormArguments], **given: Any) -> Any:
        """Of a norm; ``given`` replaces operands and adds options. Backward gets the statistics of
        x as they are."""
        if kind in (RMS, LAYER):
            matrices = {"x": self.matrix(), "out": self.matrix(read=False)}
        else:
            names = ("dy", "x", "dx")
            matrices = {name: self.matrix(read=name != "dx") for name in names}
            given = {**self._statistics(given.get("x", matrices["x"]), kind), **given}
        return kind(**{**matrices, **given})

    def _statistics(self, x: Any, kind: type[NormArguments]) -> dict[str, Any]:
        if self.device.type == "meta":
            names = ("rstd",) if kind is RMS_BACKWARD else ("mean", "rstd")
            return {name: self.statistic() for name in names}
        mean, rstd = statistics(x, kind is LAYER_BACKWARD, 1e-5)
        found = {"rstd": rstd.to(self.wide)}
        return found if kind is RMS_BACKWARD else {"mean": mean.to(self.wide), **found}


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.fill_(float("nan"))


# For kernels -----------------------------------------------------------------------------


def columns_for(kernel: Any, N: int) -> int:
    """The nearest number of columns, or so, that the kernel's design and alignment take."""
    design, operands = kernel.metadata.design, kernel.metadata.operands
    if not hasattr(design, "room"):
        return N
    vector = operands.x.alignment // operands.x.dtype.itemsize
    least = 1
    if design.elements and design.room > 64:
        least = design.room // 2 + 1
    most = design.room or N + vector
    found = -(-min(max(N, least), most) // vector) * vector
    # Hadamard blocks.
    return -(-found // 16) * 16 if kernel.family == "sm80.rmsnorm_rht_amax" else found


def arguments_for(
    kernel: Any, M: int, N: int, *, device: Any = "cpu", seed: int = 0, **given: Any
) -> Any:
    """Arguments that a kernel takes, at no more than the alignment that it asks."""
    kind, operands = kernel.arguments, kernel.metadata.operands
    N = columns_for(kernel, N)
    draw = Draw(M, N, operands.x.dtype or "float32", device=device, seed=seed)
    matrices = {}
    for name, asked in operands.tensors.items():
        pitch = N + 1 + (asked.divisibility - N - 1) % (2 * asked.divisibility)
        read = name not in ("out", "dx")
        matrices[name] = draw.matrix(read=read, element=asked.dtype, pad=pitch - N)
    if kernel.family == "sm80.rmsnorm_rht_amax" and not {"amax", "hadamard"} & set(given):
        given = {"hadamard": True, "global_amax": draw.statistic(()), **given}
    given = {"weight": draw.columns(), **given}
    args = draw.arguments(kind, **{**matrices, **given})
    if kind in (RMS, LAYER) or "dresidual" in given:
        return args
    return args.rebuilt(*args.tensors, dresidual=dresidual_for(kernel, draw, args))


#: How rules begin that one more matrix, or its type, may break.
_OF_DRESIDUAL = ("there are as many stages as fit", "registers are shared out")


def weight_type(kernel: Any, element: Any) -> Any:
    """Another one than float32 where the kernel's threads have no registers for it."""
    is_crowded = getattr(kernel.metadata.design, "is_crowded", False)
    return None if is_crowded and element == "float32" else element


def dresidual_for(kernel: Any, draw: Draw, args: Any, first: Any = None) -> Any:
    """The gradient of a residual's sum, or None: of the first type beside which as many stages fit
    as the design has."""
    on_meta = rebuilt(described(args))
    for element in dict.fromkeys((first, None, "bfloat16", "float32")):
        found = None if element is None else rows_beside(kernel, draw, element)
        if element is not None and found is None:
            continue
        like = None if found is None else torch.empty_like(found, device="meta")
        status = kernel.supports(on_meta.rebuilt(*on_meta.tensors, dresidual=like))
        if not (status.rule or "").startswith(_OF_DRESIDUAL):
            return found
    raise AssertionError(f"{kernel.metadata.kernel_name} takes nothing")


def rows_beside(kernel: Any, draw: Draw, element: Any, *, read: bool = True) -> Any:
    """(M, N) of another type, in the vectors that the kernel reads; None where it copies fewer
    bytes at once than there are copies of."""
    design, x = kernel.metadata.design, kernel.metadata.operands.x
    vector = x.alignment // x.dtype.itemsize
    if design.elements and vector * dtype(element).itemsize < 4:
        return None
    return draw.matrix(read=read, element=element, pad=vector)


# Formulas --------------------------------------------------------------------------------


def statistics(x: torch.Tensor, centred: bool, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, rstd) of rows in float64; mean of an RMS norm is 0."""
    x = x.double()
    mean = x.sum(1) / x.shape[1] if centred else x.new_zeros(x.shape[0])
    variance = ((x - mean[:, None]) ** 2).sum(1) / x.shape[1]
    return mean, (variance + eps) ** -0.5


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    centred: bool,
    eps: float,
) -> torch.Tensor:
    """In float64; gradients pass through."""
    mean, rstd = statistics(x, centred, eps)
    y = (x.double() - mean[:, None]) * rstd[:, None]
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def hadamard(y: torch.Tensor, signs: torch.Tensor | None = None) -> torch.Tensor:
    """Blocks of 16 columns times H16 / 4, by the recursion H(2n) = [[H, H], [H, -H]]."""
    H = torch.ones(1, 1, dtype=y.dtype)
    for _ in range(4):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    blocks = y.reshape(y.shape[0], -1, 16)
    if signs is not None:
        blocks = blocks * signs.to(y.dtype)
    return torch.einsum("mbj,ij->mbi", blocks, H / 4).reshape(y.shape)


def block_maxima(values: torch.Tensor, rows: int) -> torch.Tensor:
    """The largest magnitude of every so many rows."""
    return torch.stack([part.abs().max() for part in values.split(rows)])


def gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *, centred: bool, eps: float
) -> dict[str, torch.Tensor]:
    """dx, dweight and dbias in float64, by differentiating the forward formula."""
    leaf = x.double().clone().requires_grad_()
    N = x.shape[1]
    given = torch.ones(N) if weight is None else weight.cpu()
    factor = given.double().to(x.device).clone().requires_grad_()
    offset = torch.zeros(N, dtype=torch.float64, device=x.device, requires_grad=True)
    norm(leaf, factor, offset, centred=centred, eps=eps).backward(dy.double())
    return {"dx": leaf.grad, "dweight": factor.grad, "dbias": offset.grad}
