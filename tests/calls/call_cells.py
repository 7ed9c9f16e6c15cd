"""Cells of the matrix of calls: what happens in one of them, in a few words."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from call_breaches import Breach
from call_contexts import CONTEXTS, FOREIGN, Metadata
from call_executors import Executor
from call_subjects import Subject
from context_cases import values_and_gradients
from torch import Tensor
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
        traceback.clear_frames(error.__traceback__)  # hooks of a checkpoint are on as long as its frame lives
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

    A cell is as expected, too, where the executor does the same with the plain function, or fails with it, or
    where torch takes no node.
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
            no_node = context.startswith("inference") and not takes_nodes(executor, "inference")
            by_torch_too = (isinstance(by_torch, Exception) or no_node) and not foreign
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


class Saving(torch.autograd.Function):
    """A product whose node saves its arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, grad * x


def takes_nodes(executor: Executor, mode: str) -> bool:
    """Return True if a class can save its arguments in a mode, as none can in inference on torch 2.11."""
    if executor.compiles:
        return True
    with MODES[mode].context():
        found = outcome(lambda: executor.call(Saving.apply)(torch.ones(2), torch.ones(2)))
    return not isinstance(found, Exception)


def in_modes(words: str, modes: Sequence[str]) -> str:
    """What `said` gives, in some modes alone."""
    kept = []
    for part in words.split("; "):
        word, _, among = part.partition(" in ")
        wrong = [mode for mode in among.split(", ") if mode in modes]
        if not among or len(wrong) == len(modes):
            kept.append(word)
        elif wrong:
            kept.append(f"{word} in {', '.join(wrong)}")
    return "; ".join(kept) or RIGHT


def modes_of(breach: Breach, executor: Executor) -> Sequence[str]:
    """The modes in which a breach is tried: those in which torch's own classes work."""
    if executor.compiles:
        return breach.modes[-3:-2] or breach.modes
    return [mode for mode in breach.modes if takes_nodes(executor, mode)]


def said(breach: Breach, executor: Executor) -> str:
    """The outcome of a breach: RIGHT, or another outcome, and its modes if it is not that of all."""
    modes = modes_of(breach, executor)
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
