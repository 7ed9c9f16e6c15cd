"""`symbolic` of adopted `autograd.Function` classes names the node, under the exporter of today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_files import Made, attributes
from torch import Tensor, nn
from torch.autograd import Function

import opsmith
from opsmith import errors

Exported = Callable[..., Made]


class Linear(Function):
    """As in torch's documents, with a name that has no domain."""

    @staticmethod
    def symbolic(g: Any, input: Any, weight: Any, bias: Any, scale: float) -> Any:
        return g.op("MYLINEAR", input, weight, bias, scale_f=scale, steps_i=[1, 2], mode_s="q", flag_i=True)

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> Tensor:
        y = (input @ weight.T) * scale
        return y if bias is None else y + bias


class Halves(Function):
    """Its forward leaves torch; its node has the inputs in another order, and two results."""

    @staticmethod
    def symbolic(g: Any, x: Any, shift: Any) -> Any:
        return g.op("com.acme::Halves", shift, x, outputs=2)

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.from_numpy(np.divide(x.detach().numpy(), 2))
        return half + shift, half - shift


class Plain(Function):
    """Its symbolic is made of ONNX's own operators, one of which has a tensor for an attribute."""

    @staticmethod
    @torch.onnx.symbolic_helper.parse_args("v", "v", "i")
    def symbolic(g: Any, x: Any, weight: Any, times: int) -> Any:
        product = g.op("MatMul", x, g.op("Transpose", weight, perm_i=[1, 0]))
        return g.op("onnx::Mul", product, g.op("Constant", value_t=torch.tensor(float(times))))

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, times: int = 3) -> Tensor:
        return x @ weight.T * times


def halves_of(x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2 + shift, x / 2 - shift


linear = opsmith.adopt(Linear, "symbolic::linear")
halves = opsmith.adopt(Halves, "symbolic::halves", reference=halves_of, opaque=True)
plain = opsmith.adopt(Plain, "symbolic::plain")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias, 2.0) + linear(x, self.weight, None, 2.0)
        one, two = halves(y, self.bias)
        return one * two + plain(x, self.weight, 5)


MODEL, EXAMPLE = Network().eval(), torch.randn(2, 3)
NO_DOMAIN = "`symbolic` of Linear names a node `MYLINEAR` without a domain"
SAID = {"scale": 2.0, "steps": [1, 2], "mode": "q", "flag": 1}


@pytest.mark.every(5)
@pytest.mark.parametrize("body", ["function", pytest.param("inline", marks=pytest.mark.slow), "node"])
def test_the_node_is_the_one_that_it_names(export: Exported, body: str) -> None:
    with pytest.warns(UserWarning, match=NO_DOMAIN) as warned:
        made = export(MODEL, EXAMPLE, body=body, dynamic={"x": {0: "batch"}}, input_names=["x"])
    assert len([each for each in warned if NO_DOMAIN in str(each.message)]) == 1
    assert made.export.verified == (body != "node")
    functions = {(each.domain, each.name): list(each.input) for each in made.model.functions}
    found = [(node.domain, node.op_type, len(node.input), attributes(node)) for node in made.ours()]
    if body == "inline":
        assert (found, functions) == ([], {})
    else:
        second = "MYLINEAR" if body == "node" else "MYLINEAR_2"
        assert found[0] == ("symbolic", "MYLINEAR", 3, SAID)
        assert found[1][:2] == ("symbolic", second)
        assert attributes(made.ours()[1]) == SAID
        assert found[2] == ("com.acme", "Halves", 2, {})
        assert len(found) == 3
    if body == "function":
        assert functions["com.acme", "Halves"] == ["shift", "x"]
        assert set(functions) == {
            ("symbolic", "MYLINEAR"),
            ("symbolic", "MYLINEAR_2"),
            ("com.acme", "Halves"),
        }
    assert {"MatMul", "Mul"} <= {node.op_type for node in made.model.graph.node if not node.domain}
    onnx.checker.check_model(made.model, full_check=True)
    if body != "node":
        for rows in (1, 2, 7):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(made.in_runtime(x)[0], MODEL(x).detach())


@pytest.mark.slow
def test_without_a_body_stock_runtimes_have_no_kernel(export: Exported) -> None:
    with pytest.warns(UserWarning, match=NO_DOMAIN):
        made = export(linear, (EXAMPLE, torch.ones(4, 3), torch.ones(4)), body="node")
    with pytest.raises(Exception, match="MYLINEAR"):
        onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])


def adopted(name: str, symbolic: Callable[..., Any], outputs: int = 1) -> Any:
    """An operator whose class has this symbolic."""

    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        return x + y if outputs == 1 else (x + y, x - y)

    hint = Tensor if outputs == 1 else tuple[Tensor, Tensor]
    forward.__annotations__["return"] = hint
    members = {"symbolic": staticmethod(symbolic), "forward": staticmethod(forward)}
    return opsmith.adopt(type("Odd", (Function,), members), f"symbolic::{name}")


def asks_for_a_type(g: Any, x: Any, y: Any) -> Any:
    return g.op("demo::Odd", x, y, size_i=x.type().sizes()[0])


REFUSED = {
    "sizes": (adopted("sizes", asks_for_a_type), "its `symbolic` cannot be run: TypeError: 'TensorType'"),
    "ending": (
        adopted("ending", lambda g, x, y: g.op("demo::Odd", x, y, slope=2.0)),
        "the attribute `slope` of `g.op` has no type",
    ),
    "several": (
        adopted("several", lambda g, x, y: g.op("demo::Odd", g.op("demo::Even", x, y), y)),
        "an input of the node that its `symbolic` makes is not a tensor of the call",
    ),
    "among_others": (
        adopted("among_others", lambda g, x, y: g.op("Relu", g.op("demo::Odd", x, y))),
        "makes several nodes, and one of them is outside of ONNX's domain",
    ),
    "results": (
        adopted("results", lambda g, x, y: g.op("demo::Odd", x, y), outputs=2),
        "does not return one value for each result of `forward`",
    ),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_an_error_with_its_line(export: Exported, case: str) -> None:
    operator, said = REFUSED[case]
    with pytest.raises(errors.ExportError, match=said) as caught:
        export(operator, (torch.ones(2), torch.ones(2)))
    assert caught.value.operator == operator.name
    assert "test_symbolic.py" in str(caught.value.where)
    assert caught.value.hint
