"""Between an author's values and what torch's dispatcher carries of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opsmith.core.encoded import OBJECT

if TYPE_CHECKING:
    from opsmith.core.schema import Argument


class Lowering:
    """How the arguments of an operator become those of its schema, and back.

    torch.compile traces `call`: it is plain code over plain attributes.

    Args:
        arguments: The operator's arguments.
        leaves: Those of its schema: a structure has one for each of its parts.
        required: The default of an argument that has none.

    Attributes:
        objects: Whether some arguments are any objects at all.
    """

    def __init__(self, arguments: Sequence[Argument], leaves: Sequence[Argument], required: Any) -> None:
        self._arguments = list(arguments)
        self._by_name = {argument.name: argument for argument in arguments}
        self._names = {
            argument.name: [name for name, _ in argument.kind.leaves(argument.name)] for argument in arguments
        }
        self._leaves = list(leaves)
        self._positional = sum(not leaf.keyword_only for leaf in leaves)
        self._required = required
        self.objects = any(leaf.kind.base is OBJECT for leaf in leaves)

    def call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call of torch's operator that a call means: what is not given stays so.

        Raises:
            TypeError: If a value is not of its argument's kind, or belongs to no argument.
        """
        if len(args) > len(self._arguments):
            raise TypeError("too many arguments")
        lowered = []
        for position, value in enumerate(args):
            lowered += self._arguments[position].kind.lower(value)
        named = {}
        for name, value in kwargs.items():
            if name not in self._by_name:
                raise TypeError("no such argument")
            for leaf, part in zip(self._names[name], self._by_name[name].kind.lower(value), strict=True):
                named[leaf] = part
        return tuple(lowered), named

    def split(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of torch's operator for the values of all arguments."""
        lowered: list[Any] = []
        for argument, value in zip(self._arguments, values, strict=True):
            lowered += argument.kind.lower(value)
        return lowered[: self._positional], {
            leaf.name: value
            for leaf, value in zip(self._leaves[self._positional :], lowered[self._positional :], strict=True)
        }

    def lift(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of all arguments, from a call of torch's operator: defaults filled in."""
        lowered = list(args)
        for leaf in self._leaves[len(args) :]:
            given = leaf.name in kwargs or leaf.default is self._required
            lowered.append(kwargs.get(leaf.name) if given else leaf.kind.lower(leaf.default)[0])
        rest = iter(lowered)
        return [argument.kind.lift(rest) for argument in self._arguments]
