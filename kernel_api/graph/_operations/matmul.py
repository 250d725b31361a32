"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._node import Node, Operation, settle


class MatmulMethods(Builder):
    """Products of matrices."""

    def matmul(
        self,
        A: Any,
        B: Any,
        compute_data_type: Any = None,
        padding: float = 0.0,
        name: str | None = None,
    ) -> Any:
        """C = A · B.

        Args:
            A: (..., M, K).
            B: (..., K, N). Where it has fewer modes than A, or A fewer, ones stand in front. Of a
                batch mode, one extent is a multiple of the other: each matrix of the smaller one
                then serves as many neighbours, as heads of keys do in grouped-query attention.
            padding: Kept for compatibility; only 0 is supported.

        Returns:
            C (..., M, N), row-major unless its strides are set. Products of integers are exact.

        Raises:
            GraphError: ``padding`` is not 0.
        """
        if padding:
            raise GraphError(
                f"matmul has padding = {padding}; only 0.0 is supported, because products of "
                f"matrices with sizes of their own are none"
            )
        return self._add("matmul", {"A": A, "B": B}, name=name, compute=compute_data_type)


class Matmul(Operation):
    """C = A · B."""

    name = "matmul"
    result = ("C",)
    inputs = ("A", "B")

    def infer(self, node: Node) -> None:
        a, b = node.input("A").dim, node.input("B").dim
        if min(len(a), len(b)) < 2:
            raise GraphError(
                f"{node} has A of dim {list(a)} and B of dim {list(b)}; matrices have two modes "
                f"at least"
            )
        rank = max(len(a), len(b))
        a, b = ((1,) * (rank - len(one)) + one for one in (a, b))
        if a[-1] != b[-2]:
            raise GraphError(
                f"{node} has A with K = {a[-1]} but B with K = {b[-2]} (A (..., M, K) = {list(a)}, "
                f"B (..., K, N) = {list(b)})"
            )
        batch = []
        for one, other in zip(a[:-2], b[:-2], strict=True):
            small, large = sorted((one, other))
            if small != large and (not small or large % small):
                raise GraphError(
                    f"{node} has A of dim {list(a)} and B of dim {list(b)}: of batch modes {one} "
                    f"and {other}, one must be a multiple of the other"
                )
            batch.append(large)
        settle(node, node.outputs.get("C"), (*batch, a[-2], b[-1]))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        a, b = given["A"], given["B"]
        whole = not (a.is_floating_point() or b.is_floating_point())
        # float64 holds sums of products of 8-bit integers exactly, on every device.
        kind = torch.float64 if whole else node.arithmetic
        a, b = a.to(kind), b.to(kind)
        rank = max(a.dim(), b.dim())
        a, b = (one.reshape((1,) * (rank - one.dim()) + tuple(one.shape)) for one in (a, b))
        for mode in range(rank - 2):
            sizes = a.shape[mode], b.shape[mode]
            if 1 not in sizes and sizes[0] != sizes[1]:
                if sizes[0] < sizes[1]:
                    a = a.repeat_interleave(sizes[1] // sizes[0], dim=mode)
                else:
                    b = b.repeat_interleave(sizes[0] // sizes[1], dim=mode)
        return {"C": torch.matmul(a, b)}
