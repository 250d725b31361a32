"""What the dense GEMM families share that the performance model knows by their candidates."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kernel_api.providers.cutedsl.gemm import model
from kernel_api.providers.cutedsl.gemm.fusing import FusedGemm


class ModelledGemm(FusedGemm):
    """A family of which every kernel has a ``candidate``."""

    candidate: Any

    def predict(self, args: Any) -> float:
        return model.predict(args, self.candidate, self.family)

    @classmethod
    def estimated_by(cls, args: Any) -> Hashable | None:
        return model.problem_of(args)
