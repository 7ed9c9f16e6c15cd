"""The script in a failure shows the failure again."""

from typing import Any

import pytest
import torch
import wrong_gradients
import wrong_results
from mutants import WRONG

import opsmith

__all__ = ["wrong_gradients", "wrong_results"]


def scripts(name: str) -> list[str]:
    report = opsmith.check(WRONG[name].operator, only=["forward", "gradient"])
    return [failure.replay for failure in report.failures if failure.replay]


@pytest.mark.parametrize(
    ("name", "raises"),
    [
        ("sign", AssertionError),
        ("transposed", AssertionError),
        ("zeros", AssertionError),
        ("as_strided", RuntimeError),
        ("view_of_grad", RuntimeError),
        ("not_conjugated", AssertionError),
        ("nan_at_zero", AssertionError),
    ],
)
def test_a_script_fails_as_the_check_did(name: str, raises: type[Exception]) -> None:
    (script,) = scripts(name)
    with pytest.raises(raises):
        exec(script, {})


def test_a_result_that_is_wrong_without_a_kernel_has_a_script() -> None:
    calls: list[int] = []

    @opsmith.operator("replay::drifting", opaque=True)
    def drifting(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    report = opsmith.check(drifting, samples=[(torch.ones(2),)], only=["forward"])
    script = report.failures[0].replay
    assert script is not None
    assert script.splitlines()[-1] == "torch.testing.assert_close(operator(x=x), operator.reference(x=x))"
    with pytest.raises(AssertionError):
        exec(script, {})


def test_a_call_with_lists_dtypes_and_nothing_is_written_as_code() -> None:
    @opsmith.operator("replay::stacked")
    def stacked(
        xs: list[torch.Tensor],
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        return torch.stack(xs).sum(0) * weight + 0.0 * torch.zeros((), dtype=dtype).to(weight.dtype)

    stacked.gradients(weight=lambda grad, xs: -grad * torch.stack(xs).sum(0))
    sample: Any = ([torch.rand(2, 3).mT, torch.rand(3, 2)], torch.rand(3, 1).expand(3, 2))
    (failure,) = opsmith.check(stacked, samples=[sample], only=["gradient"]).failures
    assert failure.replay is not None
    for line in ("xs = [torch.empty_strided([3, 2], [1, 3]", "bias = None", "dtype = torch.float64"):
        assert line in failure.replay
    with pytest.raises(AssertionError):
        exec(failure.replay, {})


def test_a_large_sample_has_no_script() -> None:
    assert scripts("one_element_of_many") == []
