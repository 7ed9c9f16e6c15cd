"""Types of Function classes and of `adopt`, for type checkers and editors. No program imports them.

An adopted class has the types of its forward. `setup_context` shows whether the first parameter of forward
is the context: torch's own `setup_context` is annotated with `Any`, which fits `NoType`; an author's is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar

from torch.autograd.function import FunctionCtx

from opsmith.adopting.class_samples import Samples
from opsmith.core.specification import Accepting

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class NoType:
    """Type that no value has: only an unannotated (`Any`) type fits it."""


class Untyped(Protocol):
    """A class whose forward has no annotation of its result, and perhaps none of its arguments."""

    @property
    def forward(self) -> Callable[..., NoType]: ...


class WithContext(Protocol[P, R_co]):
    """A class whose forward gets the context first."""

    @property
    def forward(self) -> Callable[Concatenate[FunctionCtx, P], R_co]: ...
    @property
    def setup_context(self) -> Callable[..., NoType]: ...


class ResultTyped(Protocol[R_co]):
    """A class whose forward has a return annotation, but does not show which parameter is the context."""

    @property
    def forward(self) -> Callable[..., R_co]: ...
    @property
    def setup_context(self) -> Callable[..., NoType]: ...


class WithSetup(Protocol[P, R_co]):
    """A class whose forward gets no context."""

    @property
    def forward(self) -> Callable[P, R_co]: ...


class AdoptOptions(TypedDict, total=False):
    """Options of `adopt` that leave all types as they are."""

    samples: Samples
    kind: str | Iterable[str]
    opaque: bool
    deterministic: bool
    accept: Accepting | None
    mutates: str | Iterable[str] | None


class ClassOptions(AdoptOptions, total=False):
    """Options of `adopt` for a class that has type annotations."""

    reference: Callable[..., Any] | None


class SignatureText(ClassOptions, total=False):
    """Options of `adopt`, with a signature that type checkers do not read."""

    signature: str | None
