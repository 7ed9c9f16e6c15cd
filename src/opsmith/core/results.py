"""Results of a reference: their names, roles and forms."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.core.annotations import shown_annotation
from opsmith.core.formula import NonDifferentiable

REQUIRED = inspect.Parameter.empty
RESERVED = ("grad", "result")

Role = types.EllipsisType | NonDifferentiable
ResultNames = Mapping[str, Role] | Iterable[str] | None


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor that the reference returns, or a list of them.

    Args:
        name: Name of the result in formulas.
        differentiable: True if it has a gradient.
        hidden: True if only formulas see it.
        optional: True if it may be None.
        sequence: True for a list of tensors.
        written: In the functional form of an in-place operator, the argument of which this is the new value.
    """

    name: str
    differentiable: bool = True
    hidden: bool = False
    optional: bool = False
    sequence: bool = False
    written: str | None = None

    def annotation(self) -> str:
        """Return its annotation."""
        return "list[Tensor]" if self.sequence else "Tensor | None" if self.optional else "Tensor"

    @property
    def type(self) -> Any:
        """Its type, as in an annotation."""
        return list[torch.Tensor] if self.sequence else torch.Tensor | None if self.optional else torch.Tensor

    def gradient_name(self) -> str:
        """Return the name by which a formula receives the gradient of this result."""
        return "grad" if self.name == "result" else f"grad_{self.written or self.name}"


NOTHING = "return a tensor; if the operator writes into an argument, declare it with `mutates=`"
_RESULT_FORMS: dict[Any, str] = {
    torch.Tensor: "tensor",
    torch.Tensor | None: "optional",
    typing.Optional[torch.Tensor]: "optional",  # noqa: UP045  # has a different type before Python 3.14
    list[torch.Tensor]: "list",
}


def result_forms(annotation: Any, *, writes: bool = False) -> tuple[list[str], bool]:
    """Return the form of each result (tensor, optional or list), and True for a single result, not a tuple.

    Args:
        annotation: Annotation of the return value.
        writes: True if the reference writes into its arguments, so that it may return nothing.

    Raises:
        MissingAnnotationError, UnsupportedTypeError: As their names say.
    """
    if annotation is REQUIRED:
        raise errors.MissingAnnotationError(
            "the reference has no return type hint",
            expected="a return type hint",
            hint="write `-> Tensor` or `-> tuple[Tensor, Tensor]`",
        )
    if writes and annotation in (None, types.NoneType):
        return [], False
    forms = _RESULT_FORMS.get(annotation)
    if forms is not None:
        return [forms], True
    items = typing.get_args(annotation)
    is_tuple = typing.get_origin(annotation) is tuple and len(items) > 1
    if is_tuple and all(item in _RESULT_FORMS for item in items):
        return [_RESULT_FORMS[item] for item in items], False
    hints = {
        None: NOTHING,
        type(None): NOTHING,
        int: "return a tensor without dimensions, `torch.tensor(value)`",
        float: "return a tensor without dimensions, `torch.tensor(value)`",
        bool: "return a tensor without dimensions, `torch.tensor(value)`",
    }
    raise errors.UnsupportedTypeError(
        "an operator must return a tensor, a list of tensors, or a tuple of two or more of these",
        argument="return",
        got=shown_annotation(annotation),
        hint="write `-> list[Tensor]` if the number of results varies"
        if items[1:] == (...,) or typing.get_origin(annotation) is Sequence
        else hints.get(annotation, "write `-> Tensor` or `-> tuple[Tensor, Tensor]`"),
    )


def result_names(count: int, word: str = "result") -> list[str]:
    """Return default names of results: the word itself for one result, numbered from 0 for several."""
    return [word] if count == 1 else [f"{word}{i}" for i in range(count)]


def result_roles(count: int, results: ResultNames, hidden: tuple[str, ...]) -> tuple[Result, ...]:
    """Return the results with their names and roles.

    Raises:
        ReservedNameError, ResultNameError: As their names say.
    """
    roles: dict[str, Role]
    if results is None:
        shown = count - len(hidden)
        roles = dict.fromkeys((*result_names(shown), *hidden), ...)
    else:
        roles = dict(results) if isinstance(results, Mapping) else dict.fromkeys(results, ...)
        for name in hidden:
            roles.setdefault(name, ...)
        for name in roles:
            if name.startswith(RESERVED) and name != "result":
                raise errors.ReservedNameError(
                    "in formulas, names that begin with `grad` or `result` mean gradients and results",
                    argument=name,
                    hint="rename the result in `results=`",
                )
    if len(roles) != count or (count and len(set(hidden)) == count):
        raise errors.ResultNameError(
            "the names of the results do not fit the results of the reference",
            expected=f"{count} names, at least one of them not hidden",
            got=", ".join(roles) or "none",
            hint="give one name in `results=` or `hidden=` for each result, in order",
        )
    for name, role in roles.items():
        if not (role is ... or isinstance(role, NonDifferentiable)):
            raise errors.ResultNameError(
                f"`{name}` has an unknown role",
                argument=name,
                expected="`...` or `opsmith.non_differentiable`",
                got=repr(role),
                hint=f"write `results={{{name!r}: ...}}`",
            )
    return tuple(Result(name, role is ..., name in hidden) for name, role in roles.items())
