"""Fresh inputs: others than the sample's, and such as the operator takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diagnosed import diagnosed, observation, operator, random
from torch import Tensor

import opsmith
from opsmith.checking.diagnosis import Observer, diagnose
from opsmith.checking.diagnosis.observation import Evidence
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.perturb import METHODS, draw_fresh
from opsmith.checking.subject_kinds import subject_of
from opsmith.judging.compare import largest_magnitude


def fresh(value: object, way: str = "mixed", seed: int = 0) -> object:
    (drawn,) = draw_fresh([value], torch.Generator().manual_seed(seed), way)
    return drawn


@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize(
    "value",
    [
        random(3, 4),
        random(3, 4).abs() + 0.1,
        torch.softmax(random(3, 4), -1),
        random(3, 4).expand(2, 3, 4),
        random(8)[::2],
        random(3, dtype=torch.complex128),
        torch.tensor(0.3, dtype=torch.float64),
        torch.zeros(0, 3),
    ],
    ids=["normal", "positive", "probabilities", "expanded", "sliced", "complex", "one", "empty"],
)
def test_fresh_numbers_keep_their_form_and_their_range(value: Tensor, way: str) -> None:
    drawn = fresh(value, way)
    assert isinstance(drawn, Tensor)
    assert (drawn.shape, drawn.dtype, drawn.stride()) == (value.shape, value.dtype, value.stride())
    if value.numel():
        assert not torch.equal(drawn, value)
        sizes = drawn.abs()
        assert float(sizes.max()) <= 1.5 * float(value.abs().max())
    if value.numel() and not value.is_complex() and bool((value > 0).all()):
        assert bool((drawn > 0).all())


@pytest.mark.parametrize(
    "value",
    [torch.tensor([2, 0, 1, 1]), torch.tensor([True, False, False]), torch.tensor([0.0, 1.0, 1.0, 0.0])],
)
def test_indices_and_masks_keep_their_values(value: Tensor) -> None:
    drawn = fresh(value)
    assert isinstance(drawn, Tensor)
    assert torch.equal(drawn.sort().values, value.sort().values)


def test_offsets_and_plain_values_stay() -> None:
    offsets = torch.tensor([0, 3, 5, 9])
    assert torch.equal(fresh(offsets), offsets)  # type: ignore[arg-type]
    assert (fresh(3), fresh("sum"), fresh(True), fresh(None)) == (3, "sum", True, None)
    assert fresh(2.0) != 2.0
    assert fresh(2.0) == pytest.approx(2.0, rel=0.05)


def test_zeros_stay_zero_and_move() -> None:
    value = torch.tensor([0.0, 0.5, -1.5, 2.5, 0.0, 3.5])
    drawn = fresh(value)
    assert isinstance(drawn, Tensor)
    assert int((drawn == 0).sum()) == 2


def cholesky(matrix: Tensor) -> Tensor:
    return torch.linalg.cholesky(matrix)


def relu(x: Tensor) -> Tensor:
    return x.clamp_min(0)


def square(x: Tensor) -> Tensor:
    return x * x


def test_an_operator_that_takes_few_inputs_is_given_such() -> None:
    a = random(3, 3)
    declared = operator(cholesky, [(a @ a.mT + torch.eye(3, dtype=torch.float64),)])
    seen = Evidence(observation(declared, "matrix"))
    assert len(seen.fresh) == seen.fresh_count
    for pair in seen.fresh:
        matrix = pair.inputs["matrix"]
        assert bool(torch.linalg.eigvalsh(matrix).min() > 0)


def test_the_same_seed_draws_the_same() -> None:
    declared = operator(square, [(random(3, 4),)])
    one, other = (Evidence(observation(declared, "x")).fresh[0] for _ in range(2))
    assert torch.equal(one.expected, other.expected)


def test_other_sizes_are_derived_from_the_samples() -> None:
    seen = Evidence(observation(operator(square, [(random(3, 4),), (random(5, 7),)]), "x"))
    shapes = {tuple(pair.expected.shape) for pair in seen.other_sizes}
    assert (5, 7) in shapes
    assert len(shapes) == len(seen.other_sizes) > 2


def test_either_side_of_a_kink_is_right_on_fresh_inputs_as_well() -> None:
    x = torch.tensor([[0.0, 0.5, -1.5, 2.5], [0.0, -0.7, 1.3, 0.0]], dtype=torch.float64)
    found = diagnosed(relu, [(x,)], "x", x=lambda grad, x: -grad * (x > 0))
    assert found.cause == "sign", found


def unit(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def test_a_gradient_that_nearly_vanishes_has_no_kink() -> None:
    """grad_output is the input, along which a unit vector does not change: its gradient is rounding."""
    declared = operator(unit, [(random(3, 4),)], x=lambda grad, x: grad / x.norm(dim=-1, keepdim=True))
    subject = subject_of(declared, None, 0, EFFORTS["default"])
    flat = subject.samples[0].at(torch.float64)
    seen = Observer(subject, subject.samples[0], by=(0,)).observe(flat, flat)
    assert largest_magnitude(seen.expected) < 1e-12
    assert diagnose(seen).cause == "missing-term"


def test_what_comes_in_is_not_what_the_samples_were_drawn_from() -> None:
    for seed in (0, 1, 2):
        declared = opsmith.operator(f"fresh::drawn_{seed}")(square)

        @declared.samples
        def drawn(make: Any) -> Any:
            yield (make(4, 5),)

        subject = subject_of(declared, None, seed, EFFORTS["quick"])
        flat = subject.samples[0].at(torch.float64)
        torch.manual_seed(seed)
        for grads in (torch.randn(4, 5, dtype=torch.float64), flat[0]):
            for stream in (0, 1, 2):
                drawn_now = torch.randn(4, 5, generator=subject.generator(stream), dtype=torch.float64)
                assert not bool(torch.isin(drawn_now, grads).any())
