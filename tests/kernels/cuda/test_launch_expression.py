"""Expressions over the sizes of a call: their values, and what the language of launches does not allow."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy
import pytest
import torch

from opsmith.core.expression import ExpressionError, parse
from opsmith.kernels.cuda.launch import LAUNCH, launch_rule
from opsmith.kernels.cuda.parameters import CudaParameter, pack_parameters

VALUES: dict[str, Any] = {
    "x": torch.empty(2, 3, 5, dtype=torch.float16),
    "bias": None,
    "stride": (2, 1),
    "by": 1.5,
    "count": 7,
    "flag": True,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("256", 256),
        ("ceil(x.numel / 7)", 5),
        ("-(-x.numel // 7)", 5),
        ("floor(x.numel / 7)", 4),
        ("x.shape[0] * x.shape[-1]", 10),
        ("x.dim + x.itemsize", 5),
        ("max(1, min(count, 4), 2)", 4),
        ("stride[1] + len(stride)", 3),
        ("count % 4", 3),
        ("(ceil(x.shape[1] / 2), x.shape[0], 1)", (2, 2, 1)),
        ("1 if bias is None else bias.numel", 1),
        ("x.numel if flag else 0", 30),
        ("0 if not flag else count", 7),
        ("2 if x.shape[0] >= 2 else 3", 2),
        ("x.numel * 9007199254740993 / 9007199254740993", 30),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert parse(text, LAUNCH).value(VALUES) == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x.numel ** 2", "x.numel ** 2"),
        ("__import__('os')", "__import__('os')"),
        ("x.data_ptr", "x.data_ptr"),
        ("x.shape[0].bit_length()", "x.shape[0].bit_length()"),
        ("[1, 2]", "[1, 2]"),
        ("lambda: 1", "lambda: 1"),
        ("max(1, default=2)", "max(1, default=2)"),
        ("'text'", "'text'"),
        ("1.5 * count", "1.5"),
        ("ceil", "ceil"),
        ("1 < count < 3", "1 < count < 3"),
        ("x.shape[0:1]", "0:1"),
    ],
)
def test_what_the_language_does_not_allow(text: str, part: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text, LAUNCH)
    assert str(caught.value) == f"`{part}` is not allowed"


def test_what_python_cannot_read() -> None:
    with pytest.raises(ExpressionError, match="Python cannot read it: "):
        parse("ceil(x.numel", LAUNCH)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bias.numel", "`bias` is None, which has no `numel`"),
        ("count / (x.dim - 3)", "it divides by zero"),
        ("stride[2]", "`stride[2]` is out of range: there are 2 items"),
        ("count[0]", "`count[0]` indexes a value that has no items"),
        ("bias + 1", "`bias` is not a number"),
        ("ceil(bias)", "must be real number, not NoneType"),
    ],
)
def test_what_has_no_value(text: str, why: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text, LAUNCH).value(VALUES)
    assert str(caught.value) == why


def test_names_are_those_of_arguments_alone() -> None:
    expression = parse("ceil(x.numel / count) + max(stride[0], x.dim)", LAUNCH)
    assert set(expression.names) == {"x", "count", "stride"}


def test_whole_numbers_of_numpy_are_numbers() -> None:
    rule = launch_rule("grid", numpy.int64(3), "demo::op", ["x"], 3)
    assert rule.value(VALUES) == (3,)
    rule = launch_rule("grid", lambda x: (numpy.int32(x.shape[0]), 1), "demo::op", ["x"], 3)
    assert rule.value(VALUES) == (2, 1)


def test_a_float_beyond_float32_is_infinite_as_in_c() -> None:
    parameter = CudaParameter("float", item=4, size=4, alignment=4)
    several = CudaParameter("float[]", capacity_items=2, item=4, size=16, alignment=8)
    most = (2 - 2**-23) * 2.0**127
    rounded = {most * (1 + 2**-26): most, most + 2.0**103: math.inf}
    for value, packed in {
        1e300: math.inf,
        -1e300: -math.inf,
        1.5: 1.5,
        math.inf: math.inf,
        **rounded,
    }.items():
        assert struct.unpack("<f", pack_parameters([parameter], [value]).image[:4]) == (packed,)
        image = pack_parameters([several], [[1.0, value]]).image
        assert struct.unpack("<qff", image[:16]) == (2, 1.0, packed)
