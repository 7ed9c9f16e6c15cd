"""The vector-Jacobian product of an operator: formulas, checks of their results, and derived gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula, NotImplementedGradient, Zero, listed
from opsmith.core.gradients import AUTOCAST, NEEDED
from opsmith.core.origins.function_class import ClassFormula
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import without_casts
from opsmith.torch_library.autograd.gradient_values import CallMetadata, TensorMetadata, fit
from opsmith.torch_library.autograd.graph_cuts import refuse_graph_cut, refusing_cuts
from opsmith.torch_library.autograd.pullback import vjp_by_recompute
from opsmith.torch_library.autograd.random_state import RandomState, generators_in
from opsmith.torch_library.dtensor.placements import (
    dtensors_in,
    gathered,
    is_unplaced,
    replicating,
    warn_gathers,
)
from opsmith.torch_library.flattening import ArgumentFlattening, ResultFlattening
from opsmith.torch_library.symbolic_sizes import for_symbolic_sizes


@dataclass(eq=False)  # torch 2.11 hashes it during its construction
class Vjp:
    """The vector-Jacobian product of one call, without its saved tensors.

    Args:
        specification: The operator.
        plan: The backward plan.
        flattening: Flat form of the arguments.
        results: Flat form of the results.
        metadata: Metadata of the call's tensors.
        state: Random state of the forward, if the backward recomputes a random reference.
        autocast: Autocast of the call, under which the forward of a class runs again.
    """

    specification: Specification
    plan: BackwardPlan
    flattening: ArgumentFlattening
    results: ResultFlattening
    metadata: CallMetadata
    state: RandomState | None
    autocast: str | None = None

    def __call__(self, saved: Mapping[str, Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the flat arguments.

        Args:
            saved: Saved inputs and results by name; lists as lists.
            grads: Gradient of each flat result, or None.
        """
        self._refuse()
        values = (*saved.values(), *grads)
        # A class handles autocast itself, as in `apply`.
        casts = without_casts(grads) if self.specification.origin.casts else nullcontext()
        with replicating(values), casts:
            try:
                return self._gradients(saved, grads)
            except Exception as error:
                if not (dtensors_in(values) and is_unplaced(error)):
                    raise
                gradients = self._on_whole_tensors(saved, grads)
                warn_gathers(self.specification, values, error)
                return gradients

    def _fitted(self, label: str, expected: TensorMetadata, formula: Formula, answer: Any) -> Tensor:
        """A gradient that a formula returned, fitted to its input."""
        if expected.describes(answer):
            fitted: Tensor = answer
            return fitted
        mixed = self.metadata.mixed or self.specification.origin.kind == "class"
        operator = self.specification.name
        return fit(answer, expected, label=label, operator=operator, formula=formula, mixed=mixed)

    def _on_whole_tensors(
        self, saved: Mapping[str, Any], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Compute all gradients on every rank."""
        found = self.metadata
        inputs, results = (
            tuple(each and TensorMetadata(each.shape, each.dtype, each.device) for each in every)
            for every in (found.inputs, found.results)
        )
        plain = replace(self, metadata=CallMetadata(inputs, found.shapes, results, found.mixed))
        names, values = zip(*saved.items(), strict=True) if saved else ((), ())
        local = dict(zip(names, map_tensors(gathered, values), strict=True))
        gradients = plain(local, map_tensors(gathered, grads))
        pairs = zip(gradients, found.inputs, strict=True)
        return [each if each is None or like is None else like.placed(each) for each, like in pairs]

    def _gradients(self, saved: Mapping[str, Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * len(self.metadata.inputs)
        self._set_zeros(gradients, self.plan.zeros)
        for formula, inputs in zip(self.plan.formulas, self.plan.inputs, strict=True):
            self._run(formula, inputs, saved, grads, gradients)
        self._derive(saved, grads, gradients)
        return gradients

    def _refuse(self) -> None:
        specification = self.specification
        for name in self.plan.refused:
            rule = specification.gradients.rules[name]
            assert isinstance(rule, NotImplementedGradient)
            raise specification.error(
                errors.GradientNotImplementedError,
                f"the gradient of `{name}` is not implemented: {rule.reason}",
                argument=name,
                hint=f"call it with `{name}.detach()`, or give a formula: `.gradients({name}=...)`",
            )
        if specification.opaque and self.plan.derived and specification.gradients.stand_in is None:
            name = self.plan.derived[0]
            raise specification.error(
                errors.MissingGradientError,
                f"the operator is opaque, but no gradient is given for `{name}`",
                argument=name,
                hint=f"write `.gradients({name}=lambda grad: ...)`, or `{name}=opsmith.non_differentiable`",
            )

    def _set_zeros(self, gradients: list[Tensor | None], names: Sequence[str]) -> None:
        for index in self.flattening.positions(names):
            expected = self.metadata.inputs[index]
            if expected is not None:
                gradients[index] = expected.zeros()

    def _run(
        self,
        formula: Formula,
        inputs: Sequence[str],
        saved: Mapping[str, Any],
        grads: Sequence[Tensor | None],
        gradients: list[Tensor | None],
    ) -> None:
        named = self._used_grads(formula)
        if named and all(grads[index] is None for index in named):
            self._set_zeros(gradients, inputs)  # a gradient is linear in `grad`, which is zero
            return
        arguments = {
            keyword: self._argument(formula, name, saved, grads, inputs)
            for keyword, name in zip(formula.keywords, formula.parameters, strict=True)
        }
        answer = call_formula(self.specification, formula, arguments)
        answers = formula_answers(self.specification, formula, answer, inputs)
        for name in inputs:
            items = self._items(formula, name, answers[name])
            for item, index in enumerate(self.flattening.positions([name])):
                expected = self.metadata.inputs[index]
                if expected is None:
                    continue
                label = self.flattening.labels[index]
                gradient = self._fitted(label, expected, formula, items[item])
                constant = isinstance(formula, ClassFormula) and _may_be_zero(gradient)
                if torch.is_grad_enabled() and not (constant or isinstance(items[item], Zero)):
                    find = partial(self._item, formula, name, item)
                    gradient = refuse_graph_cut(self.specification, formula, label, gradient, arguments, find)
                gradients[index] = gradient

    def _argument(
        self,
        formula: Formula,
        name: str,
        saved: Mapping[str, Any],
        grads: Sequence[Tensor | None],
        inputs: Sequence[str],
    ) -> Any:
        schema = self.specification.schema
        if name == NEEDED:
            return frozenset(inputs)
        if name == AUTOCAST:
            return self.autocast
        if name in schema.shapes:
            return self.metadata.shapes[self.flattening.spans[schema.shapes[name]].start]
        position = schema.gradient_position.get(name)
        if position is None:
            return saved[name]
        if isinstance(formula, ClassFormula):  # a class decides by `set_materialize_grads`
            return grads[position]
        filled = [
            expected.zeros() if expected is not None and gradient is None else gradient
            for expected, gradient in zip(self.metadata.results, grads, strict=True)
        ]
        return self.results.item(schema.results[position].name, filled)

    def _indices_of(self, positions: Iterable[int]) -> list[int]:
        """Flat positions of some results."""
        results = self.specification.schema.results
        return self.results.positions(results[position].name for position in positions)

    def _used_grads(self, formula: Formula) -> list[int]:
        """Flat positions of the results whose gradients a formula uses."""
        positions = self.specification.schema.gradient_position
        return self._indices_of(positions[name] for name in formula.parameters if name in positions)

    def _item(self, formula: Formula, name: str, index: int, answer: Any) -> Any:
        return self._items(formula, name, answer[name] if formula.joint else answer)[index]

    def _items(self, formula: Formula, name: str, answer: Any) -> Sequence[Any]:
        if not self.flattening.is_list(name):
            return [answer]
        count = len(self.flattening.positions([name]))
        return list_answers(self.specification, formula, name, answer, count)

    def _derive(
        self, saved: Mapping[str, Any], grads: Sequence[Tensor | None], gradients: list[Tensor | None]
    ) -> None:
        """Add the gradients that no formula covers: of inputs without formula, and through hidden results."""
        specification, plan = self.specification, self.plan
        positions = specification.schema.result_position
        followed = [
            positions[name]
            for name in plan.follows_hidden
            if any(grads[index] is not None for index in self._indices_of([positions[name]]))
        ]
        if not plan.derived and not followed:
            return
        self._refuse_to_follow(followed)
        flat = self.flattening.flatten([saved[name] for name in specification.schema.names])
        self._refuse_to_draw_again(flat)

        def add(names: Sequence[str], function: Any, what: str, grads: Sequence[Tensor | None]) -> None:
            indices = self._input_indices(names)
            with refusing_cuts(specification, function, what, derived=True):
                answers = vjp_by_recompute(function, self.flattening, flat, indices, grads, self.state)
            for index, answer in zip(indices, answers, strict=True):
                known = gradients[index]
                gradients[index] = answer if known is None else known + answer

        function, wanted, what = specification.reference, grads, "the reference"
        if specification.gradients.stand_in is not None:
            function, what = specification.gradients.stand_in, "the stand-in"
            wanted = [grads[index] for index in self._indices_of(specification.schema.visible)]
        if plan.derived:
            add(plan.derived, function, what, wanted)
        function, results = specification.reference, specification.schema.results
        for formula, names in zip(plan.formulas, plan.inputs, strict=True):
            blind = [p for p in followed if results[p].gradient_name() not in formula.parameters]
            if blind:
                kept = self._indices_of(blind)
                only = [grad if index in kept else None for index, grad in enumerate(grads)]
                add(names, function, "the reference", only)

    def _refuse_to_follow(self, followed: list[int]) -> None:
        specification = self.specification
        if specification.opaque and followed:
            hidden = specification.schema.results[followed[0]]
            raise specification.error(
                errors.HiddenResultError,
                "a second-order gradient, or forward mode, needs the derivative of the hidden result "
                f"`{hidden.name}`, but the operator is opaque",
                argument=hidden.name,
                where=self.plan.formulas[0].where,
                hint=f"let the formulas use `{hidden.gradient_name()}`; if `{hidden.name}` "
                f"depends on no input, declare `results={{{hidden.name!r}: opsmith.non_differentiable}}`",
            )

    def _refuse_to_draw_again(self, flat: Sequence[Any]) -> None:
        specification = self.specification
        draws = specification.random or generators_in(flat)
        if draws and self.state is None and specification.gradients.stand_in is None:
            raise specification.error(
                errors.ForwardModeError,
                "it draws random numbers: its reference cannot be run again in forward mode or torch.func",
                hint="return the drawn numbers as a hidden result that is non-differentiable, "
                "and give formulas that use it",
            )

    def _input_indices(self, names: Sequence[str]) -> list[int]:
        return [p for p in self.flattening.positions(names) if self.metadata.inputs[p] is not None]


def _may_be_zero(gradient: Tensor) -> bool:
    """Return True if all numbers of a gradient are zero, or are not known yet."""
    value = capabilities.innermost_value(gradient)
    return type(value) is not Tensor or value.is_meta or not bool(value.any())


def call_formula(
    specification: Specification, formula: Formula, arguments: Mapping[str, Any], kind: str = "gradient"
) -> Any:
    """Run a formula, and check that it writes into no argument.

    Args:
        specification: The operator.
        formula: The formula.
        arguments: Its arguments by keyword.
        kind: `gradient` or `tangent`, in messages.

    Raises:
        SavedTensorModifiedError: If it writes into an argument.
    """
    tensors = [(name, tensor) for name, value in arguments.items() for tensor in tensors_in([value])]
    before = [capabilities.writes_of(capabilities.layers(tensor)) for _, tensor in tensors]
    function = for_symbolic_sizes(formula.function, arguments.values())
    own = f"the {kind} of {listed(formula.answers_for)}"
    try:
        with refusing_cuts(specification, formula.function, own):
            returned = function(**arguments)
    except Exception as error:
        note_formula(specification, formula, error, kind)
        raise
    for (name, tensor), count in zip(tensors, before, strict=True):
        if count is not None and capabilities.writes_of(capabilities.layers(tensor)) != count:
            raise written_into(specification, [formula], name, kind)
    return returned


def formula_answers(
    specification: Specification,
    formula: Formula,
    answer: Any,
    needed: Sequence[str],
    kind: str = "gradient",
) -> Mapping[str, Any]:
    """The gradients by input name, or the tangents by result name, that a formula returned.

    Args:
        specification: The operator.
        formula: The formula.
        answer: The value that it returned.
        needed: Names that a joint formula must return.
        kind: `gradient` or `tangent`.

    Raises:
        GradientCountError: If a joint formula did not return a dict with these names.
    """
    if not formula.joint:
        return {formula.answers_for[0]: answer}
    if isinstance(answer, Mapping) and set(needed) <= set(answer) <= set(formula.answers_for):
        return answer
    owner, example = ("input", "x") if kind == "gradient" else ("result", "y")
    raise specification.error(
        errors.GradientCountError,
        f"the joint {kind} does not return a {kind} for each {owner} that it covers",
        expected=f"a dict with {listed(needed)}",
        got=listed(list(answer)) if isinstance(answer, Mapping) else type(answer).__name__,
        where=formula.where,
        hint=f"return a dict by {owner} name; cover fewer {owner}s with `@op.{kind}s({example!r}, ...)`",
    )


def list_answers(
    specification: Specification,
    formula: Formula,
    name: str,
    answer: Any,
    count: int,
    kind: str = "gradient",
) -> Sequence[Any]:
    """The gradients, or tangents, of the tensors of a list, as a formula returned them.

    Raises:
        GradientCountError: If there is not one for each tensor.
    """
    if isinstance(answer, list | tuple) and len(answer) == count:
        return answer
    raise specification.error(
        errors.GradientCountError,
        f"the {kind} of the list `{name}` has the wrong length",
        argument=name,
        expected=f"a list of {count} tensors",
        got=f"a list of {len(answer)}" if isinstance(answer, list | tuple) else type(answer).__name__,
        where=formula.where,
        hint=f"return one {kind} for each tensor of the list",
    )


def note_formula(
    specification: Specification, formula: Formula, error: Exception, kind: str = "gradient"
) -> None:
    """Add the formula's name to an error that it raised; opsmith's errors already have it."""
    if not isinstance(error, errors.OpsmithError):
        error.add_note(
            f"raised in the {kind} of {listed(formula.answers_for)} of {specification.name}, {formula.where}"
        )


def written_into(
    specification: Specification, formulas: Sequence[Formula], name: str, kind: str = "gradient"
) -> errors.SavedTensorModifiedError:
    """The error if one of these formulas wrote into the argument of this name."""
    return specification.error(
        errors.SavedTensorModifiedError,
        f"a {kind} formula wrote into `{name}`",
        argument=name,
        where=" or ".join(dict.fromkeys(formula.where for formula in formulas)),
        hint=f"work on a copy, `{name}.clone()`, or use an operation without a trailing `_`",
    )
