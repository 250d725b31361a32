"""wgmma: matrix products of a warp group, whose operands lie in shared memory.

A matrix descriptor says where: the start address, two byte offsets and the swizzle. In pieces of 16
bytes, with w of them in a row of the swizzle's span (1, 2, 4 or 8), piece c of row r lies at

    K-major     r % 8 · w + r / 8 · stride + c               (no swizzle: c · leading)
    MN-major    r % 8 · w + r / 8 · stride + c % w + c / w · leading

where r counts rows of M or N and c pieces along K, or for MN-major r counts along K and c pieces
along M or N; without a swizzle, MN-major swaps the two offsets. The swizzle then applies to
addresses.

D has 64 rows: 16 for each warp; in each 8 rows of 8 columns a thread has 2 neighbouring elements.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from support.ptx.arithmetic import PREDICATE, TYPES, U32
from support.ptx.errors import EmulationError
from support.ptx.ordered_memory import GRANULE, AsyncRead
from support.ptx.program import Immediate, Instruction, Operand, Register, Vector
from support.ptx.tensor_map import bits, swizzled
from support.ptx.threads import Mask
from support.ptx.warps import GROUP, Gang, Suspend, Warp

ROWS = 64

_TF32_DROPPED = np.uint32(0xFFFFE000)
ELEMENTS: dict[str, np.dtype] = {
    "f16": np.dtype("f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype("f4"),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype("i1"),
    "u8": np.dtype("u1"),
}
_K_BYTES = 32  # of every wgmma: k16 of 16-bit elements, k8 of tf32, k32 of bytes


@dataclass(frozen=True)
class Descriptor:
    """Offsets in bytes; the swizzle: 0 none, 1 to 3: 32 to 128 bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def decode(cls, value: int) -> Descriptor:
        if bits(value, 49, 3):
            raise EmulationError("a matrix descriptor with a base offset, which is not known")
        layout = bits(value, 62, 2)  # 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes
        return cls(
            16 * bits(value, 0, 14),
            16 * bits(value, 16, 14),
            16 * bits(value, 32, 14),
            (4 - layout) % 4,
        )

    def addresses(self, extent: int, k: int, transposed: bool) -> np.ndarray:
        """Of the pieces of 16 bytes: (extent, 2) if K-major, (k, extent / 8) if not."""
        pieces = _pieces(self.leading, self.stride, self.swizzle, extent, k, transposed)
        return swizzled(self.start + pieces, self.swizzle)


