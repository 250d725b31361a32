"""What the Hopper family of attention gradients offers, and how it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from kernel_api import _workspaces
from kernel_api.arguments import SdpaBackwardArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.devices import multiprocessors_of
from kernel_api.metadata import SdpaBackwardOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.kernel import SIZES_KEPT, WorkspaceFinder
from kernel_api.providers.cutedsl.sdpa import biases, model
from kernel_api.providers.cutedsl.sdpa.base import (
    WHY_ALIGNED,
    AttentionDesign,
    AttentionKernel,
    changes,
    head_dims,
    least_room,
    nothing_empty,
)
from kernel_api.providers.cutedsl.sdpa.model import choose, longest, tiles_seen
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
        bias: How one comes to the scores: it is ``read`` where it lies, or comes to shared memory
            with the queries, in ``tiles``.
        bias_gradient: How it is made: from scores that are computed ``again``, or of what blocks
            have, which is stored in ``tiles``, or left in the workspace for ``sums``.
    """

    gradient_stages: int
    score_stages: int
    early: tuple[str, ...] = ()
    staged: bool = False
    bias: str = "read"
    bias_gradient: str = "again"

    def label(self) -> str:
        stages = f"x{self.gradient_stages}x{self.score_stages}"
        early = "".join(f"_early_{name}" for name in self.early)
        found = f"{super().label()}{stages}{early}{'_staged' if self.staged else ''}"
        found += "" if self.bias == "read" else f"_bias_{self.bias}"
        return found + ("" if self.bias_gradient == "again" else f"_dbias_{self.bias_gradient}")


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


def _biased(
    room: tuple[int, int], tile: tuple[int, int], *gradients: str
) -> list[AttentionGradientDesign]:
    """To whose scores tiles of a bias come, by what becomes of its gradient."""
    return [
        AttentionGradientDesign(tile, room, 2, 2, 2, bias="tiles", bias_gradient=how)
        for how in gradients
    ]


