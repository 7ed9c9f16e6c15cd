"""Flags of the C++ compiler and the linker that a kernel cannot have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RefusedFlags:
    """Flags that a kernel cannot have, all for the same reason.

    Attributes:
        pattern: Regular expression of the flags.
        reason: Reason, as a sentence without its end.
        hint: Advice on what to write instead.
    """

    pattern: str
    reason: str
    hint: str = "leave it out"


REFUSED = (
    RefusedFlags(
        r"-o.*|-c|-S|-E|-M.*|-x.*|-fsyntax-only|-save-temps.*|-###",
        "opsmith decides what is compiled and which file is written",
    ),
    RefusedFlags(
        r"-shared|-static(-pie)?|-r|-(no-)?pie|-nostdlib|-nodefaultlibs|-nostartfiles",
        "a kernel is linked as a shared library",
    ),
    RefusedFlags(r"-fno-(pic|PIC|pie|PIE)|-fpie|-fPIE", "the code of a library may be loaded at any address"),
    RefusedFlags(
        r"--?std=(?!(c|gnu)\+\+(17|1z|2\w|3\w)$).*|-ansi",
        "opsmith.h is C++17",
        'leave it out, or write "-std=c++20"',
    ),
    RefusedFlags(
        r"-m(16|32|x32)|-mabi=.*|-fpack-struct.*|-fshort-enums",
        "torch and the kernel exchange data in the compiler's default layout",
    ),
    RefusedFlags(r"-fno-exceptions", "OPSMITH_CHECK throws an exception"),
    RefusedFlags(
        r"-fsanitize=.*",
        "a process loads sanitizers before everything else",
        "leave it out, and run `opsmith check --sanitize`",
    ),
    RefusedFlags(r"-flto.*", "a kernel is a single file, so there is nothing to optimise across files"),
    RefusedFlags(
        r"-(cxx-)?(I|iquote|isystem|idirafter|iprefix|iwithprefix|isysroot).*|--include-directory.*",
        "folders of headers have an argument",
        'write `include_dirs=["..."]`',
    ),
    RefusedFlags(
        r"--?(include|imacros).*",
        "the text of a kernel names the headers that it includes",
        'write `#include "..."` into the source',
    ),
    RefusedFlags(r"-l.*", "libraries have an argument", 'write `libraries=["openblas"]` for -lopenblas'),
    RefusedFlags(
        r"@.*", "the key of a kernel does not contain the content of this file", "write its flags out"
    ),
    RefusedFlags(
        r"(?s:-(?![DUW]).*\s-.*)",
        "it is more than one flag",
        'write each flag as a separate str: ["-O2", "-ffast-math"]',
    ),
)
