"""The standard decorator `dataclass`, with methods that are written when they are first used.

The standard library compiles six methods for a frozen dataclass at once, which was a quarter of the time of
`import opsmith.ops`. Most classes of a program make no instance in it. The methods are those of the standard
library, written here: its decorator takes three times as long for a single one. torch.compile cannot trace
the first use of a method: classes with instances that are made in traces, as by autograd nodes, have the
standard decorator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from itertools import dropwhile
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

_ALWAYS = ("__init__", "__repr__")
_COMPARED = ("__eq__", "__hash__")
"""The methods of a class whose instances are compared, besides."""

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

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
            TypeError: As of the standard decorator; and if a field is an `InitVar`.
        """

        def decorate(undecorated):
            own = set(vars(undecorated))
            _refuse(undecorated, frozen)
            if "__eq__" in own and vars(undecorated)["__hash__"] is None:
                own.discard("__hash__")  # Python sets None where a class has `__eq__` alone
            made = dataclasses.dataclass(
                init=False,
                repr=False,
                eq=order,
                order=order,
                frozen=any(each.frozen for each in _inherited(undecorated)),  # it compares the two
                slots=slots,
                kw_only=kw_only,
            )(undecorated)
            for name in made.__dataclass_fields__.keys() - {each.name for each in fields(made)}:
                if "ClassVar" not in str(made.__dataclass_fields__[name].type):
                    raise TypeError(f"{made.__name__}.{name} is an InitVar, which is not supported")
            for name in (*_ALWAYS, *_COMPARED) if eq else _ALWAYS:
                if name not in own:
                    setattr(made, name, _WrittenMethod(made, name, frozen))
            if eq and not frozen and "__hash__" not in own:
                made.__hash__ = None
            if frozen:
                made.__dataclass_params__.frozen = True  # by it torch.compile knows a frozen class
                made.__setattr__, made.__delattr__ = _refusals(made)
                if slots and "__getstate__" not in own:
                    made.__getstate__ = _state
                if slots and "__setstate__" not in own:
                    made.__setstate__ = _set_state
            return made

        return decorate if cls is None else decorate(cls)


def _inherited(undecorated: type) -> list[Any]:
    """Return the parameters of the bases that are dataclasses."""
    params = (vars(each).get("__dataclass_params__") for each in undecorated.__mro__[1:])
    return [each for each in params if each is not None]


def _refuse(undecorated: type, frozen: bool) -> None:
    """Refuse what would be lost or overwritten.

    Raises:
        TypeError: If a class and its base are not both frozen; if a frozen class has its own method to set or
            delete an attribute.
    """
    if any(each.frozen != frozen for each in _inherited(undecorated)):
        raise TypeError(f"{undecorated.__name__} and its base must both be frozen, or neither")
    if frozen:
        for name in {"__setattr__", "__delattr__"} & set(vars(undecorated)):
            raise TypeError(f"{undecorated.__name__} is frozen, and has its own {name}")


class _WrittenMethod:
    """Method of a dataclass that is written when it is first looked up, in place of this.

    Two threads that look it up first at once both have it written, and use either.
    """

    def __init__(self, owner: type, name: str, frozen: bool) -> None:
        self._owner, self._name, self._frozen = owner, name, frozen

    def __get__(self, holder: object, owner: type | None = None) -> Any:
        method = _WRITERS[self._name](self._owner, self._frozen)
        method.__module__ = self._owner.__module__
        method.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        setattr(self._owner, self._name, method)
        return method.__get__(holder, owner)


_OF_STANDARD: Any = dataclasses.make_dataclass(
    "Made", [("anew", list, dataclasses.field(default_factory=list))], repr=False, eq=False
)
(_MADE_ANEW,) = _OF_STANDARD.__init__.__defaults__
"""Default of a parameter whose value a factory makes: torch.compile knows the one of the standard library."""


