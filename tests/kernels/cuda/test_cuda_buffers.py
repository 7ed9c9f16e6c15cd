"""Results that begin with a value, and scratch buffers of CUDA kernels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fake_driver import forget, on_cpu, record
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.launch import launch_rule
from opsmith.kernels.cuda.rules import KernelRules, real_number

ORDERS = ("forward", "backward", "alternating", "random(3)")


@opsmith.operator("cuda_buffers::histogram", results={"counts": opsmith.non_differentiable})
def histogram(x: Tensor, bins: int) -> Tensor:
    return (x.flatten()[:, None] == torch.arange(bins, device=x.device)).sum(0)


HISTOGRAM = """
__global__ void histogram(Contiguous<const int64_t> x, int bins, Contiguous<int64_t, 1> counts) {
  int* own = opsmith::shared_memory<int>();
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) own[bin] = 0;
  __syncthreads();
  OPSMITH_EACH(i, x.numel()) atomicAdd(&own[x[i]], 1);
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x)
    if (own[bin]) ADD
}
"""
ADDED = HISTOGRAM.replace(
    "ADD", "atomicAdd((unsigned long long*)&counts[bin], (unsigned long long)own[bin]);"
)
LAUNCH: dict[str, Any] = {"grid": "ceil(x.numel / 64)", "block": 32, "shared": "4 * bins"}
histogram.kernel("cuda", cuda=ADDED, **LAUNCH, initial={"counts": 0})


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_add_into_a_result_that_begins_with_a_value(order: str) -> None:
    x = torch.randint(0, 7, (300,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(opsmith.emulate(histogram, x, 9, order=order), histogram.reference(x, 9))


def test_without_blocks_the_result_has_its_initial_values() -> None:
    assert opsmith.emulate(histogram, torch.empty(0, dtype=torch.int64), 3).tolist() == [0, 0, 0]
    assert opsmith.emulate(histogram, torch.zeros(3, dtype=torch.int64), 0).shape == (0,)


def faulty(name: str, text: str, reference: Any = histogram.reference, **launch: Any) -> Any:
    operator = opsmith.operator(f"cuda_buffers::{name}")(reference)
    return operator.kernel("cuda", cuda=text, entry="histogram", **launch)


def test_blocks_that_add_without_atomics_race() -> None:
    text = HISTOGRAM.replace("ADD", "counts[bin] += own[bin];  // plain")
    operator = faulty("plain", text, **LAUNCH, initial={"result": 0})
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(operator, torch.arange(200) % 5, 5)
    assert caught.value.problem == "the CUDA kernel is faulty: race"
    assert "counts[bin] += own[bin];  // plain" in str(caught.value)


def test_a_result_without_an_initial_value_is_read_uninitialized() -> None:
    operator = faulty("no_value", ADDED, **LAUNCH)
    with pytest.raises(errors.KernelFaultError, match="reads 8 bytes of `result`") as caught:
        opsmith.emulate(operator, torch.arange(200) % 5, 5)
    assert caught.value.problem == "the CUDA kernel is faulty: uninitialized"
    assert "or name the tensor in `initial=`" in str(caught.value)


@opsmith.operator("cuda_buffers::row_maxima")
def row_maxima(x: Tensor, least: int = -3) -> Tensor:
    """Laid out by columns, as the transpose of [columns, rows] is."""
    return x.clamp(min=least).amax(2).mT.contiguous().mT


def maxima(view: str, initial: Any) -> Any:
    text = f"""
