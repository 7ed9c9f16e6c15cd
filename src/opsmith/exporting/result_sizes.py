"""Programs that compute a call's result sizes from its tensor sizes, made from an exported program."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch

from opsmith.core.schema import Argument
from opsmith.exporting.calls import OperatorCall, varies
from opsmith.kernels.runtime.recipe import (
    CODES,
    MOST_LETTERS,
    Leaf,
    NotEncodedError,
    Program,
    constant,
    program,
)

_OPERATIONS: dict[str, type[ast.operator]] = {
    "Add": ast.Add,
    "Mul": ast.Mult,
    "FloorDiv": ast.FloorDiv,
    "CleanDiv": ast.FloorDiv,
    "Mod": ast.Mod,
    "PythonMod": ast.Mod,
}
_CHOICES = {"Max": "max", "Min": "min"}
_VALUES = {"int": "VALUE", "bool": "TRUTH", "float": "SINGLE"}
_ITEMS = {"int": "ITEM", "bool": "TRUTH_ITEM", "float": "SINGLE_ITEM"}


def sizing_of_call(call: OperatorCall) -> tuple[int, ...] | None:
    """Numbers from which C++ computes the sizes of results, in the format of `sizing_of`.

    They apply to calls with the same static sizes and the same other arguments as this call. Letters are the
    sizes that vary, and conditions compare the other arguments. None if no program computes the sizes.
    """
    if len(call.results()) < len(call.specification.schema.results):  # hidden results: unknown sizes
        return None
    try:
        return _Sizing(call).numbers()
    except NotEncodedError:
        return None


class _Sizing:
    """The sizes of one call.

    Args:
        call: The call.
    """

    def __init__(self, call: OperatorCall) -> None:
        self._call = call
        self._letters: dict[str, int] = {}

    def numbers(self) -> tuple[int, ...]:
        """All numbers, in the order in which C++ reads them."""
        tensors: list[int] = []
        conditions: list[Program] = []
        composed: dict[str, Any] = {}
        count = 0
        for index, (leaf, value) in enumerate(self._call.values()):
            conditions += _conditions(index, leaf, value)
            if not leaf.kind.is_tensor or value is None:
                continue
            items = enumerate(value) if leaf.kind.sequence else [(-1, value)]
            for item, node in items:
                shape = node.meta["val"].shape
                composed |= self._bound(shape)
                tensors += [index, item, *self._dims(shape)]
                count += 1
        if len(self._letters) > MOST_LETTERS:
            raise NotEncodedError("too many sizes")
        for text, expression in composed.items():
            if {str(each) for each in expression.free_symbols} <= self._letters.keys():
                letter = _code("PLACE", self._letters[text])
                conditions.append((*letter, *self._program(expression, whole=False), *_code("EQUAL")))
        results = [number for each in self._call.results() for number in self._dims(each.shape)]
        shown = len(self._call.results())
        checks = [number for each in conditions for number in (len(each), *each)]
        return len(self._letters), 0, count, *tensors, len(conditions), *checks, shown, *results

    def _bound(self, shape: torch.Size) -> Iterator[tuple[str, Any]]:
        """Give each size that varies a letter; yield each compound expression with its text."""
        for size in filter(varies, shape):
            expression = _expression(size)
            self._letters.setdefault(str(expression), len(self._letters))
            if not expression.is_Symbol:
                yield str(expression), expression

    def _dims(self, shape: torch.Size) -> list[int]:
        numbers = [0, len(shape)]
        for size in shape:
            codes = self._program(_expression(size)) if varies(size) else constant(int(size))
            numbers += [len(codes), *codes]
        return numbers

    def _program(self, expression: Any, *, whole: bool = True) -> Program:
        """The program of an expression of sympy; `whole` permits one letter for the entire expression."""
        return program(self._tree(expression, whole=whole), self._leaf)

    def _leaf(self, node: ast.expr) -> Leaf | None:
        if isinstance(node, ast.Name) and node.id in self._letters:
            return _code("PLACE", self._letters[node.id]), ()
        return None

    def _tree(self, expression: Any, *, whole: bool = True) -> ast.expr:
        text, kind = str(expression), type(expression).__name__
        if whole and text in self._letters:
            return ast.Name(text)
        if expression.is_Integer:
            return ast.Constant(int(expression))
        parts = [self._tree(each) for each in expression.args]
        if kind in _CHOICES:
            return ast.Call(ast.Name(_CHOICES[kind]), parts, [])
        if kind == "Pow" and expression.exp.is_Integer and 0 < int(expression.exp) <= 8:
            kind, parts = "Mul", [parts[0]] * int(expression.exp)
        if kind in _OPERATIONS:
            return reduce(lambda one, two: ast.BinOp(one, _OPERATIONS[kind](), two), parts)
        raise NotEncodedError(text)


def _expression(size: Any) -> Any:
    """The expression of sympy for a symbolic size, a SymInt."""
    return size.node.expr


def _code(name: str, *number: int) -> Program:
    return CODES.index(name), *number


def _conditions(index: int, leaf: Argument, value: Any) -> Iterator[Program]:
    """Programs that are true if an argument equals the argument of a call; they ignore tensor sizes."""
    given = _code("GIVEN", index)
    if value is None:
        yield (*given, *_code("NOT"))
        return
    yield given
    form = leaf.kind.base.annotation
    if leaf.kind.is_tensor:
        if leaf.kind.sequence:
            yield _equal(_code("LENGTH", index), len(value))
    elif form == "str":
        letters = value.encode()
        yield _equal(_code("LENGTH", index), len(letters))
        for at, byte in enumerate(letters):
            yield _equal((*constant(at), *_code("BYTE_ITEM", index)), byte)
    elif leaf.kind.sequence:
        items = value if isinstance(value, list | tuple) else [value] * (leaf.kind.length or 1)
        yield _equal(_code("LENGTH", index), len(items))
        for at, item in enumerate(items):
            yield _equal((*constant(at), *_code(_ITEMS[form], index)), _whole(form, item))
    else:
        yield _equal(_code(_VALUES[form], index), _whole(form, value))


def _equal(read: Program, number: int) -> Program:
    return *read, *constant(number), *_code("EQUAL")


def _whole(form: str, value: Any) -> int:
    """A value as a program reads it; a float is read as its single-precision bits, as in an attribute."""
    if form != "float":
        return int(value)
    if value != value:
        return 0x7FC00000
    single = torch.tensor(float(value), dtype=torch.float32) + 0.0  # -0.0 becomes 0.0
    return int(single.view(torch.int32)) & 0xFFFFFFFF
