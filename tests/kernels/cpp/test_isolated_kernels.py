"""A kernel in C++ that ends its process, or never returns, is a finding with the line in which it did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from faulty_kernels import FAULTS

import opsmith
from opsmith.build.cache import Cache
from opsmith.checking.processes.child import SIGNALS
from opsmith.kernels.cpp import crash_trace
from opsmith.kernels.cpp.source import CppSource

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux")

DEATHS = {
    "null": f"the process dies of SIGSEGV ({SIGNALS['SIGSEGV']})",
    "leaves": "the operator ends the process with status 0, instead of returning",
    "never_ends": "it did not finish within 5 s",
    "aborts": f"the process dies of SIGABRT ({SIGNALS['SIGABRT']})",
    "divides_by_zero": f"the process dies of SIGFPE ({SIGNALS['SIGFPE']})",
    "recurses": f"the process dies of SIGSEGV ({SIGNALS['SIGSEGV']})",
}
FAST = ("null", "leaves")


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DEATHS]
)
def test_a_death_is_told_with_its_line(name: str) -> None:
    operator = FAULTS[name].operator
    limit = 5 if name == "never_ends" else True
    report = opsmith.check(operator, only=["forward"], effort="quick", isolate=limit)
    (failure,) = report.failures
    assert (failure.property, failure.cause) == ("forward", "raises")
    assert failure.message.startswith(f"{DEATHS[name]}, on sample 0 (x [5])"), failure
    assert "stderr" not in failure.evidence
    place, _, line = str(failure.where).rpartition(":")
    assert place == f"<cpp of faulty::{name}>"
    source = operator.specification.kernels[0].function.source
    assert source.quoted(int(line)).strip() == failure.evidence["line"]
    if name != "recurses":  # which dies somewhere in its 100 MB
        assert failure.evidence["line"].endswith("// fault")


@pytest.mark.slow
def test_who_leaves_does_not_wait_for_what_is_bound_to_threads() -> None:
    @opsmith.operator("isolated_kernels::leaving")
    def leaving(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    leaving.samples(lambda make: [(make(2),)])
    leaving.kernel(
        "cpu",
        cpp="""
        #include <cstdlib>
        struct Endless { bool begun = false; ~Endless() { for (volatile bool on = begun; on;) {} } };
        thread_local Endless endless;
        void leaving(View<const double> x, View<double> y) {
          endless.begun = true;
          std::exit(3);
        }
        """,
    )
    (failure,) = opsmith.check(leaving, only=["forward"], effort="quick", isolate=60).failures
    assert failure.evidence["status"] == 3
    assert failure.evidence["line"] == "std::exit(3);"


@pytest.mark.slow
def test_a_kernel_that_damages_the_heap_does_so_in_child_processes_alone() -> None:
    """Inputs are derived, and asked whether they are symmetric, by the reference."""
    report = opsmith.check(
        FAULTS["writes_after"].operator, only=["forward", "gradient"], effort="quick", isolate=True
    )
    outcomes = {each.property: each for each in report.outcomes}
    assert all(outcomes[name].status in ("failed", "passed") for name in ("forward", "gradient"))
    assert {failure.cause for failure in report.failures} <= {"raises", "kernel-mismatch"}


@opsmith.operator("isolated_kernels::deadly")
def deadly(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.slow
def test_a_kernel_in_a_file_is_told_with_its_line_in_that_file(tmp_path: Path) -> None:
    (tmp_path / "deadly.cpp").write_text(
        "#include <cstdlib>\n\n"
        "void deadly(View<const double> x, View<double> y) {\n"
        "  if (x.numel())\n"
        "    std::abort();\n"
        "}\n"
    )
    deadly.kernel("cpu", cpp_file=tmp_path / "deadly.cpp")
    deadly.samples(lambda make: [(make(2),)])
    (failure,) = opsmith.check(deadly, only=["forward"], effort="quick", isolate=True).failures
    assert failure.where == f"{tmp_path}/deadly.cpp:5"
    assert failure.evidence["line"] == "std::abort();"


def source(text: str) -> CppSource:
    return CppSource(text, "none", template=False, path="/home/me/none.cpp", line=1, at=7)


def test_where_the_line_is_not_known_it_is_that_of_the_function(tmp_path: Path) -> None:
    text = "void none() {}"

    def build(directory: Path) -> None:
        (directory / "kernel.so").write_text("no library")

    entry = Cache(tmp_path / "cache").obtain({"text": f"before {text} behind"}, build)
    words = f"Fatal\nC++ frame: {entry.directory}/kernel.so 0x0000000000001234\n"
    assert crash_trace.location_in(words, [source("int other"), source(text)]) == ("/home/me/none.cpp:7", "")
    assert crash_trace.location_in(words, [source("int other")]) is None
    assert crash_trace.location_in(words.replace("kernel.so", "other.so"), [source(text)]) is None


def test_without_a_compiler_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    crash_trace.tracer.cache_clear()
    try:
        assert crash_trace.tracer() is None
    finally:
        crash_trace.tracer.cache_clear()
