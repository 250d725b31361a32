"""The page of measurements: kernel_api.report, and the command that writes it."""

import contextlib
import copy
import dataclasses
import html
import json
import sys
import time
from datetime import timedelta

import pytest
import torch
from support.report import H200, Page, recorded, row
from support.tuning import arguments, problem, some_kernels, tensor

import kernel_api as ka
from kernel_api import report
from kernel_api.arguments.norm import RmsNormArguments
from kernel_api.cli import main
from kernel_api.errors import ArgumentError
from kernel_api.report import _charts, _problem
from kernel_api.tuning import Environment, KernelIdentity, Policy, Problem, Status, Store
from kernel_api.tuning._roofs import roofs_of
from kernel_api.tuning._row import Row
from kernel_api.tuning._work import Work, work_of


@pytest.fixture(scope="module")
def kernels():
    return some_kernels()


@pytest.fixture(scope="module")
def torch_kernel():
    (found,) = ka.get_kernels(arguments(), cc=90, providers=["torch"])
    return found


@pytest.fixture(scope="module")
def real():
    return recorded(4)


def renamed(one, **metadata):
    """A row whose kernel's metadata say something else."""
    kernel = one.measurement.kernel
    identity = KernelIdentity({**copy.deepcopy(kernel.metadata), **metadata}, kernel.fingerprint)
    return Row(one.environment, dataclasses.replace(one.measurement, kernel=identity))


def only(tables):
    """The one table of candidates."""
    (found,) = (rows for key, rows in tables.items() if key not in ("", "summary"))
    return found


# What is in it ---------------------------------------------------------------------------


def test_every_row_is_in_the_page_with_its_status_and_message(real):
    page = Page(report.page(real))
    assert len(page.rows) == len(real)
    assert len(page.tables["summary"]) == 4
    shown = [one for key, rows in page.tables.items() if key not in ("", "summary") for one in rows]
    expected = [
        (one.measurement.kernel.name, one.measurement.status.value, one.measurement.message)
        for one in real
    ]
    found = [(one["kernel"], one["status"], one["message"]) for one in shown]
    assert sorted(found) == sorted(expected)


def test_a_problem_says_who_won_and_by_how_much(kernels, torch_kernel):
    rows = [
        row(kernels[0], problem(), 2.0, 2.0, 2.2),
        row(kernels[1], problem(), 1.5),
        row(kernels[2], problem(), status=Status.WRONG),
        row(torch_kernel, problem(), 3.0, error_ratio=0.125, sm_mhz=1980, memory_mhz=3201),
    ]
    page = Page(report.page(rows))
    (line,) = page.tables["summary"]
    assert line["problem"] == "gemm bf16"
    assert [line[f"size-{name}"] for name in "MNKL"] == ["256", "512", "128", "1"]
    assert line["winner"] == kernels[1].metadata.kernel_name
    assert (line["time"], line["second"], line["torch"]) == ("1.50", "1.333", "2.000")
    assert (line["passed"], line["failed"]) == ("3", "1\N{NO-BREAK SPACE}WRONG")
    work = work_of(problem())
    assert line["tflops"] == f"{work.operations / 1.5e6:.1f}"
    assert line["gbytes"] == f"{work.bytes / 1.5e3:.0f}"
    found = only(page.tables)
    assert [one["place"] for one in found] == ["1", "2", "3", ""]
    assert [one["ratio"] for one in found] == ["1.000", "1.333", "2.000", ""]
    assert [one["rounds"] for one in found] == ["1", "3", "1", ""]
    assert [one["spread"] for one in found] == ["0.0", "5.0", "0.0", ""]
    assert (found[2]["provider"], found[2]["family"]) == ("torch", "torch.mm")
    assert (found[2]["error"], found[2]["clocks"]) == ("0.125", "1980 / 3201")
    design = kernels[1].metadata.design
    assert found[0]["axis-tile_shape"] == "x".join(map(str, design.tile_shape))
    assert found[0]["axis-swap_ab"] == ("yes" if design.swap_ab else "no")
    assert found[0]["axis-stages"] == str(design.stages)
    assert found[2]["axis-stages"] == ""


