"""Grids, defaults, configurations and numbers of Triton kernels, on the CPU and in launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402
from triton_launches import Launches, on_cpu, recording  # noqa: E402

from opsmith.kernels.triton.compiler import specialization_of  # noqa: E402
from opsmith.kernels.triton.interpreter import missing_interpreter  # noqa: E402
from opsmith.kernels.triton.source import triton_source  # noqa: E402


@pytest.fixture(name="launches")
def _launches() -> Iterator[Launches]:
    with recording() as found:
        yield found


def interpreted(operator: Any, *arguments: Any) -> Tensor:
    missing = missing_interpreter()
    if missing is not None:
        pytest.skip(missing)
    result: Tensor = operator.specification.kernels[0].given.interpreted(*arguments)
    return result


def copy(name: str, kernel: Any, **words: Any) -> Any:
    @opsmith.operator(f"triton_arguments::{name}")
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    given = {"grid": lambda x, BLOCK: triton.cdiv(x.numel(), BLOCK), **words}
    return copied.kernel("cuda", triton=kernel, **given)


def copy_kernel(x, result, x_numel, BLOCK: tl.constexpr = 64):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, tl.load(x + at, mask=at < x_numel), mask=at < x_numel)


def tuned_copy(*configs: Any, **words: Any) -> Any:
    return triton.autotune(list(configs), key=["x_numel"], **words)(triton.jit(copy_kernel))


# Grids


def test_a_constant_is_the_grid_s_also_where_the_parameter_has_a_default(launches: Launches) -> None:
    operator, x = copy("default", copy_kernel, constants={"BLOCK": 32}), torch.randn(128)
    kernel = on_cpu(operator)
    for _ in range(2):
        kernel(x)
    assert [each[0] for each in launches.by_triton] == [(4, 1, 1)]
    assert [each.grid for each in launches.by_plan] == [(4, 1, 1)]
    assert torch.equal(interpreted(operator, x), x)
    on_cpu(copy("by_default", copy_kernel))(x)
    assert launches.by_triton[1][0] == (2, 1, 1)


def test_an_argument_is_the_grid_s_also_where_the_parameter_has_a_default(launches: Launches) -> None:
    def several_kernel(x, result, n=5):  # type: ignore[no-untyped-def]
        tl.store(result + tl.program_id(0), tl.load(x))

    @opsmith.operator("triton_arguments::several")
    def several(x: Tensor, n: int) -> Tensor:
        return x.expand(n).clone()

    on_cpu(several.kernel("cuda", triton=several_kernel, grid=lambda n: n))(torch.ones(1), 7)
    assert launches.by_triton[0][0] == (7, 1, 1)


def test_a_grid_that_reads_what_a_parameter_gets(launches: Launches) -> None:
    def sized_kernel(x, result, x_size_0: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(result + tl.program_id(0), tl.load(x + tl.program_id(0)))

    kernel = on_cpu(copy("sized", sized_kernel, grid=lambda x_size_0: x_size_0))
    for _ in range(2):
        kernel(torch.ones(5))
    assert (launches.by_triton[0][0], launches.by_plan[0].grid) == ((5, 1, 1), (5, 1, 1))


def test_a_constant_with_the_name_of_a_tensor_hides_no_tensor(launches: Launches) -> None:
    def named_kernel(x_ptr, result, x: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(result, tl.load(x_ptr))

    x = torch.ones(1)
    on_cpu(copy("named", named_kernel, grid=1, constants={"x": 3}))(x)
    assert launches.by_triton[0][1][0] is x


@pytest.mark.parametrize(
    ("name", "grid", "problem"),
    [
        ("none", lambda x, BLOCK: x.numel() // BLOCK, "has no programs that could write `result`"),
        ("many", lambda BLOCK: (1, 2048 * BLOCK), "has more programs than a GPU takes"),
        ("half", lambda BLOCK: BLOCK / 2, "is not valid"),
    ],
)
def test_a_grid_is_checked_also_where_triton_tunes(
    name: str, grid: Callable[..., Any], problem: str, launches: Launches
) -> None:
    kernel = on_cpu(copy(f"tuned_{name}", tuned_copy(triton.Config({"BLOCK": 32})), grid=grid))
    with pytest.raises(errors.LaunchError, match=f"the grid of the Triton kernel {problem}"):
        kernel(torch.ones(8))
    assert launches == ([], [], [])


def test_a_default_behind_a_star() -> None:
    def starred_kernel(x, result, m=3, *, BLOCK: tl.constexpr = 64):  # type: ignore[no-untyped-def]
        tl.store(result, tl.load(x))

    kernel = copy("starred", starred_kernel, grid=1).specification.kernels[0].given
    assert kernel.defaults == {"m": 3, "BLOCK": 64}


# Configurations


def test_a_hook_of_a_configuration_is_called_on_the_cpu() -> None:
    def added_kernel(x, result, x_numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.atomic_add(result + at, tl.load(x + at, mask=at < x_numel), mask=at < x_numel)

    filled = triton.Config({"BLOCK": 32}, pre_hook=lambda arguments: arguments["result"].fill_(5))
    kernel = triton.autotune([filled], key=[])(triton.jit(added_kernel))
    x = torch.randn(40)
    assert torch.equal(interpreted(copy("hook", kernel), x), x + 5)


def test_a_configuration_that_is_pruned_does_not_run_on_the_cpu() -> None:
    def large(configs: list[Any], named: Any, *, x_numel: int, **others: Any) -> list[Any]:
        return [each for each in configs if each.kwargs["BLOCK"] >= x_numel]

    configs = [triton.Config({"BLOCK": 1}), triton.Config({"BLOCK": 64})]
    kernel, x = tuned_copy(*configs, prune_configs_by={"early_config_prune": large}), torch.randn(40)
    assert torch.equal(interpreted(copy("pruned", kernel, grid=1), x), x)


# Numbers


def test_numbers_have_the_types_of_their_annotations_on_the_cpu() -> None:
    def typed_kernel(result, n: tl.int64, m: tl.uint8, half: tl.float16, rough: tl.bfloat16, flag):  # type: ignore[no-untyped-def]
        tl.store(result, n * n)
        tl.store(result + 1, m.to(tl.float64))
        tl.store(result + 2, half.to(tl.float64))
        tl.store(result + 3, rough.to(tl.float64))
        tl.store(result + 4, flag.to(tl.float64))

    @opsmith.operator("triton_arguments::typed")
    def typed(like: Tensor, n: int, m: int, half: float, rough: float, flag: bool) -> Tensor:
        return like.new_empty(5)

    typed.kernel("cuda", triton=typed_kernel, grid=1, dtypes=[torch.float64])
    result = interpreted(typed, torch.ones(1, dtype=torch.float64), 70_000, 200, 0.1, 3.1415926, True)
    assert result.tolist() == [70_000**2, 200, torch.tensor(0.1).half().item(), 3.140625, 1]


def test_a_number_with_a_type_is_no_constant_where_it_is_1() -> None:
    def one_kernel(x, n: tl.int64, m):  # type: ignore[no-untyped-def]
        tl.store(x, n + m)

    found = specialization_of(triton_source(one_kernel), {"x": torch.ones(1), "n": 1, "m": 1})
    assert (found.signature["n"], found.signature["m"]) == ("i64", "constexpr")


# What a kernel takes


def test_what_a_kernel_does_not_take_is_not_launched_by_triton_either(launches: Launches) -> None:
    def doubled_kernel(x, x_numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, 2 * tl.load(x + at, mask=at < x_numel), mask=at < x_numel)

    @opsmith.operator("triton_arguments::doubled", mutates=["x"])
    def doubled(x: Tensor) -> None:
        x.mul_(2)

    doubled.kernel("cuda", triton=doubled_kernel, grid=1, constants={"BLOCK": 8})
    kernel, x = on_cpu(doubled), torch.ones(4, 2)[:, 0]
    for _ in range(2):
        kernel(x)
    assert torch.equal(x, torch.full((4,), 4.0))
    assert launches == ([], [], [])
    with pytest.raises(errors.MutationError):
        kernel(torch.ones(1).expand(3))


@pytest.mark.parametrize("tuned", [True, False])
def test_a_negative_view_is_resolved(tuned: bool, launches: Launches) -> None:
    words: dict[str, Any] = {} if tuned else {"constants": {"BLOCK": 32}}
    source = tuned_copy(triton.Config({"BLOCK": 32})) if tuned else copy_kernel
    kernel, x = on_cpu(copy(f"negative_{tuned}", source, **words)), torch._neg_view(torch.randn(4))
    kernel(x)
    given = launches.by_triton[0][1][0]
    assert not given.is_neg()
    assert torch.equal(given, x)
    assert kernel.copies([x]) == ("`x`, which has the negative bit",)


def test_a_result_that_indices_of_32_bits_do_not_count(launches: Launches) -> None:
    def outer_kernel(x, y, result):  # type: ignore[no-untyped-def]
        tl.store(result, tl.load(x))

    @opsmith.operator("triton_arguments::outer")
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y

    kernel, x = on_cpu(outer.kernel("cuda", triton=outer_kernel, grid=1)), torch.ones(60_000)
    with pytest.raises(errors.KernelRefusedError) as caught:
        kernel(x, x)
    assert caught.value.problem == (
        "the kernel cannot write this result: `result` extends over more than 2**31 elements, which the "
        "kernel's indices cannot count"
    )
    assert launches == ([], [], [])


def test_a_call_without_tensors_is_not_taken(launches: Launches) -> None:
    def ones_kernel(result):  # type: ignore[no-untyped-def]
        tl.store(result + tl.program_id(0), 1.0)

    @opsmith.operator("triton_arguments::ones_of")
    def ones_of(n: int) -> Tensor:
        return torch.ones(n)

    operator = ones_of.kernel("cuda", triton=ones_kernel, grid=lambda n: n)
    operator.samples(lambda make: [(3,)])
    [failure] = opsmith.check(operator, only=["triton"], effort="quick").failures
    assert "it takes none of the samples (its tensors are on no device)" in failure.message
    assert torch.equal(on_cpu(operator)(3), torch.ones(3))
    assert launches == ([], [], [])
