"""Which kernels can: one survey of all families answers ``get_kernels`` and ``explain`` alike.

The way of a query: providers -> families -> operand variants that fit -> kernels behind them
whose rules agree -> ranked. A survey is remembered by everything it may depend on.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_api import _locks, _log
from kernel_api._catalogue import Catalogue, Miss
from kernel_api._checks import require_arguments
from kernel_api._filters import MetadataFilter, filtered
from kernel_api._offer import Offer
from kernel_api.arguments import Arguments
from kernel_api.devices import query_target, target_of
from kernel_api.errors import PluginWarning
from kernel_api.kernel import Kernel
from kernel_api.matching import BEHIND_OPERANDS, match_layouts, with_mend
from kernel_api.provider import Provider, generation, providers
from kernel_api.status import Status, with_true_nearest
from kernel_api.targets import CcLike, Target
from kernel_api.utils import untraced

if TYPE_CHECKING:
    from kernel_api.explanation import Explanation

logger = _log.logger(__name__)

ProviderChoice = Iterable["str | type[Provider]"]

_SURVEYS_KEPT = 1024


class Verdict(NamedTuple):
    """What one family answers: the kernels that can, or the status of the nearest miss."""

    family: type[Kernel]
    kernels: tuple[Kernel, ...]
    status: Status


@untraced
def get_kernels(
    args: Arguments | None = None,
    metadata_filter: MetadataFilter | None = None,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
) -> list[Kernel]:
    """The kernels that can compile and run the arguments, best first.

    Args:
        args: What to compute; None lists every kernel.
        metadata_filter: Keeps the kernels for whose metadata it is true. One whose design has no
            such axis as it asks for is not kept.
        cc: Architecture asked about (90, "9.0", "sm_90a", ...). By default that of the operands'
            device, else of the current device, else all.
        providers: Names or classes of the providers asked; all by default.

    Kernels with a performance model come first, by predicted time, then those without one in
    the order of registration, then what the ``torch`` and ``reference`` providers offer.

    Raises:
        ArgumentError: a provider or ``cc`` that does not exist.
        FilterError: the filter raised, or asked for an axis that no design has.
    """
    if args is None:
        return filtered(
            _enumerate(query_target(None, cc) if cc is not None else None, providers),
            metadata_filter,
        )
    require_arguments(args)
    key = _key(args, cc, providers)
    survey = _surveys.get(key)
    if survey is None:
        survey = _surveyed(args, query_target(args.device, cc), key)
    if cc is None:
        args._accepted[Offer] = survey.offer
    return filtered(survey.kernels, metadata_filter)


@untraced
def explain(
    args: Arguments,
    metadata_filter: MetadataFilter | None = None,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
) -> Explanation:
    """Every kernel family: accepted with how many designs, or the rule that failed and why.

    Takes what :func:`get_kernels` takes.
    """
    from kernel_api.explanation import Acceptance, Explanation, Rejection

    require_arguments(args)
    accepted, rejected = [], []
    target = query_target(args.device, cc)
    for verdict in _surveyed(args, target, _key(args, cc, providers)).verdicts:
        family, provider = verdict.family.family_name(), verdict.family.provider_name()
        kept = filtered(verdict.kernels, metadata_filter)
        if kept:
            accepted.append(Acceptance(family, provider, tuple(kept)))
            continue
        status = _with_true_nearest(verdict, args, target)
        if verdict.kernels:
            status = Status.fail(
                f"metadata_filter refused {_all_of(len(verdict.kernels))}",
                rule="metadata_filter",
            )
        reason = status.error or "no design"
        rejected.append(Rejection(family, provider, status.rule or reason, reason, status.nearest))
    return Explanation(repr(args), tuple(accepted), tuple(rejected))


def _all_of(designs: int) -> str:
    return "the one design" if designs == 1 else f"all {designs} designs"


# One family ------------------------------------------------------------------------------


def _judge(catalogue: Catalogue, args: Arguments, target: Target | None) -> Verdict:
    """One family's answer. A family that raises is a warning and a reason, not an error."""
    family = catalogue.family
    try:
        status = family.class_status(args, target)
        if not status:
            return Verdict(family, (), status)
        return _judge_kernels(catalogue, args, target)
    except Exception as error:
        return Verdict(family, (), _plugin_fault(family, error))


def _judge_kernels(
    catalogue: Catalogue, args: Arguments, target: Target | None, but_for: str | None = None
) -> Verdict:
    family = catalogue.family
    accepted: list[Kernel] = []
    alike, others = catalogue.of_types(args, target, but_for)
    misses = others.copy()
    for variants in alike:
        for operands in variants:
            status = match_layouts(operands, args, family.why_aligned())
            if status:
                status = family.status_of_operands(operands, args)
            if not status:
                misses.append((status, operands))
                continue
            kernels = catalogue.kernels(operands, args, target)
            if not kernels:
                misses.append((_NO_DESIGN, operands))
            for kernel in kernels:
                status = kernel.status_behind_operands(args, target)
                if status:
                    accepted.append(kernel)
                else:
                    misses.append((status, operands))
    # Rows of operands may overlap: one may leave open what another one says.
    return Verdict(family, tuple(dict.fromkeys(accepted)), _nearest_miss(misses, args))


