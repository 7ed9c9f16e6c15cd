"""Kernels in C++ under sanitizers: a fault is told with its line, and a right kernel passes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_kernels
import pytest
import torch
from cpp_operators import channel_sums, row_sums
from cpp_operators import scaled as scaled_in_every_dtype
from faulty_kernels import FAULTS, RIGHT, Fault
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build import toolchain
from opsmith.build.toolchain import Toolchain
from opsmith.checking.processes import sanitizer_parent
from opsmith.checking.processes.sanitizer_parent import SanitizerJob
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.report import Outcome
from opsmith.kernels.cpp import compiler as compiling
from opsmith.kernels.cpp import sanitizer
from opsmith.kernels.cpp.crash_trace import traced_sources
from opsmith.kernels.cpp.source import CppSource
from opsmith.ops import add, exp, involution, linear, mul

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux")

FAST = ("reads_after",)
"""One for all in `make test`: each takes seconds."""


def outcome(operator: Any, **options: Any) -> Outcome:
    report = opsmith.check(operator, only=["sanitized"], effort="quick", **options)
    return next(each for each in report.outcomes if each.property == "sanitized")


def some(names: Any) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def hold(name: str, found: Outcome) -> None:
    fault: Fault = FAULTS[name]
    assert found.status == "failed", (name, found)
    (failure,) = found.failures
    assert (failure.cause, failure.input) == (fault.cause, fault.input), failure
    assert re.search(fault.message, failure.message), failure.message
    assert failure.where is not None
    assert failure.where.startswith(f"<cpp of faulty::{name}>:")
    if name not in faulty_kernels.WITHOUT_LINE:
        assert failure.evidence["line"].endswith("// fault")
        assert (
            fault.operator.specification.kernels[0]
            .function.source.quoted(int(failure.where.rpartition(":")[2]))
            .endswith("// fault")
        )
    assert failure.evidence["sample"].startswith("sample ")


@pytest.mark.slow
@pytest.mark.parametrize("name", some(FAULTS))
def test_a_fault_is_told_with_its_line_and_what_it_is_of(name: str) -> None:
    hold(name, outcome(FAULTS[name].operator, isolate=5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator", [*RIGHT.values(), scaled_in_every_dtype, row_sums, channel_sums], ids=str
)
def test_a_right_kernel_passes(operator: Any) -> None:
    found = outcome(operator)
    assert (found.status, found.failures) == ("passed", ()), found
    if operator is RIGHT["refusing"]:
        (note,) = found.notes
        assert (
            "raised: KernelError: faulty::refusing: the C++ kernel threw: no more than 2 dimensions" in note
        )
    else:
        assert found.notes == ()


@pytest.mark.slow
def test_elements_that_are_not_written_and_a_header_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "twice.h").write_text("template <class T> T twice(T x) { return 2 * x; }\n")
    (tmp_path / "kernel.cpp").write_text(
        '#include "twice.h"\ntemplate <class T> void but_the_last(Contiguous<const T> x, Contiguous<T> y) {\n'
        "  for (int64_t i = 0; i + 1 < x.numel(); i++) y[i] = twice(x[i]);\n}\n"
    )

    @opsmith.operator("faulty::but_the_last")
    def but_the_last(x: Tensor) -> Tensor:
        return x * 2

    but_the_last.kernel("cpu", cpp_file=tmp_path / "kernel.cpp")
    found = outcome(but_the_last, samples=[(torch.ones(3),)])
    (failure,) = found.failures
    assert (failure.cause, failure.input) == ("uninitialized", "result")
    assert failure.message.startswith(
        "the kernel does not write all of `result`: 1 of 3 elements, the first at [2]"
    )


@pytest.mark.slow
def test_calls_that_were_not_made_are_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system ends the process for want of memory."""
    monkeypatch.setattr(
        sanitizer_parent,
        "PROGRAM",
        "import os\n"
        + sanitizer_parent.PROGRAM.replace(
            "import main\n",
            "import main, SanitizerChild\nSanitizerChild._forked = lambda self, start: os._exit(0)\n",
        ),
    )
    found = outcome(RIGHT["columns"])
    assert found.status == "skipped"
    assert "were not made: their process ended without a report" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("operator", [exp, mul, add, linear, involution], ids=str)
def test_bundled_operators_pass_or_have_no_kernel_in_cpp(operator: Any) -> None:
    found = outcome(operator)
    assert found.failures == ()
    if traced_sources(operator.specification.kernels):
        assert (found.status, found.notes) == ("passed", ())
    else:
        assert found.reason == "the operator has no kernel in C++"


@pytest.mark.slow
def test_the_script_fails_again_and_what_else_would_run_the_kernel_here_does_not() -> None:
    name = "writes_after"
    report = opsmith.check(FAULTS[name].operator, only=["forward", "state"], effort="quick", sanitize=True)
    found = {each.property: each for each in report.outcomes}
    hold(name, found["sanitized"])
    for left in ("forward", "state"):
        assert found[left].status == "skipped"
        assert found[left].reason.startswith("not run: a kernel would damage this process (see `sanitized`)")
    assert found["gradient"].left_out
    script = found["sanitized"].failures[0].replay
    assert script is not None
    with pytest.raises(AssertionError, match="outside of `result`"):
        exec(script, {})


