"""Cells of the matrix of calls: what happens in one of them, in a few words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from call_breaches import Breach
from call_contexts import CONTEXTS, FOREIGN, Metadata
from call_executors import Executor
from call_subjects import Subject
from context_cases import values_and_gradients
from torch.testing import assert_close

from opsmith import errors

RIGHT = "right"
CALLS = 3
"""The first call is validated in full, the second may prepare a faster way, the third is a known one."""


def outcome(run: Callable[[], Any]) -> Any:
    """The value, or the exception."""
    torch.manual_seed(0)
    try:
        return run()
    except Exception as error:
        return error


NAMES = re.compile(rf"\b({'|'.join(errors.__all__)})\b")


def name_of(error: BaseException) -> str:
    """The class of an exception; that of ours where a compiler wraps it."""
    while error.__cause__ is not None:
        error = error.__cause__
    ours = None if isinstance(error, errors.OpsmithError) else NAMES.search(str(error))
    return ours[0] if ours else type(error).__name__


def equal(found: Any, truth: Any) -> bool:
    if isinstance(truth, Exception):
        return False
    if isinstance(truth, Metadata):
        return bool(found == truth)
    try:
        assert_close(found, truth)
    except AssertionError:
        return False
    return True


def expected(subject: Subject, executor: Executor, context: str) -> str:
    """The right outcome of a cell: RIGHT, or the name of the error."""
    foreign = context in FOREIGN and not subject.any_kind
    by_context = subject.refuses.get(context, "LayoutError" if foreign else RIGHT)
    return subject.refuses.get(executor.name, by_context)


def happened(subject: Subject, executor: Executor, context: str) -> str:
    """Tell what happens in a cell: RIGHT, the class of an exception, or that values are wrong.

    A cell is as expected, too, where the executor does the same with the plain function, or fails with it.
    """
    inputs, around = subject.inputs(), CONTEXTS[context]
    subject.operator.forget_calls()
    torch.manual_seed(0)
    if not executor.compiles:
        for _ in range(CALLS - 1):
            values_and_gradients(subject.call, inputs)
    truth = outcome(lambda: around(subject.plain, inputs))
    function = executor.call(subject.call)
    for _ in range(1 if executor.compiles else 2):
        found = outcome(lambda: around(function, inputs))
        if not isinstance(found, Exception) and equal(found, truth):
            continue
        by_torch = outcome(lambda: around(executor.call(subject.plain), inputs))
        if isinstance(found, Exception):
            foreign = context in FOREIGN and not subject.any_kind
            by_torch_too = isinstance(by_torch, Exception) and not foreign
            return expected(subject, executor, context) if by_torch_too else name_of(found)
        if not equal(found, by_torch):
            return "wrong values"
    return RIGHT


@dataclass(frozen=True)
class Mode:
    """A mode of a call.

    Args:
        context: Context of the call.
        recorded: True if the tensors require a gradient.
    """

    context: Callable[[], Any]
    recorded: bool = False


MODES = {
    "plain": Mode(torch.enable_grad),
    "graph": Mode(torch.enable_grad, recorded=True),
    "no_grad": Mode(torch.no_grad),
    "inference": Mode(torch.inference_mode),
}


def run(breach: Breach, function: Callable[..., Any], mode: Mode) -> Any:
    """Call a function in a mode, and differentiate it where the backward breaks the contract."""
    x, w = (
        each.requires_grad_(mode.recorded) * 1 for each in breach.inputs()
    )  # torch itself protects leaves
    with mode.context():
        result = function(x, w)
        if not breach.differentiated:
            return result
        return torch.autograd.grad(result, x, torch.ones_like(result))[0]


def of_a_breach(breach: Breach, executor: Executor, mode: Mode) -> Any:
    """The result of a call that breaks the contract after calls that kept it, or its exception.

    It is RIGHT where the function that breaks it did not run, and the values are right; where that function
    itself raised; and where the breach has a right answer, which came.
    """
    declared, switch = breach.declared, breach.declared.switch
    switch.on = False
    declared.operator.forget_calls()
    function = executor.call(declared.call)
    truth = run(breach, declared.plain, mode)
    for _ in range(1 if executor.compiles else CALLS):
        assert_close(run(breach, function, mode), truth)
    switch.on, switch.ran, switch.raised = True, 0, ""
    try:
        result = outcome(lambda: run(breach, function, mode))
        if executor.compiles and not switch.ran:  # what it traced keeps the contract
            torch.compiler.reset()
            result = outcome(lambda: run(breach, executor.call(declared.call), mode))
    finally:
        switch.on = False
        if executor.compiles:
            torch.compiler.reset()
    if isinstance(result, Exception):
        ours = issubclass(error_of(result), errors.OpsmithError)
        if not ours and declared.instead is not None:  # torch takes no such call there
            instead = outcome(lambda: run(breach, executor.call(declared.instead), mode))
            return RIGHT if isinstance(instead, Exception) else result
        return RIGHT if switch.raised and switch.raised in str(result) else result
    if switch.ran and declared.instead is not None:
        truth = outcome(lambda: run(breach, declared.instead, mode))
        return RIGHT if equal(result, truth) and result.stride() == truth.stride() else result
    return RIGHT if not switch.ran and equal(result, truth) else result


def said(breach: Breach, executor: Executor) -> str:
    """The outcome of a breach: RIGHT, or another outcome, and its modes if it is not that of all."""
    modes = breach.modes[-3:-2] or breach.modes if executor.compiles else breach.modes
    words: dict[str, list[str]] = {}
    for mode in modes:
        found = of_a_breach(breach, executor, MODES[mode])
        if isinstance(found, Exception):
            right = breach.error is not None and issubclass(error_of(found), breach.error)
            word = RIGHT if right else name_of(found)
        else:
            word = RIGHT if isinstance(found, str) else "accepted"
        words.setdefault(word, []).append(mode)
    words.pop(RIGHT, None)
    return (
        "; ".join(
            word if len(wrong) == len(modes) else f"{word} in {', '.join(wrong)}"
            for word, wrong in words.items()
        )
        or RIGHT
    )


def error_of(error: BaseException) -> type[BaseException]:
    """The class that `name_of` names, where it is one of ours."""
    found: type[BaseException] = getattr(errors, name_of(error), type(error))
    return found
