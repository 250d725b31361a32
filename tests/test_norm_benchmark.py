"""The suite norm: its problems, its peers, and the rows that it writes."""

import dataclasses
import json

import pytest
import torch
from support.benchmarks import script

import kernel_api as ka
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, NormOperandsMetadata
from kernel_api.space import Operands, Space

driver, harness, norm = map(script, ("driver", "harness", "norm"))


def test_a_dry_run_lists_every_problem_with_its_peer_and_the_best_kernels(capsys):
    assert norm.main(["--dry-run", "--candidates", "2"]) == 0
    text = capsys.readouterr().out
    for problem in norm.PROBLEMS:
        assert f"{problem.label}  peers: torch" in text
    assert len({problem.label for problem in norm.PROBLEMS}) == len(norm.PROBLEMS)
    assert text.count("us expected") > len(norm.PROBLEMS)


@pytest.mark.parametrize("operation", ["rmsnorm", "layernorm", "layernorm_backward"])
def test_peers_compute_the_norm(operation):
    problem = norm.Problem(operation, 33, 65, "float32")
    args = problem.arguments("cpu")
    assert problem.bytes == (3 if "backward" in operation else 2) * 33 * 65 * 4
    _, call = norm.peer_of(problem, args)
    found = call()
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    exact = kernel.exact(args)
    first = found if isinstance(found, torch.Tensor) else found[0]
    expected = exact["dx" if "backward" in operation else "out"]
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-4)
    if "backward" in operation:
        torch.testing.assert_close(found[1].double(), exact["dweight"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("operation", sorted(set(norm.KINDS) - {"rmsnorm_rht_amax"}))
def test_peers_add_residuals(operation, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    problem = norm.Problem(operation, 33, 65, "float32", residual=True)
    args = problem.arguments("cpu")
    is_backward = "backward" in operation
    assert problem.bytes == 4 * 33 * 65 * 4
    _, call = norm.peer_of(problem, args)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    exact = kernel.exact(args)
    names = ("dx", "dweight", "dbias") if is_backward else ("out", "residual_out")
    found = dict(zip(names, call(), strict=False))
    assert found.keys() == exact.keys() - {"mean", "rstd"}
    for name, one in found.items():
        torch.testing.assert_close(one.double(), exact[name], rtol=1e-5, atol=1e-4)


def test_the_peer_of_the_transform_computes_it():
    problem = norm.Problem("rmsnorm_rht_amax", 20, 64, "float32")
    args = problem.arguments("cpu")
    _, call = norm.peer_of(problem, args)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    exact = kernel.exact(args)
    out, amax = call()
    torch.testing.assert_close(out.view(20, 64).double(), exact["out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(amax.double(), exact["amax"], rtol=1e-5, atol=1e-5)


class CpuNorm(Kernel):
    """A norm that the CPU computes."""

    arguments = ka.RmsNormArguments
    devices = ("cpu",)
    operands = (Operands(x="any", out="any", accumulator="f32", majors="strided"),)
    operands_metadata = NormOperandsMetadata
    space = Space()
    design = DesignMetadata
    wrong = 1.0

    def _launch_operands(self, args):
        return args.launch_values

    def _run(self, args, artifact, stream, workspace=None):
        y = torch.nn.functional.rms_norm(args.x.tensor.float(), (args.N,), None, args.eps)
        args.out.tensor.copy_(y * args.weight.tensor.float() * self.wrong)
        args.rstd.tensor.copy_(torch.rsqrt(args.x.tensor.float().square().mean(1) + args.eps))


@pytest.fixture
def lab(monkeypatch, registry, tmp_path):
    """Runs the suite on the CPU, with a clock that is made up: ours take 10 us, others 20."""

    def timed(calls, set_bytes, policy="auto", rounds=20):
        for one in calls.values():
            for call in one:
                call()
        times = {name: 10.0 if "CpuNorm" in name else 20.0 for name in calls}
        return {n: harness.Timing([t] * 4) for n, t in times.items()}, "made up"

    registry.register(CpuNorm)
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(harness, "interleaved", timed)
    monkeypatch.setattr(harness, "environment", lambda: {"gpu": "made up"})
    small = dataclasses.replace(norm.SUITE, problems=(norm.Problem("rmsnorm", 48, 64),))
    monkeypatch.setattr(norm, "SUITE", small)
    monkeypatch.setattr(harness, "copy", lambda: [lambda: None])
    return lambda *options: (
        norm.main(["--out", str(tmp_path), *options]),
        tmp_path / "norm.json",
    )


def test_a_row_says_what_was_moved_beside_a_copy(lab):
    code, file = lab()
    assert code == 0
    (row,) = json.loads(file.read_text())
    assert (row["suite"], row["problem"]) == ("norm", "rmsnorm 48x64 (M x N) bf16")
    assert (row["peer"], row["ratio"], row["verified"], row["rank"]) == (
        "torch.rms_norm",
        2.0,
        True,
        0,
    )
    assert row["bytes"] == 2 * 48 * 64 * 2
    moved = row["bytes"] / 10.0
    ceiling = 2 * harness.COPIED_BYTES / 20.0
    assert row["of_ceiling"] == round(moved / ceiling, 4)
    assert {"subject", "subject_us", "peer_us", "spread", "policy", "env", "date"} <= set(row)


def test_a_kernel_that_is_wrong_has_no_row(lab, monkeypatch, capsys):
    monkeypatch.setattr(CpuNorm, "wrong", 1.1)
    code, file = lab()
    assert code == driver.FAILURES
    assert "WRONG" in capsys.readouterr().out
    assert not file.exists() or json.loads(file.read_text()) == []
