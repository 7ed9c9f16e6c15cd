"""ELF files: check that a library or an object file is complete before it is stored."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"\x7fELF"
_NO_BITS = 8
"""Type of a section that takes no room in the file."""

NEEDED, SONAME, RPATH, RUNPATH = 1, 14, 15, 29
"""Tags of the dynamic section: name of a needed library, the library's own name, and search folders."""
_ENTRY = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_THREAD_LOCAL = 6
"""Type of the symbol of a thread-local variable."""


def fault_of(path: Path) -> str | None:
    """Return the fault of an ELF file; None if it is complete.

    A truncated library would kill the process that loads it, with a bus error.

    Args:
        path: Path of a library or an object file.

    Example:
        >>> fault_of(Path(__file__))
        'it is no ELF file of 64 bits'
    """
    if path.is_symlink() or not path.is_file():
        return "it is a link" if path.is_symlink() else "there is no such file"
    content = path.read_bytes()
    if not content.startswith(_MAGIC) or len(content) < 64 or content[4] != 2:
        return "it is empty" if not content else "it is no ELF file of 64 bits"
    order = "<" if content[5] == 1 else ">"
    header = struct.unpack_from(f"{order}HHIQQQIHHHHHH", content, 16)
    segments_at, sections_at = header[4:6]
    segment_size, segments, section_size, sections = header[8:12]
    needed = max(segments_at + segment_size * segments, sections_at + section_size * sections)
    if needed <= len(content):
        for at in range(segments_at, segments_at + segment_size * segments, segment_size or 1):
            offset, _, _, size = struct.unpack_from(f"{order}QQQQ", content, at + 8)
            needed = max(needed, offset + size)
        for at in range(sections_at, sections_at + section_size * sections, section_size or 1):
            kind, _, _, offset, size = struct.unpack_from(f"{order}IQQQQ", content, at + 4)
            needed = max(needed, 0 if kind == _NO_BITS else offset + size)
    return None if needed <= len(content) else f"it has {len(content)} of {needed} bytes"


def section(content: bytes, name: str) -> bytes:
    """Return the content of a section of an ELF file; empty if there is none.

    Args:
        content: Content of the file, of 64 bits, complete and little-endian.
        name: Name of the section.
    """
    (sections_at,) = struct.unpack_from("<Q", content, 40)
    size, count, names = struct.unpack_from("<HHH", content, 58)
    headers = [struct.unpack_from("<IIQQQQ", content, sections_at + size * number) for number in range(count)]
    for at, _, _, _, offset, length in headers:
        start = headers[names][4] + at
        if content[start : content.index(b"\0", start)] == name.encode():
            return content[offset : offset + length]
    return b""


def dynamic_texts(content: bytes, *tags: int) -> list[str]:
    """Return the texts of some tags in the dynamic section of a library, in its order.

    Args:
        content: Content of the file, of 64 bits, complete and little-endian.
        tags: Numbers of the tags, such as `NEEDED`.
    """
    names = section(content, ".dynstr")
    entries = _ENTRY.iter_unpack(section(content, ".dynamic"))
    return [names[at : names.index(b"\0", at)].decode() for tag, at in entries if tag in tags]


def undefined_thread_locals(content: bytes) -> list[str]:
    """Return the names of thread-local variables that an object file uses, but does not define.

    Args:
        content: Content of the file, of 64 bits, complete and little-endian.
    """
    symbols, names = section(content, ".symtab"), section(content, ".strtab")
    found = []
    for at in range(0, len(symbols), _SYMBOL.size):
        name, kind, _, defined_in, _, _ = _SYMBOL.unpack_from(symbols, at)
        if kind & 15 == _THREAD_LOCAL and not defined_in:
            found.append(names[name : names.index(b"\0", name)].decode())
    return found


def defined_thread_locals(content: bytes) -> list[tuple[str, int, int]]:
    """Return the thread-local variables of a library: name, offset in the thread's memory, and size.

    Args:
        content: Content of the file, of 64 bits, complete and little-endian.
    """
    symbols, names = section(content, ".symtab"), section(content, ".strtab")
    found = []
    for at in range(0, len(symbols), _SYMBOL.size):
        name, kind, _, defined_in, offset, size = _SYMBOL.unpack_from(symbols, at)
        if kind & 15 == _THREAD_LOCAL and defined_in:
            found.append((names[name : names.index(b"\0", name)].decode(), offset, size))
    return sorted(found, key=lambda each: each[1:])
