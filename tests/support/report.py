"""Rows for the tests of kernel_api.report, and what a page says, read as a program would."""

import html.parser
import json
from pathlib import Path

import kernel_api as ka
from kernel_api.tuning import Environment, Policy, Problem, Status
from kernel_api.tuning._row import Row
from support.tuning import measured, tensor

H200 = Environment(
    "NVIDIA H200", "9.0", 132, 580, {"torch": "2.11.0", "nvidia-cutlass-dsl": "4.8.1"}, Policy()
)
CANDIDATES = (
    Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200" / "gemm-candidates.json"
)
MESSAGES = (
    (Status.WRONG, "the error is 12.4 times what is allowed at (17, 33)"),
    (Status.COMPILE_ERROR, "DSLRuntimeError: <script>document.title = 'taken'</script>"),
    (Status.TIMEOUT, "it did not come to an end in 10 s"),
)


def row(kernel, problem, *times, environment=H200, **fields):
    return Row(environment, measured(kernel, problem, *times, environment=environment, **fields))


def recorded(count):
    """Rows of the first problems that the repository has times of, with three failures each."""
    rows = []
    plain = (p for p in json.loads(CANDIDATES.read_text())["problems"] if _is_plain(p))
    for one, _ in zip(plain, range(count), strict=False):
        M, N, K = (one["sizes"][name] for name in "MNK")
        args = ka.GemmArguments(tensor(M, K), tensor(N, K).t(), tensor(M, N))
        kernels = {k.metadata.kernel_name: k for k in ka.get_kernels(args, cc=90)}
        problem = Problem.of(args)
        known = {name: kernels[name] for name in one["times_us"] if name in kernels}
        for name, kernel in known.items():
            time = one["times_us"][name]
            clocks = {"sm_mhz": 1980, "memory_mhz": 3201}
            rows.append(row(kernel, problem, time, 1.01 * time, error_ratio=0.25, **clocks))
        torch = next(k for k in kernels.values() if k.metadata.provider == "torch")
        rows.append(row(torch, problem, one["peer_us"]))
        others = [k for n, k in kernels.items() if n not in known and k is not torch]
        for kernel, (status, message) in zip(others, MESSAGES, strict=False):
            rows.append(row(kernel, problem, status=status, message=message))
    return rows


def _is_plain(problem):
    return problem["problem"].endswith("TN bf16") and problem["sizes"]["L"] == 1


class Page(html.parser.HTMLParser):
    """What is in a page.

    Attributes:
        tables: By id, or by the key of their problem: rows of cells by the name of the column.
        rows: The attributes of every row of candidates.
        tags: Names of all elements, and how often each is there.
        headings: Text of the sections' headings by the key of the problem.
    """

    def __init__(self, text):
        super().__init__()
        self.tables, self.rows, self.tags, self.headings = {}, [], {}, {}
        self._table, self._columns, self._cell, self._section, self._heading = [], [], None, "", 0
        self.feed(text)

    def handle_starttag(self, tag, pairs):
        found = dict(pairs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag == "details":
            self._section = found["data-key"]
        elif tag == "summary":
            self._heading = True
        elif tag == "table":
            name = found.get("id") or (self._section if "candidates" in found["class"] else "")
            self._table, self._columns = self.tables.setdefault(name, []), []
        elif tag == "th":
            self._columns.append(found.get("data-column"))
        elif tag == "tr" and "data-key" in found:
            self._table.append({})
            if found["class"].startswith("candidate"):
                self.rows.append(found)
        elif tag == "td" and self._table and self._columns:
            self._cell = self._columns[len(self._table[-1])]
            self._table[-1][self._cell] = ""

    def handle_endtag(self, tag):
        if tag in ("td", "summary"):
            self._cell, self._heading = None, False

    def handle_data(self, data):
        if self._cell is not None:
            self._table[-1][self._cell] += data
        elif self._heading:
            self.headings[self._section] = self.headings.get(self._section, "") + data
