"""The accelerator: it makes calls of a handle in C++, by a table of routes in front of the dispatcher.

It computes the calls whose signature it knows, and leaves the others to the handle's `__call__`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from opsmith.core.argument_types import BOOL, FLOAT, INT, NUMBER, STR, ArgumentType
from opsmith.core.schema import REQUIRED, Argument, Schema
from opsmith.core.shapes import ANY, Shapes
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.calls.autograd_kernel import AutogradKernel
from opsmith.torch_library.calls.computation import Route, UnknownCallError

_TYPES = {INT: int, BOOL: bool, STR: str}
_ANY_SIZE, _FIRST_NUMBER = -1, -2
"""Code for any size in C++; smaller codes mean the size `n` as `-2 - n`. Letters are numbers from 0."""


class Accelerator:
    """The calls of one handle in C++.

    Args:
        specification: The operator.
        handle: The class of the handle, which is its only instance.
        as_apply: True if the handle takes the arguments and returns the results of the `apply` of a class: it
            also returns written arguments, and Python makes calls with keywords.
    """

    def __init__(self, specification: Specification, handle: type, *, as_apply: bool = False) -> None:
        self._plan = _plan(specification, handle, as_apply)
        self._in_cpp = None if self._plan is None else capabilities.calls_in_cpp()
        self._served: list[AutogradKernel] = []

    def serve(self, kernels: Iterable[AutogradKernel]) -> None:
        """Also make calls of an operator's kernels for the autograd key, which come from `torch.ops`."""
        if self._in_cpp is not None:
            self._in_cpp.use_autograd_kernels(AutogradKernel)
            for each in kernels:
                each.table = self._plan
                self._served.append(each)

    def accept(self, values: list[Any], route: Route) -> None:
        """Take over the calls with the signature of these argument values.

        Args:
            values: The argument values.
            route: The route of the calls.
        """
        if self._in_cpp is None or not route.accelerated:
            return
        if route.apply is not None:
            self._in_cpp.accept(self._plan, values, "n", route.apply, None, True, True, False)
        elif route.kernel is not None:
            self._in_cpp.accept(self._plan, values, "k", *route.kernel)
        else:
            self._in_cpp.accept(self._plan, values, "w", route.compute, None, True, True, False)

    def detach(self) -> None:
        """Leave all calls to Python; a route that another thread adds later has no effect."""
        if self._in_cpp is not None:
            self._in_cpp.detach(self._plan)
        for each in self._served:
            each.table = None


def _plan(specification: Specification, handle: type, as_apply: bool) -> Any:
    """The table in C++; None if it is not built, or if it does not know the form of an argument."""
    in_cpp, schema = capabilities.calls_in_cpp(), specification.schema
    forms = [_form(argument) for argument in schema.arguments]
    if in_cpp is None or None in forms or schema.encoded or not schema.always_tensors:
        return None
    declared = _declared_sizes(specification)
    letters, integers, sizes = declared or (0, (-1,) * len(forms), ())
    shapes, names = specification.shapes, schema.names
    fits = None
    if shapes is not None and declared is None:
        fits = partial(_fits, shapes, schema)
    written = tuple(at for at, each in enumerate(schema.arguments) if each.alias)
    shown = schema.visible if schema.returns is None else (-1 - names.index(schema.returns),)
    if as_apply and written:
        shown = (*[-1 - at for at in written], *range(len(schema.results)))
    return in_cpp.plan(
        handle=handle,
        forms="".join(map(str, forms)),
        positional=schema.positional,
        results=len(schema.results),
        letters=letters,
        by_name=not as_apply,
        alike=specification.rounds_alike,
        counts=[each.kind.length or 0 for each in schema.arguments],
        spread=[int(each.kind.spread) for each in schema.arguments],
        integers=integers,
        written=written,
        sizes=sizes,
        names=tuple(map(sys.intern, names)),
        by_keyword=names[schema.positional :] or None,
        defaults=tuple(() if each.default is REQUIRED else (each.default,) for each in schema.arguments),
        types=tuple(_exact(each.kind) for each in schema.arguments),
        fits=fits,
        shown=shown,
        unknown=UnknownCallError,
        unchanged=capabilities.unwatched(),
    )


def _fits(shapes: Shapes, schema: Schema, *values: Any) -> bool:
    """Return True if argument values have the declared shapes."""
    return shapes.bind(schema, values)[1] is None


def _form(argument: Argument) -> str | None:
    """The form of an argument, a letter of `call.h`; None if Python must look at the argument."""
    kind = argument.kind
    form: str | None
    if kind.is_tensor and kind.sequence:
        form = None if kind.item_optional or kind.optional else "u" if kind.as_tuple else "l"
    elif kind.is_tensor:
        form = "t"
    elif kind.structure is not None or (kind.sequence and (kind.base is not INT or kind.item_optional)):
        form = None
    elif kind.sequence:
        form = "z" if kind.as_tuple else "s"
    elif kind.base is FLOAT:
        form = "f"
    elif kind.base is NUMBER:
        form = "n"
    else:
        form = None if _exact(kind) is None else "e"
    return form.upper() if form is not None and kind.optional else form


def _exact(kind: ArgumentType) -> type | None:
    exact: type | None = None if kind.sequence else _TYPES.get(kind.base, kind.base.exact)
    return exact


def _declared_sizes(
    specification: Specification,
) -> tuple[int, tuple[int, ...], tuple[tuple[int, bool, tuple[int, ...]], ...]] | None:
    """The number of letters, the letter of each argument that is a size, and the sizes of each tensor.

    None if Python compares them: for expressions of letters, and leading sizes of several tensors.
    """
    shapes, schema = specification.shapes, specification.schema
    if shapes is None:
        return 0, (-1,) * len(schema.names), ()
    kinds = {each.name: each.kind for each in schema.arguments}
    leading = [name for name, dims in shapes.arguments.items() if dims.leading]
    if len(leading) > 1 or any(kinds[name].sequence for name in leading):
        return None
    letters: dict[str, int] = {name: at for at, name in enumerate(sorted(shapes.integers))}
    sizes = []
    for name, dims in shapes.arguments.items():
        numbers = _numbers(dims.sizes, letters)
        if numbers is None:
            return None
        sizes.append((schema.names.index(name), dims.leading, numbers))
    integers = tuple(letters[name] if name in shapes.integers else -1 for name in schema.names)
    return len(letters), integers, tuple(sizes)


def _numbers(sizes: Sequence[str], letters: dict[str, int]) -> tuple[int, ...] | None:
    """Sizes of one tensor as numbers; new letters are added. None for an expression."""
    found = []
    for size in sizes:
        if size == ANY:
            found.append(_ANY_SIZE)
        elif size.isdigit():
            found.append(_FIRST_NUMBER - int(size))
        elif size.isidentifier():
            found.append(letters.setdefault(size, len(letters)))
        else:
            return None
    return tuple(found)
