"""Templates: a sample in different sizes, with numbers from the sample, if the reference accepts them.

Samples are small, because finite differences are computed on them. `grow` doubles one letter of a sample, or
two together, if the reference still accepts the call. It begins with the smallest letter, so that all sizes
grow. The reference runs on `meta` tensors, which need no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.samples.sample import Sample
from opsmith.core.call_arguments import tensors_in
from opsmith.core.shapes import LEADING, Shapes
from opsmith.core.specification import Specification
from opsmith.judging.tensors import is_inexact

Letters = dict[str, Any]
"""Size of each letter; the key `...` has the leading sizes."""


class RefusedSizesError(Exception):
    """The operator does not accept these sizes."""


@dataclass(frozen=True)
class Template:
    """A sample whose tensors can be made again in different sizes.

    Args:
        specification: The operator.
        sample: The sample.
        letters: Sizes of its letters, which are from `shapes=`, or else one for each distinct size. shapes:
            The operator's `shapes=`; None if the letters are not from it.
    """

    specification: Specification
    sample: Sample
    letters: Letters
    shapes: Shapes | None

    @classmethod
    def of(cls, specification: Specification, sample: Sample) -> Template:
        """Make a template of a sample."""
        shapes = specification.shapes
        if shapes is not None:
            sizes, fault = shapes.bind(specification.schema, sample.flattening.pack(sample.flat))
            if fault is None:
                return cls(specification, sample, sizes, shapes)
        every = {size for value in sample.flat if isinstance(value, Tensor) for size in value.shape}
        return cls(specification, sample, {f"{size}": size for size in sorted(every)}, None)

    def values(self, letters: Letters) -> list[Any]:
        """Return the flat arguments in these sizes, with tensors on `meta`.

        Raises:
            RefusedSizesError: If an expression of letters is not a valid size.
        """
        integers = frozenset() if self.shapes is None else self.shapes.integers
        found = []
        for name, value in zip(self.sample.names, self.sample.flat, strict=True):
            if isinstance(value, Tensor):
                found.append(torch.empty(self._shape(name, value, letters), dtype=value.dtype, device="meta"))
            else:
                found.append(letters.get(name, value) if name in integers else value)
        return found

    def _shape(self, name: str, value: Tensor, letters: Letters) -> tuple[int, ...]:
        if self.shapes is None:
            return tuple(letters[f"{size}"] for size in value.shape)
        return _evaluated(self.shapes, name, value, letters)

    def attempt(self, values: Sequence[Any]) -> int:
        """Return the number of elements of the results for these arguments on `meta`.

        Raises:
            RefusedSizesError: If the operator refuses them.
        """
        args, kwargs = self.sample.arguments(list(values))
        shapes = self.specification.shapes
        if shapes is not None:
            fault = shapes.bind(self.specification.schema, self.sample.flattening.pack(list(values)))[1]
            if fault is not None:
                raise RefusedSizesError(f"`{fault[0]}` must be {fault[1]}, not {fault[2]}")
        try:
            with torch.no_grad(), torch.device("meta"):
                returned = self.specification.reference(*args, **kwargs)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise RefusedSizesError(reason) from error
        results = returned if isinstance(returned, tuple) else (returned,)
        return sum(each.numel() for each in tensors_in(list(results)))

    def filled(self, values: Sequence[Any], generator: torch.Generator) -> list[Any]:
        """Fill the arguments on the CPU: the numbers of each tensor are drawn from the sample's tensor.

        The numbers of a sample are in the operator's domain: positive, or valid indices.
        """
        pairs = zip(values, self.sample.flat, strict=True)
        return [
            _drawn(own, made.shape, generator) if isinstance(own, Tensor) else made for made, own in pairs
        ]


def _evaluated(shapes: Shapes, name: str, value: Tensor, letters: Letters) -> tuple[int, ...]:
    dims = shapes.arguments.get(name)
    if dims is None:
        return tuple(value.shape)
    lead = len(letters.get(LEADING, ())) if dims.leading else 0
    found = dims.evaluate(letters)
    shape = tuple(
        original if size is None else size
        for size, original in zip(
            found, (*([0] * lead), *value.shape[value.dim() - len(dims.sizes) :]), strict=True
        )
    )
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise RefusedSizesError(f"`{dims.text}` of `{name}` is not a valid shape with these sizes")
    return shape


def _drawn(original: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if original.shape == torch.Size(shape):
        return original
    if not original.numel():
        return torch.zeros(tuple(shape), dtype=original.dtype)
    indices = torch.randint(original.numel(), (math.prod(shape),), generator=generator)
    return original.detach().reshape(-1)[indices].reshape(tuple(shape)).clone()


def elements(values: Sequence[Any]) -> int:
    """Count the elements of all tensors.

    Example:
        >>> elements([torch.ones(2, 3), 4, torch.ones(5)])
        11
    """
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def usable(sample: Sample) -> bool:
    """Return True if a sample can be a template: it has floating tensors, and none of them is empty."""
    tensors = [value for value in sample.flat if isinstance(value, Tensor)]
    return any(map(is_inexact, tensors)) and all(each.numel() for each in tensors)


def shown_letters(letters: Mapping[str, Any]) -> dict[str, int]:
    """Convert letters for a benchmark: each leading size gets a name.

    Example:
        >>> shown_letters({"...": (2, 3), "M": 4})
        {'...0': 2, '...1': 3, 'M': 4}
    """
    found: dict[str, int] = {}
    for name, size in letters.items():
        if name == LEADING:
            found |= {f"{LEADING}{at}": int(each) for at, each in enumerate(size)}
        elif isinstance(size, int) and not isinstance(size, bool):
            found[name] = size
    return found


def no_such_size(problem: str, expected: str, got: str, hint: str) -> errors.UsageError:
    """Make the error for invalid `sizes=`."""
    return errors.UsageError(problem, argument="sizes", expected=expected, got=got, hint=hint)


MAX_LETTERS = 12
"""Maximum number of letters that are tried: the number of pairs grows with its square."""


def grow(template: Template, targets: Sequence[int]) -> Iterator[Letters]:
    """Yield sizes of the letters for about each number of elements; nothing if the sample cannot grow.

    Args:
        template: The sample.
        targets: Numbers of elements of all tensors together, ascending.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.benchmarking.sizes import samples_of_operator
        >>> spec = opsmith.ops.linear.specification
        >>> template = Template.of(spec, samples_of_operator(opsmith.ops.linear, None, 0)[0])
        >>> [dict(each) for each in grow(template, [1000])]
        [{'...': (32,), 'M': 24, 'N': 16}]
    """
    groups = _groups(template)
    letters = dict(template.letters)
    for target in targets:
        while groups and _letter_elements(template, letters) < target:
            group = min(groups, key=lambda each: max(_size(letters, name) for name in each))
            larger = _doubled(letters, group)
            if _fits(template, larger):
                letters = larger
            else:
                groups.remove(group)
        if letters != template.letters and _letter_elements(template, letters) * 2 > target:
            yield dict(letters)


def _groups(template: Template) -> list[tuple[str, ...]]:
    """Return the letters that can be doubled: one alone, or two, preferably so that the result grows.

    An image could grow together with its result or with its window; here it grows with its result.
    """
    letters = template.letters
    if not _fits(template, letters):
        return []
    names = [name for name in letters if _size(letters, name)][:MAX_LETTERS]
    alone = [(name,) for name in names if _fits(template, _doubled(letters, (name,)))]
    rest = [name for name in names if (name,) not in alone]
    tried = {pair: _attempt(template, _doubled(letters, pair)) for pair in combinations(rest, 2)}
    results = {pair: size for pair, size in tried.items() if size is not None}
    pairs: list[tuple[str, ...]] = []
    for pair in sorted(results, key=lambda each: -results[each]):
        if {name for other in pairs for name in other}.isdisjoint(pair):
            pairs.append(pair)
    return [*alone, *pairs]


def _attempt(template: Template, letters: Letters) -> int | None:
    """Return the number of elements of the results in these sizes; None if the operator refuses the sizes."""
    try:
        return template.attempt(template.values(letters))
    except RefusedSizesError:
        return None


def _fits(template: Template, letters: Letters) -> bool:
    return _attempt(template, letters) is not None


def _letter_elements(template: Template, letters: Letters) -> int:
    return elements(template.values(letters))


def _doubled(letters: Letters, group: Sequence[str]) -> Letters:
    larger = dict(letters)
    for name in group:
        size = letters[name]
        larger[name] = (2 * size[0], *size[1:]) if name == LEADING else 2 * size
    return larger


def _size(letters: Letters, name: str) -> int:
    size = letters[name]
    if name == LEADING:
        return int(size[0]) if size else 0
    return size if isinstance(size, int) else 0
