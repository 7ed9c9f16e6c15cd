"""The call that a page shows: the first of an operator's samples."""

from __future__ import annotations

from typing import Any

import torch

from opsmith import errors
from opsmith.core.calls import Call
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of


def first_call(operator: Operator[..., Any]) -> Call:
    """The first sample, its floating tensors in float32.

    Raises:
        MissingSamplesError: If there is none.
        SampleError: If it does not fit.
    """
    specification = operator.specification
    calls = (
        samples_of(specification.samples, Make(torch.float32), specification.schema, specification.name)
        if specification.samples is not None
        else []
    )
    if not calls:
        raise errors.MissingSamplesError(
            "there is no sample to call it with",
            operator=specification.name,
            where=specification.where,
            hint=f"write `@{specification.short_name}.samples` over a function of `make` that yields tuples "
            "of arguments",
        )
    return calls[0]
