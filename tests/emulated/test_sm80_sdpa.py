"""Attention for Ampere is right: its PTX runs in the emulator, without a GPU.

Outputs are poisoned, and what lies between rows, behind lengths and in unused pages is NaN. With
KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import dataclasses
import os
import re

import pytest
import torch
from support.ptx import EmulationError
from support.ptx.kernel import poison
from support.sdpa_cases import BACKWARD, FORWARD, Case, bias_gradient, biased, check, hidden_by

from kernel_api import masks

pytestmark = pytest.mark.compile

EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))


def named(cases, first):
    chosen = cases if EVERY else [*cases[:first], *[c for c in cases if c.statistics][:1]]
    return {"argvalues": chosen, "ids": [case.name for case in chosen]}


@pytest.mark.parametrize("case", **named(FORWARD, 1))
def test_attention_is_right(case):
    check(case, case.arguments(), "sm80.sdpa_forward")


@pytest.mark.parametrize("case", **named(BACKWARD if EVERY else BACKWARD[1:], 1))
def test_gradients_are_right(case):
    check(case, case.backward(), "sm80.sdpa_backward")


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_rows_that_are_no_numbers_have_no_statistics_either(number):
    case = next(case for case in FORWARD if case.statistics)
    args = case.arguments()
    args.Q.tensor[0, 0, 130, 0] = float(number)
    args.K.tensor[0, 0, :, 0] = 1.0  # so that infinity is the score of every key
    check(case, args, "sm80.sdpa_forward")
    assert args.further["score_max"].tensor[0, 0, 130].isnan()


HIDING = [-1e10, torch.finfo(torch.float32).min]


@pytest.mark.parametrize("number", HIDING if EVERY else HIDING[:1])
def test_rows_that_a_large_negative_bias_hides_see_nothing(number):
    case = Case("hidden", options=hidden_by(number), statistics=True)
    args = case.arguments()
    check(case, args, "sm80.sdpa_forward")
    assert args.out.tensor[:, :, :3].count_nonzero() == 0
    case = dataclasses.replace(case, statistics=False, gradient=bias_gradient(2, 3))
    check(case, case.backward(), "sm80.sdpa_backward")


if EVERY:
    ORDERED = Case(
        "order",
        tile=(64, 64),
        sizes=(1, 2, 1, 130, 200, 64, 64),
        keywords={"mask": masks.SlidingWindow(90, 60)},
    )
    DISORDER = "with no barrier in between|reads what an asynchronous copy is on its way to"
    BARRIER = re.compile(r"(cp\.async\.wait_group\s+\d;\s*(?://.*\n\s*)*)bar\.sync\s+0;")

    # The last one of a kernel is for rows that visit nothing.
    @pytest.mark.parametrize(
        ("family", "chosen"),
        [("sm80.sdpa_forward", slice(2)), ("sm80.sdpa_backward", slice(0, 4, 2))],
    )
    def test_no_barrier_of_a_loop_can_be_left_out(family, chosen):
        args = ORDERED.backward() if "backward" in family else ORDERED.arguments()
        compiled = check(ORDERED, args, family)
        barriers = list(BARRIER.finditer(compiled.text))
        assert len(barriers) == (4 if "backward" in family else 3)
        for one in barriers[chosen]:
            text = compiled.text[: one.start()] + one[1] + compiled.text[one.end() :]
            with pytest.raises(EmulationError, match=DISORDER):
                compiled.with_text(text).run(args)

    def test_gradients_have_the_same_bits_in_every_run():
        case = Case("again", options=biased(3), gradient=bias_gradient(3))
        args = case.backward()
        compiled, results = check(case, args, "sm80.sdpa_backward"), []
        for seed in range(2):
            for output in args.outputs.values():
                poison(output.tensor)
            compiled.run(args, seed=seed)
            results.append([output.tensor.clone() for output in args.outputs.values()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
