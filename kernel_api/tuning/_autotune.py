"""The fastest correct kernel for a problem, by measurement."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from kernel_api import _disk_cache, _log
from kernel_api._description import described, rebuilt
from kernel_api._disk_cache import DiskCache
from kernel_api._filters import MetadataFilter
from kernel_api.arguments import Arguments
from kernel_api.discovery import ProviderChoice, explain
from kernel_api.errors import ArgumentError, CaptureError, KernelApiError, NoKernelError
from kernel_api.kernel import Kernel
from kernel_api.parallel import Compilations, cache_to_share
from kernel_api.targets import CcLike
from kernel_api.tuning import _lookup
from kernel_api.tuning._bench import Bench, Halt
from kernel_api.tuning._choice import Candidates, Choice, Order
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._kernel import KernelIdentity
from kernel_api.tuning._measurement import Measurement, Status
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._search import Candidate, search, seeded
from kernel_api.tuning._store import Store
from kernel_api.tuning._work import least_us

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kernel_api.explanation import Explanation

logger = _log.logger(__name__)

#: Characters of what a candidate says for itself: rows have an end.
_LONGEST_MESSAGE = 10_000

#: A compilation that takes longer has failed, in seconds.
_COMPILE_SECONDS = 300.0

#: How often whoever waits for a GPU looks whether it is to go on, in seconds.
_LOCK_SECONDS = 1.0


@dataclass(frozen=True)
class TuningResult:
    """What is known of a problem.

    Attributes:
        kernel: The fastest that computes it right.
        rows: Every candidate: those that passed first, from fast to slow.
        problem: What was computed.
        environment: Where and how it was measured.
        measured: How many of the rows are new.
        default: What came of the kernel that is chosen without tuning, if the filter or
            ``providers`` leave it out: it is measured all the same, and has no place among the
            rows.
    """

    kernel: Kernel
    rows: tuple[Measurement, ...]
    problem: Problem
    environment: Environment
    measured: int = 0
    default: Measurement | None = None

    def __str__(self) -> str:
        counts = {one: sum(row.status is one for row in self.rows) for one in Status}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{self.rows[0]} of {told}"


@overload
def autotune(
    args: Arguments,
    metadata_filter: MetadataFilter | None = None,
    *,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
    budget_s: float | None = None,
    max_candidates: int | None = 24,
    timeout_s: float = 10.0,
    policy: Policy | None = None,
    order: Order | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> TuningResult: ...


@overload
def autotune(
    args: Sequence[Arguments],
    metadata_filter: MetadataFilter | None = None,
    *,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
    budget_s: float | None = None,
    max_candidates: int | None = 24,
    timeout_s: float = 10.0,
    policy: Policy | None = None,
    order: Order | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> list[TuningResult | KernelApiError]: ...


def autotune(
    args: Arguments | Sequence[Arguments],
    metadata_filter: MetadataFilter | None = None,
    *,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
    budget_s: float | None = None,
    max_candidates: int | None = 24,
    timeout_s: float = 10.0,
    policy: Policy | None = None,
    order: Order | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> TuningResult | list[TuningResult | KernelApiError]:
    """Find the fastest kernel that computes the arguments right, and keep all that was measured.

    Candidates of every provider compile in processes that see no GPU, are compared with the
    reference, and are timed in a process of their own: one that crashes, hangs or computes wrong
    gets that as its status and harms no other. What was measured before, of the same kernel,
    problem and environment, is not measured again, unless memory did not suffice, or the time that
    it was given then, and it has more now.

    Args:
        args: What to compute, or several problems. Data is not looked at and outputs are not
            written: operands are random, of the same types, sizes, strides and alignment. Meta
            tensors will do.
        metadata_filter: Which candidates compete, as in ``get_kernels``. What is chosen without
            tuning, the first of ``get_kernels(args)``, is measured even if the filter or
            ``providers`` leave it out, and is then no part of the result: so the result is the
            best of those that were asked for, and :func:`tuned`, which goes by all rows, never
            slower than the default.
        cc: Architecture to compile for; that of the device by default. The CPU has none.
        providers: Those whose kernels compete; all but ``reference`` by default, and but for
            kernels that compile as they run, such as torch's flex_attention, which may take longer
            than ``timeout_s``.
        budget_s: Seconds for a problem after which no more candidates are begun, but the default,
            and the first if none is known to pass. One that is to be measured again, and is not
            begun, keeps its row. Finite: inf is refused, None is no limit.
        max_candidates: So many of the order, the default and the first of every provider; None:
            all.
        timeout_s: Seconds that no step of a candidate may take. Finite: inf is refused.
        policy: How to measure; CUDA graphs and a cold L2 cache by default, and on the CPU, which
            has neither, eager launches. :func:`tuned` goes by what was measured in the usual way
            (:meth:`Policy.usual`).
        order: Puts candidates, which it gets with the arguments, in the order in which they are
            begun, such as :func:`kernel_api.tuning.heuristics.ranked`; that of the performance
            model by default.
        executor: Measures each problem in some other process, or on another machine: anything
            with the interface of :class:`concurrent.futures.Executor`. By default problems are
            spread over the GPUs of this machine.
        progress: Draw a bar on stderr, where rich is installed.

    Returns the result; of several problems a list in their order, with the error in place of each
    one that failed.

    Raises:
        NoKernelError: no kernel takes the arguments, or none of the candidates passed; the text
            has their statuses.
        BenchError: nothing can be measured, such as a problem whose data has no room.
        DeviceError: ``cc`` is given, and a problem is measured on the CPU.
        CaptureError: a CUDA graph is being captured.
        ArgumentError: what is passed is not as above, or as ``get_kernels`` has it.
        FilterError: as ``get_kernels``.
    """
    from kernel_api.tuning._spread import spread

    _check_no_capture()
    _check_executor(executor)
    limits = budget_s, max_candidates, timeout_s
    choice = Choice(metadata_filter, cc, providers, *limits, policy, order)
    if not isinstance(args, Arguments):
        return spread(_problems(args), choice, executor, progress)
    found: TuningResult | KernelApiError = spread([args], choice, executor, progress)[0]
    if isinstance(found, KernelApiError):
        raise found
    return found


def _problems(args: Any) -> list[Arguments]:
    if not isinstance(args, Iterable):
        raise ArgumentError(
            f"args is {args!r}; expected an arguments object such as GemmArguments: pass one, or a "
            f"list of them"
        )
    found = list(args)
    for place, one in enumerate(found):
        if not isinstance(one, Arguments):
            raise ArgumentError(
                f"problem {place} is {one!r}; expected an arguments object such as GemmArguments: "
                f"pass one"
            )
    return found


def _check_executor(executor: Any) -> None:
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ArgumentError(
            f"executor is {executor!r}; expected the interface of concurrent.futures.Executor: "
            f"pass such as a ProcessPoolExecutor, or leave it out"
        )


def _check_no_capture() -> None:
    import torch

    initialized: Any = torch.cuda.is_initialized
    if initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "a CUDA graph is being captured, which measuring would break; tune before the capture"
        )


# One problem ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One problem on one device, before it is tuned.

    Attributes:
        description: The arguments, for other processes.
        device: ``"cpu"``, or ``"cuda:0"`` and so on.
        store: Where rows are kept; None: nowhere.
        known: What was measured before; some of it is to be measured again, see :meth:`is_due`.
    """

    description: dict[str, Any]
    problem: Problem
    candidates: Candidates
    device: str
    environment: Environment
    store: Store | None
    known: Mapping[Kernel, Measurement]
    budget_s: float | None
    timeout_s: float

    @classmethod
    def of(cls, args: Arguments, choice: Choice, device: str) -> Task:
        """Raises what :meth:`Choice.candidates` raises, and ArgumentError for what cannot be
        described."""
        candidates = choice.candidates(args, device)
        limits = choice.budget_s, choice.timeout_s
        return cls.made(described(args), candidates, device, choice.policy_on(device), *limits)

    @classmethod
    def made(
        cls,
        description: dict[str, Any],
        candidates: Candidates,
        device: str,
        policy: Policy,
        budget_s: float | None,
        timeout_s: float,
    ) -> Task:
        """With what is known of it here."""
        problem = Problem.of(rebuilt(description))
        environment = Environment.of(device, policy)
        store, limits = Store.open(environment), (budget_s, timeout_s)
        made = cls(description, problem, candidates, device, environment, store, {}, *limits)
        return made.looked_up()

    def looked_up(self) -> Task:
        """The same with what is known of it by now."""
        if self.store is None:
            return self
        kernels = self.candidates.with_default
        found = ((kernel, self.store.find(self.problem, kernel)) for kernel in kernels)
        return replace(self, known={kernel: row for kernel, row in found if row is not None})

    @property
    def rounds(self) -> int:
        return self.environment.policy.rounds

    def is_due(self, kernel: Kernel) -> bool:
        """Whether a kernel is to be measured: nothing is known of it, or it failed for a reason
        that may be gone."""
        row = self.known.get(kernel)
        return row is None or not row.stands_for(self.timeout_s)

    @property
    def has_passed(self) -> bool:
        """Whether a result is known, of those that were asked for."""
        return any(self.known[one].passed for one in self.candidates.kernels if one in self.known)

    def meta(self) -> Arguments:
        """The arguments without data."""
        return rebuilt(self.description)

    def on(self, device: str) -> Task:
        """The same on another device of the same kind: what is known of it is known of all."""
        return self if device == self.device else replace(self, device=device)


