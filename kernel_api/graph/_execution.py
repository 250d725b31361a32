"""Executing a plan: tensors to their places, then one launch after the other."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kernel_api import _locks
from kernel_api._overwritten import teller
from kernel_api._readers import Reader, reader_of
from kernel_api.devices import require_streams
from kernel_api.errors import ArgumentError, GraphError, VariantPackError, WorkspaceError
from kernel_api.graph._enums import element_type
from kernel_api.graph._handle import Handle
from kernel_api.graph._likeness import Likeness, likeness
from kernel_api.graph._origins import Ref, origins
from kernel_api.graph._planning.frame import Layout
from kernel_api.graph._planning.plan import Plan, size_of
from kernel_api.graph._planning.steps import KernelStep, TorchStep, ViewStep, origin_of
from kernel_api.graph._slots import (
    NOWHERE,
    Slot,
    at_address,
    check_apart,
    check_readable,
    number_for,
    shown,
)
from kernel_api.graph._tensor import Tensor
from kernel_api.kernel import LauncherInOrder
from kernel_api.operands import as_torch, is_read_only

#: What kernels may ask of addresses; other addresses get a program of their own.
_LOW_BITS = 15

#: Sets of keys of variant packs that are remembered, each in its order.
_MOST_READERS = 64

#: Sets of addresses that are remembered: whether memory is shared is asked of new ones only.
_MOST_PLACES = 256

#: So often an execution compares with other tensors than before; where they are never alike, it
#: looks at them one by one.
_MOST_LIKENESSES = 16

#: Executions for other extents that are remembered.
_MOST_OVERRIDDEN = 256

_Run = Callable[[list[Any]], None]
_Program = list[_Run]


class KeptView:
    """Reads a :class:`Ref` that is a view, which is made anew only where the tensor is another
    one, or lies elsewhere, than the last time.

    What is kept is forgotten when that tensor is gone. It is of the tensor detached: a view keeps
    alive what it is of.
    """

    def __init__(self, ref: Ref) -> None:
        self._slot, self._ref = ref.slot, ref._replace(slot=0)
        self._last = _NO_VIEW
        own = weakref.ref(self)  # the tensor's end does not keep this

        def forget(of: Any) -> None:
            kept = own()
            if kept is not None and kept._last[0] is of:
                kept._last = _NO_VIEW

        self._forget = forget

    def read(self, slots: list[Any]) -> Any:
        tensor = slots[self._slot]
        of, ahead, view = self._last
        if of() is not tensor or tensor.data_ptr() + ahead != view.data_ptr():
            view = self._ref.read([tensor.detach()])
            ahead = view.data_ptr() - tensor.data_ptr()
            self._last = weakref.ref(tensor, self._forget), ahead, view
        return view


#: What gives the tensor that a view is of, its bytes behind the tensor's start, and the view.
_NO_VIEW: tuple[Callable[[], Any], int, Any] = (lambda: None, 0, None)

#: What gives the caller's workspace, its address, and the views of it: forgotten when it is gone.
_NO_WORKSPACE: tuple[Callable[[], Any], int, list[Any]] = (lambda: None, 0, [])


class Execution:
    """One plan of a graph with its tensors in order. Safe to be used by several threads."""

    def __init__(self, graph: Any, plan: Plan, also: Mapping[Tensor, Tensor] | None = None) -> None:
        """``also``: other tensors by which the caller may name those of the graph."""
        import torch
        from torch.autograd import forward_ad

        from kernel_api._launches import TENSORS

        self._graph, self._plan, self._plain = graph, plan, TENSORS
        self._tangents: Any = forward_ad
        self.device = torch.device(graph._planned_device())
        if self.device.type == "cuda" and self.device.index is None and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        read = {id(t) for node in graph.nodes for t in _all_reads(node)}
        given = [t for t in graph.inputs if id(t) in read] + list(graph.outputs)
        self._slots = [self._slot(tensor) for tensor in given]
        # Plain tuples: those with names are slower to take apart.
        self._checks = [
            (number, s.dim, s.stride, s.element, s.place) for number, s in enumerate(self._slots)
        ]
        self._in_memory = [n for n, s in enumerate(self._slots) if s.place != NOWHERE]
        # Of the class: faster than that of each.
        self._address_of = torch.Tensor.data_ptr
        numbers = range(len(given) - len(graph.outputs), len(given))
        self._outputs, self._tell = reader_of(tuple(numbers)), teller()
        self._numbers = [n for n, s in enumerate(self._slots) if s.place == NOWHERE]
        self._has_numbers = bool(self._numbers)
        self._misaligned: dict[tuple[int, ...], int] = {}
        self._alike: Likeness | None = None
        self._likenesses = 0
        self._readers: dict[tuple[Any, ...], Reader] = {}
        self._index: dict[Any, int] = {}
        for number, tensor in enumerate(given):
            for key in (tensor.name, tensor.uid, tensor):
                if key not in (None, ""):
                    self._index[key] = number
        for other, tensor in (also or {}).items():
            if tensor in self._index:
                self._index[other] = self._index[tensor]
        self._unread = {k for t in graph.inputs if id(t) not in read for k in (t, t.uid, t.name)}
        self._places = list(plan.places.values())
        self._number = {id(t): i for i, t in enumerate([*given, *(t for t, _ in self._places)])}
        self._programs: dict[Any, _Program] = {}
        self._overridden: dict[Any, Execution] = {}
        self._workspace_views = _NO_WORKSPACE
        self._lock = _locks.lock()
        own = weakref.ref(self)  # the workspace's end does not keep this

        def forget(of: Any) -> None:
            kept = own()
            if kept is not None and kept._workspace_views[0] is of:
                kept._workspace_views = _NO_WORKSPACE

        self._forget_workspace = forget

    def _slot(self, tensor: Tensor) -> Slot:
        element = element_type(tensor.data_type).torch
        place = self.device.index if self.device.type == "cuda" else -1
        if tensor.is_pass_by_value:
            place = NOWHERE
        size = size_of(tensor) if tensor.ragged_offset is None else element.itemsize
        return Slot(tensor, element, self.device, place, tensor.dim, tensor.stride, size)

    # One execution -----------------------------------------------------------------------

    def execute(
        self, variant_pack: Mapping[Any, Any], workspace: Any, handle: Handle | None
    ) -> None:
        """See :meth:`pygraph.execute`."""
        slots, misaligned = self._taken(variant_pack)
        if self._tangents._current_level >= 0:
            slots = [_detached(value) for value in slots]
        if self._places:
            slots += self._temporaries(workspace)
        if handle is not None:
            if not isinstance(handle, Handle):
                raise GraphError(
                    f"handle is a {type(handle).__name__}; expected what create_handle() returns"
                )
            handle.check()
            if handle.stream is not None:
                from kernel_api.providers.streams import on_stream

                require_streams(self.device, handle.stream)
                with on_stream(handle.stream, self.device.index):
                    self._launch(slots, misaligned)
                return
        self._launch(slots, misaligned)

    def _launch(self, slots: list[Any], misaligned: int) -> None:
        key: Any = misaligned
        if self._has_numbers:  # a kernel may be for some alone
            key = misaligned, *[_sort_of(slots[n]) for n in self._numbers]
        program = self._programs.get(key)
        if program is None:
            program = self._bound(slots, key)
        for run in program:
            run(slots)
        self._tell(self._outputs(slots))

    def _taken(self, pack: Mapping[Any, Any]) -> tuple[list[Any], int]:
        """The caller's tensors in their slots, and a bit for each that starts at no multiple of 16
        bytes; raises VariantPackError."""
        if type(pack) is not dict and not isinstance(pack, Mapping):
            raise VariantPackError(
                f"the variant pack is a {type(pack).__name__}; expected a dict from tensors, uids "
                f"or names to torch tensors"
            )
        read = self._readers.get(tuple(pack))
        if read is None:
            read = self._reader_for(tuple(pack))
        slots, alike = [*read(pack)], self._alike
        try:
            if alike is None or not alike(*slots):
                self._look_at(slots)
            tensors = [slots[n] for n in self._in_memory] if self._has_numbers else slots
            addresses = (*map(self._address_of, tensors),)
        except (NotImplementedError, RuntimeError):
            for value, slot in zip(slots, self._slots, strict=True):
                check_readable(value, slot)
            raise
        misaligned = self._misaligned.get(addresses)
        return slots, self._placed(slots, addresses) if misaligned is None else misaligned

    def _look_at(self, slots: list[Any]) -> None:
        """Checks what was given, one by one; what is fitting in another form is replaced."""
        plain, fitted = self._plain, False
        for number, dim, stride, element, place in self._checks:
            value = slots[number]
            if (
                type(value) not in plain
                or value.shape != dim
                or value.stride() != stride
                or value.dtype is not element
                or value.get_device() != place
                or (place < 0 and not value.is_cpu)
                or value.is_neg()
            ):
                slots[number] = self._fitted(value, self._slots[number])
                fitted = True
        if not fitted:
            self._likenesses += 1
            self._alike = likeness(slots) if self._likenesses <= _MOST_LIKENESSES else None

    def _placed(self, slots: list[Any], addresses: tuple[int, ...]) -> int:
        """A bit for each tensor that starts at no multiple of 16 bytes; raises VariantPackError
        where memory is shared that is written."""
        placed = dict(zip(self._in_memory, addresses, strict=True))
        check_apart(self._slots, placed, slots)
        bits = sum(1 << number for number, start in placed.items() if start & _LOW_BITS)
        if len(self._misaligned) >= _MOST_PLACES:
            self._misaligned.clear()
        self._misaligned[addresses] = bits
        return bits

    def _reader_for(self, keys: tuple[Any, ...]) -> Reader:
        """What reads the slots, in their order, from packs with these keys; raises VariantPackError
        for keys that are unknown or missing."""
        found: dict[int, Any] = {}
        for key in keys:
            number = self._index.get(key)
            if number is None:
                self._refuse_key(key)
            elif number in found:
                raise VariantPackError(
                    f"{self._slots[number]} is given twice, as {_shown(found[number])} and as "
                    f"{_shown(key)}"
                )
            else:
                found[number] = key
        missing = [s.tensor for number, s in enumerate(self._slots) if number not in found]
        if missing:
            raise VariantPackError(
                f"Non-virtual input tensors not found in variant pack: "
                f"{[str(t) for t in missing]} (uids {[t.uid for t in missing]}); every tensor that "
                f"is read or written for the caller is needed"
            )
        if len(self._readers) >= _MOST_READERS:
            self._readers.clear()
        read = self._readers[keys] = reader_of([found[number] for number in sorted(found)])
        return read

    def _refuse_key(self, key: Any) -> None:
        if key in self._unread:
            return
        known = [str(slot) for slot in self._slots]
        if isinstance(key, Tensor):
            own = any(key is tensor for tensor in self._graph.tensors)
            what = f"{key}, a virtual tensor" if own else f"{key}, a tensor of another graph"
            raise VariantPackError(
                f"the variant pack has {what}; expected {', '.join(known)}. Graphs that were "
                f"deserialised take uids"
            )
        raise VariantPackError(
            f"the variant pack has {key!r}, which is no tensor, uid or name of the graph; "
            f"expected {', '.join(known)}"
        )

    def _fitted(self, value: Any, slot: Slot) -> Any:
        """What was given in another form, without a mode, or with other strides in modes of extent
        1."""
        tensor = slot.tensor
        if tensor.is_pass_by_value:
            return number_for(value, slot)
        if isinstance(value, int) and not isinstance(value, bool):
            return at_address(value, slot)
        import torch

        if not isinstance(value, torch.Tensor):
            if not hasattr(value, "__dlpack__"):
                raise VariantPackError(
                    f"{tensor} was given as a {type(value).__name__}; expected a torch tensor, "
                    f"another DLPack tensor, or an address"
                )
            if not tensor.is_input and is_read_only(value):
                raise VariantPackError(f"{slot} is a read-only array, and the graph writes it")
            value = _viewed(value, str(slot))
        check_readable(value, slot)
        if not value.shape and slot.dim == (1,):
            value = value.view(1)
        found = (tuple(value.shape), value.dtype, value.device)
        if found != (slot.dim, slot.element, slot.device):
            raise VariantPackError(
                f"{slot} is {shown(*found)}; the graph says "
                f"{shown(slot.dim, slot.element, slot.device)}. Other extents can be given by "
                f"override_uids, override_shapes and override_strides"
            )
        if value.is_neg():
            own = (
                "its resolve_neg()" if tensor.is_input else "a tensor of its own, and copy it back"
            )
            raise VariantPackError(
                f"{slot} has torch's negative bit set, as imaginary parts of conjugates have, and "
                f"kernels take memory as it is; pass {own}"
            )
        strides = zip(slot.dim, value.stride(), slot.stride, strict=True)
        if 0 not in slot.dim and any(n != 1 and own != said for n, own, said in strides):
            raise VariantPackError(
                f"{slot} has stride {list(value.stride())}; the graph says {list(slot.stride)}"
            )
        return value.detach().as_strided(slot.dim, slot.stride, value.storage_offset())

    # The workspace -----------------------------------------------------------------------

    def _temporaries(self, workspace: Any) -> list[Any]:
        """Tensors in the workspace, for what one kernel writes and another reads."""
        import torch

        size = self._plan.workspace_size
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            return self._views_of(workspace)
        start = workspace.data_ptr() if isinstance(workspace, torch.Tensor) else 0
        of, known, views = self._workspace_views
        same = start and start == known and of() is workspace
        if same and workspace.numel() * workspace.element_size() >= size:
            return views
        self._check_workspace(workspace, size)
        views = self._views_of(_detached(workspace).reshape(-1).view(torch.uint8))
        if isinstance(workspace, torch.Tensor):
            self._workspace_views = weakref.ref(workspace, self._forget_workspace), start, views
        return views

    def _check_workspace(self, workspace: Any, size: int) -> None:
        if not hasattr(workspace, "data_ptr"):
            raise WorkspaceError(
                f"the workspace is a {type(workspace).__name__}; expected a torch.uint8 tensor"
            )
        if workspace.device != self.device or not workspace.is_contiguous():
            raise WorkspaceError(
                f"the workspace is on {workspace.device}; expected contiguous memory on "
                f"{self.device}"
            )
        bytes_given = workspace.numel() * workspace.element_size()
        if bytes_given < size:
            raise WorkspaceError(f"the workspace has {bytes_given} bytes; {size} are needed")
        if workspace.data_ptr() & _LOW_BITS:
            raise WorkspaceError("the workspace starts at no multiple of 16 bytes")

    def _views_of(self, workspace: Any) -> list[Any]:
        return [
            workspace[offset : offset + size_of(tensor)]
            .view(element_type(tensor.data_type).torch)
            .as_strided(
                tensor.dim,
                tensor.stride,
                (workspace.storage_offset() + offset) // element_type(tensor.data_type).itemsize,
            )
            for tensor, offset in self._places
        ]

    # From steps to launches --------------------------------------------------------------

    def _bound(self, slots: list[Any], key: Any) -> _Program:
        """The launches for tensors that lie like these, and numbers of their sort."""
        program: _Program = []
        for step in self._plan.steps:
            if isinstance(step, KernelStep):
                program.append(self._kernel_launch(step, slots))
            elif isinstance(step, TorchStep):
                program.append(self._torch_launch(step))
            else:
                assert isinstance(step, ViewStep)
        with self._lock:
            return self._programs.setdefault(key, program)

    def ref(self, tensor: Tensor, layout: Layout | None = None) -> Ref:
        """Where a tensor is found."""
        source, offset = origin_of(tensor)
        number = self._number.get(id(source))
        if number is None:
            raise GraphError(f"{tensor} has no memory in plan {self._plan.name}")
        if layout is None and source is not tensor:
            layout = tensor.dim, tensor.stride
        if layout == (source.dim, source.stride) and not offset:
            layout = None
        return Ref(number, layout, offset)

    def _kernel_launch(self, step: KernelStep, slots: list[Any]) -> Callable[[list[Any]], None]:
        def take(tensor: Tensor, layout: Layout | None = None, name: str = "") -> Any:
            return self._read(tensor, layout, slots)

        args = step.build(take)
        if not args.writes_anything:
            return _nothing
        kernel = self._kernel_for(step, args)
        launch = kernel._launcher_in_order(args, kernel._artifact_to_run(args))
        values, found = kernel._launch_operands(args), origins(step, kernel, self.ref)
        if found is None or list(found.values) != list(values):
            return self._rebuilding(step, kernel)
        constants = {name: value for name, value in values.items() if found.values[name] is None}
        if any(hasattr(value, "data_ptr") for value in constants.values()):
            # By the arguments: what is another tensor every time is of the operands.
            again = kernel._launch_operands(step.build(take))
            if any(again[name] is not value for name, value in constants.items()):
                return self._rebuilding(step, kernel)
        behind = {name: Ref(place) for place, name in enumerate(constants, -len(constants))}
        ordered = [ref or behind[name] for name, ref in found.values.items()]
        return _launching(launch, found.fields, ordered, list(constants.values()))

    def _kernel_for(self, step: KernelStep, args: Any) -> Any:
        """The planned kernel, or the best one for tensors that it does not take."""
        from kernel_api.discovery import explain, get_kernels
        from kernel_api.errors import NoKernelError

        if step.kernel.supports(args):
            return step.kernel
        kernels = get_kernels(args)
        if not kernels:
            raise NoKernelError(explain(args))
        return kernels[0]

    def _rebuilding(self, step: KernelStep, kernel: Any) -> Callable[[list[Any]], None]:
        """A launch whose arguments are made anew, because they derive tensors of their own."""

        def run(slots: list[Any]) -> None:
            def take(tensor: Tensor, layout: Layout | None = None, name: str = "") -> Any:
                return self._read(tensor, layout, slots)

            kernel.run(step.build(take))

        return run

    def _torch_launch(self, step: TorchStep) -> Callable[[list[Any]], None]:
        # By what they write: the producer of a tensor may be the user's node, not that which
        # planning put in its place.
        own = {id(tensor) for node in step.nodes for tensor in node.writes}
        refs: dict[int, Ref] = {}
        for node in step.nodes:
            for tensor in (*_all_reads(node), *node.writes):
                inside = id(tensor) in own and id(tensor) not in self._number
                if tensor.is_constant or inside:
                    continue
                refs[id(tensor)] = self.ref(tensor)

        def run(slots: list[Any]) -> None:
            step.run({key: _detached(ref.read(slots)) for key, ref in refs.items()})

        return run

    def _read(self, tensor: Tensor, layout: Layout | None, slots: list[Any]) -> Any:
        """What arguments are made of."""
        if tensor.is_constant:
            return tensor.value
        return self.ref(tensor, None if tensor.is_pass_by_value else layout).read(slots)

    # Other extents -----------------------------------------------------------------------

    def overridden(
        self,
        uids: Iterable[int],
        shapes: Iterable[Iterable[int]],
        strides: Iterable[Iterable[int]] | None,
    ) -> Execution:
        """The execution of the same graph on tensors of other extents."""
        from kernel_api.graph._overriding import whole_numbers

        if not isinstance(uids, Iterable):
            raise GraphError(f"override_uids is {uids!r}; expected uids of tensors")
        given = (
            tuple(uids),
            whole_numbers("override_shapes", shapes),
            None if strides is None else whole_numbers("override_strides", strides),
        )
        found = self._overridden.get(given)
        if found is None:
            from kernel_api.graph._overriding import overridden

            found = overridden(self._graph, self._plan, *given)
            with self._lock:
                if len(self._overridden) >= _MOST_OVERRIDDEN:  # the oldest goes
                    del self._overridden[next(iter(self._overridden))]
                self._overridden[given] = found
        return found


def _viewed(value: Any, name: str) -> Any:
    """Another library's tensor as one of torch; raises VariantPackError where that cannot be."""
    try:
        return as_torch(value, name)
    except ArgumentError as error:
        raise VariantPackError(str(error)) from error


