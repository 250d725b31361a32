"""The command line: what it prints, where, and with which exit code."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
from support.kernels import CpuGemm, CudaGemm
from support.sampling import some

from kernel_api.cli import _doctor, _render, main
from kernel_api.cli._render import Output, Table, plain

SMALL = ["--m", "33", "--n", "17", "--k", "65"]


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_help_loads_neither_torch_nor_the_dsl():
    script = (
        "import sys; from kernel_api.cli import main; code = main(['--help']); "
        "sys.exit(code or int(bool({'torch', 'cutlass'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert done.returncode == 0


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kernel_api", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("kernel-api ")


@pytest.mark.parametrize("words", [["explain", "--help"], ["explain", *SMALL]], ids=" ".join)
def test_what_the_readers_encoding_has_not_is_replaced(words):
    done = subprocess.run(
        [sys.executable, "-m", "kernel_api", *words],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
    if "--help" in words:
        assert b"A (M, K) ? B (K, N)" in done.stdout


CLOSED = [">&-", "2>&-", ">&- 2>&-"]


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        *(("--help", closed) for closed in CLOSED),
        *(("list --provider torch", closed) for closed in some(CLOSED, 1)),
    ],
)
def test_without_a_reader_the_exit_code_answers(words, closed):
    command = f"{shlex.quote(sys.executable)} -m kernel_api {words} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_counts_what_it_shows_and_hides(capsys):
    code, out, _ = run(capsys, "list", "--provider", "torch", "--limit", 2)
    assert code == 0
    assert out.count("torch_") == 2
    assert "more are not shown" in out


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--family", "gemm_tf32", lambda k: "gemm_tf32" in k["family"]),
        ("--provider", "torch", lambda k: k["provider"] == "torch"),
        ("--providers", "torch,reference", lambda k: k["provider"] in ("torch", "reference")),
        ("--filter", "family=torch.mm", lambda k: k["family"] == "torch.mm"),
        ("--filter", "torch_mm", lambda k: "torch_mm" in k["kernel_name"]),
        (
            "--dtype",
            "int8",
            lambda k: k["provider"] == "reference" or '"int8"' in json.dumps(k["operands"]),
        ),
        ("--target", "sm_80", lambda k: "sm_90a" not in k["targets"]),
    ],
)
def test_list_filters(capsys, option, value, field):
    code, listed = run_json(capsys, "list", option, value)
    assert code == 0
    assert listed["kernels"]
    assert all(field(kernel) for kernel in listed["kernels"])


@pytest.mark.parametrize(("terminal", "lines"), [(True, 7), (False, 1)])
def test_json_is_indented_for_a_person(monkeypatch, terminal, lines):
    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", written)
    Output(as_json=True).show({"kernels": ({"count": 1} for _ in range(1))})
    assert json.loads(written.getvalue()) == {"kernels": [{"count": 1}]}
    assert len(written.getvalue().splitlines()) == lines


@pytest.mark.parametrize(("room", "lines"), [(40, 4), (66, 5), (120, 4)])
def test_a_table_for_a_person_has_names_in_one_piece_in_any_width(monkeypatch, room, lines):
    pytest.importorskip("rich")
    name, said = "sm90_sdpa_latent_f16_f16_f16_f16_f32", "tile=64x64 head_dim=576x512"
    written = io.StringIO()
    written.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", written)
    monkeypatch.setenv("COLUMNS", str(room))
    monkeypatch.setenv("TERM", "xterm")
    Output().show({}, Table(("name", "design", "us"), [(name, said, "3"), ("short", "none", "12")]))
    text = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    shown = [line for line in text.splitlines() if line.strip()]
    assert {name, *said.split(), "short"} <= {*text.split()}
    assert len(shown) == lines
    if room > 40:
        assert max(map(len, shown)) <= room


def test_progress_that_is_told_is_told_to_its_end(monkeypatch, capsys):
    for seconds, told in ((60.0, ""), (-1.0, "0 1 2 3")):
        monkeypatch.setattr(_render, "_SECONDS_BETWEEN_LINES", seconds)
        assert list(Output().track("abc", "looking")) == ["a", "b", "c"]
        lines = capsys.readouterr().err.splitlines()
        assert lines == [f"looking: {n} of 3" for n in told.split()]


def test_explain_prints_what_the_library_says(capsys):
    code, out, _ = run(capsys, "explain", "--cc", 90, "--layout", "tn", "--k", 1001)
    assert code == 0
    assert "no:  sm90.gemm" in out
    assert "would match with K padded to 1008" in out


def test_explain_answers_no_by_its_exit_code(capsys):
    code, told = run_json(capsys, "explain", "--dtype", "int16", "--provider", "torch")
    assert code == 1
    assert not told["accepted"]
    assert "A is int16" in told["rejected"][0]["reason"]


def test_verify_passes_what_is_right(capsys):
    code, out, _ = run(capsys, "verify", *SMALL, "--device", "cpu", "--dtype", "float32")
    assert code == 0
    assert "torch_mm_f32" in out
    assert "reference_gemm" in out


@pytest.mark.parametrize("operation", ["sdpa", "sdpa_backward"])
def test_verify_has_odd_sizes_of_attention(capsys, operation):
    words = ("--shapes", "odd", "--device", "cpu", "--provider", "torch")
    code, told = run_json(capsys, "verify", "--operation", operation, *words)
    assert (code, told["without_kernel"]) == (0, [])
    labels = list(dict.fromkeys(one["problem"] for one in told["outcomes"]))
    assert len(labels) == 8 and labels[0] == "1x1x16"


@pytest.mark.parametrize(
    ("operation", "beside", "columns"),
    [
        ("gemm_swiglu", (), [64, 64, 64, 64, 192, 256, 128, 64]),
        ("gemm_swiglu", ("granularity=8",), [16, 16, 16, 48, 144, 256, 128, 16]),
        ("gemm_swiglu", ("granularity=halves",), [2, 8, 6, 34, 130, 256, 120, 8]),
        ("gemm_dglu", (), [32, 32, 32, 64, 160, 256, 128, 32]),
        ("gemm_recompute_dglu", (), [64, 64, 64, 64, 192, 256, 128, 64]),
        ("grouped_gemm_glu_hadamard", ("granularity=8",), [32, 32, 32, 64, 160, 256, 128, 32]),
        ("gemm_rope", ("head_dim=24",), [24, 24, 24, 48, 144, 264, 120, 24]),
        ("rmsnorm_rht_amax", (), [16, 16, 16, 48, 144, 256, 128, 16]),
        ("rmsnorm_quantize", (), [128, 128, 128, 128, 256, 256, 128, 128]),
        ("layernorm_quantize", ("mode=mx",), [32, 32, 32, 64, 160, 256, 128, 32]),
        ("gemm_quantize", ("mode=block",), [128, 128, 128, 128, 256, 256, 128, 128]),
        ("gemm_swiglu", ("scale", "granularity=halves"), 8 * [256]),
        ("quantize", (), [128, 128, 128, 128, 256, 256, 128, 128]),
        ("quantize", ("mode=row",), [1, 8, 5, 33, 129, 255, 120, 8]),
    ],
)
def test_verify_has_odd_sizes_of_what_takes_columns_together(capsys, operation, beside, columns):
    words = ("--shapes", "odd", "--device", "cpu", "--provider", "reference", "--limit", 1)
    given = [word for one in beside for word in ("--with", one)]
    code, told = run_json(capsys, "verify", "--operation", operation, *given, *words)
    assert (code, told["without_kernel"]) == (0, [])
    assert [int(one["problem"].split("x")[1]) for one in told["outcomes"]] == columns


@pytest.mark.parametrize("beside", ["granularity=0", "granularity=thirds", "head_dim=0"])
def test_verify_says_what_is_no_number_of_columns(capsys, beside):
    operation = "gemm_rope" if "head_dim" in beside else "gemm_swiglu"
    words = ("--shapes", "odd", "--device", "cpu", "--with", beside)
    code, out, err = run(capsys, "verify", "--operation", operation, *words)
    assert (code, out) == (2, "")
    assert beside.partition("=")[0] in err


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("rmsnorm", "residual"),
        ("layernorm", "residual=float32"),
        ("rmsnorm_quantize", "residual"),
        ("layernorm_backward", "dresidual=bfloat16"),
        ("rmsnorm_backward", "dresidual"),
    ],
)
def test_norms_are_verified_with_a_residual(capsys, operation, name):
    words = ("verify", "--operation", operation, "--m", 17, "--n", 128, "--device", "cpu")
    code, told = run_json(capsys, *words, "--with", name, "--provider", "reference")
    assert code == 0 and [one["verdict"] for one in told["outcomes"]] == ["passed"]
    other = "residual" if name.startswith("d") else "dresidual"
    code, _, err = run(capsys, *words, "--with", other)
    assert code == 2 and f"--with {other}: {operation} is made with its usual operands" in err


def test_a_norm_has_no_k(capsys):
    words = ("verify", "--operation", "rmsnorm", "--m", 17, "--n", 9, "--device", "cpu")
    code, told = run_json(capsys, *words)
    assert code == 0
    assert {one["problem"] for one in told["outcomes"]} == {"17x9"}
    code, out, err = run(capsys, *words, "--k", 64)
    assert (code, out) == (2, "")
    assert "--k is 64; rmsnorm has sizes M and N, leave it out" in err


def test_verify_fails_what_is_wrong(capsys, registry):
    class Wrong(CpuGemm):
        family = "wrong"

        def _run(self, args, artifact, stream, workspace=None):
            args.out.tensor.copy_(args.A.tensor @ args.B.tensor)
            args.out.tensor[0, 0] += 1

    registry.register(Wrong)
    code, told = run_json(
        capsys, "verify", *SMALL, "--device", "cpu", "--dtype", "float32", "--filter", "wrong"
    )
    assert code == 1
    assert "wrong" in json.dumps(told)


@pytest.mark.compile
def test_compile_prints_what_the_machine_code_takes(capsys):
    code, told = run_json(capsys, "compile", "--target", "sm_80", "--limit", 1, "--layout", "tn")
    assert code == 0
    text = json.dumps(told)
    assert all(word in text for word in ("registers", "shared_memory_bytes", "spill_bytes"))


@pytest.mark.parametrize(
    ("targets", "code", "lacking"),
    [
        (("sm_80", "sm_90"), 0, ["sm_80"]),
        (("sm_80",), 1, ["sm_80"]),
        (("sm_75", "sm_80"), 1, ["sm_75", "sm_80"]),
    ],
)
def test_compile_fails_where_no_target_has_a_kernel(registry, capsys, targets, code, lacking):
    class New(CudaGemm):
        family = "only_new"
        targets = ("sm_90",)

    registry.register(New)
    words = ["compile", "--filter", "only_new", *(f"--target={one}" for one in targets)]
    assert run_json(capsys, *words)[0] == code
    assert main(words) == code
    shown = capsys.readouterr().out
    assert [line.split(":")[0] for line in shown.splitlines() if "no kernel" in line] == lacking


@pytest.mark.compile
def test_doctor_says_what_is_here_and_what_works(capsys):
    code, told = run_json(capsys, "doctor")
    assert code == 0
    text = json.dumps(told)
    assert version("torch") in text  # torch.__version__ may have a label more
    assert "nvidia-cutlass-dsl" in text
    assert "sm_90a" in text


def test_doctor_says_that_a_variable_names_no_provider(capsys, monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "nope")
    monkeypatch.setattr(_doctor, "_what_works", dict)
    code, told = run_json(capsys, "doctor")
    assert code == 0
    assert told["providers"]["KERNEL_API_PROVIDERS"].startswith(
        "no: KERNEL_API_PROVIDERS is 'nope': no provider is called 'nope'"
    )
    assert told["environment"]["KERNEL_API_PROVIDERS"] == "nope"


def test_doctor_shows_a_provider_that_cannot_say_whether_it_is_available(registry):
    def raises(cls):
        raise OSError("the compiler cannot be asked")

    provider = registry.register(CpuGemm)
    provider.available = classmethod(raises)
    found = _doctor._providers()
    told = "CpuGemm 1; not available: OSError: the compiler cannot be asked"
    assert found[provider.name] == told
    assert "reference.gemm" in found["reference"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--dtype", "float17"], "names no element type"),
        (["explain", "--cc", "hopper"], "names no GPU architecture"),
        (["explain", "--layout", "xyz"], "--layout is 'xyz'"),
        (["explain", "--provider", "nobody"], "no provider is called 'nobody'"),
        (["explain", "--filter", "foo=1"], "there is no axis foo; expected one of family, "),
        (["explain", "--m", "-1"], "--m"),
        (["frobnicate"], "invalid choice"),
        ([], "required"),
    ],
)
def test_a_question_without_sense_is_exit_code_2_and_one_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


#: More than a process can address, so that no system lends it in the hope that it is not used.
HUGE = ["--m", "20000000", "--n", "20000000", "--k", "4", "--device", "cpu"]
SDPA = ["--operation", "sdpa", "--heads", "2", "--m", "4", "--n", "4", "--k", "128"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["explain", "--m", 2**32, "--n", 2**32, "--k", 2**32],
            f"of shape ({2**32}, {2**32}) take",
        ),
        (["explain", "--batch", 2**60], "takes"),
        (["explain", "--m", 10**20], f"--m: {10**20} is more than {2**63 - 1}"),
        (["explain", "--seed", 10**23], f"--seed: {10**23} is more than {2**64 - 1}"),
        (["explain", "--seed", -(2**63) - 1], f"is less than {-(2**63)}"),
        (["verify", *HUGE], "the operands cannot be made: "),
        (["bench", *HUGE], "the operands cannot be made: "),
        (
            ["explain", *SDPA, "--with", "page_size=0"],
            "--with page_size=0; expected a whole number",
        ),
        (
            ["verify", *SDPA, "--device", "cpu", "--with", "page_size=abc"],
            "--with page_size=abc; ex",
        ),
        (["explain", *SDPA, "--with", "page_size"], "--with page_size=True; expected a whole"),
        (["explain", *SDPA, "--with", "causal=0"], "--with causal=0; expected it without a value"),
        (["explain", *SDPA, "--with", "padding=maybe"], "--with padding=maybe; expected it with"),
        (
            ["explain", *SDPA, "--with", "d_v=abc"],
            "--with d_v=abc; expected a whole number, 1 or m",
        ),
        (["explain", *SDPA, "--with", "d_v=-3"], "--with d_v=-3; expected a whole number, 1 or mo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_that_nothing_can_have_are_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "words", some(["explain", "explain --json", "list --provider torch --limit 1"], 1)
)
def test_an_answer_that_cannot_be_written_is_one_line_and_exit_code_2(words):
    command = [sys.executable, "-m", "kernel_api", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    name = words.partition(" ")[0]
    assert done.stderr == f"kernel-api {name}: [Errno 28] No space left on device\n"


def test_json_is_all_that_stdout_has(capsys):
    for command in (["list", "--limit", "1"], ["explain"], ["verify", *SMALL, "--device", "cpu"]):
        _, out, _ = run(capsys, *command, "--json")
        json.loads(out)


def test_the_log_is_shown_where_it_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("KERNEL_API_LOG", "loud")
    code, _, err = run(capsys, "explain")
    assert code == 2
    assert "KERNEL_API_LOG is 'loud'" in err


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m kernel_api list --provider torch | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_cells_of_tables_are_lines_that_no_terminal_obeys():
    table = Table(("kernel", "message"), [("one", "bad\x1b[31m\nnews"), ("two", "ok")])
    assert plain(table).splitlines()[2:] == ["one     bad [31m news", "two     ok"]
