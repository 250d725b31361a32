"""Operands: tensors as the registry sees them, whatever library made them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from math import gcd
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api._sketch import Sketch
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError

#: Alignment is counted up to this many bytes; no kernel asks for more.
MAX_ALIGNMENT = 128

_PARTS_OF_COMPLEX = frozenset(("float16", "float32", "float64"))


class Layout:
    """What there is to know of a tensor without its address, and what follows from that.

    Tensors that are alike share one (see :func:`_layout_of`): it stands for all of this in keys,
    by identity.

    Attributes:
        shape: Extents in elements.
        stride: Strides in elements.
        dtype: The canonical :class:`~kernel_api.dtypes.DType`.
        device: The torch device.
        on_meta: Whether that is ``meta``.
        may_be_negated: Whether it may be the imaginary part of something complex, whose conjugate
            has torch's negative bit.
        read_only: Whether an array says that it may not be written; torch's tensors cannot.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        element: DType,
        device: Any,
        read_only: bool = False,
    ) -> None:
        self.shape, self.stride, self.dtype, self.device = shape, stride, element, device
        self.read_only = read_only
        self.on_meta: bool = device.type == "meta"
        self.may_be_negated: bool = element.name in _PARTS_OF_COMPLEX

    @cached_property
    def unit_mode(self) -> int | None:
        """Which of the last two modes has stride 1: -1, -2, or None if neither has."""
        stride = self.stride
        if not stride:
            return None
        if stride[-1] == 1:
            return -1
        return -2 if len(stride) > 1 and stride[-2] == 1 else None

    @cached_property
    def stride_bits(self) -> int:
        """Every stride but the unit one in bytes, joined by or: its lowest bit divides them."""
        itemsize, stride, unit = self.dtype.itemsize, self.stride, self.unit_mode
        if unit == -1:
            stride = stride[:-1]
        elif unit == -2:
            stride = (*stride[:-2], stride[-1])
        bits = MAX_ALIGNMENT
        for one in stride:
            bits |= one * itemsize
        return bits

    @cached_property
    def span(self) -> int:
        """Bytes from the first element to behind the last."""
        if 0 in self.shape:
            return 0
        reach = sum((e - 1) * s for e, s in zip(self.shape, self.stride, strict=True))
        return (reach + 1) * self.dtype.itemsize


_Layouts = dict[tuple[Any, ...], Layout]

_layouts: _Layouts = {}
#: Apart from those of tensors, whose keys are of types that every Dynamo can hash.
_of_sketches: _Layouts = {}
_LAYOUTS_KEPT = 16384


def _layout_of(tensor: Any, *, read_only: bool = False, known: _Layouts = _layouts) -> Layout:
    """The one layout of tensors like this; those that are read only have another."""
    shape = tensor.shape
    look: tuple[Any, ...] = (tensor.dtype, shape, tensor.stride(), tensor.device)
    if read_only:
        look = (*look, read_only)
    try:
        found = known.get(look)
    except TypeError:  # sizes of a graph, which are symbols
        return _new_layout(*look)
    if found is None:
        if len(known) >= _LAYOUTS_KEPT:
            known.clear()  # those in use stay; others like them are asked about anew
        found = known.setdefault(look, _new_layout(*look))
    return found


def _new_layout(
    element: Any, shape: Any, stride: tuple[int, ...], device: Any, read_only: bool = False
) -> Layout:
    torch = sys.modules.get("torch")
    if torch is not None and torch.jit.is_tracing():
        raise traced_by_jit()
    return Layout(tuple(shape), stride, dtype(element), device, read_only)


def traced_by_jit() -> ArgumentError:
    return ArgumentError(
        "a call is traced by torch.jit.trace, whose sizes are no numbers and whose graphs hold no "
        "kernels of ours; use torch.compile or torch.export"
    )


