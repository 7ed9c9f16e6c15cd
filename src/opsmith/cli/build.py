"""`opsmith build`: compile the kernels of a package for named targets, into the package."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from opsmith import errors
from opsmith.cli.guard import FAILED, waiting
from opsmith.cli.options import AsJson, Traceback, named_as_options
from opsmith.cli.output import answering, columns, progress_bar
from opsmith.cli.verification import Verification, verified
from opsmith.shipping import (
    BuildTargets,
    PackageBuild,
    SourcePackage,
    TorchLibrary,
    build_torch_library,
    staged_build,
)
from opsmith.targets import Target
from opsmith.torch_library.calls_extension import compile_calls
from opsmith.torch_library.calls_extension import target as calls_target

SCHEMA = 1
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""


def build(
    package: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PACKAGE]...",
            help="Name of a package or of a module in it, or its folder; by default the package of the "
            "project in this directory. With `--torch-library`: `FILE_OR_MODULE[:NAME]`, one or several.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder of the built kernels; by default `_kernels` in the package, where opsmith searches.",
        ),
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(
            metavar="LEVELS",
            help="Levels of processors, with commas between, or `none`; by default all "
            "of this machine: `x86-64-v2`, `x86-64-v3`, `x86-64-v4`; or `armv8-a`, `armv8.2-a`, `armv9-a`. "
            "With `--torch-library`: one level, by default this machine's processor.",
        ),
    ] = None,
    cuda: Annotated[
        str | None,
        typer.Option(
            metavar="ARCHS",
            help="Architectures of GPUs, with commas between, or `none`; by default `sm_80`, `sm_90` and "
            "`sm_100`. PTX of the newest is for later GPUs. With `--torch-library` none by default.",
        ),
    ] = None,
    torch_library: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write one library instead, `libNAME.so`: it gives operators to torch without Python, "
            "for example in programs in C++. It is for this machine's processor, or for a level of `--cpu`, "
            "and has kernels for the GPUs of `--cuda`.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="First compare the kernels that this machine can run with the references.",
        ),
    ] = False,
    calls: Annotated[
        bool,
        typer.Option(
            "--calls",
            help="Compile opsmith's own calls instead, for this Python and this torch, into the cache: "
            "this takes a minute, once.",
        ),
    ] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Compile the kernels of a package, so that its users need no compiler.

    Kernels in C++ are compiled for levels of processors, kernels in CUDA C++ for architectures of GPUs and
    for the operator's samples; neither needs a GPU. Kernels in Triton ship as source. The result is stored in
    the package, with a manifest. It is used if the source is unchanged and the machine can run it.

    `--verify` runs each library that this machine can run, and the kernels in CUDA C++ on the CPU. The
    results on the operator's samples are compared with the reference. If a result differs, nothing is
    written.

    **Examples**

    - `opsmith build mypackage`

    - `opsmith build --cpu x86-64-v3 --cuda none`

    - `opsmith build mypackage --verify`

    - `opsmith build mypackage.ops:scaled --torch-library libmine.so`

    - `opsmith build --calls`

    Exit status: 0 built; 1 a kernel does not compile, or differs from its reference; 2 nothing could be
    built.
    """
    failures = ("CompileError", "KernelSignatureError", "LaunchError", "MissingSamplesError", "ServingError")
    wrong = False
    with answering(as_json=as_json, traceback=traceback, failures=failures) as printer:
        if calls:
            with named_as_options(build):
                others = {
                    "package": package,
                    "output": output,
                    "cpu": cpu,
                    "cuda": cuda,
                    "torch_library": torch_library,
                    "verify": verify,
                }
                for option, value in others.items():
                    if value:
                        raise _unfit(option, "calls in C++", "no option except `--json`")
            with waiting("compiling calls in C++"):
                entry = compile_calls()
            if as_json:
                printer.write_json({"schema": SCHEMA, "calls": str(entry.directory), "for": calls_target()})
            else:
                printer.console().print(
                    f"calls in C++ for {calls_target()} are in {entry.directory}", soft_wrap=True
                )
            return
        if torch_library is not None:
            with named_as_options(build):
                for option, given in (("output", output), ("verify", verify)):
                    if given:
                        raise _unfit(option, "a library for torch", LIBRARY_OPTIONS)
                served = _serve(package or [], torch_library, cpu, cuda)
            if as_json:
                printer.write_json(_library_to_dict(served))
            else:
                _show_library(printer.console(), served)
            return
        with named_as_options(build):
            targets = BuildTargets.of(cpu, cuda)
            found = SourcePackage.of(_only(package or []))
            with progress_bar() as advance, staged_build(found, targets, output, advance) as made:
                verification = verified(made, advance) if verify else None
                wrong = verification is not None and bool(verification.differences)
                if not wrong:
                    made.write()
        if as_json:
            printer.write_json(_to_dict(made, verification))
        else:
            _show(printer.console(), made, verification)
    raise typer.Exit(FAILED if wrong else 0)


