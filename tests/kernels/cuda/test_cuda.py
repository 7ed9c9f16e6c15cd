"""Kernels in CUDA C++ are launched as they say, and compute what the reference does.

There is no GPU: a driver that holds callers to its contract runs them on the CPU; see fake_driver.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_operators import channel_sums, pooled, row_sums, scaled, told
from fake_driver import STREAM, copied, emulate, forget, forget_copies, instances, on_cpu, record
from kernel_cases import EVERY, SHAPES, WIDE
from kernel_cases import WITH_NEGATIVE as LAYOUTS
from matrices import diagonal
from torch.testing import assert_close

import opsmith
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.rules import MAX_DIM


@pytest.fixture(scope="module")
def kernels() -> dict[str, CudaKernel]:
    """The kernels, with a CPU in the place of a GPU."""
    found = {each.__name__: on_cpu(each) for each in (scaled, row_sums, channel_sums, told, pooled)}
    emulated = {kernel: instances(kernel) for kernel in found.values()}
    sizes = [(("SIZE", size), ("LARGEST", largest)) for size, largest in ((2, False), (3, True))]
    emulate(emulated | {found["pooled"]: instances(found["pooled"], *sizes)})
    return found


@pytest.fixture(autouse=True)
def forgotten(kernels: dict[str, CudaKernel]) -> Iterator[None]:
    forget(dry=False)
    forget_copies(kernels.values())
    yield
    assert record().depth == 0, "a context is left behind"
    forget()


@pytest.mark.parametrize(("dtype", "shape", "layout"), diagonal(EVERY, SHAPES, LAYOUTS, every=4))
def test_every_dtype_layout_and_size(dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(shape, dtype=torch.float64).to(dtype))
    shift = torch.randn(4, dtype=torch.float64).to(dtype)[2:]
    for arguments in ((x, 2.0), (x, -0.5, shift)):
        result = scaled(*arguments)
        right = scaled.reference(*arguments)
        assert_close(result, right)
        if x.numel():  # torch's own stand-ins have other strides than its tensors where there is no element
            assert result.stride() == right.stride()
    assert record().launches == (2 if x.numel() and dtype != torch.float64 else 0)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5), (1,) * MAX_DIM], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert_close(scaled(x, 2.0), x * 2)
    assert record().launches == 1


def test_more_dimensions_than_there_is_room_for() -> None:
    x = torch.randn((1,) * (MAX_DIM + 1))
    assert_close(scaled(x, 2.0), x * 2)
    assert record().launches == 0
    (reason, _) = scaled.explain(x, 2.0).rejected
    assert reason.endswith(f": `x` has {MAX_DIM + 1} dimensions, and a view has room for {MAX_DIM}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_several_results_and_any_strides(
    dtype: torch.dtype, layout: str, kernels: dict[str, CudaKernel]
) -> None:
    x = LAYOUTS[layout](torch.randn(4, 6, dtype=dtype))
    assert_close(row_sums(x), row_sums.reference(x))
    assert record().launches == 1
    assert copied(kernels["row_sums"]) == {}


def test_a_negative_bit_becomes_numbers(kernels: dict[str, CudaKernel]) -> None:
    """The dispatcher sees to it, also where the kernel itself is called, as `check` does."""
    x = LAYOUTS["negative"](torch.randn(4, 6))
    assert x.is_neg()
    assert_close(kernels["row_sums"](x), row_sums.reference(x))
    assert copied(kernels["row_sums"]) == {}
    assert kernels["row_sums"].copies([x]) == ("`x`, which has the negative bit",)


@pytest.mark.parametrize("channels_last", [True, False])
def test_channels_last(channels_last: bool, kernels: dict[str, CudaKernel]) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    assert_close(channel_sums(x), channel_sums.reference(x))
    assert copied(kernels["channel_sums"]) == ({} if channels_last else {"x": 1})
    assert channel_sums.explain(x).copies == (() if channels_last else ("`x`, which is not channels-last",))


def test_every_kind_of_argument() -> None:
    x = torch.ones(1, dtype=torch.float64)
    others = [torch.arange(3.0, dtype=torch.float64), torch.ones(4, dtype=torch.float64)[::2]]
    full = (x, others, [1, -2, 2**40], [0.5, 1.25], [True, False, True], "text", -7, 5, 0.75, True, (3, 4))
    for arguments in ((*full, 3, 0.25), full, (x, [], [], [], [], "t", 0, -(2**31), 0.0, False, 2, 0, 0.0)):
        forget(dry=False)
        assert_close(told(*arguments), told.reference(*told.specification.schema.call_values(arguments, {})))
        assert record().launches == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"small": 2**31}, "`small` is 2147483648, but the kernel takes an int of 32 bits"),
        ({"maybe": -(2**31) - 1}, "`maybe` is -2147483649, but the kernel takes an int of 32 bits"),
        ({"flags": [True] * 4}, "`flags` has 4 items, and `List<bool, 3>` has room for 3"),
        ({"x": torch.ones(1)}, "`x` is float32, but the kernel takes float64"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_it_does_not_take_is_computed_by_the_reference(change: dict[str, Any], reason: str) -> None:
    x = torch.ones(1, dtype=torch.float64)
    names = told.specification.schema.names
    full = (x, [x], [1], [0.5], [True], "text", -7, 5, 0.75, True, (3, 4), 3, 0.25)
    arguments = dict(zip(names, full, strict=True)) | change
    assert_close(told(**arguments), told.reference(**arguments))
    assert record().launches == 0
    assert told.explain(**arguments).rejected[0].endswith(f": {reason}")


def test_the_launch_is_as_it_is_said() -> None:
    scaled(torch.ones(130), 2.0)
    found = record()
    assert (list(found.grid), list(found.block), found.shared) == ([3, 1, 1], [64, 1, 1], 0)
    assert (found.stream, found.device) == (STREAM, 0)
    assert found.name.startswith(b"_Z6scaledIf")
    row_sums(torch.ones(33, 2))
    assert (list(record().grid), list(record().block)) == ([2, 1, 1], [32, 1, 1])


def test_constants_make_instances_and_are_no_part_of_the_size(kernels: dict[str, CudaKernel]) -> None:
    for numbers in (4, 8, 10):
        x = torch.randn(numbers)
        assert_close(pooled(x, 2), pooled.reference(x, 2))
    x = torch.randn(6)
    assert_close(pooled(x, 3, True), pooled.reference(x, 3, True))
    assert record().launches == 4
    assert record().shared == 16 * 4
    loaded = {str(instance) for instance, _ in kernels["pooled"].functions.loaded}
    assert loaded >= {"float32, SIZE=2, LARGEST=0", "float32, SIZE=3, LARGEST=1"}
    assert not any("SIZE=8" in each for each in loaded)


def test_a_second_call_loads_nothing() -> None:
    scaled(torch.ones(3), 2.0)
    forget(dry=False)
    scaled(torch.ones(4), 2.0)
    assert (record().launches, record().loads) == (1, 0)


def test_gradients_are_the_reference_s() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    shift = torch.randn(2, requires_grad=True)
    gradients = torch.autograd.grad(scaled(x, 2.0, shift).sum(), (x, shift))
    assert_close(gradients, (torch.full_like(x, 2.0), torch.tensor([15.0, 0.0])))
    assert record().launches == 1


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_calls_it(dynamic: bool) -> None:
    compiled = torch.compile(lambda x: pooled(x + 1, 2) - 1, fullgraph=True, dynamic=dynamic)
    for size in (6, 8, 10):
        x = torch.randn(size)
        assert_close(compiled(x), pooled.reference(x + 1, 2) - 1)
    assert record().launches == 3


@pytest.mark.parametrize("operator", [scaled, row_sums, channel_sums], ids=lambda each: each.__name__)
def test_check_passes(operator: Any) -> None:
    report = opsmith.check(operator, only=["forward", "layouts"], effort="quick")
    assert report.passed_as_asked, str(report)
    assert record().launches > 0