class Operand:
    """A tensor with its shape, strides, element type and device read once.

    Attributes:
        tensor: The torch tensor (other DLPack tensors are viewed as one, without a copy).
        layout: All that is known of it but the address; the following come from there.
        shape: Extents in elements.
        stride: Strides in elements.
        dtype: The canonical :class:`~kernel_api.dtypes.DType`.
        device: The torch device.
    """

    __slots__ = ("_address", "_alignment", "device", "dtype", "layout", "shape", "stride", "tensor")

    #: Which elements share a scale; of a ScaledOperand.
    mode: Any = None
    #: Whether ``tensor`` has the addresses of matrices that lie anywhere.
    discrete: bool = False
    _address: int | None

    def __init__(self, tensor: Any, name: str = "operand") -> None:
        torch: Any = sys.modules.get("torch")
        plain = torch is not None and type(tensor) is torch.Tensor
        is_sketch = not plain and isinstance(tensor, Sketch)
        read_only = False
        if not plain and not is_sketch and (torch is None or not isinstance(tensor, torch.Tensor)):
            read_only = is_read_only(tensor)
            tensor = as_torch(tensor, name)
            torch = sys.modules["torch"]
            plain = type(tensor) is torch.Tensor
        if not is_sketch and (tensor.layout is not torch.strided or tensor.is_nested):
            kind = "nested" if tensor.is_nested else tensor.layout
            raise ArgumentError(f"{name} is a {kind} tensor; expected a strided one")
        self.tensor = tensor
        known = _of_sketches if is_sketch else _layouts
        self.layout = layout = _layout_of(tensor, read_only=read_only, known=known)
        # Whole numbers are not asked, which torch's compiler could not trace.
        if layout.may_be_negated and not is_sketch and tensor.is_neg():
            raise ArgumentError(
                f"{name} has torch's negative bit set, as imaginary parts of conjugates have, "
                f"and kernels read memory; pass {name}.resolve_neg(), but for an output a tensor "
                f"of its own, and copy that back"
            )
        if not is_sketch and torch.autograd.forward_ad._current_level >= 0:
            _refuse_tangent(tensor, name)
        self.shape: tuple[int, ...] = layout.shape
        self.stride: tuple[int, ...] = layout.stride
        self.dtype: DType = layout.dtype
        self.device = layout.device
        self._alignment: int | None = None
        # Others than plain tensors may be without memory; those on meta tell their offset.
        self._address = None
        if plain and not layout.on_meta:
            try:
                self._address = tensor.data_ptr()
            except RuntimeError as error:
                raise _no_memory(name) from error

    def __getattr__(self, name: str) -> Any:
        """Of an operand that was not read yet, see :meth:`ScaledOperand.unread`."""
        if name == "tensor" or name not in Operand.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._complete()
        return getattr(self, name)

    def _complete(self) -> None:
        Operand.__init__(self, self.tensor)

    def __reduce__(self) -> Any:
        """A copy is of a copy of the tensor, which lies elsewhere."""
        return Operand, (self.tensor,)

    def maker(self) -> Callable[[Any], Any] | None:
        """Makes an operand like this of another tensor, and keeps none but a scale; None where
        that is the tensor itself."""
        return None

    def viewed(self, tensor: Any, name: str) -> Operand:
        """The same memory with other modes.

        Raises ArgumentError where a scale would be lost.
        """
        if self.mode is not None:
            raise ArgumentError(f"{name} is a {type(self).__name__}; expected a plain tensor")
        made = Operand(tensor, name)
        if self.layout.read_only:
            made.layout = _layout_of(tensor, read_only=True)
        return made

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def unit_mode(self) -> int | None:
        """Which of the last two modes has stride 1: -1, -2, or None if neither has."""
        return self.layout.unit_mode

    @property
    def has_data(self) -> bool:
        """False for meta and fake tensors: they can be compiled for, not run on."""
        return not (self.tensor.is_meta or is_fake(self.tensor))

    @property
    def alignment(self) -> int:
        """Bytes, a power of two, that divide the address and every stride but the unit one.

        Meta and fake tensors have no address: their storage offset stands for it.
        """
        if self._alignment is None:
            start = self._address or self.address
            if not start:
                start = self.tensor.storage_offset() * self.dtype.itemsize
            bits = self.layout.stride_bits | start
            self._alignment = bits & -bits
        return self._alignment

    @property
    def address(self) -> int:
        """Of the first element; 0 for what has no memory (meta, fake and empty tensors)."""
        if self._address is None:
            self._address = self.tensor.data_ptr() if self.has_data else 0
        return self._address

    @property
    def span(self) -> int:
        """Bytes from the first element to behind the last."""
        return self.layout.span

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}:{list(self.stride)} on {self.device}"


