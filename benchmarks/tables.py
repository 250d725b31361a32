"""Write what the recorded rows say into the README, docs/benchmarks.md and docs/attention.md.

    python benchmarks/tables.py [--check]

In the README a line per suite. In docs/benchmarks.md a table per GPU and suite: for every problem
the fastest verified subject beside its peer, or the worst problems where there are many. In
docs/attention.md a line per kind of problem.
``benchmarks/plots.py`` draws what the documents refer to. ``--check`` changes nothing and fails if
a document is not what the rows say.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reasons import Candidates
from tuning_figures import figures

ROOT = Path(__file__).parents[1]
CONSTANTS = ROOT / "providers" / "cutedsl" / "gemm" / "model.json"
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
ATTENTION = ROOT / "docs" / "attention.md"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
NOTHING = "No rows are recorded yet; `benchmarks/` has the scripts."

#: Suites of more problems show so many of them, those with the lowest ratio.
MOST_PROBLEMS = 24
#: The GPU whose tables stand first: the one that the kernels were made on.
FIRST = "h200"
#: What some suites say beside, and the columns' names.
FURTHER = {
    "of_ceiling": "of the copy ceiling",
    "per_tensor_us": "us per tensor",
    "of_plain": "of the plain product's time",
    "peer_tflops": "TFLOP/s, the peer's",
}

SUITES_OF_ATTENTION = "sdpa-"

#: How often a row was timed, in its policy.
REPEATS = re.compile(r"(?<=median of )\d+")

#: Columns, of a line per suite.
OVERVIEW = [
    "suite", "what", "problems", "peers", "peer / kernel, geometric mean", "worst", "recorded",
]  # fmt: skip
#: What suites are about; those of `RESTED` are about the same.
ABOUT = {
    "elementwise": "chains of element-wise operations, sums of rows",
    "fusion-dense": "products with fused epilogues",
    "gemm-bf16": "six products of bfloat16",
    "gemm-decode": "1 to 64 rows times the weights of a layer",
    "gemm-extremes": "long sums of few outputs, or of few products, bfloat16",
    "gemm-f16": "six products of float16",
    "gemm-few-columns": "routers and adapters: narrow weights, bfloat16",
    "gemm-fp8": "products of e4m3: scales per tensor, per row, in blocks",
    "gemm-fp8-layers": "layers of language models in e4m3, 16 to 1024 rows",
    "gemm-layouts": "gradients of linear layers, bfloat16",
    "gemm-models": "layers of language models and odd sizes, bfloat16",
    "gemm-other": "products of int8 and tf32",
    "gemm-unaligned": "rows that begin anywhere in memory, bfloat16",
    "graph": "graphs, and a whole transformer block",
    "grouped": "products of groups of tokens, weight gradients too",
    "grouped-fusion": "products of groups with fused epilogues",
    "host": "what calls cost on the CPU",
    "indexed-rows": "rows gathered and scattered by an index",
    "moe-layer": "whole layers of experts",
    "moe-layer-8-bits": "layers of experts of 8 bits, beside those of 8 or 16",
    "norm": "norms of rows and their gradients",
    "norm-quantize": "rows in 8 bits with the scales that products take, of norms and as they are",
    "sdpa-backward": "gradients of attention",
    "sdpa-decode": "attention of one query to many keys, in pages too",
    "sdpa-decode-fp8": "the same of e4m3, queries of bfloat16 too, beside torch's of bfloat16",
    "sdpa-forward": "attention",
    "sdpa-latent": "attention of one query to latent vectors (MLA), in pages too",
    "sdpa-options": "attention whose scores are changed or hidden: windows, biases, functions, ...",
    "sdpa-options-backward": "gradients of attention whose scores are changed or hidden",
    "sdpa-packed": "attention of packed queries to keys in pages, decoding and chunks of prompts",
    "sdpa-short": "attention of short prompts, and of few queries to many keys",
    "sdpa-short-backward": "gradients of attention of few or short sequences",
    "transformer-layer": "whole Llama layers: prompts, decoding, training",
    "tuning": "the products of gemm-models, as the tuner chooses",
}
#: Ends the name of a suite that was timed while the GPU rests after every call.
RESTED = "-rested"

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


def table(gpu: str, suite: str, rows: list[Row], candidates: Candidates) -> str:
    """Markdown; the environment stands under it, because times mean nothing without. Of many
    problems, the worst come with the reason."""
    best = best_rows(rows)
    shown, sentence, reasons = best, "", {}
    if len(best) > MOST_PROBLEMS:
        shown = sorted(best, key=lambda row: row["ratio"])[:MOST_PROBLEMS]
        sentence = f"The {len(shown)} problems of {len(best)} with the lowest ratio. "
        reasons = {row["problem"]: candidates.reason(row) for row in shown}
    columns = ["problem", "kernel", "time", "peer", "its time", "peer / kernel"]
    further = [name for name in FURTHER if any(name in row for row in best)]
    columns += [FURTHER[name] for name in further]
    columns += ["why"] if any(reasons.values()) else []
    lines = [f"### {suite} on {gpu}", ""]
    if any("operations" in row for row in best):
        lines += [f"![{suite} on {gpu}](plots/{gpu}-{suite}.svg)", ""]
    lines += [_cells(columns), f"|{'---|' * len(columns)}"]
    for row in shown:
        cells = [row["problem"], f"`{row['subject']}`", f"{row['subject_us']:.1f} us"]
        cells += [row["peer"], f"{row['peer_us']:.1f} us", f"{row['ratio']:.3f}"]
        cells += [_further(row, name) for name in further]
        cells += [reasons[row["problem"]]] if any(reasons.values()) else []
        lines.append(_cells(cells))
    if _has_mean(best):
        sentence += f"Geometric mean {geometric_mean([r['ratio'] for r in best]):.3f}. "
    if all("runs" in row for row in best):
        sentence += "".join(f"{line[:1].upper()}{line[1:]}. " for line in figures(best))
    lines += ["", f"{sentence}{_circumstances(best)}."]
    return "\n".join(lines)


def _has_mean(best: list[Row]) -> bool:
    """Not where the peer is a part of the others."""
    return all(row["problem"] != row["peer"] for row in best)


def _further(row: Row, name: str) -> str:
    if name == "peer_tflops" and name in row:
        return f"{row['tflops']:.0f}, {row[name]:.0f}"
    return f"{row[name]:.3f}" if name in row else ""


def summary(results: Path = RESULTS) -> str:
    """Of the suites of attention: a line per kind of problem."""
    parts = []
    for gpu, suites in recorded(results).items():
        for suite, rows in suites.items():
            if suite.startswith(SUITES_OF_ATTENTION):
                parts.append(_summary(gpu, suite, best_rows(rows)))
    return "\n\n".join(parts) or NOTHING


def _summary(gpu: str, suite: str, best: list[Row]) -> str:
    of_ceiling = all("of_ceiling" in row for row in best)
    own, other = ("TB/s", "of the copy") if of_ceiling else ("TFLOP/s", "the peer's")
    columns = ["problems", "number", own, other, "peer / kernel, geometric mean", "worst"]
    lines = [f"### {suite} on {gpu}", "", _cells(columns), f"|{'---|' * len(columns)}"]
    for origin in dict.fromkeys(row["origin"] for row in best):
        kind = [row for row in best if row["origin"] == origin]
        ratios = [row["ratio"] for row in kind]
        if of_ceiling:
            rates = _range(kind, "tb_s", ".2f"), _range(kind, "of_ceiling", ".3f")
        else:
            rates = _range(kind, "tflops", ".0f"), _range(kind, "peer_tflops", ".0f")
        means = f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"
        lines.append(_cells([origin.replace(",", ", "), str(len(kind)), *rates, *means]))
    peers = ", ".join(dict.fromkeys(row["peer"] for row in best))
    return "\n".join([*lines, "", f"Peers: {peers}. {_circumstances(best)}."])


def _range(rows: list[Row], name: str, digits: str) -> str:
    values = [row[name] for row in rows]
    return f"{min(values):{digits}} to {max(values):{digits}}"


def _circumstances(rows: list[Row]) -> str:
    """How, when and with what the rows were timed; each of several where they differ."""
    seen: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row["env"].items():
            seen.setdefault(name, []).append(value)
    versions = ", ".join(f"{name} {_each(values)}" for name, values in seen.items())
    return f"{_policy(rows)}; {_dates(rows)}; {versions}"


def _policy(rows: list[Row]) -> str:
    """How the rows were timed; short problems are timed by graphs, long ones call by call."""
    parts = [row["policy"].partition(", ") for row in rows]
    repeats: dict[str, set[int]] = {}
    for _, _, rest in parts:
        found = repeats.setdefault(REPEATS.sub("{}", rest), set())
        found.update(int(number) for number in REPEATS.findall(rest))
    ways = _each(way.partition(" of ")[0] for way, _, _ in parts)
    rests = _each(rest.replace("{}", _each(sorted(found))) for rest, found in repeats.items())
    return ", ".join(filter(None, [ways, rests]))


def _each(values: Iterable[Any]) -> str:
    """The distinct ones."""
    return " or ".join(dict.fromkeys(map(str, values)))


def _dates(rows: list[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def _cells(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def recorded(results: Path = RESULTS) -> dict[str, dict[str, list[Row]]]:
    """The rows by GPU and suite, of suites that have a verified one; `FIRST`, then
    most suites first."""
    found: dict[str, dict[str, list[Row]]] = {}
    for path in sorted(results.glob("*/*.json")):
        rows = json.loads(path.read_text())
        if isinstance(rows, list) and best_rows(rows):  # what a model is fitted to is no suite
            found.setdefault(path.parent.name, {})[path.stem] = rows
    return dict(sorted(found.items(), key=lambda one: (one[0] != FIRST, -len(one[1]))))


def ceilings(rows: list[Row]) -> dict[str, Any] | None:
    """What the performance model knows of the GPU of a roofline's rows; None: there is none."""
    known: dict[str, Any] = json.loads(CONSTANTS.read_text())
    found = known.get(rows[0]["env"]["gpu"], {}) if rows else {}
    return found if "machine" in found else None


