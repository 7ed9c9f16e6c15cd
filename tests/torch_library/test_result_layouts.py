"""The layout of a kernel's results is known before it runs, from the fake kernel or the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities
from opsmith.torch_library.result_layouts import SMALL, ResultLayout, result_layouts


@opsmith.operator("kernel_forms::counted")
def counted(x: Tensor) -> Tensor:
    """Add 0, 1, 2, ... to each row: the numbers are a tensor that the reference makes itself, on the CPU."""
    return x + torch.arange(x.shape[-1])


counted.kernel(
    "cpu",
    cpp="""
void counted(View<const float, 2> x, View<float, 2> y) {
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) y(i, j) = x(i, j) + float(j);
}
""",
)


def test_shape_strides_and_dtype_are_the_reference_s() -> None:
    @opsmith.operator("kernel_forms::halves")
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.argmax(0)

    x = torch.ones(2, 3).mT
    assert result_layouts(halves.specification, [x]) == (
        ResultLayout((3, 2), (1, 3), torch.float32),
        ResultLayout((2,), (1,), torch.int64),
    )


@pytest.mark.slow
def test_a_reference_that_makes_tensors_of_its_own_runs_on_torch_s_stand_ins() -> None:
    x = torch.randn(SMALL // 256 + 1, 256)  # a smaller one would stand in for itself
    if capabilities.on("fake_tensors"):
        assert_close(counted(x), x + torch.arange(256.0))
    else:  # tensors on `meta` do not mix with those on the CPU
        with pytest.raises(errors.MissingFakeError, match="are unknown before a native kernel runs"):
            counted(x)


def test_a_pair_is_a_pair_for_the_reference_whatever_tensors_stand_in() -> None:
    @opsmith.operator("kernel_forms::moved")
    def moved(x: Tensor, by: int | tuple[int, int]) -> Tensor:
        return x + (sum(by) if isinstance(by, tuple) else by)

    x = torch.zeros(SMALL + 1)
    assert result_layouts(moved.specification, [x, (1, 2)]) == (
        ResultLayout((SMALL + 1,), (1,), torch.float32),
    )
    assert result_layouts(moved.specification, [x[:3], (1, 2)]) == (ResultLayout((3,), (1,), torch.float32),)


@pytest.mark.slow
def test_a_reference_that_looks_at_data_needs_a_fake_kernel() -> None:
    @opsmith.operator("kernel_forms::firsts")
    def firsts(x: Tensor, count: Tensor) -> Tensor:
        return x[: int(count.item())].clone()

    source = (
        "void firsts(View<const float, 1> x, View<const int64_t, 0> count, View<float, 1> y) { y(0) = 1; }"
    )
    firsts.kernel("cpu", cpp=source)
    with pytest.raises(errors.MissingFakeError) as caught:
        firsts(torch.zeros(3), torch.tensor(1))
    problem, where, hint = caught.value.message().splitlines()
    assert problem.startswith(
        "kernel_forms::firsts: the layouts of its results are unknown before a native kernel runs: "
        "the reference needs data for them ("
    )
    assert where == f"  where: {firsts.specification.where}"
    assert hint == (
        "  hint: write `@op.fake` over a function that returns `x.new_empty(shape)` for each result, of "
        "maximum size: a kernel writes into memory that is allocated before it runs"
    )
    firsts.fake(lambda x, count: x.new_empty(1))
    assert firsts(torch.zeros(3), torch.tensor(1)).tolist() == [1]


@pytest.mark.parametrize("large", [False, True])
def test_what_the_reference_refuses_is_refused_in_its_own_words(large: bool) -> None:
    @opsmith.operator("kernel_forms::refusing")
    def refusing(x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            raise ValueError(f"expected rows of even length, got {list(x.shape)}")
        return x * 2

    refusing.kernel("cpu", cpp="void refusing(View<const float, 2> x, View<float, 2> y) {}")
    x = torch.ones(2, SMALL + 1 if large else 3)
    capabilities.fake_mode()  # imports what makes small tensors be stood in for, too
    with pytest.raises(ValueError, match=rf"^expected rows of even length, got \[2, {x.shape[-1]}\]$"):
        refusing(x)
