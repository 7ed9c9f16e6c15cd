"""Cancellation: gradients that are off by rounding alone, and operations on low precision operands.

The bound of an element is measured on the right gradient. Another formula that is as good may subtract larger
numbers. Its error is tiny relative to the largest element, and changes completely when the inputs and the
grad_output are perturbed. The error of a wrong formula changes as little as they do.

Where all terms cancel, as in the gradient of `x / x.sum(-1)` over one element, the right gradient is zero,
and so is its largest element. The error is tiny then relative to the size that such gradients usually have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import differentiate, vjp, vjp_or_zeros
from opsmith.checking.numerics.compare import Difference, largest_magnitude
from opsmith.checking.numerics.directional import DirectionalFunction
from opsmith.checking.numerics.tolerance import LIBRARY, allowed_roundings, in_double_on_cpu, unit_roundoff
from opsmith.checking.properties.numeric.gradient_truth import RightGradient
from opsmith.checking.samples.cases import LOW_PRECISION, dtype_name
from opsmith.checking.samples.grad_outputs import GradOutputs, plain_grad_outputs
from opsmith.checking.samples.perturb import perturbed
from opsmith.checking.samples.sample import Sample, is_inexact, replica
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import PERTURBATIONS, Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library import capabilities

DRAWS = 16
"""Largest number of perturbations: one that shows rounding is enough. Of four, all are alike once in a
hundred times."""

KEPT = 0.75
"""Share of the dtype's digits that must be right: a computation in a lower precision has fewer."""

MOVED = 0.5
"""Exponent of the perturbation: half of the digits. A smaller one may not change how a number near one is
rounded."""

MAX_RATIO = 4.0
"""Largest ratio of the error in another dtype to one of the few measured errors."""

ROUGH = 0.5
"""Share of the error that must change at least once."""


def is_only_rounding(
    right: RightGradient,
    argnum: int,
    subset: tuple[int, ...],
    grad_outputs: GradOutputs,
    got: Tensor,
    expected: Tensor,
    difference: Difference,
) -> bool:
    """Return True if an element of a gradient is off by rounding alone.

    In float64 its error must be tiny, beside the largest element or the size that gradients by this input
    have (`usual_size`), and change when the inputs are perturbed: a right gradient that is zero has no digits
    to compare. In another dtype it must exceed the operator's error in float64 by no more than the ratio of
    the eps, or be a few roundings of that size, and change. What computes in float32, whatever comes in, has
    no other error in float64: it is held to the first rule, in float32.

    Args:
        right: Right gradients. Where finite differences do not confirm autograd through the reference, they
            or the operator itself in float64 decide what is right.
        argnum: Position of the input.
        subset: Positions of the inputs that required a gradient.
        grad_outputs: The grad_outputs.
        got: The gradient.
        expected: The right one, on the CPU.
        difference: Their worst element.
    """
    if not difference.index and expected.dim():
        return False  # the difference is one along a random direction
    subject, trusted = right.subject, right.trusted(argnum, grad_outputs)
    dtype = got.dtype.to_real() if got.is_complex() else got.dtype
    wide = expected.to(torch.complex128 if expected.is_complex() else torch.float64)
    error = (got.detach().cpu().to(wide.dtype) - wide).masked_fill(~wide.isfinite(), 0)
    here, eps = complex(error[difference.index]), torch.finfo(dtype).eps
    fine = torch.finfo(computed_in(subject, right.sample, by_reference=True)).eps
    errors = partial(_errors, right, argnum, subset, grad_outputs, got.device, difference.index)
    if dtype == torch.float64 or subject.single_precision:
        share, step, at, size = fine**KEPT, fine**MOVED, torch.float64, largest_magnitude(wide)
    elif trusted and any(abs(here) <= MAX_RATIO * eps / fine * abs(other) for other in errors(fine**MOVED)):
        return True
    else:
        share, step, at, size = allowed_roundings(1) * unit_roundoff(dtype), eps**MOVED, dtype, 0.0
    if not largest_magnitude(error) <= share * max(size, usual_size(right, argnum, grad_outputs)):
        return False
    return any(abs(other - here) > ROUGH * abs(here) for other in errors(step, at))


