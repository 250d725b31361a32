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
from collections.abc import Sequence
from typing import Any

from kernel_api import _log, discovery
from kernel_api._catalogue import Leading
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


@untraced
def first_kernel(args: Arguments, cc: CcLike = None) -> Kernel | None:
    """The same as the first of ``get_kernels(args, cc=cc)``; None if there is none. Raises what it
    does.

    That is asked where only it can say, as of kernel classes of others, which are warned of if they
    raise. So are ours, as far as they are asked.
    """
    require_arguments(args)
    key, target = discovery.question(args, cc)
    kernel = None if discovery.is_remembered(key) else _asked_in_order(args, key, target)
    if kernel is None:
        return next(iter(discovery.get_kernels(args, cc=cc)), None)
    if cc is None:
        args._accepted[Offer] = Offer((kernel,), key[0])
    return kernel


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
    waiting = [
        _expected(variant, number, args)
        for number, family in enumerate(families)
        for variant in _of_operands(family, args, target)
    ]
    heapq.heapify(waiting)
    while waiting:
        _, _, number, _, variant = heapq.heappop(waiting)
        if variant.kernel.status_behind_operands(args, target):
            return variant.kernel
        for laxer in variant.laxer:
            heapq.heappush(waiting, _expected(laxer, number, args))
    return None


def _of_operands(family: type[Kernel], args: Arguments, target: Target | None) -> Sequence[Leading]:
    """Kernels of a family that ask for such operands, see :meth:`Catalogue.leading`."""
    if not family.class_status(args, target):
        return ()
    return discovery.catalogue_of(family).leading(args, target)


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
