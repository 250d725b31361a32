"""The Llama layer of examples/, and the suite that times it."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from support.benchmarks import script

SMALL = (256, 4, 2, 64, 384)
KINDS = {"prompts": (2, 32), "decode": (3, 40), "training": (2, 33)}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    yield importlib.import_module("llama_layer")
    for name in ("llama_layer", "transformer_graph"):
        sys.modules.pop(name, None)


@pytest.fixture
def suite(monkeypatch):
    found = script("transformer_layer")
    monkeypatch.setitem(found.SIZES, "small", SMALL)
    with torch.compiler.set_stance("force_eager"):
        yield found


def test_prompts_decoding_and_gradients_are_those_of_torch(example, capsys):
    assert example.main() == 0
    said = capsys.readouterr().out
    assert said.count("of the norm") == 9
    assert "gradient of gate_up" in said


def test_a_step_goes_on_where_the_prompt_ended(example):
    """Keys and values of the last token come from the cache, or from the prompt."""
    sizes, tokens = example.SMALL, 7
    given = {n: one.double() for n, one in example.operands(sizes, tokens, "cpu").items()}
    whole = example.plain_prompt(given["x"], given, sizes, 1)
    rows = example.functional.linear(
        example.functional.rms_norm(given["x"], (sizes.width,), given["attention_norm"], 1e-5),
        given["qkv"],
    )
    _, k, v = example.heads(rows, sizes, 1)
    cache = example.Cache(torch.stack([example.turned(k, given), v]), tokens - 1)
    own = example.of_steps({**given, "x": given["x"][-1:]}, 1)
    step = example.plain_step(own["x"], own, sizes, cache)
    torch.testing.assert_close(step, whole[-1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_compared_before_they_are_timed(suite, kind, monkeypatch):
    problem = suite.Problem("small", kind, *KINDS[kind])
    assert list(suite.calls_of(problem, "cpu")) == [suite.SUBJECT, suite.PEER]
    layers = suite.example()
    name = {"prompts": "fused_prompt", "decode": "fused_step", "training": "learning"}[kind]
    right = getattr(layers, name)
    monkeypatch.setattr(layers, name, lambda *given: 1.1 * right(*given))
    with pytest.raises(RuntimeError, match=r"is off by 0\.(09|1)\d* of the norm"):
        suite.calls_of(problem, "cpu")


def test_operations_and_bytes_are_those_of_a_layer(suite):
    problem = suite.Problem("small", "prompts", 2, 32)
    weights = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 384
    assert problem.bytes == 2 * weights
    assert problem.operations == 2 * 64 * weights + 4 * 64 * 16 * 256
    learning = dataclasses.replace(problem, kind="training")
    assert learning.operations == 6 * 64 * weights + int(3.5 * 4 * 64 * 16 * 256)
    decoding = dataclasses.replace(problem, kind="decode")
    assert decoding.bytes == 2 * (weights + 2 * 2 * 32 * 2 * 64)


def test_without_a_gpu_problems_are_listed(suite, capsys):
    assert suite.main(["--only", "training"]) == 2
    assert "Llama-3-70B, training, 2x4096" in capsys.readouterr().out
