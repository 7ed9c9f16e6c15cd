"""The cache of calls with one signature: for one specification, and of limited size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import opsmith
from opsmith.kernels.common import call_cache
from opsmith.kernels.common.call_cache import CallCache, call_signature, is_symbolic


@opsmith.operator("memory::same")
def same(x: Tensor) -> Tensor:
    return x.clone()


SPECIFICATION = same.specification


def test_it_is_found_once_for_a_specification() -> None:
    remembered: CallCache[str] = CallCache()
    assert remembered.get(SPECIFICATION, 1) is None
    assert remembered.obtain(SPECIFICATION, 1, lambda: "first") == "first"
    assert remembered.obtain(SPECIFICATION, 1, lambda: "second") == "first"
    other = replace(SPECIFICATION)
    assert remembered.get(other, 1) is None
    assert remembered.obtain(other, 1, lambda: "third") == "third"
    assert remembered.get(SPECIFICATION, 1) is None


def test_it_forgets_all_before_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_SIGNATURES", 2)
    remembered: CallCache[int] = CallCache()
    for number in range(3):
        remembered.obtain(SPECIFICATION, number, lambda number=number: number)  # type: ignore[misc]
    assert [remembered.get(SPECIFICATION, number) for number in range(3)] == [None, None, 2]


@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(4, 2)[:, 0], torch.ones(4).double(), torch.ones(4, device="meta"), 1.0],
    ids=["size", "stride", "dtype", "device", "kind"],
)
def test_forms_that_are_not_one(other: Any) -> None:
    assert call_signature([torch.ones(4)]) == call_signature([torch.zeros(4)])
    assert call_signature([torch.ones(4)]) != call_signature([other])
    assert call_signature([[torch.ones(4)]]) != call_signature([[other]])


def test_a_negated_view_is_of_another_form() -> None:
    imaginary = torch.ones(4, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    assert call_signature([imaginary]) != call_signature([torch.ones(4, 2)[:, 0]])


def test_symbols_of_a_compiler_are_seen_in_sizes_lists_and_numbers() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = mode.from_tensor(torch.ones(4, 3), static_shapes=False)
    shaped = [symbolic, torch.ones(4, 3), symbolic.shape[0], symbolic.shape[0] * 0.5, symbolic.shape[0] > 2]
    assert [is_symbolic(call_signature([[1.0, each]])) for each in shaped] == [True, False, True, True, True]
    assert not mode.shape_env.guards  # the question decides nothing
    plain = [
        None,
        1,
        True,
        0.5,
        2j,
        "text",
        torch.float32,
        torch.device("cpu"),
        torch.strided,
        [torch.ones(2), None],
    ]
    assert not is_symbolic(call_signature(plain))
