"""Calls under transforms of `torch.func`, one interpreter level at a time, innermost first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.origins.declared import MAPPED
from opsmith.core.origins.function_class import class_of
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import FormulaRule, all_names
from opsmith.torch_library.autograd.node import NodeContext, RunsRule, TransformedNode, needs_of, through
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, Primitive, differentiate
from opsmith.torch_library.autograd.random_state import RandomState, generators_in
from opsmith.torch_library.autograd.vmap import (
    BatchedPrimitive,
    VmapInfo,
    batched_call,
    has_vmap_rule,
    run_vmap_rule,
)
from opsmith.torch_library.flattening import Flat
from opsmith.torch_library.torch_messages import (
    NO_DATA,
    NO_EXAMPLES,
    NOT_YET_IMPLEMENTED,
    TANGENT_COUNT,
    WRITE_UNMAPPED,
    has_message,
)

_BY_LEVEL = capabilities.on("torch_func")


class LevelNode(RunsRule, capabilities.SingleLevelFunction):  # type: ignore[misc]  # torch gives it no type
    """The node of one `grad` transform."""


def _on_level(primitive: Primitive, flat: Sequence[Any]) -> Flat:
    """Compute the results on the level below, and lift them to the innermost level."""
    transform = capabilities.innermost_transform()
    assert transform is not None
    lowered = [transform.unwrap(value) for value in flat]
    with torch.enable_grad(), capabilities.forward_mode_on(), transform.interpreter.lower():
        results = _call_below(primitive, lowered)
    return tuple(_wrapped(transform, result) for result in results)


def call_under_transforms(primitive: Primitive, flat: Sequence[Any]) -> Flat:
    """All results of a call, through autograd and every running transform, innermost first."""
    if not _BY_LEVEL:
        return _call_by_node(primitive, flat)
    transform = capabilities.innermost_transform()
    if transform is None:
        return differentiate(primitive, flat)
    flat = [capabilities.unwrap_dead(value) for value in flat]
    return _RULES[transform.kind](primitive, flat, transform)


def _call_below(primitive: Primitive, flat: Sequence[Any]) -> Flat:
    """Continue at the level below; operators are called through the dispatcher, for modes and subclasses."""
    return (
        primitive.call(flat)
        if isinstance(primitive, OperatorPrimitive)
        else call_under_transforms(primitive, flat)
    )


def _grad(primitive: Primitive, flat: Sequence[Any], transform: capabilities.Transform) -> Flat:
    rule = FormulaRule(primitive, partial(_on_level, primitive), draws=False)
    node = primitive.registered.node(LevelNode)
    with capabilities.single_level_nodes():
        found: Flat = through(node.apply, rule, *[transform.lift(value) for value in flat])
    return found


def _jvp(primitive: Primitive, flat: Sequence[Any], transform: capabilities.Transform) -> Flat:
    lifted = [transform.lift(value) for value in flat]
    pairs = [capabilities.unpack_dual(value) for value in lifted]
    primals, tangents = [primal for primal, _ in pairs], [tangent for _, tangent in pairs]
    with transform.interpreter.lower():
        lowered = _call_below(primitive, [transform.unwrap(value) for value in primals])
    results = [_wrapped(transform, result) for result in lowered]
    if all(tangent is None for tangent in tangents) or not capabilities.forward_mode_allowed():
        return tuple(results)
    names = all_names(primitive.specification)
    values = [*primitive.flattening.pack(primals), *primitive.results.pack(results)]
    every = dict(zip(names, values, strict=True))
    try:
        moved = primitive.jvp(every, tangents)
    except RuntimeError as error:
        if isinstance(error, errors.OpsmithError) or not has_message(error, NO_DATA):
            raise
        raise primitive.specification.error(
            errors.ForwardModeError,
            "its tangent reads tensor memory, as NumPy does, but `torch.func` gives tensors no memory",
            got=str(error),
            hint="write the tangent with torch operations, or use `torch.autograd.forward_ad`",
        ) from error
    return tuple(
        result if tangent is None else capabilities.make_dual(result, tangent)
        for result, tangent in zip(results, moved, strict=True)
    )


def _wrapped(transform: capabilities.Transform, result: Any) -> Any:
    return None if result is None else transform.wrap(result)


def _wrap_batched(transform: capabilities.Transform, results: Flat, dims: Sequence[int | None]) -> Flat:
    """Wrap results for a `vmap` level; None stays None."""
    present = [(result, dim) for result, dim in zip(results, dims, strict=True) if result is not None]
    wrapped = iter(
        transform.wrap_batched(tuple(each for each, _ in present), tuple(dim for _, dim in present))
    )
    return tuple(None if result is None else next(wrapped) for result in results)


def _vmap(primitive: Primitive, flat: Sequence[Any], transform: capabilities.Transform) -> Flat:
    values, dims = transform.unwrap_batched(flat)
    with transform.interpreter.lower():
        if all(dim is None for dim in dims):
            return _call_below(primitive, values)
        values, dims = _written_mapped(primitive, values, dims, transform.batch_size)
        batch = isinstance(primitive, OperatorPrimitive) and batched_call(
            primitive.specification,
            primitive.flattening,
            values,
            dims,
            transform.batch_size,
            transform.randomness,
        )
        if batch:
            results = batch.restore(_call_below(primitive, batch.flat), primitive.results.labels)
            return _wrap_batched(transform, results, (0,) * len(results))
        if isinstance(primitive, OperatorPrimitive) and has_vmap_rule(primitive.specification):
            info, packed = (
                VmapInfo(transform.batch_size, transform.randomness),
                primitive.flattening.pack(values),
            )
            return _wrap_batched(transform, *run_vmap_rule(primitive.specification, info, dims, packed))
        if primitive.specification.opaque or not primitive.specification.origin.runs(MAPPED):
            return _loop_over_examples(primitive, values, dims, transform)
        batched = BatchedPrimitive(primitive, tuple(dims), transform.batch_size, transform.randomness)
        try:
            results = call_under_transforms(batched, values)
        except errors.TransformError:
            if primitive.specification.origin.runs(MAPPED, suspected=True):
                raise
            looped = _loop_over_examples(primitive, values, dims, transform)
            facts, task = class_of(primitive.specification.origin).facts, f"forward {MAPPED}"
            if task not in facts.instead:
                facts.instead[task] = facts.suspected[task]
            return looped
    return _wrap_batched(transform, results, batched.result_dims)


def _written_mapped(
    primitive: Primitive, values: Flat, dims: tuple[int | None, ...], batch_size: int
) -> tuple[Flat, tuple[int | None, ...]]:
    """Map every tensor that the reference writes into, in the functional form of an in-place operator."""
    written = primitive.specification.schema.new_values
    if not written:
        return values, dims
    mapped, places = list(values), list(dims)
    for position in primitive.flattening.positions(written):
        value = values[position]
        if isinstance(value, Tensor) and dims[position] is None:
            mapped[position], places[position] = value.expand(batch_size, *value.shape), 0
    return tuple(mapped), tuple(places)


def _loop_over_examples(
    primitive: Primitive, values: Sequence[Any], dims: Sequence[int | None], transform: capabilities.Transform
) -> Flat:
    """Call an operator once for each example, if there are no torch operations to batch."""
    specification = primitive.specification
    if specification.random and transform.randomness != "different":
        raise specification.error(
            errors.TransformError,
            f"it is random and called for each example, but vmap has randomness={transform.randomness!r}",
            hint="call `vmap(..., randomness='different')`, or pass the drawn numbers as an argument",
        )
    rows = [
        _call_below(
            primitive,
            [value if dim is None else value.select(dim, i) for value, dim in zip(values, dims, strict=True)],
        )
        for i in range(transform.batch_size)
    ]
    patterns = {tuple(result is None for result in row) for row in rows}
    if len(patterns) > 1:
        raise specification.error(
            errors.TransformError,
            "its examples have different numbers of results, so they cannot form a batch",
            hint="call it on each example, and keep its results in a list",
        )
    stacked = tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))
    return _wrap_batched(transform, stacked, (0,) * len(stacked))


_RULES = {"Grad": _grad, "Jvp": _jvp, "Vmap": _vmap}


_UNSUPPORTED = (
    (RuntimeError, NOT_YET_IMPLEMENTED, "functionalize"),
    (ValueError, TANGENT_COUNT, "forward mode over `vmap`"),
    (IndexError, NO_EXAMPLES, "`vmap` over no examples"),
)
"""torch's errors for transforms that do not support an `autograd.Function`."""


