"""Tensor maps that kernels make themselves, for the emulator: it learns their instructions here.

A map in global memory is changed by its maker, who releases it; a warp acquires it before copies
use it. A copy by a map that is not released, or that its warp has not acquired, is an error.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.ptx import bulk, hopper, instructions
from support.ptx.arithmetic import TYPES
from support.ptx.errors import EmulationError
from support.ptx.machine import PARAMETER_WINDOW
from support.ptx.memory import GlobalMemory, Placed
from support.ptx.program import Address, Immediate, Instruction, Symbol, Vector
from support.ptx.tensor_map import TensorMap
from support.ptx.threads import Mask
from support.ptx.warps import Gang

U64 = TYPES["u64"]
BYTES = 128
_KNOWN = 64  # of these, the rest is not looked at
_MOST_MODES = 5


@dataclass
class Made:
    """The maps in some memory.

    Attributes:
        changed: By address: the warps that changed one and have not released it.
        acquired: (warp, address), of the launch that runs.
    """

    launch: object = None
    changed: dict[int, set[int]] = field(default_factory=dict)
    acquired: set[tuple[int, int]] = field(default_factory=set)


def _made(gang: Gang) -> Made:
    made: Made = vars(gang.memory).setdefault("tensor_maps", Made())
    if made.launch is not gang.machine:
        made.launch = gang.machine
        made.acquired.clear()
    return made


def _words(memory: GlobalMemory, address: int) -> np.ndarray:
    """A view of those that are known."""
    first = address - memory.BASE
    if not 0 <= first <= len(memory.bytes) - BYTES:
        raise EmulationError(f"uses a tensor map at {address:#x}, where no memory is")
    return memory.bytes[first : first + _KNOWN].view(np.uint32)


def _replace(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    target, *place, operand = instruction.operands
    assert isinstance(target, Address)
    mode = 0
    if place:
        assert isinstance(place[0], Immediate)
        mode = int(place[0].value)
    values = gang.everywhere(gang.read(operand, TYPES["u" + match["bits"]]))
    addresses = gang.everywhere(gang.read(target.base, U64)) + target.offset
    for at in np.arange(gang.threads.size)[gang.chosen(mask)].tolist():
        address = int(addresses[at])
        if address % BYTES:
            raise EmulationError(f"changes a tensor map at {address:#x}, no multiple of {BYTES}")
        gang.memory.load(np.arange(address, address + _KNOWN, 16), 16, gang.threads[[at] * 4])
        words = _words(gang.memory, address)
        _REPLACED[match["field"]](words, mode, int(values[at]))
        _made(gang).changed.setdefault(address, set()).add(int(gang.threads[at]) // 32)


def _replace_address(words: np.ndarray, mode: int, value: int) -> None:
    words[0:2] = struct.unpack("<2I", struct.pack("<Q", value))


def _replace_extent(words: np.ndarray, mode: int, value: int) -> None:
    assert mode < _MOST_MODES
    words[8 + mode] = value - 1


def _replace_stride(words: np.ndarray, mode: int, value: int) -> None:
    if value % 16:
        raise EmulationError(f"a stride of {value} bytes in a tensor map, no multiple of 16")
    assert mode < _MOST_MODES - 1
    units = value // 16
    words[3 + mode] = units & 0xFFFFFFFF
    rest = ~np.uint32(15 << 4 * mode)
    words[7] = words[7] & rest | np.uint32((units >> 32 & 15) << 4 * mode)


_REPLACED = {
    "global_address": _replace_address,
    "global_dim": _replace_extent,
    "global_stride": _replace_stride,
}


def _release(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    for warps in _made(gang).changed.values():
        warps.difference_update(warp.number for warp in gang.warps_of(mask))


def _acquire(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    address, size = instruction.operands
    assert isinstance(address, Address)
    assert isinstance(size, Immediate)
    assert size.value == BYTES
    found = gang.everywhere(gang.read(address.base, U64)) + address.offset
    for at in np.arange(gang.threads.size)[gang.chosen(mask)].tolist():
        _made(gang).acquired.add((int(gang.threads[at]) // 32, int(found[at])))


_of_parameters = bulk.tensor_map_at


def tensor_map_at(gang: Gang, address: int) -> TensorMap:
    """One that a kernel has made, or one of the host's."""
    if address >> 40 == PARAMETER_WINDOW >> 40:
        return _of_parameters(gang, address)
    made = _made(gang)
    if address not in made.changed:
        return _of_parameters(gang, address)
    if made.changed[address]:
        raise EmulationError(f"uses a tensor map at {address:#x} that is not released")
    if not any((warp.number, address) in made.acquired for warp in gang.warps):
        raise EmulationError(f"uses a tensor map at {address:#x} that it has not acquired")
    return TensorMap.decode(_words(gang.memory, address).tobytes())


def _load_parameter(match: re.Match[str], gang: Gang, instruction: Instruction, mask: Mask) -> None:
    """Of a register that holds the address of a parameter: a map, to be copied."""
    target, source = instruction.operands
    assert isinstance(source, Address)
    if isinstance(source.base, Symbol):
        instructions.handler_of(instruction)(gang, instruction, mask)  # type: ignore[arg-type]
        return
    dtype = TYPES[match["type"]]
    elements = target.elements if isinstance(target, Vector) else (target,)
    (address,) = np.unique(gang.addresses(source, U64, mask)).tolist()
    data = gang.machine.parameter_bytes(PARAMETER_WINDOW + address, dtype.itemsize * len(elements))
    for element, value in zip(elements, np.frombuffer(data, dtype), strict=True):
        gang.write(element, value[None], mask)


_INSTRUCTIONS = (
    (r"ld\.param(\.v[24])?\.(?P<type>[busf]\d+)", _load_parameter),
    (
        r"tensormap\.replace\.tile\.(?P<field>global_(address|dim|stride))\.global\.b1024"
        r"\.b(?P<bits>32|64)",
        _replace,
    ),
    (r"fence\.proxy\.tensormap::generic\.release\.gpu", _release),
    (r"fence\.proxy\.tensormap::generic\.acquire\.gpu", _acquire),
)


_place = GlobalMemory.place


def _place_aligned(self: GlobalMemory, *args: Any, alignment: int, **how: Any) -> Placed:
    """Addresses of matrices lie where 64 bits can be read, however the matrices are aligned."""
    itemsize = args[5]
    return _place(self, *args, alignment=max(alignment, itemsize), **how)


def _install() -> None:
    GlobalMemory.place = _place_aligned  # type: ignore[method-assign]
    hopper._PATTERNS.extend((re.compile(pattern), handler) for pattern, handler in _INSTRUCTIONS)
    hopper._handler_of.cache_clear()
    bulk.tensor_map_at = tensor_map_at


_install()
