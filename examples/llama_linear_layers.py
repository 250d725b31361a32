"""The linear layers of a Llama-3-8B block: find kernels, compile, verify, run, compare with torch.

    python examples/llama_linear_layers.py

On a GPU each layer is timed beside torch.mm for several numbers of tokens, caches cold, the two
taking turns. Without one, the layers run on the CPU, and the GPU's candidates are compiled (not
run) for Ampere and Hopper: that shows what they take of a multiprocessor.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

import kernel_api as ka

# (in_features, out_features): hidden 4096, 32 query and 8 key/value heads of 128, MLP of 14336.
LAYERS = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
}
TOKENS = {"cuda": (1, 16, 64, 512, 2048, 8192), "cpu": (4, 64)}
TARGETS = ("sm_80", "sm_90a")
CANDIDATES_COMPILED = 2  # per layer and target
ROUNDS = {"cuda": 15, "cpu": 1}
WARM_UP_ROUNDS = {"cuda": 1, "cpu": 0}
L2_FLUSH_BYTES = 256 << 20

T = TypeVar("T")


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU: there is no GPU here"
    print(f"The linear layers of a Llama-3-8B block in bfloat16, on {where}.\n")
    explain_one(device)
    passed = run_layers(device)
    if device == "cpu":
        compile_candidates()
    if not passed:
        print("At least one result is wrong.", file=sys.stderr)
    return 0 if passed else 1


@functools.lru_cache(maxsize=1)
def weight_of(layer: str, device: str) -> torch.Tensor:
    """As torch.nn.Linear stores it: (out_features, in_features)."""
    in_features, out_features = LAYERS[layer]
    weight = torch.randn(out_features, in_features, dtype=torch.bfloat16, device=device)
    return weight.mul_(in_features**-0.5)


def layer_arguments(layer: str, tokens: int, device: str) -> ka.GemmArguments:
    """out = x · weight.t()"""
    weight = weight_of(layer, device)
    out_features, in_features = weight.shape
    x = torch.randn(tokens, in_features, dtype=torch.bfloat16, device=device)
    out = torch.empty(tokens, out_features, dtype=torch.bfloat16, device=device)
    return ka.GemmArguments(x, weight.t(), out)


def explain_one(device: str) -> None:
    print(f"{ka.explain(layer_arguments('qkv', TOKENS[device][-1], device))}\n")


# Run -------------------------------------------------------------------------------------


def run_layers(device: str) -> bool:
    """Every layer with every number of tokens; True if all results are right."""
    rows, all_passed = [], True
    cases = [(layer, tokens) for layer in LAYERS for tokens in TOKENS[device]]
    cases = [(layer, tokens) for layer, tokens in cases if fits(layer, tokens, device)]
    for layer, tokens in progress(cases, "layers"):
        args = layer_arguments(layer, tokens, device)
        kernels = ka.get_kernels(args)
        best = kernels[0]
        best.compile(args)
        verified = ka.verify(best, args)
        best.run(args)
        ours, theirs = times(args, best.prepare(args), device)
        all_passed &= bool(verified)
        rows.append(
            (
                layer,
                f"{tokens}",
                f"{args.M}x{args.N}x{args.K}",
                offers(kernels),
                best.metadata.kernel_name,
                f"{1e6 * ours:.1f}",
                f"{1e6 * theirs:.1f}",
                f"{theirs / ours:.2f}",
                f"{verified.error_ratio:.2f}" if verified else f"WRONG: {verified.reason}",
            )
        )
    columns = ("layer", "tokens", "MxNxK", "kernels", "first choice", "us", "torch us")
    show(f"On {device}", (*columns, "torch/ours", "error ratio"), rows)
    print("An error ratio of at most 1 is right: the error in units of what is allowed.\n")
    return all_passed


def fits(layer: str, tokens: int, device: str) -> bool:
    """Whether the GPU has memory to verify: about a dozen float64 copies of out."""
    if device == "cpu":
        return True
    needed = 100 * tokens * LAYERS[layer][1]
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        print(f"{layer} with {tokens} tokens is left out: verifying takes {needed >> 30} GiB.")
    return needed <= free


def offers(kernels: list[ka.Kernel]) -> str:
    """How many kernels each provider offers."""
    names = [kernel.metadata.provider for kernel in kernels]
    return " ".join(f"{name}:{names.count(name)}" for name in dict.fromkeys(names))


def times(args: ka.GemmArguments, launch: Callable[..., None], device: str) -> tuple[float, float]:
    """Median seconds of the launch and of torch.mm, which take turns."""
    x, weight, out = args.tensors
    calls = (lambda: launch(x, weight, out), lambda: torch.mm(x, weight, out=out))
    clock = gpu_seconds if device == "cuda" else cpu_seconds
    measured: tuple[list[float], list[float]] = ([], [])
    for turn in range(-WARM_UP_ROUNDS[device], ROUNDS[device]):
        for call, seconds in zip(calls, measured, strict=True):
            spent = clock(call)
            if turn >= 0:
                seconds.append(spent)
    return statistics.median(measured[0]), statistics.median(measured[1])


def gpu_seconds(call: Callable[[], Any]) -> float:
    """One launch with a cold L2 cache, by events on the stream."""
    torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    seconds: float = start.elapsed_time(end) * 1e-3
    return seconds


def cpu_seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# Compile ---------------------------------------------------------------------------------


def compile_candidates() -> None:
    """Compile the first candidates of each layer for GPUs that are not here.

    The artifacts serve every size of their signature, so that what one layer compiled another
    one finds in the cache.
    """
    work = [
        (target, layer, kernel)
        for target in TARGETS
        for layer in LAYERS
        for kernel in candidates(layer, target)
    ]
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    serves: dict[tuple[str, str], list[str]] = {}
    for target, layer, kernel in progress(work, "compilations"):
        key = (target, kernel.metadata.kernel_name)
        serves.setdefault(key, []).append(layer)
        started = time.perf_counter()
        artifact = kernel.compile(layer_arguments(layer, 64, "meta"), cc=target)
        seconds = time.perf_counter() - started
        if key not in found:
            found[key] = (*resources(artifact), f"{seconds:.1f}")
    rows = [(*key, ", ".join(serves[key]), *numbers) for key, numbers in found.items()]
    columns = ("target", "kernel", "first for", "registers", "smem", "spills", "threads", "s")
    show("Compiled for GPUs, not run: there is none here", columns, rows)


def candidates(layer: str, target: str) -> list[ka.Kernel]:
    args = layer_arguments(layer, 64, "meta")
    return ka.get_kernels(args, cc=target, providers=["cutedsl"])[:CANDIDATES_COMPILED]


def resources(artifact: ka.CompiledArtifact) -> tuple[str, ...]:
    found = artifact.resources
    if found is None:
        return ("-",) * 4
    values = (found.registers, found.shared_memory_bytes, found.spill_bytes, found.threads)
    return tuple(map(str, values))


# Show ------------------------------------------------------------------------------------


def progress(items: list[T], doing: str) -> Iterator[T]:
    """The items one by one; a bar, where rich and a terminal are there, or a line each."""
    if sys.stderr.isatty() and rich_is_here():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, doing, console=Console(stderr=True), transient=True)
        return
    for number, item in enumerate(items, 1):
        print(f"{doing}: {number} of {len(items)}", file=sys.stderr)
        yield item


def show(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if sys.stdout.isatty() and rich_is_here():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, tuple("-" * width for width in widths), *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()


def rich_is_here() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
