"""Operands with scales: real value = stored value × scale."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from typing import Any, cast

from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand
from kernel_api.utils import is_read, untraced

BLOCK = 128


class ScaleMode(enum.Enum):
    """Which stored elements share a scale. Scales are float32.

    PER_TENSOR    scale (): all of them
    PER_ROW       one per index that is not contracted: A and out (M,), B (N,)
    BLOCK_1x128   A (M, ceil(K/128))
    BLOCK_128x128 B (ceil(K/128), ceil(N/128))

    Batched operands put L in front; () serves all batches too.
    """

    PER_TENSOR = "per_tensor"
    PER_ROW = "per_row"
    BLOCK_1x128 = "block_1x128"
    BLOCK_128x128 = "block_128x128"


#: Modes in which the scale varies along the contracted index.
BLOCK_MODES = (ScaleMode.BLOCK_1x128, ScaleMode.BLOCK_128x128)


#: Of what is read together; addresses, strides and rows are multiples.
VECTOR_BYTES = 16


class ScaledOperand(Operand):
    """A tensor stored in units of a scale: real value = ``tensor`` × ``scale``.

    Args:
        tensor: The stored values, usually of an 8-bit type.
        scale: float32, of the shape that ``mode`` says; checked by the arguments that it joins.
            Any strides will do. One per row of B is read fastest where columns of B are a multiple
            of 4, their scales side by side, and addresses and other strides multiples of 16 bytes.
            Those of out are 2⁻¹²⁶ at least: kernels multiply with the inverse.
        mode: Which elements share a scale.

    Raises:
        ArgumentError: ``mode`` or the scale's type is not one of those, or ``tensor`` or the scale
            has a scale already.
    """

    __slots__ = ("mode", "scale")

    def __init__(self, tensor: Any, scale: Any, mode: ScaleMode) -> None:
        if is_read() and isinstance(mode, ScaleMode) and _are_tensors(tensor, scale):
            # What a graph holds: the operator that it goes to reads the rest.
            self._hold(tensor, scale, mode)
        else:
            self._read(tensor, scale, mode)

    @classmethod
    def unread(cls, tensor: Any, scale: Any, mode: ScaleMode) -> ScaledOperand:
        """Of what was made to fit: all else is read, and checked, where somebody asks for it. Calls
        like an earlier one do not, and take less time."""
        if not _are_tensors(tensor, scale):
            return cls(tensor, scale, mode)
        made = cls.__new__(cls)
        made._hold(tensor, scale, mode)
        return made

    def _hold(self, tensor: Any, scale: Any, mode: ScaleMode) -> None:
        self.tensor, self.shape, self.mode = tensor, tensor.shape, mode
        self.scale = Operand.__new__(Operand)
        self.scale.tensor, self.scale.shape = scale, scale.shape

    def _complete(self) -> None:
        self._read(self.tensor, self.scale.tensor, self.mode)

    def __reduce__(self) -> Any:
        return type(self), (self.tensor, self.scale.tensor, self.mode)

    @untraced
    def _read(self, tensor: Any, scale: Any, mode: ScaleMode) -> None:
        register_with_torch()
        for name, given in (("tensor", tensor), ("scale", scale)):
            if isinstance(given, Operand) and (given.mode is not None or given.discrete):
                raise ArgumentError(
                    f"{name} is a {type(given).__name__}; expected a tensor without a scale of its "
                    f"own"
                )
        super().__init__(tensor)
        if not isinstance(mode, ScaleMode):
            names = ", ".join(str(m) for m in ScaleMode)
            raise ArgumentError(f"mode is {mode!r}; expected one of {names}")
        self.scale = Operand(scale, "scale")
        if self.scale.dtype is not dtype("float32"):
            raise ArgumentError(f"scale is {self.scale.dtype}; expected float32")
        self.mode = mode

    def maker(self) -> Callable[[Any], Any] | None:
        return functools.partial(ScaledOperand, scale=self.scale, mode=self.mode)

    def __repr__(self) -> str:
        return f"{super().__repr__()} x {self.mode.value} scale"


_is_registered = False


def register_with_torch() -> None:
    """Let torch look into operands as it does into lists, which may put back anything in the place
    of a tensor: so torch.export takes them; and load them by ``torch.load(weights_only=True)``.
    Nothing where that is done, torch is not there, or half of it while another thread imports it.
    """
    global _is_registered

    torch = sys.modules.get("torch")
    if _is_registered or getattr(torch, "serialization", None) is None:
        return
    from torch.utils import _pytree

    def taken_apart(operand: ScaledOperand) -> tuple[list[Any], str]:
        return [operand.tensor, operand.scale.tensor], operand.mode.value

    def named(operand: ScaledOperand) -> tuple[list[Any], str]:
        parts, mode = taken_apart(operand)
        keys = map(_pytree.GetAttrKey, ("tensor", "scale"))
        return list(zip(keys, parts, strict=True)), mode

    def put_together(parts: Any, mode: str) -> ScaledOperand:
        tensor, scale = parts
        made = ScaledOperand.__new__(ScaledOperand)
        made.tensor, made.mode, made.scale = tensor, ScaleMode(mode), Operand.__new__(Operand)
        made.scale.tensor = scale
        return made

    _is_registered = True
    _pytree.register_pytree_node(
        *(ScaledOperand, taken_apart, put_together),
        serialized_type_name="kernel_api.ScaledOperand",
        flatten_with_keys_fn=named,
    )
    cast(Any, torch).serialization.add_safe_globals([ScaledOperand, ScaleMode])


register_with_torch()  # or where torch is loaded with the one-call forms


def _are_tensors(*given: Any) -> bool:
    import torch

    return all(isinstance(one, torch.Tensor) for one in given)


def in_vectors(operand: Any) -> bool:
    """Whether scales of neighbours can be read together: one per row, side by side, in whole
    vectors."""
    if operand.mode is not ScaleMode.PER_ROW:
        return False
    scale: Operand = operand.scale
    whole = scale.shape[-1] * scale.dtype.itemsize % VECTOR_BYTES == 0
    return whole and scale.unit_mode == -1 and scale.alignment % VECTOR_BYTES == 0


def check_scale(name: str, operand: ScaledOperand, modes: str, contracted: str) -> None:
    """Raise ArgumentError unless the scale has the shape that its mode asks.

    Args:
        modes: Letters of the operand's last two modes, ``"MK"``.
        contracted: The letter that is summed over.
    """
    shape = expected_scale_shape(name, operand, modes, contracted)
    batch = operand.shape[:-2]
    found = operand.scale.shape
    if found == (*batch, *shape) or (found == () and operand.mode is ScaleMode.PER_TENSOR):
        return
    letters = f"({', '.join(('L' if batch else '') + modes)})"
    raise ArgumentError(
        f"{name}'s {operand.mode.value} scale has shape {found}; expected {(*batch, *shape)} "
        f"for {name} {letters} = {operand.shape}"
    )


def expected_scale_shape(
    name: str, operand: ScaledOperand, modes: str, contracted: str
) -> tuple[int, ...]:
    """Shape of the scale of one matrix."""
    extents = dict(zip(modes, operand.shape[-2:], strict=True))
    if operand.mode is ScaleMode.PER_TENSOR:
        return ()
    if operand.mode is ScaleMode.PER_ROW:
        return (extents[modes.replace(contracted, "")[0]],)
    blocked = {ScaleMode.BLOCK_1x128: "MK", ScaleMode.BLOCK_128x128: "KN"}[operand.mode]
    if modes != blocked:
        raise ArgumentError(
            f"{name} carries a {operand.mode.value} scale; that is for ({', '.join(blocked)}) "
            f"operands, {name} is ({', '.join(modes)})"
        )
    blocks = {letter: -(-extent // BLOCK) for letter, extent in extents.items()}
    return (extents["M"], blocks["K"]) if blocked == "MK" else (blocks["K"], blocks["N"])


def expanded_scale(operand: ScaledOperand, modes: str, contracted: str) -> Any:
    """The scale as a tensor that broadcasts against the operand's."""
    scale = operand.scale.tensor
    if operand.mode is ScaleMode.PER_TENSOR:
        return scale.reshape(*scale.shape, 1, 1)
    if operand.mode is ScaleMode.PER_ROW:
        return scale.unsqueeze(-1 if modes[1] == contracted or contracted not in modes else -2)
    rows, columns = operand.shape[-2:]
    if operand.mode is ScaleMode.BLOCK_128x128:
        scale = scale.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    return scale.repeat_interleave(BLOCK, dim=-1)[..., :columns]
