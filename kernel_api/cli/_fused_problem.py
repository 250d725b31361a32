"""Operands of fused products, made from the options that describe a problem."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api._forms import Form
    from kernel_api.arguments import GemmArguments
    from kernel_api.cli._problem import Maker

#: Products with an epilogue: the other names of :mod:`kernel_api.fusions` that are no norms.
FUSED = (
    "gemm_bias_activation", "gemm_residual", "gemm_amax", "gemm_glu", "gemm_swiglu", "gemm_geglu",
    "gemm_reglu", "gemm_dglu", "gemm_dswiglu", "gemm_recompute_dglu", "gemm_srelu", "gemm_dsrelu",
    "gemm_dactivation", "gemm_recompute_dsrelu", "gemm_recompute_dactivation", "gemm_rope",
    "gemm_quantize", "gemm_dropout",
)  # fmt: skip

#: What is known at run time, and may be any number; with its value where one has to be given.
_NUMBERS = {"p": 0.5, "seed": 0, "offset": 0, "scale": 1.0}

_BFLOAT16, _FLOAT32, _FLOAT64 = dtype("bfloat16"), dtype("float32"), dtype("float64")


def beside(text: str) -> tuple[str, Any]:
    """``NAME`` or ``NAME=VALUE``: what a fusion takes beside A, B and out."""
    name, _, value = text.partition("=")
    return name.strip().replace("-", "_"), _value(value.strip() or "true")


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def option_names() -> tuple[str, ...]:
    """Everything that a fusion of the catalogue takes beside A, B and out."""
    from kernel_api.ops import FORMS, GROUPED_FORMS

    return tuple(sorted({n for form, _ in (*FORMS, *GROUPED_FORMS) for n in names_of(form)}))


def names_of(form: Form) -> list[str]:
    """What a fusion takes beside A, B and out."""
    import inspect

    own = {"A", "B", "out", "offsets", "epilogue"}
    return [name for name in inspect.signature(form.fusion).parameters if name not in own]


def fused_arguments(
    options: argparse.Namespace, maker: Maker, matrices: tuple[Any, Any], letter: str
) -> GemmArguments:
    """The operation that the options name.

    Args:
        matrices: A and B, which may carry scales.
        letter: Layout of out.

    Raises:
        ArgumentError: the options contradict each other, or name what the operation does not take.
    """
    from kernel_api.ops import FORMS

    form = next(form for form, _ in FORMS if form.name == options.operation)
    args: GemmArguments = Operands(form, options, maker, matrices).arguments(letter)
    return args


class Operands:
    """Those beside A and B, random or poisoned, by name.

    Raises:
        ArgumentError: there are options that only a product without an epilogue takes.
    """

    def __init__(
        self,
        form: Form,
        options: argparse.Namespace,
        maker: Maker,
        matrices: tuple[Any, Any],
    ) -> None:
        for name in ("accumulator", "fp32_precision"):
            if getattr(options, name) is not None:
                raise ArgumentError(
                    f"--{name.replace('_', '-')} is {getattr(options, name)!r}; only a gemm "
                    f"without an epilogue takes it, leave it out"
                )
        self.form, self.options, self.maker, self.matrices = form, options, maker, matrices
        given = {name: value for name, value in options.beside or () if value is not False}
        self.given: dict[str, Any] = given
        A, B = matrices
        self.M, self.N = A.shape[-2], B.shape[-1]
        element = dtype(options.dtype)
        self.out_element = dtype(options.out_dtype or form.element_of(given) or element)
        self.wide = _FLOAT64 if element is _FLOAT64 else _FLOAT32
        # Nobody keeps a bias in 8 bits.
        fine = (one for one in (element, self.out_element) if one.bits >= 16)
        self.element = next(fine, _BFLOAT16)

    def arguments(self, letter: str) -> Any:
        """Of the operation, with out in this layout; raises ArgumentError for options that it does
        not take."""
        form = self.form
        names = names_of(form)
        for name in self.given:
            if name not in names:
                raise ArgumentError(
                    f"{form.name}, --with: there is no {name}; there are {', '.join(names)}"
                )
        A, B = (getattr(one, "tensor", one) for one in self.matrices)
        try:
            out, complete = form.completed(A, B, self.out(letter), None, self.read())
            return form.fusion(*self.matrices, out=out, **complete)
        except TypeError as error:  # a name that the fusion needs
            raise ArgumentError(f"{form.name}, --with: {error}") from error

    @property
    def columns(self) -> int:
        """Of out."""
        return self.form.columns(self.N)

    def out(self, letter: str) -> Any:
        return self.maker.tensor((self.M, self.columns), self.out_element, letter, fill=False)

    def read(self) -> dict[str, Any]:
        """What the fusion takes: what the options give, and what it needs beside that."""
        named = {n: self.operand(n) if one is True else one for n, one in self.given.items()}
        return {**self._required(), **named}

    def _required(self) -> dict[str, Any]:
        import inspect

        parameters = inspect.signature(self.form.fusion).parameters.values()
        names = [one.name for one in parameters if one.default is one.empty]
        absent = [name for name in names if name not in ("A", "B", "out", *self.given)]
        found = {n: self.operand(n) for n in absent if n not in self.form.always or n == "scale"}
        return {name: value for name, value in found.items() if value is not True}

    def operand(self, name: str) -> Any:
        """A tensor or a number; True for what is allocated later, or is neither."""
        M, N = self.M, self.N
        if name == "scale" and name in self.form.outputs and name not in self.form.always:
            return True
        if name in _NUMBERS:
            mode = self.given.get("mode", "tensor")
            return True if name == "scale" and mode != "tensor" else _NUMBERS[name]
        if name == "preactivation" and name not in self.form.outputs:
            return self._matrix(M, self.columns)
        if name == "upstream":
            return self._matrix(M, N // 2 if "glu" in self.form.name else N)
        if name in ("cos", "sin"):
            return self._matrix(M, self._angles(), self.wide)
        if name == "C":
            return self._matrix(M, N)
        if name == "bias":
            return self._matrix(1, N)[..., 0, :]
        if name == "prob":
            return self._matrix(1, M, self.wide)[..., 0, :]
        return True

    def _angles(self) -> int:
        """Pairs of columns that are rotated in each head."""
        from kernel_api.fusions._shared import whole

        if "head_dim" not in self.given:
            raise ArgumentError(
                f"{self.form.name} takes head_dim, the columns of a head; it is not given, such as "
                f"head_dim=128"
            )
        head_dim, start = (whole(n, self.given.get(n, 0)) for n in ("head_dim", "start"))
        turned = whole("width", self.given.get("width", head_dim - start))
        return max(turned, 0) // 2

    def _matrix(self, rows: int, columns: int, element: Any = None) -> Any:
        return self.maker.tensor((rows, columns), element or self.element, "t", fill=True)
