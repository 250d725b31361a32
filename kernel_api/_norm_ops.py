"""The one-call forms of norms, see :mod:`kernel_api.ops`: outputs allocated if absent, the best
kernel run."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, get_type_hints

from kernel_api import fusions
from kernel_api._forms import with_own_code
from kernel_api._lazy import module
from kernel_api._numbers import known_number, whole_number
from kernel_api._results import ResultsTypes
from kernel_api.arguments.norm import NormArguments, default_rows_per_block
from kernel_api.dtypes import dtype
from kernel_api.operands import Operand, becomes_node
from kernel_api.utils import is_read

__all__ = [
    "layernorm",
    "layernorm_backward",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_rht_amax",
]

_STATISTICS = ("rstd", "mean")
_OF_ROWS = ("out", "dx", "residual_out")


class NormForm:
    """A fusion whose outputs may be absent.

    Attributes:
        name: The fusion's.
        kind: Of the arguments that it makes.
        written: The output of x's shape, then the others.
        always: Those that are allocated if they are None; the others if they are True.
        matrices: Names of what is passed by place.
        defaults: Of what is passed by name; None without one.
    """

    def __init__(
        self,
        fusion: Callable[..., NormArguments],
        written: tuple[str, ...],
        always: tuple[str, ...] = (),
    ) -> None:
        self.fusion = fusion
        self.name: str = fusion.__name__
        self.kind: type[NormArguments] = get_type_hints(fusion)["return"]
        self.written = written
        self.always = (written[0], *always)
        self._results_types = ResultsTypes(self.name, written[0])
        self._results_types.make_all(written[1:])
        parameters = inspect.signature(fusion).parameters.values()
        self.matrices = tuple(
            one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        self.defaults = {
            one.name: None if one.default is inspect.Parameter.empty else one.default
            for one in parameters
            if one.name not in self.matrices
        }
        named = [one for one in self.signature.parameters.values() if one.name in self.defaults]
        self._required = {one.name for one in named if one.default is one.empty}
        self._type_of_first = f"{written[0]}_dtype"
        self._taken = {*self.defaults, self._type_of_first}

    @property
    def signature(self) -> inspect.Signature:
        """Of the fusion, with outputs that may be absent and a type for the first one."""
        found = inspect.signature(self.fusion)
        parameters = []
        for one in found.parameters.values():
            absent = one.name in self.always
            parameters.append(one.replace(default=None) if absent else one)
            if one.name == self.written[0]:
                parameters.append(one.replace(name=f"{one.name}_dtype", default=None))
        return found.replace(parameters=parameters, return_annotation=Any)

    def bound(self, matrices: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """What a call gives, by name; raises TypeError as a function of this signature does."""
        # No comparison of sets with keys, which older versions of torch's compiler cannot read.
        fits = len(matrices) == len(self.matrices) and all(one in self._taken for one in options)
        if fits and all(one in options for one in self._required):
            return {**dict(zip(self.matrices, matrices, strict=True)), **options}
        try:
            return dict(self.signature.bind(*matrices, **options).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None

    def completed(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with every output that is asked for."""
        x = tensor(options["x"])
        complete = {name: one for name, one in options.items() if name != self._type_of_first}
        for name in self.written:
            if complete.get(name) is False:
                complete[name] = None
        for name, element in self.elements(x, options).items():
            complete[name] = _allocated(name, x, element, options)
        return complete

    def elements(self, x: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Element types of the outputs that are asked for and not given: by True, or by theirs."""
        import torch

        from kernel_api._launches import check_type

        first, found = self.written[0], {}
        asked, given = options.get(self._type_of_first), options.get(first)
        if given is not None and asked is not None:
            check_type(given, asked, first)
        for name in self.written:
            value = options.get(name)
            if isinstance(value, torch.dtype):
                found[name] = value
            elif value is True or (value is None and name in self.always):
                is_asked = name == first and asked is not None
                like = options.get("residual") if name == "residual_out" else None
                usual = _usual(name, x.dtype if like is None else tensor(like).dtype)
                found[name] = dtype(asked).torch if is_asked else usual
        return found

    def check(self, options: dict[str, Any]) -> None:
        """Raise ArgumentError where the gradient of an output that is given would be lost."""
        from kernel_api._autograd import check_outputs

        check_outputs([(name, options.get(name)) for name in self.written])

    def results(self, options: dict[str, Any]) -> Any:
        """The first output, or all by name where there are several."""
        first, *others = (name for name in self.written if options.get(name) is not None)
        if not others:
            return options[first]
        found = self._results_types.of(tuple(others))
        return found(options[first], *[options[name] for name in others])


def tensor(x: Any) -> Any:
    """As torch has it."""
    import torch

    if not isinstance(x, torch.Tensor) or x.is_nested:  # of which the latter is refused
        return Operand(x, "x").tensor
    return x


def _usual(name: str, element: Any) -> Any:
    """Element type of an output of which nothing says it, of that of x, or of the residual."""
    import torch

    if name in _OF_ROWS:
        return element
    return torch.float64 if element is torch.float64 else torch.float32


def _allocated(name: str, x: Any, element: Any, options: dict[str, Any]) -> Any:
    if name in _OF_ROWS:
        return x.new_empty(x.shape, dtype=element)
    if name in _STATISTICS:
        return x.new_empty(x.shape[:-1], dtype=element)
    if name in ("dweight", "dbias"):
        return x.new_empty(x.shape[-1:], dtype=element)
    if name == "global_amax":
        return x.new_empty((), dtype=element)
    assert name == "amax", name
    rows = math.prod(x.shape[:-1])
    per_block = whole_number(known_number(options.get("rows_per_block")))
    if per_block is None or per_block <= 0:  # absent, or refused where the arguments are made
        per_block = default_rows_per_block(rows)
    return x.new_empty(-(-rows // per_block), dtype=element)


def _one_call(
    fusion: Callable[..., NormArguments], *written: str, always: tuple[str, ...] = ()
) -> Callable[..., Any]:
    form = NormForm(fusion, written, always)

    def run_or_trace(*matrices: Any, **options: Any) -> Any:
        seen = None if is_read() else _seen(form, matrices, options)
        if seen is not None and (found := seen.repeated()) is not NotImplemented:
            if True in [one.requires_grad for one in seen.tensors]:
                return _without_gradient(form.name, found, seen.tensors)
            return found
        given = form.bound(matrices, options)
        form.check(given)
        if becomes_node(given["x"]):
            from kernel_api import _norm_operators

            return _norm_operators.traced(form, given)
        complete = form.completed(given)
        run(form, complete, seen)
        return _without_gradient(form.name, form.results(complete), [*given.values()])

    call = functools.update_wrapper(with_own_code(run_or_trace), fusion)
    call.__module__ = "kernel_api.ops"
    call.__signature__ = form.signature  # type: ignore[attr-defined]
    FORMS.append(form)
    return call


def _without_gradient(name: str, results: Any, given: list[Any]) -> Any:
    from kernel_api._autograd import without_gradient

    return without_gradient(name, results, given)


def run_into(form: NormForm, complete: dict[str, Any]) -> None:
    """The best kernel on options with all outputs, or what is known of such calls."""
    options = dict(complete)
    seen = _seen(form, tuple([options.pop(name) for name in form.matrices]), options)
    if seen is None or seen.repeated() is NotImplemented:
        run(form, complete, seen)


def run(form: NormForm, complete: dict[str, Any], seen: Any) -> None:
    """The best kernel on options with all outputs, remembered for calls like one that is seen."""
    from kernel_api import _again

    args = form.fusion(**complete)
    if seen is None or seen.is_known:  # of which this one has memory that it shares
        _again.run(None, args, ())
        return
    launcher, taken = _again.launched(args)
    if launcher is None:
        return
    found = _remembered(form, complete, args, launcher, taken, seen.names)
    if found is not None:
        _again.keep(seen.key, found)


def _seen(form: NormForm, matrices: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The call, if it may look like another."""
    if "rows_per_block" in form.defaults:
        return None
    return module("_again").seen(form.name, form.matrices, matrices, options, form.written)


def _remembered(
    form: NormForm,
    complete: dict[str, Any],
    args: NormArguments,
    launcher: Any,
    taken: dict[str, Any],
    tensors: list[str],
) -> Any:
    """How calls are made that give tensors of these names; None where it cannot be told.

    Args:
        complete, args: Of a call that was made.
        launcher, taken: Of its kernel, and what that takes by name beside the operands.
    """
    from kernel_api import _again
    from kernel_api._made import maker

    outputs = [name for name in form.written if complete.get(name) is not None]
    given, made = ([n for n in outputs if (n in tensors) is there] for there in (True, False))
    beside: dict[str, Any] = {**form.defaults, **complete}
    numbers = {name: beside[name] for name in taken if name == "eps"}
    places = {name: n for n, name in enumerate((*tensors, *made, *numbers))}
    operands = {**dict(zip(args.operand_names, args.operands, strict=True)), **args.further}
    launched = []
    for name in (*args.operand_names, *taken):
        if name not in places:
            return None
        shape = None
        if name in operands:
            one, as_taken = complete[name], operands[name].tensor
            if one.shape != as_taken.shape:
                if not one.is_contiguous():
                    return None
                shape = tuple(as_taken.shape)
            if one.data_ptr() != as_taken.data_ptr():  # a copy
                return None
        launched.append((places[name], shape))
    count = len(args.operand_names)
    first, *others = [places[name] for name in outputs]
    kind = form._results_types.of(tuple(outputs[1:])) if others else None
    return _again.Known(
        launcher,
        [maker(complete[name]) for name in made],
        list(numbers.values()),
        launched[:count],
        launched[count:],
        _again.Given({name: complete[name] for name in tensors}, given) if given else None,
        operator.itemgetter(first) if kind is None else _results(kind, (first, *others)),
    )


def _results(kind: Callable[..., Any], places: tuple[int, ...]) -> Callable[[list[Any]], Any]:
    """What a call returns, of all that it holds."""
    return lambda held: kind(*[held[place] for place in places])


#: Every form, as it is made.
FORMS: list[NormForm] = []

rmsnorm = _one_call(fusions.rmsnorm, "out", "rstd", "residual_out")
layernorm = _one_call(fusions.layernorm, "out", "mean", "rstd", "residual_out")
rmsnorm_backward = _one_call(fusions.rmsnorm_backward, "dx", "dweight", "dbias")
layernorm_backward = _one_call(fusions.layernorm_backward, "dx", "dweight", "dbias")
rmsnorm_rht_amax = _one_call(
    fusions.rmsnorm_rht_amax, "out", "amax", "global_amax", always=("amax",)
)
