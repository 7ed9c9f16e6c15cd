"""Sizes of results are told in C++, by `sizes` or `shapes=`, where the reference has shown them right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors

KERNEL = """
template <class T>
void windows(View<const T, 2> x, int64_t width, double by, View<T, 3> y) {
  for (int64_t i = 0; i < y.size(0); i++)
    for (int64_t j = 0; j < y.size(1); j++)
      for (int64_t k = 0; k < y.size(2); k++) y(i, j, k) = x(i, j + k) * T(by);
}
"""
SIZES = """
template <class T>
Shape sizes(View<const T, 2> x, int64_t width, double by) {
  OPSMITH_CHECK(width > 0, "a window is at least 1 wide, and not %d", int(width));
  return {x.size(0), x.size(1) - width + 1, width};
}
"""


def declare(
    text: str, shapes: str | None = None, change: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Any, list[tuple[int, ...]]]:
    """An operator that gives each row's windows, and the sizes for which its reference ran."""
    ran: list[tuple[int, ...]] = []

    @opsmith.operator("cpp_sizes::windows", shapes=shapes)
    def windows(x: Tensor, width: int, by: float) -> Tensor:
        ran.append(tuple(x.shape))
        return change(x.unfold(1, width, 1) * by)

    return windows.kernel("cpu", cpp=text), ran


def kernel_of(operator: Any) -> Any:
    return operator.specification.kernels[0].function


WAYS = {
    "sizes": (KERNEL + SIZES, None),
    "shapes": (KERNEL, "x: B N -> B N-width+1 width"),
}


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("way", WAYS)
def test_after_the_first_call_the_reference_runs_for_other_strides_and_kinds_alone(way: str) -> None:
    windows, ran = declare(*WAYS[way])
    x = torch.randn(5, 9)
    right = windows.reference
    assert_close(windows(x, 3, 2.0), right(x, 3, 2.0))
    assert_close(windows(x, 3, 2.0), right(x, 3, 2.0))  # the second one proves the first
    ran.clear()
    for size in range(2, 12):
        for number in (1.5, 2.5):
            given = torch.randn(size, size + 3)
            assert windows(given, 3, number).shape == (size, size + 1, 3)
    assert ran == []
    assert kernel_of(windows).cached_plans == 1
    for others in ((x.mT, 3, 2.0), (x, 4, 2.0), (x.double(), 3, 2.0)):
        ran.clear()
        result = windows(*others)
        assert ran
        assert_close(result, right(*others))
    assert f"`{way}" in windows.explain(x, 3, 2.0).sizing
    assert windows.explain(x, 3, 2.0).sizing.endswith("else the reference, cached for 4 call signatures")


@pytest.mark.slow
def test_of_sizes_of_0_and_1_the_reference_is_asked_for_it_may_lay_them_out_otherwise() -> None:
    @opsmith.operator("cpp_sizes::other_for_one", shapes="x: B N -> B N")
    def other_for_one(x: Tensor) -> Tensor:
        return x.clone() if x.shape[0] != 1 else x.new_empty_strided(x.shape, (7, 3)).copy_(x)

    other_for_one.kernel(
        "cpu",
        cpp="""
void other_for_one(View<const float, 2> x, View<float, 2> y) {
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) y(i, j) = x(i, j);
}
""",
    )
    for rows in (2, 3, 4, 1, 5, 0):
        x = torch.randn(rows, 3)
        result = other_for_one(x)
        assert torch.equal(result, x)
        assert result.stride() == other_for_one.reference(x).stride()


def test_a_result_that_the_reference_gives_transposed_stays_so() -> None:
    windows, _ = declare(KERNEL + SIZES, None, lambda y: y.mT.contiguous().mT)
    for size in (4, 4, 5, 6):
        x = torch.randn(size, 9)
        result, right = windows(x, 3, 2.0), windows.reference(x, 3, 2.0)
        assert_close(result, right)
        assert result.stride() == right.stride()
        assert result.stride() != result.contiguous().stride()


def test_nothing_is_proven_by_sizes_of_which_strides_tell_nothing() -> None:
    windows, _ = declare(KERNEL + SIZES, None, lambda y: y.mT.contiguous().mT)
    for size in ((1, 3), (1, 3), (2, 3), (1, 5), (5, 9)):  # one row, or one window in it
        x = torch.randn(size)
        result, right = windows(x, 3, 2.0), windows.reference(x, 3, 2.0)
        assert_close(result, right)
    assert result.stride() == right.stride() == (21, 1, 7)


