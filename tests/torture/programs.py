"""Programs of this folder, as its tests run them: each prints its figures as one JSON object."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import opsmith

HERE = Path(__file__).parent
LIMIT_S = 1800
"""Limit of a program, far beyond what it needs."""


def torture(
    program: str, *arguments: str, variables: Mapping[str, str] | None = None, before: str = ""
) -> tuple[Any, str]:
    """Run a program; return its figures, and all that it and its children printed beside them.

    Args:
        program: Name of its file, without the suffix.
        arguments: Its arguments.
        variables: Environment variables.
        before: Command of a shell, run as root of namespaces of its own.
    """
    path = os.pathsep.join([str(Path(opsmith.__file__).parents[1]), str(HERE)])
    command = [sys.executable, str(HERE / f"{program}.py"), *arguments]
    if before:
        command = ["unshare", "-rm", "sh", "-c", f'{before} && exec "$0" "$@"', *command]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *said, figures = done.stdout.splitlines()
    sys.stdout.write(figures + "\n")
    return json.loads(figures), "\n".join([*said, *done.stderr.splitlines()])


def compiler(folder: Path, text: str) -> str:
    """Write a program of the shell into a folder, as a compiler."""
    program = folder / "compiler"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def remembering(folder: Path) -> str:
    """Return a compiler that runs g++ once for the same files and arguments, which makes builds fast."""
    kept = folder / "kept"
    kept.mkdir()
    text = f"""
    case " $* " in *" -E "* | *" -fsyntax-only "*) exec g++ "$@" ;; esac
    for each; do [ "$last" = -o ] && out=$each; last=$each; done
    key=$({{ echo "$*"; cat ./*; }} | sha256sum | cut -c 1-64)
    [ -e {kept}/$key ] && exec cp {kept}/$key "$out"
    g++ "$@" || exit
    cp "$out" {kept}/$key.$$ 2>/dev/null && mv {kept}/$key.$$ {kept}/$key
    exit 0"""
    return compiler(folder, text)


@functools.cache
def can_mount() -> bool:
    """Return whether this user may mount a small disk."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
