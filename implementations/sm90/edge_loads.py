"""Loads of tiles that reach beyond the last row of their matrix.

TMA fills rows beyond it with zeros, which takes longer than to load as many. Nobody needs them: a
row of A or B reaches only its own row or column of D, which is not stored.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ..common.epilogue import HALF, column_in_heads

_SWIZZLED_ROWS = 8  # that the pattern of a swizzle takes
_PANELS = 64, 32, 16, 8  # elements of 16 bits that a swizzle holds side by side: the most that fit
_MOST_COPIES = 6  # of a k tile, by a block: each takes the producer as long as many rows take TMA


@dataclass(frozen=True)
class EdgeLoad:
    """Loads of a K-major tile the pieces that have rows of the matrix, and nothing of the others.

    rows: Of a tile.
    sharers: Blocks that load it together, each its share of the rows for all of them.
    """

    rows: int
    sharers: int

    always = False  # whether whole tiles are loaded in pieces as well

    @property
    def piece(self) -> int:
        """Rows of a copy; a share has a multiple of 8 (`GemmPlan`)."""
        share = self.rows // self.sharers
        fewest = -(-share // _MOST_COPIES)
        return next(
            rows
            for rows in range(_SWIZZLED_ROWS, share + 1, _SWIZZLED_ROWS)
            if rows >= fewest and share % rows == 0
        )

    @property
    def pieces(self) -> int:
        """Of a tile."""
        return self.rows // self.piece

    @property
    def pieces_of_all(self) -> int:
        """The first so many are of all sharers."""
        return self.pieces - self.pieces // self.sharers + 1

    def box(self, tile_k: int) -> tuple[int, int]:
        """Rows and columns of a copy."""
        return self.piece, tile_k

    def shared_layout(self, element_type: type[cutlass.Numeric], tile_k: int):
        """Of a box, as it lies in a stage."""
        kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, element_type, tile_k)
        atom = sm90.make_smem_layout_atom(kind, element_type)
        return cute.tile_to_shape(atom, self.box(tile_k), order=(0, 1))

    def partition(self, tma: cute.CopyAtom, mX: cute.Tensor, sX: cute.Tensor) -> tuple:
        """(of the matrix, of the stages): (TMA, pieces, boxes along K, batches), (TMA, pieces,
        boxes along K, stages)"""
        box = self.box(cute.size(sX, mode=[1]))
        sX, mX = (cute.tiled_divide(tensor, box) for tensor in (sX, mX))
        target, source = cpasync.tma_partition(tma, 0, cute.make_layout(1), sX, mX)
        return source, target

    def place(self, piece: Int32) -> Int32:
        """In the matrix, of a piece of tiles."""
        return piece

    def pieces_inside(self, tile: Int32, extent: Int32) -> Int32:
        """Of a tile of a matrix with so many rows."""
        inside = (extent - tile * self.rows + self.piece - 1) // self.piece
        return cutlass.min(cutlass.max(inside, 0), self.pieces)

    @cute.jit
    def copy(self, edge: "Edge", k: Int32, stage: Int32, full, mask):
        """This block's share of the pieces of a k tile that are inside.

        full: The barrier of the stage; mask: of the sharers, None for this block alone.
        """
        share = self.pieces // self.sharers
        source, target = edge.source[None, None, k], edge.target[None, None, 0, stage]
        for i in cutlass.range_constexpr(share):
            piece = edge.rank * share + i
            if piece < edge.inside:
                cute.copy(
                    edge.tma,
                    source[None, self.place(edge.tile * self.pieces + piece)],
                    target[None, piece],
                    tma_bar_ptr=full,
                    mcast_mask=mask,
                )


@dataclass(frozen=True)
class HeadLoad(EdgeLoad):
    """Loads all tiles so, of a matrix whose rows come in the order of `Epilogue.heads`.

    heads: Rows of a head.
    """

    heads: int

    always = True
    piece = HALF

    def place(self, piece: Int32) -> Int32:
        return column_in_heads(piece * HALF, self.heads) // HALF


@dataclass(frozen=True)
class PanelLoad(EdgeLoad):
    """Loads of a tile whose rows lie side by side the panels that have some of the matrix.

    A panel is as wide as the swizzle. Each sharer loads a part of all of them, cut along K.
    """

    @property
    def piece(self) -> int:
        return next(panel for panel in _PANELS if self.rows % panel == 0)

    @property
    def pieces_of_all(self) -> int:
        return 1

    def box(self, tile_k: int) -> tuple[int, int]:
        return self.piece, tile_k // self.sharers

    def shared_layout(self, element_type: type[cutlass.Numeric], tile_k: int):
        kind = sm90.get_smem_layout_atom(LayoutEnum.COL_MAJOR, element_type, self.piece)
        atom = sm90.make_smem_layout_atom(kind, element_type)
        return cute.tile_to_shape(atom, self.box(tile_k), order=(1, 0))

    @cute.jit
    def copy(self, edge: "Edge", k: Int32, stage: Int32, full, mask):
        source = edge.source[None, None, k * self.sharers + edge.rank]
        target = edge.target[None, None, edge.rank, stage]
        for panel in cutlass.range_constexpr(self.pieces):
            if panel < edge.inside:
                cute.copy(
                    edge.tma,
                    source[None, edge.tile * self.pieces + panel],
                    target[None, panel],
                    tma_bar_ptr=full,
                    mcast_mask=mask,
                )


class Edge(NamedTuple):
    """A tile of which some rows may lie outside.

    source: (TMA, pieces, boxes along K) of the matrix.
    target: (TMA, pieces, boxes along K, stages).
    inside: Pieces that have rows of the matrix.
    rank: Of this block among the sharers.
    """

    tma: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    tile: Int32
    inside: Int32
    rank: Int32
