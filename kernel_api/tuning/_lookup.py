"""What was tuned, for whoever runs it."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from kernel_api import _locks, _log, provider
from kernel_api._checks import require_arguments
from kernel_api._disk_cache import SETTINGS
from kernel_api._estimated_sizes import told_apart
from kernel_api._first_kernel import first_kernel
from kernel_api.arguments import Arguments
from kernel_api.devices import target_of, torch_device
from kernel_api.discovery import get_kernels
from kernel_api.errors import KernelApiError
from kernel_api.kernel import Kernel
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._nearby import FASTEST, expected_fastest
from kernel_api.tuning._policy import REST, Policy
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._store import Store
from kernel_api.tuning._table import Table

logger = _log.logger(__name__)

_KEPT, _PROBLEMS_KEPT = 4096, 512

_found: dict[Hashable, Kernel | None] = {}
_lock = _locks.lock()


def tuned(args: Arguments, device: Any = None) -> Kernel | None:
    """The fastest kernel for the arguments, as far as anything was measured.

    That is the fastest of those measured on this very problem. Else the nearest one is asked:
    alike in all but sizes, none of which is more than twice or less than half of its own (see
    :meth:`Problem.near`). Of the three that were fastest there, and what the performance model
    would choose, the one is taken that the model, corrected by what was measured there, expects to
    be fastest; where they have no model, the fastest there. Of sizes that are nearly the same, and
    estimated so, the first decides, as far as the others can be computed so.

    It takes the arguments. None where nothing was measured in this environment, with these versions
    and sources, by the usual policy (:meth:`Policy.usual`): neither here nor before the library was
    released, for the GPUs that it has tables of. These hold for any driver, and but for kernels of
    torch for any version of torch.

    What other processes measure meanwhile is seen after the next ``autotune`` (by
    :func:`changed`).

    Args:
        args: What to compute; meta tensors will do.
        device: That it is to be computed on, or its name; by default what the operands are on.

    Raises ArgumentError for what is no arguments object, or no device.
    """
    require_arguments(args)
    place = args.device if device is None else torch_device(device)
    key = (provider.generation(), tuple(provider.providers()), place, args.key)
    try:
        return _found[key]
    except KeyError:
        pass
    kernel = _looked_up(args, place, nearby=True)
    with _lock:
        if len(_found) >= _KEPT:
            _found.clear()
        _found[key] = kernel
    return kernel


def measured(args: Arguments) -> Kernel | None:
    """The fastest kernel of those measured on this very problem, on the operands' device."""
    return _looked_up(args, args.device, nearby=False)


def changed() -> None:
    """Rows were added: look everything up again."""
    with _lock:
        _found.clear()
        _measured.clear()
        _stores.clear()
    provider.registry_changed()


def _looked_up(args: Arguments, device: Any, *, nearby: bool) -> Kernel | None:
    """nearby: Whether other sizes are asked where these were not measured."""
    try:
        store = _store(device)
        if store is None:
            return None
        problem = Problem.of(args)
        if not store.has_like(problem):
            return None
        kernel = _fastest(store, problem, args)
        return _of_nearby(store, problem, args, device) if kernel is None and nearby else kernel
    except (KernelApiError, OSError) as error:
        logger.info("nothing that was tuned is used: %s", error)
    return None


def _fastest(store: Store, problem: Problem, args: Arguments) -> Kernel | None:
    """Of those measured on a problem that take the arguments."""
    kernels = (_kernel_of(row, args) for row in _fastest_first(store, problem))
    return next(filter(None, kernels), None)


def _of_nearby(store: Store, problem: Problem, args: Arguments, device: Any) -> Kernel | None:
    """What is expected to be fastest by what was measured on the nearest problem of other sizes."""
    nearest = nearest_on(store, problem)
    if nearest is None:
        return None
    expected = nearest.expected_before(args, device)
    if expected is not None:
        return expected
    kernels = ((nearest.kernel(row, args), row) for row in nearest.passed)
    found = ((kernel, row) for kernel, row in kernels if kernel is not None)
    taken = dict(islice(found, FASTEST))
    return nearest.expected(args, device, taken, _choice(args, device)) if taken else None


def nearest_on(store: Store, problem: Problem) -> _Measured | None:
    """What is known of the nearest problem with a kernel that passed, of those that are near (see
    :meth:`Problem.near`)."""
    near = (_measured_on(store, one) for one in store.near(problem))
    return next((one for one in near if one.passed), None)


