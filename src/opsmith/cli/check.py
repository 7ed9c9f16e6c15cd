"""`opsmith check`: check all properties of the operators in files or modules; results and exit status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from opsmith import errors
from opsmith.adopting.function_class import is_function_class
from opsmith.checking.checker import selected
from opsmith.checking.processes.fork import limit_of
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.report import Report, read_reports
from opsmith.cli.check_formats import destinations, write_results
from opsmith.cli.check_run import Checking, CheckRun, check_at_once, check_in_turn
from opsmith.cli.check_subject import CheckSubject, subjects_of
from opsmith.cli.guard import waiting
from opsmith.cli.options import (
    AsJson,
    Quick,
    Seed,
    Thorough,
    Traceback,
    effort_of,
    named_as_options,
    read_file,
)
from opsmith.cli.output import answering
from opsmith.targets import Target, nothing_declared, targets_of

EPILOG = "\n\n".join(
    ["**Properties**", *(f"- `{known.name}` {known.title}" for known in PROPERTIES.values())]
)
"""End of the help: the values of `--only` and `--skip`."""


def check(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE_OR_MODULE[:NAME]",
            help="One or several `.py` files or modules, with the name of an operator, Function or custom op "
            "(`twice`, or `mylib::twice`). Without `:NAME`, all its operators; if it has no operator, all "
            "its Functions and custom ops. A folder (`kernels/`) means all its files that declare one.",
        ),
    ],
    pass_if_none: Annotated[
        bool,
        typer.Option(
            "--pass-if-none",
            help="Allow files that declare nothing, for example in a hook that names each changed file.",
        ),
    ] = False,
    quick: Quick = False,
    thorough: Thorough = False,
    seed: Seed = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PROPERTY,...", help="Check only these properties; may be repeated."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROPERTY,...", help="Leave out these properties; the names are as for `--only`."
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE_OR_MODULE:]NAME",
            help="Samples: a list of tuples of arguments, or a function that returns this list.",
        ),
    ] = None,
    isolate: Annotated[
        bool,
        typer.Option("--isolate", help="Run each property in a child process: then a crash is a finding."),
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With `--isolate`: time limit of a property; 300 by default.",
        ),
    ] = None,
    sanitize: Annotated[
        bool,
        typer.Option(
            "--sanitize",
            help="Run kernels in C++ under the compiler's sanitizers, too: property `sanitized`.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Let the check fail for warnings and for kernels that did not run, too."
        ),
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="An earlier output of `--json`: failures in it do not count, only new failures count.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "-j",
            "--jobs",
            metavar="N",
            help="Number of operators to check at once, each in a process.",
            show_default=False,
        ),
    ] = 1,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT[=FILE]",
            help="Format of the results on stdout, or in a file: `text`, `lines` (a line for each finding), "
            "`github` (annotations of GitHub Actions), `json`, `sarif`, `junit` or `html`. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the reports as a page, as `--format html=FILE`."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Check operators: results, gradients, second order, side effects and more, against their references.

    A plain `autograd.Function` or a `torch.library.custom_op` can be checked without changes. Without
    `--samples` the arguments of a Function are guessed, but a custom op cannot be checked.

    **Examples**

    - `opsmith check operators.py` every operator that the file declares

    - `opsmith check operators.py:linear --quick` only the operator in the variable `linear`

    - `opsmith check mypackage --skip integration --html report.html` a package with all its modules

    - `opsmith check functions.py:Swish --samples SWISH_SAMPLES` a Function, on the file's `SWISH_SAMPLES`

    - `opsmith check mypackage.ops:mylib::linear --json > report.json`

    - `opsmith check first.py second.py kernels/` all operators of both files, and of the files in the folder

    - `opsmith check mypackage --format text --format github --format sarif=check.sarif`

    - `opsmith check mypackage -j 4` four operators at a time, with the same reports in the same order

    Exit status: 0 no error in what was asked for (`--strict`: no warning, and every kernel ran), 1 otherwise,
    2 something could not be checked or written, 130 interrupted. A crash ends the command with the status of
    its signal, after a traceback on stderr. With `--isolate` it is a finding. With `-j` the operator counts
    as not checked.
    """
    run = CheckRun()
    shown = [*(formats or []), *(["json"] if as_json else [])]
    with answering(as_json="json" in shown, traceback=traceback) as output:
        wanted = destinations(formats or [], as_json=as_json, html=html)
        try:
            with named_as_options(check):
                selected(only or None, skip)
            options = {
                "only": only or None,
                "skip": skip,
                "seed": seed,
                "effort": effort_of(quick=quick, thorough=thorough),
                "isolate": _isolation(isolate=isolate, limit=limit),
                "sanitize": sanitize,
                "strict": strict,
            }
            _refuse_jobs(jobs)
            known: Mapping[str, Report] = {}
            if baseline is not None:
                known = read_file(baseline, "--baseline", "opsmith check ... --json >", read_reports)
            found, refused = _subjects(targets, samples, run, optional=pass_if_none)
        except errors.OpsmithError as error:
            run.refusal = error
            write_results(run, wanted, output)
            raise
        text = any(each.format.render is None for each in wanted)
        checked = Checking(found, run, output if text else None, options, known)
        for problem in refused:
            checked.refuse(*problem)
        if min(jobs, len(found)) > 1:
            check_at_once(checked, jobs, check)
        else:
            check_in_turn(checked, check)
        if not run.interrupted:
            for each in dict.fromkeys(subject.target for subject in found):
                for line in _unchecked_remarks(each, each.unadopted()):
                    typer.echo(line, err=True)
        if text and len(found) + len(refused) != 1:
            output.write(f"\n{run.summary()}\n")
        for remark in write_results(run, wanted, output):
            typer.echo(f"opsmith: {remark}", err=True)
        if run.interrupted:
            output.close()
            raise KeyboardInterrupt
    raise typer.Exit(run.status)


