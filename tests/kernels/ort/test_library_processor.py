"""A library for ONNX Runtime knows every instruction that its kernels may use, and whether there is one."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

from opsmith.build.toolchain import find_toolchain
from opsmith.kernels.runtime.library import PROCESSOR

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the table is of x86-64's instructions"
)

ROWS = re.findall(r'X\((\d+), (__\w+__), "(\w+)"', PROCESSOR.read_text(encoding="utf-8"))
COMPUTING = re.compile(r"__(AVX\w*|FMA\w*|XOP|BMI2?|POPCNT|LZCNT|MOVBE|F16C|GFNI|VAES|VPCLMULQDQ)__")
"""Macros of what a compiler may use by itself, or a kernel where its author asks for it."""
OF_OLD = re.compile(r"__AVX512(ER|PF|4\w+)__")
"""Of Xeon Phi alone."""
LISTED = {"bmi": "bmi1", "lzcnt": "abm"}
"""Names that Linux has for others."""


def test_no_two_have_the_same_bit() -> None:
    assert [int(bit) for bit, _, _ in ROWS] == list(range(len(ROWS)))
    assert len(ROWS) <= 32


@pytest.mark.parametrize(
    "processor", ["native", "haswell", "icelake-server", "cooperlake", "tigerlake", "alderlake", "znver3"]
)
def test_all_that_a_compiler_may_use_are_known(processor: str, tmp_path: Path) -> None:
    (tmp_path / "empty.cpp").write_text("")
    done = find_toolchain().run([f"-march={processor}", "-dM", "-E", "empty.cpp"], tmp_path)
    assert done.status == 0, done.printed
    defined = set(re.findall(r"#define (__\w+__) 1$", done.printed, re.MULTILINE))
    used = {each for each in defined if COMPUTING.fullmatch(each) and not OF_OLD.fullmatch(each)}
    assert used
    assert used <= {macro for _, macro, _ in ROWS}


def test_missing_are_those_that_the_system_does_not_list(tmp_path: Path) -> None:
    described = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*:(.*)$", described, re.MULTILINE)[1].replace("_", "").split())
    (tmp_path / "asked.cpp").write_text(
        f'#include "{PROCESSOR}"\n#include <cstdio>\n'
        "int main() {\n"
        "  for (int bit = 0; bit < 32; bit++)\n"
        '    if (const char* name = missing_instruction(1u << bit)) std::printf("%s\\n", name);\n'
        "}\n"
    )
    done = find_toolchain().run(["-std=c++17", "asked.cpp", "-o", "asked"], tmp_path)
    assert done.status == 0, done.printed
    said = subprocess.run([tmp_path / "asked"], capture_output=True, text=True, check=True)
    wanted = {name for _, _, name in ROWS if LISTED.get(name, name) not in flags}
    assert set(said.stdout.split()) == wanted
    assert len(wanted) < len(ROWS)
