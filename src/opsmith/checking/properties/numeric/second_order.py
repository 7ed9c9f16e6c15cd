"""Second order: derivatives of the gradients, compared with finite differences of the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from opsmith import errors
from opsmith.checking.calls import leaves_out
from opsmith.checking.numerics.autodiff import differentiate, record, vjp_or_zeros
from opsmith.checking.numerics.directional import PackedTensors
from opsmith.checking.numerics.finite_differences import Claim
from opsmith.checking.promises import of_second_order
from opsmith.checking.properties.numeric.conventions import by_convention
from opsmith.checking.properties.numeric.derivatives import Derivatives, apart, each_subset
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.side_effects.liveness import nodes
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.formula import Formula
from opsmith.judging.answer import Answer
from opsmith.judging.compare import Difference, largest_magnitude
from opsmith.judging.tensors import is_inexact
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.graph_cuts import is_cut

NAME = "second_order"


def run(subject: Subject) -> Findings:
    """Differentiate the gradients of every sample, by all inputs together and by each alone."""
    if subject.kind.applied and subject.specification.origin.once_differentiable:
        yield Skipped(
            "the backward is marked with `once_differentiable`: torch refuses to differentiate it again"
        )
        return
    for each in each_subset(NAME, SecondOrderGradients, _check, subject):
        yield by_convention(each, subject) if isinstance(each, Failure) else each


def _check(gradients: SecondOrderGradients, together: SecondOrderGradients | None) -> Findings:
    try:
        if together is None:
            gradients.by_transforms()
            yield from _against_differences(gradients)
        else:
            yield from _against_all(gradients, together)
    except errors.GraphCutError as error:
        yield gradients.failure(error.argument, "second-order", error.message(), error.where)


def _against_differences(gradients: SecondOrderGradients) -> Findings:
    brief, weights = gradients.sample.brief, gradients.weights()
    claim = gradients.claimed(weights)
    if not all(bool(each.isfinite().all()) for each in gradients(gradients.inputs_and_grads)):
        yield Skipped(f"{brief} was left out: the gradient itself is infinite or nan there")
        return
    if claim.is_settled():
        return
    other = gradients.other_surrogate()
    if other is not None:
        yield Skipped(
            f"the gradient goes through {other} in {brief}: if {other} is a surrogate, too, finite "
            "differences of the gradient decide nothing"
        )
        return
    if not claim.numbers.has_estimate:
        yield Skipped(f"finite differences of the gradient decide nothing in {brief}")
    for by in claim.kinked():
        yield Note(
            f"the gradient has a kink in {brief}, with respect to `{gradients.label(by)}`: any value "
            "between its one-sided derivatives is right there"
        )
    if claim.worst() is None:
        return
    for position, argnum in enumerate(gradients.argnums):
        alone = [weight if at == position else None for at, weight in enumerate(weights)]
        claim = gradients.claimed(alone)
        if claim.worst() is None:
            continue
        rounding = gradients.rounding(alone)
        worst = claim.worst(rounding)
        if worst is not None:
            yield _failure(gradients, argnum, claim, rounding, *worst)


RIGHT, MISSING, WRONG = "right", "missing", "wrong"


def _failure(
    gradients: SecondOrderGradients, argnum: int, claim: Claim, rounding: float, by: int, off: Difference
) -> Failure:
    """The failure of one gradient, with verdicts on its derivatives by inputs and by grad_output."""
    verdicts: dict[str, str] = {}
    for each in gradients.by_each:
        derivative = claim.got[each]
        missing = derivative is None or not derivative.any()
        wrong = claim.by(each).worst(rounding) is not None
        verdicts[gradients.label(each)] = RIGHT if not wrong else MISSING if missing else WRONG
    lacking, others = (
        [name for name, verdict in verdicts.items() if verdict == kind] for kind in (MISSING, WRONG)
    )
    label, named = gradients.sample.labels[argnum], gradients.label(by)
    if len(lacking) == len(verdicts):
        what = "the gradient cannot be differentiated again, as if it were a constant"
    elif lacking:
        what = f"it lacks the part that flows through {_listed(lacking)}"
    else:
        what = (
            f"the derivative with respect to {_listed(others or [named])} differs from finite "
            "differences of the gradient"
        )
    message = (
        f"the derivative of the gradient of `{label}` is wrong: {what} (with respect to `{named}`, "
        f"{off}). {CUT}"
    )
    evidence = {f"by {name}": verdict for name, verdict in verdicts.items()} | off.evidence()
    found = gradients.failure(argnum, "second-order", message, evidence=evidence)
    # A class that never returns a gradient by an input does not promise a second order by it either.
    constants = all(leaves_out(gradients.subject, name) for name in lacking)
    return replace(found, given="unpromised") if lacking and constants and not others else found


CUT = (
    "The gradient depends on a value that is hidden from autograd: by `.detach()`, `.data`, NumPy "
    "or `no_grad`, or because the forward keeps the value on `ctx` or by `save_for_backward` and "
    "does not return it. Compute the value again in the backward. Another possible cause: a "
    "function in the backward has a wrong backward"
)


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(f"`{label}`" for label in labels)


def _against_all(gradients: SecondOrderGradients, together: SecondOrderGradients) -> Findings:
    """Compare the derivatives of a gradient computed alone with those if every input requires a gradient."""
    (argnum,), weights = gradients.argnums, together.weights()
    at = together.argnums.index(argnum)
    weighted = [weight if weight is weights[at] else None for weight in weights]
    alone = gradients.derivatives([weights[at]], gradients.by_each)
    for position, words in apart(alone, together.derivatives(weighted, gradients.by_each)):
        label = gradients.labels
        message = (
            f"the derivative of the gradient of `{label}` changes if only `{label}` requires a "
            f"gradient, and not every input: {words}, with respect to "
            f"`{gradients.label(gradients.by_each[position])}`"
        )
        yield gradients.failure(argnum, "second-order", message)
        return


SECOND_ORDER = Property(
    NAME,
    "the gradients can be differentiated again, and their derivatives are right",
    run,
    inputs="few",
    traits=("differences", "sends-gradients", "reruns"),
    given=of_second_order,
)


class SecondOrderGradients(Derivatives):
    """The gradients by some inputs of a sample, as functions that can be differentiated again."""

    @cached_property
    def inputs_and_grads(self) -> list[Any]:
        """The inputs, followed by the grad_outputs, in float64."""
        return [*self.sample.in_double(), *plain_grad_outputs(self.subject, self.sample).in_double()]

    def by_transforms(self) -> None:
        """Differentiate twice by `torch.func`, where autograd has not recorded a kernel's operations.

        Autograd records what a kernel in Python does, and `torch.func` does not.
        """
        specification = self.subject.specification
        rules = specification.gradients.rules.values()
        functions = [specification.reference, *(each.function for each in rules if isinstance(each, Formula))]
        if not any(map(is_cut, functions)):
            return

        def total(*inputs: Tensor) -> Any:
            flat = [*self.sample.in_double()]
            for argnum, value in zip(self.argnums, inputs, strict=True):
                flat[argnum] = value
            return sum(each.real.sum() for each in self.results_at(flat) if is_inexact(each))

        argnums = tuple(range(len(self.argnums)))
        first: Any = torch.func.grad(total, argnums)
        second: Any = torch.func.grad(lambda *x: sum(each.real.sum() for each in first(*x)), argnums)
        second(*(self.inputs_and_grads[argnum] for argnum in self.argnums))

    @cached_property
    def by_each(self) -> tuple[int, ...]:
        """Positions in `inputs_and_grads` to differentiate the gradients by: inputs and grad_outputs."""
        grads = range(self.count, len(self.inputs_and_grads))
        return (*self.argnums, *(at for at in grads if self.inputs_and_grads[at] is not None))

    @property
    def count(self) -> int:
        """Number of arguments, which the grad_outputs follow."""
        return len(self.sample.flat)

    def label(self, argnum: int) -> str:
        """Name of an entry of `inputs_and_grads` in messages."""
        if argnum < self.count:
            return self.sample.labels[argnum]
        return self.subject.results(self.sample)[argnum - self.count].gradient_name()

    def weights(self) -> list[Tensor]:
        """Random weights of each gradient's elements; the weighted sum is differentiated."""
        drawn = partial(torch.randn, generator=self.subject.generator(1))
        inputs = (self.inputs_and_grads[argnum] for argnum in self.argnums)
        return [drawn(value.shape, dtype=value.dtype) for value in inputs]

    def __call__(self, values: Sequence[Any]) -> list[Tensor]:
        """The gradients without a graph; zeros for a missing gradient."""
        return vjp_or_zeros(self.results_at, values[: self.count], self.argnums, values[self.count :])

    def claimed(self, weights: Sequence[Tensor | None]) -> Claim:
        """The derivatives of the weighted gradients by autograd."""
        got = self.differentiated(weights, self.inputs_and_grads)
        return self.claim(self, PackedTensors(self.inputs_and_grads, self.by_each), weights, got)

    def derivatives(self, weights: Sequence[Tensor | None], by: Sequence[int]) -> tuple[Answer, ...]:
        """The derivatives of the weighted gradients by some entries of `by_each`, with their rounding."""
        count = len(self.inputs_and_grads)

        def again(given: list[Any]) -> list[Tensor | None]:
            found = self.differentiated(given[count:], given[:count])
            return [torch.zeros_like(given[at]) if found[at] is None else found[at] for at in by]

        return self.answers(again, [*self.inputs_and_grads, *weights])

    def rounding(self, weights: Sequence[Tensor | None]) -> float:
        """Rounding error of the derivatives of the gradients, whose terms may cancel."""
        return max(largest_magnitude(each.distance) for each in self.derivatives(weights, self.by_each))

    def differentiated(
        self, weights: Sequence[Tensor | None], values: Sequence[Any]
    ) -> Mapping[int, Tensor | None]:
        """Differentiate the gradients, times their weights, by autograd.

        Args:
            weights: A weight for each gradient; None for a gradient that is left out.
            values: The inputs and the grad_outputs.

        Returns:
            The derivative by each entry of `by_each`; None if autograd returns none.
        """
        leaves, gradients = self._recorded(values)
        again = [
            (gradient, weight)
            for gradient, weight in zip(gradients, weights, strict=True)
            if weight is not None and gradient is not None and gradient.requires_grad
        ]
        if not again:
            return dict.fromkeys(self.by_each)
        first, second = zip(*again, strict=True)
        inputs = [leaves[argnum] for argnum in self.by_each]
        found = capabilities.differentiated(first, inputs, second, retain_graph=True)
        if any(each is None for each in found):
            # `once_differentiable` refuses only in `backward()`; `autograd.grad` by some inputs skips its
            # node and reports the inputs as unused.
            torch.autograd.backward(first, second)
        return dict(zip(self.by_each, found, strict=True))

    def _recorded(self, values: Sequence[Any]) -> tuple[list[Any], Sequence[Tensor | None]]:
        """Leaves with these values, and the gradients with their graph."""
        copied = [value.clone() if is_inexact(value) else value for value in values]  # it may write into them
        leaves, given, results = record(
            lambda given: self.results_at(given[: self.count]), copied, self.by_each, leaf=False
        )
        inputs = [leaves[argnum] for argnum in self.argnums]
        return leaves, differentiate(results, inputs, given[self.count :], create_graph=True)

    def other_surrogate(self) -> str | None:
        """Description of a part of the surrogate gradients that may be a surrogate too; None if there is
        none.

        A stand-in may detach on purpose. A Function's node may belong to the operator itself.
        """
        rules = self.subject.specification.gradients
        if not rules.surrogate:
            return None
        if rules.stand_in is not None:
            return "its stand-in"
        _, gradients = self._recorded(self.inputs_and_grads)
        for node in nodes(gradients, most=None):
            if issubclass(type(node), FunctionCtx) or capabilities.forward_class(node) is not None:
                return f"`{node.name()}`"
        return None
