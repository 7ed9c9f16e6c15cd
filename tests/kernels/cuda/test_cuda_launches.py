"""Kernels in CUDA C++ that compute an operator together, one launched after the other."""

from __future__ import annotations

import warnings
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import OnCpu, driver_library, emulate, forget, on_cpu, record
from torch import Tensor

import opsmith
from opsmith import Launch, errors
from opsmith.kernels.cuda import functions
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.nvrtc import find_nvrtc, older_nvrtcs
from opsmith.kernels.cuda.usage import CudaUsage

ORDERS = ("forward", "backward", "alternating", "random(3)")
PARTS = """
template <class T, int STEP>
__global__ void part(Contiguous<const T> x, Contiguous<T, 1> sums) {
  T sum = 0;
  OPSMITH_EACH(i, x.numel()) sum += x[i];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum * STEP;  // part
}
template <class T>
__global__ void folded(Contiguous<const T, 1> sums, View<T> y) {
  OPSMITH_EACH(at, y.numel()) {
    T sum = 0;
    for (int i = at; i < sums.numel(); i += y.numel()) sum += sums[i];  // fold
    y.data[at] = sum;
  }
}
__global__ void counted(View<int, 0> count) { *count.data += 1; }
"""


def clone(x: Tensor) -> Tensor:
    return x.clone()


def sum_of(x: Tensor) -> Tensor:
    return x.sum()


def declared(name: str, launches: Any, reference: Any = sum_of, text: str = PARTS, **options: Any) -> Any:
    operator = opsmith.operator(f"cuda_launches::{name}")(reference)
    return operator.kernel("cuda", cuda=text, launches=launches, **options)


SCRATCH: dict[str, Any] = {"scratch": {"sums": (64, "x"), "again": (8, "x")}}
FIRST = Launch("part(x, sums)", grid=2, block=32, constants={"STEP": 1})
TWICE = [FIRST, Launch("folded(sums, again)", grid=1, block=8), Launch("folded(again, result)", grid=1)]


@pytest.mark.every(5)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [300, 0, 1])
def test_each_launch_sees_what_those_before_it_have_written(size: int, order: str) -> None:
    total = declared("total", TWICE, **SCRATCH)
    x = torch.arange(float(size))
    assert opsmith.emulate(total, x, order=order) == x.sum()


def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers, doubled, laid out by columns; and the number 2."""
    return (x * 2).mT.contiguous().mT, torch.tensor(2, dtype=torch.int32, device=x.device)


STEPS = """
template <class T>
__global__ void copied(View<const T, 2> x, Contiguous<T, 2> y, View<int, 0> count) {
  OPSMITH_EACH(at, y.numel()) y[at] = x(at / x.size(1), at % x.size(1));
}
template <class T>
__global__ void added(Contiguous<T, 2> y, View<const T> x, View<int, 0> count) {
  OPSMITH_EACH(at, y.numel()) y[at] += x(at / x.size(1), at % x.size(1));
}
__global__ void counted(View<int, 0> count) { *count.data += 1; }
"""


@pytest.mark.every(5)
@pytest.mark.parametrize("order", ORDERS)
def test_launches_add_to_results_in_other_layouts(order: str) -> None:
    counted = Launch("counted(count)", grid=1, block=1)
    launches = [Launch("copied(x, y, count)", grid=2), counted, Launch("added(y, x, count)", grid=2), counted]
    operator = opsmith.operator("cuda_launches::doubled", results=("y", "count"))(doubled)
    operator.kernel("cuda", cuda=STEPS, launches=launches, initial={"count": 0}, dtypes=[torch.float32])
    base = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    for x in (base, base[::2, 1:7], base.mT, base[:0]):
        y, count = opsmith.emulate(operator, x, order=order)
        torch.testing.assert_close(y, x * 2)
        assert y.stride() == doubled(x)[0].stride()
        assert count == 2


def test_without_parentheses_a_kernel_gets_all() -> None:
    text = """
