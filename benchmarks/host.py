"""Suite host: what a call costs on the CPU, and a process until its first result.

python benchmarks/host.py [--out FOLDER] [--tests]

Prints a line per number that has a limit: its name, what was measured, the limit, and ok or NO.
With --tests the tests that stand for the other promises are run, at their full sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import moe_layer
import rows
import torch

import kernel_api as ka
from kernel_api import devices
from kernel_api._first_kernel import first_kernel
from kernel_api.errors import LinkError
from kernel_api.providers.cutedsl import compiler

SUITE = "host"
ROOT = Path(__file__).parents[1]

NUMBER, ROUNDS, PAUSE_AFTER = 1000, 11, 200
PAUSE_AFTER_LAYERS = 20
RAW, TORCH, OPS = "raw TVM-FFI call", "torch.mm(A, B, out=out)", "ops.gemm(A, B, out=out)"
PREPARED, WHOLE_WAY = "prepared launch", "GemmArguments, get_kernels (repeated), run"
ARGUMENTS, REPEATED = "GemmArguments(A, B, out)", "get_kernels(args), repeated"

Calls = dict[str, Callable[[], Any]]


class Limited(NamedTuple):
    """A number that has a limit."""

    name: str
    value: float
    limit: float
    unit: str = "us"

    def __str__(self) -> str:
        verdict = "ok" if self.value <= self.limit else "NO"
        return f"{self.name:62} {self.value:10.2f} {self.limit:10.2f} {self.unit:3} {verdict}"


# Calls ------------------------------------------------------------------------------------


def microseconds(calls: Calls, pause_after: int = PAUSE_AFTER) -> dict[str, harness.Timing]:
    """Host time of every call, in turns; the GPU drains after so many calls, so that the queue of
    launches never fills."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            spent = 0.0
            for _ in range(NUMBER // pause_after):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(pause_after):
                    call()
                spent += time.perf_counter() - started
            samples[name].append(spent / NUMBER * 1e6)
    torch.cuda.synchronize()
    return {name: harness.Timing(found) for name, found in samples.items()}


def matrices(*shape: int, count: int = 3) -> Iterator[torch.Tensor]:
    return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count))


def plain_calls(kernel: ka.Kernel, args: ka.GemmArguments) -> Calls:
    A, B, out = args.tensors
    artifact = kernel.compile(args)
    raw = compiler.raw_function(artifact.compiled_obj)
    scalars = kernel.scalars(devices.sm_count(0))
    launch = kernel.prepare(args)

    def whole_way() -> None:
        made = ka.GemmArguments(A, B, out)
        ka.get_kernels(made)[0].run(made)

    return {
        RAW: lambda: raw(A, B, out, *scalars),
        TORCH: lambda: torch.mm(A, B, out=out),
        PREPARED: lambda: launch(A, B, out),
        OPS: lambda: ka.ops.gemm(A, B, out=out),
        "torch.mm(A, B)": lambda: torch.mm(A, B),
        "ops.gemm(A, B)": lambda: ka.ops.gemm(A, B),
        "run(args, artifact)": lambda: kernel.run(args, artifact),
        "run(args)": lambda: kernel.run(args),
        ARGUMENTS: lambda: ka.GemmArguments(A, B, out),
        REPEATED: lambda: ka.get_kernels(args),
        WHOLE_WAY: whole_way,
        "supports(args)": lambda: kernel.supports(args),
    }


def fused_calls() -> Calls:
    """What another operand or output adds, beside torch's own calls for the same."""
    A, B, out, C = matrices(64, 64, count=4)
    bias, amax = torch.randn(64, device="cuda"), torch.empty((), device="cuda")
    half = out[:, :32].contiguous()
    args = ka.fusions.gemm(A, B, out=out, bias=bias, alpha=0.5)
    launch = ka.get_kernels(args, providers=["cutedsl"])[0].prepare(args)
    typed = bias.bfloat16()
    return {
        "prepared launch with bias and alpha": lambda: launch(A, B, out, bias=bias, alpha=0.5),
        "torch.addmm(bias, A, B, out=out)": lambda: torch.addmm(typed, A, B, out=out),
        "ops.gemm(A, B, out=out, bias=bias)": lambda: ka.ops.gemm(A, B, out=out, bias=bias),
        "ops.gemm_residual(A, B, out=out, C=C, beta=0.5)": lambda: ka.ops.gemm_residual(
            A, B, out=out, C=C, beta=0.5
        ),
        "ops.gemm_swiglu(A, B, out=half)": lambda: ka.ops.gemm_swiglu(A, B, out=half),
        "ops.gemm_amax(A, B, out=out, amax=amax)": lambda: ka.ops.gemm_amax(
            A, B, out=out, amax=amax
        ),
    }


