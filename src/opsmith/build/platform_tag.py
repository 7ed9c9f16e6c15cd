"""Find the platform tag of a wheel from the system libraries that its libraries need."""

from __future__ import annotations

import posixpath
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from opsmith.build.elf import NEEDED, RPATH, RUNPATH, dynamic_texts, section

SYSTEM = frozenset(
    {
        *("libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1"),
        *("libgcc_s.so.1", "libstdc++.so.6", "libatomic.so.1"),
        *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
    }
)
"""Libraries that every system with glibc has, by the policies of auditwheel, and kernels may need."""
OF_TORCH = frozenset({"libgomp.so.1", "libc10.so", "libtorch_cpu.so", "libtorch_python.so"})
"""Libraries that torch contains and loads first; a copy in a wheel would be a second OpenMP runtime."""

_POLICIES = (
    ("2.28", "3.4.24", "1.3.11", "7.0.0"),
    ("2.31", "3.4.28", "1.3.12", "7.0.0"),
    ("2.34", "3.4.29", "1.3.13", "7.0.0"),
    ("2.35", "3.4.30", "1.3.13", "12.0.0"),
    ("2.38", "3.4.30", "1.3.13", "12.0.0"),
    ("2.39", "3.4.33", "1.3.15", "14.0.0"),
    ("2.41", "3.4.33", "1.3.15", "14.0.0"),
)
"""Newest GLIBC, GLIBCXX, CXXABI and GCC versions of the systems of each tag, as in auditwheel 6.8.

Older systems are left out: wheels of torch need glibc 2.28.
"""
_SHIP_IT = (
    "link the library statically. Or put it into the package, where `.gitignore` must not exclude it, and "
    "name the file in `libraries=`. Do not use `auditwheel repair`: opsmith does not use changed kernels"
)
"""Advice on a library that a kernel links."""
_WORDS = {"GLIBC_ABI_DT_RELR": "2.36", "CXXABI_TM_1": "1.3", "CXXABI_FLOAT128": "1.3"}
"""Versions that are words, each with its numbered version; unknown words are newer than all systems."""
_NAMES = ("GLIBC", "GLIBCXX", "CXXABI", "GCC")
_MACHINES = {62: "x86_64", 183: "aarch64"}
_FILE, _VERSION = struct.Struct("<HHIII"), struct.Struct("<IHHII")


@dataclass(frozen=True, slots=True)
class PlatformTag:
    """Platform tag of a wheel.

    Attributes:
        tag: The tag, such as `manylinux_2_28_x86_64`; `linux_x86_64` if no other system is known to run it.
            reason: Reason why it is not a manylinux tag; empty if it is one. hint: Advice on how to get a
            manylinux tag.
    """

    tag: str
    reason: str = ""
    hint: str = ""


def platform_tag(libraries: Iterable[Path], wheel: Mapping[str, Path] | None = None) -> PlatformTag:
    """Return the tag of the systems that can run these libraries, by the rules of `auditwheel show`.

    Args:
        libraries: ELF files of one machine, complete, little-endian, of 64 bits.
        wheel: Files of the wheel by their paths in it, including these libraries. A needed library that is in
            the wheel is not required from the system, but its own requirements count.

    Raises:
        ValueError: If there are no libraries, or they are not all for one machine for which torch has wheels.
    """
    needs: dict[Path, SystemNeeds] = {}
    waiting = [*libraries]
    while waiting:
        path = waiting.pop(0)
        if path not in needs:
            content = path.read_bytes()
            inside = _in_wheel(path, content, wheel or {})
            of_library = SystemNeeds.of(content)
            needs[path] = replace(of_library, libraries=of_library.libraries - inside.keys())
            waiting += inside.values()
    machines = {each.machine for each in needs.values()}
    if len(machines) != 1 or not machines <= {*_MACHINES.values()}:
        raise ValueError(f"all libraries must be for the same machine, but these are for: {sorted(machines)}")
    machine = machines.pop()
    for path, each in needs.items():
        foreign = sorted(each.libraries - SYSTEM - OF_TORCH)
        if foreign:
            return PlatformTag(
                f"linux_{machine}",
                f"{path.name} needs {', '.join(foreign)}",
                _SHIP_IT,
            )
    for newest in _POLICIES:
        limits = dict(zip(_NAMES, map(_numbers, newest), strict=True))
        if all(each.fits(limits) for each in needs.values()):
            return PlatformTag(f"manylinux_{newest[0].replace('.', '_')}_{machine}")
    symbols = sorted({name for each in needs.values() for name in each.versions if not _fits(name, limits)})
    return PlatformTag(
        f"linux_{machine}",
        f"they need {', '.join(symbols)}, which no known system has",
        "build on an older system, such as a manylinux container",
    )


def _in_wheel(path: Path, content: bytes, wheel: Mapping[str, Path]) -> dict[str, Path]:
    """Return the libraries that a library of a wheel loads from the wheel, by their names."""
    place = next((place for place, each in wheel.items() if each == path), None)
    if place is None:
        return {}
    folders = [each for text in dynamic_texts(content, RPATH, RUNPATH) for each in text.split(":")]
    found: dict[str, Path] = {}
    for name in dynamic_texts(content, NEEDED):
        for folder in folders:
            origin, _, below = folder.partition("/")
            there = posixpath.normpath(posixpath.join(posixpath.dirname(place), below, name))
            if origin == "$ORIGIN" and there in wheel:
                found.setdefault(name, wheel[there])
    return found


@dataclass(frozen=True, slots=True)
class SystemNeeds:
    """Requirements of a library: machine, needed libraries, and versions of the system's symbols.

    Attributes:
        machine: Machine that it is for. libraries: Names of the libraries that it needs. versions: Versions
            of the symbols of the system's libraries, such as `GLIBC_2.29`.
    """

    machine: str
    libraries: frozenset[str]
    versions: frozenset[str]

    @classmethod
    def of(cls, content: bytes) -> SystemNeeds:
        """Read the requirements from a library's content."""
        (number,) = struct.unpack_from("<H", content, 18)
        names = section(content, ".dynstr")
        libraries = dynamic_texts(content, NEEDED)
        versions = {name for file, name in _versions(content, names) if file not in OF_TORCH}
        return cls(_MACHINES.get(number, f"machine {number}"), frozenset(libraries), frozenset(versions))

    def fits(self, limits: dict[str, tuple[int, ...]]) -> bool:
        """Return True if the system has every version of symbols."""
        return all(_fits(name, limits) for name in self.versions)


def _versions(content: bytes, names: bytes) -> Iterable[tuple[str, str]]:
    """Yield library and version of each group of needed symbols, from `.gnu.version_r`."""
    table, at = section(content, ".gnu.version_r"), 0
    while table:
        _, count, file, first, following = _FILE.unpack_from(table, at)
        inner = at + first
        for _ in range(count):
            _, _, _, name, step = _VERSION.unpack_from(table, inner)
            yield _text(names, file), _text(names, name)
            inner += step
        if not following:
            return
        at += following


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()


def _fits(symbol: str, limits: dict[str, tuple[int, ...]]) -> bool:
    name, _, version = symbol.partition("_")
    if name not in limits:
        return True
    version = _WORDS.get(symbol, version)
    return re.fullmatch(r"[\d.]+", version) is not None and _numbers(version) <= limits[name]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
