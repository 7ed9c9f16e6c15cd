"""Three answers to "what is the gradient?" that are not a formula. They are different, and none is silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Zero:
    """The gradient exists and is zero everywhere.

    Example:
        >>> import opsmith
        >>> @opsmith.operator("demo::sign")
        ... def sign(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sign()
        >>> sign.gradients(x=opsmith.zero)
        <opsmith operator demo::sign(Tensor x) -> Tensor>
    """

    def __repr__(self) -> str:
        return "opsmith.zero"


@dataclass(frozen=True, slots=True)
class NonDifferentiable:
    """There is no gradient: the input is treated as a constant, the result as one.

    Example:
        >>> import opsmith
        >>> @opsmith.operator("demo::where_largest", results={"index": opsmith.non_differentiable})
        ... def where_largest(x: torch.Tensor) -> torch.Tensor:
        ...     return x.argmax()
        >>> where_largest(torch.tensor([1.0, 3.0], requires_grad=True)).requires_grad
        False
    """

    def __repr__(self) -> str:
        return "opsmith.non_differentiable"


@dataclass(frozen=True, slots=True)
class NotImplementedGradient:
    """The gradient exists, nobody has written it, and whoever needs it gets an error."""

    reason: str

    def __repr__(self) -> str:
        return f"opsmith.not_implemented({self.reason!r})"


zero = Zero()
non_differentiable = NonDifferentiable()


def not_implemented(reason: str) -> NotImplementedGradient:
    """A gradient that exists and that nobody has written.

    Args:
        reason: Why, and perhaps what to do instead; it stands in the error that a caller gets.

    Example:
        >>> not_implemented("the adjoint solver is missing")
        opsmith.not_implemented('the adjoint solver is missing')
    """
    return NotImplementedGradient(reason)
