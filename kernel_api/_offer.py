"""What discovery answered for arguments, carried by them: running one of the kernels that they
were offered checks nothing again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kernel_api import _compile_cache, provider

if TYPE_CHECKING:
    from kernel_api.artifact import CompiledArtifact
    from kernel_api.kernel import Kernel


class Offer:
    """The kernels for arguments of one key on their own device, with artifacts as they are used.

    It ends when a provider or kernel class changes, or the compiled kernels are forgotten.

    Args:
        valid_for: The registry's generation when the kernels were asked.
    """

    __slots__ = ("_artifacts", "_era", "_generation", "_kernels")

    def __init__(self, kernels: Iterable[Kernel], valid_for: int) -> None:
        # They are alive as long as this is, so their ids stand for them: kernels hash slowly.
        self._kernels = {id(kernel): kernel for kernel in kernels}
        self._artifacts: dict[int, CompiledArtifact] = {}
        self._generation, self._era = valid_for, _compile_cache._era

    def holds(self, kernel: Kernel) -> bool:
        return id(kernel) in self._kernels and self._is_valid()

    def artifact(self, kernel: Kernel) -> CompiledArtifact | None:
        found = self._artifacts.get(id(kernel))
        return found if found is not None and self._is_valid() else None

    def keep(self, kernel: Kernel, artifact: CompiledArtifact) -> None:
        if self.holds(kernel):
            self._artifacts[id(kernel)] = artifact

    def _is_valid(self) -> bool:
        return self._generation == provider._generation and self._era == _compile_cache._era
