"""What a compiled kernel takes of a multiprocessor, read from its machine code.

The compiled object carries a CUDA ELF ("cubin"), a constant of its module. Registers, stack and
the required block size stand in its ``.nv.info`` attributes; the shared memory that a launch asks
for is a constant of the host code.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from kernel_api._code_files import FUNCTION
from kernel_api.artifact import Resources
from kernel_api.providers.cutedsl import compiler

_ELF_MAGIC = b"\x7fELF"
_MACHINE_CUDA = 190

# Attributes of .nv.info, as "value with size" records: format 4, code, 16-bit size, payload.
_REGISTER_COUNT, _FRAME_SIZE, _REQUIRED_THREADS, _MAX_THREADS = 0x2F, 0x11, 0x10, 0x05

_SYSTEM_SHARED_MEMORY = 1024

# The launch configuration in the host IR: field 2 holds the bytes of dynamic shared memory.
_LAUNCH_STRUCT = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"


def resources(compiled: Any) -> Resources | None:
    """Of the kernel with most registers, if there are several; None without machine code."""
    code = cubin(compiled)
    if code is None:
        return None
    sections = dict(_sections(code))
    attributes = _attributes(sections)
    return Resources(
        registers=max(attributes.get(_REGISTER_COUNT, [0])),
        shared_memory_bytes=_static_shared_memory(code)
        + _dynamic_shared_memory(str(compiled.ir_module)),
        spill_bytes=max(attributes.get(_FRAME_SIZE, [0])),
        threads=max(attributes.get(_REQUIRED_THREADS, attributes.get(_MAX_THREADS, [0]))),
    )


def cubin(compiled: Any) -> bytes | None:
    """The CUDA ELF inside what ``cute.compile`` returned."""
    found = map(_cuda_elf, _constants(getattr(compiled, "ir_module", None)))
    return next(filter(None, found), None) or _cuda_elf(compiler.object_code(compiled, FUNCTION))


def _constants(module: Any) -> Iterator[bytes]:
    """Of a module, those that are bytes. To make an object file of it takes a hundred times as
    long."""
    for operation in () if module is None else module.body.operations:
        named = operation.attributes
        if "value" in named and hasattr(named["value"], "value_bytes"):
            yield named["value"].value_bytes


def _cuda_elf(data: bytes | None) -> bytes | None:
    """The first one in data."""
    if data is None:
        return None
    for match in re.finditer(re.escape(_ELF_MAGIC), data):
        start = match.start()
        if struct.unpack_from("<H", data, start + 18)[0] == _MACHINE_CUDA:
            return data[start:][: _elf_size(data, start)]
    return None


def _elf_size(data: bytes, start: int) -> int:
    """End of the last table or section, which is where the file ends."""
    program, section = struct.unpack_from("<QQ", data, start + 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", data, start + 54)
    return int(max(program + program_size * programs, section + section_size * sections))


def _sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    for name, kind, offset, size in _section_table(code):
        if kind != 8:  # SHT_NOBITS has no bytes in the file
            yield name, code[offset : offset + size]


def _static_shared_memory(code: bytes) -> int:
    """Without the kilobyte that newer architectures keep for the system, and list with it."""
    sizes = {name: size for name, _, _, size in _section_table(code)}
    reserved = _SYSTEM_SHARED_MEMORY if ".nv.shared.reserved.0" in sizes else 0
    own = [size for name, size in sizes.items() if name.startswith(".nv.shared.kernel")]
    return max(max(own, default=0) - reserved, 0)


def _section_table(code: bytes) -> Iterator[tuple[str, int, int, int]]:
    table = struct.unpack_from("<Q", code, 40)[0]
    entry, count, names_index = struct.unpack_from("<3H", code, 58)
    headers = [struct.unpack_from("<IIQQQQ", code, table + entry * i) for i in range(count)]
    names_at = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        end = code.index(b"\0", names_at + name)
        yield code[names_at + name : end].decode(), kind, offset, size


def _attributes(sections: dict[str, bytes]) -> dict[int, list[int]]:
    """Per attribute code, its value for each kernel; products for block sizes."""
    found: dict[int, list[int]] = {}
    for name, data in sections.items():
        if not name.startswith(".nv.info"):
            continue
        at = 0
        while at + 4 <= len(data):
            form, code, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form != 4:
                continue
            values = struct.unpack_from(f"<{size // 4}I", data, at)
            at += size
            if code in (_REGISTER_COUNT, _FRAME_SIZE):
                found.setdefault(code, []).append(values[1])
            elif code in (_REQUIRED_THREADS, _MAX_THREADS):
                found.setdefault(code, []).append(values[0] * values[1] * values[2])
    return found


def _dynamic_shared_memory(ir: str) -> int:
    field = rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : .*?{_LAUNCH_STRUCT}"
    pattern = rf"{field}\s+llvm\.store (%\d+), \1 :"
    sizes = [_constant_before(ir, m.start(), m.group(2)) for m in re.finditer(pattern, ir)]
    return max(sizes, default=0)


def _constant_before(ir: str, position: int, name: str) -> int:
    """The value of a name that every function of the module may define anew."""
    constant = rf"{name} = llvm\.mlir\.constant\((\d+) : i64\)"
    values = re.findall(constant, ir[:position])
    return int(values[-1]) if values else 0
