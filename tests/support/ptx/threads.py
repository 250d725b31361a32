"""Threads that execute an instruction together, and their registers.

What executes an instruction knows nothing but this: it reads and writes operands as numpy arrays
with one element per thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from support.ptx.arithmetic import BITS, PREDICATE, U32
from support.ptx.errors import EmulationError
from support.ptx.memory import WARP
from support.ptx.program import (
    Address,
    Immediate,
    Negated,
    Operand,
    Program,
    Register,
    Special,
    Symbol,
    Vector,
)

#: Which of the threads execute an instruction; None for all.
Mask = np.ndarray | None


class Threads(ABC):
    """Of whole warps.

    Attributes:
        threads: Their numbers, counted through all blocks.
        parameters: What each parameter of the program holds.
        counter: The index of the instruction that is being executed.
    """

    program: Program
    memory: Any
    shared: Any
    parameters: dict[str, bytes]
    threads: np.ndarray
    counter: int

    @abstractmethod
    def bits_of(self, register: Register) -> np.ndarray:
        """The register of each thread; KeyError if none of them has written it."""

    @abstractmethod
    def set_bits(self, register: Register, bits: np.ndarray, mask: Mask) -> None:
        """`bits`: of each thread, or one element for all."""

    @abstractmethod
    def special(self, name: str) -> np.ndarray | int:
        """A register that the hardware sets; KeyError if it is not known."""

    def address_of(self, symbol: Symbol) -> int:
        """Of a variable; KeyError if it is not known."""
        return self.program.shared[symbol.name]

    def parameter_at(self, address: int, size: int) -> bytes:
        """Bytes of the space of parameters, of which `address_of` knows where one begins."""
        raise EmulationError(f"reads {size} bytes at {address:#x} of parameters, which are not one")

    # Operands ----------------------------------------------------------------------------------

    def read(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """The value for each thread; of one element if it is the same for all."""
        if isinstance(operand, Register):
            pass
        elif isinstance(operand, Immediate):
            return operand.array(dtype)
        elif isinstance(operand, Vector):
            return self._packed(operand, dtype)
        elif isinstance(operand, Negated):
            return ~self.read(operand.predicate, dtype)
        bits = self._bits(operand)
        if bits.dtype.itemsize != dtype.itemsize:
            bits = bits.astype(f"u{dtype.itemsize}")
        return bits.view(dtype)

    def _bits(self, operand: Operand) -> np.ndarray:
        try:
            if isinstance(operand, Register):
                return self.bits_of(operand)
            if isinstance(operand, Special):
                return np.atleast_1d(self.special(operand.name)).astype(U32)
            if isinstance(operand, Symbol):
                return np.array([self.address_of(operand)], BITS["b64"])
        except KeyError:
            if isinstance(operand, Register):
                raise EmulationError(f"reads {operand.name}, which has no value") from None
        raise EmulationError(f"reads {operand}, which the emulator does not know")

    def _packed(self, operand: Vector, dtype: np.dtype) -> np.ndarray:
        """The elements side by side, the first one lowest."""
        part = np.dtype(f"u{dtype.itemsize // len(operand.elements)}")
        parts = [self.everywhere(self.read(e, part)) for e in operand.elements]
        return np.stack(parts, axis=-1).view(dtype)[:, 0]

    def write(self, operand: Operand, value: np.ndarray, mask: Mask) -> None:
        if isinstance(operand, Vector):
            part = np.dtype(f"u{value.dtype.itemsize // len(operand.elements)}")
            parts = self.everywhere(value)[:, None].view(part)
            for i, element in enumerate(operand.elements):
                self.write(element, np.ascontiguousarray(parts[:, i]), mask)
            return
        if isinstance(operand, Symbol) and operand.name == "_":
            return
        if not isinstance(operand, Register):
            raise EmulationError(f"writes {operand}, which is no register")
        if operand.width > value.dtype.itemsize:  # signed values keep their sign
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{operand.width}")
        container = np.dtype(f"u{operand.width}") if operand.width else PREDICATE
        self.set_bits(operand, value.view(container), mask)

    def everywhere(self, value: np.ndarray) -> np.ndarray:
        """One contiguous element for each thread."""
        if value.size == self.threads.size:
            return value
        return np.full(self.threads.size, value[0], value.dtype)

    def addresses(self, operand: Operand, dtype: np.dtype, mask: Mask) -> np.ndarray:
        """Those of the active threads."""
        assert isinstance(operand, Address)
        base = self.everywhere(self.read(operand.base, dtype))
        addresses = base + Immediate(operand.offset).array(dtype)  # wraps around
        return (addresses if mask is None else addresses[mask]).astype(np.int64)

    def active(self, mask: Mask) -> np.ndarray:
        """The numbers of the active threads."""
        return self.threads if mask is None else self.threads[mask]

    @staticmethod
    def chosen(mask: Mask) -> np.ndarray | slice:
        """Index of the active threads, in arrays with one element per thread."""
        return slice(None) if mask is None else mask

    def require_whole_warps(self, mask: Mask) -> None:
        if mask is not None:
            warps = mask.reshape(-1, WARP)
            if (warps.any(axis=1) != warps.all(axis=1)).any():
                raise EmulationError("is executed by a part of a warp")
