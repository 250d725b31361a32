"""Write the README's benchmark tables from the recorded rows.

    python benchmarks/tables.py [--check]

One table per GPU and suite: for every problem the fastest verified subject beside its peer.
``--check`` changes nothing and fails if the README is not what the rows say.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
NOTHING = "No rows are recorded yet; `benchmarks/` has the scripts."

Row = dict[str, Any]


def best_rows(rows: list[Row]) -> list[Row]:
    """The fastest verified row of each problem, in the order of the file."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["verified"]:
            known = best.setdefault(row["problem"], row)
            if row["subject_us"] < known["subject_us"]:
                best[row["problem"]] = row
    return list(best.values())


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(gpu: str, suite: str, rows: list[Row]) -> str:
    """Markdown; the environment stands under it, because times mean nothing without."""
    best = best_rows(rows)
    lines = [
        f"### {suite} on {gpu}",
        "",
        "| problem | kernel | time | peer | its time | peer / kernel |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['problem']} | `{r['subject']}` | {r['subject_us']:.1f} us | {r['peer']} "
        f"| {r['peer_us']:.1f} us | {r['ratio']:.3f} |"
        for r in best
    ]
    mean = geometric_mean([r["ratio"] for r in best])
    versions = ", ".join(f"{name} {value}" for name, value in best[0]["env"].items())
    lines += ["", f"Geometric mean {mean:.3f}. {best[0]['policy']}; {best[0]['date']}; {versions}."]
    return "\n".join(lines)


def document(results: Path = RESULTS) -> str:
    """All tables, or a sentence where nothing is recorded."""
    tables = []
    for path in sorted(results.glob("*/*.json")):
        rows = json.loads(path.read_text())
        if best_rows(rows):
            tables.append(table(path.parent.name, path.stem, rows))
    return "\n\n".join(tables) or NOTHING


def updated(readme: str, text: str) -> str:
    """The README with the part between the markers replaced."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = README.read_text()
    wanted = updated(found, document())
    if options.check:
        return int(found != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