def tune(task: Task, builder: Builder, advance: Callable[[], None] = lambda: None) -> TuningResult:
    """Measure what is not known yet, and give all that is.

    Args:
        advance: Is called for every candidate.

    Raises NoKernelError, BenchError; HaltedError once the builder is closed.
    """
    rows = dict(task.known)
    task = add_rows(rows, task, builder, advance)
    return result_of(rows, task, lambda: explain(task.meta()))


def add_rows(
    rows: dict[Kernel, Measurement],
    task: Task,
    builder: Builder,
    advance: Callable[[], None] = lambda: None,
) -> Task:
    """Measure what is due, and put each row among the others as soon as it is there.

    Returns the task with what was known when measuring began: while it waits for a GPU, others may
    measure what it is about to. Raises BenchError; HaltedError once the builder is closed.
    """

    def done(one: Candidate) -> None:
        row = rows[one.kernel] = measurement(one, task)
        if task.store is not None:
            _kept(task.store, row)
        advance()

    with contextlib.ExitStack() as held:
        held.callback(_lookup.changed)  # rows known here may be news to lookups: others wrote them
        if any(map(task.is_due, task.candidates.with_default)):
            held.enter_context(alone_on(task.device, builder.halt))
            task = task.looked_up()
            rows.update(task.known)
        candidates = [one for one in seeded(task.candidates) if task.is_due(one.kernel)]
        for _ in range(len(task.candidates.with_default) - len(candidates)):
            advance()
        if candidates:
            measure(task, candidates, builder, done)
    return task