def test_regret_is_of_the_first_choice_of_the_model(kernels, torch_kernel):
    expected = [1e6 * kernel.predict(arguments()) for kernel in kernels]
    assert sorted(expected) == expected
    times = (3.0, 2.0, 4.0)
    rows = [row(k, problem(), t) for k, t in zip(kernels, times, strict=True)]
    (line,) = Page(report.page([*rows, row(torch_kernel, problem(), 9.0)])).tables["summary"]
    assert line["regret"] == "1.500"
    failed = row(kernels[0], problem(), status=Status.OOM)
    text = report.page([failed, *rows[1:]])
    (line,) = Page(text).tables["summary"]
    assert line["regret"] == "1.000"
    assert "which is OOM; the first that passed is" in text
    found = only(Page(text).tables)
    assert [one["predicted"] for one in found if one["choice"] == "1"] == [f"{expected[0]:.2f}"]


def test_regret_of_a_fused_problem_is_known_by_the_graph_of_its_kernels():
    fused = ka.EpilogueArguments(lambda accum, bias: accum * 2 + bias, bias=tensor(512))
    args = arguments(epilogue=fused)
    found = ka.get_kernels(args, cc=90, providers=["cutedsl"])[:2]
    rows = [row(k, Problem.of(args), t) for k, t in zip(found, (2.0, 1.0), strict=True)]
    (line,) = Page(report.page(rows)).tables["summary"]
    assert line["regret"] == "2.000"
    assert line["options"].startswith("epilogue(bias) ")


def test_a_kernel_with_other_sources_is_shown_but_not_compared(kernels):
    now = row(kernels[0], problem(), 2.0)
    before = dataclasses.replace(
        now.measurement,
        kernel=KernelIdentity(now.measurement.kernel.metadata, {"sources": "older"}),
        times_us=(1.0,),
        date=now.measurement.date - timedelta(days=1),
    )
    page = Page(report.page([Row(H200, before), now]))
    assert [one["status"] for one in only(page.tables)] == ["PASSED", "PASSED (earlier)"]
    assert page.tables["summary"][0]["time"] == "2.00"


def test_environments_and_policies_are_kept_apart(kernels):
    other = Environment("cpu", None, None, None, {"torch": "2.13.0"}, Policy(l2="warm"))
    rows = [
        row(kernels[0], problem(), 2.0),
        row(kernels[0], problem(), 1.0, environment=other),
    ]
    text = report.page(rows)
    lines = Page(text).tables["summary"]
    assert sorted(one["environment"] for one in lines) == ["E1", "E2"]
    assert sorted(one["roof"] for one in lines)[0] == ""
    for words in ("NVIDIA H200", "l2 cold", "l2 warm", "nvidia-cutlass-dsl 4.8.1"):
        assert words in text


def test_a_problem_that_nothing_solves_is_in_the_page(kernels):
    page = Page(report.page([row(kernels[0], problem(), status=Status.TIMEOUT)]))
    assert page.tables["summary"][0]["winner"] == "none passed"
    assert only(page.tables)[0]["status"] == "TIMEOUT"


def test_without_rows_the_page_says_so():
    text = report.page([])
    assert "There are no measurements" in text
    assert Page(text).rows == []


def test_the_same_rows_make_the_same_page(real):
    assert report.page(real) == report.page(list(real))


# Safe to open ----------------------------------------------------------------------------


def test_nothing_is_fetched(real):
    text = report.page(real)
    for words in ("http://", "https://", "src=", "@import", "url(", "<iframe"):
        assert words not in text
    assert "default-src 'none'" in text


def test_texts_of_rows_are_escaped(kernels):
    evil = "</td><script>alert('x')</script><img src=x onerror=\"y\">&amp;"
    one = renamed(
        row(kernels[0], problem(), 1.0),
        kernel_name=evil,
        provider=evil,
        design={"type": "this:Design", "fields": {evil: evil, "tile_shape": [evil]}},
    )
    failed = row(kernels[1], problem(), status=Status.WRONG, message=evil)
    other = row(kernels[2], problem(), 2.0)
    environment = dataclasses.replace(H200, gpu=evil, packages={evil: evil})
    moved = dataclasses.replace(one.measurement, environment=environment.digest)
    text = report.page([one, failed, other, Row(environment, moved)])
    assert "<script>alert" not in text
    assert "<img" not in text
    page = Page(text)
    assert page.tags["script"] == 1
    assert evil in {
        row["provider"]
        for rows in page.tables.values()
        for row in rows
        if rows[0] and "provider" in row
    }


