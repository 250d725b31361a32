"""Arguments of normalised rows, forward and backward.

x (M, N) has M rows of N columns. Statistics, and the sums over rows, are computed in float32, or
in float64 where x is.
"""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from kernel_api._numbers import real_number, whether, whole_number
from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.arguments.row import RowArguments
from kernel_api.epilogue.graph import HADAMARD_BLOCK
from kernel_api.epilogue.shape import Problem
from kernel_api.errors import ArgumentError, EpilogueError
from kernel_api.operands import Operand

_MOST_ROWS = 1 << 31  # of a block
_OF_SUMS = ("residual", "residual_out")

#: Blocks of rows that there should be, if ``rows_per_block`` is not given.
_MANY_BLOCKS = 148


class NormArguments(RowArguments):
    """What the norms share.

    Attributes:
        eps: What the mean of squares is enlarged by; a run-time value. Backward has none.
    """

    #: Modes of the further operands.
    further_modes: ClassVar[dict[str, str]] = {
        "weight": "N",
        "bias": "N",
        "rstd": "M",
        "mean": "M",
        "dweight": "N",
        "dbias": "N",
        "residual": "MN",
        "residual_out": "MN",
        "dresidual": "MN",
    }
    #: Operands that have the type of the arithmetic.
    statistics: ClassVar[tuple[str, ...]] = ("rstd", "mean")

    __slots__ = ("eps",)

    eps: float | None

    def _take(self, matrices: Mapping[str, Any], further: Mapping[str, Any]) -> None:
        """Keep the operands; before all else."""
        super()._take(matrices, further)
        self.eps = None

    @property
    def M(self) -> int:
        """Rows."""
        return self.x.shape[0]

    @property
    def N(self) -> int:
        """Columns; an epilogue may give ``out`` more or fewer."""
        return self.x.shape[1]

    def _numbers(self) -> dict[str, Any]:
        return {} if self.eps is None else {"eps": self.eps}

    @property
    def key(self) -> tuple[Hashable, ...]:
        if self._key is None:
            self._key = (*super().key, self._numbers().get("rows_per_block"))
        return self._key

    # Checks ------------------------------------------------------------------------------

    def _check(self, *, out_columns: bool = True) -> None:
        """All that is the same for all norms.

        Args:
            out_columns: Whether the matrix that is written has the columns of x.
        """
        written = self.output_names[0]
        for name, operand in self.named_operands.items():
            if operand.dtype.kind != "float" and not self._is_of_epilogue(name):
                raise ArgumentError(f"{name} is {operand.dtype}; expected a floating type")
        for name in self.operand_names:
            operand = getattr(self, name)
            if operand.rank != 2:
                raise ArgumentError(
                    f"{name} has shape {operand.shape}; expected (M, N): see leading modes as "
                    f"one, {name}.view(-1, N)"
                )
            compared = 2 if out_columns or name != written else 1
            if operand.shape[:compared] != self.x.shape[:compared]:
                raise ArgumentError(f"{name} has (M, N) = {operand.shape} but x has {self.x.shape}")
        if not self.N:
            raise ArgumentError(f"x has shape {self.x.shape}; the mean of no columns is undefined")
        self._check_further({"M": self.M, "N": self.N})
        self._check_devices()
        self._check_outputs()

    def _is_of_epilogue(self, name: str) -> bool:
        """Whether that operand has the type that an epilogue reads or writes."""
        written = self.output_names[0]
        return self.epilogue is not None and (name == written or name in self.epilogue.tensors)

    def _check_further(self, extents: Mapping[str, int]) -> None:
        for name, operand in self.further.items():
            modes = self.further_modes[name]
            expected = tuple(extents[mode] for mode in modes)
            if operand.shape != expected:
                raise ArgumentError(
                    f"{name} has shape {operand.shape}; expected ({', '.join(modes)}) = {expected}"
                )
            if name in self.statistics and operand.dtype is not self.accumulator_type:
                raise ArgumentError(
                    f"{name} is {operand.dtype}; expected {self.accumulator_type}, which it is "
                    f"computed in for x of {self.x.dtype}"
                )

    def __repr__(self) -> str:
        types = " -> ".join(getattr(self, name).dtype.short for name in ("x", self.output_names[0]))
        beside = "".join(f", {name} {o.dtype.short}" for name, o in self.further.items())
        options = "".join(f", {name}" for name, on in self._options_by_name().items() if on)
        epilogue = "" if self.epilogue is None else f", {self.epilogue.graph}"
        return (
            f"{type(self).__name__}({self.M}x{self.N} (M x N), {types}{beside}{options}{epilogue}, "
            f"on {self.device})"
        )


