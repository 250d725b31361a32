"""The suites of attention: their problems, their peers, and the rows that they write."""

import json
import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from support.benchmarks import script

import kernel_api as ka
from kernel_api.kernel import Kernel
from kernel_api.metadata import (
    DesignMetadata,
    SdpaBackwardOperandsMetadata,
    SdpaOperandsMetadata,
)
from kernel_api.providers.reference.sdpa import ReferenceSdpa, ReferenceSdpaBackward
from kernel_api.space import Operands, Space

driver, harness, attention, plots, tables = map(
    script, ("driver", "harness", "attention", "plots", "tables")
)
(
    forward,
    backward,
    decode,
    decode_fp8,
    latent,
    options,
    options_backward,
    packed,
    short,
    short_backward,
) = (
    script(f"sdpa_{name}")
    for name in (
        *("forward", "backward", "decode", "decode_fp8", "latent", "options", "options_backward"),
        *("packed", "short", "short_backward"),
    )
)
SUITES = {
    "sdpa-forward": forward,
    "sdpa-backward": backward,
    "sdpa-decode": decode,
    "sdpa-decode-fp8": decode_fp8,
    "sdpa-latent": latent,
    "sdpa-options": options,
    "sdpa-options-backward": options_backward,
    "sdpa-packed": packed,
    "sdpa-short": short,
    "sdpa-short-backward": short_backward,
}
BESIDE_A_COPY = ("sdpa-decode", "sdpa-decode-fp8", "sdpa-latent")
BY_GRAPHS = (*BESIDE_A_COPY, "sdpa-packed", "sdpa-short", "sdpa-short-backward")

SMALL = {
    "sdpa-forward": (
        forward.Problem(2, 2, 2, 40, 16),
        forward.Problem(1, 4, 1, 33, 16, causal=True),
    ),
    "sdpa-backward": (
        backward.Problem(2, 2, 2, 24, 16),
        backward.Problem(1, 4, 2, 33, 16, causal=True),
    ),
    "sdpa-decode": (
        decode.Problem(2, 4, 2, 64, 16),
        decode.Problem(2, 4, 2, 64, 16, page_size=16),
    ),
    "sdpa-decode-fp8": (
        decode_fp8.Problem(2, 4, 2, 64, 16),
        decode_fp8.Problem(2, 4, 2, 64, 16, page_size=16),
    ),
    "sdpa-latent": (
        latent.Problem(2, 4, 1, 64, latent.D),
        latent.Problem(2, 4, 1, 64, latent.D, page_size=16),
    ),
    "sdpa-options": tuple(
        options.Problem(2, 4, 2, 256, 16, *what)
        for what in (
            *((False, options.with_sink(options.window(30))), (True, options.OF_PAIRS)),
            *((True, options.TABLE), (True, options.SLOPES), (False, options.LENGTHS)),
            *((False, options.BLOCKS), (True, options.WIDTHS, 32), (True, options.DROPPING)),
        )
    ),
    "sdpa-options-backward": tuple(
        options_backward.Problem(2, 4, 4, 256, 16, *what)
        for what in (
            *((False, options.SINK), (True, options.CAPPED), (True, options.TABLE)),
            *((False, options.OF_ALL, 0, True), (False, options.OF_HEADS, 0, True)),
            *((True, options.DOCUMENTS), (False, options.LENGTHS), (True, options.DROPPING)),
        )
    ),
    "sdpa-packed": (
        packed.Problem(3, 4, 2, 300, 16, True, "decode, a chunk", ((1, 300), (20, 257), (5, 5))),
        packed.Problem(1, 4, 1, 33, 16, True, "a prompt", ((33, 33),)),
    ),
    "sdpa-short": (
        short.Problem(2, 4, 2, 24, 16, causal=True, S_q=24),
        short.Problem(1, 4, 1, 33, 16, causal=True, S_q=7),
    ),
    "sdpa-short-backward": (
        backward.Problem(1, 2, 1, 24, 16),
        backward.Problem(2, 4, 2, 33, 16, causal=True),
    ),
}