def _subjects(
    targets: list[str], samples: str | None, run: CheckRun, *, optional: bool
) -> tuple[list[CheckSubject], list[tuple[errors.OpsmithError, str]]]:
    """Return the subjects that the targets name, each once, and the errors of files that cannot be imported.

    Args:
        targets: The targets.
        samples: Value of `--samples`.
        run: Object that gets the name of the file or module if it is the only one, and cannot be imported.
        optional: True if they may declare nothing.

    Raises:
        OpsmithError: If there is nothing to check, or a single file or module cannot be imported.
    """
    parsed = [(text, each) for text in targets for each in targets_of(text, optional=optional)]
    if samples is not None and (len(parsed) != 1 or parsed[0][1].optional):
        first = parsed[0][1].source if parsed else "FILE"
        raise errors.UsageError(
            f"`--samples` is for one operator, but {len(parsed)} files or modules are named",
            hint=f"name it: `opsmith check {first}:NAME --samples {samples}`",
        )
    found: list[CheckSubject] = []
    refused: list[tuple[errors.OpsmithError, str]] = []
    for text, each in parsed:
        try:
            with waiting(f"importing {escape(each.source if each.optional else text)}"):
                named = subjects_of(each, samples)
        except errors.OpsmithError as error:
            if len(targets) == 1 and not each.optional:
                run.refused_in = each.source
                raise
            refused.append((error, each.source))
            continue
        found += [new for new in named if all(new.value is not before.value for before in found)]
    if not found and not refused and not optional:
        raise nothing_declared(*targets)
    return found, refused


def _isolation(*, isolate: bool, limit: float | None) -> bool | float:
    if limit is not None and not isolate:
        raise errors.UsageError(
            "`--limit` is for a check in child processes",
            expected="`--isolate` with it",
            hint=f"write `--isolate --limit {limit:g}`",
        )
    if limit is not None and not 0 < limit < float("inf"):
        raise errors.UsageError(
            "`--limit` takes a positive number of seconds",
            got=f"{limit:g}",
            hint="write for example `--isolate --limit 60`",
        )
    found = isolate if limit is None else limit
    limit_of(found)
    return found


def _unchecked_remarks(target: Target, others: dict[str, Any]) -> Iterator[str]:
    """Yield a line about Functions, and a line about custom ops, in a file whose operators were checked."""
    functions = [name for name, value in others.items() if is_function_class(value)]
    custom = [name for name in others if name not in functions]
    for names, kind, options in ((functions, "Function", ""), (custom, "custom op", " --samples SAMPLES")):
        if names:
            listed = ", ".join(f"`{name}`" for name in names)
            which, its, verb = (f"{kind}s", "them", "are") if len(names) > 1 else (kind, "it", "is")
            yield (
                f"opsmith: {target.source} also has the {which} {listed}, which {verb} not adopted; "
                f"check {its} with `opsmith check {target.source}:{names[0]}{options}`"
            )


def _refuse_jobs(jobs: int) -> None:
    if jobs < 1:
        raise errors.UsageError(
            "`-j` takes the number of processes",
            expected="1 or more",
            got=str(jobs),
            hint="write for example `-j 2`",
        )
