"""Examples of the README that stand alone, run as they are."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def block_with(text):
    """The one Python example that has a text."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = (one for one in blocks if text in one)
    return found


@pytest.mark.parametrize(
    "text", ["ka.autotune(args)", "ep.glu_pair(", "ka.ops.gemm(x, weight.t())"]
)
def test_an_example_runs_alone(text, cache_directory, tmp_path):
    path = tmp_path / "example.py"  # an epilogue is read from its file
    path.write_text(block_with(text))
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "example"})
