"""Attention and its gradient by the operators behind torch's scaled_dot_product_attention.

torch aligns a causal mask to the top left. Its operators allocate what they return, which is copied
to where it belongs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api._autocast import off
from kernel_api.arguments import SdpaArguments, SdpaBackwardArguments
from kernel_api.arguments.attention import AttentionArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.devices import target_of
from kernel_api.kernel import Kernel
from kernel_api.masks import HIDDEN_BELOW
from kernel_api.metadata import (
    DesignMetadata,
    SdpaBackwardOperandsMetadata,
    SdpaOperandsMetadata,
)
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.space import Miss, Operands, Space, rule

_aten: Any = torch.ops.aten

_INFINITY = float("inf")

#: Queries that the efficient kernels keep statistics of at a time.
_EFFICIENT_ROWS = 32


@rule("torch gives no largest scores and no sums of exponentials")
def no_statistics(args: AttentionArguments) -> bool | Miss:
    asked = [name for name in ("score_max", "score_sum_exp") if name in args.further]
    return not asked or Miss(f"{asked[0]} is given")


class TorchAttention(Kernel):
    """One of torch's operators, on dense sequences without options that torch does not have."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    space = Space()
    design = DesignMetadata
    gives_no_statistics = no_statistics

    @rule("torch's operators take dense sequences of one length")
    def _(args: AttentionArguments) -> bool | Miss:
        for name, on in (("packed", args.is_packed), ("paged", args.is_paged)):
            if on:
                return Miss(f"they are {name}")
        return Miss("they have seq_lens") if args.is_padded else True

    @rule("torch's operators have no softcap, score_mod, alibi or sink")
    def _(args: AttentionArguments) -> bool | Miss:
        further = args.further
        given = {
            "softcap": args.softcap,
            "score_mod": args.score,
            "alibi": further.get("alibi"),
            "sink": further.get("sink"),
        }
        found = [name for name, one in given.items() if one is not None]
        return Miss(f"{found[0]} is given") if found else True

    @rule("torch draws the zeros of dropout in a way of its own")
    def _(args: AttentionArguments) -> bool:
        return args.dropout is None

    @rule("torch's operators mask nothing, or what is causal from the top left")
    def _(args: AttentionArguments) -> bool | Miss:
        mask = args.mask
        if mask is None:
            return True
        known = args.bounds in ({}, {"right": 0}) or _is_square_causal(args)
        return (mask.is_band and known) or Miss(f"the mask is {mask!r}")

    @rule("torch's operators need a key")
    def _(args: AttentionArguments) -> bool:
        return args.S_kv > 0

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            for name, values in self._computed(args).items():
                if name in args.outputs:
                    args.outputs[name].tensor.copy_(values)

    def _computed(self, args: Any) -> dict[str, Any]:
        """Outputs by name; others are left out later."""
        raise NotImplementedError


def is_causal(args: AttentionArguments) -> bool:
    return bool(args.bounds)


def _is_square_causal(args: AttentionArguments) -> bool:
    """Whether the mask is causal, and it makes no difference to where it is aligned."""
    return args.S_q == args.S_kv and set(args.bounds.items()) <= {("right", 0), ("right_end", 0)}


def bias_of(args: AttentionArguments) -> Any:
    """(B, H, S_q, S_kv), or None. What hides a key is −∞, as torch does not take it for that."""
    if "bias" not in args.further:
        return None
    bias = args.further["bias"].tensor
    if args.Q.dtype.bits < 64:
        bias = bias.masked_fill(bias < HIDDEN_BELOW, -_INFINITY)
    return bias.expand(args.B, args.H, args.S_q, args.S_kv)


# Rules that some of the operators share --------------------------------------------------


@rule("torch's flash attention takes no bias")
def no_bias(args: AttentionArguments) -> bool:
    return "bias" not in args.further


@rule("torch takes a bias of the type of the operands")
def same_bias(args: AttentionArguments) -> bool | Miss:
    bias = args.further.get("bias")
    if bias is None or bias.dtype is args.Q.dtype:
        return True
    return Miss(f"bias is {bias.dtype}", f"would match with bias of {args.Q.dtype}")


