"""Kernels are run at sizes larger than a tile, and at one, whatever the samples and the effort are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.properties.kernels import sizes
from opsmith.checking.properties.kernels.sizes import MOST_ELEMENTS, kernel_sizes
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import subject_of

SAMPLES = [(torch.rand(3, 5), torch.rand(5)), (torch.rand(2, 7), torch.rand(7))]
Kernel = Callable[[Tensor, Tensor], Tensor]


def declared(name: str, kernel: Kernel | None = None, samples: Any = SAMPLES, **options: Any) -> Any:
    def scaled(matrix: Tensor, scale: Tensor) -> Tensor:
        return matrix * scale

    operator = opsmith.operator(f"kernel_sizes::{name}", **options)(scaled)
    operator.samples(lambda: samples)
    return operator if kernel is None else operator.kernel("cpu", kernel)


def of_one_tile(matrix: Tensor, scale: Tensor) -> Tensor:
    result = torch.zeros_like(matrix * scale)
    result[..., :16] = (matrix * scale)[..., :16]
    return result


WRONG: dict[str, tuple[Kernel, str]] = {
    "of_one_tile": (of_one_tile, "kernel-mismatch"),
    "squeezing": (lambda matrix, scale: matrix.squeeze() * scale, "shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_at_such_sizes_alone_is_found_quickly(name: str) -> None:
    kernel, cause = WRONG[name]
    report = opsmith.check(declared(name, kernel), only=["forward"], effort="quick")
    assert [(failure.input, failure.cause) for failure in report.failures] == [("result", cause)]


@pytest.mark.parametrize("effort", ["quick", "default"])
def test_a_right_kernel_passes(effort: Any) -> None:
    operator = declared(f"right_{effort}", lambda matrix, scale: scale * matrix)
    subject = subject_of(operator, None, 0, EFFORTS[effort])
    shapes = [[list(value.shape) for value in sample.flat] for sample in kernel_sizes(subject)]
    assert shapes[0] == [[33, 129], [129]]
    assert [[1, 5], [5]] in shapes
    assert [[3, 1], [1]] in shapes
    assert opsmith.check(operator, only=["forward"], effort=effort).passed_as_asked


def test_where_there_is_no_kernel_there_are_no_such_sizes() -> None:
    assert kernel_sizes(subject_of(declared("none"), None, 0, EFFORTS["default"])) == ()


def test_sizes_that_no_sample_varies_stay() -> None:
    def turned(matrix: Tensor, scale: Tensor) -> Tensor:
        return (matrix.flip(-1) * scale).softmax(-1)

    operator = opsmith.operator("kernel_sizes::fixed")(turned)
    operator.samples(lambda: SAMPLES[:1])
    operator.kernel("cpu", lambda matrix, scale: (matrix.flip(-1) * scale).softmax(-1))
    found = kernel_sizes(subject_of(operator, None, 0, EFFORTS["default"]))
    assert found
    for sample in found:
        assert [value.shape[-1] for value in sample.flat] == [5, 5]


def test_a_size_that_no_input_of_a_kernel_varies_is_told() -> None:
    def summed(x: Tensor) -> Tensor:
        return x.sum(-1)

    remark = "kernels ran only with `x.shape[-1]` at 4: add a sample of another size, or declare `shapes=`"
    for shapes, samples, expected in (
        (None, [(3, 4)], (remark,)),
        (None, [(3, 4), (2, 6)], ()),
        ("x: B N -> B", [(3, 4)], ()),
    ):
        operator = opsmith.operator("kernel_sizes::summed", shapes=shapes)(summed)
        operator.kernel("cpu", lambda x: x.sum(-1))
        given = [(torch.ones(size),) for size in samples]
        assert opsmith.check(operator, samples=given, only=["forward"]).remarks == expected
        assert opsmith.check(operator, samples=given, only=["forward"], effort="quick").remarks == ()
    operator.kernel(
        "cpu", cpp="void summed(Contiguous<const float, 2> x, Contiguous<float, 1> y) { nothing }"
    )
    assert opsmith.check(operator, samples=[(torch.ones(3, 4),)], only=["forward"]).remarks == ()  # none ran
    without = opsmith.operator("kernel_sizes::without_kernel")(summed)
    assert opsmith.check(without, samples=[(torch.ones(3, 4),)], only=["forward"]).remarks == ()


def test_what_is_too_large_together_is_tried_alone() -> None:
    samples = [(torch.rand(3, 5, 2, 2), torch.rand(2)), (torch.rand(4, 6, 3, 7), torch.rand(7))]
    operator = declared("four", lambda matrix, scale: matrix * scale, samples)
    found = kernel_sizes(subject_of(operator, None, 0, EFFORTS["quick"]))
    largest = {max(value.shape) for sample in found for value in sample.flat}
    assert {33, 129, 65} <= largest
    assert all(sum(value.numel() for value in sample.flat) <= MOST_ELEMENTS for sample in found)


def test_nothing_is_made_that_memory_would_not_hold() -> None:
    samples = [
        (torch.rand(2, 3, 1, 2, 3, 2, 2, 1), torch.rand(1)),
        (torch.rand(1, 2, 2, 1, 2, 3, 1, 2), torch.rand(2)),
    ]
    operator = declared(
        "eight", lambda matrix, scale: matrix * scale, samples
    )  # 33 * 129 * 65 * ... elements
    found = kernel_sizes(subject_of(operator, None, 0, EFFORTS["default"]))
    assert found
    assert all(sum(value.numel() for value in sample.flat) <= MOST_ELEMENTS for sample in found)


def row_means(name: str, block: str) -> Any:
    def means(matrix: Tensor) -> Tensor:
        return matrix.mean(-1)

    operator = opsmith.operator(f"kernel_sizes::{name}")(means)
    operator.samples(lambda: [(torch.rand(3, 5),), (torch.rand(2, 7),)])
    text = """
    template <class T>
    void means(Contiguous<const T, 2> x, Contiguous<T, 1> y) {
      const int64_t width = x.size(1), rows = BLOCK;
      for (int64_t first = 0; first < x.size(0); first += rows)
        for (int64_t i = first; i < x.size(0) && i < first + rows; i++) {
          T sum = 0;
          for (int64_t j = 0; j < width; j++) sum += x(i, j);
          y[i] = sum / T(width);
        }
    }
    """
    return operator.kernel("cpu", cpp=text.replace("BLOCK", block), entry="means")


@pytest.mark.every(5)
@pytest.mark.parametrize("effort", ["quick", "default"])
def test_a_kernel_that_divides_by_a_size_of_0_is_found_and_the_check_goes_on(effort: Any) -> None:
    report = opsmith.check(
        row_means(f"divides_{effort}", "1024 / width"), only=["forward", "gradient"], effort=effort
    )
    (failure,) = report.failures
    assert (failure.property, failure.cause, failure.evidence["signal"]) == ("forward", "raises", "SIGFPE")
    assert (
        "dies of SIGFPE (an arithmetic error, such as the division of an integer by zero)" in failure.message
    )
    assert "`matrix.shape[1]` = 0" in failure.message
    assert failure.evidence["line"] == "const int64_t width = x.size(1), rows = 1024 / width;"


@pytest.mark.slow
def test_a_kernel_that_has_no_answer_for_a_size_of_0_and_lives_passes() -> None:
    operator = row_means("lives", "width ? 1024 / width : 1")  # the mean of nothing is nan
    assert opsmith.check(operator, only=["forward", "gradient"], effort="quick").passed_as_asked


def test_an_index_into_nothing_that_the_reference_refuses_is_not_tried_on_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that does not look at its indices would write outside of the tensor."""

    @opsmith.operator("kernel_sizes::put_rows", mutates=["cache"])
    def put_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        cache.index_copy_(0, slots, rows)

    called: list[list[tuple[int, ...]]] = []

    def recorded(_self: Subject, _sample: Sample, flat: list[Any]) -> list[Tensor]:
        called.append([tuple(each.shape) for each in flat if isinstance(each, Tensor)])
        return flat[:1]

    slots = torch.tensor([4, 0])
    samples = [(torch.ones(6, 3), slots, torch.ones(2, 3))]
    subject = subject_of(put_rows.functional, samples, 0, EFFORTS["quick"])

    def given(cache: int, width: int) -> Sample:
        return replace(subject.samples[0], flat=(torch.ones(cache, width), slots, torch.ones(2, width)))

    monkeypatch.setattr(Subject, "call", recorded)
    sizes._call_all(subject, [given(0, 3)])
    assert called == []
    sizes._call_all(subject, [given(6, 0)])
    assert {*called[0]} == {(6, 0), (2,), (2, 0)}


