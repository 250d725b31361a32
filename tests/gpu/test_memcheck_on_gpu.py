"""Kernels of every family touch no memory but their own, as compute-sanitizer sees it.

The tool comes with CUDA, or in the package ``nvidia-cuda-sanitizer-api``; without it these tests
are skipped. A quarter of an hour.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.memcheck import PROBLEMS, chosen

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parents[1] / "support" / "memcheck.py"


def _tool():
    found = shutil.which("compute-sanitizer")
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec is not None else ():
        found = found or next(map(str, Path(folder).glob("*/bin/compute-sanitizer")), None)
    return found


TOOL = _tool()
needs_the_tool = pytest.mark.skipif(TOOL is None, reason="there is no compute-sanitizer")


def checked(*program):
    # Of what torch keeps to lend again, a part behind a tensor would be no error.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment.pop("KERNEL_API_CHECK_OFFSETS", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parents[1]), *filter(None, sys.path)])
    command = [
        TOOL,
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "9",
        sys.executable,
        *program,
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=PROGRAM.parent,  # what python is given as text finds packages beside it first
        check=False,
    )


@needs_the_tool
@pytest.mark.parametrize("problem", PROBLEMS)
def test_nothing_is_touched_beyond_what_is_given(problem):
    if not chosen(PROBLEMS[problem](), None):
        pytest.skip("this GPU has no kernel for it")
    found = checked(str(PROGRAM), problem)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert f"{problem}: s" in found.stdout
    assert "ERROR SUMMARY: 0 errors" in found.stdout


FAR = """
import torch, kernel_api as ka
from support.memcheck import E, K, N, T, drawn, empty
index = empty(T, element=torch.int32)
offsets = empty(E, element=torch.int32)
args = drawn(ka.GroupedGemmArguments(
    empty(T, K), empty(E, N, K).mT, empty(T, N), offsets, row_index=index
))
args.row_index.tensor.fill_(1 << 30)
ka.get_kernels(args, providers=["cutedsl"])[0].run(args)
torch.cuda.synchronize()
"""


@needs_the_tool
def test_the_tool_sees_rows_that_are_picked_where_there_are_none():
    found = checked("-c", FAR)
    assert found.returncode != 0
    assert "Invalid __global__ read" in found.stdout, found.stdout[-2000:] + found.stderr[-2000:]
