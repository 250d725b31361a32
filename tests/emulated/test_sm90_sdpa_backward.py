"""The gradient of attention for Hopper is right: its PTX runs in the emulator, without a GPU.

Outputs are poisoned, and what lies between rows and behind lengths is NaN; the emulator refuses
every race, of threads, of bulk copies, of wgmma, and accumulators that are touched in flight. With
KERNEL_API_EMULATE in the environment every case and every design runs, else those in front.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.ptx import EmulationError
from support.ptx.kernel import EmulatedKernel
from support.sass import sass
from support.sdpa import NAN, Draw, backward_of, run
from support.sdpa_cases import (
    F16,
    Case,
    bias_gradient,
    biased,
    blocks,
    documents,
    dropped,
    every_gradient,
    everything,
    in_order,
    on_meta,
)

from kernel_api import masks
from kernel_api.providers.cutedsl.sdpa.sm90_backward import Sm90SdpaBackward
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))
CAUSAL = {"mask": masks.Causal()}
ENDING = {"mask": masks.Causal("bottom_right")}


def kernels(element: str = "bfloat16") -> list[Any]:
    found = Sm90SdpaBackward.generate_kernels(lambda metadata: True)
    return [kernel for kernel in found if kernel.metadata.operands.Q.dtype.name == element]


def compiled(kernel: Any, args: Any) -> EmulatedKernel:
    status = kernel.supports(on_meta(args))
    assert status, status.error
    return EmulatedKernel.compile(kernel, args, "sm_90a")


def kernel_of(case: Case, args: Any) -> Any:
    served = [k for k in kernels(case.element) if k.supports(on_meta(args))]
    return next(k for k in served if k.metadata.design.tile_shape == case.tile)


def check(case: Case, kernel: Any | None) -> tuple[Any, Any]:
    """By the kernel, or the first that serves the case with its tile."""
    args = case.backward()
    kernel = kernel or kernel_of(case, args)
    found = compiled(kernel, args)
    broken = conduct(args, lambda: found.run(args))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
    return found, args


def capped(draw: Draw) -> dict[str, Any]:
    return {"softcap": 3.0}


def sloped(draw: Draw) -> dict[str, Any]:
    return {"alibi": draw.wides(draw.H) / 8}


def with_sink(draw: Draw) -> dict[str, Any]:
    return {"sink": draw.wides(draw.H)}


def of_sink(draw: Draw) -> dict[str, Any]:
    return {"dSink": torch.full((draw.H,), NAN)}


def modified(draw: Draw) -> dict[str, Any]:
    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any, w: Any) -> Any:
        return score * w[h] + 0.1 * (q - kv)

    return {"score_mod": score_mod, "score_operands": {"w": draw.wides(draw.H)}}


def sparse(draw: Draw) -> dict[str, Any]:
    """Few blocks are seen, of the last tile of queries nothing."""
    shape = 64, 24
    rows, columns = (-(-n // size) for n, size in zip((draw.S_q, draw.S_kv), shape, strict=True))
    table = draw.random(1, draw.H, rows, columns) > 1.2
    table[:, :, 0, 0] = True
    table[:, :, -1] = False
    return {"mask": masks.BlockSparse(table, shape)}


def of_bias(*modes: int, **further: Any) -> dict[str, Any]:
    """A bias of these modes, and its gradient."""
    gradient = bias_gradient(*modes)
    return {"options": biased(*modes), "gradient": lambda d: {**gradient(d), **further}}


def sparse_whole(draw: Draw) -> dict[str, Any]:
    """Tiles meet one entry each; a function hides more, and of the last keys there is nothing."""
    rows, columns = -(-draw.S_q // 128), -(-draw.S_kv // 128)
    table = draw.random(draw.B, draw.H, rows, columns) > 0.3
    table[..., 1, 0] = True
    table[..., -1] = False
    shown = masks.MaskMod(lambda b, h, q, kv: (q + kv) % 5 != 2)
    return {"mask": masks.BlockSparse(table, (128, 128)) & shown}


WHOLE, SMALLER = (documents(*shape, further=masks.Causal()) for shape in ((128, 128), (48, 24)))


#: Those in front are run every time.
CASES = [
    Case("causal", (1, 1, 1, 130, 140, 128, 128), (64, 128), keywords=CAUSAL),
    Case("documents", (1, 2, 1, 390, 390, 128, 128), (64, 128), options=WHOLE),
    Case("shares", (1, 4, 2, 70, 150, 128, 120), (64, 128), keywords=ENDING),
    Case("dBias of all heads, causal", (1, 2, 1, 66, 40, 64, 64), (64, 128), keywords=CAUSAL,
         **of_bias(0, 2, 3, deterministic=True)),
    Case(
        "packed",
        (3, 2, 1, 1, 1, 64, 64),
        (128, 128),
        packed=True,
        lengths=((65, 0, 30), (140, 9, 20)),
        keywords=ENDING,
        options=with_sink,
        gradient=of_sink,
    ),
    Case("padded", (2, 1, 1, 62, 90, 256, 248), (64, 80), lengths=((60, 3), (85, 20))),
    Case("whole tiles of 80", (1, 2, 1, 160, 256, 128, 128), (80, 128)),
    Case("padded, 128", (2, 2, 1, 150, 200, 128, 128), (64, 128), lengths=((70, 150), (30, 170))),
    Case("no queries", (2, 1, 1, 70, 150, 64, 64), (128, 128), lengths=((0, 70), (150, 0))),
    Case("a window", (1, 2, 1, 170, 140, 64, 64), (128, 128),
         keywords={"mask": masks.SlidingWindow(50, 9)}),
    Case("more queries than keys", (1, 1, 1, 200, 70, 128, 128), (64, 128), keywords=ENDING),
    Case("packed, 128", (2, 2, 2, 1, 1, 128, 128), (80, 128), packed=True,
         lengths=((90, 70), (10, 150))),
    Case("one query", (2, 2, 1, 1, 140, 128, 128), (64, 128)),
    Case("few columns", (1, 2, 1, 70, 140, 40, 24), (128, 128), element=F16),
    Case("values wider than queries", (1, 2, 1, 70, 140, 64, 128), (64, 128)),
    Case("192, 128", (1, 1, 1, 70, 100, 192, 128), (64, 64), keywords=CAUSAL),
    Case("192", (1, 1, 1, 70, 140, 136, 192), (64, 64), element=F16),
    Case("192, shares of 112 keys", (1, 4, 1, 70, 230, 192, 128), (64, 112), keywords=ENDING),
    Case("192, packed, a window", (2, 2, 1, 1, 1, 192, 192), (64, 96), packed=True,
         lengths=((100, 70), (90, 200)), keywords={"mask": masks.SlidingWindow(50, 9)}),
    Case("192, in order", (2, 2, 2, 150, 230, 184, 136), (64, 96), element=F16, gradient=in_order,
         lengths=((150, 70), (30, 230)), keywords=CAUSAL),
    Case("a scale", (1, 1, 1, 70, 140, 128, 128), (64, 128), keywords={"scale": 0.7}, factor=4.0),
    Case("softcap", (1, 2, 1, 70, 140, 128, 128), (64, 128), options=capped),
    Case("alibi", (1, 2, 1, 70, 140, 128, 128), (64, 128), options=sloped),
    Case("a sink", (1, 2, 1, 70, 140, 64, 64), (128, 128), options=with_sink),
    Case("in order", (1, 2, 1, 200, 300, 64, 64), (64, 128), gradient=in_order),
    Case("in order, causal", (1, 2, 1, 300, 300, 64, 64), (64, 128), gradient=in_order,
         keywords=CAUSAL),
    Case("in order, a window", (1, 2, 1, 300, 260, 128, 128), (64, 128), gradient=in_order,
         keywords={"mask": masks.SlidingWindow(50, 9)}),
    Case("in order, packed", (2, 2, 1, 1, 1, 256, 256), (64, 80), packed=True, gradient=in_order,
         lengths=((100, 70), (90, 200)), keywords={"mask": masks.SlidingWindow(50, None)}),
    Case("shares of two heads", (1, 32, 1, 20, 30, 64, 64), (64, 64), gradient=in_order,
         keywords=ENDING),
    Case("no shares of 17 heads", (1, 17, 1, 20, 30, 64, 64), (64, 64), keywords=ENDING),
    Case("three shares of 80 keys", (2, 6, 2, 70, 90, 256, 200), (64, 80),
         lengths=((70, 9), (90, 3))),
    Case("a bias", (1, 2, 1, 70, 140, 64, 64), (64, 128), options=biased(1, 2, 3)),
    Case("a score function", (1, 2, 1, 70, 140, 64, 64), (64, 128), options=modified),
    Case("dropout", (1, 2, 1, 70, 140, 64, 64), (64, 64), options=dropped),
    Case("dropout, 256", (1, 1, 1, 70, 140, 256, 256), (64, 64), options=dropped),
    Case("blocks", (1, 2, 1, 70, 140, 128, 128), (64, 64), options=blocks),
    Case("blocks, in order", (1, 2, 1, 70, 140, 64, 64), (64, 128), options=blocks,
         gradient=in_order),
    Case("blocks, few seen", (1, 6, 1, 330, 150, 64, 64), (64, 128), options=sparse),
    Case("whole blocks", (1, 4, 2, 330, 390, 128, 128), (64, 128), options=sparse_whole),
    Case("documents, smaller blocks", (2, 4, 2, 300, 300, 64, 64), (64, 64),
         options=SMALLER, lengths=((300, 250), (300, 270))),
    Case("documents, in order", (1, 2, 1, 390, 390, 128, 128), (64, 64), options=WHOLE,
         gradient=in_order),
    Case("documents, smaller blocks, in order", (2, 4, 2, 300, 300, 64, 64), (64, 64),
         options=SMALLER, lengths=((300, 250), (300, 270)), gradient=in_order),
    Case("whole blocks, in order", (1, 4, 2, 330, 390, 128, 128), (64, 64), options=sparse_whole,
         gradient=in_order),
    Case("whole blocks, padded", (2, 2, 2, 330, 390, 64, 64), (64, 128), options=sparse_whole,
         lengths=((330, 20), (250, 390))),
    Case("blocks, few seen, padded", (2, 4, 2, 200, 100, 192, 128), (64, 64), options=sparse,
         lengths=((200, 70), (100, 30))),
    Case("dBias", (2, 4, 2, 70, 40, 128, 128), (64, 128), **of_bias(0, 1, 2, 3)),
    Case("dBias of all batches", (2, 2, 2, 70, 100, 64, 64), (64, 128), **of_bias(1, 2, 3)),
    Case("dBias of all queries, padded", (2, 2, 1, 70, 100, 64, 64), (64, 128),
         lengths=((60, 3), (85, 20)), **of_bias(0, 1, 3)),
    Case("dBias of all keys", (1, 2, 1, 70, 100, 64, 64), (64, 128), keywords=ENDING,
         **of_bias(1, 2)),
    Case("dropout, 128", (1, 2, 1, 70, 80, 128, 128), (64, 64), options=dropped),
    Case("dropout, drawn ahead, a window", (1, 2, 1, 130, 200, 64, 64), (64, 128), options=dropped,
         keywords={"mask": masks.SlidingWindow(50, 9)}),
    Case("everything, padded", (2, 4, 2, 70, 80, 192, 72), (64, 64),
         lengths=((66, 3), (77, 20)), options=everything, gradient=every_gradient),
    Case("everything, padded, 256", (1, 2, 1, 66, 50, 256, 200), (64, 48),
         lengths=((65,), (49,)), options=everything),
    Case("everything, padded, 128", (2, 4, 2, 70, 80, 128, 72), (64, 64),
         lengths=((66, 3), (77, 20)), options=everything, gradient=every_gradient),
]  # fmt: skip


def designs() -> list[tuple[Case, Any]]:
    found = []
    for kernel in (*kernels(), *kernels(F16)):
        if kernel.metadata.design.bias != "read":  # see test_sm90_bias_gradient
            continue
        sizes = (1, 2, 1, 150, 140, *kernel.metadata.design.head_dim)
        name, element = kernel.metadata.design.label(), kernel.metadata.operands.Q.dtype.name
        found.append((Case(f"{name}, {element}", sizes, element=element, keywords=CAUSAL), kernel))
    return found


EVERYTHING = [*((case, None) for case in CASES), *designs()]


@pytest.mark.parametrize(
    ("case", "kernel"),
    EVERYTHING if EVERY else EVERYTHING[:2],
    ids=lambda one: one.name if isinstance(one, Case) else "",
)
def test_gradients_are_right(case, kernel):
    found, args = check(case, kernel)
    assert kernel is None or not found.artifact.resources.spill_bytes
    if args.deterministic:
        before = {name: output.tensor.clone() for name, output in args.outputs.items()}
        found.run(args, seed=1)
        assert all(torch.equal(before[n], one.tensor) for n, one in args.outputs.items())


def test_dbias_is_made_beside_wgmma():
    args = CASES[2].backward()
    artifact = compiled(kernel_of(CASES[2], args), args).artifact
    assert artifact.resources.spill_bytes == 0
    products = [part for part in sass(artifact).split(".text.") if "MMA" in part]
    assert {"HGMMA" in part for part in products} == {True, False}


@pytest.fixture(scope="module")
def plain():
    """A kernel without a mask."""
    case = Case("", (1, 1, 1, 300, 128, 64, 64), (64, 128))
    args = case.backward()
    chosen = next(k for k in kernels() if k.metadata.design.tile_shape == case.tile)
    return compiled(chosen, args), args


def test_very_negative_scores_of_half_a_tile_are_finite(plain):
    """Where keys end within a tile, what is behind them must not become exp(0 - lse)."""
    args = Case("", (1, 1, 1, 64, 192, 64, 64)).arguments()
    for tensor, value in ((args.Q.tensor, 6.0), (args.K.tensor, -6.0)):
        tensor.copy_(value + tensor / 8)
    run(args)
    assert args.lse.tensor.max() < -88.7
    backward = backward_of(args, Draw(element="bfloat16").random(*args.out.shape))
    plain[0].run(backward)
    verdict = judge(backward, FACTOR_REORDERED)
    assert verdict, verdict


def test_a_score_that_is_not_seen_may_have_any_slope():
    """Of the key behind each query it is infinite."""

    def divided(draw: Draw) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, q, kv: score / (q - kv + 1), **CAUSAL}

    check(Case("", (1, 1, 1, 20, 20, 64, 64), (64, 128), options=divided), None)


def test_no_barrier_of_the_consumers_can_be_left_out(plain):
    found, args = plain
    parts = found.text.split("bar.sync \t1, 256;")
    assert len(parts) > 3
    for i in range(1, len(parts)):
        text = "bar.sync \t1, 256;".join(parts[:i]) + "bar.sync \t1, 256;".join(parts[i:])
        with pytest.raises(EmulationError):
            for seed in range(3):
                found.with_text(text).run(args, seed=seed)


def test_what_a_table_hides_whole_is_not_looked_at():
    """Else a product with nothing would be no number."""
    case = Case("", (1, 2, 1, 130, 40, 64, 64), (64, 128), options=sparse)
    found, args = check(case, None)
    outputs = {name: output.tensor.clone() for name, output in args.outputs.items()}
    for operand in (args.Q, args.dO):
        operand.tensor[:, :, 128:] = NAN
    found.run(args)
    assert all(torch.equal(outputs[n], one.tensor) for n, one in args.outputs.items())


def test_what_is_not_served_is_refused_by_a_named_rule():
    draw = Draw(1, 2, 1, 70, 140, 64, 64, element="bfloat16")
    staged = next(k for k in kernels() if k.metadata.design.staged)
    args = draw.arguments()
    run(args)
    dO = draw.random(*args.out.shape)
    status = staged.supports(on_meta(backward_of(args, dO, deterministic=True)))
    assert not status and "in any order" in str(status.error)


def test_the_least_room_serves():
    def rooms(D: int, D_v: int) -> set[tuple[int, int]]:
        args = Draw(1, 1, 1, 8, 8, D, D_v, element="bfloat16").arguments()
        backward = on_meta(backward_of(args, torch.zeros_like(args.out.tensor)))
        return {k.metadata.design.head_dim for k in kernels() if k.supports(backward)}

    assert rooms(64, 64) == {(64, 64)}
    assert rooms(72, 64) == {(128, 128)}
    assert rooms(192, 128) == {(192, 128)}
    assert rooms(200, 8) == {(256, 256)}
    assert rooms(264, 8) == set()
