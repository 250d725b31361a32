"""The document "Adding a kernel" works with only the package's name put in place."""

import pytest
from support import seed_document

RUN = """kernels[0].run(args)
torch.testing.assert_close(out, A @ B)
"""

WITHOUT_GPU = """
for target in ("sm_80", "sm_90a"):
    artifact = kernels[0].compile(args, cc=target)
    print("compiled for", artifact.target, artifact.resources.threads, "threads")
try:
    kernels[0].run(args)
except kernel_api.errors.DeviceError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the document prints on meta tensors, compiled instead of run."""
    source = seed_document.text()
    assert source.count('device="cuda"') == 3
    assert source.count(RUN) == 1
    source = source.replace('device="cuda"', 'device="meta"').replace(RUN, WITHOUT_GPU)
    done = seed_document.run(source, tmp_path_factory.mktemp("document"))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout.splitlines()


def test_the_copy_of_the_code_is_the_code_of_the_document():
    copied = seed_document.code_lines(seed_document.copied_text())
    assert copied == seed_document.code_lines(seed_document.text())


def test_its_kernels_are_found_in_the_order_in_which_it_generates_them(printed):
    assert printed[:2] == ["F64GemmKernel_tile32x32_ttt", "F64GemmKernel_tile16x16_ttt"]


def test_its_kernel_compiles_for_ampere_and_hopper_without_a_gpu(printed):
    assert printed[2] == "compiled for sm_80 1024 threads"
    assert printed[3] == "compiled for sm_90a 1024 threads"


def test_its_kernel_is_not_run_on_meta_tensors(printed):
    assert printed[4] == "refused: A is a meta or fake tensor: it can be compiled for, not run on"
