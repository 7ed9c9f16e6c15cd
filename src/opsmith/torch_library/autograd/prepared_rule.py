"""The rule of calls of the same signature: a `FormulaRule`, prepared once, with less work in each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opsmith.core.formula import Formula
from opsmith.core.gradients import NEEDED
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import RecordedOperator
from opsmith.torch_library.autograd.gradient_values import (
    CallMetadata,
    TensorMetadata,
    constant_results,
    fit,
    mixes_dtypes,
)
from opsmith.torch_library.autograd.node import BoundNode
from opsmith.torch_library.autograd.primitive import OperatorPrimitive
from opsmith.torch_library.autograd.vjp import formula_answers, list_answers, note_formula, written_into
from opsmith.torch_library.dtensor.placements import dtensor, is_authors, mesh_of

Kept = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
"""Values other than saved tensors that a call keeps for its backward, also in C++: other arguments; shapes of
flat arguments; their meshes; metadata of results whose gradients may be needed as zeros."""

VALUES, SHAPES, MESHES, METADATA = range(4)
_NOTHING: Kept = ((), (), (), ())


CONSTANT, USED, FOLLOWED = 1, 2, 4
"""Roles of a result in C++: without a gradient; gradient used by a formula; gradient by the reference."""


class KernelCall(NamedTuple):
    """A kernel for calls from C++.

    Args:
        function: The kernel, or the reference.
        validate: Takes the returned value, the argument values and the earlier versions of the tensors (None
            for a trusted kernel); raises an error, or returns all results.
        trusted: True if it writes only into arguments declared as written, and returns new tensors.
        has_graph: True if a result may require a gradient.
        contiguous: True if it takes written arguments only in contiguous memory.
    """

    function: Callable[..., Any]
    validate: Callable[[Any, Sequence[Any], tuple[int, ...] | None], tuple[Any, ...]]
    trusted: bool
    has_graph: bool
    contiguous: bool


@dataclass(frozen=True)
class _FormulaCall:
    """The call of a formula in the backward.

    Args:
        formula: The formula.
        function: Takes its arguments by position.
        sources: The arguments' positions among the saved tensors, gradients and kept values; several for a
        list.
        pick: Takes the arguments from these values.
        inputs: The inputs whose gradients it computes, each with its positions among the flat arguments.
        grads: Positions of the results whose gradients it uses; empty if not all of them can be missing.
        plain: The position of the gradient, if it returns one bare gradient; None for a dict or a list.
    """

    formula: Formula
    function: Callable[..., Any]
    sources: list[int | list[int]]
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: list[tuple[str, list[int]]]
    grads: list[int]
    plain: int | None


class PreparedRule:
    """Forward and backward of the calls of one signature.

    Args:
        primitive: The operator.
        compute: Takes flat arguments, and returns all results.
        flat: The flat arguments of one of the calls.
        written: Positions of the flat arguments that are written into; they are the first results.
        shown: Name of the operator in the graph; by default the primitive's name.

    Attributes:
        saved: Names of the saved tensors, one for each.
        apply: The `apply` of its node: it takes flat arguments, and returns the result, or a tuple of all
            results.
    """

    def __init__(
        self,
        primitive: OperatorPrimitive,
        compute: Callable[[Sequence[Any]], tuple[Any, ...]],
        flat: Sequence[Any],
        written: Sequence[int] = (),
        shown: str | None = None,
    ) -> None:
        specification, schema = primitive.specification, primitive.specification.schema
        flattening, names = primitive.flattening, primitive.flattening.names
        self._primitive, self._compute, self._mixed = primitive, compute, mixes_dtypes(flat)
        differentiable = [specification.gradients.differentiable(name) for name in names]
        self._inputs = [
            TensorMetadata.of(value) if isinstance(value, Tensor) and value.requires_grad and own else None
            for value, own in zip(flat, differentiable, strict=True)
        ]
        self._written = written
        self._on_mesh = any(isinstance(value, Tensor) and mesh_of(value) for value in flat)
        plan = primitive.plan(flattening.needed([each is not None for each in self._inputs]))
        self._plan, self._schema, self._single = plan, schema, len(schema.results) == 1
        self._by_formulas_alone = not (plan.derived or plan.refused)
        self._followed = [schema.result_position[name] for name in plan.follows_hidden]
        self._wanted = [at for at, like in enumerate(self._inputs) if like is not None]
        self._constants: tuple[list[torch.dtype], list[int]] = ([], [])
        spans = {name: range(*flattening.spans[name].indices(len(names))) for name in schema.names}
        for name, at in schema.result_position.items():
            spans[name] = range(len(names) + at, len(names) + at + 1)
        self._plan_kept(spans, differentiable)
        self._plan_calls(spans)
        number = {at: each for each, at in enumerate(self._saved_places)}
        self._expected = [
            (at, number.get(at), dtensor() if like.mesh else Tensor, like.dtype, like.device)
            for at, like in enumerate(self._inputs)
            if like is not None
        ]
        recorded = RecordedOperator(specification, tuple(name for name, _, _ in self._saved))
        bound = BoundNode(shown or specification.short_name, self, recorded)
        self._node, self._apply = bound.node, bound.apply
        self.apply = self._apply_written if written else self._apply

    def _plan_kept(self, spans: Mapping[str, range], differentiable: Sequence[bool]) -> None:
        """Plan the values that a call saves and keeps for its backward.

        Args:
            spans: Positions of each argument and result among all flat values.
            differentiable: True for each flat argument that may have a gradient.
        """
        schema, flattening, plan = self._schema, self._primitive.flattening, self._plan
        tensors = (*schema.tensor_names, *schema.result_position)
        self._saved = [
            (name, name in schema.names and flattening.is_list(name), spans[name])
            for name in plan.saved
            if name in tensors
        ]
        self.saved: Sequence[str] = [name for name, _, span in self._saved for _ in span]
        self._saved_places = [at for _, _, span in self._saved for at in span]
        self._pick_saved = _picker(self._saved_places)
        self._copied = [at for at in self._written if at in self._saved_places]
        arguments = enumerate(self._saved_places)
        count = len(differentiable)
        self._constant = [number for number, at in arguments if at < count and not differentiable[at]]
        named = {name for formula in plan.formulas for name in formula.parameters}
        # A second-order gradient may run the reference again.
        kept = {*plan.saved, *named}.difference(tensors)
        self._values = [name for name in schema.names if name in kept]
        self._value_places = [spans[name][0] for name in self._values]
        self._pick_values = _picker(self._value_places)
        unsaved = any(at not in self._saved_places for at in self._wanted)
        self._keeps_shapes = bool(named & set(schema.shapes) or unsaved or plan.zeros)
        grads = map(self._grads_of, plan.formulas)
        self._filled = sorted({at for used in grads if len(used) > 1 for at in used})
        self._pick_filled = _picker(self._filled)
        self._keeps = bool(self._values or self._keeps_shapes or self._on_mesh or self._filled)

    def _plan_calls(self, spans: Mapping[str, range]) -> None:
        """Plan the source of each argument of the formulas, and the place of each gradient."""
        schema, plan, flattening = self._schema, self._plan, self._primitive.flattening
        # The saved tensors, the gradients, the kept values, and, if a formula takes them, its needed inputs.
        at: dict[str, int | list[int]] = {}
        end = 0
        for name, is_list, span in self._saved:
            at[name] = [*range(end, end + len(span))] if is_list else end
            end += len(span)
        at |= {name: end + place for name, place in schema.gradient_position.items()}
        end += len(schema.results)
        at |= {name: end + place for place, name in enumerate(self._values)}
        end += len(self._values)
        if self._keeps_shapes:
            at |= {name: end + spans[tensor][0] for name, tensor in schema.shapes.items()}
            end += len(flattening.names)
        self._needed: list[frozenset[str]] = []
        self._calls: list[_FormulaCall] = []
        for formula, inputs in zip(plan.formulas, plan.inputs, strict=True):
            if NEEDED in formula.parameters:
                at[NEEDED] = end + len(self._needed)
                self._needed.append(frozenset(inputs))
            sources = [at[name] for name in formula.parameters]
            plain = not formula.joint and not flattening.is_list(inputs[0])
            self._calls.append(
                _FormulaCall(
                    formula,
                    _by_position(formula),
                    sources,
                    _picker(sources),
                    [(name, [*spans[name]]) for name in inputs],
                    [] if self._single else self._grads_of(formula),
                    spans[inputs[0]][0] if plain else None,
                )
            )
        self._zeros = [
            place for name in plan.zeros for place in spans[name] if self._inputs[place] is not None
        ]

    def apply_in_cpp(self, kernel: KernelCall) -> Callable[..., Any] | None:
        """The `apply` of its node in C++; None if it is not built, or does not support such a rule."""
        in_cpp = capabilities.calls_in_cpp()
        if in_cpp is None or self._zeros or not self._primitive.flattening.is_flat:
            return None
        used = {at for formula in self._plan.formulas for at in self._grads_of(formula)}
        roles = [
            CONSTANT * (not each.differentiable) | USED * (at in used) | FOLLOWED * (at in self._followed)
            for at, each in enumerate(self._primitive.specification.schema.results)
        ]
        formulas = [
            (call.function, tuple(call.sources), self._wanted_of(call), call.plain is None)
            for call in self._calls
        ]

        def validated(returned: Any, flat: tuple[Any, ...], versions: tuple[int, ...] | None) -> Any:
            results = kernel.validate(returned, flat, versions)
            self._noted_constants(results, [result.dtype for result in results])
            return results[0] if self._single else results

        def fitted(at: int, gradient: Any, saved: Sequence[Any], kept: Kept | None) -> Tensor:
            return self._fitted(at, gradient, saved, kept or _NOTHING)

        def spread(number: int, answer: Any) -> tuple[Any, ...]:
            call, answers = self._calls[number], [None] * len(self._inputs)
            self._spread(call, answer, answers)
            return tuple([answers[at] for at in self._wanted_of(call)])

        def note(number: int, error: Exception) -> None:
            note_formula(self._primitive.specification, self._calls[number].formula, error)

        apply: Callable[..., Any] = in_cpp.rule(
            node=self._node,
            kernel=kernel.function,
            names=self._schema.names[self._schema.positional :] or None,
            validate=validated,
            fit=fitted,
            spread=spread,
            refuse_writes=self._refuse_write,
            note=note,
            needed=tuple(self._needed),
            trusted=kernel.trusted,
            results=roles,
            saved=self._saved_places,
            values=self._value_places,
            filled=self._filled,
            keeps=self._keeps,
            keeps_shapes=self._keeps_shapes,
            on_mesh=self._on_mesh,
            alone=self._by_formulas_alone and not self._on_mesh,  # torch may raise there: `Vjp`
            formulas=formulas,
        )
        return apply

    def _grads_of(self, formula: Formula) -> list[int]:
        """Positions of the results whose gradients a formula uses."""
        grads = self._schema.gradient_position
        return [grads[name] for name in formula.parameters if name in grads]

    def forward(self, ctx: Any, *given: Any) -> Any:
        """Compute the results, and save the values that the backward needs."""
        flat, (before,) = (given[:-1], given[-1:]) if self._written else (given, ({},))
        results = self._compute(flat)
        dtypes = [result.dtype for result in results]
        known, constants = self._constants  # read once: another thread may replace it
        if dtypes != known:
            constants = self._noted_constants(results, dtypes)
        if constants:
            ctx.non_differentiable = tuple([results[at] for at in constants])
        every = (*flat, *results)
        if self._written:
            ctx.dirty_tensors = tuple([flat[at] for at in self._written])
            if before:
                every = tuple([before.get(at, value) for at, value in enumerate(every)])
        ctx.to_save = self._pick_saved(every)
        ctx.materialize_grads = False
        if self._keeps:
            ctx.kept = (
                self._pick_values(every),
                tuple(map(_shape, flat)) if self._keeps_shapes else (),
                tuple(map(_mesh, flat)) if self._on_mesh else (),
                tuple([tuple(TensorMetadata.of(each)) for each in self._pick_filled(results)]),
            )
        return results[0] if self._single else results

    def _apply_written(self, *flat: Any) -> Any:
        """Call the node with copies of overwritten values: second-order gradients go through them."""
        return self._apply(*flat, {at: flat[at].clone() for at in self._copied})

    def _noted_constants(self, results: Sequence[Tensor], dtypes: list[torch.dtype]) -> list[int]:
        """Note which results of these dtypes have no gradient, and return their positions.

        Raises:
            IntegerResultError: If a formula uses the gradient of such a result.
        """
        primitive = self._primitive
        found = constant_results(primitive.results, primitive.specification, self._plan, results)
        constants = [at for at, result in enumerate(results) if any(result is each for each in found)]
        self._constants = (dtypes, constants)
        return constants

    def backward(self, ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of everything that the node takes."""
        return (*self._gradients(ctx, grads), *([None] if self._written else []))

    def _gradients(self, ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of the flat arguments."""
        # torch has freed the tensors of a node that runs backward again; a node without tensors may do so.
        saved, kept = ctx.saved_tensors if self.saved else (), ctx.kept if self._keeps else _NOTHING
        if all(grad is None for grad in grads):
            return (None,) * len(self._inputs)
        unusual = torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling()
        # Inference tensors have no versions.
        unusual = unusual or capabilities.any_autocast() or torch.is_inference_mode_enabled()
        unusual = unusual or not self._by_formulas_alone
        if not (unusual or any(grads[at] is not None for at in self._followed)):
            try:
                return self._by_formulas(saved, grads, kept)
            except Exception as error:
                if not self._on_mesh or is_authors(error):
                    raise  # otherwise torch raises it again, or has placements for whole tensors
        saved = list(saved)
        for at in self._constant:  # they have no second order
            saved[at] = None if saved[at] is None else saved[at].detach()
        flat, given = iter(saved), {}
        for name, is_list, span in self._saved:
            items = [next(flat) for _ in span]
            given[name] = items if is_list else items[0]
        given |= dict(zip(self._values, kept[VALUES], strict=True))
        vjp = self._primitive.vjp(self._plan, self._metadata(saved, grads, kept), None)
        return tuple(vjp(given, grads))

    def _by_formulas(self, saved: Sequence[Any], grads: Sequence[Any], kept: Kept) -> tuple[Any, ...]:
        """The gradient of each flat argument by the formulas, without a graph.

        Raises:
            SavedTensorModifiedError: If a formula writes into a tensor.
        """
        given = grads
        if any(grads[at] is None for at in self._filled):
            given = list(grads)
            for at, metadata in zip(self._filled, kept[METADATA], strict=True):
                given[at] = TensorMetadata(*metadata).zeros() if grads[at] is None else grads[at]
        every = (*saved, *given, *kept[VALUES], *kept[SHAPES], *self._needed)
        tensors = (*saved, *given)
        count = self._writes if self._on_mesh else capabilities.versions
        before = count(tensors)
        answers: list[Any] = [None] * len(self._inputs)
        for call in self._calls:
            if call.grads and all(grads[at] is None for at in call.grads):
                for at in self._wanted_of(call):  # a gradient is linear in `grad`, which is zero
                    answers[at] = self._like(at, saved, kept).zeros()
                continue
            try:
                answer = call.function(*call.pick(every))
            except Exception as error:
                note_formula(self._primitive.specification, call.formula, error)
                raise
            if call.plain is not None:
                answers[call.plain] = answer
            else:
                self._spread(call, answer, answers)
        after = count(tensors)
        if before != after:
            changed = (old != new for old, new in zip(before, after, strict=True))
            self._refuse_write([*changed].index(True))
        for at in self._zeros:
            answers[at] = self._like(at, saved, kept).zeros()
        for at, number, kind, dtype, device in self._expected:
            gradient = answers[at]
            shape = kept[SHAPES][at] if number is None else saved[number].shape
            fits = type(gradient) is kind and gradient.shape == shape and gradient.dtype is dtype
            if not (fits and gradient.device == device and gradient.layout is torch.strided):
                answers[at] = self._fitted(at, gradient, saved, kept)
        return tuple(answers)

    @staticmethod
    def _writes(tensors: Sequence[Tensor | None]) -> list[int | None]:
        return [
            None if each is None else capabilities.writes_of(capabilities.layers(each)) for each in tensors
        ]

    def _wanted_of(self, call: _FormulaCall) -> list[int]:
        return [at for _, places in call.inputs for at in places if self._inputs[at] is not None]

    def _spread(self, call: _FormulaCall, answer: Any, answers: list[Any]) -> None:
        """Put the gradients of several tensors into their positions."""
        specification, formula = self._primitive.specification, call.formula
        found = formula_answers(specification, formula, answer, [name for name, _ in call.inputs])
        for name, places in call.inputs:
            items: Sequence[Any] = [found[name]]
            if self._primitive.flattening.is_list(name):
                items = list_answers(specification, formula, name, found[name], len(places))
            for at, item in zip(places, items, strict=True):
                if self._inputs[at] is not None:
                    answers[at] = item

    def _like(self, at: int, saved: Sequence[Any], kept: Kept) -> TensorMetadata:
        """Metadata that the gradient of a flat argument must have."""
        like = self._inputs[at]
        assert like is not None
        number = next(number for place, number, *_ in self._expected if place == at)
        shape = kept[SHAPES][at] if number is None else saved[number].shape
        assert shape is not None
        return TensorMetadata(shape, like.dtype, like.device, kept[MESHES][at] if self._on_mesh else None)

    def _fitted(self, at: int, gradient: Any, saved: Sequence[Any], kept: Kept) -> Tensor:
        """A gradient that a formula returned, fitted to its input."""
        specification, flattening = self._primitive.specification, self._primitive.flattening
        formula = next(call.formula for call in self._calls if at in self._wanted_of(call))
        return fit(
            gradient,
            self._like(at, saved, kept),
            label=flattening.labels[at],
            operator=specification.name,
            formula=formula,
            mixed=self._mixed,
        )

    def _refuse_write(self, at: int) -> None:
        """Raise an error with the tensor into which a formula wrote, and the formulas that use it."""
        schema = self._primitive.specification.schema
        names = (*self.saved, *(each.gradient_name() for each in schema.results))
        formulas = [formula for formula in self._plan.formulas if names[at] in formula.parameters]
        raise written_into(self._primitive.specification, formulas, names[at])

    def _metadata(self, saved: Sequence[Any], grads: Sequence[Any], kept: Kept) -> CallMetadata:
        """Metadata of a call, for `Vjp`."""
        inputs: list[TensorMetadata | None] = [None] * len(self._inputs)
        for at in self._wanted:
            inputs[at] = self._like(at, saved, kept)
        results = [None if grad is None else TensorMetadata.of(grad) for grad in grads]
        for at, metadata in zip(self._filled, kept[METADATA], strict=True):
            results[at] = results[at] or TensorMetadata(*metadata)
        shapes = kept[SHAPES] or (None,) * len(inputs)
        return CallMetadata(tuple(inputs), shapes, tuple(results), self._mixed)


def _by_position(formula: Formula) -> Callable[..., Any]:
    """The function of a formula, called with values in the order of its parameters."""
    kinds = {each.kind for each in signature(formula.function).parameters.values()}
    if all(kind is kind.POSITIONAL_OR_KEYWORD for kind in kinds):
        return formula.function
    return lambda *values: formula.function(**dict(zip(formula.keywords, values, strict=True)))


def _picker(places: Sequence[int | list[int]]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes values, or lists of values, from some positions of a sequence."""
    if not places:
        return lambda every: ()
    if len(places) > 1 and all(isinstance(at, int) for at in places):
        return itemgetter(*places)
    return lambda every: tuple(
        [every[at] if isinstance(at, int) else [every[item] for item in at] for at in places]
    )


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _mesh(value: Any) -> Any:
    return mesh_of(value) if isinstance(value, Tensor) else None