def measure(
    task: Task,
    candidates: Sequence[Candidate],
    builder: Builder,
    done: Callable[[Candidate], Any],
    *,
    verify: bool = True,
    recheck: bool = True,
) -> None:
    """Check and time candidates of a task in a process of their own, alone on their device.

    Args:
        done: Is called with each candidate when all is known of it.
        verify: Whether results are compared with the reference before anything is timed.
        recheck: Whether a winner that is faster than it should be is timed again, alone.

    Raises BenchError; HaltedError once the builder is closed.
    """
    meta = task.meta()
    with Bench(
        task.description,
        task.device,
        task.environment.policy,
        task.timeout_s,
        builder.environment,
        builder.halt,
        verify=verify,
    ) as bench:
        search(
            bench,
            candidates,
            task.rounds,
            ready=lambda one: builder.wait(one.kernel, meta),
            budget_s=task.budget_s,
            begins_one=not task.has_passed,
            least_us=least_us(task.problem, task.environment.gpu, task.environment.policy),
            recheck=recheck,
            done=done,
        )


def _kept(store: Store, row: Measurement) -> None:
    try:
        store.record(row)
    except OSError as error:
        _disk_cache.warn(f"what is measured is not kept: {error}", "it is measured again")


def measurement(one: Candidate, task: Task) -> Measurement:
    """What came of a candidate, as a row."""
    sm_mhz, memory_mhz = one.mhz if one.times_us else (None, None)
    return Measurement(
        kernel=KernelIdentity.of(one.kernel),
        problem=task.problem,
        environment=task.environment.digest,
        status=one.status,
        message=one.message[:_LONGEST_MESSAGE],
        times_us=tuple(one.times_us),
        error_ratio=one.error_ratio,
        sm_mhz=sm_mhz,
        memory_mhz=memory_mhz,
        timeout_s=task.timeout_s if one.status is Status.TIMEOUT else None,
    )


