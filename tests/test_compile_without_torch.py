"""Products compile in processes that have not imported torch, to the same machine code."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sampling import EVERY

import kernel_api as ka
from kernel_api import _description, parallel
from kernel_api._sketch import Sketch
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl.machine_code import cubin
from kernel_api.targets import target


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def plain(M=512, N=512, K=512):
    return ka.GemmArguments(meta(M, K), meta(N, K).t(), meta(M, N))


def batched():
    return ka.GemmArguments(meta(3, 64, 128), meta(3, 128, 72), meta(3, 64, 72))


def tf32():
    A, B, out = (meta(128, 128, dtype=torch.float32) for _ in range(3))
    return ka.GemmArguments(A, B.t(), out, fp32_precision="tf32")


def float8():
    A, B = (meta(128, 128, dtype=torch.float8_e4m3fn) for _ in range(2))
    return ka.GemmArguments(A, B.t(), meta(128, 128))


def fused():
    M, N, K = 128, 256, 128
    out, bias = meta(M, N), meta(N)
    return ka.fusions.gemm_bias_activation(
        meta(M, K), meta(N, K).t(), out=out, bias=bias, activation="gelu"
    )


def unaligned():
    return ka.GemmArguments(meta(65, 67)[:, 1:], meta(66, 51), meta(65, 51))


#: Those in front are compiled every time.
MAKE = {
    "for Ampere": (plain, "80", "sm80_gemm"),
    "batched": (batched, "90a", "sm90_gemm"),
    "float8": (float8, "90a", "sm90_gemm_fp8"),
    "fused": (fused, "90a", "sm90_gemm"),
    "repacked": (unaligned, "90a", "sm90_gemm_repacked"),
    "plain": (plain, "90a", "sm90_gemm"),
    "tf32": (tf32, "90a", "sm90_gemm_tf32"),
}

COMPILES = """
import hashlib, json, sys
sys.modules["torch"] = None
from kernel_api import _description
from kernel_api.metadata import KernelMetadata
from kernel_api.providers.cutedsl.machine_code import cubin
found = {}
for name, job in json.load(sys.stdin).items():
    args = _description.rebuilt(job["arguments"], job["device"])
    artifact = KernelMetadata.from_dict(job["kernel"]).rebuild().compile(args, cc=job["target"])
    found[name] = hashlib.sha256(cubin(artifact.compiled_obj)).hexdigest(), repr(args.signature)
print(json.dumps(found))
"""


def job_of(make, cc, family):
    args = make()
    kernel = next(
        k for k in ka.get_kernels(args, cc=cc) if k.metadata.kernel_name.startswith(family)
    )
    job = parallel._job(0, kernel, args, target(cc))
    assert job is not None and not job.needs_torch
    return kernel, args, job.message


@pytest.mark.compile
def test_machine_code_is_the_same_without_torch(monkeypatch):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    jobs, expected = {}, {}
    for name in [*MAKE][: None if EVERY else 5]:
        make, cc, family = MAKE[name]
        kernel, args, jobs[name] = job_of(make, cc, family)
        code = cubin(kernel.compile(args, cc=cc).compiled_obj)
        expected[name] = [hashlib.sha256(code).hexdigest(), repr(args.signature)]
    done = subprocess.run(
        [sys.executable, "-c", COMPILES],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=3),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32, torch.int8]),
)
def test_a_sketch_is_like_the_tensor_that_it_stands_for(shape, start, turned, dtype):
    tensor = torch.empty((*shape[:-1], shape[-1] + start), dtype=dtype)[..., start:]
    operand = Operand(tensor.mT if turned else tensor)
    sketch = Operand(
        _description._empty(_description._tensor(operand), device=_description.SKETCHED)
    )
    assert isinstance(sketch.tensor, Sketch) and not sketch.has_data
    for name in ("shape", "stride", "dtype", "alignment", "unit_mode", "rank", "span"):
        assert getattr(sketch, name) == getattr(operand, name), name


def scaled():
    A, B = (meta(128, 128, dtype=torch.float8_e4m3fn) for _ in range(2))
    one = meta(dtype=torch.float32)
    mode = ka.ScaleMode.PER_TENSOR
    operands = ka.ScaledOperand(A, one, mode), ka.ScaledOperand(B.t(), one, mode)
    return ka.GemmArguments(*operands, meta(128, 128))


def attention():
    return ka.SdpaArguments(*(meta(1, 2, 64, 64) for _ in range(4)))


@pytest.mark.parametrize("make", [scaled, attention])
def test_workers_have_torch_for_all_that_may_ask_for_it(make):
    args = make()
    kernel = ka.get_kernels(args, cc="90a", providers=["cutedsl"])[0]
    assert parallel._needs_torch(kernel, args)


def test_kernels_of_others_may_ask_for_torch():
    class Own(type(ka.get_kernels(plain(), cc="90a", providers=["cutedsl"])[0])):
        pass

    Own.__module__ = "elsewhere"
    args = plain()
    found = ka.get_kernels(args, cc="90a", providers=["cutedsl"])[0]
    assert not parallel._needs_torch(found, args)
    assert parallel._needs_torch(object.__new__(Own), args)
