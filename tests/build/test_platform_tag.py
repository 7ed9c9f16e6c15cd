"""The platform tag of a wheel: what its libraries need of the system, and which systems have that."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from opsmith.build.platform_tag import PlatformTag, SystemNeeds, platform_tag
from opsmith.build.toolchain import find_toolchain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tags are those of Linux")

LINK = ["-shared", "-fPIC", "-Wl,--no-as-needed"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A library that needs OpenMP and mathematics, one that needs another library, and that one."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "plain.cpp").write_text(
        '#include <cmath>\n#include <stdexcept>\nextern "C" double f(double x) {\n'
        '  if (x < 0) throw std::runtime_error("negative");\n  return std::exp(x);\n}\n'
    )
    (folder / "other.cpp").write_text('extern "C" int g() { return 1; }\n')
    toolchain = find_toolchain()
    for arguments in (
        ["-O2", "plain.cpp", "-o", "plain.so", "-lgomp"],
        ["other.cpp", "-o", "libother.so.3", "-Wl,-soname,libother.so.3"],
        ["plain.cpp", "libother.so.3", "-o", "foreign.so"],
    ):
        done = toolchain.run([*LINK, *arguments], folder)
        assert done.status == 0, done.printed
    return {name: folder / f"{name}.so" for name in ("plain", "foreign")}


def versions_by_objdump(path: Path) -> set[str]:
    """The versions in the section that a tool of binutils prints."""
    printed = subprocess.run(["objdump", "-p", str(path)], capture_output=True, text=True, check=True).stdout
    references = printed.partition("Version References:")[2]
    found: set[str] = set()
    for part in references.split("required from ")[1:]:
        library, _, rest = part.partition(":")
        if not library.startswith("libgomp"):
            found |= set(re.findall(r"0x\w+ 0x\w+ \d+ (\S+)", rest))
    return found


def test_needs_are_those_of_the_file(libraries: dict[str, Path]) -> None:
    needs = SystemNeeds.of(libraries["plain"].read_bytes())
    assert {"libgomp.so.1", "libstdc++.so.6", "libm.so.6", "libc.so.6"} <= needs.libraries
    assert needs.versions == versions_by_objdump(libraries["plain"])
    assert any(each.startswith("CXXABI_") for each in needs.versions)
    assert not any(each.startswith(("GOMP", "OMP")) for each in needs.versions), "torch brings that"


def test_a_library_of_this_machine_has_a_tag(libraries: dict[str, Path]) -> None:
    found = platform_tag([libraries["plain"]])
    assert re.fullmatch(r"manylinux_2_\d+_\w+", found.tag)
    assert found.reason == ""


def test_a_foreign_library_is_named(libraries: dict[str, Path]) -> None:
    found = platform_tag(libraries.values())
    assert found.tag.startswith("linux_")
    assert found.reason == "foreign.so needs libother.so.3"
    assert (
        "link the library statically. Or put it into the package, where `.gitignore` must not" in found.hint
    )


def test_a_library_of_the_wheel_is_no_need_of_the_system(libraries: dict[str, Path], tmp_path: Path) -> None:
    """A kernel finds it by its place, and what it needs itself counts."""
    arguments = [
        "plain.cpp",
        "libother.so.3",
        "-Wl,-rpath,$ORIGIN/../native",
        "-o",
        str(tmp_path / "kernel.so"),
    ]
    folder = libraries["plain"].parent
    assert find_toolchain().run([*LINK, *arguments], folder).status == 0
    kernel, other, foreign = tmp_path / "kernel.so", folder / "libother.so.3", libraries["foreign"]
    at = "package/_kernels/kernel.so"
    found = platform_tag([kernel], {at: kernel, "package/native/libother.so.3": other})
    assert found == platform_tag([libraries["plain"]])
    for wheel in ({at: kernel}, {at: kernel, "package/libother.so.3": other}, {}):
        assert platform_tag([kernel], wheel).reason == "kernel.so needs libother.so.3"
    wheel = {at: kernel, "package/native/libother.so.3": foreign}
    assert platform_tag([kernel], wheel).reason == "foreign.so needs libother.so.3"


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        ((), "manylinux_2_28_x86_64"),
        (("GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.24", "CXXABI_1.3.11"), "manylinux_2_28_x86_64"),
        (("GLIBC_2.29",), "manylinux_2_31_x86_64"),
        (("GLIBCXX_3.4.29",), "manylinux_2_34_x86_64"),
        (("CXXABI_1.3.12",), "manylinux_2_31_x86_64"),
        (("GCC_12.0.0",), "manylinux_2_35_x86_64"),
        (("GLIBC_2.36", "GLIBCXX_3.4.9"), "manylinux_2_38_x86_64"),
        (("GLIBC_ABI_DT_RELR",), "manylinux_2_38_x86_64"),
        (("CXXABI_TM_1", "CXXABI_FLOAT128", "LIBATOMIC_1.0"), "manylinux_2_28_x86_64"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else None,
)
def test_the_oldest_system_that_has_all(
    monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Path], versions: tuple[str, ...], tag: str
) -> None:
    assert tag_of(monkeypatch, libraries["plain"], versions) == PlatformTag(tag)


def tag_of(monkeypatch: pytest.MonkeyPatch, path: Path, versions: tuple[str, ...]) -> PlatformTag:
    needs = SystemNeeds("x86_64", frozenset({"libc.so.6"}), frozenset(versions))
    monkeypatch.setattr(SystemNeeds, "of", classmethod(lambda cls, content: needs))
    return platform_tag([path])


def test_symbols_of_no_known_system(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Path]) -> None:
    found = tag_of(monkeypatch, libraries["plain"], ("GLIBC_2.2.5", "GLIBC_2.99", "GLIBCXX_3.5.1"))
    for word in ("GLIBC_PRIVATE", "GLIBC_ABI_FUTURE"):
        assert tag_of(monkeypatch, libraries["plain"], (word,)).reason == (
            f"they need {word}, which no known system has"
        )
    assert found == PlatformTag(
        "linux_x86_64",
        "they need GLIBCXX_3.5.1, GLIBC_2.99, which no known system has",
        "build on an older system, such as a manylinux container",
    )


def test_libraries_of_no_machine_or_of_two(libraries: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape("all libraries must be for the same machine, but these are for: []")
    ):
        platform_tag([])
    other = bytearray(libraries["plain"].read_bytes())
    struct.pack_into("<H", other, 18, 8)
    (tmp_path / "mips.so").write_bytes(other)
    with pytest.raises(ValueError, match="machine 8"):
        platform_tag([tmp_path / "mips.so"])
