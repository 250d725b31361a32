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
from kernel_api.operands import MAX_ALIGNMENT

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
#: Of an address, those that alignment is counted by.
LOW_BITS = MAX_ALIGNMENT - 1

#: Of what is held when a launch is made: a place, or no place and a number.
_Value = tuple[int | None, Any]
#: Of what is held, something further to hold.
_Adder = Callable[[Any], torch.Tensor]
_RunBest = Callable[[Arguments], tuple[Kernel, CompiledArtifact]]

_running = threading.local()


class Step(NamedTuple):
    """A launch, and what is done around it.

    Attributes:
        added: Makers of tensors and of views, which are held behind what is there.
        aligned: Of tensors that are made, the place, and the bits of the address that are 0.
        launcher: Of the kernel.
        operands: Places of its tensors.
        values: What it takes beside them.
        done: Places of what nothing later looks at.
    """

    added: list[_Adder]
    aligned: list[tuple[int, int]]
    launcher: LauncherInOrder
    operands: list[int]
    values: list[_Value]
    done: list[int]


class Repeated:
    """The launches of a call, on other tensors that look alike. It keeps no tensor.

    Args:
        steps: In order.
        added: Behind them all.
        results: The places of what is returned; of one tensor, its place.
    """

    __slots__ = ("added", "results", "steps")

    def __init__(
        self, steps: list[Step], added: list[_Adder], results: int | list[int | None]
    ) -> None:
        self.steps, self.added, self.results = steps, added, results

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """What the call returns; NotImplemented where memory is less aligned than it was."""
        held: list[Any] = list(tensors)
        for added, aligned, launcher, operands, values, done in self.steps:
            for add in added:
                held.append(add(held))
            for n, bits in aligned:
                if held[n].data_ptr() & bits:
                    return NotImplemented
            given = tuple([number if n is None else held[n] for n, number in values])
            launcher([held[n] for n in operands], given)
            for n in done:
                held[n] = None
        for add in self.added:
            held.append(add(held))
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


