"""The shapes of what a module owns: as the author wrote them, or as `shapes=` of the operator says them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opsmith.core.calls import shown
from opsmith.core.formula import listed
from opsmith.core.shapes import ANY
from opsmith.modules.expression import ALLOWED, Expression, expression
from opsmith.modules.wording import Words


def read_shapes_of(
    words: Words, word: str, given: Any, known: tuple[str, ...], letters: Mapping[str, str]
) -> dict[str, tuple[Expression, ...]]:
    """Shape of each parameter, or buffer."""
    derived = None if isinstance(given, Mapping) else dict.fromkeys(words.names(word, given))
    found = {}
    for name, shape in (given if derived is None else derived).items():
        if name not in words.tensors:
            raise words.refuse(
                f"`{word}` names `{name}`, which is no tensor argument of the operator",
                word,
                "name an argument of the reference; for a list of tensors write a module by hand",
                expected=f"one of {listed(words.tensors)}" if words.tensors else "no name",
            )
        found[name] = _derived(words, name, letters) if derived is not None else _written(words, name, shape)
        for dimension in found[name]:
            _refuse_unknown(words, name, dimension, known)
    return found


def _written(words: Words, name: str, shape: Any) -> tuple[Expression, ...]:
    """A shape that the author wrote."""
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise words.refuse(
            f"the shape of `{name}` is a list of dimensions",
            name,
            f'write `"{name}": ("{shape}",)`, with a comma; `()` for a single number',
            got=shown(shape),
        )
    dimensions = []
    for dimension in shape:
        read = expression(dimension)
        if read is None:
            raise words.refuse(
                f"the shape of `{name}` has a dimension that cannot be read",
                name,
                'write a size, a number, or `"channels // groups"`',
                expected=ALLOWED,
                got=shown(dimension),
            )
        dimensions.append(read)
    pattern = words.specification.shapes
    dims = None if pattern is None else pattern.arguments.get(name)
    if dims is not None and not dims.leading and len(dims.sizes) != len(dimensions):
        raise words.refuse(
            f"the shape of `{name}` does not fit the operator's `shapes=`",
            name,
            "write as many dimensions, or leave the shapes to `shapes=`: give names alone",
            expected=f"`{dims.text}`",
            got=f"{len(dimensions)} dimension{'s' * (len(dimensions) != 1)}",
        )
    return tuple(dimensions)


def _derived(words: Words, name: str, letters: Mapping[str, str]) -> tuple[Expression, ...]:
    """A shape that `shapes=` says."""
    pattern = words.specification.shapes
    dims = None if pattern is None else pattern.arguments.get(name)
    read = [] if dims is None else [expression(size) for size in dims.sizes]
    if dims is None or dims.leading or ANY in dims.sizes or None in read:
        raise words.refuse(
            f"the operator's `shapes=` does not say the shape of `{name}`",
            name,
            f'write it: `{{"{name}": ("features",)}}`',
            expected="a dimension for each of its sizes",
            got="no `shapes=`" if pattern is None else f"`{dims.text if dims else pattern.text}`",
        )
    return tuple(each.renamed(letters) for each in read if each is not None)


def _refuse_unknown(words: Words, name: str, dimension: Expression, known: tuple[str, ...]) -> None:
    """Refuse a name in a shape that the constructor does not take."""
    unknown = [each for each in dimension.names if each not in known]
    if unknown:
        raise words.refuse(
            f"the shape of `{name}` names `{unknown[0]}`, which is no size",
            name,
            f"add it to `sizes`, or say there what the letter `{unknown[0]}` is called"
            if unknown[0] in words.pattern_letters
            else "add it to `sizes`",
            expected=f"one of {listed(list(known))}" if known else "numbers: there are no `sizes`",
            got=repr(dimension.text),
        )
