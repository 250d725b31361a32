"""Threads that find, compile and run kernels at the same time; libraries without the compiler."""

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from support.data import gemm_arguments

import kernel_api as ka
from kernel_api.errors import LinkError
from kernel_api.providers.cutedsl import linking
from kernel_api.providers.reference.gemm import product
from kernel_api.verification import FACTOR_REORDERED, judge, poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

#: The issue's number is 60.
SECONDS = float(os.environ.get("KERNEL_API_TEST_SECONDS", "15"))
THREADS = 8


# Threads ----------------------------------------------------------------------------------


class Worker(threading.Thread):
    """Takes random problems until the time is up; on a stream of its own."""

    TYPES = (("bf16",) * 3, ("f16", "f16", "f32"), ("bf16", "bf16", "f32"))

    def __init__(self, number, until):
        super().__init__(daemon=True)
        self.chosen, self.until = random.Random(number), until
        self.turns, self.wrong, self.raised = 0, [], None

    def run(self):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while time.monotonic() < self.until and not self.wrong:
                    self.chosen.choice((self.exact, self.exact, self.one_call, self.fused))()
                    self.turns += 1
        except BaseException as error:
            self.raised = error
            raise

    def problem(self):
        choice = self.chosen.choice
        M, N, K = (choice((8, 64, 136, 200)) for _ in range(3))
        return gemm_arguments(
            M, N, K, choice((None, 2)), types=choice(self.TYPES),
            layouts=choice(("ttt", "tnt", "ntt")), device="cuda", values="integers",
            seed=self.chosen.randrange(1000),
        )  # fmt: skip

    def exact(self):
        """A kernel of those that are offered, also one that nobody has compiled."""
        args = self.problem()
        kernels = ka.get_kernels(args, providers=["cutedsl"])
        kernel = self.chosen.choice(kernels[:4])
        poison(args.out.tensor)
        kernel.run(args)
        torch.cuda.current_stream().synchronize()
        A, B, out = args.tensors
        if not torch.equal(out, product(A, B).to(out.dtype)):
            self.wrong.append((kernel, args))
        if self.turns % 16 == 0:
            assert ka.explain(args).accepted

    def one_call(self):
        args = self.problem()
        A, B, out = args.tensors
        found = ka.ops.gemm(A, B, out_dtype=out.dtype)
        torch.cuda.current_stream().synchronize()
        if not torch.equal(found, product(A, B).to(out.dtype)):
            self.wrong.append(("ops.gemm", args))

    def fused(self):
        A, B, out = (torch.randn(128, 128, device="cuda").bfloat16() for _ in range(3))
        amax = torch.empty((), device="cuda")
        alpha = self.chosen.uniform(-2, 2)
        ka.ops.gemm_amax(A, B, out=out, amax=amax, alpha=alpha)
        torch.cuda.current_stream().synchronize()
        args = ka.fusions.gemm_amax(A, B, out=out, amax=amax, alpha=alpha)
        if not judge(args, FACTOR_REORDERED):
            self.wrong.append(("ops.gemm_amax", args))


def test_threads_discover_compile_and_run_at_the_same_time():
    workers = [Worker(number, time.monotonic() + SECONDS) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS + 300)
    assert not any(worker.is_alive() for worker in workers)
    assert [worker.raised for worker in workers] == [None] * THREADS
    assert [worker.wrong for worker in workers] == [[]] * THREADS
    print(f"{sum(worker.turns for worker in workers)} problems in {SECONDS} s")
    assert all(worker.turns for worker in workers)


# Without the compiler ---------------------------------------------------------------------

