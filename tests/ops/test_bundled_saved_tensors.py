"""Tensors that the bundled operators save: exactly those that the needed formulas name."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.ops import add, exp, involution, linear, mul

LINEAR = {"x": (4, 3), "weight": (2, 3), "bias": (2,)}
INVOLUTION = {"input": (2, 4, 5, 5), "weight": (2, 2, 3, 3, 3, 3)}
PAIR = {"x": (3, 5), "y": (3, 5)}

# For each input the tensors that its gradient is computed from.
NEEDS = {
    exp: {"x": {"result"}},
    mul: {"x": {"y"}, "y": {"x"}},
    add: {"x": set(), "y": set()},
    linear: {"x": {"weight"}, "weight": {"x"}, "bias": set()},
    involution: {"input": {"weight"}, "weight": {"input"}},
}
SHAPES = {exp: {"x": (3, 5)}, mul: PAIR, add: PAIR, linear: LINEAR, involution: INVOLUTION}


def matrix() -> list[Any]:
    return [
        pytest.param(operator, subset, id=f"{operator.specification.short_name}-{'+'.join(subset) or 'none'}")
        for operator, shapes in SHAPES.items()
        for subset in chain.from_iterable(combinations(shapes, n) for n in range(len(shapes) + 1))
    ]


@pytest.mark.parametrize(("operator", "subset"), matrix())
def test_saved(operator: opsmith.Operator[..., Any], subset: tuple[str, ...]) -> None:
    tensors = {
        name: torch.rand(shape, requires_grad=name in subset) for name, shape in SHAPES[operator].items()
    }
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = operator(*tensors.values())
    names = {tensor.data_ptr(): name for name, tensor in {**tensors, "result": result}.items()}
    assert sorted(names[tensor.data_ptr()] for tensor in saved) == sorted(
        set[str]().union(*(NEEDS[operator][name] for name in subset))
    )
