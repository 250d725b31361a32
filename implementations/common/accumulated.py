"""An output that is added to: D += what an epilogue makes of the accumulators."""

import cutlass.cute as cute
from cutlass import Numeric

from .epilogue import Epilogue, Finish, Thread


class Accumulated(Epilogue):
    """An epilogue whose D is added to D as it was, its last operand: (L, M, N).

    A thread reads an element before any thread of its warp writes it, and nobody else does either;
    so nothing outside of D is read, whatever is made of it.

    Args:
        epilogue: None: D is the accumulators.
    """

    def __init__(self, epilogue: Epilogue | None):
        self.epilogue = epilogue = epilogue or Finish()
        self.kinds = (*epilogue.kinds, "lmn")
        self.full = epilogue.full
        self.per_block = epilogue.per_block
        self.reduced = epilogue.reduced
        self.bundle = epilogue.bundle
        self.halves = epilogue.halves
        self.heads = epilogue.heads
        self.spans_row = epilogue.spans_row
        self.conversions = epilogue.conversions

    def element(self, output: int, thread: Thread, half: int, column: int) -> Numeric:
        value = self.epilogue.element(output, thread, half, column)
        return value if output else value + self._before(thread, half, column)

    def _before(self, thread: Thread, half: int, column: int) -> Numeric:
        key = ("before", half, column)
        if key not in thread.memory:
            D = self.full[0]
            n = thread.column_of(column, D.lane_columns, D.columns)
            value = _load_inside(thread.operands[-1], thread.row_of(half), n, thread.batch)
            thread.memory[key] = self.conversions.widened(value)
        return thread.memory[key]

    def factors(self, output: int, thread: Thread, half: int, column: int) -> tuple | None:
        return self.epilogue.factors(output, thread, half, column) if output else None

    def reads(self, bundle: int) -> list[tuple]:
        return self.epilogue.reads(bundle)

    def fetch(self, thread: Thread, bundle: int) -> None:
        super().fetch(thread, bundle)
        for half, column in self.places(0, bundle):
            self._before(thread, half, column)

    def finished(self, output: int, value: Numeric, extents: tuple) -> Numeric:
        return self.epilogue.finished(output, value, extents)


@cute.jit
def _load_inside(mX: cute.Tensor, row, column, batch) -> Numeric:
    """An element of (M, N, L); 0 beyond its rows and columns."""
    value = mX.element_type(0)
    if (row < mX.shape[0]) & (column < mX.shape[1]):
        value = mX[row, column, batch]
    return value
