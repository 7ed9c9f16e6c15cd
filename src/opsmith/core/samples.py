"""Representative inputs of an operator: what check, benchmark, export and pages run it on."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import CallArguments, Fault, call_fault, shown
from opsmith.core.location import where
from opsmith.core.schema import Schema

if TYPE_CHECKING:
    from opsmith.core.specification import Specification


@dataclass(frozen=True)
class Make:
    """Makes random tensors for samples, all from one seed.

    Args:
        dtype: dtype of floating tensors.
        device: Where tensors are made.
        generator: Source of randomness, on the CPU, so that every device gets the same numbers.

    Example:
        >>> make = Make(torch.float64)
        >>> make(2, 3).shape, make.integers(4, high=10).dtype
        (torch.Size([2, 3]), torch.int64)
    """

    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __call__(self, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
        """Uniform numbers in [low, high) of this shape."""
        real = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        if self.dtype.is_complex:
            imaginary = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
            return torch.complex(real, imaginary).to(self.device, self.dtype)
        return real.to(self.device, self.dtype)

    def integers(self, *shape: int, low: int = 0, high: int = 10) -> torch.Tensor:
        """Whole numbers in [low, high) of this shape, int64.

        Example:
            >>> Make().integers(3, low=5, high=6)
            tensor([5, 5, 5])
        """
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def call(self, *args: Any, **kwargs: Any) -> CallArguments:
        """A call with keyword arguments; a plain tuple serves for a call without.

        Example:
            >>> Make().call(2.0, stride=1)
            Call(args=(2.0,), kwargs={'stride': 1})
        """
        return CallArguments(args, kwargs)


Samples = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class LocatedSamples:
    """A function of samples that stands for the author's own, in messages too.

    Args:
        function: Gives the samples.
        place: Where the author gave them.
    """

    function: Callable[[Make], Iterable[Any]]
    place: str

    def __call__(self, make: Make) -> Iterable[Any]:
        return self.function(make)


def location_of(samples: Any, otherwise: str) -> str:
    """Where samples were written: `file:line` of a function, else what the caller knows."""
    if isinstance(samples, LocatedSamples):
        return samples.place
    return where(samples) if callable(samples) else otherwise


def read_samples(source: Any, make: Make, operator: str | None, place: str) -> list[Any]:
    """The samples one by one, from a list of them or a function that gives one; no sample is looked into.

    Args:
        source: The list, or the function, of `make` or of nothing.
        make: What makes tensors.
        operator: The operator's name, in messages.
        place: Where a list was given; a function tells its own place.

    Raises:
        SampleError: If the function raises, or what it gives is no list.

    Example:
        >>> read_samples(lambda: [(1.0,)], Make(), "demo::twice", "")
        [(1.0,)]
    """
    place = location_of(source, place)
    try:
        given = _called(source, make) if callable(source) else source
        if isinstance(given, Iterable) and not isinstance(given, _ONE):
            return list(given)
    except errors.SampleError:
        raise
    except (Exception, SystemExit) as error:
        raise errors.SampleError(
            f"its samples cannot be made: {type(error).__name__}: {error}".rstrip(": "),
            operator=operator,
            where=_last_line(error, place),
            hint="let the function return a list of tuples of arguments, such as `[(x, weight)]`",
        ) from error
    raise errors.SampleError(
        "its samples are no list of calls",
        operator=operator,
        expected="a list of tuples of arguments, or a function of `make` or of nothing that gives one",
        got=shown(given),
        where=place,
        hint="give a list, a tuple for each call: `[(x, weight)]`, or `[(x,)]` where it takes one argument",
    )


_ONE = (str, bytes, Mapping, Set, torch.Tensor)
"""What can be gone through, and is no list of calls."""


def _called(function: Samples, make: Make) -> Any:
    """What a function of samples gives: it may leave out its parameter `make`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin that does not say
        return function()
    wanted = any(
        each.name == "make" or (each.default is each.empty and each.kind in _BY_POSITION)
        for each in parameters
    )
    return function(make) if wanted else function()


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _last_line(error: BaseException, place: str) -> str:
    """The last line of the file in which the samples are made, that an exception passed through."""
    file = place.rpartition(":")[0]
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
    return f"{file}:{frames[-1].lineno}" if frames else place