_MAKE = """
    import sys
    sys.path[:] = json.loads(sys.argv[1])
    import torch
    import kernel_api as ka

    assert not torch.cuda.is_available()
    folder, cc = sys.argv[2:]

    def meta(*shape, kind=torch.bfloat16):
        return torch.empty(shape, dtype=kind, device="meta")

    A, B, out = meta(256, 192), meta(192, 256), meta(256, 256)
    plain = ka.GemmArguments(A, B, out)
    fused = ka.fusions.gemm_amax(A, B, out=out, amax=meta(kind=torch.float32), alpha=0.5)
    made = []
    for name, args in (("plain", plain), ("fused", fused)):
        kernels = ka.get_kernels(args, cc=cc, providers=["cutedsl"])
        kernels[0].compile(args, cc=cc).export(f"{folder}/{name}.so")
    parts = [k for k in ka.get_kernels(plain, cc=cc, providers=["cutedsl"])
             if getattr(k.metadata.design, "split_k", 1) > 1]
    if parts:
        parts[0].compile(plain, cc=cc).export(f"{folder}/split.so")
"""

_RUN = """
    import importlib.abc, os, sys, time
    sys.path[:] = json.loads(sys.argv[1])

    class Blocked(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Blocked())
    import torch, tvm_ffi
    import kernel_api as ka
    from kernel_api.verification import FACTOR_REORDERED, judge, poison

    folder = sys.argv[2]
    A, B = (torch.randn(s, device="cuda").bfloat16() for s in ((512, 448), (448, 384)))
    out = torch.empty(512, 384, device="cuda", dtype=torch.bfloat16)
    amax = torch.empty((), device="cuda")
    found = {}
    for name in sorted(n for n in os.listdir(folder) if n.endswith(".so")):
        started = time.perf_counter()
        artifact = ka.load(os.path.join(folder, name))
        milliseconds = 1e3 * (time.perf_counter() - started)
        args = ka.GemmArguments(A, B, out)
        if name == "fused.so":
            args = ka.fusions.gemm_amax(A, B, out=out, amax=amax, alpha=0.75)
        poison(out), poison(amax)
        artifact.kernel.run(args, artifact)
        torch.cuda.synchronize()
        found[name] = [milliseconds, str(judge(args, FACTOR_REORDERED)), str(artifact.target)]
    assert not any(n.partition(".")[0] == "cutlass" for n in sys.modules)
    print(json.dumps(found))
"""


def python(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", "import json\n" + textwrap.dedent(code), json.dumps(sys.path),
         *map(str, arguments)],
        capture_output=True, text=True, timeout=400, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Made by a process that sees no GPU."""
    try:
        linking.toolchain()
    except LinkError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("libraries")
    cc = "{}.{}".format(*torch.cuda.get_device_capability())
    python(_MAKE, folder, cc, CUDA_VISIBLE_DEVICES="")
    return folder


def test_libraries_made_without_a_gpu_run_without_the_compiler(libraries):
    found = json.loads(python(_RUN, libraries).splitlines()[-1])
    print(found)
    assert {"plain.so", "fused.so"} <= set(found)
    for milliseconds, verdict, target in found.values():
        assert verdict.startswith("passed")
        assert target.startswith("sm_")
        assert milliseconds < 1000  # benchmarks/host.py holds it to 5


def _plain(metadata):
    """Whether the kernel takes its three operands and nothing else."""
    return metadata.targets == ("sm_80",) and getattr(metadata.design, "split_k", 1) == 1


@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("nvcc")), reason="there is no cmake, or no toolkit"
)
def test_the_program_in_cpp_runs_a_library(tmp_path):
    kinds = {"dtype": torch.bfloat16, "device": "meta"}
    args = ka.GemmArguments(*(torch.empty(256, 256, **kinds) for _ in range(3)))
    cc = "{}.{}".format(*torch.cuda.get_device_capability())
    offered = ka.get_kernels(args, _plain, cc=cc, providers=["cutedsl"])
    offered[0].compile(args, cc=cc).export(tmp_path / "gemm.so")
    source = Path(__file__).parents[2] / "examples" / "cpp"
    for command in (
        ("cmake", "-S", source, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}"),
        ("cmake", "--build", tmp_path),
        (tmp_path / "run_gemm", tmp_path / "gemm.so"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("passed\n")
