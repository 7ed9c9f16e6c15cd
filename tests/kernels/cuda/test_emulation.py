"""CUDA kernels on the CPU: right ones give the reference's results, each fault is found with its cause."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_kernels import KernelCase, numbers
from kernel_corpus import CASES, RIGHT, WITH_NVIDIA, WRONG
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.emulation import compiler
from opsmith.kernels.cuda.emulation.call import KernelEmulation
from opsmith.kernels.cuda.emulation.launch import Order, guarded
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.cuda.nvrtc import include_directories
from opsmith.torch_library.result_layouts import extent_of

VALUES = "wrong values"
ORDERS = ("forward", "backward", "alternating", "random(3)")


def in_orders(cases: Any, every: int) -> list[Any]:
    """Each case in each order; `make test` has one order of some cases."""
    return [
        pytest.param(
            case,
            order,
            id=f"{case}-{order}",
            marks=() if at % every == 0 and at // every % len(ORDERS) == turn else pytest.mark.slow,
        )
        for at, case in enumerate(cases)
        for turn, order in enumerate(ORDERS)
    ]


def close(got: Any, case: KernelCase) -> None:
    expected = case.reference(*case.arguments)
    dtype = next(each.dtype for each in case.arguments if isinstance(each, Tensor))
    bound = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype)
    words = {} if bound is None else {"rtol": bound, "atol": bound}
    torch.testing.assert_close(got, expected, **words)


@pytest.mark.every(5)
@pytest.mark.parametrize(("case", "order"), in_orders(RIGHT, 6))
def test_a_right_kernel_gives_what_its_reference_gives(case: KernelCase, order: str) -> None:
    close(opsmith.emulate(case.operator(), *case.arguments, order=order), case)


@pytest.mark.slow
@pytest.mark.skipif(not include_directories(), reason="NVIDIA's headers are not installed")
@pytest.mark.parametrize("case", WITH_NVIDIA, ids=str)
def test_types_of_nvidia_s_headers(case: KernelCase) -> None:
    close(opsmith.emulate(case.operator(), *case.arguments), case)


@pytest.mark.every(5)
@pytest.mark.parametrize(("case", "order"), in_orders([each for each in WRONG if each.cause != VALUES], 12))
def test_a_fault_is_found_with_its_cause(case: KernelCase, order: str) -> None:
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(case.operator(), *case.arguments, order=order)
    assert caught.value.problem == f"the CUDA kernel is faulty: {case.cause}", str(caught.value)
    assert re.search(rf"{case.name}>?:\d+$", caught.value.where or "")


@pytest.mark.parametrize(("case", "order"), in_orders([each for each in WRONG if each.cause == VALUES], 6))
def test_wrong_values_are_those_of_the_kernel(case: KernelCase, order: str) -> None:
    got = opsmith.emulate(case.operator(), *case.arguments, order=order)
    with pytest.raises(AssertionError, match=r"not (close|equal)"):
        close(got, case)


def test_the_corpus_is_large_enough() -> None:
    assert len(RIGHT) >= 75
    assert len(WRONG) >= 190
    assert len(CASES) == len(RIGHT) + len(WRONG) + len(WITH_NVIDIA)


def test_the_documentation_has_the_counts_of_the_corpus() -> None:
    by_values = sum(each.cause == VALUES for each in WRONG)
    by_cause = len(WRONG) - by_values
    root = Path(__file__).parents[3]
    readme, page = (
        " ".join((root / name).read_text().split()) for name in ("README.md", "docs/cuda-kernels.md")
    )
    assert f"corpus of {len(RIGHT) + len(WRONG)} kernels" in readme
    assert f"nothing for the {len(RIGHT)} right kernels" in readme
    assert f"For {by_cause} of the {len(WRONG)} wrong kernels it names the fault" in readme
    assert f"for {by_values} it reports only wrong values" in readme
    assert f"For {len(RIGHT)} right kernels the check reports nothing. The other {len(WRONG)} kernels" in page
    assert f"For {by_cause} of them the check names the fault; for {by_values} it reports only" in page


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("reduced", "no_first_barrier") else pytest.mark.slow)
        for name in CASES
        if CASES[name].cause != VALUES and CASES[name] not in WITH_NVIDIA
    ],
)
def test_stacks_are_switched_by_ucontext_where_there_is_no_other_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_RUNTIME_FLAGS", (*compiler._RUNTIME_FLAGS, "-DEMULATED_UCONTEXT=1"))
    case = CASES[name]
    if not case.cause:
        close(opsmith.emulate(case.operator(), *case.arguments), case)
        return
    with pytest.raises(errors.KernelFaultError, match=case.cause):
        opsmith.emulate(case.operator(), *case.arguments)


def test_it_runs_in_this_process_for_a_debugger() -> None:
    case = CASES["reduced"]
    close(opsmith.emulate(case.operator(), *case.arguments, in_process=True), case)


def declared(name: str, text: str, reference: Any, **launch: Any) -> Any:
    operator = opsmith.operator(f"emulation::{name}")(reference)
    return operator.kernel("cuda", cuda=text, entry=name, **{"grid": 1, "block": 32, **launch})


def double(x: Tensor) -> Tensor:
    return x * 2


def in_half(x: Tensor) -> Tensor:
    return x.half()


def test_half_precision_is_rounded_as_torch_rounds_it() -> None:
    text = """