def missing_list_hint(source: Any, fits: Callable[[Sequence[Any]], bool]) -> str:
    """A remark for the hint where the samples look like the arguments of one call; else empty.

    Args:
        source: What was given for samples.
        fits: Whether it takes these arguments.
    """
    alone = isinstance(source, tuple | list) and not all(
        isinstance(item, tuple | list | CallArguments) for item in source
    )
    if not (alone and fits(source)):
        return ""
    return "these look like the arguments of one call: put them into a list, `[(x, weight)]`; or "


def as_call(
    sample: Any, schema: Schema, operator: str, place: str, position: int = 0, remark: str = ""
) -> CallArguments:
    """One sample as a call, checked against the signature.

    Args:
        sample: A tuple of arguments, a call, or one tensor.
        schema: The signature.
        operator: The operator's name, in messages.
        place: Where the samples were given.
        position: Which of the samples it is.
        remark: What the hint begins with.

    Raises:
        SampleError: If it is neither a tuple nor a call, or does not fit the operator's arguments.
    """
    if isinstance(sample, torch.Tensor):
        sample = (sample,)
    if isinstance(sample, tuple | list):
        sample = CallArguments(tuple(sample))
    if not isinstance(sample, CallArguments):
        raise not_a_sample(sample, operator, place, position, remark)
    fault = call_fault(sample.args, sample.kwargs, schema)
    if fault is not None:
        raise errors.SampleError(
            f"sample {position} does not fit the signature: {fault[0]}",
            operator=operator,
            argument=fault[1],
            expected=fault[2],
            got=fault[3],
            where=place,
            hint=remark + _mend(fault),
        )
    return sample


def _mend(fault: Fault) -> str:
    """What to do about an argument that does not fit."""
    expected, got = fault[2] or "", fault[3] or ""
    if expected.startswith("object") and "Tensor" in got:
        return (
            "annotate it where it is taken, `xs: list[Tensor]`; or take the tensors one by one, or as `*xs`"
        )
    return "yield the arguments as a call of the operator would give them"


def not_a_sample(
    sample: Any, operator: str, place: str, position: int, remark: str = ""
) -> errors.SampleError:
    """The error for a sample that is neither a tuple of arguments nor a call."""
    return errors.SampleError(
        f"sample {position} is neither a tuple of arguments nor `make.call(...)`",
        operator=operator,
        got=shown(sample),
        where=place,
        hint=f"{remark}yield `(x, weight)` or `make.call(x, weight, stride=2)`",
    )


def samples_of(
    source: Any, make: Make, schema: Schema, operator: str, place: str = ""
) -> list[CallArguments]:
    """Every sample of a list, or that a `samples` function yields, as a call that fits the signature.

    Args:
        source: As of `listed`.
        make: What makes tensors.
        schema: The signature.
        operator: The operator's name, in messages.
        place: Where a list was given.

    Raises:
        SampleError: If it is no list of samples, or one of them does not fit.
    """
    given = read_samples(source, make, operator, place)
    place = location_of(source, place)
    remark = missing_list_hint(source, lambda args: call_fault(tuple(args), {}, schema) is None)
    return [as_call(each, schema, operator, place, position, remark) for position, each in enumerate(given)]


def first_call(specification: Specification, use: str, otherwise: str = "") -> CallArguments:
    """The first sample of an operator, with floating tensors of float32.

    Args:
        specification: The specification of the operator.
        use: The use of the call, for the message: `drawn`, `exported`.
        otherwise: An alternative to samples, for the hint.

    Raises:
        MissingSamplesError: If there is none.
        SampleError: If it does not fit the signature.
    """
    source = specification.samples
    make = Make(torch.float32)
    calls = [] if source is None else samples_of(source, make, specification.schema, specification.name)
    if not calls:
        lack = "has none" if source is None else "its samples are empty"
        raise errors.MissingSamplesError(
            f"it is {use} as its first sample calls it, and {lack}",
            operator=specification.name,
            where=specification.where,
            hint=f"write `@{specification.short_name}.samples` over a function of `make` that yields tuples "
            f"of arguments{otherwise}",
        )
    return calls[0]
