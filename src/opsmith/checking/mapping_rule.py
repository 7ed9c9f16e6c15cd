"""What computes a batch under `vmap`: who wrote it, where, and what it says where it refuses."""

from __future__ import annotations

from opsmith.checking.own_words import stated
from opsmith.checking.property import first_line
from opsmith.checking.subject import Subject
from opsmith.core.location import where


def rule_words(subject: Subject) -> str:
    """What computes a batch, in words."""
    specification = subject.specification
    if specification.adopted is not None and subject.apply is not None:
        if specification.adopted.vmap is not None:
            return "its own rule for `vmap`"
        return "the rule for `vmap` that torch derives from its forward"
    if specification.own is not None:
        return "its own rule for `vmap`" if specification.own.vmap else "`vmap`"
    if specification.batching is not None:
        return f"the rule for `vmap` that batching={specification.batching!r} makes"
    return "the rule for `vmap` that follows from the reference"


def own_rule(subject: Subject) -> bool:
    """Whether its author wrote what computes a batch, or says that one call serves a batch."""
    specification = subject.specification
    if specification.adopted is not None and specification.adopted.vmap is not None:
        return True
    own = specification.own
    return specification.batching is not None or (own is not None and own.vmap)


def rule_place(subject: Subject) -> str:
    """`file:line` of what computes a batch."""
    adopted = subject.specification.adopted
    if adopted is not None and adopted.vmap is not None:
        return where(adopted.vmap)
    return subject.specification.where


def refusal(subject: Subject, error: Exception, *, empty: bool) -> str | None:
    """Why `vmap` is not to be had, where torch or the author says so; None for a fault.

    Args:
        subject: What is under check.
        error: What was raised.
        empty: Whether a tensor has no elements, which not all of torch's own rules bear.
    """
    if isinstance(error, NotImplementedError):
        return first_line(error)
    # The words below are torch's only where torch says them.
    if _inside_own_rule(subject, error) or stated(error):
        return None
    text = str(error)
    if any(words in text for words in _REFUSALS) or (empty and not own_rule(subject)):
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _inside_own_rule(subject: Subject, error: Exception) -> bool:
    """Whether an exception passed through the author's own rule for `vmap`."""
    adopted = subject.specification.adopted
    code = getattr(getattr(adopted, "vmap", None), "__code__", None)
    trace = error.__traceback__
    while trace is not None:
        if code is not None and trace.tb_frame.f_code is code:
            return True
        trace = trace.tb_next
    return False


_REFUSALS = (
    "In order to use an autograd.Function with functorch transforms",
    "does not have vmap support",
    "Batching rule not implemented",
    "vmap: It looks like you're",
    "vmap: inplace",
    "vmap: aten::",
    "accessing the data under vmap transform is not allowed",
    "Cannot access data pointer of Tensor that doesn't have storage",
    "data-dependent control flow",
    "not supported with functorch",
    "not supported under functorch",
    "We do not support",
    "not yet support",
    "in randomness error mode",
    "does not work with functorch",
    "not compatible with functorch",
)
"""What torch says where it has no rule."""
