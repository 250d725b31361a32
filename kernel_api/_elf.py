"""Sections of 64-bit ELF files, read without loading them."""

from __future__ import annotations

import struct

_MAGIC = b"\x7fELF"


def section(data: bytes, name: str) -> tuple[int, int] | None:
    """Offset and size of a section; None if the file has no such section.

    Raises ValueError if the bytes are no ELF file, or end before they should.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("it is no ELF file")
    try:
        table = struct.unpack_from("<Q", data, 40)[0]
        entry, count, names_index = struct.unpack_from("<3H", data, 58)
        # name, type, flags, address, offset, size
        headers = [struct.unpack_from("<IIQQQQ", data, table + entry * i) for i in range(count)]
        names = headers[names_index][4]
    except (struct.error, IndexError, OverflowError):
        raise ValueError("its table of sections is cut off") from None
    wanted = name.encode() + b"\0"
    for at, _, _, _, offset, size in headers:
        if data.startswith(wanted, names + at):
            if offset + size > len(data):
                raise ValueError(f"its section {name} is cut off")
            return offset, size
    return None
