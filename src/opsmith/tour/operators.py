"""Operators of the tour: the declaration of `swish`, and the stage that checks all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import opsmith
from opsmith import ops
from opsmith.checking import Report, check
from opsmith.checking.report import Status
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.ops.decoder import Decoder, DecoderSizes, PagedCache, generate
from opsmith.ops.involution import involution, involution_input_gradient, involution_weight_gradient
from opsmith.tour.stage import StageResult, TourContext, progress, write_json


@opsmith.operator("opsmith_tour::swish")
def swish(x: Tensor) -> Tensor:
    """Compute x sigmoid(x), element by element.

    Source: P. Ramachandran et al., "Searching for Activation Functions", arXiv:1710.05941, equation 1.

    Args:
        x: Any shape; floating.

    Returns:
        Shape and dtype of `x`.

    Example:
        >>> import torch
        >>> swish(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.2689,  0.0000,  0.7311])
    """
    return x * x.sigmoid()


# With s = sigmoid(x): d/dx x s = s + x s (1 - s).
swish.gradients(x=lambda grad, x: grad * x.sigmoid() * (1 + x * (-x).sigmoid()))


@swish.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield (make(3, 5),)
    yield (make(2, 4, 3, 3),)
    yield (make(),)


def implementation_of(operator: opsmith.Operator[..., Any], *args: Any) -> str:
    """Describe the implementation of a call in one line: a kernel and its location, or why the reference.

    Example:
        >>> import torch
        >>> from opsmith.ops import exp
        >>> line = implementation_of(exp, torch.ones(2))
        >>> line.partition(",")[0], line.partition("(")[2]
        ('reference', 'there is no kernel for it)')
    """
    explanation = operator.explain(*args)
    if explanation.kernel is not None:
        return explanation.forward
    return f"{explanation.forward} ({'; '.join(explanation.rejected) or 'there is no kernel for it'})"


def involution_implementations(step: Callable[[], object]) -> dict[str, list[str]]:
    """Run a step of training, and return the implementations of involution and of its gradients.

    Args:
        step: Function that computes a loss and its gradients; it is called once.

    Returns:
        The implementations of the calls of each of the three operators, by its name.
    """
    calls = _InvolutionCalls()
    with calls:
        step()
    return calls.implementations


class _InvolutionCalls(TorchFunctionMode):
    """Records the implementations of the calls of involution, and of its gradients in their backward."""

    def __init__(self) -> None:
        super().__init__()
        operators = (involution, involution_input_gradient, involution_weight_gradient)
        self.implementations: dict[str, list[str]] = {operator.name: [] for operator in operators}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.opsmith.involution.default:
            self._add(involution, *args)
            if result.requires_grad:
                result.register_hook(lambda grad: self._note_gradients(grad, *args))
        return result

    def _note_gradients(self, grad: Tensor, input: Tensor, weight: Tensor, *steps: Any) -> None:
        size, kernel = tuple(input.shape[2:]), tuple(weight.shape[2:4])
        if input.requires_grad:
            self._add(involution_input_gradient, grad, weight, size, *steps)
        if weight.requires_grad:
            self._add(involution_weight_gradient, grad, input, weight.shape[1], kernel, *steps)

    def _add(self, operator: opsmith.Operator[..., Any], *args: Any) -> None:
        found, known = implementation_of(operator, *args), self.implementations[operator.name]
        if found not in known:
            known.append(found)


# Operators with kernels come last: the tour's second process builds kernels that are not in the cache.
OPERATORS = (
    ops.exp,
    ops.mul,
    ops.add,
    ops.linear,
    swish,
    ops.involution,
    involution_input_gradient,
    involution_weight_gradient,
)
SKIPPED = ("cuda", "resources")
"""Properties that the tour leaves out."""

LEFT_OUT = "left out by the tour, because they compile more kernels, for GPUs"


def build_decoder_kernels() -> None:
    """Build the kernels of the decoder in float32; a prefill and a step call all of them."""
    sizes = DecoderSizes(width=2, layers=1, heads=1, hidden=1, positions=4)
    list(generate(Decoder(sizes), PagedCache(sizes, 1), [[0]], 2))


def build_kernels() -> None:
    """Build the kernels of the decoder, and all kernels of involution for all dtypes, two at a time."""
    build_decoder_kernels()

    def call(dtype: torch.dtype) -> None:
        x = torch.zeros(1, 16, 3, 3, dtype=dtype, requires_grad=True)
        weight = torch.zeros(1, 1, 3, 3, 3, 3, dtype=dtype, requires_grad=True)
        involution(x, weight, 1, 1).sum().backward()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, (torch.float64, torch.float32, torch.bfloat16, torch.float16)))


@thread_count(1)
def run(context: TourContext) -> StageResult:
    """Check the operators at quick effort, print a table, and write the reports to `checks.json`."""
    reports: dict[str, Report] = {}
    say = partial(context.console.print, highlight=False, soft_wrap=True)
    say(f"{len(OPERATORS)} operators, a line for each when its check ends; {LEFT_OUT}: {', '.join(SKIPPED)}")
    with progress(context.console, "checking", len(OPERATORS)) as advance:
        for operator in OPERATORS:
            start = perf_counter()
            report = check(operator, seed=context.seed, effort="quick", skip=SKIPPED)
            reports[operator.name] = report = _with_reason(report)
            say(_line(report, perf_counter() - start))
            advance(operator.name)
    say(THOROUGHLY)
    for report in reports.values():
        for failure in report.failures:
            context.console.print(f"{report.operator}: {failure.message}", markup=False)
    path = write_json(context.out / "checks.json", [report.to_dict() for report in reports.values()])
    passed = [name for name, report in reports.items() if report.passed]
    return StageResult(
        len(passed) == len(reports),
        f"{len(passed)} of {len(reports)} operators passed a quick check; {THOROUGHLY}",
        {"passed": passed, "failed": [name for name in reports if name not in passed]},
        (path,),
    )


THOROUGHLY = "to check them thoroughly: opsmith check opsmith.ops --thorough"
STATUSES: tuple[Status, ...] = ("passed", "skipped")


def _with_reason(report: Report) -> Report:
    """Say in a report why the tour leaves properties out."""
    outcomes = (replace(each, reason=LEFT_OUT) if each.left_out else each for each in report.outcomes)
    return replace(report, outcomes=tuple(outcomes))


def _line(report: Report, seconds: float) -> str:
    width = max(len(operator.name) for operator in OPERATORS)
    verdict = "[green]passed[/green]" if report.passed else "[red]failed[/red]"
    words = [outcome.word() for outcome in report.outcomes if not outcome.left_out]
    counts = ", ".join(f"{words.count(status):2} {status}" for status in STATUSES)
    return f"{report.operator:{width}}  {verdict}  properties: {counts}  {seconds:5.1f} s"
