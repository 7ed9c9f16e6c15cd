"""Finding of a survey about one Function: a verdict, its reasons, and the line to write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from opsmith.checking.report import Report
from opsmith.display import titled_repr

Verdict = Literal["works", "needs a declaration", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Result of the survey of one Function class.

    Args:
        name: The class's qualified name.
        where: `file:line` of its forward.
        verdict: `works`, `needs a declaration` or `wrong`.
        reasons: Reasons for the verdict, and remarks, each in one or two sentences.
        tried: Description of the arguments of the check; None if none could be guessed.
        line: Code that adopts it; None if the class must be fixed first.
        abilities: Abilities of the operator. Each is `new`, `mended` (`apply` has it, but it is wrong or
            raises) or `kept` (`apply` has it, too).
        report: Report of the last check.
        mends: A sentence about each ability that is mended.
    """

    __repr__ = titled_repr(lambda finding: f"{finding.name}: {finding.verdict}")

    name: str
    where: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    tried: str | None = None
    line: str | None = None
    abilities: Mapping[str, str] = field(default_factory=dict)
    report: Report | None = None
    mends: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The finding in JSON's types."""
        return {
            **vars(self),
            "reasons": list(self.reasons),
            "abilities": dict(self.abilities),
            "mends": list(self.mends),
            "report": None if self.report is None else self.report.to_dict(),
        }


def adopting_line(qualname: str, options: Mapping[str, str]) -> str:
    """Return the code that adopts a class.

    Args:
        qualname: Name of the class in its module.
        options: Keyword arguments of `adopt`, each as code.

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
    """Convert the name of a class into the name of a variable.

    Example:
        >>> snake("LeakyReLUInPlace"), snake("GELU"), snake("Conv2d")
        ('leaky_relu_in_place', 'gelu', 'conv2d')
    """
    plain = re.sub(r"(?<=[a-z])LU", "lu", name)
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+[0-9]*", plain)
    return "_".join(words).lower() or "adopted"
