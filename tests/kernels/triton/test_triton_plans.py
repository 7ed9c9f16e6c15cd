"""Calls of Triton kernels by plans: each byte is what Triton's launcher would give, and no Python runs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import ON_LAUNCH, STREAM, driver_library, record
from kernel_cases import frames_in
from torch import Tensor

import opsmith
from opsmith import errors

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402
from triton_launches import MOST_SHARED, Launches, on_cpu, recording  # noqa: E402
from triton_operators import picked, pixel_sums, product, softmax, times, tuned  # noqa: E402

from opsmith.kernels.common import cubin  # noqa: E402
from opsmith.kernels.triton import plan  # noqa: E402
from opsmith.kernels.triton.kernel import TritonKernel  # noqa: E402
from opsmith.torch_library import capabilities  # noqa: E402


@pytest.fixture(name="waiting")
def _waiting() -> Iterator[Launches]:
    """Launches, where a plan is made in the second call of a signature."""
    with recording() as found:
        yield found


@pytest.fixture(name="launches")
def _launches(waiting: Launches, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Launches, where a plan is made at once."""
    monkeypatch.setattr(TritonKernel, "_awaits_plan", lambda self, values: not self.by_triton)
    return waiting


@triton.jit
def mixed_kernel(
    x, y, result, x_numel, n, flag, by, wide: tl.float64, half: tl.float16, rough: tl.bfloat16, x_stride_0,
    SQUARE: tl.constexpr, extra=5,
):  # fmt: skip
    at = tl.program_id(0)
    value = tl.load(x + at * x_stride_0).to(tl.float64) * by * wide * half.to(tl.float32) * rough
    if SQUARE:
        value *= value
    if y is not None:
        value += tl.load(y)
    if flag:
        value += n + x_numel + extra
    tl.store(result + at, value)


@opsmith.operator("triton_plans::mixed")
def mixed(
    x: Tensor, y: Tensor | None, n: int, flag: bool, by: float, wide: float, half: float, rough: float
) -> Tensor:
    return (x * by * wide * half * rough).contiguous()


mixed.kernel(
    "cuda",
    triton=mixed_kernel,
    grid=lambda x: x.numel(),
    constants={"SQUARE": lambda n: n == 3, "num_warps": 2},
)

