"""The benchmark tables of the documents come from the recorded rows."""

import json

import pytest
from support.benchmarks import script

tables = script("tables")
Candidates = script("reasons").Candidates


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


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (tables.README, tables.overview),
        (tables.BENCHMARKS, tables.document),
        (tables.ATTENTION, tables.summary),
    ],
)
def test_documents_say_what_the_rows_say(path, text):
    written = path.read_text()
    assert written == tables.updated(written, text())


def test_overview_says_what_every_recorded_suite_is_about():
    suites = {suite for of_gpu in tables.recorded().values() for suite in of_gpu}
    assert {suite.removesuffix(tables.RESTED) for suite in suites} <= set(tables.ABOUT)


def test_overview_has_a_line_per_suite_that_leads_to_its_table(tmp_path):
    rows = [row("a", "slow", 50.0), row("a", "fast", 25.0), row("b", "fast", 100.0)]
    write(tmp_path, rows, "gemm-bf16-rested")
    link = "[gemm-bf16-rested](docs/benchmarks.md#gemm-bf16-rested-on-h200)"
    about = "six products of bfloat16, the GPU rests between calls"
    line = f"| {link} | {about} | 2 | torch.mm | 2.000 | 1.000 | 2026-01-01 |"
    assert line in tables.overview(tmp_path).splitlines()
    assert "### gemm-bf16-rested on h200" in tables.document(tmp_path)


def test_overview_has_no_mean_of_what_is_beside_a_part_of_itself(tmp_path):
    write(tmp_path, [row("torch.mm", "fast", 100.0), row("a whole call", "fast", 200.0)], "host")
    assert "| 2 | torch.mm |  |  | 2026-01-01 |" in tables.overview(tmp_path)


def test_the_fastest_verified_kernel_of_a_problem_is_shown(tmp_path):
    rows = [row("a", "slow", 50.0), row("a", "fast", 25.0), row("a", "wrong", 1.0, verified=False)]
    text = written(tmp_path, rows)
    assert "| a | `fast` | 25.0 us | torch.mm | 100.0 us | 4.000 |" in text
    assert "slow" not in text
    assert "wrong" not in text
    assert "Geometric mean 4.000" in text


def test_rows_of_several_runs_are_told_with_all_their_dates_and_policies(tmp_path):
    runs = [
        ("2026-01-05", "eager, cold L2, median of 20", "2.9"),
        ("2026-01-02", "CUDA graph of 9 calls on 3 operand sets, cold L2, median of 7", "2.9"),
        ("2026-01-03", "CUDA graph of 8 calls on 4 operand sets, cold L2, median of 7", "2.13"),
    ]
    rows = [
        {
            **row(f"p{n}", "kernel", 50.0),
            "date": date,
            "policy": policy,
            "env": {"gpu": "NVIDIA H200", "torch": torch},
            "origin": "one kind",
            "tflops": 1.0,
            "peer_tflops": 0.5,
        }
        for n, (date, policy, torch) in enumerate(runs)
    ]
    told = (
        "eager or CUDA graph, cold L2, median of 7 or 20; 2026-01-02 to 2026-01-05; "
        "gpu NVIDIA H200, torch 2.9 or 2.13."
    )
    assert told in written(tmp_path, rows, "sdpa-forward")
    assert told in tables.summary(tmp_path)
    assert "| 2.000 | 2.000 | 2026-01-02 to 2026-01-05 |" in tables.overview(tmp_path)


def test_what_is_beside_a_part_of_itself_has_no_mean(tmp_path):
    rows = [row("torch.mm", "fast", 100.0), row("a whole call", "fast", 200.0)]
    text = written(tmp_path, rows, "host")
    assert "| a whole call | `fast` | 200.0 us | torch.mm | 100.0 us | 0.500 |" in text
    assert "Geometric mean" not in text


def test_without_rows_there_is_a_sentence(tmp_path):
    assert tables.document(tmp_path) == tables.overview(tmp_path) == tables.NOTHING


def test_only_what_stands_between_the_markers_changes():
    readme = f"before\n{tables.START}\nold\n{tables.END}\nafter\n"
    expected = f"before\n{tables.START}\nnew\n{tables.END}\nafter\n"
    assert tables.updated(readme, "new") == expected


def write(tmp_path, rows, suite):
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / f"{suite}.json").write_text(json.dumps(rows))


def written(tmp_path, rows, suite="gemm-bf16"):
    """The document of one suite."""
    write(tmp_path, rows, suite)
    return tables.document(tmp_path)


def test_of_many_problems_the_worst_are_shown(tmp_path):
    rows = [row(f"p{i:03}", "kernel", 50.0 + i) for i in range(120)]
    text = written(tmp_path, rows)
    assert text.count("| `kernel` |") == tables.MOST_PROBLEMS
    assert "| p119 |" in text
    assert "| p000 |" not in text
    assert "The 24 problems of 120 with the lowest ratio" in text


