"""The constants of the error model are in one module: no other bound is written where it is used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CHECKING = Path(__file__).parents[3] / "src" / "opsmith" / "checking"
FREE = {"constants", "agreement", "finite_differences", "noise", "slope", "working_precision"}
"""The module itself, and those that take differences, whose steps and errors are their own."""

HELD = [each for each in sorted((CHECKING / "numerics").glob("*.py")) if each.stem not in FREE]
HELD += [CHECKING / "properties" / "numeric" / f"{name}.py" for name in ("derivatives", "second_order")]


def bounds(source: str) -> list[str]:
    """Numbers below a hundredth, and powers of the eps of a dtype."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 1e-2:
            found.append(ast.unparse(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and "eps" in ast.unparse(node.left):
            found.append(ast.unparse(node))
    return found


def test_a_bound_is_seen() -> None:
    assert bounds("close = off < 1e-6 * size and off < torch.finfo(x.dtype).eps ** 0.5") != []
    assert bounds("half = 0.5 * size") == []


@pytest.mark.parametrize("path", HELD, ids=lambda path: path.stem)
def test_no_other_module_has_bounds_of_its_own(path: Path) -> None:
    # The tolerances of gradcheck, and of special values.
    allowed = {"compare": {"1e-05", "0.001", "known.eps ** 0.5"}}.get(path.stem, set())
    assert {*bounds(path.read_text(encoding="utf-8"))} <= allowed
