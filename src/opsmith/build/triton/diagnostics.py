"""What Triton's compiler and launcher say, in the author's own lines."""

from __future__ import annotations

from typing import Any

from opsmith import errors
from opsmith.build.triton.source import TritonSource

SHOWN = 6
"""So many lines of what the compiler says are quoted."""


def told_of_launch(error: Exception, source: TritonSource, operator: str) -> errors.OpsmithError | None:
    """The error for what Triton raises where it compiles or launches; None for anything else."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, CompilationError | PTXASError):
        return told_of_compilation(error, source, operator)
    if isinstance(error, OutOfResources):
        return errors.KernelError(
            f"the Triton kernel needs more {error.name} than the GPU has",
            operator=operator,
            expected=f"at most {error.limit}",
            got=f"{error.required}",
            where=source.where,
            hint="make its blocks smaller, or lower `num_stages` in `constants=`",
        )
    return None


def told_of_compilation(error: Any, source: TritonSource, operator: str) -> errors.CompileError:
    """The error for a kernel that Triton's compiler refuses, at the author's line and column.

    Args:
        error: What Triton raised; the place in its `CompilationError` counts from the `def` of the function.
        source: The kernel.
        operator: The operator's name.
    """
    message, inner = "", error
    while inner is not None:  # of a function that it calls, the innermost knows what is wrong
        message = getattr(inner, "error_message", None) or message or str(inner)
        inner = inner.__cause__
    lines, first = source.text.splitlines(), source.function.__code__.co_firstlineno
    before = next((at for at, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    at, shown = source.where, message.strip()
    shown = "\n        ".join(shown.splitlines()[:SHOWN])
    line = getattr(getattr(error, "node", None), "lineno", None)
    if line is not None:
        at = f"{source.function.__code__.co_filename}:{first + before + line - 1}"
        quoted = "".join(lines[before + line - 1 : before + line])
        indent = len(lines[0]) - len(lines[0].lstrip())  # which Triton takes away
        column = error.node.col_offset + indent
        shown = f"{at}:{column + 1}: {shown}\n        {quoted}\n        {' ' * column}^"
    return errors.CompileError(
        "Triton's compiler refuses the kernel",
        operator=operator,
        got=shown,
        where=at,
        hint="hint the line that it names" if line is not None else "hint the kernel: what it is made of",
    )
