"""Contexts in which a function is computed and differentiated, as a table: none of them changes an answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Function = Callable[..., Any]
Inputs = tuple[Tensor, ...]


def results_of(value: Any) -> Inputs:
    """One result or several, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def loss_of(value: Any) -> Tensor:
    """A scalar whose second derivative is not zero."""
    return sum((result.pow(2).sum() for result in results_of(value)), torch.zeros(()))


def values_and_gradients(function: Function, inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Results, and the gradient of their loss by each input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    results = function(*leaves)
    return tuple(r.detach() for r in results_of(results)), torch.autograd.grad(loss_of(results), leaves)


def _checkpointed(function: Function, inputs: Inputs, **options: Any) -> Any:
    return _accumulated(lambda *leaves: checkpoint(function, *leaves, **options), inputs)


def _selective(chosen: CheckpointPolicy, others: CheckpointPolicy, function: Function, inputs: Inputs) -> Any:
    """A policy that tells aten's operators from ours."""

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return others if operator.namespace == "aten" else chosen

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return _checkpointed(function, inputs, use_reentrant=False, context_fn=contexts)


def _packed_as_numpy(function: Function, inputs: Inputs) -> Any:
    def pack(tensor: Tensor) -> Any:
        return tensor.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        return values_and_gradients(function, inputs)


def _saved_on_cpu(function: Function, inputs: Inputs) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return values_and_gradients(function, inputs)


def _under_anomaly_detection(function: Function, inputs: Inputs) -> Any:
    with torch.autograd.detect_anomaly():
        return values_and_gradients(function, inputs)


def _forward_in(context: Callable[[], Any], function: Function, inputs: Inputs) -> Any:
    """The values in a context without gradients; the gradients, of a second call, outside of it."""
    with context():
        values = tuple(result.clone() for result in results_of(function(*inputs)))
        assert not any(value.requires_grad for value in values)
    return tuple(torch.empty_like(v).copy_(v) for v in values), values_and_gradients(function, inputs)[1]


def _inference_inputs(function: Function, inputs: Inputs) -> Any:
    with torch.inference_mode():
        made = tuple(tensor.clone() for tensor in inputs)
    values = tuple(result.clone() for result in results_of(function(*made)))
    return values, values_and_gradients(function, inputs)[1]


def _retained(function: Function, inputs: Inputs) -> Any:
    """The second backward through one graph."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    results = function(*leaves)
    loss = loss_of(results)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(first, second)
    return tuple(r.detach() for r in results_of(results)), second


def _accumulated(function: Function, inputs: Inputs) -> Any:
    """`backward` adds into `.grad`."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    for _ in range(2):
        results = function(*leaves)
        loss_of(results).backward()
    return tuple(r.detach() for r in results_of(results)), tuple(leaf.grad / 2 for leaf in leaves)


def _of_parameters(function: Function, inputs: Inputs) -> Any:
    leaves = [nn.Parameter(tensor.clone()) for tensor in inputs]
    results = function(*leaves)
    return tuple(r.detach() for r in results_of(results)), torch.autograd.grad(loss_of(results), leaves)


class Logged(Tensor):
    """A subclass that lets every function of torch through, and its results be of its kind."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def _of_function_subclass(function: Function, inputs: Inputs) -> Any:
    leaves = [tensor.clone().as_subclass(Logged).requires_grad_() for tensor in inputs]
    results = results_of(function(*leaves))
    assert all(type(result) is Logged for result in results)
    gradients = torch.autograd.grad(loss_of(results), leaves)
    return tuple(r.detach().as_subclass(Tensor) for r in results), tuple(
        g.as_subclass(Tensor) for g in gradients
    )


class Wrapped(Tensor):
    """A subclass that holds a tensor and has no data of its own, made as torch's notes say."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda value: value.held if isinstance(value, cls) else value
        wrap = lambda value: cls(value) if isinstance(value, Tensor) else value
        return tree_map(wrap, function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


def _of_wrapper_subclass(function: Function, inputs: Inputs) -> Any:
    leaves = [Wrapped(tensor.clone()).requires_grad_() for tensor in inputs]
    results = results_of(function(*leaves))
    assert all(type(result) is Wrapped for result in results)
    gradients = torch.autograd.grad(loss_of(results), leaves)
    return tuple(r.detach().held for r in results), tuple(g.held for g in gradients)


class LetThrough(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class LetFunctionsThrough(TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _in_mode(mode: Callable[[], Any], function: Function, inputs: Inputs) -> Any:
    with mode():
        return values_and_gradients(function, inputs)


def _traced(tracing: str, function: Function, inputs: Inputs, **options: Any) -> Any:
    """Forward and backward in one graph."""
    traced = make_fx(lambda *leaves: values_and_gradients(function, leaves), tracing_mode=tracing, **options)(
        *inputs
    )
    torch.manual_seed(0)  # a trace draws numbers, too
    return traced(*inputs)


def _functionalized(function: Function, inputs: Inputs) -> Any:
    step = torch.func.functionalize(
        lambda *given: torch.func.grad(
            lambda *a: (loss_of(r := function(*a)), results_of(r)), tuple(range(len(given))), has_aux=True
        )(*given)
    )
    gradients, values = step(*inputs)
    return values, gradients


def _profiled(function: Function, inputs: Inputs) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return values_and_gradients(function, inputs)


CONTEXTS: dict[str, Callable[[Function, Inputs], Any]] = {
    "nothing": values_and_gradients,
    "checkpoint": partial(_checkpointed, use_reentrant=False),
    "checkpoint-reentrant": partial(_checkpointed, use_reentrant=True),
    "checkpoint-that-saves-ours": partial(
        _selective, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
    ),
    "checkpoint-that-recomputes-ours": partial(
        _selective, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    ),
    "saved-tensors-hooks": _packed_as_numpy,
    "save-on-cpu": _saved_on_cpu,
    "anomaly-detection": _under_anomaly_detection,
    "no-grad": partial(_forward_in, torch.no_grad),
    "inference-mode": partial(_forward_in, torch.inference_mode),
    "inference-tensors": _inference_inputs,
    "retain-graph": _retained,
    "backward-twice": _accumulated,
    "parameters": _of_parameters,
    "function-subclass": _of_function_subclass,
    "dispatch-subclass": _of_wrapper_subclass,
    "dispatch-mode": partial(_in_mode, LetThrough),
    "function-mode": partial(_in_mode, LetFunctionsThrough),
    "make_fx": partial(_traced, "real"),
    "make_fx-fake": partial(_traced, "fake"),
    "make_fx-symbolic": partial(_traced, "symbolic"),
    "make_fx-pre-dispatch": partial(_traced, "real", pre_dispatch=True),
    "functionalize": _functionalized,
    "profiler": _profiled,
}
"""Each gives values and gradients."""


def _dual(function: Function, inputs: Inputs) -> Any:
    with forward_ad.dual_level():
        results = function(*(forward_ad.make_dual(tensor, tensor.cos()) for tensor in inputs))
        return [tuple(forward_ad.unpack_dual(result)) for result in results_of(results)]


def _dual_under_gradients(function: Function, inputs: Inputs) -> Any:
    """Backward through tangents: forward over reverse, nested by hand."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with forward_ad.dual_level():
        results = function(*(forward_ad.make_dual(leaf, leaf.detach().cos()) for leaf in leaves))
        moved = [part for result in results_of(results) for part in forward_ad.unpack_dual(result)]
        return torch.autograd.grad(loss_of(tuple(moved)), leaves)


def _gradients_of_dual(function: Function, inputs: Inputs) -> Any:
    """Tangents of gradients: reverse over forward."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(tensor.clone().requires_grad_(), tensor.cos()) for tensor in inputs]
        gradients = torch.autograd.grad(loss_of(function(*duals)), duals, create_graph=True)
        return [tuple(forward_ad.unpack_dual(gradient)) for gradient in gradients]


def _double_backward(function: Function, inputs: Inputs) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    first = torch.autograd.grad(loss_of(function(*leaves)), leaves, create_graph=True)
    return torch.autograd.grad(sum(gradient.pow(2).sum() for gradient in first), leaves)


def _batched_gradients(function: Function, inputs: Inputs) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    result = results_of(function(*leaves))[0]
    vectors = torch.eye(result.numel(), dtype=result.dtype).view(-1, *result.shape)
    return torch.autograd.grad(result, leaves, vectors, is_grads_batched=True)


def _scalar(function: Function) -> Function:
    return lambda *inputs: loss_of(function(*inputs))


DERIVATIVES: dict[str, Callable[[Function, Inputs], Any]] = {
    "functional.jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x),
    "functional.jacobian-vectorized": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "functional.jacobian-forward-mode": lambda f, x: torch.autograd.functional.jacobian(
        f, x, strategy="forward-mode", vectorize=True
    ),
    "functional.hessian": lambda f, x: torch.autograd.functional.hessian(_scalar(f), x),
    "functional.hessian-forward-mode": lambda f, x: torch.autograd.functional.hessian(
        _scalar(f), x, outer_jacobian_strategy="forward-mode", vectorize=True
    ),
    "functional.vjp": lambda f, x: torch.autograd.functional.vjp(_scalar(f), x),
    "functional.jvp": lambda f, x: torch.autograd.functional.jvp(f, x, tuple(each.cos() for each in x)),
    "functional.hvp": lambda f, x: torch.autograd.functional.hvp(
        _scalar(f), x, tuple(each.cos() for each in x)
    ),
    "functional.vhp": lambda f, x: torch.autograd.functional.vhp(
        _scalar(f), x, tuple(each.cos() for each in x)
    ),
    "double-backward": _double_backward,
    "is_grads_batched": _batched_gradients,
    "dual": _dual,
    "gradients-of-tangents": _dual_under_gradients,
    "tangents-of-gradients": _gradients_of_dual,
}
"""Each gives what the plain function gives in the same way."""