# Without timing --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUITES)
def test_a_dry_run_lists_every_problem_with_its_peers_and_the_best_kernel(name, capsys):
    module = SUITES[name]
    assert module.SUITE.name == name
    assert module.main(["--dry-run"]) == 0
    text = capsys.readouterr().out
    for problem in module.SUITE.problems:
        assert f"{problem.label}  peers: " in text
    assert text.count("us expected") == len(module.SUITE.problems)
    assert text.endswith(f"{name}: {len(module.SUITE.problems)} problems\n")
    assert set(module.SUITE.quick) <= {*module.SUITE.problems}
    labels = {problem.label for problem in module.SUITE.problems}
    assert len(labels) == len(module.SUITE.problems)


def test_a_quick_run_has_a_few_problems(capsys):
    forward.main(["--dry-run", "--quick"])
    text = capsys.readouterr().out
    assert f"sdpa-forward: {len(forward.SUITE.quick)} problems" in text
    assert "2x32x8192x128 (B x H x S x D) causal" in text


def test_forward_problems_are_all_combinations_of_16384_tokens():
    found = {(p.B * p.S, p.S, p.D, p.H // p.H_kv, p.causal) for p in forward.SUITE.problems}
    for S in (512, 1024, 2048, 4096, 8192, 16384):
        for D in (64, 128, 256):
            for group in (1, 4):
                assert {(16384, S, D, group, False), (16384, S, D, group, True)} <= found


def test_few_queries_see_the_keys_up_to_their_own():
    one = short.Problem(3, 8, 2, 40, 16, causal=True, S_q=24)
    args = one.arguments("meta")
    seen = sum(40 - 24 + i + 1 for i in range(24))
    assert one.operations == pytest.approx(4 * 3 * 8 * 16 * seen, rel=0.03)
    assert one.bytes == sum(2 * tensor.numel() for tensor in args.tensors[:4])
    assert {p.origin for p in short.SUITE.problems} == {"prompts", "chunks"}


def test_packed_queries_see_the_keys_up_to_their_own():
    one = SMALL["sdpa-packed"][0]
    args = one.arguments("meta")
    seen = sum(keys - own + i + 1 for own, keys in one.lengths for i in range(own))
    assert one.operations == 4 * 4 * 16 * seen
    assert args.S_kv >= 2 * one.S
    assert one.bytes == 2 * (2 * args.Q.tensor.numel() + 2 * 562 * 2 * 16)


def test_decoding_is_of_every_length_that_there_is_room_for():
    problems = decode.SUITE.problems
    assert {p.S for p in problems} == {1024, 4096, 16384, 65536, 131072}
    assert {p.B for p in problems} == {1, 4, 16, 64}
    assert max(2 * p.bytes * p.sets for p in problems) <= 40 << 30
    assert {p.page_size for p in problems} == {0, 64}


def test_operations_and_bytes_are_counted_as_published():
    one = forward.Problem(2, 32, 32, 8192, 128)
    assert one.operations == 4 * 2 * 32 * 8192**2 * 128
    assert forward.Problem(2, 32, 32, 8192, 128, True).operations == one.operations // 2
    assert backward.Problem(2, 32, 32, 8192, 128).operations == one.operations * 5 // 2
    for problem, read in ((forward.Problem(2, 4, 2, 32, 16), 2), (SMALL["sdpa-decode"][0], 0)):
        args = problem.arguments("meta")
        moved = [args.K, args.V] + [args.Q, args.out] * (read > 0)
        assert problem.bytes == sum(2 * math.prod(one.shape) for one in moved)
    args = (problem := backward.Problem(2, 4, 2, 32, 16)).arguments("meta")
    size = sum(one.tensor.numel() * one.tensor.element_size() for one in args.operands)
    assert problem.bytes == size


def test_tensors_lie_in_memory_as_projections_leave_them():
    args = forward.Problem(2, 4, 2, 32, 16).arguments("meta")
    for operand in args.operands:
        assert operand.tensor.transpose(1, 2).is_contiguous()


#: Of a GPU.
OPERATORS = (forward.by_operator, backward.cudnn, backward.torchs_flash, options.by_flash)


# Peers and comparisons -------------------------------------------------------------------


def every_problem():
    return [pytest.param(p, id=p.label) for problems in SMALL.values() for p in problems]


@pytest.mark.parametrize("problem", every_problem())
def test_peers_compute_the_problem(problem):
    torch.manual_seed(0)
    args = problem.arguments("cpu")
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)
    for peer in problem.peers().values():
        if getattr(peer, "func", peer) in OPERATORS:
            continue
        returned = peer(args)()
        if not getattr(peer, "comparable", True):
            first = returned if torch.is_tensor(returned) else returned[0]
            assert first.shape == problem.compared(args)[0].shape
            continue
        results = [returned] if torch.is_tensor(returned) else returned
        for found, expected in zip(results, problem.compared(args), strict=True):
            assert attention.distance(found, expected) < 1


@pytest.mark.parametrize("problem", every_problem())
def test_parts_are_the_first_and_the_last_head_on_the_same_memory(problem):
    args = problem.arguments("cpu")
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)
    for part in problem.parts(args):
        assert part.B == part.H_kv == 1
        assert attention.judge(part)
    checked = [name for name in args.outputs if name in part.outputs]
    assert set(args.outputs) - set(checked) <= {"dBias", "dSink"}  # sums over sequences
    args.outputs[checked[-1]].tensor[-1, -1] += 1
    assert not attention.judge(part)


