"""Declared shapes, `x: B M, weight: N M, bias: N -> B N`: parsed once, and checked in each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opsmith import errors
from opsmith.core.argument_types import INT
from opsmith.core.cached_property import cached_property
from opsmith.core.expression import Expression, ExpressionError, parse
from opsmith.core.formula import listed
from opsmith.core.schema import Schema

LEADING = "..."
ANY = "_"

Sizes = dict[str, Any]
"""Sizes of the letters in one call; the key `...` has the leading sizes."""

Fault = tuple[str, str, str]

NO_SIZE = object()
"""The value of an expression that is not a size, because it is negative or divides by zero."""


@dataclass(frozen=True)
class Dims:
    """The dimensions of one tensor.

    Args:
        text: The dimensions as the author wrote them.
        leading: True if any number of dimensions may come first (`...`).
        sizes: Each dimension: a letter, a number, an expression of letters, or `_` for any size.
    """

    text: str
    leading: bool
    sizes: tuple[str, ...]

    @cached_property
    def expressions(self) -> tuple[Expression | None, ...]:
        """The dimensions as expressions, None for a letter or `_`."""
        return tuple(None if size.isidentifier() else parse(size) for size in self.sizes)

    @cached_property
    def letters(self) -> frozenset[str]:
        """All letters, including letters in expressions."""
        return frozenset(name for size in self.sizes if size != ANY for name in parse(size).names)

    def evaluate(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return the shape, with None for an unknown size, and one None for unknown leading sizes."""
        lead = tuple(sizes.get(LEADING, (None,))) if self.leading else ()
        return lead + tuple(
            (None if size == ANY else sizes.get(size)) if expression is None else _value(expression, sizes)
            for size, expression in zip(self.sizes, self.expressions, strict=True)
        )


@dataclass(frozen=True)
class Shapes:
    """The shapes of an operator's tensors.

    Args:
        text: The shapes as the author wrote them.
        arguments: Dimensions of each argument with a declared shape.
        results: Dimensions of each result, in order; hidden results at the end may be left out.
        integers: Arguments whose value may be used as a size.
    """

    text: str
    arguments: Mapping[str, Dims]
    results: tuple[Dims, ...]
    integers: frozenset[str]

    def shown(self, schema: Schema) -> str:
        """The text as callers see it, without hidden results."""
        if len(self.results) <= len(schema.visible):
            return self.text
        seen = (self.results[position].text for position in schema.visible)
        return f"{self.text.partition('->')[0].strip()} -> {', '.join(seen)}"

    def bind(self, schema: Schema, values: Sequence[Any]) -> tuple[Sizes, Fault | None]:
        """Return the sizes of the letters in a call, and a mismatch (argument, expected, got) or None."""
        named = dict(zip(schema.names, values, strict=True))
        sizes: Sizes = {name: named[name] for name in self.integers if named[name] is not None}
        tensors = list(self._tensors(named))
        for label, dims, tensor in tensors:
            fault = _bind(label, dims, tensor, sizes)
            if fault is not None:
                return sizes, fault
        for label, dims, tensor in tensors:
            for expression, size, found in zip(
                dims.expressions, dims.sizes, tensor.shape[tensor.dim() - len(dims.sizes) :], strict=True
            ):
                wanted = None if expression is None else _value(expression, sizes)
                if wanted is NO_SIZE:
                    return sizes, (
                        label,
                        f"`{dims.text}` with a valid size `{size}`",
                        str(list(tensor.shape)),
                    )
                if wanted is not None and wanted != found:
                    return sizes, (label, f"`{dims.text}` with {size} = {wanted}", str(list(tensor.shape)))
        return sizes, None

    def _tensors(self, named: Mapping[str, Any]) -> Iterator[tuple[str, Dims, torch.Tensor]]:
        for name, dims in self.arguments.items():
            value = named[name]
            if isinstance(value, torch.Tensor):
                yield name, dims, value
            elif isinstance(value, list | tuple):
                for position, item in enumerate(value):
                    if isinstance(item, torch.Tensor):
                        yield f"{name}[{position}]", dims, item


