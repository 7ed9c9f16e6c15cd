"""Formats of the results of `opsmith check`, on stdout or in files."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from opsmith import errors
from opsmith.checking.output.annotations import lines, workflow_commands
from opsmith.checking.output.junit import junit
from opsmith.checking.output.sarif import sarif
from opsmith.cli.check_run import CheckRun
from opsmith.cli.output import Output
from opsmith.core.output_file import replace_file, writable_file


def _json(run: CheckRun) -> str:
    value = run.to_dict() if run.refusal is None else {"error": str(run.refusal)}
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _html(run: CheckRun) -> str:
    from opsmith.checking.output.html import page

    return page(run.reports, [(each.subject, each.message) for each in run.unchecked()])


@dataclass(frozen=True)
class Format:
    """A format of the results.

    Args:
        kind: The noun for the results in this format, for messages.
        example: Name of a file in this format, for hints.
        render: Function that writes the results; None for the text, which is printed report by report. whole:
            True if it is a single document, so that nothing else may be written to stdout.
    """

    kind: str
    example: str
    render: Callable[[CheckRun], str] | None
    whole: bool = True


FORMATS = {
    "text": Format("text", "check.txt", None, whole=False),
    "lines": Format("list", "check.txt", lambda run: lines(run.reports, run.unchecked()), whole=False),
    "github": Format(
        "list", "check.txt", lambda run: workflow_commands(run.reports, run.unchecked()), whole=False
    ),
    "json": Format("JSON", "check.json", _json),
    "sarif": Format("SARIF", "check.sarif", lambda run: sarif(run.reports, run.unchecked())),
    "junit": Format("JUnit XML", "check.xml", lambda run: junit(run.reports, run.unchecked())),
    "html": Format("page", "page.html", _html),
}
"""Formats by their names for `--format`."""


@dataclass(frozen=True)
class Destination:
    """A format, and the destination of the results in this format.

    Args:
        word: The format, as `--format` names it.
        file: The file; None for stdout.
    """

    word: str
    file: Path | None = None

    @property
    def format(self) -> Format:
        """The format."""
        return FORMATS[self.word]

    def excludes(self, other: Destination) -> bool:
        """Return True if two destinations conflict; lists and the text can share stdout."""
        if self.file is None or other.file is None:
            alone = self.format.whole or other.format.whole or self.word == other.word
            return self.file is other.file and alone
        return os.path.realpath(self.file) == os.path.realpath(other.file)


def destinations(given: Iterable[str], *, as_json: bool, html: Path | None) -> list[Destination]:
    """Return the destinations of the options; the text on stdout if none is on stdout.

    Args:
        given: Values of `--format`: `FORMAT` or `FORMAT=FILE`.
        as_json: True for `--json`, which is `--format json`.
        html: Value of `--html`, which is `--format html=FILE`.

    Raises:
        UsageError: If there is no such format, a file cannot be written, or two documents have the same
            destination.
    """
    found = [_destination(text) for text in given]
    found += [Destination("json")] if as_json else []
    found += [] if html is None else [Destination("html", writable_file(html, "page.html", "--html"))]
    if all(each.file is not None for each in found):
        found.append(Destination("text"))
    for one, other in itertools.combinations(found, 2):
        if one.excludes(other):
            moved = one if one.format.whole else other
            file = f", or name another file: `--format {moved.word}={moved.format.example}`"
            raise errors.UsageError(
                f"`{one.word}` and `{other.word}` are both to be written to {one.file or 'stdout'}",
                argument="--format",
                expected="one format for each file; only `text`, `lines` and `github` can be together on "
                "stdout",
                hint=f"leave one out{file if moved.format.render else ''}",
            )
    return found


def _destination(text: str) -> Destination:
    word, equals, file = text.partition("=")
    known = FORMATS.get(word)
    if known is None or (known.render is None and equals):
        raise errors.UsageError(
            f"there is no format `{word}`" if known is None else "the text can only be written to stdout",
            argument="--format",
            expected=" or ".join([", ".join([*FORMATS][:-1]), [*FORMATS][-1]]),
            got=text,
            hint="write `--format github`, or `--format sarif=check.sarif` for a file",
        )
    return Destination(word, writable_file(file, known.example, "--format") if equals else None)


def write_results(run: CheckRun, wanted: Iterable[Destination], output: Output) -> list[str]:
    """Write the results, first to stdout; return a remark on each file.

    Raises:
        UsageError: If a file cannot be written.
    """
    remarks = []
    for each in sorted(wanted, key=lambda one: one.file is not None):
        if each.format.render is None or (run.refusal is not None and each.word == "html"):
            continue  # an empty page would replace the page of an earlier check
        text = each.format.render(run)
        if each.file is None:
            output.write(text)
        else:
            replace_file(each.file, text.encode("utf-8", "backslashreplace"))
            remarks.append(f"the {each.format.kind} is in {each.file}")
    return remarks
