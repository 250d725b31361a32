"""What was measured: how, where, of what, and the files that it is kept in.

A :class:`Measurement` is one kernel on one :class:`Problem` in one :class:`Environment`, which a
:class:`Policy` is part of. A :class:`Store` keeps each in a file of its own.
"""

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
