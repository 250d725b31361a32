"""What older versions of torch cannot do, whatever is called there."""

import re

import pytest
import torch

_INSTALLED = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def since_torch(version: str, why: str) -> pytest.MarkDecorator:
    """For a test that needs it, and why."""
    asked = tuple(map(int, version.split(".")))
    return pytest.mark.skipif(asked > _INSTALLED, reason=f"torch before {version} {why}")


#: Guards of sizes of programs that torch.export made.
names_sizes = since_torch("2.10", "names sizes in guards that are not there")
#: Of ``Quantized.operand`` in graphs, see there.
reads_properties = since_torch("2.11", "reads no properties of tuples with names in graphs")
