"""Calls and autograd nodes in C++, by torch's own classes; the source lies in the folder `cpp`."""

from __future__ import annotations

import threading
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from opsmith.torch_library.calls_extension import calls_extension

_C: Any = torch._C


@cache
def calls_in_cpp() -> ModuleType | None:
    """The extension module; None where it is not built for this Python and this torch."""
    extension = calls_extension()
    if extension is not None:
        extension.use_types(Tensor, torch.nn.Parameter)
        extension.use_frame_callback(_C._dynamo.eval_frame.get_eval_frame_callback)
        torch.autograd.graph.Node.register(extension.Node)  # as every node of torch
        # Dynamo is at work where compiled autograd is, and must not compile it.
        extension.use_maker(recorded_by_torch, torch.compiler.disable)
    return extension


def recorded_by_torch(
    generated: type[torch.autograd.Function],
    context: Any,
    results: tuple[Tensor | None, ...],
    arguments: tuple[int, ...],
) -> Tensor:
    """Record a call that C++ has recorded once more by `torch.autograd.Function`, for compiled autograd.

    Args:
        generated: The class of the node.
        context: What its forward has left.
        results: A tensor like each result; None for one without a gradient.
        arguments: For each argument 0 if it is no tensor, 1 for a tensor, 2 for one that requires a gradient.

    Returns:
        A result whose `grad_fn` is the node.
    """
    names: Any = vars(generated)
    # One class for all calls: compiled autograd takes another class for other code.
    recorded: Any = names.get("recorded_by_torch")
    if recorded is None:
        recorded = type(generated.__name__, (generated,), {"forward": staticmethod(_forward)})
        generated.recorded_by_torch = recorded  # type: ignore[attr-defined]
    tensors = [torch.empty(0, requires_grad=each == 2) if each else None for each in arguments]
    _LEFT.context, _LEFT.results = context, results  # no argument: it would get a gradient
    try:
        with torch.enable_grad():
            made: tuple[Tensor, ...] = recorded.apply(*tensors)
    finally:
        vars(_LEFT).clear()
    return next(each for each in made if each.grad_fn is not None)


_LEFT = threading.local()
"""While this thread records a call once more: its context, and a tensor like each result."""


def _forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    context, like = _LEFT.context, _LEFT.results
    results = [torch.zeros(()) if each is None else each for each in like]
    constants = [made for made, each in zip(results, like, strict=True) if each is None]
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)
    # Without their history: a result among them would hold the node, which holds this one.
    ctx.save_for_backward(*(each if each is None else each.detach() for each in context.saved_tensors))
    if hasattr(context, "kept"):
        ctx.kept = context.kept
    return tuple(results)


def self_test() -> None:
    """A guard tells tensors apart, and a recorded call has the gradient of its class."""
    extension = calls_in_cpp()
    if extension is None:
        return
    x, y = torch.ones(2), torch.ones(3)
    accepts = extension.guard((x, y), False)
    assert accepts(torch.ones(5), torch.ones(0))
    others = (
        x.double(),
        torch.ones(1, 2),
        torch.nn.Parameter(x),
        x.to("meta"),
        torch.eye(2).to_sparse(),
        None,
    )
    assert not any(accepts(x, other) for other in others)
    assert not accepts(x, x)
    with torch.inference_mode():
        assert not accepts(x, y)

    class Sevenfold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: int) -> Any:
            first, second = x * by, x > 0
            ctx.to_save, ctx.non_differentiable, ctx.materialize_grads = (x, first, None), (second,), False
            ctx.kept = (by,)
            return first, second

        @staticmethod
        def backward(ctx: Any, grad: Tensor, nothing: None) -> Any:
            saved, result, missing = ctx.saved_tensors
            assert (saved is leaf, result.grad_fn is node, missing, nothing) == (True, True, None, None)
            return grad * ctx.kept[0], None

    leaf = torch.ones(2, requires_grad=True)
    first, second = extension.recorder(Sevenfold)(leaf, 7)
    node = first.grad_fn
    assert (node.name(), second.requires_grad, node._forward_cls) == ("SevenfoldBackward", False, Sevenfold)
    (gradient,) = torch.autograd.grad(first.sum(), leaf, retain_graph=True)
    assert gradient.tolist() == [7.0, 7.0]
