"""The compiled form of a kernel for one argument signature and one GPU architecture."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_api.errors import ForeignArtifactError, SignatureError, TargetError
from kernel_api.targets import Target

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.kernel import Kernel


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a multiprocessor, read from its machine code.

    Attributes:
        registers: Per thread at launch.
        shared_memory_bytes: Per CTA, static and dynamic together.
        spill_bytes: Local memory per thread that registers were spilled to.
        threads: Per CTA.
    """

    registers: int
    shared_memory_bytes: int
    spill_bytes: int
    threads: int


class CompiledArtifact:
    """A compiled kernel. Made by :meth:`Kernel.compile`, which adds signature and target.

    Attributes:
        compiled_obj: What the provider's compiler returned; called by the kernel's ``_run``.
        kernel: The kernel that it was compiled from.
        signature: The argument signature that it serves; every size of it.
        target: The architecture that it was compiled for; None if it is not machine code.
        file: The file that it was loaded from; None if it was compiled here.
    """

    __slots__ = ("_resources", "compiled_obj", "file", "kernel", "launchers", "signature", "target")

    def __init__(
        self,
        compiled_obj: Any,
        kernel: Kernel,
        signature: tuple[Hashable, ...] | None = None,
        target: Target | None = None,
    ) -> None:
        self.compiled_obj = compiled_obj
        self.kernel = kernel
        self.signature = signature
        self.target = target
        self.file: Path | None = None
        self._resources: Resources | None = None
        #: Prepared launches by device, for kernels that keep them.
        self.launchers: dict[Any, Any] = {}

    def sealed(self, signature: tuple[Hashable, ...], target: Target | None) -> CompiledArtifact:
        """The same artifact, knowing what it serves."""
        if self.signature is None:
            self.signature = signature
        if self.target is None:
            self.target = target
        return self

    @property
    def resources(self) -> Resources | None:
        """Registers, shared memory, spills and threads; None where there is no machine code."""
        if self._resources is None:
            self._resources = self.kernel.read_resources(self)
        return self._resources

    @resources.setter
    def resources(self, found: Resources | None) -> None:
        self._resources = found

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a shared library that :func:`kernel_api.load` gives back, without the compiler.

        Its name ends in ``.so``. Its manifest is inside, and beside it in a file of the same name
        with ``.json`` behind.

        Raises:
            LinkError: there is no linker here, there is no machine code, or the artifact was
                loaded from a file that is another one now.
            ArgumentError: the file cannot be written or its name does not end so, or the kernel's
                metadata cannot be written as JSON.
        """
        from kernel_api.library import export

        return export(self, path)

    def check(self, kernel: Kernel, args: Arguments, device: Target | None) -> None:
        """Raise unless this artifact is the kernel's, for the arguments, on the device."""
        if self.kernel is not kernel and self.kernel != kernel:
            raise ForeignArtifactError(
                f"the artifact was compiled by {self.kernel.metadata.kernel_name}, "
                f"not by {kernel.metadata.kernel_name}"
            )
        if self.signature is not args.signature and self.signature != args.signature:
            differing = _differences(self.signature, args.signature, args.operand_names)
            told = ", ".join(f"{one} where the arguments have {other}" for one, other in differing)
            raise SignatureError(f"the artifact was compiled for {told}; compile for them")
        if self.target is None or device is None:
            return
        if not self.runs_on(device):
            raise TargetError(
                f"the artifact was compiled for {self.target}, the device is {device}; "
                f"compile with cc={device.cc}"
            )

    def runs_on(self, device: Target) -> bool:
        """Whether the machine code runs on a device, see :func:`code_runs_on`."""
        assert self.target is not None
        return code_runs_on(self.target, device)

    def __repr__(self) -> str:
        return f"<CompiledArtifact of {self.kernel.metadata.kernel_name} for {self.target}>"


def code_runs_on(target: Target, device: Target) -> bool:
    """Machine code runs on its own compute capability and newer ones of the same major."""
    if target.suffix == "a":
        return target.cc == device.cc
    return target.major == device.major and target.minor <= device.minor


def _differences(
    one: Any, other: Any, operands: tuple[str, ...] = (), label: str = ""
) -> Iterator[tuple[str, str]]:
    """What differs in two signatures, of the one and of the other; operands by their names."""
    if one == other:
        return
    if not (isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)):
        yield f"{label}{one}", f"{other}"
        return
    if one and isinstance(one[0], str) and one[0] == other[0]:
        label = f"{one[0]} "
    for place, pair in enumerate(zip(one, other, strict=True)):
        if operands and place == 1:  # behind the kind
            for name, of_one, of_other in zip(operands, *pair, strict=False):
                if of_one != of_other:
                    yield f"{name} {of_one}", f"{of_other}"
        else:
            yield from _differences(*pair, label=label)