def overview(results: Path = RESULTS) -> str:
    """A line per suite, or a sentence where nothing is recorded."""
    parts = []
    for gpu, suites in recorded(results).items():
        parts.append(f"On an NVIDIA {gpu.upper()}:")
        products = [row for rows in suites.values() for row in rows if "operations" in row]
        if ceilings(products) is not None:
            parts.append(f"![Roofline of {gpu}](docs/plots/{gpu}-roofline.svg)")
        lines = [_cells(OVERVIEW), f"|{'---|' * len(OVERVIEW)}"]
        lines += [_overview(gpu, suite, best_rows(rows)) for suite, rows in suites.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or NOTHING


def _overview(gpu: str, suite: str, best: list[Row]) -> str:
    link = f"[{suite}](docs/benchmarks.md#{suite}-on-{gpu})"
    about = ABOUT.get(suite.removesuffix(RESTED), "")
    if suite.endswith(RESTED):
        about += ", the GPU rests between calls"
    ratios = [row["ratio"] for row in best]
    mean_and_worst = ["", ""]
    if _has_mean(best):
        mean_and_worst = [f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"]
    peers = ", ".join(dict.fromkeys(row["peer"] for row in best))
    return _cells([link, about, str(len(best)), peers, *mean_and_worst, _dates(best)])


def document(results: Path = RESULTS) -> str:
    """All tables, or a sentence where nothing is recorded."""
    parts = []
    for gpu, suites in recorded(results).items():
        candidates = Candidates.beside(results / gpu)
        parts += [table(gpu, suite, rows, candidates) for suite, rows in suites.items()]
    return "\n\n".join(parts) or NOTHING


def updated(written: str, text: str) -> str:
    """A document with the part between the markers replaced."""
    before, _, rest = written.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{text}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    found = {path: path.read_text() for path in (README, BENCHMARKS, ATTENTION)}
    texts = overview(), document(), summary()
    wanted = {p: updated(found[p], text) for p, text in zip(found, texts, strict=True)}
    if options.check:
        return int(found != wanted)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
