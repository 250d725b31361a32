"""Calls that look like an earlier one, of norms, rows, quantisation and layers of experts.

As in :mod:`kernel_api._launches`, which is for products: what a call looks like is read from its
tensors, and one that looks like an earlier one goes straight to the kernel's launcher. Of outputs
that it gives, whether they share memory with others is asked again. What is remembered keeps no
tensor alive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from kernel_api import _compile_cache, _locks, _sequence, provider
from kernel_api._apart import are_apart, pairs_apart
from kernel_api._launches import (
    BEFORE_DISPATCH,
    LOW_BITS,
    NEVER_NEGATIVE,
    TENSORS,
    dispatch_modes,
    is_included,
    run_best,
)
from kernel_api._overwritten import teller
from kernel_api._settings import raw_setting
from kernel_api.arguments import Arguments
from kernel_api.kernel import LauncherInOrder
from kernel_api.offsets import check_is_asked
from kernel_api.operands import Operand
from kernel_api.provider import PROVIDERS

_KEPT = 1024
_Key = tuple[Hashable, ...]
_Taken = tuple[int, tuple[int, ...] | None]
_launchers: dict[_Key, tuple[LauncherInOrder, Given | None]] = {}
_calls: dict[_Key, Known] = {}
#: Of calls that were more than launches, how often.
_sequences: dict[_Key, _sequence.Repeated | int] = {}
#: Something else may have asked torch for something meanwhile, as Python's garbage may.
_TIMES = 3
_lock = _locks.lock()
_tell = teller()

#: Options that count by value. Whole numbers are not among them: launchers take others.
_PLAIN = frozenset((float, bool, str, torch.dtype, type(None)))


def look(given: Sequence[Any], *how: Hashable, written: Sequence[Any] = ()) -> _Key | None:
    """What a call looks like; None: it is not looked at.

    Args:
        given: The tensors that it is given; None in the place of one that is absent.
        how: What else tells it from others: its kind, element types and sizes of what is made.
        written: Those of them that it writes.
    """
    if dispatch_modes() or is_included(BEFORE_DISPATCH):
        return None
    if forward_ad._current_level >= 0 or check_is_asked():
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    key: _Key = (
        provider._generation, raw_setting(PROVIDERS), _compile_cache._era, *how,
    )  # fmt: skip
    addresses: list[int] = []
    for one in given:
        if one is None:
            key += (None,)
            continue
        if type(one) not in TENSORS or one.layout is not torch.strided or one.is_nested:
            return None
        if one.dtype is not NEVER_NEGATIVE and one.is_neg():
            return None
        try:
            address = one.data_ptr()
        except RuntimeError:  # as of what torch.func wraps
            return None
        if not address:  # empty, or freed
            return None
        key += (one.dtype, one.shape, one.stride(), one.device, address & LOW_BITS)
        addresses.append(address)
    if not written:
        return key
    if torch.is_grad_enabled() and True in [one.requires_grad for one in written]:
        return None  # which is refused
    # What is written where it is read may take another kernel.
    return (*key, *[addresses.index(one) for one in addresses])


class Given:
    """Outputs that a call gives, among all that it gives.

    Args:
        tensors: All, by name, in order; other values have no memory.
        written: Names of the outputs.
    """

    __slots__ = ("_apart", "_places", "_written")

    def __init__(self, tensors: Mapping[str, Any], written: Sequence[str]) -> None:
        named = {name: one for name, one in tensors.items() if isinstance(one, torch.Tensor)}
        order = list(tensors)
        self._places = [order.index(name) for name in named]
        self._written = [order.index(name) for name in written]
        spans = {name: Operand(one).span for name, one in named.items()}
        pairs = map(frozenset, itertools.combinations(named, 2))
        # Those that start where others do were allowed to; it is a part of what a call looks like.
        as_one = {pair for pair in pairs if len({named[name].data_ptr() for name in pair}) == 1}
        self._apart = pairs_apart(spans, written, as_one)

    def are_apart(self, held: Sequence[Any]) -> bool:
        """Whether nothing that is written has memory that it may not have."""
        return are_apart([held[place].data_ptr() for place in self._places], self._apart)

    def tell(self, held: Sequence[Any]) -> None:
        """Tell torch what was written."""
        _tell([held[place] for place in self._written])


def repeated(key: _Key | None, tensors: Sequence[Any], values: Sequence[Any] = ()) -> bool:
    """Launch what is remembered of such calls; False if nothing is.

    Args:
        tensors: In the order of the arguments' fields.
        values: What stands beside them, in the order of the names that :func:`run` was given.
    """
    known = None if key is None else _launchers.get(key)
    if known is None:
        return False
    launcher, given = known
    if given is None:
        launcher(tensors, values)
        return True
    held = (*tensors, *values)
    if not given.are_apart(held):
        return False
    launcher(tensors, values)
    given.tell(held)
    return True


class Known:
    """How a call is made, from its tensors to what it returns.

    Args:
        launcher: Of the kernel.
        made: Makers of the outputs that the call does not give.
        numbers: That the launcher takes.
        operands, values: What it takes, in order, of the call's tensors, the outputs that are made
            and the numbers: the place among all of these, and the shape to view it in, if that is
            another.
        given: Outputs among the call's tensors; None without.
        results: From all of these to what the call returns.
    """

    __slots__ = ("given", "launcher", "made", "numbers", "operands", "results", "values")

    def __init__(
        self,
        launcher: LauncherInOrder,
        made: list[Callable[[], Any]],
        numbers: list[float],
        operands: list[_Taken],
        values: list[_Taken],
        given: Given | None,
        results: Callable[[list[Any]], Any],
    ) -> None:
        self.launcher, self.made, self.numbers = launcher, made, numbers
        self.operands, self.values, self.given, self.results = operands, values, given, results

    def __call__(self, tensors: list[Any]) -> Any:
        """NotImplemented where memory is shared that was not."""
        if self.given is not None and not self.given.are_apart(tensors):
            return NotImplemented
        held = [*tensors, *[make() for make in self.made], *self.numbers]
        operands = [held[n] if shape is None else held[n].view(shape) for n, shape in self.operands]
        values = [held[n] if shape is None else held[n].view(shape) for n, shape in self.values]
        self.launcher(operands, tuple(values))
        if self.given is not None:
            self.given.tell(tensors)
        return self.results(held)


class Seen(NamedTuple):
    """A call of a form, by what it is given.

    Attributes:
        key: What it looks like.
        tensors: In the order in which they are given.
        names: Theirs.
    """

    key: _Key
    tensors: list[Any]
    names: list[str]

    @property
    def is_known(self) -> bool:
        """Whether it is known how such calls are made."""
        return self.key in _calls

    def repeated(self) -> Any:
        """What the call returns, if it is known how it is made; else NotImplemented."""
        known = _calls.get(self.key)
        return NotImplemented if known is None else known(self.tensors)


def seen(
    name: str,
    places: Sequence[str],
    matrices: Sequence[Any],
    options: dict[str, Any],
    written: Sequence[str],
) -> Seen | None:
    """A call of a form of this name; None: it is not looked at.

    Args:
        places: Names of what is passed by place.
        written: Names of outputs, which may be among the options.
    """
    tensors: list[Any] = list(matrices)
    names: list[str] = list(places[: len(tensors)])
    how: list[Hashable] = [name]
    outputs = []
    for option, value in options.items():
        kind = type(value)
        if kind in TENSORS:
            tensors.append(value)
            names.append(option)
            if option in written:
                outputs.append(value)
        elif kind in _PLAIN:
            how += [option, kind.__name__, value]
        else:
            return None
    key = look(tensors, *how, *names, written=outputs)
    return None if key is None else Seen(key, tensors, names)


def is_known(key: _Key | None) -> bool:
    """Whether a call of several launches was made before, so that nothing has to be checked."""
    return key is not None and key in _sequences


def as_one(key: _Key | None, tensors: Sequence[torch.Tensor], make: Callable[[], Any]) -> Any:
    """What ``make()`` returns, which several launches make: those of an earlier call that looks
    like this one, if there are, one behind the other. See :func:`kernel_api._sequence.recorded`.

    Args:
        key: What the call looks like; ``make`` depends on nothing else.
        tensors: All that are read.
    """
    if key is None:
        return make()
    known = _sequences.get(key, 0)
    if not isinstance(known, int):
        results = known(tensors)
        return make() if results is NotImplemented else results
    if known >= _TIMES or _are_joined(tensors):
        return make()
    results, repeated = _sequence.recorded(make, tensors)
    _keep(_sequences, key, repeated or known + 1)
    return results


def _are_joined(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of them share memory, which says nothing of others."""
    return len({one.untyped_storage().data_ptr() for one in tensors}) < len(tensors)


