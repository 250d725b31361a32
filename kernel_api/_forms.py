"""How a fusion is called in one call: which outputs are allocated, and what comes back."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from kernel_api._results import ResultsTypes
from kernel_api.arguments.scaled import BLOCK
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.fusions._shared import matrices
from kernel_api.fusions._store import MX_BLOCK
from kernel_api.operands import Operand, as_torch, require_tensor

Fusion = Callable[..., Any]

#: Options that are numbers, or tensors of one number: known at run time.
FACTORS = frozenset(("alpha", "beta", "limit", "offset", "p", "scale", "seed"))


_SCALE = "scale"
#: Type of ``out`` where it is stored in units of scales, and nothing says another.
_QUANTIZED = "float8_e4m3fn"


class Form:
    """A fusion whose outputs may be absent.

    Attributes:
        name: The fusion's.
        always: Outputs beside ``out`` that are allocated if they are None or True.
        outputs: All beside ``out``; the others are allocated if they are True.
        width: Columns of ``out`` in units of N.
        element: Type of ``out``; None: see :func:`product_type`.
    """

    #: Tensors that arguments have behind A, B and out; they stand among the options.
    further: tuple[str, ...] = ()

    def __init__(
        self,
        fusion: Fusion,
        optional: tuple[str, ...] = (),
        always: tuple[str, ...] = (),
        width: Fraction | int = 1,
        element: str | None = None,
    ) -> None:
        self.name: str = fusion.__name__
        self.fusion = fusion
        self.always, self.outputs = always, (*always, *optional)
        # Two ints, not a fraction: to torch's compiler an int may be a symbol, which is none.
        self.columns_of, self.element = Fraction(width).as_integer_ratio(), element
        self.results_types = ResultsTypes(self.name, "out")

    @property
    def signature(self) -> inspect.Signature:
        """Of the fusion, with outputs that may be absent and a type for ``out``."""
        found = inspect.signature(self.fusion)
        parameters = []
        for one in found.parameters.values():
            absent = one.name == "out" or one.name in self.always
            parameters.append(one.replace(default=None) if absent else one)
            if one.name == "out":
                parameters.append(one.replace(name="out_dtype", default=None))
        return found.replace(parameters=parameters, return_annotation=Any)

    def option_of(self, operand: str) -> str:
        """The option that an operand of the epilogue is made of."""
        return operand

    def operands(self, A: Any, B: Any) -> tuple[Operand, Operand]:
        """A and B as the fusion takes them; raises ArgumentError as that does."""
        return matrices(A, B)

    def completed(
        self, A: Any, B: Any, out: Any, out_dtype: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """``out`` and the options with every output that is asked for. A is a tensor, B has a
        shape and an element type."""
        if not (A.shape and B.shape):
            name = "B" if A.shape else "A"
            raise ArgumentError(f"{name} has shape (); expected a matrix, or several")
        complete, N = dict(options), B.shape[-1]
        if out is not None:
            self.require_out(out)
            if not isinstance(out, (list, tuple)) and not hasattr(out, "shape"):
                out = as_torch(out, "out")
        else:
            element = out_dtype
            if element is None:
                element = self.element_of(options) or product_type(A.dtype, torch_type(B.dtype))
            out = empty(self.out_shape(A, B, options), torch_type(element), A)
        for name in self.outputs:
            given = options.get(name)
            if given is True or (given is None and name in self.always):
                complete[name] = self.allocated(name, A, N, out, options)
            elif given is False:
                complete[name] = None
        return out, complete

    def element_of(self, options: dict[str, Any]) -> str | None:
        """Type of ``out`` for these options; None: see :func:`product_type`."""
        in_units = _SCALE in self.written(options) and _SCALE not in self.always
        return _QUANTIZED if in_units else self.element

    def require_out(self, out: Any) -> None:
        """Raise ArgumentError for an ``out`` of a kind that the fusion does not take."""
        require_tensor(out, "out")
        if not len(getattr(out, "shape", (1,))):
            raise ArgumentError("out has shape (); expected a matrix, or several")

    def columns(self, N: int) -> int:
        """Of ``out``."""
        numerator, denominator = self.columns_of
        return N * numerator // denominator

    def out_shape(self, A: Any, B: Any, options: dict[str, Any]) -> tuple[int, ...]:
        return (*A.shape[:-1], self.columns(B.shape[-1]))

    def allocated(self, name: str, A: Any, N: int, out: Any, options: dict[str, Any]) -> Any:
        """An output beside ``out``; where its operation only reads what has that name, that."""
        import torch

        element = torch.float64 if A.dtype is torch.float64 else torch.float32
        if name == "preactivation":
            return empty((*A.shape[:-1], N), self.kept_type(out, options), A)
        if name == "amax":
            return empty((), element, A)
        if name == "dprob":
            return empty(A.shape[:-1], element, A)
        if name == "dbias":
            return empty((*A.shape[:-2], out.shape[-1]), element, A)
        assert name == _SCALE, name
        rows = out.shape[:-1]
        if (mode := self._mode(options)) == "row":
            return empty(rows, torch.float32, A)
        if mode == "block":
            return empty((*rows, out.shape[-1] // BLOCK), torch.float32, A)
        blocks = (*rows, N // MX_BLOCK)
        return empty(blocks, torch.float8_e8m0fnu, A) if mode == "mx" else options.get(name)

    def kept_type(self, out: Any, options: dict[str, Any]) -> Any:
        """Of a pre-activation: that of ``out``, unless this is in units of scales."""
        import torch

        in_units = self.element_of(options) == _QUANTIZED
        return torch.bfloat16 if in_units else torch_type(out.dtype)

    def _mode(self, options: dict[str, Any]) -> Any:
        """How ``out`` is quantised; where it need not be, in blocks."""
        return options.get("mode", "tensor") if _SCALE in self.always else "block"

    def written(self, options: dict[str, Any]) -> tuple[str, ...]:
        """The outputs beside ``out``, of options that are complete, or as a call has them."""
        reads = (_SCALE,) if self._mode(options) == "tensor" else ()
        given = [(name, options.get(name)) for name in self.outputs if name not in reads]
        return tuple([name for name, one in given if one is not None and one is not False])

    def given(self, out: Any, options: dict[str, Any]) -> list[tuple[str, Any]]:
        """The outputs that a call is given or asks for, with their names."""
        return [("out", out), *((name, options[name]) for name in self.written(options))]

    def results(self, out: Any, options: dict[str, Any]) -> Any:
        """``out``, or all outputs by name where there are several."""
        written = self.written(options)
        if not written:
            return out
        return self.results_types.of(written)(out, *[options[name] for name in written])

    def results_of(self, made: list[Any], options: dict[str, Any]) -> Any:
        """The same of outputs that were all made for a call with these options."""
        if len(made) == 1:
            return made[0]
        usual = {name: True for name in self.always if options.get(name) is None}
        return self.results_types.of(self.written({**options, **usual}))(*made)


def product_type(A: Any, B: Any) -> Any:
    """:func:`out_type` of the elements of A; of those of B where these alone are no whole numbers,
    which would round the products."""
    return out_type(B if _is_whole(A) and not _is_whole(B) else A)


def _is_whole(element: Any) -> bool:
    return not (element.is_floating_point or element.is_complex)


def out_type(element: Any, *, scaled: bool = False) -> Any:
    """That of products of such elements: 8 bits hold hardly any.

    Args:
        scaled: Whether they are in units of a scale, so that whole numbers hold hardly any either.
    """
    import torch

    if scaled and _is_whole(element):
        return torch.bfloat16 if element.itemsize == 1 else torch.float32
    if element.itemsize > 1:
        return element
    return torch.bfloat16 if element.is_floating_point else torch.int32


def torch_type(element: Any) -> Any:
    import torch

    return element if isinstance(element, torch.dtype) else dtype(element).torch


def empty(shape: tuple[int, ...], element: Any, like: Any) -> Any:
    return like.new_empty(shape, dtype=element)


def with_own_code(call: Any) -> Callable[..., Any]:
    """The function, with a code object that no other form has: torch compiles one so often, and no
    more (``torch._dynamo.config.recompile_limit``)."""
    own = types.FunctionType(
        call.__code__.replace(),
        call.__globals__,
        call.__name__,
        call.__defaults__,
        call.__closure__,
    )
    own.__kwdefaults__ = call.__kwdefaults__
    return own
