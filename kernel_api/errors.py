"""Everything that this library raises of its own.

KernelApiError
 ├── ArgumentError (ValueError)        the arguments contradict each other
 │    └── EpilogueError                an epilogue cannot be traced, or its operands do not fit
 ├── RegistrationError (TypeError)     a kernel class or provider lacks what the contract asks
 ├── FilterError                       the caller's metadata_filter raised, returned no bool, or
 │                                     no design has what it asks for
 ├── NoKernelError (LookupError)       nothing offers the arguments; carries the explanation
 ├── UnsupportedError (ValueError)     this kernel cannot take these arguments; carries the status
 ├── CompileError (RuntimeError)       the code generator failed
 │    └── CompilerKilledError          somebody killed its process, as systems short of memory do
 ├── ArtifactError (ValueError)        the artifact does not belong to this call
 │    ├── ForeignArtifactError         it was compiled by another kernel
 │    ├── SignatureError               it was compiled for other dtypes, majors or ranks
 │    ├── TargetError                  it was compiled for another GPU architecture
 │    └── LibraryError                 a file is no kernel library or bundle, or is damaged
 ├── LinkError (RuntimeError)          no shared library can be made of the compiled code here
 ├── DeviceError (RuntimeError)        no GPU where one is needed, or a tensor on the wrong one
 ├── CaptureError (RuntimeError)       something would compile while a graph is captured
 ├── WorkspaceError (ValueError)       the workspace is too small, misplaced or not of bytes
 ├── GradientError (RuntimeError)      a gradient is asked for that no kernel computes
 ├── BenchError                        nothing can be measured: there is no data, or no process
 ├── GraphError (ValueError)           a graph contradicts itself; the text names node or tensor
 │    ├── GraphStateError (RuntimeError)  it is used before it is built, or changed after
 │    ├── VariantPackError             a tensor is missing, or is not as the graph describes it
 │    └── SerializedGraphError         the data is no graph of this library, or is damaged
 └── GraphNotSupportedError (RuntimeError)  no plan can serve the graph; says why for each

PluginWarning (UserWarning)            a provider or kernel class misbehaved and was left out
CacheWarning (UserWarning)             the cache on disk, or the file of recorded problems, is not
                                       used; kernels compile and run anyway

All but warnings are raised before anything is launched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_api.explanation import Explanation
    from kernel_api.status import Status
    from kernel_api.tuning import Measurement


class KernelApiError(Exception):
    """Base of every error that this library raises."""


#: As the interface spells what ``compile_all`` returns in the place of an artifact.
KernelError = KernelApiError


class ArgumentError(KernelApiError, ValueError):
    """The arguments contradict each other; the text names both values."""


class EpilogueError(ArgumentError):
    """An epilogue cannot be traced, or its operands do not fit; the text starts with the line."""


class RegistrationError(KernelApiError, TypeError):
    """A kernel class or provider lacks what the contract asks; the text names what."""


class FilterError(KernelApiError):
    """The caller's ``metadata_filter`` raised, or asked for an axis that no design has (the cause
    is chained), or returned what is no bool."""


class NoKernelError(KernelApiError, LookupError):
    """No kernel offers the arguments, or none that does is right; ``explanation`` says why, family
    by family, and ``rows`` what was measured of each that was tried."""

    def __init__(
        self,
        explanation: Explanation,
        text: str | None = None,
        rows: tuple[Measurement, ...] = (),
    ) -> None:
        super().__init__(text or f"no kernel takes these arguments\n{explanation}")
        self.rows = rows
        self.explanation = explanation

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.explanation, str(self), self.rows)


class UnsupportedError(KernelApiError, ValueError):
    """This kernel cannot take these arguments; ``status`` says which rule failed."""

    def __init__(self, kernel_name: str, status: Status) -> None:
        super().__init__(f"{kernel_name} does not support these arguments: {status.error}")
        self.kernel_name = kernel_name
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kernel_name, self.status)


class CompileError(KernelApiError, RuntimeError):
    """The code generator failed; its own error is chained."""


class CompilerKilledError(CompileError):
    """Somebody killed the compiler's process, twice: of the kernel that says nothing. Systems that
    are short of memory do so; fewer compilations at once (KERNEL_API_COMPILE_WORKERS) take less."""


class ArtifactError(KernelApiError, ValueError):
    """The artifact does not belong to this call."""


class ForeignArtifactError(ArtifactError):
    """The artifact was compiled by another kernel."""


class SignatureError(ArtifactError):
    """The artifact was compiled for other dtypes, majors or ranks."""


class TargetError(ArtifactError):
    """The artifact was compiled for another GPU architecture."""


class LibraryError(ArtifactError):
    """A file is no kernel library or bundle, is cut off, or was changed after it was made."""


class LinkError(KernelApiError, RuntimeError):
    """No shared library can be made of the compiled code: there is no linker, or it failed."""


class DeviceError(KernelApiError, RuntimeError):
    """There is no GPU where one is needed, or a tensor lies on the wrong one, or nowhere."""


class CaptureError(KernelApiError, RuntimeError):
    """A CUDA graph is being captured and something would have to be compiled first."""


class WorkspaceError(KernelApiError, ValueError):
    """The workspace is too small, lies on another device, or is not made of bytes."""


class BenchError(KernelApiError):
    """Nothing can be measured: the data or the reference cannot be made, or the processes that
    measure die before any candidate runs."""


class GradientError(KernelApiError, RuntimeError):
    """A gradient is asked for that no kernel computes: one is differentiated again, or it is that
    of a layer of 8 bits, or of a form of :mod:`kernel_api.ops` that has none."""


class GraphError(KernelApiError, ValueError):
    """A graph contradicts itself; the text names the node or tensor."""


class GraphStateError(GraphError, RuntimeError):
    """A graph is used before it is built, or changed after; the text says what to call first."""


class VariantPackError(GraphError):
    """A tensor that a graph reads or writes is missing, or is not as the graph describes it."""


class SerializedGraphError(GraphError):
    """The data is no graph of this library, is of another version, or is damaged."""


class GraphNotSupportedError(KernelApiError, RuntimeError):
    """No plan can serve the graph; ``reasons`` says why, for each plan by its name."""

    def __init__(self, text: str, reasons: dict[str, str] | None = None) -> None:
        self.text = text
        self.reasons = dict(reasons or {})
        lines = [f"[{i}] {name}: {why}" for i, (name, why) in enumerate(self.reasons.items())]
        super().__init__("\n".join([text, *lines]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text, self.reasons)


class PluginWarning(UserWarning):
    """A third-party provider or kernel class misbehaved and was left out of the answer."""


class CacheWarning(UserWarning):
    """The cache on disk cannot be used, or may not: kernels compile in every process. Or the file
    that problems are recorded in cannot be written: they are not kept."""
