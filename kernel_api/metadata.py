"""What one kernel is: frozen, hashable, round-trippable through JSON, enough to rebuild it."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kernel_api._cached_property import cached_property
from kernel_api._numbers import whole_number
from kernel_api.arguments.scaled import ScaleMode
from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue.graph import Graph
from kernel_api.errors import ArgumentError
from kernel_api.targets import Target, is_compute_capability, target, targets_of

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel


@dataclass(frozen=True)
class TensorAttributes:
    """What a kernel asks of one operand.

    Attributes:
        dtype: Element type; given in any spelling, kept as the canonical one. None: any.
        stride: A 1 for the mode of stride 1 and 0 for the others: ``(0, 0, 1)`` is row-major.
            Only the last two modes are compared, so one pattern serves with and without batch.
            None: any strides, also without a 1.
        divisibility: Elements that divide the address and every other stride.
        scale: Which elements share a scale; None: the operand carries none; ``"any"``: either.
    """

    dtype: DType | None
    stride: tuple[int, ...] | None
    divisibility: int = 1
    scale: ScaleMode | str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype(self.dtype))
        if self.stride is not None:
            if not isinstance(self.stride, (tuple, list)):
                raise ArgumentError(
                    f"stride is {self.stride!r}; expected a pattern such as (0, 1), or None for any"
                )
            object.__setattr__(self, "stride", tuple(self.stride))
            if self.stride[-2:].count(1) != 1:
                raise ArgumentError(
                    f"stride pattern {self.stride} must mark one of the last two modes with 1"
                )
        if not (self.scale is None or self.scale == "any"):
            object.__setattr__(self, "scale", _scale_mode(self.scale))
        elements = whole_number(self.divisibility)
        if elements is None or elements < 1:
            raise ArgumentError(
                f"divisibility is {self.divisibility!r}; expected a number of elements, 1 at least"
            )
        object.__setattr__(self, "divisibility", elements)

    @property
    def unit_mode(self) -> int | None:
        """Which of the last two modes has stride 1: -1 or -2; None: any or none."""
        if self.stride is None:
            return None
        return -1 if self.stride[-1] == 1 else -2

    @property
    def alignment(self) -> int:
        """Bytes that divide the address and every stride but the unit one."""
        return self.divisibility * (self.dtype.itemsize if self.dtype is not None else 1)


def _scale_mode(given: Any) -> ScaleMode:
    try:
        return ScaleMode(given)
    except ValueError:
        modes = ", ".join(mode.value for mode in ScaleMode)
        raise ArgumentError(f"scale is {given!r}; expected {modes}, any, or None") from None


@dataclass(frozen=True)
class OperandsMetadata:
    """Base of the per-operation operand descriptions; the tensor fields carry operand names."""

    def __post_init__(self) -> None:
        for name in _tensor_fields(type(self)):
            if not isinstance(given := getattr(self, name), TensorAttributes):
                raise ArgumentError(f"{name} is {given!r}; expected TensorAttributes")

    @cached_property
    def tensors(self) -> dict[str, TensorAttributes]:
        """The tensor fields by name, in the order of the arguments' operands."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, TensorAttributes)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)


