"""The autograd node of a known call on DTensors: as `OperatorNode`, with less to do for each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.gradient_values import (
    CallMetadata,
    TensorMetadata,
    has_gradient,
)
from opsmith.torch_library.autograd.node import (
    LEADING_ARGUMENTS,
    OperatorNode,
    OperatorPrimitive,
    RegisteredOperator,
    prepare_backward,
)
from opsmith.torch_library.autograd.vjp import written_into
from opsmith.torch_library.distributed import dtensor
from opsmith.torch_library.fast_path.purity import never_writes
from opsmith.torch_library.flattening import ArgumentFlattening, SavedValues


class SlowPathError(Exception):
    """The slow path has to compute the call."""


class DTensorPrimitive(OperatorPrimitive):
    """An operator whose node computes calls on DTensors.

    Args:
        registered: The operator; no argument of it is a list of tensors.
        compute: Takes argument values, all tensors among them DTensors, and returns all results; None where
            the slow path has to compute them.

    Attributes:
        apply: Takes this object, True if floating dtypes are mixed, and the argument values; returns all
            results.
    """

    def __init__(
        self, registered: RegisteredOperator, compute: Callable[[Sequence[Any]], tuple[Any, ...] | None]
    ) -> None:
        schema = registered.specification.schema
        super().__init__(registered, ArgumentFlattening(schema, (None,) * len(schema.names)))
        self.compute = compute
        self.backwards: dict[tuple[bool, ...], DTensorBackward] = {}
        node = type(registered.node.__name__, (DTensorNode,), {})
        self.apply: Callable[..., Any] = capabilities.direct_apply(node)

    def backward(self, needs: tuple[bool, ...]) -> DTensorBackward:
        """The backward for the arguments of the node that need a gradient, made once."""
        found = self.backwards.get(needs)
        if found is None:
            found = self.backwards[needs] = DTensorBackward(self, needs[LEADING_ARGUMENTS:])
        return found


class DTensorBackward:
    """What all calls with the same tensors to differentiate share.

    Args:
        primitive: The operator.
        needs: For each argument, whether its gradient is needed.

    Attributes:
        plan: The backward plan.
        quick: True if the gradients are what formulas return for saved values and gradients.
    """

    def __init__(self, primitive: DTensorPrimitive, needs: tuple[bool, ...]) -> None:
        schema = primitive.specification.schema
        self.primitive, self.needs = primitive, needs
        plan: BackwardPlan = primitive.plan(primitive.flattening.needed(needs))
        self.plan = plan
        named = {name for formula in plan.formulas for name in formula.parameters}
        known = {*plan.saved, *schema.gradient_position}
        self.takes_shapes = not named.isdisjoint(schema.shapes)
        self.quick = bool(plan.formulas) and named <= known
        self.quick &= not (plan.derived or plan.refused or plan.zeros)
        self.gradients = [(name, at) for name, at in schema.gradient_position.items() if name in named]
        self.pure = all(never_writes(formula.function) for formula in plan.formulas)
        self.formulas = [
            (formula, [*zip(formula.keywords, formula.parameters, strict=True)]) for formula in plan.formulas
        ]
        places = {name: at for at, name in enumerate((*schema.names, *schema.result_position))}
        values = {each.name for each in schema.arguments if not each.kind.is_tensor}
        self.tensors = [(name, places[name]) for name in plan.saved if name not in values]
        self.values = [(name, places[name]) for name in plan.saved if name in values]
        saved = {name: index for index, (name, _) in enumerate(self.tensors)}
        self.kept = SavedValues(tuple((name, False, (index,)) for name, index in saved.items()))
        self.wanted = [(at, name) for at, name in enumerate(schema.names) if needs[at]]
        self.unsaved = [(at, name) for at, name in self.wanted if name not in saved]

    def given(self, ctx: Any) -> dict[str, Any]:
        """The saved values by name."""
        given = {name: tensor for (name, _), tensor in zip(self.tensors, ctx.saved_tensors, strict=True)}
        given.update(ctx.values)
        return given

    def gradients_of(self, ctx: Any, saved: dict[str, Any], grads: Sequence[Any]) -> list[Any] | None:
        """The gradient of each argument by the formulas; None where the checks of `Vjp` are needed.

        Raises:
            SavedTensorModifiedError: If a formula writes.
        """
        given = dict(saved)
        for name, at in self.gradients:
            if grads[at] is None:
                return None
            given[name] = grads[at]
        before = {} if self.pure else _versions(given)
        found: dict[str, Any] = {}
        for formula, arguments in self.formulas:
            answer = formula.function(**{keyword: given[name] for keyword, name in arguments})
            if formula.joint:
                found.update(answer)
            else:
                found[formula.answers_for[0]] = answer
        after = {} if self.pure else _versions(given)
        if before != after:
            name = next(name for name, version in before.items() if after[name] != version)
            formulas = [formula for formula, _ in self.formulas if name in formula.parameters]
            raise written_into(self.primitive.specification, formulas, name)
        answers: list[Any] = [None] * len(self.needs)
        kind = dtensor()
        for at, name in self.wanted:
            gradient: Any = found.get(name)
            expected = given[name] if name in given else ctx.inputs[name]
            if type(gradient) is not kind or gradient.dtype != expected.dtype:
                return None
            if gradient.shape != expected.shape:
                return None
            answers[at] = gradient
        return answers

    def metadata(self, ctx: Any, given: Mapping[str, Any]) -> CallMetadata:
        """Metadata of a call with these saved values, for `Vjp`."""
        inputs: list[TensorMetadata | None] = [None] * len(self.needs)
        for at, name in self.wanted:
            tensor = given.get(name)
            inputs[at] = ctx.inputs.get(name) if tensor is None else TensorMetadata.of(tensor)
        return CallMetadata(tuple(inputs), (None,) * len(self.needs), ctx.results, ctx.mixed)


class DTensorNode(OperatorNode):
    """The node of a known call on DTensors."""

    @staticmethod
    def forward(ctx: Any, primitive: Any, mixed: bool, *flat: Any) -> tuple[Any, ...]:
        """Compute the results, and save the values that the backward needs.

        Raises:
            SlowPathError: Where the slow path has to compute them.
        """
        shared: DTensorBackward = primitive.backward(ctx.needs_input_grad)
        results: tuple[Any, ...] | None = primitive.compute(flat)
        if results is None:
            raise SlowPathError
        ctx.shared, ctx.primitive = shared, primitive
        for described, result in zip(primitive.results.described, results, strict=True):
            if not described.differentiable or not has_gradient(result.dtype) or shared.takes_shapes:
                prepare_backward(ctx, primitive, shared.plan, flat, results, None)
                ctx.shared = None
                return results
        every = (*flat, *results)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[every[at] for _, at in shared.tensors])
        ctx.kept = shared.kept
        ctx.values = {name: every[at] for name, at in shared.values} if shared.values else {}
        ctx.inputs = {name: TensorMetadata.of(flat[at]) for at, name in shared.unsaved}
        # Zeros are made of the metadata of a result where another one has a gradient.
        ctx.results = tuple(map(TensorMetadata.of, results)) if len(results) > 1 else (None,)
        ctx.mixed = mixed
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients of the flat arguments."""
        shared = ctx.shared
        if shared is None:
            return OperatorNode.backward(ctx, *grads)
        saved = shared.given(ctx)
        quick = shared.quick and not (torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling())
        if quick and capabilities.nothing_active():
            try:
                answers = shared.gradients_of(ctx, saved, grads)
            except errors.OpsmithError:
                raise
            except Exception:
                answers = None  # it is raised again, with the name of the formula
            if answers is not None:
                return (*(None,) * LEADING_ARGUMENTS, *answers)
        vjp = ctx.primitive.vjp(shared.plan, shared.metadata(ctx, saved), None)
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return (*(None,) * LEADING_ARGUMENTS, *vjp(saved, grads))


def _versions(values: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: capabilities.version(value) for name, value in values.items() if isinstance(value, Tensor)}
