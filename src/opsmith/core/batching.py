"""Declaration of batching: one call of an operator computes a whole batch, so that `vmap` calls it once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opsmith import errors
from opsmith.core.schema import Schema
from opsmith.core.shapes import LEADING, Shapes

ELEMENTWISE = "elementwise"


def check_batching(
    batching: Any, shapes: Shapes | None, schema: Schema, operator: str, location: str
) -> str | None:
    """Check `batching=` against the operator's shapes, and return it.

    Args:
        batching: `"elementwise"`, or the first dimension of some arguments and all results in `shapes=`,
            a letter or `...`; None if one call takes one example.
        shapes: The operator's shapes.
        schema: Its signature.
        operator: Its name, for messages.
        location: `file:line` of its declaration.

    Raises:
        UsageError: If it is none of these.
    """
    if batching is None or batching == ELEMENTWISE:
        return batching  # type: ignore[no-any-return]  # one of the two
    fault = _fault(batching, shapes, schema)
    if fault is not None:
        raise errors.UsageError(
            f"`batching` {fault}",
            operator=operator,
            argument="batching",
            expected="`elementwise`, or a dimension that comes first in `shapes=`, a letter or `...`",
            got=repr(batching),
            where=location,
            hint='write `shapes="x: B M, weight: N M -> B N", batching="B"`, or leave it out',
        )
    chosen: str = batching
    return chosen


def _fault(batching: Any, shapes: Shapes | None, schema: Schema) -> str | None:
    if not isinstance(batching, str):
        return "has an invalid value"
    if shapes is None:
        return "names a dimension, but there is no `shapes=`"
    if batching in shapes.integers:
        return "names an argument whose value is a size, which a batch would change"
    if len(shapes.results) < len(schema.results):
        return "needs the shape of every result, of hidden ones too"
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
    """Return True if the batch dimension comes first in an argument, by name, or a result, by position."""
    dims = shapes.results[key] if isinstance(key, int) else shapes.arguments.get(key)
    if dims is None:
        return False
    return dims.leading if batching == LEADING else not dims.leading and dims.sizes[:1] == (batching,)