_NOTHING, _SCORES, _VALUES, _BOTH = (), ("scores",), ("values",), ("values", "scores")
#: Those of each room for which registers suffice; the first are expected to be the fastest.
_DESIGNS = (
    *_designs((64, 64), (128, 128), (2, 2, 2), _SCORES, _NOTHING),
    *_designs((64, 64), (64, 128), (2, 2, 2), _BOTH, _NOTHING, staged=(False,)),
    *_designs((64, 64), (64, 64), (2, 2, 2), _NOTHING, staged=(False,)),
    *_designs((128, 128), (64, 128), (2, 2, 2), _SCORES, _VALUES, _NOTHING),
    *_designs((128, 128), (80, 128), (2, 2, 2), _NOTHING, staged=(False,)),
    *_designs((128, 128), (64, 64), (2, 2, 2), _NOTHING, staged=(False,)),
    *_designs((192, 128), (64, 112), (2, 2, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((192, 128), (64, 64), (2, 2, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((192, 192), (64, 96), (2, 2, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((192, 192), (64, 64), (2, 2, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((256, 256), (64, 80), (2, 1, 2), _SCORES, _NOTHING, staged=(False,)),
    *_designs((256, 256), (64, 64), (2, 2, 1), _SCORES, _NOTHING, staged=(False,)),
    *_designs((256, 256), (64, 48), (2, 2, 2), _NOTHING, staged=(False,)),
    *_biased((64, 64), (64, 128), "again", "tiles", "sums"),
    *_biased((64, 64), (64, 64), "again"),
    *_biased((128, 128), (64, 128), "again", "tiles", "sums"),
    *_biased((128, 128), (64, 64), "again"),
)

#: Of rooms that have a tile of fewer keys: how many changes of scores the wider ones have registers
#: for, and keys of that tile.
_CROWDED = {
    (64, 64): (2, 64),
    (128, 128): (1, 64),
    (192, 128): (1, 64),
    (192, 192): (1, 64),
    (256, 256): (4, 48),
}
#: Beside what registers do not suffice for so many, by the change.
_CROWDED_BY = {
    "softcap": {"left", "left_end", "right", "right_end", "blocks"},
    "bias": {"left", "left_end", "seq_lens_q", "blocks", "deterministic"},
    "block_shape": {"blocks"},
}
#: Changes that registers never suffice for, by the room and how a bias comes to the scores.
_NEVER_WIDE = {
    ((128, 128), "tiles"): {"softcap", "block_shape", "dropout"},
    ((192, 128), "read"): {"softcap", "dropout", "alibi", "block_shape"},
}
#: What registers never suffice for beside a change, by the room and the change.
_NEVER_BESIDE = {
    ((64, 64), "dropout"): {"deterministic"},
    ((128, 128), "dropout"): {
        *("deterministic", "left", "left_end", "seq_lens_q", "blocks", "is_packed"),
    },
}
#: Changes that leave registers for early scores, and take less time with them, by the columns of Q.
_GAINING_BY_EARLY = {
    128: {"score", "mask_graph", "bias", "alibi"},
    192: {"block_shape", "mask_graph"},
}

#: Bytes of dS that blocks leave in the workspace at most.
_MOST_LEFT = 2 << 30

_NAMES = ("Q", "K", "V", "out", "dO", "dQ", "dK", "dV")


#: Bytes per second that launches beside the main one move.
_BANDWIDTH = 2.9e12
#: Products per second of a multiprocessor, by columns of Q and K and the tile. Fitted, as the
#: seconds below, to rows of an H200, and to all candidates of short sequences on an H100.
_RATES = {
    (64, (128, 128)): 2.17e12,
    (64, (64, 128)): 1.97e12,
    (64, (64, 64)): 1.6e12,
    (128, (64, 128)): 2.34e12,
    (128, (80, 128)): 2.15e12,
    (192, (64, 112)): 2.15e12,
    (192, (64, 96)): 2.0e12,
    (256, (64, 80)): 1.95e12,
    (256, (64, 48)): 1.57e12,
}
_OTHER_RATES = 1.62e12
#: The same with dropout, measured on an H200: what threads or warps beside them draw takes longer.
_RATES_OF_DROPOUT = {
    (64, (64, 128)): 1.12e12,
    (64, (64, 64)): 0.95e12,
    (128, (64, 128)): 1.56e12,
    (128, (64, 64)): 1.23e12,
}
#: The same in a fixed order, measured on an H100, and what it is of those where it was not: with
#: small tiles blocks wait for the turns to be passed on.
_RATES_IN_ORDER = {
    (64, (128, 128)): 2.0e12,
    (64, (64, 128)): 1.65e12,
    (64, (64, 64)): 0.9e12,
    (128, (64, 128)): 2.05e12,
    (128, (80, 128)): 2.2e12,
    (128, (64, 64)): 1.0e12,
}
_IN_ORDER, _EARLY_IN_ORDER = 0.87, 0.93
#: Seconds of all launches, however little there is to do, and of a block beside its products.
_ALONE = {64: (2.3e-6, 3.3e-6), 128: (3.7e-6, 1.5e-6), 192: (5.5e-6, 1e-6), 256: (7.5e-6, 0.2e-6)}
#: How much longer products take where scores have a bias, by how that comes to them.
_BIASED = {"read": 1.9, "tiles": 1.2}
#: Seconds for its gradient, where it is made of what blocks have, and for each score of that.
_OF_BIAS = {"tiles": (0.0, 0.7e-12), "sums": (3e-6, 1.4e-12)}


@CuTeDSLProvider.register
class Sm90SdpaBackward(AttentionKernel):
    """The gradient of attention of 16-bit floats for Hopper: TMA loads, wgmma, some launches."""

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
        "queries at once, of which little is issued early, and threads add dQ"
    )
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
        found, (queries, keys) = changes(args), design.tile_shape
        early = not design.early or _gains_by_early(design, found)
        return not found or (queries == 64 and keys != 80 and early and not design.staged)

    @rule("more changes of scores than registers suffice for leave fewer keys at once")
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
        return _has_fewer_keys(design) or not _is_crowded(design, args)

    @rule(
        "a band of packed sequences, of heads of 192, leaves registers where scores of the next "
        "queries are issued early, or are changed"
    )
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
        crowded = design.head_dim == (192, 192) and not design.early and args.is_packed
        return not (crowded and args.bounds) or bool(changes(args))

    @rule(
        "a bias comes with queries if it has 16 bits, a row for each of them, and rows of "
        "multiples of 16 bytes"
    )
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool | Miss:
        return design.bias == "read" or biases.comes_by_tma(args, of_queries=True)

    @rule(
        "blocks have what a gradient of a bias is made of where scores are products to which it "
        "is added, all tiles are computed, and the gradient has 16 bits"
    )
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool | Miss:
        return design.bias_gradient == "again" or _is_of_blocks(args)

    @rule(
        "blocks store a gradient of a bias if it has all modes, the type of Q, and rows of "
        "multiples of 16 bytes"
    )
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool | Miss:
        return design.bias_gradient != "tiles" or biases.goes_by_tma(args)

    @rule("what blocks leave of the gradients of scores takes 2 GiB at most")
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool | Miss:
        left = _left_of_scores(design, args.Q.shape, args.K.shape)
        return left <= _MOST_LEFT or Miss(f"it would take {left / (1 << 30):.1f} GiB")

    @rule("bulk copies add dQ in any order")
    def _(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
        return not (design.staged and args.deterministic)

    def implementation_for(self, args: Any) -> Callable[..., None]:
        options: dict[str, Any] = {"deterministic": args.deterministic}
        if self._design.bias == "tiles":
            options["bias_type"] = args.further["bias"].dtype.cutlass
        return self._built(self.scores(args), **options)

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        launch = super()._launcher(args, artifact)
        if self._design.bias == "tiles":
            launch = biases.checked(launch, of_queries=True)
        if self._design.bias_gradient == "tiles":
            launch = biases.checked_gradient(launch)
        return launch

    def aligned_values(self, args: Any) -> dict[str, int]:
        by_tma = {"bias": self._design.bias, "dBias": self._design.bias_gradient}
        return {name: biases.VECTOR for name, how in by_tma.items() if how == "tiles"}

    def _built(self, scores: Any, **options: Any) -> Callable[..., None]:
        from kernel_api.implementations.sm90 import sdpa_backward, sdpa_backward_tiles

        design = self._design
        q: Any = self.metadata.operands.tensors["Q"].dtype
        gradient: Any = sdpa_backward.SdpaBackward
        if "bias_type" in options:
            gradient = sdpa_backward_tiles.SdpaBackwardBiased
            options["gradient"] = design.bias_gradient
        found: Callable[..., None] = gradient(
            design.head_dim,
            design.tile_shape,
            (design.stages, design.gradient_stages, design.score_stages),
            q.cutlass,
            scores,
            early=frozenset(design.early),
            staged=design.staged,
            **options,
        )
        return found

    # The workspace -----------------------------------------------------------------------

    def get_workspace_size(self, args: Any) -> int:
        names = tuple(self.more_values(args))
        return self._workspace_bytes((args.Q.shape, args.K.shape), args.B, names)

    def _workspace_bytes(
        self, shapes: tuple[tuple[int, ...], ...], sequences: int, names: tuple[str, ...] = ()
    ) -> int:
        """shapes: of Q and K. Of every row two numbers and the sums of dQ, of every tile two
        counters; of every block of keys that blocks share what each leaves of dK and dV."""
        (Q, K), design = shapes, self._design
        tile, keys = design.tile_shape
        left = 0
        if len(Q) == 3:
            tiles = Q[1] * ((Q[0] + sequences * tile) // tile)
        else:
            tiles = Q[0] * Q[1] * -(-Q[2] // tile)
            blocks = K[0] * K[1] * -(-K[2] // keys)
            shares = self._shares(blocks, Q[1] // max(K[1], 1), Q[2], names)
            if shares > 1:
                left = _left_bytes(shares * blocks, design)
        floats = tile * (2 + design.head_dim[0])
        return int(
            _workspaces.ZEROED
            + tiles * (floats * _workspaces.PART_BYTES + 2 * _workspaces.COUNTER_BYTES)
            + left
            + _left_of_scores(design, Q, K)
        )

    def _shares(self, blocks: int, sharing: int, queries: int, names: tuple[str, ...]) -> int:
        """blocks: of keys; names: of values beside the operands."""
        return _shares_of(self._design, (blocks, sharing, queries), names)

    def _workspace_finder(self, names: tuple[str, ...]) -> WorkspaceFinder:
        return self._finder_by(names, 0, 1)

    def _estimate(self, args: Any) -> float:
        """Of blocks, one after the other on each multiprocessor; no less than the longest takes."""
        from kernel_api.implementations.sm90.sdpa_backward_shares import adding_up

        design = self._design
        (queries, keys), (wide, wide_v) = design.tile_shape, design.head_dim
        rate = _rate(design, args)
        tile = queries * keys * (3 * wide + 2 * wide_v) / rate
        if "bias" in args.further:
            tile *= _BIASED[design.bias]
        blocks, sharing = args.B * args.H_kv * -(-args.S_kv // keys), args.H // max(args.H_kv, 1)
        shares = self._shares(blocks, sharing, args.S_q, tuple(self.more_values(args)))
        found, begin = _ALONE[wide]
        met = tiles_seen(args, queries, keys)
        most_met = longest(args, -(-args.S_q // queries), met)
        average, most = (begin + sharing // shares * tiles * tile for tiles in (met, most_met))
        rounds = blocks * shares / multiprocessors_of(args.device)
        if 1 < rounds <= 2:
            rounds = 2.0
        found += max(rounds * average, most)
        if args.deterministic and rounds > 1:  # the longest come last
            found += most - average
        found += args.B * args.H * args.S_q * (12 * wide + 4 * wide_v) / _BANDWIDTH
        if shares > 1:
            found += adding_up(shares * blocks, (queries, keys), design.head_dim)
        if design.bias_gradient == "again":
            return float(found + model.bias_again(args))
        at_least, of_score = _OF_BIAS[design.bias_gradient]
        return float(found + at_least + args.B * args.H * args.S_q * args.S_kv * of_score)


@lru_cache(maxsize=SIZES_KEPT)
def _shares_of(
    design: AttentionGradientDesign, sizes: tuple[int, int, int], names: tuple[str, ...]
) -> int:
    """sizes: blocks of keys, heads that share one, and their queries."""
    from kernel_api.implementations.sm90 import sdpa_backward_shares as by

    (queries, _), room = design.tile_shape, design.head_dim
    if not by.may_share(design.tile_shape, room, "cu_seqlens_q" in names):
        return 1
    blocks = by.Blocks(sizes[0], sizes[1], -(-sizes[2] // queries))
    return int(by.shares_of(blocks, by.costs_of(design.tile_shape, room, names), choose))


def _rate(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> float:
    """Products per second of a multiprocessor."""
    key = design.head_dim[0], design.tile_shape
    rate = _RATES.get(key, _OTHER_RATES)
    if args.deterministic:
        early = _EARLY_IN_ORDER if max(design.head_dim) > 128 and "scores" in design.early else 1.0
        rate = _RATES_IN_ORDER.get(key, _IN_ORDER * rate) * early
    if args.dropout is not None:
        rate = min(rate, _RATES_OF_DROPOUT.get(key, rate))
    return rate


def _left_bytes(blocks: int, design: AttentionGradientDesign) -> int:
    """Of what so many blocks that share keys leave, behind counters."""
    from kernel_api.implementations.sm90.sdpa_backward_shares import ALIGNMENT, share_bytes

    return int(ALIGNMENT + blocks * share_bytes(design.tile_shape[1], design.head_dim))


def _left_of_scores(design: AttentionGradientDesign, *shapes: tuple[int, ...]) -> int:
    """Bytes that blocks leave of dS. shapes: of Q and K."""
    from kernel_api.implementations.sm90.sdpa_backward_shares import ALIGNMENT
    from kernel_api.implementations.sm90.sdpa_workspace import left_scores_bytes

    if design.bias_gradient != "sums":
        return 0
    Q, K = shapes
    return int(ALIGNMENT + left_scores_bytes(*Q[:3], K[2]))


def _is_of_blocks(args: SdpaBackwardArguments) -> bool | Miss:
    """Whether dS is what dBias is made of."""
    if "dBias" not in args.further:
        return Miss("there is none")
    if args.softcap is not None or args.score is not None:
        return Miss("scores are changed before")
    if args.block_shape is not None:
        return Miss("there is a table of blocks")
    gradient = args.further["dBias"]
    near = f"would match with dBias of {args.Q.dtype}"
    return gradient.dtype.bits == 16 or Miss(f"dBias is {gradient.dtype}", near)


def _finds_whole(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
    """Whether of tiles that a table does not hide it hides nothing."""
    from kernel_api.implementations.common.attention.entries import are_whole

    return bool(are_whole(args.block_shape, design.tile_shape))


def _has_fewer_keys(design: AttentionGradientDesign) -> bool:
    """Than the others of its room."""
    _, keys = _CROWDED.get(design.head_dim, (0, 0))
    return design.tile_shape[1] == keys


def _gains_by_early(design: AttentionGradientDesign, found: list[str]) -> bool:
    """Whether scores of the next queries are worth their registers, beside changes of scores."""
    gaining = _GAINING_BY_EARLY.get(max(design.head_dim), set())
    return "scores" in design.early and gaining.issuperset(found)


def _is_crowded(design: AttentionGradientDesign, args: SdpaBackwardArguments) -> bool:
    """Whether the wider tiles of a room would spill."""
    found, room = changes(args), design.head_dim
    if _finds_whole(design, args):
        found.remove("block_shape")
    most, _ = _CROWDED.get(room, (len(found) + 1, 0))
    if not _NEVER_WIDE.get((room, design.bias), set()).isdisjoint(found):
        return True
    beside = {*args.bounds, *args.further}
    beside |= {name for name in ("deterministic", "is_packed") if getattr(args, name)}
    if any(_NEVER_BESIDE.get((room, change), set()) & beside for change in found):
        return True
    if design.bias == "tiles":
        return False
    if len(found) != most:
        return len(found) > most
    return any(bool(_CROWDED_BY.get(change, set()) & beside) for change in found)
