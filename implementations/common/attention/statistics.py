"""Where numbers of rows of scores are written."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..conversion import select
from .behind import Behind, fill_behind
from .sequences import Sequence
from .softmax import STATISTICS, Finished
from .values import Values


def where_seen(exists: Boolean, row: Finished) -> Finished:
    """The statistics of a row that sees nothing where its query does not exist."""
    found = {
        name: select(exists, getattr(row, name), Float32(nothing))
        for name, nothing in STATISTICS.items()
    }
    return row._replace(**found)


def statistics_of(values: Values) -> dict:
    """Those that are asked for, by name: (B,H,S), or packed (H,T)."""
    return {name: values[name] for name in STATISTICS if name in values}


def statistics_rows(values: Values, batch: Int32, head: Int32, sequence: Sequence) -> dict:
    """The same of a head of a sequence: (S,)."""
    given = statistics_of(values)
    if "cu_seqlens_q" in values:
        first = sequence.first_query
        return {n: cute.domain_offset((first,), one[head, None]) for n, one in given.items()}
    return {name: one[batch, head, None] for name, one in given.items()}


def fill_statistics_behind(values: Values, head: Int32, behind: Behind) -> None:
    """Of packed sequences."""
    for name, statistic in statistics_of(values).items():
        fill_behind(statistic[head, None], behind, STATISTICS[name])


def write_statistics(statistics: dict, place, row: Finished) -> None:
    """place: Of the row in each of the statistics."""
    for name, statistic in statistics.items():
        statistic[place] = getattr(row, name)
