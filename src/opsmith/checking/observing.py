"""A wrong gradient as the diagnosis looks at it: with its inputs, and with a way to see it on fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis import Observation, Observer
from opsmith.checking.numerical_gradient import numerical_gradient
from opsmith.checking.right_gradient import Grads, RightGradient
from opsmith.checking.sample import Sample

if TYPE_CHECKING:
    from opsmith.checking.attempts import Attempt


def observe(right: RightGradient, attempt: Attempt) -> Observation:
    """What is known of a wrong gradient.

    Args:
        right: The right gradients of its sample.
        attempt: The backward that it came from.
    """
    assert attempt.expected is not None
    subject, sample, probe = right.subject, right.sample, attempt.probe

    def numerically(
        other: Sample, flat: Sequence[Any], places: Sequence[int], grads: Grads
    ) -> list[Tensor | None]:
        return [
            numerical_gradient(
                subject.plain(other),
                flat,
                place,
                grads,
                elements=subject.effort.elements,
                generator=subject.generator(),
            ).values
            for place in places
        ]

    trusted = right.trusted(attempt.place, probe)
    observer = Observer(
        subject,
        sample,
        attempt.place,
        attempt.subset,
        None if trusted else numerically,
        dtype=attempt.dtype,
        device=attempt.device,
    )
    cpu = torch.device("cpu")
    seen = observer.observe(sample.at(torch.float64), probe.at(torch.float64, cpu))
    got, expected = attempt.got, attempt.expected
    if got is not None and got.shape == expected.shape:  # at a kink, either side is right
        kinks = right.numerical(attempt.place, probe).kinks & got.cpu().isfinite()
        got = torch.where(kinks, expected.to(got.dtype), got.cpu())
    return replace(seen, got=got, expected=expected)
