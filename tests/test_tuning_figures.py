"""What the rows of the suite tuning say."""

import pytest
from support.benchmarks import script

figures = script("tuning_figures").figures


def row(ratio, first, *runs, **further):
    return {
        "ratio": ratio,
        "subject": next(iter(runs[0])),
        "first": first,
        "runs": list(runs),
        **further,
    }


def test_regret_flips_and_replays_are_told():
    found = [
        row(
            1.21,
            "b",
            {"a": [10.0, 20], "b": [12.0, 20], "c": [9.0, 5], "d": "WRONG"},
            {"b": [10.0, 20], "a": [11.0, 20]},
            replays={"graph": 1.02, "eager": 1.5},
        ),
        row(1.0, "a", {"a": [10.0, 20]}, {"a": [10.0, 20]}, replays={"graph": 0.99, "eager": 1.1}),
    ]
    gain, model, flips, eager, graph = figures(found)
    assert gain == "2 problems: peer / tuned 1.100, worst 1.000"
    # c fell behind after five rounds: its time is of another field.
    assert model.startswith("the model's first choice: regret 9.54% (geometric mean), 20.00% (wor")
    assert model.endswith("the best in 50%")
    assert flips.startswith("the second run chose another in 50.0%") and "10.00% (worst)" in flips
    assert eager.endswith("eager mode, over the stored time: median 1.300, farthest 50.00%")
    assert graph.endswith("graph mode, over the stored time: median 1.005, farthest 2.00%")


def test_a_run_without_replays_tells_the_rest():
    assert len(figures([row(1.0, "a", {"a": [1.0, 3]}, {"a": [1.0, 3]})])) == 3
    with pytest.raises(KeyError):
        figures([row(1.0, "b", {"a": [1.0, 3]}, {"a": [1.0, 3]})])
