"""Guess the arguments of a Function class from its source, the simplest guess first."""

from __future__ import annotations

import collections.abc
import inspect
import itertools
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opsmith.adopting.signature import forward_signature
from opsmith.core.reading import Comparison, Reading


@dataclass(frozen=True)
class ClassSource:
    """Arguments of a class, as its source describes them.

    Args:
        function_class: The class.
        name: Its name in its module.
        parameters: Parameters of `forward`, without its context.
        called: Arguments that are functions, because its methods call them.
        compared: Constants with which the code compares an argument, by the argument's name.
        asked: Attributes that the code reads from its arguments, by attribute the names of the arguments.
            Such an argument may be an object.
    """

    function_class: type[torch.autograd.Function]
    name: str
    parameters: tuple[inspect.Parameter, ...]
    called: frozenset[str]
    compared: dict[str, tuple[Any, ...]]
    asked: Mapping[str, Collection[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, function_class: type[torch.autograd.Function], name: str | None = None) -> ClassSource:
        """Read a class; if it has no source, as a class in C++, only its signature is known."""
        parameters = tuple(forward_signature(function_class).parameters.values())
        reading = Reading()
        reading.read_class(function_class, [parameter.name for parameter in parameters])
        words = {name: _words_and_flags(found) for name, found in reading.compared.items()}
        return cls(
            function_class,
            name or function_class.__qualname__,
            parameters,
            frozenset(reading.called),
            {name: found for name, found in words.items() if found},
            # The only argument of a class is a tensor.
            reading.asked if len(parameters) > 1 else {},
        )

    @property
    def defaulted(self) -> int:
        """Return the number of trailing arguments that have defaults."""
        given = [parameter.default is not parameter.empty for parameter in self.parameters]
        return len(given) if all(given) else given[::-1].index(False)

    @property
    def variadic(self) -> inspect.Parameter | None:
        """Return the parameter `*args`, if there is one."""
        last = self.parameters[-1] if self.parameters else None
        return last if last is not None and last.kind is last.VAR_POSITIONAL else None


def _words_and_flags(comparisons: Iterable[Comparison]) -> tuple[str | bool, ...]:
    """Return the texts and truth values in comparisons; numbers are left out, since most are bounds."""
    values = [value for each in comparisons for value in each.values if isinstance(value, str | bool)]
    return tuple(dict.fromkeys(values))


Shape = tuple[int, ...]
FLOATING, WHOLE = "floating", "whole"

SHAPES: dict[int, list[tuple[Shape, ...]]] = {
    1: [((3, 4),), ((4,),), ((2, 3, 4),), ((1, 2, 4, 6),), ((4, 4),), ((1, 2, 3, 4, 5),), ((),)],
    2: [
        ((3, 4), (3, 4)),
        ((3, 4), (4, 5)),
        ((3, 4), (5, 4)),
        ((3, 4), (4,)),
        ((3, 4), (3,)),
        ((4,), (4,)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 3, 4), (4,)),
        ((2, 3, 4), (3,)),
        ((1, 2, 3, 4), (3, 2, 2, 2)),
        ((2, 3, 4, 5), (3,)),
        ((2, 4, 6), (3, 4, 3)),
        ((3, 4), ()),
        ((3, 4), (1,)),
        ((4, 4), (4, 3)),
        ((5, 4), (3,)),
    ],
    3: [
        ((3, 4), (3, 4), (3, 4)),
        ((3, 4), (5, 4), (5,)),
        ((3, 4), (4, 5), (5,)),
        ((3, 4), (4,), (4,)),
        ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
        ((1, 2, 3, 4), (3, 2, 2, 2), (3,)),
        ((2, 3, 4, 5), (3,), (3,)),
        ((2, 4, 6), (3, 4, 3), (3,)),
        ((3, 4), (4, 5), (3, 5)),
        ((3, 5), (3, 4), (4, 5)),
        ((3, 4), (2, 5), (6, 4, 5)),
        ((3, 4), (), ()),
    ],
    4: [
        ((3, 4), (3, 4), (3, 4), (3, 4)),
        ((3, 4), (4,), (4,), (4,)),
        ((3, 4), (5, 4), (5,), (3, 5)),
        ((3, 4), (5, 4), (5, 5), (3, 5)),
        ((2, 3, 4), (2, 3, 4), (2, 3, 4), (3, 3)),
        ((3, 4), (5, 4), (5,), (5,)),
    ],
    5: [
        ((3, 4),) * 5,
        ((3, 4), (4,), (4,), (4,), (4,)),
        ((2, 3, 4, 5), (3,), (3,), (3,), (3,)),
        ((3, 4), (15, 9), (15,), (3, 5), (3, 5)),
        ((3, 4), (20, 9), (20,), (3, 5), (3, 5)),
        ((3, 4), (5, 4), (5,), (2, 5), (2,)),
    ],
}
"""Shapes by the number of tensors. More tensors share one shape, or all except the first are vectors."""

