"""Lists of problems, as files in YAML, JSON and CSV or as recorded."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.strategies import gemm_signatures

import kernel_api as ka
from kernel_api._description import described
from kernel_api.cli._fused_problem import FUSED
from kernel_api.cli._grouped_problem import GROUPED
from kernel_api.cli._norm_problem import NORMS
from kernel_api.cli._problem import add_problem_options, problem_arguments
from kernel_api.cli._problem_list import problems
from kernel_api.errors import ArgumentError, CacheWarning
from kernel_api.tuning import Problem

SIZES = ("--m", 8, "--n", 16, "--k", 32)


def options(*words):
    parser = argparse.ArgumentParser()
    add_problem_options(parser, devices=("meta",), device="meta")
    return parser.parse_args([str(word) for word in words])


def read(path, text, *words, **how):
    path.write_text(text)
    return problems(path, options(*words), **how)


def read_rows(folder, *rows):
    return read(Path(folder) / "list.csv", "\n".join(rows))


def read_objects(folder, *objects):
    return read(Path(folder) / "list.json", json.dumps(objects))


def asked(*words):
    return Problem.of(problem_arguments(options(*words)))


def same(found, *expected):
    return [Problem.of(args) for args in found] == list(expected)


@pytest.fixture
def yaml(monkeypatch):
    """Reads the YAML that is JSON, where PyYAML is not installed."""
    try:
        import yaml  # noqa: F401
    except ImportError:
        load = lambda text, Loader: json.loads(text)  # noqa: E731
        module = SimpleNamespace(load=load, SafeLoader=object, YAMLError=ValueError)
        monkeypatch.setitem(sys.modules, "yaml", module)


# What is read ----------------------------------------------------------------------------


def test_a_problem_is_the_same_in_csv_json_and_yaml(tmp_path, yaml):
    entry = {"op": "gemm", "M": 33, "N": 64, "K": 128, "L": 3, "dtype": "f16", "layout": "tn"}
    expected = asked("--m", 33, "--n", 64, "--k", 128, "--batch", 3,
                     "--dtype", "float16", "--layout", "tn")  # fmt: skip
    rows = ",".join(entry), ",".join(map(str, entry.values()))
    assert same(read_rows(tmp_path, *rows), expected)
    assert same(read_objects(tmp_path, entry), expected)
    assert same(read(tmp_path / "list.yaml", json.dumps([entry])), expected)
    assert same(read(tmp_path / "list.yml", json.dumps([entry])), expected)


def test_all_arguments_are_on_meta_tensors(tmp_path):
    (args,) = read_objects(tmp_path, {"M": 10**6, "N": 10**6, "K": 10**6})
    assert all(tensor.is_meta for tensor in args.tensors)


def test_csv_may_have_spaces_comments_empty_lines_and_empty_cells(tmp_path):
    found = read_rows(
        tmp_path,
        "\ufeff# shapes of a layer",
        "",
        " Op , m,N , K, out-dtype, bias  # columns",
        'gemm, 8, "16", 32, , ',
        "   ",
        "gemm,8,16,32,float32,true   # with a bias",
        "# rmsnorm, 1, 2",
        "rmsnorm, 8, 16",
    )
    sizes = ("--m", 8, "--n", 16)
    assert same(
        found,
        asked(*sizes, "--k", 32),
        asked(*sizes, "--k", 32, "--out-dtype", "float32", "--with", "bias"),
        asked(*sizes, "--operation", "rmsnorm"),
    )


def test_a_problem_that_is_there_twice_is_kept_once(tmp_path):
    found = read_rows(
        tmp_path,
        "M,N,K,dtype,layout",
        "8,16,32,bf16,tn",
        "16,16,32,bf16,tn",
        "8,16,32,bfloat16,tnt",
    )
    assert [args.M for args in found] == [8, 16]


def test_what_an_entry_does_not_say_is_as_on_the_command_line(tmp_path):
    entries = [{"m": 8, "n": 16, "k": 32}, {"m": 8, "n": 16, "k": 32, "dtype": "f32"}]
    path = tmp_path / "list.json"
    found = read(path, json.dumps(entries), "--dtype", "f16", "--with", "bias")
    assert [args.A.dtype.short for args in found] == ["f16", "f32"]
    assert all("bias" in args.epilogue.operands for args in found)
    (args,) = read(path, "[{}]", "--m", 8, with_sizes=False)
    assert (args.M, args.N) == (8, 1024)


@pytest.mark.parametrize("scales", ["per_tensor", "per_row", "blocks", "per_row-per_tensor"])
def test_operands_may_carry_scales(tmp_path, scales):
    entry = {"M": 256, "N": 512, "K": 300, "dtype": "e4m3", "out_dtype": "bf16", "scales": scales}
    (args,) = read_objects(tmp_path, {**entry, "layout": "tn"})
    assert args.scaled == ("A", "B")
    assert ka.get_kernels(args, providers=["reference"])


# Operations ------------------------------------------------------------------------------


def test_every_operation_of_the_catalogue_has_a_name():
    assert ["gemm", *FUSED] == [form.name for form, _ in ka.ops.FORMS]
    assert set(GROUPED) == {form.name for form, _ in ka.ops.GROUPED_FORMS}
    assert set(FUSED) | set(NORMS) | set(GROUPED) | {"gemm"} <= set(ka.fusions.__all__)


@pytest.mark.parametrize("operation", [*FUSED, *NORMS])
@pytest.mark.parametrize("batch", [None, 3])
def test_every_operation_gives_arguments_that_some_kernel_takes(tmp_path, operation, batch):
    entry = {"op": operation, "M": 32, "N": 128, "layout": "ttt", "dtype": "f32"}
    if operation in NORMS:
        if batch is not None:
            return
    else:
        entry |= {"K": 64, "L": batch, "head_dim": 64 if operation == "gemm_rope" else None}
    (args,) = read_objects(tmp_path, entry)
    assert (args.M, args.N) == (32, 128)
    assert ka.get_kernels(args, providers=["reference"])


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_options_of_a_fusion_are_those_of_its_function(tmp_path):
    A, B, out = meta(64, 32), meta(96, 32).t(), meta(64, 48)
    expected = ka.fusions.gemm_glu(
        *(A, B), out=out, kind="geglu_clamped", order="gate_up", granularity="halves",
        bias=meta(96), prob=meta(64, dtype=torch.float32), preactivation=meta(64, 96),
    )  # fmt: skip
    found = read_rows(
        tmp_path,
        "op,M,N,K,layout,kind,order,granularity,bias,prob,preactivation,limit",
        "gemm_glu,64,96,32,tn,geglu_clamped,gate_up,halves,true,true,true,6.5",
    )
    assert same(found, Problem.of(expected))


def test_a_gradient_reads_what_the_forward_pass_wrote(tmp_path):
    A, B = meta(64, 32), meta(32, 128)
    wide, upstream = meta(64, 256), meta(64, 64)
    sums = {
        "dprob": meta(64, dtype=torch.float32),
        "dbias": meta(256, dtype=torch.float32),
    }
    expected = [
        ka.fusions.gemm_dswiglu(A, B, out=meta(64, 256), preactivation=wide, **sums),
        ka.fusions.gemm_recompute_dglu(A, B, out=meta(64, 128), upstream=upstream),
    ]
    sizes = {"M": 64, "N": 128, "K": 32}
    found = read_objects(
        tmp_path,
        {"op": "gemm_dswiglu", **sizes, "dprob": True, "dbias": True},
        {"op": "gemm_recompute_dglu", **sizes, "dbias": False},
    )
    assert same(found, *map(Problem.of, expected))


@pytest.mark.parametrize("mode", ["tensor", "row", "mx"])
def test_quantisation_has_the_scale_of_its_mode(tmp_path, mode):
    sizes = {"M": 64, "N": 96, "K": 32}
    (args,) = read_objects(tmp_path, {"op": "gemm_quantize", **sizes, "mode": mode})
    assert args.out.dtype.name == "float8_e4m3fn"
    assert ("scale" in args.outputs) == (mode != "tensor")


# What makes no sense ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["M,N,K,Q", "1,2,3,4"], "list.csv, line 2: there is no option Q of a problem; there are"),
        (["M,N,K,dtype", "", "1,2,3,float17"], "line 3: 'float17' names no element type; known"),
        (["M,N,dtype", "1,2,f16"], "line 2: there is no K; gemm has sizes M, N, K"),
        (["M,N,K", "1,,3"], "line 2: there is no N; gemm has sizes M, N, K"),
        (["M,N,K", "1,x,3"], "line 2: argument --n: 'x' is no integer"),
        (["M,N,K", "1,-2,3"], "line 2: argument --n: -2 is less than 0"),
        (["M,N,K", "1,2,3,4"], "line 2 has 4 cells; expected 3, one of each column"),
        (["M,N,K,M", "1,2,3,4"], "line 1 has 2 columns 'M'; expected one"),
        (["M,N,K,m", "1,2,3,4"], "line 2: m is given twice, also as m; expected it once"),
        (["M,N,K,layout", "1,2,3,xy"], "line 2: --layout is 'xy'; expected t or n"),
        (["op,M,N,K", "conv,1,2,3"], "line 2: argument --operation: invalid choice: 'conv'"),
        (["op,M,N,K", "rmsnorm,1,2,3"], "line 2: K is 3; rmsnorm has sizes M, N, leave it out"),
        (
            ["op,M,N,bias", "rmsnorm,1,2,true"],
            "--with bias: rmsnorm is made with its usual operands",
        ),
        (["op,M,N,fp32_precision", "rmsnorm,1,2,tf32"], "--fp32-precision is 'tf32'"),
        (
            ["op,M,N,K,kind", "gemm_srelu,1,2,3,x"],
            "gemm_srelu, --with: there is no kind; there are",
        ),
        (["op,M,N,K,kind", "gemm_glu,1,64,3,x"], "kind is 'x'; expected one of glu"),
        (["op,M,N,K", "gemm_rope,1,64,3"], "gemm_rope takes head_dim"),
        (["op,M,N,K", "gemm_swiglu,1,60,3"], "line 2: B has N = 60; pairs of 32 columns need"),
        (["op,M,N,K,accumulator", "gemm_amax,1,2,3,f32"], "--accumulator is 'f32'; only a gemm"),
        (["M,N,K", f"1,{2**63},3"], "line 2: "),
        (["M,N,K"], "has no problem; expected one at least"),
        ([""], "has no problem"),
    ],
)
def test_a_row_that_makes_no_sense_is_named_with_its_file_and_line(tmp_path, rows, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        read_rows(tmp_path, *rows)
    assert "list.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("list.json", "", "has no problem"),
        ("list.json", "[]", "has no problem"),
        ("list.yaml", "[]", "has no problem"),
        ("list.json", "[1]", "is no list of objects"),
        ("list.json", '{"m": 1}', "is no list of objects"),
        ("list.json", "[", "list.json cannot be read: "),
        ("list.json", '[{"m": 1, "n": 2, "k": 3.5}]', "entry 1: argument --k: '3.5' is no integer"),
        ("list.json", '[{"m": 1, "n": 2, "k": [3]}]', "entry 1: argument --k"),
        ("list.json", '[{"class": 3}]', "entry 1: this is no problem as KERNEL_API_RECORD"),
        ("list.json", '[{"class": ["this", "Fool"]}]', "entry 1: this.Fool is not loaded"),
        ("list.jsonl", '{"class": ["kernel_api.ops", "gemm"]}', "line 1: .* no arguments class"),
        ("list.jsonl", '{"class": [\n', "line 1 is not JSON"),
        (
            "list.jsonl",
            '{"class": ["kernel_api.arguments", "GemmArguments"]}',
            "line 1: this is no",
        ),
        ("list.txt", "gemm 1 2 3", "list.txt cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path, yaml, name, text, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        read(tmp_path / name, text)
    assert name in str(caught.value)
    assert "this" not in sys.modules


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"none\.csv cannot be read: .*No such file"):
        problems(tmp_path / "none.csv", options())
    (tmp_path / "list.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match=r"list\.csv cannot be read: .*utf-8"):
        problems(tmp_path / "list.csv", options())
    (tmp_path / "list.csv").write_text(f"m,n,k\n{'8' * 200_000},8,8\n")
    with pytest.raises(ArgumentError, match=r"list\.csv cannot be read: line 2: field larger"):
        problems(tmp_path / "list.csv", options())


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_last_line_that_a_killed_writer_cut_off_is_left_out_with_a_warning(tmp_path, cut):
    args = problem_arguments(options(*SIZES))
    line = json.dumps(described(args))
    with pytest.warns(CacheWarning, match="list.jsonl, line 2: it is cut off.* is left out"):
        found = read(tmp_path / "list.jsonl", f"{line}\n{line[:cut]}")
    assert same(found, Problem.of(args))


def test_a_line_that_is_no_json_among_others_is_named(tmp_path):
    line = json.dumps(described(problem_arguments(options(*SIZES))))
    for text in (f"{line}\n{line[:40]}\n", f"{line}\n{line[:40]}\n{line}"):
        with pytest.raises(ArgumentError, match="line 2 is not JSON"):
            read(tmp_path / "list.jsonl", text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", '[{"m": 1, "n": 2, "k": 3, "m": 4}]'),
        ("list.yaml", "- {m: 1, n: 2, k: 3, m: 4}"),
        ("list.yaml", "- m: 1\n  n: 2\n  k: 3\n  m: 4\n"),
    ],
)
def test_a_name_that_an_entry_has_twice_is_refused(tmp_path, name, text):
    if name.endswith("yaml"):
        pytest.importorskip("yaml", reason="pyyaml is not installed")
    with pytest.raises(ArgumentError, match="cannot be read: m is given twice; expected it once"):
        read(tmp_path / name, text)


def test_a_norm_in_a_list_takes_no_k_of_the_command_line(tmp_path):
    path, entries = tmp_path / "list.json", [{"m": 8, "n": 16}, {"m": 8, "n": 16, "op": "rmsnorm"}]
    gemm, norm = read(path, json.dumps(entries), "--k", 32, with_sizes=False)
    assert (gemm.K, norm.N) == (32, 16)
    with pytest.raises(ArgumentError, match="entry 1: --k is 3; rmsnorm has sizes M and N"):
        read(path, '[{"op": "rmsnorm", "k": 3}]', with_sizes=False)


def test_yaml_needs_pyyaml(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ArgumentError, match=r"YAML needs pyyaml.* pip install 'kernel-api\[cli\]'"):
        read(tmp_path / "list.yaml", "- {m: 1}")


def test_pyyaml_comes_with_the_extra_that_the_error_names():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (extra,) = (line for line in project.splitlines() if line.startswith("cli = "))
    assert '"pyyaml' in extra


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])
def test_every_precision_of_float32_can_be_asked_for(precision):
    sizes = ("--m", 64, "--n", 64, "--k", 64, "--dtype", "float32", "--layout", "tn")
    args = problem_arguments(options(*sizes, "--fp32-precision", precision))
    assert args.fp32_precision == precision


# Any problem -----------------------------------------------------------------------------

entries = st.fixed_dictionaries(
    {"m": st.integers(0, 300), "n": st.integers(0, 300), "k": st.integers(0, 300)},
    optional={
        "operation": st.sampled_from(("gemm", "gemm_amax", "gemm_srelu", "gemm_residual")),
        "batch": st.integers(1, 4),
        "dtype": st.sampled_from(("bfloat16", "f16", "float32", "float64")),
        "out_dtype": st.sampled_from(("bfloat16", "f32")),
        "layout": st.sampled_from(("tn", "nnt", "ttn", "NT")),
        "pad": st.integers(0, 9),
        "offset": st.integers(0, 9),
    },
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entry=entries)
def test_a_list_gives_what_the_command_line_gives(tmp_path, entry):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in entry.items()]
    expected = asked(*words)
    rows = ",".join(entry), ",".join(map(str, entry.values()))
    assert same(read_rows(tmp_path, *rows), expected)
    assert same(read_objects(tmp_path, entry), expected)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(listed=st.lists(gemm_signatures(), min_size=1, max_size=3))
def test_a_recorded_file_gives_the_problems_that_were_recorded(tmp_path, listed):
    lines = [json.dumps(described(args)) for args in listed]
    found = read(tmp_path / "recorded", "\n\n".join(lines))
    assert same(found, *dict.fromkeys(map(Problem.of, listed)))
    assert same(read(tmp_path / "list.json", f"[{','.join(lines)}]"), *map(Problem.of, found))