def _call_by_node(primitive: Primitive, flat: Sequence[Any]) -> Flat:
    """Call without the capability `torch_func`: under a transform, with a node that torch transforms.

    Raises:
        TransformError: For a transform that does not support such a node.
    """
    if capabilities.innermost_transform() is None:
        return differentiate(primitive, flat)
    devices = {value.device.type for value in flat if isinstance(value, Tensor)}
    if any(torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) for kind in devices):
        raise unsupported_transform(
            primitive.specification, "autocast under `torch.func`"
        )  # the arguments of the reference would not be cast
    node = primitive.registered.node(TransformedNode)
    try:
        rule = RerunRule(primitive, partial(_transformed, primitive))
        found: Flat = through(node.apply, rule, *flat)
        return found
    except (RuntimeError, ValueError, IndexError) as error:
        for kind, texts, transform in _UNSUPPORTED:
            if isinstance(error, kind) and has_message(error, texts):
                raise unsupported_transform(primitive.specification, transform) from error
        if primitive.specification.schema.new_values and has_message(error, WRITE_UNMAPPED):
            unmapped = "`vmap` that does not map the written argument"
            raise unsupported_transform(primitive.specification, unmapped) from error
        raise


def _transformed(primitive: Primitive, flat: Flat) -> Flat:
    """Compute the results: below all transforms by the operator, or for a batch by its reference."""
    if capabilities.innermost_transform() is None:
        return primitive.below(flat)
    if primitive.specification.opaque:
        raise unsupported_transform(primitive.specification, "`vmap` of an opaque operator")
    return _with_batch(primitive.example(flat), flat)


