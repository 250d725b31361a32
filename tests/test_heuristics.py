"""The order of nvMatmulHeuristics: kernel_api.tuning.heuristics."""

import functools
import random
import subprocess
import sys

import pytest
import torch
from support import hostile_kernels as hostile

import kernel_api as ka
from kernel_api.tuning import _heuristics_process, heuristics
from kernel_api.tuning._choice import Choice

H200 = "NVIDIA H200"

needs_library = pytest.mark.skipif(
    not heuristics.is_installed(), reason="nvidia-matmul-heuristics is not installed"
)


def arguments(M=4096, N=4096, K=4096, dtype=torch.bfloat16, layout="tn"):
    A = torch.empty(M, K, dtype=dtype, device="meta")
    B = torch.empty(N, K, dtype=dtype, device="meta").t()
    if layout[1] == "t":
        B = torch.empty(K, N, dtype=dtype, device="meta")
    return ka.GemmArguments(A, B, torch.empty(M, N, dtype=dtype, device="meta"))


def candidates(args, providers=None):
    return ka.get_kernels(args, cc="sm_90a", providers=providers or ["cutedsl", "torch"])


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_kernels_come_back_from_fast_to_slow(dtype):
    args = arguments(dtype=dtype)
    kernels = candidates(args)
    shuffled = random.Random(1).sample(kernels, len(kernels))
    found = heuristics.ranked(shuffled, args, H200)
    assert sorted(map(id, found)) == sorted(map(id, kernels))
    areas = [
        one.metadata.design.tile_shape
        for one in found
        if hasattr(one.metadata.design, "tile_shape")
    ]
    areas = [M * N for M, N, _ in areas]
    assert sum(areas[:20]) > 2 * sum(areas[-20:])  # of a large product


def test_it_can_be_named_without_being_imported():
    code = "import kernel_api as ka; ka.tuning.heuristics.ranked"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_library
def test_the_tuner_takes_its_order():
    args = arguments()
    order = functools.partial(heuristics.ranked, gpu=H200)
    asked = {"cc": 90, "max_candidates": 8}
    default = Choice(**asked).candidates(args, "cuda")
    found = Choice(order=order, **asked).candidates(args, "cuda")
    assert found.default == default.default == default.kernels[0]
    assert found.default in found.kernels and set(found.kernels) != set(default.kernels)
    everything = [k for k in ka.get_kernels(args, cc=90) if k.metadata.provider != "reference"]
    ranked = order(everything, args)
    assert [k for k in ranked if k in found.kernels] == list(found.kernels)
    assert ranked[0] in found.kernels


@needs_library
def test_what_it_knows_nothing_of_keeps_its_place():
    args = arguments()
    kernels = candidates(args)
    found = heuristics.ranked(kernels, args, H200)
    unknown = [i for i, one in enumerate(kernels) if heuristics._question(one, args) is None]
    assert 0 < len(unknown) < len(kernels)
    assert all(found[place] is kernels[place] for place in unknown)
    assert found != kernels
    assert heuristics.ranked(kernels, args, "NVIDIA GeForce GTX 1080") == kernels


@needs_library
def test_a_configuration_that_it_dies_of_keeps_its_place(monkeypatch):
    args = arguments()
    kernels = candidates(args, ["cutedsl"])[:12]
    before = heuristics._question
    asked = {id(one): before(one, args) for one in kernels}
    numbers = [i for i, one in enumerate(kernels) if asked[id(one)] is not None]
    deadly = kernels[numbers[1]]
    asked[id(deadly)] = {**asked[id(deadly)], "warp": (0, 0, 0), "instruction": (0, 0, 0)}
    monkeypatch.setattr(heuristics, "_question", lambda kernel, args: asked[id(kernel)])
    found = heuristics.ranked(kernels, args, H200)
    assert found[numbers[1]] is deadly
    assert set(found) == set(kernels)


def test_without_the_library_or_a_process_the_order_stays(monkeypatch):
    args = arguments()
    kernels = candidates(args, ["cutedsl"])[:20]
    assert heuristics.ranked(kernels, args, "cpu") == kernels
    with monkeypatch.context() as patch:
        patch.setattr(heuristics, "is_installed", lambda: False)
        assert heuristics.ranked(kernels, args, H200) == kernels
    monkeypatch.setattr(heuristics, "is_installed", lambda: True)
    monkeypatch.setattr(_heuristics_process, "__file__", "/nowhere")
    assert heuristics.ranked(kernels, args, H200) == kernels


def test_kernels_of_torch_are_not_asked_about(registry):
    args = ka.GemmArguments(*(torch.empty(8, 8, device="meta") for _ in range(3)))
    registry.register(hostile.FastGemm)
    found = ka.get_kernels(args)
    assert heuristics.ranked(found, args, H200) == found


@pytest.mark.parametrize(("layout", "expected"), [("tn", "NT_ROW_MAJOR"), ("tt", "NN_ROW_MAJOR")])
def test_layouts_are_seen_from_the_rows_of_out(layout, expected):
    args = arguments(layout=layout)
    assert heuristics._layout(args, is_swapped=False) == expected
    swapped = {"NT_ROW_MAJOR": "TN_COL_MAJOR", "NN_ROW_MAJOR": "NN_COL_MAJOR"}[expected]
    assert heuristics._layout(args, is_swapped=True) == swapped
