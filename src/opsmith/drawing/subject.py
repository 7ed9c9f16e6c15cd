"""What is to be drawn, as a call: a function, what it is called with, and what its tensors are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.calls import call_fault
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of


@dataclass(frozen=True)
class Subject:
    """A call.

    Args:
        function: What is called.
        args: What it is called with by position.
        kwargs: And by keyword.
        module: The module that it is, if it is one.
        output: What its results are called, if it returns no mapping.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: torch.nn.Module | None = None
    output: str = "output"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors among its arguments, by the names of the parameters."""
        for name, value in self._bound():
            yield from named_tensors(value, name).items()

    def _bound(self) -> Iterator[tuple[str, Any]]:
        function = self.function.forward if isinstance(self.function, torch.nn.Module) else self.function
        try:
            bound = inspect.signature(function).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):  # no signature, or none that fits: the call itself will say
            yield from ((f"input{position}", value) for position, value in enumerate(self.args))
            yield from self.kwargs.items()
            return
        yield from bound.items()


def named_tensors(value: Any, name: str) -> dict[str, Tensor]:
    """Every tensor in tuples, lists and mappings, by name.

    Example:
        >>> list(named_tensors([torch.ones(1), {"a": torch.ones(1)}], "y"))
        ['y[0]', "y[1]['a']"]
    """
    if isinstance(value, Tensor):
        return {name: value}
    pairs: Any = ()
    if isinstance(value, Mapping):
        pairs = ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        pairs = ((f"{name}[{position}]", each) for position, each in enumerate(value))
    return {label: tensor for inner, each in pairs for label, tensor in named_tensors(each, inner).items()}


def call_of(function: Any, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> Subject:
    """The call of a module or function with these inputs: a tuple of arguments, a dict by name, or a tensor.

    Args:
        function: What is called.
        inputs: What it is called with.
        kwargs: And by keyword.

    Raises:
        UsageError: If they are no call of it.
    """
    module = function if isinstance(function, torch.nn.Module) else None
    args, named = _arguments(inputs, kwargs)
    called = function.forward if module is not None else function
    try:
        inspect.signature(called).bind(*args, **named)
    except TypeError as error:
        what = "module" if module is not None else "function"
        raise errors.UsageError(
            f"`inputs` are no call of the {what}: {error}",
            argument="inputs",
            expected=f"what `{getattr(called, '__name__', what)}{inspect.signature(called)}` takes",
            got=f"{len(args) + len(named)} given" if args or named else "nothing",
            hint='write `inputs=(x, y)`, or `inputs={"x": x}` by name',
        ) from error
    except ValueError:  # a function in C, which takes what it takes
        pass
    return Subject(function, args, named, module)


def _arguments(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = dict(kwargs or {})
    if isinstance(inputs, Mapping):
        return (), {**inputs, **named}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), named
    return (() if inputs is None else (inputs,)), named


def operator_call(
    operator: Operator[..., Any], inputs: Any = None, kwargs: Mapping[str, Any] | None = None
) -> Subject:
    """The call of an operator with these inputs, or else with its first sample.

    Raises:
        MissingSamplesError: If there are neither.
        UsageError: If they do not fit.
    """
    specification = operator.specification
    if inputs is None and not kwargs:
        if specification.samples is None:
            raise _without_samples(operator, "it is drawn as its first sample calls it, and has none")
        make = Make(torch.float32)
        calls = samples_of(specification.samples, make, specification.schema, specification.name)
        if not calls:
            raise _without_samples(
                operator, "it is drawn as its first sample calls it, and its samples are empty"
            )
        return Subject(operator, tuple(calls[0].args), dict(calls[0].kwargs))
    args, named = _arguments(inputs, kwargs)
    fault = call_fault(args, named, specification.schema)
    if fault is not None:
        raise errors.UsageError(
            f"`inputs` are no call of the operator: {fault[0]}",
            operator=operator.name,
            argument=fault[1] or "inputs",
            expected=fault[2],
            got=fault[3],
            hint=f"give `inputs=` what {specification.schema.call_text(specification.short_name)} takes",
        )
    return Subject(operator, args, named)


def _without_samples(operator: Operator[..., Any], problem: str) -> errors.MissingSamplesError:
    specification = operator.specification
    return errors.MissingSamplesError(
        problem,
        operator=operator.name,
        where=specification.where,
        hint=f"write `@{specification.short_name}.samples` over a function of `make` that yields tuples of "
        "arguments, or give `inputs=`",
    )