@pytest.mark.slow
def test_an_accepted_input_without_elements_that_is_fatal_is_left_out_of_the_other_properties() -> None:
    def doubled(matrix: Tensor) -> Tensor:
        return 2 * matrix

    operator = opsmith.operator("kernel_sizes::fatal")(doubled)
    operator.samples(lambda: [(torch.rand(3, 5),), (torch.rand(2, 7),)])
    text = """
    template <class T>
    void doubled(Contiguous<const T, 2> x, Contiguous<T, 2> y) {
      const int64_t width = x.numel() / x.size(0);
      for (int64_t i = 0; i < x.size(0); i++)
        for (int64_t j = 0; j < width; j++) y(i, j) = 2 * x(i, j);
    }
    """
    operator = operator.kernel("cpu", cpp=text, entry="doubled")
    report = opsmith.check(operator, only=["forward", "gradient"], effort="quick")
    (failure,) = report.failures
    assert (failure.cause, failure.evidence["signal"]) == ("raises", "SIGFPE")
    assert not [text for text in report.inputs if "matrix [0, 5]" in text]


@pytest.mark.slow
def test_a_fatal_input_is_told_from_those_before_it() -> None:
    def totals(xs: list[Tensor], by: Tensor) -> Tensor:
        return torch.stack([x.sum() for x in xs]).sum() * by

    operator = opsmith.operator("kernel_sizes::totals")(totals)
    text = """
    template <class T>
    void totals(List<View<const T, 1>> xs, View<const T, 1> by, View<T, 1> result) {
      T sum = 0;
      for (auto& x : xs)
        for (int64_t i = 0; i < x.size(0); i++) sum += x(i);
      volatile int64_t share = 1024 / by.size(0);
      for (int64_t i = 0; i < by.size(0); i++) result(i) = sum * by(i);
    }
    """
    operator.kernel("cpu", cpp=text)
    samples = [([torch.rand(4), torch.rand(6)], torch.rand(5))]
    (failure,) = opsmith.check(operator, samples=samples, only=["forward"], effort="quick").failures
    assert "`by.shape[0]` = 0" in failure.message


@pytest.mark.slow
def test_a_kernel_that_never_returns_from_an_input_without_elements_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "EMPTY_LIMIT_S", 1.0)
    operator = row_means("endless", "width > 4 ? width : 0")
    report = opsmith.check(operator, samples=[(torch.rand(3, 5),)], only=["forward"], effort="quick")
    (failure,) = report.failures
    assert (failure.cause, failure.evidence["limit"]) == ("raises", "1 s of processor time")
    assert "it did not finish within 1 s of processor time, on sample" in failure.message
