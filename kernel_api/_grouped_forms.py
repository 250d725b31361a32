"""How a fusion of products of groups is called in one call, see :mod:`kernel_api._forms`."""

from __future__ import annotations

from typing import Any

from kernel_api._forms import Form, empty
from kernel_api.arguments.experts import experts
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand, as_torch, require_tensor

#: Those that may sum over tokens, whose ``out`` may be a list of matrices.
_SUMS = frozenset(("grouped_gemm", "grouped_gemm_wgrad"))


class GroupedForm(Form):
    """A fusion of tokens A (T, K) and experts, or of tokens (M, T) and (T, N) that are summed
    over. ``offsets`` is one of the options."""

    further = ("offsets",)

    def option_of(self, operand: str) -> str:
        return "amax" if operand in ("amax_gate", "amax_up") else operand

    def operands(self, A: Any, B: Any) -> tuple[Operand, Operand]:
        return A if isinstance(A, Operand) else Operand(A, "A"), experts(B)

    def completed(
        self, A: Any, B: Any, out: Any, out_dtype: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        for name in ("offsets", "row_index"):
            given: Any = options.get(name)
            if given is None and name != "offsets":
                continue
            require_tensor(given, name)
            if not hasattr(given, "shape"):
                given = as_torch(given, name)
                options = {**options, name: given}
            if not len(given.shape):
                raise ArgumentError(f"{name} has shape (); expected integers in one mode")
        return super().completed(A, B, out, out_dtype, options)

    def require_out(self, out: Any) -> None:
        if self.name not in _SUMS or not isinstance(out, (list, tuple)):
            super().require_out(out)

    def given(self, out: Any, options: dict[str, Any]) -> list[tuple[str, Any]]:
        (_, given), *others = super().given(out, options)
        if not isinstance(given, (list, tuple)):
            return [("out", given), *others]
        return [*((f"out[{place}]", one) for place, one in enumerate(given)), *others]

    def out_shape(self, A: Any, B: Any, options: dict[str, Any]) -> tuple[int, ...]:
        for name in ("accumulate", "out_row_index"):
            given = options.get(name)
            if given is not None and given is not False:
                raise ArgumentError(f"{name} is given and there is no out; pass the one it is for")
        of_matrices = self.name == "grouped_gemm" and len(B.shape) == 2
        if of_matrices or self.name == "grouped_gemm_wgrad":
            return options["offsets"].shape[0], A.shape[0], B.shape[-1]
        return _tokens(A, options), self.columns(B.shape[-1])

    def allocated(self, name: str, A: Any, N: int, out: Any, options: dict[str, Any]) -> Any:
        import torch

        T, E = _tokens(A, options), options["offsets"].shape[0]
        element = torch.float64 if A.dtype is torch.float64 else torch.float32
        if name == "preactivation":
            return empty((T, N), self.kept_type(out, options), A)
        if name == "amax":
            return empty((E, 2) if self.name == "grouped_gemm_dglu" else (E,), element, A)
        if name == "dprob":
            return empty((T,), element, A)
        if name == "dbias":
            return empty((E, out.shape[-1]), element, A)
        return super().allocated(name, A, N, out, options)


def _tokens(A: Any, options: dict[str, Any]) -> int:
    picked = options.get("row_index")
    found: int = (A if picked is None else picked).shape[0]
    return found
