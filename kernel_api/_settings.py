"""Settings of the environment, where it counts how long it takes to read them."""

from __future__ import annotations

import os
from collections.abc import Callable


def _translated(name: bytes) -> bytes | None:
    found = os.environ.get(os.fsdecode(name))
    return None if found is None else os.fsencode(found)


#: What the environment says of a name, both in bytes: ``os.environ`` translates what it is asked
#: and what it answers, which takes twenty times as long.
raw_setting: Callable[[bytes], bytes | None]
raw_setting = getattr(getattr(os.environ, "_data", None), "get", _translated)
