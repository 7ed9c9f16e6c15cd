"""Adopted operators: `autograd.Function` classes, and operators of torch.library."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from opsmith.core.formula import Formula
from opsmith.core.location import where
from opsmith.core.schema import Schema


@dataclass(frozen=True)
class LibraryOperator:
    """An operator that opsmith did not register, and what it brings.

    Args:
        overload: The operator as torch knows it.
        devices: Device types that it has kernels for; empty where one kernel serves all.
        autograd: Device types on which it differentiates itself.
        autocast: Device types on which it has a rule for autocast.
        fake: Whether it has a fake kernel.
        vmap: Whether it has a rule for `vmap`.
        sources: What its behaviour in compiled code is written in; what has no source is no two times alike.
    """

    overload: Any
    devices: tuple[str, ...] = ()
    autograd: frozenset[str] = frozenset()
    autocast: frozenset[str] = frozenset()
    fake: bool = False
    vmap: bool = False
    sources: tuple[Any, ...] = ()


Outputs = int | None | tuple["Outputs", ...]
"""The position of a result, None, or a tuple of such."""


class StructureMismatchError(Exception):
    """A value that does not have the structure: what was expected there, and what came."""

    def __init__(self, outputs: Outputs, value: Any) -> None:
        super().__init__(outputs, value)
        self.outputs, self.value = outputs, value


def leaves(outputs: Outputs, value: Any) -> Iterator[tuple[int | None, Any]]:
    """The parts of a value that lie where results, or None, are expected, each with its result's position.

    Raises:
        MisfitError: If a tuple is expected, and the value is none of that length.

    Example:
        >>> list(leaves((0, None, (1,)), ("a", None, ("b",))))
        [(0, 'a'), (None, None), (1, 'b')]
    """
    if not isinstance(outputs, tuple):
        yield outputs, value
    elif not isinstance(value, tuple | list) or len(value) != len(outputs):
        raise StructureMismatchError(outputs, value)
    else:
        for inner, part in zip(outputs, value, strict=True):
            yield from leaves(inner, part)


def structured(outputs: Outputs, results: Sequence[Any]) -> Any:
    """Results, given in a row, in this structure; inverse of `leaves`.

    Example:
        >>> structured((0, None, (1,)), ["a", "b"])
        ('a', None, ('b',))
    """
    if isinstance(outputs, tuple):
        return tuple(structured(inner, results) for inner in outputs)
    return None if outputs is None else results[outputs]


def side_by_side(outputs: Outputs) -> tuple[int | None, ...]:
    """For each output at the top the position of its result; None where it is no tensor of its own.

    What lies in a tuple inside of the tuple is no output to torch, and has no gradient.

    Example:
        >>> side_by_side((0, None, (1, 2)))
        (0, None, None)
    """
    top = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(each if isinstance(each, int) else None for each in top)


KINDS = {
    "true": "the gradient is the derivative of the forward",
    "surrogate": "the gradient is wrong on purpose",
    "approximate": "the gradient approximates the derivative",
    "nonlinear": "the backward is not linear in the incoming gradient",
    "stochastic": "the forward draws from torch's random state",
    "float32": "it computes in float32, whatever comes in",
}
"""What an author may say of a Function."""


_LEAVING = frozenset({"numpy", "np", "detach", "data", "item", "tolist", "no_grad", "asarray", "from_numpy"})


@dataclass
class ObservedFacts:
    """What the runs of a class have shown, which its source does not tell.

    Attributes:
        written: Positions of the operator's arguments that its forward writes into; None before the first
            run.
        copied: Results that are copied since they were inputs, views of them or of one another, each with
            what it was.
        grads_written: Whether its backward writes into the incoming gradients; None before the first run.
        instead: What the reference does in its place, by what it could not do, with torch's reason.
    """

    written: frozenset[int] | None = None
    copied: dict[int, str] = field(default_factory=dict)
    grads_written: bool | None = None
    instead: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AdoptedFunction:
    """A Function class, as an operator uses it; the class itself stays as it is.

    Args:
        operator: The operator's name.
        schema: The operator's signature.
        function_class: The class.
        outputs: What its forward returns.
        kinds: Keys of `KINDS`.
        variadic: Whether the operator's last argument is the list of what `*args` takes.
        reference: The function that does what the class cannot, if its author gave one.
        defaults: Defaults that the schema does not have, since one of them cannot be written there.
        facts: What its runs have shown.
    """

    operator: str
    schema: Schema
    function_class: type[torch.autograd.Function]
    outputs: Outputs
    kinds: frozenset[str] = frozenset({"true"})
    variadic: bool = False
    reference: Callable[..., Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: ObservedFacts = field(default_factory=ObservedFacts, compare=False)

    @property
    def name(self) -> str:
        """The class's name, in messages."""
        return self.function_class.__qualname__

    @cached_property
    def has_setup_context(self) -> bool:
        """Whether its forward takes no context, and `setup_context` fills it."""
        return self.function_class.setup_context is not torch.autograd.Function.setup_context

    @cached_property
    def takes_self(self) -> bool:
        """Whether its forward is a plain method, as in the oldest documents: its context is `self`."""
        return inspect.isfunction(inspect.getattr_static(self.function_class, "forward"))

    @cached_property
    def backward(self) -> Callable[..., Any] | None:
        """Its backward, taking a context and the incoming gradients; None where it has none."""
        for name in ("backward", "vjp"):
            if overrides(self.function_class, name):
                found: Callable[..., Any] = getattr(self.function_class, name)
                return found
        return None

    @cached_property
    def looks_like_writing(self) -> bool:
        """Whether the code of its forward has something in it that writes into tensors, if only its own."""
        codes = [getattr(inspect.unwrap(self.function_class.forward), "__code__", None)]
        return any(code is None or _writes(code) for code in codes)

    def place(self, position: int) -> int:
        """The position of an argument of forward, the same for all that `*args` takes."""
        return min(position, len(self.schema.arguments) - 1)

    @cached_property
    def once_differentiable(self) -> bool:
        """Whether its backward is marked as one that cannot be differentiated, under whatever decorators."""
        decorated: Any = self.backward
        while decorated is not None:
            code = getattr(decorated, "__code__", None)
            if code is not None and code.co_filename == torch.autograd.function.__file__:
                return True
            decorated = getattr(decorated, "__wrapped__", None)
        return False

    @cached_property
    def leaves_torch(self) -> bool:
        """Whether its backward names what leaves torch, so that a second order cannot be taken through it."""
        code = getattr(inspect.unwrap(self.backward), "__code__", None) if self.backward else None
        return code is None or bool(_LEAVING & set(code.co_names))

    @cached_property
    def jvp(self) -> Callable[..., Any] | None:
        """Its rule for forward mode, taking a context and a tangent for each argument."""
        return self.function_class.jvp if overrides(self.function_class, "jvp") else None

    @cached_property
    def vmap(self) -> Callable[..., Any] | None:
        """Its rule for `vmap`, taking `info`, the batch dimension of each argument, and the arguments."""
        return self.function_class.vmap if overrides(self.function_class, "vmap") else None

    @property
    def random(self) -> bool:
        """Whether its forward draws, so that another run of it computes something else."""
        return "stochastic" in self.kinds

    @property
    def surrogate(self) -> bool:
        """Whether the derivative of a reference must never take the place of its gradient."""
        return bool(self.kinds & {"surrogate", "approximate", "nonlinear"})

    @property
    def where(self) -> str:
        """`file:line` of its forward."""
        return where(self.function_class.forward)

    @property
    def backward_where(self) -> str:
        """`file:line` of its backward."""
        return where(self.backward) if self.backward is not None else self.where

    @cached_property
    def differentiable(self) -> tuple[str, ...]:
        """The arguments that have gradients; torch finds no tensors in lists that are arguments."""
        arguments = self.schema.arguments
        last = arguments[-1].name if self.variadic else None
        return tuple(
            each.name
            for each in arguments
            if each.kind.is_tensor and (not each.kind.sequence or each.name == last)
        )

    def notes(self) -> list[str]:
        """What its runs have shown so far, for people."""
        facts, names = self.facts, self.schema.names
        written = [names[position] for position in sorted(facts.written or ())]
        return [
            *(f"`{name}` is copied first: forward writes into it" for name in written),
            *(f"`{self.schema.results[i].name}` is a copy: {why}" for i, why in sorted(facts.copied.items())),
            *(f"{what}, the reference in its place: {why}" for what, why in sorted(facts.instead.items())),
        ]

    def argument_names(self, given: Sequence[Any]) -> list[str]:
        """For each argument of its forward, the name of the operator's argument that it comes from."""
        names = list(self.schema.names)
        return [*names[:-1], *names[-1:] * (len(given) - len(names) + 1)] if self.variadic else names

    def packed(self, given: Sequence[Any]) -> list[Any]:
        """The values of the operator's arguments, from those that its forward takes; inverse of `spread`."""
        if not self.variadic:
            return list(given)
        fixed = len(self.schema.arguments) - 1
        return [*given[:fixed], list(given[fixed:])]

    def completed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as the schema has it: with defaults that it lacks, and what `*args` takes in a list."""
        names = self.schema.names
        if self.defaults:
            given = {*names[: len(args)], *kwargs}
            kwargs = {**{name: value for name, value in self.defaults.items() if name not in given}, **kwargs}
        if not self.variadic:
            return args, kwargs
        fixed = len(names) - 1
        if len(args) > fixed:
            listed = len(args) == fixed + 1 and isinstance(args[fixed], list | tuple)
            return args if listed else (*args[:fixed], list(args[fixed:])), kwargs
        return args, kwargs if names[-1] in kwargs else {**kwargs, names[-1]: []}

    def structured(self, results: Sequence[Any]) -> Any:
        """The results as `forward` returns them."""
        return structured(self.outputs, results)

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """The values of an operator's arguments as its forward takes them."""
        return [*values[:-1], *values[-1]] if self.variadic else list(values)


def _writes(code: types.CodeType) -> bool:
    """Whether code has an operation in it that works in place: `x.add_`, `x += y`, `x[0] = y`, `out=`."""
    if any(name.endswith("_") and not name.endswith("__") for name in code.co_names):
        return True
    if "mark_dirty" in code.co_names or any(isinstance(c, tuple) and "out" in c for c in code.co_consts):
        return True
    for instruction in dis.get_instructions(code):
        in_place = instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")
        if in_place or instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            return True
    return any(isinstance(constant, types.CodeType) and _writes(constant) for constant in code.co_consts)


class ClassFormula(Formula):
    """The backward of an adopted class, as a gradient formula."""


def overrides(function_class: type, name: str) -> bool:
    """Whether a class has a method of its own, and not the one that says that there is none."""
    mine = inspect.getattr_static(function_class, name, None)
    return mine is not inspect.getattr_static(torch.autograd.Function, name, None)
