"""Aspects on a page: handwritten, declared, derived and missing, of every kind of operator."""

from __future__ import annotations

import textwrap

import paged
import pytest
import torch

import opsmith
from opsmith.core import source
from opsmith.pages.aspects import aspects_of
from opsmith.pages.declaration import codes_of

NAMES = {"result", "second order", "forward mode", "vmap", "shapes and dtypes", "autocast", "torch.compile"}
NAMES |= {"ONNX", "count of operations", "samples"}


def origins(operator: opsmith.Operator[..., object]) -> dict[str, str]:
    return {each.name: each.origin for each in aspects_of(operator.specification)}


def how(operator: opsmith.Operator[..., object], name: str) -> str:
    return next(each.how for each in aspects_of(operator.specification) if each.name == name)


def test_a_reference_alone_derives_everything() -> None:
    found = origins(paged.plain)
    handwritten = {name for name, origin in found.items() if origin == "handwritten"}
    assert handwritten == {"result", "samples"}
    assert {name for name, origin in found.items() if origin == "derived"} == {
        *(NAMES - {"result", "samples"}),
        "gradient of `x`",
    }
    assert how(paged.plain, "gradient of `x`") == "ordinary autograd of the reference"


def test_formulas_a_kernel_and_shapes_are_the_authors() -> None:
    found = origins(paged.affine)
    assert found["gradient of `x`"] == found["gradient of `weight`"] == "handwritten"
    assert found["gradient of `bias`"] == "derived"
    assert how(paged.affine, "gradient of `bias`") == "derived: the reference, run again"
    assert found["result on cpu"] == "handwritten"
    assert how(paged.affine, "result on cpu") == "a kernel in Python, for float32"
    assert found["shapes and dtypes"] == "declared"
    assert found["second order"] == found["forward mode"] == "derived"


def test_of_an_opaque_operator_what_is_missing_is_named() -> None:
    found = origins(paged.in_numpy)
    missing = {name for name, origin in found.items() if origin == "missing"}
    assert missing == {
        "gradient of `x`",
        "second order",
        "forward mode",
        "ONNX",
        "count of operations",
        "samples",
    }
    assert found["shapes and dtypes"] == "handwritten"


def test_a_surrogate_is_checked_as_one() -> None:
    (found,) = [each for each in aspects_of(paged.step.specification) if each.name == "gradient of `x`"]
    assert (found.origin, found.checked_by) == ("handwritten", "surrogate")
    assert found.how == "surrogate formula"


def test_an_adopted_class_has_its_own_forward_and_backward() -> None:
    assert how(paged.double, "result") == "the forward of `Double`"
    assert how(paged.double, "gradient of `x`") == "backward of Double"
    codes = codes_of(paged.double.specification)
    assert [each.title for each in codes] == ["forward of Double", "gradient of `x`"]
    assert all("paged.py:" in each.where for each in codes), "the code of the class, and none of opsmith"
    assert "def forward(" in codes[0].text


def test_answers_that_are_no_formula_are_declared() -> None:
    @opsmith.operator("paged::answers")
    def answers(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x.sign() * y.floor() + z

    answers.gradients(x=opsmith.zero, y=opsmith.non_differentiable, z=opsmith.not_implemented("later"))
    assert [how(answers, f"gradient of `{name}`") for name in "xyz"] == [
        "opsmith.zero",
        "none: non-differentiable",
        "opsmith.not_implemented('later')",
    ]
    assert {origins(answers)[f"gradient of `{name}`"] for name in "xyz"} == {"declared"}


def test_each_aspect_that_was_written_says_where() -> None:
    for operator in (paged.affine, paged.plain, paged.in_numpy, paged.step, paged.double):
        for each in aspects_of(operator.specification):
            assert (each.origin == "handwritten") <= (
                "paged.py:" in each.where or each.where == "empty_like"
            ), (operator, each)


first, second = lambda x: x + 1, lambda x: x + 2
wrapped = [
    lambda x, y: (
        x + y  # as it stands
    ),
]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (first, "lambda x: x + 1"),
        (second, "lambda x: x + 2"),
        (wrapped[0], "lambda x, y: (\n    x + y  # as it stands\n)"),
        (len, ""),
        (eval("lambda x: x"), ""),
    ],
    ids=["first", "second", "wrapped", "builtin", "evaluated"],
)
def test_a_lambda_is_shown_alone(function: object, text: str) -> None:
    assert source.text(function) == text  # type: ignore[arg-type]


def test_a_function_is_shown_with_its_decorators() -> None:
    def around(function: object) -> object:
        return function

    @around
    def inside() -> None:
        """Words."""

    expected = '@around\ndef inside() -> None:\n    """Words."""'
    assert source.text(inside) == textwrap.dedent(expected)  # type: ignore[arg-type]
