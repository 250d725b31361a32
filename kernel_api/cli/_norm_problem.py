"""Operands of norms, and of rows that are quantised, made from the options that describe a
problem."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.arguments.norm import NormArguments
    from kernel_api.cli._problem import Maker

#: With what they are if they are not given.
_OPTIONS_OF_GEMM = {
    "batch": None,
    "layout": "ttt",
    "accumulator": None,
    "scales": None,
    "fp32_precision": None,
}

_FLOAT32, _FLOAT64 = dtype("float32"), dtype("float64")


def norm_arguments(options: argparse.Namespace, maker: Maker, M: int, N: int) -> Arguments:
    """Of x (M, N), with every operand that the operation has, and a residual if that is asked for.

    Raises:
        ArgumentError: the options contradict each other.
    """
    check_options_of_gemm(options, f"{options.operation} is of row-major matrices and")
    beside = dict(options.beside or ())
    mode = beside.pop("mode", "block") if options.operation in QUANTIZED else "block"
    name = _RESIDUALS.get(options.operation)
    residual = beside.pop(name, False) if name in beside else False
    if not isinstance(residual, bool | str):
        raise ArgumentError(f"--with {name}={residual}; expected it alone, or an element type")
    if beside:
        raise ArgumentError(
            f"--with {next(iter(beside))}: {options.operation} is made with its usual operands; "
            f"leave this out"
        )
    return NORMS[options.operation](_Operands(options, maker, M, N, mode, residual))


def check_options_of_gemm(
    options: argparse.Namespace, what: str, *, but: tuple[str, ...] = ()
) -> None:
    """Raises ArgumentError where one of them, but these, is given to an operation that has none."""
    for name, plain in _OPTIONS_OF_GEMM.items():
        if name not in but and getattr(options, name) != plain:
            raise ArgumentError(
                f"--{name.replace('_', '-')} is {getattr(options, name)!r}; it is an option of "
                f"gemm, {what} has no such thing"
            )


class _Operands:
    """Random or poisoned ones, in the type of the problem or of the arithmetic."""

    def __init__(
        self,
        options: argparse.Namespace,
        maker: Maker,
        M: int,
        N: int,
        mode: str,
        residual: bool | str,
    ) -> None:
        """residual: Whether there is one, of this type or of another one."""
        self.M, self.N, self.mode, self._maker = M, N, mode, maker
        self._residual = residual
        self.element = dtype(options.dtype)
        self._out_element = options.out_dtype
        self.wide = _FLOAT64 if self.element is _FLOAT64 else _FLOAT32

    def read(self) -> Any:
        return self._maker.tensor((self.M, self.N), self.element, "t", fill=True)

    def written(self, element: Any = None) -> Any:
        """(M, N) of the type that is asked for; by default of this one, or that of the problem."""
        element = dtype(self._out_element or element or self.element)
        return self._maker.tensor((self.M, self.N), element, "t", fill=False)

    def residual(self) -> dict[str, Any]:
        """One with its sum, if it is asked for."""
        if self._residual is False:
            return {}
        return {"residual": self._further(fill=True), "residual_out": self._further(fill=False)}

    def dresidual(self) -> dict[str, Any]:
        """The gradient of the sum, if it is asked for."""
        return {} if self._residual is False else {"dresidual": self._further(fill=True)}

    def _further(self, *, fill: bool) -> Any:
        element = self.element if self._residual is True else dtype(self._residual)
        return self._maker.tensor((self.M, self.N), element, "t", fill=fill)

    def columns(self, *, fill: bool = True) -> Any:
        """(N,)"""
        return self._vector(self.N, self.element, fill)

    def statistic(self, *, fill: bool = False, size: int | None = None) -> Any:
        """(M,), or of another size."""
        return self._vector(self.M if size is None else size, self.wide, fill)

    def number(self) -> Any:
        """(), written."""
        return self.statistic(size=1).view(())

    def scale(self) -> Any:
        """Of what is quantised in the mode; that of mode tensor is read."""
        if self.mode == "tensor":
            return 0.5
        from kernel_api.fusions._store import WIDTHS

        columns = () if self.mode == "row" else (self.N // WIDTHS.get(self.mode, 1),)
        element = dtype("float8_e8m0fnu" if self.mode == "mx" else "float32")
        size = self.M * (columns[0] if columns else 1)
        return self._vector(size, element, fill=False).view(self.M, *columns)

    def _vector(self, size: int, element: Any, fill: bool) -> Any:
        return self._maker.tensor((1, size), element, "t", fill=fill)[0]


def _rmsnorm(made: _Operands) -> NormArguments:
    import kernel_api as ka

    x, out = made.read(), made.written()
    given = {"rstd": made.statistic(), **made.residual()}
    return ka.RmsNormArguments(x, out, made.columns(), **given)


def _layernorm(made: _Operands) -> NormArguments:
    import kernel_api as ka

    given = {"rstd": made.statistic(), "mean": made.statistic(), **made.residual()}
    x, out = made.read(), made.written()
    return ka.LayerNormArguments(x, out, made.columns(), bias=made.columns(), **given)


def _rmsnorm_backward(made: _Operands) -> NormArguments:
    import kernel_api as ka

    matrices = made.read(), made.read(), made.written()
    rstd = made.statistic(fill=True)
    given = {"dweight": made.columns(fill=False), **made.dresidual()}
    return ka.RmsNormBackwardArguments(*matrices, rstd, made.columns(), **given)


def _layernorm_backward(made: _Operands) -> NormArguments:
    import kernel_api as ka

    matrices = made.read(), made.read(), made.written()
    statistics = made.statistic(fill=True), made.statistic(fill=True)
    given = {name: made.columns(fill=False) for name in ("dweight", "dbias")} | made.dresidual()
    return ka.LayerNormBackwardArguments(*matrices, *statistics, made.columns(), **given)


def _rmsnorm_rht_amax(made: _Operands) -> NormArguments:
    import kernel_api as ka
    from kernel_api.arguments.norm import default_rows_per_block

    blocks = -(-made.M // default_rows_per_block(made.M))
    return ka.RmsNormArguments(
        made.read(),
        made.written(),
        made.columns(),
        hadamard=True,
        signs=made.statistic(fill=True, size=16),
        amax=made.statistic(size=blocks),
        global_amax=made.number(),
    )


def _quantized(made: _Operands, *, centred: bool) -> NormArguments:
    from kernel_api import fusions

    given = {"out": made.written("float8_e4m3fn"), "scale": made.scale(), "mode": made.mode}
    x, weight = made.read(), made.columns()
    given |= made.residual()
    if centred:
        return fusions.layernorm_quantize(x, **given, weight=weight, bias=made.columns())
    return fusions.rmsnorm_quantize(x, **given, weight=weight)


def _quantize(made: _Operands) -> Arguments:
    from kernel_api import fusions

    out, scale = made.written("float8_e4m3fn"), made.scale()
    return fusions.quantize(made.read(), out=out, scale=scale, mode=made.mode)


#: Operations of which ``--with mode=`` says what shares a scale.
QUANTIZED = ("quantize", "rmsnorm_quantize", "layernorm_quantize")
#: What ``--with`` may name of an operation, as it is or with an element type.
_RESIDUALS = {
    **dict.fromkeys(("rmsnorm", "layernorm", "rmsnorm_quantize", "layernorm_quantize"), "residual"),
    **dict.fromkeys(("rmsnorm_backward", "layernorm_backward"), "dresidual"),
}
#: By the name of the operation.
NORMS: dict[str, Callable[[_Operands], Arguments]] = {
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "rmsnorm_backward": _rmsnorm_backward,
    "layernorm_backward": _layernorm_backward,
    "rmsnorm_rht_amax": _rmsnorm_rht_amax,
    "rmsnorm_quantize": functools.partial(_quantized, centred=False),
    "layernorm_quantize": functools.partial(_quantized, centred=True),
    "quantize": _quantize,
}
