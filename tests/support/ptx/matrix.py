"""Fragments of ldmatrix and mma.sync, as the PTX ISA lays them out over the lanes of a warp.

With groupID = lane / 4 and threadID_in_group = lane % 4, element i of a lane lies at

                A (M × K)                     B (K × N)                    C, D (M × N)
k16, 16 bits    row  group (+ 8 if i & 2)     row  2 · tid + i % 2         row  group
                col  2 · tid + i % 2               (+ 8 if i & 2)               (+ 8 if i & 2)
                     (+ 8 if i & 4)           col  group                   col  2 · tid + i % 2
k8, tf32        row  group (+ 8 if i & 1)     row  tid (+ 4 if i & 1)      the same
                col  tid (+ 4 if i & 2)       col  group
k32, 8 bits     row  group (+ 8 if i & 4)     row  4 · tid + i % 4         the same
                col  4 · tid + i % 4               (+ 16 if i & 4)
                     (+ 16 if i & 8)          col  group
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from support.ptx.arithmetic import F32

_LANE = np.arange(32)[:, None]
_GROUP, _TID = _LANE // 4, _LANE % 4


def _bit(i: np.ndarray, value: int) -> np.ndarray:
    return (i & value) // value


@dataclass(frozen=True)
class Fragment:
    """Where the elements of a matrix are in a warp: index arrays of (lanes, elements)."""

    rows: np.ndarray
    columns: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.rows.max()) + 1, int(self.columns.max()) + 1

    def gather(self, elements: np.ndarray) -> np.ndarray:
        """(warps, lanes, elements) in registers → (warps, rows, columns)."""
        matrix = np.zeros((len(elements), *self.shape), elements.dtype)
        matrix[:, self.rows, self.columns] = elements
        return matrix

    def scatter(self, matrix: np.ndarray) -> np.ndarray:
        """(warps, rows, columns) → (warps, lanes, elements)."""
        return matrix[:, self.rows, self.columns]


_i4, _i8, _i2, _i16 = np.arange(4), np.arange(8), np.arange(2), np.arange(16)
ACCUMULATOR_M16N8 = Fragment(_GROUP + 8 * _bit(_i4, 2), 2 * _TID + _i4 % 2)
A_M16K16 = Fragment(_GROUP + 8 * _bit(_i8, 2), 2 * _TID + _i8 % 2 + 8 * _bit(_i8, 4))
B_K16N8 = Fragment(2 * _TID + _i4 % 2 + 8 * _bit(_i4, 2), _GROUP + 0 * _i4)
A_M16K8_TF32 = Fragment(_GROUP + 8 * _bit(_i4, 1), _TID + 4 * _bit(_i4, 2))
B_K8N8_TF32 = Fragment(_TID + 4 * _bit(_i2, 1), _GROUP + 0 * _i2)
A_M16K32 = Fragment(_GROUP + 8 * _bit(_i16, 4), 4 * _TID + _i16 % 4 + 16 * _bit(_i16, 8))
B_K32N8 = Fragment(4 * _TID + _i8 % 4 + 16 * _bit(_i8, 4), _GROUP + 0 * _i8)


@dataclass(frozen=True)
class MatrixMultiply:
    """One shape and type of mma.sync with 32-bit accumulators.

    Products are summed in float64 and rounded once to float32: closer than any hardware. Of tf32
    operands the 13 lowest bits are dropped, as hardware does. Sums of integers are clamped.
    """

    A: Fragment
    B: Fragment
    element: np.dtype
    accumulator: np.dtype = F32

    def operand(self, fragment: Fragment, registers: list[np.ndarray]) -> np.ndarray:
        """32-bit registers of (threads,) → (warps, rows, columns) in float64."""
        words = np.stack(registers, axis=-1).reshape(-1, 32, len(registers))
        if self.element == np.float32:
            words = words & np.uint32(0xFFFFE000)
        return fragment.gather(words.view(self.element).astype(np.float32)).astype(np.float64)

    def __call__(
        self, A: list[np.ndarray], B: list[np.ndarray], C: list[np.ndarray]
    ) -> list[np.ndarray]:
        """D = A · B + C; all as lists of 32-bit registers, each (threads,)."""
        product = self.operand(self.A, A) @ self.operand(self.B, B)
        words = np.stack(C, axis=-1).reshape(-1, 32, len(C))
        accumulator = ACCUMULATOR_M16N8.gather(words.view(self.accumulator)).astype(np.float64)
        total = product + accumulator
        if self.accumulator.kind == "i":
            total = total.clip(np.iinfo(self.accumulator).min, np.iinfo(self.accumulator).max)
        result = ACCUMULATOR_M16N8.scatter(total.astype(self.accumulator))
        columns = np.moveaxis(result.reshape(-1, len(C)), -1, 0)
        return [np.ascontiguousarray(column).view(np.uint32) for column in columns]


MULTIPLIES = {
    f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32": MatrixMultiply(
        A_M16K16, B_K16N8, np.dtype(element)
    )
    for name, element in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16))
}
MULTIPLIES["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"] = MatrixMultiply(
    A_M16K8_TF32, B_K8N8_TF32, np.dtype(np.float32)
)
MULTIPLIES["mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"] = MatrixMultiply(
    A_M16K32, B_K32N8, np.dtype(np.int8), np.dtype(np.int32)
)


def load_fragments(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """ldmatrix of 8 × 8 elements of 16 bits.

    Lane t receives row t / 4, elements 2 · (t % 4) and the next, the first in the low half; of a
    transposed matrix the same.

    Args:
        rows: (..., 8, 16) bytes of the rows.

    Returns:
        (..., 32) registers of 32 bits.
    """
    elements = rows.view(np.uint16)
    if transposed:
        elements = np.swapaxes(elements, -1, -2)
    words = np.ascontiguousarray(elements).view(np.uint32)  # (..., 8, 4), lanes in this order
    return words.reshape(*words.shape[:-2], 32)


def store_fragments(words: np.ndarray, transposed: bool) -> np.ndarray:
    """stmatrix, the reverse: (..., 32) registers → (..., 8, 16) bytes of the rows."""
    elements = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape[:-1], 8, 8)
    if transposed:
        elements = np.swapaxes(elements, -1, -2)
    return np.ascontiguousarray(elements).view(np.uint8)
