"""A Function as it would be adopted: with what its author would have to say, tried by check."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.adopting.functions import adopt_function
from opsmith.checking import Report, check
from opsmith.checking.effort import EFFORTS
from opsmith.checking.subject_kinds import throwaway_name
from opsmith.core.calls import Call
from opsmith.core.operator import Operator
from opsmith.surveying.guessing import Guess
from opsmith.surveying.reading import Reading
from opsmith.surveying.trying import seeded

NAMESPACE = "surveyed"

TRACED = "opcheck"
"""The property that traces an operator once."""


ON_THE_GUESS = replace(EFFORTS["quick"], variations=0)
"""Little effort, and no other inputs: what is guessed may well be all that a class is meant to take."""


@dataclass
class Draft:
    """A class, arguments that it takes, and what is said of it.

    Args:
        reading: The class.
        guess: Arguments on which it runs.
        seed: Seed of the check.
        signature: What `signature=` says, if anything.
        kinds: What `kind=` says, if anything.
        opaque: Whether `opaque=True` is said.
        by_samples: Whether `samples=` is said, since no signature can.
    """

    reading: Reading
    guess: Guess
    seed: int
    signature: str | None = None
    kinds: list[str] = field(default_factory=list)
    opaque: bool = False
    by_samples: bool = False

    @property
    def names(self) -> list[str]:
        """A name for each argument of the guess."""
        return argument_names(self.reading, len(self.guess.values))

    def options(self) -> dict[str, str]:
        """What is said, as code."""
        said: dict[str, str] = {}
        if self.signature is not None:
            said["signature"] = f'"{self.signature}"'
        if self.kinds:
            words = [f'"{kind}"' for kind in self.kinds]
            said["kind"] = words[0] if len(words) == 1 else f"({', '.join(words)})"
        if self.opaque:
            said["opaque"] = "True"
        if self.by_samples:
            said["samples"] = f"lambda: [({self.guess.code()})]"
        return said

    def operator(self) -> Operator[..., Any]:
        """Adopt the class under a name of the survey's own."""
        return adopt_function(
            self.reading.function_class,
            throwaway_name(NAMESPACE, self.reading.function_class),
            reference=None,
            samples=(lambda: [self.guess.values]) if self.by_samples else None,
            signature=self.signature,
            kind=self.kinds or "true",
            opaque=self.opaque,
            module=__name__,
        )

    def typed(self) -> Operator[..., Any]:
        """Adopt the class, with the words about its types that it cannot do without."""
        attempts: list[Callable[[], None]] = [lambda: None, self._say_signature, self._say_samples]
        for last, say in enumerate(attempts, start=1 - len(attempts)):
            say()
            try:
                operator = self.operator()
                with seeded(self.seed):
                    operator(*self.given(operator))
            except (errors.MissingAnnotationError, errors.ArgumentError, errors.ResultTypeError):
                if not last:
                    raise
            except (errors.ResultCountError, errors.UsageError, errors.UnsupportedTypeError):
                if not last:
                    raise
            else:
                return operator
        raise AssertionError("the last attempt returns or raises")

    def given(self, operator: Operator[..., Any]) -> list[Any]:
        """The arguments as the operator takes them."""
        adopted = operator.specification.adopted
        assert adopted is not None
        copies = [value.clone() if isinstance(value, Tensor) else value for value in self.guess.values]
        return adopted.packed(copies)

    def check(self, operator: Operator[..., Any]) -> Report:
        """Check it on the guess: with little effort, and traced once, which a quick check leaves out."""
        samples = [Call(tuple(self.given(operator)))]
        # Of positive numbers it is asked whether these alone are meant: special ones are of every sign.
        skip = ["values"] if self.guess.positive else None
        report = check(operator, samples=samples, seed=self.seed, effort=ON_THE_GUESS, skip=skip)
        looked = {outcome.property for outcome in report.outcomes if outcome.status != "skipped"}
        if TRACED not in looked:
            return report
        traced = check(operator, samples=samples, seed=self.seed, only=[TRACED])
        instead = {outcome.property: outcome for outcome in traced.outcomes if not outcome.left_out}
        outcomes = tuple(instead.get(outcome.property, outcome) for outcome in report.outcomes)
        return replace(report, outcomes=outcomes)

    def _say_signature(self) -> None:
        words = signature_text(self.reading, self.guess, self._returned())
        self.signature = words

    def _say_samples(self) -> None:
        self.signature, self.by_samples = None, True

    def _returned(self) -> Any:
        apply: Callable[..., Any] = self.reading.function_class.apply
        with seeded(self.seed), torch.no_grad():
            return apply(*(v.clone() if isinstance(v, Tensor) else v for v in self.guess.values))


def signature_text(reading: Reading, guess: Guess, returned: Any) -> str:
    """A signature in Python's notation that fits a guess and what was returned for it."""
    parts = []
    for place, parameter in enumerate(reading.parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            parts.append(f"*{parameter.name}: Tensor")
            continue
        value, default = guess.values[place], parameter.default
        kind = "Tensor | None" if default is None and isinstance(value, Tensor) else _kind(value)
        ending = "" if default is parameter.empty else f" = {default!r}"
        parts.append(f"{parameter.name}: {kind}{ending}")
    return f"({', '.join(parts)}) -> {_result(returned)}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "Tensor"
    if isinstance(value, tuple | list) and value:
        inner = _kind(value[0])
        return f"tuple[{inner}, ...]" if isinstance(value, tuple) else f"list[{inner}]"
    if value is None:
        return "Tensor | None"
    return type(value).__name__ if type(value) in (int, float, bool, str, complex) else "object"


def _result(returned: Any) -> str:
    if isinstance(returned, tuple | list):
        return f"tuple[{', '.join(map(_result, returned))}]"
    return "None" if returned is None else "Tensor"


def argument_names(reading: Reading, count: int) -> list[str]:
    """A name for each of so many arguments; those in `*args` by number."""
    fixed = [parameter.name for parameter in reading.parameters if parameter is not reading.variadic]
    rest = reading.variadic
    return fixed + [f"{rest.name}[{i}]" for i in range(count - len(fixed))] if rest is not None else fixed
