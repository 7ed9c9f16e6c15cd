"""What the source of a Function class tells about its arguments, without running it."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opsmith.adopting.signature import forward_signature

METHODS = ("forward", "setup_context", "backward", "vjp")


@dataclass(frozen=True)
class Reading:
    """A class, as its source describes it.

    Args:
        function_class: The class.
        name: How its module calls it.
        parameters: What `forward` takes, without its context.
        hints: Type hints of `forward`, resolved.
        called: Arguments that its methods call, which are functions therefore.
        compared: Constants that an argument is compared with, by its name.
    """

    function_class: type[torch.autograd.Function]
    name: str
    parameters: tuple[inspect.Parameter, ...]
    hints: dict[str, Any]
    called: frozenset[str]
    compared: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, function_class: type[torch.autograd.Function], name: str | None = None) -> Reading:
        """Read a class; what has no source to read, as in C++, tells its signature alone."""
        parameters = tuple(forward_signature(function_class).parameters.values())
        names = {parameter.name for parameter in parameters}
        trees = list(_trees(function_class))
        kept = {
            target.attr: node.value.id
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in names
            for target in node.targets
            if isinstance(target, ast.Attribute)
        }
        called: set[str] = set()
        compared: dict[str, dict[Any, None]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    called.add(_name(node.func, kept))
                elif isinstance(node, ast.Compare):
                    constants = [value for each in node.comparators for value in _constants(each)]
                    compared.setdefault(_name(node.left, kept), {}).update(dict.fromkeys(constants))
        return cls(
            function_class,
            name or function_class.__qualname__,
            parameters,
            _hints(function_class),
            frozenset(called & names),
            {name: tuple(found) for name, found in compared.items() if name in names and found},
        )

    @property
    def defaulted(self) -> int:
        """How many arguments at the end have defaults."""
        given = [parameter.default is not parameter.empty for parameter in self.parameters]
        return len(given) if all(given) else given[::-1].index(False)

    @property
    def variadic(self) -> inspect.Parameter | None:
        """The parameter `*args`, if there is one."""
        last = self.parameters[-1] if self.parameters else None
        return last if last is not None and last.kind is last.VAR_POSITIONAL else None


def _trees(function_class: type) -> Iterator[ast.AST]:
    for name in METHODS:
        method = getattr(function_class, name, None)
        if method is None or method is getattr(torch.autograd.Function, name, None):
            continue
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
        except (OSError, TypeError, SyntaxError):
            continue


def _name(expression: ast.expr, kept: dict[str, str]) -> str:
    """The argument that an expression is, itself or as `ctx` keeps it; empty for any other expression."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        return kept.get(expression.attr, "")
    return ""


def _constants(expression: ast.expr) -> Iterator[Any]:
    """The words and truth values in an expression; a number is more often a bound than a value to take."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bool):
            yield node.value


def _hints(function_class: type[torch.autograd.Function]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(function_class.forward))
    except (NameError, AttributeError, TypeError, SyntaxError):
        return {}
