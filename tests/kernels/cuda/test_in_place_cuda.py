"""Kernels in CUDA C++ that write in place, run by a driver on the CPU; see fake_driver.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_driver import copied, emulate, forget, forget_copies, instances, on_cpu, record
from kernel_cases import EVERY, SHAPES
from kernel_cases import LAYOUTS as READ
from matrices import diagonal
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.kernel import CudaKernel

LAYOUTS = {name: layout for name, layout in READ.items() if name != "expanded"}
LAYOUTS["column"] = lambda x: torch.stack([x, x], -1)[..., 1]


def declare(name: str, *mutates: str) -> Any:
    return opsmith.operator(f"cuda_in_place::{name}", mutates=mutates)


@declare("raise_", "cache")
def raise_(cache: Tensor, x: Tensor, by: float) -> Tensor:
    """cache <- cache + by x; returns the first values of the rows from before.  cache, x [N, M]."""
    before = cache[:, :1].clone()
    cache.add_(by * x)
    return before


raise_.kernel(
    "cuda",
    cuda="""
template <class T>
__global__ void raise_(View<T, 2> cache, View<const T, 2> x, double by, View<T, 2> before) {
  OPSMITH_EACH(i, cache.size(0)) {
    if (cache.size(1)) before(i, 0) = cache(i, 0);
    for (int64_t j = 0; j < cache.size(1); j++)
      cache(i, j) = T(float(cache(i, j)) + float(T(by * float(x(i, j)))));
  }
}
""",
    grid="cache.shape[0]",
    block=32,
    dtypes=EVERY,
)


def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


CONTIGUOUS = """
template <class T>
__global__ void NAME(Contiguous<T> x, Contiguous<const T> y) { OPSMITH_EACH(i, x.numel()) x[i] += y[i]; }
"""
LAUNCH: dict[str, Any] = {"grid": "ceil(x.numel / 32)", "block": 32}
strictly = declare("strictly", "x")(add_into)
strictly.kernel("cuda", cuda=CONTIGUOUS.replace("NAME", "strictly"), **LAUNCH)
copying = declare("copying", "x")(add_into)
copying.kernel("cuda", cuda=CONTIGUOUS.replace("NAME", "copying"), **LAUNCH, copies="allowed")


@declare("step", "parameters", "buffer")
def step(parameters: list[Tensor], slopes: list[Tensor], buffer: Tensor | None, rate: float) -> None:
    """parameters <- parameters - rate slopes, one each; buffer <- buffer + 1."""
    for parameter, slope in zip(parameters, slopes, strict=True):
        parameter.sub_(rate * slope)
    if buffer is not None:
        buffer.add_(1)


step.kernel(
    "cuda",
    cuda="""
template <class T>
__global__ void step(List<View<T, 1>, 3> parameters, List<View<const T, 1>, 3> slopes,
                     Optional<View<T, 0>> buffer, double rate) {
  const int n = blockIdx.x;
  for (int64_t i = 0; i < parameters[n].size(0); i++) parameters[n](i) -= T(rate) * slopes[n](i);
  if (n == 0 && buffer) *buffer->data += T(1);
}
""",
    grid="len(parameters)",
    block=1,
)


@pytest.fixture(scope="module")
def kernels() -> dict[str, CudaKernel]:
    """The kernels, with a CPU in the place of a GPU."""
    found = {each.__name__: on_cpu(each) for each in (raise_, step)}
    found |= {"strictly": on_cpu(strictly), "copying": on_cpu(copying)}
    emulate({kernel: instances(kernel) for kernel in found.values()})
    return found


@pytest.fixture(autouse=True)
def forgotten(kernels: dict[str, CudaKernel]) -> Iterator[None]:
    forget(dry=False)
    forget_copies(kernels.values())
    yield
    assert record().depth == 0, "a context is left behind"
    forget()


@pytest.mark.parametrize(("dtype", "shape", "layout"), diagonal(EVERY, SHAPES, LAYOUTS, every=4))
def test_every_dtype_size_and_layout(
    dtype: torch.dtype, shape: tuple[int, int], layout: str, kernels: dict[str, CudaKernel]
) -> None:
    numbers = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0))
    cache, expected = (LAYOUTS[layout](numbers.to(dtype)) for _ in range(2))
    x = LAYOUTS[layout]((numbers % 3).to(dtype))
    count = cache._version
    for _ in range(2):
        assert_close(raise_(cache, x, 2.0), raise_.reference(expected, x, 2.0))
        assert_close(cache, expected)
    assert cache._version == count + 2
    assert copied(kernels["raise_"]) == {}
    assert record().launches == (2 if cache.numel() else 0)


def test_another_layout_is_rejected_unless_copies_are_allowed(kernels: dict[str, CudaKernel]) -> None:
    whole, y = torch.zeros(3, 8), torch.ones(3, 4)
    (reason, _) = strictly.explain(whole[:, ::2], y).rejected
    assert reason.endswith(
        "`x`, which the kernel writes, is not contiguous, "
        'but the kernel takes only contiguous memory without `copies="allowed"`'
    )
    strictly(whole[:, ::2], y)
    assert record().launches == 0
    found = copying.explain(whole[:, ::2], torch.ones(4, 3).T)
    assert found.copies[:2] == ("`x`, which is not contiguous, and back", "`y`, which is not contiguous")
    copying(whole[:, ::2], torch.ones(4, 3).T)
    assert record().launches == 1
    assert copied(kernels["copying"]) == {"x": 1, "y": 1}
    assert_close(whole, torch.tensor([2.0, 0.0]).repeat(3, 4))
    strictly(whole, torch.ones(8, 3).T)
    assert_close(whole, torch.tensor([3.0, 1.0]).repeat(3, 4))
    assert copied(kernels["strictly"]) == {"y": 1}


def test_lists_optional_tensors_and_a_launch_of_nothing() -> None:
    parameters, buffer = [torch.ones(3), torch.ones(10)[::2]], torch.zeros(())
    step(parameters, [torch.ones(3), torch.ones(5, 2)[:, 0]], buffer, 0.5)
    assert [each.tolist() for each in parameters] == [[0.5] * 3, [0.5] * 5]
    assert buffer == 1
    step(parameters[:1], [torch.ones(3)], None, 0.5)
    assert parameters[0].tolist() == [0] * 3
    launched = record().launches
    assert launched == 2
    step([], [], buffer, 0.5)  # the grid has no block, and nothing is returned that it should fill
    assert record().launches == launched


def test_gradients_go_through_what_is_written() -> None:
    x, y = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    own, expected = x * 1, x * 1
    raise_(own, y, 2.0)
    raise_.reference(expected, y, 2.0)
    assert record().launches == 1
    found, right = (torch.autograd.grad((each**2).sum(), (x, y)) for each in (own, expected))
    assert_close(found, right)


def test_constness_is_compared_with_what_is_written() -> None:
    wrong = declare("wrong", "x")(add_into)
    wrong.kernel(
        "cuda",
        cuda=CONTIGUOUS.replace("NAME", "wrong").replace("<T> x", "<const T> x").replace("x[i] +=", "x[i],"),
        **LAUNCH,
    )
    on_cpu(wrong)
    x = torch.zeros(3)
    with pytest.raises(errors.KernelSignatureError) as caught:
        wrong(x, torch.ones(3))
    assert "expected: (Contiguous<T> x, Contiguous<const T> y)" in str(caught.value)
    assert "got: (Contiguous<const float32>, Contiguous<const float32>)" in str(caught.value)
    assert not x.any()
