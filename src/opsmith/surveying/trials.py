"""Trials of a Function class on guessed arguments; guesses that run become samples for a check."""

from __future__ import annotations

import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from opsmith import errors
from opsmith.adopting.signature import value_names
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.core.location import where
from opsmith.core.origins.function_class import overrides
from opsmith.core.tensors import nested_tensors
from opsmith.surveying.guesses import ClassSource, Guess, guesses, unguessable

SECONDS = 10.0
"""Time limit in seconds for the guesses of one class."""

TRIES = 400
"""Maximum number of guesses that are tried."""

TOO_FEW = "incorrect number of gradients"
NO_TENSOR = "it returns no tensor"

ENOUGH = 8
"""Number of guesses that must end in the same error before the class is blamed for it."""


@dataclass(frozen=True)
class Stop:
    """An exception that ended a run.

    Args:
        method: `forward` or `backward`.
        error: The exception.
        guess: The arguments.
    """

    method: str
    error: Exception | SystemExit
    guess: Guess

    @property
    def text(self) -> str:
        """The error in one line."""
        message = str(self.error).strip()
        return f"{type(self.error).__name__}: {message.splitlines()[0] if message else 'without a message'}"

    @property
    def fault(self) -> str:
        """The error as the end of a sentence whose subject is the method."""
        return "returns no tensor" if str(self.error) == NO_TENSOR else f"raises {self.text}"

    @property
    def is_mistake(self) -> bool:
        """True if the class fails for any arguments: a name is not defined, or a gradient is missing."""
        text = str(self.error)
        return (
            isinstance(self.error, NameError | ImportError)
            or self.is_left_out
            or text == NO_TENSOR
            or (isinstance(self.error, AttributeError) and "Backward' object" in text)
            or TOO_FEW in text
            or "You must implement" in text
        )

    @property
    def missing_attribute(self) -> str | None:
        """The missing attribute of a tensor, if this ended the run."""
        found = re.search(r"'Tensor' object has no attribute '(\w+)'", str(self.error))
        return found[1] if found is not None and isinstance(self.error, AttributeError) else None

    @property
    def is_left_out(self) -> bool:
        """True if the backward is declared as not implemented."""
        return isinstance(self.error, NotImplementedError) and self.method == "backward"

    def where(self, file: str) -> str | None:
        """Return the last line of this file in the traceback of the error."""
        frames = traceback.extract_tb(self.error.__traceback__)
        own = [frame for frame in frames if frame.filename == file]
        return f"{file}:{own[-1].lineno}" if own else None


@dataclass(frozen=True)
class Trials:
    """Results of all trials.

    Args:
        ran: Guesses on which forward and backward ran, with distinct shapes. Guesses that have no gradient
            are included only if all have none. stops: Errors of the remaining guesses.
        tried: Number of guesses.
        asked: Attributes that an argument may have if it is not a tensor.
    """

    ran: tuple[Guess, ...]
    stops: tuple[Stop, ...]
    tried: int
    asked: Collection[str] = ()

    @property
    def nearest(self) -> Stop | None:
        """The error of the run that came furthest."""
        return max(self.stops, key=lambda stop: stop.method == "backward", default=None)

    @property
    def mistake(self) -> Stop | None:
        """An error that the class itself causes: an unmistakable error, or the same error for all guesses."""
        # An error before the backward is caused by the guess if a different guess reached the backward.
        reached = [stop for stop in self.stops if stop.method == "backward"]
        clear = [
            stop
            for stop in reached or self.stops
            if stop.is_mistake or stop.missing_attribute not in (None, *self.asked)
        ]
        if clear:
            return clear[0]
        same = len({stop.text for stop in self.stops}) == 1 and self.tried >= ENOUGH
        return self.stops[0] if same else None


def run_guesses(source: ClassSource, seed: int, seconds: float, wanted: int = 1) -> Trials:
    """Run a class on guesses until enough of them run.

    Args:
        source: The class.
        seed: Seed of the numbers.
        seconds: Time after which no further guess is tried.
        wanted: Number of guesses of different shapes to find.
    """
    end = time.perf_counter() + seconds
    ran: dict[Any, Guess] = {}
    without: dict[Any, Guess] = {}
    stops: list[Stop] = []
    count = 0
    for variants in guesses(source, seed):
        for guess in variants:
            count += 1
            found = run(source.function_class, guess, seed)
            if isinstance(found, Stop) and TOO_FEW in found.text and source.defaulted:
                # A call that leaves defaults out needs fewer gradients; an operator accepts both numbers.
                shorter = Guess(guess.values[: -source.defaulted])
                found = (
                    found if isinstance(again := run(source.function_class, shorter, seed), Stop) else again
                )
            if isinstance(found, Stop):
                stops.append(found)
            elif found != "not finite":
                (ran if found == "gradients" else without).setdefault(guess.shapes(), guess)
                break
            if count >= TRIES or time.perf_counter() > end:
                break
        late = bool(stops) and stops[-1].method == "backward" and stops[-1].is_mistake
        if len(ran) >= wanted or late or count >= TRIES or time.perf_counter() > end:
            break
    # If a backward was reached and raised, calls without a backward prove nothing.
    reached = any(stop.method == "backward" for stop in stops)
    chosen = (ran or ({} if reached else without)).values()
    return Trials(tuple(chosen), tuple(stops), count, source.asked)


