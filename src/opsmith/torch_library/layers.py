"""The layers of `torch.func`, one at a time: each hands the call on to the layer below it.

Nested transforms form a stack. A call is treated here for the innermost layer alone, whatever lies further
out: `grad` becomes a node of that level, `jvp` a dual of that level, `vmap` a target that takes a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.torch_library import capabilities
from opsmith.torch_library.adopted.vmap_rule import Info, has_rule, run_rule
from opsmith.torch_library.batching import Batched
from opsmith.torch_library.differentiation import (
    LEADING,
    differentiate,
    every_name,
    prepare_backward,
    run_backward,
)
from opsmith.torch_library.operator_call import OperatorCall
from opsmith.torch_library.result_flattening import Flat
from opsmith.torch_library.targets import Target
from opsmith.torch_library.whole_batch import whole_batch


class LevelNode(capabilities.SingleLevelFunction):  # type: ignore[misc]  # torch gives it no type
    """The autograd node of one `grad` layer."""

    @staticmethod
    def forward(target: Target, layer: capabilities.Layer, *flat: Any) -> Flat:
        """Compute the results on the level below, and lift them to this one."""
        lowered = [layer.unwrap(value) for value in flat]
        with torch.enable_grad(), capabilities.forward_mode_on(), layer.interpreter.lower():
            results = _descend(target, lowered)
        return tuple(_wrapped(layer, result) for result in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
        """Keep what the backward will need."""
        target, flat = inputs[0], inputs[LEADING:]
        plan = target.plan(target.flattening.needed(ctx.needs_input_grad[LEADING:]))
        prepare_backward(ctx, target, plan, flat, output, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the flat arguments."""
        return run_backward(ctx, grads)


def call_in_layers(target: Target, flat: Sequence[Any]) -> Flat:
    """All results of a call, hidden ones too, through every transform that is running, innermost first."""
    layer = capabilities.innermost_layer()
    if layer is None:
        return differentiate(target, flat)
    flat = [capabilities.unwrap_dead(value) for value in flat]
    return _LAYERS[layer.kind](target, flat, layer)


def _descend(target: Target, flat: Sequence[Any]) -> Flat:
    """Go on at the level below: an operator by a call of its own, so that modes and subclasses see it."""
    return target.call(flat) if isinstance(target, OperatorCall) else call_in_layers(target, flat)


def _grad(target: Target, flat: Sequence[Any], layer: capabilities.Layer) -> Flat:
    lifted = [layer.lift(value) for value in flat]
    with capabilities.single_level_nodes():
        apply: Any = LevelNode.apply
        results: Flat = apply(target, layer, *lifted)
    return results


def _jvp(target: Target, flat: Sequence[Any], layer: capabilities.Layer) -> Flat:
    lifted = [layer.lift(value) for value in flat]
    pairs = [capabilities.unpack_dual(value) for value in lifted]
    primals, tangents = [primal for primal, _ in pairs], [tangent for _, tangent in pairs]
    with layer.interpreter.lower():
        lowered = _descend(target, [layer.unwrap(value) for value in primals])
    results = [_wrapped(layer, result) for result in lowered]
    if all(tangent is None for tangent in tangents) or not capabilities.forward_mode_allowed():
        return tuple(results)
    names = every_name(target.specification)
    values = [*target.flattening.pack(primals), *target.results.pack(results)]
    every = dict(zip(names, values, strict=True))
    moved = target.jvp(every, tangents)
    return tuple(
        result if tangent is None else capabilities.make_dual(result, tangent)
        for result, tangent in zip(results, moved, strict=True)
    )


def _wrapped(layer: capabilities.Layer, result: Any) -> Any:
    return None if result is None else layer.wrap(result)


def _wrap_batched(layer: capabilities.Layer, results: Flat, dims: Sequence[int | None]) -> Flat:
    """The results on the level of a `vmap` layer; one that is not there is on none."""
    there = [(result, dim) for result, dim in zip(results, dims, strict=True) if result is not None]
    wrapped = iter(layer.wrap_batched(tuple(each for each, _ in there), tuple(dim for _, dim in there)))
    return tuple(None if result is None else next(wrapped) for result in results)


def _vmap(target: Target, flat: Sequence[Any], layer: capabilities.Layer) -> Flat:
    values, dims = layer.unwrap_batched(flat)
    with layer.interpreter.lower():
        if all(dim is None for dim in dims):
            return _descend(target, values)
        whole = isinstance(target, OperatorCall) and whole_batch(
            target.specification, target.flattening, values, dims, layer.batch_size, layer.randomness
        )
        if whole:
            results = whole.restore(_descend(target, whole.flat), target.results.labels)
            return _wrap_batched(layer, results, (0,) * len(results))
        if isinstance(target, OperatorCall) and has_rule(target.specification):
            info, packed = Info(layer.batch_size, layer.randomness), target.flattening.pack(values)
            return _wrap_batched(layer, *run_rule(target.specification, info, dims, packed))
        if target.specification.opaque:
            return _one_by_one(target, values, dims, layer)
        batched = Batched(target, tuple(dims), layer.batch_size, layer.randomness)
        results = call_in_layers(batched, values)
    return _wrap_batched(layer, results, batched.result_dims)


def _one_by_one(
    target: Target, values: Sequence[Any], dims: Sequence[int | None], layer: capabilities.Layer
) -> Flat:
    """An opaque operator has no torch operations to batch: it is called for each example."""
    specification = target.specification
    if specification.random and layer.randomness != "different":
        raise errors.TransformError(
            f"it is opaque and random, and vmap was called with randomness={layer.randomness!r}",
            operator=specification.name,
            where=specification.where,
            hint="call `vmap(..., randomness='different')`, or pass what is drawn as an argument",
        )
    rows = [
        _descend(
            target,
            [value if dim is None else value.select(dim, i) for value, dim in zip(values, dims, strict=True)],
        )
        for i in range(layer.batch_size)
    ]
    forms = {tuple(result is None for result in row) for row in rows}
    if len(forms) > 1:
        raise errors.TransformError(
            "its examples have different numbers of results, which no batch can hold",
            operator=specification.name,
            where=specification.where,
            hint="call it on each example, and keep what it returns in a list",
        )
    stacked = tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))
    return _wrap_batched(layer, stacked, (0,) * len(stacked))


_LAYERS = {"Grad": _grad, "Jvp": _jvp, "Vmap": _vmap}
