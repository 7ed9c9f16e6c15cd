"""`opsmith new`: write a package with an operator, its kernels and its tests."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from opsmith.cli.output import answering
from opsmith.scaffolding import LICENCES, NewPackage, new_package


def new(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the package, such as `fast-attention`; Python imports it as `fast_attention`.",
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Folder to make; by default NAME."),
    ] = None,
    cuda: Annotated[bool, typer.Option("--cuda/--no-cuda", help="Write a kernel in CUDA C++, too.")] = True,
    ci: Annotated[bool, typer.Option("--ci/--no-ci", help="Write a workflow for GitHub Actions.")] = True,
    licence: Annotated[
        str,
        typer.Option(
            "--licence",
            "--license",
            metavar="LICENCE",
            help=f"One of {', '.join(f'`{each}`' for each in LICENCES)}.",
        ),
    ] = LICENCES[0],
) -> None:
    """Write a package that works at once: an operator, kernels in files, tests, settings.

    It passes `pytest`, `opsmith check`, `ruff` and `mypy` without changes. Nothing is overwritten.

    **Examples**

    - `opsmith new fast-attention`

    - `opsmith new fast-attention ~/projects/attention --no-cuda --licence Apache-2.0`

    Exit status: 0 written, 2 it could not be written.
    """
    with answering() as printer:
        package = new_package(name, folder, cuda=cuda, ci=ci, licence=licence)
        printer.write(_summary(package, ci=ci))


def _summary(package: NewPackage, *, ci: bool) -> str:
    lines = [f"{package.folder}: {len(package.files)} files", *(f"  {file}" for file in package.files)]
    if not package.source.indexed:
        lines += ["", "opsmith is on no package index yet:"]
        if package.source.reference:
            lines.append(f"  pyproject.toml takes it from {package.source.reference}")
        else:
            lines.append("  the package needs opsmith in its environment, as in this environment")
        if ci and not package.source.reachable:
            lines.append("  .github/workflows/test.yml cannot reach it: name a source there")
    folder = shlex.quote(str(package.folder))
    lines += ["", "Next:", f"  cd {folder}", "  pip install -e '.[dev]'", "  pytest"]
    return "\n".join(lines) + "\n"
