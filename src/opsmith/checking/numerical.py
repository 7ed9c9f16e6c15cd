"""torch's own gradcheck on a sample, by each input alone and by all together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from opsmith.checking.sample import Sample, is_inexact
from opsmith.checking.subject import Subject
from opsmith.core.calls import tensors_in


def on_inputs(subject: Subject, sample: Sample, flat: Sequence[Any], places: Sequence[int]) -> Any:
    """The operator as a function of some of its inputs alone, which returns what can have a gradient."""

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        results = zip(subject.call(sample, values), subject.results(sample), strict=True)
        return tuple(
            result for result, described in results if described.differentiable and is_inexact(result)
        )

    return function


def numerical_fault(
    check: Callable[..., bool],
    subject: Subject,
    sample: Sample,
    places: Sequence[int],
    device: torch.device,
    wrap: Callable[[Any], Any] = lambda function: function,
    **options: Any,
) -> str | None:
    """What gradcheck, or gradgradcheck, says against a sample in float64; None where it agrees.

    That is the first line: after it come matrices, cut short, which do not tell which element is wrong.

    Args:
        check: `torch.autograd.gradcheck` or `gradgradcheck`, with torch's own tolerances.
        subject: What is under check.
        sample: The sample.
        places: The inputs to differentiate by.
        device: Where to run.
        wrap: Makes of the operator, as a function of these inputs, the function to check.
        **options: For `check`.
    """
    flat = sample.at(torch.float64, device)
    inputs = tuple(_apart(flat[place]).requires_grad_() for place in places)
    try:
        with torch.random.fork_rng(), quiet():
            torch.manual_seed(subject.seed)
            steps = SINGLE_STEPS if subject.single_precision else {}
            check(wrap(on_inputs(subject, sample, flat, places)), inputs, **steps, **options)
    except GradcheckError as error:
        return str(error).strip().splitlines()[0].rstrip(",:")
    return None


_ROUNDING = torch.finfo(torch.float32).eps
SINGLE_STEPS = {
    "eps": (3 * _ROUNDING) ** (1 / 3),
    "atol": 64 * _ROUNDING ** (2 / 3),
    "rtol": 64 * _ROUNDING ** (2 / 3),
}
"""For what computes in float32: the step at which rounding and curvature weigh alike, and what both leave
(W. H. Press and others, Numerical Recipes, section 5.7), with room for curvatures up to 64."""


@contextmanager
def quiet() -> Iterator[None]:
    """A region without warnings: torch's checkers warn of what they then raise, and of their own insides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SLOW_LIMIT = 2**20
"""Largest Jacobian, in elements, that gradcheck's slow mode builds here; beyond, its fast mode runs alone."""


def too_large(subject: Subject, sample: Sample, places: Sequence[int]) -> bool:
    """Whether a sample's Jacobian is larger than what slow mode should build."""
    with torch.no_grad():
        results = subject.call(sample, sample.at(torch.float64))
    inputs = sum(int(sample.flat[place].numel()) for place in places)
    outputs = sum(result.numel() for result in tensors_in(list(results)))
    return inputs * outputs > SLOW_LIMIT


def large_note(sample: Sample) -> str:
    """What a report says of a sample that is too large for slow mode."""
    return f"sample {sample.position} is too large for gradcheck's slow mode; its fast mode ran"


def _apart(tensor: Tensor) -> Tensor:
    """A tensor whose elements lie apart: gradcheck moves one at a time."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.contiguous() if tensor.numel() > reach else tensor


# How gradcheck says that something else than a number is wrong, and the cause that it then is.
_OTHER_FAULTS = {
    "not reentrant": "nondeterministic",
    "undefined output grads": "raises",
    "when all output grads are undefined": "raises",
    "not multiplied by grad_output": "ignores-grad-output",
    "expected to be zero": "missing-gradient",
}


def cause_of(text: str) -> str | None:
    """The cause that gradcheck names; None where it is about numbers."""
    return next((cause for words, cause in _OTHER_FAULTS.items() if words in text), None)
