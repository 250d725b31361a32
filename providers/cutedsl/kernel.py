"""Base class of the CuTe DSL kernels: compile through fake tensors, run through TVM-FFI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernel_api import _compile_cache, _workspaces
from kernel_api.artifact import CompiledArtifact, Resources
from kernel_api.devices import sm_count
from kernel_api.errors import WorkspaceError
from kernel_api.kernel import Kernel, LauncherInOrder
from kernel_api.metadata import TensorAttributes
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl import compiler, linking, machine_code
from kernel_api.providers.streams import on_stream
from kernel_api.targets import CcLike, target

#: The bytes of workspace that a launch needs, of its operands and of what it takes by name.
WorkspaceFinder = Callable[[Sequence[Any], Mapping[str, Any]], int]

#: Sets of sizes that a launch remembers the workspace of.
SIZES_KEPT = 256


class CuteDslKernel(Kernel):
    """A kernel whose implementation is a ``cute.jit`` callable.

    The short way is to return it from :meth:`implementation`; it is called with the operands in
    the order of the arguments' fields, then :meth:`scalars`, then the stream. The long way is to
    write ``compile`` with :meth:`cute_compile` and ``_run`` with :meth:`cute_run`.
    """

    code_files = linking.CODE_FILES
    faster_if_aligned = True

    @property
    def _design(self) -> Any:
        """Of the family's own type."""
        return self.metadata.design

    def implementation(self) -> Callable[..., None]:
        """The ``cute.jit`` callable for this kernel's metadata."""
        raise TypeError(f"{type(self).__name__} implements neither implementation nor compile")

    def implementation_for(self, args: Any) -> Callable[..., None]:
        """The same, where it depends on the operands of an epilogue too."""
        return self.implementation()

    def scalars(self, multiprocessors: int) -> tuple[int, ...]:
        """32-bit integers that the implementation takes behind the operands."""
        return ()

    def cute_compile(
        self,
        implementation: Callable[..., None],
        *args: Any,
        target: CcLike = None,
        options: str = "",
    ) -> Any:
        """``cute.compile`` with TVM-FFI on, operands as fake tensors with symbolic sizes.

        Operands keep element type, rank, the mode of stride 1, and the divisibility that the
        kernel's metadata asks of them. Anything else is passed on as it is.

        Args:
            target: Architecture; that of the running ``compile(args, cc)`` by default.
            options: Further options of ``cute.compile``.
        """
        compilation = _compile_cache.running()
        asked = _target(target, compilation)
        placeholders = [
            compiler.fake_tensor(arg, self._attributes_of(arg, compilation))
            if isinstance(arg, Operand)
            else arg
            for arg in args
        ]
        return compiler.compile(implementation, placeholders, asked, options)

    def cute_run(self, compiled: Callable[..., None], *args: Any) -> None:
        """Call what ``cute_compile`` returned; operands are passed as their tensors."""
        compiled(*(arg.tensor if isinstance(arg, Operand) else arg for arg in args))

    def read_resources(self, artifact: CompiledArtifact) -> Resources | None:
        return machine_code.resources(artifact.compiled_obj)

    # What a kernel may take between operands and scalars, see the property.

    @property
    def takes_more(self) -> bool:
        """Whether the implementation is called by its method ``with_operands``, which takes a
        tuple of further tensors and the address of a workspace behind the operands."""
        return False

    def more_values(self, args: Any) -> dict[str, Any]:
        """What is in that tuple, by name: tensors of any strides, or Python numbers. A prepared
        launch takes others by these names."""
        return {}

    def more_placeholders(self, args: Any) -> tuple[Any, ...]:
        """What stands for those values while the kernel is compiled."""
        aligned, values = self.aligned_values(args), self.more_values(args)
        return tuple(compiler.placeholder(one, aligned.get(name)) for name, one in values.items())

    def aligned_values(self, args: Any) -> dict[str, int]:
        """Of what a kernel takes by name and reads in vectors: the bytes that addresses, strides
        and rows are multiples of."""
        return {}

    def workspace_for(self, *tensors: Any) -> int:
        """Bytes that a launch on these operands needs, see :meth:`get_workspace_size`; the first
        ``_workspaces.ZEROED`` are zero at launch, and left so. 0 where that depends on what else is
        given: then :meth:`_workspace_finder` says."""
        return 0

    def _workspace_finder(self, names: tuple[str, ...]) -> WorkspaceFinder:
        """For launches that are given values of these names."""
        return remembered_by_shape(self.workspace_for)

    def _compile(self, args: Any, cc: CcLike = None) -> CompiledArtifact:
        implementation: Any = self.implementation_for(args)
        more: list[Any] = []
        if self.takes_more:
            implementation = implementation.with_operands
            more = [self.more_placeholders(args), compiler.address_placeholder()]
        scalars = compiler.int32_placeholders(len(self.scalars(1)))
        stream = compiler.current_stream_placeholder()
        compiled = self.cute_compile(implementation, *args.operands, *more, *scalars, stream)
        return CompiledArtifact(compiled, self)

    def _made_by(
        self, hook: Callable[..., CompiledArtifact], args: Any, cc: CcLike
    ) -> CompiledArtifact:
        def loaded(*given: Any) -> CompiledArtifact:
            compiler.load()
            return hook(*given)

        return super()._made_by(loaded, args, cc)

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        known = artifact.launchers.get(args.device)
        if known is None:
            known = self._launcher(args, artifact), self.takes_more
            artifact.launchers[args.device] = known
        launch, takes_more = known
        if takes_more:
            operands = self._launch_operands(args)
            launch(*args.tensors, stream=stream, workspace=workspace, **operands)
        elif stream is None:
            launch(*args.tensors)
        else:
            launch(*args.tensors, stream=stream)

    def _workspace(self, args: Any, given: Any) -> Any:
        """Checks one that is given; the launcher borrows one otherwise."""
        if given is None:
            return None
        super()._workspace(args, given)
        if given.data_ptr() % _workspaces.ALIGNMENT:
            raise WorkspaceError(
                f"the workspace starts at {given.data_ptr():#x}; expected a multiple of "
                f"{_workspaces.ALIGNMENT}"
            )
        return given

    def _launch_operands(self, args: Any) -> dict[str, Any]:
        return self.more_values(args)

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        import torch

        function = compiler.raw_function(artifact.compiled_obj)
        index = args.device.index or 0
        scalars = self.scalars(sm_count(index))
        if self.takes_more:
            function = self._with_more(function, index, tuple(self.more_values(args)))
        # torch.cuda.current_device asks this, and whether CUDA is there.
        current_device = torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None

        def launch(*tensors: Any, stream: Any = None, **others: Any) -> None:
            if stream is not None or (current_device is not None and current_device() != index):
                # A launch goes to the current device, whatever its tensors and stream are on.
                with torch.cuda.device(index), on_stream(stream, index):
                    function(*tensors, *scalars, **others)
            elif others:
                function(*tensors, *scalars, **others)
            else:  # without keywords, which take their time
                function(*tensors, *scalars)

        return launch

    def _bare_launcher(self, args: Any, artifact: CompiledArtifact) -> LauncherInOrder | None:
        """On the current stream, for tensors of these sizes; None where an operand is empty, or
        there are several devices, so that the current one may be another."""
        import torch

        if torch.cuda.device_count() > 1 or any(0 in operand.shape for operand in args.operands):
            return None
        function = compiler.raw_function(artifact.compiled_obj)
        index = args.device.index or 0
        scalars = self.scalars(sm_count(index))
        if not self.takes_more:
            return lambda tensors, values: function(*tensors, *scalars)
        size = self.get_workspace_size(args)
        if not size:
            return lambda tensors, values: function(*tensors, values, 0, *scalars)
        lend = _workspaces.lender(index)

        def launch(tensors: Sequence[Any], values: Sequence[Any]) -> None:
            buffer = lend(size)  # kept until the launch is made
            function(*tensors, values, buffer.address, *scalars)

        return launch

    def _with_more(
        self, function: Callable[..., None], index: int, names: tuple[str, ...]
    ) -> Callable[..., None]:
        """The function of operands and scalars, which adds what it takes between them."""
        operands = len(self.metadata.operands.tensors)
        size_of = self._workspace_finder(names)
        lend = _workspaces.lender(index)

        def call(*values: Any, workspace: Any = None, **others: Any) -> None:
            tensors, scalars = values[:operands], values[operands:]
            more = tuple([others[name] for name in names])
            address = 0
            if workspace is not None:
                workspace[: _workspaces.ZEROED].zero_()
                address = workspace.data_ptr()
            elif size := size_of(tensors, others):
                buffer = lend(size)
                address = buffer.address
            function(*tensors, more, address, *scalars)

        return call

    def _attributes_of(self, operand: Operand, compilation: Any) -> TensorAttributes | None:
        if compilation is None:
            return None
        names = compilation.args.operand_names
        for name, own in zip(names, compilation.args.operands, strict=True):
            if own is operand:
                return self.metadata.operands.tensors.get(name)
        return None