def test_text_that_is_no_unicode_is_written(kernels, tmp_path):
    lone = row(kernels[0], problem(), status=Status.WRONG, message="half of a pair: \ud800")
    report.write(tmp_path / "report.html", [lone])
    assert "half of a pair" in (tmp_path / "report.html").read_text()


# Kernels and problems that are not known here ---------------------------------------------


def test_families_that_are_not_here_have_no_prediction(kernels):
    unknown = renamed(
        row(kernels[0], problem(), 1.0),
        kernel_class={"class": "antigravity:Fusion"},
        provider="someone",
        design={
            "type": "antigravity:Design",
            "fields": {
                "warps": 8,
                "swizzle": None,
                "mma": {"dtype": "float16"},
                "nested": [[1, 2], {"a": 1, "b": 2}],
            },
        },
    )
    page = Page(report.page([unknown]))
    (one,) = only(page.tables)
    assert (one["family"], one["provider"]) == ("Fusion", "someone")
    assert (one["axis-warps"], one["axis-swizzle"], one["axis-mma"]) == ("8", "–", "float16")
    assert one["axis-nested"] == '1x2, {"a": 1, "b": 2}'
    assert "predicted" not in one
    assert page.tables["summary"][0]["regret"] == ""
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("design", [None, 3, [], {}, {"fields": 3}, {"fields": {"": []}}])
def test_any_metadata_is_shown(kernels, design):
    strange = renamed(
        row(kernels[0], problem(), 1.0), design=design, operands=design, kernel_class={}
    )
    assert len(Page(report.page([strange])).rows) == 1


def test_a_model_that_raises_makes_no_prediction(kernels, monkeypatch):
    def broken(self, args):
        raise RuntimeError("no model today")

    monkeypatch.setattr(type(kernels[0]), "predict", broken)
    (line,) = Page(report.page([row(kernels[0], problem(), 1.0)])).tables["summary"]
    assert line["regret"] == ""


@pytest.mark.parametrize(
    "change",
    [
        {"signature": []},
        {"signature": ["gemm", "?", 3]},
        {"signature": ["gemm", [["int3", 2, -1, None]], "float32", None]},
        {"sizes": {}},
    ],
)
def test_problems_that_cannot_be_described_are_in_the_page(kernels, change):
    strange = Problem.from_dict({**problem().to_dict(), **change})
    page = Page(report.page([row(kernels[0], strange, 1.0), row(kernels[1], strange, 2.0)]))
    assert len(page.rows) == 2


ANYTHING = (None, True, -1, 0, 1.5, 10**400, "", "text", [], [[]], {}, {"shape": [-2]})


