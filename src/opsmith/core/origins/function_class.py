"""Origin of an adopted operator: an `autograd.Function` class, with facts that its runs have shown."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.amp import autocast_mode

from opsmith import errors
from opsmith.core import source
from opsmith.core.annotations import hints_of
from opsmith.core.cached_property import cached_property
from opsmith.core.formula import Formula
from opsmith.core.forward_arguments import NO_PARAMETERS, ForwardArguments
from opsmith.core.location import where
from opsmith.core.origins.declared import Origin, Own, Part
from opsmith.core.schema import Schema, in_place_schema

Outputs = int | None | tuple["Outputs", ...]
"""The position of a result, None, or a tuple of these."""


class StructureMismatchError(Exception):
    """A value that does not have the expected structure."""

    def __init__(self, outputs: Outputs, value: Any) -> None:
        super().__init__(outputs, value)
        self.outputs, self.value = outputs, value


def leaves(outputs: Outputs, value: Any) -> Iterator[tuple[int | None, Any]]:
    """Yield each part of a value with the position of its result, or with None if it is no result.

    Raises:
        StructureMismatchError: If a tuple is expected, and the value is not a tuple of that length.

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
    """Arrange a flat list of results in this structure; inverse of `leaves`.

    Example:
        >>> structured((0, None, (1,)), ["a", "b"])
        ('a', None, ('b',))
    """
    if isinstance(outputs, tuple):
        return tuple(structured(inner, results) for inner in outputs)
    return None if outputs is None else results[outputs]


@dataclass(frozen=True)
class WrittenOutput:
    """An output of a class that is an argument, which the class marks as dirty.

    Args:
        argument: Name of the operator's argument.
    """

    argument: str


@dataclass(frozen=True)
class ObservedReturn:
    """The value of a run that does not have the expected structure; the error carries it.

    Args:
        structure: Its structure, in tuples of "tensor", None, `WrittenOutput`, and "other" for anything else.
        unmarked: True if the run should have written in place, but marked nothing.
    """

    structure: Any
    unmarked: bool = False