def calls_of_8_bits() -> Calls:
    """Of operands with scales, beside torch's own."""
    (A,), (B,) = (matrices(64, 64, count=1) for _ in range(2))
    x, y = (ka.ops.quantize(one, "row") for one in (A, B))
    of_B = ka.ScaledOperand(y.out.t(), y.scale, ka.ScaleMode.PER_ROW)
    mm = (x.out, y.out.t(), x.scale.unsqueeze(1), y.scale.unsqueeze(0))
    return {
        "torch._scaled_mm(A, B, ...)": lambda: torch._scaled_mm(*mm, out_dtype=torch.bfloat16),
        "ops.gemm(A, B) of scaled operands": lambda: ka.ops.gemm(x.operand, of_B),
        'ops.quantize(A, "row")': lambda: ka.ops.quantize(A, "row"),
    }


def calls_of_rows() -> Calls:
    """Of norms and of rows that are moved, beside torch's own."""
    (x, out, residual), (weight,) = matrices(64, 64), matrices(64, count=1)
    scale, of_8_bits = torch.ones((), device="cuda"), torch.empty_like(x, dtype=torch.float8_e4m3fn)
    index = torch.randperm(64, device="cuda").int().unsqueeze(1)
    norm = torch.nn.functional.rms_norm
    return {
        "torch.nn.functional.rms_norm(x, ...)": lambda: norm(x, (64,), weight),
        "ops.rmsnorm(x, weight=weight)": lambda: ka.ops.rmsnorm(x, weight=weight),
        "ops.rmsnorm(x, weight=weight, out=out)": lambda: ka.ops.rmsnorm(x, weight=weight, out=out),
        "ops.rmsnorm(x, weight=weight, residual=r, residual_out=r, out=out)": lambda: (
            ka.ops.rmsnorm(x, weight=weight, residual=residual, residual_out=residual, out=out)
        ),
        "nn.rmsnorm(x, weight)": lambda: ka.nn.rmsnorm(x, weight),
        "ops.rmsnorm_quantize(x, weight=weight)": lambda: ka.ops.rmsnorm_quantize(
            x, "row", weight=weight
        ),
        'ops.quantize(x, "tensor", scale=scale, out=out)': lambda: ka.ops.quantize(
            x, "tensor", scale=scale, out=of_8_bits
        ),
        "ops.gather_rows(x, row_index)": lambda: ka.ops.gather_rows(x, index),
        "ops.scatter_rows(x, row_index, out=out)": lambda: ka.ops.scatter_rows(x, index, out=out),
    }


def calls_of_layers() -> Calls:
    """Of layers of experts and of a matrix with one scale, which several launches make, beside the
    layer of torch, compiled."""
    layer = moe_layer.example().Layer(experts=8, chosen=2, hidden=256, inner=256)
    weights = layer.weights("cuda")
    tokens = layer.tokens(16, "cuda")
    by_rows = tuple(map(moe_layer.by_rows, weights))
    in_blocks = tuple(map(moe_layer.in_blocks, weights))
    leaves = [one.detach().requires_grad_() for one in (tokens[0], tokens[2], *weights)]
    compiled = torch.compile(moe_layer.example().layer_of_torch)

    dy = torch.randn_like(tokens[0])

    def step() -> Any:
        x, weight, *experts = leaves
        y = ka.nn.moe(x, tokens[1], weight, *experts)
        return torch.autograd.grad(y, leaves, dy)

    return {
        "the layer of torch, compiled": lambda: compiled(*tokens, *weights),
        "nn.moe": lambda: ka.nn.moe(*tokens, *weights),
        "nn.moe, experts of 8 bits by rows": lambda: ka.nn.moe(*tokens, *by_rows),
        "nn.moe, experts of 8 bits in blocks": lambda: ka.nn.moe(*tokens, *in_blocks),
        "nn.moe and its gradients": step,
        'ops.quantize(x, "tensor")': lambda: ka.ops.quantize(tokens[0], "tensor"),
    }


