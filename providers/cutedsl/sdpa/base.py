"""What the attention families share: their designs, and what they take beside matrices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from kernel_api.arguments._attention_checks import LEAST
from kernel_api.artifact import CompiledArtifact
from kernel_api.dtypes import DType
from kernel_api.kernel import LauncherInOrder
from kernel_api.masks import BlockSparse
from kernel_api.metadata import DesignMetadata
from kernel_api.providers.cutedsl.extents import MOST, counted_in_32_bits
from kernel_api.providers.cutedsl.kernel import SIZES_KEPT, CuteDslKernel, WorkspaceFinder
from kernel_api.providers.cutedsl.sdpa.estimated import Estimated, estimated_by
from kernel_api.space import Miss, Operands, Rule, rule

WHY_ALIGNED = "rows are copied in vectors of 16 bytes, whose addresses and pitches are multiples"
ALIGNED = dict.fromkeys(("Q", "K", "V", "out"), 16)

#: Of a tile, and of one of keys whose gradients it makes.
_LEAST_QUERIES, _LEAST_KEYS = 64, 16


def operands_of(alignments: tuple[Mapping[str, int], ...] = (ALIGNED,), **types: str) -> Operands:
    """Of a forward pass: columns lie side by side."""
    return Operands(
        accumulator="f32",
        majors="Q:d K:d V:e out:e",
        alignments=alignments,
        why_aligned=WHY_ALIGNED,
        **types,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class AttentionDesign(DesignMetadata):
    """How a block computes attention.

    Attributes:
        tile_shape: (queries, keys) of a block at once.
        head_dim: Of queries and keys that there is room for: (of Q and K, of V).
        stages: Blocks of keys that are in shared memory at once.
    """

    tile_shape: tuple[int, int]
    head_dim: tuple[int, int]
    stages: int

    def label(self) -> str:
        queries, keys = self.tile_shape
        wide, wide_v = self.head_dim
        dims = f"d{wide}" if wide == wide_v else f"d{wide}x{wide_v}"
        return f"{dims}_tile{queries}x{keys}_stages{self.stages}"


def changes(args: Any) -> list[str]:
    """What scores have beside products of which a band is seen."""
    given = ("softcap", "score", "dropout", "mask_graph", "block_shape")
    found = [name for name in given if getattr(args, name) is not None]
    return [*found, *(name for name in ("bias", "alibi") if name in args.further)]


def refused_bias(args: Any, refuses: Callable[[DType], bool]) -> bool | Miss:
    """Of a rule about the type of a bias and of its gradient."""
    for name in ("bias", "dBias"):
        if name in args.further and refuses(element := args.further[name].dtype):
            return Miss(f"{name} is {element}", f"would match with {name} of bfloat16")
    return True


def head_dims(args: Any) -> tuple[int, int]:
    """(of Q and K, of V)"""
    return args.Q.shape[-1], args.V.shape[-1]


class AttentionKernel(CuteDslKernel):
    """Attention: its kernels take what `launch_values` has of the arguments between the matrices
    and the stream."""

    takes_more = True
    reorders_accumulation = True
    #: Seconds, of arguments as estimates see them.
    _estimate: Callable[..., float]
    #: The implementation for scores, and for what else depends on arguments, by name.
    _built: Callable[..., Callable[..., None]]

    @rule("scale is positive, in float32 as well: then the largest product has the largest score")
    def _(args: Any) -> bool | Miss:
        return args.scale >= LEAST or Miss(f"scale is {args.scale}")

    @rule("nothing converts what a bias of float8_e8m0fnu holds, powers of two alone")
    def _(args: Any) -> bool | Miss:
        return refused_bias(args, lambda element: element.short == "e8m0")

    def predict(self, args: Any) -> float:
        return self._estimate(Estimated(args))

    @classmethod
    def estimated_by(cls, args: Any) -> Hashable | None:
        return estimated_by(args)

    counts_in_32_bits = counted_in_32_bits

    @rule("keys are counted in 32 bits, 2³⁰ at most")
    def _(args: Any) -> bool | Miss:
        fits = not args.is_paged or args.S_kv <= MOST
        return fits or Miss(f"pages of a sequence have {args.S_kv} keys")

    @rule("tiles of all heads and sequences are counted in 32 bits, fewer than 2³¹")
    def _(args: Any) -> bool | Miss:
        counted = [(args.S_q, args.Q, _LEAST_QUERIES)]
        if "dK" in args.operand_names:
            counted.append((args.S_kv, args.K, _LEAST_KEYS))
        most = 0
        for longest, operand, tile in counted:
            rows = min(longest, operand.shape[0]) if args.is_packed else longest
            most = max(most, -(-rows // tile) * args.B * args.H)
        return most < 2 * MOST or Miss(f"there may be {most}")

    @rule("rows of packed tensors are cleared by the blocks of a sequence, of which there are some")
    def _(args: Any) -> bool | Miss:
        if not args.is_packed:
            return True
        sides = [(args.Q.shape[0], args.S_q)]
        if not args.is_paged:
            sides.append((args.K.shape[0], args.S_kv))
        for rows, longest in sides:
            if rows > 0 and args.B * longest == 0:
                return Miss(f"there are {rows} rows, and {args.B} sequences of up to {longest}")
        return True

    @rule("the head dimensions have room", by=head_dims)
    def _(design: AttentionDesign, args: Any) -> bool | Miss:
        asked, room = head_dims(args), design.head_dim
        fits = asked[0] <= room[0] and asked[1] <= room[1]
        near = f"would match with {room[0]} of Q and K and {room[1]} of V at most"
        return fits or Miss(f"they are {asked} of {room}", near, limit=sum(room))

    def more_values(self, args: Any) -> dict[str, Any]:
        values: dict[str, Any] = args.launch_values
        return values

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        """Takes ``lse`` of a forward pass by name, or behind the operands."""
        return _with_lse(super()._launcher(args, artifact), args)

    def _launcher_in_order(self, args: Any, artifact: CompiledArtifact) -> LauncherInOrder:
        bare, count = None, len(args.operands)
        if self.get_workspace_size(args) == self.workspace_for(*args.tensors):
            bare = self._bare_launcher(args, artifact)
        if bare is None:
            return super()._launcher_in_order(args, artifact)
        if "lse" not in args.further:
            return bare
        return lambda tensors, values: bare(tensors[:count], values)  # it is one of the values

    def _workspace_bytes(
        self, shapes: tuple[tuple[int, ...], ...], sequences: int, names: tuple[str, ...] = ()
    ) -> int:
        """Of a launch whose workspace depends on the shapes of operands, on the names of the values
        beside them and, if they are packed, on how many sequences there are."""
        raise NotImplementedError

    def _finder_by(self, names: tuple[str, ...], *operands: int) -> WorkspaceFinder:
        """Where `_workspace_bytes` says what the shapes of operands ask for."""
        size_of = lru_cache(maxsize=SIZES_KEPT)(partial(self._workspace_bytes, names=names))
        if "page_table" in names:
            return lambda tensors, others: size_of(
                tuple(
                    _without_pages(tensors[i].shape, others["page_table"].shape)
                    if i
                    else tensors[i].shape  # queries are in none
                    for i in operands
                ),
                others["page_table"].shape[0],
            )
        if "cu_seqlens_q" in names:
            return lambda tensors, others: size_of(
                tuple(tensors[i].shape for i in operands), others["cu_seqlens_q"].shape[0] - 1
            )
        return lambda tensors, others: size_of(tuple(tensors[i].shape for i in operands), 0)

    def implementation(self) -> Callable[..., None]:
        """Of scores that are products times a scale."""
        from kernel_api.implementations.common.attention.scores import Scores

        return self._built(Scores(("scale",)))

    def scores(self, args: Any) -> Any:
        """What the implementation makes of products."""
        from kernel_api.implementations.common.attention.scores import Scores
        from kernel_api.providers.cutedsl.sdpa.scores import functions_of

        names, functions = tuple(self.more_values(args)), functions_of(args)
        return Scores(names, functions, block_shape_of(args), full=full_entry_of(args))


def _with_lse(launch: Callable[..., None], args: Any) -> Callable[..., None]:
    """The launch, which takes ``lse`` also behind the operands where the arguments have one."""
    if "lse" not in args.further:
        return launch
    count = len(args.operands)

    def launch_placed(*tensors: Any, **others: Any) -> None:
        if len(tensors) > count:
            others["lse"] = tensors[count]
        launch(*tensors[:count], **others)

    return launch_placed


def _without_pages(pages: tuple[int, ...], table: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of sequences that have all the pages of their rows in the table."""
    _, heads, size, columns = pages
    sequences, most = table
    return sequences, heads, most * size, columns


