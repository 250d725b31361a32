"""The C++ program of examples/cpp: it is built, and reads and loads what Python exported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.code_kernels import CodeGemm
from support.data import arguments_for
from support.kernels import kernels_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "cpp"

pytestmark = pytest.mark.skipif(
    not (shutil.which("cmake") and (shutil.which("c++") or os.environ.get("CXX"))),
    reason="there is no cmake, or no C++ compiler",
)


def ran(*command):
    blind = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=blind)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpp")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    for command in (
        ("cmake", "-S", EXAMPLE, "-B", folder, python, "-DCMAKE_BUILD_TYPE=Debug"),
        ("cmake", "--build", folder),
    ):
        done = ran(*command)
        assert done.returncode == 0, done.stderr
    return folder / "run_gemm"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    kernel = kernels_of(CodeGemm)[0]
    artifact = kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
    return artifact.export(tmp_path_factory.mktemp("exported") / "gemm.so")


def test_the_program_shows_the_manifest_and_finds_the_function(program, library):
    done = ran(program, library)
    assert done.returncode == 0, done.stderr
    text, _, rest = done.stdout.rpartition("}\n")
    assert json.loads(text + "}") == json.loads(Path(f"{library}.json").read_text())
    assert rest.startswith("loaded; ")


def test_the_program_says_what_it_cannot_load(program, tmp_path):
    (tmp_path / "gemm.so").write_bytes(b"no library")
    done = ran(program, tmp_path / "gemm.so")
    assert done.returncode == 1
    assert "gemm.so" in done.stderr
    assert ran(program).returncode == 2
