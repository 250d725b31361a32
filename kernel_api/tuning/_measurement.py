"""What came of one kernel on one problem."""

from __future__ import annotations

import enum
import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kernel_api.errors import ArgumentError
from kernel_api.tuning._canonical import as_object, taken
from kernel_api.tuning._kernel import KernelIdentity
from kernel_api.tuning._problem import Problem


class Status(str, enum.Enum):
    """What came of a candidate.

    PASSED: right, and timed. WRONG: its result is not, or it wrote where it must not.
    COMPILE_ERROR, RUNTIME_ERROR: it raised, or its process died. TIMEOUT: it did not come to an
    end. OOM: memory did not suffice, also where its compiler was killed, as systems do then.
    """

    PASSED = "PASSED"
    WRONG = "WRONG"
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    TIMEOUT = "TIMEOUT"
    OOM = "OOM"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Measurement:
    """What came of one kernel on one problem.

    Attributes:
        kernel: Which kernel, and the state of its sources.
        problem: What it computed.
        environment: The hash of the environment.
        status: What came of it.
        message: Why it did not pass; empty if it did.
        times_us: Microseconds per launch, one of each round, in their order; of a kernel that
            passed at least one, of others none. What all candidates that were timed together have
            in common from round to round, which are clocks that change, is taken off. One that
            fell behind early has fewer rounds than the policy says.
        error_ratio: The largest error over the one that is allowed; None if it was not compared.
        sm_mhz: Clock of the multiprocessors while it was timed, if known.
        memory_mhz: Clock of the memory, if known.
        date: When; with a time zone.
        timeout_s: Of one that did not come to an end: seconds that no step of it was to take, if
            known; of others None.

    Raises:
        ArgumentError: fields contradict each other.
    """

    kernel: KernelIdentity
    problem: Problem
    environment: str
    status: Status
    message: str = ""
    times_us: tuple[float, ...] = ()
    error_ratio: float | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    date: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", _status(self.status))
        object.__setattr__(self, "times_us", tuple(map(_microseconds, self.times_us)))
        name = self.kernel.name
        if self.passed and not self.times_us:
            raise ArgumentError(f"{name} is PASSED without a time; pass times_us, one of a round")
        if not self.passed and self.times_us:
            raise ArgumentError(
                f"{name} is {self.status} with {len(self.times_us)} times; only a kernel that "
                f"passed has times, leave times_us out"
            )
        if not self.passed and not self.message:
            raise ArgumentError(f"{name} is {self.status} without a message; say why")
        if self.date.tzinfo is None:
            raise ArgumentError(
                f"date is {self.date} without a time zone; pass datetime.now(timezone.utc)"
            )

        if self.timeout_s is not None and self.status is not Status.TIMEOUT:
            raise ArgumentError(
                f"{name} is {self.status} with timeout_s = {self.timeout_s}; only what did not end "
                f"in time has one, leave it out"
            )

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED

    @property
    def median_us(self) -> float:
        """Microseconds per launch, the median of the rounds; infinite if it did not pass."""
        return statistics.median(self.times_us) if self.times_us else math.inf

    @property
    def spread_us(self) -> float:
        """Microseconds that the middle half of the rounds spans; 0 for less than two."""
        if len(self.times_us) < 2:
            return 0.0
        quarters = statistics.quantiles(self.times_us, n=4, method="inclusive")
        return quarters[2] - quarters[0]

    @property
    def rounds(self) -> int:
        return len(self.times_us)

    def stands_for(self, timeout_s: float) -> bool:
        """Whether it need not be made again, with so many seconds for each step: memory that did
        not suffice may be free by now, and more time than it had may be enough."""
        if self.status is Status.TIMEOUT:
            return self.timeout_s is not None and timeout_s <= self.timeout_s
        return self.status is not Status.OOM

    def replaces(self, other: Measurement) -> bool:
        """Whether it is the one to keep of two of the same kernel and problem from different
        places: the newer one, but for one that lacked memory or time where the other passed."""
        lacked = self.status in (Status.OOM, Status.TIMEOUT)
        if lacked and other.passed and other.kernel == self.kernel:
            return False
        return other.date < self.date

    def place(self, rounds: int) -> tuple[Any, ...]:
        """To sort by: those that were timed in so many rounds or more, from fast to slow, then
        those that fell behind before, then those that did not pass."""
        return not self.passed, self.rounds < rounds, self.median_us, self.kernel.name

    def to_dict(self) -> dict[str, Any]:
        """Valid JSON throughout."""
        return {
            "kernel": self.kernel.to_dict(),
            "problem": self.problem.to_dict(),
            "environment": self.environment,
            **self.result(),
        }

    def result(self) -> dict[str, Any]:
        """What came of it, as JSON values: an error ratio that is not finite is a text, and there
        is a timeout only where it is known."""
        ratio = self.error_ratio
        timeout = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        return {
            "status": self.status.value,
            "message": self.message,
            "times_us": list(self.times_us),
            "error_ratio": ratio if ratio is None or math.isfinite(ratio) else str(ratio),
            "sm_mhz": self.sm_mhz,
            "memory_mhz": self.memory_mhz,
            "date": self.date.isoformat(),
            **timeout,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Measurement:
        """Inverse of ``to_dict``; raises ArgumentError for what is no measurement."""
        fields = as_object(data, "measurement")
        return cls.of(
            KernelIdentity.from_dict(taken(fields, "kernel", dict)),
            Problem.from_dict(taken(fields, "problem", dict)),
            taken(fields, "environment", str),
            fields,
        )

    @classmethod
    def of(
        cls, kernel: KernelIdentity, problem: Problem, environment: str, result: Any
    ) -> Measurement:
        """With what ``result`` gives; raises ArgumentError for what is no result."""
        fields, nothing = as_object(result, "result"), type(None)
        return cls(
            kernel=kernel,
            problem=problem,
            environment=environment,
            status=_status(taken(fields, "status", str)),
            message=taken(fields, "message", str),
            times_us=tuple(taken(fields, "times_us", list)),
            error_ratio=_ratio(fields),
            sm_mhz=taken(fields, "sm_mhz", int, nothing),
            memory_mhz=taken(fields, "memory_mhz", int, nothing),
            date=_date(taken(fields, "date", str)),
            timeout_s=taken({"timeout_s": None, **fields}, "timeout_s", int, float, nothing),
        )

    def __str__(self) -> str:
        if not self.passed:
            return f"{self.kernel.name}: {self.status}: {self.message}"
        return f"{self.kernel.name}: {self.median_us:.2f} us (spread {self.spread_us:.2f} us)"


def _status(value: Any) -> Status:
    try:
        return Status(value)
    except ValueError:
        names = ", ".join(map(str, Status))
        raise ArgumentError(f"status is {value!r}; expected one of {names}") from None


def _microseconds(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ArgumentError(f"times_us has {value!r}; expected microseconds, more than 0")
    return float(value)


def _ratio(fields: Mapping[str, Any]) -> float | None:
    found = taken(fields, "error_ratio", int, float, str, type(None))
    try:
        return None if found is None else float(found)
    except (ValueError, OverflowError):
        raise ArgumentError(f"error_ratio is {found!r}; expected a number") from None


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentError(
            f"date is {text!r}; expected one as 2026-01-31T12:00:00+00:00"
        ) from None