def _bind(label: str, dims: Dims, tensor: torch.Tensor, sizes: Sizes) -> Fault | None:
    """Set the sizes of letters from a tensor; return the mismatch if a letter already has another size."""
    shape, count = tensor.shape, len(dims.sizes)
    got = str(list(shape))
    if len(shape) < count or (len(shape) > count and not dims.leading):
        more = " or more" if dims.leading else ""
        return label, f"`{dims.text}`: {count}{more} dimension{'s' * (count != 1 or dims.leading)}", got
    start = len(shape) - count
    if dims.leading and sizes.setdefault(LEADING, shape[:start]) != shape[:start]:
        return label, f"`{dims.text}` with ... = {list(sizes[LEADING])}", got
    for size, found in zip(dims.sizes, shape[start:], strict=True):
        if size.isidentifier() and size != ANY and sizes.setdefault(size, found) != found:
            return label, f"`{dims.text}` with {size} = {sizes[size]}", got
    return None


def _value(expression: Expression, sizes: Sizes) -> Any:
    """Evaluate an expression; None if a letter is not known, NO_SIZE if the value is not a size."""
    if any(sizes.get(name) is None for name in expression.names):
        return None
    try:
        value = expression.value(sizes)
    except ExpressionError:
        return NO_SIZE
    return NO_SIZE if isinstance(value, int) and value < 0 else value


def read_shapes(text: Any, schema: Schema) -> Shapes:
    """Parse an operator's `shapes=`.

    Args:
        text: `name: dimensions, ... -> dimensions, ...`: one entry for each tensor whose shape is declared,
            then one for each result. Dimensions are separated by spaces: letters or words, which mean
            the same size everywhere; numbers; integer arguments; expressions of these without spaces, such as
            `H//stride`; `_` for any size; a leading `...` for any number of dimensions.
        schema: The operator's signature.

    Raises:
        ShapePatternError: If it cannot be read, or does not fit the signature.

    Example:
        >>> from opsmith.core.schema import schema_of
        >>> def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ...     return x @ weight.mT
        >>> schema = schema_of(linear, "demo::linear")
        >>> shapes = read_shapes("x: ... M, weight: N M -> ... N", schema)
        >>> sizes, fault = shapes.bind(schema, [torch.ones(4, 3), torch.ones(2, 3)])
        >>> shapes.results[0].evaluate(sizes), fault
        ((4, 2), None)
    """

    returns = bool(schema.results) or schema.returns is not None

    def refuse(problem: str, hint: str, got: str | None = None) -> errors.ShapePatternError:
        return errors.ShapePatternError(
            f"`shapes=` {problem}",
            argument="shapes",
            expected="`x: B M, weight: N M -> B N`, in the order of the arguments and results"
            if returns
            else "`x: B M, weight: N M ->`, with no results",
            got=got or repr(text),
            hint=hint,
        )

    if not isinstance(text, str) or text.count("->") != 1:
        results_hint = "the results" if returns else "nothing after it: the operator returns nothing"
        raise refuse("must be a string with one `->` in it", f"write the arguments, `->`, and {results_hint}")
    given, _, returned = text.partition("->")
    arguments: dict[str, Dims] = {}
    for entry in filter(None, (part.strip() for part in given.split(","))):
        name, colon, rest = (part.strip() for part in entry.partition(":"))
        if not colon or name not in schema.tensor_names or name in arguments:
            raise refuse(
                "must name each tensor once",
                f"begin each entry with one of {listed(schema.tensor_names)}",
                repr(entry),
            )
        arguments[name] = _dims(rest, refuse)
    # An operator that only writes in place has no result of its own: `x: B M ->`.
    entries = [part.strip() for part in returned.split(",")] if schema.results or returned.strip() else []
    results = tuple(_dims(_unnamed(entry), refuse) for entry in entries)
    if schema.returns is not None and results == (arguments.get(schema.returns),):
        results = ()  # `x: B M -> B M`: the argument that is written and returned
    if len(results) not in (len(schema.results), len(schema.visible)):
        hint = (
            f"write one entry for each result after `->`, {len(schema.visible)} in all"
            if schema.results
            else "write nothing after `->`"
        )
        raise refuse("must give the dimensions of each result", hint, repr(returned.strip()))
    integers = frozenset(
        each.name for each in schema.arguments if each.kind.base is INT and not each.kind.sequence
    )
    used = {letter for dims in (*arguments.values(), *results) for letter in dims.letters}
    plain = {size for dims in arguments.values() for size in dims.sizes if size.isidentifier()}
    unknown = sorted(used - plain - integers)
    if unknown:
        raise refuse(
            f"uses `{unknown[0]}`, whose size no argument shows",
            "make it a dimension of an argument, or write `_`",
        )
    if any(dims.leading for dims in results) and not any(dims.leading for dims in arguments.values()):
        raise refuse("has `...` only in a result", "begin an argument with `...`, too")
    return Shapes(text, arguments, results, integers & used)


