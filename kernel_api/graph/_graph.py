"""``pygraph``: tensors and operations, and the way from them to an execution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kernel_api import _locks
from kernel_api.errors import (
    DeviceError,
    GraphError,
    GraphNotSupportedError,
    GraphStateError,
    SerializedGraphError,
)
from kernel_api.graph._enums import (
    as_data_type,
    behavior_note,
    build_plan_policy,
    heur_mode,
    member_of,
    numerical_note,
)
from kernel_api.graph._execution import Execution
from kernel_api.graph._handle import Handle, default_handle, required
from kernel_api.graph._node import Node
from kernel_api.graph._operations import Operations
from kernel_api.graph._options import listed, number, optional_whole, refused, text, wholes
from kernel_api.graph._planning.listing import PlanList
from kernel_api.graph._tensor import Tensor, packed_strides, with_a_mode
from kernel_api.graph._validation import validate
from kernel_api.targets import target

_DEFAULT_MODES = (heur_mode.A, heur_mode.FALLBACK)


class pygraph(Operations):
    """A graph of operations on tensors, planned onto the kernels of the registry.

    Args:
        name: For messages and pictures.
        io_data_type: Of tensors of the caller's that have none set.
        intermediate_data_type: Of virtual tensors that have none set: they are rounded to it.
        compute_data_type: Of the arithmetic of operations that have none set. It is float32 at
            least, whatever is set.
        handle: The device that it is planned for, unless ``tensor_like`` says; and the stream.
        sm_version: Architecture to plan for (90, "9.0", "sm_90a"); that of the device by default.
        sm_count, kernel_cache, device_property, is_dynamic_shape_enabled,
            is_override_shape_enabled: Taken, and not needed: every kernel serves all sizes, and
            compiled ones are shared by all graphs.

    Without any of the types, results have the type of the first floating input.
    """

    def __init__(
        self,
        name: str = "",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Handle | None = None,
        sm_count: int | None = None,
        sm_version: Any = None,
        kernel_cache: Any = None,
        device_property: Any = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
    ) -> None:
        self.name = text("pygraph", "name", name)
        self.io_data_type = as_data_type(io_data_type)
        self.intermediate_data_type = as_data_type(intermediate_data_type)
        self.compute_data_type = as_data_type(compute_data_type)
        self.handle = None if handle is None else required(handle)
        self.sm_version = None if sm_version is None else target(sm_version)
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self._uids: dict[int, Tensor] = {}
        #: In memory, of results that get their extents once more; see ``override_shapes``.
        self._orders: dict[int, tuple[int, ...]] = {}
        self._ordered: list[Node] | None = None
        self._plans: PlanList | None = None
        self._execution: Execution | None = None
        self._lock = _locks.rlock()

    # Tensors -----------------------------------------------------------------------------

    def tensor(
        self,
        dim: Iterable[int],
        stride: Iterable[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: Any = None,
        name: str = "",
        uid: int | None = None,
    ) -> Tensor:
        """An input by its description; row-major without ``stride``.

        Raises GraphError if something does not fit.
        """
        self.check_open("no tensor can be added")
        name = text("tensor", "name", name)
        label = f"tensor {name!r}" if name else "tensor"
        extents = tuple(wholes(label, "dim", dim))
        given = None if stride is None else tuple(wholes(label, "stride", stride))
        strides = packed_strides(extents) if given is None else given
        own = optional_whole(label, "uid", uid)
        for option, numbers in (("dim", extents), ("stride", strides)):
            if any(number < 0 for number in numbers):
                raise refused(label, option, list(numbers), "numbers of 0 or more")
        if len(strides) != len(extents):
            raise GraphError(
                f"a tensor {name!r} of dim {list(extents)} cannot have stride {list(strides)}; "
                f"they need one number for each mode"
            )
        made = self._new_tensor(
            name=name, dim=extents, stride=strides, element=as_data_type(data_type)
        )
        if is_virtual:
            made.set_is_virtual(True)
        made.set_is_pass_by_value(is_pass_by_value)
        if ragged_offset is not None:
            made.set_ragged_offset(ragged_offset)
        if reordering_type is not None:
            made.set_reordering_type(reordering_type)
        return made if own is None else made.set_uid(own)

    def tensor_like(self, like: Any, name: str = "") -> Tensor:
        """An input as a torch tensor, another DLPack tensor or a tensor of a graph is.

        One without modes has dim (1,). A tensor of one element on the CPU becomes a number of the
        host's, as in cuDNN's frontend, unless the graph is for the CPU; its value is taken at every
        execution.
        """
        self.check_open("no tensor can be added")
        if isinstance(like, Tensor):
            made = self.tensor(like.dim, like.stride, like.data_type, name=name)
            made.device, made.is_pass_by_value = like.device, like.is_pass_by_value
            made.value = like.value
            return made
        from kernel_api.operands import Operand

        operand = Operand(like, name or "the tensor")
        shape, stride = with_a_mode(operand.shape), with_a_mode(operand.stride)
        made = self.tensor(shape, stride, operand.dtype, name=name)
        if operand.device.type == "cpu" and shape == (1,) * len(shape):
            made.is_pass_by_value = self._planned_device().type != "cpu"
        if not made.is_pass_by_value:
            made.device = operand.device
        return made

    def tensor_scalar(self, value: Any, data_type: Any = None) -> Tensor:
        """A number that is known now, of a type of its own or of ``data_type``.

        Raises GraphError for what is no number, or none that ``data_type`` holds.
        """
        self.check_open("no number can be added")
        return self._constant(value, "", data_type)

    def claim_uid(self, tensor: Tensor, uid: int) -> None:
        """Give a tensor its number; raises GraphError if another one has it."""
        other = self._uids.get(uid)
        if other is not None and other is not tensor:
            raise GraphError(f"{tensor} cannot have uid {uid}, which {other} has")
        if tensor.uid is not None:
            self._uids.pop(tensor.uid, None)
        self._uids[uid] = tensor
        tensor.uid = uid

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """The tensor of a number; raises GraphError if there is none."""
        for tensor in self.tensors:
            if tensor.uid == uid:
                return tensor
        raise GraphError(f"no tensor of the graph has uid {uid}")

    @property
    def inputs(self) -> list[Tensor]:
        """What an execution has to be given to read, in the order that it was made."""
        return [t for t in self.tensors if t.is_input and not t.is_constant and not t.is_virtual]

    @property
    def outputs(self) -> list[Tensor]:
        """What an execution writes for the caller, in the order of the nodes."""
        return [t for t in self.tensors if not t.is_input and not t.is_virtual]

    def check_open(self, what: str) -> None:
        if self._plans is not None:
            raise GraphStateError(f"{what}: the graph is planned, which fixes it")
        self._ordered = None

    # From the graph to plans -------------------------------------------------------------

    def validate(self) -> None:
        """Infer what was not set. Raises GraphError for what contradicts itself or is missing."""
        with self._lock:
            if self._plans is None:
                self._ordered = validate(self)
                self._uids = {t.uid: t for t in self.tensors if t.uid is not None}

    def build_operation_graph(self) -> None:
        """Validates, if that was not done."""
        self._validated()

    def create_execution_plans(self, modes: Iterable[Any] = _DEFAULT_MODES) -> None:
        """Make plans of the modes, in this order, without compiling.

        Raises:
            GraphStateError: this was called before.
            GraphNotSupportedError: no mode has a plan.
        """
        with self._lock:
            if self._plans is not None:
                raise GraphStateError(
                    "create_execution_plans() was already called on this graph; planning is one-"
                    "shot, and deserialize() counts as planning"
                )
            nodes = self._validated()
            one = isinstance(modes, (heur_mode, str))
            asked = [modes] if one else listed("create_execution_plans", "modes", modes, "modes")
            wanted = [member_of(heur_mode, mode) for mode in asked] or list(_DEFAULT_MODES)
            self._plans = PlanList.of(self, nodes, wanted, self._planned_device())

    def check_support(self) -> None:
        """Raises GraphNotSupportedError, with the reason of each, if no plan can serve."""
        self._planned().check_support()

    def build_plans(self, policy: Any = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Compile the first plan that can be, or all, and select the first.

        Raises GraphNotSupportedError, with the reason of each, if none can be.
        """
        with self._lock:
            chosen = member_of(build_plan_policy, policy)
            self._planned().build(every=chosen is build_plan_policy.ALL)
            self._select()

    def build(self, modes: Iterable[Any] | None = None) -> None:
        """All of it: validate, plan, check, compile."""
        with self._lock:
            self.build_operation_graph()
            if self._plans is None:
                self.create_execution_plans(_DEFAULT_MODES if modes is None else modes)
            self.check_support()
            self.build_plans()

    # Plans by index ----------------------------------------------------------------------

    def get_execution_plan_count(self) -> int:
        """How many plans there are; 0 before planning."""
        return 0 if self._plans is None else len(self._plans.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self._planned().at(index).name

    def get_plan_name(self) -> str:
        """Of the plan that is selected."""
        name: str = self._selected().name
        return name

    def build_plan_at_index(self, index: int) -> None:
        """Compile a plan and select it. Raises GraphNotSupportedError if it cannot be."""
        with self._lock:
            self._planned().build_at(index)
            self._select()

    select_plan = build_plan_at_index

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self._planned().at(index).workspace_size

    def execute_plan_at_index(
        self, variant_pack: Mapping[Any, Any], workspace: Any, index: int, handle: Any = None
    ) -> None:
        """Execute another plan than the selected one, which stays selected."""
        plan = self._planned().built(index)
        Execution(self, plan).execute(variant_pack, workspace, handle or self.handle)

    def get_behavior_notes(self) -> list[behavior_note]:
        """Of the selected plan."""
        return list(self._selected().behavior_notes)

    def get_numeric_notes(self) -> list[numerical_note]:
        """Of the selected plan."""
        return list(self._selected().numerical_notes)

    def deselect_engines(self, names: Iterable[str]) -> pygraph:
        """Bar plans with a kernel whose name contains one of these; indices stay as they are.

        If a plan is built, the next one that can be takes the place of the selected one that is
        barred, as of every other method that bars plans; GraphNotSupportedError if none can be.
        A name that no plan has is a warning in the log.
        """
        named = [names] if isinstance(names, str) else names
        barred = list(named) if isinstance(named, Iterable) else [named]
        if not all(isinstance(name, str) for name in barred):
            raise GraphError(
                f"deselect_engines was given {names!r}; expected names, or parts of them"
            )
        return self._bar(lambda plans: plans.bar_engines(barred))

    def deselect_numeric_notes(self, notes: Iterable[Any]) -> pygraph:
        return self._bar_notes("deselect_numeric_notes", numerical_note, notes, having=True)

    def select_numeric_notes(self, notes: Iterable[Any]) -> pygraph:
        return self._bar_notes("select_numeric_notes", numerical_note, notes, having=False)

    def deselect_behavior_notes(self, notes: Iterable[Any]) -> pygraph:
        return self._bar_notes("deselect_behavior_notes", behavior_note, notes, having=True)

    def select_behavior_notes(self, notes: Iterable[Any]) -> pygraph:
        return self._bar_notes("select_behavior_notes", behavior_note, notes, having=False)

    def _bar_notes(self, method: str, kind: Any, notes: Any, having: bool) -> pygraph:
        chosen = [member_of(kind, note) for note in listed(method, "notes", notes, "notes")]
        return self._bar(lambda plans: plans.bar_notes(chosen, having=having))

    def deselect_workspace_greater_than(self, size: int) -> pygraph:
        """Bar plans that need more bytes."""
        most = number("deselect_workspace_greater_than", "size", size)
        return self._bar(lambda plans: plans.bar_workspace(int(most)))

    def _bar(self, bar: Callable[[PlanList], None]) -> pygraph:
        with self._lock:
            plans = self._planned()
            bar(plans)
            if plans.selected is not None and plans.selected.barred:
                plans.selected = self._execution = None
                self.build_plans()
        return self

    @property
    def plans(self) -> list[Any]:
        """Every plan, best first."""
        return [] if self._plans is None else list(self._plans.plans)

    @property
    def selected(self) -> Any:
        """The plan that is executed; None before one is built."""
        return None if self._plans is None else self._plans.selected

    def autotune(
        self, variant_pack: Mapping[Any, Any], workspace: Any = None, handle: Any = None
    ) -> list[tuple[str, float]]:
        """Compile all plans, time them on these tensors, and select the fastest.

        Outputs are written over and over. Returns name and median seconds of each plan that ran,
        fastest first.
        """
        from kernel_api.graph._autotune import autotune

        with self._lock:
            times = autotune(self, self._planned(), variant_pack, workspace, handle or self.handle)
            self._select()
            return times

    # Execution ---------------------------------------------------------------------------

    def get_workspace_size(self) -> int:
        """Bytes that the selected plan needs for what lives between its kernels."""
        return int(self._selected().workspace_size)

    def execute(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any = None,
        handle: Handle | None = None,
        override_uids: Iterable[int] | None = None,
        override_shapes: Iterable[Iterable[int]] | None = None,
        override_strides: Iterable[Iterable[int]] | None = None,
    ) -> None:
        """Launch the selected plan; returns before the GPU is done.

        Args:
            variant_pack: Every tensor that is read or written for the caller: by tensor, uid or
                name a torch tensor, another DLPack tensor, or the address of its memory. Numbers
                of the host's may be given as numbers.
            workspace: A uint8 tensor of ``get_workspace_size()`` bytes; allocated if absent.
            handle: With the stream; the graph's by default.
            override_uids, override_shapes, override_strides: Tensors that have other extents in
                this execution than the graph says, and these. Everything else follows from them.

        Raises:
            GraphStateError: the graph is not built.
            VariantPackError: a tensor is missing, unknown, or is not as the graph says; or what is
                written shares memory with another tensor.
            WorkspaceError: the workspace is too small or is no memory of the device.
        """
        import torch

        if torch.compiler.is_compiling():
            from kernel_api._outside import outside

            overrides = (override_uids, override_shapes, override_strides)
            outside(self.execute, variant_pack, workspace, handle, *overrides)
            return
        execution = self._execution
        if execution is None:
            self._selected()
            raise GraphStateError("the graph is not built; call build() before execute()")
        if override_uids is None:
            if override_shapes is not None or override_strides is not None:
                raise GraphError(
                    "override_shapes and override_strides are those of the tensors in "
                    "override_uids, which is missing"
                )
        else:
            shapes = () if override_shapes is None else override_shapes
            strides = override_strides
            execution = execution.overridden(override_uids, shapes, strides)
        execution.execute(variant_pack, workspace, handle or self.handle)

    # What it is --------------------------------------------------------------------------

    def explain(self) -> Any:
        """Which kernels every plan uses, what was fused, and why the rest was not."""
        return self._planned().explain()

    def to_svg(self) -> str:
        """A picture: nodes, tensors, and the kernels of the selected plan around them."""
        from kernel_api.graph._picture import draw

        return draw(self, self.selected)

    _repr_svg_ = to_svg

    def key(self) -> str:
        """SHA-256 of the structure: equal for graphs that compute the same in the same way."""
        import hashlib
        import json

        from kernel_api.graph._serialization import graph_to_dict

        text = json.dumps(graph_to_dict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def serialize(self, as_bytes: bool = False) -> list[int] | bytes:
        """The graph and its selected plan as bytes, or a list of them as numbers; JSON inside."""
        from kernel_api.graph._serialization import graph_to_dict, pack

        plan = self._selected()
        data = pack({"graph": graph_to_dict(self), "plan": plan.to_dict()})
        return data if as_bytes else list(data)

    def deserialize(self, *given: Any) -> pygraph:
        """Become the graph that was serialised: ``deserialize(data)`` or
        ``deserialize(handle, data)``. It can be executed at once, and is not compiled again where
        the compiled kernels are in the cache.

        Raises:
            SerializedGraphError: the data is damaged or of another library.
            GraphStateError: this graph is not empty.
        """
        if not 1 <= len(given) <= 2:
            raise GraphError(
                f"deserialize was given {len(given)} values; expected data, or a handle and data"
            )
        *handles, data = given
        if self.nodes or self.tensors:
            raise GraphStateError("deserialize() needs a graph that is empty: pygraph()")
        if handles:
            self.handle = handles[0]
        with self._lock:
            try:
                self._restore(data)
            except BaseException:  # a graph that cannot be restored is as empty as it was
                self.nodes, self.tensors, self._uids = [], [], {}
                self._ordered = self._plans = self._execution = None
                raise
        return self

    def _restore(self, data: Any) -> None:
        from kernel_api.graph._serialization import damaged, graph_from_dict, unpack

        content = unpack(data)
        graph_from_dict(self, content["graph"])
        try:
            nodes, device = self._validated(), self._planned_device()
            plans = PlanList.restored(self, nodes, content["plan"], device)
        except (SerializedGraphError, GraphNotSupportedError, DeviceError):
            raise
        except Exception as error:  # it is no graph, whatever else it makes planning raise
            raise damaged(error) from error
        self._plans = plans
        self._plans.build(every=False)
        self._select()

    # Inside ------------------------------------------------------------------------------

    def _planned_device(self) -> Any:
        import torch

        for tensor in self.tensors:
            if tensor.device is not None:
                return torch.device(tensor.device)
        device = (self.handle or default_handle()).device
        if self.sm_version is not None and device.type == "cpu":
            return torch.device("cuda")  # planned and compiled for, not run on
        return device

    def _validated(self) -> list[Node]:
        if self._ordered is None:
            self.validate()
        assert self._ordered is not None
        return self._ordered

    def _planned(self) -> PlanList:
        if self._plans is None:
            raise GraphStateError(
                "the graph is not planned; call create_execution_plans(), or build() for all steps"
            )
        return self._plans

    def _selected(self) -> Any:
        plan = self._planned().selected
        if plan is None:
            raise GraphStateError(
                "no plan of the graph is built; call build_plans(), or build() for all steps"
            )
        return plan

    def _select(self) -> None:
        self._execution = Execution(self, self._selected())

    def __repr__(self) -> str:
        state = "built" if self.selected else "planned" if self._plans else "open"
        return f"<graph {self.name!r} of {len(self.nodes)} operations, {state}>"