@rule("torch takes a bias or a causal mask, not both")
def either(args: AttentionArguments) -> bool:
    return "bias" not in args.further or not args.bounds


@rule("the operator has as many heads of keys as of queries")
def same_heads(args: AttentionArguments) -> bool | Miss:
    return args.H_kv == args.H or Miss(f"they are {args.H_kv} and {args.H}")


@rule("the operator has values as long as keys")
def same_dims(args: AttentionArguments) -> bool | Miss:
    return args.D_v == args.D or Miss(f"they have {args.D_v} and {args.D} elements")


@rule("the operator is causal where there are as many keys as queries")
def square(args: AttentionArguments) -> bool | Miss:
    return (
        not args.bounds or _is_square_causal(args) or Miss(f"they are {args.S_kv} and {args.S_q}")
    )


@rule("the operator reads vectors of 16 bytes")
def whole_vectors(args: AttentionArguments) -> bool | Miss:
    read = ("Q", "K", "V", "out", "dO") if "dO" in args.operand_names else ("Q", "K", "V")
    for name in read:
        operand = getattr(args, name)
        if operand.alignment % 16:
            return Miss(f"{name}'s address and strides are multiples of {operand.alignment} bytes")
    return True


@rule("the operator adds gradients up in any order")
def in_any_order(args: SdpaBackwardArguments) -> bool:
    return not args.deterministic


@rule("the operator gives no gradient of a bias")
def no_sums(args: SdpaBackwardArguments) -> bool:
    return "dBias" not in args.further


def _largest_head(args: AttentionArguments) -> int:
    """That cuDNN takes."""
    target = target_of(args.device)
    return 256 if target is None or target.cc >= 90 else 128


class _Forward(TorchAttention):
    arguments = SdpaArguments
    operands: ClassVar[tuple[Operands, ...]] = (
        Operands(
            Q="f16 | bf16",
            K="like Q",
            V="like Q",
            out="like Q",
            accumulator="f32",
            majors="strided",
        ),
    )
    operands_metadata = SdpaOperandsMetadata


class _Backward(TorchAttention):
    arguments = SdpaBackwardArguments
    operands: ClassVar[tuple[Operands, ...]] = (
        Operands(
            Q="f16 | bf16",
            K="like Q",
            V="like Q",
            out="like Q",
            dO="like Q",
            lse="f32",
            dQ="like Q",
            dK="like Q",
            dV="like Q",
            accumulator="f32",
            majors="strided",
        ),
    )
    operands_metadata = SdpaBackwardOperandsMetadata


def _with_wider(operands: tuple[Operands, ...], wide: str = "f32") -> tuple[Operands, ...]:
    """Rows for a wider type, too."""
    types = {n: wide if n in ("Q", "lse") else t for n, t in operands[0].types.items()}
    more = Operands(accumulator=wide, majors="strided", **types)  # type: ignore[arg-type]
    return (*operands, more)


def _state(device: Any) -> tuple[Any, Any]:
    """Of dropout, which is not looked at."""
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    return nothing, nothing


# cuDNN -----------------------------------------------------------------------------------


class _Cudnn(TorchAttention):
    targets: ClassVar[tuple[str, ...]] = ("sm_80",)

    takes_same_bias = same_bias
    takes_either = either
    reads_whole_vectors = whole_vectors

    @rule("cuDNN's attention has heads of 128 elements at most, 256 on Hopper and newer")
    def _(args: AttentionArguments) -> bool | Miss:
        return max(args.D, args.D_v) <= _largest_head(args) or Miss(f"D is {args.D}, {args.D_v}")

    @rule("cuDNN's attention has more than one query and one key")
    def _(args: AttentionArguments) -> bool | Miss:
        return min(args.S_q, args.S_kv) > 1 or Miss(f"they are {args.S_q} and {args.S_kv}")


