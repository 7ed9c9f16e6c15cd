"""Promises: how far an operator stands for what a property looks at, by what its author wrote."""

from __future__ import annotations

from typing import Any

from opsmith.checking.report import Given
from opsmith.checking.subject import Subject
from opsmith.core.source import code_of, names_in


def _function_class(subject: Subject) -> Any:
    """The class that is held to its own forward; None for what has a reference, or is no class."""
    origin = subject.specification.origin
    return None if origin.kind != "class" or subject.kind.has_reference else origin.subject


def of_tools(subject: Subject) -> Given:
    """The promise to be traced, mapped, copied and compiled: none of a class, which torch calls as it is."""
    return "unpromised" if subject.kind.own_forward else "undeclared"


def of_second_order(subject: Subject) -> Given:
    """The promise of a second order: a class makes it whose backward applies a Function."""
    written = _function_class(subject)
    code = None if written is None else code_of(written.backward)
    applies = code is not None and "apply" in names_in(code)
    return "usual" if applies and not subject.specification.gradients.surrogate else "unpromised"


def of_forward_mode(subject: Subject) -> Given:
    """The promise of tangents: opsmith derives those of a reference, and a class makes it by its `jvp`."""
    if subject.kind.has_reference:
        return "undeclared"
    own = _function_class(subject) and subject.specification.origin.own("tangent")
    return "usual" if own is not None else "unpromised"


def of_batches(subject: Subject) -> Given:
    """The promise of `vmap`: a class makes it by its own rule; one that torch generates nobody wrote."""
    if _function_class(subject) is None:
        return "undeclared"
    return "usual" if subject.specification.origin.own("vmap") is not None else "unpromised"