class BareWhereSizesAreKnown(CuteDslKernel):
    """A kernel whose :meth:`_launcher` does more only where something is empty, or named: for
    tensors of known sizes the compiled function is all there is to a launch."""

    def _launcher_in_order(self, args: Any, artifact: CompiledArtifact) -> LauncherInOrder:
        bare = self._bare_launcher(args, artifact)
        return bare or super()._launcher_in_order(args, artifact)


def unless_empty(launch: Callable[..., None]) -> Callable[..., None]:
    """A launcher that does nothing where x has no elements."""

    def launch_unless_empty(x: Any, out: Any, **others: Any) -> None:
        if x.numel():
            launch(x, out, **others)

    return launch_unless_empty


def by_place(launch: Callable[..., None], args: Any) -> Callable[..., None]:
    """A launcher that takes what is beside the operands by name, for which their places do, too."""
    count, names = len(args.operands), tuple(args.further)

    def launch_by_place(*tensors: Any, **others: Any) -> None:
        if len(tensors) > count:
            others.update(zip(names, tensors[count:], strict=False))
        launch(*tensors[:count], **others)

    return launch_by_place


def remembered_by_shape(workspace_for: Callable[..., int]) -> WorkspaceFinder:
    """The bytes that a launch on operands of these shapes needs."""
    sizes: dict[tuple[Any, ...], int] = {}

    def size_of(tensors: Sequence[Any], others: Mapping[str, Any]) -> int:
        key = tuple([tensor.shape for tensor in tensors])
        size = sizes.get(key)
        if size is None:
            if len(sizes) >= SIZES_KEPT:
                sizes.clear()
            size = sizes[key] = workspace_for(*tensors)
        return size

    return size_of


def _target(given: CcLike, compilation: Any) -> Any:
    if given is not None:
        return target(given)
    if compilation is None or compilation.target is None:
        raise RuntimeError("cute_compile needs target= outside of a kernel's compile")
    return compilation.target