template <class T>
__global__ void row_maxima(View<const T, 3> x, int64_t least, {view} y) {{
  OPSMITH_EACH(at, y.numel()) {{
    const int64_t i = at / x.size(1), j = at % x.size(1);
    for (int64_t k = 0; k < x.size(2); k++) if (x(i, j, k) > y(i, j)) y(i, j) = x(i, j, k);
  }}
}}
"""
    return row_maxima.kernel("cuda", cuda=text, grid=2, block=32, initial={"result": initial})


@pytest.mark.every(8)
@pytest.mark.parametrize("view", ["View<T, 2>", "Contiguous<T, 2>"])
@pytest.mark.parametrize(
    "initial",
    ["least", "min(least, 9)", lambda least: least, -3.0],
    ids=["name", "expression", "function", "number"],
)
def test_the_value_fills_a_result_in_any_layout(view: str, initial: Any) -> None:
    operator = maxima(view, initial)
    x = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0)) - 2
    got = opsmith.emulate(operator, x)
    assert got.stride() == (1, 3)
    torch.testing.assert_close(got, operator.reference(x))
    assert got.eq(-3).any()


@pytest.mark.every(8)
@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.5, 7, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_infinite_values(value: float, dtype: torch.dtype) -> None:
    @opsmith.operator("cuda_buffers::filled")
    def filled(x: Tensor) -> Tensor:
        return torch.full_like(x, value)

    text = "template <class T> __global__ void filled(View<const T> x, View<T> y) {}"
    filled.kernel("cuda", cuda=text, grid=1, dtypes=[dtype], initial={"result": value})
    x = torch.zeros(5, dtype=dtype)
    assert torch.equal(opsmith.emulate(filled, x), filled.reference(x))


@opsmith.operator("cuda_buffers::total")
def total(x: Tensor) -> Tensor:
    return x.sum()


TOTAL = """
template <class T>
__global__ void total(
    Contiguous<const T> x, Contiguous<T, 0> y, Contiguous<T, 1> sums, View<int, 0> arrived) {
  __shared__ T held[32];
  __shared__ bool last;
  T sum = 0;
  OPSMITH_EACH(i, x.numel()) sum += x[i];
  held[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < 32; i++) sum += held[i];
  sums[blockIdx.x] = sum;
  __threadfence();
  if (atomicAdd(arrived.data, 1) != int(gridDim.x) - 1) return;
  __threadfence();
  sum = 0;
  for (int i = 0; i < int(gridDim.x); i++) sum += sums[i];
  y.data[0] = sum;
}
"""
BUFFERS: dict[str, Any] = {
    "grid": "sums.numel",
    "block": 32,
    "scratch": {"sums": ("max(ceil(x.numel / 64), 1)", "x"), "arrived": (torch.int32,)},
    "initial": {"arrived": 0},
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_block_folds_a_scratch_buffer(order: str) -> None:
    total.kernel("cuda", cuda=TOTAL, **BUFFERS)
    x = torch.arange(300.0)
    assert opsmith.emulate(total, x, order=order) == x.sum()


def test_a_scratch_buffer_is_not_zero() -> None:
    text = TOTAL.replace("  sums[blockIdx.x] = sum;\n", "")
    total.kernel("cuda", cuda=text, **BUFFERS)
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(total, torch.ones(100))
    assert caught.value.problem == "the CUDA kernel is faulty: uninitialized"
    assert caught.value.argument == "sums"
    assert "reads 4 bytes of `sums` [2] at element [0], which no thread has written" in str(caught.value)


def test_an_access_beyond_a_scratch_buffer_is_found() -> None:
    total.kernel("cuda", cuda=TOTAL.replace("sums[blockIdx.x]", "sums[blockIdx.x + 1]"), **BUFFERS)
    with pytest.raises(errors.KernelFaultError, match="after `sums` \\[2\\]: just after its last element"):
        opsmith.emulate(total, torch.ones(100))


def test_sizes_by_a_function_and_several_dimensions() -> None:
    text = """