def test_a_suite_with_a_ceiling_has_a_column_for_it(tmp_path):
    text = written(tmp_path, [{**row("a", "x", 50.0), "of_ceiling": 0.87}, row("b", "x", 50.0)])
    assert "| of the copy ceiling |" in text
    assert "| 2.000 | 0.870 |" in text
    assert "| 2.000 |  |" in text


def test_graphs_and_single_calls_are_both_named(tmp_path):
    short = {**row("a", "x", 5.0), "policy": "CUDA graph of 9 calls on 3 operand sets, cold L2"}
    text = written(tmp_path, [short, {**row("b", "x", 50.0), "policy": "eager, cold L2"}])
    assert "CUDA graph or eager, cold L2; 2026-01-01" in text


def test_times_of_candidates_are_no_table(tmp_path):
    assert written(tmp_path, {"kernels": {}, "problems": []}, "gemm-candidates") == tables.NOTHING


# Why a product is slower than its peer -------------------------------------------------------

DESIGN = {"tile_shape": [128, 256, 64], "cluster_shape": [2, 1, 1], "split_k": 1}
DESIGN |= {"stream_k": False, "swap_ab": False}
PROBLEM = "512x4096x1024 (M x N x K) TN bf16"


def reason(*, ratio=0.9, times=(), problem=PROBLEM, **design):
    candidate = {"candidate": {**DESIGN, **design}}
    problems = [{"problem": problem, "times_us": dict(times)}]
    found = Candidates({"kernels": {"tile128x256x64_a": candidate}, "problems": problems})
    env = {"gpu": "NVIDIA H200", "multiprocessors": 132}
    return found.reason(
        {"problem": problem, "subject": "tile128x256x64_a", "ratio": ratio, "env": env}
    )


def test_a_reason_says_what_the_choice_loses():
    times = {"tile128x256x64_a": 10.0, "tile64x128x64_b": 9.0}
    assert reason(times=times).startswith("choice: `tile64x128x64` takes 10% less; tiles: ")
    assert "choice" not in reason(times={**times, "tile64x128x64_b": 9.9})


def test_newer_times_of_a_choice_win():
    row = {"problem": PROBLEM, "subject": "tile_a", "ratio": 0.9, "env": {}}

    def file(**times):
        kernels = {name: {"candidate": DESIGN} for name in times}
        return {"kernels": kernels, "problems": [{"problem": PROBLEM, "times_us": times}]}

    older, newer = file(tile_a=10.0, tile_b=9.0), file(tile_a=10.0, tile_c=8.0)
    assert "20% less" in Candidates(older, newer).reason(row)
    assert "10% less" in Candidates(older, file(tile_c=8.0)).reason(row)


@pytest.mark.parametrize(
    ("words", "problem", "design"),
    [
        ("fills 48% of one wave of 66 clusters", PROBLEM, {}),
        ("fills 48% of one wave of 66 clusters", "4096x512x1024 (M x N x K)", {"swap_ab": True}),
        ("fills 73% of 2 waves of 66 clusters", "1536x4096x1024 (M x N x K)", {}),
        (
            "fills 82% of one wave of 39 clusters",
            "128x4096x14336 (M x N x K)",
            {"tile_shape": [128, 128, 64], "cluster_shape": [1, 1, 3], "split_k": 3},
        ),
    ],
)
def test_a_reason_says_how_full_tiles_and_waves_are(words, problem, design):
    assert words in reason(problem=problem, **design)


@pytest.mark.parametrize("design", [{"cluster_shape": [1, 1, 1]}, {"stream_k": True}])
def test_nothing_is_said_of_full_tiles(design):
    times = {"tile128x256x64_a": 10.0}
    found = reason(problem="1024x4096x64 (M x N x K)", times=times, **design)
    assert found == "its choice is the best and its tiles are full: the loop itself"


def test_nothing_is_said_of_what_is_not_known():
    assert reason(problem="1024x4096x64 (M x N x K)") == ""
    assert reason(problem="something", times={"tile128x256x64_a": 10.0}) == ""


def test_what_is_ahead_or_no_candidate_needs_no_reason():
    assert reason(ratio=1.0) == ""
    assert Candidates().reason({"subject": "x", "ratio": 0.5}) == ""


def test_reasons_stand_beside_the_worst(tmp_path):
    rows = [row(f"p{i:03}", "kernel", 150.0 + i) for i in range(30)]
    problems = [{"problem": f"p{i:03}", "times_us": {"kernel": 150.0 + i}} for i in range(30)]
    design = {"candidate": {**DESIGN, "stream_k": True}}
    found = {"kernels": {"kernel": design}, "problems": problems}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "gemm-candidates.json").write_text(json.dumps(found))
    (tmp_path / "h200" / "gemm-models.json").write_text(json.dumps(rows))
    assert tables.document(tmp_path).count("the loop itself |") == tables.MOST_PROBLEMS
