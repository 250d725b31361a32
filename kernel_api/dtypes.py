"""The canonical dtype: one object per element type, whatever library named it."""

from __future__ import annotations

import sys
from typing import Any

from kernel_api.errors import ArgumentError


class DType:
    """An element type. Equal to anything that names the same type.

    >>> dtype(torch.bfloat16) is dtype("bf16")
    True
    >>> dtype("bf16") == cutlass.BFloat16
    True

    Attributes:
        name: As torch spells it, ``"bfloat16"``.
        short: As kernel names spell it, ``"bf16"``.
        kind: ``"float"``, ``"int"``, ``"uint"``, ``"bool"`` or ``"other"``.
        bits: Size of an element.
    """

    __slots__ = ("_cutlass", "_hash", "bits", "kind", "name", "short")

    def __init__(
        self, name: str, short: str, kind: str, bits: int, cutlass: str | None = None
    ) -> None:
        self.name, self.short, self.kind, self.bits = name, short, kind, bits
        self._cutlass = cutlass
        self._hash = hash(name)

    @property
    def itemsize(self) -> int:
        """Bytes of an element (at least 1)."""
        return max(self.bits // 8, 1)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def torch(self) -> Any:
        """The torch dtype; what float32 may be multiplied as is stored as float32."""
        import torch

        return getattr(torch, _STORED_AS.get(self.name, self.name))

    @property
    def cutlass(self) -> Any:
        """The CuTe DSL type; raises ArgumentError where the DSL has none."""
        import cutlass

        if self._cutlass is None:
            raise ArgumentError(f"CuTe DSL has no type for {self.name}")
        return getattr(cutlass, self._cutlass)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):  # most are, and each is there once
            return self is other
        return _find(other) is self

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype, (self.name,)


_TABLE = (
    ("float64", "f64", "float", 64, "Float64", ("double",)),
    ("float32", "f32", "float", 32, "Float32", ("float", "single")),
    ("tfloat32", "tf32", "float", 32, "TFloat32", ()),
    ("tfloat32x3", "tf32x3", "float", 32, None, ()),
    ("float16", "f16", "float", 16, "Float16", ("half", "fp16")),
    ("bfloat16", "bf16", "float", 16, "BFloat16", ()),
    ("float8_e4m3fn", "e4m3", "float", 8, "Float8E4M3FN", ("float8_e4m3", "fp8_e4m3")),
    ("float8_e5m2", "e5m2", "float", 8, "Float8E5M2", ("fp8_e5m2",)),
    ("float8_e8m0fnu", "e8m0", "float", 8, "Float8E8M0FNU", ()),
    ("int64", "i64", "int", 64, "Int64", ("long",)),
    ("int32", "i32", "int", 32, "Int32", ("int",)),
    ("int16", "i16", "int", 16, "Int16", ("short",)),
    ("int8", "i8", "int", 8, "Int8", ()),
    ("uint64", "u64", "uint", 64, "Uint64", ()),
    ("uint32", "u32", "uint", 32, "Uint32", ()),
    ("uint16", "u16", "uint", 16, "Uint16", ()),
    ("uint8", "u8", "uint", 8, "Uint8", ("byte",)),
    ("bool", "b1", "bool", 8, "Boolean", ()),
    ("complex64", "c64", "other", 64, None, ()),
    ("complex128", "c128", "other", 128, None, ()),
)

_BY_NAME: dict[str, DType] = {}
_BY_EXACT_NAME: dict[str, DType] = {}
for _name, _short, _kind, _bits, _cutlass, _aliases in _TABLE:
    _entry = DType(_name, _short, _kind, _bits, _cutlass)
    for _alias in (_name, _short, *((_cutlass.lower(),) if _cutlass else ()), *_aliases):
        _BY_NAME[_alias] = _entry
    for _exact in (_name, *((_cutlass.lower(),) if _cutlass else ())):
        _BY_EXACT_NAME[_exact] = _entry

#: What has no type of its own in memory.
_STORED_AS = {"tfloat32": "float32", "tfloat32x3": "float32"}
TF32 = _BY_NAME["tfloat32"]
#: float32 as a sum of two tfloat32: three products, of which 21 bits are right.
TF32X3 = _BY_NAME["tfloat32x3"]

#: Keys are of one type that every Dynamo can hash.
_OF_TORCH: dict[Any, DType] = {}


def dtype(value: Any) -> DType:
    """The canonical dtype of a torch, cutlass, numpy or ml_dtypes type, or a string.

    Raises ArgumentError for what names no element type.
    """
    found = value if isinstance(value, DType) else _find(value)
    if found is None:
        known = ", ".join(row[0] for row in _TABLE)
        raise ArgumentError(f"{value!r} names no element type; known are {known}")
    return found


def _find(value: Any) -> DType | None:
    if isinstance(value, str):
        return _BY_NAME.get(value.rpartition(".")[2].lower())
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return _OF_TORCH.get(value) or _OF_TORCH.setdefault(value, _from_torch(value))
    # numpy scalar types, ml_dtypes and cutlass numeric types are classes; numpy.dtype has .name.
    # Their names are exact: Python's float is no float32, and float8_e4m3 no float8_e4m3fn.
    name = getattr(value, "name", None) if not isinstance(value, type) else value.__name__
    return _BY_EXACT_NAME.get(name.rstrip("_").lower()) if isinstance(name, str) else None


def _from_torch(value: Any) -> DType:
    """Element types that only torch knows still get a name, so that a refusal can state it."""
    name = str(value).rpartition(".")[2]
    if name not in _BY_NAME:
        kind = "float" if name.startswith("float8") else "other"
        _BY_NAME[name] = DType(name, name, kind, 8 * value.itemsize)
    return _BY_NAME[name]