def result_of(
    rows: Mapping[Kernel, Measurement], task: Task, explained: Callable[[], Explanation]
) -> TuningResult:
    """What the rows of a task come to.

    Raises NoKernelError, with what was explained, if no kernel passed of those that were asked for.
    """
    kernels, default = task.candidates
    asked = [(kernel, rows[kernel]) for kernel in kernels if kernel in rows]
    ranked = sorted(asked, key=lambda pair: pair[1].place(task.rounds))
    measurements = tuple(row for _, row in ranked)
    if not ranked or not ranked[0][1].passed:
        told = "".join(f"\n  {row}" for row in measurements)
        text = f"none of {len(measurements)} candidates passed{told}"
        raise NoKernelError(explained(), text, measurements)
    return TuningResult(
        ranked[0][0],
        measurements,
        task.problem,
        task.environment,
        measured=sum(row is not task.known.get(kernel) for kernel, row in asked),
        default=None if default in kernels else rows.get(default),
    )


@contextlib.contextmanager
def alone_on(device: str, halt: Halt) -> Iterator[None]:
    """While another process measures on a GPU, wait: both would measure each other."""
    lock = _lock_of(device)
    if lock is None:
        yield
        return
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process measures on %s: waiting", device)
        while not lock.is_locked:
            halt.check()
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=_LOCK_SECONDS)
    except OSError as error:
        logger.warning("%s may be used by others while it is measured on: %s", device, error)
    try:
        yield
    finally:
        lock.release()


def is_measured_on(device: str) -> bool:
    """Whether some process measures on a GPU just now."""
    lock = _lock_of(device)
    if lock is None:
        return False
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def _lock_of(device: str) -> Any:
    """None where there is nothing to lock, or nowhere."""
    cache = DiskCache.open()
    if device == "cpu" or cache is None:
        return None
    import filelock
    import torch

    uuid = torch.cuda.get_device_properties(device).uuid
    return filelock.FileLock(cache.root / "locks" / f"gpu-{uuid}.lock")


def devices_here() -> list[str]:
    """Where problems are measured that lie nowhere: on every GPU; without one, on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return ["cpu"]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


# Compilation ---------------------------------------------------------------------------------


class Builder:
    """Compiles the candidates of all tasks, each kernel once for all problems that share its code.

    Attributes:
        environment: Variables by which other processes find what was compiled.
        halt: Is set when this is closed: what waits for a kernel, or measures one, ends as well.
    """

    def __init__(self, tasks: Sequence[Task], cc: CcLike) -> None:
        self.environment = {
            "KERNEL_API_CACHE_DIR": str(cache_to_share().root),
            "KERNEL_API_DISABLE_CACHE": "0",
        }
        self.halt = Halt()
        wanted: dict[tuple[Kernel, Any], Arguments] = {}
        for task in tasks:
            meta = task.meta()
            for kernel in task.candidates.with_default:
                if task.is_due(kernel):
                    wanted.setdefault((kernel, meta.signature), meta)
        self._pairs = {
            key: meta for key, meta in wanted.items() if _is_built_before(key[0], meta, cc)
        }
        self._done = {key: threading.Event() for key in self._pairs}
        self._errors: dict[tuple[Kernel, Any], KernelApiError] = {}
        self._compilations: Compilations | None = None
        if self._pairs:
            pairs = [(kernel, meta) for (kernel, _), meta in self._pairs.items()]
            self._compilations = Compilations(pairs, cc, timeout_s=_COMPILE_SECONDS, load=False)
            threading.Thread(target=self._collect, daemon=True).start()

    def wait(self, kernel: Kernel, meta: Arguments) -> KernelApiError | None:
        """Until a kernel is compiled; the error if it cannot be. What only the process that
        measures can compile is not waited for."""
        key = (kernel, meta.signature)
        if key in self._done:
            self._done[key].wait()
            self.halt.check()
        return self._errors.get(key)

    def close(self) -> None:
        self.halt.set()
        for done in self._done.values():
            done.set()
        if self._compilations is not None:
            self._compilations.close()

    def _collect(self) -> None:
        assert self._compilations is not None
        keys = list(self._pairs)
        for index, found in self._compilations:
            if isinstance(found, KernelApiError):
                self._errors[keys[index]] = found
            self._done[keys[index]].set()


def _is_built_before(kernel: Kernel, meta: Arguments, cc: CcLike) -> bool:
    """Whether its code can be on disk. What else it does to compile, it does where it is measured:
    that may be anything."""
    if kernel.code_files is None:
        return False
    try:
        target = kernel.compile_target(meta, cc)
    except KernelApiError:
        return False
    return _disk_cache.identity_of(kernel, meta.signature, target) is not None
