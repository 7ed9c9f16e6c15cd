"""The vector-Jacobian product of an operator: formulas run by name, answers checked, the rest derived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import ClassFormula
from opsmith.core.answers import NonDifferentiable, NotImplementedGradient, Zero
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.calls import tensors_in
from opsmith.core.formula import Formula
from opsmith.core.gradients import NEEDED
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import without_casts
from opsmith.torch_library.distributed import replicating
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.gradient_values import Form, fit
from opsmith.torch_library.graph_cut import refuse_graph_cut
from opsmith.torch_library.random_state import RandomState, generators_in
from opsmith.torch_library.recompute import vjp_by_recompute
from opsmith.torch_library.result_flattening import ResultFlattening
from opsmith.torch_library.targets import Forms


@dataclass(frozen=True, eq=False)  # torch 2.11 hashes a half-made one
class Vjp:
    """Everything one backward needs that is no tensor.

    Args:
        specification: The operator.
        plan: What to run.
        flattening: How arguments lie in flat form.
        results: How results do.
        forms: Forms of the call's tensors.
        state: Random state of the forward, where the backward recomputes a random reference.
    """

    specification: Specification
    plan: BackwardPlan
    flattening: Flattening
    results: ResultFlattening
    forms: Forms
    state: RandomState | None

    def __call__(self, saved: Mapping[str, Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the flat arguments.

        Args:
            saved: Saved inputs and results by name; lists as lists.
            grads: Gradient of each flat result, None where there is none.
        """
        self._refuse()
        with replicating((*saved.values(), *grads)), without_casts(grads):
            return self._gradients(saved, grads)

    def _gradients(self, saved: Mapping[str, Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * len(self.forms.inputs)
        for name in self.plan.zeros:
            self._fill(gradients, name, lambda form, place: form.zeros())
        for formula in self.plan.formulas:
            self._run(formula, saved, grads, gradients)
        self._derive(saved, grads, gradients)
        return gradients

    def _refuse(self) -> None:
        specification = self.specification
        for name in self.plan.refused:
            rule = specification.gradients.rules[name]
            assert isinstance(rule, NotImplementedGradient)
            raise errors.GradientNotImplementedError(
                f"the gradient of `{name}` is not implemented: {rule.reason}",
                operator=specification.name,
                argument=name,
                where=specification.where,
                hint=f"call it with `{name}.detach()`, or give a formula: `.gradients({name}=...)`",
            )
        if specification.opaque and self.plan.derived and specification.gradients.stand_in is None:
            name = self.plan.derived[0]
            raise errors.MissingGradientError(
                f"the operator is opaque, and no gradient is given for `{name}`",
                operator=specification.name,
                argument=name,
                where=specification.where,
                hint=f"write `.gradients({name}=lambda grad: ...)`, or `{name}=opsmith.non_differentiable`",
            )

    def _fill(self, gradients: list[Tensor | None], name: str, value: Callable[[Form, int], Tensor]) -> None:
        span = self.flattening.spans[name]
        for place in range(span.start, span.stop):
            form = self.forms.inputs[place]
            if form is not None:
                gradients[place] = value(form, place - span.start)

    def _run(
        self,
        formula: Formula,
        saved: Mapping[str, Any],
        grads: Sequence[Tensor | None],
        gradients: list[Tensor | None],
    ) -> None:
        named = self._incoming(formula)
        inputs = [name for name in formula.answers_for if name in self.plan.needed]
        if named and all(grads[place] is None for place in named):
            # Gradients are linear in what comes in, and nothing did.
            for name in inputs:
                self._fill(gradients, name, lambda form, place: form.zeros())
            return
        arguments = {
            keyword: self._argument(formula, name, saved, grads, inputs)
            for keyword, name in zip(formula.keywords, formula.parameters, strict=True)
        }
        answers = self._call(formula, arguments)
        for name in inputs:
            items = self._items(formula, name, answers[name])
            labels = self.flattening.labels(name)

            def fitted(
                form: Form,
                place: int,
                name: str = name,
                items: Sequence[Any] = items,
                labels: list[str] = labels,
            ) -> Tensor:
                gradient = fit(
                    items[place],
                    form,
                    label=labels[place],
                    operator=self.specification.name,
                    formula=formula,
                    mixed=self.forms.mixed or self.specification.adopted is not None,
                )
                if torch.is_grad_enabled() and not isinstance(items[place], Zero):
                    find = partial(self._item, formula, name, place)
                    refuse_graph_cut(self.specification, formula, labels[place], gradient, arguments, find)
                return gradient

            self._fill(gradients, name, fitted)

    def _argument(
        self,
        formula: Formula,
        name: str,
        saved: Mapping[str, Any],
        grads: Sequence[Tensor | None],
        inputs: list[str],
    ) -> Any:
        schema = self.specification.schema
        if name == NEEDED:
            return frozenset(inputs)
        if name in schema.shapes:
            return self.forms.shapes[self.flattening.spans[schema.shapes[name]].start]
        position = schema.gradient_position.get(name)
        if position is None:
            return saved[name]
        if isinstance(
            formula, ClassFormula
        ):  # a class says itself what it takes for a gradient that is not there
            return grads[position]
        filled = [
            form.zeros() if form is not None and gradient is None else gradient
            for form, gradient in zip(self.forms.results, grads, strict=True)
        ]
        return self.results.item(schema.results[position].name, filled)

    def _places_of(self, positions: Iterable[int]) -> list[int]:
        """The flat places of some results."""
        spans = [
            self.results.spans[self.specification.schema.results[position].name] for position in positions
        ]
        return [place for span in spans for place in range(span.start, span.stop)]

    def _incoming(self, formula: Formula) -> list[int]:
        """The flat results whose gradients a formula uses."""
        positions = self.specification.schema.gradient_position
        return self._places_of(positions[name] for name in formula.parameters if name in positions)

    def _call(self, formula: Formula, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Run a formula, see that it leaves what it was given as it was, and return its answers by input."""
        tensors = [(name, tensor) for name, value in arguments.items() for tensor in tensors_in([value])]
        before = [capabilities.version(tensor) for _, tensor in tensors]
        try:
            answer = formula.function(**arguments)
        except Exception as error:
            note_formula(self.specification, formula, error)
            raise
        for (name, tensor), count in zip(tensors, before, strict=True):
            if count is not None and capabilities.version(tensor) != count:
                raise written_into(self.specification, [formula], name)
        return self._joint_answers(formula, answer) if formula.joint else {formula.answers_for[0]: answer}

    def _joint_answers(self, formula: Formula, answer: Any) -> Mapping[str, Any]:
        needed = [name for name in formula.answers_for if name in self.plan.needed]
        given = list(answer) if isinstance(answer, Mapping) else None
        if given is None or set(needed) - set(given) or set(given) - set(formula.answers_for):
            raise errors.GradientCountError(
                "the joint gradient does not answer for the inputs that it covers",
                operator=self.specification.name,
                expected=f"a dict with {', '.join(f'`{name}`' for name in needed)}",
                got=", ".join(f"`{name}`" for name in given) if given is not None else type(answer).__name__,
                where=formula.where,
                hint="return a dict by input name; cover fewer inputs with `@op.gradients('x', ...)`",
            )
        assert isinstance(answer, Mapping)
        return answer

    def _item(self, formula: Formula, name: str, place: int, answer: Any) -> Any:
        return self._items(formula, name, answer[name] if formula.joint else answer)[place]

    def _items(self, formula: Formula, name: str, answer: Any) -> Sequence[Any]:
        if not self.flattening.is_list(name):
            return [answer]
        count = len(self.flattening.labels(name))
        if isinstance(answer, list | tuple) and len(answer) == count:
            return answer
        raise errors.GradientCountError(
            f"the gradient of the list `{name}` has the wrong length",
            operator=self.specification.name,
            argument=name,
            expected=f"a list of {count} tensors",
            got=f"a list of {len(answer)}" if isinstance(answer, list | tuple) else type(answer).__name__,
            where=formula.where,
            hint="return one gradient for each tensor of the list",
        )

    def _derive(
        self, saved: Mapping[str, Any], grads: Sequence[Tensor | None], gradients: list[Tensor | None]
    ) -> None:
        """Add what no formula covers: inputs without one, and the way through hidden results."""
        specification, plan = self.specification, self.plan
        positions = specification.schema.result_position
        followed = [
            positions[name]
            for name in plan.follows_hidden
            if any(grads[place] is not None for place in self._places_of([positions[name]]))
        ]
        if not plan.derived and not followed:
            return
        self._refuse_to_follow(followed)
        flat = self.flattening.flatten([saved[name] for name in specification.schema.names])
        self._refuse_to_draw_again(flat)
        function, wanted = specification.reference, grads
        if specification.gradients.stand_in is not None:
            function = specification.gradients.stand_in
            wanted = [grads[place] for place in self._places_of(specification.schema.visible)]
        if plan.derived:
            places = self._places(plan.derived)
            answers = vjp_by_recompute(function, self.flattening, flat, places, wanted, self.state)
            for place, answer in zip(places, answers, strict=True):
                gradients[place] = answer
        for formula in plan.formulas:
            blind = [
                p
                for p in followed
                if specification.schema.results[p].gradient_name() not in formula.parameters
            ]
            if not blind:
                continue
            places = self._places([name for name in formula.answers_for if name in plan.needed])
            kept = self._places_of(blind)
            only = [grad if place in kept else None for place, grad in enumerate(grads)]
            answers = vjp_by_recompute(
                specification.reference, self.flattening, flat, places, only, self.state
            )
            for place, answer in zip(places, answers, strict=True):
                known = gradients[place]
                gradients[place] = answer if known is None else known + answer

    def _refuse_to_follow(self, followed: list[int]) -> None:
        specification = self.specification
        if specification.opaque and followed:
            hidden = specification.schema.results[followed[0]]
            raise errors.HiddenResultError(
                f"a second order, or forward mode, needs the derivative of the hidden `{hidden.name}`, "
                "and it is opaque",
                operator=specification.name,
                argument=hidden.name,
                where=self.plan.formulas[0].where,
                hint=f"let the formulas take `{hidden.gradient_name()}` into account; where `{hidden.name}` "
                f"depends on no input, declare `results={{{hidden.name!r}: opsmith.non_differentiable}}`",
            )

    def _refuse_to_draw_again(self, flat: Sequence[Any]) -> None:
        specification = self.specification
        draws = specification.random or generators_in(flat)
        if draws and self.state is None and specification.gradients.stand_in is None:
            raise errors.ForwardModeError(
                "it draws random numbers: its reference cannot be run again in forward mode or torch.func",
                operator=specification.name,
                where=specification.where,
                hint="return what was drawn as a hidden result that is non-differentiable, "
                "and give formulas that use it",
            )

    def _places(self, names: Sequence[str]) -> list[int]:
        spans = [self.flattening.spans[name] for name in names]
        return [p for span in spans for p in range(span.start, span.stop) if self.forms.inputs[p] is not None]


def differentiable_places(specification: Specification, flattening: Flattening) -> list[bool]:
    """For each flat argument, whether gradients flow to it."""
    rules = specification.gradients.rules
    return [
        not isinstance(rules.get(name), NonDifferentiable)
        for name in specification.schema.names
        for _ in flattening.labels(name)
    ]


def note_formula(specification: Specification, formula: Formula, error: Exception) -> None:
    """Add to an error that a formula raised which formula it was; our own errors say it already."""
    if not isinstance(error, errors.OpsmithError):
        which = ", ".join(f"`{name}`" for name in formula.answers_for)
        error.add_note(f"raised in the gradient of {which} of {specification.name}, {formula.where}")


def written_into(
    specification: Specification, formulas: Sequence[Formula], name: str
) -> errors.SavedTensorModifiedError:
    """The error for a formula, one of these, that wrote into what it was given under a name."""
    return errors.SavedTensorModifiedError(
        f"a gradient formula wrote into `{name}`",
        operator=specification.name,
        argument=name,
        where=" or ".join(dict.fromkeys(formula.where for formula in formulas)),
        hint=f"work on a copy, `{name}.clone()`, or use an operation without a trailing `_`",
    )
