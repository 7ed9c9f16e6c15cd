"""Reports of sanitizers are read, in the words of several compilers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from opsmith.build import symbols
from opsmith.build.symbols import Line, lines_at
from opsmith.kernels.cpp import sanitizer
from opsmith.kernels.cpp.sanitizer import reports

FRAMES = """\
    #0 0x7fbd4b34758f  (/c/2eb/kernel.so+0x458f)
    #1 0x7fbd4b33e9d7  (/c/ee7/kernel.so+0x29d7) (BuildId: 0123)
"""
PYTHON = "    #2 0x7fbd48714cf3  (/usr/lib/libpython3.so+0xb14cf3)\n"

OVERFLOW = f"""\
=================================================================
==46==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x611 at pc 0x7fb bp 0x7ff sp 0x7fe
READ of size 4 at 0x611 thread T0
{FRAMES}{PYTHON}
0x611 is located 3 bytes to the right of 12-byte region [0x600,0x60c)
allocated by thread T0 here:
    #0 0x7fdea92b7ffd  (/usr/lib/libasan.so+0xb7ffd)

SUMMARY: AddressSanitizer: heap-buffer-overflow (/c/2eb/kernel.so+0x458f)
"""
STACK = f"""\
==46==ERROR: AddressSanitizer: stack-buffer-overflow on address 0x7fc at pc 0x7fb bp 0x7ff sp 0x7fe
WRITE of size 8 at 0x7fc thread T0
{FRAMES}
Address 0x7fc is located in stack of thread T0 at offset 64 in frame
    #0 0x7fbd4b34758f  (/c/2eb/kernel.so+0x458f)

  This frame has 2 object(s):
    [32, 64) 'buffer' (line 12) <== Memory access at offset 64 overflows this variable
    [96, 128) 'other' (line 13)
"""
SEGV = f"""\
AddressSanitizer:DEADLYSIGNAL
=================================================================
==46==ERROR: AddressSanitizer: SEGV on unknown address 0x000000000008 (pc 0x7fb bp 0x7ff sp 0x7fe T0)
==46==The signal is caused by a WRITE memory access.
==46==Hint: address points to the zero page.
{FRAMES}
"""
UNDEFINED = f"""\
ops.cpp:14:25: runtime error: load of misaligned address 0x7ffd31 for type 'const int', which requires 4 \
byte alignment
0x7ffd31: note: pointer points here
 00 00 00  01 00 00 00
{FRAMES}
"""


@pytest.fixture(autouse=True)
def known_lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every address is a line of its own number."""
    asked: list[tuple[str, int]] = []

    def found(library: Path, addresses: list[int]) -> list[list[Line]]:
        asked.extend((str(library), address) for address in addresses)
        return [[Line("f", "ops.cpp", address)] for address in addresses]

    monkeypatch.setattr(sanitizer, "lines_at", found)
    return asked


def test_a_read_behind_a_piece_of_memory(known_lines: list[tuple[str, int]]) -> None:
    (found,) = reports(OVERFLOW)
    assert (found.kind, found.access, found.size, found.address) == ("heap-buffer-overflow", "READ", 4, 0x611)
    assert found.region == (0x600, 3, 12, "after")
    # The uppermost address is that of the access, the others stand behind calls.
    assert known_lines == [("/c/2eb/kernel.so", 0x458F), ("/c/ee7/kernel.so", 0x29D6)]
    assert [line.number for line in found.lines] == [0x458F, 0x29D6]


@pytest.mark.parametrize(
    ("words", "side"),
    [("after", "after"), ("before", "before"), ("to the left of", "before"), ("inside of", "inside")],
)
def test_the_words_of_other_versions(words: str, side: str) -> None:
    (found,) = reports(OVERFLOW.replace("to the right of", words))
    assert found.region is not None
    assert found.region[3] == side


def test_a_variable_on_the_stack() -> None:
    (found,) = reports(STACK)
    assert (found.access, found.size, found.variable, found.region) == ("WRITE", 8, "buffer", None)


def test_a_signal() -> None:
    (found,) = reports(SEGV)
    assert (found.kind, found.access, found.size, found.address) == ("SEGV", "WRITE", 0, 8)


def test_undefined_behaviour_in_the_same_words_each_time() -> None:
    (found,) = reports(UNDEFINED)
    assert found.kind == "undefined"
    assert found.text == "load of misaligned address for type 'const int', which requires 4 byte alignment"


def test_several_at_once_and_what_is_not_of_a_kernel() -> None:
    text = "\n".join((OVERFLOW, UNDEFINED, "a word of the kernel", STACK, SEGV))
    assert [each.kind for each in reports(text)] == [
        "heap-buffer-overflow",
        "undefined",
        "stack-buffer-overflow",
        "SEGV",
    ]
    assert reports(text.replace("kernel.so", "libtorch.so")) == []
    assert reports("nothing of the sort") == []


def test_addresses_become_lines_with_what_was_inlined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = (
        "0x0000458f\nat(int)\n/c/opsmith.h:153\nf\n/me/ops.cpp:7 (discriminator 2)\n0x000029d7\n??\n??:0\n"
    )
    program = tmp_path / "addr2line"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lines_at(Path("/c/kernel.so"), [0x458F, 0x29D7]) == [
        [Line("at(int)", "/c/opsmith.h", 153), Line("f", "/me/ops.cpp", 7)],
        [],
    ]


def test_without_a_program_that_knows_lines_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lines_at(Path("/c/kernel.so"), [1, 2]) == [[], []]
    (tmp_path / "addr2line").write_text("#!/bin/sh\n")
    (tmp_path / "addr2line").chmod(0o755)

    def late(*_args: object, **_more: object) -> None:
        raise subprocess.TimeoutExpired("addr2line", 1)

    monkeypatch.setattr(symbols.subprocess, "run", late)
    assert lines_at(Path("/c/kernel.so"), [1]) == [[]]
