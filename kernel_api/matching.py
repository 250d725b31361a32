"""Do the operands of the arguments fit what a kernel's metadata asks?"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

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
    return match_layouts(operands, args, why_aligned) if status else status


def types_of(operands: OperandsMetadata) -> tuple[Hashable, ...]:
    """All that :func:`match_types` looks at."""
    types = tuple((tensor.dtype, tensor.scale) for tensor in operands.tensors.values())
    further = (getattr(operands, name, None) for name in _FURTHER)
    return (operands.names, types, *further)


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
    """The modes of stride 1, then addresses and strides."""
    asked = operands.tensors
    for step, (name, attributes) in enumerate(asked.items()):
        status = _match_major(name, getattr(args, name), attributes, args, _MAJORS + step)
        if not status:
            return status
    for step, (name, attributes) in enumerate(asked.items()):
        if not _is_aligned(getattr(args, name), attributes):
            return _misaligned(asked, args, why_aligned, name, step)
    return Status.success()


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


def _match_major(
    name: str, operand: Operand, asked: TensorAttributes, args: Arguments, progress: int
) -> Status:
    unit = asked.unit_mode
    if unit is None or operand.unit_mode == unit:
        return Status.success()
    letters = args.modes[name]
    wanted = f"{letters[unit]}-major"
    if operand.unit_mode is None:
        return Status.fail(
            f"{name} has strides {operand.stride}; one of its last two modes must have stride 1",
            rule="a mode of stride 1",
            operand=name,
            nearest=f"would match with {name}.contiguous()",
            progress=progress,
        )
    return Status.fail(
        f"{name} is {letters[operand.unit_mode]}-major; expected {wanted}",
        rule="majors",
        operand=name,
        expected=wanted,
        actual=f"{letters[operand.unit_mode]}-major",
        nearest=f"would match if {name} were {wanted}",
        progress=progress,
    )


def _is_aligned(operand: Operand, asked: TensorAttributes) -> bool:
    return asked.divisibility == 1 or operand.alignment % _bytes_of(operand, asked) == 0


def _bytes_of(operand: Operand, asked: TensorAttributes) -> int:
    return asked.divisibility * operand.dtype.itemsize


def _misaligned(
    asked: Mapping[str, TensorAttributes],
    args: Arguments,
    why_aligned: str | None,
    name: str,
    step: int,
) -> Status:
    """Of the first operand that is, with what would mend all of them."""
    changes: dict[str, int] = {}
    actual = ""
    for other in list(asked)[step:]:
        operand = getattr(args, other)
        if _is_aligned(operand, asked[other]):
            continue
        needed = _bytes_of(operand, asked[other])
        found, change, value = _misalignment(other, operand, needed, args.modes[other])
        actual = actual or found
        changes[change] = max(value, changes.get(change, 0))
    needed = _bytes_of(getattr(args, name), asked[name])
    reason = why_aligned or f"address and strides must be multiples of {needed} bytes"
    mended = " and ".join(change.format(value) for change, value in changes.items())
    return Status.fail(
        f"{reason}; {actual}",
        rule=reason,
        operand=name,
        expected=f"{needed} bytes",
        actual=actual,
        nearest=f"would match {mended}",
        progress=_ALIGNMENT + step,
    )


def _misalignment(name: str, operand: Operand, needed: int, letters: str) -> tuple[str, str, int]:
    """Which of the address and the strides is off, and what would mend it to which number."""
    itemsize = operand.dtype.itemsize
    unit = operand.unit_mode or -1
    for mode in reversed(range(operand.rank)):
        stride = operand.stride[mode] * itemsize
        if mode - operand.rank == unit or stride % needed == 0:
            continue
        padded = -(-stride // needed) * needed // itemsize
        if mode < operand.rank - 2:
            known = len(letters) == operand.rank
            of = letters[mode] if known else "batch"
            apart = "with batches {} apart"
            if known:
                apart = f"with a stride of {{}} along {of} for {name}"
            return f"{name}'s {of} stride is {stride}", apart, padded
        if operand.stride[mode] == operand.shape[unit]:
            return f"{name}'s is {stride}", f"with {letters[unit]} padded to {{}}", padded
        return f"{name}'s is {stride}", f"with a pitch of {{}} for {name}", padded
    offset = operand.address or operand.tensor.storage_offset() * itemsize
    started = f"if {name} started at a multiple of {{}} bytes"
    return f"{name}'s address is {offset % needed} bytes off", started, needed