def usual_size(right: RightGradient, argnum: int, grad_outputs: GradOutputs) -> float:
    """Return the size that terms of a gradient have, whatever is left of them when they cancel.

    Where the results do not move with an input, as those of `x / x.sum(-1)` over one element, nothing is
    left, and the size does not show in the right gradient. It is that of the weighted results over the input,
    which have the same unit, or that of the right gradients on the author's samples.

    Args:
        right: The right gradients.
        argnum: Position of the input.
        grad_outputs: The grad_outputs.
    """
    subject, label = right.subject, right.sample.labels[argnum]
    sizes = [0.0]
    with Overlooking(), without_warnings():  # what a reference raises, other properties report
        line = DirectionalFunction(
            subject.plain(right.sample), right.sample.in_double(), argnum, grad_outputs.in_double()
        )
        sizes.append(float(line.weighed.abs().sum()) / line.usual)
    for sample in subject.samples:
        position = sample.labels.index(label) if label in sample.labels else -1
        if not sample.origin and position in sample.inexact:
            with Overlooking(), without_warnings():
                sizes.append(_largest(_usual_gradient(subject, sample, position)))
    return max(size for size in sizes if math.isfinite(size))


def _usual_gradient(subject: Subject, sample: Sample, argnum: int) -> list[Tensor]:
    """The gradient by one input through the reference, on a sample of the author."""

    def first() -> list[Tensor]:
        grads = plain_grad_outputs(subject, sample).in_double()
        return vjp_or_zeros(subject.plain(sample), sample.in_double(), (argnum,), grads)

    return subject.once(f"gradient by {sample.labels[argnum]}", sample, first)


def _errors(
    right: RightGradient,
    argnum: int,
    subset: tuple[int, ...],
    grad_outputs: GradOutputs,
    device: torch.device,
    index: tuple[int, ...],
    step: float,
    dtype: torch.dtype = torch.float64,
) -> Iterator[complex]:
    """Yield the errors of one element in a dtype, each on inputs perturbed differently by a step."""
    generator = right.subject.generator(PERTURBATIONS)
    for draw in range(DRAWS):
        own = step * (1 + draw / DRAWS)  # of one element the signs alone give two values
        flat = [perturbed(value, own, generator) for value in right.sample.at(dtype, device)]
        grads = [perturbed(grad, own, generator) for grad in grad_outputs.at(dtype, device)]
        found = vjp(partial(right.subject.call, right.sample), [*map(replica, flat)], subset, grads)
        answer = found[subset.index(argnum)]
        if answer is None:
            return
        truth = _truth(right, argnum, grad_outputs, flat, grads, dtype)
        wide = answer.detach().cpu().to(truth.dtype)
        yield complex((wide - truth)[index])


