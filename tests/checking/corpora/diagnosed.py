"""Diagnoses of operators that are wrong on purpose, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith.checking.diagnosis import Diagnosis, Observation, diagnose
from opsmith.checking.diagnosis.observation import Observer
from opsmith.checking.effort import EFFORTS
from opsmith.checking.subject_kinds import subject_of
from opsmith.judging.tensors import is_inexact

_numbers = itertools.count()


def random(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operator(
    reference: Callable[..., Any], samples: Iterable[tuple[Any, ...]], results: Any = None, **formulas: Any
) -> Any:
    name = f"diagnosed::{reference.__name__}_{next(_numbers)}"
    declared = opsmith.operator(name, results=results)(reference)
    given = list(samples)
    declared.samples(lambda make: given)
    return declared.gradients(**formulas)


def observation(declared: Any, about: str, position: int = 0) -> Observation:
    """Observe a gradient on one of the samples, as the check does."""
    subject = subject_of(declared, None, 0, EFFORTS["default"])
    sample = subject.samples[position]
    place = sample.labels.index(about)
    flat = sample.at(torch.float64)
    generator = torch.Generator().manual_seed(9)
    grads = [
        torch.randn(result.shape, generator=generator, dtype=result.dtype) if is_inexact(result) else None
        for result in subject.plain(sample)(flat)
    ]
    return Observer(subject, sample, by=(place,), argnum=place).observe(flat, grads)


def diagnosed(
    reference: Callable[..., Any],
    samples: Iterable[tuple[Any, ...]],
    about: str,
    results: Any = None,
    **formulas: Any,
) -> Diagnosis:
    return diagnose(observation(operator(reference, samples, results, **formulas), about))