WHOLE_SHAPES: tuple[Shape, ...] = ((3,), (3, 4), (2, 3), (4,))

INDICES = re.compile(
    r"(.*_)?(idx|index|indices|ids?|labels?|targets?|segments?|classes|batch)", re.IGNORECASE
)
"""Names of tensors of whole numbers."""

COUNTS = re.compile(
    r"(.*_)?(dims?|axis|k|n|num|stride|padding|dilation|groups|size|steps?|bits|levels|order|degree)(_.*)?",
    re.IGNORECASE,
)
"""Names of whole numbers."""

NUMBERS = re.compile(
    r"(.*_)?(p|prob|eps|epsilon|alpha|beta|gamma|lambda_?|lamb?d?|tau|temperature|slope|scale|factor|constant"
    r"|threshold|exponent|power|min|max|lower|upper|low|high|momentum|rate|coeff|strength)(_.*)?",
    re.IGNORECASE,
)
"""Names of plain numbers."""

FLAGS = re.compile(r"(is|use|has|with|do)_.+|training|train|inplace|causal|reverse|keepdim|bidirectional")
"""Names of truth values."""


@dataclass(frozen=True)
class Guess:
    """Guessed arguments of one call.

    Args:
        values: The arguments by position, as `apply` takes them.
        positive: True if its tensors were made positive.
    """

    values: tuple[Any, ...]
    positive: bool = False

    def made_positive(self) -> Guess:
        """Return a copy whose floating tensors have numbers of at least 0.5."""
        values = [value.abs() + 0.5 if _is_floating(value) else value for value in self.values]
        return Guess(tuple(values), positive=True)

    def with_other_indices(self) -> list[Guess]:
        """Return two copies: in one all indices are equal, in the other they vary."""
        if not any(map(_is_whole, self.values)):
            return []
        others = torch.zeros_like, lambda value: (torch.arange(value.numel()) % 3).flip(0).view(value.shape)
        changed = ([other(each) if _is_whole(each) else each for each in self.values] for other in others)
        return [Guess(tuple(values), self.positive) for values in changed]

    def named(self, names: Sequence[str]) -> str:
        """Describe the arguments: `x [3, 4], slope=0.01`."""
        shown = [f"{name}{_words(value)}" for name, value in zip(names, self.values, strict=True)]
        return ", ".join(shown) + ", all of them positive" * self.positive

    def code(self) -> str:
        """Return the arguments as code, with new random tensors."""
        return ", ".join(map(_code, self.values)) + "," * (len(self.values) == 1)

    def shapes(self) -> tuple[Any, ...]:
        """Return the shapes and plain values; guesses with equal ones are the same guess."""
        return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else repr(v) for v in self.values)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def unguessable(source: ClassSource) -> list[str]:
    """Return the names of arguments without a default for which there is no guess."""
    return [parameter.name for parameter in source.parameters if not _roles(source, parameter)]


def guesses(source: ClassSource, seed: int) -> Iterator[list[Guess]]:
    """Yield lists of guesses, the simplest first; guesses in one list differ only in their tensors' numbers.

    Args:
        source: The class.
        seed: Seed of the numbers.
    """
    roles = [_roles(source, parameter) for parameter in source.parameters]
    if source.variadic is not None:
        rest = roles.pop()
        counts: list[list[Any]] = [rest[:1] * count for count in (3, 2, 1)]
    else:
        counts = [[]]
    for chosen in _cheapest(roles):
        for more in counts:
            yield from _with_shapes([*chosen, *more], seed)


