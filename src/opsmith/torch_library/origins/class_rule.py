"""The rule of adopted Function classes: runs their own forward and backward, with all checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.formula import zero
from opsmith.core.gradients import AUTOCAST, NEEDED
from opsmith.core.origins.function_class import AdoptedFunction, ClassFormula, class_of, note
from opsmith.core.tensors import map_tensors, replace_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import autocast_in_force
from opsmith.torch_library.autograd.formula_rule import FormulaRule
from opsmith.torch_library.autograd.gradient_values import CallMetadata, fit, has_gradient
from opsmith.torch_library.autograd.graph_cuts import refuse_differentiation
from opsmith.torch_library.autograd.node import NodeContext, needs_of
from opsmith.torch_library.autograd.primitive import OperatorPrimitive
from opsmith.torch_library.autograd.random_state import RandomState
from opsmith.torch_library.autograd.saved_values import SavedValues
from opsmith.torch_library.contract import refuse_nondeterminism
from opsmith.torch_library.flattening import Flat
from opsmith.torch_library.origins.context import Context, PackedContext, SavedTensors
from opsmith.torch_library.origins.fallback import (
    graph_cut_error,
    once_differentiable_error,
    overwritten_error,
    proxy_reason,
    rerun_differs_error,
    run_or_fall_back,
)
from opsmith.torch_library.origins.forward import ForwardRun, run_traceable
from opsmith.torch_library.origins.gradients import by_name, run_backward


@dataclass(eq=False)
class ClassKept:
    """Values other than tensors that a run of a class keeps for its backward.

    Args:
        places: Indices of the inputs among the saved tensors.
        inputs: The inputs, if a second-order gradient or a fallback of the backward needs them.
        for_second: True if a second-order gradient needs the inputs, and does not go through the context.
        given: The arguments of the class's forward, each tensor replaced by a placeholder.
        metadata: Metadata of the call's tensors.
        autocast: Autocast of the call.
        random: The random state of the forward, if it may run again.
        constant: Positions of the results that have no gradient.
        context: Its context; None if a caller has it.
        every: Form of the tensors for tangents; None if none are needed.
        saves: False if no tensors are saved.
    """

    places: tuple[int, ...]
    inputs: SavedValues | None
    for_second: bool
    given: tuple[Any, ...]
    metadata: CallMetadata
    autocast: str | None
    random: RandomState | None = None
    constant: frozenset[int] = frozenset()
    context: PackedContext | None = None
    every: SavedValues | None = None
    saves: bool = True


class ClassRule(FormulaRule):
    """The rule of an adopted class; if the class cannot run, the rule of its formulas."""

    @property
    def origin(self) -> AdoptedFunction:
        """The class."""
        return class_of(self.specification.origin)

    def _runs_class(self, needs: Sequence[bool]) -> bool:
        """Return True if the class's backward computes all gradients, without formulas attached later."""
        rules = self.specification.gradients.rules
        needed = self.primitive.flattening.needed(needs)
        return all(isinstance(rules.get(name), ClassFormula) for name in needed)

    def keep_before(self, flat: Flat) -> None:
        """Copy overwritten values, if earlier runs show that a second-order gradient needs them."""
        adopted = self.origin
        if not self._runs_class([isinstance(value, Tensor) and value.requires_grad for value in flat]):
            super().keep_before(flat)
        elif adopted.facts.keeps_under.get(self._flags(flat), True):
            self.before = {at: flat[at].clone() for at in self.written}

    def _flags(self, flat: Flat) -> tuple[Any, ...]:
        return self.origin.flags(self.origin.spread(self.primitive.flattening.pack(flat)))

    def forward(self, ctx: NodeContext, flat: Flat) -> Flat:
        """Run the class's forward, on written arguments themselves, and keep its context."""
        run, state = None, None
        adopted, values, needs = self.origin, self.primitive.flattening.pack(flat), needs_of(ctx)
        if adopted.random and not capabilities.recording():
            state = RandomState.now(flat)
        in_place = bool(self.written)
        on_proxies = not in_place and self.specification.opaque and proxy_reason(values) is not None
        if isinstance(self.primitive, OperatorPrimitive) and self._runs_class(needs) and not on_proxies:
            refuse_nondeterminism(self.specification)
            needed = self.primitive.flattening.needed(needs)
            own = partial(run_traceable, adopted, values, needed, in_place=in_place)
            run = own() if in_place else run_or_fall_back(adopted, "forward", values, own, _no_run)
        if run is None:
            return super().forward(ctx, flat)
        if not in_place:
            self.keep_run(ctx, flat, run, needs, state)
            return run.results
        refuse_constants(adopted, run)
        lost, facts, flags = not self.before, adopted.facts, self._flags(flat)
        keeps = self.keep_run(ctx, self.over_written(ctx, flat), run, needs, state, lost=lost)
        note(facts.keeps_under, flags, keeps or facts.keeps_under.get(flags, False))
        return run.results

    def keep_run(
        self,
        ctx: NodeContext,
        flat: Flat,
        run: ForwardRun,
        needs: Sequence[bool],
        state: RandomState | None = None,
        *,
        lost: bool = False,
    ) -> bool:
        """Save the values that the backward needs; return True if a second-order gradient needs the inputs.

        Args:
            ctx: The context of the node.
            flat: The arguments as they were before the call.
            run: The run of the forward.
            needs: True for each flat argument whose gradient is needed.
            state: The random state of the forward, if it may run again.
            lost: True if the forward has overwritten an argument without a copy.
        """
        specification = self.specification
        roles = zip(run.results, specification.schema.results, strict=True)
        constant = frozenset(
            at
            for at, (result, role) in enumerate(roles)
            if result is not None
            and (at in run.constant or not role.differentiable or not has_gradient(result.dtype))
        )
        ctx.non_differentiable = tuple(run.results[at] for at in sorted(constant))
        ctx.materialize_grads = False
        self.origin.facts.hides |= run.context.hides(run.given)
        saved = SavedTensors(each for each in run.context.to_save if isinstance(each, Tensor))
        context = run.context.pack(saved)
        inputs: SavedValues | None = None
        places: tuple[int, ...] = ()
        needed = keeps_inputs(self.origin)
        for_second = run.keeps(saved.tensors, run.results) if needed is None else needed
        if (for_second and not lost) or proxy_reason(flat) is not None:
            tensors, inputs = self.primitive.save(specification.schema.names, flat, run.results)
            places = tuple(map(saved.place, tensors))
        ctx.to_save = tuple(saved.tensors)
        ctx.kept = ClassKept(
            places,
            inputs,
            for_second,
            replace_tensors(tuple(run.given), repeat(placeholder())),
            CallMetadata.of(flat, run.results, needs),
            autocast_in_force(),
            state,
            constant,
            context,
            self.save_every(ctx, flat, run.results),
            saves=bool(saved.tensors),
        )
        return for_second

    def backward(self, ctx: NodeContext, grads: Flat) -> Flat:
        """Gradients of the flat arguments."""
        kept = ctx.kept
        if not isinstance(kept, ClassKept):
            return super().backward(ctx, grads)
        assert kept.context is not None
        saved = ctx.saved_tensors if kept.saves else ()  # if none, it may run twice, as in `apply`
        return tuple(self.gradients(kept, kept.context.unpack(saved), saved, grads))

    def tangents(self, ctx: NodeContext, tangents: Flat) -> Flat:
        """Tangents of the results; None for a result that the class marked as constant, as torch requires."""
        answers = super().tangents(ctx, tangents)
        constant = ctx.kept.constant if isinstance(ctx.kept, ClassKept) else ()
        return tuple(None if at in constant else answer for at, answer in enumerate(answers))

    def gradients(
        self, kept: ClassKept, context: Context, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of the flat arguments by the class's backward, with all checks.

        Args:
            kept: The values that the call kept.
            context: The class's context.
            saved: The saved tensors.
            grads: Gradient of each result, or None.
        """
        specification, adopted = self.specification, self.origin
        rules = specification.gradients.rules.values()
        formula = next(rule for rule in rules if isinstance(rule, ClassFormula))
        every = frozenset(specification.schema.names)
        higher = torch.is_grad_enabled()

        def run(grads: Sequence[Tensor | None]) -> list[Any]:
            return run_backward(adopted, context, grads, kept.metadata.results, kept.given)

        def own() -> list[Any]:
            answers = run(grads)
            answers = _checked_graph(adopted, run, answers, saved, grads) if higher else answers
            return self._flat(by_name(adopted, answers, kept.given, every))

        recompute = partial(self._recomputed, kept, formula, saved)
        if higher and kept.for_second and kept.inputs is not None:
            answers = recompute(grads)
            if adopted.reference is None or adopted.surrogate:
                with torch.no_grad():
                    first = self._flat(by_name(adopted, run(grads), kept.given, every))
                answers = _if_reproducible(adopted, answers, first, [*saved, *grads])
                answers = _checked_graph(adopted, recompute, answers, saved, grads)
        elif higher and kept.for_second:
            lost = torch.empty(0, requires_grad=True)  # represents the history of the value before the call
            answers = refuse_differentiation(own(), [*saved, *grads, lost], overwritten_error(adopted))
        else:
            instead = None if kept.inputs is None else partial(recompute, grads)
            answers = run_or_fall_back(adopted, "backward", [*saved, *grads], own, instead)
        labels = self.primitive.flattening.labels
        return [
            None
            if expected is None or answer is None or answer is zero
            else fit(answer, expected, label=label, operator=specification.name, formula=formula, mixed=True)
            for answer, expected, label in zip(answers, kept.metadata.inputs, labels, strict=True)
        ]

    def _recomputed(
        self,
        kept: ClassKept,
        formula: ClassFormula,
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> list[Any]:
        """Gradients of a backward that will be differentiated: recomputed from the inputs."""
        assert kept.inputs is not None
        needed = self.primitive.flattening.needed([each is not None for each in kept.metadata.inputs])
        given: dict[str, Any] = kept.inputs.load([saved[at] for at in kept.places])
        for name, position in self.specification.schema.gradient_position.items():
            grad, expected = grads[position], kept.metadata.results[position]
            given[name] = expected.zeros() if grad is None and expected is not None else grad
        with kept.random.again() if kept.random else nullcontext():
            return self._flat(formula.function(**given, **{NEEDED: needed, AUTOCAST: kept.autocast}))

    def _flat(self, answers: Mapping[str, Any]) -> list[Any]:
        """The gradient of each flat argument, from the gradients by name."""
        flat: list[Any] = []
        for name, span in self.primitive.flattening.spans.items():
            answer = answers.get(name)
            flat.extend(answer if isinstance(answer, list | tuple) else [answer] * (span.stop - span.start))
        return flat


def _no_run() -> ForwardRun | None:
    """The run of a forward that the operator itself computes, by its own fallback."""
    return None


@cache
def placeholder() -> Tensor:
    """Replacement of tensors in arguments of which only the type matters: a node keeps no tensors."""
    return capabilities.plain_tensor()


def refuse_constants(adopted: AdoptedFunction, run: ForwardRun) -> None:
    """Refuse a written result that is marked as non-differentiable although it requires a gradient.

    Raises:
        MutationError: With the name of the argument.
    """
    for position in run.constant:
        name, result = adopted.schema.results[position].written, run.results[position]
        if name is not None and result.requires_grad:
            raise adopted.error(
                errors.MutationError,
                f"`{adopted.name}.forward` marks `{name}` as dirty and as non-differentiable, although "
                "`{name}` requires a gradient: `{name}` would keep the history of its value before the call",
                argument=name,
                hint=f"call it on `{name}.detach()`",
            )


def keeps_inputs(adopted: AdoptedFunction) -> bool | None:
    """Return True if a second-order gradient needs the inputs; None if only when `ForwardRun.keeps` is True.

    Saved intermediate values have no graph; an integer or a mask is a constant of the derivative in any case.
    """
    stands_in = adopted.reference is not None and not adopted.surrogate
    if stands_in and (adopted.once_differentiable or adopted.leaves_torch):
        return True
    return False if not stands_in and adopted.once_differentiable else None


def _if_reproducible(
    adopted: AdoptedFunction, answers: Sequence[Any], first: Sequence[Any], around: Sequence[Tensor | None]
) -> list[Any]:
    """Recomputed gradients if they equal the first ones; else the first ones, not differentiable again.

    A forward that draws random numbers, or keeps state, returns different results when it runs again.
    """
    held: list[Any] = []
    for again, once in zip(answers, first, strict=True):
        same = not isinstance(once, Tensor) or (
            isinstance(again, Tensor)
            and again.shape == once.shape
            and torch.allclose(again.detach(), once, rtol=torch.finfo(once.dtype).eps ** 0.5, equal_nan=True)
        )
        held.append(
            again if same else refuse_differentiation([once], around, rerun_differs_error(adopted))[0]
        )
    return held


def _checked_graph(
    adopted: AdoptedFunction,
    run: Callable[[Sequence[Tensor | None]], list[Any]],
    answers: list[Any],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Any]:
    """Gradients under `create_graph`: differentiating a gradient that lost the graph raises an error."""
    sources = [tensor for tensor in (*saved, *grads) if tensor is not None and tensor.requires_grad]
    # A class may return zeros on purpose.
    cut = [isinstance(each, Tensor) and not each.requires_grad and bool(each.any()) for each in answers]
    if not sources or not any(cut):
        return answers
    if adopted.once_differentiable:
        error: errors.OpsmithError = once_differentiable_error(adopted)
    else:
        if not any(grad is not None and grad.requires_grad for grad in grads):
            # A gradient is linear in `grad`: if it depends on `grad`, it has a graph whenever `grad` has one.
            grads = map_tensors(lambda each: each.detach().requires_grad_(has_gradient(each.dtype)), grads)
            cut = [lost and not each.requires_grad for lost, each in zip(cut, run(grads), strict=True)]
        error = graph_cut_error(adopted)
    return [
        refuse_differentiation([answer], sources, error)[0] if lost else answer
        for answer, lost in zip(answers, cut, strict=True)
    ]