template <class T>
__global__ void total(Contiguous<const T> x, Contiguous<T, 0> y, View<double, 2> s, View<T, 2> t) {
  if (blockIdx.x || threadIdx.x) return;
  double sum = s(2, 3) = t(1, 1) = 0;
  for (int i = 0; i < x.numel(); i++) sum += x[i];
  y.data[0] = T(sum + s.size(0) * 100 + t.size(1));
}
"""
    scratch = {
        "s": (3, "x.dim + 3", torch.float64),
        "t": (lambda x, result: (x.shape[0], 2 + result.dim()), "result"),
    }
    total.kernel("cuda", cuda=text, grid=1, block=32, scratch=scratch)
    assert opsmith.emulate(total, torch.ones(5)) == 5 + 300 + 2


@pytest.fixture
def _forgotten() -> Any:
    forget()
    yield
    forget()


@pytest.mark.parametrize("number", [2**63 - 1, -(2**53) - 1, 7])
def test_a_whole_number_is_filled_in_as_it_is_on_a_device(number: int) -> None:
    @opsmith.operator(f"cuda_buffers::whole_{number % 1000}")
    def whole(x: Tensor) -> Tensor:
        return torch.full_like(x, number)

    text = "__global__ void whole(View<const int64_t> x, View<int64_t> y) {}"
    whole.kernel("cuda", cuda=text, entry="whole", grid=1, initial={"result": number})
    on_cpu(whole)
    forget()
    for _ in range(2):
        assert whole(torch.zeros(2, 3, dtype=torch.int64)).tolist() == [[number] * 3] * 2
    assert record().launches == 2


@pytest.mark.usefixtures("_forgotten")
def test_results_are_filled_before_the_launch_on_a_device() -> None:
    @opsmith.operator("cuda_buffers::on_device", results={"counts": opsmith.non_differentiable})
    def on_device(x: Tensor, bins: int) -> Tensor:
        return histogram.reference(x, bins)

    on_device.kernel("cuda", cuda=ADDED, entry="histogram", **LAUNCH, initial={"counts": 4})
    on_cpu(on_device)
    x = torch.arange(100) % 5
    assert on_device(x, 5).tolist() == [4] * 5  # the driver launches, and runs nothing
    assert record().launches == 1
    assert record().shared == 20
    assert on_device(x[:0], 5).tolist() == [4] * 5
    assert record().launches == 1
    assert on_device.explain(x, 5).rejected == ()


# ---- Messages.


def given(**options: Any) -> Any:
    operator = opsmith.operator("cuda_buffers::wrong")(lambda_reference)
    return operator.kernel("cuda", cuda=WRONG, entry="wrong", **{"grid": 1, **options})


def lambda_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x * 2 if bias is None else x * 2 + bias


WRONG = """
template <class T>
__global__ void wrong(View<const T> x, Optional<View<const T>> bias, View<T> y, View<T, 1> s) {}
"""


LINES = Path(__file__).read_text().splitlines()
WHERE = f"{__file__}:{3 + LINES.index('WRONG = ' + chr(34) * 3)}"


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"initial": {"x": 0}},
            [
                "`initial=` of a CUDA kernel names 'x', which is an argument",
                "  argument: initial",
                "  expected: names among `result`",
                "  got: 'x'",
                "  hint: leave it out: an argument already has values",
            ],
        ),
        (
            {"initial": {"result": 0, "y": 1}},
            [
                "`initial=` of a CUDA kernel names 'y', which is neither a result nor a scratch buffer",
                "  argument: initial",
                "  expected: names among `result`",
                "  got: 'result', 'y'",
                "  hint: use the names in the operator's `results=`; without `results=`, the only name is "
                "`result`",
            ],
        ),
        (
            {"initial": 0},
            [
                "`initial=` of a CUDA kernel is not a dict by name",
                "  argument: initial",
                "  expected: a dict, such as {'result': 0}",
                "  got: 0",
                "  hint: write `initial={'result': 0}`",
            ],
        ),
        (
            {"initial": {"result": None}},
            [
                "`initial['result']` of a CUDA kernel is not a valid launch expression",
                "  argument: initial['result']",
                "  expected: a number, a text, or a function",
                "  got: None",
            ],
        ),
        (
            {"initial": {"result": "inf"}},
            [
                "`initial['result']` of a CUDA kernel is not a valid launch expression",
                "  argument: initial['result']",
                "  expected: names among `x`, `bias`, `result`",
                "  got: `inf`, which names `inf`",
            ],
        ),
        (
            {"scratch": ["s"]},
            [
                "`scratch=` of a CUDA kernel is not a dict by name",
                "  argument: scratch",
                '  expected: a dict, such as {"s": ("x.shape[0]", torch.float32)}',
                "  got: ['s']",
            ],
        ),
        (
            {"scratch": {"result": (3, torch.float32)}},
            [
                "`scratch=` of a CUDA kernel has a buffer with the name 'result'",
                "  argument: scratch",
                "  expected: a name that differs from all arguments and results",
                "  got: 'result'",
                "  hint: choose another name",
            ],
        ),
        (
            {"scratch": {"s": ("x.numel", 4)}},
            [
                "`scratch['s']` of a CUDA kernel does not end with its dtype",
                "  argument: scratch",
                "  expected: sizes, and then one of float32, float64, float16, bfloat16, int64, int32, "
                "int16, int8, uint8, bool, or the name of a tensor",
                "  got: ('x.numel', 4)",
                '  hint: write for example `scratch={"s": ("x.shape[0]", torch.float32)}`',
            ],
        ),
        (
            {"scratch": {"s": ("y.numel", torch.float32)}},
            [
                "`scratch['s']` of a CUDA kernel is not a valid launch expression",
                "  argument: scratch['s']",
                "  expected: names among `x`, `bias`, `result`",
                "  got: `y.numel`, which names `y`",
            ],
        ),
    ],
)
def test_what_a_declaration_refuses(options: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(errors.LaunchError) as caught:
        given(**options)
    assert str(caught.value).removeprefix("cuda_buffers::wrong: ").splitlines()[: len(lines)] == lines


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"scratch": {"s": ("x.numel - 9", "x")}},
            [
                "`scratch['s']` of a CUDA kernel cannot be computed",
                "  argument: scratch['s']",
                "  expected: sizes that are not negative",
                "  got: -6",
            ],
        ),
        (
            {"scratch": {"s": (4, "bias")}},
            [
                "`scratch['s']` of a CUDA kernel cannot be computed",
                "  argument: scratch['s']",
                "  expected: the name of an argument that is a tensor in each call",
                "  got: `bias` is None",
            ],
        ),
        (
            {"scratch": {"s": (4, 2, "x")}},
            [
                "the CUDA kernel's view does not match the scratch buffer `s`",
                "  argument: s",
                "  expected: `View` or `Contiguous` of float32, of 2 dimensions",
                "  got: View<float32, 1>",
            ],
        ),
        (
            {"scratch": {"s": (4, torch.float64)}},
            [
                "the CUDA kernel's view does not match the scratch buffer `s`",
                "  argument: s",
                "  expected: `View` or `Contiguous` of float64, of 1 dimension",
                "  got: View<float32, 1>",
                f"  where: {WHERE}",
                "  hint: change the view, or the sizes and the dtype in `scratch=`",
            ],
        ),
        (
            {"scratch": {"s": (4, "x"), "t": (2, "x")}},
            [
                "the parameters of the CUDA kernel are not the operator's arguments and results and the "
                "scratch buffers",
                "  expected: (View<const T> x, Optional<View<const T>> bias, View<T> result, View<T> s, "
                "View<T> t)",
                "  got: (View<const float32>, Optional<View<const float32>>, View<float32>, "
                "View<float32, 1>)",
            ],
        ),
        (
            {"scratch": {"s": (4, "x")}, "initial": {"result": lambda x: (1, 2)}},
            [
                "`initial['result']` of a CUDA kernel cannot be computed",
                "  argument: initial['result']",
                "  expected: one number",
                "  got: 1, 2",
            ],
        ),
    ],
)
def test_what_a_call_refuses(options: dict[str, Any], lines: list[str]) -> None:
    operator = given(dtypes=[torch.float32], **options)
    with pytest.raises(errors.OpsmithError) as caught:
        opsmith.emulate(operator, torch.ones(3))
    assert str(caught.value).removeprefix("cuda_buffers::wrong: ").splitlines()[: len(lines)] == lines


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, 0.5),
        (torch.int64, math.inf),
        (torch.int32, math.nan),
        (torch.uint8, -1),
        (torch.int8, 128),
        (torch.bool, 2),
        (torch.int32, 2**40),
        (torch.float16, 1e6),
    ],
    ids=str,
)
def test_a_number_that_the_dtype_does_not_hold(dtype: torch.dtype, value: float) -> None:
    with pytest.raises(errors.LaunchError) as caught:
        initial_number(value, dtype)
    assert caught.value.expected == f"a number that {str(dtype).removeprefix('torch.')} can represent"
    assert caught.value.got == str(value)


def initial_number(value: Any, dtype: torch.dtype) -> float | None:
    rule = launch_rule("initial['y']", value, "demo::op", ["y"], convert=real_number)
    return KernelRules((), initial={"y": rule}).initial_number("y", {"y": torch.empty(3, dtype=dtype)})


@pytest.mark.parametrize(
    ("dtype", "value", "number"),
    [
        (torch.int64, 2.0, 2),
        (torch.int64, "y.numel / 3", 1),
        (torch.float32, "y.numel / 2", 1.5),
        (torch.float16, -math.inf, -math.inf),
        (torch.bool, True, 1),
        (torch.int8, numpy.int64(-128), -128),
        (torch.float64, numpy.float32(0.5), 0.5),
        pytest.param(torch.bfloat16, lambda y: y.shape[0] + 0.5, 3.5, id="function"),
    ],
    ids=str,
)
def test_numbers_that_the_dtype_holds(dtype: torch.dtype, value: Any, number: float) -> None:
    assert initial_number(value, dtype) == number
