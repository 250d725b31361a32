"""Pairs of rows in the tiles of a transposed product on Hopper: how TMA loads and stores them."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from ..common.epilogue import PAIR, places
from ..common.expert_matrices import ExpertMatrices
from ..common.paired_rows import PairedRows, PairedThread
from ..common.row_pairs import RowPairs
from .mma import WGMMA_M
from .output import Output

ROWS = 8  # that lie together: of a thread's two rows, the distance; of a swizzle, a whole one
PAIRS = WGMMA_M // 2  # of the rows of an instruction


def dealt_out(mX: cute.Tensor, pairs: RowPairs) -> cute.Tensor:
    """A K-major matrix (M, K, L) as TMA describes it: mode M is (8 rows, first or second of their
    pairs, steps of 8 rows). A box of 8 rows, both, and 4 steps holds 32 pairs.

    Steps overlap what pairs reach for: so blocks of pairs take no further mode, TMA has five.
    """
    (rows, *others), (pitch, *pitches) = mX.shape, mX.stride
    distance = pairs.distance(rows)
    shape = (ROWS, 2, (rows - distance) // ROWS)
    stride = (pitch, distance * pitch, ROWS * pitch)
    layout = cute.make_layout((shape, *others), stride=(stride, *pitches))
    return cute.make_tensor(mX.iterator, layout)


def in_order(coordinates: cute.Tensor, pairs: RowPairs, rows: Int32) -> cute.Tensor:
    """What TMA sees of such a matrix of so many rows, with its rows in the order of tiles."""
    (_, *others), ((row, both, step), *steps) = coordinates.shape, coordinates.stride
    along = PAIRS // ROWS
    shape, stride = (rows // WGMMA_M,), (step * along,)
    if pairs.granularity != "halves":
        block = pairs.granularity
        shape = (block // PAIRS, rows // (2 * block))
        stride = (step * along, step * (2 * block // ROWS))
    layout = cute.make_layout(
        ((ROWS, 2, along, *shape), *others), stride=((row, both, step, *stride), *steps)
    )
    return cute.make_tensor(coordinates.iterator, layout)


@dataclass(frozen=True)
class MatricesOfPairs(ExpertMatrices):
    """Matrices whose rows are dealt out in pairs, as TMA sees them."""

    row_pairs: RowPairs

    def at(self, address, shape, pitch):
        return dealt_out(super().at(address, shape, pitch), self.row_pairs)


class PairedOutput(Output):
    """Outputs with a row per pair: a group's block of 64 rows gives 32 of each.

    Few columns make a tile here, and few elements a subtile: threads put them one by one into
    shared memory.
    """

    subtile_rows = PAIRS

    def __init__(self, element_types: tuple, epilogue: PairedRows, *, tma_stores: tuple, **how):
        self.epilogue = epilogue
        super().__init__(
            self.of_parts(element_types), epilogue, tma_stores=self.of_parts(tma_stores), **how
        )

    def _tells_whole_tiles(self) -> bool:
        return False  # rows of a tile are counted in another order than those of the matrix

    def of_parts(self, of_outputs: tuple) -> tuple:
        return tuple(of_outputs[output] for output, _ in self.epilogue.parts)

    def views(self, mD: tuple) -> tuple:
        pairs = self.epilogue.row_pairs
        return tuple(
            pairs.rows_of(mD[output], half) if half in (0, 1) else mD[output]
            for output, half in self.epilogue.parts
        )

    def _threads(self, *args) -> list:
        """A thread's first row r of 16 is that of the pair r of 8."""
        found = []
        for thread in super()._threads(*args):
            own = {**vars(thread), "row": thread.row // (2 * ROWS) * ROWS + thread.row % ROWS}
            found.append(PairedThread(**own, row_pairs=self.epilogue.row_pairs))
        return found

    def _places(self, columns: int, lane_columns: int) -> list:
        return [place for place in places(columns, lane_columns) if place[0] == 0]

    def _tiled_store(self, j, major):
        return None

    def _put(self, j, fragment, to_shared, sD, tid):
        row, lane = tid // 32 * ROWS + tid % 32 // 4, tid % 4
        for i, (_, column) in enumerate(self._places(self.subtiles[j][1], PAIR)):
            sD[row, column + lane * PAIR] = fragment[i]
