"""One row of the store as text: a measurement and the environment that it was made in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_api.errors import ArgumentError
from kernel_api.tuning._canonical import as_object, canonical, digest, taken
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._measurement import Measurement

FORMAT = 1

#: No row is larger; what is, is none. In bytes.
_LARGEST = 4 << 20


@dataclass(frozen=True)
class Row:
    """A measurement and the environment that it was made in."""

    environment: Environment
    measurement: Measurement

    @property
    def place(self) -> Path:
        """Its file below the store's folder."""
        one = self.measurement
        folder = Path(self.environment.digest, one.problem.likeness, one.problem.digest)
        return folder / f"{one.kernel.digest}.json"

    def to_dict(self) -> dict[str, Any]:
        fields = {
            "format": FORMAT,
            "environment": self.environment.to_dict(),
            "measurement": self.measurement.to_dict(),
        }
        return {**fields, "digest": digest(canonical(fields))}

    @classmethod
    def from_dict(cls, data: Any) -> Row:
        """Inverse of ``to_dict``; raises ArgumentError for what is no row, or was changed."""
        fields = as_object(data, "the row")
        if (found := taken(fields, "format", int)) != FORMAT:
            raise ArgumentError(f"format is {found}; expected {FORMAT}")
        _check_digest(fields)
        environment = Environment.from_dict(taken(fields, "environment", dict))
        measurement = Measurement.from_dict(taken(fields, "measurement", dict))
        if measurement.environment != environment.digest:
            raise ArgumentError("it was measured in another environment than it names")
        if measurement.kernel.fingerprint is None:
            raise ArgumentError("its kernel has no fingerprint")
        return cls(environment, measurement)

    @property
    def data(self) -> bytes:
        """The content of its file."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False).encode()

    @classmethod
    def read(cls, root: Path, place: Path) -> Row:
        """The row in a file.

        Args:
            root: The store's folder.
            place: The file below it.

        Raises:
            ArgumentError: it is no row, or the row belongs elsewhere.
            OSError: it cannot be read, or is not there.
        """
        path = root / place
        if (size := path.stat().st_size) > _LARGEST:
            raise ArgumentError(f"it has {size} bytes; expected at most {_LARGEST}")
        row = cls.from_dict(parsed(path))
        if row.place != place:
            raise ArgumentError(f"it belongs to {row.place}")
        return row


def _check_digest(fields: Mapping[str, Any]) -> None:
    named = taken(fields, "digest", str)
    try:
        found = digest(canonical({n: one for n, one in fields.items() if n != "digest"}))
    except ValueError as error:
        raise ArgumentError(f"it has a number that is none: {error}") from error
    if named != found:
        raise ArgumentError("it was changed, or damaged: its digest is another one")


def parsed(path: Path) -> Any:
    """A file as JSON; raises ArgumentError for what is none, OSError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is a ValueError as well
        raise ArgumentError(f"this is not JSON: {error}") from error
