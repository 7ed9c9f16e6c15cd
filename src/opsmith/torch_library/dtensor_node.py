"""The autograd node of a known call on DTensors: as `Node`, with less to do for each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from opsmith.core.backward_plan import BackwardPlan
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import RecordedOperator
from opsmith.torch_library.autograd.gradient_values import (
    CallMetadata,
    TensorMetadata,
    constant_results,
    mixes_dtypes,
)
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator
from opsmith.torch_library.autograd.vjp import note_formula, written_into
from opsmith.torch_library.distributed import dtensor, is_authors, mesh_of
from opsmith.torch_library.fast_path.purity import never_writes
from opsmith.torch_library.flattening import ArgumentFlattening

MAX_NODES = 64
"""Maximum number of node classes of an operator that are kept."""

MAX_GUARDS = 32
"""Maximum number of guards that a node makes for its gradients, one after another."""


class SlowPathError(Exception):
    """The slow path has to compute the call."""


class DTensorPrimitive(OperatorPrimitive):
    """An operator whose nodes compute calls on DTensors.

    Args:
        registered: The operator; no argument of it is a list of tensors.
        compute: Takes argument values, all tensors among them DTensors, and returns the result, or all of
            several, or raises SlowPathError.
    """

    def __init__(self, registered: RegisteredOperator, compute: Callable[[Sequence[Any]], Any]) -> None:
        schema = registered.specification.schema
        super().__init__(registered, ArgumentFlattening(schema, (None,) * len(schema.names)))
        self.compute = compute
        self._applies: dict[Any, Callable[..., Any]] = {}

    def apply(self, values: Sequence[Any]) -> Callable[..., Any]:
        """The `apply` of the node for calls with tensors of these dtypes that require gradients as these do.

        It takes the argument values, and returns what `compute` does.
        """
        tensors = [value if isinstance(value, Tensor) else None for value in values]
        inputs = tuple(
            (tensor.dtype, tensor.device) if tensor is not None and tensor.requires_grad else None
            for tensor in tensors
        )
        key = inputs, mixes_dtypes(values)
        if key not in self._applies:
            if len(self._applies) >= MAX_NODES:
                self._applies.clear()
            self._applies[key] = capabilities.recorder(self._node(DTensorCall(self, *key)))
        return self._applies[key]

    def _node(self, call: DTensorCall) -> Any:
        """The class of a node."""

        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return call.backward(ctx, *grads)

        functions = {"forward": staticmethod(call.forward), "backward": staticmethod(backward)}
        node: Any = type(self.specification.short_name, (torch.autograd.Function,), functions)
        node.recorded_operator = RecordedOperator(self.specification, tuple(call.saved))
        capabilities.direct_backward(node, backward)
        return node


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


class DTensorCall:
    """Forward and backward of a node: what all calls share whose tensors are alike.

    Args:
        primitive: The operator.
        inputs: Dtype and device of each argument whose gradient is needed; None for the others.
        mixed: True if floating dtypes are mixed.

    Attributes:
        saved: Names of the saved tensors.
    """

    def __init__(self, primitive: DTensorPrimitive, inputs: Sequence[Any], mixed: bool) -> None:
        schema = primitive.specification.schema
        self._primitive, self._inputs, self._mixed = primitive, inputs, mixed
        plan = primitive.plan(primitive.flattening.needed([each is not None for each in inputs]))
        self._plan: BackwardPlan = plan
        values = {each.name for each in schema.arguments if not each.kind.is_tensor}
        self.saved = [name for name in plan.saved if name not in values]
        self._values = [name for name in plan.saved if name in values]
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
        self._formulas = [
            (formula, [self._names.index(name) for name in formula.parameters])
            for formula in plan.formulas
            if self._quick
        ]
        self._pure = all(never_writes(formula.function) for formula in plan.formulas)
        self._saved_wanted = [self.saved.index(name) for name, _ in wanted if name in self.saved]
        self._alike: Callable[..., bool] = lambda *_: False
        self._guards_left = MAX_GUARDS

    def forward(self, ctx: Any, *values: Any) -> Any:
        """Compute the results, and save what the backward needs.

        Raises:
            SlowPathError: Where the slow path has to compute them.
        """
        found = self._primitive.compute(values)
        results = (found,) if self._single else found
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
        return found

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

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients of the arguments."""
        saved, kept = ctx.saved_tensors, ctx.kept if self._keeps else _NOTHING
        if self._quick and not (torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling()):
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
        before = () if self._pure else _versions(every)
        found: dict[str, Any] = {}
        for formula, places in self._formulas:
            given = zip(formula.keywords, places, strict=True)
            try:
                answer = formula.function(**{keyword: every[at] for keyword, at in given})
            except Exception as error:
                note_formula(self._primitive.specification, formula, error)
                raise
            if formula.joint:
                found.update(answer)
            else:
                found[formula.answers_for[0]] = answer
        if before and before != (after := _versions(every)):
            self._refuse_writes(before, after)
        gradients: list[Any] = [found.get(name) for name, _ in self._wanted]
        # The guard knows neither shapes, nor a tensor that is given twice.
        if not self._alike(*gradients) and not self._are_alike(gradients):
            return None
        shapes = [saved[at].shape for at in self._saved_wanted]
        shapes += [shape for shape, _ in kept.unsaved]
        if [gradient.shape for gradient in gradients] != shapes:
            return None
        answers: list[Any] = [None] * len(self._inputs)
        for gradient, (_, at) in zip(gradients, self._wanted, strict=True):
            answers[at] = gradient
        return tuple(answers)

    def _are_alike(self, gradients: Sequence[Any]) -> bool:
        """Return True if gradients have the types and dtypes of their inputs, and keep a guard of theirs."""
        kind = dtensor()
        for gradient, (_, at) in zip(gradients, self._wanted, strict=True):
            if type(gradient) is not kind or gradient.dtype != self._inputs[at][0]:
                return False
        if not capabilities.nothing_active():
            return False
        if self._guards_left:
            self._guards_left -= 1
            self._alike = capabilities.tensor_guard(gradients)
        return True

    def _refuse_writes(self, before: Sequence[int | None], after: Sequence[int | None]) -> None:
        """Raise an error that names the tensor that a formula wrote to, and the formulas that use it."""
        name = next(name for name, old, new in zip(self._names, before, after, strict=True) if old != new)
        formulas = [formula for formula in self._plan.formulas if name in formula.parameters]
        raise written_into(self._primitive.specification, formulas, name)

    def _metadata(self, saved: dict[str, Any], kept: _Kept) -> CallMetadata:
        """Metadata of a call, for `Vjp`."""
        inputs: list[TensorMetadata | None] = [None] * len(self._inputs)
        unsaved = iter(kept.unsaved)
        for name, at in self._wanted:
            shape, mesh = (saved[name].shape, mesh_of(saved[name])) if name in saved else next(unsaved)
            dtype, device = self._inputs[at]
            inputs[at] = TensorMetadata(shape, dtype, device, mesh)
        return CallMetadata(tuple(inputs), kept.shapes or (None,) * len(inputs), kept.results, self._mixed)


def _picker(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes the values at some places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda every: tuple([every[at] for at in places])


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _versions(values: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(capabilities.version(value) if isinstance(value, Tensor) else None for value in values)
