"""The standard decorator `dataclass`, with methods that are written when they are first used.

The standard library compiles six methods for a frozen dataclass at once, which was a quarter of the time of
`import opsmith.ops`. Most classes of a program make no instance in it. torch.compile cannot trace the first
use of a method: classes with instances that are made in traces, as by autograd nodes, have the standard one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses

    def dataclass(cls=None, /, *, frozen=False, eq=True, order=False, slots=False, kw_only=False):
        """Make a class a dataclass, as `dataclasses.dataclass` does.

        `dataclasses.fields`, `replace`, `asdict` and `is_dataclass` take it.

        Args:
            cls: The class; None where options are given.
            frozen: True if its fields cannot be assigned.
            eq: True if two instances with equal fields are equal.
            order: True if instances have an order.
            slots: True if instances have slots in place of a dictionary.
            kw_only: True if all fields are given by name.

        Raises:
            TypeError: As of the standard decorator.
        """

        def decorate(undecorated):
            own = set(vars(undecorated))
            if undecorated.__hash__ is None and "__eq__" in own:
                own.discard("__hash__")  # Python sets None where a class has `__eq__` alone
            made = dataclasses.dataclass(
                init=False,
                repr=False,
                eq=order,
                order=order,
                frozen=_inherits_frozen(undecorated),
                slots=slots,
                kw_only=kw_only,
            )(undecorated)
            for name, write in (_COMPARED if eq else _ALWAYS).items():
                if name not in own:
                    setattr(made, name, _WrittenMethod(made, name, write, frozen))
            if eq and not frozen and "__hash__" not in own:
                made.__hash__ = None
            if frozen:
                made.__dataclass_params__.frozen = True  # by it torch.compile knows a frozen class
                made.__setattr__, made.__delattr__ = _refusals(made)
                if slots:
                    made.__getstate__, made.__setstate__ = _state, _set_state
            return made

        return decorate if cls is None else decorate(cls)


def _inherits_frozen(undecorated: Any) -> bool:
    """Return True if a base is a frozen dataclass: the standard library compares the two."""
    params = (vars(each).get("__dataclass_params__") for each in undecorated.__mro__[1:])
    return any(each is not None and each.frozen for each in params)


class _WrittenMethod:
    """Method of a dataclass that is written when it is first looked up, and replaces this descriptor.

    Two threads that look it up first at once both write it, and use either.
    """

    def __init__(self, owner: type, name: str, write: Callable[[type, bool], Any], frozen: bool) -> None:
        self._owner, self._name, self._write, self._frozen = owner, name, write, frozen

    def __get__(self, holder: object, owner: type | None = None) -> Any:
        method = self._write(self._owner, self._frozen)
        method.__name__, method.__module__ = self._name, self._owner.__module__
        method.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        setattr(self._owner, self._name, method)
        return method.__get__(holder, owner)


class _Made:
    """Default of a field whose value a function makes, as signatures show it."""

    def __repr__(self) -> str:
        return "<factory>"


_MADE = _Made()


def _init(owner: Any, frozen: bool) -> Callable[..., None]:
    """Compile `__init__`, with each field as a parameter."""
    names: dict[str, Any] = {"_object": object, "_made": _MADE}
    taken = [each for each in fields(owner) if each.init]
    parameters = ["self", *(_parameter(each, names) for each in taken if not each.kw_only)]
    by_name = [_parameter(each, names) for each in taken if each.kw_only]
    lines = [_assignment(each, names, frozen) for each in fields(owner) if _is_assigned(each)]
    if hasattr(owner, "__post_init__"):
        lines.append("self.__post_init__()")
    listed = ", ".join([*parameters, *(["*", *by_name] if by_name else [])])
    exec("\n  ".join([f"def __init__({listed}):", *(lines or ["pass"])]), names)
    method: Callable[..., None] = names["__init__"]
    method.__annotations__ = {**{each.name: each.type for each in taken}, "return": None}
    return method


def _parameter(field: Field[Any], names: dict[str, Any]) -> str:
    if field.default is not MISSING:
        names[f"_default_{field.name}"] = field.default
        return f"{field.name}=_default_{field.name}"
    return f"{field.name}=_made" if field.default_factory is not MISSING else field.name


def _is_assigned(field: Field[Any]) -> bool:
    return field.init or field.default is not MISSING or field.default_factory is not MISSING


def _assignment(field: Field[Any], names: dict[str, Any], frozen: bool) -> str:
    name, value = field.name, field.name
    if field.default_factory is not MISSING:
        names[f"_make_{name}"] = field.default_factory
        made = f"_make_{name}()"
        value = f"{made} if {name} is _made else {name}" if field.init else made
    elif not field.init:
        value = f"_default_{name}"
        names[value] = field.default
    # torch.compile takes this spelling alone.
    return f"_object.__setattr__(self, {name!r}, {value})" if frozen else f"self.{name} = {value}"


def _repr(owner: Any, frozen: bool) -> Callable[[Any], str]:
    shown = [each.name for each in fields(owner) if each.repr]

    def method(self: Any) -> str:
        listed = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__qualname__}({listed})"

    return reprlib.recursive_repr()(method)


def _eq(owner: Any, frozen: bool) -> Callable[[Any, Any], bool]:
    values = _values([each for each in fields(owner) if each.compare])

    def method(self: Any, other: Any) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return method


def _hash(owner: Any, frozen: bool) -> Callable[[Any], int]:
    values = _values([each for each in fields(owner) if (each.compare if each.hash is None else each.hash)])

    def method(self: Any) -> int:
        return hash(values(self))

    return method


def _values(compared: list[Field[Any]]) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function that makes a tuple of these fields of an instance."""
    names = [each.name for each in compared]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda instance: tuple(getattr(instance, name) for name in names)


_ALWAYS = {"__init__": _init, "__repr__": _repr}
"""The functions that write methods, by name."""
_COMPARED = {**_ALWAYS, "__eq__": _eq, "__hash__": _hash}
"""The same for a class whose instances are compared."""


def _refusals(owner: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return `__setattr__` and `__delattr__`, which refuse fields; a subclass may have other attributes."""

    def refuse_to_set(self: Any, name: str, value: Any) -> None:
        if type(self) is owner or name in owner.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(owner, self).__setattr__(name, value)

    def refuse_to_delete(self: Any, name: str) -> None:
        if type(self) is owner or name in owner.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(owner, self).__delattr__(name)

    return refuse_to_set, refuse_to_delete


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
