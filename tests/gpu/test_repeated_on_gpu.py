"""Calls that look like earlier ones compute what they do alone, by our kernels, bit for bit."""

import pytest
import torch
from support import repeated
from support.repeated import BACKWARD, CALLS, bits, forget, gradients, remembered

from kernel_api import _again, _attention_launches, _launches

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(repeated, "DEVICE", "cuda")
    monkeypatch.setattr(repeated, "OF_ATTENTION", BF16)
    monkeypatch.setattr(_attention_launches, "_launches", {})
    forget()
    yield
    forget()


def refuse_the_long_way(monkeypatch):
    def refused(*args):
        raise AssertionError("it ran the long way")

    for module in (_launches, _again, _attention_launches):
        monkeypatch.setattr(module, "run_best", refused)


def check(call, again, monkeypatch):
    """again: Forgets all calls."""
    alone = []
    for seed in range(3):
        alone.append(bits(call(seed)))
        again()
    call(0)
    refuse_the_long_way(monkeypatch)
    for seed in range(3):
        for one, other in zip(bits(call(seed)), alone[seed], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_norms_rows_and_quantisation(name, monkeypatch):
    check(CALLS[name], forget, monkeypatch)
    assert len(remembered()) == 1


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_attention(name, monkeypatch):
    def call(seed):
        return tuple(gradients(name, seed, deterministic=True))

    check(call, _attention_launches._launches.clear, monkeypatch)


def test_norms_in_place_in_a_graph_of_cuda():
    """Replays add to what is there."""
    x, residual = repeated.drawn(0, 9, 128), repeated.drawn(1, 9, 128)
    out = repeated.room(9, 128)

    def call(residual, out):
        repeated.ka.ops.rmsnorm(x, residual=residual, residual_out=residual, out=out)

    expected, found = residual.clone(), repeated.room(9, 128)
    for _ in range(4):
        call(expected, found)
    call(residual, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(residual, out)
    for _ in range(3):
        graph.replay()
    assert torch.equal(residual, expected) and torch.equal(out, found)
