"""``Graph``: a graph that is written with torch tensors, and called with others like them."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from kernel_api.errors import (
    GraphError,
    GraphStateError,
    SerializedGraphError,
)
from kernel_api.graph._calls import Calls, Objects, is_data, ordered
from kernel_api.graph._copies import Uncopied
from kernel_api.graph._enums import heur_mode
from kernel_api.graph._graph import pygraph
from kernel_api.graph._handle import Handle, required
from kernel_api.graph._operations import Operations
from kernel_api.graph._options import listed
from kernel_api.graph._serialization import pack, unpack
from kernel_api.graph._tensor import Tensor
from kernel_api.utils import is_traced

#: What the end of the block does, and calls: single steps of ``pygraph``.
_STEPS = frozenset(
    (
        "validate",
        "build_operation_graph",
        "create_execution_plans",
        "check_support",
        "build_plans",
        "build",
        "execute",
        "check_open",
        "claim_uid",
    )
)
#: What is there without plans.
_WITHOUT_PLANS = frozenset(
    (
        "compute_data_type",
        "get_execution_plan_count",
        "handle",
        "inputs",
        "intermediate_data_type",
        "io_data_type",
        "key",
        "name",
        "nodes",
        "outputs",
        "plans",
        "query_tensor_attributes_of_uid",
        "selected",
        "sm_version",
        "tensor",
        "tensor_like",
        "tensor_scalar",
        "tensors",
        "to_svg",
    )
)
_TENSORS = ("tensor", "tensor_like", "tensor_scalar")


class Graph(Uncopied):
    """Context manager in whose block a graph is written; planned and compiled where it ends.

        with Graph(io_data_type=data_type.HALF) as graph:
            y = graph.relu(graph.matmul(a, b, name="mm"), name="act")
            y.set_output(True)
        y = graph(a, b)
        y = graph({"mm::A": a, "mm::B": b})["act::OUT_0"]

    In the block, operations of ``pygraph`` take torch tensors, other DLPack tensors and numbers.
    One object is one tensor of the graph wherever it is used; it stands for tensors like it.
    Gradients are not followed.

    Tensors have canonical names: inputs ``node::argument`` and ``node::i``, its place among the
    operation's parameters (``node::argument::j`` in a tuple); results ``node::O``, ``node::Y``
    and so on, as the operation calls them. A name given with ``set_name`` is one more. A node is
    called as its ``name=`` says, else ``operation.i``.

    A graph in which nothing has ``set_output(True)`` is validated and not planned.

    Args:
        name, io_data_type, intermediate_data_type, compute_data_type, options: As of ``pygraph``.
        handle: With device and stream; ``"auto"`` and None: the tensors' device, else the current
            GPU, and torch's current stream at every call.
        heuristics: One mode or several, in which plans are looked for in this order; by default A
            and FALLBACK.
        inputs: Names of all inputs, in the order of positional calls; by default they are in the
            order in which they came up in the block.
        outputs: Names of all outputs, in the order of results of positional calls; by default in
            the order of the operations.
        workspace_alloc: False: calls have to bring ``workspace=``, if the plan needs one.
        is_dynamic_shape_enabled: Calls may have other extents than the tensors of the block, as
            many modes each; outputs follow from them. The graph is then planned for them, with
            the kernels that are compiled already wherever they serve.
    """

    def __init__(
        self,
        name: str | None = None,
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Handle | str | None = "auto",
        heuristics: heur_mode | Iterable[heur_mode] | None = None,
        inputs: Iterable[str] | None = None,
        outputs: Iterable[str] | None = None,
        *,
        workspace_alloc: bool = True,
        is_dynamic_shape_enabled: bool = False,
        **options: Any,
    ) -> None:
        if not (handle is None or handle == "auto" or isinstance(handle, Handle)):
            raise GraphError(
                f"handle is {handle!r}; expected one of create_handle(), 'auto' or None"
            )
        self._graph = pygraph(
            name=name or "",
            io_data_type=io_data_type,
            intermediate_data_type=intermediate_data_type,
            compute_data_type=compute_data_type,
            handle=handle if isinstance(handle, Handle) else None,
            is_dynamic_shape_enabled=is_dynamic_shape_enabled,
            **options,
        )
        self._heuristics: Any = heuristics
        self._given_names = {
            "inputs": None if inputs is None else listed("Graph", "inputs", inputs, "names"),
            "outputs": None if outputs is None else listed("Graph", "outputs", outputs, "names"),
        }
        self._workspace_alloc = workspace_alloc
        self._is_dynamic = bool(is_dynamic_shape_enabled)
        self._aliases: dict[str, Tensor] = {}
        #: By identity: objects that the block was written with. Weak when it has ended.
        self._objects: Objects = {}
        self._calls: Calls | None = None
        self._not_callable = "You should not invoke the graph before the context exits"
        self._is_closed = False
        #: In how many functions among arguments it is being written.
        self._depth = 0

    # The block ---------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self._is_closed:
            raise GraphStateError("the block of the graph has ended; a new one needs a new Graph")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        try:
            if error is not None:
                self._not_callable = f"the graph is not there: its block raised {error!r}"
            else:
                self._not_callable = (
                    "the graph is not there: it could not be built when its block ended"
                )
                self._finish()
        finally:
            if self._calls is None:
                self._objects.clear()

    def _finish(self) -> None:
        graph = self._graph
        graph.validate()
        if not graph.outputs:
            self._not_callable = (
                "the graph has no output, so there is nothing to plan; mark what is wanted with "
                "set_output(True)"
            )
            return
        names = self._names()
        inputs = ordered("input", graph.inputs, self._given_names["inputs"], names)
        outputs = ordered("output", graph.outputs, self._given_names["outputs"], names)
        graph.build(self._heuristics)
        self._make_callable(inputs, outputs, names)

    def _make_callable(
        self, inputs: list[Tensor], outputs: list[Tensor], names: dict[str, Tensor]
    ) -> None:
        self._objects = {
            key: (_weak(known()), tensor) for key, (known, tensor) in self._objects.items()
        }
        self._calls = Calls(
            self._graph,
            self._objects,
            inputs,
            outputs,
            names,
            is_dynamic=self._is_dynamic,
            is_allocating=self._workspace_alloc,
        )

    def _names(self) -> dict[str, Tensor]:
        """Canonical names, and those that were set, which come first."""
        own = {tensor.name: tensor for tensor in self._graph.tensors if tensor.name}
        return {**self._aliases, **own}

    # Operations --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a Graph has no attribute {name!r}")
        if name in _STEPS:
            raise AttributeError(
                f"Calling {name} via wrapper is not allowed: the end of the block plans and "
                f"compiles the graph, and graph(...) executes it; use pygraph for single steps"
            )
        if hasattr(Operations, name) or name in _TENSORS:
            return self._operation(name)
        found = getattr(self._graph, name)
        if self._calls is None and name not in _WITHOUT_PLANS:
            raise GraphStateError(f"{name} is not there yet: {self._not_callable}")
        return found

    def __dir__(self) -> list[str]:
        inner = (name for name in dir(self._graph) if not name.startswith("_"))
        return sorted({*super().__dir__(), *inner} - _STEPS)

    def _operation(self, name: str) -> Callable[..., Any]:
        method = getattr(self._graph, name)

        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            if name == "tensor_like" and args and not isinstance(args[0], Tensor):
                return self._tensor_like(*args, **named)
            return self._call(method, args, named)

        return call

    def _call(self, method: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._is_closed:
            raise GraphStateError(
                f"{method.__name__} cannot be added: the block of the graph has ended"
            )
        graph = self._graph
        before = len(graph.nodes)
        parameters = _parameters(method.__func__)
        places: list[tuple[tuple[str, ...], Tensor]] = []
        given = [
            self._converted(value, _labels(parameters, i), places) for i, value in enumerate(args)
        ]
        given_named = {
            key: self._converted(value, _labels(parameters, key), places)
            for key, value in named.items()
        }
        result = method(*given, **given_named)
        made = graph.nodes[before:]
        if made and not self._depth:
            self._name_tensors(made, places)
        return result

    def _name_tensors(self, made: list[Any], places: list[tuple[tuple[str, ...], Tensor]]) -> None:
        aliases = self._aliases
        node = made[-1].name
        for labels, tensor in places:
            for label in labels:
                aliases.setdefault(f"{node}::{label}", tensor)
            if not tensor.name:
                tensor.name = f"{node}::{labels[0]}"
        for one in made:
            # Arguments as the operation calls them, if its method has other names for them, and
            # what only functions among them use.
            for key, given in one.inputs.items():
                several = isinstance(given, tuple)
                for j, tensor in enumerate(given if isinstance(given, tuple) else (given,)):
                    name = f"{one.name}::{key}::{j}" if several else f"{one.name}::{key}"
                    aliases.setdefault(name, tensor)
                    tensor.name = tensor.name or name
            for key, tensor in one.outputs.items():
                aliases.setdefault(f"{one.name}::{key}", tensor)

    def _converted(
        self, value: Any, labels: tuple[str, ...], places: list[tuple[tuple[str, ...], Tensor]]
    ) -> Any:
        """A value with tensors of this graph in place of data."""
        if isinstance(value, Tensor):
            places.append((labels, value))
            return value
        if is_data(value):
            tensor = self._tensor_like(value)
            places.append((labels, tensor))
            return tensor
        if type(value) in (list, tuple):
            return type(value)(
                self._converted(one, tuple(f"{label}::{j}" for label in labels), places)
                for j, one in enumerate(value)
            )
        if callable(value) and not isinstance(value, type):
            return self._callback(value)
        return value

    def _callback(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that adds to the graph, as that of a score: it may use torch tensors too.

        Its operations become part of the one that it is given to, so they name no tensors.
        """

        @functools.wraps(function)
        def call(graph: Any, *args: Any, **named: Any) -> Any:
            self._depth += 1
            try:
                return function(self if graph is self._graph else graph, *args, **named)
            finally:
                self._depth -= 1

        return call

    def _tensor_like(self, value: Any, name: str = "") -> Tensor:
        known = self._objects.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        plain = value.detach() if getattr(value, "requires_grad", False) else value
        tensor = self._graph.tensor_like(plain, name)
        self._objects[id(value)] = (lambda: value, tensor)
        return tensor

    # Calls -------------------------------------------------------------------------------

    def __call__(
        self,
        *tensors: Any,
        handle: Handle | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Execute the graph.

        ``graph(a, b)`` takes all inputs, in the order of ``inputs=``, and returns the output, or a
        tuple of them in the order of ``outputs=``. ``graph({key: tensor})`` takes inputs, and
        outputs that are to be written to, by canonical name, name, tensor of the graph, uid, or
        the object that the block was written with; it returns a dict with all of these, and with
        all outputs under their names.

        Args:
            handle: Of the stream; that of the graph by default.
            stream: Another one than the handle's: None, or in any form that kernels take.
            workspace: A uint8 tensor of ``get_workspace_size()`` bytes; allocated if absent.

        Raises:
            GraphStateError: the block has not ended, or has no output.
            VariantPackError: a tensor is missing, unknown, or not as those of the block; or an
                output shares memory with another tensor.
        """
        if is_traced():
            from kernel_api._outside import outside

            return outside(self, *tensors, handle=handle, stream=stream, workspace=workspace)
        calls = self._calls
        if calls is None:
            raise GraphStateError(self._not_callable)
        return calls.run(tensors, workspace, self._handle(handle, stream))

    def autotune(
        self,
        *tensors: Any,
        handle: Handle | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> list[tuple[str, float]]:
        """Time all plans on these tensors, given as in a call, and keep the fastest.

        Returns name and median seconds of each plan that ran, fastest first.
        """
        calls = self._calls
        if calls is None:
            raise GraphStateError(self._not_callable)
        handle = self._handle(handle, stream)
        return self._graph.autotune(calls.variant_pack(tensors, handle), workspace, handle)

    def _handle(self, handle: Handle | None, stream: Any) -> Handle | None:
        handle = self._graph.handle if handle is None else required(handle)
        if stream is None:
            return handle
        made = Handle(self._graph._planned_device() if handle is None else handle.device)
        made.stream = stream
        return made

    # Serialisation -----------------------------------------------------------------------

    def serialize(self, as_bytes: bool = False) -> list[int] | bytes:
        """The graph, its plan, and names and order of its tensors; see ``pygraph.serialize``."""
        calls = self._calls
        if calls is None:
            raise GraphStateError(self._not_callable)
        content = unpack(self._graph.serialize(as_bytes=True))
        content["interface"] = {
            "inputs": [tensor.uid for tensor in calls.inputs],
            "outputs": [tensor.uid for tensor in calls.outputs],
            "names": {name: tensor.uid for name, tensor in calls.names.items()},
            "is_dynamic": calls.is_dynamic,
        }
        data = pack(content)
        return data if as_bytes else list(data)

    @staticmethod
    def deserialize(*given: Any, handle: Handle | str | None = "auto") -> Graph:
        """The graph that was serialised, of this class or of ``pygraph``, ready to be called.

        ``deserialize(data)``, or ``deserialize(handle, data)``. Raises SerializedGraphError if the
        data is damaged or of another library.
        """
        if not 1 <= len(given) <= 2:
            raise GraphError(f"deserialize() got {len(given)} arguments; expected [handle,] data")
        made = Graph(handle=given[0] if len(given) == 2 else handle)
        content = unpack(given[-1])
        made._graph.deserialize(given[-1])
        made._restore(content.get("interface"))
        return made

    def _restore(self, interface: Any) -> None:
        graph = self._graph
        self._is_closed = True
        self._name_tensors(graph.nodes, [])
        inputs, outputs, names = graph.inputs, graph.outputs, self._names()
        if interface is not None:
            known = {tensor.uid: tensor for tensor in graph.tensors}
            try:
                places = [known[uid] for uid in interface["inputs"]]
                results = [known[uid] for uid in interface["outputs"]]
                names = {name: known[uid] for name, uid in interface["names"].items()}
                self._is_dynamic = interface["is_dynamic"]
            except (AttributeError, KeyError, TypeError) as error:
                raise SerializedGraphError(
                    f"the serialised graph is damaged: names of tensors are missing ({error!r})"
                ) from error
            if not isinstance(self._is_dynamic, bool):
                raise SerializedGraphError(
                    f"the serialised graph is damaged: expected true or false as is_dynamic, got "
                    f"{self._is_dynamic!r}"
                )
            if _ids(places) != _ids(inputs) or _ids(results) != _ids(outputs):
                raise SerializedGraphError(
                    "the serialised graph is damaged: its inputs and outputs are not those that "
                    "it lists"
                )
            inputs, outputs = places, results
        self._make_callable(inputs, outputs, names)

    def to_svg(self) -> str:
        """A picture: nodes, tensors, and the kernels of the selected plan around them."""
        return self._graph.to_svg()

    _repr_svg_ = to_svg

    def __repr__(self) -> str:
        state = "ready" if self._calls else "closed" if self._is_closed else "open"
        return f"<Graph {self._graph.name!r} of {len(self._graph.nodes)} operations, {state}>"


@functools.lru_cache(maxsize=256)
def _parameters(function: Any) -> tuple[str, ...]:
    """Names of a method's parameters without self."""
    return tuple(inspect.signature(function).parameters)[1:]


def _labels(parameters: tuple[str, ...], place: int | str) -> tuple[str, ...]:
    """What an argument is called: by its name first, then by its place."""
    if isinstance(place, int):
        return (parameters[place], str(place)) if place < len(parameters) else (str(place),)
    return (place, str(parameters.index(place))) if place in parameters else (place,)


def _weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _ids(tensors: Iterable[Tensor]) -> list[int]:
    return sorted(map(id, tensors))