def test_without_a_kernel_in_cpp_it_is_skipped_and_says_so() -> None:
    report = opsmith.check(exp, only=["forward"], effort="quick", sanitize=True)
    found = report.outcomes[-1]
    assert (found.property, found.status, found.reason) == (
        "sanitized",
        "skipped",
        "the operator has no kernel in C++",
    )
    assert report.passed_as_asked


def test_it_goes_first_and_progress_tells() -> None:
    told: list[tuple[str, int, int]] = []
    options: Any = {"only": ["forward"], "effort": "quick", "sanitize": True}
    opsmith.check(exp, progress=lambda *event: told.append(event), **options)
    assert told[0][:2] == ("sanitized", 0)
    assert [done for _, done, _ in told] == list(range(len(PROPERTIES) + 1))
    assert sorted(name for name, _, _ in told[:-1]) == sorted(PROPERTIES)


def test_without_being_asked_for_it_is_not_there() -> None:
    report = opsmith.check(exp, only=["forward"], effort="quick")
    assert "sanitized" not in {each.property for each in report.outcomes}
    assert "sanitized" not in report.omissions()


def compiler(folder: Path, text: str) -> Toolchain:
    program = folder / "compiler"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return Toolchain((str(program),), "one of a test")


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("echo libnone.so", "without libasan.so and libubsan.so and libstdc++.so.6"),
        (
            'case "$*" in *trial.cpp*) exec g++ "$@";; esac; '
            f'case "$1" in -print*) echo {sys.executable};; *) echo unrecognized option; exit 1;; esac',
            "unrecognized option",
        ),
    ],
    ids=["no libraries", "an older compiler"],
)
def test_a_compiler_without_sanitizers_is_refused_with_what_to_install(
    tmp_path: Path, text: str, got: str
) -> None:
    with pytest.raises(errors.ToolchainError) as caught:
        sanitizer.preloaded(compiler(tmp_path, text))
    assert caught.value.message().splitlines() == [
        "the C++ compiler has no sanitizers for a sanitised check",
        "  expected: g++ 12 or later, with its libraries libasan.so and libubsan.so",
        f"  got: {tmp_path}/compiler: {got}",
        "  hint: install g++ with its sanitizers: on Debian or Ubuntu with `apt-get install g++`, on Fedora "
        "with `dnf install gcc-c++ libasan libubsan`; if CXX names clang, name g++ instead",
    ]


def test_a_text_in_the_place_of_a_library_names_it(tmp_path: Path) -> None:
    real = sanitizer.preloaded(toolchain.find_toolchain())[0]
    script = tmp_path / "libasan.so"
    script.write_text(f"/* GNU ld script */\nINPUT ( {real} )\n")
    found = sanitizer.preloaded(compiler(tmp_path, f'case "$1" in -print*) echo {script};; esac'))
    assert found[0] == real


@pytest.mark.slow
def test_a_process_that_does_not_start_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer_parent, "PROGRAM", "raise SystemExit('no shadow memory')")
    with pytest.raises(errors.ToolchainError) as caught:
        outcome(FAULTS["reads_after"].operator)
    assert caught.value.message().splitlines() == [
        "no process runs with AddressSanitizer",
        "  expected: Python and torch with the sanitizer's library loaded before all others",
        "  got: no shadow memory",
        "  hint: check without `sanitize`, or name another g++ in CXX",
    ]


def test_other_flags_are_another_entry() -> None:
    plain = compiling.build_flags()
    with sanitizer.sanitized("zero"):
        zero = compiling.build_flags()
        with sanitizer.sanitized("pattern"):
            pattern = compiling.build_flags()
        assert compiling.build_flags() == zero
    assert compiling.build_flags() == plain
    assert not {"-O3", "-g1"} & {*zero, *pattern}
    assert {*zero} - {*pattern} == {"-ftrivial-auto-var-init=zero"}, "their results are compared"
    assert "-fsanitize=address,undefined" in pattern


@opsmith.operator("faulty::mistaken")
def mistaken(x: Tensor) -> Tensor:
    return x + 1


mistaken.kernel(
    "cpu", cpp="void mistaken(Contiguous<const float> x, Contiguous<float> y) { y[0] = nothing; }"
)
mistaken.samples(lambda make: [(make(3).to(torch.float32),)])


@pytest.mark.slow
def test_a_compile_error_is_told_as_ever() -> None:
    (failure,) = outcome(mistaken).failures
    assert failure.cause == "raises"
    assert "the C++ compiler refuses the kernel" in failure.message


def test_variables_of_a_function_that_returned_are_watched_but_in_kernels_with_vectors(
    tmp_path: Path,
) -> None:
    source = CppSource("void b() {}", "b", False, "<cpp of a::b>", 1, 1, folder=str(tmp_path))
    job = SanitizerJob("a::b", (), ("y",), source, None, ())
    assert "detect_stack_use_after_return=1" in sanitizer_parent.options(job)["ASAN_OPTIONS"]
    (tmp_path / "wide.h").write_text("using Wide __attribute__((vector_size(64))) = float;")
    for text in ('#include "wide.h"', "__m512d x;", "_mm256_setzero_ps();", "__m128i x;"):
        held = sanitizer_parent.options(replace(job, source=replace(source, text=text)))
        assert "detect_stack_use_after_return=0" in held["ASAN_OPTIONS"]
        assert held["UBSAN_OPTIONS"] == sanitizer_parent.options(job)["UBSAN_OPTIONS"]
