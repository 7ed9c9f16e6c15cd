"""Where a torch operation stands in its source, and what its operands are called there."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

WIDTH = 60
_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[2]
_BETWEEN = tuple(str(_OURS / name) for name in ("checking", "core", "adopting", "torch_library"))
_FORMULAS = str(Path(__file__).with_name("unrolled.py"))


@dataclass(frozen=True)
class Source:
    """An expression.

    Args:
        text: Its source; empty where there is none.
        where: `file:line` of it.
        inside: The expression that a composite operation, of which it is a part, stands as; else empty.
    """

    text: str
    where: str
    inside: str = ""

    def whole(self, operation: str) -> str:
        """What a message calls the value of the expression."""
        return f"`{_short(self.text or operation)}`" + self._end()

    def operand(self, slot: int, operation: str) -> str:
        """What a message calls one operand of it."""
        names = _operands(self.text)
        if slot < len(names):
            return f"`{_short(names[slot])}` in `{_short(self.text)}`" + self._end()
        return f"operand {slot + 1} of `{_short(self.text or operation)}`" + self._end()

    def _end(self) -> str:
        inside = f" inside of `{_short(self.inside)}`" if self.inside else ""
        return f"{inside} at {self.where}" if self.where else inside


def source_of() -> Source:
    """Where the operation that is being run stands: the innermost expression outside of torch and of us."""
    frame: FrameType | None = inspect.currentframe()
    formula = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _FORMULAS and frame.f_code.co_name != "unrolled":
            formula = formula or _segment(frame)
        elif not name.startswith((str(_TORCH), *_BETWEEN)):
            text, where = _segment(frame), f"{name}:{frame.f_lineno}"
            return Source(formula, where, text) if formula else Source(text, where)
        frame = frame.f_back
    return Source(formula, "")


def _segment(frame: FrameType) -> str:
    """The source of what a frame is executing."""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(positions, (None, None, None, None))
    if line is None or end_line is None or column is None or end_column is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, at) for at in range(line, end_line + 1)]
    encoded = [each.encode() for each in lines]
    encoded[-1] = encoded[-1][:end_column]
    encoded[0] = encoded[0][column:]
    return " ".join(b"".join(encoded).decode(errors="replace").split())


def _operands(text: str) -> list[str]:
    """The operands of an operator or of a call, the receiver of a method first."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return []
    if isinstance(tree, ast.BinOp):
        found: list[ast.expr] = [tree.left, tree.right]
    elif isinstance(tree, ast.Call):
        found = [*tree.args, *(word.value for word in tree.keywords)]
        if isinstance(tree.func, ast.Attribute) and ast.unparse(tree.func.value) not in _MODULES:
            found.insert(0, tree.func.value)
        found = [part for each in found for part in (each.elts if isinstance(each, _LISTS) else [each])]
    else:
        return []
    return [ast.unparse(each) for each in found]


_LISTS = (ast.List, ast.Tuple)
_MODULES = frozenset({"torch", "F", "torch.nn.functional", "nn.functional", "torch.special", "torch.linalg"})


def _short(text: str) -> str:
    return textwrap.shorten(text, WIDTH, placeholder=" ...") if len(text) > WIDTH else text