X = torch.randn(40)
NUMBERS = (2.5, 0.1, 1.5, 3.1415926)
CALLS: dict[str, tuple[Any, ...]] = {
    **{str(dtype): (X.to(dtype), None, 7, True) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    **{f"n={n}": (X, None, n, False) for n in (1, 0, 3, 16, 17, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**40)},
    "another tensor": (X, torch.ones(1), 7, True),
    "one element": (X[:1], None, 7, True),
    "16 elements": (X[:16], None, 7, True),
    "misaligned": (X[1:], None, 7, True),
    "strided": (X[::3], None, 7, True),
    "strided by 16": (X[::16], None, 7, True),
    "expanded": (X[:1].expand(5), None, 7, True),
}


def address(tensor: Tensor) -> bytes:
    return struct.pack("<Q", tensor.data_ptr())


def whole(number: int) -> list[bytes]:
    """A whole number: a constant if it is 1, in 64 bits if 32 do not hold it."""
    return [] if number == 1 else [struct.pack("<i" if -(2**31) <= number < 2**31 else "<q", number)]


@pytest.mark.parametrize("name", CALLS)
def test_each_byte_of_each_parameter(name: str, launches: Launches) -> None:
    x, y, n, flag = CALLS[name]
    kernel = on_cpu(mixed)
    by, wide, half, rough = NUMBERS
    for _ in range(2):
        result = kernel(x, y, n, flag, *NUMBERS)
    assert launches.by_triton == []
    assert kernel.by_triton == ""
    (rounded,) = struct.unpack("<I", struct.pack("<f", rough))
    expected = [
        address(x),
        *([] if y is None else [address(y)]),
        address(result),
        *whole(x.numel()),
        *whole(n),
        bytes([flag]),
        struct.pack("<f", by),
        struct.pack("<d", wide),
        struct.pack("<e", half),
        struct.pack("<H", rounded >> 16),
        *whole(x.stride(0)),
        *whole(5),
        bytes(8),
        bytes(8),
    ]
    first, second = launches.by_plan
    assert second.parameters == expected
    for launch in (first, second):
        assert (launch.name, launch.grid, launch.block) == ("mixed_kernel", (x.numel(), 1, 1), (64, 1, 1))
    assert record().stream == STREAM


@pytest.mark.slow  # a process of its own imports torch and Triton, and compiles Triton's launcher
@pytest.mark.skipif(
    not Path(sysconfig.get_paths()["include"], "Python.h").exists(), reason="there are no headers of Python"
)
def test_triton_s_own_launcher_gives_the_same(tmp_path: Path) -> None:
    """In a process of its own, which sees another driver."""
    nvidia = Path(triton.__file__).parent / "backends" / "nvidia" / "driver.py"
    if "PyKernelArg" not in nvidia.read_text(encoding="utf-8"):
        pytest.skip(f"Triton {triton.__version__} generates a launcher for each kernel: 3.7 has one for all")
    script = Path(__file__).with_name("launched_by_triton.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path])}
    command = [sys.executable, str(script), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == len(CALLS) + len(SHIPPED) + 2


SHIPPED: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...], int]] = {
    "softmax": (softmax, (torch.randn(3, 5),), (3, 1, 1), 64),
    "softmax of columns": (softmax, (torch.randn(5, 3).mT,), (3, 1, 1), 64),
    "product": (product, (torch.randn(5, 17), torch.randn(17, 40)), (1, 3, 1), 128),
    "picked": (picked, (torch.randn(4, 5), torch.tensor([1, 2])), (2, 1, 1), 128),
    "picked, all": (picked, (torch.randn(4, 5), torch.tensor([1]), torch.ones(1), 3, True), (1, 1, 1), 128),
    "channels": (pixel_sums, (torch.randn(2, 3, 4, 5),), (40, 1, 1), 128),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_kernels_of_other_tests_run_by_plans(name: str, launches: Launches) -> None:
    operator, arguments, grid, threads = SHIPPED[name]
    kernel = on_cpu(operator)
    for _ in range(2):
        kernel(*arguments)
    assert kernel.by_triton == ""
    assert launches.by_triton == []
    assert kernel.cached_plans == 1
    assert [(each.grid, each.block) for each in launches.by_plan] == [(grid, (threads, 1, 1))] * 2


def test_results_of_which_there_are_several(launches: Launches) -> None:
    x, index = torch.randn(4, 5), torch.tensor([1, 2])
    best, place = on_cpu(picked)(x, index, None, 3, True)
    expected = [address(x), address(index), *whole(3), bytes([True]), address(best), address(place)]
    expected += [*whole(4), *whole(5), *whole(5), *whole(1), bytes(8), bytes(8)]
    assert launches.by_plan[0].parameters == expected
    assert (best.dtype, place.dtype) == (torch.float32, torch.int64)


def test_no_python_runs_once_there_is_a_plan(launches: Launches) -> None:
    kernel = on_cpu(softmax)
    overload = softmax.torch_operator
    call = capabilities.direct_call(overload) if capabilities.on("known_calls") else overload
    x = torch.randn(3, 5)
    with torch.inference_mode():
        for _ in range(2):
            call(x)
        driver_library().fake_on_launch(ON_LAUNCH())  # nothing is written down, which is in Python
        direct = kernel.direct
        assert frames_in(lambda: call(x)) == frames_in(lambda: direct(x)) == []
    assert record().launches == 4


def test_another_offset_is_another_plan(launches: Launches) -> None:
    kernel, base = on_cpu(softmax), torch.randn(100)
    for offset in (0, 16, 1, 5, 17):
        kernel(base[offset : offset + 15].view(3, 5))
    assert kernel.cached_plans == 2  # 16 floats further the address is divisible by 16, too
    assert launches.images == ["softmax_kernel"] * 2


def test_copies_into_other_layouts(launches: Launches) -> None:
    kernel = on_cpu(times)
    x = torch.randn(3, 5).mT
    for _ in range(3):
        assert kernel(x, 2.0).stride() == x.stride()
    assert kernel.copied == {"x": 3, "result": 3}
    assert launches.by_plan[1].parameters[0] != address(x)
    kernel.reload()
    assert kernel.copied == {}


def test_tensors_without_elements_launch_nothing(launches: Launches) -> None:
    kernel = on_cpu(softmax)
    for _ in range(2):
        assert kernel(torch.ones(0, 3)).shape == (0, 3)
    assert kernel.cached_plans == 1
    assert launches == ([], [], [])


# Numbers of floating point


@triton.jit
def added_kernel(x, by, x_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < x_numel) + by, mask=at < x_numel)