def _truth(
    right: RightGradient,
    argnum: int,
    grad_outputs: GradOutputs,
    flat: Sequence[Any],
    grads: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """The right gradient on perturbed inputs.

    Differences do not tell it to so many digits: where they decide, it is the one on the inputs themselves.
    """
    trusted = right.trusted(argnum, grad_outputs)
    if not trusted and dtype == torch.float64:
        return right.numerical(argnum, grad_outputs).known
    function = right.by_reference if trusted else right.by_itself
    return function(in_double_on_cpu(flat), in_double_on_cpu(grads))[right.argnums.index(argnum)]


FEWER = (torch.float32, *LOW_PRECISION)
"""dtypes of lower precision than float64."""
PARTS = 16
"""Multiples of one over this are exact in every dtype."""


def low_precision_operand(compute: Callable[[], Any], *, mixed: bool = True) -> str | None:
    """Find the first operation that takes a tensor of lower precision than float64.

    Numbers that every dtype represents exactly, as in a mask, do not count.

    Args:
        compute: Computation in float64.
        mixed: True if the operation must also take a tensor of float64.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> low_precision_operand(lambda: x * torch.full((2,), 0.1))
        'aten.mul.Tensor takes float32 beside float64'
        >>> low_precision_operand(lambda: x * 0.1)
    """
    found: list[str] = []

    def given(operator: Any, args: Sequence[Any]) -> None:
        tensors = [*tensors_in(list(args))]
        wide = [each for each in tensors if each.dtype in (torch.float64, torch.complex128)]
        if found or (mixed and not wide):
            return
        for each in tensors:
            if each.dtype in FEWER and _rounded(each):
                found[:] = [f"{operator} takes {dtype_name(each.dtype)}{' beside float64' * bool(wide)}"]

    with capabilities.observe_operators(lambda operator, kwargs: None, given):
        compute()
    return found[0] if found else None


def _rounded(tensor: Tensor) -> bool:
    return bool((tensor.detach().double() * PARTS).frac().any())


def low_precision_in_backward(
    subject: Subject, sample: Sample, argnums: Sequence[int], grad_outputs: GradOutputs
) -> str | None:
    """Find the operation by which the backward, but not the forward, loses precision; None for none.

    Args:
        subject: The checked operator.
        sample: The sample, run in float64.
        argnums: Positions of the inputs that require a gradient.
        grad_outputs: The grad_outputs.
    """
    flat = sample.in_double()
    for argnum in argnums:
        flat[argnum].requires_grad_()
    results: list[Any] = []
    with torch.enable_grad():
        if low_precision_operand(lambda: results.extend(subject.call(sample, flat)), mixed=False) is not None:
            return None
    grads = grad_outputs.in_double()
    inputs = [flat[argnum] for argnum in argnums]
    return low_precision_operand(partial(differentiate, results, inputs, grads))


def rounding_of_terms(
    subject: Subject, sample: Sample, dtype: torch.dtype, argnum: int, grads: Sequence[Tensor | None]
) -> float:
    """Return the rounding error of a gradient whose terms cancel, as those of a softmax near a one do.

    The size of its terms is taken from the gradient at the sample's own values, where it is known to be
    right: at special values it may be 1e-40 or 1e100, whatever the size of its terms.

    Args:
        subject: The subject of the check.
        sample: The sample.
        dtype: dtype of the arguments.
        argnum: The input that is differentiated by.
        grads: The grad_output of each visible result.
    """
    usual: Tensor | None = None
    with Overlooking(), without_warnings():  # what it raises there, other properties report
        usual = vjp(partial(subject.call, sample), sample.at(dtype), (argnum,), grads)[0]
    if usual is None or not bool(usual.isfinite().any()):
        return 0.0
    return LIBRARY * torch.finfo(dtype).eps * float(usual[usual.isfinite()].abs().max())


SHRUNK = (2.0**-2, 2.0**-5, 2.0**-8, 2.0**-12)
"""Factors that make inputs smaller: at the last, logits of a thousand saturate nothing."""

GROWN = 2.0**20
"""Largest ratio of the results there to those of the sample: near a pole they grow, and saturate nowhere. Of
a gradient like `-1 / x**2` then at most a hundred-thousandth counts as rounding."""


def size_of_terms(
    gradients: Callable[[list[Any]], Sequence[Tensor | None]],
    results: Callable[[list[Any]], Sequence[Tensor | None]],
    flat: Sequence[Any],
) -> float:
    """Return the size of the terms whose cancellation leaves a gradient, as in a saturated softmax.

    It shows at inputs nearer to zero, where nothing saturates: as the largest element of the gradient there.

    Args:
        gradients: Computes the gradient, in float64.
        results: Computes the results.
        flat: Arguments of both, in float64.

    Example:
        >>> x = torch.full((1,), 99.0, dtype=torch.float64)
        >>> f"{size_of_terms(lambda flat: [1 - flat[0].tanh() ** 2], lambda flat: [flat[0].tanh()], [x]):.1f}"
        '1.0'
    """
    inexact = [position for position, value in enumerate(flat) if is_inexact(value)]
    groups = [(position,) for position in inexact] + [tuple(inexact)] * (len(inexact) > 1)
    found = [0.0]
    for group in groups:
        for factor in SHRUNK:
            smaller = [
                replica(value) * factor if position in group else replica(value)
                for position, value in enumerate(flat)
            ]
            with Overlooking(), without_warnings():  # an input out of its domain shows nothing
                largest = _largest(results([*map(replica, smaller)]))
                if largest > GROWN * _largest(results([*map(replica, flat)])):
                    break
                found.append(_largest(gradients(smaller)))
    return max(found)


def _largest(tensors: Sequence[Tensor | None]) -> float:
    return max((largest_magnitude(each) for each in tensors if each is not None), default=0.0)
