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
from opsmith.exporting.closeness import Closeness, closeness, in_float64, rounding

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


def off_by(
    share: float, dtype: torch.dtype = torch.float32, coarsest: torch.dtype | None = None
) -> Closeness:
    right = torch.ones(3, dtype=dtype)
    return closeness(right * (1 + share), right, 9, coarsest)


def test_the_bound_of_an_output_is_that_of_the_coarsest_type() -> None:
    assert off_by(12 * 2**-24).close
    assert not off_by(16 * 2**-24).close
    assert off_by(12 * 2**-11, coarsest=torch.float16).close
    assert not off_by(16 * 2**-11, coarsest=torch.float16).close
    assert off_by(12 * 2**-24, torch.float64, torch.float32).close
    assert not off_by(12 * 2**-24, torch.float64, torch.float64).close
    assert "in float16" in off_by(0.0, torch.float16, torch.float32).reason
    whole = torch.ones(3, dtype=torch.int64)
    assert closeness(whole, whole, 9, torch.float16).close
    assert not closeness(whole + 1, whole, 9, torch.float16).close


def test_another_form_and_other_special_values_are_not_close() -> None:
    right = torch.tensor([1.0, torch.nan, torch.inf])
    assert closeness(right, right, 9).close
    for got in (right.double(), right[:2], right.nan_to_num(0.0), -right):
        assert not closeness(got, right, 9).close


class Shrinking(torch.nn.Module):
    """It loses digits, all of them for small inputs."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return ((1 + x) - 1,)


@pytest.mark.parametrize(
    ("size", "off", "close"), [(1e-3, 3e-5, True), (1e-3, 1e-2, False), (1e-6, 0.5, False)]
)
def test_the_model_in_float64_explains_lost_digits_down_to_half(size: float, off: float, close: bool) -> None:
    x = torch.linspace(1, 2, 7) * size
    (right,) = Shrinking()(x)
    found = in_float64(Shrinking(), [x])
    assert found is not None
    judged = closeness(right * (1 + off), right, 3, None, lambda dtype: found.at([x], dtype)[0])
    assert judged.close is close
    assert ("in float64" in judged.reason) is close


def refused() -> tuple[Tensor]:
    raise TypeError("float32 alone")


class Fixed(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.float() @ torch.ones(2, 2),) if x.dtype == torch.float32 else refused()


def test_a_model_that_does_not_run_in_float64_explains_nothing() -> None:
    assert in_float64(Fixed(), [torch.ones(2, 2)]) is None


def half_way(x: Tensor) -> Tensor:
    return (x.half() @ x.half().mT).exp().float()


X = torch.linspace(-1, 1, 24).reshape(4, 6)


@pytest.mark.slow
def test_an_output_that_went_through_float16_may_be_off_as_that(export: Callable[..., Made]) -> None:
    made = export(Calls(lambda x: {"half": half_way(x), "whole": opsmith.ops.exp(x)}), X)
    by_name = {each.output: each for each in made.export.comparisons}
    assert by_name["whole"].allowed < 1e-5
    assert 1e-5 < by_name["half"].difference <= by_name["half"].allowed < 0.05
    assert "in float16" in by_name["half"].reason


@pytest.mark.slow
def test_another_output_may_not(export: Callable[..., Made]) -> None:
    """`off` is off by a hundredth, which float16 would explain, and nothing in its output is float16."""
    with pytest.raises(ExportMismatchError) as caught:
        export(Calls(lambda x: {"half": half_way(x), "whole": of.off(x)}), X)
    assert caught.value.argument == "whole"
    assert "in float32" in str(caught.value.expected)
