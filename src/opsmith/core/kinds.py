"""The kinds of argument an operator can take: values, lists of them, and what stands for several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.core.bases import FLOAT, INT, NUMBERED, TENSOR, Base, is_int
from opsmith.core.location import where


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of one argument, as its author wrote it.

    Args:
        base: Type of a value, or of a list's items.
        optional: Whether `None` is taken.
        sequence: Whether it is a list.
        length: Fixed length of the list, if it has one.
        item_optional: Whether items of the list may be `None`.
        spread: Whether one value stands for all items, as in `int | tuple[int, int]`.
        as_tuple: Whether the reference receives a tuple rather than a list.
        structure: The values that it is taken apart into, where torch carries them one by one.
    """

    base: Base
    optional: bool = False
    sequence: bool = False
    length: int | None = None
    item_optional: bool = False
    spread: bool = False
    as_tuple: bool = False
    structure: Structure | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it holds tensors, and so may have a gradient."""
        return self.base is TENSOR

    def schema(self) -> str:
        """The type in torch's schema language."""
        if not self.sequence:
            return self.base.schema + "?" * self.optional
        # torch spreads a single number over `int[2]`, and not over `SymInt[2]`.
        item = "int" if self.spread and self.base is INT else self.base.schema
        size = "" if self.length is None else str(self.length)
        return f"{item}{'?' * self.item_optional}[{size}]{'?' * self.optional}"

    def annotation(self) -> str:
        """The type as its author would annotate it."""
        if not self.sequence:
            text = self.base.annotation
        else:
            item = f"{self.base.annotation} | None" if self.item_optional else self.base.annotation
            if self.length is not None:
                text = f"tuple[{', '.join([item] * self.length)}]"
            else:
                text = f"tuple[{item}, ...]" if self.as_tuple else f"list[{item}]"
            if self.spread:
                text = f"{self.base.annotation} | {text}"
        return f"{text} | None" if self.optional else text

    def expected(self) -> str:
        """The type, with the values that there are, for messages."""
        return (
            f"{self.annotation()}: {', '.join(self.base.members)}" if self.base.members else self.annotation()
        )

    @property
    def encoded(self) -> bool:
        """Whether torch's dispatcher carries something else in the place of a value."""
        return self.structure is not None or self.base.lower is not None

    def accepts(self, value: Any) -> bool:
        """Whether a value fits this type."""
        if value is None:
            return self.optional
        if self.structure is not None:
            return self.structure.accepts(value)
        if not self.sequence:
            return self.base.accepts(value)
        if self.spread and self.base.accepts(value):
            return self.base is not FLOAT or not is_int(value)  # torch spreads only what it need not convert
        if not isinstance(value, list | tuple | torch.Size):
            return False
        if self.length is not None and len(value) != self.length:
            return False
        return all(self.item_optional if item is None else self.base.accepts(item) for item in value)

    def default_text(self, value: Any) -> str:
        """A default value of this type in the schema language."""
        if value is None:
            return "None"
        if self.sequence and isinstance(value, list | tuple):
            return f"[{', '.join(self.base.default_text(item) for item in value)}]"
        return self.base.default_text(value)

    def restore(self, value: Any) -> Any:
        """A value from the dispatcher, in the form that the reference expects: a spread value is a tuple."""
        if value is None:
            return value
        if not self.sequence:
            return self._lifted(value)
        if self.spread and not isinstance(value, list | tuple):
            value = [value] * (self.length or 1)
        value = [self._lifted(item) for item in value]
        numbered = NUMBERED.get(self.base.schema)
        if numbered is not None:
            value = [numbered[item] if isinstance(item, int) else item for item in value]
        return tuple(value) if self.as_tuple else list(value)

    def _lifted(self, value: Any) -> Any:
        return value if self.base.lift is None or value is None else self.base.lift(value)

    def lower(self, value: Any) -> list[Any]:
        """What torch's dispatcher carries for a value, one item for each argument in the schema.

        Raises:
            TypeError: If the value is none of this kind.
        """
        if self.structure is not None:
            return self.structure.lower(value)
        lower = self.base.lower
        if lower is None or value is None:
            return [value]
        return [[lower(item) for item in value]] if self.sequence else [lower(value)]

    def flat(self, value: Any) -> list[Any]:
        """The value itself, or its parts, theirs too, as their author wrote them."""
        if self.structure is None:
            return [value]
        pairs = zip(self.structure.parts.values(), self.structure.take_apart(value), strict=True)
        return [item for kind, part in pairs for item in kind.flat(part)]

    def lift(self, values: Iterator[Any]) -> Any:
        """The value again; inverse of `lower`, takes as many items."""
        return self.restore(next(values)) if self.structure is None else self.structure.lift(values)

    def leaves(self, name: str) -> list[tuple[str, Kind]]:
        """Name and kind of each argument in the schema that stands for one of this name."""
        if self.structure is None:
            return [(name, self)]
        return [leaf for part, kind in self.structure.parts.items() for leaf in kind.leaves(f"{name}_{part}")]


