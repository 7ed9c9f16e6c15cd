"""`opsmith check`: every property of every operator of a file or module; its results and its exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from opsmith import checking, errors
from opsmith.adopting.library_operator import name_of
from opsmith.checking.accepting import project_findings, with_baseline
from opsmith.checking.checker import selected
from opsmith.checking.output.json import read_reports
from opsmith.checking.output.terminal import rendered
from opsmith.checking.processes.fork import limit_of, run_isolated
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.report import SCHEMA, Outcome, Report
from opsmith.cli.guard import FAILED, INTERRUPTED, UNUSABLE, complain, fatal_ends_reported, guarded, waiting
from opsmith.cli.options import AsJson, Traceback, effort_of, named_as_options, read_file, value_named
from opsmith.cli.output import Output, progress_bar, refuse_unwritable, write_file
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.surveying.trials import GuessedSamples, guessed_samples
from opsmith.targets import Target
from opsmith.targets.definitions import is_function_class

GUESSED = "its arguments were guessed: {words}. If it is not meant to take these, give it others: {how}"


@dataclass(frozen=True)
class CheckSubject:
    """One thing to check.

    Args:
        name: Its name in messages.
        value: An operator, an `autograd.Function` class or an operator of torch.library.
        target: The target that names it.
        samples: Samples to check it on; None for its own.
    """

    name: str
    value: Any
    target: Target
    samples: Any = None

    @property
    def reported_name(self) -> str:
        """Its name in reports: of a class the qualified name."""
        if isinstance(self.value, Operator):
            return self.value.name
        return self.value.__qualname__ if is_function_class(self.value) else name_of(self.value)

    def guess(self, seed: int, limit_s: float) -> GuessedSamples | None:
        """Guess the arguments of a Function that has no samples; return None for all else.

        Args:
            seed: Seed of the numbers.
            limit_s: Seconds of a child process that tries them first; 0 for none.

        Raises:
            MissingSamplesError: If no guess runs, or a guess kills the process.
        """
        if self.samples is not None or not is_function_class(self.value):
            return None
        hint = self.samples_hint()
        if limit_s:

            def dry() -> Outcome:
                guessed_samples(self.value, name=self.name, hint=hint, seed=seed)
                return Outcome("forward", "passed")

            fallen = run_isolated("forward", dry, where=where(self.value.forward), limit_s=limit_s).failures
            if fallen:
                raise errors.MissingSamplesError(
                    f"there are no samples to check it on, and on guessed arguments {fallen[0].message}",
                    operator=self.name,
                    where=fallen[0].where,
                    hint=hint,
                )
        return guessed_samples(self.value, name=self.name, hint=hint, seed=seed)

    def check(self, options: dict[str, Any]) -> Report:
        """Check it on its own samples, or on those that were given.

        Raises:
            MissingSamplesError: If there are none; the hint shows how to give them.
        """
        try:
            return checking.check(self.value, samples=self.samples, **options)
        except errors.MissingSamplesError as error:
            if isinstance(self.value, Operator):
                raise
            raise errors.MissingSamplesError(
                error.problem, operator=error.operator, where=error.where, hint=self.samples_hint()
            ) from error

    def samples_hint(self) -> str:
        """Return the hint of a message: the way to give samples."""
        file, where = (self.target.source, "") if self.target.is_file else ("samples.py", "samples.py:")
        return (
            f"write `SAMPLES = [(torch.randn(3, 4), 2.0)]`, a tuple for each call, into {file} and run "
            f"`opsmith check {self.target.source}:{self.name} --samples {where}SAMPLES`"
        )


def subjects_of(target: Target, samples: str | None) -> list[CheckSubject]:
    """Return all subjects that a target names.

    Args:
        target: The target.
        samples: Value of `--samples`: `[FILE_OR_MODULE:]NAME`.

    Raises:
        UsageError: If there are samples for more than one operator.
        OperatorNotFoundError: If there is nothing to check, or the samples are not there.
    """
    found = target.checkable()
    if samples is not None and len(found) != 1:
        raise errors.UsageError(
            f"`--samples` is for one operator, and `{target.source}` has {len(found)}",
            expected=f"one of {', '.join(f'`{name}`' for name in found)}",
            hint=f"name it: `opsmith check {target.source}:{next(iter(found))} --samples {samples}`",
        )
    given = (
        None
        if samples is None
        else value_named(
            samples,
            target,
            what="no samples",
            expected="a list of tuples of arguments, or a function without arguments that returns one",
            hint="write `{name} = [(torch.randn(3, 4),)]` there, or name what holds them",
        )
    )
    return [CheckSubject(name, value, target, given) for name, value in found.items()]


@dataclass
class CheckRun:
    """Results of the subjects so far.

    Args:
        reports: Reports of those that were checked.
        unchecked: Errors of those that could not be checked.
        interrupted: Names of those that Ctrl-C left unchecked.
    """

    reports: list[Report] = field(default_factory=list)
    unchecked: list[errors.OpsmithError] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        if self.unchecked:
            return UNUSABLE
        return 0 if all(report.passed_as_asked for report in self.reports) else FAILED

    def summary(self) -> str:
        """Return the counts in one line."""
        passed = sum(report.passed_as_asked for report in self.reports)
        parts = [f"{passed} passed", f"{len(self.reports) - passed} not passed"]
        parts += [f"{len(self.unchecked)} could not be checked"] if self.unchecked else []
        parts += [f"{len(self.interrupted)} interrupted"] if self.interrupted else []
        every = len(self.reports) + len(self.unchecked) + len(self.interrupted)
        return f"{every} operators: {', '.join(parts)}"

    def unchecked_entries(self) -> list[dict[str, Any]]:
        """Return the name of each subject that was not checked, and the reason."""
        left = [{"operator": name, "message": INTERRUPTION} for name in self.interrupted]
        return [{"operator": error.operator, "message": str(error)} for error in self.unchecked] + left

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints; `report.schema.json` of `opsmith.checking` describes it."""
        return {
            "schema": SCHEMA,
            "passed": self.status == 0,
            "reports": [report.to_dict() for report in self.reports],
            "unchecked": self.unchecked_entries(),
            "interrupted": bool(self.interrupted),
        }