@pytest.mark.slow
def test_sizes_that_are_not_the_reference_s_are_an_error() -> None:
    windows, _ = declare(KERNEL + SIZES.replace("- width + 1", "- width"))
    with pytest.raises(errors.KernelError) as caught:
        windows(torch.randn(2, 5), 3, 1.0)
    assert "`sizes` returns [2, 2, 3] for result 0, but the reference returns [2, 3, 3]" in str(caught.value)


@pytest.mark.slow
def test_what_sizes_throws_is_an_error() -> None:
    windows, _ = declare(
        KERNEL + SIZES.replace("width > 0", "by != 7.0").replace("not %d", "not %d, says `sizes`")
    )
    windows(torch.randn(2, 5), 3, 1.0)
    windows(torch.randn(2, 5), 3, 1.0)
    with pytest.raises(errors.KernelError, match="a window is at least 1 wide, and not 3, says `sizes`"):
        windows(torch.randn(2, 6), 3, 7.0)


@pytest.mark.slow
def test_where_sizes_throws_the_reference_says_first_what_it_refuses() -> None:
    def refusing(x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            raise ValueError(f"expected windows of an even number, got {x.shape[1]}")
        return x

    checked = SIZES.replace("width > 0", "(x.size(1) - width) % 2").replace("at least 1 wide", "odd")
    windows, ran = declare(KERNEL + checked, change=lambda x: refusing(x).contiguous())
    for rows in (4, 6):
        windows(torch.randn(2, rows), 3, 1.0)
        windows(torch.randn(2, rows), 3, 1.0)
    ran.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^expected windows of an even number, got 3$"):
            windows(torch.randn(2, 5), 3, 1.0)
    assert windows(torch.randn(2, 8), 3, 1.0).shape == (2, 6, 3)
    assert {*ran} == {(2, 5)}  # on stand-ins for the tensors it may run twice


def test_a_function_of_other_arguments_is_refused_by_the_compiler() -> None:
    windows, _ = declare(KERNEL + SIZES.replace(", double by", ""))
    with pytest.raises(errors.CompileError, match="`sizes` takes what the kernel takes, without its results"):
        windows(torch.randn(2, 5), 3, 1.0)


@pytest.mark.slow
def test_shapes_that_a_call_does_not_have_are_refused_all_the_same() -> None:
    @opsmith.operator("cpp_sizes::outer", shapes="x: ... N, y: ... N//2, k: 4 -> ... N N//2, ...")
    def outer(x: Tensor, y: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x[..., :, None] * y[..., None, :], x.sum(-1)

    outer.kernel(
        "cpu",
        cpp="""
void outer(Contiguous<const float> x, Contiguous<const float> y, std::optional<View<const float>> k,
           Contiguous<float> z, Contiguous<float> sums) {
  int64_t n = x.size(-1), m = y.size(-1);
  for (int64_t at = 0; at < sums.numel(); at++) {
    sums[at] = 0;
    for (int64_t i = 0; i < n; i++) {
      sums[at] += x[at * n + i];
      for (int64_t j = 0; j < m; j++) z[(at * n + i) * m + j] = x[at * n + i] * y[at * m + j];
    }
  }
}
""",
    )
    for count in (3, 3, 4, 5, 6):
        x, y = torch.randn(2, 3, count), torch.randn(2, 3, count // 2)
        for k in (None, torch.ones(4)):
            assert_close(outer(x, y, k), outer.reference(x, y, k))
    assert kernel_of(outer).cached_plans <= 4
    for wrong in ((x, y[..., :1]), (x, y[:1]), (x, y, torch.ones(3)), (x, y[0])):
        with pytest.raises(errors.ShapeError):
            outer(*wrong)


def test_an_opaque_operator_needs_no_fake_kernel_where_shapes_say_all() -> None:
    @opsmith.operator("cpp_sizes::numpy_twice", opaque=True, shapes="x: ... -> ...")
    def numpy_twice(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    numpy_twice.kernel(
        "cpu",
        cpp="""
template <class T> void numpy_twice(Contiguous<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = 2 * x[i];
}
""",
    )
    for size in (2, 2, 3, 4):
        x = torch.randn(size, 2)
        assert_close(numpy_twice(x), x * 2)