def least_room(rooms: Iterable[tuple[int, int]]) -> Rule:
    """Of a family that has these, ascending."""
    ordered = tuple(dict.fromkeys(rooms))

    def is_least(design: AttentionDesign, args: Any) -> bool | Miss:
        asked, asked_v = head_dims(args)
        least = next((r for r in ordered if asked <= r[0] and asked_v <= r[1]), None)
        return design.head_dim == least or Miss(f"that is {least}")

    text = "the head dimensions take the least room that they fit in"
    return rule(text, by=head_dims)(is_least)


@rule("no mode is empty: TMA describes none that is")
def nothing_empty(args: Any) -> bool | Miss:
    for operand, name in zip(args.operands, args.operand_names, strict=True):
        if 0 in operand.shape:
            return Miss(f"{name} has shape {operand.shape}")
    return True


def full_entry_of(args: Any) -> int | None:
    """That says of a block mask that functions show all; None: it does not tell."""
    mask = getattr(args, "mask", None)
    blocks = None if mask is None else mask.blocks
    return BlockSparse.FULL if blocks is not None and blocks.marks_full else None


def block_shape_of(args: Any) -> tuple[int, int] | None:
    """(queries, keys) of an entry of a block mask."""
    found: tuple[int, int] | None = getattr(args, "block_shape", None)
    return found