class _Memory:
    """What a tensor lies in that is given, or made within the call, as long as nothing else does.

    Attributes:
        start: The address of the tensor.
        place: Where it is held; None as long as it is made and no launch was given it.
        is_given: Whether it is; else ``make`` makes one like it.
        look: What it looks like.
        base: What views are tried on: the tensor, or a stand-in of one that is made.
    """

    def __init__(self, tensor: torch.Tensor, place: int | None) -> None:
        self.start, self.place, self.is_given = tensor.data_ptr(), place, place is not None
        self.look = _look(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if self.is_given:
            self.base = tensor
            return
        layout = tuple(tensor.shape), tensor.stride()
        make = functools.partial(torch.empty_strided, *layout, dtype=tensor.dtype)
        self.base = make(device="meta")
        made = functools.partial(make, device=tensor.device)
        self.make: _Adder = lambda held: made()

    @property
    def is_there(self) -> bool:
        return not self._storage.expired()  # type: ignore[no-untyped-call]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is launched within it, and gives each tensor the place where it will be held:
    first those that are given, then what steps make and view, in their order."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = self._count = len(tensors)
        #: By address, what was last there.
        self._memory = {_address(one): _Memory(one, n) for n, one in enumerate(tensors)}
        self._viewed = {(n, 0, *_look(one)): n for n, one in enumerate(tensors)}
        self._last_used: dict[int, int] = {}
        self._steps: list[Step] = []
        self._added: list[_Adder] = []
        self._aligned: list[tuple[int, int]] = []
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
        _running.recorder = None  # torch has taken the mode off
        try:
            found = function(*args, **(kwargs or {}))
        finally:
            _running.recorder = self
        if function in _ALLOCATIONS:
            self._memory[_address(found)] = _Memory(found, None)
        elif not _is_view(function, args, found):
            self._is_refused = True
        return found

    def run(self, args: Arguments, run_best: _RunBest) -> tuple[Kernel, CompiledArtifact]:
        """What kernels ask of torch is not looked at."""
        self.__exit__(None, None, None)
        try:
            kernel, artifact = run_best(args)
            if not self._is_refused:
                self._note(args, kernel, artifact)
        finally:
            self.__enter__()
        return kernel, artifact

    def repeated(self, results: Any) -> Repeated | None:
        is_one = isinstance(results, torch.Tensor)
        self._added = []
        try:
            places = [self._place(one) for one in ((results,) if is_one else results)]
        except _NotRepeatedError:
            return None
        if self._is_refused or not self._steps:
            return None
        for place, step in self._last_used.items():
            if self._given <= place and step < len(self._steps):
                self._steps[step].done.append(place)
        return Repeated(self._steps, self._added, places[0] if is_one else places)

    def _note(self, args: Arguments, kernel: Kernel, artifact: CompiledArtifact) -> None:
        """A launch that was made."""
        self._added, self._aligned = [], []
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
        self._steps.append(Step(self._added, self._aligned, launcher, operands, values, []))

    def _is_given(self, output: Any) -> bool:
        memory = self._memory.get(_address(output.tensor))
        return memory is None or memory.is_given

    def _value(self, value: Any) -> _Value:
        if type(value) in _NUMBERS:
            return None, value
        return self._place(value), None

    def _place(self, tensor: Any) -> Any:
        """Where a launch, or who called, finds it; None for None."""
        if tensor is None:
            return None
        memory = self._memory.get(_address(tensor)) if isinstance(tensor, torch.Tensor) else None
        if memory is None or not memory.is_there:
            raise _NotRepeatedError
        whole = self._whole(memory)
        behind, rest = divmod(tensor.data_ptr() - memory.start, tensor.element_size())
        if rest:
            raise _NotRepeatedError
        look = whole, behind, *_look(tensor)
        place = self._viewed.get(look)
        if place is None:
            place = self._viewed[look] = self._add(_view(memory, whole, behind, tensor))
            self._use(whole)
        self._use(place)
        return place

    def _whole(self, memory: _Memory) -> int:
        """The place of the tensor that was given or made."""
        if memory.place is None:
            memory.place = self._add(memory.make)
            whole = memory.place, 0, *memory.look
            self._viewed[whole] = memory.place
            alignment = min(memory.start & -memory.start, LOW_BITS + 1)
            self._aligned.append((memory.place, max(alignment, 1) - 1))
        return memory.place

    def _add(self, adder: _Adder) -> int:
        self._added.append(adder)
        self._count += 1
        return self._count - 1

    def _use(self, place: int) -> None:
        self._last_used[place] = len(self._steps)


def _view(memory: _Memory, place: int, behind: int, tensor: torch.Tensor) -> _Adder:
    """Makes a view like this tensor of what is held at a place."""
    element = None if tensor.dtype is memory.base.dtype else tensor.dtype
    view = _viewer(place, element, tuple(tensor.shape), tensor.stride(), behind)
    try:
        view({place: memory.base})
    except RuntimeError as raised:  # as one of wider elements that are not side by side
        raise _NotRepeatedError from raised
    return view


def _viewer(
    place: int,
    element: torch.dtype | None,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    behind: int,
) -> _Adder:
    """Looks at the memory of what is held at a place, as another element type where that is given,
    from so many elements behind its start."""
    strided = torch.as_strided
    if element is None and not behind:
        return lambda held: strided(held[place], shape, stride)

    def view(held: Any) -> torch.Tensor:
        base = held[place] if element is None else held[place].view(element)
        return strided(base, shape, stride, base.storage_offset() + behind)

    return view


def _is_view(function: Any, args: Sequence[Any], found: Any) -> bool:
    if not (args and isinstance(args[0], torch.Tensor) and isinstance(found, torch.Tensor)):
        return False
    return not function._schema.is_mutable and _address(found) == _address(args[0])


def _address(tensor: torch.Tensor) -> int:
    """The address of what a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
