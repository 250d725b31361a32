"""The one-call forms of norms, see :mod:`kernel_api.ops`: outputs allocated if absent, the best
kernel run."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, get_type_hints

from kernel_api import fusions
from kernel_api._numbers import known_number, whole_number
from kernel_api._results import ResultsTypes
from kernel_api.arguments.norm import NormArguments, default_rows_per_block
from kernel_api.dtypes import dtype
from kernel_api.operands import Operand, becomes_node

__all__ = [
    "layernorm",
    "layernorm_backward",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_rht_amax",
]

_STATISTICS = ("rstd", "mean")


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
        self._taken = {*self.defaults, f"{written[0]}_dtype"}

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
        fits = len(matrices) == len(self.matrices) and options.keys() <= self._taken
        if fits and options.keys() >= self._required:
            return {**dict(zip(self.matrices, matrices, strict=True)), **options}
        try:
            return dict(self.signature.bind(*matrices, **options).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None

    def completed(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with every output that is asked for."""
        import torch

        from kernel_api._launches import check_type

        complete = dict(options)
        x = options["x"]
        if not isinstance(x, torch.Tensor) or x.is_nested:  # of which the latter is refused
            x = Operand(x, "x").tensor
        first = self.written[0]
        asked = complete.pop(f"{first}_dtype", None)
        given = complete.get(first)
        if given is not None and asked is not None:
            check_type(given, asked, first)
        for name in self.written:
            value = complete.get(name)
            if value is True or (value is None and name in self.always):
                complete[name] = _allocated(name, x, asked, options)
            elif value is False:
                complete[name] = None
        return complete

    def allocates_all(self, given: dict[str, Any]) -> bool:
        """Whether a call is given no output."""
        return all(given.get(name) is None or given[name] is True for name in self.written)

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


def _allocated(name: str, x: Any, asked: Any, options: dict[str, Any]) -> Any:
    import torch

    element = torch.float64 if x.dtype is torch.float64 else torch.float32
    if name in ("out", "dx"):
        return x.new_empty(x.shape, dtype=x.dtype if asked is None else dtype(asked).torch)
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

    @functools.wraps(fusion)
    def call(*matrices: Any, **options: Any) -> Any:
        given = form.bound(matrices, options)
        form.check(given)
        complete = form.completed(given)
        if becomes_node(complete["x"]):
            from kernel_api import _norm_operators

            _norm_operators.traced(form, complete)
        elif form.allocates_all(given):
            _run_again(form, complete)
        else:
            run(form, complete)
        return form.results(complete)

    call.__module__ = "kernel_api.ops"
    call.__signature__ = form.signature  # type: ignore[attr-defined]
    FORMS.append(form)
    return call


def run(form: NormForm, complete: dict[str, Any]) -> None:
    """The best kernel on options with all outputs."""
    from kernel_api._launches import run_best

    run_best(form.fusion(**complete))


def _run_again(form: NormForm, complete: dict[str, Any]) -> None:
    """Into outputs that were made for the call."""
    from kernel_api import _again

    further = [name for name in form.kind.further_names if complete.get(name) is not None]
    names = [*further, *(name for name in ("eps",) if name in form.defaults)]
    beside = {**form.defaults, **complete}
    read = [complete[n] for n in (*form.matrices, *further) if n not in form.written]
    of_rows = None
    if type(beside.get("eps", 0.0)) is float and "rows_per_block" not in beside:
        key = _again.look(
            read, form.name, *names, beside.get("eps"), complete[form.written[0]].dtype
        )
        of_rows = None if key is None else _as_rows(form, beside)
    if of_rows is None:
        run(form, complete)
        return
    tensors = [of_rows[name] for name in form.kind.operand_names]
    values = tuple([of_rows.get(name, beside[name]) for name in names])
    if not _again.repeated(key, tensors, values):
        _again.run(key, form.fusion(**complete), names)


def _as_rows(form: NormForm, beside: dict[str, Any]) -> dict[str, Any] | None:
    """Matrices as (M, N) and statistics as (M,); None where one is no view."""
    found = {}
    for names, modes in ((form.kind.operand_names, 2), (_STATISTICS, 1)):
        for name in names:
            one = beside.get(name)
            if one is None:
                continue
            if one.dim() != modes:
                if not (one.dim() and one.is_contiguous()):
                    return None
                one = one.view(-1, one.shape[-1]) if modes == 2 else one.view(-1)
            found[name] = one
    return found


#: Every form, as it is made.
FORMS: list[NormForm] = []

rmsnorm = _one_call(fusions.rmsnorm, "out", "rstd")
layernorm = _one_call(fusions.layernorm, "out", "mean", "rstd")
rmsnorm_backward = _one_call(fusions.rmsnorm_backward, "dx", "dweight", "dbias")
layernorm_backward = _one_call(fusions.layernorm_backward, "dx", "dweight", "dbias")
rmsnorm_rht_amax = _one_call(
    fusions.rmsnorm_rht_amax, "out", "amax", "global_amax", always=("amax",)
)
