"""docs/attention.md says what is there, and its code runs."""

import re
from pathlib import Path

import torch

import kernel_api as ka
from kernel_api import provider

DOCUMENT = Path(__file__).parents[1] / "docs" / "attention.md"


def test_the_code_of_the_document_runs(capsys):
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 8
    assert "reference.sdpa" in capsys.readouterr().out
    assert names["out"].shape == (2, 4, 48, 64)
    assert names["packed"].shape == (48, 4, 64)
    assert names["decoded"].shape == (2, 8, 1, 64)
    assert names["attended"].shape == (2, 16, 1, 512)
    assert names["step"].isfinite().all()
    assert names["mixed"].shape == (25, 4, 64)
    assert names["mixed"].isfinite().all()
    assert names["dq"].isfinite().all()


def test_every_family_is_named():
    text = DOCUMENT.read_text().replace("each also `..._backward`", "")
    named = set(re.findall(r"`([a-z0-9]+\.[a-z0-9_]+)`", text))
    named |= {f"{name}_backward" for name in named if name.startswith("torch.sdpa_")}
    registered = {
        family.family_name()
        for one in provider.providers()
        for family in one.families()
        if family.arguments in (ka.SdpaArguments, ka.SdpaBackwardArguments)
    }
    assert registered <= named


def test_masks_and_options_are_those_that_there_are():
    text = DOCUMENT.read_text()
    for mask in ("Causal", "SlidingWindow", "Padding", "BlockSparse", "MaskMod"):
        assert f"| `{mask}(" in text
        assert hasattr(ka.masks, mask)
    options = {*ka.SdpaArguments.tensor_names, "scale", "softcap", "mask", "score_mod", "dropout"}
    for option in options:
        assert f"`{option}`" in text, option
