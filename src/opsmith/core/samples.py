"""Samples: representative inputs of an operator, for checks, benchmarks, exports and pages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.core.argument_types import OBJECT
from opsmith.core.call_arguments import CallArguments, call_error, shown
from opsmith.core.location import innermost, where
from opsmith.core.lowering import holds_tensor
from opsmith.core.schema import Schema
from opsmith.display import short_repr

if TYPE_CHECKING:
    from opsmith.core.specification import Specification


@dataclass(frozen=True)
class Make:
    """Factory of random tensors for samples, all from one seed.

    Args:
        dtype: dtype of floating tensors.
        device: Device of the tensors.
        generator: Source of randomness, on the CPU, so that every device gets the same numbers.

    Example:
        >>> make = Make(torch.float64)
        >>> make(2, 3).shape, make.integers(4, high=10).dtype
        (torch.Size([2, 3]), torch.int64)
    """

    __repr__ = short_repr

    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __call__(self, *shape: int | Sequence[int], low: float = -2.0, high: float = 2.0) -> torch.Tensor:
        """Return a tensor of this shape, uniform in [low, high); it may be a tuple, as for `torch.rand`."""
        shape = _flat(shape)
        real = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        if self.dtype.is_complex:
            imaginary = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
            return torch.complex(real, imaginary).to(self.device, self.dtype)
        return real.to(self.device, self.dtype)

    def integers(self, *shape: int | Sequence[int], low: int = 0, high: int = 10) -> torch.Tensor:
        """Return an int64 tensor of this shape, uniform in [low, high); the shape may be a tuple.

        Example:
            >>> Make().integers(3, low=5, high=6)
            tensor([5, 5, 5])
        """
        return torch.randint(low, high, _flat(shape), generator=self.generator).to(self.device)

    def call(self, *args: Any, **kwargs: Any) -> CallArguments:
        """Return a call with keyword arguments; for a call without keywords, a plain tuple is enough.

        Example:
            >>> Make().call(2.0, stride=1)
            CallArguments(args=(2.0,), kwargs={'stride': 1})
        """
        return CallArguments(args, kwargs)


def _flat(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape


Samples = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class LocatedSamples:
    """A function that wraps the author's function of samples, and has the author's location.

    Args:
        function: Returns the samples.
        location: `file:line` of the author's samples.
    """

    function: Callable[[Make], Iterable[Any]]
    location: str

    def __call__(self, make: Make) -> Iterable[Any]:
        return self.function(make)


def location_of(samples: Any, otherwise: str) -> str:
    """Return `file:line` of a function of samples, else the default."""
    if isinstance(samples, LocatedSamples):
        return samples.location
    return where(samples) if callable(samples) else otherwise


def read_samples(source: Any, make: Make, operator: str | None, location: str) -> list[Any]:
    """Return the samples of a list, or of a function that returns a list, without reading them.

    Args:
        source: The list, or the function, which may take `make`.
        make: Maker of tensors.
        operator: The operator's name, in messages.
        location: `file:line` of a list.

    Raises:
        SampleError: If the function raises, or does not return a list.

    Example:
        >>> read_samples(lambda: [(1.0,)], Make(), "demo::twice", "")
        [(1.0,)]
    """
    location = location_of(source, location)
    try:
        given = _called(source, make) if callable(source) else source
        if isinstance(given, Iterable) and not isinstance(given, _ONE):
            return list(given)
    except errors.SampleError:
        raise
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]  # torch adds its own stack to some errors
        raise errors.SampleError(
            f"its samples cannot be made: {type(error).__name__}: {first}".rstrip(": "),
            operator=operator,
            where=innermost(error, location),
            hint="let the function return a list of tuples of arguments, such as `[(x, weight)]`",
        ) from error
    raise errors.SampleError(
        "its samples are not a list of calls",
        operator=operator,
        expected="a list of tuples of arguments, or a function that returns the list and may take `make`",
        got=shown(given),
        where=location,
        hint="give a list with a tuple for each call: `[(x, weight)]`, or `[(x,)]` for a single argument",
    )


_ONE = (str, bytes, Mapping, Set, torch.Tensor)
"""Iterables that are not lists of samples."""


def _called(function: Samples, make: Make) -> Any:
    """Call a function of samples, which may leave out its parameter `make`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return function()
    wanted = any(
        each.name == "make" or (each.default is each.empty and each.kind in _BY_POSITION)
        for each in parameters
    )
    return function(make) if wanted else function()


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def missing_list_hint(source: Any, fits: Callable[[Sequence[Any]], bool]) -> str:
    """Return the start of a hint if the samples look like the arguments of one call, else an empty string.

    Args:
        source: The samples as given.
        fits: Returns True if an operator takes these arguments.
    """
    alone = isinstance(source, tuple | list) and not all(
        isinstance(item, tuple | list | CallArguments) for item in source
    )
    if not (alone and fits(source)):
        return ""
    return "these look like the arguments of one call: put them into a list, `[(x, weight)]`; or "