def of_new_sizes(ask: Callable[[ka.GemmArguments], Any], smallest: int) -> harness.Timing:
    """A question about sizes that nothing was asked about before."""
    samples = []
    for size in range(smallest, smallest + 16 * 20, 16):
        args = ka.GemmArguments(*matrices(size, size))
        started = time.perf_counter()
        ask(args)
        samples.append((time.perf_counter() - started) * 1e6)
    return harness.Timing(samples)


def calls_of_new_tokens() -> dict[str, harness.Timing]:
    """One-call forms of as many tokens as no call had before, of layers that were called."""
    (B, gate), (weight,) = matrices(64, 64, count=2), matrices(64, count=1)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "ops.gemm(A, B), new sizes": lambda x: ka.ops.gemm(x, B),
        "ops.gemm_swiglu(A, B), new sizes": lambda x: ka.ops.gemm_swiglu(x, gate),
        "ops.rmsnorm(x, weight=weight), new sizes": lambda x: ka.ops.rmsnorm(x, weight=weight),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for tokens in range(2049, 2049 + 60):
        (x,) = matrices(tokens, 64, count=1)
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            call(x)
            samples[name].append((time.perf_counter() - started) * 1e6)
    return {name: harness.Timing(found) for name, found in samples.items()}


# Processes --------------------------------------------------------------------------------

_PROCESS = """
import gc, json, sys, time
sys.path[:] = json.loads(sys.argv[1])
import torch, tvm_ffi
A, B, out = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(3))
torch.cuda.synchronize()
gc.collect()  # of what torch has loaded: it is due, and goes through all of that
marks = [time.perf_counter()]
import kernel_api as ka
from kernel_api import provider
provider.providers()
marks.append(time.perf_counter())
args = ka.GemmArguments(A, B, out)
marks.append(time.perf_counter())
kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
kernel.run(args)
marks.append(time.perf_counter())
torch.cuda.synchronize()
compiled = any(name.partition(".")[0] == "cutlass" for name in sys.modules)
loads = []
for path in sys.argv[2:]:
    started = time.perf_counter()
    ka.load(path)
    loads.append(1e3 * (time.perf_counter() - started))
verified = bool(ka.verify(kernel, args))
spent = [1e3 * (end - start) for start, end in zip(marks, marks[1:])]
print(json.dumps({"ms": spent, "compiled": compiled, "loads": loads, "verified": verified}))
"""