def _cheapest(roles: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of roles, one role for each argument, the likeliest combination first."""
    ranked = itertools.product(*(range(len(each)) for each in roles))
    for ranks in sorted(itertools.islice(ranked, 4096), key=sum):
        yield tuple(options[rank] for options, rank in zip(roles, ranks, strict=True))


def _with_shapes(roles: Sequence[Any], seed: int) -> Iterator[list[Guess]]:
    count = sum(role is FLOATING for role in roles)
    every = SHAPES.get(count) or [((3, 4),) * count, ((4,),) * count, ((3, 4), *((4,),) * (count - 1))]
    whole = WHOLE_SHAPES if any(role is WHOLE for role in roles) else ((),)
    for shapes, indices in itertools.product(every if count else [()], whole):
        yield [_guess(roles, shapes, indices, seed, numbers) for numbers in NUMBERS_IN_TENSORS]


NUMBERS_IN_TENSORS = ("any", "positive", "fractions", "single")
"""Kinds of numbers: of both signs; at least 0.5; between 0.1 and 0.9; of both signs in float32."""


def _guess(roles: Sequence[Any], shapes: Sequence[Shape], indices: Shape, seed: int, numbers: str) -> Guess:
    generator = torch.Generator().manual_seed(seed)
    left = iter(shapes)

    def value(role: Any) -> Any:
        if role is FLOATING:
            return _floating(next(left), generator, numbers)
        if role is WHOLE:
            return _repeated(torch.randint(3, indices, generator=generator))
        return role

    return Guess(tuple(map(value, roles)))


def _repeated(indices: torch.Tensor) -> torch.Tensor:
    """Repeat the first index along each dimension as the last, so that a gradient by it is a sum."""
    for dim in range(indices.dim()):
        indices.select(dim, -1).copy_(indices.select(dim, 0))
    return indices


def _floating(shape: Shape, generator: torch.Generator, numbers: str) -> torch.Tensor:
    if numbers in ("any", "single"):
        dtype = torch.float32 if numbers == "single" else torch.float64
        return torch.randn(shape, dtype=dtype, generator=generator)
    drawn = torch.rand(shape, dtype=torch.float64, generator=generator)
    return 0.5 + drawn if numbers == "positive" else 0.1 + 0.8 * drawn


def _roles(source: ClassSource, parameter: inspect.Parameter) -> list[Any]:
    """Return the roles of an argument, likeliest first: `FLOATING`, `WHOLE`, or a plain value."""
    name, default = parameter.name, parameter.default
    known = [] if default is parameter.empty else [default]
    if name in source.called:
        return known
    annotation = parameter.annotation
    if annotation is not parameter.empty and annotation is not Any:
        found = _roles_by_annotation(annotation, list(source.compared.get(name, ())))
        return [*known, *found] if default is not None else [*found, *known]
    if known and default is not None:
        return known
    constants = list(source.compared.get(name, ()))
    if constants:
        return [*constants, *known]
    if FLAGS.fullmatch(name):
        return [True, False, *known]
    if INDICES.fullmatch(name):
        return [WHOLE, FLOATING, 1, *known]
    if any(name in names and hasattr(torch.Tensor, each) for each, names in source.asked.items()):
        return [FLOATING, WHOLE, *known]
    if COUNTS.fullmatch(name):
        return [1, 2, 0.5, FLOATING, *known]
    if NUMBERS.fullmatch(name):
        return [0.5, 2, FLOATING, *known]
    if default is None:
        return [FLOATING, None]
    return [FLOATING, 2, 0.5, WHOLE]


def _roles_by_annotation(annotation: Any, constants: list[Any]) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [
            role for member in typing.get_args(annotation) for role in _roles_by_annotation(member, constants)
        ]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) in (tuple, list, collections.abc.Sequence):
        inner = [each for each in typing.get_args(annotation) if each is not Ellipsis]
        if inner and all(each in (int, float) for each in inner):
            make = list if typing.get_origin(annotation) is list else tuple
            return [make([1] * max(2, len(inner)))]
        return []
    words = [word for word in constants if isinstance(word, str)]
    table: dict[Any, list[Any]] = {
        torch.Tensor: [FLOATING, WHOLE],
        int: [1, 2],
        float: [0.5, 2.0],
        bool: [True, False],
        str: words,
        type(None): [None],
    }
    return table.get(annotation, [])


def _words(value: Any) -> str:
    return f" {list(value.shape)}" if isinstance(value, torch.Tensor) else f"={value!r}"


def _code(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    sizes = ", ".join(map(str, value.shape)) or "()"
    if not value.is_floating_point():
        return f"torch.randint(3, ({', '.join(map(str, value.shape))}{',' * (value.dim() == 1)}))"
    return f"torch.{'randn' if bool((value < 0).any()) else 'rand'}({sizes})"


def placeholder_code(source: ClassSource, unknown: Sequence[str]) -> str:
    """Return a sample as code, with a name in capitals for each argument that cannot be guessed."""
    parts = []
    for parameter in source.parameters:
        roles = _roles(source, parameter)
        if parameter.name in unknown or not roles:
            parts.append(parameter.name.upper())
        elif parameter.default is not parameter.empty:
            parts.append(repr(parameter.default))
        else:
            parts.append(_code(_guess(roles[:1], [(3, 4)], (3,), 0, "any").values[0]))
    return ", ".join(parts) + "," * (len(parts) == 1)
