"""Forward mode from the same formulas: a Jacobian-vector product is the derivative of the vector-Jacobian
product by its vector (J. Townsend, "A new trick for calculating Jacobian vector products", 2017).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.core.calls import tensors_in
from opsmith.torch_library.differentiation import constant_results
from opsmith.torch_library.pullback import pull_back
from opsmith.torch_library.targets import Forms, Target


def jvp_from_vjp(
    target: Target, every: Mapping[str, Any], tangents: Sequence[Tensor | None], wanted: Sequence[int]
) -> tuple[Tensor | None, ...]:
    """Tangents of the flat results: the vector-Jacobian product, differentiated by its vector.

    Args:
        target: The operator.
        every: All arguments and results by name, without tangents.
        tangents: Tangent of each flat argument, or None.
        wanted: Places of the flat results whose tangents are asked for.
    """
    schema = target.specification.schema
    flat = target.flattening.flatten([every[name] for name in schema.names])
    results = target.results.flatten([every[name] for name in schema.result_position])
    needs = [tangent is not None for tangent in tangents]
    plan = target.plan(target.flattening.needed(needs))
    vjp = target.vjp(plan, Forms.of(flat, results, needs), None)
    constant = {
        id(result) for result in constant_results(target.results, target.specification, plan, results)
    }
    moving = [
        place for place in sorted(wanted) if results[place] is not None and id(results[place]) not in constant
    ]

    answered: list[int] = []

    def products(*vectors: Tensor) -> tuple[Tensor, ...]:
        grads: list[Tensor | None] = [None] * len(results)
        for place, vector in zip(moving, vectors, strict=True):
            grads[place] = vector
        found = {place: product for place, product in enumerate(vjp(every, grads)) if product is not None}
        answered[:] = found
        return tuple(found.values())

    if not moving or not any(needs):
        return (None,) * len(results)
    vectors = [torch.zeros_like(results[place]) for place in moving]
    _, pull = pull_back(products, vectors, tensors_in(list(every.values())))
    answers = pull([tangents[place] for place in answered])
    found = dict(zip(moving, answers, strict=True))
    return tuple(found.get(place) for place in range(len(results)))
