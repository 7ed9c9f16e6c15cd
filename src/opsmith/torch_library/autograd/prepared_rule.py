"""The rule of calls that are alike: as `FormulaRule`, prepared once, with less to do for each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.formula import Formula
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import RecordedOperator
from opsmith.torch_library.autograd.gradient_values import (
    CallMetadata,
    TensorMetadata,
    constant_results,
    mixes_dtypes,
)
from opsmith.torch_library.autograd.node import bound_apply
from opsmith.torch_library.autograd.primitive import OperatorPrimitive
from opsmith.torch_library.autograd.vjp import note_formula, written_into
from opsmith.torch_library.distributed import dtensor, is_authors, mesh_of


@dataclass(frozen=True)
class _Kept:
    """Values that a call keeps for its backward besides saved tensors.

    Args:
        values: The arguments that formulas name and that are not tensors.
        unsaved: Shape and mesh of each input whose gradient is needed and that is not saved.
        shapes: Shape of each argument that is a tensor; empty where no formula names a shape.
        results: Metadata of the results; None for a single one.
    """

    values: tuple[Any, ...] = ()
    unsaved: tuple[tuple[torch.Size, Any], ...] = ()
    shapes: tuple[torch.Size | None, ...] = ()
    results: tuple[TensorMetadata | None, ...] = (None,)


_NOTHING = _Kept()


class PreparedRule:
    """Forward and backward of the calls of one signature.

    Args:
        primitive: The operator, for calls without lists of tensors.
        compute: Takes argument values, and returns all results.
        values: The argument values of one of the calls.

    Attributes:
        saved: Names of the saved tensors.
        apply: The `apply` of its node: it takes argument values, and returns the result, or all of several.
    """

    def __init__(
        self,
        primitive: OperatorPrimitive,
        compute: Callable[[Sequence[Any]], tuple[Any, ...]],
        values: Sequence[Any],
    ) -> None:
        schema = primitive.specification.schema
        self._primitive, self._compute, self._mixed = primitive, compute, mixes_dtypes(values)
        inputs = [value if isinstance(value, Tensor) and value.requires_grad else None for value in values]
        self._inputs = [None if each is None else TensorMetadata.of(each) for each in inputs]
        plan = primitive.plan(primitive.flattening.needed([each is not None for each in inputs]))
        self._plan: BackwardPlan = plan
        others = {each.name for each in schema.arguments if not each.kind.is_tensor}
        self.saved: Sequence[str] = [name for name in plan.saved if name not in others]
        self._values = [name for name in plan.saved if name in others]
        wanted = [(name, at) for at, name in enumerate(schema.names) if inputs[at] is not None]
        self._wanted = sorted(wanted, key=lambda each: each[0] not in self.saved)  # the saved ones first
        self._unsaved = [at for name, at in wanted if name not in self.saved]
        places = {name: at for at, name in enumerate((*schema.names, *schema.result_position))}
        self._pick_saved = _picker([places[name] for name in self.saved])
        self._pick_values = _picker([places[name] for name in self._values])
        self._single = len(schema.results) == 1
        named = {name for formula in plan.formulas for name in formula.parameters}
        self._takes_shapes = not named.isdisjoint(schema.shapes)
        self._keeps = bool(self._values or self._unsaved or self._takes_shapes or not self._single)
        self._constants: tuple[list[torch.dtype], list[int]] = ([], [])

        # Formulas get what is saved, the gradients, and what is kept.
        grads = schema.gradient_position
        self._names = (*self.saved, *grads, *self._values)
        # True if the gradients are what formulas return for these.
        self._quick = bool(plan.formulas) and named <= set(self._names)
        self._quick &= not (plan.derived or plan.refused or plan.zeros)
        self._used_grads = [at for name, at in grads.items() if name in named]
        at_name = dict(wanted)
        self._calls = [
            (
                formula,
                _by_position(formula),
                _picker([self._names.index(name) for name in formula.parameters]),
                [(name, at_name[name]) for name in formula.answers_for if name in at_name],
            )
            for formula in plan.formulas
            if self._quick
        ]
        self._expected = [
            (at, dtensor() if like.mesh else Tensor, like.dtype, like.device)
            for _, at in self._wanted
            if (like := self._inputs[at]) is not None
        ]
        self._saved_wanted = [self.saved.index(name) for name, _ in wanted if name in self.saved]
        recorded = RecordedOperator(primitive.specification, tuple(self.saved))
        self.apply = bound_apply(primitive.specification.short_name, self, recorded)

    def forward(self, ctx: Any, *values: Any) -> Any:
        """Compute the results, and save what the backward needs."""
        results = self._compute(values)
        dtypes = [result.dtype for result in results]
        known, constants = self._constants  # one value: another thread may note others
        if dtypes != known:
            constants = self._noted_constants(results, dtypes)
        if constants:
            ctx.non_differentiable = tuple([results[at] for at in constants])
        every = (*values, *results)
        ctx.to_save = self._pick_saved(every)
        ctx.materialize_grads = False
        if self._keeps:
            ctx.kept = _Kept(
                values=self._pick_values(every),
                unsaved=tuple([(values[at].shape, mesh_of(values[at])) for at in self._unsaved]),
                shapes=tuple(map(_shape, values)) if self._takes_shapes else (),
                # Zeros are made of the metadata of a result where another one has a gradient.
                results=(None,) if self._single else tuple(map(TensorMetadata.of, results)),
            )
        return results[0] if self._single else results

    def _noted_constants(self, results: Sequence[Tensor], dtypes: list[torch.dtype]) -> list[int]:
        """Note which results of these dtypes have no gradient, and return their positions.

        Raises:
            IntegerResultError: If a formula uses the gradient of one.
        """
        primitive = self._primitive
        found = constant_results(primitive.results, primitive.specification, self._plan, results)
        constants = [at for at, result in enumerate(results) if any(result is each for each in found)]
        self._constants = (dtypes, constants)
        return constants

    def backward(self, ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of the arguments."""
        saved, kept = ctx.saved_tensors, ctx.kept if self._keeps else _NOTHING
        unusual = torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling()
        # Inference tensors have no versions.
        unusual = unusual or torch.is_inference_mode_enabled()
        if self._quick and not (unusual or capabilities.any_autocast()):
            try:
                answers = self._by_formulas(saved, grads, kept)
            except Exception as error:
                if is_authors(error):
                    raise
                answers = None  # torch raises it again, or has placements for whole tensors
            if answers is not None:
                return answers
        if all(grad is None for grad in grads):
            return (None,) * len(self._inputs)
        given = dict(zip((*self.saved, *self._values), (*saved, *kept.values), strict=True))
        vjp = self._primitive.vjp(self._plan, self._metadata(given, kept), None)
        return tuple(vjp(given, grads))

    def _by_formulas(self, saved: Sequence[Any], grads: Sequence[Any], kept: _Kept) -> tuple[Any, ...] | None:
        """The gradient of each argument by the formulas; None where the checks of `Vjp` are needed.

        Raises:
            SavedTensorModifiedError: If a formula writes.
        """
        for at in self._used_grads:
            if grads[at] is None:
                return None
        every = (*saved, *grads, *kept.values)
        tensors = (*saved, *grads)
        before = capabilities.versions(tensors)
        answers: list[Any] = [None] * len(self._inputs)
        for formula, function, pick, answered in self._calls:
            try:
                answer = function(*pick(every))
            except Exception as error:
                note_formula(self._primitive.specification, formula, error)
                raise
            for name, at in answered:
                answers[at] = answer.get(name) if formula.joint else answer
        after = capabilities.versions(tensors)
        if before != after:
            self._refuse_writes(before, after)
        shapes = [saved[at].shape for at in self._saved_wanted]
        if self._unsaved:
            shapes += [shape for shape, _ in kept.unsaved]
        for (at, kind, dtype, device), shape in zip(self._expected, shapes, strict=True):
            gradient = answers[at]
            if type(gradient) is not kind or gradient.shape != shape or gradient.dtype is not dtype:
                return None
            if gradient.device != device or gradient.layout is not torch.strided:
                return None
        return tuple(answers)

    def _refuse_writes(self, before: Sequence[int | None], after: Sequence[int | None]) -> None:
        """Raise an error that names the tensor that a formula wrote to, and the formulas that use it."""
        name = next(name for name, old, new in zip(self._names, before, after, strict=False) if old != new)
        formulas = [formula for formula in self._plan.formulas if name in formula.parameters]
        raise written_into(self._primitive.specification, formulas, name)

    def _metadata(self, saved: dict[str, Any], kept: _Kept) -> CallMetadata:
        """Metadata of a call, for `Vjp`."""
        inputs: list[TensorMetadata | None] = [None] * len(self._inputs)
        unsaved = iter(kept.unsaved)
        for name, at in self._wanted:
            shape, mesh = (saved[name].shape, mesh_of(saved[name])) if name in saved else next(unsaved)
            like = self._inputs[at]
            inputs[at] = None if like is None else TensorMetadata(shape, like.dtype, like.device, mesh)
        return CallMetadata(tuple(inputs), kept.shapes or (None,) * len(inputs), kept.results, self._mixed)


def _by_position(formula: Formula) -> Callable[..., Any]:
    """The function of a formula, for values in the order of its parameters."""
    if all(
        each.kind is each.POSITIONAL_OR_KEYWORD for each in signature(formula.function).parameters.values()
    ):
        return formula.function
    return lambda *values: formula.function(**dict(zip(formula.keywords, values, strict=True)))


def _picker(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes the values at some places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda every: tuple([every[at] for at in places])


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None