def _only(packages: list[str]) -> str | None:
    """Return the only package; None for the package of the project in this directory."""
    if len(packages) > 1:
        raise errors.UsageError(
            "one package is built at a time",
            expected="one package, or its folder",
            got=", ".join(packages),
            hint="build the packages one after the other; only `--torch-library` takes several",
        )
    return packages[0] if packages else None


LIBRARY_OPTIONS = "operators, `--torch-library`, one level of `--cpu`, and `--cuda`"


def _unfit(option: str, purpose: str, expected: str) -> errors.UsageError:
    return errors.UsageError(
        f"`{option}` is not for {purpose}",
        argument=option,
        expected=expected,
        hint=f"leave `{option}` out",
    )


def _serve(targets: list[str], path: Path, cpu: str | None, cuda: str | None) -> TorchLibrary:
    """Build the library of all operators that the targets name."""
    if not targets:
        raise errors.UsageError(
            "name the operators for a library for torch",
            expected="`FILE_OR_MODULE[:NAME]`, one or several",
            got="none",
            hint="write `opsmith build mypackage.ops --torch-library libmine.so`",
        )
    operators = [each for text in targets for each in Target.of(text).operators()]
    unique = {each.name: each for each in operators}.values()
    return build_torch_library(unique, path, processor=cpu or "native", cuda=cuda or "none")


def _show_library(console: Console, made: TorchLibrary) -> None:
    for name in made.served:
        console.print(f"{name}, with kernels for GPUs" if name in made.cuda else name, soft_wrap=True)
    for name in made.inlined:
        console.print(f"{name} is left out: compiled code contains its reference", soft_wrap=True)
    console.print(f"{made.path.stat().st_size / 1000:.0f} kB in {made.path}", soft_wrap=True)


def _library_to_dict(made: TorchLibrary) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "library": str(made.path),
        "served": made.served,
        "cuda": made.cuda,
        "inlined": made.inlined,
    }


def _show(console: Console, made: PackageBuild, verification: Verification | None) -> None:
    numbers = ("instances", "kB", "s")
    rows = columns("kernel", "in", "for", *numbers, right=numbers)
    for each in made.rows:
        built = bool(each.bytes)
        rows.add_row(
            each.operator or "opsmith",
            each.language,
            each.target,
            str(each.instances or ""),
            f"{each.bytes / 1000:.0f}" if built else "",
            f"{each.seconds:.1f}" if built else "",
        )
    console.print(rows)
    for file in {each.operator: each for each in made.files if each.libraries}.values():
        linked = ", ".join(file.libraries)
        console.print(f"{file.operator} links {linked}, which its users must have", soft_wrap=True)
    cubins = sorted({each.target for each in made.rows if each.target.startswith("sm_")})
    if cubins and not any(each.target.startswith("compute_") for each in made.rows):
        only = f"no PTX is built, because code for {', '.join(cubins)} uses features that later GPUs may lack"
        console.print(f"{only}; name an architecture without a letter, too, as `sm_90`", soft_wrap=True)
    for text in made.left_out:
        console.print(Text(f"left out: {text}", style="yellow"), soft_wrap=True)
    size = sum(each.bytes for each in made.rows) / 1e3
    count = f"{len(made.files)} file{'' if len(made.files) == 1 else 's'}, {size:.0f} kB"
    if verification is not None:
        for text in verification.unverified:
            console.print(Text(f"not verified: {text}", style="yellow"), soft_wrap=True)
        for text in verification.differences:
            console.print(Text(text, style="red"), soft_wrap=True)
        if verification.differences:
            console.print("nothing is written: kernels differ from their references", soft_wrap=True)
            return
        console.print(f"verified: {', '.join(verification.verified) or 'nothing'}", soft_wrap=True)
    console.print(f"{count} in {made.output}", soft_wrap=True)
    if made.kept:
        others = f"{len(made.kept)} file{'' if len(made.kept) == 1 else 's'}"
        console.print(f"kept there: {others} of different modules of the package", soft_wrap=True)


def _to_dict(made: PackageBuild, verification: Verification | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "package": made.package.name,
        "directory": str(made.output),
        "written": verification is None or not verification.differences,
        "kernels": [asdict(each) for each in made.rows],
        "libraries": {each.operator: list(each.libraries) for each in made.files if each.libraries},
        "kept": [each.file for each in made.kept],
        "left_out": list(made.left_out),
        "verification": None if verification is None else asdict(verification),
    }
