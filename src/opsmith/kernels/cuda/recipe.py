"""Recipe of a CUDA kernel's calls: scratch buffers and launches as programs of whole numbers."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.expression import Expression, ExpressionError
from opsmith.core.specification import Specification
from opsmith.kernels.cuda.launch import LAUNCH, LaunchRule, LaunchRules
from opsmith.kernels.cuda.plan import CudaPlan, PlannedLaunch
from opsmith.kernels.cuda.rules import KernelRules
from opsmith.kernels.runtime.recipe import (
    NotEncodedError,
    Program,
    Recipe,
    SizedLaunch,
    constant,
    contiguous_recipe,
    elements,
    program,
    size,
)


class CallKind:
    """Values of a call; all calls of its kind have them, but for sizes and numbers of floating point.

    Args:
        named: Arguments, results and scratch buffers by name, in this order.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._places: dict[str, range] = {}
        count = 0
        for name, value in named.items():
            for each in tensors_in([value]):
                self._places[name] = range(count, count + each.dim())
                count += each.dim()

    def programs(self, rule: LaunchRule) -> tuple[Program, ...]:
        """Return a program for each part of a rule.

        Raises:
            NotEncodedError: If Python alone computes one.
        """
        return tuple(map(self._program, rule.parts))

    def _three(self, rule: LaunchRule) -> tuple[Program, Program, Program]:
        first, second, third = (*self.programs(rule), constant(1), constant(1))[:3]
        return first, second, third

    def launch(self, rules: LaunchRules, known: PlannedLaunch, most: tuple[int, int]) -> SizedLaunch:
        """Return the parts of a launch that depend on sizes.

        Args:
            rules: Rules of the launch.
            known: The launch in the call.
            most: Most threads of a block, and most bytes of dynamic shared memory.

        Raises:
            NotEncodedError: If Python alone computes one.
        """
        numbers = known.instance.constants
        return SizedLaunch(
            tuple((number, self.programs(rules.constants[name])[0]) for name, number in numbers),
            self._three(rules.grid),
            self._three(rules.block),
            self.programs(rules.shared)[0],
            tuple(max(view.max_dim, 1) for view in known.views),
            *most,
        )

    def _program(self, part: Any) -> Program:
        if isinstance(part, Expression):
            return program(part.tree, self._leaf)
        if isinstance(part, int):
            return constant(part)
        raise NotEncodedError("a function in Python")

    def _leaf(self, node: ast.expr) -> Program | None:
        """Return the program of a size, or of a part that is the same in all calls; None for others."""
        if self._is_of_kind(node):
            return self._value(node)
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="numel") if name in self._tensors:
                return elements(self._places[name])
            case ast.Attribute(value=ast.Name(id=name), attr="dim" | "itemsize") if name in self._tensors:
                return self._value(node)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(value=ast.Name(), attr="shape")]):
                return self._value(node)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]) if name not in self._tensors:
                return self._value(node)
            case ast.Compare(
                left=ast.Name(), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
            ):
                return self._value(node)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=at):
                index = self._computed(at) if self._is_of_kind(at) else None
                if name not in self._tensors or not isinstance(index, int):
                    return None
                dims = self._places[name]
                return size(dims[index]) if -len(dims) <= index < len(dims) else None
        return None

    @property
    def _tensors(self) -> set[str]:
        return {name for name, value in self._named.items() if isinstance(value, Tensor)}

    def _is_of_kind(self, node: ast.expr) -> bool:
        """Return True if a part has the same value in all calls of the kind, by what it names."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - LAUNCH.functions.keys()
        values = [self._named[name] for name in names]
        several = [item for each in values for item in (each if isinstance(each, list | tuple) else [each])]
        return not any(isinstance(each, Tensor | float) for each in several)

    def _computed(self, node: ast.expr) -> Any:
        """Return the value of a part; None if it has none."""
        try:
            return Expression(ast.unparse(node), LAUNCH).value(self._named)
        except ExpressionError:
            return None

    def _value(self, node: ast.expr) -> Program | None:
        """Return the program of a part that is the same in all calls; None if it is no whole number."""
        found = self._computed(node)
        return constant(int(found)) if isinstance(found, int) else None


def launch_recipe(
    specification: Specification,
    rules: KernelRules,
    call: CudaPlan,
    values: Sequence[Any],
    most: Sequence[tuple[int, int]],
) -> Recipe | None:
    """Return the recipe for calls of the kind of one; None if Python plans them.

    Args:
        specification: The operator.
        rules: Rules of the kernel.
        call: Plan of the call.
        values: Its argument values.
        most: For each launch, the most threads of a block and bytes of dynamic shared memory.
    """
    views = [view for launch in call.launches for view in launch.views]
    plain = not call.copied and all(each.layout != "channels-last" for each in views)
    if not plain or len(call.launches) != len(rules.launches):
        return None
    recipe = contiguous_recipe(specification, values, [each.layout for each in call.results])
    if recipe is None or any(rule.depends_on_call for rule in rules.initial.values()):
        return None
    named = dict(zip(specification.schema.names, values, strict=True))
    named |= {each.name: each.layout.allocate("meta") for each in (*call.results, *call.scratch)}
    kind = CallKind(named)
    try:
        scratch = tuple(kind.programs(each.sizes) for each in rules.scratch)
        launches = tuple(map(kind.launch, rules.launches, call.launches, most))
    except NotEncodedError:
        return None
    return replace(recipe, scratch=scratch, launches=launches)
