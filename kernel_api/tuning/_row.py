"""One row of the store: a measurement and the environment that it was made in, and its text.

The text is a JSON object whose parts stand on lines of their own, each of them canonical, behind a
digest of the bytes of all of them. So a row is checked, and compared with what is looked for,
without being parsed. One that was laid out in another way is read as well, only slower.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kernel_api.errors import ArgumentError
from kernel_api.tuning._canonical import as_object, canonical, digest, parsed, taken
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._kernel import KernelIdentity
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._problem import Problem

FORMAT = 2

#: No row is larger; what is, is none. In bytes.
_LARGEST = 4 << 20


class RowText(NamedTuple):
    """The parts of a row, each as canonical JSON."""

    environment: str
    kernel: str
    problem: str
    result: str

    @classmethod
    def parsed(cls, data: bytes) -> RowText | None:
        """None for what :attr:`data` does not give, be it damaged or laid out in another way."""
        head, _, body = data.decode("ascii", errors="replace").partition("\n")
        if head != _head(body):
            return None
        lines = body.removesuffix("}").split(",\n")
        names = [f'"{name}":' for name in cls._fields]
        if len(lines) != len(names) or not all(map(str.startswith, lines, names)):
            return None
        return cls._make(line[len(name) :] for line, name in zip(lines, names, strict=True))

    @property
    def data(self) -> bytes:
        """The content of the row's file."""
        body = self._body
        return f"{_head(body)}\n{body}".encode()

    @property
    def digest(self) -> str:
        return digest(self._body)

    @property
    def _body(self) -> str:
        lines = (f'"{name}":{text}' for name, text in zip(self._fields, self, strict=True))
        return ",\n".join(lines) + "}"

    def measurement(self, problem: Problem) -> Measurement:
        """What was measured, of a problem that is known to be this one.

        Raises:
            ArgumentError: the kernel or the result are none.
        """
        kernel = KernelIdentity.from_json(self.kernel)
        if kernel.fingerprint is None:
            raise ArgumentError("its kernel has no fingerprint")
        return Measurement.of(kernel, problem, digest(self.environment), parsed(self.result))

    def place(self, rounds: int) -> tuple[bool, bool, float]:
        """As that of the measurement, which is not made for it; the last for what is none."""
        try:
            times = json.loads(self.result)["times_us"]
            if times:
                return False, len(times) < rounds, float(statistics.median(times))
        except (ValueError, TypeError, LookupError, OverflowError):
            pass
        return True, True, math.inf


def _head(body: str) -> str:
    return f'{{"digest":"{digest(body)}","format":{FORMAT},'


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

    @property
    def text(self) -> RowText:
        one = self.measurement
        result = canonical(one.result())
        return RowText(self.environment.to_json(), one.kernel.text, one.problem.text, result)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text.data)
        return found

    @classmethod
    def from_dict(cls, data: Any) -> Row:
        """Inverse of ``to_dict``; raises ArgumentError for what is no row, or was changed."""
        fields = as_object(data, "the row")
        if (found := taken(fields, "format", int)) != FORMAT:
            raise ArgumentError(f"format is {found}; expected {FORMAT}")
        try:
            text = RowText(*(canonical(taken(fields, one, dict)) for one in RowText._fields))
        except ValueError as error:
            raise ArgumentError(f"it has a number that is none: {error}") from error
        if taken(fields, "digest", str) != text.digest:
            raise ArgumentError("it was changed, or damaged: its digest is another one")
        environment = Environment.from_dict(fields["environment"])
        problem = Problem.from_dict(fields["problem"])
        row = cls(environment, text.measurement(problem))
        if row.text != text:
            raise ArgumentError("it has more than a row has")
        return row

    @classmethod
    def read(cls, place: Path, data: bytes) -> Row:
        """The row in a file.

        Args:
            place: The file, below the store's folder.
            data: What it has.

        Raises:
            ArgumentError: it is no row, or the row belongs elsewhere.
        """
        row = cls.from_dict(parsed(data))
        if row.place != place:
            raise ArgumentError(f"it belongs to {row.place}")
        return row


def content(path: str) -> bytes:
    """Of a row's file; raises ArgumentError for one that is too large, or OSError."""
    with open(path, "rb", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST:
            raise ArgumentError(f"it has {size} bytes; expected at most {_LARGEST}")
        return file.readall()