def run(
    key: _Key | None, args: Arguments, names: Sequence[str], written: Sequence[str] = ()
) -> None:
    """Run by the best kernel, and remember that for calls that look alike.

    Args:
        names: Of what such calls give beside the operands: all that a launch takes by name.
        written: Of these and the operands, outputs that are not made for the call.
    """
    if key is None or key in _launchers:  # of which this one has memory that it shares
        run_best(args)
        return
    launcher, taken = launched(args)
    if launcher is None or tuple(taken) != tuple(names):
        return
    held = {**dict(zip(args.operand_names, args.tensors, strict=True)), **taken}
    _keep(_launchers, key, (launcher, Given(held, written) if written else None))


def launched(args: Arguments) -> tuple[LauncherInOrder | None, dict[str, Any]]:
    """Run by the best kernel; its launcher, if anything is written, and what that takes by name."""
    kernel, artifact = run_best(args)
    if not args.writes_anything:
        return None, {}
    return kernel._launcher_in_order(args, artifact), kernel._launch_operands(args)


def keep(key: _Key, call: Known) -> None:
    """Remember how calls that look alike are made."""
    _keep(_calls, key, call)


def _keep(among: dict[_Key, Any], key: _Key, one: Any) -> None:
    with _lock:
        if len(among) >= _KEPT:
            for oldest in list(among)[: _KEPT // 4]:
                del among[oldest]
        among[key] = one