class _ForwardArguments(NormArguments):
    """out = what is computed of the rows of x, or of their sum with a residual's, or an epilogue of
    that."""

    operand_names: ClassVar[tuple[str, ...]] = ("x", "out")
    modes: ClassVar[dict[str, str]] = {"x": "MN", "out": "MN"}

    __slots__ = ("bias", "out", "residual", "residual_out", "rstd", "weight", "x")

    out: Operand
    weight: Operand | None
    bias: Operand | None
    rstd: Operand | None
    residual: Operand | None
    residual_out: Operand | None

    def _finish(self, eps: Any, epilogue: Any) -> None:
        """Check everything, and join the epilogue."""
        is_number = isinstance(eps, numbers.Real) and not isinstance(eps, bool)
        self.eps = real_number("eps", eps) if is_number else None
        if self.eps is None or not self.eps >= 0:
            raise ArgumentError(f"eps is {eps!r}; expected a number that is not negative")
        if epilogue is not None:
            operands = getattr(epilogue, "operands", {})
            free = _OF_SUMS if self.residual is None else ()
            taken = [n for n in self._own_names() if n in operands and n not in free]
            if taken:
                raise EpilogueError(
                    f"an operand of the epilogue is called {taken[0]}, which is taken by the "
                    f"arguments; choose another name"
                )
            if self.x.rank == 2:
                self._join_epilogue(epilogue, Problem(None, self.M, self.N), self.out)
        self._check(out_columns=epilogue is None)

    def _check_further(self, extents: Mapping[str, int]) -> None:
        super()._check_further(extents)
        residual, written = self.residual, self.residual_out
        if residual is not None and (residual.dtype.bits == 64) != (self.x.dtype.bits == 64):
            raise ArgumentError(
                f"residual is {residual.dtype} and x is {self.x.dtype}; expected both to be "
                f"float64, or neither"
            )
        if written is None:
            return
        if residual is None:
            raise ArgumentError("residual_out is given and residual is not; it is x + residual")
        if written.dtype is not residual.dtype:
            raise ArgumentError(
                f"residual_out is {written.dtype}; expected {residual.dtype}, the type of residual"
            )

    def _own_names(self) -> tuple[str, ...]:
        # An epilogue may have the names of what is not there.
        taken = () if self.epilogue is None else self.epilogue.operands
        free = [name for name in _OF_SUMS if self.residual is None and name in taken]
        return tuple(name for name in super()._own_names() if name not in free)

    @property
    def in_place(self) -> tuple[str, ...]:
        residual, written = self.residual, self.residual_out
        if residual is None or written is None:
            return ()
        return ("residual",) if self._is_in_place(written, residual) else ()

    @property
    def overwriting(self) -> tuple[str, ...]:
        return ("residual_out",) if self.in_place else ()

    def _is_in_place(self, out: Operand, operand: Operand) -> bool:
        """Who writes an element of the sum has read it before, and nobody else does."""
        if out is not self.residual_out or operand is not self.residual:
            return super()._is_in_place(out, operand)
        strides = (_strides(out), _strides(operand))
        return 0 != out.address == operand.address and strides[0] == strides[1]


def _strides(operand: Operand) -> list[int]:
    """Those that say where elements are."""
    return [s for s, n in zip(operand.stride, operand.shape, strict=True) if n > 1]


