"""The document "Adding a kernel" runs unchanged but for the package's name."""

import pytest
from support import seed_document

pytestmark = pytest.mark.gpu


def test_the_document_runs_with_nothing_but_the_package_renamed(tmp_path):
    source = seed_document.text()
    assert "cutlass_api" not in source
    done = seed_document.run(source, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "F64GemmKernel_tile32x32_ttt",
        "F64GemmKernel_tile16x16_ttt",
    ]
