"""Run as a program: kernels are built by compilers that are none, fail, lie, or hang.

Its argument is a folder of its own. Each compiler gets a fork, in which a kernel under `strict=True` and one
without are called; another fork with the real compiler follows. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from children import REFUSED, RIGHT, adopt_orphans, observed, orphans
from kernel_torture import OPERATORS, TEXT, use
from torch import Tensor

import opsmith
from opsmith.build import toolchain

WITHOUT_KERNEL = re.compile(
    r".*?: RuntimeWarning: .+? the reference runs in place of its kernel .+? once in a process\n [^\n]+\n",
    re.DOTALL,
)
"""What a kernel leads to that is not strict; the line of source stands below it."""
HANG_LIMIT_S = 2
"""Limit of those that hang."""
MOST_SAID = 10_000
"""Most characters of a message that a person reads."""
REAL = shutil.which("g++") or "g++"
OUT = 'for each; do [ "$last" = -o ] && out=$each; last=$each; done\n'
"""Shell: finds the file to write."""
COMPILING = 'case " $* " in *" -E "*) exec ' + REAL + ' "$@";; esac\n' + OUT
"""Shell: what follows happens after the preprocessor, which is the real one."""
OTHER_MACHINE = bytes.fromhex("7f454c46020101000000000000000000 0300b700") + bytes(200)
"""Head of a library for another processor."""


@opsmith.operator("torture::strict")
def strict(x: Tensor) -> Tensor:
    return x * 5


strict.kernel("cpu", cpp=TEXT.format(factor=5), entry="times_5", strict=True)


def call_both() -> None:
    """Call a kernel that may not be replaced by the reference, after two that may."""
    x = torch.arange(5.0)
    for factor, operator in OPERATORS.items():
        with_reference(operator, factor, x)
    assert torch.equal(strict(x), x * 5)


def with_reference(operator: Any, factor: int, x: Tensor) -> None:
    with suppress(opsmith.errors.CompileError):  # the source is at fault, as far as one can see
        assert torch.equal(operator(x), x * factor)


SCRIPTS: dict[str, str] = {
    "writes nothing": "exit 0",
    "writes nothing, and the preprocessor works": COMPILING + "exit 0",
    "an empty file": COMPILING + ': > "$out"',
    "a text": COMPILING + 'echo "no library" > "$out"',
    "a script": COMPILING + 'printf "#!/bin/sh\\n" > "$out"; chmod 755 "$out"',
    "half a file": COMPILING + f'{REAL} "$@" && size=$(wc -c < "$out") && truncate -s $((size / 2)) "$out"',
    "all but a byte": COMPILING
    + f'{REAL} "$@" && size=$(wc -c < "$out") && truncate -s $((size - 1)) "$out"',
    "a file of zeros": COMPILING + 'head -c 20000 /dev/zero > "$out"',
    "random bytes": COMPILING + 'head -c 20000 /dev/urandom > "$out"',
    "the head of a library alone": COMPILING + 'printf "\\177ELF\\002\\001\\001" > "$out"',
    "another machine's library": COMPILING + 'cp "$(dirname "$0")/other_machine" "$out"',
    "a program": COMPILING + 'cp /bin/true "$out"',
    "a library without the symbol": COMPILING
    + f'echo "int other;" | {REAL} -x c++ -shared -fPIC - -o "$out"',
    "the object in place of the library": COMPILING
    + f'echo "int other;" | {REAL} -x c++ -c -fPIC - -o "$out"',
    "a library with an undefined symbol": COMPILING
    + f'echo "int none(); int other = none();" | {REAL} -x c++ -shared -fPIC - -o "$out"',
    "a link": COMPILING + 'ln -s /etc/passwd "$out"',
    "a dangling link": COMPILING + 'ln -s nowhere "$out"',
    "a link to a library": COMPILING + f'{REAL} "$@" && mv "$out" real.so && ln -s real.so "$out"',
    "a folder": COMPILING + 'mkdir "$out"',
    "a FIFO": COMPILING + 'mkfifo "$out"',
    "another name": COMPILING + f'{REAL} "$@" && mv "$out" other.so',
    "files beside it": COMPILING
    + f'{REAL} "$@" && echo more > more && ln -s /etc/passwd link && mkdir below',
    "unreadable": COMPILING + f'{REAL} "$@" && chmod 0 "$out"',
    "writable by all": COMPILING + f'{REAL} "$@" && chmod 777 "$out"',
    "the result, and a failure": COMPILING + f'{REAL} "$@"; exit 1',
    "fails": "exit 1",
    "fails after the preprocessor": COMPILING + "exit 1",
    "status 255": "exit 255",
    "status 126": COMPILING + "exit 126",
    "status 127": COMPILING + "exit 127",
    "dies of SIGKILL": COMPILING + "kill -KILL $$",
    "dies of SIGSEGV": COMPILING + "kill -SEGV $$",
    "dies of SIGTERM": COMPILING + "kill -TERM $$",
    "dies of SIGPIPE": COMPILING + "kill -PIPE $$",
    "dies of SIGXFSZ": COMPILING + "kill -XFSZ $$",
    "dies of a signal without a name": COMPILING + "kill -40 $$",
    "kills its group": COMPILING + "kill -KILL 0",
    "hangs": "exec sleep 1000",
    "hangs after the preprocessor": COMPILING + "sleep 1000",
    "hangs and ignores signals": "trap '' TERM INT HUP; sleep 1000; sleep 1000",
    "hangs, stopped": "kill -STOP $$",
    "a child that holds the output": COMPILING + f'sleep 1000 & exec {REAL} "$@"',
    "hangs with children": COMPILING + "sleep 1000 & sleep 1000 & wait",
    "leaves children": COMPILING + f'sleep 2 > /dev/null 2>&1 & exec {REAL} "$@"',
    "forks": COMPILING
    + f'for i in 1 2 3 4 5 6 7 8; do (sleep 1; true) > /dev/null 2>&1 & done; exec {REAL} "$@"',
    "prints 60 MB": COMPILING + "head -c 60000000 /dev/zero | tr '\\0' x; exit 1",
    "prints 60 MB of lines": COMPILING + "yes 'kernel.cpp:1:1: error: no' | head -c 60000000; exit 1",
    "prints 60 MB and succeeds": COMPILING + f'head -c 60000000 /dev/zero; exec {REAL} "$@"',
    "prints escapes": COMPILING + "printf 'error: \\033[31mred\\033]0;title\\007\\r\\b'; exit 1",
    "prints what is no UTF-8": COMPILING + "printf 'error: \\377\\376\\200'; exit 1",
    "prints nothing and fails": COMPILING + "exit 2",
    "preprocesses to nothing": COMPILING.replace(f'exec {REAL} "$@"', OUT + ': > "$out"; exit 0')
    + f'exec {REAL} "$@"',
    "preprocesses to bytes": OUT
    + 'case " $* " in *" -E "*) head -c 5000 /dev/urandom > "$out"; exit 0;; esac\n'
    + f'exec {REAL} "$@"',
    "preprocesses to something else each time": f'{REAL} "$@" || exit\n'
    + OUT
    + 'case " $* " in *" -E "*) date "+// %N" >> "$out";; esac',
    "changes its source": COMPILING + f'echo "#error changed" >> kernel.ii; exec {REAL} "$@"',
    "changes its source afterwards": COMPILING + f'{REAL} "$@"; echo "//" >> kernel.ii; echo > kernel.cpp',
    "deletes its source": COMPILING + "rm -f kernel.ii kernel.cpp runtime.cpp",
    "deletes its folder": COMPILING + 'rm -rf "$PWD"',
    "deletes its folder and succeeds": COMPILING + f'{REAL} "$@"; rm -rf "$PWD"',
    "makes its folder unwritable": COMPILING + "chmod 500 .; exit 1",
    "reads its input": COMPILING + f'cat; exec {REAL} "$@"',
    "writes into its input": COMPILING + f'echo more >&0; exec {REAL} "$@"',
    "closes its output": COMPILING + f'exec >&- 2>&-; exec {REAL} "$@"',
    "works, and warns": f'echo "warning: mind" >&2; exec {REAL} "$@"',
    "works, after failing once": COMPILING
    + f'[ -e "$0.once" ] || {{ : > "$0.once"; echo "Input/output error"; exit 1; }}; exec {REAL} "$@"',
}
HANGING = {name for name in SCRIPTS if name.startswith("hangs") or name == "a child that holds the output"}


def commands(at: Path) -> dict[str, str]:
    """Return values of `CXX` that are no such script."""
    for name, content in {"data": b"\x00\x01", "other": OTHER_MACHINE, "text": b"g++\n"}.items():
        (at / name).write_bytes(content)
        (at / name).chmod(0o755)
    (at / "plain").write_text(f'#!/bin/sh\nexec {REAL} "$@"\n')
    (at / "interpreter").write_text("#!/nowhere/sh\n")
    (at / "interpreter").chmod(0o755)
    (at / "loop").symlink_to("loop")
    return {
        "missing": str(at / "none"),
        "missing in PATH": "no-such-compiler",
        "not executable": str(at / "plain"),
        "a folder as the compiler": str(at),
        "bytes": str(at / "data"),
        "another machine's program": str(at / "other"),
        "a text without an interpreter": str(at / "text"),
        "an interpreter that is missing": str(at / "interpreter"),
        "a loop of links": str(at / "loop"),
        "/dev/null": "/dev/null",
        "an open quotation mark": "g++ 'open",
        "an empty word": "''",
        "spaces": "   ",
        "an unknown option": "g++ --no-such-option",
        "only the preprocessor": "g++ -E",
        "only syntax": "g++ -fsyntax-only",
        "no library": "g++ -c",
        "a library that is missing": "g++ -lno-such-library",
        "true": "true",
        "false": "false",
        "cat": "cat",
        "a shell": "sh",
        "a C compiler": "gcc",
        "32 bits": "g++ -m32",
        "an old standard": "g++ -std=c++98",
        "not UTF-8": "g++\udcff",
        "a newline": "g++\n-O1",
        "a real one": "g++",
    }


def attempt(command: str, hangs: bool) -> dict[str, Any]:
    """Call with a compiler, and then with the real one in another process; return what came of it."""

    def call() -> None:
        os.environ["CXX"] = command
        if hangs:
            toolchain.LIMIT_S = HANG_LIMIT_S
        call_both()

    status, printed = observed(call)
    return {"status": status, "printed": printed, "next": observed(use), "running": orphans()}


def is_clear(found: dict[str, Any]) -> bool:
    """Return True for right results, and for an error of opsmith's that a person can read."""
    printed = found["printed"]
    if found["next"] != (RIGHT, "") or found["running"] or len(printed) > MOST_SAID:
        return False
    printed = WITHOUT_KERNEL.sub("", printed)
    if found["status"] == REFUSED:
        named = ("ToolchainError: ", "CompileError: ", "CacheError: ", "KernelRefusedError: ")
        return printed.startswith(named) and "\n  hint: " in printed and "\x1b" not in printed
    warned = "RuntimeWarning: kernels are built for this process alone" in printed
    return found["status"] == RIGHT and (warned or not printed)


def compilers(at: Path) -> dict[str, Any]:
    adopt_orphans()
    (at / "other_machine").write_bytes(OTHER_MACHINE)
    values = commands(at)
    for number, (name, text) in enumerate(SCRIPTS.items()):
        program = at / f"compiler_{number}"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        values[name] = str(program)
    figures: dict[str, Any] = {"compilers": len(values), "right": 0, "refused": 0, "unclear": {}}
    for name, command in values.items():
        found = attempt(command, name in HANGING)
        figures["right"] += found["status"] == RIGHT
        figures["refused"] += found["status"] == REFUSED
        if not is_clear(found):
            figures["unclear"][name] = {**found, "printed": found["printed"][:1000]}
    return figures


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compilers(Path(sys.argv[1]))) + "\n")