class RerunRule(FormulaRule):
    """A rule under torch's own transforms, which cut the graph of results: results are computed again."""

    def _reruns(self, plan: BackwardPlan) -> bool:
        """Return True if a formula uses a result."""
        return not self.specification.schema.result_position.keys().isdisjoint(plan.saved)

    def saved(self, plan: BackwardPlan) -> Sequence[str]:
        """Names of the values to save: only arguments."""
        return self.specification.schema.names if self._reruns(plan) else plan.saved

    def keep(self, ctx: NodeContext, flat: Flat, results: Flat, state: RandomState | None = None) -> None:
        """Save arguments for the backward."""
        draws = self.specification.random or generators_in(flat)
        if draws and self._reruns(self.plan(needs_of(ctx))):
            what = "a formula under `torch.func` that uses a result drawn at random"
            raise unsupported_transform(self.specification, what)
        super().keep(ctx, flat, results, state)

    def loaded(self, ctx: NodeContext) -> dict[str, Any]:
        """Saved arguments by name, and the results of a new run."""
        schema, flattening, saved = self.specification.schema, self.primitive.flattening, super().loaded(ctx)
        if self._reruns(self.plan(needs_of(ctx))):
            assert isinstance(self.primitive, OperatorPrimitive)
            results = self.primitive.call(flattening.flatten([saved[name] for name in schema.names]))
            saved.update(zip(schema.result_position, self.primitive.results.pack(results), strict=True))
        return saved

    def tangents(self, ctx: NodeContext, tangents: Flat) -> Flat:
        """Refuse forward mode."""
        raise unsupported_transform(self.specification, "forward mode under `torch.func`")


def _with_batch(results: Sequence[Any], flat: Sequence[Any]) -> Flat:
    """Give each result a batch dimension; otherwise torch adds its gradient once for every example."""
    nothing = sum(torch.zeros_like(value).sum().abs() for value in flat if isinstance(value, Tensor))
    always = torch.as_tensor(nothing == 0)
    return tuple(None if result is None else torch.where(always, result, result) for result in results)


def unsupported_transform(specification: Specification, what: str) -> errors.TransformError:
    """The error for a transform that needs the capability `torch_func`."""
    return specification.error(
        errors.TransformError,
        f"{what} needs the capability `torch_func`, which is off",
        hint="`opsmith doctor` says why; a reference without formulas or kernels works under every transform",
    )
