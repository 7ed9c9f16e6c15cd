"""Samples from `shapes=`: check, benchmark and page need no others where shapes and types say enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import Make, errors
from opsmith.benchmarking.sizes import samples_of_operator
from opsmith.core.shape_samples import samples_for


def scaled(x: Tensor, weight: Tensor, bias: Tensor | None, mode: Literal["up", "down"]) -> Tensor:
    y = x @ weight.mT
    y = y if bias is None else y + bias
    return y if mode == "up" else -y


def logarithm(x: Tensor) -> Tensor:
    return x.log()


def halves(x: Tensor, size: int) -> Tensor:
    return x.unfold(-1, size, 1).sum(-1)


def in_groups(x: Tensor, flag: bool) -> Tensor:
    if x.shape[-1] % 4:
        raise ValueError("not in groups")
    return x.unflatten(-1, (4, -1)).sum(-1)


def taken(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def powered(x: Tensor, exponent: float) -> Tensor:
    return x**exponent


ENOUGH: dict[str, tuple[Any, str]] = {
    "linear": (scaled, "x: ... M, weight: N M, bias: N -> ... N"),
    "positive": (logarithm, "x: B N -> B N"),
    "integer": (halves, "x: B N -> B N-size+1"),
    "divided": (in_groups, "x: B N -> B 4"),
}
RAISES = "on samples made from `shapes=` the reference raises an error, or has no finite results"
NOT_ENOUGH: dict[str, tuple[Any, str, str]] = {
    "an index": (taken, "x: N, index: M -> M", RAISES),
    "a number": (powered, "x: N -> N", "the possible values of `exponent` are not known"),
    "a tensor without dimensions": (
        scaled,
        "x: ... M -> ... _",
        "the possible values of `weight` are not known",
    ),
}


def declared(name: str, function: Any, shapes: str) -> Any:
    return opsmith.operator(f"shape_samples::{name.replace(' ', '_')}", shapes=shapes)(function)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ENOUGH)
def test_where_shapes_and_types_say_enough_a_check_needs_no_samples(name: str) -> None:
    operator = declared(name, *ENOUGH[name])
    report = opsmith.check(operator, only=["forward", "gradient"], effort="quick")
    assert report.passed_as_asked, report
    assert len(report.inputs) >= 2
    source = samples_for(operator.specification)
    assert source is not None
    sizes = [[tuple(each.shape) for each in call.args if isinstance(each, Tensor)] for call in source(Make())]
    assert len(set(map(tuple, sizes))) == len(sizes)


def test_the_wrong_gradient_of_an_operator_without_samples_is_found() -> None:
    operator = declared("wrong", *ENOUGH["linear"]).gradients(weight=lambda grad, x: (grad.mT @ x) * 2)
    report = opsmith.check(operator, only=["gradient"], effort="quick")
    assert {failure.input for failure in report.failures} == {"weight"}


@pytest.mark.parametrize("name", NOT_ENOUGH)
def test_where_they_do_not_the_error_asks_for_samples(name: str) -> None:
    function, shapes, why = NOT_ENOUGH[name]
    operator = declared(name, function, shapes)
    assert samples_for(operator.specification) is None
    with pytest.raises(errors.MissingSamplesError) as raised:
        opsmith.check(operator)
    assert f"there are no samples to check it on, and {why}\n" in str(raised.value)


def test_an_empty_list_of_samples_says_nothing_of_shapes() -> None:
    with pytest.raises(errors.MissingSamplesError, match="there are no samples to check it on\n"):
        opsmith.check(declared("empty", *ENOUGH["linear"]), samples=[])


def test_samples_touch_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared("on_the_cpu", *ENOUGH["linear"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail("it asked for a GPU"))
    assert samples_for(operator.specification) is not None


def test_the_authors_samples_come_first() -> None:
    operator = declared("given", *ENOUGH["positive"])
    operator.samples(lambda make: [(make(2, 2, low=1.0),)])
    assert samples_for(operator.specification) is operator.specification.samples
    assert opsmith.check(operator, only=["forward"], effort="quick").inputs[0] == "sample 0 (x [2, 2])"


@pytest.mark.slow
def test_a_page_needs_none(tmp_path: Path) -> None:
    operator = declared("shown", *ENOUGH["linear"])
    report = opsmith.check(operator, only=["forward"], effort="quick")
    (file,) = opsmith.page(operator, tmp_path / "page.html", reports={operator.name: report})
    text = file.read_text(encoding="utf-8")
    assert "from <code>shapes=</code> and the types of the arguments" in text
    assert "@shown.samples" not in text


def test_a_benchmark_needs_none() -> None:
    operator = declared("measured", *ENOUGH["positive"])
    report = opsmith.check(operator, only=["forward", "gradient"], effort="quick")
    found = samples_of_operator(operator, None, 0)
    assert report.passed_as_asked
    assert [[*sample.flat[0].shape] for sample in found] == [[3, 5], [2, 3], [6, 4]]


def test_the_global_random_state_stays() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    operator = opsmith.operator("shape_samples::noisy", shapes="x: N -> N", random=True)(noisy)
    before = torch.get_rng_state()
    assert samples_for(operator.specification) is not None
    assert torch.equal(torch.get_rng_state(), before)