_NO_DESIGN = Status.fail(
    "the rules of the family leave no design for these operands",
    rule="no design",
    progress=BEHIND_OPERANDS,
)

#: Rules of which one value out of several would do.
_RULES_WITH_ALTERNATIVES = ("element types", "scales", "accumulator type", "majors")


def _nearest_miss(misses: list[Miss], args: Arguments) -> Status:
    """The refusal that came last in the order of checks; alternatives are joined."""
    if not misses:
        return Status.fail("the family has no kernels", rule="empty family")
    nearest, operands = max(misses, key=lambda miss: (miss[0].progress, miss[0].limit))
    nearest = with_mend(nearest, operands, args)
    level = [s for s, _ in misses if s.progress == nearest.progress and s.rule == nearest.rule]
    alternatives = list(dict.fromkeys(s.expected or "" for s in level))
    if nearest.rule not in _RULES_WITH_ALTERNATIVES or len(alternatives) < 2:
        return nearest
    expected = " or ".join(alternatives)
    return Status.fail(
        f"{nearest.operand} {_verb(nearest)} {nearest.actual}; expected {expected}",
        rule=nearest.rule,
        operand=nearest.operand,
        expected=expected,
        actual=nearest.actual,
        nearest=nearest.nearest,
        progress=nearest.progress,
    )


def _verb(status: Status) -> str:
    return "carries" if status.rule == "scales" else "is"


def _with_true_nearest(verdict: Verdict, args: Arguments, target: Target | None) -> Status:
    def fits(but_for: str) -> object:
        with _lock:
            _forget_if_changed()
            return _judge_kernels(catalogue_of(verdict.family), args, target, but_for).kernels

    return with_true_nearest(verdict.status, fits)


_faults_told: set[tuple[type, str]] = set()
#: Texts may name sizes, so that there is no end of them.
_FAULTS_KEPT = 1024


def _plugin_fault(
    family: type[Kernel], error: Exception, outcome: str = "raised and is left out"
) -> Status:
    where = f"{family.__module__}.{family.__qualname__}"
    what = f"kernel class {where} (provider {family.provider_name()!r})"
    text = _told(family, what, error, outcome)
    return Status.fail(f"the kernel class raised {text}", rule="plug-in fault")


def _told(cls: type, what: str, error: Exception, outcome: str) -> str:
    """Warn of an error of a plug-in, once; what it says."""
    text = f"{type(error).__name__}: {error}"
    if (cls, text) not in _faults_told:
        if len(_faults_told) >= _FAULTS_KEPT:
            _faults_told.clear()
        _faults_told.add((cls, text))
        logger.debug("%s raised", what, exc_info=error)
        warnings.warn(f"{what} {outcome}: {text}", PluginWarning, stacklevel=3)
    return text


def _families_of(provider: type[Provider]) -> tuple[type[Kernel], ...]:
    """Its kernel classes; none, with a warning, where it cannot say them."""
    try:
        found = tuple(provider.families())
        for one in found:
            if not (isinstance(one, type) and issubclass(one, Kernel)):
                raise TypeError(f"families() gave {one!r}; expected kernel classes")
        return found
    except Exception as error:
        _told(provider, f"provider {provider.name!r}", error, "raised and is left out")
        return ()


# All families ----------------------------------------------------------------------------


class _Survey:
    """The answer to one query.

    Attributes:
        kernels: All that can, best first.
        verdicts: What each family answered.
        offer: The kernels, for arguments to carry.
    """

    __slots__ = ("kernels", "offer", "verdicts")

    def __init__(
        self, kernels: tuple[Kernel, ...], verdicts: tuple[Verdict, ...], valid_for: int
    ) -> None:
        self.kernels, self.verdicts = kernels, verdicts
        self.offer = Offer(kernels, valid_for)


_lock = _locks.rlock()
_surveys: OrderedDict[Any, _Survey] = OrderedDict()
_catalogues: dict[type[Kernel], Catalogue] = {}
_valid_for = -1
_devices_with_target: set[Any] = set()


def _key(args: Arguments, cc: CcLike, chosen: ProviderChoice | None = None) -> tuple[Any, ...]:
    """What an answer depends on: the registry's generation first, the providers last."""
    own = cc is None and _has_target(args.device)
    asked = tuple(providers(chosen))
    return generation(), args.key, own or query_target(args.device, cc), asked


def question(args: Arguments, cc: CcLike) -> tuple[tuple[Any, ...], Target | None]:
    """The key of a query of all providers, and the architecture that it is about."""
    return _key(args, cc), query_target(args.device, cc)


def is_remembered(key: tuple[Any, ...]) -> bool:
    """Whether a query has an answer already."""
    return key in _surveys


@contextlib.contextmanager
def current() -> Iterator[None]:
    """While catalogues are those of the registry as it is, and nobody else builds any."""
    with _lock:
        _forget_if_changed()
        yield


