"""A process that compiles kernels for :func:`kernel_api.compile_all`, into the cache on disk.

One job per line of standard input, one answer per line of standard output; both are JSON. The
process ends with its input. It sees no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    # What a compiler prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(job: dict[str, Any]) -> dict[str, str | None]:
    """The error's kind and text, if there was one."""
    try:
        from kernel_api import _description
        from kernel_api.metadata import KernelMetadata

        kernel = KernelMetadata.from_dict(job["kernel"]).rebuild()
        kernel.compile(_description.rebuilt(job["arguments"]), cc=job["target"])
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None, "text": None}


if __name__ == "__main__":
    main()