def test_a_wrong_row_is_far_from_the_peers():
    expected = torch.randn(2, 3, 40, 16)
    assert attention.distance(expected.bfloat16(), expected) < 1
    found = expected.clone()
    found[1, 2, 17] *= 1.1
    assert attention.distance(found, expected) > 1
    found[0, 0, 0, 0] = float("nan")
    assert not attention.distance(found, expected) <= 1


# Runs on the CPU, with a clock that is made up ----------------------------------------------


class CpuSdpa(Kernel):
    """Attention that the CPU computes."""

    arguments = ka.SdpaArguments
    devices = ("cpu",)
    operands = (Operands(Q="bf16 | e4m3", K="like Q", V="like Q", out="bf16", accumulator="f32",
                         majors="strided"),)  # fmt: skip
    operands_metadata = SdpaOperandsMetadata
    space = Space()
    design = DesignMetadata
    reference = ReferenceSdpa
    wrong = 0.0

    def _run(self, args, artifact, stream, workspace=None):
        for name, values in self.reference.exact(args).items():
            args.outputs[name].tensor.copy_(values * (1 + self.wrong))


class CpuSdpaBackward(CpuSdpa):
    arguments = ka.SdpaBackwardArguments
    operands = (Operands(
        **dict.fromkeys(("Q", "K", "V", "out", "dO", "dQ", "dK", "dV"), "bf16"), lse="f32",
        accumulator="f32", majors="strided",
    ),)  # fmt: skip
    operands_metadata = SdpaBackwardOperandsMetadata
    reference = ReferenceSdpaBackward


@pytest.fixture
def lab(monkeypatch, registry, tmp_path):
    """Runs a suite on the CPU: ours take 10 us, others 20."""

    def timed(calls, set_bytes, policy="auto", rounds=20):
        for one in calls.values():
            for call in one:
                call()
        times = {name: 10.0 if "CpuSdpa" in name else 20.0 for name in calls}
        return {n: harness.Timing([t] * 4) for n, t in times.items()}, f"made up, {policy}"

    registry.register(CpuSdpa, CpuSdpaBackward)
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(harness, "interleaved", timed)
    monkeypatch.setattr(harness, "environment", lambda: {"gpu": "made up"})
    monkeypatch.setattr(harness, "operand_sets", lambda size: 2)

    def run(name, *options):
        module = SUITES[name]
        small = attention.Suite(name, SMALL[name], SMALL[name], module.SUITE.report,
                                module.SUITE.policy)  # fmt: skip
        monkeypatch.setattr(module, "SUITE", small)
        file = tmp_path / f"{name}.json"
        code = module.main(["--out", str(tmp_path), *options])
        return code, json.loads(file.read_text()) if file.exists() else []

    return run


