"""Messages about Triton kernels that cannot be built, or do what they must not: location and hint."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.core import missing_kernels
from opsmith.kernels.triton.interpreter import missing_interpreter

WHERE = f"{__file__}:"


def declared(name: str) -> Any:
    @opsmith.operator(f"triton_messages::{name}")
    def twice(x: Tensor, by: float = 2.0, names: list[int] | None = None) -> Tensor:
        return x * by

    return twice


def plain_kernel(x, result, by, N):  # type: ignore[no-untyped-def]
    raise AssertionError("it is not run")


GIVEN = {"triton": plain_kernel, "grid": 1}


def place() -> str:
    return f"{WHERE}{plain_kernel.__code__.co_firstlineno}"


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("no_grid", {"triton": plain_kernel}, "a kernel in Triton has no grid"),
        ("on_cpu", {**GIVEN, "device": "cpu"}, "a kernel in Triton is declared for `cpu`"),
        ("entry", {**GIVEN, "entry": "f"}, "a kernel in Triton is given unknown options"),
        ("block", {**GIVEN, "block": 32}, "a kernel in Triton is given unknown options"),
        ("both", {**GIVEN, "cpp": "void both() {}"}, "a kernel must have exactly one source"),
        ("alone", {"grid": 1}, "a kernel must have exactly one source"),
        (
            "cpp",
            {"cpp": "void cpp() {}", "constants": {}, "device": "cpu"},
            "a kernel in C++ is given unknown options",
        ),
    ],
)
def test_words_that_do_not_fit_one_another(name: str, words: dict[str, Any], problem: str) -> None:
    words = dict(words)
    with pytest.raises(errors.UsageError) as caught:
        declared(name).kernel(words.pop("device", "cuda"), **words)
    assert caught.value.problem == problem
    assert caught.value.operator == f"triton_messages::{name}"
    assert caught.value.hint


@pytest.mark.parametrize("given", [3, len, "scale"], ids=str)
def test_what_is_no_kernel_in_triton(given: Any) -> None:
    with pytest.raises(errors.KernelSourceError) as caught:
        declared("none").kernel("cuda", triton=given, grid=1)
    lines = caught.value.message().splitlines()
    assert lines[:2] == [
        "triton_messages::none: the value of `triton=` is not a kernel in Triton",
        "  argument: triton",
    ]
    assert lines[-1] == "  hint: write `op.kernel('cuda', triton=function, grid=...)`"


def test_a_lambda_is_no_kernel_in_triton() -> None:
    with pytest.raises(errors.KernelSourceError, match="a kernel in Triton is a lambda"):
        declared("lambda_").kernel("cuda", triton=lambda x_ptr, result_ptr: None, grid=1)


def test_a_kernel_without_source_or_names() -> None:
    made: dict[str, Any] = {}
    exec("def made(x, result): pass", made)
    with pytest.raises(errors.KernelSourceError, match="the source of a kernel in Triton cannot be read"):
        declared("made").kernel("cuda", triton=made["made"], grid=1)

    def many(*x: Any) -> None: ...

    with pytest.raises(errors.KernelSourceError, match=r"a kernel in Triton takes `\*x"):
        declared("many").kernel("cuda", triton=many, grid=1)


def test_a_dtype_that_triton_has_no_pointer_to() -> None:
    with pytest.raises(errors.KernelDtypeError) as caught:
        declared("complex").kernel(
            "cuda", triton=plain_kernel, grid=1, constants={"N": 1}, dtypes=[torch.complex64]
        )
    assert caught.value.problem == "a kernel in Triton is declared for a dtype that it does not support"
    assert caught.value.got == "torch.complex64"


def test_a_parameter_that_nothing_fills() -> None:
    with pytest.raises(errors.KernelSignatureError) as caught:
        declared("unfilled").kernel("cuda", triton=plain_kernel, grid=1)
    assert caught.value.message().splitlines() == [
        "triton_messages::unfilled: the parameter `N` of the Triton kernel is not bound to anything",
        "  argument: N",
        "  expected: the name of an argument or result (`x`, `by`, `names`, `result`), the name of a tensor "
        "with the ending `_ptr`, `_numel`, `_size_0` or `_stride_0`, or a name in `constants=`",
        "  got: `N`",
        f"  where: {place()}",
        "  hint: rename the parameter, or give its value: `constants={'N': ...}`",
    ]


def refused(name: str, function: Any, **words: Any) -> errors.KernelSignatureError:
    with pytest.raises(errors.KernelSignatureError) as caught:
        declared(name).kernel("cuda", triton=function, **{"grid": 1, **words})
    assert caught.value.operator == f"triton_messages::{name}"
    assert caught.value.where == f"{WHERE}{function.__code__.co_firstlineno}"
    return caught.value


def test_parameters_and_words_about_them() -> None:
    error = refused("other", plain_kernel, constants={"N": 1, "BLOCK": 4})
    assert error.problem == "`BLOCK` is not a parameter of the Triton kernel"
    assert error.expected == (
        "one of `x`, `result`, `by`, `N`, or of `num_warps`, `num_stages`, `num_ctas`, `maxnreg`"
    )

    def blind(x): ...  # type: ignore[no-untyped-def]

    error = refused("blind", blind)
    assert error.problem == "the Triton kernel has no parameter for `result`, so it cannot write it"
    assert (error.expected, error.got) == ("a parameter `result` or `result_ptr`", "(x)")

    def some(x, x_size_1, x_stride_1, result): ...  # type: ignore[no-untyped-def]

    error = refused("some", some)
    assert error.problem == "the Triton kernel takes some strides of `x`, but not all"
    assert (error.expected, error.got) == ("x_stride_0, x_stride_1", "x_stride_1")

    def listing(x, names, result): ...  # type: ignore[no-untyped-def]

    error = refused("listing", listing)
    assert error.problem == "a Triton kernel cannot take `names`"
    assert error.hint == "convert it to numbers: `constants={'SOME': lambda names: ...}`"

    error = refused("layout", plain_kernel, constants={"N": 1}, layouts={"x": "transposed"})
    assert error.problem == "`layouts=` has an entry that is not valid"
    assert error.got == "'transposed' for `x`"
    error = refused("layout_of", plain_kernel, constants={"N": 1}, layouts={"by": "contiguous"})
    assert error.got == "'contiguous' for `by`"


def test_functions_that_name_what_there_is_not() -> None:
    error = refused("grid", plain_kernel, grid=lambda y: y.numel(), constants={"N": 1})
    assert error.problem == "the grid names `y`, which the operator does not have"
    assert error.expected == "one of `x`, `by`, `names`, `result`, `N`"
    error = refused("constant", plain_kernel, constants={"N": lambda size: size})
    assert error.problem == "the constant `N` names `size`, which the operator does not have"


def test_results_that_no_kernel_in_triton_gives() -> None:
    @opsmith.operator("triton_messages::listed")
    def listed(x: Tensor) -> list[Tensor]:
        return [x.clone()]

    with pytest.raises(errors.KernelSignatureError) as caught:
        listed.kernel("cuda", triton=plain_kernel, grid=1)
    assert caught.value.problem == "a Triton kernel cannot return a list, or a result that may be None"
    assert caught.value.got == "list[Tensor]"


@pytest.mark.parametrize("grid", [0.5, True, (1, 2, 3, 4), (), -1], ids=str)
def test_what_is_no_grid(grid: Any) -> None:
    with pytest.raises(errors.LaunchError) as caught:
        declared("bad_grid").kernel("cuda", triton=plain_kernel, grid=grid, constants={"N": 1})
    assert caught.value.problem == "the grid of the Triton kernel is not valid"
    assert caught.value.expected == "one to three whole numbers, none of them negative"
    assert caught.value.where == place()


def kernel_of(operator: Any) -> Any:
    return operator.specification.kernels[0].function


def test_a_grid_that_leaves_results_unwritten() -> None:
    operator = declared("unwritten").kernel(
        "cuda", triton=plain_kernel, grid=lambda x: x.numel() // 8, constants={"N": 1}
    )
    with pytest.raises(errors.LaunchError) as caught:
        kernel_of(operator).interpreted(torch.ones(3))
    assert caught.value.message().splitlines() == [
        "triton_messages::unwritten: the grid of the Triton kernel has no programs that could write `result`",
        "  argument: result",
        "  expected: a grid with a program for each part of each result",
        "  got: grid (0,), `result` [3]",
        f"  where: {place()}",
        "  hint: count the programs by the results, as in `grid=lambda result: ...`",
    ]


def test_a_grid_that_is_too_large() -> None:
    with pytest.raises(errors.LaunchError) as caught:
        declared("large").kernel("cuda", triton=plain_kernel, grid=(1, 70_000), constants={"N": 1})
    assert caught.value.problem == "the grid of the Triton kernel has more programs than a GPU takes"
    assert (caught.value.expected, caught.value.got) == ("at most 65535 in dimension 1", "(1, 70000)")


def test_sizes_of_a_result_with_other_dimensions() -> None:
    def flat(x, result, result_size_1, result_stride_0, result_stride_1): ...  # type: ignore[no-untyped-def]

    operator = declared("flat").kernel("cuda", triton=flat, grid=1)
    with pytest.raises(errors.KernelSignatureError) as caught:
        kernel_of(operator).interpreted(torch.ones(3))
    assert (
        caught.value.problem == "the result that the Triton kernel writes differs from the reference's result"
    )
    assert (caught.value.expected, caught.value.got) == ("1 dimension", "sizes or strides of 2 dimensions")


@pytest.fixture
def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.usefixtures("_no_triton")
def test_without_triton_the_reference_runs_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared("missing").kernel("cuda", triton=plain_kernel, grid=1, constants={"N": 1})
    operator.samples(lambda make: [(make(3),)])
    hint = "pip install '.[triton]' in a checkout of opsmith; until then the reference computes the operator"
    monkeypatch.setattr(missing_kernels, "_warned", False)
    with pytest.warns(RuntimeWarning, match="the reference runs in place of its kernel in Triton"):
        refusal = kernel_of(operator).refusal([torch.ones(3), 2.0, None])
    assert refusal is not None
    assert refusal.startswith("Triton is not installed: ")
    assert refusal.endswith(hint)
    reason = f"Triton is not installed: {hint}"
    assert missing_interpreter() == reason
    report = opsmith.check(operator, only=["triton"])
    [outcome] = [each for each in report.outcomes if each.property == "triton"]
    assert (outcome.status, outcome.reason) == ("skipped", reason)


@pytest.mark.usefixtures("_no_triton")
def test_without_triton_a_strict_kernel_is_an_error() -> None:
    operator = declared("strict").kernel("cuda", triton=plain_kernel, grid=1, constants={"N": 1}, strict=True)
    with pytest.raises(errors.ToolchainError) as caught:
        kernel_of(operator).refusal([torch.ones(3), 2.0, None])
    lines = caught.value.message().splitlines()
    assert lines[0] == "Triton is not installed"
    assert lines[1] == "  expected: the package `triton`, which comes with torch for CUDA"
    assert lines[2] == f"  got: none on {sys.platform}"


def test_an_operator_without_such_a_kernel_skips_the_property() -> None:
    operator = declared("none_at_all")
    operator.samples(lambda make: [(make(3),)])
    report = opsmith.check(operator, only=["triton"])
    [outcome] = [each for each in report.outcomes if each.property == "triton"]
    assert (outcome.status, outcome.reason) == ("skipped", "the operator has no kernel in Triton")


def test_the_interpreter_of_an_old_triton_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.kernels.triton.interpreter.triton_module", lambda: Old)
    assert missing_interpreter() == (
        "the interpreter of Triton 3.6.0 does not run loops with NumPy 2.4: check the kernel under a later "
        "torch, or on a GPU"
    )


class Old:
    """Another version of Triton."""

    __version__ = "3.6.0"


def test_the_interpreter_needs_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.kernels.triton.interpreter.triton_module", lambda: New)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert missing_interpreter() == (
        "Triton's interpreter needs NumPy, which is not installed: `pip install numpy`"
    )


class New:
    """A version of Triton whose interpreter is used."""

    __version__ = "3.10.1+git"