def in_place(name: str, **words: Any) -> Any:
    @opsmith.operator(f"triton_plans::{name}", mutates=["x"])
    def added(x: Tensor, by: float) -> None:
        x.add_(by)

    given = {"grid": lambda x, BLOCK: triton.cdiv(x.numel(), BLOCK), "constants": {"BLOCK": 32}, **words}
    return added.kernel("cuda", triton=added_kernel, **given)


def test_calls_in_place_with_other_numbers_share_a_plan(launches: Launches) -> None:
    kernel, x = on_cpu(in_place("shared")), torch.zeros(40)
    numbers = (0.5, -0.0, 1e-3, 1e30, 1e300, float("inf"), 2.0**-130)
    for by in numbers:
        kernel(x, by)
    assert kernel.cached_plans == 1
    narrow = [torch.tensor(by, dtype=torch.float64).float().numpy().tobytes() for by in numbers]
    assert [each.parameters for each in launches.by_plan] == [
        [address(x), by, *whole(40), bytes(8), bytes(8)] for by in narrow
    ]
    assert kernel.copied == {}


@pytest.mark.parametrize(
    "words",
    [
        {"grid": lambda by: 2 if by > 1 else 1},
        {"constants": {"BLOCK": lambda by: 64 if by > 1 else 32}},
    ],
    ids=["grid", "constant"],
)
def test_a_number_that_a_rule_reads_is_part_of_the_signature(words: Any, launches: Launches) -> None:
    kernel = on_cpu(in_place(f"read_by_{next(iter(words))}", **words))
    for plans, by in enumerate((0.5, 1.5, 2.5), 1):
        kernel(torch.zeros(40), by)
        assert kernel.cached_plans == plans
    grids = [each.grid[0] for each in launches.by_plan]
    assert grids == ([1, 2, 2] if "grid" in words else [2, 1, 1])


def test_a_plan_is_made_in_the_second_call_of_a_signature(waiting: Launches) -> None:
    kernel = on_cpu(times)
    for rows in range(1, 20):  # the results may have other sizes for another number
        times(torch.randn(rows, 5), 0.5)
        kernel(torch.randn(3, 5), rows / 8)
    assert (kernel.cached_plans, len(waiting.by_plan)) == (1, 1)  # at 4 / 8, with 3 rows
    assert len(waiting.by_triton) == 2 * 19 - 1
    for _ in range(2):
        kernel(torch.randn(7, 5), 0.5)
    assert (kernel.cached_plans, len(waiting.by_plan)) == (2, 3)


def test_a_number_that_the_kernel_alone_reads_makes_no_signature(waiting: Launches) -> None:
    kernel, x = on_cpu(in_place("waiting")), torch.zeros(40)
    for by in (0.1, 0.2, 0.3):
        kernel(x, by)
    assert (kernel.cached_plans, len(waiting.by_triton), len(waiting.by_plan)) == (1, 1, 2)


