"""What the Hopper attention families offer, and how they are compiled."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api._workspaces import ZEROED
from kernel_api.arguments import SdpaArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.metadata import SdpaOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.kernel import WorkspaceFinder
from kernel_api.providers.cutedsl.sdpa import biases, model
from kernel_api.providers.cutedsl.sdpa.base import (
    AttentionDesign,
    AttentionKernel,
    changes,
    least_room,
    nothing_empty,
    operands_of,
)
from kernel_api.providers.cutedsl.sdpa.widened import some_keys
from kernel_api.space import Miss, Operands, Rule, Space, rule

#: (queries, keys) of tiles, for (columns of Q and K, columns of V) that there is room for.
_TILES = {
    (64, 64): ((192, 128), (128, 128)),
    (96, 96): ((128, 128), (192, 96)),
    (128, 128): ((128, 128), (128, 160), (128, 176)),
    (192, 128): ((128, 128), (128, 112)),
    (192, 192): ((128, 96), (128, 80)),
    (256, 256): ((128, 80), (128, 64)),
}
_STAGES = 2
#: (queries, keys), head dimensions that there is room for, and blocks of a multiprocessor: while
#: one begins or ends a tile, which is most of the time of short sequences, the others multiply.
_SHARING = (
    ((64, 64), (64, 64), 3),
    ((64, 96), (64, 64), 3),
    ((64, 64), (96, 96), 2),
    ((64, 64), (128, 128), 2),
    ((64, 64), (192, 128), 2),
)
#: Those of designs whose shared memory has the tile of a bias beside the keys that it is for.
_BIASED_TILES = {
    (64, 64): ((192, 128), (128, 128)),
    (96, 96): ((128, 128),),
    (128, 128): ((128, 128),),
    (192, 128): ((128, 96),),
    (192, 192): ((128, 80),),
    (256, 256): ((128, 64),),
}
_BIASED_SHARING = (((64, 64), (64, 64), 3),)
#: Scores of a tile, at most, where dropout draws a number for each. With a causal mask, kernels for
#: sm_90a with more of them spill up to 168 bytes; those that are left spill nothing.
_MOST_DROPPED = {
    (64, 64): 128 * 128,
    (96, 96): 128 * 128,
    (128, 128): 128 * 128,
    (192, 128): 128 * 112,
    (256, 256): 128 * 64,
}
#: The same where a tile meets several entries of a table of blocks: more of them spill 8 to 500
#: bytes.
_MOST_HIDDEN = {(64, 64): 128 * 128, (96, 96): 128 * 128, (128, 128): 128 * 128}
#: The same where keys are in pages: more of them spill 8 bytes with a table of blocks.
_MOST_IN_PAGES = {(128, 128): 128 * 160}
#: Tiles that spill nothing where keys are in pages and there is a bias: others spill 8 to 128
#: bytes. With dropout instead, the tile of (128, 128) spills 24 or 32 if a band is seen.
_BIASED_IN_PAGES = (((96, 96), (192, 96)), ((256, 256), (128, 80)))


def few_dropped(most: Mapping[tuple[int, int], int]) -> Rule:
    """Of a family where a tile has so many scores at most, for some of the head dimensions."""

    def are_few(design: AttentionDesign, args: SdpaArguments) -> bool | Miss:
        limit = most.get(design.head_dim)
        if args.dropout is None or limit is None:
            return True
        return math.prod(design.tile_shape) <= limit or Miss(f"there are {limit} at most")

    return rule("random numbers of dropout leave registers for fewer scores at once")(are_few)


def few_hidden(most: Mapping[tuple[int, int], int]) -> Rule:
    """The same where entries of a table of blocks are smaller than a tile."""

    def are_few(design: AttentionDesign, args: SdpaArguments) -> bool | Miss:
        limit, entry = most.get(design.head_dim), args.block_shape
        if limit is None or entry is None:
            return True
        queries, keys = design.tile_shape
        if entry[0] >= queries and entry[1] >= keys:
            return True
        return queries * keys <= limit or Miss(f"there are {limit} at most")

    return rule("several entries of a table leave registers for fewer scores at once")(are_few)


def few_in_pages(most: Mapping[tuple[int, int], int]) -> Rule:
    """The same where keys are in pages."""

    def are_few(design: AttentionDesign, args: SdpaArguments) -> bool | Miss:
        limit = most.get(design.head_dim)
        if limit is None or not args.is_paged:
            return True
        return math.prod(design.tile_shape) <= limit or Miss(f"there are {limit} at most")

    return rule("numbers of pages leave registers for fewer scores at once")(are_few)


@rule("pages hold a part of a tile's keys, or several tiles")
def pages_fit(design: AttentionDesign, args: SdpaArguments) -> bool | Miss:
    size, keys = args.page_size, design.tile_shape[1]
    if size is None or (size % 8 == 0 and (keys % size == 0 or size % keys == 0)):
        return True
    return Miss(f"they hold {size}")


def hides_later(args: SdpaArguments) -> bool:
    """Whether the last queries see the most keys."""
    return "right" in args.bounds or "right_end" in args.bounds


class Sm90Sdpa(AttentionKernel):
    """What the families share."""

    targets: ClassVar[tuple[str, ...]] = ("sm_90a",)
    arguments = SdpaArguments
    operands_metadata = SdpaOperandsMetadata
    operands: ClassVar[tuple[Operands, ...]] = (
        operands_of(Q="f16 | bf16", K="like Q", V="like Q", out="like Q"),
    )
    design = AttentionDesign
    multiplied: ClassVar[str] = "K"  # in whose type products are formed
    space = Space(
        *(AttentionDesign(tile, room, _STAGES) for room, tiles in _TILES.items() for tile in tiles)
    )
    is_full = nothing_empty

    def scalars(self, multiprocessors: int) -> tuple[int, ...]:
        return (multiprocessors,)

    def workspace_for(self, *tensors: Any) -> int:
        return ZEROED

    def get_workspace_size(self, args: SdpaArguments) -> int:
        return ZEROED

    def _design_values(self, scores: Any) -> tuple[Any, ...]:
        """As the implementation takes them."""
        design, of = self._design, self.metadata.operands.tensors[self.multiplied]
        assert of.dtype is not None
        return design.head_dim, design.tile_shape, design.stages, of.dtype.cutlass, scores


@dataclass(frozen=True)
class ForwardDesign(AttentionDesign):
    """How a block of the forward family computes attention.

    Attributes:
        scaling: When what was summed up is scaled to a larger maximum: ``at_once``, ``late``, while
            the next scores are formed, or ``seldom``, late and only if powers would be more than
            256 times as large.
        resident: Blocks that share a multiprocessor.
        bias: How one comes to the scores: it is ``read`` where it lies, or comes to shared memory
            with the keys, in ``tiles`` of as many queries, or in ``rows`` that are for all of them.
    """

    scaling: str = "at_once"
    resident: int = 1
    bias: str = "read"

    def label(self) -> str:
        found = super().label() + ("" if self.scaling == "at_once" else f"_{self.scaling}")
        found += "" if self.resident == 1 else f"_resident{self.resident}"
        return found + ("" if self.bias == "read" else f"_bias_{self.bias}")


class Sm90SdpaOf16Bits(Sm90Sdpa):
    """What the families share that multiply 16-bit floats."""

    design = ForwardDesign
    space = Space(
        *(
            ForwardDesign(tile, room, _STAGES, scaling)
            for room, tiles in _TILES.items()
            for scaling in ("at_once", "late", "seldom")
            for tile in tiles
        ),
        *(
            ForwardDesign(tile, room, _STAGES, scaling, resident)
            for tile, room, resident in _SHARING
            for scaling in ("at_once", "seldom")
        ),
    )
    takes_least = least_room(_TILES)
    drops_few = few_dropped(_MOST_DROPPED)
    hides_few = few_hidden(_MOST_HIDDEN)

    @rule(
        "scores that are more than products of which a band is seen leave no registers to scale "
        "late or seldom"
    )
    def _(design: ForwardDesign, args: SdpaArguments) -> bool:
        return design.scaling == "at_once" or not changes(args)

    @rule(
        "blocks that share a multiprocessor have registers for scores that are changed in one way, "
        "by tables of no smaller blocks than a tile, and of more than 64 columns for products"
    )
    def _(design: ForwardDesign, args: SdpaArguments) -> bool | Miss:
        entry, ways = args.block_shape, changes(args)
        if design.resident == 1:
            return True
        if entry is not None and any(map(operator.lt, entry, design.tile_shape)):
            return Miss(f"they are of {entry[0]} x {entry[1]}")
        most = 1 if design.head_dim[0] <= 64 else 0
        return len(ways) <= most or Miss(f"there is {' and '.join(ways)}")

    @rule(
        "blocks that share a multiprocessor have registers for more than 64 keys at once where "
        "scores are products, and all keys are seen or those up to a bound"
    )
    def _(design: ForwardDesign, args: SdpaArguments) -> bool | Miss:
        if design.resident == 1 or design.tile_shape[1] <= 64:
            return True
        others = [*changes(args), *(name for name in args.bounds if name.startswith("left"))]
        return not others or Miss(f"there is {others[0]}")

    @rule("scaling seldom, the largest score of a row is not kept")
    def _(design: ForwardDesign, args: SdpaArguments) -> bool | Miss:
        asked = [name for name in ("score_max", "score_sum_exp") if name in args.further]
        return design.scaling != "seldom" or not asked or Miss(f"{asked[0]} is given")

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        scores, longest_first = self.scores(args), hides_later(args)
        return self._built(scores, longest_first=longest_first, page_size=args.page_size)

    def _estimate(self, args: Any) -> float:
        return model.seconds(args, self._design)


@CuTeDSLProvider.register
class Sm90SdpaForward(Sm90SdpaOf16Bits):
    """Attention of 16-bit floats for Hopper: TMA loads, wgmma, softmax while others multiply."""

    family: ClassVar[str] = "sm90.sdpa_forward"
    space = Space(
        *Sm90SdpaOf16Bits.space.points,
        *(
            ForwardDesign(tile, room, _STAGES, bias=bias)
            for bias in ("tiles", "rows")
            for room, tiles in _BIASED_TILES.items()
            for tile in tiles
        ),
        *(
            ForwardDesign(tile, room, _STAGES, resident=resident, bias=bias)
            for bias in ("tiles", "rows")
            for tile, room, resident in _BIASED_SHARING
        ),
    )
    takes_pages = pages_fit
    reads_few = few_in_pages(_MOST_IN_PAGES)

    @rule(
        "a bias comes with keys if it has 16 bits, a row for each query or one for all of them, "
        "and rows of multiples of 16 bytes"
    )
    def _(design: ForwardDesign, args: SdpaArguments) -> bool | Miss:
        return design.bias == "read" or biases.comes_by_tma(args, of_queries=design.bias == "tiles")

    @rule("a bias that comes with keys leaves 192 queries no registers to look for bounds")
    def _(design: ForwardDesign, args: SdpaArguments) -> bool | Miss:
        if design.bias == "read" or design.tile_shape[0] < 192:
            return True
        return not args.bounds or Miss(f"there is {next(iter(args.bounds))}")

    @rule("numbers of pages and a bias leave registers to some tiles alone")
    def _(design: ForwardDesign, args: SdpaArguments) -> bool | Miss:
        bias = args.further.get("bias")
        if not args.is_paged or bias is None or design.bias != "read":
            return True
        near = f"would match with a bias of bfloat16 and rows at multiples of {biases.VECTOR} bytes"
        fits = (design.head_dim, design.tile_shape) in _BIASED_IN_PAGES
        return fits or Miss(f"bias is {bias.dtype}", near)

    @rule("numbers of pages and dropout leave no registers to tiles of 128 columns")
    def _(design: ForwardDesign, args: SdpaArguments) -> bool:
        return design.head_dim != (128, 128) or not args.is_paged or args.dropout is None

    @rule("three blocks that share a multiprocessor have no registers for numbers of pages")
    def _(design: ForwardDesign, args: SdpaArguments) -> bool:
        return design.resident < 3 or not args.is_paged

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        read = self._design.bias == "read"
        return self._built(
            self.scores(args),
            longest_first=hides_later(args),
            page_size=args.page_size,
            bias_type=None if read else args.further["bias"].dtype.cutlass,
        )

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        launch = super()._launcher(args, artifact)
        if self._design.bias == "read":
            return launch
        return biases.checked(launch, of_queries=self._design.bias == "tiles")

    def aligned_values(self, args: Any) -> dict[str, int]:
        return {} if self._design.bias == "read" else {"bias": biases.VECTOR}

    def _built(
        self,
        scores: Any,
        *,
        longest_first: bool = False,
        page_size: int | None = None,
        bias_type: Any = None,
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm90 import sdpa_bias, sdpa_forward

        design, paged = self._design, page_size is not None
        options: dict[str, Any] = {
            "longest_first": longest_first,
            "scaling": design.scaling,
            "page_size": page_size,
            "resident": design.resident,
        }
        forward: Any = sdpa_forward.SdpaForwardPaged if paged else sdpa_forward.SdpaForward
        if bias_type is not None:
            forward = sdpa_bias.SdpaForwardBiasedPaged if paged else sdpa_bias.SdpaForwardBiased
            options |= {"bias_type": bias_type, "of_queries": design.bias == "tiles"}
        found: Callable[..., None] = forward(*self._design_values(scores), **options)
        return found


OPERANDS_FP8 = operands_of(Q="e4m3", K="e4m3", V="e4m3", out="f16 | bf16")
#: Of keys and values that are kept for later, and queries as they come.
OPERANDS_MIXED = operands_of(Q="f16 | bf16", K="e4m3", V="e4m3", out="like Q")

_FP8_TILES = {
    (64, 64): ((192, 128), (128, 128)),
    (128, 128): ((128, 128), (128, 160), (128, 192), (128, 224)),
    (256, 256): ((128, 128), (128, 96)),
}
#: The same of 8 bits: more of them spill up to 72 bytes. Of (256, 256) either tile spills something
#: with a band.
_MOST_DROPPED_FP8 = {(64, 64): 128 * 128, (128, 128): 128 * 128}
_MOST_HIDDEN_FP8 = {(64, 64): 128 * 128, (128, 128): 128 * 160, (256, 256): 128 * 96}
#: The same where keys are in pages: more of them spill 56 or 72 bytes if a window is seen.
_MOST_IN_PAGES_FP8 = {(128, 128): 128 * 192}


@CuTeDSLProvider.register
class Sm90SdpaForwardFp8(Sm90Sdpa):
    """Attention of 8-bit floats for Hopper: a kernel before turns V over."""

    family: ClassVar[str] = "sm90.sdpa_forward_fp8"
    operands = (OPERANDS_FP8,)
    space = Space(
        *(
            AttentionDesign(tile, room, _STAGES)
            for room, tiles in _FP8_TILES.items()
            for tile in tiles
        )
    )
    has_some_keys = some_keys
    takes_least = least_room(_FP8_TILES)
    drops_few = few_dropped(_MOST_DROPPED_FP8)
    hides_few = few_hidden(_MOST_HIDDEN_FP8)
    takes_pages = pages_fit
    reads_few = few_in_pages(_MOST_IN_PAGES_FP8)

    def workspace_for(self, *tensors: Any) -> int:
        """Of packed sequences, 0: what they need depends on how many there are."""
        V = tensors[2].shape
        return self._workspace_bytes((V,), V[0]) if len(V) == 4 else 0

    def get_workspace_size(self, args: SdpaArguments) -> int:
        if args.is_packed and not args.is_paged:
            return self._workspace_bytes((args.V.shape,), args.B)
        return self._workspace_bytes(((args.B, args.H_kv, args.S_kv, args.D_v),), args.B)

    def _workspace_bytes(
        self, shapes: tuple[tuple[int, ...], ...], sequences: int, names: tuple[str, ...] = ()
    ) -> int:
        """shapes: of V alone, not in pages. Counters, and room for Vᵀ."""
        from kernel_api.implementations.sm90 import sdpa_workspace

        (shape,) = shapes
        if len(shape) == 3:
            keys, heads, columns = shape
            tile = self._design.tile_shape[1]
            rows, room = heads * columns, sdpa_workspace.first_of_packed(keys, sequences, tile)
        else:
            batches, heads, keys, columns = shape
            rows, room = batches * heads * columns, sdpa_workspace.keys_with_room(keys)
        return int(ZEROED + rows * room)

    def _workspace_finder(self, names: tuple[str, ...]) -> WorkspaceFinder:
        return self._finder_by(names, 2)

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        scores, longest_first = self.scores(args), hides_later(args)
        return self._built(scores, longest_first=longest_first, page_size=args.page_size)

    def _built(
        self, scores: Any, *, longest_first: bool = False, page_size: int | None = None
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_fp8 import SdpaForwardFp8

        out = self.metadata.operands.tensors["out"]
        assert out.dtype is not None
        found: Callable[..., None] = SdpaForwardFp8(
            *self._design_values(scores),
            longest_first=longest_first,
            output_type=out.dtype.cutlass,
            page_size=page_size,
        )
        return found

    def _estimate(self, args: Any) -> float:
        return 0.6 * model.seconds(args, self._design)
