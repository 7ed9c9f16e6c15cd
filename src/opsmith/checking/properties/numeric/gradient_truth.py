"""Right gradients of a sample: autograd through the reference, confirmed by finite differences.

Either can be wrong alone. Autograd through the reference is exact, and blind to what the reference hides from
it. Finite differences see everything, to as many digits as they can tell, and nothing at a kink. So autograd
is believed where finite differences do not contradict it; where they do, they decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import has_gradient, vjp_or_zeros
from opsmith.checking.numerics.finite_differences import NumericalGradient, numerical_gradient
from opsmith.checking.samples.grad_outputs import GradOutputs
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject

Grads = Sequence[Tensor | None]

GLANCE = 8
"""How many elements a glance moves one at a time."""


@dataclass
class RightGradient:
    """The right gradients of one sample, each worked out when it is asked for.

    Args:
        subject: What is under check.
        sample: The sample.
        places: The inputs that are differentiated by.
        borne_out: Whether finite differences have borne out autograd through the reference on other samples,
            so that nothing is gained by taking them again, an element at a time, on a larger one.
        glanced: Whether a few elements and random directions stand for all, as long as these bear out
            autograd through the reference.
    """

    subject: Subject
    sample: Sample
    places: tuple[int, ...]
    borne_out: bool = False
    glanced: bool = False
    _numerical: dict[tuple[int, str], NumericalGradient] = field(default_factory=dict)
    _glances: dict[tuple[int, str], NumericalGradient] = field(default_factory=dict)
    _trusted: dict[tuple[int, str], bool] = field(default_factory=dict)

    @cached_property
    def recorded(self) -> bool:
        """True if autograd records the reference, and the reference is not the operator itself."""
        if self.subject.specification.opaque:
            return False
        with torch.enable_grad():
            flat = self.sample.at(torch.float64)
            for place in self.places:
                flat[place].requires_grad_()
            if not any(has_gradient(result) for result in self.subject.plain(self.sample)(flat)):
                return False
        return not self.subject.kind.own_forward or self._runs_under_autograd()

    def _runs_under_autograd(self) -> bool:
        """True if autograd passes through a forward that nobody wrote for it, and that may work in place."""
        with torch.no_grad():
            results = self.subject.plain(self.sample)(self.sample.at(torch.float64))
        grads = [torch.ones_like(result) if is_inexact(result) else None for result in results]
        try:
            self.by_reference(self.sample.at(torch.float64), grads)
        except RuntimeError as error:
            refuse_own(error)
            return False
        return True

    def by_reference(self, flat: Sequence[Any], grads: Grads) -> list[Tensor]:
        """Autograd's gradients through the reference, by every place; zeros where it has none."""
        return vjp_or_zeros(self.subject.plain(self.sample), flat, self.places, grads)

    def by_itself(self, flat: Sequence[Any], grads: Grads) -> list[Tensor]:
        """The operator's own gradients of contiguous ones: what those in other dtypes are held to."""
        plain = [None if grad is None else grad.contiguous() for grad in grads]
        return vjp_or_zeros(partial(self.subject.call, self.sample), flat, self.places, plain)

    def numerical(self, place: int, probe: GradOutputs) -> NumericalGradient:
        """Finite differences by one input, in float64."""
        key = (place, probe.name)
        if key not in self._numerical:
            self._numerical[key] = self._look(place, probe, self.subject.effort.moved(self.sample.elements))
        return self._numerical[key]

    def glance(self, place: int, probe: GradOutputs) -> NumericalGradient:
        """The same, of a few elements and along random directions where that has been enough."""
        key = (place, probe.name)
        known = key in self._glances and key not in self._numerical
        return self._glances[key] if known else self.numerical(place, probe)

    def _look(self, place: int, probe: GradOutputs, elements: int) -> NumericalGradient:
        with torch.no_grad():
            flat, grads = self.sample.at(torch.float64), probe.at(torch.float64, torch.device("cpu"))
            return _numerical(self.subject, self.sample, flat, place, grads, elements)

    def trusted(self, place: int, probe: GradOutputs) -> bool:
        """True if finite differences confirm autograd through the reference by an input."""
        if self.borne_out or not self.recorded:
            return self.borne_out
        key = (place, probe.name)
        if key not in self._trusted:
            found = self.through_reference(place, probe)
            self._trusted[key] = self._glanced(place, probe, found) or (
                self.numerical(place, probe).judge(found) is None
            )
        return self._trusted[key]

    def tells(self, place: int, probe: GradOutputs) -> bool:
        """True if the right gradient by an input is known in one element at least."""
        if not self.sample.flat[place].numel():
            return False
        if self.trusted(place, probe):
            return bool(self.through_reference(place, probe).isfinite().any())
        return self.numerical(place, probe).has_estimate

    def _glanced(self, place: int, probe: GradOutputs, found: Tensor) -> bool:
        """True if a few elements may stand for all, and confirm autograd; otherwise all are taken."""
        if not self.glanced:
            return False
        glance = self._look(place, probe, GLANCE)
        self._glances[(place, probe.name)] = glance
        return glance.judge(found) is None

    def through_reference(self, place: int, probe: GradOutputs) -> Tensor:
        """Autograd's gradient through the reference by one input, in float64."""
        grads = probe.at(torch.float64, torch.device("cpu"))
        return self.by_reference(self.sample.at(torch.float64), grads)[self.places.index(place)]

    def gradient(self, place: int, probe: GradOutputs) -> Tensor:
        """The right gradient by one input, in float64; nan where it is unknown."""
        if not self.trusted(place, probe):
            return self.numerical(place, probe).known
        return self.through_reference(place, probe)


def by_differences(
    subject: Subject, sample: Sample, flat: Sequence[Any], places: Sequence[int], grads: Grads
) -> list[Tensor | None]:
    """Gradients by finite differences, where nothing else is right; nan where they are unknown."""
    with torch.no_grad():
        elements = subject.effort.moved(sample.elements)
        return [_numerical(subject, sample, flat, place, grads, elements).known for place in places]


def _numerical(
    subject: Subject, sample: Sample, flat: Sequence[Any], place: int, grads: Grads, elements: int
) -> NumericalGradient:
    return numerical_gradient(
        subject.plain(sample),
        flat,
        place,
        grads,
        elements=elements,
        generator=subject.generator(),
    )
