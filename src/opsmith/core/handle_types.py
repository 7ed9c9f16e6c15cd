"""Types of handles and of declarations, for type checkers and editors. No program imports them.

A handle has the types of its calls. The reference and the functional form have different types if results are
hidden, or if arguments are written into. Such handles have a class of their own here; at run time their class
is `Operator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, TypeVarTuple, overload

from torch import Tensor

from opsmith.core.operator import Operator
from opsmith.core.results import ResultNames
from opsmith.core.specification import Accepting, Autocast

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
H = TypeVar("H")
H2 = TypeVar("H2")
H3 = TypeVar("H3")
More = TypeVarTuple("More")
Returned = TypeVar("Returned")


class WritingOperator(Operator[P, R]):
    """An operator that writes into arguments: its functional form returns their new values, too."""

    @property
    def functional(self) -> Operator[P, Any]:
        """The operator that writes into no argument."""
        raise NotImplementedError


class HidingOperator(WritingOperator[P, R], Generic[P, R, Returned]):
    """An operator with hidden results, which its reference returns, but its calls do not."""

    @property
    def reference(self) -> Callable[P, Returned]:  # type: ignore[override]  # it returns more than a call
        """The function that the operator was declared with."""
        raise NotImplementedError


class CommonOptions(TypedDict, total=False):
    """Options of `operator` that leave all types as they are."""

    opaque: bool
    random: bool
    deterministic: bool
    autocast: Autocast
    inline: bool | None
    shapes: str | None
    batching: str | None
    accept: Accepting | None
    returns: str | None


class NamedOptions(CommonOptions, total=False):
    """Options of `operator` that leave the type of its result as it is."""

    results: ResultNames


class WritingOptions(CommonOptions, total=False):
    """Options of `operator` for hidden results, which come last, in the order of their names."""

    mutates: Iterable[str]


class HidesOne(Protocol):
    """The decorator of a reference whose last result is hidden."""

    @overload
    def __call__(self, reference: Callable[P, tuple[A, H]], /) -> HidingOperator[P, A, tuple[A, H]]: ...
    @overload
    def __call__(
        self, reference: Callable[P, tuple[A, B, *More, H]], /
    ) -> HidingOperator[P, tuple[A, B, *More], tuple[A, B, *More, H]]: ...


class HidesTwo(Protocol):
    """The decorator of a reference whose last two results are hidden."""

    @overload
    def __call__(
        self, reference: Callable[P, tuple[A, H, H2]], /
    ) -> HidingOperator[P, A, tuple[A, H, H2]]: ...
    @overload
    def __call__(
        self, reference: Callable[P, tuple[A, B, *More, H, H2]], /
    ) -> HidingOperator[P, tuple[A, B, *More], tuple[A, B, *More, H, H2]]: ...


class HidesThree(Protocol):
    """The decorator of a reference whose last three results are hidden."""

    @overload
    def __call__(
        self, reference: Callable[P, tuple[A, H, H2, H3]], /
    ) -> HidingOperator[P, A, tuple[A, H, H2, H3]]: ...
    @overload
    def __call__(
        self, reference: Callable[P, tuple[A, B, *More, H, H2, H3]], /
    ) -> HidingOperator[P, tuple[A, B, *More], tuple[A, B, *More, H, H2, H3]]: ...


_Two = tuple[Tensor, Tensor]
_Three = tuple[Tensor, Tensor, Tensor]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


class HidesOneTensor(Protocol):
    """The decorator of a reference that returns tensors; `results=` may hide one of them."""

    @overload
    def __call__(self, reference: Callable[P, _Two], /) -> HidingOperator[P, Tensor, _Two]: ...
    @overload
    def __call__(self, reference: Callable[P, _Three], /) -> HidingOperator[P, _Two, _Three]: ...
    @overload
    def __call__(self, reference: Callable[P, _Four], /) -> HidingOperator[P, _Three, _Four]: ...
    @overload
    def __call__(self, reference: Callable[P, R], /) -> HidingOperator[P, Any, R]: ...


class HidesTwoTensors(Protocol):
    """The decorator of a reference that returns tensors, any two of which `results=` may make hidden."""

    @overload
    def __call__(self, reference: Callable[P, _Three], /) -> HidingOperator[P, Tensor, _Three]: ...
    @overload
    def __call__(self, reference: Callable[P, _Four], /) -> HidingOperator[P, _Two, _Four]: ...
    @overload
    def __call__(self, reference: Callable[P, R], /) -> HidingOperator[P, Any, R]: ...


class Hides(Protocol):
    """The decorator of a reference with an unknown number of hidden results."""

    def __call__(self, reference: Callable[P, R], /) -> HidingOperator[P, Any, R]: ...