template <class T>
__global__ void first(View<const T, 1> x, View<const T, 1> y, View<T, 1> s) {
  s(threadIdx.x) = x(threadIdx.x);
}
template <class T>
__global__ void second(View<const T, 1> x, View<T, 1> y, View<const T, 1> s) {
  y(threadIdx.x) = s(threadIdx.x);
}
"""
    both = [Launch(name, grid="1 if x.numel else 0", block="x.numel") for name in ("first", "second")]
    operator = declared("all_of_it", both, clone, text, scratch={"s": ("x.numel", "x")})
    assert torch.equal(opsmith.emulate(operator, torch.arange(5.0)), torch.arange(5.0))


def test_a_launch_without_blocks_is_left_out() -> None:
    launches = [
        Launch("part(x, sums)", grid="min(x.numel, 2)", block=32, constants={"STEP": 1}),
        Launch("counted(calls)", grid="x.numel - x.numel", block=1),
        Launch("folded(sums, result)", grid=1),
    ]
    scratch = {"sums": (64, "x"), "calls": (torch.int32,)}
    operator = declared("left_out", launches, scratch=scratch, initial={"sums": 0})
    assert opsmith.emulate(operator, torch.ones(100)) == 100
    assert opsmith.emulate(operator, torch.ones(0)) == 0


@pytest.mark.slow
def test_gradients_of_an_operator_may_be_computed_so() -> None:
    total = declared("forward", TWICE, **SCRATCH)

    @opsmith.operator("cuda_launches::backward")
    def backward(dy: Tensor, x: Tensor) -> Tensor:
        return dy.expand_as(x) * 1

    text = """
