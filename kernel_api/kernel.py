"""The kernel: one configuration that can be asked ``supports``, ``compile`` and ``run``.

Public methods do the checks, once and here. Implementers write the hooks behind them:
``compile``, ``_run``, ``_supports``, ``generate_kernels`` and ``get_workspace_size``; or they
declare ``operands``, ``space`` and rules, and get ``generate_kernels`` for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kernel_api import _compile_cache, _recording
from kernel_api._cached_property import cached_property
from kernel_api._checks import (
    checked_workspace,
    device_of,
    epilogue_mismatch,
    not_arguments,
    require_arguments,
    require_data,
    with_operands,
)
from kernel_api._kernel_type import KernelType
from kernel_api._naming import name_of
from kernel_api._offer import Offer
from kernel_api._overwritten import tell_autograd
from kernel_api._questions import BEFORE_RULES, Questions, agree_by
from kernel_api.arguments import Arguments, EpilogueArguments, GemmArguments
from kernel_api.arguments.experts import tensors_of
from kernel_api.artifact import CompiledArtifact, Resources
from kernel_api.devices import capturing, query_target, require_streams, target_of
from kernel_api.errors import (
    ArtifactError,
    CaptureError,
    CompileError,
    DeviceError,
    KernelApiError,
    UnsupportedError,
)
from kernel_api.matching import BEHIND_OPERANDS, match_operands
from kernel_api.metadata import (
    BLASDesignMetadata,
    DesignMetadata,
    GemmOperandsMetadata,
    KernelMetadata,
    OperandsMetadata,
)
from kernel_api.space import Operands, Space, Variants
from kernel_api.status import DEVICE, KIND_OF_OPERATION, Status, with_true_nearest
from kernel_api.targets import CcLike, Target, fitting
from kernel_api.utils import is_traced, is_watched, untraced

#: Takes tensors, then values.
LauncherInOrder = Callable[[Sequence[Any], Sequence[Any]], None]

if TYPE_CHECKING:
    from kernel_api._code_files import CodeFiles
    from kernel_api.epilogue import Graph
    from kernel_api.provider import Provider


class Kernel(metaclass=KernelType):
    """One configuration of a kernel family.

    Class attributes that describe a family:
        family: Its name in ``explain``; the class name by default.
        targets: Architectures with suffix, for families that declare a space.
        devices: Types of device that it runs on.
        operands, space, design: The declarative design space (see :mod:`kernel_api.space`).
        operands_metadata: The class of ``metadata.operands``.
        arguments: The arguments class that a declared family computes.
        ragged, experts: The form of grouped products that a declared family computes, see
            :class:`~kernel_api.metadata.GroupedGemmOperandsMetadata`; None for other operations.
        reorders_accumulation: Whether sums are formed in another order than one pass over K;
            ``verify`` then allows three times the error of torch instead of twice.
        fuses: Whether the declared kernels exist with any epilogue as well; rules say with which.
        any_epilogue: Whether it computes whatever epilogue the arguments carry; else the one
            that its metadata names, or none.
        faster_if_aligned: Whether a design is never expected to take longer for operands of more
            alignment: who wants one kernel alone asks for those of less only behind it.
        compiles_as_it_runs: Whether the first run of a signature compiles, which ``compile`` cannot
            do ahead: the tuner measures it only where ``providers=`` names its provider, or where
            there is no other.
        code_files: How its compiled code becomes a file; None if it does not: then it is neither
            kept on disk nor exported.
    """

    family: ClassVar[str] = ""
    targets: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    operands: ClassVar[tuple[Operands, ...]] = ()
    space: ClassVar[Space | None] = None
    design: ClassVar[Callable[..., DesignMetadata]] = BLASDesignMetadata
    operands_metadata: ClassVar[type[OperandsMetadata]] = GemmOperandsMetadata
    arguments: ClassVar[type[Arguments] | None] = None
    ragged: ClassVar[str | None] = None
    experts: ClassVar[str | None] = None
    reorders_accumulation: bool = False
    fuses: ClassVar[bool] = False
    any_epilogue: ClassVar[bool] = False
    faster_if_aligned: ClassVar[bool] = False
    compiles_as_it_runs: ClassVar[bool] = False
    code_files: ClassVar[CodeFiles | None] = None

    _provider: ClassVar[type[Provider] | None] = None

    def __init__(self, metadata: KernelMetadata) -> None:
        self.metadata = metadata

    # What implementers write -------------------------------------------------------------

    @classmethod
    def generate_kernels(
        cls,
        metadata_filter: Callable[[KernelMetadata], bool],
        epilogue_args: EpilogueArguments | None = None,
        cc: int | None = None,
    ) -> list[Kernel]:
        """Every configuration that the filter passes; declared families need not write it."""
        graph = None
        if epilogue_args is not None:
            if not cls.fuses:
                return []
            graph = epilogue_args.graph
        return [
            kernel
            for operands in cls.operand_variants()
            for kernel in cls.kernels_for(operands, graph)
            if metadata_filter(kernel.metadata)
        ]

    def _supports(self, args: Any) -> Status:
        """Checks beyond what the metadata and the rules say."""
        return Status.success()

    def _compile(self, args: Any, cc: CcLike = None) -> CompiledArtifact:
        """Compile for the signature of the arguments; pure, and never asks the device."""
        return CompiledArtifact(None, self)

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        """Launch on a stream (None: torch's current one). The arguments are checked."""
        raise TypeError(f"{type(self).__name__} does not implement _run")

    def get_workspace_size(self, args: Any) -> int:
        """Bytes of device memory that ``run`` needs beside the operands."""
        return 0

    def predict(self, args: Any) -> float | None:
        """Seconds that the kernel is expected to take; None without a performance model."""
        return None

    @classmethod
    def estimated_by(cls, args: Any) -> Hashable | None:
        """What of the arguments :meth:`predict` depends on, beside the device, what kernels ask of
        operands, and the epilogue's graph: where it is the same, so is every estimate, and the
        order that they give is looked up. None: that is not known."""
        return () if cls.predict is Kernel.predict else None

    def read_resources(self, artifact: CompiledArtifact) -> Resources | None:
        """Registers, shared memory and spills of the compiled code, where there is any."""
        return None

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        """A callable on new tensors of the same signature, as cheap as the provider can; with an
        epilogue it takes all of its operands by name. It keeps no tensor of the arguments."""
        blueprint = args.blueprint()

        def launch(*tensors: Any, stream: Any = None, **operands: Any) -> None:
            if is_traced():
                from kernel_api._outside import outside

                outside(launch, *tensors, stream=stream, **operands)
                return
            self.run(blueprint(*tensors, **operands), artifact, stream)

        return launch

    def _launcher_in_order(self, args: Any, artifact: CompiledArtifact) -> LauncherInOrder:
        """``launch(tensors, values)``: the same for tensors of just these sizes, always on the
        current stream, so that there may be less to ask and to name at a launch. The tensors come
        as :meth:`_launcher` takes them, the values in the order of :meth:`_launch_operands`."""
        launcher, names = self._launcher(args, artifact), tuple(self._launch_operands(args))

        def launch(tensors: Sequence[Any], values: Sequence[Any]) -> None:
            launcher(*tensors, **dict(zip(names, values, strict=True)))

        return launch

    def _launch_operands(self, args: Any) -> dict[str, Any]:
        """What a launcher takes by name, of the arguments: values beside the operands, and the
        operands of the epilogue."""
        operands = {} if args.epilogue is None else args.epilogue.operands
        tensors = {name: getattr(value, "tensor", value) for name, value in operands.items()}
        return {**args.launch_values, **tensors}

    # What users call ---------------------------------------------------------------------

    def supports(self, args: Arguments) -> Status:
        """Whether this kernel can take the arguments; falsy with the reason if not."""
        return self.status(args, query_target(device_of(args), None))

    def compile(self, args: Arguments, cc: CcLike = None) -> CompiledArtifact:
        """The artifact for the signature of the arguments, from the cache if it is there.

        Args:
            args: Sizes do not matter, types, ranks and majors do, and whether scales of B's columns
                are packed and a multiple of 4. Meta tensors will do.
            cc: Architecture to compile for; that of the operands' device by default.

        Raises:
            UnsupportedError: ``supports`` says no.
            DeviceError: there is neither a ``cc`` nor a GPU to take it from.
            CompileError: the code generator failed, or what calls it; the cause is chained.
        """
        if _compile_cache.compiling(self):
            return self._compile(args, cc)
        return self._compiled(args, cc, type(self)._compile)

    def run(
        self,
        args: Arguments,
        artifact: CompiledArtifact | None = None,
        stream: Any = None,
        workspace: Any = None,
        assume_supported_args: bool = False,
    ) -> None:
        """Check, compile if need be, and launch; returns before the GPU is done.

        Args:
            args: What to compute.
            artifact: From :meth:`compile`; compiled (cached) if absent.
            stream: A torch stream, an int, a CUstream or ``__cuda_stream__`` object; torch's
                current stream if absent. Operands on the CPU have none.
            workspace: A uint8 tensor of at least ``get_workspace_size``; allocated if absent.
            assume_supported_args: Skip ``supports``; for arguments that passed it before.

        Raises:
            UnsupportedError, ArtifactError, DeviceError, CaptureError, WorkspaceError: before
                anything is launched.
        """
        if is_watched():
            from kernel_api._outside import outside

            outside(self.run, args, artifact, stream, workspace, assume_supported_args)
            return
        require_arguments(args)
        if stream is not None:
            require_streams(args.device, stream)
        accepted = args._accepted
        offer = accepted.get(Offer)
        offered = offer.artifact(self) if offer is not None and artifact is None else None
        if not assume_supported_args and accepted.get(id(self)) is not self:
            if offered is None and (offer is None or not offer.holds(self)):
                self._require(args, query_target(args.device, None), compiled=artifact is not None)
            require_data(args)
            accepted[id(self)] = self  # by id: kernels hash slowly
        if artifact is None:
            artifact = offered or self._artifact_to_run(args, stream)
        elif not isinstance(artifact, CompiledArtifact) or accepted.get(artifact) is not self:
            self._check_artifact(args, artifact)
            accepted[artifact] = self
        workspace = self._workspace(args, workspace)
        if args.writes_anything:
            args.check_values(stream)
            _recording.record(args)
            self._run(args, artifact, stream, workspace)
            written = accepted.get(tell_autograd)
            if written is None:
                written = [
                    one
                    for out in args.outputs.values()
                    for one in (tensors_of(out) if out.discrete else (out.tensor,))
                ]
                accepted[tell_autograd] = written
            tell_autograd(written)

    @untraced
    def prepare(
        self, args: Arguments, artifact: CompiledArtifact | None = None
    ) -> Callable[..., None]:
        """Check and compile once; returns ``launch(*tensors, stream=None)`` for hot loops.

        The tensors come in the order of the arguments' fields and must have the same types,
        ranks, majors and alignment as those prepared for; sizes may differ (columns with scales of
        their own stay a multiple of 4 if they were one), but neither head dimensions nor page sizes
        of attention, nor whether its bias has one row for all queries and whole vectors of keys,
        where the kernel's design says how that comes to shared memory. Operands of an epilogue,
        tensors and numbers, are passed by name; those that are not are the ones prepared with::

            launch = kernel.prepare(args)
            launch(A, B, out, bias=bias, alpha=0.5)

        Autograd is not told what a launch writes, as it is by :meth:`run`.

        Raises what :meth:`run` does. The launch checks no more than that the names exist
        (EpilogueError; TypeError or ArgumentError where there are no operands to name), head
        dimensions and page sizes (ArgumentError), what the compiled code checks of its tensors, and
        offsets of groups where the environment asks for that while it is prepared.
        """
        require_arguments(args)
        self._require(args, query_target(args.device, None), compiled=artifact is not None)
        require_data(args)
        if artifact is None:
            artifact = self._artifact_to_run(args)
        else:
            self._check_artifact(args, artifact)
        _recording.record(args)
        launch = args.checked(self._launcher(args, artifact))
        operands = self._launch_operands(args)
        return launch if not operands else with_operands(launch, operands)

    # How they work -----------------------------------------------------------------------

    def status(self, args: Any, target: Target | None, *, compiled: bool = False) -> Status:
        """``supports`` for a device of the given architecture; None: for any.

        What is ``compiled`` does without the provider's compiler.
        """
        status = self.class_status(args, target, compiled=compiled)
        if status:
            status = self._status_behind_class(args, target)
        return with_true_nearest(status, lambda rule: self._status_behind_class(args, target, rule))

    def _status_behind_class(
        self, args: Any, target: Target | None, but_for: str | None = None
    ) -> Status:
        operands = self.metadata.operands
        status = match_operands(operands, args, self.why_aligned(), but_for)
        if status:
            status = self.status_of_operands(operands, args)
        return self.status_behind_operands(args, target) if status else status

    @classmethod
    def class_status(
        cls, args: Any, target: Target | None = None, *, compiled: bool = False
    ) -> Status:
        """The checks that are the same for all kernels of the class, see :meth:`status`."""
        if not isinstance(args, Arguments):
            return Status.fail(not_arguments(args), rule=KIND_OF_OPERATION)
        if cls.arguments is not None and not isinstance(args, cls.arguments):
            return Status.fail(
                f"the kernel computes {cls.arguments.__name__}, these are {type(args).__name__}",
                rule=KIND_OF_OPERATION,
            )
        if not compiled and not (available := cls.provider_status()):
            return available
        device = args.device.type
        if device not in cls.devices and device != "meta":
            return Status.fail(
                f"the operands are on {args.device}; the kernel runs on {' or '.join(cls.devices)}",
                rule=DEVICE,
                nearest=f"would match with operands on {cls.devices[0]}",
                progress=1,
            )
        if target is not None and device in ("cuda", "meta"):
            reason = cls.why_not_for(target, compiled)
            if reason is not None:
                return Status.fail(reason, rule="target", progress=1)
        return Status.success()

    @classmethod
    def status_of_operands(cls, operands: OperandsMetadata, args: Arguments) -> Status:
        """The rules that are the same for all designs."""
        for step, one in cls.operand_rules:
            verdict = one.check(operands=operands, args=args)
            if not verdict:
                return verdict.at(BEFORE_RULES + step)
        return Status.success()

    def status_behind_operands(self, args: Arguments, target: Target | None) -> Status:
        """Target, epilogue, rules of the design and the kernel's own checks."""
        metadata = self.metadata
        if target is not None and not metadata.runs_on(target):
            return Status.fail(
                f"the kernel is for {_names(metadata.parsed_targets)}, the device is {target}",
                rule="target",
                progress=BEHIND_OPERANDS,
            )
        if not self.any_epilogue:
            refusal = epilogue_mismatch(metadata.epilogue, args.epilogue)
            if refusal is not None:
                return Status.fail(refusal, rule="epilogue", progress=BEHIND_OPERANDS + 1)
        broken = self._questions.refusal(args)
        if broken is not None:
            return broken
        verdict = self._supports(args)
        if not isinstance(verdict, Status):
            name = type(self).__name__
            raise TypeError(f"{name}._supports returned {verdict!r}; expected a Status")
        return verdict if verdict else verdict.at(1000)

    def may_suit(self, args: Arguments) -> bool:
        """Whether the rules of the design agree that look at nothing of the arguments, or at what
        they are ``by``."""
        return agree_by(type(self).design_rules, self.metadata, args, self.any_epilogue)

    @cached_property
    def _questions(self) -> Questions:
        return Questions(type(self).design_rules, self.metadata, self.any_epilogue)

    @classmethod
    def why_not_for(cls, target: Target, compiled: bool = False) -> str | None:
        """Why no kernel of the class is for a GPU of the architecture; None if some may be. What is
        ``compiled`` needs no code generator that knows it."""
        if "cuda" not in cls.devices:
            return f"the kernel runs on {' or '.join(cls.devices)}, the device is {target}"
        known = None if cls._provider is None else cls._provider.architectures
        if compiled or known is None or target.cc in known:
            return None
        names = ", ".join(f"sm_{cc}" for cc in known)
        return f"{cls.provider_name()} generates code for {names}; the device is {target}"

    @classmethod
    def operand_groups(cls) -> Iterator[Variants]:
        """Every combination of element types that the declared rows give, with its variants."""
        modes = (cls.arguments or GemmArguments).modes
        form = {"ragged": cls.ragged, "experts": cls.experts}
        given = {name: value for name, value in form.items() if value is not None}
        metadata = functools.partial(cls.operands_metadata, **given)
        for row in cls.operands:
            yield from row.groups(metadata, modes)

    @classmethod
    def operand_variants(cls) -> Iterator[OperandsMetadata]:
        """Every combination of operands that the declared rows give."""
        for group in cls.operand_groups():
            yield from group

    @classmethod
    def kernels_for(cls, operands: OperandsMetadata, epilogue: Graph | None = None) -> list[Kernel]:
        """The declared designs that the rules allow for these operands."""
        assert cls.space is not None
        return [
            cls(cls.describe(operands, design, epilogue))
            for design in cls.space.designs(cls.design)
            if all(rule.agrees(design, operands) for rule in cls.shaping_rules)
        ]

    @classmethod
    def describe(
        cls, operands: OperandsMetadata, design: DesignMetadata, epilogue: Graph | None = None
    ) -> KernelMetadata:
        """The metadata of one design for one combination of operands, with a name of its own."""
        name = name_of(cls.family_name(), operands, design)
        return KernelMetadata(
            kernel_name=name if epilogue is None else f"{name}_epilogue_{epilogue.identity[:12]}",
            kernel_class=cls,
            operands=operands,
            design=design,
            epilogue=epilogue,
            targets=cls.targets,
        )

    @classmethod
    def is_declared(cls) -> bool:
        """Whether its kernels are those of a declared space; else it generates them itself."""
        return cls.space is not None and bool(cls.operands)

    @classmethod
    def family_name(cls) -> str:
        return cls.family or cls.__name__

    @classmethod
    def provider_name(cls) -> str:
        return cls._provider.name if cls._provider is not None else ""

    @classmethod
    def provider_status(cls) -> Status:
        if cls._provider is None:
            return Status.success()
        status = cls._provider.available()
        if not isinstance(status, Status):
            raise TypeError(f"available() of the provider returned {status!r}; expected a Status")
        return status

    @classmethod
    def why_aligned(cls) -> str | None:
        """The reason for asking alignment, the same in all rows of a family."""
        return cls.operands[0].why_aligned if cls.operands else None

    def _require(self, args: Arguments, target: Target | None, *, compiled: bool = False) -> None:
        status = self.status(args, target, compiled=compiled)
        if not status:
            raise UnsupportedError(self.metadata.kernel_name, status)

    def _compiled(
        self, args: Arguments, cc: CcLike, hook: Callable[..., CompiledArtifact]
    ) -> CompiledArtifact:
        target = self.compile_target(args, cc)

        def build() -> CompiledArtifact:
            artifact = self._made_by(hook, args, cc)
            if not isinstance(artifact, CompiledArtifact):
                raise TypeError(
                    f"{type(self).__name__}.compile returned {type(artifact).__name__}; "
                    f"expected a CompiledArtifact"
                )
            return artifact.sealed(args.signature, target)

        return _compile_cache.get_or_build(self, args, target, build)

    def _made_by(
        self, hook: Callable[..., CompiledArtifact], args: Arguments, cc: CcLike
    ) -> CompiledArtifact:
        """What a hook compiles; its errors that are not ours become a CompileError."""
        try:
            return hook(self, args, cc)
        except (KernelApiError, MemoryError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise CompileError(f"{self.metadata.kernel_name} does not compile: {text}") from error

    def compile_target(self, args: Arguments, cc: CcLike) -> Target | None:
        """What :meth:`compile` compiles for, and the errors that it raises before."""
        asked = query_target(device_of(args), cc)
        self._require(args, asked)
        return self._compile_target(args, asked)

    def _compile_target(self, args: Arguments, asked: Target | None) -> Target | None:
        if "cuda" not in self.devices or "cpu" in self.devices:
            return None
        targets = self.metadata.parsed_targets
        if asked is not None:
            fit = fitting(targets, asked)
            assert fit is not None
            return fit.compiled_for(asked)
        if len(targets) == 1 and targets[0].suffix == "a":
            return targets[0]
        raise DeviceError(
            f"{self.metadata.kernel_name} can be compiled for several architectures and there is "
            f"no GPU to take one from; pass cc= or set KERNEL_API_ARCH"
        )

    def _artifact_to_run(self, args: Arguments, stream: Any = None) -> CompiledArtifact:
        offer = args._accepted.get(Offer)
        if offer is None:
            return self._artifact_for(args, stream)
        artifact: CompiledArtifact | None = offer.artifact(self)
        if artifact is None:
            artifact = self._artifact_for(args, stream)
            offer.keep(self, artifact)
        return artifact

    def _artifact_for(self, args: Arguments, stream: Any) -> CompiledArtifact:
        target = self._compile_target(args, target_of(args.device))
        found = _compile_cache.get(self, args.signature, target)
        if found is not None:
            return found
        if args.device.type == "cuda" and capturing(args.device.index, stream):
            raise CaptureError(
                f"a CUDA graph is being captured and {self.metadata.kernel_name} is not compiled "
                f"for these arguments; call compile(args) before the capture"
            )
        return self.compile(args)

    def _check_artifact(self, args: Arguments, given: object) -> None:
        if not isinstance(given, CompiledArtifact):
            raise ArtifactError(
                f"artifact is a {type(given).__name__}; expected one that compile(args) gave, or "
                f"None"
            )
        given.check(self, args, target_of(args.device))

    def _workspace(self, args: Arguments, given: Any) -> Any:
        size = self.get_workspace_size(args)
        return checked_workspace(type(self).__name__, size, args.device, given)

    def __getstate__(self) -> dict[str, Any]:
        """A copy asks its rules itself; predicates cannot be pickled."""
        return {name: one for name, one in vars(self).items() if name != "_questions"}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Kernel) and self.metadata == other.metadata

    def __hash__(self) -> int:
        return hash(self.metadata)

    def __repr__(self) -> str:
        return f"<{self.metadata.kernel_name}>"


def _names(targets: Iterable[Target]) -> str:
    return " or ".join(map(str, targets))
