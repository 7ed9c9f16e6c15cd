"""`opsmith.emulate` takes, refuses and returns what a call of the operator does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.ops import add_rms_norm_, rms_norm, rope_, rope_table


@opsmith.operator("emulated_calls::doubled_", mutates=["x"])
def doubled_(x: Tensor) -> None:
    x.mul_(2)


DOUBLED = """
__global__ void doubled_(View<float, 2> x) {
  OPSMITH_EACH(i, x.numel()) x(i / x.size(1), i % x.size(1)) *= 2;
}
"""
doubled_.kernel("cuda", cuda=DOUBLED, grid=1, block=32)


def test_what_a_call_refuses_is_refused() -> None:
    x, weight = torch.randn(2, 4), torch.ones(4)
    calls: list[tuple[Any, tuple[Tensor, ...], str]] = [
        (add_rms_norm_, (x, x, weight), "the written `x` shares elements with `residual`"),
        (
            add_rms_norm_,
            (x[:1].expand(2, 4), torch.ones(2, 4), weight),
            "several elements of `x` share the same memory",
        ),
        (rms_norm, (x, torch.ones(5)), ""),
        (rms_norm, (x.to_sparse(), weight), "it takes only strided dense tensors"),
        (doubled_, (torch.randn(3, dtype=torch.complex64).conj().imag,), "`x` is a negated view"),
    ]
    for operator, arguments, problem in calls:
        with pytest.raises(errors.OpsmithError) as called:
            operator(*arguments)
        with pytest.raises(type(called.value)) as emulated:
            opsmith.emulate(operator, *arguments)
        assert str(emulated.value) == str(called.value)
        assert emulated.value.problem.startswith(problem)


def test_results_are_those_that_a_call_returns() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    torch.testing.assert_close(opsmith.emulate(rms_norm, x, weight), rms_norm(x, weight))
    rows, table, positions = torch.randn(2, 1, 4), rope_table(3, 4), torch.tensor([0, 2])
    expected = rope_(rows.clone(), table, positions)
    assert opsmith.emulate(rope_, rows, table, positions) is rows
    torch.testing.assert_close(rows, expected)
    assert opsmith.emulate(doubled_, x) is None