def changed(value):
    """What a JSON value is with any one of its parts replaced by anything, or left out."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for part in changed(value[key]):
                other = copy.copy(value)
                other[key] = part
                yield other
            other = copy.copy(value)
            del other[key]
            yield other
    yield from ANYTHING


def test_rows_of_any_problem_make_a_page(kernels):
    rows = []
    fused = ka.EpilogueArguments(lambda accum, bias: accum + bias, bias=tensor(512))
    norm = RmsNormArguments(tensor(64, 128), tensor(64, 128), weight=tensor(128))
    for args in (arguments(epilogue=fused), norm):
        for data in changed(Problem.of(args).to_dict()):
            with contextlib.suppress(ArgumentError):
                rows.append(row(kernels[0], Problem.from_dict(data), 1.0))
    assert len(rows) > 500
    assert len(Page(report.page(rows)).rows) == len(rows)


def test_rows_of_any_kernel_make_a_page(kernels):
    rows = []
    one = row(kernels[0], problem(), 1.0, sm_mhz=10**400)
    for data in changed(KernelIdentity.of(kernels[0]).to_dict()):
        with contextlib.suppress(ArgumentError):
            identity = KernelIdentity.from_dict(data)
            rows.append(Row(H200, dataclasses.replace(one.measurement, kernel=identity)))
    assert len(rows) > 500
    assert len(Page(report.page(rows)).rows) == len(rows)


def test_the_shortest_and_longest_times_are_drawn(kernels):
    rows = [row(k, problem(), t) for k, t in zip(kernels, (5e-324, 1.7e308, 1.0), strict=True)]
    for some in (rows, rows[:1], rows[1:2], rows[:2]):
        assert len(Page(report.page(some)).rows) == len(some)


# Work and roofs --------------------------------------------------------------------------


def test_work_counts_operations_and_the_bytes_of_every_operand():
    work = work_of(problem())
    assert work.operations == 2 * 256 * 512 * 128
    assert work.bytes == 2 * (256 * 128 + 128 * 512 + 256 * 512)
    assert work.kind == "float16"
    batch = work_of(Problem.of(arguments(L=3)))
    assert (batch.operations, batch.bytes) == (3 * work.operations, 3 * work.bytes)
    bias = ka.EpilogueArguments(lambda accum, bias: accum + bias, bias=tensor(512))
    assert work_of(Problem.of(arguments(epilogue=bias))).bytes == work.bytes + 1024
    scale = torch.empty((), device="meta")
    a = ka.ScaledOperand(tensor(256, 128), scale, ka.ScaleMode.PER_TENSOR)
    scaled = Problem.of(ka.GemmArguments(a, tensor(128, 512), tensor(256, 512)))
    assert work_of(scaled).bytes == work.bytes + 4
    assert "scales" in _problem.describe(scaled).options


def test_a_broadcast_operand_has_the_bytes_that_it_has_in_memory():
    shared = tensor(128, 512).expand(4, 128, 512)
    args = ka.GemmArguments(tensor(4, 256, 128), shared, tensor(4, 256, 512))
    assert work_of(Problem.of(args)).bytes == 2 * (4 * 256 * 128 + 128 * 512 + 4 * 256 * 512)


def test_groups_and_attention_have_their_sizes_and_types(torch_kernel):
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    groups = ka.GroupedGemmArguments(
        tensor(64, 32), tensor(3, 32, 48), tensor(64, 48).float(), ends
    )  # fmt: skip
    heads = tensor(2, 6, 40, 64), tensor(2, 3, 50, 64)
    attention = ka.SdpaArguments(heads[0], heads[1], heads[1], heads[0].clone())
    found = [_problem.describe(Problem.of(args)) for args in (groups, attention)]
    assert [one.types for one in found] == ["bf16 × bf16 → f32", "bf16"]
    assert [one.layout for one in found] == ["ttt", ""]
    assert found[0].sizes == {"M": 64, "N": 48, "K": 32, "L": 3}
    assert list(found[1].sizes.items()) == [
        *(("B", 2), ("H", 6), ("H_kv", 3), ("S_q", 40), ("S_kv", 50), ("D", 64), ("D_v", 64))
    ]
    rows = [row(torch_kernel, Problem.of(args), 1.0) for args in (groups, attention)]
    first, second = Page(report.page(rows)).tables["summary"]
    assert (first["size-M"], first["size-S_kv"], second["size-S_kv"]) == ("64", "", "50")
    assert first["tflops"] == f"{2 * 64 * 32 * 48 / 1e6:.1f}"


def test_norms_have_bytes_and_no_operations(torch_kernel):
    args = RmsNormArguments(tensor(64, 128), tensor(64, 128), weight=tensor(128))
    work = work_of(Problem.of(args))
    assert (work.operations, work.bytes) == (None, 2 * (2 * 64 * 128 + 128))
    about = _problem.describe(Problem.of(args))
    assert (about.operation, about.types, about.options) == ("rmsnorm", "bf16", "weight")
    (line,) = Page(report.page([row(torch_kernel, Problem.of(args), 1.0)])).tables["summary"]
    assert (line["tflops"], line["gbytes"]) == ("", "33.0")
    assert line["roof"] == f"{100 * 1e6 * work.bytes / 4.8e12:.0f}"


def test_types_are_said_in_short():
    def types(a, b, out, **options):
        args = ka.GemmArguments(
            tensor(32, 16, dtype=a), tensor(16, 32, dtype=b), tensor(32, 32, dtype=out), **options
        )
        return _problem.describe(Problem.of(args)).types

    assert types(torch.float16, torch.float16, torch.float16) == "f16"
    assert types(torch.float16, torch.float16, torch.float32) == "f16 × f16 → f32"
    assert types(torch.int8, torch.int8, torch.int32) == "i8 × i8 → i32"
    half = types(torch.float16, torch.float16, torch.float16, accumulator_type="float16")
    assert half == "f16, f16 sums"


def test_roofs_are_the_slower_of_memory_and_arithmetic():
    roofs = roofs_of("NVIDIA H200")
    assert roofs.seconds(Work(None, 4_800_000, None)) == pytest.approx(1e-6)
    assert roofs.seconds(Work(10**12, 1, "float16")) == pytest.approx(1 / 989.4)
    assert roofs.seconds(Work(1, 4_800_000, "float16")) == pytest.approx(1e-6)
    assert roofs.seconds(Work(1, 1, "float4")) is None
    assert roofs_of("Voodoo 2") is None


def test_regrets_are_counted_in_bars():
    picture = _charts.distribution([1.0, 1.0, 1.005, 1.3, 7.0])
    text = html.unescape(str(picture))
    counts = [part.split("</text>")[0] for part in text.split('text-anchor="middle">')[1:]]
    assert dict(zip(counts[1::2], counts[0::2], strict=False)) == {
        "0 %": "2",
        "≤ 1 %": "1",
        "≤ 2 %": "0",
        "≤ 5 %": "0",
        "≤ 10 %": "0",
        "≤ 20 %": "0",
        "≤ 50 %": "1",
        "> 50 %": "1",
    }


def test_axes_that_matter_most_come_first(kernels):
    def designed(name, time, **fields):
        design = {"type": "this:Design", "fields": fields}
        return renamed(row(kernels[0], problem(), time), kernel_name=name, design=design)

    rows = [
        designed("a", 1.0, stages=4, warps=1),
        designed("b", 1.1, stages=4, warps=2),
        designed("c", 5.0, stages=16, warps=1),
    ]
    text = report.page(rows)
    names = [part.split('"')[0] for part in text.split('data-axis="')[1:]]
    assert names == ["stages", "warps"] * 2
    assert "stages 4: 1.00 µs, 2 rows" in text


# Size, and the command -------------------------------------------------------------------


def test_five_thousand_rows_take_seconds(kernels):
    base = row(kernels[0], problem(), 1.0)
    problems = [problem(8 * (i + 1)) for i in range(100)]
    rows = []
    for what in problems:
        for number in range(50):
            design = {"type": "this:Design", "fields": {"stages": number % 7, "warps": number}}
            one = dataclasses.replace(
                base.measurement, problem=what, times_us=(1.0 + number, 1.1 + number)
            )
            rows.append(renamed(Row(H200, one), kernel_name=f"kernel{number}", design=design))
    started = time.monotonic()
    text = report.page(rows)
    assert time.monotonic() - started < 60
    assert len(text) < 20e6
    assert len(Page(text).rows) == 5000


@pytest.fixture
def store(tmp_path, kernels):
    found = Store(tmp_path / "tuning", H200)
    for number, kernel in enumerate(kernels):
        found.record(row(kernel, problem(), 1.0 + number).measurement)
    return found


def test_the_command_writes_the_rows_of_a_folder(store, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", "--out", str(out), "--store", str(store.folder)]) == 0
    assert "3 rows of 1 problems written to" in capsys.readouterr().out
    assert out.read_text() == report.page(store.rows())


def test_the_command_takes_the_users_cache_by_default(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path))
    out = tmp_path / "page.html"
    assert main(["report", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["problems"], told["out"]) == (3, 1, str(out))


def test_the_command_reads_an_exported_file_and_leaves_out_what_is_no_row(store, tmp_path, capsys):
    file, out = tmp_path / "rows.json", tmp_path / "page.html"
    store.export(file)
    data = json.loads(file.read_text())
    data["rows"][0]["digest"] = "another"
    file.write_text(json.dumps(data))
    assert main(["report", "--out", str(out), "--store", str(file)]) == 0
    told = capsys.readouterr()
    assert "2 rows" in told.out
    assert "row 0 of" in told.err
    assert len(Page(out.read_text()).rows) == 2


def test_the_command_says_no_where_there_is_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / "none"))
    out = tmp_path / "page.html"
    assert main(["report", "--out", str(out)]) == 1
    assert "no measurements in" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize("content", ["no JSON", "[]", "{}", '{"rows": 3}'])
def test_the_command_refuses_a_file_that_is_no_export(tmp_path, capsys, content):
    file = tmp_path / "rows.json"
    file.write_text(content)
    assert main(["report", "--store", str(file)]) == 2
    assert "is no export of measurements" in capsys.readouterr().err


def test_the_command_refuses_places_that_are_not_there(store, tmp_path, capsys):
    assert main(["report", "--store", str(tmp_path / "none")]) == 2
    assert "which is not there" in capsys.readouterr().err
    out = tmp_path / "none" / "page.html"
    assert main(["report", "--out", str(out), "--store", str(store.folder)]) == 2
    assert "cannot be written" in capsys.readouterr().err
