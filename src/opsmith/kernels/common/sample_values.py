"""Argument values of an operator's samples, to compile and run kernels without calls by the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of

SampleValues = Callable[[torch.dtype], Iterable[list[Any]]]
"""Argument values of each sample, with floating-point tensors in a dtype."""


def sample_values(operator: Operator[..., Any], dtype: torch.dtype) -> Iterator[list[Any]]:
    """Yield the argument values of each sample of an operator, with floating-point tensors in a dtype."""
    specification = operator.specification
    if specification.samples is not None:
        schema = specification.schema
        for call in samples_of(specification.samples, Make(dtype), schema, specification.name):
            yield schema.call_values(call.args, call.kwargs)
