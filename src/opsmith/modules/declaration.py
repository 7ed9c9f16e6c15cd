"""Check the arguments of `op.module(...)`, and make the plan of a module class from them."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from opsmith import errors
from opsmith.core.call_arguments import shown
from opsmith.core.expression import SIZES, Expression, ExpressionError, parse
from opsmith.core.formula import listed
from opsmith.core.operator import Operator
from opsmith.core.schema import Argument
from opsmith.core.shapes import ANY
from opsmith.core.specification import Specification
from opsmith.modules.operator_module import ModulePlan, OperatorModule, OwnedTensor


def _refusal(
    problem: str, argument: str, hint: str, *, expected: str | None = None, got: str | None = None
) -> errors.ModuleDeclarationError:
    """Return the error for an argument that does not fit."""
    return errors.ModuleDeclarationError(problem, argument=argument, expected=expected, got=got, hint=hint)


def _pattern_letters(specification: Specification) -> list[str]:
    """Return the letters of `shapes=` that are sizes."""
    shapes = specification.shapes
    if shapes is None:
        return []
    return sorted({letter for dims in shapes.arguments.values() for letter in dims.letters} - shapes.integers)


def _names(argument: str, given: Any) -> list[str]:
    """Return the names in an argument, which must be a list of names."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise _refusal(
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
        raise _refusal(
            f"`{argument}` is a list of names", argument, "write names as text", got=shown(wrong[0])
        )
    return names


