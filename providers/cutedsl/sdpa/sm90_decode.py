"""What the Hopper attention families for few queries offer, and how they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api._workspaces import ZEROED
from kernel_api.arguments import SdpaArguments
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.kernel import WorkspaceFinder
from kernel_api.providers.cutedsl.sdpa import decode_model
from kernel_api.providers.cutedsl.sdpa.base import AttentionDesign, least_room
from kernel_api.providers.cutedsl.sdpa.sm90 import OPERANDS_FP8, OPERANDS_MIXED, Sm90Sdpa, pages_fit
from kernel_api.space import Miss, Space, rule


@dataclass(frozen=True)
class DecodeDesign(AttentionDesign):
    """How a block of the decode family computes attention.

    Attributes:
        cluster: Blocks, at most, that add up their parts of a tile in shared memory; 1: all parts
            go through the workspace.
    """

    cluster: int = 1

    def label(self) -> str:
        return super().label() + ("" if self.cluster == 1 else f"_cluster{self.cluster}")


#: Of tiles of 64 keys: few enough that a multiprocessor has room for a block of the next kernel.
_STAGES_IN_CLUSTERS = (((64, 64), 6), ((128, 128), 3))
#: Of decoding, where all rows of a head of keys are one tile: stages are what is on its way.
_FEW_QUERIES = (
    DecodeDesign((64, 128), (64, 64), 6),
    DecodeDesign((64, 128), (128, 128), 3),
    DecodeDesign((64, 64), (192, 128), 4),
    DecodeDesign((64, 64), (192, 192), 3),
    DecodeDesign((64, 64), (256, 256), 3),
    DecodeDesign((128, 128), (64, 64), 5),
    DecodeDesign((128, 128), (128, 128), 2),
    DecodeDesign((128, 64), (256, 256), 2),
    *(
        DecodeDesign((64, 64), room, stages, cluster)
        for room, stages in _STAGES_IN_CLUSTERS
        for cluster in (8, 16)
    ),
)
#: (queries, keys), room of K and of V in it: two blocks of keys are all that fits beside Q. With a
#: bias, or functions of scores or indices, it spills 8 to 112 bytes, up to 152 if keys are in pages
#: as well, mostly of what is the same for all blocks. There is no smaller tile.
_LATENT = DecodeDesign((64, 64), (576, 512), 2)
_ROOMS = tuple(design.head_dim for design in (*_FEW_QUERIES, _LATENT))
#: Of a head of keys: more are tiles of 128 for all multiprocessors anyhow. Of 8-bit queries there
#: is no larger tile than of 64.
_MOST_ROWS, _MOST_ROWS_FP8 = 16384, 256


#: Of all packed sequences together: rows, and pairs of a row and a key. Blocks of both, of 64 each
#: at least, are counted in 32 bits.
_MOST_TOGETHER, _MOST_PAIRS = 2**30, 2**42


def _are_few(args: SdpaArguments, most: int) -> bool | Miss:
    rows = args.S_q * args.H // args.H_kv
    return rows <= most or Miss(f"they are {rows}")


class Sm90FewQueries(Sm90Sdpa):
    """What the families share."""

    design = DecodeDesign
    takes_pages = pages_fit

    @rule("packed queries of all heads that share one of keys are counted in 32 bits, 2³⁰ at most")
    def _(args: SdpaArguments) -> bool | Miss:
        rows = args.Q.shape[0] * args.H // args.H_kv
        return not args.is_packed or rows <= _MOST_TOGETHER or Miss(f"they are {rows}")

    @rule("packed queries of such heads have 2⁴² pairs with keys at most: their blocks are counted")
    def _(args: SdpaArguments) -> bool | Miss:
        pairs = args.Q.shape[0] * args.H // args.H_kv * args.S_kv
        return not args.is_packed or pairs <= _MOST_PAIRS or Miss(f"they have {pairs}")

    @rule("dropout is for one head: rows side by side are of several")
    def _(args: SdpaArguments) -> bool:
        return args.dropout is None

    def workspace_for(self, *tensors: Any) -> int:
        """Of packed sequences, 0: what they need depends on how many there are."""
        return 0 if len(tensors[0].shape) == 3 else self._with_parts()

    def get_workspace_size(self, args: SdpaArguments) -> int:
        if args.is_packed:
            return self._workspace_bytes((args.Q.shape, args.K.shape), args.B)
        return self._with_parts()

    def _workspace_finder(self, names: tuple[str, ...]) -> WorkspaceFinder:
        if "cu_seqlens_q" not in names:
            return super()._workspace_finder(names)
        return self._finder_by(names, 0, 1)

    def _workspace_bytes(
        self, shapes: tuple[tuple[int, ...], ...], sequences: int, names: tuple[str, ...] = ()
    ) -> int:
        """shapes: Of packed Q, and of K."""
        from kernel_api.implementations.sm90 import sdpa_workspace

        (T, H, _), (_, key_heads, *_) = shapes
        tile = self._design.tile_shape[0]
        places = sdpa_workspace.first_place(T * H // max(key_heads, 1), sequences, tile)
        listing = sdpa_workspace.Listing(self._most_parts(), places * key_heads)
        return int(self._with_parts() + listing.bytes)

    def _with_parts(self) -> int:
        from kernel_api.implementations.sm90 import sdpa_workspace

        rows, columns = self._design.tile_shape[0], self._design.head_dim[1]
        part = sdpa_workspace.part_bytes(rows, columns, sdpa_workspace.MOST_NUMBERS)
        return int(ZEROED + self._most_parts() * part)

    def _most_parts(self) -> int:
        """Of all tiles together."""
        from kernel_api.implementations.sm90.sdpa_workspace import MOST_PARTS

        return int(MOST_PARTS)

    def implementation_for(self, args: SdpaArguments) -> Callable[..., None]:
        return self._built(self.scores(args), page_size=args.page_size)


@CuTeDSLProvider.register
class Sm90SdpaDecode(Sm90FewQueries):
    """Attention of few queries to many keys for Hopper: keys are cut into parts, and may be in
    pages."""

    family: ClassVar[str] = "sm90.sdpa_decode"
    space = Space(*_FEW_QUERIES)
    takes_least = least_room(sorted(_ROOMS))

    @rule(f"queries of all heads that share one of keys are {_MOST_ROWS} at most")
    def _(args: SdpaArguments) -> bool | Miss:
        return _are_few(args, _MOST_ROWS)

    def _built(self, scores: Any, *, page_size: int | None = None) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_decode import SdpaDecode
        from kernel_api.implementations.sm90.sdpa_decode_cluster import SdpaDecodeCluster

        design = self._design
        values = self._design_values(scores)
        found: Callable[..., None]
        if design.cluster == 1:
            found = SdpaDecode(*values, page_size=page_size)
        else:
            found = SdpaDecodeCluster(*values, cluster=design.cluster, page_size=page_size)
        return found

    def _estimate(self, args: Any) -> float:
        return decode_model.decode_seconds(args, self._design)


@dataclass(frozen=True)
class DecodeFp8Design(DecodeDesign):
    """The same of 8-bit floats.

    Attributes:
        resident: Blocks that share a multiprocessor.
    """

    resident: int = 1

    def label(self) -> str:
        return super().label() + ("" if self.resident == 1 else f"_resident{self.resident}")


#: Of wide tiles for few of them, and of blocks that share a multiprocessor for more than there are
#: multiprocessors: while one begins a tile, the other reads.
_FEW_QUERIES_FP8 = (
    DecodeFp8Design((64, 64), (64, 64), 8, resident=2),
    DecodeFp8Design((64, 64), (128, 128), 4, resident=2),
    DecodeFp8Design((64, 128), (128, 128), 4),
    DecodeFp8Design((64, 64), (256, 256), 3),
)


@CuTeDSLProvider.register
class Sm90SdpaDecodeFp8(Sm90FewQueries):
    """Attention of few queries to many keys of 8-bit floats for Hopper."""

    family: ClassVar[str] = "sm90.sdpa_decode_fp8"
    operands = (OPERANDS_FP8, OPERANDS_MIXED)
    design = DecodeFp8Design
    space = Space(*_FEW_QUERIES_FP8)
    takes_least = least_room(sorted(design.head_dim for design in _FEW_QUERIES_FP8))

    @rule(f"queries of 8 bits, of all heads that share one of keys, are {_MOST_ROWS_FP8} at most")
    def _(args: SdpaArguments) -> bool | Miss:
        return args.Q.dtype.bits > 8 or _are_few(args, _MOST_ROWS_FP8)

    def _built(self, scores: Any, *, page_size: int | None = None) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_decode_fp8 import SdpaDecodeFp8
        from kernel_api.implementations.sm90.sdpa_decode_mixed import SdpaDecodeMixed

        tensors = self.metadata.operands.tensors
        Q, out = tensors["Q"].dtype, tensors["out"].dtype
        assert Q is not None and out is not None
        values = self._design_values(scores)
        options = {
            "page_size": page_size,
            "output_type": out.cutlass,
            "resident": self._design.resident,
        }
        found: Callable[..., None]
        if Q.bits == 8:
            found = SdpaDecodeFp8(*values, **options)
        else:
            found = SdpaDecodeMixed(*values, queries_type=Q.cutlass, **options)
        return found

    def _estimate(self, args: Any) -> float:
        return decode_model.decode_fp8_seconds(args, self._design)


@CuTeDSLProvider.register
class Sm90SdpaLatent(Sm90FewQueries):
    """The same where V is the first columns of K, as in multi-head latent attention: both are read
    once."""

    family: ClassVar[str] = "sm90.sdpa_latent"
    space = Space(_LATENT)
    takes_least = least_room(sorted(_ROOMS))

    @rule("values are the first columns of keys")
    def _(args: SdpaArguments) -> bool | Miss:
        near = f"would match with V = K[..., :{args.D_v}] and values_in_keys=True"
        return args.values_in_keys or Miss("V lies apart from K", near)

    @rule("all blocks of keys are loaded, one after the other: there is no table of blocks")
    def _(args: SdpaArguments) -> bool:
        return args.block_shape is None

    def _built(self, scores: Any, *, page_size: int | None = None) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_latent import SdpaLatent

        found: Callable[..., None] = SdpaLatent(*self._design_values(scores), page_size=page_size)
        return found

    def _most_parts(self) -> int:
        from kernel_api.implementations.sm90.sdpa_workspace import MOST_LATENT_PARTS

        return int(MOST_LATENT_PARTS)

    def _estimate(self, args: Any) -> float:
        return decode_model.latent_seconds(args, self._design)
