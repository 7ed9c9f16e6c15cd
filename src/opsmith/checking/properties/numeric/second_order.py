"""Second order: derivatives of the gradients, against finite differences of the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from opsmith import errors
from opsmith.checking.calls import computed_in, rule_location
from opsmith.checking.numerics.agreement import agrees_along
from opsmith.checking.numerics.answer import Computation, Function, unknown
from opsmith.checking.numerics.autodiff import differentiate, vjp_or_zeros
from opsmith.checking.numerics.compare import Difference, agree_to_share, largest_magnitude, unravel
from opsmith.checking.numerics.directional import PackedTensors, coordinates
from opsmith.checking.numerics.finite_differences import NumericalGradient, numerical_gradient
from opsmith.checking.numerics.judge import judge
from opsmith.checking.promises import of_second_order
from opsmith.checking.properties.numeric.differentiable import each_subset
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import case_name
from opsmith.checking.samples.grad_outputs import contiguous_grad_outputs
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.liveness import nodes
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.formula import Formula
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.graph_cuts import is_cut

NAME = "second_order"


def run(subject: Subject) -> Findings:
    """Differentiate the gradients of every sample, by all inputs together and by each alone."""
    if subject.kind.applied and subject.specification.origin.once_differentiable:
        yield Skipped("its backward is marked with `once_differentiable`: torch refuses a second order")
        return
    yield from each_subset(NAME, _check_subset, subject)


def _check_subset(
    subject: Subject, sample: Sample, argnums: tuple[int, ...], right: tuple[int, ...]
) -> Findings:
    for device in subject.devices_with(torch.float64):
        gradients = SecondOrderGradients(subject, sample, argnums, device)
        try:
            if right:
                yield from _against_all(gradients, SecondOrderGradients(subject, sample, right, device))
            else:
                gradients.by_transforms()
                yield from _against_differences(gradients)
        except errors.GraphCutError as error:
            evidence = {"sample": case_name(sample, torch.float64, device)}
            yield Failure(NAME, error.argument, "second-order", str(error), error.where, evidence)
            return


def _against_differences(gradients: SecondOrderGradients) -> Findings:
    weights = gradients.weights()
    found = gradients.differentiated(weights)
    if not all(bool(each.isfinite().all()) for each in gradients(gradients.inputs_and_grads)):
        yield Skipped(f"{gradients.sample.brief} was left out: the gradient itself is infinite or nan there")
        return
    if gradients.agree_along(weights, found):
        return
    other = gradients.other_surrogate()
    if other is not None:
        yield Skipped(
            f"the gradient goes through {other} in {gradients.sample.brief}: where that is a surrogate, too, "
            "differences of it decide nothing"
        )
        return
    numbers = gradients.numerically(weights)
    if not numbers.found.has_estimate:
        yield Skipped(f"finite differences of the gradient decide nothing in {gradients.sample.brief}")
    for by in numbers.kinked():
        yield Note(
            f"the gradient has a kink in {gradients.sample.brief}, by `{gradients.label(by)}`: whatever lies "
            "between its one-sided derivatives is right there"
        )
    if numbers.judge(found) is None:
        return
    for position, argnum in enumerate(gradients.argnums):
        alone = [weight if at == position else None for at, weight in enumerate(weights)]
        found = gradients.differentiated(alone)
        numbers = gradients.numerically(alone)
        if numbers.judge(found) is None:
            continue
        rounding = gradients.rounding(alone)
        worst = numbers.judge(found, rounding)
        if worst is not None:
            yield _failure(gradients, argnum, _verdicts(gradients, alone, found, rounding), *worst)


RIGHT, MISSING, WRONG = "right", "missing", "wrong"


def _verdicts(
    gradients: SecondOrderGradients,
    weights: Sequence[Tensor | None],
    found: dict[int, Tensor | None],
    rounding: float,
) -> dict[int, str]:
    """Verdict on the derivative of one gradient by each entry of `by`."""
    verdicts: dict[int, str] = {}
    for by in gradients.by:
        right = gradients.only(by).numerically(weights).judge(found, rounding) is None
        derivative = found[by]
        missing = derivative is None or not derivative.any()
        verdicts[by] = RIGHT if right else MISSING if missing else WRONG
    return verdicts


def _failure(
    gradients: SecondOrderGradients, argnum: int, verdicts: dict[int, str], by: int, difference: Difference
) -> Failure:
    subject, sample = gradients.subject, gradients.sample
    label = sample.labels[argnum]
    evidence: dict[str, Any] = {"sample": case_name(sample, torch.float64, gradients.device)}
    evidence.update({f"by {gradients.label(each)}": verdict for each, verdict in verdicts.items()})
    missing = [gradients.label(each) for each, verdict in verdicts.items() if verdict == MISSING]
    wrong = [gradients.label(each) for each, verdict in verdicts.items() if verdict == WRONG]
    if len(missing) == len(verdicts):
        what = "the gradient of it cannot be differentiated again at all, as if it were a constant"
    elif missing:
        what = f"it lacks what flows through {_listed(missing)}"
    else:
        what = (
            f"what its gradient gives when it is differentiated by {_listed(wrong or [gradients.label(by)])} "
            "differs from finite differences of it"
        )
    shown = f"by `{gradients.label(by)}`, {difference}"
    return Failure(
        NAME,
        label,
        "second-order",
        f"the second order by `{label}` is wrong: {what} ({shown}). {CUT}",
        rule_location(subject, sample.names[argnum]),
        {**evidence, **difference.evidence()},
    )


CUT = (
    "Something that the gradient depends on is hidden from autograd, as by `.detach()`, `.data`, NumPy, "
    "`no_grad`, or a value that the forward computed and kept, on `ctx` or by `save_for_backward`, and that "
    "is not a result of it: compute it again in the backward; or what is used has a wrong backward of its own"
)


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(f"`{label}`" for label in labels)


def _against_all(gradients: SecondOrderGradients, together: SecondOrderGradients) -> Findings:
    """The derivatives of one gradient alone, beside those of it where every input requires one."""
    (argnum,) = gradients.argnums
    weights = together.weights()
    weight_alone = [
        weight if at == argnum else None for at, weight in zip(together.argnums, weights, strict=True)
    ]
    expected = together.differentiated(weight_alone)
    got = gradients.differentiated([weights[together.argnums.index(argnum)]])
    for by in gradients.by:
        alone, right = got[by], expected[by]
        like = gradients.inputs_and_grads[by]
        alone, right = (torch.zeros_like(like) if each is None else each for each in (alone, right))
        both = alone.isnan() & right.isnan()  # as where a sample has nan
        alone, right = alone.masked_fill(both, 0), right.masked_fill(both, 0)
        if agree_to_share(alone, right, torch.finfo(torch.float64).eps ** 0.5):
            continue
        dtype = computed_in(gradients.subject, gradients.sample)
        if agree_to_share(alone, right, torch.finfo(dtype).eps ** 0.5):
            continue
        directions = (gradients, [weights[together.argnums.index(argnum)]]), (together, weight_alone)
        if any(each.only_rounds(by, given, alone, right) for each, given in directions):
            continue
        subject, sample = gradients.subject, gradients.sample
        label = sample.labels[argnum]
        message = (
            f"the second order by `{label}` is another one where `{label}` alone requires a gradient than "
            f"where every input does: they differ by {float((alone - right).abs().max()):.3g}, by "
            f"`{gradients.label(by)}`"
        )
        evidence = {"sample": case_name(sample, torch.float64, gradients.device)}
        yield Failure(
            NAME, label, "second-order", message, rule_location(subject, sample.names[argnum]), evidence
        )
        return


SECOND_ORDER = Property(
    NAME,
    "the gradients can be differentiated again, and are right",
    run,
    subset=True,
    differences=True,
    sends_gradients=True,
    gradcheck="torch.autograd.gradgradcheck(lambda {names}: {call}, ({names},))",
    given=of_second_order,
    reruns=True,
)


SHARE = 64
DIRECTIONS = 3
"""Divisor of the number of elements that are moved one at a time, and number of random directions for the
others: a backward costs more than a call, and a wrong second order is rarely wrong in one element only."""


@dataclass(frozen=True)
class SecondOrderGradients:
    """The gradients by some inputs of a sample, to be differentiated again.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: The inputs.
        device: The device.
        chosen: The only entry of `inputs_and_grads` to differentiate them by; None for all.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    device: torch.device
    chosen: int | None = None

    @cached_property
    def inputs_and_grads(self) -> list[Any]:
        """The inputs, and after them the grad_outputs, in float64."""
        flat = self.sample.in_double()
        with torch.no_grad():
            results = self.call(self.sample.in_double())
        return [*flat, *contiguous_grad_outputs(self.subject, self.sample, results).in_double()]

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results on the device, of numbers on the CPU, as numbers on the CPU."""
        return self.subject.call(self.sample, flat, self.device)

    def by_transforms(self) -> None:
        """Differentiate twice by `torch.func`, where an operator without autograd was seen.

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
            return sum(each.real.sum() for each in self.call(flat) if is_inexact(each))

        argnums = tuple(range(len(self.argnums)))
        first: Any = torch.func.grad(total, argnums)
        second: Any = torch.func.grad(lambda *x: sum(each.real.sum() for each in first(*x)), argnums)
        second(*(self.inputs_and_grads[argnum] for argnum in self.argnums))

    @cached_property
    def by(self) -> tuple[int, ...]:
        """Positions in `inputs_and_grads` to differentiate the gradients by: inputs and grad_outputs."""
        if self.chosen is not None:
            return (self.chosen,)
        count = len(self.sample.flat)
        return (
            *self.argnums,
            *(p for p in range(count, len(self.inputs_and_grads)) if self.inputs_and_grads[p] is not None),
        )

    def only(self, by: int) -> SecondOrderGradients:
        """The same gradients, to be differentiated by one entry of `inputs_and_grads` alone."""
        return replace(self, chosen=by)

    def label(self, argnum: int) -> str:
        """Name of an entry of `inputs_and_grads` in messages."""
        count = len(self.sample.flat)
        if argnum < count:
            return self.sample.labels[argnum]
        return self.subject.results(self.sample)[argnum - count].gradient_name()

    def weights(self) -> list[Tensor]:
        """A random direction for each gradient, in which it is differentiated."""
        generator = self.subject.generator(1)
        wide = {True: torch.complex128, False: torch.float64}
        return [
            torch.randn(value.shape, generator=generator, dtype=wide[value.is_complex()])
            for value in (self.inputs_and_grads[argnum] for argnum in self.argnums)
        ]

    def __call__(self, values: Sequence[Any]) -> list[Tensor]:
        """The gradients, as numbers; zeros where there is none."""
        count = len(self.sample.flat)
        return vjp_or_zeros(self.call, values[:count], self.argnums, values[count:])

    def differentiated(
        self, weights: Sequence[Tensor | None], values: Sequence[Any] | None = None
    ) -> dict[int, Tensor | None]:
        """The derivatives of the gradients, times their weights, by autograd.

        Args:
            weights: One for each gradient; None for one that is left out.
            values: The inputs and the grad_outputs, if not those of the sample.

        Returns:
            The derivative by each entry of `by`; None where autograd has none.
        """
        leaves, gradients = self._recorded(self.inputs_and_grads if values is None else values)
        again = [
            (gradient, weight)
            for gradient, weight in zip(gradients, weights, strict=True)
            if weight is not None and gradient is not None and gradient.requires_grad
        ]
        if not again:
            return dict.fromkeys(self.by)
        first, second = zip(*again, strict=True)
        inputs = [leaves[argnum] for argnum in self.by]
        found = capabilities.differentiated(first, inputs, second, retain_graph=True)
        if any(each is None for each in found):
            # `once_differentiable` refuses in `backward()` alone; `autograd.grad` by some inputs skips its
            # node and reports them as unused.
            torch.autograd.backward(first, second)
        return dict(zip(self.by, found, strict=True))

    def _recorded(self, values: Sequence[Any]) -> tuple[list[Any], Sequence[Tensor | None]]:
        """Leaves with these values, and the gradients with their graph."""
        count = len(self.sample.flat)
        with torch.enable_grad():
            leaves = [
                value.detach().requires_grad_(argnum in self.by) if is_inexact(value) else value
                for argnum, value in enumerate(values)
            ]
            copies = [value.clone() if is_inexact(value) else value for value in leaves]
            inputs = [leaves[argnum] for argnum in self.argnums]
            return leaves, differentiate(self.call(copies[:count]), inputs, copies[count:], create_graph=True)

    def other_surrogate(self) -> str | None:
        """Description of what may be a surrogate within surrogate gradients; None if there is nothing.

        A stand-in may detach on purpose. A node of a Function may be that of the operator itself.
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

    def only_rounds(self, by: int, weights: Sequence[Tensor | None], got: Tensor, expected: Tensor) -> bool:
        """True if a derivative is rounding noise, as one that is zero."""

        count = len(self.inputs_and_grads)

        def again(given: list[Any]) -> list[Tensor | None]:
            found = self.differentiated(given[count:], given[:count])[by]
            return [torch.zeros_like(expected) if found is None else found]

        flat = [*self.inputs_and_grads, *weights]
        (answer,) = self._computation(again, flat).twins(flat, torch.float64)
        return not judge(got, replace(answer, value=expected)).wrong

    def rounding(self, weights: Sequence[Tensor | None]) -> float:
        """Rounding error of the derivatives of the gradients, whose terms may cancel."""
        count = len(self.inputs_and_grads)

        def derivatives(given: list[Any]) -> list[Tensor | None]:
            return [*self.differentiated(given[count:], given[:count]).values()]

        flat = [*self.inputs_and_grads, *weights]
        answers = self._computation(derivatives, flat).twins(flat, torch.float64)
        found = [largest_magnitude(each.distance) for each in answers if each.value is not None]
        return max(found, default=0.0)

    def _computation(self, function: Function, flat: list[Any]) -> Computation:
        known = partial(computed_in, self.subject, self.sample)
        return Computation.of(function, flat, self.subject.generator(), computed_in=known, usual=unknown)

    @cached_property
    def packed(self) -> PackedTensors:
        """The entries to differentiate by, in a row."""
        return PackedTensors(self.inputs_and_grads, self.by)

    def of_row(self, flat: Sequence[Any]) -> list[Tensor]:
        """The gradients as a function of the row."""
        return self(self.packed.unpacked(flat[0]))

    def agree_along(self, weights: Sequence[Tensor | None], found: Mapping[int, Tensor | None]) -> bool:
        """True if differences of the gradients along random directions settle that derivatives are right."""
        row, generator = packed_derivatives(self.packed, found), self.subject.generator()
        return agrees_along(self.of_row, [self.packed.row], 0, weights, row, generator=generator)

    def numerically(self, weights: Sequence[Tensor | None]) -> NumericalDerivatives:
        """Differentiate the gradients by finite differences."""
        found = numerical_gradient(
            self.of_row,
            [self.packed.row],
            0,
            weights,
            elements=max(1, self.subject.effort.moved(self.sample.elements) // SHARE),
            directions=DIRECTIONS,
            generator=self.subject.generator(),
        )
        return NumericalDerivatives(self.packed, found)


def packed_derivatives(packed: PackedTensors, got: Mapping[int, Tensor | None]) -> Tensor:
    """Pack derivatives by the arguments of a row into a row; zeros where autograd has none."""
    pieces = [got[argnum] for argnum in packed.argnums]
    row = [
        torch.zeros(size, dtype=torch.float64) if piece is None else coordinates(piece).cpu().double()
        for piece, size in zip(pieces, packed.sizes, strict=True)
    ]
    return torch.cat(row)


@dataclass(frozen=True)
class NumericalDerivatives:
    """Finite differences of a function by several arguments together.

    Args:
        packed: The arguments.
        found: The derivative by all of them in a row.
    """

    packed: PackedTensors
    found: NumericalGradient

    def judge(self, got: Mapping[int, Tensor | None], rounding: float = 0.0) -> tuple[int, Difference] | None:
        """The argument by which autograd's derivatives differ most, and the difference; None if all agree.

        Args:
            got: The derivatives by each argument.
            rounding: Rounding error that each may have besides.
        """
        difference = self.found.widened(rounding).judge(packed_derivatives(self.packed, got))
        if difference is None or not difference.index:
            return None if difference is None else (self.packed.argnums[0], difference)
        argnum, position = self.packed.locate(difference.index[0])
        value = self.packed.values[argnum]
        at = position // 2 if value.is_complex() else position
        return argnum, replace(difference, index=unravel(at, value.shape))

    def kinked(self) -> tuple[int, ...]:
        """The arguments by which there is a kink."""
        pieces = self.found.kinks.split(self.packed.sizes)
        return tuple(p for p, piece in zip(self.packed.argnums, pieces, strict=True) if piece.any())
