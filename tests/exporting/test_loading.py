"""`opsmith.onnx.load`: a file as a module, and what it says of files and calls that do not fit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import onnx_operators as of
import pytest
import torch

import opsmith
import opsmith.onnx
from opsmith import errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    x = torch.randn(4, 6)
    opsmith.export_onnx(opsmith.ops.mul, (x, x), folder / "mul.onnx", dynamic={"x": {0: "n"}, "y": {0: "n"}})
    opsmith.export_onnx(of.moments, x, folder / "node.onnx", body="node", verify=False)
    opsmith.export_onnx(of.moments, x, folder / "moments.onnx")
    return folder


@pytest.mark.slow
def test_it_is_called_as_a_module(folder: Path) -> None:
    module = opsmith.onnx.load(folder / "mul.onnx")
    x, y = torch.randn(3, 6, requires_grad=True), torch.randn(6, 3).mT
    assert isinstance(module, torch.nn.Module)
    assert torch.equal(module(x, y), (x * y).detach())
    assert torch.equal(module(x, y=y), (x * y).detach())
    assert not module.training
    assert torch.equal(pickle.loads(pickle.dumps(module))(x, y), (x * y).detach())
    assert repr(module) == f"OnnxModule({str(folder / 'mul.onnx')!r}, x, y -> result)"


def test_several_results_are_a_tuple(folder: Path) -> None:
    x = torch.randn(4, 6)
    mean, spread = opsmith.onnx.load(folder / "moments.onnx")(x)
    assert torch.allclose(mean, x.mean(-1))
    assert torch.equal(spread, x.amax(-1) - x.amin(-1))


X = torch.ones(2, 6)


@pytest.mark.parametrize(
    ("args", "kwargs", "problem", "got"),
    [
        ((X,), {}, "their names do not fit", "x"),
        ((X, X, X), {}, "there are too many inputs", "3"),
        ((X, X), {"x": X}, "`x` is given twice", "x"),
        ((X, 2.0), {}, "`y` is not a tensor", "float"),
        ((X, X.double()), {}, "`y` does not fit", "torch.float64 [2, 6]"),
        ((X, X[:, :3]), {}, "`y` does not fit", "torch.float32 [2, 3]"),
    ],
    ids=["few", "many", "twice", "no-tensor", "dtype", "shape"],
)
def test_calls_that_do_not_fit(folder: Path, args: Any, kwargs: Any, problem: str, got: str) -> None:
    with pytest.raises(errors.OnnxRuntimeError) as caught:
        opsmith.onnx.load(folder / "mul.onnx")(*args, **kwargs)
    assert caught.value.message() == (
        f"`mul.onnx` cannot be called with these inputs: {problem}\n"
        "  expected: x: torch.float32 [n, 6], y: torch.float32 [n, 6]\n"
        f"  got: {got}\n"
        "  hint: pass a tensor of this dtype for each input; an axis without a name has a constant size"
    )


def test_sizes_that_do_not_fit_one_another(folder: Path) -> None:
    with pytest.raises(errors.OnnxRuntimeError) as caught:
        opsmith.onnx.load(folder / "mul.onnx")(torch.ones(2, 6), torch.ones(3, 6))
    assert str(caught.value).startswith("ONNX Runtime does not run `mul.onnx`: ")
    assert caught.value.got == "x [2, 6], y [3, 6]"


def test_a_node_without_a_kernel(folder: Path) -> None:
    with pytest.raises(errors.OnnxRuntimeError) as caught:
        opsmith.onnx.load(folder / "node.onnx")
    assert str(caught.value).startswith("ONNX Runtime has no kernel for a node of `node.onnx`: ")
    assert caught.value.hint == (
        "export the model with `body='function'`, which every runtime runs, or give the runtime a library "
        "that has the kernel"
    )


def test_files_that_are_none(folder: Path) -> None:
    with pytest.raises(errors.UsageError, match="there is no file"):
        opsmith.onnx.load(folder / "other.onnx")
    (folder / "text.onnx").write_text("no model")
    with pytest.raises(errors.OnnxRuntimeError, match=r"ONNX Runtime does not load `text\.onnx`: "):
        opsmith.onnx.load(folder / "text.onnx")
