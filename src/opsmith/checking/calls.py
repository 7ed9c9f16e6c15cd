"""Recorded calls: the inputs to differentiate by, an operator under autograd, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import Tensor

from opsmith.adopting.outputs import never_returned
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import (
    Overlooking,
    error_words,
    first_line,
    raised_within,
    refuse_own,
    stated,
)
from opsmith.checking.numerics.autodiff import differentiate, differentiate_by_ones, record
from opsmith.checking.samples.grad_outputs import plain_grad_outputs, results_with_gradient
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import default_dtype
from opsmith.checking.subject import Subject, computed_once
from opsmith.core.formula import Formula, NonDifferentiable, NotImplementedGradient
from opsmith.core.location import where
from opsmith.core.origins.function_class import AdoptedFunction
from opsmith.judging.compare import largest_magnitude
from opsmith.judging.tensors import is_inexact, perturbed, replica
from opsmith.judging.working_precision import working_precision
from opsmith.torch_library.torch_messages import NO_DERIVATIVE, has_message

T = TypeVar("T", bound=Sequence[Any])
R = TypeVar("R")


@dataclass(frozen=True)
class Differentiated:
    """The flat arguments of a sample that gradients flow to.

    Args:
        argnums: Positions of the arguments to check.
        refused: The reason for each input that has no gradient to check.
    """

    argnums: tuple[int, ...]
    refused: dict[str, str]

    def subsets(self, effort: Effort | None = None) -> Iterator[tuple[int, ...]]:
        """Each input alone, then all of them together; with `effort`, other choices of inputs too.

        Args:
            effort: Level of effort. Other choices are all of up to four inputs; of more inputs, every pair,
                and all inputs except one. With `quick`, they are all inputs except one.
        """
        for argnum in self.argnums:
            yield (argnum,)
        if len(self.argnums) > 1:
            yield self.argnums
        if effort is None or len(self.argnums) < 3:
            return
        frozen = len(self.argnums) - 1
        every = range(2, len(self.argnums)) if len(self.argnums) <= 4 else sorted({2, frozen})
        sizes = every if effort.full else [frozen]
        for size in sizes:
            yield from combinations(self.argnums, size)


@computed_once
def differentiated(subject: Subject, sample: Sample) -> Differentiated:
    """Select the inputs of a sample to differentiate by: floating tensors with a gradient, derived or given.

    No input is selected if no result has a dtype with gradients. A floating result without a graph still
    counts: finite differences must confirm that it is constant. The operator is called once for all
    properties.
    """
    if not any(results_with_gradient(subject, sample, subject.call(sample, sample.at()))):
        return Differentiated((), {})
    rules = subject.specification.gradients
    argnums: list[int] = []
    stated_refusals = refusals_in(subject, sample)
    refused: dict[str, str] = {}
    for argnum in sample.inexact:
        name = sample.names[argnum]
        rule = rules.rules.get(name)
        if sample.is_buffer(argnum):
            refused[name] = f"`{name}` has no elements: its gradient has no elements to compare"
        elif name in stated_refusals:
            refused[name] = f"the operator refuses a gradient of `{name}`: {stated_refusals[name]}"
        elif isinstance(rule, NotImplementedGradient):
            refused[name] = f"the gradient of `{name}` is not implemented: {rule.reason}"
        elif subject.kind.in_library:
            if not subject.lacks("gradient"):
                argnums.append(argnum)
            else:
                refused[name] = (
                    "the operator has no gradient: register one with `torch.library.register_autograd`"
                )
        elif rule is None and subject.specification.opaque and rules.stand_in is None:
            refused[name] = (
                f"`{name}` has no gradient: the operator is opaque; write "
                f"`.gradients({name}=lambda grad: ...)`, or `{name}=opsmith.non_differentiable`"
            )
        elif not isinstance(rule, NonDifferentiable):
            argnums.append(argnum)
    if subject.kind.has_reference:
        derived = [argnum for argnum in argnums if sample.names[argnum] not in rules.rules]
        lacking = _refused(subject, sample, derived, _without_derivative) if derived else {}
        refused |= {
            name: f"torch has no derivative with respect to `{name}`: {text}"
            for name, text in lacking.items()
        }
        argnums = [argnum for argnum in argnums if sample.names[argnum] not in lacking]
    return Differentiated(tuple(argnums), refused)


def computed_in(subject: Subject, sample: Sample, *, by_reference: bool = False) -> torch.dtype:
    """Return the dtype that a call or its backward computes in for arguments in float64: float64 or float32.

    It is declared, or else measured on results and gradients together, because a gradient that is zero except
    for rounding does not show how large its terms are. A derived sample may show less than the author's
    sample: a norm of one element is constant.

    Args:
        by_reference: True for the reference, and autograd through it.
    """
    if subject.single_precision:
        return torch.float32
    call = in_all_digits(subject, subject.plain(sample) if by_reference else partial(subject.call, sample))
    what = f"computed in, by_reference={by_reference}"
    found = subject.once(what, sample, partial(_computed_in, subject, sample, call))
    if found == torch.float32 or sample.change is None:
        return found
    return computed_in(subject, sample.change.of, by_reference=by_reference)


def _computed_in(subject: Subject, sample: Sample, call: Callable[[list[Any]], Any]) -> torch.dtype:
    with Overlooking():  # other properties report its exceptions
        argnums = differentiated(subject, sample).argnums
        grads = plain_grad_outputs(subject, sample).in_double()

        def function(flat: list[Any]) -> list[Tensor | None]:
            leaves, _, results = record(call, flat, argnums)
            return [*results, *differentiate(results, [leaves[argnum] for argnum in argnums], grads)]

        return working_precision(function, sample.in_double(), subject.generator())
    return torch.float64


LITTLE = 2.0**-40
"""Relative perturbation of the inputs: well above the eps of float64, and well below that of float32."""

SINGLE = 2.0**-16
"""Largest error of a computation in float32, relative to the largest element."""

LOST = 0.05
"""Share of a result's change that must be lost; a float32 constant alters this change by a millionth."""


