"""Files of nodes without bodies, in ONNX Runtime, by torch's own operators: the nodes say all of a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_operators as of
import pytest
import torch
from onnx_files import off
from onnx_operators import Calls
from runtime_bridge import Bridge
from torch import Tensor

import opsmith
from opsmith import ops

X = torch.linspace(-1, 1, 24).reshape(4, 6)
SLOW = pytest.mark.slow

CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "optional-absent-in-the-middle": (
        lambda x, w: of.affine(x, w) + of.affine(x, w, scale=w[:, 0]) * of.affine(x, w, w[:, 1], w[:, 2]),
        (X, X.flip(0)),
    ),
    "several-results": (lambda x: of.moments(x, 0.5), (X,)),
    "list-of-tensors": (
        lambda x: of.weighted([x, x + 1], [0.5, 0.25]) + of.weighted([x, x, x], [1.0, 2.0, 4.0]),
        (X,),
    ),
    "list-of-results": (lambda x: of.halves(x, 3), (X,)),
    "result-that-is-none": (lambda x: of.maybe(x)[0] + of.maybe(x, True)[1], (X,)),
    "every-attribute": (
        lambda x: of.described(
            x,
            3,
            0.25,
            False,
            "mean",
            of.Mode.DOWN,
            "b",
            torch.float64,
            2.5,
            4j,
            [1, 2],
            (0.5,),
            [True],
            3,
            0.5,
        ),
        (X,),
    ),
    "attributes-left-out": (lambda x: of.described(x), (X,)),
    "linear": (ops.linear, (X, torch.ones(2, 6), torch.ones(2))),
    "involution": (
        lambda x, w: ops.involution(x, w, 2, (1, 0)),
        (torch.randn(2, 4, 5, 6), torch.randn(2, 2, 3, 2, 3, 3)),
    ),
    "bfloat16": (lambda x: ops.exp(x) * 1, (X.bfloat16(),)),
    "float64": (lambda x, y: ops.mul(x, y), (X.double(), X.double() + 1)),
}
FAST = ("optional-absent-in-the-middle", "every-attribute")


@pytest.mark.every(5)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else SLOW) for name in CASES])
def test_a_node_says_all_of_its_call(name: str, tmp_path: Path) -> None:
    function, inputs = CASES[name]
    path = tmp_path / "model.onnx"
    made = opsmith.export_onnx(Calls(function), inputs, path, body="node", verify=False)
    assert made.nodes
    bridge = Bridge(path, tmp_path)
    results = bridge.run(*inputs)
    assert not bridge.failed
    want = function(*inputs)
    assert off(results, want if isinstance(want, tuple | list) else [want]) <= 1e-6


@SLOW
def test_what_an_operator_raises_is_an_error_of_the_runtime(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    opsmith.export_onnx(of.opaque_and_strict, X[0], path, body="node", dynamic={"x": {0: "n"}}, verify=False)
    with pytest.raises(Exception, match="ValueError: it takes no more than 6 numbers"):
        Bridge(path, tmp_path).run(torch.ones(7))
