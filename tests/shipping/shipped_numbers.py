"""Calls of a package's operator and of bundled ones, and where their kernels came from.

python shipped_numbers.py FILE
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import wheeled  # type: ignore[import-not-found]

import opsmith
from opsmith import errors
from opsmith.kernels.cpp.compiler import kernel_toolchain

OPERATORS = {"swish": wheeled.swish, "involution": opsmith.ops.involution, "rms_norm": opsmith.ops.rms_norm}


def tensor(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that every version of torch makes alike."""
    count = torch.Size(sizes).numel()
    return ((torch.arange(count) * 37 % 101).to(dtype) / 32 - 1.5).reshape(sizes).requires_grad_()


def calls() -> dict[str, tuple[str, tuple[Any, ...]]]:
    f64 = torch.float64
    return {
        "swish": ("swish", (tensor(2_000, 30), tensor(30))),
        "swish of doubles": ("swish", (tensor(7, 5, dtype=f64), tensor(5, dtype=f64))),
        "involution": ("involution", (tensor(2, 8, 9, 11), tensor(2, 2, 3, 3, 9, 11), 1, 1)),
        "rms_norm": ("rms_norm", (tensor(5, 64), tensor(64))),
    }


def main(file: str) -> None:
    saved, origins = {}, {}
    for name, (operator, arguments) in calls().items():
        origins[name] = OPERATORS[operator].explain(*arguments).origin
        result = OPERATORS[operator](*arguments)
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        gradients = torch.autograd.grad(result.square().sum(), tensors)
        saved[name] = [result.detach(), *gradients]
    torch.randn(500, 500).exp()  # torch's own loops have begun
    try:
        compiler = str(kernel_toolchain())
    except errors.ToolchainError as error:
        compiler = error.problem
    runtimes = set()
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps}
        runtimes = {each for each in paths if any(name in each for name in ("gomp", "iomp", "libomp"))}
    torch.save(saved, file)
    files = {"opsmith": opsmith.__file__, "wheeled": wheeled.__file__, "torch": torch.__file__}
    said = {"torch": torch.__version__, "files": files, "origins": origins, "compiler": compiler}
    sys.stdout.write(json.dumps(said | {"runtimes": sorted(runtimes)}))


if __name__ == "__main__":
    main(sys.argv[1])