@TorchProvider.register
class TorchCudnnSdpa(_Forward, _Cudnn):
    """Attention by cuDNN."""

    family: ClassVar[str] = "torch.sdpa_cudnn"

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, _ = args.tensors
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias_of(args), "lse" in args.further, 0.0, is_causal(args), scale=args.scale
        )
        return {"out": out} if lse is None else {"out": out, "lse": lse.view(lse.shape[:3])}


@TorchProvider.register
class TorchCudnnSdpaBackward(_Backward, _Cudnn):
    """The gradient of attention by cuDNN."""

    family: ClassVar[str] = "torch.sdpa_cudnn_backward"

    adds_in_any_order = in_any_order
    gives_no_sums = no_sums

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, out, dO, lse, *_ = args.tensors
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            dO, q, k, v, out, lse.contiguous().unsqueeze(-1), *_state(args.device), bias_of(args),
            None, None, args.S_q, args.S_kv, 0.0, is_causal(args), scale=args.scale,
        )  # fmt: skip
        return dict(zip(("dQ", "dK", "dV"), found, strict=True))


# Flash attention -------------------------------------------------------------------------


class _Flash(TorchAttention):
    targets: ClassVar[tuple[str, ...]] = ("sm_80",)

    takes_no_bias = no_bias
    has_same_dims = same_dims
    is_square = square
    reads_whole_vectors = whole_vectors

    @rule("torch's flash attention has heads of 256 elements at most")
    def _(args: AttentionArguments) -> bool | Miss:
        return args.D <= 256 or Miss(f"D is {args.D}")


@TorchProvider.register
class TorchFlashSdpa(_Forward, _Flash):
    """Attention by the flash attention in torch."""

    family: ClassVar[str] = "torch.sdpa_flash"

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, _ = args.tensors
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal(args), scale=args.scale
        )
        return {"out": out, "lse": lse}


@TorchProvider.register
class TorchFlashSdpaBackward(_Backward, _Flash):
    """The gradient of attention by the flash attention in torch."""

    family: ClassVar[str] = "torch.sdpa_flash_backward"

    adds_in_any_order = in_any_order

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, out, dO, lse, *_ = args.tensors
        found = _aten._scaled_dot_product_flash_attention_backward(
            dO, q, k, v, out, lse.contiguous(), None, None, args.S_q, args.S_kv, 0.0,
            is_causal(args), *_state(args.device), scale=args.scale,
        )  # fmt: skip
        return dict(zip(("dQ", "dK", "dV"), found, strict=True))


# Memory-efficient attention --------------------------------------------------------------


class _Efficient(TorchAttention):
    takes_same_bias = same_bias
    has_same_heads = same_heads
    reads_whole_vectors = whole_vectors

    @rule("the operator reads a bias in vectors of 16 elements along the keys")
    def _(args: AttentionArguments) -> bool | Miss:
        bias = args.further.get("bias")
        if bias is None:
            return True
        aligned = bias.alignment % (16 * bias.dtype.itemsize) == 0 and args.S_kv % 16 == 0
        return (aligned and bias.shape[3] == args.S_kv) or Miss(f"bias is {bias!r}")


@TorchProvider.register
class TorchEfficientSdpa(_Forward, _Efficient):
    """Attention by the memory-efficient kernels in torch."""

    family: ClassVar[str] = "torch.sdpa_efficient"
    operands = _with_wider(_Forward.operands)

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, _ = args.tensors
        wanted = "lse" in args.further
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, bias_of(args), wanted, 0.0, is_causal(args), scale=args.scale
        )
        return {"out": out, "lse": lse[..., : args.S_q]} if wanted else {"out": out}