def _class_name(name: Any, operator: str) -> str:
    """Return the name of the class: the given one, or the operator's in CamelCase."""
    if name is None:
        return "".join(word[:1].upper() + word[1:] for word in re.split("_+", operator)) or "Module"
    if not is_name(name):
        raise _refusal(
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


class _PlanReader:
    """Reader of shapes, which knows the names that a shape may use and the shapes that it must match.

    Args:
        specification: The operator.
        sizes, forward: As `module` takes them.
    """

    def __init__(self, specification: Specification, sizes: Any, forward: Any) -> None:
        arguments = specification.schema.arguments
        self.specification = specification
        self.pattern = {} if specification.shapes is None else specification.shapes.arguments
        self.ownable = [each.name for each in arguments if each.kind.is_tensor and not each.kind.sequence]
        self.names, self.letters = _sizes(specification, sizes)
        self.options = _options(specification, forward)
        numbers = [
            each for each in self.options if each.kind.base.annotation == INT and not each.kind.sequence
        ]
        self.known = (*self.names, *(each.name for each in numbers if not each.kind.optional))

    def shapes(self, argument: str, given: Any) -> dict[str, tuple[Expression, ...]]:
        """Return the shape of each parameter, or of each buffer."""
        derived = None if isinstance(given, Mapping) else dict.fromkeys(_names(argument, given))
        found = {}
        for name, shape in (given if derived is None else derived).items():
            if name not in self.ownable:
                raise _refusal(
                    f"`{argument}` names `{name}`, which is not a tensor argument of the operator",
                    argument,
                    "name an argument of the reference; for a list of tensors write a module by hand",
                    expected=f"one of {listed(self.ownable)}" if self.ownable else "no name",
                )
            found[name] = (
                self._derived_shape(name) if derived is not None else self._written_shape(name, shape)
            )
            for dimension in found[name]:
                self._refuse_unknown(name, dimension)
        return found

    def _written_shape(self, name: str, shape: Any) -> tuple[Expression, ...]:
        """Return a shape that the author wrote."""
        if isinstance(shape, str) or not isinstance(shape, Iterable):
            raise _refusal(
                f"the shape of `{name}` is a list of dimensions",
                name,
                f'write `"{name}": ("{shape}",)`, with a comma; `()` for a single number',
                got=shown(shape),
            )
        dimensions = []
        for dimension in shape:
            read = read_dimension(dimension)
            if read is None:
                raise _refusal(
                    f"the shape of `{name}` has a dimension that cannot be read",
                    name,
                    'write a size, a number, or `"channels // groups"`',
                    expected=SIZES.description,
                    got=shown(dimension),
                )
            dimensions.append(read)
        dims = self.pattern.get(name)
        if dims is not None and not dims.leading and len(dims.sizes) != len(dimensions):
            raise _refusal(
                f"the shape of `{name}` does not fit the operator's `shapes=`",
                name,
                "write the same number of dimensions, or only the names: then `shapes=` gives the shapes",
                expected=f"`{dims.text}`",
                got=f"{len(dimensions)} dimension{'s' * (len(dimensions) != 1)}",
            )
        return tuple(dimensions)

    def _derived_shape(self, name: str) -> tuple[Expression, ...]:
        """Return a shape that follows from `shapes=`."""
        dims, pattern = self.pattern.get(name), self.specification.shapes
        read = [] if dims is None else [read_dimension(size) for size in dims.sizes]
        if dims is None or dims.leading or ANY in dims.sizes or None in read:
            raise _refusal(
                f"the operator's `shapes=` does not declare the shape of `{name}`",
                name,
                f'write the shape: `{{"{name}": ("features",)}}`',
                expected="a dimension for each of its sizes",
                got="no `shapes=`" if pattern is None else f"`{dims.text if dims else pattern.text}`",
            )
        return tuple(each.renamed(self.letters) for each in read if each is not None)

    def _refuse_unknown(self, name: str, dimension: Expression) -> None:
        """Raise an error for a name in a shape that is not an argument of the constructor."""
        unknown = [each for each in dimension.names if each not in self.known]
        if unknown:
            raise _refusal(
                f"the shape of `{name}` names `{unknown[0]}`, which is not a size",
                name,
                f"add it to `sizes`, or give the letter `{unknown[0]}` a name there"
                if unknown[0] in _pattern_letters(self.specification)
                else "add it to `sizes`",
                expected=f"one of {listed(list(self.known))}"
                if self.known
                else "numbers: there are no `sizes`",
                got=repr(dimension.text),
            )

    def letters_of(self, owned: tuple[OwnedTensor, ...]) -> dict[str, str]:
        """Return the name of each letter of `shapes=`, inferred from the shapes that the author wrote."""
        found: dict[str, str] = {}
        for each in owned:
            if each.name in self.pattern and len(self.pattern[each.name].sizes) == len(each.shape):
                for letter, dimension in zip(self.pattern[each.name].sizes, each.shape, strict=True):
                    if letter.isidentifier() and letter != ANY and dimension.names == (dimension.text,):
                        found.setdefault(letter, dimension.text)
        return found

    def inferred_sizes(self, forward: tuple[Argument, ...], letters: Mapping[str, str]) -> frozenset[str]:
        """Return the sizes that can be inferred from the tensors of a call."""
        brought = {
            size for each in forward if each.name in self.pattern for size in self.pattern[each.name].sizes
        }
        return frozenset(name for letter, name in letters.items() if letter in brought)

    def refuse_clashes(self, shapes: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise an error for a name that is used twice, or that `torch.nn.Module` uses itself."""
        both = [name for name in shapes["parameters"] if name in shapes["buffers"]]
        if both:
            raise _refusal(
                f"`{both[0]}` is a parameter and a buffer",
                both[0],
                "keep the name in `parameters` if the tensor is trained, else in `buffers`",
            )
        owned, plain = {**shapes["parameters"], **shapes["buffers"]}, [each.name for each in self.options]
        for name in self.names:
            if name in owned or name in plain:
                raise _refusal(
                    f"`{name}` is a size and an argument of the operator",
                    name,
                    "give the size a different name"
                    if name in owned
                    else "leave the name out of `sizes`: shapes may name whole numbers among the arguments",
                )
        taken = {*dir(OperatorModule), *vars(nn.Module()), "device", "dtype", "self"}
        for name in (*self.names, *owned, *plain):
            if name in taken:
                raise _refusal(
                    f"modules use the name `{name}` themselves",
                    name,
                    f'give it in each call, `forward=("{name}",)`, or rename the argument'
                    if name in plain
                    else "rename it",
                )
        if any(each.name == "self" for each in self.specification.schema.arguments):
            raise _refusal("`forward` uses the name `self` for the module", "self", "rename the argument")


def read_dimension(dimension: Any) -> Expression | None:
    """Read a dimension: a number or an expression of sizes; None if it is neither.

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


INT, GENERATOR = "int", "torch.Generator"
"""Types of arguments that are not arguments of the constructor."""


def read_plan(
    operator: Operator[..., Any],
    where: str,
    *,
    sizes: Any,
    parameters: Any,
    buffers: Any,
    init: Any,
    non_persistent: Any,
    forward: Any,
    name: Any,
) -> ModulePlan:
    """Check the arguments of `op.module(...)`, and return the plan of the class.

    Args:
        operator: The operator.
        where: `file:line` of the call of `module`.
        sizes, parameters, buffers, init, non_persistent, forward, name: As `module` takes them.

    Raises:
        ModuleDeclarationError: For the first keyword that does not fit.
    """
    specification = operator.specification
    title = _class_name(name, specification.short_name)
    reader = _PlanReader(specification, sizes, forward)
    names, options = reader.names, reader.options
    shapes = {
        "parameters": reader.shapes("parameters", parameters),
        "buffers": reader.shapes("buffers", buffers),
    }
    reader.refuse_clashes(shapes)
    _refuse_unused(names, shapes)
    left_out = _non_persistent(non_persistent, shapes["buffers"])
    fills = _fills(init, [*shapes["parameters"], *shapes["buffers"]])
    by_name = specification.schema.by_name
    owned = tuple(
        OwnedTensor(
            each, shape, fills[each], by_name[each].kind.optional, keyword == "buffers", each not in left_out
        )
        for keyword in shapes
        for each, shape in shapes[keyword].items()
    )
    fixed = {*(each.name for each in options), *(each.name for each in owned)}
    rest = tuple(each for each in specification.schema.arguments if each.name not in fixed)
    letters = {**reader.letters_of(owned), **reader.letters}
    inferred = reader.inferred_sizes(rest, letters)
    return ModulePlan(operator, title, where, names, letters, inferred, owned, options, rest)


def _sizes(specification: Specification, given: Any) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the sizes in order, and the name of each letter of `shapes=`."""
    if isinstance(given, Mapping):
        for letter in given:
            if letter not in _pattern_letters(specification):
                raise _refusal(
                    f"`sizes` names `{letter}`, which is not a size in the operator's `shapes=`",
                    "sizes",
                    "give the sizes as a list of names, or declare the operator with `shapes=`",
                    expected=f"one of {listed(_pattern_letters(specification))}"
                    if _pattern_letters(specification)
                    else None,
                    got=repr(letter),
                )
        names, letters = list(dict.fromkeys(_names("sizes", given.values()))), dict(given)
    else:
        names = _names("sizes", given)
        letters = {name: name for name in names if name in _pattern_letters(specification)}
    for name in names:
        if not is_name(name) or names.count(name) > 1:
            raise _refusal(
                "each size must have a different name",
                "sizes",
                'write `sizes=("in_features", "out_features")`',
                expected="identifiers, all different",
                got=shown(name),
            )
    return tuple(names), letters


def _options(specification: Specification, forward: Any) -> tuple[Argument, ...]:
    """Return the arguments of the constructor: all except tensors, generators and names in `forward=`."""
    schema = specification.schema
    plain = {each.name: each for each in schema.arguments if not each.kind.is_tensor}
    per_call = _names("forward", forward)
    for name in per_call:
        if name not in plain:
            raise _refusal(
                f"`forward` names `{name}`, which is "
                + ("a tensor" if name in schema.by_name else "not an argument of the operator"),
                "forward",
                "leave it out: tensors other than parameters and buffers are always arguments of `forward`"
                if name in schema.by_name
                else "name an argument of the reference",
                expected=f"one of {listed(list(plain))}" if plain else "no name: all arguments are tensors",
            )
    return tuple(
        each
        for name, each in plain.items()
        if name not in per_call and each.kind.base.annotation != GENERATOR
    )


def _refuse_unused(sizes: tuple[str, ...], shapes: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise an error for a size that no shape names, since it would have no effect."""
    used = {
        name for owned in shapes.values() for shape in owned.values() for each in shape for name in each.names
    }
    for name in sizes:
        if name not in used:
            raise _refusal(
                f"no parameter or buffer has the size `{name}`",
                "sizes",
                "leave it out, or name it in a shape",
                got=f"sizes {listed(list(sizes))}",
            )


def _non_persistent(given: Any, buffers: Mapping[str, Any]) -> list[str]:
    """Return the buffers that are left out of a state_dict."""
    names = _names("non_persistent", given)
    for name in names:
        if name not in buffers:
            raise _refusal(
                f"`non_persistent` names `{name}`, which is not a buffer",
                "non_persistent",
                "name it in `buffers`, too",
                expected=f"one of {listed(list(buffers))}" if buffers else "no name: there are no `buffers`",
            )
    return names


def _fills(init: Any, owned: list[str]) -> dict[str, Any]:
    """Return the initialiser of each parameter and buffer."""
    given = init if isinstance(init, Mapping) else {} if init is None else dict.fromkeys(owned, init)
    for name, fill in given.items():
        if name not in owned:
            raise _refusal(
                f"`init` names `{name}`, which is neither parameter nor buffer",
                "init",
                "leave it out, or name it in `parameters`",
                expected=f"one of {listed(owned)}" if owned else "no `init`: there is nothing to fill",
            )
        if not callable(fill):
            raise _refusal(
                f"the initialiser of `{name}` is not a function",
                "init",
                f"write `opsmith.init.constant({fill!r})`"
                if isinstance(fill, int | float)
                else "write `opsmith.init.uniform(-0.1, 0.1)`",
                expected="a function that fills a tensor in place",
                got=shown(fill),
            )
    for name in owned:
        if name not in given:
            raise _refusal(
                f"nothing fills `{name}`",
                "init",
                f'write `init={{"{name}": opsmith.init.uniform(-0.1, 0.1)}}`',
                expected="an initialiser for each parameter and buffer, or one for all",
            )
    return dict(given)
