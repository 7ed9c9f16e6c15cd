"""Abilities that an adopted Function gains over its class, or mends, each tried on the guessed arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith.checking.exceptions import error_words
from opsmith.checking.report import Report
from opsmith.core.operator import Operator
from opsmith.core.tensors import nested_tensors
from opsmith.judging.judge import judge
from opsmith.surveying.guesses import Guess
from opsmith.surveying.trials import right_answers, seeded


def abilities(
    function_class: type[torch.autograd.Function],
    operator: Operator[..., Any],
    report: Report,
    guess: Guess,
    names: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """Compare the abilities of the operator with those of `apply` of the class.

    Args:
        function_class: The class.
        operator: The adopted operator.
        report: Report of its check.
        guess: The arguments to try on.
        names: Their names.

    Returns:
        Each ability `new`, `mended` if `apply` has it, and is wrong, or `kept` if both have it; and a
        sentence on each that is mended.
    """
    passed = {outcome.property for outcome in report.outcomes if outcome.word() == "passed"}
    complete = {
        outcome.property for outcome in report.outcomes if outcome.property in passed and not outcome.notes
    }
    apply: Callable[..., Any] = function_class.apply
    found: dict[str, str] = {}
    mends: list[str] = []
    if "second_order" in passed:
        found["second order"], mends = _compared_second_order(apply, operator, guess, names)
    if "forward_mode" in passed:
        found["jvp"] = _new_or_kept(lambda: _jvp(apply, guess))
    if not operator.specification.random and _succeeds(lambda: _vmap(operator, guess)):
        found["vmap"] = _new_or_kept(lambda: _vmap(apply, guess))
    if "opcheck" in complete:
        found["torch.compile"] = "kept"
    return found, mends


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
    results = nested_tensors(function(*values))
    return torch.cat([each.flatten() for each in results if each.is_floating_point()])


def _inputs(guess: Guess) -> list[Tensor]:
    return [guess.values[index].detach().clone() for index in _floating(guess)]


def _compared_second_order(
    apply: Callable[..., Any], operator: Operator[..., Any], guess: Guess, names: Sequence[str]
) -> tuple[str, list[str]]:
    """The state of the second order, which is right by the operator, and a sentence if that mends it."""
    first: list[Tensor] = []
    try:
        with seeded(0):
            got = _second_order(apply, guess, first, _inputs(guess))
    except Exception as error:
        if not first:
            return "new", []  # there is no gradient by `apply` either
        return "mended", [f"mends second order: `apply` raises {error_words(error)}"]
    right = right_answers(partial(_second_order, operator, guess, []), _inputs(guess))
    for index, one, answer in zip(_floating(guess), got, right, strict=True):
        verdict = judge(one, answer)
        worst = verdict.difference
        if worst is not None and not verdict.minor:
            return "mended", [
                f"mends second order: by `apply` a derivative of the gradient by `{names[index]}` is "
                f"{worst.got:.6g} at {list(worst.index)} where {worst.expected:.6g} is right, and nothing "
                "says so: torch takes what forward has computed and kept for a constant"
            ]
    return "kept", []


def _second_order(
    function: Callable[..., Any], guess: Guess, gradients: list[Tensor], given: Sequence[Tensor]
) -> list[Tensor]:
    """Derivatives of the squared gradients of a sum of squares; the gradients are appended to a list."""
    inputs = [each.detach().clone().requires_grad_() for each in given]
    total = _call(function, guess, inputs).square().sum()
    first: Sequence[Tensor | None] = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
    present = [each for each in first if each is not None]
    gradients += present
    squares = torch.stack([each.square().sum() for each in present]).sum()
    second: Sequence[Tensor | None] = torch.autograd.grad(squares, inputs, allow_unused=True)
    pairs = zip(inputs, second, strict=True)
    return [torch.zeros_like(each) if found is None else found for each, found in pairs]


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

        def loop(given: Sequence[Tensor], mapped: Callable[..., Any] = mapped) -> list[Tensor]:
            alone = (nested_tensors(mapped(*(each[row] for each in given))) for row in range(2))
            return [torch.stack(rows) for rows in zip(*alone, strict=True)]

        together = nested_tensors(torch.func.vmap(mapped)(*batch))
        if any(judge(*pair).wrong for pair in zip(together, right_answers(loop, batch), strict=True)):
            raise ArithmeticError("vmap gives other numbers than a loop")
