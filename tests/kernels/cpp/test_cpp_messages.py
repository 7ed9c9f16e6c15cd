"""Messages about C++ kernels that cannot be built: the author's own file, line and column, and the hint."""

from __future__ import annotations

import errno
import inspect
import re
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build import toolchain
from opsmith.core import missing_kernels

HERE = Path(__file__)


def declared(name: str) -> Any:
    @opsmith.operator(f"cpp_messages::{name}")
    def twice(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    return twice


def line_of(text: str) -> int:
    """The line of this file that begins with a text: a word of C++ that stands at the margin."""
    return 1 + next(at for at, line in enumerate(HERE.read_text().splitlines()) if line.startswith(text))


@pytest.mark.slow
def test_a_compile_error_shows_the_author_s_line_and_column() -> None:
    wrong = declared("wrong_line").kernel(
        "cpu",
        entry="twice",
        cpp=r"""
template <class T>
void twice(Contiguous<const T> x, double by, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++)
    y[i] = x[i] * byy;
}
""",
    )
    with pytest.raises(errors.CompileError) as caught:
        wrong(torch.ones(2))
    first, at = line_of("template <class T>"), line_of("    y[i] = x[i] * byy;")
    assert caught.value.message().splitlines() == [
        "cpp_messages::wrong_line: the C++ compiler refuses the kernel",
        f"  got: {HERE}:{at}:19: 'byy' was not declared in this scope; did you mean 'by'?",
        "            y[i] = x[i] * byy;",
        "                          ^",
        f"  where: {HERE}:{first + 1}",
        "  hint: fix the first error; the later errors may follow from it",
    ]


@pytest.mark.slow
def test_an_error_inside_the_header_is_told_at_the_author_s_function(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cpp"
    file.write_text("// a kernel\n\nvoid twice(const float* x, double by, View<float> y) {}\n")
    wrong = declared("wrong_parameter").kernel("cpu", entry="twice", cpp_file=file)
    with pytest.raises(errors.CompileError) as caught:
        wrong(torch.ones(2))
    message = str(caught.value)
    assert f"{file}:3: " in message
    assert "a kernel takes views, std::optional of them, int64_t, double, bool" in message
    assert "opsmith.h" not in message.partition("where:")[0].splitlines()[1]


@pytest.mark.slow
def test_it_is_refused_each_time_and_mended_by_reload(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cpp"
    file.write_text("void twice(View<const float> x, double by, View<float> y) { oh }\n")
    operator = declared("fixed").kernel("cpu", entry="twice", cpp_file=file)
    for _ in range(2):
        with pytest.raises(errors.CompileError, match="'oh' was not declared"):
            operator(torch.ones(2))
    file.write_text("void twice(View<const float, 1> x, double by, View<float, 1> y) { y(0) = y(1) = 5; }\n")
    assert operator.reload()(torch.ones(2)).tolist() == [5, 5]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("parameters", "got", "name", "expected", "hint"),
    [
        (
            "View<const float> x, View<float> y",
            "(View<const float32>, View<float32>)",
            None,
            "View<const T> x, double by, View<T> result",
            "give the kernel these parameters in this order; a view may be Contiguous or ChannelsLast, and "
            "may state its number of dimensions",
        ),
        (
            "View<const float> x, double by, View<const float> y",
            "(View<const float32>, double, View<const float32>)",
            "result",
            "View<const float> x, double by, View<float> result",
            "write `View<float> result`",
        ),
        (
            "Contiguous<float, 1> x, double by, View<float> y",
            "(Contiguous<float32, 1>, double, View<float32>)",
            "x",
            "Contiguous<const float, 1> x, double by, View<float> result",
            "write `Contiguous<const float, 1> x`: the kernel may only read `x`, because `mutates=` does not "
            "name it",
        ),
        (
            "View<const float> x, int64_t by, View<float, 2> y",
            "(View<const float32>, int64_t, View<float32, 2>)",
            "by",
            "View<const float> x, double by, View<float, 2> result",
            "write `double by`",
        ),
        (
            "View<const float> x, std::optional<double> by, Contiguous<float> y",
            "(View<const float32>, std::optional<double>, Contiguous<float32>)",
            "by",
            "View<const float> x, double by, Contiguous<float> result",
            "write `double by`",
        ),
    ],
)
def test_other_parameters_than_the_operator_s(
    parameters: str, got: str, name: str | None, expected: str, hint: str
) -> None:
    operator = declared("parameters").kernel("cpu", entry="f", cpp=f"void f({parameters}) {{}}")
    with pytest.raises(errors.KernelSignatureError) as caught:
        operator(torch.ones(2))
    assert caught.value.message().splitlines() == [
        "cpp_messages::parameters: the parameters of the C++ kernel are not the operator's arguments and "
        "results",
        *([] if name is None else [f"  argument: {name}"]),
        f"  expected: ({expected})",
        f"  got: {got}",
        f"  where: {operator.specification.kernels[0].where}",
        f"  hint: {hint}",
    ]


def test_parameters_in_another_order() -> None:
    @opsmith.operator("cpp_messages::minus")
    def minus(x: Tensor, y: Tensor) -> Tensor:
        return x - y

    of = "Contiguous<const float>"
    text = f"void minus({of} {{}}, {of} {{}}, Contiguous<float> out) {{{{ out[0] = {{}}[0] - {{}}[0]; }}}}"
    operator = minus.kernel("cpu", cpp=text.format("y", "x", "x", "y"))
    with pytest.raises(errors.KernelSignatureError) as caught:
        operator(torch.ones(1), torch.zeros(1))
    assert caught.value.message().splitlines() == [
        "cpp_messages::minus: the C++ kernel has the operator's argument names in another order, but gets "
        "the arguments by position",
        "  expected: (x, y, result)",
        "  got: (Contiguous<const float> y, Contiguous<const float> x, Contiguous<float> out)",
        f"  where: {operator.specification.kernels[0].where}",
        "  hint: write the kernel's parameters in this order, or give them different names",
    ]
    for names in (("x", "y", "x", "y"), ("b", "a", "b", "a")):
        assert minus.kernel("cpu", cpp=text.format(*names))(torch.ones(1), torch.zeros(1)).item() == 1.0


RIGHT = ["Contiguous<const T> x", "double by", "Contiguous<T> y"]


@pytest.mark.xdist_group("misdeclared")
@pytest.mark.parametrize(
    ("at", "wrong", "kind"),
    [
        (0, "Contiguous<T> x", errors.KernelSignatureError),
        (0, "const T* x", errors.CompileError),
        (1, "T by", errors.CompileError),
        pytest.param(1, "float by", errors.CompileError, marks=pytest.mark.slow),
        pytest.param(1, "const T by", errors.CompileError, marks=pytest.mark.slow),
        pytest.param(0, "Contiguous<const T>& x", errors.CompileError, marks=pytest.mark.slow),
        pytest.param(0, "std::vector<T> x", errors.CompileError, marks=pytest.mark.slow),
        pytest.param(1, "int by", errors.CompileError, marks=pytest.mark.slow),
        pytest.param(1, "int64_t by", errors.KernelSignatureError, marks=pytest.mark.slow),
        pytest.param(1, "std::vector<double> by", errors.CompileError, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_hint_for_a_parameter_names_the_argument_and_what_to_write(
    at: int, wrong: str, kind: type[errors.OpsmithError]
) -> None:
    def text(parameters: list[str]) -> str:
        body = "for (int64_t i = 0; i < y.numel(); i++) y[i] = x[i] * by;" if parameters == RIGHT else ""
        return f"template <class T> void f({', '.join(parameters)}) {{ {body} }}"

    operator = declared("misdeclared").kernel(
        "cpu", entry="f", cpp=text([*RIGHT[:at], wrong, *RIGHT[at + 1 :]])
    )
    line = inspect.currentframe().f_lineno - 3  # type: ignore[union-attr]
    with pytest.raises(kind) as caught:
        operator(torch.ones(2))
    name = ("x", "by", "result")[at]
    assert caught.value.argument == name
    if kind is errors.CompileError:
        assert caught.value.where == f"{HERE}:{line}"  # of the call: no file has the text
        assert f"in place of `{wrong}`" in (caught.value.hint or "")
    written = re.match(r"write `(.*?)`", caught.value.hint or "")
    assert written is not None
    if kind is errors.KernelSignatureError:
        assert written[1] in str(caught.value.expected)
    mended = [*RIGHT[:at], written[1], *RIGHT[at + 1 :]]
    assert mended == RIGHT
    operator = declared("misdeclared").kernel("cpu", entry="f", cpp=text(mended))
    assert operator(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.slow
def test_a_result_of_another_dtype_than_the_reference_s() -> None:
    operator = declared("other_result").kernel(
        "cpu", entry="f", cpp="void f(View<const float> x, double by, View<double, 3> y) {}"
    )
    with pytest.raises(errors.KernelSignatureError) as caught:
        operator(torch.ones(2))
    assert caught.value.message().splitlines()[:4] == [
        "cpp_messages::other_result: the result that the C++ kernel writes differs from the reference's "
        "result",
        "  argument: result",
        "  expected: float32 of 1 dimension",
        "  got: View<float64, 3>",
    ]


def test_an_argument_that_c_plus_plus_cannot_take() -> None:
    @opsmith.operator("cpp_messages::of_dtype")
    def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    of_dtype.kernel("cpu", cpp="void of_dtype(View<const float> x, View<float> y) {}")
    with pytest.raises(errors.KernelSignatureError) as caught:
        of_dtype(torch.ones(2), torch.float64)
    assert caught.value.message().splitlines()[:5] == [
        "cpp_messages::of_dtype: a C++ kernel cannot take `dtype`",
        "  argument: dtype",
        "  expected: a tensor, int, float, bool, str or None, or a list of tensors, ints, floats or bools",
        "  got: torch.dtype",
        f"  where: {of_dtype.specification.kernels[0].where}",
    ]


def test_an_argument_with_listed_values_may_be_an_int() -> None:
    @opsmith.operator("cpp_messages::of_mode")
    def of_mode(x: Tensor, mode: Literal["a", "b"]) -> Tensor:
        return x.clone()

    of_mode.kernel("cpu", cpp="void of_mode(View<const float> x, View<float> y) {}")
    with pytest.raises(errors.KernelSignatureError) as caught:
        of_mode(torch.ones(2), "a")
    assert caught.value.hint == (
        "declare `mode` as an int, or give the kernel in Python: `@op.kernel('cpu')`"
    )


def test_a_result_that_c_plus_plus_cannot_give() -> None:
    @opsmith.operator("cpp_messages::parts")
    def parts(x: Tensor) -> list[Tensor]:
        return [each.clone() for each in x]

    parts.kernel("cpu", cpp="void parts(View<const float> x, View<float> y) {}")
    with pytest.raises(
        errors.KernelSignatureError, match="cannot return a list, or a result that may be None"
    ):
        parts(torch.ones(2))


def test_no_function_of_that_name() -> None:
    with pytest.raises(errors.KernelSourceError) as caught:
        declared("nameless").kernel(
            "cpu", cpp="// void nameless() {}\nvoid one(int a) {}\nvoid two(int a) {}"
        )
    assert caught.value.message().splitlines()[:4] == [
        "cpp_messages::nameless: the C++ source has no function `nameless`",
        "  argument: entry",
        "  expected: `void nameless(...)`, whose parameters are the arguments and then the results",
        "  got: functions that return void: one, two",
    ]
    assert caught.value.hint == "name the kernel `nameless`, or name the kernel's function in `entry=`"
    with pytest.raises(errors.KernelSourceError, match="got: no function that returns void") as caught:
        declared("nameless").kernel("cpu", cpp="int nameless(int a);")
    assert (
        caught.value.hint
        == "declare `nameless` in the expected form, or name the kernel's function in `entry=`"
    )


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(errors.KernelSourceError) as caught:
        declared("no_file").kernel("cpu", cpp_file="no such.cpp")
    assert "the file of a C++ kernel cannot be read" in str(caught.value)
    assert f"got: {HERE.parent / 'no such.cpp'}: " in str(caught.value)


@pytest.mark.slow
def test_a_file_beside_the_one_that_declares_it() -> None:
    operator = declared("beside").kernel("cpu", entry="twice", cpp_file="beside.cpp")
    assert operator.specification.kernels[0].where == f"{HERE.parent / 'beside.cpp'}:3"
    assert operator(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("words", "got"),
    [
        ({"cpp": "x", "cpp_file": "y"}, "`cpp=` and `cpp_file=`"),
        ({"entry": "f"}, "only `entry=`"),
        ({"strict": True}, "only `strict=`"),
    ],
)
def test_one_source(words: dict[str, Any], got: str) -> None:
    with pytest.raises(errors.UsageError, match=re.escape(f"got: {got}")):
        declared("sources").kernel("cpu", **words)
    with pytest.raises(errors.UsageError, match="got: a function and `cpp=`"):
        declared("sources").kernel("cpu", torch.mul, cpp="x")


def test_a_path_is_no_text() -> None:
    with pytest.raises(errors.KernelSourceError, match="for the path of a file write `cpp_file=`"):
        declared("path").kernel("cpu", cpp=HERE.parent / "beside.cpp")


def test_c_plus_plus_runs_on_the_cpu() -> None:
    with pytest.raises(errors.UsageError, match=r"a kernel in C\+\+ is declared for `cuda`"):
        declared("elsewhere").kernel("cuda", cpp="void elsewhere() {}")


def test_dtypes_that_it_cannot_have() -> None:
    with pytest.raises(errors.KernelDtypeError, match="a dtype that it does not support") as caught:
        declared("dtypes").kernel(
            "cpu",
            entry="f",
            cpp="template <class T> void f(View<T> x) {}",
            dtypes=[torch.complex64, torch.float32],
        )
    assert caught.value.got == "torch.complex64"
    with pytest.raises(errors.KernelDtypeError, match=r"got: \[\]"):
        declared("dtypes").kernel("cpu", entry="f", cpp="template <class T> void f(View<T> x) {}", dtypes=[])
    with pytest.raises(
        errors.KernelDtypeError, match="dtypes are given for a C\\+\\+ function that is not a template"
    ):
        declared("dtypes").kernel("cpu", entry="f", cpp="void f(View<float> x) {}", dtypes=[torch.float32])


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_kernels, "_warned", False)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    toolchain._toolchain.cache_clear()


CORRECT = "void f(View<const float, 1> x, double by, View<float, 1> y) { y(0) = 7; }"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_reference_runs_and_explain_says_so() -> None:
    operator = declared("no_compiler").kernel("cpu", entry="f", cpp=CORRECT)
    with pytest.warns(RuntimeWarning) as warned:
        assert operator(torch.ones(1)).item() == 2
    assert [str(each.message) for each in warned] == [
        "cpp_messages::no_compiler: the reference runs in place of its kernel in C++, "
        f"{kernel_where(operator)}: there is no C++ compiler: no `no-such-compiler` in PATH; install "
        "a C++ compiler, on Debian or Ubuntu by `apt-get install g++`, or name yours in CXX; until then the "
        "reference computes the operator. `opsmith doctor` shows the missing tools, and "
        "OPSMITH_REQUIRE_KERNELS=1 turns this warning into an error. Other "
        "kernels may be missing, too: this warning appears only once in a process"
    ]
    assert warned[0].filename == __file__
    other = declared("no_compiler_again").kernel("cpu", entry="f", cpp=CORRECT)
    assert other(torch.ones(1)).item() == 2  # and says nothing
    (reason,) = operator.explain(torch.ones(1)).rejected
    assert reason.endswith(
        "there is no C++ compiler: no `no-such-compiler` in PATH; install a C++ compiler, on Debian or "
        "Ubuntu by `apt-get install g++`, or name yours in CXX; until then the reference computes the "
        "operator"
    )


@pytest.mark.usefixtures("no_compiler")
def test_explain_leaves_the_warning_to_a_call_and_one_that_is_an_error_is_raised_by_each_call() -> None:
    operator = declared("warned").kernel("cpu", entry="f", cpp=CORRECT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator.explain(torch.ones(1)).rejected
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match="the reference runs in place of its kernel"):
                operator(torch.ones(1))


def kernel_where(operator: Any) -> str:
    (kernel,) = operator.specification.kernels
    where: str = kernel.where
    return where


@pytest.mark.usefixtures("no_compiler")
def test_a_kernel_that_is_required_and_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared("required").kernel("cpu", entry="f", cpp=CORRECT)
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
    with pytest.raises(errors.KernelRefusedError) as caught:
        operator(torch.ones(1))
    assert caught.value.message().splitlines() == [
        "cpp_messages::required: its kernel in C++ is required by OPSMITH_REQUIRE_KERNELS=1, but cannot be "
        "loaded or built here",
        "  expected: a built kernel in its package that fits this machine, or a compiler",
        "  got: there is no C++ compiler: no `no-such-compiler` in PATH",
        f"  where: {kernel_where(operator)}",
        "  hint: install a package with built kernels for this machine, or a compiler; "
        "`opsmith doctor` shows the missing tools",
    ]
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "yes")
    with pytest.raises(errors.UsageError, match="OPSMITH_REQUIRE_KERNELS has an invalid value"):
        operator(torch.ones(1))
    monkeypatch.delenv("OPSMITH_REQUIRE_KERNELS")
    with pytest.raises(
        errors.KernelRefusedError, match="is required by `require_kernel`, but cannot be loaded or built"
    ):
        operator.require_kernel("cpu")
    with pytest.raises(errors.KernelRefusedError, match="is required by `require_kernel`"):
        operator(torch.ones(1))


def test_a_wrong_value_is_an_error_although_no_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared("all_there").kernel("cpu", entry="f", cpp=CORRECT)
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "yes")
    with pytest.raises(errors.UsageError, match="OPSMITH_REQUIRE_KERNELS has an invalid value"):
        operator(torch.ones(1))


@pytest.mark.slow
def test_only_what_is_built_can_be_required() -> None:
    operator = declared("unbuilt")
    for got in ("no kernel", "kernels in Python"):
        with pytest.raises(
            errors.UsageError, match="no kernel for `cpu` that is built from a source"
        ) as caught:
            operator.require_kernel("cpu")
        assert caught.value.got == got
        operator.kernel("cpu", lambda x, by: x * 2)
    operator.kernel("cpu", entry="f", cpp=CORRECT)
    assert operator.require_kernel("cpu") is operator
    assert operator.explain(torch.ones(1)).origin in ("from the cache", "compiled now")
    assert operator(torch.ones(1)).item() == 7


@pytest.mark.usefixtures("no_compiler")
def test_strict_raises_instead() -> None:
    operator = declared("strict").kernel("cpu", entry="f", cpp=CORRECT, strict=True)
    with pytest.raises(errors.ToolchainError) as caught:
        operator(torch.ones(1))
    assert caught.value.message().splitlines() == [
        "there is no C++ compiler",
        "  expected: the program that CXX names, `no-such-compiler -O1`",
        "  got: no `no-such-compiler` in PATH",
        "  hint: install a C++ compiler, on Debian or Ubuntu by `apt-get install g++`, or name yours in CXX; "
        "until then the reference computes the operator",
    ]


@pytest.mark.slow
def test_what_is_no_exception_of_c_plus_plus_is_told_too() -> None:
    operator = declared("throws").kernel(
        "cpu", entry="f", cpp="void f(View<const float> x, double by, View<float> y) { throw 3; }"
    )
    with pytest.raises(errors.KernelError, match="it threw something that is no std::exception"):
        operator(torch.ones(1))
    operator.kernel(
        "cpu",
        entry="f",
        cpp="#include <stdexcept>\nvoid f(View<const float> x, double by, View<float> y)\n"
        '{ throw std::out_of_range("100% {} of them"); }',
    )
    with pytest.raises(errors.KernelError, match=r"the C\+\+ kernel threw: 100% {} of them"):
        operator(torch.ones(1))


def test_an_exception_without_a_message_of_a_text_that_no_file_has() -> None:
    operator = declared("silent").kernel(
        "cpu",
        entry="f",
        cpp="#include <stdexcept>\nvoid f(View<const float> x, double by, View<float> y)\n"
        '{ throw std::runtime_error(""); }',
    )
    with pytest.raises(errors.KernelError, match="threw: an exception without a message") as caught:
        operator(torch.ones(1))
    assert str(caught.value.where).startswith(f"{HERE}:")


def test_a_check_without_its_text_is_an_error_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cpp"
    file.write_text("void f(View<const float> x, double by, View<float> y) {\n  OPSMITH_CHECK(by > 0);\n}\n")
    operator = declared("unchecked").kernel("cpu", entry="f", cpp_file=file)
    with pytest.raises(errors.CompileError, match=rf"{file}:2:3: .*\n +OPSMITH_CHECK\(by > 0\);\n +\^"):
        operator(torch.ones(1))


@pytest.mark.slow
def test_what_it_throws_need_be_no_utf_8_and_may_be_too_long() -> None:
    operator = declared("bytes").kernel(
        "cpu",
        entry="f",
        cpp="#include <stdexcept>\n#include <string>\n"
        "void f(View<const float> x, double by, View<float> y)\n"
        '{ throw std::runtime_error("\\xff" + std::string(997, \'a\') + "\u00e9"); }',
    )
    with pytest.raises(errors.KernelError, match=r"the C\+\+ kernel threw: \ufffda{997}\ufffd\n"):
        operator(torch.ones(1))


@pytest.mark.slow
def test_a_brace_that_is_never_closed_is_told_first(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cpp"
    file.write_text("void f(View<const float> x, double by, View<float> y) {\n  if (by > 0) {\n}\n")
    operator = declared("open").kernel("cpu", entry="f", cpp_file=file)
    with pytest.raises(errors.CompileError) as caught:
        operator(torch.ones(1))
    assert (
        caught.value.message().splitlines()[1] == f"  got: {file}:1:55: expected '}}' that matches this '{{'"
    )


@pytest.mark.slow
def test_a_name_that_nothing_defines_is_an_error_of_the_line() -> None:
    @opsmith.operator("cpp_messages::unlinked")
    def unlinked(x: Tensor) -> Tensor:
        return x * 2

    unlinked.kernel(
        "cpu",
        cpp="""
void nowhere(float*);
void unlinked(Contiguous<const float> x, Contiguous<float> y) { nowhere(y.data); }
""",
    )
    with pytest.raises(errors.CompileError, match=r"`nowhere\(float\*\)` is defined neither"):
        unlinked(torch.ones(1))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_strict_kernel_is_not_passed_over_on_its_device(mode: Any) -> None:
    @opsmith.operator("cpp_messages::unyielding")
    def unyielding(x: Tensor) -> Tensor:
        return x * 2

    unyielding.kernel("cpu")(lambda x: x * 2)
    unyielding.kernel(
        "cpu", cpp="void unyielding(View<const float, 1> x, View<float, 1> y) { y(0) = 2; }", strict=True
    )
    with mode():
        assert unyielding(torch.ones(1)).item() == 2
        for wrong in (torch.ones(1).double(), torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)):
            for call in (unyielding, torch.ops.cpp_messages.unyielding):
                with pytest.raises(
                    errors.KernelRefusedError, match="its kernel for cpu does not take the call"
                ):
                    call(wrong)
        assert unyielding(torch.ones(1, 1, device="meta")).shape == (1, 1)
        assert "1" in unyielding.explain(torch.ones(1, 1)).rejected[0]


def test_a_library_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    from opsmith.build.cache import CacheEntry
    from opsmith.kernels.cpp.codegen import TABLE
    from opsmith.kernels.runtime.loading import LIBRARY, loadable

    (tmp_path / LIBRARY).write_text("no library")
    with pytest.raises(errors.CompileError, match=r"the compiled kernel cannot be loaded\n  got: .*"):
        loadable(lambda: CacheEntry(tmp_path, "built"), TABLE)


def test_a_stored_library_that_does_not_load_is_built_again_once(tmp_path: Path) -> None:
    from opsmith.build.cache import CacheEntry
    from opsmith.kernels.cpp.codegen import TABLE
    from opsmith.kernels.runtime.loading import LIBRARY, loadable

    sources = iter(["disk", "built"])
    entries = []

    def obtain() -> CacheEntry:
        (tmp_path / "entry").mkdir()
        (tmp_path / "entry" / LIBRARY).write_text("no library")
        entries.append(CacheEntry(tmp_path / "entry", next(sources)))  # type: ignore[arg-type]
        return entries[-1]

    with pytest.raises(errors.CompileError, match="the compiled kernel cannot be loaded"):
        loadable(obtain, TABLE)
    assert [each.source for each in entries] == ["disk", "built"]


def test_a_disk_that_runs_no_programs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.build.cache import Cache
    from opsmith.kernels.runtime import loading

    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(loading, "cache_on_disk", lambda: cache)
    monkeypatch.setattr(loading, "_runs_nothing", lambda directory: directory.parent == cache.directory)
    places = []

    def load(path: str) -> Any:
        places.append(Path(path).parent)
        if places[-1].parent == cache.directory:
            raise OSError(f"{path}: failed to map segment from shared object")
        return path

    monkeypatch.setattr(loading.ctypes, "CDLL", load)
    with pytest.warns(RuntimeWarning, match="for this process alone, .*noexec"):
        file = loading.loadable(lambda: cache.obtain({"a": "b"}, lambda at: (at / "c").touch()), "strip")
    assert places == [places[0], Path(file.path).parent]
    assert not Path(file.path).is_relative_to(cache.directory)
    reason = "no program can be run from its file system (noexec)"
    assert file.origin == f"compiled now, for this process alone: {reason}"


def test_a_full_directory_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.build import dependencies
    from opsmith.kernels.cpp.compiler import compile_kernel
    from opsmith.kernels.cpp.source import cpp_source

    def full(**options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    text = "void full(Contiguous<const float> x, Contiguous<float> y) { /* of no other test */ }"
    source = cpp_source("demo::full", cpp=text, cpp_file=None, entry=None, declared=None)
    monkeypatch.setattr(dependencies.tempfile, "TemporaryDirectory", full)
    with pytest.raises(errors.CacheError, match="no temporary file can be written") as caught:
        compile_kernel(source, "demo::full", ())
    assert caught.value.hint == "free some space, or set TMPDIR to a directory that can be written"
