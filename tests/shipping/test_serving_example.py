"""`examples/serving` from end to end: a model is exported, and a program in C++ runs it without Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opsmith.build.toolchain import find_toolchain

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving"
TORCH = Path(torch.__file__).parent


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compile_program(folder: Path) -> Path:
    """Build the program as the example's README says."""
    program = folder / "serve"
    flags = [
        "-std=c++20",
        "-O1",
        f"-I{TORCH / 'include'}",
        f"-L{TORCH / 'lib'}",
        f"-Wl,-rpath,{TORCH / 'lib'}",
    ]
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    run(*find_toolchain().command, EXAMPLE / "serve.cpp", "-o", program, *flags, *libraries)
    return program


@pytest.mark.slow
@pytest.mark.compile
def test_a_program_computes_what_pytorch_does(tmp_path: Path) -> None:
    written = run(sys.executable, "-W", "ignore", EXAMPLE / "export.py", tmp_path)
    assert written.endswith(
        "liboperators.so: opsmith::involution, opsmith::rms_norm, opsmith::rms_norm_and_hidden\n"
    )
    program = compile_program(tmp_path)
    printed = run(program, tmp_path)
    assert printed.count("image ") == 3
    assert float(re.search(r"largest difference: (\S+)", printed)[1]) < 1e-5
    loaded = [Path(line.split()[0]).name for line in run("ldd", program).splitlines()]
    assert "libtorch_cpu.so" in loaded
    assert not [name for name in loaded if "python" in name]

    (tmp_path / "liboperators.so").unlink()
    missing = subprocess.run([program, tmp_path], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "liboperators.so" in missing.stderr
