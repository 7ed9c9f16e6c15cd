"""Kernels in Triton that write in place, interpreted on the CPU and traced without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import EVERY
from kernel_cases import LAYOUTS as READ
from matrices import diagonal
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402
from test_triton_compiled import _driver, calls_in, graph_of, kernel_in  # noqa: E402, F401

from opsmith.kernels.triton.interpreter import missing_interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(missing_interpreter() is not None, reason=str(missing_interpreter()))

LAYOUTS = {name: layout for name, layout in READ.items() if name != "expanded"}
LAYOUTS["column"] = lambda x: torch.stack([x, x], -1)[..., 1]
SHAPES = [(3, 5), (1, 1), (0, 3), (3, 0), (4, 129)]


def kernel_of(operator: Any) -> Any:
    return operator.specification.kernels[0].function


def declare(name: str, *mutates: str) -> Any:
    return opsmith.operator(f"triton_in_place::{name}", mutates=mutates)


@declare("raise_", "cache")
def raise_(cache: Tensor, x: Tensor, by: float) -> Tensor:
    """cache <- cache + by x; returns the sums of the rows from before.  cache, x [N, M]."""
    before = cache.sum(1)
    cache.add_(by * x)
    return before


@triton.jit
def raise_kernel(  # type: ignore[no-untyped-def]
    cache_ptr, x_ptr, result_ptr, by: tl.float64, cache_size_1, cache_stride_0, cache_stride_1,
    x_stride_0, x_stride_1, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    there = column < cache_size_1
    at = cache_ptr + row * cache_stride_0 + column * cache_stride_1
    cache = tl.load(at, mask=there, other=0.0)
    x = tl.load(x_ptr + row * x_stride_0 + column * x_stride_1, mask=there, other=0.0)
    tl.store(result_ptr + row, tl.sum(cache, 0))
    tl.store(at, cache + by.to(x.dtype) * x, mask=there)


raise_.kernel(
    "cuda",
    triton=raise_kernel,
    grid=lambda cache: cache.shape[0],
    constants={"BLOCK": lambda cache: triton.next_power_of_2(max(cache.shape[1], 1))},
    dtypes=EVERY,
)


@pytest.mark.parametrize(("dtype", "shape", "layout"), diagonal(EVERY, SHAPES, LAYOUTS, every=4))
def test_every_dtype_layout_and_size(dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    numbers = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0))
    cache, expected = (LAYOUTS[layout](numbers.to(dtype)) for _ in range(2))
    x = LAYOUTS[layout]((numbers % 3).to(dtype))
    assert_close(kernel_of(raise_).interpreted(cache, x, 2.0), raise_.reference(expected, x, 2.0))
    assert_close(cache, expected)
    assert kernel_of(raise_).copies([cache, x, 2.0]) == ()


@triton.jit
def add_kernel(x_ptr, y_ptr, x_numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < x_numel), tl.load(y_ptr + at, mask=at < x_numel)
    tl.store(x_ptr + at, x + y, mask=at < x_numel)


LAUNCH: dict[str, Any] = {
    "triton": add_kernel,
    "grid": lambda x, BLOCK: (triton.cdiv(x.numel(), BLOCK),),
    "constants": {"BLOCK": 32},
}


def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


strictly = declare("strictly", "x")(add_into).kernel("cuda", **LAUNCH)
copying = declare("copying", "x")(add_into).kernel("cuda", **LAUNCH, copies="allowed")


def test_another_layout_is_rejected_unless_copies_are_allowed() -> None:
    whole, y = torch.zeros(3, 8), torch.ones(4, 3).T
    reason = kernel_of(strictly).value_refusal([whole[:, ::2], y])
    assert reason == (
        "`x`, which the kernel writes, is not contiguous, "
        'but the kernel takes only contiguous memory without `copies="allowed"`'
    )
    assert kernel_of(strictly).value_refusal([whole, y]) is None
    assert kernel_of(copying).value_refusal([whole[:, ::2], y]) is None
    assert kernel_of(copying).copies([whole[:, ::2], y]) == (
        "`x`, which is not contiguous, and back",
        "`y`, which is not contiguous",
    )
    assert kernel_of(copying).interpreted(whole[:, ::2], y) is None
    assert_close(whole, torch.tensor([1.0, 0.0]).repeat(3, 4))
    dense = torch.zeros(3, 4)
    kernel_of(strictly).interpreted(dense, y)
    assert_close(dense, torch.ones(3, 4))
    kernel_of(strictly).interpreted(torch.zeros(0, 3), torch.zeros(0, 3))


@triton.jit
def count_kernel(x_ptr, total_ptr, x_numel):  # type: ignore[no-untyped-def]
    at = tl.program_id(0)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)
    if total_ptr is not None:
        tl.atomic_add(total_ptr, 1.0)


def test_an_optional_argument_and_a_grid_without_programs() -> None:
    @declare("count", "x", "total")
    def count(x: Tensor, total: Tensor | None) -> None:
        x.add_(1)
        if total is not None:
            total.add_(x.numel())

    count.kernel("cuda", triton=count_kernel, grid=lambda x: x.numel())
    x, total = torch.zeros(5), torch.zeros(())
    kernel_of(count).interpreted(x, total)
    kernel_of(count).interpreted(x, None)
    assert (x.tolist(), total.item()) == ([2] * 5, 5)
    kernel_of(count).interpreted(x[:0], total)
    assert total.item() == 5


def test_nothing_is_written_where_the_reference_refuses() -> None:
    cache = torch.ones(3, 4)
    with pytest.raises(RuntimeError):
        kernel_of(raise_).interpreted(cache, torch.ones(3, 5), 1.0)
    assert_close(cache, torch.ones(3, 4))


def test_what_is_written_needs_a_pointer() -> None:
    def no_pointer(y_ptr, x_numel): ...  # type: ignore[no-untyped-def]

    with pytest.raises(errors.KernelSignatureError, match="has no parameter for `x`, so it cannot write it"):
        declare("no_pointer", "x")(add_into).kernel("cuda", triton=no_pointer, grid=1)


def test_lists_are_refused() -> None:
    @declare("listed", "xs")
    def listed(xs: list[Tensor]) -> None:
        xs[0].add_(1)

    with pytest.raises(errors.KernelSignatureError, match="a Triton kernel cannot take `xs`"):
        listed.kernel("cuda", triton=add_kernel, grid=1)


def test_a_tuning_must_restore_what_is_written() -> None:
    several = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})]
    launch = {"grid": LAUNCH["grid"]}
    plain = triton.autotune(several, key=["x_numel"])(add_kernel)
    with pytest.raises(errors.KernelSignatureError, match="runs the kernel many times") as caught:
        declare("tuned", "x")(add_into).kernel("cuda", triton=plain, **launch)
    assert "restore_value=['x_ptr']" in (caught.value.hint or "")
    one = triton.autotune(several[:1], key=["x_numel"])(add_kernel)
    restoring = triton.autotune(several, key=["x_numel"], restore_value=["x_ptr"])(add_kernel)
    for name, tuned in {"one": one, "restoring": restoring}.items():
        operator = declare(f"tuned_{name}", "x")(add_into).kernel("cuda", triton=tuned, **launch)
        x = torch.zeros(40)
        kernel_of(operator).interpreted(x, torch.ones(40))
        assert_close(x, torch.ones(40))


@triton.jit
def forgetful_kernel(x_ptr, y_ptr, x_numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < x_numel), tl.load(y_ptr + at, mask=at < x_numel)
    tl.store(x_ptr + at, x + y, mask=at < x_numel - 1)


@pytest.mark.slow
def test_check_interprets_it() -> None:
    samples = [(torch.randn(3, 5), torch.randn(3, 5))]
    for operator in (raise_, strictly, copying):
        calls = [(*samples[0], 2.0)] if operator is raise_ else samples
        report = opsmith.check(operator, samples=calls, effort="quick", only=["forward", "triton"])
        assert report.passed_as_asked, str(report)
        (outcome,) = [each for each in report.outcomes if each.property == "triton"]
        assert outcome.status == "passed"
    wrong = declare("forgetful", "x")(add_into).kernel("cuda", **{**LAUNCH, "triton": forgetful_kernel})
    report = opsmith.check(wrong, samples=samples, effort="quick", only=["triton"])
    assert [(each.property, each.input) for each in report.failures] == [("triton", "result_x")], str(report)
    assert report.failures[0].where == kernel_of(wrong).where


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
@pytest.mark.usefixtures("_driver")
def test_compiled_code_holds_the_kernel_and_what_it_writes() -> None:
    def step(cache: Tensor, x: Tensor) -> Tensor:
        own = cache * 2
        return raise_(own.select(0, 1), x, 2.0) + own.sum()

    graph = graph_of(step, (2, 3, 5), (3, 5))
    kernel = kernel_in(graph)
    assert sorted(kernel.kwargs["tensors_to_clone"]) == ["cache_ptr", "result_ptr"]
    (written,) = [node for node in calls_in(graph) if "scatter" in str(node.target)]
    assert kernel in [each for node in written.all_input_nodes for each in node.all_input_nodes]
    assert [str(user.target) for user in written.users] == ["aten.sum.default"]
    assert not [node for node in calls_in(graph) if str(node.target).startswith("triton_in_place")]