RunResult = Literal["gradients", "no gradient", "not finite"]


def run(function_class: type[torch.autograd.Function], guess: Guess, seed: int) -> Stop | RunResult:
    """Run forward and backward, and classify the result, or return the error."""
    apply: Callable[..., Any] = function_class.apply
    with seeded(seed):
        method = "forward"
        try:
            inputs, given = fresh_inputs(guess.values)
            results = list(nested_tensors(apply(*given)))
            if not results:
                return Stop(method, TypeError(NO_TENSOR), guess)
            differentiable = [result for result in results if result.requires_grad]
            gradients: tuple[Tensor | None, ...] = ()
            if not has_backward(function_class):
                return "gradients"
            if differentiable:
                method = "backward"
                grads = [torch.randn_like(result) for result in differentiable]
                gradients = torch.autograd.grad(differentiable, inputs, grads, allow_unused=True)
        except (Exception, SystemExit) as error:
            return Stop(method, error, guess)
    if not all(bool(each.isfinite().all()) for each in [*results, *gradients] if each is not None):
        return "not finite"
    return "gradients" if any(each is not None for each in gradients) else "no gradient"


def has_backward(function_class: type) -> bool:
    """Return True if a class has a backward, under one of its two names."""
    return overrides(function_class, "backward") or overrides(function_class, "vjp")


def fresh_inputs(values: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """Return leaf tensors, and argument values made from them that may be modified in place."""
    inputs: list[Tensor] = []
    given: list[Any] = []
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs.append(value.detach().clone().requires_grad_())
            given.append(inputs[-1].clone())
        else:
            given.append(value.clone() if isinstance(value, Tensor) else value)
    return inputs, given


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch and turn off warnings in a region."""
    with torch.random.fork_rng(), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class GuessedSamples:
    """Guessed arguments on which forward and backward ran.

    Args:
        samples: Tuples of arguments, as `apply` takes them.
        words: Their description: `x [3, 4], slope=0.5`.
    """

    samples: list[tuple[Any, ...]]
    words: str


def guessed_samples(
    function_class: type[torch.autograd.Function],
    *,
    name: str,
    hint: str,
    seed: int = 0,
) -> GuessedSamples:
    """Guess arguments of a class from its source, and try them.

    Args:
        function_class: The class.
        name: Its name in its module.
        hint: Hint of the error.
        seed: Seed of the numbers.

    Raises:
        MissingSamplesError: If no guess ran.

    Example:
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, factor=2.0):
        ...         ctx.factor = factor
        ...         return x * factor
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * ctx.factor, None
        >>> guessed_samples(Scale, name="Scale", hint="").words
        'x [3, 4], factor=2.0 and x [2, 5], factor=3.25'
    """
    if not overrides(function_class, "forward"):
        problem = "it has no `forward`, so there is nothing to check"
        raise _missing(name, None, problem, "check a class that derives from it")
    location = where(function_class.forward)
    source = ClassSource.of(function_class, name)
    unknown = unguessable(source)
    if unknown:
        listed = " and ".join(f"`{each}`" for each in unknown)
        problem = f"there are no samples to check it on, and the values of {listed} cannot be guessed"
        raise _missing(name, location, problem, hint)
    with thread_count(1):
        trials = run_guesses(source, seed, SECONDS)
        if not trials.ran:
            stop = trials.mistake or trials.nearest
            end = f"; the call that came furthest ended in {stop.text}" if stop else ""
            problem = (
                f"there are no samples to check it on, and none of {trials.tried} guessed calls ran{end}"
            )
            raise _missing(name, location, problem, hint)
        chosen = [trials.ran[0]]
        varied = _with_other_numbers(chosen[0])
        for other in (_with_other_sizes(varied or chosen[0]), varied):
            if other is not None and run(function_class, other, seed) == "gradients":
                chosen.append(other)
                break
    names = value_names(source.function_class, len(chosen[0].values))
    return GuessedSamples(
        [guess.values for guess in chosen], " and ".join(guess.named(names) for guess in chosen)
    )


def _with_other_numbers(guess: Guess) -> Guess | None:
    """Change the plain numbers of a guess: a factor of 1 hides that a gradient lacks the factor."""
    values = tuple(1.5 * each + 0.25 if type(each) is float else each for each in guess.values)
    return Guess(values, guess.positive) if values != guess.values else None


def _with_other_sizes(guess: Guess) -> Guess | None:
    """Change even sizes of a guess to odd sizes: an even size hides an error in the element without a pair.

    Equal sizes stay equal, and the plain numbers stay the same.
    """
    if not any(isinstance(each, torch.Tensor) and each.dim() for each in guess.values):
        return None
    return Guess(tuple(map(_resized, guess.values)), guess.positive)


def _resized(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    shape = [OTHER_SIZES.get(size, size) for size in value.shape]
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(max(count, value.numel()), generator=generator)[:count]
    return value.flatten()[order % value.numel()].view(shape)


OTHER_SIZES = {3: 2, 4: 5}
"""Replacements of the sizes of a guess."""


def _missing(name: str, location: str | None, problem: str, hint: str) -> errors.MissingSamplesError:
    return errors.MissingSamplesError(problem, operator=name, where=location, hint=hint)
