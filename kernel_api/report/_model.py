"""What the performance model says of kernels that are known by their metadata."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from kernel_api import _description, _log
from kernel_api.provider import providers, registered_class
from kernel_api.tuning import KernelIdentity, Problem

logger = _log.logger(__name__)


class Model:
    """Predicted times; kernels and arguments are rebuilt once each."""

    def __init__(self) -> None:
        providers()  # those that come with us are registered when they are asked for
        self._kernels: dict[str, Any] = {}
        self._arguments: dict[tuple[str, str], Any] = {}  # None of both: it cannot be rebuilt

    def microseconds(self, kernel: KernelIdentity, problem: Problem) -> float | None:
        """None for a kernel that has no model, is not here, or cannot be rebuilt."""
        try:
            built, args = self._kernel(kernel), self._args(problem, kernel)
            seconds = None if built is None or args is None else built.predict(args)
            return 1e6 * seconds if seconds is not None and 0 < seconds < math.inf else None
        except Exception as error:
            # Rows may be of other versions, or of providers whose code does whatever it does.
            logger.debug("nothing is predicted for %s on %s: %r", kernel.name, problem, error)
            return None

    def _kernel(self, identity: KernelIdentity) -> Any:
        text = identity.text
        if text not in self._kernels:
            self._kernels[text] = None
            if _is_here(identity.metadata):
                self._kernels[text] = identity.rebuild()
        return self._kernels[text]

    def _args(self, problem: Problem, kernel: KernelIdentity) -> Any:
        """The arguments on meta tensors; the kernel knows the graph of the epilogue."""
        epilogue = json.dumps(kernel.metadata.get("epilogue"), sort_keys=True)
        key = problem.text, epilogue
        if key not in self._arguments:
            self._arguments[key] = None
            data = problem.to_dict()["arguments"]
            if data["class"][0] not in sys.modules:
                raise ValueError(f"{data['class'][0]} is not loaded")
            keywords = dict(data["keywords"])
            if keywords.get("epilogue") is not None:
                graph = json.loads(epilogue)["epilogue"]
                operands = keywords["epilogue"]["operands"].items()
                numbers = {name: 0.0 if one is None else one for name, one in operands}
                keywords["epilogue"] = {"graph": graph, "operands": numbers}
            self._arguments[key] = _description.rebuilt({**data, "keywords": keywords})
        return self._arguments[key]


def _is_here(metadata: Mapping[str, Any]) -> bool:
    """Whether its classes are loaded: a row that someone sent makes nothing be imported."""
    parts = [metadata.get(name) or {} for name in ("operands", "design")]
    modules = [one["type"].partition(":")[0] for one in parts if one]
    path = metadata["kernel_class"]["class"]
    return registered_class(path) is not None and all(one in sys.modules for one in modules)
