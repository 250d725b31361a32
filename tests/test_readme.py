"""Examples of the README that stand alone, run as they are."""

import re
from pathlib import Path

import pytest

import kernel_api as ka
from kernel_api.cli import main
from kernel_api.verification import judge

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


def test_what_a_server_chooses_is_compiled_ahead(cache_directory):
    block = block_with("ka.compile_all(chosen")
    assert "range(1, 8193)" in block
    found = {}
    exec(block.replace("range(1, 8193)", "(1, 2, 30, 700)"), found)
    assert 1 < len(found["chosen"]) < 4  # one token takes the kernel of two
    assert all(isinstance(one, ka.CompiledArtifact) for one in found["artifacts"])
    args = found["layer"](2)
    kernel = ka.get_kernels(args, cc=90)[0]
    assert kernel in found["chosen"]
    assert kernel.compile(args, cc=90) is found["artifacts"][list(found["chosen"]).index(kernel)]


def test_what_a_command_is_said_to_print_is_what_it_prints(capsys):
    """Some of its lines, in their order, with "..." for others; columns are as wide as they are."""
    (block,) = re.findall(r"^```\n\$ kernel-api (.*?)^```$", README.read_text(), re.M | re.S)
    command, *said = block.splitlines()
    assert main(command.split()) == 0
    printed = iter(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    for line in said:
        assert line == "..." or " ".join(line.split()) in printed


def test_the_fusion_computes_what_the_function_before_it_does(cache_directory, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(block_with("ep.glu_pair("))
    found = {"__name__": "example"}
    exec(compile(path.read_text(), str(path), "exec"), found)
    args, out = found["args"], found["out"]
    assert out is not args.out.tensor
    assert judge(args)
    args.out.tensor.copy_(out)
    assert judge(args)
