"""Promises: decide from an author's code how far an operator claims to have a property."""

from __future__ import annotations

from typing import Any

from opsmith.checking.report import Given
from opsmith.checking.subject import Subject
from opsmith.core.source import code_of, names_in


def _function_class(subject: Subject) -> Any:
    """The class that is checked against its own forward; None for a subject with a reference, or no class."""
    origin = subject.specification.origin
    return None if origin.kind != "class" or subject.kind.has_reference else origin.subject


def of_tools(subject: Subject) -> Given:
    """The promise of tracing, mapping, copying and compiling; a class, called as it is, does not make it."""
    return "unpromised" if subject.kind.own_forward else "undeclared"


def of_second_order(subject: Subject) -> Given:
    """The promise of a second order: a class makes it if its backward applies a Function."""
    written = _function_class(subject)
    code = None if written is None else code_of(written.backward)
    applies = code is not None and "apply" in names_in(code)
    return "usual" if applies and not subject.specification.gradients.surrogate else "unpromised"


def of_forward_mode(subject: Subject) -> Given:
    """The promise of tangents: opsmith derives them from a reference; a class promises them by its `jvp`."""
    if subject.kind.has_reference:
        return "undeclared"
    own = _function_class(subject) and subject.specification.origin.own("tangent")
    return "usual" if own is not None else "unpromised"


def of_batches(subject: Subject) -> Given:
    """The promise of `vmap`: a class makes it by its own rule, but not by a rule that torch generates."""
    if _function_class(subject) is None:
        return "undeclared"
    return "usual" if subject.specification.origin.own("vmap") is not None else "unpromised"
