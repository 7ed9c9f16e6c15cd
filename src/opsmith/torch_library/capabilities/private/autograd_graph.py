"""Nodes of autograd's graph: their Python class, the metadata of their results, and saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as _modules

from opsmith.torch_library.torch_messages import SAVED_WRITTEN, has_message


def forward_class(node: Any) -> type | None:
    """The `autograd.Function` of a node; None for torch's own nodes."""
    found: type | None = getattr(node, "_forward_cls", None)
    return found


def result_metadata(node: Any) -> list[tuple[tuple[int, ...], torch.dtype, torch.device]]:
    """Shape, dtype and device of each result of a node's operation."""
    return [
        (tuple(int(size) for size in each.shape), each.dtype, each.device) for each in node._input_metadata
    ]


def saved_tensors(node: Any) -> dict[str, Any]:
    """Values that a node saved, by name; items of a list have numbers; values of a Function are `0`, `1`, ...

    A value is None if nothing was saved. If a hook has packed it, it is the packed object: unpacking may load
    or recompute it.

    Raises:
        RuntimeError: If the values were freed.
    """
    found: dict[str, Any] = {}
    prefix = "_raw_saved_"
    for name in (name for name in dir(node) if name.startswith(prefix)):
        kept = getattr(node, name)
        several = isinstance(kept, tuple)
        label = "" if hasattr(node, "saved_tensors") else name.removeprefix(prefix)
        for position, each in enumerate(kept if several else [kept]):
            number = str(position) if not label else f"{label}[{position}]"
            found[number if several else label] = None if each is None else each.data
        if not several and found[label] is None and each is not None:
            # A freed tensor is None here, too; reading the attribute raises an error if it was freed.
            getattr(node, name.replace("_raw", "", 1))
    return found


def overwritten(node: Any) -> bool:
    """Return True if a saved tensor of a node was overwritten later, so that its backward raises an error."""
    prefix = "_raw_saved_"
    for name in (name for name in dir(node) if name.startswith(prefix)):
        kept = getattr(node, name)
        each = kept if isinstance(kept, tuple) else (kept,)
        if any(saved is not None and saved.unpack_hook is not None for saved in each):
            continue
        try:
            getattr(node, "saved_tensors" if hasattr(node, "saved_tensors") else name.replace("_raw", "", 1))
        except RuntimeError as error:
            if not has_message(error, SAVED_WRITTEN):
                raise
            return True
    return False


def after_modules(hook: Callable[..., None]) -> Callable[[], None]:
    """Call a function after every call of a module, with the module, its arguments, keywords and output.

    Returns:
        A function that removes the hook. It also removes the hook's keyword flag, which torch leaves
        behind. With this flag, torch 2.11 to 2.13 warn of global hooks whenever a module is compiled.
    """
    handle = _modules.register_module_forward_hook(hook, with_kwargs=True, always_call=True)

    def remove() -> None:
        handle.remove()
        _modules._global_forward_hooks_with_kwargs.pop(handle.id, None)

    return remove


def differentiated(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    is_grads_batched: bool = False,
) -> Sequence[Tensor | None]:
    """Compute gradients like `torch.autograd.grad`, but for small tensors in a third of its time.

    Args:
        results: Results with a graph.
        inputs: Tensors to differentiate with respect to.
        grads: grad_output of each result.
        retain_graph: As for `torch.autograd.grad`.
        create_graph: As for `torch.autograd.grad`.
        is_grads_batched: As for `torch.autograd.grad`.
    """
    kept = retain_graph or create_graph
    usual = not (is_grads_batched or torch.compiler.is_compiling())
    plain = usual and all(type(each) is Tensor for each in (*results, *inputs))
    fit = plain and all(
        type(grad) is Tensor
        and grad.shape == result.shape
        and grad.is_complex() == result.is_complex()
        and grad.layout == result.layout == torch.strided
        for result, grad in zip(results, grads, strict=True)
    )
    if not fit:  # torch refuses the call with its own message
        return torch.autograd.grad(
            results,
            inputs,
            grads,
            kept,
            create_graph,
            allow_unused=True,
            is_grads_batched=is_grads_batched,
        )
    return _engine_run_backward(
        tuple(results), tuple(grads), kept, create_graph, tuple(inputs), True, accumulate_grad=False
    )


def self_test() -> None:
    """A node of torch and a node of a Function show their class, metadata and saved tensors, until freed."""
    leaf = torch.ones(2, 3, requires_grad=True)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * 2

    doubled, result = Doubled.apply(leaf), leaf.double().exp()  # type: ignore[no-untyped-call]
    node = result.grad_fn
    assert (forward_class(doubled.grad_fn), forward_class(node)) == (Doubled, None)
    assert result_metadata(node) == [((2, 3), torch.float64, torch.device("cpu"))]
    assert saved_tensors(doubled.grad_fn)["0"] is leaf
    assert saved_tensors(node)["result"].shape == (2, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "packed", lambda text: torch.ones(0)):
        packed = leaf.exp()
    assert saved_tensors(packed.grad_fn) == {"result": "packed"}
    third = leaf**3
    (slope,) = differentiated([third], [leaf], [torch.full((2, 3), 2.0)], create_graph=True)
    assert slope is not None
    (curve,) = differentiated([slope], [leaf], [torch.ones(2, 3)], retain_graph=True)
    assert curve is not None
    assert (slope.tolist(), curve.tolist()) == ([[6.0] * 3] * 2, [[12.0] * 3] * 2)
    assert leaf.grad is None
    assert not overwritten(node)
    written = leaf.double()
    squared = written * written
    written.add_(1)
    assert overwritten(squared.grad_fn)
    result.sum().backward()
    message = ""
    try:
        saved_tensors(node)
    except RuntimeError as error:
        message = str(error)
    assert "freed" in message, "a freed value is still there"
    seen: list[Any] = []
    remove = after_modules(lambda module, args, kwargs, output: seen.append(kwargs["input"]))
    torch.nn.Identity()(input=leaf)
    remove()
    torch.nn.Identity()(input=leaf)
    assert len(seen) == 1
    assert seen[0] is leaf
    assert not _modules._global_forward_hooks_with_kwargs
