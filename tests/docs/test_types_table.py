"""The table of argument types in docs/declaring.md says what happens to each."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from doc_pages import ROOT
from torch import Tensor

import opsmith

_PAGE = (ROOT / "docs" / "declaring.md").read_text(encoding="utf-8")
_SECTION = _PAGE.partition("## Argument types")[2].partition("\n## ")[0]
ROWS = [
    tuple(cell.replace("\\|", "|") for cell in row)
    for row in re.findall(r"^\| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", _SECTION, re.MULTILINE)
]
_SINGLE: dict[str, Any] = {
    "Tensor": torch.ones(1),
    "int": 1,
    "int | float": 1,
    "float": 0.5,
    "bool": True,
    "complex": 1j,
    "str": "a",
    "torch.dtype": torch.float32,
    "torch.device": torch.device("cpu"),
    "torch.layout": torch.strided,
    "torch.memory_format": torch.channels_last,
    "torch.Generator": torch.Generator(),
}


def _value(hint: str) -> Any:
    if hint in _SINGLE:
        return _SINGLE[hint]
    if " | tuple[" in hint:
        return _SINGLE[hint.partition(" | ")[0]]
    item = re.split(r"\[|, | \| |\]", hint)[1]
    return [_SINGLE[item]] * 2


def test_the_table_is_found() -> None:
    assert len(ROWS) == _SECTION.count("\n| ") - 1


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
@pytest.mark.parametrize("optional", [False, True], ids=["given", "optional"])
def test_a_row_is_true(row: tuple[str, ...], optional: bool) -> None:
    hint, schema, kind = row
    received: list[Any] = []

    def reference(x: Tensor, argument: Any) -> Tensor:
        received.append(argument)
        return x.clone()

    reference.__annotations__ |= {"argument": f"{hint} | None" if optional else hint}
    reference.__globals__["received"] = received
    operator = opsmith.operator("documented::argument")(reference)
    assert operator.specification.schema.by_name["argument"].kind.schema() == schema + "?" * optional
    operator(torch.ones(1), _value(hint))
    assert type(received[0]).__name__ == kind
    if optional:
        operator(torch.ones(1), None)
        assert received[1] is None
