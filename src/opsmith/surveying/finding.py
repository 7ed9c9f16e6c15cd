"""Finding of a survey about one Function: a verdict, its reasons, its abilities, and the line to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith.checking.numerics.compare import agree_to_share
from opsmith.checking.report import Report
from opsmith.core.operator import Operator
from opsmith.surveying.guesses import Guess
from opsmith.surveying.trials import leaves, seeded

Verdict = Literal["works", "needs a declaration", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Result of the survey of one Function.

    Args:
        name: The class's qualified name.
        where: `file:line` of its forward.
        verdict: `works`, `needs a declaration` or `wrong`.
        reasons: Reasons of the verdict, and remarks; each in a sentence or two.
        tried: Description of the arguments of the check; None if none could be guessed.
        line: Code that adopts it; None if the class must be fixed first.
        abilities: Abilities of the operator, each `new`, or `kept` if `apply` has it, too.
        report: Report of the last check.
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
    """Convert the name of a class into that of a variable.

    Example:
        >>> snake("LeakyReLUInPlace"), snake("GELU"), snake("Conv2d")
        ('leaky_relu_in_place', 'gelu', 'conv2d')
    """
    plain = re.sub(r"(?<=[a-z])LU", "lu", name)
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+[0-9]*", plain)
    return "_".join(words).lower() or "adopted"


COARSE = 1e-8


def abilities(
    function_class: type[torch.autograd.Function], operator: Operator[..., Any], report: Report, guess: Guess
) -> dict[str, str]:
    """Map each ability of the operator to `new`, or to `kept` if `apply` of the class has it, too.

    Args:
        function_class: The class.
        operator: The adopted operator.
        report: Report of its check.
        guess: The arguments to try on.
    """
    passed = {outcome.property for outcome in report.outcomes if outcome.status == "passed"}
    complete = {
        outcome.property for outcome in report.outcomes if outcome.property in passed and not outcome.notes
    }
    apply: Callable[..., Any] = function_class.apply
    found: dict[str, str] = {}
    if "second_order" in passed:
        found["second order"] = _new_or_kept(lambda: _second_order(apply, guess))
    if "forward_mode" in passed:
        found["jvp"] = _new_or_kept(lambda: _jvp(apply, guess))
    if not operator.specification.random and _succeeds(lambda: _vmap(operator, guess)):
        found["vmap"] = _new_or_kept(lambda: _vmap(apply, guess))
    if "opcheck" in complete:
        found["torch.compile"] = "kept"
    return found


def _new_or_kept(attempt: Callable[[], None]) -> str:
    return "kept" if _succeeds(attempt) else "new"


def _succeeds(attempt: Callable[[], None]) -> bool:
    """Return True if an attempt raises no exception of any type."""
    try:
        with seeded(0):
            attempt()
    except Exception:
        return False
    return True


def _floating(guess: Guess) -> list[int]:
    return [
        index
        for index, value in enumerate(guess.values)
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


def _call(function: Callable[..., Any], guess: Guess, tensors: Sequence[Tensor]) -> Tensor:
    """Call a function with copies of these tensors as its floating arguments; return all results in one."""
    values = list(guess.values)
    for index, tensor in zip(_floating(guess), tensors, strict=True):
        values[index] = tensor.clone()
    results = [each for each in leaves(function(*values)) if isinstance(each, Tensor)]
    return torch.cat([each.flatten() for each in results if each.is_floating_point()])


def _inputs(guess: Guess) -> list[Tensor]:
    return [guess.values[index].detach().clone() for index in _floating(guess)]


def _second_order(function: Callable[..., Any], guess: Guess) -> None:
    inputs = [each.requires_grad_() for each in _inputs(guess)]
    total = _call(function, guess, inputs).square().sum()
    first: Sequence[Tensor | None] = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
    squares = [each.square().sum() for each in first if each is not None]
    torch.autograd.grad(torch.stack(squares).sum(), inputs, allow_unused=True)


def _jvp(function: Callable[..., Any], guess: Guess) -> None:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(each, torch.ones_like(each)) for each in _inputs(guess)]
        _call(function, guess, duals)


def _vmap(function: Callable[..., Any], guess: Guess) -> None:
    """Compare the results and gradients of vmap over two examples with those of each alone."""
    inputs = _inputs(guess)
    batch = [torch.stack([each, each.flip(0) if each.dim() else each]) for each in inputs]
    argnums = tuple(range(len(batch)))

    def total(*tensors: Tensor) -> Tensor:
        return _call(function, guess, tensors).square().sum()

    for mapped in (lambda *tensors: _call(function, guess, tensors), torch.func.grad(total, argnums)):
        together = list(leaves(torch.func.vmap(mapped)(*batch)))
        alone = [list(leaves(mapped(*(each[row] for each in batch)))) for row in range(2)]
        for got, *rows in zip(together, *alone, strict=True):
            if not agree_to_share(got, torch.stack(rows), COARSE):
                raise ArithmeticError("vmap gives other numbers than a loop")