@pytest.mark.parametrize("name", SUITES)
def test_rows_say_what_was_timed_and_how_fast(name, lab, capsys):
    code, found = lab(name)
    assert code == driver.DONE, capsys.readouterr().out
    assert [row["problem"] for row in found] == [p.label for p in SMALL[name]]
    for row, problem in zip(found, SMALL[name], strict=True):
        assert (row["suite"], row["verified"], row["ratio"], row["rank"]) == (name, True, 2.0, 0)
        assert row["tflops"] == pytest.approx(1e-6 * problem.operations / 10, abs=0.05)
        assert (row["S"], row["origin"]) == (problem.S, problem.origin)
        if name in BESIDE_A_COPY:
            assert row["of_ceiling"] == 2.0
        else:
            assert row["peer_tflops"] == pytest.approx(row["tflops"] / 2, abs=0.1)
        assert row["policy"] == f"made up, {'graph' if name in BY_GRAPHS else 'auto'}"
    text = capsys.readouterr().out
    assert f"geometric mean 2.000 of {len(SMALL[name])} problems" in text
    assert found[0]["origin"] in text


def test_rows_say_at_which_clocks_a_long_problem_ran(lab, monkeypatch):
    assert all("matmul_tflops" not in row for row in lab("sdpa-forward")[1])
    beside = {attention.MATMUL: [lambda: None]}
    monkeypatch.setattr(attention.Measurement, "_clocks", lambda self: beside)
    _, found = lab("sdpa-forward")
    assert found
    for row in found:
        assert row["matmul_tflops"] == pytest.approx(2e-6 * 8192**3 / 20, abs=0.05)
        assert row["peer"] != attention.MATMUL


@pytest.mark.parametrize("name", SUITES)
def test_a_kernel_that_is_wrong_has_no_row(name, lab, monkeypatch, capsys):
    # Of 8 bits a tenth is about what is allowed.
    monkeypatch.setattr(CpuSdpa, "wrong", 0.5 if "fp8" in name else 0.1)
    code, found = lab(name)
    assert code == driver.FAILURES
    assert "WRONG" in capsys.readouterr().out
    assert found == []


def test_heads_that_are_not_computed_in_float64_are_compared_with_the_peer(
    lab, monkeypatch, capsys
):
    monkeypatch.setattr(CpuSdpa, "wrong", 0.1)
    monkeypatch.setattr(forward.Problem, "parts", lambda self, args: ())
    code, _ = lab("sdpa-forward")
    assert code == driver.FAILURES
    assert "of what is allowed off the peer" in capsys.readouterr().out


def test_the_first_peer_that_takes_the_problem_is_timed(lab, monkeypatch, capsys):
    def refuses(args):
        raise RuntimeError("no such kernel")

    peers = {"refuses": refuses, "takes": forward.Problem.peers(None)["cuDNN"]}
    monkeypatch.setattr(forward.Problem, "peers", lambda self: peers)
    code, found = lab("sdpa-forward")
    assert code == driver.DONE
    assert {row["peer"] for row in found} == {"takes"}
    assert "refuses: RuntimeError: no such kernel" in capsys.readouterr().err


FLASH = """
import torch

def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True, scale=softmax_scale)
    return {} * out.transpose(1, 2), None
"""


@pytest.mark.parametrize("name", ["sdpa-forward", "sdpa-backward"])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_an_installed_library_is_timed_beside_the_peer_if_it_is_right(
    lab, monkeypatch, tmp_path, capsys, name, factor
):
    package = tmp_path / "site" / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FLASH.format(factor))
    monkeypatch.syspath_prepend(tmp_path / "site")
    try:
        code, found = lab(name)
    finally:
        for module in [one for one in sys.modules if one.partition(".")[0] == "flash_attn"]:
            del sys.modules[module]
    assert code == driver.DONE
    flash = script("flash").NAME
    for row in found:
        assert row["peer"] != flash and row["ratio"] == 2.0
        assert row.get("peers_us") == ({row["peer"]: 20.0, flash: 20.0} if factor == 1 else None)
    told = f"left out: {SMALL[name][0].label}: {flash}: RuntimeError: {flash} is"
    assert (told in capsys.readouterr().err) == (factor != 1)


def test_without_a_peer_decoding_is_timed_beside_the_copy(lab, monkeypatch):
    def refused(*_):
        raise RuntimeError("no backend")

    monkeypatch.setattr(decode, "by_torch", refused)
    code, found = lab("sdpa-decode")
    assert code == driver.DONE
    assert {row["peer"] for row in found} == {decode.COPIES[0]}