def require_tensor(value: Any, name: str) -> None:
    """Raise ArgumentError for what has no shape: others are read like tensors."""
    if getattr(value, "is_nested", False):
        Operand(value, name)  # which refuses it
    elif not hasattr(value, "shape"):
        as_torch(value, name)


def require_tensors(**given: Any) -> None:
    """Raise ArgumentError for what is no dense tensor of torch's, which alone has gradients."""
    import torch

    for name, one in given.items():
        if not isinstance(one, torch.Tensor):
            found = "None" if one is None else f"a {type(one).__name__}"
            raise ArgumentError(f"{name} is {found}; expected a torch tensor")
        if one.is_nested or one.layout is not torch.strided:
            kind = "nested" if one.is_nested else one.layout
            raise ArgumentError(f"{name} is a {kind} tensor; expected a strided one")
        if not torch.compiler.is_compiling() and not is_fake(one):
            try:
                one.data_ptr()
            except RuntimeError as error:
                raise _no_memory(name) from error
            if torch.autograd.forward_ad._current_level >= 0:
                _refuse_tangent(one, name)
    if torch.compiler.is_compiling():
        from kernel_api._transforms import check_traced

        check_traced(**given)


def require_one_device(**given: Any) -> None:
    """Raise ArgumentError where a tensor is on another device than the first."""
    (first, one), *others = given.items()
    for name, other in others:
        if other.device != one.device:
            raise ArgumentError(
                f"{name} is on {other.device} but {first} is on {one.device}; expected one device "
                f"for all"
            )


def _refuse_tangent(tensor: Any, name: str) -> None:
    if _has_tangent(tensor):
        raise ArgumentError(
            f"{name} has a tangent (torch.autograd.forward_ad), which kernels would lose; they "
            f"have gradients of the backward mode alone"
        )


def _has_tangent(tensor: Any) -> bool:
    """Whether torch carries a tangent of it along."""
    return sys.modules["torch"].autograd.forward_ad.unpack_dual(tensor).tangent is not None


def _no_memory(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name} has no memory of its own, as inside torch.func's vmap, grad and jvp, which "
        f"kernels cannot follow; call it outside of them"
    )


def as_torch(value: Any, name: str) -> Any:
    """A tensor of any library as one of torch, in the same memory.

    Raises ArgumentError where that cannot be.
    """
    if isinstance(value, Operand):
        return value.tensor
    if not hasattr(value, "__dlpack__"):
        raise ArgumentError(
            f"{name} is a {type(value).__name__}; expected a torch tensor or one with __dlpack__"
        )
    import torch

    if isinstance(value, torch.Tensor):
        return value
    strides = getattr(value, "strides", None)
    if isinstance(strides, tuple) and any(step < 0 for step in strides):
        # torch ends the process over them.
        raise ArgumentError(
            f"{name} has strides of {strides} bytes; a tensor has none below 0: copy it, as "
            f"numpy.ascontiguousarray does"
        )
    try:
        return torch.utils.dlpack.from_dlpack(value)
    except Exception as error:
        raise ArgumentError(f"{name} could not be viewed through DLPack: {error}") from error


def is_read_only(value: Any) -> bool:
    """Whether an array, such as one of NumPy, says that it may not be written."""
    return getattr(getattr(value, "flags", None), "writeable", True) is False