class RmsNormArguments(_ForwardArguments):
    """out = x · rstd · weight + bias with rstd = 1 / √(mean of x² + eps), per row.

    Args:
        x: (M, N).
        out: (M, N); written. May not share memory with an operand.
        weight: (N,).
        bias: (N,).
        eps: What keeps a row of zeros finite.
        rstd: (M,), written: what a backward pass needs.
        mean: No operand of this norm; see :class:`LayerNormArguments`.
        residual: (M, N) of any floating type, float64 where x is: x + residual, rounded to it, is
            normalised in place of x.
        residual_out: (M, N), written: that sum. May be residual itself.
        hadamard: Whether every 16 columns of the result are then multiplied with the Sylvester
            matrix H16 / 4, which is orthonormal.
        signs: (16,); the columns of a block are multiplied with them before H16: a randomised
            Hadamard transform.
        amax: (ceil(M / rows_per_block),), written: the largest magnitude in each block of rows,
            before values are rounded; NaN if there is one.
        global_amax: (), written: the same over all rows; 0 if there is none.
        rows_per_block: By default 8, 4 or 2: the largest that gives 148 blocks, or 2.
        epilogue: A function of the result, in place of ``hadamard``, ``amax``, ``global_amax``.

    Any strides are taken. Kernels may ask for more: ``explain`` tells.

    Raises:
        ArgumentError: shapes, types, devices or memory contradict each other.
        EpilogueError: the epilogue cannot be traced, or its operands do not fit.
    """

    kind = "rmsnorm"
    further_names: ClassVar[tuple[str, ...]] = (
        "weight",
        "bias",
        "rstd",
        "signs",
        "amax",
        "global_amax",
        "residual",
        "residual_out",
    )
    further_modes: ClassVar[dict[str, str]] = {
        **NormArguments.further_modes,
        "signs": "H",
        "amax": "B",
        "global_amax": "",
    }
    statistics: ClassVar[tuple[str, ...]] = ("rstd", "amax", "global_amax")
    output_names: ClassVar[tuple[str, ...]] = (
        "out",
        "rstd",
        "amax",
        "global_amax",
        "residual_out",
    )

    __slots__ = ("amax", "global_amax", "hadamard", "rows_per_block", "signs")

    signs: Operand | None
    amax: Operand | None
    global_amax: Operand | None
    hadamard: bool
    rows_per_block: int

    def __init__(
        self,
        x: Any,
        out: Any,
        weight: Any = None,
        *,
        bias: Any = None,
        eps: float = 1e-6,
        rstd: Any = None,
        mean: Any = None,
        hadamard: bool = False,
        signs: Any = None,
        amax: Any = None,
        global_amax: Any = None,
        rows_per_block: int | None = None,
        residual: Any = None,
        residual_out: Any = None,
        epilogue: EpilogueArguments | None = None,
    ) -> None:
        if mean is not None:
            raise ArgumentError(
                "mean is given; an RMS norm subtracts none, LayerNormArguments writes it"
            )
        further = {"weight": weight, "bias": bias, "rstd": rstd}
        maxima = {"amax": amax, "global_amax": global_amax}
        sums = {"residual": residual, "residual_out": residual_out}
        self._take({"x": x, "out": out}, {**further, "signs": signs, **maxima, **sums})
        self.hadamard = whether("hadamard", hadamard)
        self._check_transform(epilogue)
        self.rows_per_block = self._rows_per_block(rows_per_block)
        self._finish(eps, epilogue)

    @property
    def finds_maxima(self) -> bool:
        return self.amax is not None or self.global_amax is not None

    def _check_transform(self, epilogue: Any) -> None:
        if self.signs is not None and not self.hadamard:
            raise ArgumentError("signs are given and hadamard is False; they are a part of it")
        if self.hadamard and self.x.rank == 2 and self.N % HADAMARD_BLOCK:
            raise ArgumentError(
                f"x has N = {self.N}; a Hadamard transform takes {HADAMARD_BLOCK} columns at a "
                f"time, so N must be a multiple"
            )
        if epilogue is not None and (self.hadamard or self.finds_maxima):
            raise ArgumentError(
                "epilogue is given and so is one of hadamard, amax, global_amax; write them in "
                "epilogue"
            )

    def _rows_per_block(self, given: Any) -> int:
        if given is None:
            rows = self.x.shape[0] if self.x.rank else 0
            return default_rows_per_block(rows)
        found = whole_number(given)
        if found is None or not 1 <= found < _MOST_ROWS:
            raise ArgumentError(f"rows_per_block is {given!r}; expected a number of rows")
        return found

    def _check_further(self, extents: Mapping[str, int]) -> None:
        blocks = -(-self.M // self.rows_per_block)
        super()._check_further({**extents, "H": HADAMARD_BLOCK, "B": blocks})

    def _own_names(self) -> tuple[str, ...]:
        # Without what an epilogue replaces, which may have these names.
        names = super()._own_names()
        replaced = ("signs", "amax", "global_amax")
        used = self.hadamard or self.finds_maxima
        return names if used else tuple(name for name in names if name not in replaced)

    def _numbers(self) -> dict[str, Any]:
        found = super()._numbers()
        return {**found, "rows_per_block": self.rows_per_block} if self.finds_maxima else found

    def _options_by_name(self) -> dict[str, Any]:
        return {"hadamard": self.hadamard}


def default_rows_per_block(M: int) -> int:
    """The largest of 8, 4 and 2 that gives 148 blocks of M rows; 2 if none does."""
    return next((rows for rows in (8, 4) if -(-M // rows) >= _MANY_BLOCKS), 2)


class LayerNormArguments(_ForwardArguments):
    """out = (x − mean) · rstd · weight + bias with rstd = 1 / √(variance + eps), per row; the
    variance is the mean of (x − mean)².

    Args:
        x: (M, N).
        out: (M, N); written. May not share memory with an operand.
        weight: (N,).
        bias: (N,).
        eps: What keeps a row of equal values finite. :func:`~kernel_api.fusions.layernorm`, ops and
            nn have torch's 1e-5 by default.
        rstd: (M,), written: what a backward pass needs.
        mean: (M,), written: the same.
        residual: (M, N) of any floating type, float64 where x is: x + residual, rounded to it, is
            normalised in place of x.
        residual_out: (M, N), written: that sum. May be residual itself.
        epilogue: A function of the result.

    Any strides are taken. Kernels may ask for more: ``explain`` tells.

    Raises:
        ArgumentError: shapes, types, devices or memory contradict each other.
        EpilogueError: the epilogue cannot be traced, or its operands do not fit.
    """

    kind = "layernorm"
    further_names: ClassVar[tuple[str, ...]] = (
        "weight",
        "bias",
        "rstd",
        "mean",
        "residual",
        "residual_out",
    )
    output_names: ClassVar[tuple[str, ...]] = ("out", "rstd", "mean", "residual_out")

    __slots__ = ("mean",)

    mean: Operand | None

    def __init__(
        self,
        x: Any,
        out: Any,
        weight: Any = None,
        *,
        bias: Any = None,
        eps: float = 1e-6,
        rstd: Any = None,
        mean: Any = None,
        residual: Any = None,
        residual_out: Any = None,
        epilogue: EpilogueArguments | None = None,
    ) -> None:
        further = {"weight": weight, "bias": bias, "rstd": rstd, "mean": mean}
        sums = {"residual": residual, "residual_out": residual_out}
        self._take({"x": x, "out": out}, {**further, **sums})
        self._finish(eps, epilogue)


class _BackwardArguments(NormArguments):
    """The gradient dx of what a norm has computed of x; dy is that of its result."""

    operand_names: ClassVar[tuple[str, ...]] = ("dy", "x", "dx")
    output_names: ClassVar[tuple[str, ...]] = ("dx", "dweight", "dbias")
    modes: ClassVar[dict[str, str]] = {"dy": "MN", "x": "MN", "dx": "MN"}

    __slots__ = ("dbias", "dresidual", "dweight", "dx", "dy", "rstd", "weight", "x")

    dy: Operand
    dx: Operand
    rstd: Operand
    weight: Operand | None
    dweight: Operand | None
    dbias: Operand | None
    dresidual: Operand | None

    def _require(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                raise ArgumentError(
                    f"{name} is None; expected the (M,) that the forward pass wrote"
                )


class RmsNormBackwardArguments(_BackwardArguments):
    """With x̂ = x · rstd and g = dy · weight::

        dx      = rstd · (g − x̂ · mean of g · x̂) + dresidual
        dweight = Σ over rows of dy · x̂
        dbias   = Σ over rows of dy

    Args:
        dy: (M, N), the gradient of the result.
        x: (M, N).
        dx: (M, N); written. May not share memory with an operand.
        rstd: (M,), as the forward pass wrote it.
        weight: (N,).
        dweight: (N,), written.
        dbias: (N,), written.
        dresidual: (M, N) of any floating type, the gradient that x has from elsewhere: of
            ``residual_out``, where x is that sum, whose terms both have dx.

    Any strides are taken. Kernels may ask for more: ``explain`` tells.

    Raises ArgumentError: shapes, types, devices or memory contradict each other.
    """

    kind = "rmsnorm_backward"
    further_names: ClassVar[tuple[str, ...]] = (
        "rstd",
        "weight",
        "dweight",
        "dbias",
        "dresidual",
    )

    __slots__ = ()

    def __init__(
        self,
        dy: Any,
        x: Any,
        dx: Any,
        rstd: Any,
        weight: Any = None,
        *,
        dweight: Any = None,
        dbias: Any = None,
        dresidual: Any = None,
    ) -> None:
        further = {"rstd": rstd, "weight": weight, "dweight": dweight, "dbias": dbias}
        further["dresidual"] = dresidual
        self._take({"dy": dy, "x": x, "dx": dx}, further)
        self._require("rstd")
        self._check()


class LayerNormBackwardArguments(_BackwardArguments):
    """With x̂ = (x − mean) · rstd and g = dy · weight::

        dx      = rstd · (g − x̂ · mean of g · x̂ − mean of g) + dresidual
        dweight = Σ over rows of dy · x̂
        dbias   = Σ over rows of dy

    Args:
        dy: (M, N), the gradient of the result.
        x: (M, N).
        dx: (M, N); written. May not share memory with an operand.
        mean: (M,), as the forward pass wrote it.
        rstd: (M,), as the forward pass wrote it.
        weight: (N,).
        dweight: (N,), written.
        dbias: (N,), written.
        dresidual: (M, N) of any floating type, the gradient that x has from elsewhere: of
            ``residual_out``, where x is that sum, whose terms both have dx.

    Any strides are taken. Kernels may ask for more: ``explain`` tells.

    Raises ArgumentError: shapes, types, devices or memory contradict each other.
    """

    kind = "layernorm_backward"
    further_names: ClassVar[tuple[str, ...]] = (
        "mean",
        "rstd",
        "weight",
        "dweight",
        "dbias",
        "dresidual",
    )

    __slots__ = ("mean",)

    mean: Operand

    def __init__(
        self,
        dy: Any,
        x: Any,
        dx: Any,
        mean: Any,
        rstd: Any,
        weight: Any = None,
        *,
        dweight: Any = None,
        dbias: Any = None,
        dresidual: Any = None,
    ) -> None:
        further = {"mean": mean, "rstd": rstd, "weight": weight}
        further |= {"dweight": dweight, "dbias": dbias, "dresidual": dresidual}
        self._take({"dy": dy, "x": x, "dx": dx}, further)
        self._require("mean", "rstd")
        self._check()