def through_default_dtype(subject: Subject) -> Sequence[tuple[Sample, str]]:
    """Sample and name of each float64 result that loses digits in a tensor of torch's default dtype.

    Such a result changes if the default is float64. A constant in the default dtype changes it as well, but
    does not alter how it responds to changes of the inputs; lost digits do.
    """
    samples, found = subject.samples, partial(_through_default_dtype, subject)
    return subject.once("default dtype", samples[0], found) if samples else ()


def _through_default_dtype(subject: Subject) -> Sequence[tuple[Sample, str]]:
    if subject.draws or "float32" in subject.specification.origin.claims:
        return ()
    for sample in (each for each in subject.samples if each.inexact and not each.origin):
        flat = sample.in_double()
        near = [perturbed(value, LITTLE, subject.generator()) for value in flat]
        runs: list[Sequence[Tensor | None]] = []
        with Overlooking(), torch.no_grad():  # it may take one dtype alone, and its exceptions are reported
            for dtype in (torch.float32, torch.float64):
                with default_dtype(dtype):
                    runs += [subject.call(sample, [*map(replica, each)]) for each in (flat, near)]
        if len(runs) == 4:
            every = zip(subject.results(sample), *runs, strict=True)
            return [(sample, result.name) for result, *found in every if _loses_digits(found)]
    return ()


def _loses_digits(results: Sequence[Tensor | None]) -> bool:
    """True if a result responds differently to its inputs under a default dtype of float32 than under
    float64.

    Args:
        results: The result of the inputs and of perturbed inputs under float32, and both under float64.
    """
    if any(each is None or each.dtype not in (torch.float64, torch.complex128) for each in results):
        return False
    one, near, wide, wide_near = (each for each in results if each is not None)
    if not one.shape == near.shape == wide.shape == wide_near.shape or torch.equal(one, wide):
        return False
    if largest_magnitude((one - wide).nan_to_num()) > SINGLE * largest_magnitude(wide):
        return False  # different numbers, such as random numbers drawn in the default dtype
    moves = (wide_near - wide).nan_to_num()
    noise = 16 * torch.finfo(torch.float64).eps * largest_magnitude(wide)
    off = largest_magnitude((near - one).nan_to_num() - moves)
    return off > max(LOST * largest_magnitude(moves), noise)


def in_all_digits(subject: Subject, function: Callable[[T], R]) -> Callable[[T], R]:
    """A function of flat arguments that keeps all digits of those in float64.

    A class whose forward loses digits through torch's default dtype runs under a wider default, since finite
    differences of rounded results are noise. The property `forward` reports the lost digits.
    """
    if not (subject.kind.own_forward and through_default_dtype(subject)):
        return function

    def run(flat: T) -> R:
        wide = any(is_inexact(value) and value.dtype in (torch.float64, torch.complex128) for value in flat)
        with default_dtype(torch.float64) if wide else nullcontext():
            return function(flat)

    return run


@computed_once
def refusals_in(subject: Subject, sample: Sample) -> dict[str, str]:
    """Inputs for which a class refuses a gradient on a sample by an error of its own code, with its text.

    The class must refuse whenever the input requires a gradient, alone and together with all others.
    """
    return _refused(subject, sample, sample.inexact, _statement) if subject.kind.own_forward else {}


def _refused(
    subject: Subject, sample: Sample, argnums: Sequence[int], words: Callable[[Exception], str | None]
) -> dict[str, str]:
    """The inputs whose gradient is refused, alone and together with the others, with the text of the errors.

    Args:
        words: Returns the text of an error that refuses a gradient; None for any other error.
    """

    def refusal(*argnums: int) -> str | None:
        try:
            leaves, _, results = record(partial(subject.call, sample), sample.at(), argnums)
            differentiate_by_ones(results, [leaves[argnum] for argnum in argnums])
        except Exception as error:
            refuse_own(error)
            return words(error)
        return None

    some = argnums if refusal(*argnums) is not None else ()
    alone = {sample.names[argnum]: refusal(argnum) for argnum in some}
    return {name: text for name, text in alone.items() if text is not None}


def _statement(error: Exception) -> str | None:
    """Text of an error that the operator's code raises on purpose, not because of an unexpected error."""
    before = None if error.__suppress_context__ else error.__context__
    surprised = isinstance(before, Exception) and not isinstance(before, ImportError) and not stated(before)
    return error_words(error) if stated(error) and not surprised else None


def _without_derivative(error: Exception) -> str | None:
    """Text of torch's error for an operation without a derivative; None for any other error."""
    lacks = isinstance(error, RuntimeError) and has_message(error, NO_DERIVATIVE)
    return first_line(error) if lacks and not raised_within(error) else None


def leaves_out(subject: Subject, name: str) -> bool:
    """True if a class's backward returns None for an input in every return statement, maybe on purpose."""
    origin = subject.specification.origin
    if not isinstance(origin, AdoptedFunction):
        return False
    names = origin.parameters.names  # the name of an argument may differ from its parameter's
    return name in names and never_returned(origin.subject.backward, names.index(name))


def rule_location(subject: Subject, name: str) -> str:
    """`file:line` of the code that computes the gradient of an input."""
    specification = subject.specification
    rule = specification.gradients.rules.get(name)
    if isinstance(rule, Formula):
        return rule.where
    if subject.kind.in_library:
        return specification.where_of("gradient")
    stand_in = specification.gradients.stand_in
    return where(stand_in) if stand_in is not None and rule is None else specification.where
