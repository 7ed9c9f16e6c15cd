"""The tables of types in docs/declaring.md say what happens to each."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy
import pytest
import torch
from doc_pages import ROOT
from torch import Tensor

import opsmith
from opsmith import errors

_PAGE = (ROOT / "docs" / "declaring.md").read_text(encoding="utf-8")
_SECTION = _PAGE.partition("## Argument types")[2].partition("\n## ")[0]
_RESULTS = _PAGE.partition("## Results")[2].partition("\n## ")[0]
_NAMES: dict[str, Any] = {
    "torch": torch, "Tensor": Tensor, "Any": Any, "Callable": Callable, "Sequence": Sequence,
    "Literal": Literal, "numpy": numpy, "re": re, "__name__": __name__,
}  # fmt: skip
_PROGRAM = re.search(r"```python\n(.*?)@opsmith", _SECTION, re.DOTALL)
assert _PROGRAM is not None
exec(compile(_PROGRAM[1], "declaring.md", "exec", dont_inherit=True), _NAMES)


def _rows(section: str, columns: int) -> list[tuple[str, ...]]:
    """The rows of the table with this many columns, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]
    return [tuple(cell.replace("\\|", "|") for cell in row) for row in rows if len(row) == columns]


def _code(cell: str) -> str:
    return cell.removeprefix("`").removesuffix("`")


ROWS = [tuple(map(_code, row)) for row in _rows(_SECTION, 4)]
REFUSED = [(_code(annotation), hint) for annotation, hint in _rows(_SECTION, 2)]
RESULTS = [(_code(row[0]), _code(row[1])) for row in _rows(_RESULTS, 4)]
_SINGLE: dict[str, Any] = {
    "Tensor": torch.ones(1),
    "int": 1,
    "int | float": 1,
    "float": 0.5,
    "bool": True,
    "complex": 1j,
    "str": "a",
    'Literal["a", "b"]': "b",
    "Literal[1, 2]": 2,
    "Mode": _NAMES["Mode"].NEAREST,
    "Config": _NAMES["Config"](0.5, _NAMES["Mode"].NEAREST),
    "Window": _NAMES["Window"](1, 2),
    "tuple[int, str]": (1, "a"),
    "tuple[int, Window]": (1, _NAMES["Window"](1, 2)),
    "torch.dtype": torch.float32,
    "torch.device": torch.device("cpu"),
    "torch.layout": torch.strided,
    "torch.memory_format": torch.channels_last,
    "torch.Generator": torch.Generator(),
}


def _value(annotation: str) -> Any:
    if annotation in _SINGLE:
        return _SINGLE[annotation]
    if " | tuple[" in annotation:
        return _SINGLE[annotation.partition(" | ")[0]]
    item = re.split(r"\[|, | \| |\]", annotation)[1]
    return [_SINGLE[item]] * 2


def _declared(annotation: Any, received: list[Any]) -> opsmith.Operator[..., Any]:
    def reference(x: Tensor, argument: Any) -> Tensor:
        received.append(argument)
        return x.clone()

    reference.__annotations__ |= {"x": Tensor, "argument": annotation, "return": Tensor}
    return opsmith.operator("documented::argument")(reference)


def test_the_tables_are_found() -> None:
    assert len(ROWS) + len(REFUSED) == _SECTION.count("\n| ") - 2
    assert len(RESULTS) == _RESULTS.count("\n| ") - 1


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
@pytest.mark.parametrize("optional", [False, True], ids=["given", "optional"])
def test_a_row_is_true(row: tuple[str, ...], optional: bool) -> None:
    text, schema, kind, wrong = row
    annotation = eval(text, _NAMES)
    received: list[Any] = []
    if optional and " " in schema:
        with pytest.raises(errors.UnsupportedTypeError, match="take its parts as separate arguments"):
            _declared(annotation | None, received)
        return
    operator = _declared(typing.Optional[annotation] if optional else annotation, received)  # noqa: UP045
    if " " in schema:
        assert operator.specification.schema.text("f") == f"f(Tensor x, {schema}) -> Tensor"
    else:
        assert operator.specification.schema.by_name["argument"].kind.schema() == schema + "?" * optional
    operator(torch.ones(1), _value(text))
    assert type(received[0]).__name__ == kind
    refused = eval(wrong, _NAMES)
    for _ in range(2):
        with pytest.raises(errors.ArgumentError) as caught:
            operator(torch.ones(1), refused)
        assert str(caught.value.argument).startswith("argument")
    if optional:
        operator(torch.ones(1), None)
        assert received[-1] is None


@pytest.mark.parametrize(("annotation", "hint"), REFUSED, ids=[annotation for annotation, _ in REFUSED])
def test_a_refused_hint_has_this_hint(annotation: str, hint: str) -> None:
    with pytest.raises(errors.UnsupportedTypeError) as caught:
        _declared(eval(annotation, _NAMES), [])
    assert caught.value.hint == hint


@pytest.mark.parametrize(("annotation", "schema"), RESULTS, ids=[annotation for annotation, _ in RESULTS])
def test_a_row_of_results_is_true(annotation: str, schema: str) -> None:
    seen: list[Any] = []

    def reference(x: Tensor) -> Any:
        return [x + 1, x * 2] if schema == "Tensor[]" else x + 1

    def nothing(x: Tensor) -> Any:
        return None

    def formula(grad: Any, result: Any) -> Tensor:
        seen.append((grad, result))
        return sum(grad) if isinstance(grad, list) else grad

    reference.__annotations__ |= {"x": Tensor, "return": eval(annotation, _NAMES)}
    operator = opsmith.operator("documented::result")(reference).gradients(x=formula)
    assert operator.specification.schema.text("f") == f"f(Tensor x) -> {schema}"
    returned = operator(torch.ones(1, requires_grad=True))
    (returned[0] if isinstance(returned, list) else returned).backward()
    assert [type(each) for each in seen[0]] == [type(returned), type(returned)]
    if "None" in annotation:
        nothing.__annotations__ |= {"x": Tensor, "return": eval(annotation, _NAMES)}
        assert opsmith.operator("documented::none")(nothing)(torch.ones(1, requires_grad=True)) is None
