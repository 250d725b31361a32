"""Problems and what was measured of them, in the words of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernel_api.dtypes import dtype

if TYPE_CHECKING:
    from kernel_api.tuning import Measurement, Problem


def kind(problem: Problem) -> str:
    return str(problem.to_dict()["signature"][0])


def operands(problem: Problem) -> list[list[Any]]:
    """Element type, rank, mode with stride 1 and scale mode of each."""
    found: list[list[Any]] = problem.to_dict()["signature"][1]
    return found


def sizes(problem: Problem) -> list[int]:
    """M, N and K, those that it has; of attention queries, keys and head dimension."""
    names = ("S_q", "S_kv", "D") if "S_q" in problem.sizes else "MNK"
    return [problem.sizes[name] for name in names if name in problem.sizes]


#: What is counted in front of the sizes.
_COUNTS = {"grouped_gemm": ("L",), "sdpa": ("B", "H"), "sdpa_backward": ("B", "H")}


def label(problem: Problem) -> str:
    """Such as ``gemm 4096x4096x1024 bf16 x bf16 -> bf16 tnt``; its hash where it is odd."""
    operation = kind(problem)
    try:
        tensors, epilogue = problem.matrices, problem.to_dict()["signature"][3]
        *read, written = [dtype(one[0]).short + _scale(one[3]) for one in tensors]
        letters = "".join({-1: "t", -2: "n"}.get(one[2], "-") for one in tensors)
        fused = "" if epilogue is None else f" epilogue {epilogue[0][:8]}"
    except (LookupError, TypeError, ValueError):
        return str(problem)
    shape = "x".join(map(str, sizes(problem)))
    counts = [problem.sizes.get(name, 1) for name in _COUNTS.get(operation, ("L",))]
    count = "" if counts == [1] else "".join(f"{one} x " for one in counts)
    return f"{operation} {count}{shape} {' x '.join(read)} -> {written} {letters}{fused}"


def _scale(mode: Any) -> str:
    return "" if mode is None else f"*{mode['scale'] if isinstance(mode, dict) else mode}"


def summary(rows: Sequence[Measurement]) -> dict[str, Any]:
    """The first of them, the first of torch, and what came of all; they begin with the fastest."""
    passed = [one for one in rows if one.passed]
    best = passed[0] if passed else None
    rival = next((one for one in passed if provider(one) == "torch"), None)
    return {
        "kernel": best.kernel.name if best is not None else None,
        "provider": provider(best) if best is not None else None,
        "us": best.median_us if best is not None else None,
        "spread_us": best.spread_us if best is not None else None,
        "torch_us": rival.median_us if rival is not None else None,
        "ratio": rival.median_us / best.median_us
        if rival is not None and best is not None
        else None,
        "statuses": dict(Counter(str(one.status) for one in rows)),
    }


def provider(one: Measurement) -> str | None:
    return one.kernel.metadata.get("provider")


#: Of a table of problems: where, what, and the fastest kernel.
COLUMNS = ("problem", "kernel", "us", "of torch", "candidates")


def cells(known: dict[str, Any]) -> tuple[str, ...]:
    """Of a summary, under ``COLUMNS``."""
    statuses = ", ".join(f"{count} {status}" for status, count in known["statuses"].items())
    us, ratio = known["us"], known["ratio"]
    return (
        known["problem"],
        known["kernel"] or "-",
        "-" if us is None else f"{us:.2f}",
        "-" if ratio is None else f"{ratio:.3f}x",
        statuses or "-",
    )
