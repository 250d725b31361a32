"""Which kernel, in which state of its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel_api._cached_property import cached_property
from kernel_api._fingerprint import fingerprint
from kernel_api.errors import ArgumentError
from kernel_api.metadata import KernelMetadata
from kernel_api.provider import providers, registered_class
from kernel_api.tuning._canonical import as_object, as_texts, canonical, digest, parsed, taken

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel


@dataclass(frozen=True)
class KernelIdentity:
    """A kernel's metadata and the state of its sources.

    Attributes:
        metadata: As :meth:`KernelMetadata.to_dict` gives it.
        fingerprint: Versions and sources that its code is made from; None where these cannot be
            known, so that nothing about it can be kept.
    """

    metadata: Mapping[str, Any]
    fingerprint: Mapping[str, str] | None

    @classmethod
    def of(cls, kernel: Kernel) -> KernelIdentity:
        """Raises ArgumentError for metadata that cannot be written as JSON."""
        return cls(kernel.metadata.to_dict(), fingerprint(type(kernel)))

    @property
    def name(self) -> str:
        return str(self.metadata["kernel_name"])

    @property
    def is_current(self) -> bool:
        """Whether a registered class has this kernel, from the same sources and versions."""
        providers()  # those that come with us are registered when they are asked for
        path = self.metadata["kernel_class"].get("class")
        found = registered_class(path) if isinstance(path, str) else None
        if found is None or self.fingerprint is None:
            return False
        return fingerprint(found) == self.fingerprint

    def rebuild(self) -> Kernel:
        """The kernel; raises ArgumentError where its class is not here, or has changed."""
        return KernelMetadata.from_dict(dict(self.metadata)).rebuild()

    def to_dict(self) -> dict[str, Any]:
        known = None if self.fingerprint is None else dict(self.fingerprint)
        return {"metadata": dict(self.metadata), "fingerprint": known}

    @classmethod
    def from_dict(cls, data: Any) -> KernelIdentity:
        """Inverse of ``to_dict``; raises ArgumentError for what describes no kernel."""
        fields = as_object(data, "kernel")
        metadata = as_object(taken(fields, "metadata", dict), "metadata")
        taken(metadata, "kernel_name", str)
        taken(metadata, "kernel_class", dict)
        known = taken(fields, "fingerprint", dict, type(None))
        return cls(metadata, None if known is None else as_texts(known, "fingerprint"))

    @classmethod
    def from_json(cls, text: str) -> KernelIdentity:
        """Of the canonical text; raises ArgumentError for what describes no kernel."""
        found = cls.from_dict(parsed(text))
        vars(found)["text"] = text
        return found

    @cached_property
    def text(self) -> str:
        """The canonical JSON."""
        try:
            return canonical(self.to_dict())
        except ValueError as error:
            raise ArgumentError(f"{self.name} cannot be written as JSON: {error}") from error

    @cached_property
    def digest(self) -> str:
        """A short hash of the text; the name of a file of the store."""
        return digest(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelIdentity) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)
