"""Right gradients of a sample: autograd through the reference, confirmed by finite differences.

Either can be wrong alone. Autograd through the reference is exact, but wrong where the reference detaches
something. Finite differences depend on values alone, have fewer digits, and fail at a kink. Autograd is
trusted if finite differences do not contradict it; otherwise finite differences decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import computed_in
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.agreement import agrees_along
from opsmith.checking.numerics.answer import Computation
from opsmith.checking.numerics.autodiff import has_gradient, vjp_or_zeros
from opsmith.checking.numerics.compare import Difference, all_finite, largest_magnitude
from opsmith.checking.numerics.directional import DirectionalFunction
from opsmith.checking.numerics.finite_differences import NumericalGradient, numerical_gradient
from opsmith.checking.samples.grad_outputs import GradOutputs, plain_grad_outputs
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property

Grads = Sequence[Tensor | None]

SPOT_CHECK = 8
"""Number of elements that a spot check moves one at a time."""


@dataclass
class RightGradient:
    """The right gradients of one sample, each computed at its first use.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: The inputs that are differentiated by.
        confirmed: True if finite differences have confirmed autograd through the reference on other samples,
            so that they need not be taken again.
        spot_checked: True if a few elements and random directions stand for all, as long as they confirm
            autograd through the reference.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    confirmed: bool = False
    spot_checked: bool = False
    _numerical: dict[tuple[int, str], NumericalGradient] = field(default_factory=dict)
    _spot_checks: dict[tuple[int, str], NumericalGradient] = field(default_factory=dict)
    _trusted: dict[tuple[int, str], bool] = field(default_factory=dict)
    _along: dict[tuple[int, str], bool] = field(default_factory=dict)
    _through_reference: dict[str, list[Tensor]] = field(default_factory=dict)

    @cached_property
    def recorded(self) -> bool:
        """True if autograd records the reference, and the reference is not the operator itself."""
        if self.subject.specification.opaque:
            return False
        if not self.subject.kind.own_forward:
            return self._is_recorded()
        # torch runs a class's forward without grad mode: it may call `.numpy()`, or work in place.
        with torch.no_grad():
            results = self.subject.plain(self.sample)(self.sample.in_double())
        grads = [torch.ones_like(result) if is_inexact(result) else None for result in results]
        with Overlooking():
            if self._is_recorded():
                self.by_reference(self.sample.in_double(), grads)
                return True
        return False

    def _is_recorded(self) -> bool:
        with torch.enable_grad():
            flat = self.sample.in_double()
            for argnum in self.argnums:
                flat[argnum].requires_grad_()
            return any(has_gradient(result) for result in self.subject.plain(self.sample)(flat))

    def by_reference(self, flat: Sequence[Any], grads: Grads) -> list[Tensor]:
        """Autograd's gradients through the reference, by each of `argnums`; zeros where it has none."""
        return vjp_or_zeros(self.subject.plain(self.sample), flat, self.argnums, grads)

    def by_itself(self, flat: Sequence[Any], grads: Grads) -> list[Tensor]:
        """The operator's own gradients for contiguous grad_outputs, with which other dtypes are compared."""
        plain = [None if grad is None else grad.contiguous() for grad in grads]
        return vjp_or_zeros(partial(self.subject.call, self.sample), flat, self.argnums, plain)

    def numerical(self, argnum: int, grad_outputs: GradOutputs) -> NumericalGradient:
        """Finite differences by one input, in float64."""
        key = (argnum, grad_outputs.name)
        if key not in self._numerical:
            self._numerical[key] = self._differences(
                argnum, grad_outputs, self.subject.effort.moved(self.sample.elements)
            )
        return self._numerical[key]

    def judge_by_differences(self, argnum: int, grad_outputs: GradOutputs, got: Tensor) -> Difference | None:
        """The worst element beside finite differences; None where they contradict none.

        Beside an infinite result, as of `x / 0`, zero times an infinite derivative is nan in autograd, too.
        """
        numerical = self.numerical(argnum, grad_outputs)
        if got.isfinite().all() or not self.recorded or self.has_finite_results:
            return numerical.judge(got)
        open_ = got.isnan() & self.through_reference(argnum, grad_outputs).isnan()
        return numerical.judge(torch.where(open_, numerical.values.nan_to_num().to(got), got))

    @cached_property
    def has_finite_results(self) -> bool:
        """True if every number of every result is finite."""
        with torch.no_grad():
            results = self.subject.plain(self.sample)(self.sample.in_double())
        return all(all_finite(each) for each in results if is_inexact(each))

    def has_kink(self, argnum: int, grad_outputs: GradOutputs) -> bool:
        """True if finite differences find a kink: of a few elements if these were enough, else of all."""
        key = (argnum, grad_outputs.name)
        if self._along.get(key) and key not in self._numerical:
            return False
        known = key in self._spot_checks and key not in self._numerical
        found = self._spot_checks[key] if known else self.numerical(argnum, grad_outputs)
        return bool(found.kinks.any())

    def _differences(self, argnum: int, grad_outputs: GradOutputs, elements: int) -> NumericalGradient:
        with torch.no_grad():
            flat, grads = self.sample.in_double(), grad_outputs.in_double()
            return _numerical(self.subject, self.sample, flat, argnum, grads, elements)

    def trusted(self, argnum: int, grad_outputs: GradOutputs) -> bool:
        """True if finite differences confirm autograd through the reference by an input."""
        if self.confirmed or not self.recorded:
            return self.confirmed
        key = (argnum, grad_outputs.name)
        if key not in self._trusted:
            found = self.through_reference(argnum, grad_outputs)
            self._trusted[key] = (
                self._agrees_along(argnum, grad_outputs, found)
                or self._passes_spot_check(argnum, grad_outputs, found)
                or self._differs_by_noise(argnum, grad_outputs, found)
            )
        return self._trusted[key]

    def _differs_by_noise(self, argnum: int, grad_outputs: GradOutputs, found: Tensor) -> bool:
        """True if differences do not contradict autograd beyond its own noise, as where its terms cancel."""
        numerical = self.numerical(argnum, grad_outputs)
        if numerical.judge(found) is None:
            return True
        count, position = len(self.sample.flat), self.argnums.index(argnum)
        gradient = Computation.of(
            lambda values: [self.by_reference(values[:count], values[count:])[position]],
            [*self.sample.in_double(), *grad_outputs.in_double()],
            self.subject.generator(),
        )
        noise = gradient.noise(computed_in(self.subject, self.sample, by_reference=True))
        return noise > 0 and numerical.widened(noise).judge(found) is None

    def usual_size(self, position: int) -> float:
        """The size that gradients by an input have on the author's samples, or results over the input."""
        label, subject, found = self.sample.labels[self.argnums[position]], self.subject, [0.0]
        for sample in (self.sample, *subject.samples):
            argnum = sample.labels.index(label) if label in sample.labels else -1
            if argnum in sample.inexact and (sample is self.sample or not sample.origin):
                with Overlooking(), without_warnings():  # what a reference raises, other properties report
                    size = partial(_size_of_gradient, subject, sample, argnum)
                    found.append(subject.once(f"size of the gradient by {label}", sample, size))
        return max(size for size in found if math.isfinite(size))

    def is_known(self, argnum: int, grad_outputs: GradOutputs) -> bool:
        """True if the right gradient by an input is known in at least one element."""
        if not self.sample.flat[argnum].numel():
            return False
        if self.trusted(argnum, grad_outputs):
            return bool(self.through_reference(argnum, grad_outputs).isfinite().any())
        return self.numerical(argnum, grad_outputs).has_estimate

    def _agrees_along(self, argnum: int, grad_outputs: GradOutputs, found: Tensor) -> bool:
        """True if differences along random directions settle it, so that no element is moved alone."""
        with torch.no_grad():
            agrees = agrees_along(
                self.subject.plain(self.sample),
                self.sample.in_double(),
                argnum,
                grad_outputs.in_double(),
                found,
                generator=self.subject.generator(),
            )
        self._along[(argnum, grad_outputs.name)] = agrees
        return agrees

    def _passes_spot_check(self, argnum: int, grad_outputs: GradOutputs, found: Tensor) -> bool:
        """True if a few elements may stand for all, and confirm autograd; otherwise all are taken."""
        if not self.spot_checked:
            return False
        few = self._differences(argnum, grad_outputs, SPOT_CHECK)
        self._spot_checks[(argnum, grad_outputs.name)] = few
        return few.judge(found) is None

    def through_reference(self, argnum: int, grad_outputs: GradOutputs) -> Tensor:
        """Autograd's gradient through the reference by one input, in float64."""
        known = self._through_reference
        if grad_outputs.name not in known:
            known[grad_outputs.name] = self.by_reference(self.sample.in_double(), grad_outputs.in_double())
        return known[grad_outputs.name][self.argnums.index(argnum)]

    def gradient(self, argnum: int, grad_outputs: GradOutputs) -> Tensor:
        """The right gradient by one input, in float64; nan where it is unknown."""
        if not self.trusted(argnum, grad_outputs):
            return self.numerical(argnum, grad_outputs).known
        return self.through_reference(argnum, grad_outputs)


def _size_of_gradient(subject: Subject, sample: Sample, argnum: int) -> float:
    grads, plain = plain_grad_outputs(subject, sample).in_double(), subject.plain(sample)
    line = DirectionalFunction(plain, sample.in_double(), argnum, grads)
    (gradient,) = vjp_or_zeros(plain, sample.in_double(), (argnum,), grads)
    return max(largest_magnitude(gradient), float(line.weighed.abs().sum()) / line.usual)


def by_differences(
    subject: Subject, sample: Sample, flat: Sequence[Any], argnums: Sequence[int], grads: Grads
) -> list[Tensor | None]:
    """Gradients by finite differences, where nothing else is right; nan where they are unknown."""
    with torch.no_grad():
        elements = subject.effort.moved(sample.elements)
        return [_numerical(subject, sample, flat, argnum, grads, elements).known for argnum in argnums]


def _numerical(
    subject: Subject, sample: Sample, flat: Sequence[Any], argnum: int, grads: Grads, elements: int
) -> NumericalGradient:
    return numerical_gradient(
        subject.plain(sample), flat, argnum, grads, elements=elements, generator=subject.generator()
    )
