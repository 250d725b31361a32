"""What kernels of matrix products are judged by: results exactly, as torch computes them from the
operands' own types, and the error that is always allowed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue.tracing import RESULT
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata
from kernel_api.operands import Operand
from kernel_api.providers.reference.allowance import changes
from kernel_api.providers.reference.epilogue import evaluate, put, rounded, saturated
from kernel_api.providers.streams import on_stream
from kernel_api.space import Space
from kernel_api.status import Status
from kernel_api.verification import FACTOR


class ProductOracle:
    """Of some arguments. A subclass says what their products are.

    Values are those of the rows that are written, see ``Arguments.rows_written``.
    """

    def __init__(self, args: Any) -> None:
        self.args = args

    # What a subclass says ----------------------------------------------------------------

    def exact_product(self) -> Any:
        """The accumulator in float64, complex128 or int64."""
        raise NotImplementedError

    def float32_product(self) -> Any:
        """The accumulator as torch computes it."""
        raise NotImplementedError

    def rounding(self) -> Any:
        """What one rounding of the accumulator costs, or in float64 the bound on all: (..., M, 1).

        Per row i: u · ‖a_i‖ · max‖b_j‖, one rounding at the scale of the data; in float64 K times
        that, the bound of Higham, Accuracy and Stability of Numerical Algorithms, section 3.5
        (with the norms for |a|·|b|).
        """
        raise NotImplementedError

    def out_scale(self, wide: Any) -> Any:
        """Of a scaled ``out``, as it broadcasts."""
        raise NotImplementedError

    def out_before(self) -> Any:
        """What ``out`` holds, to be added to."""
        return self.args.out.tensor

    def evaluated(self, product: Any, *, wide: bool) -> dict[str, Any]:
        """Every output of the epilogue."""
        epilogue, double = self.args.epilogue, self.args.accumulator_type.bits == 64
        return evaluate(epilogue.graph, product, epilogue.operands, wide=wide, double=double)

    def shape_of(self, name: str, operand: Operand) -> tuple[int, ...]:
        """Extents of what is written of an output."""
        return operand.shape

    # What follows ------------------------------------------------------------------------

    def exact(self) -> dict[str, Any]:
        """What is stored, before it is rounded, in float64, complex128 or int64."""
        result = self.exact_product()
        if self.args.epilogue is not None:
            return self._fused(result, wide=True)
        return {"out": self._held(self._stored(result))}

    def same_dtype(self) -> dict[str, Any]:
        """Outputs as torch computes them, rounded once; integers that are no products of integers
        are not rounded."""
        args = self.args
        exact = args.accumulator_type.bits == 64 or not floating(args)
        if args.epilogue is None:
            if exact:
                return {"out": _overflowing(self.exact()["out"], args.out)}
            held = self._held(self._stored(self.float32_product()))
            return {"out": _as_stored(held, args.out)}
        product = self.exact_product() if exact else self.float32_product()
        found = self._fused(product, wide=False)
        return {name: _as_stored(values, args.outputs[name]) for name, values in found.items()}

    def allowance(self) -> dict[str, Any]:
        """Of a plain product: :meth:`rounding`.

        Of an epilogue's outputs: what they change by where the accumulator is off by as much as
        a plain product may be. Steps (a comparison, a cast) are allowed where that crosses them.
        """
        args = self.args
        if args.epilogue is not None:
            return self._fused_allowance()
        least = 0.5 if args.out.dtype.is_integer and not of_integers(args) else 0.0
        if not floating(args) or not args.writes_anything or args.out.dtype.kind == "bool":
            return {"out": self._everywhere(least)} if least else {}
        allowed = self.rounding()
        if "out" in args.scaled:
            allowed = allowed / self.out_scale(allowed.dtype).abs()
        allowed = allowed + least
        return {"out": allowed.expand(*self.shape_of("out", args.out)[:-1], 1)}

    def _stored(self, result: Any) -> Any:
        """In units of the scale of ``out``, and added to it where that is asked for."""
        if "out" in self.args.scaled:
            wide = result.dtype if result.is_floating_point() else torch.float64
            result = result / self.out_scale(wide)
        if "out" in self.args.accumulated:
            result = self.out_before().to(result.dtype) + result
        return result

    def _held(self, result: Any) -> Any:
        """Saturated where epilogues do; products of integers keep their low bits in integers."""
        to = self.args.out.dtype
        saturates = to.is_float or (to.is_integer and result.is_floating_point())
        return saturated(result, to) if saturates else result

    def _fused(self, product: Any, *, wide: bool) -> dict[str, Any]:
        """Every output of the epilogue, in the shape that it is stored with."""
        found = self.evaluated(product, wide=wide)
        found = {"out": self._stored(found.pop(RESULT)), **found}
        shaped = {}
        for name, operand in self.args.outputs.items():
            shape = self.shape_of(name, operand)
            values = saturated(found[name], operand.dtype).reshape(shape)
            shaped[name] = values.to(torch.float64) if wide else values
        return shaped

    def _everywhere(self, value: float) -> Any:
        """One for all elements, on the device of those."""
        return torch.full((), value, device=self.args.device)

    def _fused_allowance(self) -> dict[str, Any]:
        args = self.args
        outputs = {name: 0.0 if o.dtype.is_float else 0.5 for name, o in args.outputs.items()}
        if of_integers(args) or not args.K or not args.writes_anything:
            return {n: self._everywhere(least) for n, least in outputs.items() if least}
        product = self.exact_product()
        error = self.rounding()
        if args.accumulator_type.bits < 64 and floating(args):
            off = self.float32_product().double() - product
            off = torch.nan_to_num(off, posinf=0.0, neginf=0.0)
            error = error + FACTOR * (off.abs().max() if off.numel() else 0.0)
        exact = self._fused(product, wide=True)

        def evaluated(value: Any) -> dict[str, Any]:
            return self._fused(value, wide=True)

        return changes(product, error, exact, outputs, args.epilogue.graph, evaluated)


class ReferenceProduct(Kernel):
    """Products in float64 (int64 for integers), rounded once. Operands may carry any scale, and
    the arguments any epilogue."""

    devices = ("cpu", "cuda")
    any_epilogue = True
    space = Space()
    design = DesignMetadata

    oracle: ClassVar[type[ProductOracle]]

    def _supports(self, args: Any) -> Status:
        real_out = not args.out.dtype.torch.is_complex
        if real_out and (args.A.dtype.torch.is_complex or args.B.dtype.torch.is_complex):
            return Status.fail(
                f"out is {args.out.dtype}; a complex product needs a complex out",
                rule="element types",
                operand="out",
            )
        if args.epilogue is not None and args.A.dtype.torch.is_complex:
            return Status.fail(
                f"A is {args.A.dtype}; epilogues compute with real numbers",
                rule="element types",
                operand="A",
            )
        for name, operand in zip(args.operand_names, args.operands, strict=True):
            if operand.dtype.kind == "other" and not operand.dtype.name.startswith("complex"):
                return Status.fail(
                    f"{name} is {operand.dtype}, which torch cannot convert to float64",
                    rule="element types",
                    operand=name,
                )
        return Status.success()

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            found, rows = self.exact(args), args.rows_written()
            for name, values in found.items():
                written = args.outputs[name]
                to = written.dtype
                rounds = args.epilogue is not None or values.is_floating_point()
                rounds = rounds and not to.torch.is_complex
                values = rounded(values, to) if rounds else values.to(to.torch)
                self.store(written, rows.get(name, ...), values)

    @staticmethod
    def store(out: Operand, rows: Any, values: Any) -> None:
        put(out.tensor, rows, values)

    @classmethod
    def exact(cls, args: Any) -> dict[str, Any]:
        """The oracle of ``verify``, see :class:`ProductOracle`."""
        return cls.oracle(args).exact()

    @classmethod
    def same_dtype(cls, args: Any) -> dict[str, Any]:
        return cls.oracle(args).same_dtype()

    @classmethod
    def allowance(cls, args: Any) -> dict[str, Any]:
        return cls.oracle(args).allowance()


def floating(args: Any) -> bool:
    return all(operand.dtype.torch.is_floating_point for operand in (args.A, args.B))


def of_integers(args: Any) -> bool:
    """Whether the product is a whole number, which is computed exactly."""
    real = (operand.dtype.torch.is_floating_point for operand in (args.A, args.B))
    return not args.scaled and not any(real)


def _overflowing(values: Any, operand: Operand) -> Any:
    """As they are, but infinite where they are in the type of what is stored."""
    if not operand.dtype.is_float:
        return values
    stored = rounded(values, operand.dtype).double()
    return torch.where(torch.isinf(stored), stored, values)


def _as_stored(values: Any, operand: Operand) -> Any:
    return rounded(values, operand.dtype) if operand.dtype.is_float else values
