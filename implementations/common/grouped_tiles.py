"""Which tile of which group: found on the device, because only the device knows the sizes.

The rows of a grouped product are cut into groups by offsets, the cumulative ends. Tiles are
numbered group by group; each group begins with a tile of its own. A block visits some of the
numbers, in ascending order, and looks for the group of each: the 32 lanes of a warp hold a window
of as many groups, with the row tiles up to the end of each, and vote.

Within a group tiles follow each other in bands of rows along N, every second one backwards. Those
that follow each other run side by side and share columns of B, of which wide tiles take the most:
what L2 is asked for at one time it sends once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .threads import WARP, summed_through


def most_row_tiles(rows, groups, rows_per_tile: int):
    """That any offsets can cut so many rows into."""
    return cutlass.min(rows, (rows + groups * (rows_per_tile - 1)) // rows_per_tile)


@dataclass
class GroupTile:
    """A tile of a group; its number counts row tiles and tiles along N, or clusters of them.

    Attributes:
        group: Its number.
        first_row, end_row: Of the group, among the rows of all.
        m, n: Of the tile, in the group.
        first_tile: Row tiles of all groups before.
        tiles: Row tiles of the group.
    """

    group: Int32
    first_row: Int32
    end_row: Int32
    m: Int32
    n: Int32
    first_tile: Int32
    tiles: Int32


@dataclass
class GroupedTiles:
    """The tiles of all groups; of a kernel, which every warp of 32 lanes asks as a whole.

    A search goes on where the last one has ended: its state is five integers of each lane, the
    first group of the window and row tiles before it, then of the lane's group the first row, the
    end, and the row tiles up to there, those before the window included.

    Attributes:
        offsets: (groups,), Int32: where each group ends; the first begins at 0.
        tiles_n: Along N.
        rows_per_tile: Known while tracing.
        width: Preferred, of a band of row tiles; see `preferred_band_widths`.
    """

    offsets: cute.Tensor
    tiles_n: Int32
    rows_per_tile: int
    width: int

    @property
    def groups(self) -> Int32:
        return self.offsets.shape[0]

    @cute.jit
    def start(self) -> tuple:
        """The state that a first search begins with."""
        return self._window(Int32(0), Int32(0), Int32(0))

    @cute.jit
    def start_at(self, index: Int32) -> tuple:
        """The same of one that looks for `index`, or for a tile behind: of many groups it begins
        near that one, as every lane counts the row tiles of a share of them first."""
        window, before, first_row = Int32(0), Int32(0), Int32(0)
        if self.groups > WARP:
            share = (self.groups + (WARP - 1)) // WARP
            first = cutlass.min(cute.arch.lane_idx() * share, self.groups)
            end = cutlass.min(first + share, self.groups)
            if first > 0:
                first_row = self.offsets[first - 1]
            tiles, row = Int32(0), first_row
            for group in cutlass.range(first, end, unroll=8):
                end_row = self.offsets[group]
                tiles += self._row_tiles(row, end_row)
                row = end_row
            through = summed_through(tiles)
            beyond = cute.arch.vote_ballot_sync(through * self.tiles_n > index)
            lane = cutlass.min(WARP - cute.arch.popc(beyond), WARP - 1)
            window, before = _of_lane(first, lane), _of_lane(through - tiles, lane)
            first_row = _of_lane(first_row, lane)
        return self._window(window, before, first_row)

    @cute.jit
    def find(self, state: tuple, index: Int32) -> tuple:
        """(whether there is such a tile, the tile, state for the next search)

        index: Of the tile; not less than that of the last search.
        """
        window, before, first_row, end_row, through = state
        beyond = cute.arch.vote_ballot_sync(through * self.tiles_n > index)
        while (beyond == 0) & (window + WARP < self.groups):
            window, before, first_row, end_row, through = self._window(
                window + WARP, _of_lane(through, WARP - 1), _of_lane(end_row, WARP - 1)
            )
            beyond = cute.arch.vote_ballot_sync(through * self.tiles_n > index)
        lane = WARP - cute.arch.popc(beyond)  # tiles are more with every lane
        found = beyond != 0
        tile = self._tile(index, window + lane, first_row, end_row, through, lane)
        return found, tile, (window, before, first_row, end_row, through)

    def count(self, state: tuple) -> Int32:
        """Of all tiles; state: of a search that has found none."""
        return _of_lane(state[-1], WARP - 1) * self.tiles_n

    @cute.jit
    def _window(self, window: Int32, before: Int32, first_row: Int32) -> tuple:
        """The state of the groups from `window` on, of which the first begins at `first_row`."""
        lane = cute.arch.lane_idx()
        end_row = self.offsets[cutlass.min(window + lane, self.groups - 1)]
        previous = cute.arch.shuffle_sync_up(end_row, offset=1)
        if lane > 0:
            first_row = previous
        through = before + summed_through(self._row_tiles(first_row, end_row))
        return window, before, first_row, end_row, through

    @cute.jit
    def _tile(self, index, group, first_row, end_row, through, lane) -> GroupTile:
        """lane: That has the group; the others' rows and tiles are of other groups."""
        first_row, end_row = _of_lane(first_row, lane), _of_lane(end_row, lane)
        tiles = self._row_tiles(first_row, end_row)
        first_tile = _of_lane(through, lane) - tiles
        m, n = self._coordinates(index - first_tile * self.tiles_n, tiles)
        return GroupTile(group, first_row, end_row, m, n, first_tile, tiles)

    def _row_tiles(self, first_row: Int32, end_row: Int32) -> Int32:
        return (
            cutlass.max(end_row - first_row, 0) + (self.rows_per_tile - 1)
        ) // self.rows_per_tile

    @cute.jit
    def _coordinates(self, index: Int32, tiles_m: Int32) -> tuple:
        """(m, n) of the index-th tile of a group."""
        width = cutlass.max(cutlass.min(Int32(self.width), tiles_m), 1)
        band = index // (width * self.tiles_n)
        in_band = index - band * (width * self.tiles_n)
        own_width = cutlass.max(cutlass.min(width, tiles_m - band * width), 1)
        n = in_band // own_width
        m = band * width + in_band - n * own_width
        if band % 2 == 1:
            n = self.tiles_n - 1 - n
        return m, n


def _of_lane(value: Int32, lane: Int32) -> Int32:
    return cute.arch.shuffle_sync(value, offset=lane)
