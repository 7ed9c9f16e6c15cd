"""Calls and autograd nodes in C++, with torch's own classes; the source is in the folder `cpp`."""

from __future__ import annotations

import sys
import threading
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith.torch_library.calls_extension import calls_extension

_C: Any = torch._C


@cache
def calls_in_cpp() -> ModuleType | None:
    """The extension module; None if it is not built for this Python and this torch."""
    extension = calls_extension()
    if extension is not None:
        extension.use_types(Tensor, torch.nn.Parameter)
        frames = _C._dynamo.eval_frame
        extension.use_frame_callback(frames.get_eval_frame_callback, frames.set_eval_frame)
        torch.autograd.graph.Node.register(extension.Node)  # as every node of torch
        # Compiled autograd uses Dynamo, which must not compile this function.
        extension.use_maker(recorded_by_torch, torch.compiler.disable)
    return extension


def unwatched() -> tuple[tuple[dict[str, Any], str, Any], ...]:
    """Dictionaries, names and values that are present if no forward-mode level and no profiler is active."""
    return (
        (vars(forward_ad), sys.intern("_current_level"), -1),
        (vars(torch.autograd.profiler), sys.intern("_is_profiler_enabled"), False),
    )


def recorded_by_torch(
    generated: type[torch.autograd.Function],
    context: Any,
    results: tuple[Tensor | None, ...],
    arguments: tuple[int, ...],
) -> Tensor:
    """Record a call that C++ has already recorded again by `torch.autograd.Function`, for compiled autograd.

    Args:
        generated: The class of the node.
        context: The context after its forward.
        results: A tensor like each result; None for a result without a gradient.
        arguments: For each argument, 0 if it is not a tensor, 1 for a tensor, 2 for a tensor that requires a
            gradient.

    Returns:
        A result whose `grad_fn` is the node.
    """
    names: Any = vars(generated)
    # One class for all calls: compiled autograd takes a different class for different code.
    recorded: Any = names.get("recorded_by_torch")
    if recorded is None:
        recorded = type(generated.__name__, (generated,), {"forward": staticmethod(_forward)})
        generated.recorded_by_torch = recorded  # type: ignore[attr-defined]
    tensors = [torch.empty(0, requires_grad=each == 2) if each else None for each in arguments]
    _LEFT.context, _LEFT.results = context, results  # not as an argument: it would get a gradient
    try:
        with torch.enable_grad():
            made: tuple[Tensor, ...] = recorded.apply(*tensors)
    finally:
        vars(_LEFT).clear()
    return next(each for each in made if each.grad_fn is not None)


_LEFT = threading.local()
"""While this thread records a call again: its context, and a tensor like each result."""


def _forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    context, like = _LEFT.context, _LEFT.results
    results = [torch.zeros(()) if each is None else each for each in like]
    constants = [made for made, each in zip(results, like, strict=True) if each is None]
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)
    # Without their history: a result among them would reference the node, which references this node.
    ctx.save_for_backward(*(each if each is None else each.detach() for each in context.saved_tensors))
    if hasattr(context, "kept"):
        ctx.kept = context.kept
    return tuple(results)


def self_test() -> None:
    """A table distinguishes calls, and a recorded call has the gradient of its class."""
    extension = calls_in_cpp()
    if extension is None:
        return
    special: tuple[Any, ...] = (forward_ad.dual_level(), torch.autograd.profiler.profile())
    for (names, name, value), region in zip(unwatched(), special, strict=True):
        assert names[name] is value, name
        with region:
            assert names[name] is not value, name

    class Handle:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return "in Python"

    handle, x = Handle(), torch.ones(2)
    plan = table_of_tensors(extension, Handle, "x")
    assert handle(x) == "in Python"
    assert extension.accept(plan, [x], "k", Tensor.exp, None, True, False, False)
    assert handle(torch.zeros(3)).tolist() == [1.0] * 3
    others: tuple[Any, ...] = (
        x.double(),
        torch.ones(1, 2),
        torch.nn.Parameter(x),
        x.to("meta"),
        torch.eye(2).to_sparse(),
        x.to(torch.complex64).conj(),
        None,
    )
    assert [handle(other) for other in others] == ["in Python"] * len(others)
    regions: tuple[Any, ...] = (torch.inference_mode(), torch.autocast("cpu"), torch.no_grad())
    for region in regions:
        with region:
            assert handle(x) == "in Python", region
    extension.detach(plan)
    assert handle(x) == "in Python"

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
    first, second = extension.recorder(Sevenfold, None)(leaf, 7)
    node = first.grad_fn
    assert (node.name(), second.requires_grad, node._forward_cls) == ("SevenfoldBackward", False, Sevenfold)
    (gradient,) = torch.autograd.grad(first.sum(), leaf, retain_graph=True)
    assert gradient.tolist() == [7.0, 7.0]

    class Written(Sevenfold):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: int | None = None) -> Any:
            ctx.to_save, ctx.dirty_tensors, ctx.kept = (leaf, x, None), (x.mul_(2),), (2,)
            return x

    first = leaf * 1
    node = extension.recorder(Written, None)(first, None).grad_fn
    assert (node.name(), first.grad_fn) == ("WrittenBackward", node)
    assert node.next_functions[0][0].name() == "MulBackward0"


def table_of_tensors(extension: Any, handle: type, *names: str) -> Any:
    """The table of a function of tensors."""
    return extension.plan(
        handle=handle,
        forms="t" * len(names),
        positional=len(names),
        results=1,
        letters=0,
        by_name=True,
        alike=True,
        counts=[0] * len(names),
        spread=[0] * len(names),
        integers=[-1] * len(names),
        written=[],
        sizes=[],
        names=names,
        by_keyword=None,
        defaults=((),) * len(names),
        types=(None,) * len(names),
        fits=None,
        shown=(0,),
        unknown=KeyError,
        unchanged=unwatched(),
    )