def _unnamed(entry: str) -> str:
    return entry.partition(":")[2].strip() if ":" in entry else entry


def _dims(text: str, refuse: Any) -> Dims:
    pieces = text.split()
    leading = bool(pieces) and pieces[0] == LEADING
    sizes = tuple(pieces[1:] if leading else pieces)
    for size in sizes:
        try:
            parse(size)
        except ExpressionError:
            raise refuse(
                "has a dimension that cannot be read", "write letters, numbers, `H//2`, `_`", size
            ) from None
    return Dims(text, leading, sizes)


ELEMENTWISE = "elementwise"


def check_batching(batching: Any, shapes: Shapes | None, schema: Schema) -> str | None:
    """Check `batching=` against the operator's shapes, and return it.

    Args:
        batching: `"elementwise"`, or the first dimension of some arguments and all results in `shapes=`,
            a letter or `...`; None if one call takes one example.
        shapes: The operator's shapes.
        schema: Its signature.

    Raises:
        UsageError: If it has any other value.
    """
    if batching is None or batching == ELEMENTWISE:
        return batching  # type: ignore[no-any-return]  # one of the two
    fault = _batching_fault(batching, shapes, schema)
    if fault is not None:
        raise errors.UsageError(
            f"`batching` {fault}",
            argument="batching",
            expected="`elementwise`, or a dimension that comes first in `shapes=`, a letter or `...`",
            got=repr(batching),
            hint='write `shapes="x: B M, weight: N M -> B N", batching="B"`, or leave `batching=` out',
        )
    chosen: str = batching
    return chosen


def _batching_fault(batching: Any, shapes: Shapes | None, schema: Schema) -> str | None:
    if not isinstance(batching, str):
        return "has an invalid value"
    if shapes is None:
        return "names a dimension, but there is no `shapes=`"
    if batching in shapes.integers:
        return "names an argument whose value is a size, but a batch would change this size"
    if len(shapes.results) < len(schema.results):
        return "needs the shape of every result, including hidden results"
    if not all(leads(batching, shapes, position) for position in range(len(shapes.results))):
        return "names a dimension that does not come first in every result"
    led = [name for name in shapes.arguments if leads(batching, shapes, name)]
    if not led:
        return "names a dimension that comes first in no argument"
    named = (*shapes.arguments.values(), *shapes.results)
    inside = [replace(dims, sizes=dims.sizes[dims.sizes[:1] == (batching,) :]).letters for dims in named]
    if any(batching in letters for letters in inside):
        return "names a dimension that does not always come first"
    return None


def leads(batching: str, shapes: Shapes, key: str | int) -> bool:
    """Return True if the batch dimension comes first in an argument (key: name) or result (key: position)."""
    dims = shapes.results[key] if isinstance(key, int) else shapes.arguments.get(key)
    if dims is None:
        return False
    return dims.leading if batching == LEADING else not dims.leading and dims.sizes[:1] == (batching,)
