"""Fallback for a Function class whose code cannot run: its reference, or an error with the reason."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith import errors
from opsmith.core.call_arguments import requires_gradient, tensors_in
from opsmith.core.location import where
from opsmith.core.origins.declared import MAPPED, SECOND, TRACED, TRANSFORMED
from opsmith.core.origins.function_class import AdoptedFunction, Obstacle
from opsmith.torch_library import capabilities

T = TypeVar("T")

_EAGER = (torch.Tensor, torch.nn.Parameter)
_TORCH = os.path.dirname(torch.__file__)


def run_or_fall_back(
    adopted: AdoptedFunction,
    method: str,
    values: Sequence[Any],
    own: Callable[[], T],
    instead: Callable[[], T] | None,
) -> T:
    """Run the class's code; fall back if it cannot take proxy tensors.

    Args:
        adopted: The class.
        method: `forward` or `backward`, in messages.
        values: Argument values.
        own: Runs the code.
        instead: Runs the reference, or the code on real tensors; None if neither is possible.

    Raises:
        TransformError: If the code does not run on proxy tensors, and there is no fallback.
    """
    circumstance = proxy_reason(values)
    if circumstance is None and method == "backward" and torch.is_grad_enabled():
        circumstance = SECOND if requires_gradient(values) else None
    if circumstance is None:
        return own()
    key, known = f"{method} {circumstance}", adopted.facts.instead
    if key in known:
        if instead is None:
            raise cannot_run(adopted, circumstance, known[key])
        return instead()
    symbols = capabilities.fresh_symbols(tensors_in(list(values)))
    count = len(symbols)
    try:
        with _RefusingAddresses() if circumstance == TRACED else nullcontext():
            return own()
    except (errors.OpsmithError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        del symbols[count:]
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_by_torch = isinstance(error, RuntimeError | TypeError | NotImplementedError) or (
            isinstance(error, AssertionError) and codes[-1].co_filename.startswith(_TORCH)
        )
        real = circumstance == SECOND
        if not raised_by_torch and (real or instead is None or adopted.has_stand_in(method)):
            raise  # the code's own exception; on real tensors it is raised again
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        in_forward = adopted.where in map(where, codes)
        found = Obstacle("forward" if in_forward else method, reason)
        again, adopted.facts.suspected[key] = key in adopted.facts.suspected, found
        if instead is None:
            raise cannot_run(adopted, circumstance, found) from error
        answer = instead()
        if not real or again:  # a single error on real tensors may be caused by a lack of memory
            known[key] = adopted.facts.suspected.pop(key, found)  # missing if `instead` met it, too
        return answer


class _RefusingAddresses(TorchFunctionMode):
    """A region in which reading a tensor's address raises: a fake tensor's is 0, which crashes C code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr and (type(args[0]) not in _EAGER or args[0].is_meta):
            raise RuntimeError("it reads the address of a tensor, which has no data yet")
        return func(*args, **(kwargs or {}))


def declare_opaque(adopted: AdoptedFunction) -> None:
    """Record the author's declaration that forward and backward do not run on proxy tensors."""
    for method in ("forward", "backward"):
        for circumstance in (TRACED, TRANSFORMED, MAPPED):
            adopted.facts.instead[f"{method} {circumstance}"] = Obstacle(method, "declared with opaque=True")


def proxy_reason(values: Sequence[Any]) -> str | None:
    """Reason why the tensors are proxies: tracing, vmap, or another transform; None for ordinary tensors."""
    if capabilities.innermost_transform() is not None:
        return MAPPED if capabilities.is_mapped() else TRANSFORMED
    tensors = tensors_in(list(values))
    return None if all(type(each) in _EAGER and not each.is_meta for each in tensors) else TRACED


def cannot_run(adopted: AdoptedFunction, circumstance: str, found: Obstacle) -> errors.TransformError:
    """The error for code that does not run on proxy tensors."""
    if circumstance in (TRANSFORMED, MAPPED) and not capabilities.on("torch_func"):
        why = "running it on real tensors needs the capability `torch_func`, which is off"
    elif adopted.reference is None:
        why = "there is no reference"
    elif adopted.surrogate:
        kinds = ", ".join(sorted(adopted.claims))
        why = f"the derivative of the reference must not replace it, because its kind is {kinds}"
    else:
        why = "the values for the reference were not kept: mark the backward with `once_differentiable`"
    what = f"cannot run {circumstance}, where only torch operations work on proxy tensors"
    return _error_of(adopted, found, f"{what}, and {why}")


def _error_of(adopted: AdoptedFunction, found: Obstacle, problem: str) -> errors.TransformError:
    return adopted.error(
        errors.TransformError,
        f"`{adopted.name}.{found.method}` {problem}",
        got=found.reason,
        where=adopted.where if found.method == "forward" else adopted.backward_where,
        hint="write it with torch operations that work there, or give the same mathematics in plain "
        "PyTorch: `adopt(..., reference=...)`",
    )


def no_derivative_error(adopted: AdoptedFunction) -> errors.TransformError:
    """The error for differentiating a gradient that is computed only on real tensors."""
    tasks = adopted.facts.instead | adopted.facts.suspected
    found = next(each for task, each in tasks.items() if task.startswith("backward"))
    what = "so its gradient has no second-order derivative and no forward mode"
    return _error_of(adopted, found, f"runs only on real tensors, {what}")


def graph_cut_error(adopted: AdoptedFunction) -> errors.GraphCutError:
    """The error for differentiating a backward that uses code outside torch."""
    return adopted.error(
        errors.GraphCutError,
        f"torch cannot see that the gradients of `{adopted.name}.backward` depend on `grad`",
        where=adopted.backward_where,
        hint="write the backward with torch operations, or mark it with `once_differentiable` and give the "
        "same mathematics in plain PyTorch: `adopt(..., reference=...)`",
    )


def random_rerun_error(adopted: AdoptedFunction) -> errors.TransformError:
    """The error for running a forward that draws random numbers a second time."""
    return adopted.error(
        errors.TransformError,
        f"`{adopted.name}.forward` draws random numbers, but under a transform it would run again",
        hint="let forward take the random numbers, or the seed, as an argument",
    )


def rerun_differs_error(adopted: AdoptedFunction) -> errors.TransformError:
    """The error for a second-order gradient through a forward whose second run differs."""
    return adopted.error(
        errors.TransformError,
        f"`{adopted.name}.forward` computed different results in the second run of a second-order gradient",
        hint='write `kind="stochastic"` if forward draws from torch\'s random state; otherwise let '
        "forward take its random numbers or its random state as an argument",
    )


def overwritten_error(adopted: AdoptedFunction) -> errors.TransformError:
    """The error for a second-order gradient that needs an argument which the call has overwritten."""
    return adopted.error(
        errors.TransformError,
        f"`{adopted.name}.forward` kept different values on `ctx` than in earlier runs: the call overwrote "
        f"{' and '.join(f'`{name}`' for name in adopted.schema.new_values)}, but a second-order gradient "
        "needs the old content",
        hint="call it again: later calls keep a copy",
    )


def once_differentiable_error(adopted: AdoptedFunction) -> errors.TransformError:
    """The error for differentiating a backward that is marked with `once_differentiable`."""
    return adopted.error(
        errors.TransformError,
        f"`{adopted.name}.backward` is marked with `once_differentiable`: it has no derivative of its own",
        where=adopted.backward_where,
        hint="remove the mark if the backward is made of torch operations, or give the same mathematics "
        "in plain PyTorch: `adopt(..., reference=...)`",
    )