def _has_target(device: Any) -> bool:
    """Whether a device has one architecture whatever the settings: then the arguments' key, which
    names the device, says it."""
    if device in _devices_with_target:
        return True
    if device.index is None or target_of(device) is None:
        return False
    _devices_with_target.add(device)
    return True


def _surveyed(args: Arguments, target: Target | None, key: tuple[Any, ...]) -> _Survey:
    """Ask every family, unless the query is remembered."""
    asked = key[-1]
    with _lock:
        _forget_if_changed()
        if key in _surveys:
            return _surveys[key]
        verdicts = _without_namesakes(
            [
                _judge(catalogue_of(family), args, target)
                for provider in asked
                for family in _families_of(provider)
            ]
        )
        survey = _Survey(_ranked(verdicts, args), verdicts, key[0])
        # A catalogue built during the survey may have registered something: then do not keep it.
        if key[0] == generation():
            _surveys[key] = survey
            if len(_surveys) > _SURVEYS_KEPT:
                _surveys.popitem(last=False)
        return survey


def _without_namesakes(verdicts: list[Verdict]) -> tuple[Verdict, ...]:
    """Without the kernels of families that have a name which an earlier family of their provider
    has. One that offers kernels of several providers, as bundles do, may have it of each."""
    if all(verdict.family.is_declared() for verdict in verdicts if verdict.kernels):
        return tuple(verdicts)  # their names begin with the family's
    owners: dict[Any, type[Kernel]] = {}
    return tuple(_apart(verdict, owners) for verdict in verdicts)


def _apart(verdict: Verdict, owners: dict[Any, type[Kernel]]) -> Verdict:
    """owners: The families that names of kernels, by provider, are of."""
    family = verdict.family
    for kernel in verdict.kernels:
        name = kernel.metadata.kernel_name
        owner = owners.setdefault((family._provider, kernel.metadata.provider, name), family)
        if owner is not family:
            error = TypeError(
                f"{owner.__module__}.{owner.__qualname__} of the same provider has a kernel of the "
                f"name {name}, too; expected names of its own"
            )
            return Verdict(family, (), _plugin_fault(family, error, "is left out"))
    return verdict


def _forget_if_changed() -> None:
    global _valid_for
    if _valid_for != generation():
        _surveys.clear()
        _catalogues.clear()
        _valid_for = generation()


def catalogue_of(family: type[Kernel]) -> Catalogue:
    """That of a family, while :func:`current`."""
    if family not in _catalogues:
        _catalogues[family] = Catalogue(family)
    return _catalogues[family]


def _ranked(verdicts: Iterable[Verdict], args: Arguments) -> tuple[Kernel, ...]:
    """By provider rank; within it the predicted ones by time, then the rest as registered."""
    order: list[tuple[int, bool, float, int, Kernel]] = []
    for verdict in verdicts:
        provider = verdict.family._provider
        rank = provider.rank if provider is not None else 0
        for kernel in verdict.kernels:
            seconds = predicted(kernel, args)
            order.append((rank, seconds is None, seconds or 0.0, len(order), kernel))
    return tuple(entry[-1] for entry in sorted(order, key=lambda entry: entry[:-1]))


def predicted(kernel: Kernel, args: Arguments) -> float | None:
    """Seconds by the kernel's performance model; None without one, or with a faulty one."""
    try:
        seconds = kernel.predict(args)
        if seconds is None or (type(seconds) is float and 0.0 <= seconds < math.inf):
            return seconds
        is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if is_number and math.isfinite(seconds) and seconds >= 0:
            return float(seconds)
        raise TypeError(f"predict returned {seconds!r}; expected seconds or None")
    except Exception as error:
        _plugin_fault(type(kernel), error, "is listed without a prediction")
        return None


def _enumerate(target: Target | None, chosen: ProviderChoice | None) -> list[Kernel]:
    """Every kernel of every family, those without arguments to judge included."""
    found: list[Verdict] = []
    asked = providers(chosen)
    with _lock:
        _forget_if_changed()
        for provider in asked:
            for family in _families_of(provider):
                catalogue = catalogue_of(family)
                try:
                    if target is not None and family.why_not_for(target) is not None:
                        continue
                    kernels = dict.fromkeys(
                        kernel
                        for variants in catalogue.operands(None, target)
                        for operands in variants
                        for kernel in catalogue.kernels(operands, None, target)
                    )
                    found.append(Verdict(family, tuple(kernels), Status.success()))
                except Exception as error:
                    _plugin_fault(family, error)
        listed = [kernel for verdict in _without_namesakes(found) for kernel in verdict.kernels]
    if target is None:
        return listed
    return [kernel for kernel in listed if kernel.metadata.runs_on(target)]


def _forget_in_child() -> None:
    """A thread that asked when the process was forked is not in this one: what it was building is
    built anew."""
    global _valid_for
    _valid_for = -1


os.register_at_fork(after_in_child=_forget_in_child)
