"""Contexts around calls as rows: those of `context_cases`, and what changes how torch dispatches a call.

The key set of the dispatcher tells some of them; flags, tensors, or what acts before it tell the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from context_cases import CONTEXTS as AROUND
from context_cases import DERIVATIVES, loss_of, results_of, values_and_gradients
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

Function = Callable[..., Any]
Inputs = tuple[Tensor, ...]
Context = Callable[[Function, Inputs], Any]


class Metadata(list[Any]):
    """Shape, strides, dtype and device of results."""


def metadata(value: Any) -> Metadata:
    return Metadata(
        (tuple(each.shape), each.stride(), str(each.dtype), each.device.type) for each in results_of(value)
    )


def _fake_mode(function: Function, inputs: Inputs) -> Any:
    with FakeTensorMode() as mode:
        return metadata(function(*map(mode.from_tensor, inputs)))


def _meta(function: Function, inputs: Inputs) -> Any:
    return metadata(function(*(each.to("meta") for each in inputs)))


def _autocast(function: Function, inputs: Inputs) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return values_and_gradients(function, tuple(each.float() for each in inputs))


def _dual_level(function: Function, inputs: Inputs) -> Any:
    """Within a level, without a tangent."""
    with forward_ad.dual_level():
        return values_and_gradients(function, inputs)


def _vmap(function: Function, inputs: Inputs) -> Any:
    batch = [torch.stack([each, each * 0.5]) for each in inputs]
    return torch.func.vmap(function, randomness="different")(*batch)


def _grad(function: Function, inputs: Inputs) -> Any:
    return torch.func.grad(lambda *given: loss_of(function(*given)), tuple(range(len(inputs))))(*inputs)


def _jit_trace(function: Function, inputs: Inputs) -> Any:
    return torch.jit.trace(function, inputs, check_trace=False)(*inputs)


def _thread(function: Function, inputs: Inputs) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(values_and_gradients(function, inputs))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _conjugate(function: Function, inputs: Inputs) -> Any:
    return function(*(torch.complex(each, each.sin()).conj() for each in inputs))


def _as(convert: Callable[[Tensor], Tensor]) -> Context:
    """The first tensor of another kind."""
    return lambda function, inputs: function(convert(inputs[0]), *inputs[1:])


FOREIGN: dict[str, Context] = {
    "sparse": _as(lambda each: each.to_sparse()),
    "mkldnn": _as(lambda each: each.float().to_mkldnn()),
    "nested": _as(lambda each: torch.nested.nested_tensor([*each])),
    "quantised": _as(lambda each: torch.quantize_per_tensor(each.float(), 0.1, 0, torch.qint8)),
}
"""Kinds of tensors that every executor refuses, with a LayoutError."""

CONTEXTS: dict[str, Context] = {
    "requires-grad": AROUND["nothing"],
    **{
        name: AROUND[name]
        for name in (
            "no-grad",
            "dispatch-mode",
            "make_fx",
            "make_fx-pre-dispatch",
            "inference-mode",
            "inference-tensors",
            "functionalize",
            "function-subclass",
            "parameters",
            "profiler",
            "saved-tensors-hooks",
            "checkpoint",
            "function-mode",
            "dispatch-subclass",
            "anomaly-detection",
            "retain-graph",
        )
    },
    "fake-mode": _fake_mode,
    "meta": _meta,
    "autocast": _autocast,
    "dual-level": _dual_level,
    "dual": DERIVATIVES["dual"],
    "vmap": _vmap,
    "grad": _grad,
    "jit.trace": _jit_trace,
    "thread": _thread,
    "conjugate": _conjugate,
    "is_grads_batched": DERIVATIVES["is_grads_batched"],
    "double-backward": DERIVATIVES["double-backward"],
    **FOREIGN,
}