@dataclass(frozen=True, slots=True)
class Structure:
    """A value of several parts: a frozen dataclass, a named tuple, or a tuple of different types.

    Args:
        type: The type of every value.
        parts: Kind of each part, by its name.
        by_position: Whether it is a tuple.
    """

    type: type[Any]
    parts: dict[str, Kind]
    by_position: bool

    def take_apart(self, value: Any) -> Sequence[Any]:
        """The parts of a value.

        Raises:
            TypeError: If it is no such value.
        """
        # A value of a derived class would come out as one of its base.
        if type(value) is not self.type or (self.by_position and len(value) != len(self.parts)):
            raise TypeError(self.type)
        return list(value) if self.by_position else [getattr(value, name) for name in self.parts]

    def accepts(self, value: Any) -> bool:
        """Whether a value is of this structure, and its parts of their kinds."""
        return self.fault(value) is None

    def fault(self, value: Any) -> tuple[str, Kind, Any] | None:
        """The first part that is of another kind: behind its argument's name, its kind, what it is."""
        try:
            parts = self.take_apart(value)
        except TypeError:
            return "", self._whole(), value
        for (name, kind), part in zip(self.parts.items(), parts, strict=True):
            behind = f"[{name}]" if self.type is tuple else f".{name}"
            if kind.structure is not None:
                inside = kind.structure.fault(part)
                if inside is not None:
                    return behind + inside[0], *inside[1:]
            elif not kind.accepts(part):
                return behind, kind, part
        return None

    def _whole(self) -> Kind:
        return Kind(Base(self.annotation(), "", lambda value: False), structure=self)

    def annotation(self) -> str:
        """The type as its author would annotate it."""
        if self.type is not tuple:
            return self.type.__name__
        return f"tuple[{', '.join(kind.annotation() for kind in self.parts.values())}]"

    def lower(self, value: Any) -> list[Any]:
        """What torch's dispatcher carries for the parts of a value."""
        lowered = []
        for kind, part in zip(self.parts.values(), self.take_apart(value), strict=True):
            lowered += kind.lower(part)
        return lowered

    def lift(self, values: Iterator[Any]) -> Any:
        """The value again."""
        parts = [kind.lift(values) for kind in self.parts.values()]
        if self.type is tuple:
            return tuple(parts)
        value = self.type(**dict(zip(self.parts, parts, strict=True)))
        if hasattr(self.type, "__post_init__") and list(map(repr, self.take_apart(value))) != list(
            map(repr, parts)
        ):
            raise errors.ArgumentError(
                f"`{self.type.__name__}.__post_init__` makes other values of the fields that it once made",
                expected=", ".join(f"{name}={part!r}" for name, part in zip(self.parts, parts, strict=True)),
                got=repr(value),
                where=where(self.type.__post_init__),
                hint="let it leave alone what it has made, or compute it in a property",
            )
        return value