@dataclass(frozen=True)
class ProductOperandsMetadata(OperandsMetadata):
    """What matrix products have beside their tensors: two types, kept as the canonical ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("accumulator_type", "multiplication_type"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, dtype(given))


@dataclass(frozen=True)
class GemmOperandsMetadata(ProductOperandsMetadata):
    """Operands of a GEMM kernel.

    ``multiplication_type`` is set where the products are formed in another type than the
    operands are stored in (tfloat32 for float32 operands).
    """

    A: TensorAttributes
    B: TensorAttributes
    out: TensorAttributes
    accumulator_type: DType | None
    multiplication_type: DType | None = None


#: How what has a matrix per expert may be given.
EXPERTS = ("dense", "pointers", "any")


@dataclass(frozen=True)
class GroupedGemmOperandsMetadata(ProductOperandsMetadata):
    """Operands of a grouped GEMM kernel, see :class:`GemmOperandsMetadata`.

    Attributes:
        ragged: The mode that is cut into groups: ``"M"``, rows of A and out; ``"K"``, what is
            summed over; ``"any"``: either.
        experts: ``"dense"``: what has a matrix per expert, B or the out of ragged K, is one
            tensor; ``"pointers"``: the addresses of matrices; ``"any"``: either.
    """

    A: TensorAttributes
    B: TensorAttributes
    out: TensorAttributes
    offsets: TensorAttributes
    accumulator_type: DType | None
    ragged: str = "M"
    multiplication_type: DType | None = None
    experts: str = "dense"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("ragged", ("M", "K", "any")), ("experts", EXPERTS)):
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; expected one of {choices}")


@dataclass(frozen=True)
class NormOperandsMetadata(OperandsMetadata):
    """Matrices of a norm of rows. What is beside them (weights, statistics, ...) may be absent and
    is what rules are about; the accumulator is the type of the arithmetic."""

    x: TensorAttributes
    out: TensorAttributes
    accumulator_type: DType | None


@dataclass(frozen=True)
class GroupRowsOperandsMetadata(OperandsMetadata):
    """Operands of the sort of rows by group. Weights that are sorted with them may be absent and
    are what rules are about; the accumulator is the type that rows are counted in."""

    index: TensorAttributes
    offsets: TensorAttributes
    row_index: TensorAttributes
    place: TensorAttributes
    accumulator_type: DType | None


@dataclass(frozen=True)
class NormBackwardOperandsMetadata(OperandsMetadata):
    """The same of its gradient."""

    dy: TensorAttributes
    x: TensorAttributes
    dx: TensorAttributes
    accumulator_type: DType | None


@dataclass(frozen=True)
class SdpaOperandsMetadata(OperandsMetadata):
    """Operands of attention. What is beside them (lse, bias, lengths, ...) may be absent and is
    what rules are about; the accumulator is the type of scores and sums."""

    Q: TensorAttributes
    K: TensorAttributes
    V: TensorAttributes
    out: TensorAttributes
    accumulator_type: DType | None


@dataclass(frozen=True)
class SdpaBackwardOperandsMetadata(OperandsMetadata):
    """The same of its gradient."""

    Q: TensorAttributes
    K: TensorAttributes
    V: TensorAttributes
    out: TensorAttributes
    dO: TensorAttributes
    lse: TensorAttributes
    dQ: TensorAttributes
    dK: TensorAttributes
    dV: TensorAttributes
    accumulator_type: DType | None


@dataclass(frozen=True)
class DesignMetadata:
    """Base of the design descriptions: how a kernel is built."""

    def label(self) -> str:
        """The design's part of a kernel name."""
        return "_".join(str(getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True)
class BLASDesignMetadata(DesignMetadata):
    """Tiling of a matrix kernel.

    Attributes:
        tile_shape: (M, N, K) that one CTA computes at a time.
        cluster_shape: (M, N, K) CTAs of a cluster: those along M and N share operands, those along
            K have the parts of one tile.
    """

    tile_shape: tuple[int, int, int]
    cluster_shape: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile_shape", tuple(self.tile_shape))
        object.__setattr__(self, "cluster_shape", tuple(self.cluster_shape))

    def label(self) -> str:
        tile = "x".join(map(str, self.tile_shape))
        extents = 3 if self.cluster_shape[2:] > (1,) else 2
        cluster = "x".join(map(str, self.cluster_shape[:extents]))
        return f"tile{tile}_cluster{cluster}"


@dataclass(frozen=True)
class KernelMetadata:
    """One configuration of one kernel class.

    Attributes:
        kernel_name: Unique among the registered kernels.
        kernel_class: The class that ``rebuild`` constructs.
        operands: What is asked of each operand.
        design: How it is built (tile shape, cluster shape, stages, ...).
        min_cc: The lowest compute capability, as one number.
        epilogue: The graph of the fused epilogue, or the identity of one; None for a plain store.
        targets: Architectures with suffix; without any, ``min_cc`` and everything newer.
    """

    kernel_name: str
    kernel_class: type[Kernel]
    operands: OperandsMetadata
    design: DesignMetadata | None = None
    min_cc: int = 0
    epilogue: Graph | str | None = None
    targets: tuple[str, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        if not isinstance(self.targets, (tuple, list)):
            raise ArgumentError(
                f"targets is {self.targets!r}; expected a tuple of architectures, as in ('sm_90a',)"
            )
        targets = [target(one) for one in self.targets]
        object.__setattr__(self, "targets", tuple(map(str, targets)))
        is_asked = bool(self.min_cc)
        if targets and not is_asked:
            object.__setattr__(self, "min_cc", min(one.cc for one in targets))
        if not isinstance(self.operands, OperandsMetadata):
            raise ArgumentError(f"operands is {self.operands!r}; expected operands metadata")
        if not isinstance(self.kernel_class, type):
            raise ArgumentError(f"kernel_class is {self.kernel_class!r}; expected a class")
        if not isinstance(self.kernel_name, str):
            raise ArgumentError(f"kernel_name is {self.kernel_name!r}; expected a text")
        if self.design is not None and not isinstance(self.design, DesignMetadata):
            raise ArgumentError(f"design is {self.design!r}; expected design metadata, or None")
        if is_asked and not is_compute_capability(self.min_cc):
            raise ArgumentError(f"min_cc is {self.min_cc!r}; expected a number such as 90")
        if is_asked and targets and self.min_cc > (newest := max(one.cc for one in targets)):
            raise ArgumentError(
                f"min_cc is {self.min_cc} and targets are {', '.join(self.targets)}; expected "
                f"{newest} at most, or targets alone"
            )
        if not (self.epilogue is None or isinstance(self.epilogue, (Graph, str))):
            raise ArgumentError(f"epilogue is {self.epilogue!r}; expected a graph, or its identity")
        identity = [getattr(self, name) for name in _compared_fields(type(self))]
        object.__setattr__(self, "_hash", hash(tuple(identity)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def parsed_targets(self) -> tuple[Target, ...]:
        return targets_of(self.targets, self.min_cc)

    def runs_on(self, device: Target) -> bool:
        """Whether one of the targets does."""
        known, cc = self._runs_on, device.cc
        if cc not in known:
            known[cc] = any(one.runs_on(device) for one in self.parsed_targets)
        return known[cc]

    @cached_property
    def _runs_on(self) -> dict[int, bool]:
        """By compute capability, as every query asks of every kernel."""
        return {}

    @property
    def provider(self) -> str:
        """Name of the provider that the kernel class is registered with."""
        return self.kernel_class.provider_name()

    def rebuild(self) -> Kernel:
        """The kernel that this describes."""
        return self.kernel_class(self)

    def to_dict(self) -> dict[str, Any]:
        encoded = {name: encode(getattr(self, name)) for name in _compared_fields(type(self))}
        return {**encoded, "provider": self.provider}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KernelMetadata:
        """Inverse of ``to_dict``; raises ArgumentError for what does not describe a kernel."""
        try:
            return cls(**{name: decode(data[name]) for name in _compared_fields(cls)})
        except (KeyError, TypeError, AttributeError, ImportError, ValueError) as error:
            own = isinstance(error, AttributeError) and "'__main__'" in str(error)
            what = (
                ": classes of a script are in its process alone; move it to a module" if own else ""
            )
            raise ArgumentError(f"this does not describe a kernel: {error!r}{what}") from error

    @classmethod
    def from_json(cls, text: str) -> KernelMetadata:
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"this is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ArgumentError(f"expected a JSON object, got a {type(data).__name__}")
        return cls.from_dict(data)


#: Names of a class's fields: those of tensors, those that make an object, and those that make up
#: the identity.
_tensor_fields: Callable[[Any], tuple[str, ...]] = functools.cache(
    lambda cls: tuple(
        f.name for f in fields(cls) if f.type in ("TensorAttributes", TensorAttributes)
    )
)
_given_fields: Callable[[Any], tuple[str, ...]] = functools.cache(
    lambda cls: tuple(f.name for f in fields(cls) if f.init)
)
_compared_fields: Callable[[Any], tuple[str, ...]] = functools.cache(
    lambda cls: tuple(f.name for f in fields(cls) if f.compare)
)

#: What JSON has as a class and its fields.
_ENCODED = (TensorAttributes, OperandsMetadata, DesignMetadata)
#: What is the same in JSON.
_JSON_SCALARS = frozenset((type(None), bool, int, float, str))


def _path_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def encode(value: Any) -> Any:
    """As JSON has it; raises ArgumentError for what it cannot have."""
    if type(value) in _JSON_SCALARS:
        return value
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, ScaleMode):
        return {"scale": value.value}
    if isinstance(value, Graph):
        return {"epilogue": value.to_dict()}
    if isinstance(value, type):
        return {"class": _path_of(value)}
    if isinstance(value, _ENCODED):
        encoded = {name: encode(getattr(value, name)) for name in _given_fields(type(value))}
        return {"type": _path_of(type(value)), "fields": encoded}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, (int, float, str)):
        return value
    raise ArgumentError(f"{value!r} in a kernel's metadata cannot be written as JSON")


def decode(value: Any) -> Any:
    """What :func:`encode` was given, lists as tuples."""
    if type(value) in _JSON_SCALARS:
        return value
    if isinstance(value, list):
        return tuple([decode(v) for v in value])
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return dtype(value["dtype"])
    if "scale" in value:
        return ScaleMode(value["scale"])
    if "epilogue" in value:
        return Graph.from_dict(value["epilogue"])
    if "class" in value:
        return _class_at(value["class"], _kernel_base())
    cls = _class_at(value["type"], _ENCODED)
    return cls(**{name: decode(v) for name, v in value["fields"].items()})


def _kernel_base() -> type:
    from kernel_api.kernel import Kernel

    return Kernel


def _class_at(path: str, allowed: Any) -> type:
    """The class at ``module:qualname``, which must be one of the metadata's own kinds."""
    from kernel_api.provider import registered_class

    found: Any = registered_class(path)
    if found is None:
        module, _, qualname = path.partition(":")
        found = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, allowed)):
        raise ArgumentError(f"{path} is no kernel, operands or design class")
    return found
