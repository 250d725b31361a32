"""Settings of the environment, where it counts how long it takes to read them."""

from __future__ import annotations

import os
from collections.abc import Callable

#: What the environment says of a name, both in bytes: ``os.environ`` translates what it is asked
#: and what it answers, which takes twenty times as long.
raw_setting: Callable[[bytes], bytes | None] = getattr(os.environ, "_data", {}).get
