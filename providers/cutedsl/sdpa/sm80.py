"""What the attention families for every GPU from Ampere on offer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api._workspaces import ZEROED
from kernel_api.arguments import SdpaArguments, SdpaBackwardArguments
from kernel_api.devices import multiprocessors_of
from kernel_api.metadata import SdpaBackwardOperandsMetadata, SdpaOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.sdpa import model
from kernel_api.providers.cutedsl.sdpa.base import (
    ALIGNED,
    WHY_ALIGNED,
    AttentionDesign,
    AttentionKernel,
    least_room,
    operands_of,
    refused_bias,
)
from kernel_api.providers.cutedsl.sdpa.widened import WideOperands
from kernel_api.space import Miss, Operands, Space, rule

_ALIGNED = 16

#: Tiles and stages, for (columns of Q and K, columns of V) that there is room for.
_FORWARD = {
    (64, 64): (((128, 64), 2), ((64, 64), 2), ((64, 32), 2)),
    (128, 128): (((64, 64), 2), ((64, 32), 2)),
    (192, 128): (((64, 32), 2),),
    (192, 192): (((64, 32), 2), ((64, 16), 2)),
    (256, 256): (((64, 32), 2), ((64, 16), 2)),
}
#: The same of the gradient; a tile is 64 rows of a block's own, by those that it visits at once.
_BACKWARD = {
    (64, 64): (((64, 64), 2), ((64, 32), 2), ((64, 16), 2)),
    (128, 128): (((64, 32), 2), ((64, 16), 2)),
    (192, 128): (((64, 32), 2), ((64, 16), 2)),
    (192, 192): (((64, 32), 1), ((64, 16), 2)),
    (256, 256): (((64, 32), 1), ((64, 16), 2)),
}

#: Products that a multiprocessor of an A100 adds per second, and the share that tiles get to.
_RATE = 1.4e12
_REACHED = {(128, 64): 0.6, (64, 64): 0.5, (64, 32): 0.4, (64, 16): 0.25}
#: Of the time, where elements are copied one by one.
_ONE_BY_ONE = 4.0
#: The same where scores have a bias: 1.0 to 1.6 on an H100.
_BIASED = 1.5
#: Seconds of a launch, and of a tile's row, however few rows it visits.
_LAUNCH, _ROW = 4e-6, 8e-9


def _space(designs: dict[tuple[int, int], Any]) -> Space:
    return Space(
        *(
            AttentionDesign(tile, room, stages)
            for room, tiles in designs.items()
            for tile, stages in tiles
        )
    )


class Sm80Sdpa(AttentionKernel):
    """What forward and backward share."""

    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    design = AttentionDesign
    takes_least = least_room(_FORWARD)

    @rule("the oldest of these GPUs convert no floats of 8 bits, as a bias may be of")
    def _(args: Any) -> bool | Miss:
        return refused_bias(args, lambda element: element.bits == 8)

    @property
    def _aligned(self) -> bool:
        return self.metadata.operands.tensors["Q"].alignment >= _ALIGNED

    @property
    def _element(self) -> Any:
        element: Any = self.metadata.operands.tensors["Q"].dtype
        return element.cutlass

    def _seconds(self, args: Any, own: int, visited: int, columns: int) -> float:
        """Of blocks that have a tile's rows of ``own``, each of a head of queries.

        visited: Rows of the other kind.
        columns: That products are formed of.
        """
        rows, at_once = self._design.tile_shape
        blocks = args.B * args.H * -(-own // rows)
        most = -(-visited // at_once)
        steps = model.met(args, most, rows, at_once)
        longest = model.longest(args, most, steps)
        rate = _RATE * _REACHED[self._design.tile_shape]
        rounds = max(1.0, blocks / multiprocessors_of(args.device))
        seconds: float = rows * at_once * columns * max(rounds * steps, longest) / rate
        seconds += rounds * rows * _ROW
        return _LAUNCH + (seconds if self._aligned else _ONE_BY_ONE * seconds)


class Sm80Forward(Sm80Sdpa):
    """What the forward passes share."""

    arguments = SdpaArguments
    operands_metadata = SdpaOperandsMetadata
    space = _space(_FORWARD)

    @rule("what becomes of scores beside a band leaves registers for fewer of them at once")
    def _(design: AttentionDesign, args: Any) -> bool | Miss:
        most = 128 * 64
        if _changes(args) or _looks_closely(args):
            most = 64 * 32
        if _looks_closely(args) and design.head_dim[1] > 128:
            most = 64 * 16
        return math.prod(design.tile_shape) <= most or Miss(f"there are {most} at most")

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        return self._built(self.scores(args), page_size=args.page_size)

    def _estimate(self, args: Any) -> float:
        found = self._seconds(args, args.S_q, args.S_kv, sum(self._design.head_dim))
        return found * _BIASED if "bias" in args.further else found


@CuTeDSLProvider.register
class Sm80SdpaForward(Sm80Forward):
    """Attention for every GPU from Ampere on: cp.async, ldmatrix, mma.sync; every option."""

    family: ClassVar[str] = "sm80.sdpa_forward"
    operands = (operands_of((ALIGNED, {}), Q="f16 | bf16", K="like Q", V="like Q", out="like Q"),)

    def _built(self, scores: Any, *, page_size: int | None = None) -> Callable[..., None]:
        from kernel_api.implementations.sm80.sdpa_forward import SdpaForward

        design = self._design
        found: Callable[..., None] = SdpaForward(
            *(design.head_dim, design.tile_shape, design.stages),
            *(self._element, scores),
            page_size=page_size,
            aligned=self._aligned,
        )
        return found


@CuTeDSLProvider.register
class Sm80SdpaForwardFp8(WideOperands, Sm80Forward):
    """Attention of 8-bit floats, or of 16-bit queries to them, for every GPU from Ampere on:
    kernels before write them in the type of the output."""

    family: ClassVar[str] = "sm80.sdpa_forward_fp8"
    operands = (
        operands_of(Q="e4m3 | e5m2", K="like Q", V="like Q", out="f16 | bf16"),
        operands_of(Q="f16 | bf16", K="e4m3 | e5m2", V="like K", out="like Q"),
    )

    def _built(self, scores: Any, *, page_size: int | None = None) -> Callable[..., None]:
        from kernel_api.implementations.sm80.sdpa_forward_fp8 import SdpaForwardFp8

        design, out = self._design, self.metadata.operands.tensors["out"]
        assert out.dtype is not None
        found: Callable[..., None] = SdpaForwardFp8(
            *(design.head_dim, design.tile_shape, design.stages),
            *(out.dtype.cutlass, scores),
            keys_in_page=page_size,
        )
        return found

    def _estimate(self, args: Any) -> float:
        return super()._estimate(args) + model.widening_seconds(args)


@CuTeDSLProvider.register
class Sm80SdpaBackward(Sm80Sdpa):
    """The gradient of attention; every option, and the same bits in every run."""

    family: ClassVar[str] = "sm80.sdpa_backward"
    arguments = SdpaBackwardArguments
    operands_metadata = SdpaBackwardOperandsMetadata
    operands = (
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
            majors="Q:d K:d V:e out:e dO:e lse:s dQ:d dK:d dV:e",
            alignments=(
                dict.fromkeys(("Q", "K", "V", "out", "dO", "dQ", "dK", "dV"), _ALIGNED),
                {},
            ),
            why_aligned=WHY_ALIGNED,
        ),
    )
    space = _space(_BACKWARD)

    @rule("what becomes of scores beside a band leaves registers for fewer of them at once")
    def _(design: AttentionDesign, args: Any) -> bool | Miss:
        most = 64
        if _changes(args):
            most = 32 if design.head_dim != (256, 256) else 16
        if _looks_closely(args):
            most = 16
        return design.tile_shape[1] <= most or Miss(f"there are {64 * most} at most")

    def implementation_for(self, args: SdpaBackwardArguments) -> Callable[..., None]:
        return self._built(self.scores(args))

    def _built(self, scores: Any) -> Callable[..., None]:
        from kernel_api.implementations.sm80.sdpa_backward import SdpaBackward

        design = self._design
        found: Callable[..., None] = SdpaBackward(
            *(design.head_dim, design.tile_shape[1], design.stages),
            *(self._element, scores),
            aligned=self._aligned,
        )
        return found

    def workspace_for(self, *tensors: Any) -> int:
        return _workspace_bytes(tensors[self.arguments.operand_names.index("lse")].shape)

    def get_workspace_size(self, args: SdpaBackwardArguments) -> int:
        return _workspace_bytes(args.lse.shape)

    def _estimate(self, args: Any) -> float:
        # Scores and their derivatives twice, and a sum for each of the three.
        columns = 7 * sum(self._design.head_dim) // 2
        found = self._seconds(args, args.S_q, args.S_kv, columns)
        return 3 * _LAUNCH + found + model.bias_again(args)


def _changes(args: Any) -> bool:
    """Whether scores are more than multiples of products."""
    return args.softcap is not None or bool({"bias", "alibi"} & set(args.further))


def _looks_closely(args: Any) -> bool:
    """Whether each score has functions, a random number or an entry of a table."""
    closely = (args.score, args.mask_graph, args.dropout, args.block_shape)
    return any(one is not None for one in closely)


def _workspace_bytes(rows: Any) -> int:
    """Two numbers of each query, behind what others need zero."""
    return ZEROED + 2 * 4 * int(math.prod(rows))
