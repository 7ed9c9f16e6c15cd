"""What a survey found out about one Function: a verdict, its reasons, and the line to write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from opsmith.checking.report import Report

Verdict = Literal["works", "needs a declaration", "wrong"]


@dataclass(frozen=True)
class Finding:
    """What is known about a Function after the survey.

    Args:
        name: The class's qualified name.
        where: `file:line` of its forward.
        verdict: Whether it works as it is.
        reasons: Why not, or what to know; each in a sentence or two.
        tried: The arguments that it was checked on, in words; None where none could be guessed.
        line: What to write to adopt it; None where the class has to be fixed first.
        abilities: What the operator can do, each `new`, or `kept` where `apply` can too.
        report: What the last check said.
    """

    name: str
    where: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    tried: str | None = None
    line: str | None = None
    abilities: Mapping[str, str] = field(default_factory=dict)
    report: Report | None = None

    def to_dict(self) -> dict[str, Any]:
        """The finding in JSON's types."""
        return {
            "name": self.name,
            "where": self.where,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "tried": self.tried,
            "line": self.line,
            "abilities": dict(self.abilities),
            "report": None if self.report is None else self.report.to_dict(),
        }


def adopting_line(qualname: str, options: Mapping[str, str]) -> str:
    """The code that adopts a class.

    Args:
        qualname: The class, as its module names it.
        options: Keyword arguments of `adopt`, each as code; one that ends in a comment is put last by itself.

    Example:
        >>> print(adopting_line("LeakyReLU", {"kind": '"surrogate"'}))
        leaky_relu = opsmith.adopt(LeakyReLU, "mypackage::leaky_relu", kind="surrogate")
    """
    variable = snake(qualname.rpartition(".")[2])
    given = [qualname, f'"mypackage::{variable}"', *(f"{name}={code}" for name, code in options.items())]
    line = f"{variable} = opsmith.adopt({', '.join(given)})"
    if len(line) <= 88:
        return line
    inner = "\n".join(f"    {each}," for each in [", ".join(given[:2]), *given[2:]])
    return f"{variable} = opsmith.adopt(\n{inner}\n)"


def snake(name: str) -> str:
    """A class's name as variables are written.

    Example:
        >>> snake("LeakyReLUInPlace"), snake("GELU"), snake("Conv2d")
        ('leaky_relu_in_place', 'gelu', 'conv2d')
    """
    plain = re.sub(r"(?<=[a-z])LU", "lu", name)
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+[0-9]*", plain)
    return "_".join(words).lower() or "adopted"
