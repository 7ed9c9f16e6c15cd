"""The module forms of the bundled operators."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from opsmith import Operator, ops
from opsmith.modules import OperatorModule

CLASSES = {name: kind for name in ops.__all__ if isinstance(kind := getattr(ops, name), type)}
MODULES = {name: kind for name, kind in CLASSES.items() if issubclass(kind, OperatorModule)}


def test_which_operators_have_one() -> None:
    """All but involution, whose weight is computed, attention, and what writes into its arguments."""
    operators = {name: each for name in ops.__all__ if isinstance(each := getattr(ops, name), Operator)}
    assert CLASSES.keys() - MODULES.keys() == {"Involution2d"}
    pure = {name for name, each in operators.items() if not each.specification.schema.written}
    without = {"involution", "paged_attention"}
    assert {kind.operator.name.partition("::")[2] for kind in MODULES.values()} == pure - without


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("Linear", "RMSNorm")])
def test_without_parameters(name: str) -> None:
    layer: Any = MODULES[name]()
    tensors = [torch.tensor([0.5, 1.0]), torch.tensor([[2.0], [3.0]])][: 1 if name == "Exp" else 2]
    assert_close(layer(*tensors), layer.operator.reference(*tensors))
    assert list(layer.parameters()) == []
    assert repr(pickle.loads(pickle.dumps(layer))) == f"{name}()"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_linear_as_in_torch(bias: bool, dtype: torch.dtype) -> None:
    mine, theirs = ops.Linear(3, 2, bias, dtype=dtype), nn.Linear(3, 2, bias, dtype=dtype)
    theirs.load_state_dict(mine.state_dict())
    assert repr(mine) == repr(theirs)
    x = torch.randn(2, 4, 3, dtype=dtype)
    assert_close(mine(x), theirs(x))
    assert all(each.abs().max() <= 0.15 for each in mine.parameters())  # complex numbers: in both parts
