"""What the Hopper family of attention gradients offers, and how it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from kernel_api import _workspaces
from kernel_api.arguments import SdpaBackwardArguments
from kernel_api.devices import multiprocessors_of
from kernel_api.metadata import SdpaBackwardOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.sdpa.base import (
    WHY_ALIGNED,
    AttentionDesign,
    AttentionKernel,
    head_dims,
    least_room,
    nothing_empty,
)
from kernel_api.providers.cutedsl.sdpa.model import seen
from kernel_api.space import Miss, Operands, Space, rule


@dataclass(frozen=True)
class AttentionGradientDesign(AttentionDesign):
    """How a block computes what some keys contribute.

    Attributes:
        stages: Tiles of queries that are in shared memory at once.
        gradient_stages: Tiles of dO that are.
        score_stages: Tiles of dS that are.
        early: What is issued before its turn: ``values``, ``scores``, of both or none; see the
            implementation.
        staged: Whether dQ is added by bulk copies, or by threads.
    """

    gradient_stages: int
    score_stages: int
    early: tuple[str, ...] = ()
    staged: bool = False

    def label(self) -> str:
        stages = f"x{self.gradient_stages}x{self.score_stages}"
        early = "".join(f"_early_{name}" for name in self.early)
        return f"{super().label()}{stages}{early}{'_staged' if self.staged else ''}"


def _designs(
    room: tuple[int, int],
    tile: tuple[int, int],
    stages: tuple[int, int, int],
    *early: tuple[str, ...],
    staged: tuple[bool, ...] = (False, True),
) -> list[AttentionGradientDesign]:
    """That differ in what is issued early and in who adds dQ."""
    q, do, ds = stages
    return [
        AttentionGradientDesign(tile, room, q, do, ds, words, how)
        for words in early
        for how in staged
    ]


_NOTHING, _SCORES, _VALUES, _BOTH = (), ("scores",), ("values",), ("values", "scores")
#: Those of each room for which registers suffice; the first are expected to be the fastest.
_DESIGNS = (
    *_designs((64, 64), (128, 128), (2, 2, 2), _SCORES, _NOTHING),
    *_designs((64, 64), (64, 128), (2, 2, 2), _BOTH, _NOTHING, staged=(False,)),
    *_designs((128, 128), (64, 128), (2, 2, 2), _SCORES, _VALUES, _NOTHING),
    *_designs((128, 128), (80, 128), (2, 2, 2), _NOTHING, staged=(False,)),
    *_designs((192, 128), (64, 64), (2, 2, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((192, 192), (64, 64), (2, 2, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((256, 256), (64, 80), (2, 1, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((256, 256), (64, 64), (2, 2, 1), _SCORES, _NOTHING, staged=(False,)),
)

_NAMES = ("Q", "K", "V", "out", "dO", "dQ", "dK", "dV")

_FLOAT_BYTES, _COUNTER_BYTES = 4, 4
#: Sizes of a workspace that a launch remembers.
_SIZES_KEPT = 256

#: Bytes per second that launches beside the main one move, and seconds of the three.
_BANDWIDTH, _OVERHEAD = 4.0e12, 8e-6
#: Products per second of a multiprocessor, and what a block takes beside them.
_RATE, _BLOCK = 2.4e12, 3e-6


@CuTeDSLProvider.register
class Sm90SdpaBackward(AttentionKernel):
    """The gradient of attention of 16-bit floats for Hopper: TMA loads, wgmma, three launches."""

    family: ClassVar[str] = "sm90.sdpa_backward"
    targets: ClassVar[tuple[str, ...]] = ("sm_90a",)
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
            alignments=(dict.fromkeys(_NAMES, 16),),
            why_aligned=WHY_ALIGNED,
        ),
    )
    design = AttentionGradientDesign
    space = Space(*_DESIGNS)

    takes_least = least_room(design.head_dim for design in _DESIGNS)

    @rule("the head dimensions are multiples of 8")
    def _(args: SdpaBackwardArguments) -> bool | Miss:
        found = head_dims(args)
        return not any(one % 8 for one in found) or Miss(f"they are {found}")

    is_full = nothing_empty

    @rule(
        "scores that are more than products of which a band is seen leave registers for 64 "
        "queries at once, of which nothing is issued early, and threads add dQ"
    )
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
        queries, keys = design.tile_shape
        plain = queries == 64 and keys % 64 == 0 and not design.early and not design.staged
        return plain or not _changes(args)

    @rule("bulk copies add dQ in any order")
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
        return not (design.staged and args.deterministic)

    @rule("there is no gradient of the bias")
    def _(args: SdpaBackwardArguments) -> bool:
        return "dBias" not in args.further

    def implementation_for(self, args: Any) -> Callable[..., None]:
        return self._built(self.scores(args), deterministic=args.deterministic)

    def _built(self, scores: Any, *, deterministic: bool = False) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_backward import SdpaBackward

        design: Any = self.metadata.design
        q: Any = self.metadata.operands.tensors["Q"].dtype
        found: Callable[..., None] = SdpaBackward(
            design.head_dim,
            design.tile_shape,
            (design.stages, design.gradient_stages, design.score_stages),
            q.cutlass,
            scores,
            early=frozenset(design.early),
            staged=design.staged,
            deterministic=deterministic,
        )
        return found

    # The workspace -----------------------------------------------------------------------

    def get_workspace_size(self, args: Any) -> int:
        return self._workspace_bytes(args.Q.shape, args.B)

    def _workspace_bytes(self, shape: tuple[int, ...], sequences: int) -> int:
        """shape: of Q. Of every row two numbers and the sums of dQ, of every tile two counters."""
        design: Any = self.metadata.design
        tile = design.tile_shape[0]
        if len(shape) == 3:
            tiles = shape[1] * ((shape[0] + sequences * tile) // tile)
        else:
            tiles = shape[0] * shape[1] * -(-shape[2] // tile)
        floats = tile * (2 + design.head_dim[0])
        return int(_workspaces.ZEROED + tiles * (floats * _FLOAT_BYTES + 2 * _COUNTER_BYTES))

    def _with_more(
        self, function: Callable[..., None], index: int, names: tuple[str, ...]
    ) -> Callable[..., None]:
        """The workspace of packed operands depends on how many sequences there are."""
        operands = len(self.metadata.operands.tensors)
        size_of = lru_cache(maxsize=_SIZES_KEPT)(self._workspace_bytes)

        def call(*values: Any, workspace: Any = None, **others: Any) -> None:
            tensors, scalars = values[:operands], values[operands:]
            shape, sequences = tensors[0].shape, 0
            if len(shape) == 3:
                sequences = others["cu_seqlens_q"].shape[0] - 1
            if workspace is not None:
                workspace[: _workspaces.ZEROED].zero_()
            else:
                workspace = _workspaces.borrow(index, size_of(shape, sequences))
            more = tuple([others[name] for name in names])
            function(*tensors, more, workspace.data_ptr(), *scalars)

        return call

    def predict(self, args: Any) -> float:
        design: Any = self.metadata.design
        (queries, keys), (wide, wide_v) = design.tile_shape, design.head_dim
        tiles = -(-args.S_q // queries) * seen(args) * (args.H // max(args.H_kv, 1))
        products = queries * keys * (3 * wide + 2 * wide_v)
        block = max(tiles, 1) * products / _RATE + _BLOCK
        blocks = args.B * args.H_kv * -(-args.S_kv // keys)
        rows = args.B * args.H * args.S_q
        moved = rows * (12 * wide + 4 * wide_v)
        rounds = max(1.0, blocks / multiprocessors_of(args.device))
        return float(_OVERHEAD + moved / _BANDWIDTH + rounds * block)


def _changes(args: SdpaBackwardArguments) -> bool:
    """Whether scores are more than products of which a band is seen."""
    changes = (args.softcap, args.score, args.dropout, args.mask_graph, args.block_shape)
    return any(one is not None for one in changes) or bool({"bias", "alibi"} & set(args.further))
