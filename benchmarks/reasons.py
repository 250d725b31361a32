"""Why a product is slower than its peer, as far as the rows tell: what the choice loses against the
best of all our candidates, and how much of what the multiprocessors compute is of the matrix.

Both are facts of the kernel that was timed, not guesses: the first from the times of candidates,
the second from its tiles.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from kernel_api.providers.cutedsl.gemm.sm90_design import resident_clusters

#: Newer ones win.
CANDIDATES = ("gemm-candidates.json", "gemm-candidates-tuned.json")

#: A choice that loses less is as good as the best, and tiles that are filled so far are full.
_NOTICED, _FULL = 0.02, 0.95

_SIZES = re.compile(r"(\d+)x(\d+)x\d+ \(M x N x K\)")
_TILE = re.compile(r"tile[^_]*")

Row = dict[str, Any]


class Candidates:
    """The times of all our kernels for the problems that the model is fitted to.

    files: As they are, older ones first.
    """

    def __init__(self, *files: dict[str, Any]) -> None:
        self._designs = {n: k["candidate"] for file in files for n, k in file["kernels"].items()}
        self._times = [
            {one["problem"]: one["times_us"] for one in file["problems"]} for file in files
        ]

    @classmethod
    def beside(cls, folder: Path) -> Candidates:
        paths = (folder / name for name in CANDIDATES)
        return cls(*(json.loads(path.read_text()) for path in paths if path.exists()))

    def reason(self, row: Row) -> str:
        """What is known of a row; nothing of one that is ahead of its peer, or of no candidate."""
        design = self._designs.get(row["subject"])
        if row["ratio"] >= 1 or design is None:
            return ""
        found = [self._choice(row), _tiles(row, design)]
        if found == ["", ""]:
            return "its choice is the best and its tiles are full: the loop itself"
        return "; ".join(filter(None, found))

    def _choice(self, row: Row) -> str | None:
        """What the choice loses; nothing if it does not, None if that is not known."""
        known = (file.get(row["problem"], {}) for file in reversed(self._times))
        times = next((one for one in known if row["subject"] in one), None)
        if times is None:
            return None
        chosen = times[row["subject"]]
        best = min(times, key=lambda name: times[name])
        lost = 1 - times[best] / chosen
        if lost < _NOTICED:
            return ""
        tile = _TILE.search(best)
        return f"choice: `{tile[0] if tile else best}` takes {lost:.0%} less"


def _tiles(row: Row, design: dict[str, Any]) -> str | None:
    """How much of the tiles that fit into whole waves the matrix fills; nothing if that is about
    all, None if it is not known."""
    sizes = _SIZES.match(row["problem"])
    multiprocessors = row["env"].get("multiprocessors")
    if design["stream_k"] or design.get("even_k"):
        return ""
    if sizes is None or multiprocessors is None:
        return None
    M, N = int(sizes[1]), int(sizes[2])
    if design["swap_ab"]:
        M, N = N, M
    tile, cluster = design["tile_shape"], [*design["cluster_shape"], 1][:3]
    rows, columns = tile[0] * cluster[0], tile[1] * cluster[1]
    units = math.ceil(M / rows) * math.ceil(N / columns) * design["split_k"] // cluster[2]
    resident = resident_clusters(multiprocessors, math.prod(cluster))
    waves = math.ceil(units / resident)
    held = waves * resident * rows * columns * cluster[2] / design["split_k"]
    filled = M * N / held
    if filled >= _FULL:
        return ""
    count = "one wave" if waves == 1 else f"{waves} waves"
    return f"tiles: the matrix fills {filled:.0%} of {count} of {resident} clusters"
