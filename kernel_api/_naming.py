"""Names of kernels, which say all that their metadata does."""

from __future__ import annotations

import functools
import re

from kernel_api.arguments import ScaleMode
from kernel_api.metadata import DesignMetadata, OperandsMetadata, TensorAttributes
from kernel_api.utils import strides_to_layout_string

#: An operand that all kernels ask the same of.
_SAME_FOR_ALL = "offsets"


def name_of(family: str, operands: OperandsMetadata, design: DesignMetadata) -> str:
    """Of one design of a family for one combination of operands."""
    before, behind = _beside_designs(family, operands)
    return "_".join(filter(None, (before, in_names(design.label()), behind)))


@functools.lru_cache(maxsize=64)
def _beside_designs(family: str, operands: OperandsMetadata) -> tuple[str, str]:
    """What is before a design in all names, and behind it."""
    tensors = [one for name, one in operands.tensors.items() if name != _SAME_FOR_ALL]
    types = [_type_label(t) for t in tensors if t.dtype is not None]
    for field in ("accumulator_type", "multiplication_type"):
        if getattr(operands, field, None) is not None:
            types.append(getattr(operands, field).short)
    strides = [t.stride for t in tensors if t.stride is not None]
    ragged = getattr(operands, "ragged", "any")
    form = "" if ragged == "any" else f"ragged_{ragged.lower()}"
    experts = "pointers" if getattr(operands, "experts", "") == "pointers" else ""
    parts = (family, form, experts, *types, strides_to_layout_string(*strides))
    behind = "align" + "x".join(str(t.alignment) for t in tensors) if strides else ""
    return in_names("_".join(filter(None, parts))), in_names(behind)


@functools.lru_cache(maxsize=1024)
def in_names(text: str) -> str:
    """As names have it: words, with one ``_`` for what is between them."""
    return re.sub(r"\W+", "_", text)


def _type_label(tensor: TensorAttributes) -> str:
    assert tensor.dtype is not None
    if isinstance(tensor.scale, ScaleMode):
        return f"{tensor.dtype.short}_{tensor.scale.value}"
    return tensor.dtype.short
