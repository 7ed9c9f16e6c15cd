"""Formulas for gradients and tangents, and the three values that replace a formula."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opsmith import errors
from opsmith.core.cached_property import cached_property
from opsmith.core.location import where


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
    """There is no gradient: the input, or the result, is treated as a constant.

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
    """The gradient exists but is not implemented: using it raises an error."""

    reason: str

    def __repr__(self) -> str:
        return f"opsmith.not_implemented({self.reason!r})"


zero = Zero()
non_differentiable = NonDifferentiable()


def not_implemented(reason: str) -> NotImplementedGradient:
    """Declare that a gradient exists, but is not implemented.

    Args:
        reason: The reason, and perhaps an alternative, for the error message.

    Example:
        >>> not_implemented("the adjoint solver is missing")
        opsmith.not_implemented('the adjoint solver is missing')
    """
    return NotImplementedGradient(reason)


@dataclass(frozen=True)
class Formula:
    """A function that computes one gradient or tangent; a joint formula returns a dict by name.

    Args:
        function: The function.
        answers_for: The inputs whose gradients, or the results whose tangents, it computes.
        keywords: Its parameters, as written.
        parameters: The meaning of each parameter: the name of an input, a result, a gradient or a tangent.
        joint: True if it computes several at once.
    """

    function: Callable[..., Any]
    answers_for: tuple[str, ...]
    keywords: tuple[str, ...]
    parameters: tuple[str, ...]
    joint: bool = False

    @cached_property
    def where(self) -> str:
        """`file:line` of the formula."""
        return where(self.function)


@dataclass(frozen=True)
class FormulaNames:
    """Names that the parameters of an operator's formulas may have.

    Args:
        names: The names, in the order in which messages list them.
        also: Further names, which messages leave out.
        kinds: Description of the names, for messages.
        hint: Returns the hint for any other name.
        aliases: The full name for each short name.
    """

    names: Sequence[str]
    also: Collection[str]
    kinds: str
    hint: Callable[[str], str]
    aliases: Mapping[str, str]

    def formula(
        self, function: Callable[..., Any], answers_for: tuple[str, ...], what: str, *, joint: bool = False
    ) -> Formula:
        """Return a function as a formula, with the arguments and errors of `keywords_of`."""
        keywords = self.keywords_of(function, what)
        parameters = tuple(self.aliases.get(name, name) for name in keywords)
        return Formula(function, answers_for, keywords, parameters, joint)

    def keywords_of(self, function: Callable[..., Any], what: str) -> tuple[str, ...]:
        """Return the names of a formula's parameters.

        Args:
            function: The formula.
            what: Description of the formula, for messages.

        Raises:
            FormulaError: If it is not a function of named parameters.
            FormulaParameterError: If a parameter has another name.
        """
        location = where(function)
        try:
            parameters = inspect.signature(function).parameters
        except ValueError as error:
            raise errors.FormulaError(
                f"the signature of {what} cannot be read",
                expected=f"parameters from {listed(self.names)}",
                got=location,
                hint="write a function around it: `lambda grad: ...`",
            ) from error
        for name, parameter in parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise errors.FormulaError(
                    f"{what} takes `{parameter}`, but its parameters must be names of single values",
                    expected=f"parameters from {listed(self.names)}",
                    where=location,
                    hint="write one parameter for each value that the formula uses",
                )
            if parameter.default is not parameter.empty:
                raise errors.FormulaError(
                    f"{what} gives its parameter `{name}` a default, but formulas get values by name",
                    argument=name,
                    where=location,
                    hint="close over the value: write the formula inside a function that has the value",
                )
            if name not in self.names and name not in self.also:
                raise errors.FormulaParameterError(
                    f"{what} names `{name}`, which is not an {self.kinds}",
                    argument=name,
                    expected=f"one of {listed(self.names)}",
                    where=location,
                    hint=self.hint(name) or _nearest(name, self.names),
                )
        return tuple(parameters)


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{close[0]}`?" if close else "use one of the expected names"


def listed(names: Sequence[str]) -> str:
    """Return names as a list for a message."""
    return ", ".join(f"`{name}`" for name in names)
