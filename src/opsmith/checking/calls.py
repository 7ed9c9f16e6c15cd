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
        argnums: Those to check.
        refused: The reason for each input that has no gradient to check.
    """

    argnums: tuple[int, ...]
    refused: dict[str, str]

    def subsets(self, effort: Effort | None = None) -> Iterator[tuple[int, ...]]:
        """Each input alone, then all of them together; with an effort, other choices too.

        Args:
            effort: Level of effort: every choice of up to four inputs; of more, every pair, and all but one.
                With `quick`, all but one.
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

    There are none if no result has a dtype with gradients. A floating result without a graph still counts:
    finite differences must confirm that it is constant. Most properties ask; the operator is called once.
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
            refused[name] = f"`{name}` has no elements: there is no gradient by it to compare"
        elif name in stated_refusals:
            refused[name] = f"it refuses a gradient by `{name}`: {stated_refusals[name]}"
        elif isinstance(rule, NotImplementedGradient):
            refused[name] = f"the gradient of `{name}` is not implemented: {rule.reason}"
        elif subject.kind.in_library:
            if not subject.lacks("gradient"):
                argnums.append(argnum)
            else:
                refused[name] = "it has no gradient: `torch.library.register_autograd` gives it one"
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
        refused |= {name: f"torch has no derivative by `{name}`: {text}" for name, text in lacking.items()}
        argnums = [argnum for argnum in argnums if sample.names[argnum] not in lacking]
    return Differentiated(tuple(argnums), refused)


def computed_in(subject: Subject, sample: Sample, *, by_reference: bool = False) -> torch.dtype:
    """Return the dtype that a call or its backward computes in for arguments in float64: that, or float32.

    It is declared, or else measured, on results and gradients together: of a gradient that is zero but for
    rounding, nothing says how large its terms are. A derived sample may show less than the author's: a norm
    of one element is constant.

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
    with Overlooking():  # what it raises, other properties report
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
"""Share of a move that must be lost; a constant in float32 changes a move by a millionth."""


def through_default_dtype(subject: Subject) -> Sequence[tuple[Sample, str]]:
    """Results in float64 that lose digits in a tensor of torch's default dtype: the sample, and the name.

    They change where the default is float64. A constant in that dtype changes them as well, but not how they
    move with the inputs: digits that are lost do not come back.
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
        with Overlooking(), torch.no_grad():  # it may take one dtype alone, and what it raises is reported
            for dtype in (torch.float32, torch.float64):
                with default_dtype(dtype):
                    runs += [subject.call(sample, [*map(replica, each)]) for each in (flat, near)]
        if len(runs) == 4:
            every = zip(subject.results(sample), *runs, strict=True)
            return [(sample, result.name) for result, *found in every if _loses_digits(found)]
    return ()


def _loses_digits(results: Sequence[Tensor | None]) -> bool:
    """True if a result moves otherwise under a default dtype of float32 than under float64.

    Args:
        results: The result under float32, that of perturbed inputs, and both under float64.
    """
    if any(each is None or each.dtype not in (torch.float64, torch.complex128) for each in results):
        return False
    one, near, wide, wide_near = (each for each in results if each is not None)
    if not one.shape == near.shape == wide.shape == wide_near.shape or torch.equal(one, wide):
        return False
    if largest_magnitude((one - wide).nan_to_num()) > SINGLE * largest_magnitude(wide):
        return False  # other numbers, as those that are drawn in the default dtype
    moves = (wide_near - wide).nan_to_num()
    noise = 16 * torch.finfo(torch.float64).eps * largest_magnitude(wide)
    off = largest_magnitude((near - one).nan_to_num() - moves)
    return off > max(LOST * largest_magnitude(moves), noise)


def in_all_digits(subject: Subject, function: Callable[[T], R]) -> Callable[[T], R]:
    """A function of flat arguments, with all digits for those in float64.

    A class whose forward loses them through torch's default dtype, which `forward` reports, runs in a wider
    one: finite differences of what was rounded are noise.
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
    """Inputs by which a class refuses a gradient for a sample by an error of its own code, with its text.

    It does so whenever the input requires a gradient, alone and with all others.
    """
    return _refused(subject, sample, sample.inexact, _statement) if subject.kind.own_forward else {}


def _refused(
    subject: Subject, sample: Sample, argnums: Sequence[int], words: Callable[[Exception], str | None]
) -> dict[str, str]:
    """The inputs by which a backward is refused, alone and with the others, and the words of the errors.

    Args:
        words: Gives the words of an error that refuses a gradient; None for any other error.
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
    """The error that the operator's own code states, and not for another one that surprised it."""
    before = None if error.__suppress_context__ else error.__context__
    surprised = isinstance(before, Exception) and not isinstance(before, ImportError) and not stated(before)
    return error_words(error) if stated(error) and not surprised else None


def _without_derivative(error: Exception) -> str | None:
    """The words of torch where it has no derivative of an operation."""
    lacks = isinstance(error, RuntimeError) and has_message(error, NO_DERIVATIVE)
    return first_line(error) if lacks and not raised_within(error) else None


def leaves_out(subject: Subject, name: str) -> bool:
    """True if a class's backward returns None for an input in every return statement: it may be meant."""
    origin = subject.specification.origin
    if not isinstance(origin, AdoptedFunction):
        return False
    names = origin.parameters.names  # an argument may have another name than its parameter
    return name in names and never_returned(origin.subject.backward, names.index(name))


def rule_location(subject: Subject, name: str) -> str:
    """`file:line` of what computes the gradient of an input."""
    specification = subject.specification
    rule = specification.gradients.rules.get(name)
    if isinstance(rule, Formula):
        return rule.where
    if subject.kind.in_library:
        return specification.where_of("gradient")
    stand_in = specification.gradients.stand_in
    return where(stand_in) if stand_in is not None and rule is None else specification.where