def test_where_shapes_are_declared_calls_with_other_numbers_share_a_plan(launches: Launches) -> None:
    @opsmith.operator("triton_plans::sized", shapes="x: N -> N")
    def sized(x: Tensor, by: float) -> Tensor:
        return x * by

    sized.kernel(
        "cuda",
        triton=times.specification.kernels[0].function.source.function,
        grid=lambda result, BLOCK: triton.cdiv(result.numel(), BLOCK),
        constants={"BLOCK": 64},
    )
    kernel, x = on_cpu(sized), torch.randn(40)
    for by in (0.1, 0.2, 0.3):
        result = kernel(x, by)
        wide = struct.pack("<d", by)
        expected = [address(x), address(result), *whole(40), wide, bytes(8), bytes(8)]
        assert launches.by_plan[-1].parameters == expected
    assert kernel.cached_plans == 1
    assert launches.by_triton == []


# In place, and into given results


def test_a_call_in_place_copies_back_and_raises_versions(launches: Launches) -> None:
    operator = in_place("back", copies="allowed")
    kernel, whole_of_it = on_cpu(operator), torch.zeros(8, 2)
    x = whole_of_it[:, 0]
    for _ in range(2):
        before = x._version
        operator(x, 1.0)
        assert x._version > before
    assert kernel.copied == {"x": 2}
    assert [each.parameters[0] == address(x) for each in launches.by_plan] == [False, False]
    expanded = torch.zeros(1).expand(4)
    with pytest.raises(errors.MutationError):
        operator(expanded, 1.0)


def test_a_grid_without_programs(launches: Launches) -> None:
    kernel = on_cpu(in_place("no_programs", grid=lambda x: (x.numel() - 40, 1)))
    for _ in range(2):
        kernel(torch.zeros(40), 1.0)
    assert launches == ([], [], [])
    assert kernel.cached_plans == 1

    @opsmith.operator("triton_plans::unwritten")
    def unwritten(x: Tensor) -> Tensor:
        return x.softmax(1)

    unwritten.kernel("cuda", triton=softmax_source(), grid=0, constants={"BLOCK": 8})
    for _ in range(2):
        with pytest.raises(errors.LaunchError, match="has no programs that could write `result`"):
            on_cpu(unwritten)(torch.ones(3, 5))


def softmax_source() -> Any:
    return softmax.specification.kernels[0].function.source.given


def test_into_given_results(launches: Launches) -> None:
    on_cpu(softmax)
    x, out = torch.randn(3, 5), torch.empty(3, 5)
    for _ in range(2):
        assert softmax.out(x, out=out) is out
    assert [each.parameters[0] for each in launches.by_plan] == [address(x)] * 2


# What no plan is for


def test_a_tuned_kernel_is_launched_by_triton(launches: Launches) -> None:
    kernel = on_cpu(tuned)
    assert kernel.direct is kernel
    assert kernel.by_triton == "`triton.autotune` or `triton.heuristics` decides at each launch"


@pytest.mark.parametrize(
    ("name", "rules", "asked"),
    [
        ("item", {"grid": lambda x: max(int(x.max()), 1)}, "max"),
        ("truth", {"grid": lambda x: 1 if x[0] else 2}, "__getitem__"),
        ("address", {"constants": {"BLOCK": lambda x: 16 + x.data_ptr() % 16}}, "data_ptr"),
        ("gradient", {"grid": lambda x: 1 + x.requires_grad}, "requires_grad"),
    ],
)
def test_a_rule_that_reads_more_than_the_signature(
    name: str, rules: Any, asked: str, launches: Launches
) -> None:
    kernel, x = on_cpu(in_place(f"reads_{name}", **rules)), torch.ones(40)
    for count in (1, 2):
        kernel(x, 1.0)
        assert kernel.by_triton == f"its grid or a constant reads `{asked}` of a tensor"
        assert len(launches.by_triton) == count
    assert launches.by_plan == []


