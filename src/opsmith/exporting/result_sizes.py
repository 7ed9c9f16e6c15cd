"""Result sizes of a call as C++ expressions of the sizes of its tensors, from an exported program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch

from opsmith.core.schema import Argument
from opsmith.exporting.calls import OperatorCall, varies

_SIGNS = {"Add": " + ", "Mul": " * "}
_CHOICES = {"Max": "std::max", "Min": "std::min"}
_DIVISIONS = ("FloorDiv", "CleanDiv")


def sizes_in_cpp(calls: Sequence[OperatorCall]) -> str:
    """The body of a C++ function of `v`, the arguments, that writes the sizes of results into `r`.

    It covers calls with the static sizes and the other arguments of one of these calls. Empty if no sizes can
    be written in C++.
    """
    blocks = dict.fromkeys(block for block in map(_block, calls) if block)
    return "\n".join([*blocks, "  return opsmith::UNKNOWN;"]) if blocks else ""


class _UnwrittenError(Exception):
    """A size that cannot be written in C++."""


def _block(call: OperatorCall) -> str:
    if len(call.results()) < len(call.specification.schema.results):  # the sizes of hidden ones are unknown
        return ""
    try:
        lines = [*_Block(call).lines()]
    except _UnwrittenError:
        return ""
    return "\n".join(["  do {", *(f"    {line}" for line in lines), "  } while (false);"])


class _Block:
    """The C++ lines for one call; they `break` if the actual call differs from it.

    Args:
        call: The call.
    """

    def __init__(self, call: OperatorCall) -> None:
        self._call = call
        self._known: dict[str, str] = {}
        self._composed: list[tuple[str, Any]] = []

    def lines(self) -> Iterator[str]:
        """The lines, in order."""
        yield "bool bad = false; (void)bad;"
        for index, (leaf, value) in enumerate(self._call.values()):
            if leaf.kind.is_tensor:
                yield from self._tensors(f"v[{index}]", value, leaf.kind.sequence)
            else:
                yield from _break_unless_equal(f"v[{index}]", leaf, value)
        for name, expression in self._composed:  # symbols may stand in a later tensor
            if {str(each) for each in expression.free_symbols} <= set(self._known):
                yield f"if ({name} != {self._written(expression, whole=False)} || bad) break;"
        for number, result in enumerate(self._call.results()):
            sizes = ", ".join(self._size(size) for size in result.shape)
            yield f"r[{number}] = opsmith::Shape({{{sizes}}});"
        yield "if (bad) break;"
        yield "return opsmith::KNOWN;"

    def _tensors(self, name: str, value: Any, several: bool) -> Iterator[str]:
        if not several:
            yield f"if ({name}.given != {_flag(value is not None)}) break;"
            if value is not None:
                yield from self._tensor(f"{name}.tensor", value.meta["val"])
            return
        yield f"if ({name}.list.size != {len(value)}) break;"
        for at, item in enumerate(value):
            raw = f"static_cast<const opsmith::RawTensor*>({name}.list.data)[{at}]"
            yield from self._tensor(raw, item.meta["val"])

    def _tensor(self, raw: str, tensor: torch.Tensor) -> Iterator[str]:
        yield f"if ({raw}.dim != {tensor.dim()}) break;"
        for at, size in enumerate(tensor.shape):
            found = f"{raw}.sizes[{at}]"
            if not varies(size):
                yield f"if ({found} != {int(size)}) break;"
                continue
            expression = size.node.expr  # type: ignore[attr-defined]  # a SymInt
            text = str(expression)
            if text in self._known:
                yield f"if ({found} != {self._known[text]}) break;"
                continue
            self._known[text] = f"d{len(self._known)}"
            yield f"const int64_t {self._known[text]} = {found};"
            if not expression.is_Symbol:
                self._composed.append((self._known[text], expression))

    def _size(self, size: Any) -> str:
        return self._written(size.node.expr) if varies(size) else f"int64_t({int(size)})"

    def _written(self, expression: Any, *, whole: bool = True) -> str:
        """An expression of sympy in C++; `whole` permits a variable with the value of all of it."""
        text, kind = str(expression), type(expression).__name__
        if whole and text in self._known:
            return self._known[text]
        if expression.is_Integer:
            return f"int64_t({int(expression)})"
        parts = [self._written(each) for each in expression.args]
        if kind in _SIGNS:
            return f"({_SIGNS[kind].join(parts)})"
        if kind in _CHOICES:
            return reduce(lambda one, two: f"{_CHOICES[kind]}<int64_t>({one}, {two})", parts)
        if kind in _DIVISIONS:
            return f"opsmith::floor_divided({parts[0]}, {parts[1]}, bad)"
        if kind in ("Mod", "PythonMod"):
            return f"({parts[0]} - {parts[1]} * opsmith::floor_divided({parts[0]}, {parts[1]}, bad))"
        if kind == "Pow" and expression.exp.is_Integer and 0 < int(expression.exp) <= 8:
            return f"({' * '.join([parts[0]] * int(expression.exp))})"
        raise _UnwrittenError


def _break_unless_equal(name: str, leaf: Argument, value: Any) -> Iterator[str]:
    """Leave the block if an argument that is not a tensor has another value."""
    yield f"if ({name}.given != {_flag(value is not None)}) break;"
    if value is None:
        return
    form = leaf.kind.base.annotation
    if form == "str":
        yield f"if ({name}.list.size != {len(value.encode())}) break;"
        for at, byte in enumerate(value.encode()):
            yield f"if (static_cast<const unsigned char*>({name}.list.data)[{at}] != {byte}) break;"
    elif leaf.kind.sequence:
        items = value if isinstance(value, list | tuple) else [value] * (leaf.kind.length or 1)
        yield f"if ({name}.list.size != {len(items)}) break;"
        for at, item in enumerate(items):
            found = f"static_cast<const {_TYPES[form]}*>({name}.list.data)[{at}]"
            yield f"if ({_differs(found, form, item)}) break;"
    else:
        yield f"if ({_differs(f'{name}.{_FIELDS[form]}', form, value)}) break;"


_TYPES = {"bool": "bool", "int": "int64_t", "float": "double"}
_FIELDS = {"bool": "flag", "int": "integer", "float": "number"}


def _differs(found: str, form: str, value: Any) -> str:
    """The C++ condition that a value differs; floats in single precision, as in an attribute."""
    if form == "bool":
        return f"{found} != {_flag(value)}"
    if form == "int":
        return f"{found} != int64_t({int(value)})"
    if math.isnan(value):
        return f"{found} == {found}"
    literal = f"{'-' * (value < 0)}__builtin_inf()" if math.isinf(value) else repr(float(value))
    return f"float({found}) != float({literal})"


def _flag(value: bool) -> str:
    return "true" if value else "false"
