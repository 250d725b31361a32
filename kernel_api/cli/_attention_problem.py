"""Operands of attention, made from the options that describe a problem."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kernel_api.cli._norm_problem import check_options_of_gemm
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.cli._problem import Maker

ATTENTION = ("sdpa", "sdpa_backward")

#: What ``--with`` may name.
ATTENTION_OPTIONS = (
    "alibi", "alignment", "bias", "bshd", "causal", "d_v", "deterministic", "dropout", "lse",
    "padding", "page_size", "scale", "score_max", "score_sum_exp", "sink", "softcap",
    "values_in_keys", "window", "window_right",
)  # fmt: skip

#: Those that are there or not.
_FLAGS = (
    "alibi", "bias", "bshd", "causal", "deterministic", "lse", "padding", "score_max",
    "score_sum_exp", "sink", "values_in_keys",
)  # fmt: skip

_BFLOAT16, _FLOAT32, _FLOAT64 = dtype("bfloat16"), dtype("float32"), dtype("float64")


def attention_arguments(
    options: argparse.Namespace, maker: Maker, sizes: tuple[int, int, int]
) -> Arguments:
    """Of M queries and N keys with K columns, for each head of each sequence of a batch.

    Raises:
        ArgumentError: the options contradict each other, or name what there is not.
    """
    check_options_of_gemm(options, "attention is of Q, K and V and", but=("batch",))
    given = {name: value for name, value in options.beside or () if value is not False}
    for name in given:
        if name not in ATTENTION_OPTIONS:
            raise ArgumentError(
                f"{options.operation}, --with: there is no {name}; there are "
                f"{', '.join(ATTENTION_OPTIONS)}"
            )
        if name in _FLAGS and given[name] is not True:
            raise ArgumentError(f"--with {name}={given[name]}; expected it without a value")
    made = _Operands(options, maker, sizes, given)
    args: Arguments = made.forward() if options.operation == "sdpa" else made.backward()
    if maker.random is not None:
        args.draw_indices(maker.random)
    return args


def _count(given: dict[str, Any], name: str) -> int | None:
    """What ``--with`` gives for a name; raises ArgumentError for what is no number of things."""
    value = given.get(name)
    if value is None or (type(value) is int and value >= 1):
        return value
    raise ArgumentError(f"--with {name}={value}; expected a whole number, 1 or more")


class _Operands:
    """Random or poisoned ones.

    Attributes:
        element: Of Q, K and V.
        wide: Of what has a number for each row, or for each head.
        page_size: None without pages.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        maker: Maker,
        sizes: tuple[int, int, int],
        given: dict[str, Any],
    ) -> None:
        self.S_q, self.S_kv, self.D = sizes
        self.B = 1 if options.batch is None else options.batch
        self.H = options.heads or 1
        self.H_kv = options.heads_kv or self.H
        self.D_v = _count(given, "d_v") or self.D
        self.page_size = _count(given, "page_size")
        self.element = dtype(options.dtype)
        small = self.element.bits < 16
        self.out_element = dtype(options.out_dtype) if options.out_dtype else self.element
        if small and not options.out_dtype:
            self.out_element = _BFLOAT16
        self.wide = _FLOAT64 if self.element is _FLOAT64 else _FLOAT32
        self._maker, self._given = maker, given

    def forward(self) -> Any:
        import kernel_api as ka

        if "deterministic" in self._given:
            raise ArgumentError("sdpa, --with deterministic: sdpa_backward takes it")
        _, *names = ka.SdpaArguments.output_names
        statistics = {name: self.row_sums(fill=False) for name in names if name in self._given}
        q, k, v = self._inputs()
        out = self.queries(self.D_v, self.out_element, fill=False)
        further = {**statistics, **self._options(), **self._pages()}
        within = True if "values_in_keys" in self._given else None
        return ka.SdpaArguments(q, k, v, out, values_in_keys=within, **further)

    def backward(self) -> Any:
        import kernel_api as ka

        _, *statistics = ka.SdpaArguments.output_names
        for name in ("page_size", "values_in_keys", *statistics):
            if name in self._given:
                raise ArgumentError(f"sdpa_backward, --with {name}: sdpa takes it")
        q, k, v = self._inputs()
        out, dO = (self.queries(self.D_v, self.element, fill=True) for _ in range(2))
        dQ = self.queries(self.D, self.element, fill=False)
        dK, dV = (self.keys(columns, fill=False) for columns in (self.D, self.D_v))
        further = self._options()
        if "bias" in further:
            further["dBias"] = self._scores(fill=False)
        if "sink" in further:
            further["dSink"] = self._heads(fill=False)
        deterministic = bool(self._given.get("deterministic", False))
        return ka.SdpaBackwardArguments(
            q, k, v, out, dO, self.row_sums(fill=True), dQ, dK, dV,
            deterministic=deterministic, **further,
        )  # fmt: skip

    # Tensors -----------------------------------------------------------------------------

    def _inputs(self) -> tuple[Any, Any, Any]:
        q = self.queries(self.D, self.element, fill=True)
        return q, self.keys(self.D, fill=True), self.keys(self.D_v, fill=True)

    def queries(self, columns: int, element: Any, *, fill: bool) -> Any:
        """(B, H, S_q, columns)"""
        return self._tensor((self.B, self.H, self.S_q, columns), element, fill)

    def keys(self, columns: int, *, fill: bool) -> Any:
        """(B, H_kv, S_kv, columns), or as many pages as that is."""
        B, S = self.B, self.S_kv
        if self.page_size is not None:
            B, S = B * -(-S // self.page_size), self.page_size
        return self._tensor((B, self.H_kv, S, columns), self.element, fill)

    def row_sums(self, *, fill: bool) -> Any:
        """(B, H, S_q)"""
        return self._tensor((1, self.B, self.H, self.S_q), self.wide, fill)[0]

    def _heads(self, *, fill: bool) -> Any:
        """(H,)"""
        return self._tensor((1, 1, 1, self.H), self.wide, fill)[0, 0, 0]

    def _scores(self, *, fill: bool) -> Any:
        """(1, H, S_q, S_kv)"""
        return self._tensor((1, self.H, self.S_q, self.S_kv), self.out_element, fill)

    def _tensor(self, shape: tuple[int, int, int, int], element: Any, fill: bool) -> Any:
        batch, heads, rows, columns = shape
        if "bshd" in self._given:
            heads, rows = rows, heads
        matrices = self._maker.matrices((rows, columns), element, "t", batch * heads, fill=fill)
        found = matrices.unflatten(0, (batch, heads))
        return found.transpose(1, 2) if "bshd" in self._given else found

    # Options -----------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        from kernel_api.arguments import Dropout

        given = self._given
        found: dict[str, Any] = {n: given[n] for n in ("scale", "softcap") if n in given}
        found["mask"] = self._mask()
        if "bias" in given:
            found["bias"] = self._scores(fill=True)
        for name in ("alibi", "sink"):
            if name in given:
                found[name] = self._heads(fill=True)
        if "dropout" in given:
            found["dropout"] = Dropout(given["dropout"], self._maker.options.seed, 0)
        if "padding" in given:
            found.update(seq_lens_q=self._lengths(), seq_lens_kv=self._lengths())
        if self.element.bits < 16:
            names = ("descale_q", "descale_k", "descale_v")
            found.update((name, self._descale()) for name in names)
        return found

    def _mask(self) -> Any:
        from kernel_api import masks

        given = self._given
        alignment = given.get("alignment", "top_left")
        if not {"window", "window_right", "causal"} & given.keys():
            if "alignment" in given:
                raise ArgumentError("--with alignment: it is of causal or window; name one of them")
            return None
        if not {"window", "window_right"} & given.keys():
            return masks.Causal(alignment)
        right = 0 if "causal" in given else given.get("window_right")
        return masks.SlidingWindow(given.get("window"), right, alignment)

    def _pages(self) -> dict[str, Any]:
        import torch

        if self.page_size is None:
            return {}
        shape = self.B, -(-self.S_kv // self.page_size)
        table = torch.empty(shape, dtype=torch.int32, device=self._maker.device)
        return {"page_table": table, "seq_lens_kv": self._lengths()}

    def _lengths(self) -> Any:
        import torch

        return torch.empty(self.B, dtype=torch.int32, device=self._maker.device)

    def _descale(self) -> Any:
        return self._tensor((1, 1, self.B, self.H_kv), _FLOAT32, True)[0, 0].abs()
