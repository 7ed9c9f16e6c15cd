"""Models that torch or ONNX has no form for, and places that take no file: nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_operators as of
import pytest
import torch
from onnx_operators import Calls
from torch import Tensor

import opsmith
from opsmith import errors

X = torch.arange(24.0).reshape(4, 6)


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


MODELS: dict[str, tuple[Callable[[Tensor], Any], str, str, str]] = {
    "complex-results": (
        lambda x: torch.view_as_real(of.as_complex(x)),
        "nodes::as_complex: ONNX has no tensors of the type that it returns",
        "torch.complex64",
        "return a different type; for complex numbers, return `torch.view_as_real(y)`",
    ),
    "a-branch-on-values": (
        branches,
        "torch's exporter refuses the model: Could not guard on data-dependent expression",
        "GuardOnDataDependentSymNode",
        "`torch.export.export(model, args)` must accept the model, and ONNX must have an operator for each "
        "torch operator in it; `__context__` of this error has torch's own text",
    ),
    "sizes-that-follow-from-values": (
        lambda x: opsmith.ops.exp(x[x > 3]),
        "the size of a tensor depends on the values of other tensors, so no body can be derived",
        "u0",
        "compute these tensors outside of the operator, or export the operator with `body='node', "
        "verify=False`",
    ),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_has_no_form(name: str, tmp_path: Path) -> None:
    function, problem, got, hint = MODELS[name]
    with pytest.raises(errors.ExportError) as caught:
        opsmith.export_onnx(Calls(function), X, tmp_path / "model.onnx")
    assert str(caught.value).startswith(problem)
    assert (caught.value.got, caught.value.hint) == (got, hint)
    assert caught.value.__cause__ is None  # the traceback begins with our words
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sizes_that_follow_from_values_have_a_node(export: Callable[..., Any]) -> None:
    model = Calls(lambda x: opsmith.ops.exp(x[x > 3]))
    assert export(model, X, body="node", verify=False).export.nodes == {"opsmith::exp": 1}


@pytest.mark.parametrize(
    ("path", "got", "hint"),
    [
        ("", "a folder", "name a file in this folder, `model.onnx`"),
        ("missing/model.onnx", "there is no folder `{folder}/missing`", "make the folder first"),
    ],
    ids=["folder", "missing"],
)
def test_paths_that_cannot_be_written(path: str, got: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError) as caught:
        opsmith.export_onnx(opsmith.ops.exp, X, tmp_path / path)
    assert caught.value.message() == (
        f"no file can be written to `{tmp_path / path}`\n  argument: path\n"
        "  expected: a file in an existing folder that can be written to\n"
        f"  got: {got.format(folder=tmp_path)}\n  hint: {hint}"
    )


def test_a_path_that_is_none() -> None:
    with pytest.raises(errors.UsageError, match=r"no file can be written to `3`"):
        opsmith.export_onnx(opsmith.ops.exp, X, 3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_float_that_torch_fixes_is_found(tmp_path: Path) -> None:
    """torch itself makes a number of it in a trace, and keeps the axis open."""
    model = Calls(lambda x: of.scaled_by_float(x, x.shape[0] * 0.5))
    with pytest.raises(
        errors.ExportMismatchError, match="the file and PyTorch compute different values of `output` at n 5"
    ):
        opsmith.export_onnx(model, X, tmp_path / "model.onnx", input_names=["x"], dynamic={"x": {0: "n"}})
    assert not list(tmp_path.iterdir())


class Counting(torch.nn.Module):
    """Computes something else in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return opsmith.ops.exp(x) * self.calls


@pytest.mark.slow
def test_a_model_that_keeps_something_from_call_to_call(tmp_path: Path) -> None:
    with pytest.raises(errors.ExportMismatchError) as caught:
        opsmith.export_onnx(Counting().eval(), X, tmp_path / "model.onnx")
    assert caught.value.hint == (
        "no file was left; the model writes into `calls`, and a file keeps no state between runs"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_inputs_that_a_model_writes_into_stay_as_they_are(export: Callable[..., Any]) -> None:
    given = X.clone()
    model = Calls(lambda x: opsmith.ops.exp(x.mul_(0.1)))
    made = export(model, given, input_names=["x"], dynamic={"x": {0: "n"}})
    assert torch.equal(given, X)
    torch.testing.assert_close(made.in_runtime(X)[0], (X * 0.1).exp())