@pytest.mark.parametrize(
    "rule",
    [
        lambda x: len(x) + x.dim() + x.ndim + x.stride(0) + x.itemsize + x.nbytes + x.is_cuda,
        lambda x: x.shape[0] + x.size(0) + x.element_size() + x.is_contiguous() + (x.dtype == torch.float32),
        lambda x: x.numel() + (x.device.index or 0) + x.is_floating_point() + x.nelement(),
    ],
)
def test_a_rule_may_read_the_signature(rule: Callable[..., int], launches: Launches) -> None:
    kernel = on_cpu(in_place(f"signature_{rule.__code__.co_firstlineno}", grid=rule))
    kernel(torch.ones(40), 1.0)
    assert kernel.by_triton == ""


@pytest.mark.parametrize(
    ("name", "value"), [*(each for each in plan.USUAL.items()), ("num_ctas", None)], ids=str
)
def test_a_kernel_that_needs_more_than_a_plan_has(
    name: str, value: Any, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {**plan.USUAL, name: "another" if value is None else value + 1}
    monkeypatch.setattr(plan, "USUAL", usual)
    kernel = on_cpu(softmax)
    for count in (1, 2):
        kernel(torch.randn(3, 5))
        assert kernel.by_triton == f"its compiled form has {name}={plan_value(name)}"
        assert len(launches.by_triton) == count
    assert launches.by_plan == launches.images == []


def plan_value(name: str) -> Any:
    return {"num_ctas": 1}.get(name, False if name.startswith("launch") else 0)


FALSE = {
    "one more": lambda places: [*places, (places[-1][0] + 8, 8)],
    "one less": lambda places: places[:-1],
    "another size": lambda places: [(at, 4 if at == 0 else size) for at, size in places],
    "another offset": lambda places: [(at + 8, size) for at, size in places],
    "none": lambda places: [],
}


@pytest.mark.parametrize("name", FALSE)
def test_a_cubin_with_other_parameters(
    name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cubin.parameter_places
    monkeypatch.setattr(plan, "parameter_places", lambda *given: FALSE[name](found(*given)))
    kernel = on_cpu(product)
    kernel(torch.randn(5, 17), torch.randn(17, 3))
    assert str(kernel.by_triton).startswith("its compiled form takes parameters at [")
    assert len(launches.by_triton) == 1
    assert launches.by_plan == launches.images == []


def test_a_falsified_cubin(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that differs in the file itself, as another version of Triton may have it."""
    kernel = on_cpu(softmax)
    compiled_by = type(kernel).compiled

    def falsified(*given: Any) -> Any:
        compiled = compiled_by(*given)
        at = compiled.asm["cubin"].index(struct.pack("<BBHIHH", 4, 0x17, 12, 0, 0, 0)) + 14
        image = bytearray(compiled.asm["cubin"])
        image[at : at + 2] = struct.pack("<I", 4 << 18)[2:]
        monkeypatch.setitem(compiled.asm, "cubin", bytes(image))
        return compiled

    monkeypatch.setattr(type(kernel), "compiled", falsified)
    kernel(torch.randn(3, 5))
    assert str(kernel.by_triton).startswith("its compiled form takes parameters at [(0, 4), (8, 8)")
    assert launches.images == []


def test_a_tensor_that_is_no_argument(launches: Launches) -> None:
    table = torch.ones(40)

    @triton.jit
    def looked_up_kernel(x, table):
        tl.store(x + tl.program_id(0), tl.load(table + tl.program_id(0)))

    operator = opsmith.operator("triton_plans::looked_up", mutates=["x"])(look_up)
    operator.kernel("cuda", triton=looked_up_kernel, grid=lambda x: x.numel(), constants={"table": table})
    kernel = on_cpu(operator)
    kernel(torch.zeros(40))
    assert kernel.by_triton == "`table` is a tensor, but not an argument or a result"
    assert launches.by_triton[0][1][1] is table


def look_up(x: Tensor) -> None:
    x.fill_(1)


def test_arguments_that_the_kernel_does_not_get(launches: Launches) -> None:
    @opsmith.operator("triton_plans::behind_lists")
    def behind_lists(several: list[Tensor], words: str, x: Tensor, last: list[float]) -> Tensor:
        return x.softmax(1)

    behind_lists.kernel("cuda", triton=softmax_source(), grid=lambda x: len(x), constants={"BLOCK": 8})
    kernel, x = on_cpu(behind_lists), torch.randn(3, 5)
    for _ in range(2):
        result = kernel([torch.ones(1), torch.ones(2)], "words", x, [1.0])
    assert launches.by_plan[1].parameters[:2] == [address(x), address(result)]

    @opsmith.operator("triton_plans::encoded")
    def encoded(x: Tensor, names: list[str]) -> Tensor:
        return x.softmax(1)

    encoded.kernel("cuda", triton=softmax_source(), grid=lambda x: len(x), constants={"BLOCK": 8})
    kernel = on_cpu(encoded)
    kernel(x, ["a"])
    assert kernel.by_triton == "a Triton kernel cannot take `names`"
    assert len(launches.by_triton) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook", "kernel_load_start_hook"])
def test_hooks_of_a_profiler_are_called(
    name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x = on_cpu(softmax), torch.randn(3, 5)
    with monkeypatch.context() as hooked:
        hooked.setattr(triton.knobs.runtime, name, lambda *given: None)
        kernel(x)
        assert (len(launches.by_triton), kernel.cached_plans) == (1, 0)
    kernel(x)
    assert (len(launches.by_triton), kernel.cached_plans) == (1, 1)


def test_a_value_that_no_parameter_holds(launches: Launches) -> None:
    @triton.jit
    def narrow_kernel(x, n: tl.int8, result):
        tl.store(result, tl.load(x) + n)

    @opsmith.operator("triton_plans::narrow")
    def narrow(x: Tensor, n: int) -> Tensor:
        return x + n

    narrow.kernel("cuda", triton=narrow_kernel, grid=1)
    kernel, x = on_cpu(narrow), torch.zeros(1)
    result = kernel(x, -3)
    expected = [address(x), struct.pack("<b", -3), address(result), bytes(8), bytes(8)]
    assert launches.by_plan[0].parameters == expected
    kernel(x, 300)
    assert kernel.by_triton == "`n` is i8, but gets 300"
    assert len(launches.by_triton) == 1


def test_without_the_runtime_triton_launches(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = on_cpu(softmax)

    def missing() -> Any:
        raise errors.ToolchainError("there is no runtime", expected="", got="", hint="")

    monkeypatch.setattr(kernel, "_build", missing)
    for count in (1, 2):
        kernel(torch.randn(3, 5))
        assert (kernel.by_triton, len(launches.by_triton)) == ("there is no runtime", count)


def test_a_captured_graph_is_not_disturbed(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = on_cpu(softmax), torch.randn(3, 5)
    monkeypatch.setattr(kernel.machine, "is_capturing", lambda: True)
    kernel(x)
    assert (len(launches.by_triton), len(launches.by_plan), kernel.by_triton) == (1, 0, "")
    monkeypatch.setattr(kernel.machine, "is_capturing", lambda: False)
    kernel(x)
    monkeypatch.setattr(kernel.machine, "is_capturing", lambda: True)
    kernel(x)
    kernel(x[:2])  # its kernel is loaded
    assert (len(launches.by_triton), len(launches.by_plan)) == (1, 3)


# Errors


def test_a_launch_that_fails_names_operator_and_kernel(launches: Launches) -> None:
    kernel, x = on_cpu(softmax), torch.randn(3, 5)
    kernel(x)
    driver_library().fake_fail(701)
    with pytest.raises(errors.KernelError) as caught:
        kernel(x)
    assert caught.value.operator == "triton_kernels::softmax"
    assert caught.value.problem.startswith("the Triton kernel is not launched: cuLaunchKernel returns ")
    assert caught.value.got == "grid (3, 1, 1), block (64, 1, 1), 0 bytes of shared memory, on sm_90"
    assert caught.value.where == kernel.where


def test_an_image_that_the_driver_refuses_is_triton_s_matter(launches: Launches) -> None:
    kernel = on_cpu(softmax)
    driver_library().fake_refuse(209, 1)
    kernel(torch.randn(3, 5))
    assert str(kernel.by_triton).startswith("cuModuleLoadData returns ")
    assert len(launches.by_triton) == 1


def test_a_grid_that_is_too_large(launches: Launches) -> None:
    kernel = on_cpu(in_place("large", grid=lambda x: (1, 65536)))
    for _ in range(2):
        with pytest.raises(errors.LaunchError, match="more programs than a GPU takes"):
            kernel(torch.ones(3), 1.0)
    assert launches == ([], [], [])


def test_what_triton_s_compiler_refuses(launches: Launches) -> None:
    @triton.jit
    def refused_kernel(x, result):
        tl.store(result, no_such_name + tl.load(x))  # noqa: F821

    @opsmith.operator("triton_plans::refused")
    def refused(x: Tensor) -> Tensor:
        return x.clone()

    refused.kernel("cuda", triton=refused_kernel, grid=1)
    for _ in range(2):
        with pytest.raises(errors.CompileError, match="no_such_name"):
            on_cpu(refused)(torch.ones(1))


def shared_memory(name: str, size: int) -> Any:
    @triton.jit
    def tiles_kernel(x, result, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tile = tl.load(x + at)
        tl.store(result + at, tl.dot(tile, tl.trans(tile)))

    @opsmith.operator(f"triton_plans::{name}")
    def tiles(x: Tensor) -> Tensor:
        return x @ x.mT

    return tiles.kernel("cuda", triton=tiles_kernel, grid=1, constants={"SIZE": size, "num_warps": 8})


def test_much_shared_memory_is_allowed_first(launches: Launches) -> None:
    kernel = on_cpu(shared_memory("tiles", 128))
    for _ in range(2):
        kernel(torch.randn(128, 128))
    assert launches.by_plan[1].shared > 48 * 1024
    assert record().allowed == launches.by_plan[1].shared
    assert record().prefers_shared


def test_too_much_shared_memory_is_told_as_triton_tells_it(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = on_cpu(shared_memory("large_tiles", 128))
    compiled_by = type(kernel).compiled

    def larger(*given: Any) -> Any:
        compiled = compiled_by(*given)
        monkeypatch.setattr(compiled, "metadata", compiled.metadata._replace(shared=MOST_SHARED + 1))
        return compiled

    monkeypatch.setattr(type(kernel), "compiled", larger)
    for _ in range(2):
        with pytest.raises(errors.KernelError) as caught:
            kernel(torch.randn(128, 128))
        assert caught.value.problem == "the Triton kernel needs more shared memory than the GPU has"
        assert (caught.value.expected, caught.value.got) == (f"at most {MOST_SHARED}", str(MOST_SHARED + 1))


# Reload


def test_a_reload_drops_plans_and_loads_anew(launches: Launches) -> None:
    kernel, x = on_cpu(softmax), torch.randn(3, 5)
    for count in (1, 2):
        for _ in range(2):
            softmax(x)
        assert (kernel.cached_plans, len(launches.images)) == (1, count)
        softmax.reload()
    assert softmax.explain(x).copies == ()


def test_what_it_does_not_take_is_computed_by_the_reference(launches: Launches) -> None:
    kernel = on_cpu(softmax)
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(kernel(x), x.softmax(1))
    assert launches == ([], [], [])