__global__ void rounded(Contiguous<const float> x, Contiguous<Half> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = Half(float(Half(x[i])));
}
"""
    operator = declared("rounded", text, in_half)
    steps = torch.arange(-(2**11), 2**11).float()
    exponents = torch.cat([steps * 2.0**power for power in (-36, -35, -26, -25, -14, 0, 4, 5)])
    special = torch.tensor([0.0, -0.0, 65504, 65519.996, 65520, 1e9, torch.inf, -torch.inf, 2.0**-25, 6e-8])
    x = torch.cat([exponents, exponents * 1.0001, special, torch.tensor([torch.nan])])
    got, expected = opsmith.emulate(operator, x), x.half()
    assert torch.equal(got.view(torch.int16)[:-1], expected.view(torch.int16)[:-1])
    assert got[-1].isnan()


@pytest.mark.parametrize(
    ("count", "processors", "sizes"),
    [
        (1, 2, [1]),
        (4, 2, [2, 2]),
        (12, 2, [6, 6]),
        (20, 2, [5, 5, 5, 5]),
        (3, 16, [1, 1, 1]),
        (7, 1, [3, 4]),
    ],
)
def test_libraries_have_about_as_many_instances(count: int, processors: int, sizes: list[int]) -> None:
    instances = [Instance(constants=(("K", at),)) for at in range(count)]
    groups = compiler.in_groups(instances, processors)
    assert [len(each) for each in groups] == sizes
    assert [each for group in groups for each in group] == instances


def test_an_operator_in_place_writes_into_its_argument() -> None:
    @opsmith.operator("emulation::doubled_", mutates=("x",))
    def doubled_(x: Tensor) -> None:
        x.mul_(2)

    text = """
__global__ void doubled_(View<float, 1> x) {
  OPSMITH_EACH(i, x.numel()) x(i) *= 2;
}
"""
    doubled_.kernel("cuda", cuda=text, grid=1, block=32)
    base = torch.arange(10.0)
    assert opsmith.emulate(doubled_, base[::2]) is None
    assert base.tolist() == [0, 1, 4, 3, 8, 5, 12, 7, 16, 9]


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_leaves_the_others_alone() -> None:
    text = """
__global__ void jumping(Contiguous<const float> x, Contiguous<float> y) {
  void (*volatile nowhere)() = nullptr;
  if (x[0] < 0) nowhere();
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * 2;
}
"""
    operator = declared("jumping", text, double)
    (kernel,) = cuda_kernels(operator.specification)
    emulation = KernelEmulation(kernel)
    x = torch.arange(4.0)
    calls = [emulation.prepare([each]) for each in (x, x - 1, x + 1)]
    launches = [call.new_run(Order("forward")) for call in calls if not isinstance(call, str)]
    first, jumped, last = emulation.run(launches)
    assert (first, last) == ([], [])
    assert [each.cause for each in jumped] == ["out-of-bounds"]
    assert jumped[0].line == "if (x[0] < 0) nowhere();"


def test_a_launch_that_waits_for_another_block_is_not_judged() -> None:
    text = """
__device__ int arrived;
__global__ void together(Contiguous<const float> x, Contiguous<float> y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i] * 2;
  __threadfence();
  atomicAdd(&arrived, 1);
  while (atomicAdd(&arrived, 0) < 64) {}
}
"""
    with pytest.raises(errors.NotEmulatedError, match="waits for another block"):
        opsmith.emulate(declared("together", text, double, grid=2), torch.ones(64))


@pytest.mark.parametrize("begin", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_guarded_memory_has_the_values_and_the_alignment(begin: int, dtype: torch.dtype) -> None:
    whole = torch.arange(40).to(dtype).view(4, 10)[:, begin : begin + 5]
    copy = guarded(whole)
    assert torch.equal(copy, whole)
    assert (copy.stride(), extent_of(copy)) == (whole.stride(), extent_of(whole))
    assert copy.data_ptr() % 64 == begin * whole.element_size()


def test_there_are_no_gradients() -> None:
    x = numbers(70).requires_grad_()
    assert not opsmith.emulate(CASES["added"].operator(), x, x).requires_grad


def test_numbers_of_a_list_are_those_of_the_call() -> None:
    x, weight = numbers(1, 2, 5, 5), numbers(1, 1, 3, 3, 3, 2)
    words: dict[str, Any] = {"stride": (2, 3), "padding": (1, 1)}
    got = opsmith.emulate(opsmith.ops.involution, x, weight, **words)
    torch.testing.assert_close(got, opsmith.ops.involution.reference(x, weight, **words))
