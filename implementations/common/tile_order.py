"""The order in which a persistent kernel visits the tiles of its output.

Tiles that run at the same time should share rows of A and columns of B in L2. The output is cut
along its shorter side into bands; a band is visited lengthwise, `width` clusters at a time, and
every second band backwards, so that a band begins with the operand that the last one ended on.

          long side →
    0  2  4  6  8  10      band 0 (width 2)
    1  3  5  7  9  11
    22 20 18 16 14 12      band 1, backwards
    23 21 19 17 15 13

Those whose numbers follow each other share the operand of the long side. If they are to share the
other one, a band is visited in blocks, each of them lengthwise first (`BlockedTileOrder`):

    0  1  2  3  8  9       band 0 (width 2), in blocks of 4 along it
    4  5  6  7  10 11
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

Divisor = cute.FastDivmodDivisorV2


@dataclass
class TileOrder:
    """Run-time facts, made on the host and passed to the kernel; unit: one cluster of tiles."""

    total: Int32  # clusters in all batches
    per_batch: Divisor
    per_band: Divisor
    width: Divisor  # of a band
    last_width: Divisor  # of the last band, which may be narrower
    whole_bands: Int32
    length: Int32  # the long side
    bands_cut_m: Int32  # 1: M is the short side, 0: N is

    @cute.jit
    def coordinates(self, index: Int32) -> tuple:
        """Cluster coordinates (m, n) and batch l of the index-th cluster."""
        batch, in_batch = divmod(index, self.per_batch)
        band, in_band = divmod(in_batch, self.per_band)
        along, across = self._in_band(Int32(band), Int32(in_band))
        if band % 2 == 1:
            along = self.length - 1 - along
        m, n = along, across
        if self.bands_cut_m == 1:
            m, n = across, along
        return m, n, Int32(batch)

    @cute.jit
    def _in_band(self, band: Int32, in_band: Int32) -> tuple:
        """(along, across) of a place in a band that is visited forwards."""
        along, across = self._divided(band, in_band, self.width, self.last_width)
        return along, band * Int32(self.width.divisor) + across

    @cute.jit
    def _divided(self, band: Int32, in_band: Int32, whole: Divisor, last: Divisor) -> tuple:
        """(quotient, remainder) of a place, by what a whole band has or by what the last one has"""
        many, rest = Int32(0), Int32(0)
        if band < self.whole_bands:
            quotient, remainder = divmod(in_band, whole)
            many, rest = Int32(quotient), Int32(remainder)
        else:
            quotient, remainder = divmod(in_band, last)
            many, rest = Int32(quotient), Int32(remainder)
        return many, rest


NEIGHBOURS = 4  # clusters that follow each other and share an operand


@dataclass
class BlockedTileOrder(TileOrder):
    """The same for neighbours that share an operand, where they are to: see `make_tile_order`."""

    share: Int32  # 1: they are
    per_block: Divisor
    per_last_block: Divisor  # of the last band
    last_depth: Divisor  # of the last block of a band, along it
    blocks: Int32  # 1: bands are visited in blocks, as the long side does not have that operand

    @cute.jit
    def _in_band(self, band: Int32, in_band: Int32) -> tuple:
        along, across = Int32(0), Int32(0)
        if self.blocks == 0:
            along, across = TileOrder._in_band(self, band, in_band)
        else:
            block, in_block = self._divided(band, in_band, self.per_block, self.per_last_block)
            row, place = in_block // NEIGHBOURS, in_block % NEIGHBOURS
            if (block + 1) * NEIGHBOURS > self.length:
                quotient, remainder = divmod(in_block, self.last_depth)
                row, place = Int32(quotient), Int32(remainder)
            along = block * NEIGHBOURS + place
            across = band * Int32(self.width.divisor) + row
        return along, across


@cute.jit
def make_tile_order(
    clusters_m: Int32,
    clusters_n: Int32,
    batches: Int32,
    band_widths: tuple,
    shared: cutlass.Constexpr[str] = "",
    share: Boolean | bool = True,
) -> TileOrder:
    """
    Args:
        band_widths: The preferred width, in clusters, of a band cut along M and along N.
        shared: The operand that clusters which follow each other are to share: `"a"`, `"b"`,
            neither, or of 16 of them 4 either one, `"ab"`.
        share: Whether they are to in this launch.
    """
    length, short, preferred = clusters_m, clusters_n, Int32(band_widths[1])
    bands_cut_m = Int32(0)
    if clusters_m < clusters_n:
        length, short, preferred = clusters_n, clusters_m, Int32(band_widths[0])
        bands_cut_m = Int32(1)
    width = cutlass.min(preferred, short)
    whole_bands = short // width
    last_width = short - whole_bands * width
    if last_width == 0:
        last_width = width
    facts = {
        "total": clusters_m * clusters_n * batches,
        "per_batch": Divisor(clusters_m * clusters_n),
        "per_band": Divisor(width * length),
        "width": Divisor(width),
        "last_width": Divisor(last_width),
        "whole_bands": whole_bands,
        "length": length,
        "bands_cut_m": bands_cut_m,
    }
    if cutlass.const_expr(shared == ""):
        return TileOrder(**facts)
    # All tiles of a single row or column have one operand in common anyway.
    wanted = Boolean(share) & (clusters_m > 1) & (clusters_n > 1)
    # Along a band that is cut along M is N, where tiles share A.
    blocks = wanted
    if cutlass.const_expr(shared != "ab"):
        blocks = wanted & ((bands_cut_m == 1) == Boolean(shared == "a"))
    return BlockedTileOrder(
        **facts,
        share=Int32(wanted),
        per_block=Divisor(width * NEIGHBOURS),
        per_last_block=Divisor(last_width * NEIGHBOURS),
        last_depth=Divisor((length - 1) % NEIGHBOURS + 1),
        blocks=Int32(blocks),
    )


def preferred_band_widths(
    tile_shape: tuple[int, ...], cluster_shape: tuple[int, int], concurrent_tiles: int
) -> tuple[int, int]:
    """Widths that make the footprint of the tiles running at once about square in elements."""
    side = (concurrent_tiles * tile_shape[0] * tile_shape[1]) ** 0.5
    return tuple(
        max(1, round(side / (tile * cluster)))
        for tile, cluster in zip(tile_shape[:2], cluster_shape, strict=True)
    )