class _Measured:
    """What is known of a problem, which many that are like it ask for.

    Attributes:
        rows: Fastest first.
        passed: Those that did.
    """

    def __init__(self, rows: list[Measurement]) -> None:
        self.rows = rows
        self.passed = [row for row in rows if row.passed]
        self._kernels: dict[str, Kernel | None] = {}
        self._expected: dict[Hashable, _Expected] = {}

    def expected(
        self,
        args: Arguments,
        device: Any,
        taken: dict[Kernel, Measurement],
        choice: Kernel | None,
    ) -> Kernel:
        """See :func:`expected_fastest`."""
        found = expected_fastest(args, self.rows, taken, choice)
        kernels = [*taken] if choice is None else [*taken, choice]
        by = _estimates(kernels, args)
        if None not in by:
            if len(self._expected) >= _PROBLEMS_KEPT:
                self._expected.clear()
            self._expected[_alike(args, device)] = _Expected(found, kernels, by)
        return found

    def expected_before(self, args: Arguments, device: Any) -> Kernel | None:
        """The same of the last arguments that are like these, if all estimates are the same and it
        takes these, too. No other kernel is asked whether it does."""
        before = self._expected.get(_alike(args, device))
        if before is None or before.by != _estimates(before.kernels, args):
            return None
        return before.kernel if before.kernel.supports(args) else None

    def kernel(self, row: Measurement, args: Arguments) -> Kernel | None:
        """Of a row, if it takes the arguments."""
        if row.kernel.digest not in self._kernels:
            self._kernels[row.kernel.digest] = _rebuilt(row)
        kernel = self._kernels[row.kernel.digest]
        return kernel if kernel is not None and kernel.supports(args) else None


class _Expected(NamedTuple):
    """A kernel that was expected to be fastest of some, and what estimates of these are by."""

    kernel: Kernel
    kernels: list[Kernel]
    by: tuple[Hashable, ...]


def _alike(args: Arguments, device: Any) -> Hashable:
    """What arguments have in common whose sizes are nearly the same."""
    return device, args.device, args.signature, *map(told_apart, args.sizes.values())


def _estimates(kernels: Iterable[Kernel], args: Arguments) -> tuple[Hashable, ...]:
    return tuple([kernel.estimated_by(args) for kernel in kernels])


#: With the stamps that rows had when they were read.
_measured: dict[Hashable, tuple[Hashable, _Measured]] = {}


def _measured_on(store: Store, problem: Problem) -> _Measured:
    place = store.folder, store.environment.digest, problem
    key = provider.generation(), tuple(provider.providers()), *place
    stamp = store.stamp(problem)
    known = _measured.get(key)
    if known is None or known[0] != stamp:
        known = stamp, _Measured(store.measurements(problem))
        with _lock:
            if len(_measured) >= _PROBLEMS_KEPT:
                _measured.clear()
            _measured[key] = known
    return known[1]


def _choice(args: Arguments, device: Any) -> Kernel | None:
    """What the performance model would choose for a device."""
    cc = None if args.device.type == "cuda" else target_of(device)
    kernel = first_kernel(args, cc)
    if kernel is None or device.type in kernel.devices:
        return kernel
    offered = get_kernels(args, cc=cc)
    return next((one for one in offered if device.type in one.devices), None)


def _fastest_first(store: Store, problem: Problem) -> Iterator[Measurement]:
    """The best takes a tenth of the time that it takes to read all."""
    best = store.best(problem)
    if best is not None:
        yield best
        yield from (row for row in store.measurements(problem) if row != best)


_stores: dict[Hashable, Store | None] = {}


def _store(device: Any) -> Store | None:
    """For a device, as of when it was asked for first with these settings."""
    if device.type not in ("cpu", "cuda"):
        return None
    if device.index is None and device.type == "cuda":  # the current one
        return _opened(device)
    key = device, *[os.environ.get(name) for name in (*SETTINGS, REST)]
    if key not in _stores:
        found = _opened(device)
        with _lock:
            _stores[key] = found
    return _stores[key]


def _opened(device: Any) -> Store | None:
    environment = Environment.of(device, Policy.usual(device.type))
    table = Table.of(environment)
    return Store.open(environment, beneath=table) or table


def _kernel_of(row: Measurement, args: Arguments) -> Kernel | None:
    kernel = _rebuilt(row) if row.passed else None
    return kernel if kernel is not None and kernel.supports(args) else None


def _rebuilt(row: Measurement) -> Kernel | None:
    """The kernel of a row; None if it, or its provider, is not here, or not asked for."""
    try:
        kernel = row.kernel.rebuild()
    except KernelApiError as error:
        logger.info("%s is not here any more: %s", row.kernel.name, error)
        return None
    return kernel if type(kernel)._provider in provider.providers() else None
