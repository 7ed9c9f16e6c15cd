"""Arguments of `op.module(...)`: names and shapes, and errors for those that do not fit."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from opsmith import errors
from opsmith.core.call_arguments import shown
from opsmith.core.expression import SIZES, Expression, ExpressionError, parse
from opsmith.core.formula import listed
from opsmith.core.shapes import ANY
from opsmith.core.specification import Specification


@dataclass(frozen=True)
class ModuleArguments:
    """The arguments of one call of `op.module(...)`.

    Args:
        specification: The operator.
        where: `file:line` of the call.
    """

    specification: Specification
    where: str

    def refuse(
        self, problem: str, argument: str, hint: str, *, expected: str | None = None, got: str | None = None
    ) -> errors.ModuleDeclarationError:
        """Return the error for an argument that does not fit."""
        return errors.ModuleDeclarationError(
            problem,
            operator=self.specification.name,
            argument=argument,
            expected=expected,
            got=got,
            where=self.where,
            hint=hint,
        )

    @cached_property
    def tensors(self) -> list[str]:
        """Arguments that a module may own: single tensors."""
        return [
            each.name
            for each in self.specification.schema.arguments
            if each.kind.is_tensor and not each.kind.sequence
        ]

    @cached_property
    def pattern_letters(self) -> list[str]:
        """Letters of `shapes=` that stand for a size."""
        shapes = self.specification.shapes
        if shapes is None:
            return []
        found = {letter for dims in shapes.arguments.values() for letter in dims.letters}
        return sorted(found - shapes.integers)

    def names(self, argument: str, given: Any) -> list[str]:
        """Return the items of an argument that is a list of names."""
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise self.refuse(
                f"`{argument}` is a list of names",
                argument,
                f'write `{argument}=("{given}",)`, with a comma'
                if isinstance(given, str)
                else f"give {argument} names",
                got=shown(given),
            )
        names = list(given)
        wrong = [name for name in names if not isinstance(name, str)]
        if wrong:
            raise self.refuse(
                f"`{argument}` is a list of names", argument, "write names as text", got=shown(wrong[0])
            )
        return names

    def class_name(self, name: Any) -> str:
        """Return the name of the class: the given one, or the operator's in CamelCase."""
        if name is None:
            words = re.split("_+", self.specification.short_name)
            return "".join(word[:1].upper() + word[1:] for word in words) or "Module"
        if not is_name(name):
            raise self.refuse(
                "the class needs a name that Python can bind",
                "name",
                'write `name="Linear"`',
                expected="an identifier",
                got=shown(name),
            )
        return str(name)


def is_name(name: Any) -> bool:
    """Return True for an identifier that is not a keyword."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def read_shapes_of(
    arguments: ModuleArguments, argument: str, given: Any, known: tuple[str, ...], letters: Mapping[str, str]
) -> dict[str, tuple[Expression, ...]]:
    """Return the shape of each parameter, or of each buffer."""
    derived = None if isinstance(given, Mapping) else dict.fromkeys(arguments.names(argument, given))
    found = {}
    for name, shape in (given if derived is None else derived).items():
        if name not in arguments.tensors:
            raise arguments.refuse(
                f"`{argument}` names `{name}`, which is not a tensor argument of the operator",
                argument,
                "name an argument of the reference; for a list of tensors write a module by hand",
                expected=f"one of {listed(arguments.tensors)}" if arguments.tensors else "no name",
            )
        found[name] = (
            _derived(arguments, name, letters) if derived is not None else _written(arguments, name, shape)
        )
        for dimension in found[name]:
            _refuse_unknown(arguments, name, dimension, known)
    return found


def _written(arguments: ModuleArguments, name: str, shape: Any) -> tuple[Expression, ...]:
    """Return a shape that the author wrote."""
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise arguments.refuse(
            f"the shape of `{name}` is a list of dimensions",
            name,
            f'write `"{name}": ("{shape}",)`, with a comma; `()` for a single number',
            got=shown(shape),
        )
    dimensions = []
    for dimension in shape:
        read = read_dimension(dimension)
        if read is None:
            raise arguments.refuse(
                f"the shape of `{name}` has a dimension that cannot be read",
                name,
                'write a size, a number, or `"channels // groups"`',
                expected=SIZES.description,
                got=shown(dimension),
            )
        dimensions.append(read)
    pattern = arguments.specification.shapes
    dims = None if pattern is None else pattern.arguments.get(name)
    if dims is not None and not dims.leading and len(dims.sizes) != len(dimensions):
        raise arguments.refuse(
            f"the shape of `{name}` does not fit the operator's `shapes=`",
            name,
            "write as many dimensions, or leave the shapes to `shapes=`: give names alone",
            expected=f"`{dims.text}`",
            got=f"{len(dimensions)} dimension{'s' * (len(dimensions) != 1)}",
        )
    return tuple(dimensions)


def _derived(arguments: ModuleArguments, name: str, letters: Mapping[str, str]) -> tuple[Expression, ...]:
    """Return a shape that follows from `shapes=`."""
    pattern = arguments.specification.shapes
    dims = None if pattern is None else pattern.arguments.get(name)
    read = [] if dims is None else [read_dimension(size) for size in dims.sizes]
    if dims is None or dims.leading or ANY in dims.sizes or None in read:
        raise arguments.refuse(
            f"the operator's `shapes=` does not declare the shape of `{name}`",
            name,
            f'write it: `{{"{name}": ("features",)}}`',
            expected="a dimension for each of its sizes",
            got="no `shapes=`" if pattern is None else f"`{dims.text if dims else pattern.text}`",
        )
    return tuple(each.renamed(letters) for each in read if each is not None)


def _refuse_unknown(
    arguments: ModuleArguments, name: str, dimension: Expression, known: tuple[str, ...]
) -> None:
    """Refuse a name in a shape that the constructor does not take."""
    unknown = [each for each in dimension.names if each not in known]
    if unknown:
        raise arguments.refuse(
            f"the shape of `{name}` names `{unknown[0]}`, which is not a size",
            name,
            f"add it to `sizes`, or give the letter `{unknown[0]}` a name there"
            if unknown[0] in arguments.pattern_letters
            else "add it to `sizes`",
            expected=f"one of {listed(list(known))}" if known else "numbers: there are no `sizes`",
            got=repr(dimension.text),
        )


def read_dimension(dimension: Any) -> Expression | None:
    """Read a dimension, a number or an expression of sizes; None if it is neither.

    Example:
        >>> read_dimension("2 * hidden"), read_dimension("open('file')")
        (Expression(text='2 * hidden'), None)
    """
    if isinstance(dimension, int) and not isinstance(dimension, bool):
        dimension = str(dimension)
    try:
        return parse(dimension) if isinstance(dimension, str) else None
    except ExpressionError:
        return None
