"""Plots are drawn from the recorded rows, and nothing else."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from support.benchmarks import script

plots, tables = script("plots"), script("tables")


def row(m, ratio, origin="", element="bf16", verified=True):
    operations, amount = 2 * m * 4096 * 4096, 2 * (m * 8192 + 4096 * 4096)
    return {
        "problem": f"{m}x4096x4096 (M x N x K) TN {element}",
        "subject": "ours<&>",
        "subject_us": 10.0,
        "peer": "torch.mm",
        "peer_us": 10.0 * ratio,
        "ratio": ratio,
        "verified": verified,
        "policy": "eager, cold L2",
        "env": {"gpu": "NVIDIA H200"},
        "date": "2026-01-01",
        "operations": operations,
        "bytes": amount,
        "origin": origin,
    }


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "h200"
    folder.mkdir()
    few = [row(2**i, 0.9 + 0.05 * i) for i in range(6)]
    many = [row(1 + 64 * i, 0.8 + 0.01 * i, f"Model{i % 5} layer") for i in range(40)]
    (folder / "gemm-few.json").write_text(json.dumps(few))
    (folder / "gemm-many.json").write_text(json.dumps(many))
    (folder / "gemm-wrong.json").write_text(json.dumps([row(1, 9.0, verified=False)]))
    (folder / "gemm-candidates.json").write_text(json.dumps({"kernels": {}, "problems": []}))
    host = row(1, 1.0)
    del host["operations"], host["bytes"]
    (folder / "host.json").write_text(json.dumps([host]))
    return tmp_path


def test_the_files_are_what_the_rows_say():
    found = {path.name: path.read_text() for path in plots.PLOTS.glob("*.svg")}
    assert found == plots.drawn()


def test_every_gemm_suite_has_a_plot_and_the_gpu_a_roofline(results):
    names = set(plots.drawn(results))
    assert names == {"h200-gemm-few.svg", "h200-gemm-many.svg", "h200-roofline.svg"}


def test_without_rows_nothing_is_drawn(tmp_path):
    assert plots.drawn(tmp_path) == {}


def test_pictures_are_the_same_every_time(results):
    assert plots.drawn(results) == plots.drawn(results)


def test_pictures_are_well_formed_and_follow_dark_mode(results):
    for picture in plots.drawn(results).values():
        ElementTree.fromstring(picture)
        assert "prefers-color-scheme: dark" in picture


def test_everything_lies_within_the_picture(results):
    for name, picture in plots.drawn(results).items():
        root = ElementTree.fromstring(picture)
        _, _, width, height = map(float, root.get("viewBox").split())
        for element in root.iter():
            for attribute in ("x", "x1", "x2", "cx"):
                assert 0 <= float(element.get(attribute, 1)) <= width, name
            for attribute in ("y", "y1", "y2", "cy"):
                assert 0 <= float(element.get(attribute, 1)) <= height, name


def test_higher_ratios_are_further_to_the_right(results):
    picture = plots.drawn(results)["h200-gemm-few.svg"]
    dots = [e for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("circle")]
    places = [float(dot.get("cx")) for dot in dots]
    assert len(places) == 6
    assert places == sorted(places)


def test_a_point_for_every_problem(results):
    picture = plots.drawn(results)["h200-gemm-many.svg"]
    origins = 5
    assert picture.count("<circle") == 40 + origins
    assert picture.count("Model3") > 0


def test_a_gpu_whose_ceilings_are_not_known_has_no_roofline(results):
    """And comes behind one of more suites."""
    folder = results / "a100"
    folder.mkdir()
    other = {**row(64, 0.9), "env": {"gpu": "NVIDIA A100"}}
    (folder / "gemm-few.json").write_text(json.dumps([other]))
    assert "a100-gemm-few.svg" in plots.drawn(results)
    assert "a100-roofline.svg" not in plots.drawn(results)
    text = tables.overview(results)
    assert "a100-roofline" not in text
    assert text.index("on-h200") < text.index("on-a100")


def test_documents_refer_to_pictures_that_are_drawn_and_to_all_of_them(results):
    in_readme, in_docs = tables.overview(results), tables.document(results)
    for name in plots.drawn(results):
        if name.endswith("-roofline.svg"):
            assert f"(docs/plots/{name})" in in_readme
        else:
            assert f"(plots/{name})" in in_docs
    assert in_readme.count("plots/") + in_docs.count("plots/") == 3


def test_check_says_whether_the_files_are_up_to_date(results, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "PLOTS", tmp_path / "plots")
    everything = plots.drawn(results)
    monkeypatch.setattr(plots, "drawn", lambda: everything)
    assert plots.main(["--check"]) == 1
    assert plots.main([]) == 0
    assert plots.main(["--check"]) == 0
    (tmp_path / "plots" / "h200-old.svg").write_text("")
    assert plots.main(["--check"]) == 1
    plots.main([])
    assert not (tmp_path / "plots" / "h200-old.svg").exists()
