"""The script in a failure fails for the operator that is wrong, and for no other."""

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import wrong_gradients
import wrong_results
from mutants import WRONG, linear, square
from torch import Tensor

import opsmith
from opsmith.checking.output.literals import drawn, writable, written

__all__ = ["wrong_gradients", "wrong_results"]


def scripts(operator: Any, samples: Any = None, only: Any = ("forward", "gradient")) -> list[str]:
    report = opsmith.check(operator, samples=samples, only=only, effort="quick")
    assert report.failures
    found = [failure.replay for failure in report.failures if failure.replay]
    assert found
    return found


def right_linear() -> Any:
    return linear("replayed_right_linear")


def right_square() -> Any:
    return square("replayed_right_square")


def right_product() -> Any:
    @opsmith.operator("replayed::right_product")
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    return multiply


def right_pair() -> Any:
    @opsmith.operator("replayed::right_pair", results=("y", "z"))
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * x

    return both


TWINS: dict[str, Callable[[], Any]] = {
    "sign": right_linear,
    "transposed": right_linear,
    "zeros": right_linear,
    "mean_over_the_batch": right_linear,
    "first_row_for_the_batch": right_linear,
    "factor_two": right_square,
    "declared_zero": right_square,
    "ignores_grad": right_square,
    "not_conjugated": right_product,
    "forgets_a_result": right_pair,
}
"""Wrong operators, each with one that is right and takes the same arguments."""


@pytest.mark.every(6)
@pytest.mark.parametrize("name", TWINS)
def test_a_script_fails_for_the_wrong_operator_and_passes_for_the_right_one(name: str) -> None:
    for script in scripts(WRONG[name].operator):
        with pytest.raises((AssertionError, RuntimeError)):
            exec(script, {})
        body = [line for line in script.splitlines() if not line.startswith("operator = ")]
        assert len(body) < len(script.splitlines())
        exec("\n".join(body), {"operator": TWINS[name]()})


def test_a_script_is_a_few_lines_that_a_person_would_write() -> None:
    (script,) = scripts(WRONG["factor_two"].operator)
    lines = script.splitlines()
    assert lines[0] == "import torch, opsmith"
    assert lines[2].startswith('operator = opsmith.find_operator("wrong::factor_two"')
    assert lines[-3:] == [
        "got = torch.autograd.grad(operator(x=x), x, grad, allow_unused=True)[0]",
        "expected = torch.autograd.grad(operator.reference(x=x), x, grad, allow_unused=True)[0]",
        "torch.testing.assert_close(got, expected)",
    ]
    assert len(lines) <= 9