template <class T>
__global__ void kept(View<const T, 0> dy, View<T, 0> s) { *s.data = *dy.data; }
template <class T>
__global__ void spread(View<const T, 0> s, Contiguous<T> y) { OPSMITH_EACH(i, y.numel()) y[i] = *s.data; }
"""
    launches = [Launch("kept(dy, s)", grid=1, block=1), Launch("spread(s, result)", grid=2)]
    backward.kernel("cuda", cuda=text, launches=launches, scratch={"s": ("x",)})
    total.gradients(x=lambda grad, x: backward(grad, x))
    for shape in ((3, 40), (2, 0)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mT.requires_grad_()
        with opsmith.testing.emulated_cuda() as calls:
            (total(x) * 3).backward()
        assert torch.equal(x.grad, torch.full_like(x, 3))
        assert calls.calls == {total.name: 1, backward.name: 1}


@pytest.mark.slow
def test_the_example_has_no_finding() -> None:
    file = Path(__file__).parents[3] / "examples" / "histogram_cuda.py"
    text = file.read_text().replace('"examples::', '"launches_example::').replace('"histogram.cu"', "SOURCE")
    names: dict[str, Any] = {"SOURCE": file.with_name("histogram.cu"), "__name__": __name__}
    exec(compile(text, __file__, "exec"), names)
    for operator in (names["histogram"], names["total"]):
        report = opsmith.check(operator, only=["cuda"], effort="quick")
        (outcome,) = [each for each in report.outcomes if each.property == "cuda"]
        assert outcome.status == "passed", str(report)
        assert not [each for each in outcome.notes if "no fixed order" in each]


# ---- Faults.


def fault(operator: Any, *arguments: Any, order: str = "forward") -> errors.OpsmithError:
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(operator, *arguments, order=order)
    return caught.value


def line_of(part: str) -> int:
    return 1 + next(
        at for at, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith(part)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_launch_that_reads_what_a_later_one_writes(order: str) -> None:
    swapped = declared("swapped", [TWICE[2], *TWICE[:2]], **SCRATCH)
    found = fault(swapped, torch.ones(100), order=order)
    assert found.problem == "the CUDA kernel is faulty: uninitialized"
    assert found.argument == "again"
    assert str(found.got).splitlines()[0] == (
        "in launch 1 of 3, `folded`, thread (0, 0, 0) of block (0, 0, 0) reads 4 bytes of `again` [8] at "
        "element [0], which no thread has written"
    )
    assert found.where == f"{__file__}:{line_of('// fold')}"


def test_a_buffer_that_a_launch_has_written_in_part() -> None:
    short = Launch("part(x, sums)", grid=1, block=32, constants={"STEP": 1})
    found = fault(declared("in_part", [short, *TWICE[1:]], **SCRATCH), torch.ones(100))
    assert "in launch 2 of 3, `folded`, thread" in str(found.got)
    assert "reads 4 bytes of `sums` [64] at element [32], which no thread has written" in str(found.got)


def test_a_race_in_the_second_launch() -> None:
    text = PARTS.replace("y.data[at] = sum;", "y.data[at / 2] = sum;  // half")
    found = fault(declared("race", TWICE, text=text, **SCRATCH), torch.ones(100))
    assert found.problem == "the CUDA kernel is faulty: race"
    assert "in launch 2 of 3, `folded`, thread" in str(found.got)
    assert "y.data[at / 2] = sum;  // half" in str(found.got)


def test_elements_that_no_launch_writes() -> None:
    launches = [*TWICE[:2], Launch("folded(again, result)", grid=1), FIRST]
    text = PARTS.replace("OPSMITH_EACH(at, y.numel()) {", "OPSMITH_EACH(at, y.numel() - (y.dim == 0)) {")
    found = fault(declared("missing", launches, text=text, **SCRATCH), torch.ones(100))
    assert found.argument == "result"
    assert str(found.got) == (
        "in launch 4 of 4, `part`, the kernel does not write 1 of 1 elements of `result` []; the first is "
        "at []"
    )


@pytest.mark.slow
def test_a_launch_behind_one_that_ends_its_process_says_nothing() -> None:
    text = PARTS.replace("T sum = 0;", "T sum = 0; if (x[0] < 0) *(volatile int*)8 = 0;", 1)
    operator = declared("crash", TWICE, text=text, **SCRATCH)
    found = fault(operator, -torch.ones(100))
    assert found.problem == "the CUDA kernel is faulty: out-of-bounds"
    assert "in launch 1 of 3, `part`, thread" in str(found.got)
    assert opsmith.emulate(operator, torch.ones(100)) == 100


# ---- Compiled, and launched on a device.


@pytest.fixture
def _forgotten() -> Any:
    forget()
    yield
    forget()


def test_every_kernel_is_compiled_and_measured() -> None:
    operator = declared("measured", TWICE, **SCRATCH, max_spills=0)
    operator.samples(lambda make: [(make(5),)])
    (kernel,) = {each.given for each in operator.specification.kernels}
    used = [*CudaUsage().usage(kernel, ["sm_90"])]
    assert [(each.instance, each.threads) for each in used] == [
        ("part, float32, STEP=1", 32),
        ("folded, float32", 256),
        ("part, float64, STEP=1", 32),
        ("folded, float64", 256),
    ]
    assert {each.spills for each in used} == {0}
    assert {(each.kernel, each.where) for each in used} == {
        (name, f"{__file__}:{line_of(declaration)}")
        for name, declaration in (
            ("part", "__global__ void part(Contiguous<const T> x, Contiguous<T, 1> sums) {"),
            ("folded", "__global__ void folded(Contiguous<const T, 1> sums, View<T> y) {"),
        )
    }


@pytest.mark.usefixtures("_forgotten")
def test_launches_on_a_device_in_order(tmp_path: Path) -> None:
    file = tmp_path / "parts.cu"
    file.write_text(PARTS)
    operator = opsmith.operator("cuda_launches::on_device")(sum_of)
    operator.kernel("cuda", cuda_file=file, launches=TWICE, dtypes=[torch.float32], **SCRATCH)
    kernel = on_cpu(operator)
    needed = [Instance(torch.float32, (("STEP", 1),), "part"), Instance(torch.float32, (), "folded")]
    emulate({kernel: needed})
    forget(dry=False)
    x = torch.arange(300.0)
    assert operator(x) == x.sum()
    assert operator.explain(x).forward == f"kernel for cpu (3 launches), {file}:3"
    assert record().launches == 3
    assert record().loads == 2
    assert b"folded" in record().name
    file.write_text(PARTS.replace("sum += sums[i];", "sum += 2 * sums[i];"))
    operator.reload()
    emulate({kernel: needed})
    forget(dry=False)
    assert operator(x) == 4 * x.sum()


@pytest.mark.usefixtures("_forgotten")
def test_what_the_driver_refuses_names_the_kernel() -> None:
    operator = declared("refused", TWICE, dtypes=[torch.float32], **SCRATCH)
    on_cpu(operator)
    driver_library().fake_fail(701)
    with pytest.raises(
        errors.KernelError, match="the CUDA kernel `part` is not launched: cuLaunchKernel returns"
    ):
        operator(torch.ones(3))


REFUSALS = [
    (200, "CUDA_ERROR_INVALID_IMAGE"),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
]


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize(("status", "text"), REFUSALS)
def test_an_image_that_no_driver_takes_names_the_kernel_and_both_versions(
    monkeypatch: pytest.MonkeyPatch, status: int, text: str
) -> None:
    operator = declared(f"unloaded_{status}", TWICE, dtypes=[torch.float32], **SCRATCH)
    on_cpu(operator)
    driver_library().fake_refuse(status, 10)
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
    with pytest.raises(errors.OpsmithError) as caught:
        operator(torch.ones(3))
    assert isinstance(caught.value.__cause__, errors.ToolchainError)
    said = str(caught.value) + str(caught.value.__cause__)
    version = ".".join(map(str, find_nvrtc().version))
    assert f"the driver does not accept the CUDA kernel `part` that NVRTC compiled: {LOADING} {text}" in said
    assert f"NVRTC of CUDA {version}, and a driver of CUDA 12.4, for sm_90" in said
    assert "install a newer driver of NVIDIA, or `pip install nvidia-cuda-nvrtc-cu12`" in said


LOADING = "cuModuleLoadData returns"


@pytest.mark.usefixtures("_forgotten")
def test_the_reference_computes_where_no_driver_takes_the_image() -> None:
    operator = declared("refused_image", TWICE, dtypes=[torch.float32], **SCRATCH)
    on_cpu(operator)
    driver_library().fake_refuse(200, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # which appears once in a process
        assert operator(torch.ones(3)) == operator.reference(torch.ones(3))
    assert record().launches == 0


@pytest.mark.usefixtures("_forgotten")
def test_an_image_that_the_driver_refuses_is_compiled_by_an_older_nvrtc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    operator = declared("older", TWICE, dtypes=[torch.float32], **SCRATCH)
    on_cpu(operator)
    older = copy(find_nvrtc())
    older.version, older.file = (12, 0), replace(older.file, identity=str(tmp_path))
    compiled = []

    def compile_older(*args: Any, **options: Any) -> Any:
        compiled.append(args)
        return find_nvrtc().compile(*args, **options)

    monkeypatch.setattr(older, "compile", compile_older)
    monkeypatch.setattr(functions, "older_nvrtcs", lambda version: iter([older]))
    driver_library().fake_refuse(222, 1)
    operator(torch.ones(3))
    assert len(compiled) == 1  # of the kernel that was refused
    assert record().launches == len(TWICE)


@pytest.mark.usefixtures("_forgotten")
def test_a_load_that_fails_for_another_reason_names_the_kernel() -> None:
    operator = declared("unloadable", TWICE, dtypes=[torch.float32], **SCRATCH)
    on_cpu(operator)
    driver_library().fake_refuse(1, 1)
    with pytest.raises(errors.KernelError) as caught:
        operator(torch.ones(3))
    assert caught.value.problem == (
        "the CUDA kernel `part` is not launched: cuModuleLoadData returns CUDA_ERROR_INVALID_VALUE: "
        "invalid argument"
    )
    assert caught.value.got == "grid (2, 1, 1), block (32, 1, 1), 0 bytes of shared memory, on sm_90"


def test_older_nvrtcs_are_those_that_load_and_are_older() -> None:
    version = find_nvrtc().version
    assert [*older_nvrtcs(version)] == []
    assert [each.version for each in older_nvrtcs((version[0] + 1, 0))][:1] == [version]


@pytest.mark.usefixtures("_forgotten")
def test_all_kernels_are_loaded_before_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared("captured", TWICE, dtypes=[torch.float32], **SCRATCH)
    on_cpu(operator)
    with monkeypatch.context() as changed:
        changed.setattr(OnCpu, "is_capturing", lambda self: True)
        with pytest.raises(errors.KernelError) as caught:
            operator(torch.ones(3))
        assert caught.value.got == "the first call of its instance part, float32, STEP=1"
    assert record().launches == 0
    operator(torch.ones(3))
    monkeypatch.setattr(OnCpu, "is_capturing", lambda self: True)
    operator(torch.ones(3))
    assert record().launches == 6


# ---- Messages.


@pytest.mark.parametrize(
    ("launches", "lines"),
    [
        (
            [],
            [
                "`launches=` of a CUDA kernel is not a list of launches",
                "  argument: launches",
                "  expected: a list of at least one `opsmith.Launch(...)`",
                "  got: an empty list",
                '  hint: write `launches=[opsmith.Launch("first", grid=64), opsmith.Launch("second", '
                "grid=1)]`",
            ],
        ),
        (["part"], ["`launches=` of a CUDA kernel is not a list of launches", "  argument: launches"]),
        (
            [FIRST, Launch("folded(sum, result)", grid=1)],
            [
                "`launches[1]` of a CUDA kernel does not name a kernel and its parameters",
                "  argument: launches[1]",
                "  expected: a kernel, and in parentheses some of `x`, `result`, `sums`, `again`",
                "  got: `folded(sum, result)`, which names `sum`",
                "  hint: write for example `opsmith.Launch('fold(again)', grid=1)`",
            ],
        ),
        (
            [Launch("part<float>(x)", grid=1)],
            [
                "`launches[0]` of a CUDA kernel does not name a kernel and its parameters",
                "  argument: launches[0]",
                "  expected: a kernel, and in parentheses some of `x`, `result`, `sums`, `again`",
                "  got: 'part<float>(x)'",
            ],
        ),
        (
            TWICE[:2],
            [
                "no launch of the CUDA kernel gets `result`",
                "  argument: launches",
                "  expected: `result` among the names in one of the launches",
                "  got: `part(x, sums)`, `folded(sums, again)`",
                "  hint: name `result` in parentheses after the kernel that writes it",
            ],
        ),
        (
            [*TWICE[:2], Launch("folded(again, result)", grid="y.numel")],
            [
                "`launches[2].grid` of a CUDA kernel is not a valid launch expression",
                "  argument: launches[2].grid",
                "  expected: names among `x`, `result`, `sums`, `again`",
                "  got: `y.numel`, which names `y`",
            ],
        ),
        (
            [Launch("part(x, sums)", grid=1), *TWICE[1:]],
            [
                "the constants of a CUDA kernel do not match the numbers of its template",
                "  argument: constants",
                "  expected: a dict with `STEP`",
                "  got: none",
            ],
        ),
        (
            [*TWICE, Launch("third(x)", grid=1)],
            ["the CUDA source has no kernel `third`", "  argument: entry"],
        ),
    ],
)
def test_what_a_declaration_refuses(launches: Any, lines: list[str]) -> None:
    with pytest.raises(errors.OpsmithError) as caught:
        declared("wrong", launches, **SCRATCH)
    assert str(caught.value).removeprefix("cuda_launches::wrong: ").splitlines()[: len(lines)] == lines


def test_options_of_one_launch_beside_several() -> None:
    with pytest.raises(errors.UsageError) as caught:
        declared("beside", TWICE, **SCRATCH, grid=1, block=64, entry="part")
    assert caught.value.message().splitlines() == [
        "cuda_launches::beside: a CUDA kernel with `launches=` also has the options of a single launch",
        "  argument: launches",
        "  expected: these options in each `opsmith.Launch(...)`",
        "  got: `entry=`, `grid=`, `block=`",
        '  hint: write `opsmith.Launch("first(x, result)", grid=64, block=128)`',
    ]


def test_a_kernel_that_takes_something_else() -> None:
    text = PARTS.replace("Contiguous<const T, 1> sums, View<T> y", "Contiguous<T> sums, View<T> y, int step")
    operator = declared("other", TWICE, text=text, **SCRATCH)
    with pytest.raises(errors.KernelSignatureError) as caught:
        opsmith.emulate(operator, torch.ones(3))
    assert caught.value.message().splitlines()[:3] == [
        "cuda_launches::other: the parameters of the CUDA kernel are not the tensors and numbers in the "
        "launch "
        "`folded(sums, again)`",
        "  expected: (View<T> sums, View<T> again)",
        "  got: (Contiguous<float32>, View<float32>, int)",
    ]


def test_two_kernels_that_take_a_tensor_in_ways_that_exclude_one_another() -> None:
    text = PARTS.replace("Contiguous<const T, 1> sums", "Contiguous<const float, 1> sums")
    operator = declared("excluding", TWICE, text=text, **SCRATCH, dtypes=[torch.float64])
    with pytest.raises(errors.KernelSignatureError) as caught:
        opsmith.emulate(operator, torch.ones(3, dtype=torch.float64))
    assert caught.value.message().splitlines()[:4] == [
        "cuda_launches::excluding: two launches of the CUDA kernel have contradictory views of `sums`",
        "  argument: sums",
        "  expected: `Contiguous<float64, 1>` in both launches, or `View<...>` in one of them",
        "  got: `Contiguous<float64, 1>` and `Contiguous<const float32, 1>`",
    ]


def test_blocks_beyond_the_limits_name_their_launch() -> None:
    launches = [*TWICE[:2], Launch("folded(again, result)", grid=1, block=2048)]
    with pytest.raises(errors.LaunchError) as caught:
        opsmith.emulate(declared("beyond", launches, **SCRATCH), torch.ones(3))
    assert caught.value.argument == "launches[2].block"
    assert caught.value.expected == "1 to 1024 x 1024 x 64"


def test_no_block_fills_a_result() -> None:
    launches = [
        Launch("part(x, sums)", grid=0, constants={"STEP": 1}),
        Launch("folded(sums, result)", grid=0),
    ]
    with pytest.raises(errors.LaunchError) as caught:
        opsmith.emulate(declared("nothing", launches, scratch={"sums": (64, "x")}), torch.ones(3))
    assert caught.value.argument == "launches[0].grid"
    assert caught.value.hint == "compute the grid from the results, which a kernel must fill completely"