INTERRUPTION = "interrupted by Ctrl-C before it was checked"


EPILOG = "\n\n".join(
    ["**Properties**", *(f"- `{known.name}` {known.title}" for known in PROPERTIES.values())]
)
"""End of the help: the values of `--only` and `--skip`."""


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_MODULE[:NAME]",
            help="A `.py` file or a module, with the name of an operator, Function or custom op (`twice`, or "
            "`mylib::twice`). Without `:NAME`, all its operators; if it has none, all its Functions and "
            "custom ops.",
            show_default=False,
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Check less: about 2 seconds for each operator.")
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Check more: more inputs, more repeats; minutes.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of all random numbers: the same seed, the same report.")
    ] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROPERTY", help="Check this property alone; may be given again.", show_default=False
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROPERTY", help="Leave this property out; may be given again.", show_default=False
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE_OR_MODULE:]NAME",
            help="Samples: a list of tuples of arguments, or a function that returns one.",
            show_default=False,
        ),
    ] = None,
    isolate: Annotated[
        bool,
        typer.Option("--isolate", help="Run each property in a child process: a crash is a finding then."),
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With `--isolate`: time limit of a property; 300 by default.",
            show_default=False,
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
        bool, typer.Option("--strict", help="Let warnings and unrun kernels fail, as errors do.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="An earlier output of `--json`: what it has does not count, only what is new.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the reports as a page.", show_default=False),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Check operators: results, gradients, second order, side effects and more, against their references.

    A plain `autograd.Function` can be checked as it is, and a `torch.library.custom_op`; without `--samples`
    the arguments of a Function are guessed, and a custom op cannot be checked.

    **Examples**

    - `opsmith check operators.py` every operator that the file declares

    - `opsmith check operators.py:linear --quick` the one that the variable `linear` holds

    - `opsmith check mypackage --skip integration --html report.html` a package with all its modules

    - `opsmith check functions.py:Swish --samples SWISH_SAMPLES` a Function, on the file's `SWISH_SAMPLES`

    - `opsmith check mypackage.ops:mylib::linear --json > report.json`

    Exit status: 0 no error in what was asked for (`--strict`: no warning, and every kernel ran), 1 otherwise,
    2 something could not be checked or written, 130 interrupted. A crash ends the command with the status of
    its signal, after a traceback of the line on stderr; with `--isolate` it is a finding.
    """
    out, run = sys.stdout, CheckRun()
    with guarded(traceback=traceback), redirect_stdout(sys.stderr):  # stdout is for the result alone
        output = Output(out)
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
        if html is not None:
            from opsmith.checking.output.html import page  # a missing package is reported before the check
        refuse_unwritable(html, "page")
        known: Mapping[str, Report] = {}
        if baseline is not None:
            known = read_file(baseline, "--baseline", "opsmith check ... --json >", read_reports)
        parsed = Target.of(target)
        with waiting(f"importing {escape(target)}"):
            found = subjects_of(parsed, samples)
        _check(found, run, None if as_json else output, options, known)
        if not run.interrupted:
            for line in _unchecked_remarks(parsed, parsed.unadopted()):
                typer.echo(line, err=True)
        if as_json:
            output.write_json(run.to_dict())
        elif len(found) > 1:
            output.write(f"\n{run.summary()}\n")
        if html is not None:
            unchecked = [(entry["operator"] or "", entry["message"]) for entry in run.unchecked_entries()]
            write_file(html, page(run.reports, unchecked), "page")
            typer.echo(f"opsmith: the page is in {html}", err=True)
        output.close()
        if run.interrupted:
            raise KeyboardInterrupt
    raise typer.Exit(run.status)


def _isolation(*, isolate: bool, limit: float | None) -> bool | float:
    if limit is not None and not isolate:
        raise errors.UsageError(
            "`--limit` is for a check in child processes",
            expected="`--isolate` beside it",
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
    """Yield a line on the Functions, and one on the custom ops, of a file whose operators were checked."""
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


def _check(
    subjects: list[CheckSubject],
    run: CheckRun,
    output: Output | None,
    options: dict[str, Any],
    known: Mapping[str, Report],
) -> None:
    """Check subjects one after the other, and print each report at once.

    A subject that cannot be checked is reported, and the others are checked; Ctrl-C ends the loop.
    """
    with fatal_ends_reported() if options["isolate"] is False else nullcontext():
        for at, each in enumerate(subjects):
            try:
                with named_as_options(check), progress_bar(each.name) as progress:
                    report = _report(each, {**options, "progress": progress})
            except errors.OpsmithError as error:
                run.unchecked.append(error)
                complain(error)
                continue
            except KeyboardInterrupt:
                run.interrupted += [left.name for left in subjects[at:]]
                return
            if report.operator in known:
                report = with_baseline(report, known[report.operator])
            run.reports.append(report)
            if output is not None:
                output.show(rendered(report))


def _report(subject: CheckSubject, options: dict[str, Any]) -> Report:
    options = {**options, "accept": project_findings(subject.reported_name)}
    guessed = subject.guess(options["seed"], limit_of(options["isolate"]))
    if guessed is None:
        return subject.check(options)
    report = checking.check(subject.value, samples=guessed.samples, **options)
    remark = GUESSED.format(words=guessed.words, how=subject.samples_hint())
    return replace(report, remarks=(*report.remarks, remark))