def _shown(key: Any) -> str:
    return str(key) if isinstance(key, Tensor) else repr(key)


def _all_reads(node: Any) -> Iterable[Tensor]:
    yield from node.reads
    if node.body is not None:
        own = node.body.argument
        for inner in node.body.nodes:
            yield from (t for t in inner.reads if t.is_input and t is not own)


def _detached(value: Any) -> Any:
    """Without what torch would follow: neither gradients nor tangents are."""
    return value.detach() if hasattr(value, "detach") else value


def _sort_of(number: Any) -> tuple[bool, bool, bool]:
    return number > 0, number == 1, 0 <= number <= 1


def _nothing(slots: list[Any]) -> None:
    pass


def _launching(
    launch: LauncherInOrder, fields: list[Ref], values: list[Ref], constants: list[Any]
) -> _Run:
    """constants: Found behind the slots, by numbers that are counted from the end."""
    read_fields, read_values = _reader(fields), _reader(values)

    def run_with_constants(slots: list[Any]) -> None:
        found = slots + constants
        launch(read_fields(found), read_values(found))

    def run_with_values(slots: list[Any]) -> None:
        launch(read_fields(slots), read_values(slots))

    def run(slots: list[Any]) -> None:
        launch(read_fields(slots), ())

    if constants:
        return run_with_constants
    return run_with_values if values else run


def _reader(refs: list[Ref]) -> Reader:
    if all(ref.layout is None for ref in refs):
        return reader_of([ref.slot for ref in refs])
    readers = [_ref_reader(ref) for ref in refs]
    if len(readers) == 1:
        read_it = readers[0]
        return lambda slots: (read_it(slots),)
    return lambda slots: [read(slots) for read in readers]


def _ref_reader(ref: Ref) -> Callable[[list[Any]], Any]:
    return operator.itemgetter(ref.slot) if ref.layout is None else KeptView(ref).read
