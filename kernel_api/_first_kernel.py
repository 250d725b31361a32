"""The first of what :func:`~kernel_api.discovery.get_kernels` lists, without asking all others.

Whoever runs one kernel needs no list, and sizes that are new are many: a server sees another number
of tokens in every prompt. So of the kernels whose operands fit, the one that is expected to be
fastest is asked first, and the next only if it cannot. Providers behind the one that has it are
not asked at all, and a design for operands of less alignment only behind the same design for those
of more, where its family says that it is not faster (``faster_if_aligned``).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from kernel_api import _log, discovery
from kernel_api._catalogue import Leading, Look, look_of
from kernel_api._checks import require_arguments
from kernel_api._offer import Offer
from kernel_api.arguments import Arguments
from kernel_api.kernel import Kernel
from kernel_api.provider import Provider, are_ours, generation
from kernel_api.targets import CcLike, Target
from kernel_api.utils import untraced

logger = _log.logger(__name__)

#: What comes first is asked first: whether there is no model, the seconds, the number of the family
#: and the place in it.
_Expected = tuple[bool, float, int, int, Leading]

_rank = operator.attrgetter("rank")

#: By which arguments carry the key and the answer of the last question.
_BEFORE = object()


@untraced
def first_kernel(args: Arguments, cc: CcLike = None) -> Kernel | None:
    """The same as the first of ``get_kernels(args, cc=cc)``; None if there is none. Raises what it
    does.

    That is asked where only it can say, as of kernel classes of others, which are warned of if they
    raise. So are ours, as far as they are asked.
    """
    require_arguments(args)
    key, target = discovery.question(args, cc)
    kernel = _found_before(args, key)
    if kernel is None and not discovery.is_remembered(key):
        kernel = _asked_in_order(args, key, target)
    if kernel is None:
        return next(iter(discovery.get_kernels(args, cc=cc)), None)
    args._accepted[_BEFORE] = key, kernel
    if cc is None:
        offer = args._accepted.get(Offer)
        if offer is None or not offer.holds(kernel):
            args._accepted[Offer] = Offer((kernel,), key[0])
    return kernel


def _found_before(args: Arguments, key: tuple[Any, ...]) -> Kernel | None:
    """The answer to the last question about the arguments, if that was the same."""
    question, kernel = args._accepted.get(_BEFORE, (None, None))
    return kernel if question == key else None


def _asked_in_order(args: Arguments, key: tuple[Any, ...], target: Target | None) -> Kernel | None:
    """None where all have to be asked, or none can."""
    asked: Sequence[Any] = key[-1]
    kind: Any = type(args)
    with discovery.current():
        try:
            for _, equals in itertools.groupby(sorted(asked, key=_rank), _rank):
                families = [one for each in equals for one in _families_of(each, kind, key[0])]
                kernel = _fastest(families, args, target)
                if kernel is not None:
                    return kernel if key[0] == generation() else None
        except Exception as error:  # whoever asks all of them warns of it
            logger.debug("all kernels are asked for %s: %s", args, error)
    return None


def _families_of(provider: Any, kind: Any, changes: int) -> tuple[type[Kernel], ...]:
    """The families for such arguments, after so many changes of the registry."""
    return _ours_among(provider, tuple(provider.families()), kind, changes)


@functools.lru_cache(maxsize=256)
def _ours_among(
    provider: type[Provider], families: tuple[type[Kernel], ...], kind: Any, changes: int
) -> tuple[type[Kernel], ...]:
    """Raises TypeError where another's are among all, or some whose names are not their own."""
    for family in families:
        is_own = are_ours(provider, family) and family._provider is provider
        if not (is_own and family.is_declared()):
            raise TypeError(f"{family} is not declared by the library")
    return tuple(
        family
        for family in families
        if family.arguments is None or issubclass(kind, family.arguments)
    )


def _fastest(
    families: Sequence[type[Kernel]], args: Arguments, target: Target | None
) -> Kernel | None:
    """The first in the order of ``get_kernels`` that can."""
    look = look_of(args)
    offered = [_of_operands(family, args, target, look) for family in families]
    alike = _alike(families, offered, args)
    known = None if alike is None else _orders.get(alike)
    if known is not None and all(map(operator.is_, known.offered, offered)):
        for variant in known.asked:
            if variant.kernel.status_behind_operands(args, target):
                return variant.kernel
    waiting = [
        _expected(variant, number, args)
        for number, variants in enumerate(offered)
        for variant in variants
    ]
    heapq.heapify(waiting)
    asked = []
    while waiting:
        _, _, number, _, variant = heapq.heappop(waiting)
        asked.append(variant)
        if variant.kernel.status_behind_operands(args, target):
            if alike is not None:
                _remember(alike, _Order(offered, asked))
            return variant.kernel
        for laxer in variant.laxer:
            heapq.heappush(waiting, _expected(laxer, number, args))
    return None


class _Order(NamedTuple):
    """In which kernels were asked.

    Attributes:
        offered: What led then, by families.
        asked: As far as to the first that could; who is asked next depends on those before, which
            could not.
    """

    offered: list[Sequence[Leading]]
    asked: list[Leading]


_KEPT = 4096
_orders: dict[Hashable, _Order] = {}


def _alike(
    families: Sequence[type[Kernel]], offered: Sequence[Sequence[Leading]], args: Arguments
) -> Hashable | None:
    """Of arguments of which each estimate is the same, the same; None: that is not known."""
    found = {}
    for family, variants in zip(families, offered, strict=True):
        if variants:
            by = found[family] = family.estimated_by(args)
            if by is None:
                return None
    return args.device, *found.items()


def _remember(alike: Hashable, order: _Order) -> None:
    if len(_orders) >= _KEPT:
        _orders.clear()
    _orders[alike] = order


def _of_operands(
    family: type[Kernel], args: Arguments, target: Target | None, look: Look
) -> Sequence[Leading]:
    """Kernels of a family that ask for such operands, see :meth:`Catalogue.leading`."""
    catalogue = discovery.catalogue_of(family)
    fitting = catalogue.fitting(args, target, look)
    if not fitting or not family.class_status(args, target):
        return ()
    return catalogue.leading(args, target, fitting)


def _expected(variant: Leading, number: int, args: Arguments) -> _Expected:
    return *_seconds(variant.kernel, args), number, variant.place, variant


def _seconds(kernel: Kernel, args: Arguments) -> tuple[bool, float]:
    """By its model, and behind all others without one; raises what a faulty one raises."""
    seconds = kernel.predict(args)
    if seconds is None:
        return True, 0.0
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"{kernel} expects {seconds} seconds")
    return False, seconds
