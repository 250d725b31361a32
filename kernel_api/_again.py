"""Calls that look like an earlier one, of forms that allocate all that they write.

As in :mod:`kernel_api._launches`, which is for forms that are given outputs as well: what a call
looks like is read from its tensors, and one that looks like an earlier one goes straight to the
kernel's launcher. What is remembered keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from kernel_api import _compile_cache, _locks, _sequence, provider
from kernel_api._launches import (
    BEFORE_DISPATCH,
    LOW_BITS,
    NEVER_NEGATIVE,
    TENSORS,
    dispatch_modes,
    is_included,
    run_best,
)
from kernel_api.arguments import Arguments
from kernel_api.kernel import LauncherInOrder
from kernel_api.offsets import check_is_asked
from kernel_api.provider import PROVIDERS, raw_setting

_KEPT = 1024
_Key = tuple[Hashable, ...]
_Taken = tuple[int, tuple[int, ...] | None]
_launchers: dict[_Key, LauncherInOrder] = {}
_calls: dict[_Key, Known] = {}
#: Of calls that were more than launches, how often.
_sequences: dict[_Key, _sequence.Repeated | int] = {}
#: Something else may have asked torch for something meanwhile, as Python's garbage may.
_TIMES = 3
_lock = _locks.lock()

#: Options that count by value. Whole numbers are not among them: launchers take others.
_PLAIN = frozenset((float, bool, str, torch.dtype, type(None)))


def look(read: Sequence[Any], *how: Hashable) -> _Key | None:
    """What a call looks like; None: it is not looked at.

    Args:
        read: The tensors that it reads; None in the place of one that is absent.
        how: What else tells it from others: its kind, element types and sizes of what is written.
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
    for one in read:
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
    return key


def repeated(key: _Key | None, tensors: Sequence[Any], values: Sequence[Any] = ()) -> bool:
    """Launch what is remembered of such calls; False if nothing is.

    Args:
        tensors: In the order of the arguments' fields.
        values: What stands beside them, in the order of the names that :func:`run` was given.
    """
    launcher = None if key is None else _launchers.get(key)
    if launcher is None:
        return False
    launcher(tensors, values)
    return True


class Known:
    """How a call is made that allocates all its outputs, from its tensors to what it returns.

    Args:
        launcher: Of the kernel.
        made: Shape, element type and device of each output.
        numbers: That the launcher takes.
        operands, values: What it takes, in order, of the call's tensors, the outputs and the
            numbers: the place among all of these, and the shape to view it in, if that is another.
        results: From the outputs to what the call returns.
    """

    __slots__ = ("launcher", "made", "numbers", "operands", "results", "values")

    def __init__(
        self,
        launcher: LauncherInOrder,
        made: list[tuple[tuple[int, ...], torch.dtype, torch.device]],
        numbers: list[float],
        operands: list[_Taken],
        values: list[_Taken],
        results: Callable[[list[Any]], Any],
    ) -> None:
        self.launcher, self.made, self.numbers = launcher, made, numbers
        self.operands, self.values, self.results = operands, values, results

    def __call__(self, tensors: list[Any]) -> Any:
        outputs = [torch.empty(shape, dtype=kind, device=on) for shape, kind, on in self.made]
        held = [*tensors, *outputs, *self.numbers]
        operands = [held[n] if shape is None else held[n].view(shape) for n, shape in self.operands]
        values = [held[n] if shape is None else held[n].view(shape) for n, shape in self.values]
        self.launcher(operands, tuple(values))
        return self.results(outputs)


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
    def known(self) -> Known | None:
        """How such a call is made; None if that is not known."""
        return _calls.get(self.key)


def seen(
    name: str, places: Sequence[str], matrices: Sequence[Any], options: dict[str, Any]
) -> Seen | None:
    """A call of a form of this name; None: it is not looked at.

    Args:
        places: Names of what is passed by place.
    """
    tensors: list[Any] = list(matrices)
    names: list[str] = list(places[: len(tensors)])
    how: list[Hashable] = [name]
    for option, value in options.items():
        kind = type(value)
        if kind in TENSORS:
            tensors.append(value)
            names.append(option)
        elif kind in _PLAIN:
            how += [option, kind.__name__, value]
        else:
            return None
    key = look(tensors, *how, *names)
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


def run(key: _Key | None, args: Arguments, names: Sequence[str]) -> None:
    """Run by the best kernel, and remember that for calls that look alike.

    Args:
        names: Of what such calls give beside the operands: all that a launch takes by name.
    """
    if key is None:
        run_best(args)
        return
    launcher, taken = launched(args)
    if launcher is not None and taken == tuple(names):
        _keep(_launchers, key, launcher)


def launched(args: Arguments) -> tuple[LauncherInOrder | None, tuple[str, ...]]:
    """Run by the best kernel; its launcher, if anything is written, and what that takes by name."""
    kernel, artifact = run_best(args)
    if not args.writes_anything:
        return None, ()
    return kernel._launcher_in_order(args, artifact), tuple(kernel._launch_operands(args))


def keep(key: _Key, call: Known) -> None:
    """Remember how calls that look alike are made."""
    _keep(_calls, key, call)


def _keep(among: dict[_Key, Any], key: _Key, one: Any) -> None:
    with _lock:
        if len(among) >= _KEPT:
            for oldest in list(among)[: _KEPT // 4]:
                del among[oldest]
        among[key] = one