def as_call(
    sample: Any, schema: Schema, operator: str, location: str, position: int = 0, remark: str = ""
) -> CallArguments:
    """Return a sample as a call, checked against the signature.

    Args:
        sample: A tuple of arguments, a call, or one tensor.
        schema: The signature.
        operator: The operator's name, in messages.
        location: `file:line` of the samples.
        position: Its index among the samples.
        remark: Beginning of the hint.

    Raises:
        SampleError: If it is not a tuple or a call, or does not fit the operator's arguments.
    """
    if isinstance(sample, torch.Tensor):
        sample = (sample,)
    if isinstance(sample, tuple | list):
        sample = CallArguments(tuple(sample))
    if not isinstance(sample, CallArguments):
        raise not_a_sample(sample, operator, location, position, remark)
    fault = call_error(sample.args, sample.kwargs, schema)
    if fault is not None:
        raise errors.SampleError(
            f"sample {position} does not fit the signature: {fault.problem}",
            operator=operator,
            argument=fault.argument,
            expected=fault.expected,
            got=fault.got,
            where=location,
            hint=remark + _hint(fault.argument or "", sample, schema),
        )
    return sample


def _hint(name: str, sample: CallArguments, schema: Schema) -> str:
    argument = schema.by_name.get(name)
    value = {**dict(zip(schema.names, sample.args, strict=False)), **sample.kwargs}.get(name)
    if argument is not None and argument.kind.base is OBJECT and holds_tensor(value):
        return "annotate the parameter, `xs: list[Tensor]`; or take the tensors one by one, or as `*xs`"
    return "yield the arguments of one call of the operator"


def not_a_sample(
    sample: Any, operator: str, location: str, position: int, remark: str = ""
) -> errors.SampleError:
    """Return the error for a sample that is neither a tuple of arguments nor a call."""
    return errors.SampleError(
        f"sample {position} is neither a tuple of arguments nor `make.call(...)`",
        operator=operator,
        got=shown(sample),
        where=location,
        hint=f"{remark}yield `(x, weight)` or `make.call(x, weight, stride=2)`",
    )


def samples_of(
    source: Any, make: Make, schema: Schema, operator: str, location: str = ""
) -> list[CallArguments]:
    """Return the samples of a list or a function as calls that fit the signature.

    Args:
        source: As for `read_samples`.
        make: Maker of tensors.
        schema: The signature.
        operator: The operator's name, in messages.
        location: `file:line` of a list.

    Raises:
        SampleError: If it is not a list of samples, or one of them does not fit.
    """
    given = read_samples(source, make, operator, location)
    location = location_of(source, location)
    remark = missing_list_hint(source, lambda args: call_error(tuple(args), {}, schema) is None)
    return [
        as_call(each, schema, operator, location, position, remark) for position, each in enumerate(given)
    ]


def first_call(specification: Specification, use: str, otherwise: str = "") -> CallArguments:
    """The first sample of an operator; see `sample_calls`."""
    return sample_calls(specification, use, otherwise)[0]


def sample_calls(specification: Specification, use: str, otherwise: str = "") -> list[CallArguments]:
    """The samples of an operator, at least one, with floating tensors of float32.

    Args:
        specification: The specification of the operator.
        use: The use of the call, for the message: `drawn`, `exported`.
        otherwise: An alternative to samples, for the hint.

    Raises:
        MissingSamplesError: If there is no sample.
        SampleError: If a sample does not fit the signature.
    """
    from opsmith.core.shape_samples import samples_for  # it makes samples with this module

    source = samples_for(specification)
    make = Make(torch.float32)
    calls = [] if source is None else samples_of(source, make, specification.schema, specification.name)
    if not calls:
        lack = "it has no samples" if source is None else "its samples are empty"
        raise specification.error(
            errors.MissingSamplesError,
            f"it is {use} with the arguments of its first sample, but {lack}",
            hint=f"write `@{specification.variable}.samples` over a function of `make` that yields tuples "
            f"of arguments{otherwise}",
        )
    return calls
