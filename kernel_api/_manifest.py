"""What a file of compiled code says of itself: whose code it is, for what, and a digest.

The manifest stands beside the file, and inside a shared library in a section of its own, where it
is read without loading the library. One SHA-256 covers both: the manifest's text and the file,
where each mention of the digest itself counts as zeros.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernel_api import _elf
from kernel_api._cached_property import cached_property
from kernel_api.artifact import Resources
from kernel_api.errors import ArgumentError, LibraryError
from kernel_api.metadata import KernelMetadata, decode, encode
from kernel_api.targets import Target, target

FORMAT = 1

#: Where a shared library carries it: an ELF section, and a symbol for programs in C.
SECTION = ".kernel_api"
SYMBOL = "kernel_api_manifest"

_UNSEALED = "0" * 64


@dataclass(frozen=True)
class Identity:
    """What tells one compiled code from all others; JSON values throughout.

    Attributes:
        kernel: The kernel's metadata, without the name of its provider.
        signature: The argument signature, the epilogue in it.
        target: The architecture, as ``sm_90a``.
        fingerprint: Versions and sources that the code was made from.
    """

    kernel: Mapping[str, Any]
    signature: Any
    target: str
    fingerprint: Mapping[str, str]

    @classmethod
    def of(
        cls,
        metadata: KernelMetadata,
        signature: tuple[Hashable, ...],
        target: Target,
        fingerprint: Mapping[str, str],
    ) -> Identity:
        """Raises ArgumentError for what cannot be written as JSON."""
        kernel = {k: v for k, v in metadata.to_dict().items() if k != "provider"}
        return cls(kernel, encode(signature), str(target), dict(fingerprint))

    @cached_property
    def key(self) -> str:
        """SHA-256 of the canonical text; the name of a cache entry."""
        fields = [self.kernel, self.signature, self.target, self.fingerprint]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """A manifest and the text that it was read from, or will be written as.

    Attributes:
        cuda: The CUDA version of the runtime that is linked in; None where there is none.
    """

    identity: Identity
    resources: Resources | None
    sha256: str
    text: str
    cuda: int | None = None

    @classmethod
    def unsealed(
        cls, identity: Identity, resources: Resources | None, cuda: int | None = None
    ) -> Manifest:
        """A manifest for a file that is still to be made."""
        fields = {
            "format": FORMAT,
            "kernel": identity.kernel,
            "signature": identity.signature,
            "target": identity.target,
            "epilogue": _epilogue(identity),
            "fingerprint": identity.fingerprint,
            "resources": asdict(resources) if resources is not None else None,
            "cuda": cuda,
            "sha256": _UNSEALED,
        }
        text = json.dumps(fields, indent=1, sort_keys=True)
        return cls(identity, resources, _UNSEALED, text, cuda)

    @classmethod
    def parsed(cls, text: str) -> Manifest:
        """Raises LibraryError for what is no manifest."""
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict):
                raise TypeError(f"it is {fields!r:.99}; expected an object")
            if fields["format"] != FORMAT:
                raise LibraryError(
                    f"the manifest has format {fields['format']!r}; expected {FORMAT}"
                )
            found = fields["resources"]
            identity = Identity(
                fields["kernel"], fields["signature"], fields["target"], fields["fingerprint"]
            )
            if not (found is None or isinstance(found, dict)):
                raise TypeError(f"resources is {found!r:.99}; expected an object, or null")
            resources = Resources(**found) if found is not None else None
            sha256, cuda = fields["sha256"], fields.get("cuda")
            if not (isinstance(sha256, str) and len(sha256) == len(_UNSEALED)):
                raise TypeError(f"sha256 is {sha256!r:.99}; expected 64 hexadecimal digits")
            if not isinstance(identity.kernel, dict):
                raise TypeError(f"kernel is {identity.kernel!r:.99}; expected an object")
            if not isinstance(identity.kernel["kernel_name"], str):
                name = identity.kernel["kernel_name"]
                raise TypeError(f"kernel_name is {name!r:.99}; expected a text")
            if not (cuda is None or isinstance(cuda, int)):
                raise TypeError(f"cuda is {cuda!r:.99}; expected a version such as 12")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, LibraryError):
                raise
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise LibraryError(f"the manifest cannot be read: {why}") from error
        return cls(identity, resources, sha256, text, cuda)

    @classmethod
    def of_library(cls, data: bytes) -> Manifest:
        """The one that a shared library carries; raises LibraryError without a readable one."""
        try:
            place = _elf.section(data, SECTION)
        except ValueError as error:
            raise LibraryError(f"not a complete shared library: {error}") from None
        if place is None:
            raise LibraryError("not made by kernel-api: the library carries no manifest")
        offset, size = place
        return cls.parsed(data[offset : offset + size].rstrip(b"\0").decode(errors="replace"))

    def sealed(self, data: bytes) -> tuple[Manifest, bytes]:
        """The manifest with the digest of it and the file, and the file that says the same."""
        digest = self._digest(data)
        text = self.text.replace(_UNSEALED, digest)
        sealed = replace(self, sha256=digest, text=text)
        return sealed, self._swap(data, digest)

    def check(self, data: bytes) -> None:
        """Raises LibraryError unless the file and this text are what was sealed."""
        if self._digest(data) != self.sha256:
            raise LibraryError("damaged: its bytes are not those that the manifest was made for")

    @property
    def kernel_name(self) -> str:
        return str(self.identity.kernel["kernel_name"])

    @cached_property
    def metadata(self) -> KernelMetadata:
        """Raises ArgumentError where the kernel's class is not here, or has changed."""
        return KernelMetadata.from_dict(dict(self.identity.kernel))

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """Raises ArgumentError for what is no signature."""
        try:
            found: tuple[Hashable, ...] = decode(self.identity.signature)
        except (KeyError, TypeError, AttributeError, ImportError, ValueError) as error:
            raise ArgumentError(f"this is no signature: {error!r}") from error
        return found

    @property
    def target(self) -> Target:
        return target(self.identity.target)

    def _digest(self, data: bytes) -> str:
        content = hashlib.sha256(self.text.replace(self.sha256, _UNSEALED).encode())
        content.update(self._swap(data, _UNSEALED))
        return content.hexdigest()

    def _swap(self, data: bytes, digest: str) -> bytes:
        """The file with another digest in its own manifest."""
        try:
            place = _elf.section(data, SECTION)
        except ValueError:
            return data
        if place is None or not data.startswith(self.text.encode(), place[0]):
            return data
        at = place[0] + self.text.encode().index(self.sha256.encode())
        return b"".join((data[:at], digest.encode(), data[at + len(digest) :]))


def _epilogue(identity: Identity) -> str | None:
    """The hash of the arguments' epilogue, which the signature has in its fourth place."""
    found = identity.signature[3] if len(identity.signature) > 3 else None
    return str(found[0]) if isinstance(found, list) else None
