"""From what a user hands to `check` to the subject of the check, with its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.registered import is_operator
from opsmith.checking.effort import Effort
from opsmith.checking.fitness import refuse_unfit
from opsmith.checking.function_class import as_operator
from opsmith.checking.library_operator import as_specification
from opsmith.checking.mistakes import calls_operator
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.calls import Call, shown
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of
from opsmith.core.specification import Specification

Samples = Callable[..., Iterable[Any]] | Iterable[Any] | None


def subject_of(checked: Any, samples: Samples, seed: int, effort: Effort) -> Subject:
    """The subject of a check.

    Args:
        checked: An operator of ours, an `autograd.Function` class, or an operator of torch.library.
        samples: As of `check`.
        seed: Seed of everything random.
        effort: How much to look at.

    Raises:
        UsageError: If it is none of these.
        MissingSamplesError: If there are no samples.
        SampleError: If a sample does not fit.
        ForwardRaisedError: If the forward of a class raises on every sample.
    """
    if isinstance(checked, type) and issubclass(checked, torch.autograd.Function):
        with _drawing(seed) as make:
            operator = as_operator(checked, samples, make)
        calls = _drawn(operator.specification, None, seed, checked.__qualname__)
        adopted = operator.specification.adopted
        assert adopted is not None
        # A class of the oldest kind has no `apply` that runs; adopted, it has.
        apply = None if adopted.takes_self else _apply_of(checked, operator.specification)
        return _subject(operator.specification, calls, seed, effort, operator, apply, checked.__qualname__)
    if isinstance(checked, Operator):
        calls = _drawn(checked.specification, samples, seed)
        return _subject(checked.specification, calls, seed, effort, checked, None, None)
    if is_operator(checked):
        specification, call = as_specification(checked)
        calls = _drawn(specification, samples, seed)
        return _subject(specification, calls, seed, effort, None, call, specification.name)
    raise _no_subject(checked)


def _no_subject(checked: Any) -> errors.UsageError:
    kind = (
        getattr(checked, "__self__", None) if getattr(checked, "__name__", "") == "apply" else type(checked)
    )
    if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
        mend = f"pass the class, `{kind.__name__}`"
    else:
        mend = 'declare it first, with `@opsmith.operator("mylib::name")`'
    return errors.UsageError(
        "only an operator (of opsmith or of torch.library), or an `autograd.Function` class, can be checked",
        expected="an operator, `torch.ops.mylib.name`, or a class derived from torch.autograd.Function",
        got=shown(checked),
        mend=mend,
    )


def _apply_of(function_class: Any, specification: Specification) -> Callable[..., Any]:
    """A class's own `apply`, called as the operator would be."""
    adopted = specification.adopted
    assert adopted is not None

    @calls_operator
    def apply(*args: Any, **kwargs: Any) -> Any:
        return function_class.apply(*adopted.spread(specification.schema.call_values(args, kwargs)))

    return apply


def _subject(
    specification: Specification,
    calls: Sequence[Call],
    seed: int,
    effort: Effort,
    operator: Operator[..., Any] | None,
    apply: Callable[..., Any] | None,
    shown_as: str | None,
) -> Subject:
    if not calls:
        raise errors.MissingSamplesError(
            "there are no samples to check it on",
            operator=specification.name,
            where=specification.where,
            mend=_mend(specification, operator),
        )
    own = tuple(Sample.of(position, call, specification.schema) for position, call in enumerate(calls))
    for each in own:
        refuse_unfit(each.position, each.labels, each.flat, shown_as or specification.name, GIVEN)
    return Subject(specification, own, seed, effort, operator, apply, shown_as)


def _mend(specification: Specification, operator: Operator[..., Any] | None) -> str:
    if operator is None:
        names = specification.schema.names
        listed = f"({', '.join(names)}{',' * (len(names) == 1)})"
        path = specification.name.replace("::", ".")
        return f"call `opsmith.check(torch.ops.{path}, samples=[{listed}])`"
    if specification.adopted is not None:
        return (
            "give them where it is adopted, `adopt(..., samples=lambda: [(x, weight)])`, or call "
            "`check(..., samples=[(x, weight)])`"
        )
    return (
        f"write `@{specification.short_name}.samples` over a function of `make` that yields tuples of "
        "arguments, or call `check(..., samples=[(x, weight)])`"
    )


GIVEN = "the samples given to `check`"


def _drawn(specification: Specification, samples: Samples, seed: int, name: str | None = None) -> list[Call]:
    """The samples' calls."""
    source = specification.samples if samples is None else samples
    if source is None:
        return []
    with _drawing(seed) as make:
        return samples_of(source, make, specification.schema, name or specification.name, GIVEN)


@contextmanager
def _drawing(seed: int) -> Iterator[Make]:
    """A region in which samples are the same for the same seed, though an author may draw past `make`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield Make(generator=torch.Generator().manual_seed(seed))
