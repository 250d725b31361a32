"""Metadata in the words of a table, whatever the operation."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernel_api.metadata import KernelMetadata, TensorAttributes
from kernel_api.utils import strides_to_layout_string

COLUMNS = ("name", "provider", "types", "majors", "align", "design", "targets")


def row(metadata: KernelMetadata) -> tuple[str, ...]:
    """The kernel under ``COLUMNS``."""
    return (
        metadata.kernel_name,
        metadata.provider,
        types(metadata),
        majors(metadata),
        alignment(metadata),
        design(metadata),
        targets(metadata),
    )


def family(metadata: KernelMetadata) -> str:
    return metadata.kernel_class.family_name()


def types(metadata: KernelMetadata) -> str:
    """Such as ``bf16 x bf16 -> f32, f32``: inputs, outputs, accumulator."""
    tensors = metadata.operands.tensors
    arguments = metadata.kernel_class.arguments
    outputs = arguments.output_names if arguments is not None else tuple(tensors)[-1:]
    read = " x ".join(_short(t) for name, t in tensors.items() if name not in outputs)
    written = " x ".join(_short(t) for name, t in tensors.items() if name in outputs)
    text = f"{read} -> {written}"
    product = getattr(metadata.operands, "multiplication_type", None)
    if product is not None:
        text += f", products in {product.short}"
    accumulator = getattr(metadata.operands, "accumulator_type", None)
    return f"{text}, sums in {accumulator.short}" if accumulator is not None else text


def majors(metadata: KernelMetadata) -> str:
    """One letter per operand, ``t`` row-major and ``n`` column-major; ``any`` for any strides."""
    strides = [t.stride for t in metadata.operands.tensors.values()]
    if None in strides:
        return "any"
    return strides_to_layout_string(*(stride for stride in strides if stride is not None))


def alignment(metadata: KernelMetadata) -> str:
    """Bytes asked of each operand's address and strides; ``any`` if none asks for more than 1."""
    tensors = metadata.operands.tensors.values()
    if all(t.divisibility == 1 for t in tensors):
        return "any"
    return "x".join(str(t.alignment) for t in tensors)


def design(metadata: KernelMetadata) -> str:
    """Such as ``tile=128x128x64 cluster=2x1x1 stages=4``."""
    if metadata.design is None:
        return ""
    values = {f.name: getattr(metadata.design, f.name) for f in dataclasses.fields(metadata.design)}
    return " ".join(f"{axis(name)}={_text(v)}" for name, v in values.items())


def axis(name: str) -> str:
    """A field of a design, in these words."""
    return name.removesuffix("_shape")


def targets(metadata: KernelMetadata) -> str:
    if not metadata.targets and not metadata.min_cc:
        return "any"
    return " ".join(str(target) for target in metadata.parsed_targets)


def _short(tensor: TensorAttributes) -> str:
    return tensor.dtype.short if tensor.dtype is not None else "any"


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
