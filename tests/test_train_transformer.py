"""The example that trains a transformer, with torch's attention and with this package's."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import kernel_api as ka

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_transformer.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_transformer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def small(example, **changes):
    return example.Task(**{"steps": 6, "batch": 2, "half": 8, "layers": 2, "width": 32} | changes)


def test_curves_are_alike_on_the_cpu(example, capsys, monkeypatch):
    calls = []
    sdpa = ka.ops.sdpa
    monkeypatch.setattr(
        "kernel_api._attention_nn.ops.sdpa", lambda *a, **o: calls.append(a) or sdpa(*a, **o)
    )
    task = small(example)
    assert example.main("cpu", task) == 0
    shown = capsys.readouterr().out
    assert shown.count(" loss ") == 3
    assert "within the noise" in shown
    assert len(calls) == task.steps * task.layers


def test_another_attention_is_not_within_the_noise(example, capsys, monkeypatch):
    def wrong(q, k, v):
        return 0.9 * ka.nn.attention(q, k, v, mask=ka.masks.Causal())

    monkeypatch.setattr(example, "ours", wrong)
    assert example.main("cpu", small(example)) == 1
    assert "more than 2 times as far" in capsys.readouterr().out


def test_the_same_attention_gives_the_same_curve_and_it_falls(example):
    task = small(example, steps=12, batch=8, layers=1, rate=1e-2)
    math = example.torchs(torch.nn.attention.SDPBackend.MATH)
    one, other = (example.losses_of(task, math, "cpu") for _ in range(2))
    assert example.distance(one, other) == 0
    assert one[-1] < one[0] - 0.05


def test_a_curve_is_as_far_from_another_as_its_points_are(example):
    assert example.distance([1.0, 2.0], [1.0, 4.0]) == pytest.approx(2**0.5)


@pytest.mark.gpu
def test_curves_are_alike_on_a_gpu(example, capsys):
    assert example.main("cuda") == 0, capsys.readouterr().out