def side_by_side(outputs: Outputs) -> tuple[int | None, ...]:
    """Return the position of the result for each output at the top level; None for any other output.

    For torch, a nested tuple is not an output, and it has no gradient.

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
    "nonlinear": "the backward is not linear in grad_output",
    "stochastic": "the forward draws from torch's random state",
    "float32": "it computes in float32 for every dtype",
}
"""Kinds of Functions that an author may declare, with their meanings."""


_LEAVING = frozenset({"numpy", "np", "detach", "data", "item", "tolist", "no_grad", "asarray", "from_numpy"})


MAX_FLAGS = 1024
"""Maximum number of choices of flags with known facts: a string argument may differ in each call."""

Fact = TypeVar("Fact")


def note(known: dict[tuple[Any, ...], Fact], flags: tuple[Any, ...], fact: Fact) -> None:
    """Note a fact about a choice of flags; if there are too many facts, forget them: calls show them again.

    Example:
        >>> known = {}
        >>> note(known, (True,), frozenset({"x"}))
        >>> known
        {(True,): frozenset({'x'})}
    """
    if len(known) >= MAX_FLAGS and flags not in known:
        known.clear()
    known[flags] = fact


@dataclass
class ObservedFacts:
    """Facts about a class that its runs have shown, since its source does not show them.

    Facts under a choice of flags are added only by `note`.

    Attributes:
        written: Positions of the arguments that its forward writes into; None before the first run.
        written_under: The same for each choice of flags of a call, if its code may write.
        dirty_under: Names of the arguments that it marks as dirty, for each choice of flags.
        seen: True once a call has shown types.
        chosen: True once a call has marked nothing although other calls do, so that flags decide it.
        keeps_under: True if its backward needs inputs for a second order, for each choice of flags.
        copied: Results that are copied because they were inputs, or views of inputs or of one another, each
            with the reason.
        hides: True once a run has kept an object that may hide tensors on its context.
        grads_written: True if its backward writes into its grad_outputs; None before the first run.
        instead: Tasks that its own code cannot do, each with the obstacle.
        suspected: Tasks in which its own code raised, and that no other code has done.
        tried: Metadata of the results of trials, by the metadata of the arguments.
    """

    written: frozenset[int] | None = None
    written_under: dict[tuple[Any, ...], frozenset[int]] = field(default_factory=dict)
    dirty_under: dict[tuple[Any, ...], frozenset[str]] = field(default_factory=dict)
    seen: bool = False
    chosen: bool = False
    keeps_under: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    copied: dict[int, str] = field(default_factory=dict)
    hides: bool = False
    grads_written: bool | None = None
    instead: dict[str, Obstacle] = field(default_factory=dict)
    suspected: dict[str, Obstacle] = field(default_factory=dict)
    tried: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Obstacle:
    """Code of a class that prevents a task.

    Args:
        method: `forward` or `backward`: a gradient may need both.
        reason: torch's reason.
    """

    method: str
    reason: str

    def of(self, task: str) -> str:
        """Return the obstacle in words, for a task that begins with the name of a method."""
        return self.reason if task.startswith(self.method) else f"{self.method} raises {self.reason}"


@dataclass(frozen=True)
class Adoption:
    """The material of an adoption, to repeat it when a call shows types that it did not assume.

    Args:
        stated: True if the author stated a signature, which no call changes.
        reference: The reference as the author gave it.
        samples: The samples as the author gave them.
        observed: Arguments of samples and calls, with placeholders for tensors and objects.
        ran: True if the structure of the results was seen in a run.
    """

    stated: bool = True
    reference: Callable[..., Any] | None = None
    samples: Any = None
    observed: tuple[tuple[Any, ...], ...] = ()
    ran: bool = False

    @property
    def unseen(self) -> bool:
        """True if no call has shown the types yet."""
        return not self.stated and not self.observed


@dataclass(frozen=True)
class AdoptedFunction(Origin, errors.ErrorSubject):
    """An `autograd.Function` class as an operator uses it; the class itself is not changed.

    Args:
        operator: The operator's name.
        schema: The signature of the forward run on copies: the new value of a written argument is a result.
        function_class: The class.
        outputs: Structure of the value that its forward returns.
        claims: Keys of `KINDS`.
        parameters: The parameters of forward, as the operator's arguments carry them.
        reference: The function that is used where the class cannot be, if its author gave one.
        defaults: Defaults that are left out of the schema, because it cannot express one of them.
        mutates: Names of the arguments that its author declared as written; None if its runs show them.
        facts: Facts observed in its runs.
        provenance: Returns the material of the adoption: a function, since samples are not state of a call.
        makers: Make its forward a function of the operator's arguments: the first for an operator that
            returns new values, the second for one that writes them in place.
        rule: As for `Origin`.
        routes: As for `Origin`.
    """

    operator: str
    schema: Schema
    function_class: type[torch.autograd.Function]
    outputs: Outputs
    claims: frozenset[str] = frozenset({"true"})
    parameters: ForwardArguments = NO_PARAMETERS
    reference: Callable[..., Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    mutates: tuple[str, ...] | None = None
    facts: ObservedFacts = field(default_factory=ObservedFacts, compare=False)
    provenance: Callable[[], Adoption] = field(default=Adoption, compare=False)
    makers: tuple[Callable[[AdoptedFunction], Callable[..., Any]], ...] = ()
    rule: Any = None
    routes: Any = None

    kind = "class"
    casts = False
    computes_by = "the class's forward"
    declares_random = 'kind="stochastic"'
    takes_samples = "give the samples where the class is adopted, `adopt(..., samples=lambda: [(x, weight)])`"

    @property
    def subject(self) -> type[torch.autograd.Function]:
        """The class."""
        return self.function_class

    @property
    def referenced(self) -> bool:
        """True if its author gave a reference, which defines the right results."""
        return self.reference is not None

    def own(self, part: Part, device: str = "") -> Own | None:
        """Return a method of the class."""
        if part == "autocast":
            return Own("rule of `custom_fwd`") if self._handles_autocast else None
        name = _METHODS.get(part, "")
        function = self.backward if part == "gradient" else self.method(name)
        return None if function is None else Own(f"{name} of `{self.name}`", function, where(function))

    def method(self, name: str) -> Callable[..., Any] | None:
        """Return a method that the class defines; None if it has none."""
        return getattr(self.function_class, name) if overrides(self.function_class, name) else None

    @property
    def _handles_autocast(self) -> bool:
        both = (self.function_class.forward, self.backward)
        return any(source.decorated_in(each, autocast_mode.__file__) for each in both if each)

    @cached_property
    def _functions(self) -> list[Callable[..., Any]]:
        return [make(self) for make in self.makers]

    def compute(self, reference: Callable[..., Any] | None, *, in_place: bool) -> Any:
        """Return its forward as a function of the operator's arguments."""
        return self._functions[in_place]

    def functional(self, schema: Schema, reference: Callable[..., Any], *, faked: bool) -> dict[str, Any]:
        """Return the fields that differ in the functional form: the forward runs on copies."""
        forward = self.compute(None, in_place=False)
        return {"schema": self.schema, "reference": self.reference or forward, "origin": self}

    def runs(self, circumstance: str, *, suspected: bool = False) -> bool:
        """Return False if its forward fails in a circumstance, and no reference replaces it."""
        task = f"forward {circumstance}"
        fails = task in self.facts.instead or (suspected and task in self.facts.suspected)
        return self.referenced or not fails

    def sources(self) -> tuple[Any, ...]:
        """Return the class, and the reference of its author."""
        return self.function_class, self.reference

    def methods(self, names: Sequence[str]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return the methods of the class, and the name of the argument for each parameter of forward."""
        own = {name: self.method(name) for name in ("forward", "setup_context", "backward", "jvp")}
        return {name: each for name, each in own.items() if each}, self.parameters.names

    @cached_property
    def call_schema(self) -> Schema:
        """The operator's signature: arguments that the class marks as dirty are written in place."""
        return in_place_schema(self.schema) if self.schema.new_values else self.schema

    @property
    def name(self) -> str:
        """The class's name, in messages."""
        return self.function_class.__qualname__

    @cached_property
    def has_setup_context(self) -> bool:
        """True if its forward takes no context, and `setup_context` fills it."""
        return self.function_class.setup_context is not torch.autograd.Function.setup_context

    @cached_property
    def takes_self(self) -> bool:
        """True if its forward is a plain method, as in torch's oldest documents: its context is `self`."""
        return inspect.isfunction(inspect.getattr_static(self.function_class, "forward"))

    @cached_property
    def backward(self) -> Callable[..., Any] | None:
        """Its backward, which takes a context and the grad_outputs; None if it has none."""
        return self.method("backward") or self.method("vjp")

    def states_type(self, argument: str) -> bool:
        """Return True if `signature=` or an annotation of the forward says the type of an argument."""
        if self.provenance().stated:
            return True
        try:
            hint = hints_of(self.function_class.forward).get(argument)
        except (NameError, AttributeError, TypeError, SyntaxError):
            return False
        return hint not in (None, object, Any)

    @cached_property
    def may_write(self) -> bool:
        """True if the code of its forward writes into some tensor, or marks one as dirty."""
        return may_write(self.function_class)

    @cached_property
    def reads_requires_grad(self) -> bool:
        """True if the code of its forward reads a tensor's `requires_grad`."""
        return source.may_name(self.function_class.forward, {"requires_grad"})

    def flags(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of forward that may decide whether it writes, such as `inplace`.

        A bool, a string and None are kept; a tensor becomes its type, any other value `...`.
        """
        if not (self.may_write or self.schema.new_values):
            return ()
        return tuple(
            value
            if value is None or isinstance(value, bool | str)
            else torch.Tensor
            if isinstance(value, torch.Tensor)
            else ...
            for value in given
        )

    def written_positions(self, given: Sequence[Any]) -> dict[int, str]:
        """Return the positions in forward of the tensors that the operator writes into, with their names."""
        names = self.argument_names(given) if self.schema.new_values else []
        return {
            position: name
            for position, name in enumerate(names)
            if name in self.schema.new_values and isinstance(given[position], torch.Tensor)
        }

    def writes_nothing(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True for a call with flags for which earlier runs of the class have marked nothing."""
        if len(args) > len(self.schema.arguments):
            return False
        return self.facts.dirty_under.get(self.flags_of(args, kwargs)) == frozenset()

    def leaves_alone(self, flags: tuple[Any, ...], *, unknown: bool) -> bool:
        """Return True if runs with these flags marked nothing, and wrote nothing that other runs mark.

        Args:
            flags: The flags.
            unknown: The result if there was no such run.
        """
        facts = self.facts
        if flags not in facts.dirty_under:
            return unknown
        written = {self.schema.names[at] for at in facts.written_under.get(flags, ())}
        return not facts.dirty_under[flags] and written.isdisjoint(self.schema.new_values)

    def flags_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the flags of a call of the operator."""
        return self.flags(self.spread(self.schema.call_values(args, kwargs)))

    def argument_position(self, position: int) -> int:
        """Return the position of the operator's argument that carries an argument of forward."""
        positions = self.parameters.positions
        return positions[min(position, len(positions) - 1)]

    @cached_property
    def once_differentiable(self) -> bool:
        """True if its backward is decorated with `once_differentiable`, even under other decorators."""
        return source.decorated_in(self.backward, torch.autograd.function.__file__)

    @cached_property
    def leaves_torch(self) -> bool:
        """True if its backward uses code outside torch, so that it cannot be differentiated."""
        return source.may_name(self.backward, _LEAVING)

    @property
    def random(self) -> bool:
        """True if its forward draws random numbers, so that a second run computes other results."""
        return "stochastic" in self.claims

    @property
    def surrogate(self) -> bool:
        """True if the derivative of a reference must never replace its gradient."""
        return bool(self.claims & {"surrogate", "approximate", "nonlinear"})

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
        """Names of the arguments that have gradients; torch does not look for tensors inside lists."""
        collected = {slot.name for slot in self.parameters.slots if slot.collects}
        return tuple(
            each.name
            for each in self.schema.arguments
            if each.kind.is_tensor and (not each.kind.sequence or each.name in collected)
        )

    @property
    def _subject(self) -> tuple[str, str]:
        return self.operator, self.where

    def notes(self, *, in_place: bool) -> list[str]:
        """Return the facts observed so far, as text, about the in-place operator or its functional form."""
        facts, names = self.facts, self.schema.names
        new = self.schema.new_values if in_place else ()
        written = [names[position] for position in sorted(facts.written or ()) if names[position] not in new]
        kept = any(facts.keeps_under.values())
        return [
            *(f"`{name}` is written in place: forward marks it as dirty" for name in new),
            *["a call whose flags mark nothing returns new tensors, as `functional` does"]
            * (in_place and facts.chosen),
            *(
                f"`{name}` is copied if a gradient is needed: a second-order gradient needs the old value"
                for name in new
                if kept
            ),
            *(f"`{name}` is copied first: forward writes into it" for name in written),
            *(f"`{self.schema.results[i].name}` is a copy: {why}" for i, why in sorted(facts.copied.items())),
            *(f"{at}, {self._stand_in(at)}: {facts.instead[at].of(at)}" for at in sorted(facts.instead)),
        ]

    def _stand_in(self, what: str) -> str:
        """Return a description of the code that runs in place of its own code for a task."""
        if self.has_stand_in(what.partition(" ")[0]):
            return "replaced by the reference"
        return "on the real tensors of each example"

    def has_stand_in(self, method: str) -> bool:
        """Return True if the reference may replace `forward` or `backward`."""
        return self.reference is not None and not (method == "backward" and self.surrogate)

    def argument_names(self, given: Sequence[Any]) -> list[str]:
        """Return the name of the operator's argument for each argument of forward."""
        names = self.parameters.names
        return [*names, *names[-1:] * (len(given) - len(names))][: len(given)]

    def packed(self, given: Sequence[Any]) -> list[Any]:
        """Return the operator's arguments from forward's arguments; inverse of `spread`."""
        return self.parameters.packed(given)

    def completed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the schema, from the arguments of `apply` or of the operator."""
        parameters = self.parameters
        if parameters.plain and not self.defaults:
            return args, kwargs
        if not parameters.plain and parameters.are_packed(args, kwargs):
            return args, kwargs
        fixed = [slot.name for slot in parameters.slots if not slot.collects]
        given = {*fixed[: len(args)], *kwargs}
        kwargs = {**{name: value for name, value in self.defaults.items() if name not in given}, **kwargs}
        later = fixed[len(args) :]
        if parameters.plain or kwargs.keys() != set(later):
            return args, kwargs  # if it does not fit, the error of the call gives the reason
        return tuple(parameters.packed([*args, *[kwargs[name] for name in later]])), {}

    def structured(self, results: Sequence[Any]) -> Any:
        """Return the results in the structure that `forward` returns.

        As `apply` does, it returns a written argument itself, or detached if grad mode is off.
        """
        count = len(self.schema.new_values)
        if count and not torch.is_grad_enabled():
            written = [
                each.detach() if each is not None and each.requires_grad else each for each in results[:count]
            ]
            results = [*written, *results[count:]]
        return structured(self.outputs, results)

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments of its forward, from the operator's arguments."""
        return self.parameters.spread(values)


def class_of(origin: Origin) -> AdoptedFunction:
    """Return the origin of an operator that was adopted from a class."""
    assert isinstance(origin, AdoptedFunction)
    return origin


def may_write(function_class: type[torch.autograd.Function]) -> bool:
    """Return True if the code of a class's forward writes into some tensor, or marks one as dirty."""
    methods: list[Any] = [function_class.forward]
    if overrides(function_class, "setup_context"):
        methods.append(function_class.setup_context)
    codes = map(source.code_of, methods)
    return any(code is None or any(map(_writes, source.nested(code))) for code in codes)


def _writes(code: types.CodeType) -> bool:
    """True if code has an operation that writes in place: `x.add_`, `x += y`, `x[0] = y`, `out=`."""
    if any(name == "mark_dirty" or (name.endswith("_") and name[-2:] != "__") for name in code.co_names):
        return True
    return any(isinstance(each, tuple) and "out" in each for each in code.co_consts) or any(
        each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
        or (each.opname == "BINARY_OP" and each.argrepr.endswith("="))
        for each in dis.get_instructions(code)
    )


_METHODS: dict[Part, str] = {
    "forward": "forward",
    "gradient": "backward",
    "tangent": "jvp",
    "vmap": "vmap",
    "onnx": "symbolic",
}


class ClassFormula(Formula):
    """The backward of an adopted class as a gradient formula, or its `jvp` as a tangent formula."""


def overrides(function_class: type, name: str) -> bool:
    """True if a class defines this method itself; `torch.autograd.Function` only declares it."""
    return getattr(function_class, name, None) is not getattr(torch.autograd.Function, name, None)
