"""Launches of one-call forms, found again by what a call looks like.

What a call looks like is read straight from its tensors: element types, shapes, strides, devices
and how their addresses are aligned. Options count by value; but factors, which kernels take at run
time, by their type and by what fusions ask of their values. Of a call that looks like an earlier
one only the addresses are new. So whether memory is shared is asked again; all else was checked
then, and the call goes straight to the kernel's launcher: no arguments are made.

What is remembered keeps no tensor alive. It is valid until a provider or kernel class changes,
other providers are named by the environment, or the compiled kernels are forgotten; what was not
used lately is forgotten first.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from kernel_api import _compile_cache, _float32, _locks, _sequence, provider
from kernel_api._apart import Pair, are_apart, pairs_apart
from kernel_api._autograd import check_outputs, without_gradient
from kernel_api._checks import require_data
from kernel_api._first_kernel import first_kernel
from kernel_api._forms import FACTORS, Form, out_type
from kernel_api._made import maker
from kernel_api._overwritten import teller
from kernel_api._settings import raw_setting
from kernel_api.arguments import Arguments, EpilogueArguments
from kernel_api.arguments.experts import experts
from kernel_api.arguments.gemm import ProductArguments
from kernel_api.arguments.scaled import ScaledOperand, ScaleMode, register_with_torch
from kernel_api.artifact import CompiledArtifact
from kernel_api.discovery import explain
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError, NoKernelError
from kernel_api.kernel import Kernel, LauncherInOrder
from kernel_api.offsets import check_is_asked
from kernel_api.operands import MAX_ALIGNMENT, Operand, becomes_node, traced_by_jit
from kernel_api.provider import PROVIDERS

#: What :func:`repeated` returns where nothing is known of such a call.
NEW = object()

#: Whether torch.compile reads what is called, to make a graph of it. Of torch.export, tensors tell.
is_read_by_dynamo = torch.compiler.is_dynamo_compiling

#: Subclasses may mean something else by what they hold: those of torch that trace do.
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
#: Elements that have no complex type, whose conjugates have negative imaginary parts: asking such
#: a tensor for its negative bit would cost a call 1 %.
NEVER_NEGATIVE = torch.bfloat16
#: What torch.jit.trace says of the sizes of a parameter.
_OF_A_TRACE = "requires grad as a constant"
_OUTPUTS = frozenset((*TENSORS, type(None)))
_NUMBERS = frozenset((float, int))
_VALUES = frozenset((str, bool, int, float, type(None)))

_REFERENCE = "reference"
_BEYOND = 2**64  # what 64 bits hold, with a sign or without

_KEPT = 1024
LOW_BITS = MAX_ALIGNMENT - 1
_tell = teller()
#: With :data:`BEFORE_DISPATCH` included, they tell whether a mode may trace whatever is called.
dispatch_modes = torch._C._len_torch_dispatch_stack
is_included = torch._C._dispatch_tls_is_dispatch_key_included
BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch
_FLOAT32 = torch.float32

register_with_torch()

_Key = tuple[Any, ...]
_Value = tuple[str, Callable[[Any], Any]] | tuple[None, Any]


class Call(NamedTuple):
    """A call as it was made. What is computed of one are functions: Dynamo reads no property of a
    tuple with names before torch 2.11."""

    A: Any
    B: Any
    out: Any
    out_dtype: Any
    options: dict[str, Any]


def given_by(call: Call) -> dict[str, Any]:
    """What may be tensors, in the order that they are looked at."""
    out = {} if call.out is None else {"out": call.out}
    return {"A": call.A, "B": call.B, **out, **call.options}


def without_scales(call: Call) -> Call:
    """The same of what is stored; scales and their modes are further options then, whose names no
    option has."""
    options, stored = dict(call.options), {"A": call.A, "B": call.B, "out": call.out}
    for name, operand in stored.items():
        if isinstance(operand, ScaledOperand):
            stored[name] = operand.tensor
            options[_scale_of(name)] = operand.scale.tensor
            options[_mode_of(name)] = operand.mode.value
    return Call(**stored, out_dtype=call.out_dtype, options=options)


def with_scales(call: Call) -> Call:
    """The call that this is :func:`without_scales`."""
    options, scaled = dict(call.options), {"A": call.A, "B": call.B, "out": call.out}
    for name, tensor in scaled.items():
        if _mode_of(name) in options:
            mode = ScaleMode(options.pop(_mode_of(name)))
            scale = options.pop(_scale_of(name))
            scaled[name] = ScaledOperand.unread(tensor, scale, mode)
    return Call(**scaled, out_dtype=call.out_dtype, options=options)


def with_its_out(call: Call, found: Any) -> Any:
    """What a call returns, of what it does without scales."""
    if found is NEW or not isinstance(call.out, ScaledOperand):
        return found
    return call.out if isinstance(found, torch.Tensor) else found._replace(out=call.out)


def scales_of_products(call: Call) -> list[Any]:
    """Those of A and B, of a call without scales."""
    names = (*map(_scale_of, ("A", "B")), "B_scale")
    return [call.options[name] for name in names if call.options.get(name) is not None]


class Launch:
    """What is done for a call.

    Attributes:
        launcher: Of the kernel, on tensors of these sizes, in order.
        absent: Makers of the outputs that the call does not give, with the alignment in bytes that
            the launcher needs.
        apart: Of the tensors, those that may not share memory.
        further: Options that are tensors which the launcher takes behind A, B and out.
        values: What it takes as values: the option and what makes it of that; or None and a number.
        overwritten: Outputs that the call gives.
        read: Options that are tensors and no outputs.
        results: From ``out`` and the options to what the call returns; None: it is ``out``.
        plain: Sizes in bytes of A, B and out where the call gives these and nothing else has to be
            done; else None.
        used: When it was last.
    """

    __slots__ = (
        *("absent", "apart", "further", "launcher", "overwritten", "plain", "read", "results"),
        *("used", "values"),
    )

    def __init__(
        self,
        launcher: LauncherInOrder,
        absent: dict[str, tuple[Callable[[], Any], int]],
        apart: list[Pair],
        further: tuple[str, ...],
        values: list[_Value],
        overwritten: list[str],
        read: list[str],
        results: Callable[[Any, dict[str, Any]], Any] | None,
        plain: tuple[int, int, int] | None,
    ) -> None:
        self.launcher, self.absent, self.apart = launcher, absent, apart
        self.further, self.values, self.results = further, values, results
        self.overwritten, self.read = overwritten, read
        self.plain = None if absent or further or values or results else plain
        self.used = next(_clock)

    def with_options(self, A: Any, B: Any, out: Any, options: dict[str, Any]) -> Any:
        """Launch, and give what the call returns; NEW if memory is less aligned than it was."""
        if self.absent:
            options = dict(options)
            for name, (make, alignment) in self.absent.items():
                made = options[name] = make()
                if made.data_ptr() % alignment:
                    return NEW
            out = options.pop("out", out)
        tensors = (A, B, out, *[options[name] for name in self.further])
        values = [of if own is None else of(options[own]) for own, of in self.values]
        self.launcher(tensors, tuple(values))
        if self.overwritten:
            _tell([out if name == "out" else options[name] for name in self.overwritten])
        return out if self.results is None else self.results(out, options)


_launches: dict[_Key, Launch] = {}
_clock = itertools.count()
_lock = _locks.lock()


def repeated(form: Form, A: Any, B: Any, out: Any, out_dtype: Any, options: dict[str, Any]) -> Any:
    """Run a call that looks like an earlier one, and return what it returns; else NEW."""
    if type(A) not in TENSORS or type(B) not in TENSORS or type(out) not in _OUTPUTS:
        return _repeated_without_scales(form, Call(A, B, out, out_dtype, options))
    try:
        key, addresses = _look(form, A, B, out, out_dtype, options)
        launch = _launches.get(key)
    except TypeError:  # an option without hash
        return NEW
    except RuntimeError as error:  # a tensor without strides
        if _OF_A_TRACE in str(error):  # torch crashes where this is caught and a call returns
            raise traced_by_jit() from error
        return NEW
    if launch is None:
        return NEW
    launch.used = next(_clock)
    if launch.plain is not None:
        (a, b, start), (a_size, b_size, size) = addresses, launch.plain
        end = start + size
        if (a < end and start < a + a_size) or (b < end and start < b + b_size):
            return NEW  # arguments look closer
        if out.requires_grad and torch.is_grad_enabled():
            return NEW  # which is refused
        launch.launcher((A, B, out), ())
        _tell((out,))
        return out
    if not are_apart(addresses, launch.apart):
        return NEW
    for name in launch.overwritten:
        given = out if name == "out" else options[name]
        if given.requires_grad and torch.is_grad_enabled():
            return NEW
    found = launch.with_options(A, B, out, options)
    if not launch.absent or found is NEW:
        return found
    learns = A.requires_grad or B.requires_grad
    for name in launch.read:
        learns = learns or options[name].requires_grad
    if learns:
        return without_gradient(form.name, found, (A, B, out, *options.values()))
    return found


def _repeated_without_scales(form: Form, call: Call) -> Any:
    """The same of a call whose operands are not all plain tensors."""
    if not any(isinstance(one, ScaledOperand) for one in (call.A, call.B, call.out)):
        return NEW
    return with_its_out(call, repeated(form, *without_scales(call)))


def _look(
    form: Form, A: Any, B: Any, out: Any, out_dtype: Any, options: dict[str, Any]
) -> tuple[_Key, list[int]]:
    """What the call looks like, and the addresses of its tensors in their order; raises TypeError
    for what is not looked at. A, B and out are tensors."""
    if forward_ad._current_level >= 0 or dispatch_modes() or is_included(BEFORE_DISPATCH):
        raise TypeError
    # Written out: this is most of what a call costs.
    element, start, other_start = A.dtype, A.data_ptr(), B.data_ptr()
    if not (start and other_start):  # empty, or freed
        raise TypeError
    if element is not NEVER_NEGATIVE and (A.is_neg() or B.is_neg()):
        raise TypeError
    addresses, joined = [start, other_start], start | other_start
    key: _Key = (
        provider._generation, raw_setting(PROVIDERS), _compile_cache._era, form, out_dtype,
        element, A.shape, A.stride(), A.device,
        B.dtype, B.shape, B.stride(), B.device,
    )  # fmt: skip
    if out is not None:
        if out.dtype is not NEVER_NEGATIVE and out.is_neg():
            raise TypeError
        start = out.data_ptr()
        if not start:
            raise TypeError
        addresses.append(start)
        joined |= start
        key += (out.dtype, out.shape, out.stride(), out.device)
    if options:
        for name, value in options.items():
            key += (name, *_option(name, value, addresses))
        joined = functools.reduce(operator.or_, addresses)
    if element is _FLOAT32:
        key += (_float32.setting(),)
    if joined & LOW_BITS:  # else all are as aligned as any kernel asks
        key += (tuple([each & -each & LOW_BITS for each in addresses]),)
    return key, addresses


def _option(name: str, value: Any, addresses: list[int]) -> tuple[Any, ...]:
    kind = type(value)
    if kind in TENSORS:
        if value.dtype is not NEVER_NEGATIVE and value.is_neg():
            raise TypeError
        address = value.data_ptr()
        if not address:
            raise TypeError
        addresses.append(address)
        return value.dtype, value.shape, value.stride(), value.device
    if kind in _NUMBERS and name in FACTORS:
        if kind is int and not -_BEYOND // 2 <= value < _BEYOND:
            raise TypeError
        # Of limits, which of those that are refused somewhere it is.
        limit = (value >= 0, 0 < value < math.inf) if name == "limit" else None
        return kind, value == 1, 0 <= value <= 1, limit
    if kind in _VALUES:
        return kind, value
    raise TypeError


# Calls that look like none before ----------------------------------------------------------


def first(form: Form, call: Call) -> Any:
    """Run a call that looks like no earlier one, or that has to be looked at every time."""
    stored = without_scales(call)
    check_outputs(form.given(stored.out, call.options))
    A, B = form.operands(call.A, call.B)
    if becomes_node(A.tensor):
        from kernel_api import _operators

        return _operators.traced(form, *call)
    if call.out is not None and call.out_dtype is not None:
        check_type(call.out, call.out_dtype)
    scaled = bool(A.mode or B.mode or scales_of_products(stored))
    out_dtype = type_of_out(form, call, A.tensor.dtype, scaled)
    out, complete = form.completed(A.tensor, B, call.out, out_dtype, call.options)
    args = form.fusion(A, B, out=out, **complete)
    kernel, artifact = run_best(args)
    _remember(form, stored, out, complete, args, kernel, artifact)
    return without_gradient(form.name, form.results(out, complete), values_of(stored))


def values_of(call: Call) -> list[Any]:
    """What a call without scales gives, one by one."""
    found: list[Any] = []
    for one in given_by(call).values():
        if isinstance(one, EpilogueArguments):
            found += [getattr(value, "tensor", value) for value in one.operands.values()]
        else:
            found += one if isinstance(one, (list, tuple)) else [one]
    return found


def type_of_out(form: Form, call: Call, element: Any, scaled: bool) -> Any:
    """What a call says; else, if products of such elements are in units of scales, what holds real
    numbers; else None."""
    if call.out is not None or call.out_dtype is not None or form.element_of(call.options):
        return call.out_dtype
    return out_type(element, scaled=True) if scaled else None


def check_type(out: Any, out_dtype: Any, name: str = "out") -> None:
    """Raise ArgumentError where an output has another type than is asked for."""
    given, asked = experts(out, name).dtype, dtype(out_dtype)
    if given is not asked:
        raise ArgumentError(f"{name} is {given} and {name}_dtype {asked}; one of them is enough")


_chosen: dict[_Key, tuple[Kernel, CompiledArtifact]] = {}


def chosen(args: Arguments) -> tuple[Kernel, CompiledArtifact]:
    """The best kernel for the arguments, as far as is known, and its artifact.

    Raises NoKernelError, and what :meth:`Kernel.run` does before it launches.
    """
    require_data(args)
    key = (provider._generation, raw_setting(PROVIDERS), _compile_cache._era, args.key)
    found = _chosen.get(key)
    if found is None:
        kernel = best(args)
        found = kernel, kernel._artifact_to_run(args)
        with _lock:
            if len(_chosen) >= _KEPT:
                _chosen.clear()
            _chosen[key] = found
    return found


def run_best(args: Arguments) -> tuple[Kernel, CompiledArtifact]:
    """Run the kernel that is :func:`chosen`, and return that."""
    return _sequence.run(args, _run_best)


def _run_best(args: Arguments) -> tuple[Kernel, CompiledArtifact]:
    kernel, artifact = chosen(args)
    kernel.run(args, artifact, assume_supported_args=True)
    return kernel, artifact


def best(args: Arguments) -> Kernel:
    """What was tuned; else the first of the performance model. Raises NoKernelError."""
    from kernel_api.tuning import tuned

    kernel = tuned(args) or first_kernel(args)
    if kernel is None:
        raise NoKernelError(explain(args))
    is_reference = kernel.metadata.provider == _REFERENCE and args.device.type == "cuda"
    if is_reference and not any(0 in operand.shape for operand in args.operands):
        warnings.warn(
            f"the reference computes {args} in float64, which may take a thousand times as long as "
            f"a kernel would: none takes the arguments, ka.explain(args) says why",
            stacklevel=2,
        )
    return kernel


# What is remembered ----------------------------------------------------------------------


def _remember(
    form: Form,
    call: Call,
    out: Any,
    complete: dict[str, Any],
    args: ProductArguments,
    kernel: Kernel,
    artifact: CompiledArtifact,
) -> None:
    """Remember how a call was run, if such calls can be run without arguments.

    Args:
        call: The call as it was made, without scales.
        out, complete: Its outputs and options when all outputs were there.
        args: Its arguments, which the kernel ran.
    """
    kinds = type(call.A), type(call.B)
    if not TENSORS.issuperset(kinds) or type(call.out) not in _OUTPUTS:
        return
    try:
        key, _ = _look(form, *call)
    except (RuntimeError, TypeError):
        return
    out = out if call.out is None else call.out
    tensors = {"A": call.A, "B": call.B, "out": out, **complete}
    own = zip(args.operand_names, args.operands, strict=True)
    if key in _launches or not args.writes_anything:
        return
    if any(operand.tensor is not tensors[name] for name, operand in own):
        return
    own_values = args.launch_values if form.further else ()
    made: dict[str, _Value] = {name: (name, _itself) for name in own_values}
    found = _operands(form, args, call.options, complete)
    if found is None:
        return
    made |= found
    taken = kernel._launch_operands(args)
    for name in args.scaled:
        of = _scale_made_of(call.options.get(_scale_of(name)), taken.get(f"{name}_scale"))
        if of is None:  # what the kernel was given once, it would take again
            return
        made[f"{name}_scale"] = _scale_of(name), of
    names = tuple(taken)
    if not made.keys() >= set(names):
        return
    if form.further and check_is_asked():
        return
    passed = given_by(call)
    places = [name for name, value in passed.items() if type(value) in TENSORS]
    written = {form.option_of(name): operand for name, operand in args.outputs.items()}
    absent = {
        name: (maker(tensors[name]), operand.alignment)
        for name, operand in written.items()
        if name not in places
    }
    results = form.results if form.written(complete) else None
    launcher = kernel._launcher_in_order(args, artifact)
    spans = {name: Operand(passed[name]).span for name in places}
    in_place = {frozenset(("out", name)) for name in _in_place(form, args)}
    apart = pairs_apart(spans, written, in_place)
    values = [made[name] for name in names]
    plain = (args.A.span, args.B.span, args.out.span) if places == ["A", "B", "out"] else None
    given = [name for name in written if name in places]
    read = [name for name in places if name not in ("A", "B") and name not in written]
    launch = Launch(launcher, absent, apart, form.further, values, given, read, results, plain)
    with _lock:
        if len(_launches) >= _KEPT:
            _forget_some()
        _launches[key] = launch


def _forget_some() -> None:
    """The quarter that was not used for the longest time."""
    oldest = sorted(_launches, key=lambda key: _launches[key].used)
    for key in oldest[: max(_KEPT // 4, 1)]:
        del _launches[key]


def _in_place(form: Form, args: Arguments) -> tuple[str, ...]:
    """Options that may be ``out`` itself."""
    inputs = {} if args.epilogue is None else args.epilogue.inputs
    return tuple(form.option_of(name) for name, o in inputs.items() if args.takes_in_place(o))


def _operands(
    form: Form, args: Arguments, options: dict[str, Any], complete: dict[str, Any]
) -> dict[str, _Value] | None:
    """What the operands of the epilogue are made of; None: it cannot be told."""
    made: dict[str, _Value] = {}
    operands = {} if args.epilogue is None else args.epilogue.operands
    for name, value in operands.items():
        if isinstance(value, (int, float)) and name not in options:
            made[name] = None, value
            continue
        option = form.option_of(name)
        of = _made_of(complete.get(option), value)
        if of is None:
            return None
        made[name] = option, of
    return made


def _made_of(option: Any, value: Any) -> Callable[[Any], Any] | None:
    """What makes an operand of an option: a number's type, modes of one element, one of several
    columns, or nothing."""
    if isinstance(value, (int, float)):
        return type(value) if type(option) in _NUMBERS else None
    tensor = value.tensor
    if option is tensor:
        return _itself
    if type(option) not in TENSORS:
        return None
    if option.dim() == 1 and tensor.dim() == 3 and _view(option.view(-1, 1, 1)) == _view(tensor):
        return operator.methodcaller("view", -1, 1, 1)
    if option.dim() == 2 and tensor.dim() == 1:
        for place in range(option.shape[1]):
            if _view(option[:, place]) == _view(tensor):
                return operator.methodcaller("select", 1, place)
    if option.dim() + 1 != tensor.dim():
        return None
    for mode in range(tensor.dim()):
        if _view(option.unsqueeze(mode)) == _view(tensor):
            return operator.methodcaller("unsqueeze", mode)
    return None


def _scale_of(name: str) -> str:
    return f"scale of {name}"


def _mode_of(name: str) -> str:
    return f"mode of {name}"


def _scale_made_of(scale: Any, taken: Any) -> Callable[[Any], Any] | None:
    """What makes what a kernel takes of a scale of these sizes: it sees the same memory."""
    if scale is None or taken is None or scale.data_ptr() != taken.data_ptr():
        return None
    if scale is taken:
        return _itself
    return operator.methodcaller("as_strided", tuple(taken.shape), tuple(taken.stride()))


def _itself(value: Any) -> Any:
    return value


def _view(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