def test_a_peer_that_cannot_be_captured_is_left_out_of_decoding(lab, monkeypatch):
    timed = []

    def interleaved(calls, set_bytes, policy="auto", rounds=20):
        timed.append(set(calls))
        how = "eager (no graph: RuntimeError)" if "torch" in calls else "CUDA graph"
        return {name: harness.Timing([10.0] * 4) for name in calls}, how

    monkeypatch.setattr(harness, "interleaved", interleaved)
    _, found = lab("sdpa-decode", "--limit", "1")
    assert [("torch" in names) for names in timed] == [True, False]
    assert found[0]["policy"] == "CUDA graph"


def test_a_run_that_resumes_measures_only_what_is_missing(lab, capsys):
    _, before = lab("sdpa-forward", "--limit", "1")
    capsys.readouterr()
    _, after = lab("sdpa-forward", "--resume")
    assert after[:1] == before
    assert len(after) == 2
    assert capsys.readouterr().out.count("+-") == 1


def test_without_a_gpu_the_suites_say_what_can_be_done(capsys):
    assert decode.main([]) == driver.FAILURES
    assert "--dry-run" in capsys.readouterr().err


# Tables and pictures ---------------------------------------------------------------------


@pytest.fixture
def results(tmp_path):
    """Rows of all problems of the suites, as they are written."""
    folder = tmp_path / "h200"
    folder.mkdir()
    for name, module in SUITES.items():
        found = []
        for number, problem in enumerate(module.SUITE.problems):
            ratio = 0.9 + 0.004 * number
            row = {
                "problem": problem.label, "subject": "ours", "subject_us": 100.0,
                "peer": "cuDNN", "peer_us": 100.0 * ratio, "ratio": ratio, "verified": True,
                "policy": "eager, cold L2", "env": {"gpu": "NVIDIA H200"}, "date": "2026-01-01",
                "operations": problem.operations, "bytes": problem.bytes, "S": problem.S,
                "origin": problem.origin, "tflops": 600.0 + number,
            }  # fmt: skip
            if name in BESIDE_A_COPY:
                row |= {"of_ceiling": 0.5 + 0.01 * number, "tb_s": 2.0 + 0.01 * number}
            else:
                row["peer_tflops"] = 601.4
            found.append(row)
        (folder / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def test_a_cloud_lies_along_the_keys_of_a_sequence(results):
    pictures = plots.drawn(results)
    assert {f"h200-{name}.svg" for name in SUITES} <= set(pictures)
    clouds = {n: m for n, m in SUITES.items() if len(m.SUITE.problems) > plots.MOST_LINES}
    assert set(SUITES) - set(clouds) == {"sdpa-short-backward"}
    for name, module in clouds.items():
        root = ElementTree.fromstring(picture := pictures[f"h200-{name}.svg"])
        assert "S, keys of a sequence" in picture
        origins = {problem.origin for problem in module.SUITE.problems}
        assert picture.count("<circle") == len(module.SUITE.problems) + len(origins)
        places = [float(dot.get("cx")) for dot in root.iter() if dot.tag.endswith("circle")]
        assert all(0 < place < plots.WIDTH for place in places)
    ElementTree.fromstring(pictures["h200-roofline.svg"])


def test_tables_have_both_rates(results):
    text = tables.document(results)
    assert "| TFLOP/s, the peer's |" in text
    assert "| 600, 601 |" in text
    assert "| of the copy ceiling |" in text


def test_the_summary_has_a_line_per_kind_of_problem(results):
    text = tables.summary(results)
    for module in SUITES.values():
        for problem in module.SUITE.problems:
            assert f"| {problem.origin.replace(',', ', ')} | " in text
    assert "| contiguous | 19 | 2.00 to 2.18 | 0.500 to 0.680 | 0.936 | 0.900 |" in text
    assert "| D64, causal | " in text
    assert "Peers: cuDNN. eager, cold L2; 2026-01-01; gpu NVIDIA H200." in text


def test_without_rows_the_summary_is_a_sentence(tmp_path):
    assert tables.summary(tmp_path) == tables.NOTHING


def test_the_document_says_what_the_rows_say():
    found = tables.ATTENTION.read_text()
    assert found == tables.updated(found, tables.summary())