def is_fake(tensor: Any) -> bool:
    """Whether it stands for a tensor in a graph: that of torch.export, for one."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:  # to ask more takes microseconds
        return False
    from torch._subclasses import fake_tensor

    return fake_tensor.is_fake(tensor)


def becomes_node(tensor: Any) -> bool:
    """Whether a call on it becomes a node of a graph: torch.compile, torch.export, make_fx."""
    import torch

    return torch.compiler.is_compiling() or is_fake(tensor) or _is_traced()


def _is_traced() -> bool:
    """Whether torch traces whatever is called, be it of tensors that have memory: constants of a
    module that torch.export traces, and all operands of make_fx."""
    torch = sys.modules["torch"]
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(one) is not None for one in (modes.FAKE, modes.PROXY))


def without_repetitions(operand: Operand) -> Any:
    """A view that has each element once: of modes of stride 0, the first one."""
    tensor = operand.tensor
    for mode, stride in enumerate(operand.stride):
        if stride == 0:
            tensor = tensor.narrow(mode, 0, min(1, tensor.shape[mode]))
    return tensor


def overlap(a: Operand, b: Operand) -> bool:
    """Whether two operands share memory. Never False for those that do.

    Slices of one buffer side by side (columns of a packed projection, every other element) are
    told apart when what lies side by side in each is one row, and all other strides are multiples
    of one row pitch.
    """
    start_a, start_b = a._address or a.address, b._address or b.address
    if start_a < start_b:
        if start_a + a.layout.span <= start_b:
            return False
    elif start_b + b.layout.span <= start_a:
        return False
    if not start_a or not start_b or a.device != b.device:
        return False
    (row_a, pitch_a), (row_b, pitch_b) = _rows(a), _rows(b)
    pitch = gcd(pitch_a, pitch_b)
    if not pitch:
        return True
    offset = (start_b - start_a) % pitch
    return offset < row_a or offset + row_b > pitch


def side_by_side(operands: Iterable[Operand]) -> bool:
    """Whether all of them end before the next one begins, so that no two share memory: sooner
    told than of each two."""
    end = 0
    for start, span in sorted([(o._address or o.address, o.layout.span) for o in operands]):
        if start < end:
            return False
        end = start + span
    return True


def _rows(operand: Operand) -> tuple[int, int]:
    """Bytes that lie side by side from the first element on, and what all that is beside them is
    a multiple of bytes away; 0 if there is nothing else."""
    length = 1
    rest = sorted(
        (stride, extent)
        for extent, stride in zip(operand.shape, operand.stride, strict=True)
        if extent > 1
    )
    while rest and rest[0][0] == length:
        length *= rest.pop(0)[1]
    itemsize = operand.dtype.itemsize
    return length * itemsize, gcd(*(stride * itemsize for stride, _ in rest))


def self_overlapping(operand: Operand) -> bool:
    """Whether two indices of the operand are the same element (a broadcast, a window)."""
    return repeats(operand.shape, operand.stride)


def repeats(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two indices of a tensor that lies like this are the same element."""
    if 0 in shape:
        return False
    if len(shape) == 2 and stride[1] == 1 and stride[0] >= shape[1]:
        return False
    reach = 0
    modes = sorted(
        (stride, extent) for extent, stride in zip(shape, stride, strict=True) if extent > 1
    )
    for step, extent in modes:
        if step <= reach:
            return _meet(modes)
        reach += (extent - 1) * step
    return False


def _meet(modes: list[tuple[int, int]]) -> bool:
    """Whether modes of ascending (stride, extent) that are not within each other have an element
    twice; of more than two that take turns it is assumed."""
    while modes[-1][0] > sum((extent - 1) * step for step, extent in modes[:-1]):
        modes = modes[:-1]
    if len(modes) != 2:
        return True
    (a, a_extent), (b, b_extent) = modes
    common = gcd(a, b)  # b / common steps of a are a / common steps of b
    return not common or (b // common < a_extent and a // common < b_extent)
