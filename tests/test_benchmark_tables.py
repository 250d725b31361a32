"""The README's benchmark tables come from the recorded rows."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def row(problem, subject, subject_us, verified=True):
    return {
        "problem": problem,
        "subject": subject,
        "subject_us": subject_us,
        "peer": "torch.mm",
        "peer_us": 100.0,
        "ratio": 100.0 / subject_us,
        "verified": verified,
        "policy": "eager",
        "env": {"gpu": "NVIDIA H200"},
        "date": "2026-01-01",
    }


def test_readme_says_what_the_rows_say():
    readme = tables.README.read_text()
    assert readme == tables.updated(readme, tables.document())


def test_the_fastest_verified_kernel_of_a_problem_is_shown(tmp_path):
    rows = [row("a", "slow", 50.0), row("a", "fast", 25.0), row("a", "wrong", 1.0, verified=False)]
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "gemm-bf16.json").write_text(json.dumps(rows))
    text = tables.document(tmp_path)
    assert "| a | `fast` | 25.0 us | torch.mm | 100.0 us | 4.000 |" in text
    assert "slow" not in text
    assert "wrong" not in text
    assert "Geometric mean 4.000" in text


def test_without_rows_there_is_a_sentence(tmp_path):
    assert tables.document(tmp_path) == tables.NOTHING


def test_only_what_stands_between_the_markers_changes():
    readme = f"before\n{tables.START}\nold\n{tables.END}\nafter\n"
    expected = f"before\n{tables.START}\nnew\n{tables.END}\nafter\n"
    assert tables.updated(readme, "new") == expected