def test_a_result_that_is_wrong_without_a_kernel_has_a_script() -> None:
    calls: list[int] = []

    @opsmith.operator("replay::drifting", opaque=True)
    def drifting(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    for script in scripts(drifting, [(torch.ones(2),)], only=["forward"]):
        assert script.splitlines()[-2:] == [
            "got = operator(x=x)",
            "torch.testing.assert_close(got, expected)",
        ]
        with pytest.raises(AssertionError):
            exec(script, {})


class Colour(enum.Enum):
    RED = 1


@pytest.mark.slow
def test_a_call_with_lists_dtypes_and_nothing_is_written_as_code() -> None:
    @opsmith.operator("replay::stacked")
    def stacked(
        xs: list[torch.Tensor],
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        colour: Colour = Colour.RED,
    ) -> torch.Tensor:
        return torch.stack(xs).sum(0) * weight + 0.0 * torch.zeros((), dtype=dtype).to(weight.dtype)

    stacked.gradients(
        weight=lambda grad, xs: -grad * torch.stack(xs).sum(0), xs=lambda grad, xs, weight: [grad] * len(xs)
    )
    sample: Any = ([torch.rand(2, 3).mT, torch.rand(3, 2)], torch.rand(3, 1).expand(3, 2))
    for script in scripts(stacked, [sample], only=["gradient"]):
        for line in ("xs = [torch.tensor(", "bias = None", "dtype = torch.float64", "colour = Colour.RED"):
            assert line in script
        assert "from test_replay import Colour" in script
        with pytest.raises(AssertionError):
            exec(script, {})


@pytest.mark.slow
def test_a_large_sample_is_drawn_and_what_cannot_be_is_checked_again() -> None:
    (script,) = scripts(WRONG["one_element_of_many"].operator, only=["gradient"])
    assert "torch.manual_seed(0)" in script
    assert "x = (torch.rand(12, 12, dtype=torch.float64) * " in script
    with pytest.raises(AssertionError):
        exec(script, {})

    @opsmith.operator("replay::one_place")
    def one_place(x: Tensor) -> Tensor:
        return x * 2

    one_place.samples(lambda: [(torch.arange(100.0),)])
    one_place.gradients(x=lambda grad: torch.where(torch.arange(len(grad)) == 77, 3 * grad, 2 * grad))
    one_place.kernel("cpu", lambda x: torch.where(x == 41.0, x * 3, x * 2))
    (script,) = [each for each in scripts(one_place, only=["forward"]) if "check(" in each]
    assert 'report = opsmith.check(operator, only=["forward"], seed=0, effort="quick")' in script
    with pytest.raises(AssertionError, match="one_place: FAILED: forward"):
        exec(script, {})


def test_a_random_operator_is_seeded_before_each_call() -> None:
    @opsmith.operator("replay::noisy", random=True)
    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    noisy.samples(lambda make: [(make(4),)])
    noisy.gradients(x=lambda grad, x, result: -grad * result / x)
    for script in scripts(noisy, only=["gradient"]):
        assert script.count("torch.manual_seed(0)") >= 1
        with pytest.raises(AssertionError):
            exec(script, {})


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return -grad * ctx.by, None


class Scaled(Negated):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.by, None


def test_a_class_is_imported_and_called_by_apply() -> None:
    (script,) = scripts(Negated, [(torch.rand(3), 2.0)], only=["gradient"])
    assert "from test_replay import Negated" in script
    assert "Negated.apply(x, by)" in script
    with pytest.raises(AssertionError):
        exec(script, {})
    exec(script.replace("import Negated", "import Scaled as Negated"), {})


def test_a_class_that_cannot_be_imported_is_named_with_its_place() -> None:
    class Local(Negated):
        pass

    (script,) = scripts(Local, [(torch.rand(3), 2.0)], only=["gradient"])
    assert "# with Local as it is at " in script
    with pytest.raises(AssertionError):
        exec(script, {"Local": Local})
    exec(script, {"Local": Scaled})


def test_a_library_operator_is_called_by_torch_ops() -> None:
    @torch.library.custom_op("replay::thrice", mutates_args=())
    def thrice(x: Tensor) -> Tensor:
        return 3 * x

    thrice.register_autograd(lambda ctx, grad: -3 * grad)
    (script,) = scripts(thrice, [(torch.rand(3),)], only=["gradient"])
    assert "torch.ops.replay.thrice(x)" in script
    with pytest.raises(AssertionError):
        exec(script, {})


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(2, 3).mT,
        torch.rand(2, 3, 4).permute(2, 0, 1),
        torch.rand(2, 1).expand(2, 3),
        torch.rand(8)[::2],
        torch.empty(0, 2),
        torch.tensor([torch.nan, -torch.inf, 1.0]),
        torch.tensor([True, False]),
        torch.complex(torch.rand(2), torch.rand(2)),
        torch.complex(torch.rand(2), torch.rand(2)).conj(),
        torch.tensor(3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.rand(3).to(torch.bfloat16),
    ],
    ids=range(12),
)
def test_a_tensor_is_written_with_its_numbers_strides_and_dtype(value: Tensor) -> None:
    assert writable(value)
    back = eval(written(value), {"torch": torch})
    assert torch.equal(back.isnan(), value.isnan())
    assert torch.equal(back.nan_to_num(), value.resolve_conj().nan_to_num())
    assert (back.dtype, back.stride()) == (value.dtype, value.stride())


@pytest.mark.parametrize(
    "value",
    [torch.rand(9, 9) - 4, torch.randint(3, 7, (50,)), torch.rand(70) < 0.5, torch.rand(70).to(torch.cfloat)],
    ids=["floating", "whole", "truths", "complex"],
)
def test_a_large_tensor_is_drawn_in_its_range(value: Tensor) -> None:
    code = drawn(value)
    assert code is not None
    made = eval(code, {"torch": torch})
    assert (made.shape, made.dtype) == (value.shape, value.dtype)
    if not value.is_complex():
        assert float(made.min()) >= float(value.min()) - 0.01
        assert float(made.max()) <= float(value.max()) + 0.01


def test_a_generator_is_written_by_its_seed() -> None:
    generator = torch.Generator().manual_seed(7)
    back = eval(written(generator), {"torch": torch})
    assert torch.equal(torch.rand(3, generator=back), torch.rand(3, generator=generator))
