"""The tolerance of an output follows from the types to which its inputs were rounded."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir
import onnx_operators as of
import pytest
import torch
from onnx_files import Made
from onnx_operators import Calls
from torch import Tensor

import opsmith
from opsmith.errors import ExportMismatchError
from opsmith.exporting.tolerance import in_coarser, rounding, tolerance

TEXT = """
<ir_version: 10, opset_import: ["" : 20, "d" : 1]>
main (float[n] x, float16[n] w, float[n] z)
  => (float[n] wide, float[n] widened, float[n] narrowed, int64[1] whole)
<float16[n] half, float16[n] double, float[n] a, bool[1] yes>
{
    wide = Exp (x)
    widened = d.Plain (x, w)
    a = d.Narrow (z)
    narrowed = Neg (a)
    whole = d.Count (w)
}
<domain: "d", opset_import: ["" : 20, "d" : 1]> Plain (x, w) => (y) { v = Cast<to = 1>(w) y = Mul (x, v) }
<domain: "d", opset_import: ["" : 20, "d" : 1]> Narrow (x) => (y) { y = d.Inner (x) }
<domain: "d", opset_import: ["" : 20]> Inner (x) => (y) {
    h = Cast<to = 10>(x)
    e = Exp (h)
    y = Cast<to = 1>(e)
}
<domain: "d", opset_import: ["" : 20]> Count (x) => (y) { y = Shape (x) }
"""


def test_types_are_followed_into_functions() -> None:
    model = onnx_ir.from_proto(onnx.parser.parse_model(TEXT))
    for value in model.graph.outputs:
        assert value.dtype is not None
    found = rounding(model)
    assert found.nodes == 1 + 2 + 1 + 1 + 1
    assert found.coarsest == {
        "wide": torch.float32,
        "widened": torch.float32,  # `w` comes in float16, and no node rounds to it
        "a": torch.float16,
        "narrowed": torch.float16,
        "whole": torch.float16,
    }


def test_what_a_coarser_type_allows() -> None:
    assert in_coarser(torch.float32, torch.float32, 9) is None
    assert in_coarser(torch.float16, torch.float32, 9) is None
    assert in_coarser(torch.int64, torch.float16, 9) is None
    assert in_coarser(torch.float32, None, 9) is None
    coarse = in_coarser(torch.float64, torch.float32, 9)
    assert coarse is not None
    assert coarse.relative == tolerance(torch.float32, 9).relative


def half_way(x: Tensor) -> Tensor:
    return (x.half() @ x.half().mT).exp().float()


X = torch.linspace(-1, 1, 24).reshape(4, 6)


@pytest.mark.slow
def test_an_output_that_went_through_float16_may_be_off_as_that(export: Callable[..., Made]) -> None:
    made = export(Calls(lambda x: {"half": half_way(x), "whole": opsmith.ops.exp(x)}), X)
    by_name = {each.output: each for each in made.export.comparisons}
    assert by_name["whole"].allowed < 1e-5
    assert 1e-5 < by_name["half"].difference <= by_name["half"].allowed < 0.05
    assert "some of them to float16" in by_name["half"].reason


@pytest.mark.slow
def test_another_output_may_not(export: Callable[..., Made]) -> None:
    """`off` is off by a hundredth, which float16 would explain, and nothing in its output is float16."""
    with pytest.raises(ExportMismatchError) as caught:
        export(Calls(lambda x: {"half": half_way(x), "whole": of.off(x)}), X)
    assert caught.value.argument == "whole"
    assert "eps(float32)" in str(caught.value.expected)
