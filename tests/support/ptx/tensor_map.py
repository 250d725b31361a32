"""Tensor maps: CUtensorMap's 128 bytes, read as Hopper's copy engine does.

The layout is not documented. It was found by comparing the maps that the CuTe DSL makes for known
tensors; bits whose meaning did not come out are refused if they are not as in those.

    bits of 64-bit words        what
    0: all                      address
    1: 0..3, 4..6, 7..10        2, rank - 1, element type
    1: 13..14                   log2 of the swizzle's bytes / 16; none, 32, 64, 128
    1: 16                       float32 is rounded to tf32 when it is loaded
    1: 17..18, 21               L2 promotion; large tensors
    1: 32..63, 2, 3: 0..31      strides of modes 1 to 4, in 16 bytes
    3: 32..47                   bits 32..35 of those strides
    4, 5, 6: 0..31              extents of modes 0 to 4, less 1
    6: 56..63, 7: 0..31         extents of the box, less 1
    6: 32..47                   element strides, less 1, three bits each
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from support.ptx.errors import EmulationError

#: Bytes of an element, by the code of its type.
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2}
_SHARED_ALIGNMENT = 128  # of a box


def bits(word: int, low: int, count: int) -> int:
    return word >> low & (1 << count) - 1


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Where what belongs at shared-memory addresses lies; the swizzle: 0 none, 1 to 3: 32 to 128
    bytes. Bits 4 and up are changed by as many bits from bit 7 on."""
    return addresses ^ (addresses >> 3 & ((1 << swizzle) - 1) << 4)


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that a copy moves; the fastest mode first.

    Attributes:
        strides: In bytes; that of mode 0 is an element.
        rounds: float32 to tf32, when loading.
    """

    address: int
    itemsize: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    rounds: bool = False

    @classmethod
    def decode(cls, data: bytes) -> TensorMap:
        """Raises EmulationError if something is set that is not known."""
        return _decode(bytes(data[:64]))

    def encode(self, type_code: int) -> bytes:
        """128 bytes; the code is one of the element's types."""
        rank = len(self.box)
        extents = [extent - 1 for extent in self.extents] + [0] * (5 - rank)
        units = [stride // 16 for stride in self.strides[1:]] + [0] * (5 - rank)
        box = [extent - 1 for extent in self.box] + [0] * (5 - rank)
        kind = 2 | rank - 1 << 4 | type_code << 7 | self.swizzle << 13 | self.rounds << 16
        low = [unit & (1 << 32) - 1 for unit in units]
        words = (
            self.address,
            kind | low[0] << 32,
            low[1] | low[2] << 32,
            low[3] | sum((unit >> 32) << 32 + 4 * mode for mode, unit in enumerate(units)),
            extents[0] | extents[1] << 32,
            extents[2] | extents[3] << 32,
            extents[4] | box[0] << 56,
            sum(extent << 8 * mode for mode, extent in enumerate(box[1:])),
        )
        return struct.pack("<8Q", *words) + bytes(64)

    @property
    def row_bytes(self) -> int:
        """Of the box."""
        return self.box[0] * self.itemsize

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.itemsize

    def rows(self, coordinates: tuple[int, ...]) -> tuple[np.ndarray, slice]:
        """The box at these coordinates: the address of each of its rows, of one whose elements are
        all outside of the tensor -1; and which bytes of a row are inside."""
        first = coordinates[0]
        low = min(max(-first, 0), self.box[0])
        high = max(min(self.extents[0] - first, self.box[0]), low)
        addresses = np.array([self.address + first * self.itemsize], np.int64)
        inside = np.array([high > low])
        for mode in range(1, len(self.box)):
            along = coordinates[mode] + np.arange(self.box[mode])
            addresses = (along * self.strides[mode])[:, None] + addresses
            inside = ((along >= 0) & (along < self.extents[mode]))[:, None] & inside
            addresses, inside = addresses.reshape(-1), inside.reshape(-1)
        return np.where(inside, addresses, -1), slice(low * self.itemsize, high * self.itemsize)

    def granules(self, address: int) -> np.ndarray:
        """Addresses of the box's 16-byte pieces in shared memory, row by row."""
        if address % _SHARED_ALIGNMENT:
            raise EmulationError(f"copies a box to or from {address:#x}, no multiple of 128")
        span = 16 << self.swizzle
        if self.row_bytes % 16 or (self.swizzle and self.row_bytes != span):
            raise EmulationError(
                f"copies rows of {self.row_bytes} bytes with a swizzle of {span}, "
                "which the emulator does not know"
            )
        return swizzled(address + np.arange(0, self.box_bytes, 16), self.swizzle)


@lru_cache
def _decode(data: bytes) -> TensorMap:
    words = struct.unpack("<8Q", data)
    kind = words[1] & 0xFFFFFFFF
    known = 0xF | 7 << 4 | 15 << 7 | 3 << 13 | 1 << 16 | 3 << 17 | 1 << 21
    if kind & 15 != 2 or kind & ~known:
        raise EmulationError(f"a tensor map of kind {kind:#x}, which the emulator does not know")
    rank = bits(kind, 4, 3) + 1
    itemsize = _ELEMENT_BYTES.get(bits(kind, 7, 4))
    if itemsize is None or rank > 5:
        raise EmulationError(f"{data.hex()} is no tensor map that the emulator knows")
    if bits(words[6], 32, 15):
        raise EmulationError("a tensor map with element strides, which the emulator does not know")
    low = (
        bits(words[1], 32, 32),
        bits(words[2], 0, 32),
        bits(words[2], 32, 32),
        words[3] & ~-(1 << 32),
    )
    high = [bits(words[3], 32 + 4 * mode, 4) for mode in range(4)]
    strides = [16 * (h << 32 | b) for h, b in zip(high, low, strict=True)]
    extents = [bits(words[w], shift, 32) + 1 for w in (4, 5) for shift in (0, 32)]
    extents.append(bits(words[6], 0, 32) + 1)
    box = [bits(words[6], 56, 8) + 1] + [bits(words[7], 8 * i, 8) + 1 for i in range(4)]
    return TensorMap(
        address=words[0],
        itemsize=itemsize,
        extents=tuple(extents[:rank]),
        strides=(itemsize, *strides[: rank - 1]),
        box=tuple(box[:rank]),
        swizzle=bits(kind, 13, 2),
        rounds=bool(bits(kind, 16, 1)),
    )