@TorchProvider.register
class TorchEfficientSdpaBackward(_Backward, _Efficient):
    """The gradient of attention by the memory-efficient kernels in torch."""

    family: ClassVar[str] = "torch.sdpa_efficient_backward"
    operands = _with_wider(_Backward.operands)

    adds_in_any_order = in_any_order

    @rule("the operator gives the gradient of a bias that is not broadcast")
    def _(args: SdpaBackwardArguments) -> bool | Miss:
        gradient = args.further.get("dBias")
        full = (args.B, args.H, args.S_q, args.S_kv)
        return gradient is None or gradient.shape == full or Miss(f"its shape is {gradient.shape}")

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, out, dO, lse, *_ = args.tensors
        rows = -(-args.S_q // _EFFICIENT_ROWS) * _EFFICIENT_ROWS
        padded = lse.new_full((*lse.shape[:2], rows), float("inf"))
        padded[..., : args.S_q] = lse
        wanted = [True, True, True, "dBias" in args.further]
        found = _aten._scaled_dot_product_efficient_attention_backward(
            dO, q, k, v, bias_of(args), out, padded, *_state(args.device), 0.0, wanted,
            is_causal(args), scale=args.scale,
        )  # fmt: skip
        names = ("dQ", "dK", "dV", "dBias")
        return {n: one for n, one in zip(names, found, strict=True) if one is not None}


# On the CPU ------------------------------------------------------------------------------


class _OnCpu(TorchAttention):
    devices = ("cpu",)

    @rule("a causal mask is scaled as the scores are, to no −∞ unless the scale is positive")
    def _(args: AttentionArguments) -> bool | Miss:
        return not is_causal(args) or args.scale > 0 or Miss("it is not")

    takes_same_bias = same_bias
    takes_either = either
    has_same_dims = same_dims
    has_same_heads = same_heads


@TorchProvider.register
class TorchCpuSdpa(_Forward, _OnCpu):
    """Attention by torch's flash attention for the CPU."""

    family: ClassVar[str] = "torch.sdpa_flash_cpu"
    operands = _with_wider(_with_wider(_Forward.operands), "f64")

    @rule("torch's exponentials of 16-bit operands are too coarse for lse on the CPU")
    def _(args: SdpaArguments) -> bool:
        return args.Q.dtype.bits > 16 or "lse" not in args.further

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, _ = args.tensors
        bias = bias_of(args)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal(args), attn_mask=bias, scale=args.scale
        )
        if "lse" in args.further and bias is not None:  # it has 0 where a row sees nothing
            lse = lse.masked_fill((bias == -_INFINITY).all(-1), -_INFINITY)
        return {"out": out, "lse": lse}


@TorchProvider.register
class TorchCpuSdpaBackward(_Backward, _OnCpu):
    """The gradient of attention by torch's flash attention for the CPU."""

    family: ClassVar[str] = "torch.sdpa_flash_cpu_backward"
    operands = _with_wider(_with_wider(_Backward.operands), "f64")

    adds_in_any_order = in_any_order
    gives_no_sums = no_sums

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, out, dO, lse, *_ = args.tensors
        lse = lse.masked_fill(lse == -_INFINITY, _INFINITY)  # a row that sees nothing has zeros
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dO, q, k, v, out, lse, 0.0, is_causal(args), attn_mask=bias_of(args), scale=args.scale
        )
        return dict(zip(("dQ", "dK", "dV"), found, strict=True))


# Everywhere ------------------------------------------------------------------------------


@TorchProvider.register
class TorchMathSdpa(_Forward):
    """Attention by products of matrices and a softmax in torch; holds all probabilities."""

    family: ClassVar[str] = "torch.sdpa_math"
    operands = _with_wider(_with_wider(_Forward.operands), "f64")
    devices = ("cpu", "cuda")

    takes_same_bias = same_bias
    takes_either = either

    @rule("torch's attention by matrices gives no log-sum-exp")
    def _(args: AttentionArguments) -> bool:
        return "lse" not in args.further

    def _computed(self, args: Any) -> dict[str, Any]:
        q, k, v, _ = args.tensors
        grouped = args.H_kv != args.H
        with off():
            out, _ = _aten._scaled_dot_product_attention_math(
                q, k, v, bias_of(args), 0.0, is_causal(args), scale=args.scale, enable_gqa=grouped
            )
        return {"out": out}
