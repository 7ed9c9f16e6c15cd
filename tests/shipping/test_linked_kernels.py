"""A language says what a library without Python needs of its kernel, or why no library can have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.common.ahead import Ahead, Built
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.cuda.linked import linked_cuda
from opsmith.kernels.languages import language_of
from opsmith.shipping import build_torch_library

TEXT = "__global__ void f(View<const float, 1> x, View<float, 1> y) {}"


class PackagesAlone(Ahead):
    """Builds kernels into packages, and has none for libraries."""

    def refuse(self, kernels: Sequence[Any], targets: Sequence[str]) -> None:
        """Refuse nothing."""

    def build(self, kernel: Any, target: str, root: Path, folder: Path) -> Built:
        raise NotImplementedError


def declared(name: str, **options: Any) -> Any:
    @opsmith.operator(f"linked_kernels::{name}", shapes="x: N -> N")
    def doubled(x: Tensor, n: int = 2, by: float = 0.5) -> Tensor:
        return x * 2

    doubled.kernel("cuda", cuda=TEXT, entry="f", **options)
    return doubled


def test_a_language_that_gives_libraries_nothing_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    operator = declared("alone", grid=1)
    (kernel,) = cuda_kernels(operator.specification)
    reason = f"its kernel at {kernel.where} is in CUDA"
    assert PackagesAlone().linked(kernel, ("sm_90",)) == reason
    found: Any = language_of(kernel)
    monkeypatch.setattr(type(found), "ahead", PackagesAlone())
    with pytest.raises(errors.ServingError, match="is in CUDA"):
        build_torch_library([operator], tmp_path / "lib.so", cuda="sm_90")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "grid": ({"grid": "ceil(x.numel / by)"}, "`grid`", "has `by`, which C++ does not compute"),
    "block": ({"grid": 1, "block": "max(x.shape)"}, "`block`", "has `max(x.shape)`, which C++ does not"),
    "shared": ({"grid": 1, "shared": f"n * {2**63}"}, "`shared`", "has a number of more than 64 bits"),
    "depth": ({"grid": f"{'(n + ' * 40}n{')' * 40}"}, "`grid`", "which is too deep"),
    "initial": ({"grid": 1, "initial": {"result": "by"}}, "`initial['result']`", "has `by`, which C++"),
    "scratch": (
        {"grid": 1, "scratch": {"s": (lambda x: 1, torch.float32)}},
        "`scratch['s']`",
        "is a function in Python: write it as an expression, such as `ceil(result.numel / 256)`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_program_computes_is_refused_by_its_place(case: str) -> None:
    options, rule, words = REFUSED[case]
    (kernel,) = cuda_kernels(declared(case, **options).specification)
    reason = linked_cuda(kernel, ("sm_90",))
    assert isinstance(reason, str)
    assert reason.startswith(f"{rule} of its CUDA kernel at {kernel.where} ")
    assert words in reason
