"""Loads a relocatable ELF object for x86-64 into this process, with symbols that we choose.

The host half of a compiled kernel is such an object. Its undefined symbols are functions of CUDA
and of TVM-FFI; bound to functions of ours, it runs where there is no CUDA driver.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass

_ALLOCATED = 2  # flag of a section that is in memory
_NOTHING_STORED, _SYMBOLS, _RELOCATIONS = 8, 2, 4  # types of sections
_UNDEFINED = 0  # index of the section of a symbol that is elsewhere
_PAGE = 4096

# Relocations: with S the symbol, A the addend, P the place, G its entry of the table GOT.
_64, _PC32, _PLT32, _GOTOFF64, _GOTPC64, _PC64, _GOT64 = 1, 2, 4, 25, 29, 24, 27


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    section: int
    value: int


class LoadedObject:
    """An object in memory.

    Args:
        image: The bytes of the file.
        resolve: The address of an undefined symbol, by its name.
    """

    def __init__(self, image: bytes, resolve: Callable[[str], int]) -> None:
        if image[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", image, 16) != (1, 62):
            raise ValueError("this is no relocatable object for x86-64")
        self._image = image
        self._sections = self._read_sections()
        self._symbols = self._read_symbols()
        self._resolve = resolve
        self._bases: dict[int, int] = {}  # address of each section, by its index
        self._table: dict[str, int] = {}  # address of the GOT's entry for each symbol
        self._load()

    def address(self, name: str) -> int:
        for symbol in self._symbols:
            if symbol.name == name and symbol.section != _UNDEFINED:
                return self._address(symbol)
        raise KeyError(f"the object defines no {name}")

    # The file ----------------------------------------------------------------------------------

    def _read_sections(self) -> list[_Section]:
        (offset,) = struct.unpack_from("<Q", self._image, 40)
        size, count, names = struct.unpack_from("<HHH", self._image, 58)
        headers = [
            struct.unpack_from("<IIQQQQIIQQ", self._image, offset + i * size) for i in range(count)
        ]
        (strings,) = (headers[names][4],)
        return [
            _Section(self._string(strings + h[0]), h[1], h[2], h[4], h[5], h[6], h[7], max(h[8], 1))
            for h in headers
        ]

    def _read_symbols(self) -> list[_Symbol]:
        (section,) = (one for one in self._sections if one.type == _SYMBOLS)
        strings = self._sections[section.link].offset
        found = []
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", self._image, at)
            found.append(_Symbol(self._string(strings + name), index, value))
        return found

    def _string(self, offset: int) -> str:
        return self._image[offset : self._image.index(b"\0", offset)].decode()

    # In memory ---------------------------------------------------------------------------------

    def _load(self) -> None:
        places, size = {}, 0
        for index, section in enumerate(self._sections):
            if section.flags & _ALLOCATED:
                size = -(-size // section.alignment) * section.alignment
                places[index] = size
                size += section.size
        table = -(-size // 8) * 8
        size = table + 8 * len(self._symbols)
        protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._memory = mmap.mmap(-1, -(-size // _PAGE) * _PAGE, prot=protection)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for index, place in places.items():
            section = self._sections[index]
            self._bases[index] = base + place
            if section.type != _NOTHING_STORED:
                stored = self._image[section.offset : section.offset + section.size]
                self._memory[place : place + section.size] = stored
        self._base, self._table_base = base, base + table
        for i, symbol in enumerate(self._symbols):
            if symbol.name and symbol.name != "_GLOBAL_OFFSET_TABLE_":
                entry = self._table[symbol.name] = self._table_base + 8 * i
                self._put("<Q", entry, self._address(symbol))
        for section in self._sections:
            unwinding = section.name == ".rela.eh_frame"  # nothing is thrown through it
            if section.type == _RELOCATIONS and section.info in places and not unwinding:
                self._relocate(section)

    def _address(self, symbol: _Symbol) -> int:
        if symbol.section == _UNDEFINED:
            return self._resolve(symbol.name)
        return self._bases.get(symbol.section, 0) + symbol.value

    def _relocate(self, section: _Section) -> None:
        for at in range(section.offset, section.offset + section.size, 24):
            offset, info, addend = struct.unpack_from("<QQq", self._image, at)
            place = self._bases[section.info] + offset
            symbol, kind = self._symbols[info >> 32], info & 0xFFFFFFFF
            if kind == _GOTPC64:
                self._put("<q", place, self._table_base + addend - place)
            elif kind == _GOT64:
                self._put("<q", place, self._table[symbol.name] - self._table_base + addend)
            elif kind == _GOTOFF64:
                self._put("<q", place, self._address(symbol) - self._table_base + addend)
            elif kind == _64:
                self._put("<Q", place, self._address(symbol) + addend)
            elif kind == _PC64:
                self._put("<q", place, self._address(symbol) + addend - place)
            elif kind in (_PC32, _PLT32):
                self._put("<i", place, self._address(symbol) + addend - place)
            else:
                raise ValueError(f"relocation {kind} of {symbol.name} is not known")

    def _put(self, form: str, address: int, value: int) -> None:
        struct.pack_into(form, self._memory, address - self._base, value)
