"""Several launches as one: what a call allocates, views and launches, to be repeated.

While the call is made once, a dispatch mode of torch sees all that torch is asked to do beside the
launches. Allocations are noted, and views, by what launches are given. Anything else, such as a
copy, says that the call is not made of launches alone: then there is nothing to repeat.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_api.arguments import Arguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel, LauncherInOrder

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
_NUMBERS = frozenset((float, int, bool, type(None)))

#: Of what is held when a launch is made: a place, or no place and a number.
_Value = tuple[int | None, Any]
_View = Callable[[list[Any]], torch.Tensor]
_RunBest = Callable[[Arguments], tuple[Kernel, CompiledArtifact]]

_running = threading.local()


class Step(NamedTuple):
    """A launch, and what is done around it.

    Attributes:
        made: Makers of tensors, held behind those that are there.
        views: Of what is held; held behind that.
        launcher: Of the kernel.
        operands: Places of its tensors.
        values: What it takes beside them.
        done: Places of what nothing later looks at.
    """

    made: list[Callable[[], torch.Tensor]]
    views: list[_View]
    launcher: LauncherInOrder
    operands: list[int]
    values: list[_Value]
    done: list[int]


class Repeated:
    """The launches of a call, on other tensors that look alike. It keeps no tensor.

    Args:
        steps: In order.
        views: Behind them all.
        results: The places of what is returned; of one tensor, its place.
    """

    __slots__ = ("results", "steps", "views")

    def __init__(
        self, steps: list[Step], views: list[_View], results: int | list[int | None]
    ) -> None:
        self.steps, self.views, self.results = steps, views, results

    def __call__(self, tensors: Sequence[Any]) -> Any:
        held: list[Any] = list(tensors)
        for made, views, launcher, operands, values, done in self.steps:
            for make in made:
                held.append(make())
            for view in views:
                held.append(view(held))
            given = tuple([number if n is None else held[n] for n, number in values])
            launcher([held[n] for n in operands], given)
            for n in done:
                held[n] = None
        for view in self.views:
            held.append(view(held))
        if isinstance(self.results, int):
            return held[self.results]
        return tuple([None if n is None else held[n] for n in self.results])


def recorded(make: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """What ``make()`` returns, a tensor or a tuple of tensors and None; and how that is repeated,
    a :class:`Repeated`, or None where more than launches was made.

    Args:
        make: Allocates tensors, views them, and calls one-call forms. It depends on nothing but on
            what the tensors look like that it reads.
        tensors: All that it reads. None of them shares memory with another.
    """
    recorder = _Recorder(tensors)
    with recorder:
        results = make()
    return results, recorder.repeated(results)


def run(args: Arguments, run_best: _RunBest) -> tuple[Kernel, CompiledArtifact]:
    """``run_best(args)``, of which a note is taken where a call is recorded."""
    recorder: _Recorder | None = getattr(_running, "recorder", None)
    return run_best(args) if recorder is None else recorder.run(args, run_best)


class _NotRepeatedError(Exception):
    """A launch is given what would not be there when it is repeated."""


class _Whole(NamedTuple):
    """What lies somewhere in memory, as long as nothing else does."""

    place: int
    start: int
    memory: StorageWeakRef

    @classmethod
    def of(cls, place: int, tensor: torch.Tensor) -> _Whole:
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(place, tensor.data_ptr(), memory)

    @property
    def is_there(self) -> bool:
        return not self.memory.expired()  # type: ignore[no-untyped-call]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is made and launched within it, and gives each tensor the place where it will be
    held: first those that are given, then what steps make and view, in their order."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = len(tensors)
        #: By place: what views are tried on. Of tensors that are made it is a stand-in.
        self._bases: list[Any] = list(tensors)
        #: By the address of memory, the place of what was last there, where that starts, and
        #: whether it still is there.
        self._whole = {_memory(one): _Whole.of(n, one) for n, one in enumerate(tensors)}
        self._viewed = {(n, 0, *_look(one)): n for n, one in enumerate(tensors)}
        self._last_used: dict[int, int] = {}
        self._steps: list[Step] = []
        self._made: list[Callable[[], torch.Tensor]] = []
        self._views: list[_View] = []
        self._is_refused = False

    def __enter__(self) -> Any:
        _running.recorder = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        _running.recorder = None
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self._note_made(found)
        elif not _is_view(function, args, found):
            self._is_refused = True
        return found

    def run(self, args: Arguments, run_best: _RunBest) -> tuple[Kernel, CompiledArtifact]:
        """What kernels ask of torch is not looked at."""
        self.__exit__(None, None, None)
        try:
            kernel, artifact = run_best(args)
            if not self._is_refused:
                self._note_launch(args, kernel, artifact)
        finally:
            self.__enter__()
        return kernel, artifact

    def repeated(self, results: Any) -> Repeated | None:
        is_one = isinstance(results, torch.Tensor)
        self._views = []
        try:
            places = [self._place(one) for one in ((results,) if is_one else results)]
        except _NotRepeatedError:
            return None
        if self._is_refused or self._made or not self._steps:
            return None
        for place, step in self._last_used.items():
            if step < len(self._steps) and place >= self._given:
                self._steps[step].done.append(place)
        return Repeated(self._steps, self._views, places[0] if is_one else places)

    def _note_made(self, tensor: torch.Tensor) -> None:
        layout = tuple(tensor.shape), tensor.stride()
        make = functools.partial(torch.empty_strided, *layout, dtype=tensor.dtype)
        place = len(self._bases)
        self._made.append(functools.partial(make, device=tensor.device))
        self._bases.append(make(device="meta"))
        self._whole[_memory(tensor)] = _Whole.of(place, tensor)
        look = place, 0, *_look(tensor)
        self._viewed[look] = place

    def _note_launch(self, args: Arguments, kernel: Kernel, artifact: CompiledArtifact) -> None:
        self._views = []
        taken = kernel._launch_operands(args)
        try:
            if not args.writes_anything or any(map(self._is_given, args.outputs.values())):
                raise _NotRepeatedError
            if any(f"{name}_scale" not in taken for name in args.scaled):
                raise _NotRepeatedError  # a launcher keeps the scales that it does not take
            operands = [self._place(tensor) for tensor in args.tensors]
            values = [self._value(one) for one in taken.values()]
        except _NotRepeatedError:
            self._is_refused = True
            return
        launcher = kernel._launcher_in_order(args, artifact)
        self._steps.append(Step(self._made, self._views, launcher, operands, values, []))
        self._made = []

    def _is_given(self, output: Any) -> bool:
        whole = self._whole.get(_memory(output.tensor))
        return whole is None or whole.place < self._given

    def _value(self, value: Any) -> _Value:
        if type(value) in _NUMBERS:
            return None, value
        return self._place(value), None

    def _place(self, tensor: Any) -> Any:
        """Where a launch, or who called, finds it; None for None."""
        if tensor is None:
            return None
        whole = self._whole.get(_memory(tensor)) if isinstance(tensor, torch.Tensor) else None
        if whole is None or not whole.is_there:
            raise _NotRepeatedError
        behind, rest = divmod(tensor.data_ptr() - whole.start, tensor.element_size())
        if rest:
            raise _NotRepeatedError
        look = whole.place, behind, *_look(tensor)
        place = self._viewed.get(look)
        if place is None:
            place = self._viewed[look] = self._view(whole.place, behind, tensor)
            self._last_used[whole.place] = len(self._steps)
        self._last_used[place] = len(self._steps)
        return place

    def _view(self, place: int, behind: int, tensor: torch.Tensor) -> int:
        """The place of a new view of what is held at another."""
        element = None if tensor.dtype is self._bases[place].dtype else tensor.dtype
        view = _viewer(place, element, tuple(tensor.shape), tensor.stride(), behind)
        try:
            view(self._bases)
        except RuntimeError as raised:  # as one of wider elements that are not side by side
            raise _NotRepeatedError from raised
        self._views.append(view)
        self._bases.append(None)
        return len(self._bases) - 1


def _viewer(
    place: int,
    element: torch.dtype | None,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    behind: int,
) -> _View:
    """Looks at the memory of what is held at a place, as another element type where that is given,
    from so many elements behind its start."""
    strided = torch.as_strided
    if element is None and not behind:
        return lambda held: strided(held[place], shape, stride)

    def view(held: list[Any]) -> torch.Tensor:
        base = held[place] if element is None else held[place].view(element)
        return strided(base, shape, stride, base.storage_offset() + behind)

    return view


def _is_view(function: Any, args: Sequence[Any], found: Any) -> bool:
    if not (args and isinstance(args[0], torch.Tensor) and isinstance(found, torch.Tensor)):
        return False
    return not function._schema.is_mutable and _memory(found) == _memory(args[0])


def _memory(tensor: torch.Tensor) -> int:
    """The address of what a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
