"""Every element of a tile belongs to one vector of one thread."""

import numpy as np
import pytest

from kernel_api.implementations.common.thread_grid import ThreadGrid


def times_covered(grid):
    """(along, across): how many threads have the element."""
    covered = np.zeros((grid.along, grid.across), int)
    for thread in range(grid.threads):
        along, first_across = grid.first(thread)
        for across in range(first_across, grid.across, grid.step)[: grid.copies]:
            covered[along : along + grid.vector, across] += 1
    return covered


@pytest.mark.parametrize("vector", [1, 2, 8])
@pytest.mark.parametrize(("along", "across"), [(64, 64), (16, 256), (128, 8), (8, 4)])
@pytest.mark.parametrize("threads", [128, 512])
def test_every_element_belongs_to_one_thread(threads, along, across, vector):
    grid = ThreadGrid(threads, along, across, vector)
    assert (times_covered(grid) == 1).all()


@pytest.mark.parametrize("threads", [32, 64, 128])
def test_threads_are_idle_where_the_tile_has_fewer_vectors(threads):
    grid = ThreadGrid(threads, along=16, across=8, vector=2)
    without_work = [t for t in range(threads) if grid.first(t)[1] >= grid.across]
    assert grid.idle_threads == bool(without_work) == (threads > 64)


@pytest.mark.parametrize(
    ("threads", "along", "vector"),
    [pytest.param(32, 64, 1, id="long row"), pytest.param(32, 4, 8, id="long vector")],
)
def test_rows_that_threads_cannot_lie_on_are_refused(threads, along, vector):
    with pytest.raises(ValueError, match=f"{threads} threads cannot lie on rows of {along}"):
        ThreadGrid(threads, along, 64, vector)