def _write_init(owner: Any, frozen: bool) -> Any:
    """Write `__init__`.

    Raises:
        TypeError: If a field without a default follows one that has a default.
    """
    taken = fields(owner)
    positional = [each for each in taken if each.init and not each.kw_only]
    by_name = [each for each in taken if each.init and each.kw_only]
    defaults = {each.name: _default(each) for each in (*positional, *by_name)}
    trailing = [*dropwhile(lambda name: defaults[name] is MISSING, (each.name for each in positional))]
    for name in trailing:
        if defaults[name] is MISSING:
            raise TypeError(f"non-default argument {name!r} follows default argument")
    this = "__dataclass_self__" if any(each.name == "self" for each in taken) else "self"
    held: dict[str, Any] = {"__dataclass_object__": object, "__dataclass_made_anew__": _MADE_ANEW}
    body = []
    for each in taken:
        value = _initial_value(each, "__slots__" in vars(owner), held)
        if value is not None and frozen:
            body.append(f"__dataclass_object__.__setattr__({this}, {each.name!r}, {value})")
        elif value is not None:
            body.append(f"{this}.{each.name} = {value}")
    if hasattr(owner, "__post_init__"):
        body.append(f"{this}.__post_init__()")
    names = [*defaults]
    if by_name:
        names.insert(len(positional), "*")
    method = _compiled("__init__", [this, *names], body or ["pass"], held)
    method.__defaults__ = tuple(defaults[name] for name in trailing) or None
    named = ((each.name, defaults[each.name]) for each in by_name)
    method.__kwdefaults__ = {name: value for name, value in named if value is not MISSING} or None
    method.__annotations__ = {each.name: each.type for each in (*positional, *by_name)} | {"return": None}
    return method


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else _MADE_ANEW


def _initial_value(field: Field[Any], slots: bool, held: dict[str, Any]) -> str | None:
    """Return the expression that `__init__` assigns, and put what it needs into `held`; None if it does not.

    Args:
        field: The field.
        slots: True if the class has no attribute with the default.
        held: Values that the text names, by name.
    """
    name = f"__dataclass_{field.name}__"
    if field.default_factory is not MISSING:
        held[name] = field.default_factory
        made = f"{name}()"
        return f"{made} if {field.name} is __dataclass_made_anew__ else {field.name}" if field.init else made
    if field.init:
        return field.name
    if slots and field.default is not MISSING:
        held[name] = field.default
        return name
    return None


def _write_repr(owner: Any, frozen: bool) -> Any:
    shown = ", ".join(f"{each.name}={{self.{each.name}!r}}" for each in fields(owner) if each.repr)
    body = [f'return self.__class__.__qualname__ + f"({shown})"']
    return recursive_repr()(_compiled("__repr__", ["self"], body, {}))


def _write_eq(owner: Any, frozen: bool) -> Any:
    compared = [each.name for each in fields(owner) if each.compare]
    body = [
        "if other.__class__ is self.__class__:",
        f" return {_values('self', compared)} == {_values('other', compared)}",
        "return NotImplemented",
    ]
    return _compiled("__eq__", ["self", "other"], body, {})


def _write_hash(owner: Any, frozen: bool) -> Any:
    hashed = [each.name for each in fields(owner) if (each.compare if each.hash is None else each.hash)]
    return _compiled("__hash__", ["self"], [f"return hash({_values('self', hashed)})"], {})


_WRITERS: dict[str, Callable[[Any, bool], Any]] = {
    "__init__": _write_init,
    "__repr__": _write_repr,
    "__eq__": _write_eq,
    "__hash__": _write_hash,
}


def _values(holder: str, names: list[str]) -> str:
    """Return the expression of the tuple of these attributes."""
    return f"({''.join(f'{holder}.{name}, ' for name in names)})"


def _compiled(name: str, parameters: list[str], body: list[str], held: dict[str, Any]) -> Any:
    """Compile a function, which holds values in a closure, where torch.compile follows them.

    Args:
        name: Name of the function.
        parameters: Its parameters.
        body: Its lines.
        held: Other values that the lines name, by name.
    """
    lines = "".join(f"  {line}\n" for line in body)
    text = f"def create({', '.join(held)}):\n def {name}({', '.join(parameters)}):\n{lines} return {name}"
    made: dict[str, Any] = {}
    exec(text, globals(), made)
    return made["create"](**held)


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
