"""What a kernel takes of a multiprocessor is read from its machine code, wherever that is."""

import pytest
import torch

import kernel_api as ka
from kernel_api.providers.cutedsl import compiler, machine_code

pytestmark = pytest.mark.compile


def compiled(cc):
    A, B, out = (torch.empty(40, 40, dtype=torch.bfloat16, device="meta") for _ in range(3))
    args = ka.GemmArguments(A, B, out)
    (kernel, *_) = ka.get_kernels(args, cc=cc, providers=["cutedsl"])
    return kernel.compile(args, cc=cc).compiled_obj


@pytest.mark.parametrize("cc", ["sm_80", "sm_90a"])
def test_resources_are_known_before_an_object_file_is_made(monkeypatch, cc):
    found = compiled(cc)
    code = compiler.object_code(found, machine_code.FUNCTION)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "object_code", lambda *_: pytest.fail("an object file is made"))
        constant = machine_code.cubin(found)
        resources = machine_code.resources(found)
    assert constant is not None and constant in code
    assert resources.registers > 0 and resources.threads > 0 and not resources.spill_bytes
    with monkeypatch.context() as patch:
        patch.setattr(machine_code, "_constants", lambda module: iter((b"", b"none")))
        assert machine_code.cubin(found) == constant
        assert machine_code.resources(found) == resources
