"""Samples of an `autograd.Function` class: argument values, matched to the parameters of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.signature import forward_signature
from opsmith.core.call_arguments import CallArguments
from opsmith.core.samples import Make, location_of, missing_list_hint, not_a_sample, read_samples


@dataclass(frozen=True)
class ClassSamples:
    """Samples of a class, as a list or as a function that returns one.

    Args:
        function_class: The class.
        source: The list or the function.
        operator: Name of the class in messages.
        location: `file:line` of the samples.
    """

    function_class: type[torch.autograd.Function]
    source: Any
    operator: str
    location: str

    def values(self, make: Make) -> list[list[Any]]:
        """Return the arguments of each sample, as forward takes them.

        Raises:
            SampleError: If it is not a list of samples, or a sample has more or fewer arguments than forward.
        """
        given = read_samples(self.source, make, self.operator, self.location)
        remark = missing_list_hint(self.source, self._takes)
        return [self._values(sample, position, remark) for position, sample in enumerate(given)]

    def _values(self, sample: Any, position: int, remark: str) -> list[Any]:
        if isinstance(sample, CallArguments):
            try:
                bound = forward_signature(self.function_class).bind(*sample.args, **sample.kwargs)
            except TypeError as error:
                raise self._misfit(f"sample {position} does not fit", remark, got=str(error)) from None
            bound.apply_defaults()
            return list(bound.args)
        if isinstance(sample, torch.Tensor):
            sample = (sample,)
        if not isinstance(sample, tuple | list):
            raise not_a_sample(sample, self.operator, self.location, position, remark)
        if not self._takes(sample):
            count = f"{len(sample)} argument{'s' * (len(sample) != 1)}"
            if (
                isinstance(sample, list)
                and len(self._parameters) == 1
                and self._takes([sample])
                and not remark
            ):
                remark = "write a single argument that is a list as `([...],)`; or "
            raise self._misfit(f"sample {position} has {count}", remark)
        return list(sample)

    def _misfit(self, problem: str, remark: str, got: str | None = None) -> errors.SampleError:
        names = ", ".join(str(each).partition(":")[0] for each in self._parameters)
        return errors.SampleError(
            f"{problem}, and `{self.function_class.__qualname__}.forward` takes {self._count} ({names})",
            operator=self.operator,
            got=got,
            where=self.location,
            hint=f"{remark}give each sample the arguments that `apply` takes",
        )

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        every = forward_signature(self.function_class).parameters.values()
        return [each for each in every if each.kind in (*_FIXED, each.VAR_POSITIONAL)]

    @property
    def _range(self) -> tuple[int, int | None]:
        """Return the minimum and the maximum number of arguments of forward."""
        fixed = [each for each in self._parameters if each.kind in _FIXED]
        least = sum(each.default is each.empty for each in fixed)
        return least, len(fixed) if len(fixed) == len(self._parameters) else None

    @property
    def _count(self) -> str:
        least, most = self._range
        if most is None:
            return f"{least} or more"
        return str(most) if least == most else f"{least} to {most}"

    def _takes(self, values: Sequence[Any]) -> bool:
        least, most = self._range
        return least <= len(values) and (most is None or len(values) <= most)


_FIXED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


Samples = Callable[..., Iterable[Any]] | Iterable[Any] | None


def class_samples(
    samples: Samples | ClassSamples, function_class: type[torch.autograd.Function], operator: str, giver: str
) -> ClassSamples | None:
    """Return the given samples, an iterator as a list; None if there are none.

    Args:
        samples: A list, or a function that may take `make`.
        function_class: The class.
        operator: Name of the class in messages.
        giver: Name of the function that received them.

    Raises:
        SampleError: If the samples are neither.
    """
    if samples is None or isinstance(samples, ClassSamples):
        return samples
    location = location_of(samples, f"the samples given to `{giver}`")
    source = samples if callable(samples) else read_samples(samples, Make(), operator, location)
    return ClassSamples(function_class, source, operator, location)
