"""Messages about CUDA kernels that cannot be built or launched, and what explain reports meanwhile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import driver_library, forget, on_cpu, record
from torch import Tensor
from torch._subclasses import FakeTensorMode

import opsmith
from opsmith import errors
from opsmith.core import missing_kernels
from opsmith.kernels.cuda import limits, nvrtc
from opsmith.kernels.runtime.driver import TorchCuda
from opsmith.torch_library import capabilities

HERE = Path(__file__)
RIGHT = """
template <class T>
__global__ void twice(Contiguous<const T> x, double by, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * T(by);
}
"""


def declared(name: str) -> Any:
    @opsmith.operator(f"cuda_messages::{name}")
    def twice(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    return twice


def given(name: str, text: str = RIGHT, **words: Any) -> Any:
    """An operator with a kernel that a CPU runs."""
    operator = declared(name).kernel("cuda", cuda=text, entry="twice", **{"grid": 1, **words})
    on_cpu(operator)
    return operator


def line_of(text: str) -> int:
    return 1 + next(at for at, line in enumerate(HERE.read_text().splitlines()) if line.startswith(text))


def test_a_compile_error_shows_the_author_s_line_and_column() -> None:
    wrong = given(
        "wrong_line",
        r"""
template <class T>
__global__ void twice(Contiguous<const T> x, double by, Contiguous<T> y) {
	OPSMITH_EACH(i, y.numel()) y[i] = x[i] * bye;
}
""",
    )
    with pytest.raises(errors.CompileError) as caught:
        wrong(torch.ones(2))
    at = line_of("\tOPSMITH_EACH(i, y.numel()) y[i] = x[i] * bye;")
    assert caught.value.message().splitlines() == [
        "cuda_messages::wrong_line: NVRTC refuses the kernel",
        f'  got: {HERE}:{at}:43: identifier "bye" is undefined',
        "        \tOPSMITH_EACH(i, y.numel()) y[i] = x[i] * bye;",
        "        \t                                         ^",
        f"  where: {HERE}:{at - 1}",
        "  hint: fix the first error; the later errors may follow from it",
    ]


def test_a_type_that_no_kernel_takes_is_told_at_the_author_s_function() -> None:
    wrong = given("pointers", "__global__ void twice(const float* x, double by, View<float> y) {}")
    with pytest.raises(errors.CompileError, match="a kernel takes views, Optional of them") as caught:
        wrong(torch.ones(2))
    at = next(
        n for n, line in enumerate(HERE.read_text().splitlines(), 1) if "void twice(const float* x" in line
    )
    assert caught.value.where == f"{HERE}:{at}"
    assert (caught.value.got or "").startswith(f"{HERE}:{at}: static assertion failed")


def test_other_parameters_than_the_operator_s() -> None:
    wrong = given("parameters", "__global__ void twice(View<const float> x, int by, View<float> y) {}")
    with pytest.raises(errors.KernelSignatureError) as caught:
        wrong(torch.ones(2))
    assert caught.value.message().splitlines()[:4] == [
        "cuda_messages::parameters: the parameters of the CUDA kernel are not the operator's arguments and "
        "results",
        "  argument: by",
        "  expected: (View<const float> x, double by, View<float> result)",
        "  got: (View<const float32>, int, View<float32>)",
    ]
    assert caught.value.hint == "write `double by`"
    assert given("mended", "__global__ void twice(View<const float> x, double by, View<float> y) {}")


def test_parameters_in_another_order() -> None:
    wrong = given("order", "__global__ void twice(View<const float> result, double by, View<float> x) {}")
    with pytest.raises(errors.KernelSignatureError) as caught:
        wrong(torch.ones(2))
    assert "the CUDA kernel has the operator's argument names in another order" in str(caught.value)
    assert caught.value.expected == "(x, by, result)"
    assert caught.value.got == "(View<const float> result, double by, View<float> x)"
    assert given("ordered", "__global__ void twice(View<const float> x, double by, View<float> result) {}")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("View<const float> x, short by, View<float> y", "write `double by` in place of `short by`"),
        ("float* x, double by, View<float> y", "write `Contiguous<const float> x` in place of `float* x`"),
    ],
    ids=str,
)
def test_a_parameter_that_no_kernel_takes_is_named(text: str, hint: str) -> None:
    wrong = given("never", f"__global__ void twice({text}) {{}}")
    with pytest.raises(errors.CompileError) as by_nvrtc:
        wrong(torch.ones(2))
    with pytest.raises(errors.CompileError) as on_the_cpu:
        opsmith.emulate(wrong, torch.ones(2))
    assert by_nvrtc.value.hint == on_the_cpu.value.hint == hint


def test_a_result_of_another_dtype() -> None:
    wrong = given("dtype", "__global__ void twice(View<const float> x, double by, View<double, 2> y) {}")
    with pytest.raises(errors.KernelSignatureError) as caught:
        wrong(torch.ones(2))
    assert caught.value.message().splitlines()[:4] == [
        "cuda_messages::dtype: the result that the CUDA kernel writes differs from the reference's result",
        "  argument: result",
        "  expected: float32 of 1 dimension",
        "  got: View<float64, 2>",
    ]


def test_arguments_that_no_kernel_takes() -> None:
    @opsmith.operator("cuda_messages::cast")
    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    cast.kernel("cuda", cuda="__global__ void cast(View<const float> x, View<float> y) {}", grid=1)
    on_cpu(cast)
    with pytest.raises(errors.KernelSignatureError) as caught:
        cast(torch.ones(2), torch.float32)
    assert caught.value.message().splitlines()[:4] == [
        "cuda_messages::cast: a CUDA kernel cannot take `dtype`",
        "  argument: dtype",
        "  expected: a tensor, int, float, bool or None, or a list of tensors, ints, floats or bools",
        "  got: torch.dtype",
    ]


@pytest.mark.parametrize(
    ("text", "problem", "got"),
    [
        ("void twice() {}", "the CUDA source has no kernel `twice`", "no function that is `__global__ void`"),
        (
            "__global__ void thrice(View<const float> x) {}",
            "the CUDA source has no kernel `twice`",
            "kernels: thrice",
        ),
        (
            "template <class T, typename U>\n__global__ void twice(View<T> x) {}",
            "the CUDA kernel `twice` is a template over 2 types",
            "template <class T, typename U>",
        ),
    ],
)
def test_a_source_without_the_kernel(text: str, problem: str, got: str) -> None:
    with pytest.raises(errors.KernelSourceError) as caught:
        declared("source").kernel("cuda", cuda=text, entry="twice", grid=1)
    assert (caught.value.problem, caught.value.got) == (problem, got)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(errors.KernelSourceError, match="the file of a CUDA kernel cannot be read") as caught:
        declared("no_file").kernel("cuda", cuda_file="nowhere.cu", entry="twice", grid=1)
    assert caught.value.argument == "cuda_file"
    assert (caught.value.got or "").startswith(f"{HERE.with_name('nowhere.cu')}: ")


@pytest.mark.parametrize(
    ("device", "words", "problem"),
    [
        ("cpu", {"cuda": RIGHT, "grid": 1}, "a kernel in CUDA C++ is declared for `cpu`"),
        ("cuda", {"cuda": RIGHT}, "a kernel in CUDA C++ has no grid"),
        (
            "cuda",
            {"cuda": RIGHT, "gird": 1},
            "a kernel in CUDA C++ is given unknown options",
        ),
        ("cpu", {"cpp": "void twice() {}", "grid": 1}, "a kernel in C++ is given unknown options"),
        ("cuda", {"cuda": RIGHT, "cuda_file": "a.cu", "grid": 1}, "a kernel must have exactly one source"),
        ("cuda", {"grid": 1}, "a kernel must have exactly one source"),
    ],
)
def test_words_that_do_not_fit(device: str, words: dict[str, Any], problem: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        declared("words").kernel(device, **words)
    assert caught.value.problem == problem


def test_a_source_that_is_misspelt_is_named() -> None:
    with pytest.raises(errors.UsageError) as caught:
        declared("misspelt").kernel("cpu", cp="void twice() {}")
    assert (caught.value.got, caught.value.hint) == ("`cp=`", "did you mean `cpp=`?")


def test_dtypes_that_have_no_type_in_cuda() -> None:
    with pytest.raises(errors.KernelDtypeError) as caught:
        declared("dtypes").kernel("cuda", cuda=RIGHT, grid=1, dtypes=[torch.complex64])
    problem = "a kernel in CUDA C++ is declared for a dtype that it does not support"
    assert (caught.value.problem, caught.value.got) == (problem, "torch.complex64")


def test_dtypes_for_what_is_no_template() -> None:
    with pytest.raises(errors.KernelDtypeError) as caught:
        declared("plain").kernel(
            "cuda", cuda="__global__ void twice() {}", entry="twice", grid=1, dtypes=[torch.float32]
        )
    assert caught.value.problem == "dtypes are given for a CUDA function that is not a template over a type"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            {"grid": "ceil(y.numel / 256)"},
            [
                "`grid` of a CUDA kernel is not a valid launch expression",
                "  argument: grid",
                "  expected: names among `x`, `by`, `result`",
                "  got: `ceil(y.numel / 256)`, which names `y`",
            ],
        ),
        (
            {"grid": "x.numel ** 2"},
            ["  got: `x.numel ** 2`: `x.numel ** 2` is not allowed"],
        ),
        (
            {"block": lambda x, z: 1},
            ["  expected: a function of some of `x`, `by`, `result`", "  got: a function of `z`"],
        ),
        ({"grid": (1, 1, 1, 1)}, ["  expected: 1 to 3 numbers", "  got: 4 numbers"]),
        ({"shared": 1.5}, ["  expected: a whole number, a text, or a function", "  got: 1.5"]),
        (
            {"constants": {"K": 3}},
            [
                "the constants of a CUDA kernel do not match the numbers of its template",
                "  expected: no constants: the template has no number",
                "  got: `K`",
                "  hint: leave `K` out, or write `template <class T, int K>`",
            ],
        ),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else None,
)
def test_what_is_said_of_a_launch_is_read_when_it_is_declared(words: Any, lines: list[str]) -> None:
    operator = declared("said")
    with pytest.raises(errors.LaunchError) as caught:
        operator.kernel("cuda", cuda=RIGHT, entry="twice", **{"grid": 1, **words})
    said = str(caught.value).replace("cuda_messages::said: ", "").splitlines()
    assert [line for line in said if line in lines] == lines


def test_a_template_whose_number_is_not_given() -> None:
    text = RIGHT.replace("class T", "class T, int K")
    with pytest.raises(errors.LaunchError) as caught:
        declared("number").kernel("cuda", cuda=text, entry="twice", grid=1)
    assert caught.value.hint == "write `constants={'K': 'x.shape[0]'}`"


@pytest.mark.parametrize(
    ("words", "problem", "got"),
    [
        (
            {"grid": "result.numel / 2"},
            "`grid` of a CUDA kernel cannot be computed",
            "1.5, which is not a whole number",
        ),
        (
            {"grid": "ceil(3 / (x.dim - 1))"},
            "cannot be computed",
            "`ceil(3 / (x.dim - 1))`: it divides by zero",
        ),
        (
            {"grid": "x.shape[2]"},
            "cannot be computed",
            "`x.shape[2]`: `x.shape[2]` is out of range: there are 1 items",
        ),
        ({"grid": "0 * x.numel"}, "outside the limits of a GPU", "0, for x [3], result [3]"),
        ({"block": (64, 32)}, "outside the limits of a GPU", "64 x 32, for x [3], result [3]"),
        (
            {"block": lambda x: (1, 1, 65)},
            "outside the limits of a GPU",
            "1 x 1 x 65, for x [3], result [3]",
        ),
        ({"shared": "-x.numel"}, "outside the limits of a GPU", "-3, for x [3], result [3]"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else None,
)
def test_what_comes_of_it_in_a_call(words: Any, problem: str, got: str) -> None:
    forget()
    operator = given("call", **words)
    with pytest.raises(errors.LaunchError) as caught:
        operator(torch.ones(3))
    assert problem in caught.value.problem
    assert caught.value.got == got
    assert record().launches == 0


def test_an_empty_tensor_launches_nothing_whatever_the_grid() -> None:
    forget()
    operator = given("empty", grid="result.numel")
    assert operator(torch.ones(0, 3)).shape == (0, 3)
    assert record().launches == 0


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch"),
        (999, "status 999"),
    ],
)
def test_what_the_driver_refuses_is_an_error_of_python(status: int, said: str) -> None:
    operator = given("refused")
    forget()
    driver_library().fake_fail(status)
    with pytest.raises(errors.KernelError) as caught:
        operator(torch.ones(2))
    at = line_of("__global__ void twice(Contiguous<const T> x, double by")
    assert caught.value.message().splitlines()[:4] == [
        f"cuda_messages::refused: the CUDA kernel is not launched: cuLaunchKernel returns {said}",
        "  got: grid (1, 1, 1), block (256, 1, 1), 0 bytes of shared memory, on sm_90",
        f"  where: {HERE}:{at}",
        "  hint: see the kernel's resources with `opsmith compile`; a fault of an earlier kernel may also "
        "appear here: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer",
    ]
    assert record().depth == 0


def test_more_shared_memory_is_asked_for_and_refused_beyond_what_there_is() -> None:
    operator = given("shared", shared="x.shape[0] * 1024")
    kernel: Any = operator.specification.kernels[0].function
    forget()
    for kilobytes, allowed in ((1, 0), (64, 64 * 1024), (96, 96 * 1024), (80, 96 * 1024)):
        operator(torch.ones(kilobytes))
        assert (record().shared, record().allowed) == (kilobytes * 1024, allowed)
    assert record().loads == len(kernel.functions.loaded) == 1
    with pytest.raises(errors.LaunchError) as caught:
        operator(torch.ones(228))
    assert caught.value.message().splitlines()[:4] == [
        "cuda_messages::shared: a block of the CUDA kernel needs more shared memory than the GPU has for "
        "one block",
        "  argument: shared",
        f"  expected: at most {227 * 1024} bytes on sm_90, static and dynamic together",
        f"  got: 0 bytes of static and {228 * 1024} bytes of dynamic shared memory",
    ]


def test_where_the_gpu_is_unknown_the_driver_says_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "multiprocessor_of", lambda architecture: None)
    operator = given("unknown_gpu", shared="x.shape[0] * 1024")
    forget()
    with pytest.raises(errors.KernelError, match="cuFuncSetAttribute returns CUDA_ERROR_INVALID_VALUE"):
        operator(torch.ones(228))


def test_without_nvrtc_the_reference_runs_and_explain_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())
    monkeypatch.setattr(missing_kernels, "_warned", False)
    operator, strict = given("missing"), given("missing_strictly", strict=True)
    with pytest.warns(RuntimeWarning, match="the reference runs in place of its kernel in CUDA, .*no NVRTC"):
        assert torch.equal(operator(torch.ones(2)), torch.full((2,), 2.0))
    reason = operator.explain(torch.ones(2)).rejected[0].partition(": ")[2]
    assert reason == (
        "there is no NVRTC, which compiles CUDA C++: none is found; pip install '.[cuda]' in a checkout of "
        "opsmith; or `pip install nvidia-cuda-nvrtc`, or name a toolkit in CUDA_HOME; until then the "
        "reference computes the operator"
    )
    with pytest.raises(errors.ToolchainError, match="there is no NVRTC"):
        strict(torch.ones(2))


def test_rocm_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    operator = declared("rocm").kernel("cuda", cuda=RIGHT, entry="twice", grid=1)
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
    (reason,) = operator.explain(x).rejected
    assert reason.endswith(": this torch is built for ROCm, but CUDA C++ is for NVIDIA's GPUs")


def test_a_tensor_on_another_device_is_refused_with_the_reason() -> None:
    operator = declared("elsewhere").kernel("cuda", cuda=RIGHT, entry="twice", grid=1)
    (reason,) = operator.explain(torch.ones(2)).rejected
    assert reason.endswith(": a tensor is on cpu")
    assert torch.equal(operator(torch.ones(2)), torch.full((2,), 2.0))


def test_tensors_on_two_gpus_are_refused_with_the_reason() -> None:
    operator = declared("apart").kernel("cuda", cuda=RIGHT, entry="twice", grid=1)
    with FakeTensorMode():
        x, y = torch.empty(3, device="cuda:0"), torch.empty(3, device="cuda:1")
    kernel: Any = operator.specification.kernels[0].function
    assert kernel.refusal([x, y]) == "its tensors are on cuda:0, cuda:1"
    assert kernel.refusal([2.0]) == "its tensors are on no device"


@pytest.mark.skipif(not capabilities.on("fake_tensors"), reason="without them no size is a letter")
def test_where_sizes_are_letters_a_dtype_alone_is_refused() -> None:
    operator = declared("letters").kernel("cuda", cuda=RIGHT, entry="twice", grid=1)
    kernel: Any = operator.specification.kernels[0].function
    mode: Any = capabilities.symbolic_mode()
    x, whole = (mode.from_tensor(torch.ones(5, dtype=each)) for each in (torch.float32, torch.int64))
    assert kernel.refusal([x, 2.0]) is None
    assert kernel.refusal([whole, 2.0]) == "`x` is int64, but the kernel takes float32 or float64"


def test_a_call_on_a_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCuda, "architecture", lambda self, index: "sm_80")
    operator = declared("explained").kernel("cuda", cuda=RIGHT, entry="twice", grid=1)
    with FakeTensorMode():
        x, whole = torch.empty(3, 2, device="cuda"), torch.empty(2, device="cuda", dtype=torch.int64)
    said = operator.explain(x.mT)
    assert said.forward.startswith(f"kernel for cuda, {HERE}:")
    copied = "`x`, which is not contiguous", "`result`, which the reference does not return as contiguous"
    assert said.copies == copied
    (reason,) = operator.explain(whole).rejected
    assert reason.endswith(": `x` is int64, but the kernel takes float32 or float64")


def test_reload_and_declaring_again(tmp_path: Path) -> None:
    file = tmp_path / "twice.cu"
    file.write_text(RIGHT.replace("class T", "class T, int K = 1"))
    operator = declared("again").kernel("cuda", cuda_file=file, entry="twice", grid=1)
    kernel = on_cpu(operator)
    assert kernel.source.constants == ("K",)
    choice: Any = kernel.choose([torch.ones(2), 2.0], "sm_80")
    before = kernel.compile(choice.instances[0], "sm_80")
    file.write_text(RIGHT)
    operator.reload()
    assert kernel.source.constants == ()
    choice = kernel.choose([torch.ones(2), 2.0], "sm_80")
    assert kernel.compile(choice.instances[0], "sm_80").name != before.name
    operator.kernel("cuda", cuda=RIGHT, entry="twice", grid=2)
    assert len([each for each in operator.specification.kernels if each.device == "cuda"]) == 1
    file.unlink()
    with pytest.raises(errors.KernelSourceError):
        kernel.reload()
    assert kernel.source.constants == ()


def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.kernels.runtime import driver

    def broken(library: Any) -> Any:
        raise driver.DriverError("cuInit", 100, "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected")

    monkeypatch.setattr(driver, "Driver", broken)
    monkeypatch.setattr(driver, "LIBRARIES", (None,))  # this process
    with pytest.raises(errors.ToolchainError, match="the CUDA driver does not start") as caught:
        driver.find_driver.__wrapped__()
    assert caught.value.got == "cuInit returns CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"


BOUNDED = RIGHT.replace("__global__ void", "__global__ void __launch_bounds__((32))")
STATIC = """
__global__ void twice(Contiguous<const float> x, double by, Contiguous<float> y) {
  __shared__ volatile float held[10 * 1024];
  OPSMITH_EACH(i, y.numel()) { held[i] = x[i]; y[i] = held[i] * by; }
}
"""


def test_a_block_beyond_launch_bounds_is_refused_before_the_launch() -> None:
    operator = given("bounded", BOUNDED, block=(8, 8))
    forget()
    with pytest.raises(
        errors.LaunchError, match="more threads than `__launch_bounds__` of the CUDA kernel"
    ) as caught:
        operator(torch.ones(2))
    assert (caught.value.expected, caught.value.got) == ("at most 32 threads", "64 threads, 8 x 8 x 1")
    assert record().launches == 0
    given("unbounded", BOUNDED, block=(8, 4))(torch.ones(2))
    assert record().launches == 1


MANY = """
__global__ void twice(Contiguous<const float> x, double by, Contiguous<float> y) {
  float held[96];
#pragma unroll
  for (int k = 0; k < 96; k++) held[k] = x[threadIdx.x + k];
  for (int round = 0; round < y.numel(); round++) {
#pragma unroll
    for (int k = 0; k < 96; k++) held[k] = held[k] * held[(k + 1) % 96] + round;
  }
#pragma unroll
  for (int k = 0; k < 96; k++) y[threadIdx.x * 96 + k] = held[k];
}
"""


def test_a_block_with_too_many_registers_is_refused_before_the_launch() -> None:
    operator = given("many_registers", MANY, block=1024)
    forget()
    with pytest.raises(errors.LaunchError) as caught:
        operator(torch.ones(2))
    assert caught.value.problem == "a block of the CUDA kernel needs more registers than a block may have"
    found = re.fullmatch(
        r"at most (\d+) threads of (\d+) registers each: a block has 65536 registers",
        caught.value.expected or "",
    )
    assert found is not None
    most, registers = map(int, found.groups())
    assert most < 1024
    assert registers > 64
    assert caught.value.got == "1024 threads, 1024 x 1 x 1"
    assert (caught.value.hint or "").startswith("write `__launch_bounds__(1024)`")
    assert record().launches == 0
    given("fewer_registers", MANY, block=most)(torch.ones(2))
    given("bounded_registers", MANY.replace("void", "void __launch_bounds__(1024)"), block=1024)(
        torch.ones(2)
    )
    assert record().launches == 2


def test_static_and_dynamic_shared_memory_together_need_the_driver_s_leave() -> None:
    """40 KiB and 10 KiB are more than the 48 KiB that every kernel may use."""
    operator = given("shared_twice", STATIC, shared=10 * 1024)
    forget()
    operator(torch.ones(2))
    assert (record().allowed, record().shared) == (10 * 1024, 10 * 1024)
    forget()
    given("shared_once", STATIC, shared=8 * 1024)(torch.ones(2))
    assert record().allowed == 0


def test_a_first_call_while_a_graph_is_captured_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = given("captured")
    forget()
    kernel = operator.specification.kernels[0].function
    capturing = True
    monkeypatch.setattr(type(kernel.machine), "is_capturing", lambda self: capturing)
    with pytest.raises(errors.KernelError, match="cannot be loaded while a CUDA graph is captured") as caught:
        operator(torch.ones(2))
    assert caught.value.got == "the first call of its instance float32"
    capturing = False
    operator(torch.ones(2))
    capturing = True
    operator(torch.ones(2))
    assert record().launches == 2