def process_numbers() -> Iterator[Limited]:
    """Of a second process on a cache that a first one filled."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        environment = {**os.environ, "KERNEL_API_CACHE_DIR": f"{folder}/cache"}
        for name in ("KERNEL_API_DISABLE_CACHE", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        copies = library_copies(Path(folder))
        command = [sys.executable, "-c", _PROCESS, json.dumps(sys.path), *copies]
        found: dict[str, Any] = {}
        for _ in range(3):  # the first fills the caches, the second the system's
            started = time.perf_counter()
            ran = subprocess.run(command, capture_output=True, text=True, env=environment)
            seconds = time.perf_counter() - started
            if ran.returncode:
                raise RuntimeError(ran.stderr)
            found = json.loads(ran.stdout.splitlines()[-1])
    if not found["verified"]:
        raise RuntimeError("the second process computed something else")
    ours, arguments, launched = found["ms"]
    yield Limited("second process: compilers started", float(found["compiled"]), 0, "")
    yield Limited("second process: get_kernels to launch", launched, 50, "ms")
    yield Limited("second process: all of it ours", ours + arguments + launched, 50, "ms")
    yield Limited("second process: start to end, verified", seconds, 3, "s")
    if found["loads"]:
        typical = harness.Timing(found["loads"]).median
        yield Limited("load of a library", typical, 5, "ms")


def library_copies(folder: Path, count: int = 5) -> list[str]:
    """The same library under several names, so that each is loaded anew."""
    args = ka.GemmArguments(*matrices(512, 512))
    kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
    try:
        first = kernel.compile(args).export(folder / "0.so")
    except LinkError as error:
        print(f"no library is loaded: {error}")
        return []
    return [str(shutil.copy(first, folder / f"{number}.so")) for number in range(1, count + 1)]


# Tests ------------------------------------------------------------------------------------

_SIZES = {
    "KERNEL_API_TEST_RACE": "16x50",
    "KERNEL_API_TEST_KILLS": "40",
    "KERNEL_API_TEST_SECONDS": "60",
}
_TESTS = {
    "16 processes x 50 kernels compile each once; flips are found": "test_cache.py -k race",
    "40 writers are killed and leave nothing unreadable": "test_cache.py -k killed",
    "8 threads for 60 s": "gpu/test_stress_on_gpu.py -k threads",
    "libraries made without a GPU, run without the compiler": "gpu/test_stress_on_gpu.py -k libr",
    "the program in C++": "gpu/test_stress_on_gpu.py -k cpp",
    "graphs of every family, streams, devices": "gpu/test_graphs_on_gpu.py",
    "wrong device, target, signature, file: named errors": "test_aot.py",
}


def test_lines() -> Iterator[str]:
    """Each ends like the line of a number; what pytest skipped is said."""
    environment = {**os.environ, **_SIZES}
    for name, what in _TESTS.items():
        file, *chosen = what.split()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        ran = subprocess.run(
            [*command, f"tests/{file}", *chosen, "--timeout", "900"],
            capture_output=True, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        summary = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr[-200:]
        yield f"{name:62} {summary} {'ok' if ran.returncode == 0 else 'NO'}"


# All --------------------------------------------------------------------------------------


def limits(times: dict[str, harness.Timing]) -> list[Limited]:
    """The calls' numbers that have limits."""
    raw, mm = times[RAW].median, times[TORCH].median
    return [
        Limited(f"{PREPARED}, over the {RAW}", times[PREPARED].median - raw, 1.5),
        Limited(OPS, times[OPS].median, 9),
        Limited(f"{OPS}, beside {TORCH}", times[OPS].median, mm),
        Limited(WHOLE_WAY, times[WHOLE_WAY].median, 20),
        Limited(ARGUMENTS, times[ARGUMENTS].median, 10),
        Limited(REPEATED, times[REPEATED].median, 50),
    ]


def show(lines: Iterable[object]) -> None:
    for line in lines:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tests", action="store_true")
    options = parser.parse_args()
    args = ka.GemmArguments(*matrices(64, 64))
    kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
    if kernel.takes_more:
        raise SystemExit(f"{kernel} takes a workspace, which the raw call is not given")
    kernel.run(args)
    verified = bool(ka.verify(kernel, args))
    of_rows = {**calls_of_8_bits(), **calls_of_rows()}
    times = microseconds({**plain_calls(kernel, args), **fused_calls(), **of_rows})
    times |= microseconds(calls_of_layers(), PAUSE_AFTER_LAYERS)
    times |= calls_of_new_tokens()
    times["get_kernels(args), new sizes"] = of_new_sizes(ka.get_kernels, 96)
    times["the first of them alone, new sizes"] = of_new_sizes(first_kernel, 104)
    peer = (RAW, times[RAW])
    policy = f"host time per call, in turns, median of {ROUNDS} x {NUMBER} calls"
    measured = [
        rows.row(SUITE, name, (kernel.metadata.kernel_name, timing), peer, verified, policy)
        for name, timing in times.items()
    ]
    for one in measured:
        over = one["subject_us"] - one["peer_us"]
        print(f"{one['problem']:52} {one['subject_us']:8.2f} us  ({over:+.2f} over raw)")
    print(rows.write(rows.path_of(SUITE, options.out), measured))
    print(f"{'name':62} {'value':>10} {'limit':>10}")
    show(limits(times))
    show(process_numbers())
    if options.tests:
        show(test_lines())


if __name__ == "__main__":
    main()