@lru_cache
def _pieces(
    leading: int, stride: int, swizzle: int, extent: int, k: int, transposed: bool
) -> np.ndarray:
    """Their addresses relative to the start, before the swizzle."""
    row_bytes = 16 << swizzle
    per_row = 1 << swizzle
    if not transposed:
        row, piece = np.arange(extent)[:, None], np.arange(_K_BYTES // 16)
        along = 16 * piece if swizzle else leading * piece
        return row % 8 * row_bytes + row // 8 * stride + along
    row, piece = np.arange(k)[:, None], np.arange(extent // 8)
    if not swizzle:
        leading, stride = stride, leading
    return (
        row % 8 * row_bytes + row // 8 * stride + piece % per_row * 16 + piece // per_row * leading
    )


def _matrix(data: np.ndarray, element: np.dtype, transposed: bool, extent: int) -> np.ndarray:
    """Pieces → (extent, k), in float64 or int64."""
    if element == np.float32:
        data = (np.ascontiguousarray(data).view(U32) & _TF32_DROPPED).view(np.uint8)
    values = np.ascontiguousarray(data).view(element).reshape(len(data), -1)
    if transposed:
        values = values.T
    assert len(values) == extent
    return values.astype(np.int64 if element.kind in "iu" else np.float64)


# Registers ----------------------------------------------------------------------------------------

_THREAD = np.arange(128)[:, None]
_ROW, _TID = 16 * (_THREAD // 32) + _THREAD % 32 // 4, _THREAD % 4


@lru_cache
def accumulator_indices(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each thread's elements: (128, columns / 2) each."""
    i = np.arange(columns // 2)
    return _ROW + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * _TID + i % 2


@lru_cache
def operand_indices(itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Of A in four registers."""
    each = 4 // itemsize
    i = np.arange(4 * each)
    register, part = i // each, i % each
    row = _ROW + 8 * (register % 2)
    return row, each * _TID + part + 4 * each * (register // 2) + 0 * row


def _registers_of(gang_or_op: Gang, operand: Vector) -> np.ndarray:
    """(128, registers)"""
    return np.stack([gang_or_op.everywhere(gang_or_op.read(e, U32)) for e in operand.elements], -1)


@dataclass(eq=False)
class _Multiply:
    """An issued wgmma; executed once, at any time until a warp has waited for it."""

    gang: Gang
    accumulators: Vector
    type: str
    A: np.ndarray | Descriptor  # values (64, k), or where they are
    B: Descriptor
    transposed: tuple[bool, bool]
    signs: tuple[int, int]
    columns: int
    elements: tuple[np.dtype, np.dtype]
    accumulate: bool
    saturate: bool
    granules: dict[str, np.ndarray]
    readings: list[AsyncRead]
    done: bool = False

    def execute(self) -> None:
        if self.done:
            return
        self.done = True
        k = _K_BYTES // self.elements[0].itemsize
        B = self._fetch("B", self.columns, self.elements[1], self.transposed[1])
        A = self.A
        if isinstance(A, Descriptor):
            A = self._fetch("A", ROWS, self.elements[0], self.transposed[0])
        assert A.shape == (ROWS, k) and B.shape == (self.columns, k)
        product = (A * self.signs[0]) @ (B * self.signs[1]).T
        rows, columns = accumulator_indices(self.columns)
        result = product[rows, columns]
        self._add(result)

    def _fetch(self, name: str, extent: int, element: np.dtype, transposed: bool) -> np.ndarray:
        granules = self.granules[name]
        data = self.gang.shared.read(granules.reshape(-1)).reshape(*granules.shape[:-1], -1)
        return _matrix(data, element, transposed, extent)

    def _add(self, result: np.ndarray) -> None:
        names = [e for e in self.accumulators.elements if isinstance(e, Register)]
        machine, index = self.gang.machine, self.gang.index
        tables = [machine.register(register) for register in names]
        old = np.stack([table[index] for table in tables], axis=-1)  # (128, registers)
        dtype = TYPES[self.type]
        if self.accumulate:
            result = result + old.view(dtype).astype(result.dtype)
        if self.saturate:
            result = result.clip(-(1 << 31), (1 << 31) - 1)
        new = np.ascontiguousarray(result.astype(dtype)).view(old.dtype).T
        for table, values in zip(tables, new, strict=True):
            table[index] = values


def _multiply(
    match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask
) -> Suspend | None:
    if mask is not None:
        raise EmulationError("is executed by a part of a warp")
    if len(gang.warps) != GROUP:
        group, counter = gang.warps[0].group, gang.counter
        return Suspend(
            None,
            lambda: all(warp.counter == counter for warp in group),
            "the other warps of its group, at wgmma",
            again=True,
        )
    target, a, b, scale, *immediates = instruction.operands
    assert isinstance(target, Vector)
    _require_fenced(gang, (target, a))
    columns, elements = int(match["n"]), (ELEMENTS[match["a"]], ELEMENTS[match["b"]])
    k = _K_BYTES // elements[0].itemsize
    if int(match["k"]) != k:
        raise EmulationError(f"multiplies k{match['k']}, which does not exist")
    values = [one.value for one in immediates if isinstance(one, Immediate)]
    signs, transposed = (1, 1), (False, False)
    if elements[0].kind not in "iu":
        signs = tuple(1 if value == 1 else -1 for value in values[:2])
        flags = [bool(value) for value in values[2:]]
        if isinstance(a, Vector):
            flags.insert(0, False)
        transposed = tuple(flags) if elements[0].itemsize == 2 else transposed
    accumulate = gang.read(scale, PREDICATE)
    if not (accumulate == accumulate[0]).all():
        raise EmulationError("accumulates in some threads only")
    granules: dict[str, np.ndarray] = {}
    if isinstance(a, Vector):
        A = _from_registers(gang, a, elements[0])
    else:
        A = _descriptor(gang, a)
        granules["A"] = _located(gang, A, ROWS, k, transposed[0])
    B = _descriptor(gang, b)
    granules["B"] = _located(gang, B, columns, k, transposed[1])
    warps, thread = [warp.number for warp in gang.warps], int(gang.threads[0])
    everything = np.unique(np.concatenate([one.reshape(-1) for one in granules.values()]))
    unwritten = gang.machine.cuts_edges
    reading = gang.shared.start_read(
        "an unfinished wgmma", everything, warps, thread, may_be_unwritten=unwritten
    )
    operation = _Multiply(
        *(gang, target, match["d"], A, B, transposed, signs, columns, elements),
        bool(accumulate[0]),
        match.groupdict().get("saturate") is not None,
        granules,
        [reading],
    )
    key = gang.block.number, gang.warps[0].local // GROUP
    gang.machine.matrices.setdefault(key, deque()).append(operation)
    names = {
        e.name
        for operand in (target, a)
        if isinstance(operand, Vector)
        for e in operand.elements
        if isinstance(e, Register)
    }
    for warp in gang.warps:
        warp.uncommitted.append((operation, names))
        warp.in_flight |= names
    gang.note_in_flight()
    return None


def _require_fenced(gang: Gang, operands: tuple[Operand, ...]) -> None:
    names = {
        e.name
        for operand in operands
        if isinstance(operand, Vector)
        for e in operand.elements
        if isinstance(e, Register)
    }
    for warp in gang.warps:
        if warp.touched is None:
            raise EmulationError("is executed before any wgmma.fence")
        if written := names & warp.touched:
            raise EmulationError(f"uses {min(written)}, written since the last wgmma.fence")


def _descriptor(gang: Gang, operand: Operand) -> Descriptor:
    values = gang.everywhere(gang.read(operand, TYPES["u64"]))
    if not (values == values[0]).all():
        raise EmulationError("has different matrix descriptors in different threads")
    return Descriptor.decode(int(values[0]))


def _located(
    gang: Gang, descriptor: Descriptor, extent: int, k: int, transposed: bool
) -> np.ndarray:
    """Granules, numbered through all blocks."""
    addresses = descriptor.addresses(extent, k, transposed)
    if addresses.min() < 0 or addresses.max() + GRANULE > gang.shared.size:
        raise EmulationError(f"reads {addresses.max():#x}, outside of shared memory")
    return (gang.block.number * gang.shared.pitch + addresses) // GRANULE


def _from_registers(gang: Gang, operand: Vector, element: np.dtype) -> np.ndarray:
    words = np.ascontiguousarray(_registers_of(gang, operand))
    if element == np.float32:
        words &= _TF32_DROPPED
    values = words.view(element)
    rows, columns = operand_indices(element.itemsize)
    matrix = np.zeros((ROWS, _K_BYTES // element.itemsize), element)
    matrix[rows, columns] = values
    return matrix.astype(np.int64 if element.kind in "iu" else np.float64)


def _fence(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    gang.require_whole_warps(mask)
    for warp in gang.warps_of(mask):
        warp.touched = set()


def _commit(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    gang.require_whole_warps(mask)
    for warp in gang.warps_of(mask):
        warp.groups.append(warp.uncommitted)
        warp.uncommitted = []


def _wait(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    gang.require_whole_warps(mask)
    (operand,) = instruction.operands
    assert isinstance(operand, Immediate)
    for warp in gang.warps_of(mask):
        _wait_of(warp, gang, operand.value)
    gang.note_in_flight()


def _wait_of(warp: Warp, gang: Gang, pending: int) -> None:
    done = max(len(warp.groups) - pending, 0)
    key = gang.block.number, warp.local // GROUP
    queue = gang.machine.matrices.get(key, deque())
    for operation, _ in (one for group in warp.groups[:done] for one in group):
        while not operation.done:
            queue.popleft().execute()
        for reading in operation.readings:
            gang.shared.finish_read(reading, warp.number)
    warp.groups = warp.groups[done:]
    left = [*warp.uncommitted, *(one for group in warp.groups for one in group)]
    warp.in_flight = set().union(*(names for _, names in left))


_SHAPE = r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>\d+)"

WGMMA = (
    (_SHAPE + r"\.(?P<d>f32)\.(?P<a>f16|bf16|tf32)\.(?P<b>(?P=a))", _multiply),
    (_SHAPE + r"\.(?P<d>f32)\.(?P<a>e4m3|e5m2)\.(?P<b>e4m3|e5m2)", _multiply),
    (_SHAPE + r"(?P<saturate>\.satfinite)?\.(?P<d>s32)\.(?P<a>[su]8)\.(?P<b>[su]8)", _multiply),
    (r"wgmma\.fence\.sync\.aligned", _fence),
    (r"wgmma\.commit_group\.sync\.aligned", _commit),
    (r"wgmma\.wait_group\.sync\.aligned", _wait),
)
