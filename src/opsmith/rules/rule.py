"""Rules: the page of each is made from the code and from a file beside this module.

The code gives the name and one sentence: the docstring of an error class, the meaning of a cause, the promise
of a property. It also gives the introduction of each kind of rule, and the fix of a cause. A file
`errors/NAME.md`, `causes/NAME.md` or `properties/NAME.md` has the remaining sections.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opsmith import errors
from opsmith.checking.causes import CAUSES
from opsmith.checking.properties import PROPERTIES
from opsmith.display import short_repr
from opsmith.kernels.languages import OWN, loaded_languages

Kind = Literal["error", "cause", "property"]

_TEXTS = Path(__file__).parent

_KINDS: dict[Kind, tuple[str, str]] = {
    "error": ("errors", "Errors"),
    "cause": ("causes", "Causes of failures"),
    "property": ("properties", "Properties"),
}
"""Folder of the texts of each kind, and heading of its list."""

WHY, COMPARED, EXAMPLE = "Why it matters", "What is compared", "Example"

FIX, ACCEPT = "How to fix it", "How to accept it"

SECTIONS = (WHY, COMPARED, EXAMPLE, FIX, ACCEPT)
"""Headings of a page, in order; only the page of a property has `COMPARED`."""


@dataclass(frozen=True)
class Rule:
    """An error class, a cause of a failure, or a property.

    Args:
        name: Name of the class, value of `Failure.cause`, or name of the property.
        kind: `error`, `cause` or `property`.
        title: One sentence.
        key: Argument of `rule` and of the command: the name. If a cause and a property have the same name,
            the property's key is `properties/NAME`.

    Example:
        >>> rule("sign").title
        'The gradient has the wrong sign.'
    """

    name: str
    kind: Kind
    title: str
    key: str

    __repr__ = short_repr

    @property
    def address(self) -> str:
        """The command that prints the page; messages end with it."""
        return errors.address(self.key)

    @property
    def file(self) -> str:
        """The name of the page's file, such as `causes/sign.md`."""
        return f"{_KINDS[self.kind][0]}/{self.name}.md"

    @property
    def text(self) -> str:
        """The page, in Markdown."""
        given = sections((_TEXTS / self.file).read_text(encoding="utf-8"))
        about, fix, given[ACCEPT] = _of_kind(self)
        given[FIX] = f"{fix} {given.get(FIX, '')}".strip()
        parts = [f"## {each}\n\n{given[each]}" for each in SECTIONS if each in given]
        return "\n\n".join([f"# {self.name}", self.title, about, *parts]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The rule without its page, in JSON's types."""
        return {"name": self.name, "kind": self.kind, "title": self.title, "address": self.address}


def rules() -> tuple[Rule, ...]:
    """All rules: error classes by name, causes in order of precedence, properties in the order of reports.

    A property of a kernel language from a plug-in package has no page here, and is not a rule.
    """
    found: dict[str, Rule] = {}
    for kind, name, title in _named():
        key = f"{_KINDS[kind][0]}/{name}" if name in found else name
        found[key] = Rule(name, kind, title, key)
    return tuple(found.values())


def _named() -> Iterator[tuple[Kind, str, str]]:
    for name in errors.__all__:
        if name != "OpsmithError":
            yield "error", name, (getattr(errors, name).__doc__ or "").strip().partition("\n")[0]
    for cause in CAUSES.values():
        yield "cause", cause.name, cause.meaning
    foreign = {each.key for each in loaded_languages()} - OWN.keys()
    for known in PROPERTIES.values():
        if known.name not in foreign:
            yield "property", known.name, f"{known.title[0].upper()}{known.title[1:]}."


def rule(name: str) -> Rule:
    """The rule of a name.

    Args:
        name: The `key` of a rule: `CapturedTensorError`, `missing-term`, `second_order`.

    Raises:
        UsageError: If there is no such rule; the hint has the nearest names.
    """
    known = {each.key: each for each in rules()}
    if name in known:
        return known[name]
    lowered = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=3)
    raise errors.UsageError(
        f"there is no rule `{name}`",
        argument="name",
        expected="the name of an error class, of a cause or of a property",
        hint=f"write {' or '.join(f'`{lowered[each]}`' for each in close)}"
        if close
        else "`opsmith rule` lists every name",
    )


def pages() -> dict[str, str]:
    """All pages in Markdown, by file name; `index.md` links to all other pages."""
    return {"index.md": index(), **{each.file: each.text for each in rules()}}


def index() -> str:
    """A page that lists all rules, in Markdown."""
    parts = ["# Rules"]
    for kind, (_, heading) in _KINDS.items():
        rows = [
            f"| [`{each.name}`]({each.file}) | {each.title.replace('|', chr(92) + '|')} |"
            for each in rules()
            if each.kind == kind
        ]
        parts += [f"## {heading}", "\n".join(["| name | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def sections(text: str) -> dict[str, str]:
    """The sections of a page, by their headings.

    Example:
        >>> sections("## Example\\n\\n1 + 1\\n\\n## Other")
        {'Example': '1 + 1', 'Other': ''}
    """
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return {heading: body.strip() for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def _of_kind(given: Rule) -> tuple[str, str, str]:
    """The sections that the code provides: introduction, fix, and instructions to accept a failure."""
    if given.kind == "error":
        ancestors: tuple[type, ...] = getattr(errors, given.name).__mro__
        builtin = next(each.__name__ for each in ancestors if each.__module__ == "builtins")
        return (
            f"Error class `opsmith.errors.{given.name}`, a subclass of `{builtin}`.",
            "Follow the hint of the message.",
            "An error cannot be accepted. A program that can continue without the call catches it:"
            f" `except opsmith.errors.{given.name}`, or `except {builtin}`.",
        )
    key = f'"PROPERTY", "{given.name}"' if given.kind == "cause" else f'"{given.name}", "CAUSE"'
    accept = (
        f'`@opsmith.operator(..., accept={{({key}): "the reason"}})`. `opsmith.check` and `opsmith.adopt`'
        " take `accept=` as well. The failure stays in the report, with the reason, and does not count."
    )
    if given.kind == "cause":
        cause = CAUSES[given.name]
        return (
            f"Cause of a failure of `opsmith.check`. Evidence: {cause.decided_by}",
            cause.fix,
            f"Give the property that failed, this cause and your reason: {accept}",
        )
    return (
        "Property that `opsmith.check` tests.",
        "Read the page of the failure's cause. `failure.replay` shows the failure in a few lines.",
        f'Leave the property out of a check: `opsmith.check(op, skip="{given.name}")`, or'
        f" `--skip {given.name}` in a shell. Accept one of its failures by its cause: {accept}",
    )
