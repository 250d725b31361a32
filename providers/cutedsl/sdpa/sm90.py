"""What the Hopper attention families offer, and how they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from kernel_api._workspaces import ZEROED
from kernel_api.arguments import SdpaArguments
from kernel_api.metadata import SdpaOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.sdpa import model
from kernel_api.providers.cutedsl.sdpa.base import (
    WHY_ALIGNED,
    AttentionDesign,
    AttentionKernel,
    head_dims,
)
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
#: Keys that Vᵀ has room for a multiple of.
_PERMUTED = 16
#: Of the keys of all tiles together, where tiles have several.
_MOST_PARTS = 640
_ALIGNED = {"Q": 16, "K": 16, "V": 16, "out": 16}


_OPERANDS = (
    Operands(
        Q="f16 | bf16",
        K="like Q",
        V="like Q",
        out="like Q",
        accumulator="f32",
        majors="Q:d K:d V:e out:e",
        alignments=(_ALIGNED,),
        why_aligned=WHY_ALIGNED,
    ),
)


def least_room(rooms: Iterable[tuple[int, int]]) -> Rule:
    """Of a family that has these, ascending."""
    ordered = tuple(dict.fromkeys(rooms))

    def is_least(design: AttentionDesign, args: SdpaArguments) -> bool | Miss:
        asked, asked_v = head_dims(args)
        least = next((r for r in ordered if asked <= r[0] and asked_v <= r[1]), None)
        return design.head_dim == least or Miss(f"that is {least}")

    return rule("the head dimensions take the least room that they fit in")(is_least)


def hides_later(args: SdpaArguments) -> bool:
    """Whether the last queries see the most keys."""
    return "right" in args.bounds or "right_end" in args.bounds


class Sm90Sdpa(AttentionKernel):
    """What the families share."""

    targets: ClassVar[tuple[str, ...]] = ("sm_90a",)
    arguments = SdpaArguments
    operands_metadata = SdpaOperandsMetadata
    operands = _OPERANDS
    design = AttentionDesign
    space = Space(
        *(AttentionDesign(tile, room, _STAGES) for room, tiles in _TILES.items() for tile in tiles)
    )
    takes_least = least_room(_TILES)

    @rule("no mode is empty: TMA describes none that is")
    def _(args: SdpaArguments) -> bool | Miss:
        for operand, name in zip(args.operands, args.operand_names, strict=True):
            if 0 in operand.shape:
                return Miss(f"{name} has shape {operand.shape}")
        return True

    def scalars(self, multiprocessors: int) -> tuple[int, ...]:
        return (multiprocessors,)

    def workspace_for(self, *tensors: Any) -> int:
        return ZEROED

    def get_workspace_size(self, args: SdpaArguments) -> int:
        return ZEROED

    @property
    def _design(self) -> AttentionDesign:
        design = self.metadata.design
        assert isinstance(design, AttentionDesign)
        return design

    def _design_values(self, scores: Any) -> tuple[Any, ...]:
        """As the implementation takes them."""
        design, Q = self._design, self.metadata.operands.tensors["Q"]
        assert Q.dtype is not None
        return design.head_dim, design.tile_shape, design.stages, Q.dtype.cutlass, scores


@CuTeDSLProvider.register
class Sm90SdpaForward(Sm90Sdpa):
    """Attention of 16-bit floats for Hopper: TMA loads, wgmma, softmax while others multiply."""

    family: ClassVar[str] = "sm90.sdpa_forward"
    space = Space(
        *(AttentionDesign(tile, room, _STAGES) for room, tiles in _TILES.items() for tile in tiles)
    )
    takes_least = least_room(_TILES)

    @rule("K and V are not in pages")
    def _(args: SdpaArguments) -> bool:
        return not args.is_paged

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.common.attention.scores import Scores

        return self._built(Scores(("scale",)), longest_first=False)

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        return self._built(self.scores(args), longest_first=hides_later(args))

    def _built(self, scores: Any, *, longest_first: bool) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_forward import SdpaForward

        found: Callable[..., None] = SdpaForward(
            *self._design_values(scores), longest_first=longest_first
        )
        return found

    def predict(self, args: SdpaArguments) -> float:
        return model.seconds(args, self._design)


_FP8_TILES = {
    (64, 64): ((192, 128), (128, 128)),
    (128, 128): ((128, 128), (128, 160), (128, 192), (128, 224)),
    (256, 256): ((128, 128), (128, 96)),
}


@CuTeDSLProvider.register
class Sm90SdpaForwardFp8(Sm90Sdpa):
    """Attention of 8-bit floats for Hopper: a kernel before turns V over."""

    family: ClassVar[str] = "sm90.sdpa_forward_fp8"
    operands = (
        Operands(
            Q="e4m3",
            K="e4m3",
            V="e4m3",
            out="f16 | bf16",
            accumulator="f32",
            majors="Q:d K:d V:e out:e",
            alignments=(_ALIGNED,),
            why_aligned=WHY_ALIGNED,
        ),
    )
    space = Space(
        *(
            AttentionDesign(tile, room, _STAGES)
            for room, tiles in _FP8_TILES.items()
            for tile in tiles
        )
    )
    takes_least = least_room(_FP8_TILES)

    @rule("sequences are neither packed nor in pages")
    def _(args: SdpaArguments) -> bool:
        return not (args.is_packed or args.is_paged)

    def workspace_for(self, *tensors: Any) -> int:
        batches, heads, keys, columns = tensors[2].shape
        workspace: int = ZEROED + batches * heads * columns * (-(-keys // _PERMUTED) * _PERMUTED)
        return workspace

    def get_workspace_size(self, args: SdpaArguments) -> int:
        return self.workspace_for(*args.tensors)

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.common.attention.scores import Scores

        return self._built(Scores(("scale",)), longest_first=False)

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        return self._built(self.scores(args), longest_first=hides_later(args))

    def _built(self, scores: Any, *, longest_first: bool) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_fp8 import SdpaForwardFp8

        out = self.metadata.operands.tensors["out"]
        assert out.dtype is not None
        found: Callable[..., None] = SdpaForwardFp8(
            *self._design_values(scores),
            longest_first=longest_first,
            output_type=out.dtype.cutlass,
        )
        return found

    def predict(self, args: SdpaArguments) -> float:
        return 0.6 * model.seconds(args, self._design)


#: Of decoding, where all rows of a head of keys are one tile: stages are what is on its way.
_FEW_QUERIES = (
    AttentionDesign((64, 128), (64, 64), 6),
    AttentionDesign((64, 128), (128, 128), 3),
    AttentionDesign((64, 64), (192, 128), 4),
    AttentionDesign((64, 64), (192, 192), 3),
    AttentionDesign((64, 64), (256, 256), 3),
    AttentionDesign((128, 128), (64, 64), 5),
    AttentionDesign((128, 128), (128, 128), 2),
    AttentionDesign((128, 64), (256, 256), 2),
)
_MOST_ROWS = 256
#: What scores may be made with, of launch values.
_SERVED = frozenset(("lse", "scale", "softcap", "sink", "seq_lens_q", "seq_lens_kv", "page_table"))
_BOUNDS = ("left", "right", "left_end", "right_end")


@CuTeDSLProvider.register
class Sm90SdpaDecode(Sm90Sdpa):
    """Attention of few queries to many keys for Hopper: keys are cut into parts, and may be in
    pages."""

    family: ClassVar[str] = "sm90.sdpa_decode"
    space = Space(*_FEW_QUERIES)
    takes_least = least_room(design.head_dim for design in _FEW_QUERIES)

    @rule("queries of all heads that share one of keys are 256 at most")
    def _(args: SdpaArguments) -> bool | Miss:
        rows = args.S_q * args.H // args.H_kv
        return rows <= _MOST_ROWS or Miss(f"they are {rows}")

    @rule("sequences are not packed")
    def _(args: SdpaArguments) -> bool:
        return not args.is_packed

    @rule("scores are products of which a band is seen, capped or not")
    def _(args: SdpaArguments) -> bool | Miss:
        others = [n for n in args.launch_values if n not in _SERVED and n not in _BOUNDS]
        return not others or Miss(f"there is {others[0]}")

    @rule("pages hold a part of a tile's keys, or several tiles")
    def _(design: AttentionDesign, args: SdpaArguments) -> bool | Miss:
        size, keys = args.page_size, design.tile_shape[1]
        if size is None or (size % 8 == 0 and (keys % size == 0 or size % keys == 0)):
            return True
        return Miss(f"they hold {size}")

    def workspace_for(self, *tensors: Any) -> int:
        return self._with_parts()

    def get_workspace_size(self, args: SdpaArguments) -> int:
        return self._with_parts()

    def _with_parts(self) -> int:
        """Of each, float32 rows and the logarithms of their sums."""
        queries, columns = self._design.tile_shape[0], self._design.head_dim[1]
        return ZEROED + _MOST_PARTS * queries * (columns + 1) * 4

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.common.attention.scores import Scores

        return self._built(Scores(("scale",)), None)

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        return self._built(self.scores(args), args.page_size)

    def _built(self, scores: Any, page_size: int | None) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_decode import SdpaDecode

        found: Callable[..., None] = SdpaDecode(*self._design_values(scores), page_size=page_size)
        return found

    def predict(self, args: SdpaArguments) -> float:
        return model.decode_seconds(args, self._design)
