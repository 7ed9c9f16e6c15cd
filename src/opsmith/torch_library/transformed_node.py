"""Running `torch.func` transforms left to torch: one ordinary node, which torch puts under each of them.

This is what serves where the capability `torch_func` is off. The backward runs the author's formulas as ever.
Under `vmap` it is the reference that computes, and forward mode is refused: nested, torch's own treatment of
such a node is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.differentiation import LEADING, constant_results, differentiate
from opsmith.torch_library.random_state import generators_in
from opsmith.torch_library.result_flattening import Flat
from opsmith.torch_library.saving import keep
from opsmith.torch_library.targets import Forms, Target

Through = Callable[[Target, Sequence[Any]], tuple[Tensor, ...]]


@cache
def through_transforms() -> Through:
    """What takes a call through autograd and all running transforms, with the torch that is here."""
    if not capabilities.on("torch_func"):
        return call_by_node
    from opsmith.torch_library.layers import call_in_layers  # what it stands on may not be there

    return call_in_layers


def call_by_node(target: Target, flat: Sequence[Any]) -> Flat:
    """All results of a call, hidden ones too; under a transform, by a node that torch transforms.

    Raises:
        TransformError: For a transform that torch does not take such a node through.
    """
    if capabilities.innermost_layer() is None:
        return differentiate(target, flat)
    devices = {value.device.type for value in flat if isinstance(value, Tensor)}
    if any(torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) for kind in devices):
        raise refused(target.specification, "autocast under `torch.func`")  # the reference would not be cast
    apply: Any = TransformedNode.apply
    try:
        results: Flat = apply(target, None, *flat)
    except RuntimeError as error:
        if str(error).startswith("NYI"):  # torch: not yet implemented
            raise refused(target.specification, "functionalize") from error
        raise
    except ValueError as error:
        if "treespec" in str(error):  # torch miscounts tangents under `vmap` before it asks for ours
            raise refused(target.specification, "forward mode over `vmap`") from error
        raise
    except IndexError as error:
        if "index 0 out of range for tensor of size" in str(error):  # torch looks for a first example
            raise refused(target.specification, "`vmap` over no examples") from error
        raise
    return results


class TransformedNode(torch.autograd.Function):
    """A node whose rules under transforms are torch's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(target: Target, _: None, *flat: Any) -> Flat:
        """Compute the results: below every transform by the operator, with a batch by its reference."""
        if capabilities.innermost_layer() is None:
            return target.below(flat)
        if target.specification.opaque:
            raise refused(target.specification, "vmap, since it is opaque,")
        return _in_every_example(target.example(flat), flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
        """Keep what the backward will need: no results, since torch cuts their graph under `vmap`."""
        target, flat = inputs[0], inputs[LEADING:]
        specification, flattening = target.specification, target.flattening
        plan = target.plan(flattening.needed(ctx.needs_input_grad[LEADING:]))
        ctx.mark_non_differentiable(*constant_results(target.results, specification, plan, output))
        ctx.set_materialize_grads(False)
        ctx.target = target
        ctx.vjp = target.vjp(plan, Forms.of(flat, output, ctx.needs_input_grad[LEADING:]), None)
        ctx.again = any(name in specification.schema.result_position for name in plan.saved)
        if ctx.again and (specification.random or generators_in(flat)):
            raise refused(specification, "a formula under `torch.func` that uses a result drawn at random")
        names = specification.schema.names if ctx.again else plan.saved
        ctx.kept = keep(ctx.save_for_backward, names, flattening, flat, output, target.results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the flat arguments; the results that formulas use are computed again."""
        schema = ctx.target.specification.schema
        saved = ctx.kept.load([capabilities.unwrap_dead(tensor) for tensor in ctx.saved_tensors])
        if ctx.again:
            results = ctx.target.call(ctx.target.flattening.flatten([saved[name] for name in schema.names]))
            saved.update(zip(schema.result_position, ctx.target.results.pack(results), strict=True))
        return (*(None,) * LEADING, *ctx.vjp(saved, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """Refuse."""
        raise refused(ctx.target.specification, "forward mode under `torch.func`")


def _in_every_example(results: Sequence[Any], flat: Sequence[Any]) -> Flat:
    """The results, with a batch each: torch counts the gradient of one without once for every example."""
    nothing = sum(torch.zeros_like(value).sum().abs() for value in flat if isinstance(value, Tensor))
    always = torch.as_tensor(nothing == 0)
    return tuple(None if result is None else torch.where(always, result, result) for result in results)


def refused(specification: Specification, what: str) -> errors.TransformError:
    """The error for a transform that needs the capability `torch_func`."""
    return errors.TransformError(
        f"{what} needs the capability `torch_func`, which is off",
        operator=specification.name,
        where=specification.where,
        hint="`opsmith doctor` says why; a reference without formulas or kernels works under every transform",
    )
