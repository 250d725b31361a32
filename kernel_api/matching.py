"""Do the operands of the arguments fit what a kernel's metadata asks?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_api.arguments.scaled import ScaleMode
from kernel_api.dtypes import TF32, TF32X3
from kernel_api.metadata import OperandsMetadata, TensorAttributes
from kernel_api.operands import Operand
from kernel_api.status import KIND_OF_OPERATION, ROUNDED_FLOAT32, Status

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments

# How far a check got, so that the nearest of many refusals can be told.
_TYPES, _SCALES, _MAJORS, _ALIGNMENT, _FITS = 10, 14, 20, 30, 40

#: What float32 is multiplied as, and the precisions of the arguments that allow it.
_ALLOWED_BY = {TF32: ("tf32",), TF32X3: ("tf32x3", "tf32")}
_MANTISSA_BITS = {TF32: 10, TF32X3: 21}

#: What metadata may say beside its tensors.
_FURTHER = ("accumulator_type", "multiplication_type", "ragged", "experts")

#: Forms of a grouped product by the mode that is cut into groups.
_FORMS = {
    "M": "the groups are rows of A (ragged M)",
    "K": "the groups are what is summed over (ragged K)",
}

#: Progress of everything that is checked after the operands.
BEHIND_OPERANDS = _FITS


def match_operands(
    operands: OperandsMetadata,
    args: Arguments,
    why_aligned: str | None = None,
    but_for: str | None = None,
) -> Status:
    """Types first, then majors, then alignment; the first mismatch is the status.

    ``but_for``: see :func:`match_types`.
    """
    status = match_types(operands, args, but_for)
    if status:
        status = match_layouts(operands, args, why_aligned)
    return with_mend(status, operands, args)


def types_of(operands: OperandsMetadata) -> tuple[Hashable, ...]:
    """All that :func:`match_types` looks at."""
    types = tuple((tensor.dtype, tensor.scale) for tensor in operands.tensors.values())
    further = (getattr(operands, name, None) for name in _FURTHER)
    return (operands.names, types, *further)


def types_of_arguments(args: Arguments) -> tuple[Any, ...]:
    """All that :func:`match_types` looks at, of arguments."""
    operands = tuple([(o.dtype, o.mode, o.discrete) for o in args.operands])
    ragged, precision = getattr(args, "ragged", None), getattr(args, "fp32_precision", None)
    return type(args), args.operand_names, operands, ragged, args.accumulator_type, precision


def layouts_of_arguments(args: Arguments) -> tuple[Any, ...]:
    """All that :func:`match_layouts` looks at beside types, of arguments."""
    return tuple([(operand.unit_mode, operand.alignment) for operand in args.operands])


def match_types(operands: OperandsMetadata, args: Arguments, but_for: str | None = None) -> Status:
    """The kind of operation, element types, and how products and sums are formed.

    ``but_for``: a rule that is not asked, of those of how products are formed.
    """
    if operands.names != args.operand_names:
        return Status.fail(
            f"the kernel takes operands {operands.names}, these are {type(args).__name__}",
            rule=KIND_OF_OPERATION,
        )
    refusal = _form_mismatch(operands, args)
    if refusal is not None:
        return Status.fail(refusal, rule=KIND_OF_OPERATION)
    for step, (name, attributes) in enumerate(operands.tensors.items()):
        operand = getattr(args, name)
        if attributes.dtype is not None and operand.dtype is not attributes.dtype:
            return Status.fail(
                f"{name} is {operand.dtype}; expected {attributes.dtype}",
                rule="element types",
                operand=name,
                expected=str(attributes.dtype),
                actual=str(operand.dtype),
                progress=_TYPES + step,
            )
    for step, (name, attributes) in enumerate(operands.tensors.items()):
        mode = getattr(getattr(args, name), "mode", None)
        if attributes.scale != "any" and mode is not attributes.scale:
            return _scale_mismatch(name, mode, attributes, _SCALES + step)
    status = _match_arithmetic(operands, args)
    return status if status.rule != but_for else Status.success()


def _form_mismatch(operands: OperandsMetadata, args: Any) -> str | None:
    """Why a kernel of one form of grouped products does not compute another."""
    ragged, experts = (getattr(operands, name, "any") for name in ("ragged", "experts"))
    if ragged not in ("any", getattr(args, "ragged", "any")):
        return f"{_FORMS[args.ragged]}; the kernel is for ragged {ragged}"
    if experts == "any":
        return None
    given = [name for name in ("B", "out") if getattr(args, name).discrete]
    if given and experts == "dense":
        return f"{given[0]} is given as matrices that lie anywhere; the kernel takes one tensor"
    if not given and experts == "pointers":
        return "the experts are one tensor; the kernel takes the addresses of matrices"
    return None


def _scale_mismatch(
    name: str, mode: ScaleMode | None, asked: TensorAttributes, progress: int
) -> Status:
    carried = f"a {mode.value} scale" if mode is not None else "no scale"
    expected = f"a {asked.scale.value} scale" if isinstance(asked.scale, ScaleMode) else "none"
    return Status.fail(
        f"{name} carries {carried}; expected {expected}",
        rule="scales",
        operand=name,
        expected=expected,
        actual=carried,
        progress=progress,
    )


def match_layouts(
    operands: OperandsMetadata, args: Arguments, why_aligned: str | None = None
) -> Status:
    """The modes of stride 1, then addresses and strides; what would mend them, :func:`with_mend`
    says."""
    asked = operands.tensors
    for step, (name, attributes) in enumerate(asked.items()):
        if not _has_major(getattr(args, name), attributes):
            return _other_major(attributes, args, name, _MAJORS + step)
    for step, (name, attributes) in enumerate(asked.items()):
        if not _is_aligned(getattr(args, name), attributes):
            return _misaligned(attributes, args, why_aligned, name, _ALIGNMENT + step)
    return Status.success()


def with_mend(status: Status, operands: OperandsMetadata, args: Arguments) -> Status:
    """The status; of a mismatch of layouts, with what would change those of all operands. Apart, as
    most of many mismatches are told to nobody."""
    if status or not _MAJORS <= status.progress < _FITS:
        return status
    return replace(status, nearest=_mended(operands.tensors, args))


def _match_arithmetic(operands: OperandsMetadata, args: Arguments) -> Status:
    accumulator = getattr(operands, "accumulator_type", None)
    if accumulator is not None and accumulator is not args.accumulator_type:
        return Status.fail(
            f"the accumulator is {args.accumulator_type}; expected {accumulator}",
            rule="accumulator type",
            operand="accumulator_type",
            expected=str(accumulator),
            actual=str(args.accumulator_type),
            progress=_MAJORS - 2,
        )
    multiplication = getattr(operands, "multiplication_type", None)
    allowed = getattr(args, "fp32_precision", None)
    if multiplication in _ALLOWED_BY and allowed not in _ALLOWED_BY[multiplication]:
        bits, names = _MANTISSA_BITS[multiplication], _ALLOWED_BY[multiplication]
        return Status.fail(
            f"the kernel multiplies float32 with {bits} mantissa bits, and {allowed} is asked",
            rule=ROUNDED_FLOAT32,
            nearest=f"would match with fp32_precision={names[0]!r}, or "
            "torch.set_float32_matmul_precision('high')",
            progress=_MAJORS - 1,
        )
    return Status.success()


def _has_major(operand: Operand, asked: TensorAttributes) -> bool:
    return asked.unit_mode is None or operand.unit_mode == asked.unit_mode


def _other_major(asked: TensorAttributes, args: Arguments, name: str, progress: int) -> Status:
    operand, letters = getattr(args, name), args.modes[name]
    if operand.unit_mode is None:
        return Status.fail(
            f"{name} has strides {operand.stride}; one of its last two modes must have stride 1",
            rule="a mode of stride 1",
            operand=name,
            progress=progress,
        )
    unit = asked.unit_mode
    assert unit is not None
    wanted, found = f"{letters[unit]}-major", f"{letters[operand.unit_mode]}-major"
    return Status.fail(
        f"{name} is {found}; expected {wanted}",
        rule="majors",
        operand=name,
        expected=wanted,
        actual=found,
        progress=progress,
    )


def _is_aligned(operand: Operand, asked: TensorAttributes) -> bool:
    return asked.divisibility == 1 or operand.alignment % _bytes_of(operand, asked) == 0


def _bytes_of(operand: Operand, asked: TensorAttributes) -> int:
    return asked.divisibility * operand.dtype.itemsize


def _misaligned(
    asked: TensorAttributes,
    args: Arguments,
    why_aligned: str | None,
    name: str,
    progress: int,
) -> Status:
    operand = getattr(args, name)
    needed = _bytes_of(operand, asked)
    reason = why_aligned or f"address and strides must be multiples of {needed} bytes"
    actual = next(_misalignments(name, operand, needed, args.modes[name])).found
    return Status.fail(
        f"{reason}; {actual}",
        rule=reason,
        operand=name,
        expected=f"{needed} bytes",
        actual=actual,
        progress=progress,
    )


def _mended(asked: Mapping[str, TensorAttributes], args: Arguments) -> str:
    """What would change the layouts of all operands to those that are asked."""
    changes: dict[str, int] = {}
    for name, attributes in asked.items():
        operand = getattr(args, name)
        needed, letters = _bytes_of(operand, attributes), args.modes[name]
        if not _has_major(operand, attributes):
            change, value = _major_change(name, operand, attributes, needed, letters)
            changes[change] = value
        elif not _is_aligned(operand, attributes):
            for fault in _misalignments(name, operand, needed, letters):
                changes[fault.change] = max(fault.value, changes.get(fault.change, 0))
    return "would match " + " and ".join(text.format(n) for text, n in changes.items())


def _major_change(
    name: str, operand: Operand, asked: TensorAttributes, needed: int, letters: str
) -> tuple[str, int]:
    """What lays an operand out anew, with a place for a number, and the number."""
    unit = asked.unit_mode
    assert unit is not None
    change = f"if {name} were {letters[unit]}-major"
    if operand.unit_mode is None and unit == -1:
        change = f"with {name}.contiguous()"
    rows, row = operand.shape[-3 - unit], operand.shape[unit] * operand.dtype.itemsize
    if rows > 1 and row % needed:
        return f"{change}, its rows {{}} bytes apart", -(-row // needed) * needed
    return change, 0


class _Misalignment(NamedTuple):
    """Of an address or a stride.

    Attributes:
        found: In words.
        change: What would mend it, with a place for a number.
        value: The number.
    """

    found: str
    change: str
    value: int


def _misalignments(
    name: str, operand: Operand, needed: int, letters: str
) -> Iterator[_Misalignment]:
    """All of an operand, but strides that are multiples of another one."""
    itemsize = operand.dtype.itemsize
    unit = operand.unit_mode or -1
    mended = 0
    for mode in reversed(range(operand.rank)):
        stride = operand.stride[mode] * itemsize
        packed = mended and stride % mended == 0
        if mode - operand.rank == unit or stride % needed == 0 or packed:
            continue
        mended = mended or stride
        padded = -(-stride // needed) * needed // itemsize
        if mode < operand.rank - 2:
            known = len(letters) == operand.rank
            of = letters[mode] if known else "batch"
            apart = "with batches {} apart"
            if known:
                apart = f"with a stride of {{}} along {of} for {name}"
            yield _Misalignment(f"{name}'s {of} stride is {stride}", apart, padded)
        elif operand.stride[mode] == operand.shape[unit]:
            padding = f"with {letters[unit]} padded to {{}}"
            yield _Misalignment(f"{name}'s is {stride}", padding, padded)
        else:
            yield _Misalignment(f"{name}'s is {stride}", f"with a pitch of {{}} for {name}", padded)
    if operand.discrete:
        if not mended:
            promised = f"{name}'s addresses are known to be multiples of {operand.alignment} bytes"
            yield _Misalignment(promised, f"if all in {name} started at multiples of {{}}", needed)
        return
    offset = operand.address or operand.tensor.storage_offset() * itemsize
    if offset % needed:
        started = f"if {name} started at a multiple of {{}} bytes"
        yield _Misalignment(f"{name}'s address is {offset % needed} bytes off", started, needed)
