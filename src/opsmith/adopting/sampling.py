"""The samples of a class that is adopted: tuples of what its `forward` takes after its context."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.signature import forward_signature
from opsmith.core.calls import Call
from opsmith.core.samples import Make, forgotten_list, listed, no_call, place_of


@dataclass(frozen=True)
class ClassSamples:
    """Samples of a class: a list that was read once, or a function that is called for each list.

    Args:
        function_class: The class.
        source: The list or the function.
        operator: What messages call the class.
        place: Where they were given.
    """

    function_class: type[torch.autograd.Function]
    source: Any
    operator: str
    place: str

    def values(self, make: Make) -> list[list[Any]]:
        """The arguments of each sample, as forward takes them.

        Raises:
            SampleError: If it is no list of samples, or one has more or fewer arguments than forward.
        """
        given = listed(self.source, make, self.operator, self.place)
        remark = forgotten_list(self.source, self._takes)
        return [self._values(sample, position, remark) for position, sample in enumerate(given)]

    def _values(self, sample: Any, position: int, remark: str) -> list[Any]:
        if isinstance(sample, Call):
            try:
                bound = forward_signature(self.function_class).bind(*sample.args, **sample.kwargs)
            except TypeError as error:
                raise self._misfit(f"sample {position} does not fit", remark, got=str(error)) from None
            bound.apply_defaults()
            return list(bound.args)
        if isinstance(sample, torch.Tensor):
            sample = (sample,)
        if not isinstance(sample, tuple | list):
            raise no_call(sample, self.operator, self.place, position, remark)
        if not self._takes(sample):
            count = f"{len(sample)} argument{'s' * (len(sample) != 1)}"
            if (
                isinstance(sample, list)
                and len(self._parameters) == 1
                and self._takes([sample])
                and not remark
            ):
                remark = "one argument that is a list stands in a tuple of one, `([...],)`; or "
            raise self._misfit(f"sample {position} has {count}", remark)
        return list(sample)

    def _misfit(self, problem: str, remark: str, got: str | None = None) -> errors.SampleError:
        names = ", ".join(str(each).partition(":")[0] for each in self._parameters)
        return errors.SampleError(
            f"{problem}, and `{self.function_class.__qualname__}.forward` takes {self._count} ({names})",
            operator=self.operator,
            got=got,
            where=self.place,
            hint=f"{remark}give each sample the arguments that `apply` takes",
        )

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        every = forward_signature(self.function_class).parameters.values()
        return [each for each in every if each.kind in (*_FIXED, each.VAR_POSITIONAL)]

    @property
    def _range(self) -> tuple[int, int | None]:
        """How many arguments forward takes at least, and at most."""
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
    """What was given for samples, made ready to be read; None where nothing was.

    Args:
        samples: A list, or a function of `make` or of nothing.
        function_class: The class.
        operator: What messages call the class.
        giver: Name of the function that was given them.

    Raises:
        SampleError: If it is neither.
    """
    if samples is None or isinstance(samples, ClassSamples):
        return samples
    place = place_of(samples, f"the samples given to `{giver}`")
    source = samples if callable(samples) else listed(samples, Make(), operator, place)
    return ClassSamples(function_class, source, operator, place)
