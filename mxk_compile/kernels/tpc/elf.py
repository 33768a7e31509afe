"""Reads ELF files: the sections of a kernel, and the hash of its code.

tpc-clang puts the source text and the command line into the object, so a kernel's file hash changes with every comment
and folder. `code_sha256` covers only what runs.
"""

from __future__ import annotations

import hashlib
import struct

from mxk_compile.errors import KernelError

CODE_SECTIONS = (".text", ".tpc_metadata")
_NOBITS = 8  # section type without bytes in the file


def sections(data: bytes) -> dict[str, bytes]:
    """Name and content of each section of a 32- or 64-bit ELF file; raises ValueError if `data` is none."""
    if len(data) < 52 or data[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    order, wide = "<" if data[5] == 1 else ">", data[4] == 2
    try:
        (table,) = struct.unpack_from(order + ("Q" if wide else "I"), data, 0x28 if wide else 0x20)
        entry_size, count, names_index = struct.unpack_from(order + "3H", data, 0x3A if wide else 0x2E)
        if table + count * entry_size > len(data):
            raise ValueError("a damaged ELF file: its section table ends beyond it")
        headers = []
        for index in range(count):
            layout = "IIQQQQ" if wide else "6I"
            name, kind, _, _, start, size = struct.unpack_from(
                order + layout, data, table + index * entry_size
            )
            if kind == _NOBITS:
                start = size = 0
            if start + size > len(data):
                raise ValueError("a damaged ELF file: a section ends beyond it")
            headers.append((name, data[start : start + size]))
        names = headers[names_index][1] if headers else b""
        return {names[name : names.index(b"\0", name)].decode(): content for name, content in headers}
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"a damaged ELF file: {error}") from error


def code_sha256(data: bytes, name: str) -> str:
    """Hash of a kernel's machine code: sha256 over `.text` and `.tpc_metadata`, in this order.

    Of each section enter its name, a zero byte, its size as 8 bytes (little-endian), its bytes. Raises KernelError,
    which calls the file `name`, if it is no ELF file or one of the two is missing or `.text` is empty.
    """
    try:
        found = sections(data)
    except ValueError as error:
        raise KernelError(name, str(error), "an object of tpc-clang", "check the compiler") from error
    missing = [section for section in CODE_SECTIONS if section not in found]
    if missing or not found[CODE_SECTIONS[0]]:
        given = f"no {', '.join(missing)}" if missing else "an empty .text"
        raise KernelError(name, given, " and ".join(CODE_SECTIONS), "compile it with tpc-clang -march=gaudi2")
    digest = hashlib.sha256()
    for section in CODE_SECTIONS:
        content = found[section]
        digest.update(section.encode() + b"\0" + struct.pack("<Q", len(content)) + content)
    return digest.hexdigest()
