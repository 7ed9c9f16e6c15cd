"""Options, and the call to draw: a function with its arguments, or an operator with its first sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import call_error
from opsmith.core.operator import Operator
from opsmith.core.samples import first_call
from opsmith.core.tensors import named_tensors
from opsmith.display import short_repr


@dataclass(frozen=True)
class Options:
    """Options of a trace.

    Args:
        inputs: Arguments for a module, a function or an operator.
        kwargs: Further keyword arguments.
        names: Names of tensors: a module, or a dict of tensors and modules.
        training: Draw the graph of the backward instead of the calls.
        show_saved: Add a node for each tensor that torch's own nodes save.
        memory: Record saved tensors.
        title: The title of the graph.
    """

    __repr__ = short_repr

    inputs: Any = None
    kwargs: Any = None
    names: Any = None
    training: bool = False
    show_saved: bool = False
    memory: bool = True
    title: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.title, str | None):
            raise errors.UsageError(
                "the title of a graph must be a text",
                argument="title",
                expected="str or None",
                got=type(self.title).__name__,
                hint='write `title="a network"`, or leave it out',
            )


@dataclass(frozen=True)
class DrawnCall:
    """A call to draw.

    Args:
        function: The function, module or operator.
        args: Positional arguments.
        kwargs: Keyword arguments.
        module: The function if it is a module; otherwise None.
        output: The name of its result, unless it returns a mapping.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: torch.nn.Module | None = None
    output: str = "output"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors among its arguments, by the names of the parameters."""
        for name, value in self._bound():
            yield from named_tensors(value, name)

    def _bound(self) -> Iterator[tuple[str, Any]]:
        function = self.function.forward if isinstance(self.function, torch.nn.Module) else self.function
        try:
            bound = inspect.signature(function).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):  # the call itself will raise
            yield from ((f"input{position}", value) for position, value in enumerate(self.args))
            yield from self.kwargs.items()
            return
        yield from bound.items()


def function_call(function: Any, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> DrawnCall:
    """The call of a module or function.

    Args:
        function: The module or function.
        inputs: A tuple of positional arguments, a dict of keyword arguments, or a tensor.
        kwargs: Further keyword arguments.

    Raises:
        UsageError: If they do not fit its signature.
    """
    module = function if isinstance(function, torch.nn.Module) else None
    args, named = _arguments(inputs, kwargs)
    called = function.forward if module is not None else function
    try:
        inspect.signature(called).bind(*args, **named)
    except TypeError as error:
        what = "module" if module is not None else "function"
        raise errors.UsageError(
            f"`inputs` do not fit the {what}: {error}",
            argument="inputs",
            expected=f"the arguments of `{getattr(called, '__name__', what)}{inspect.signature(called)}`",
            got=f"number of arguments: {len(args) + len(named)}" if args or named else "nothing",
            hint='write `inputs=(x, y)`, or `inputs={"x": x}` by name',
        ) from error
    except ValueError:  # a function in C has no signature
        pass
    return DrawnCall(function, args, named, module)


def _arguments(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = dict(kwargs or {})
    if isinstance(inputs, Mapping):
        return (), {**inputs, **named}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), named
    return (() if inputs is None else (inputs,)), named


def operator_call(
    operator: Operator[..., Any], inputs: Any = None, kwargs: Mapping[str, Any] | None = None
) -> DrawnCall:
    """The call of an operator with these inputs or, by default, with its first sample.

    Raises:
        MissingSamplesError: If there are neither inputs nor samples.
        UsageError: If the inputs do not fit the signature.
    """
    specification = operator.specification
    if inputs is None and not kwargs:
        call = first_call(specification, "drawn", ", or give `inputs=`")
        return DrawnCall(operator, tuple(call.args), dict(call.kwargs))
    args, named = _arguments(inputs, kwargs)
    fault = call_error(args, named, specification.schema)
    if fault is not None:
        raise errors.UsageError(
            f"`inputs` do not fit the operator: {fault.problem}",
            operator=operator.name,
            argument=fault.argument or "inputs",
            expected=fault.expected,
            got=fault.got,
            hint=f"give `inputs=` the arguments of {specification.schema.call_text(specification.variable)}",
        )
    return DrawnCall(operator, args, named)
