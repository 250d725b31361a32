"""What was measured: how, where, of what, and the files that it is kept in.

A :class:`Measurement` is one kernel on one :class:`Problem` in one :class:`Environment`, which a
:class:`Policy` is part of. A :class:`Store` keeps each in a file of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_api._lazy import attribute

if TYPE_CHECKING:
    from kernel_api.errors import BenchError
    from kernel_api.tuning import heuristics
    from kernel_api.tuning._autotune import TuningResult, autotune
    from kernel_api.tuning._environment import Environment
    from kernel_api.tuning._kernel import KernelIdentity
    from kernel_api.tuning._lookup import tuned
    from kernel_api.tuning._measurement import Measurement, Status
    from kernel_api.tuning._policy import Policy
    from kernel_api.tuning._problem import Problem
    from kernel_api.tuning._store import Store

#: Loaded on first use: a thread that imports ``heuristics`` by itself waits for this package, which
#: may not wait for it at the same time.
_HOME_OF = {
    "BenchError": "errors",
    "Environment": "tuning._environment",
    "KernelIdentity": "tuning._kernel",
    "Measurement": "tuning._measurement",
    "Policy": "tuning._policy",
    "Problem": "tuning._problem",
    "Status": "tuning._measurement",
    "Store": "tuning._store",
    "TuningResult": "tuning._autotune",
    "autotune": "tuning._autotune",
    "tuned": "tuning._lookup",
}

__all__ = [
    "BenchError",
    "Environment",
    "KernelIdentity",
    "Measurement",
    "Policy",
    "Problem",
    "Status",
    "Store",
    "TuningResult",
    "autotune",
    "heuristics",
    "tuned",
]


if not TYPE_CHECKING:  # to which every name would be there, and of any type

    def __getattr__(name: str) -> Any:
        if name == "heuristics":
            return importlib.import_module(f"{__name__}.heuristics")
        return attribute(__name__, name, _HOME_OF)


def __dir__() -> list[str]:
    return sorted(__all__)
