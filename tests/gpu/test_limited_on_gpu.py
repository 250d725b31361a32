"""Kernels that leave multiprocessors to others compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "support" / "limited.py"


@pytest.mark.parametrize("most", [7, 50])
def test_kernels_that_take_few_multiprocessors_are_right(most):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "cuda"],
        env={**os.environ, "KERNEL_API_MULTIPROCESSORS": str(most)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["taken"] == [most, most]
    assert not said["wrong"]
    assert len(said["right"]) == 7
    assert all(said["right"])
