"""Circumstances that decide whether a call is a known call, and the entry of a node in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from opsmith.torch_library import capabilities

_C: Any = torch._C
_autograd: Any = torch.autograd
# Dynamo does not trace a frame that calls this method; in torch 2.11 it fails at the function itself.
_is_excluded: Any = _C._dispatch_tls_is_dispatch_key_excluded.__call__
_CONJUGATE = _C.DispatchKey.Conjugate

frame_callback: Any = _C._dynamo.eval_frame.get_eval_frame_callback
"""Return the callback that compiles functions in this thread, as after a graph break, or None, or False."""

any_autocast: Any = _C._is_any_autocast_enabled
"""Return True if autocast is on, for any type of device."""


def call_keys(keyset: Any) -> int | None:
    """The dispatch keys of a call as a number; None if they do not show all that a kernel has to do.

    They differ for different backends, layouts and wrappers of tensors, and under modes and their traces.
    They do not show forward mode, or conjugate views in the handler of a mode.

    Args:
        keyset: The keys, as the dispatcher passes them to a kernel.
    """
    if forward_ad._current_level >= 0 or _is_excluded(_CONJUGATE):
        return None
    keys: int = keyset.raw_repr()
    return keys


def nothing_active() -> bool:
    """Return True if no mode, transform, autocast, trace, profiler or forward-mode level is active."""
    return not (
        _C._len_torch_dispatch_stack()
        or _C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch)  # its handler pops its modes
        or _is_excluded(_CONJUGATE)  # and so does the handler of any mode
        or _C._len_torch_function_stack()
        or _functorch.peek_interpreter_stack() is not None
        or any_autocast()
        or forward_ad._current_level >= 0
        or _C._get_tracing_state() is not None
        or _autograd._profiler_enabled()
    )


def direct_apply(node: type[torch.autograd.Function]) -> Any:
    """The `apply` of a node in C, without the checks in Python that its caller has already made."""
    return super(torch.autograd.Function, node).apply  # type: ignore[misc]


def recorder(node: type[torch.autograd.Function], of_class: tuple[Any, ...] | None) -> Any:
    """The `apply` of a node whose context is used only for saved values: in C++ if that is built.

    Args:
        node: Its class.
        of_class: For an adopted class, the parts of its node that the backward in C++ uses; else None.
    """
    in_cpp = capabilities.calls_in_cpp()
    return direct_apply(node) if in_cpp is None else in_cpp.recorder(node, of_class)


def direct_call(overload: Any) -> Callable[..., Any]:
    """The function in C that calls an operator, without its frame in Python."""
    function: Callable[..., Any] = overload._op
    return function


def direct_backward(node: Any, backward: Callable[..., Any]) -> None:
    """Make autograd call this backward of a node directly, without looking it up in Python."""
    node._backward_cls.apply = backward


def self_test() -> None:
    """Plain calls have the same keys, different calls have different keys; a node runs its backward."""
    library = torch.library.Library("opsmith_known_calls", "FRAGMENT")
    library.define("kept(Tensor x) -> Tensor")
    seen: list[int | None] = []

    def at_autograd(keyset: Any, x: Tensor) -> Tensor:
        seen.append(call_keys(keyset))
        return x.detach().clone()

    library.impl("kept", at_autograd, "Autograd", with_keyset=True)
    library.impl("kept", lambda x: x.clone(), "CompositeExplicitAutograd")
    kept: Any = torch.ops.opsmith_known_calls.kept.default

    def keys(x: Tensor) -> int | None:
        seen.clear()
        kept(x)
        return seen[0] if seen else None

    x = torch.ones(2)
    plain = keys(x)
    assert plain is not None
    assert keys(torch.ones(2, 3)) == keys(torch.nn.Parameter(x)) == plain, "plain calls have several keys"
    assert nothing_active()
    frame_callback()  # a first call may come after a graph break
    special = (
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_mkldnn(),
        x.to("meta"),
    )
    assert plain not in map(keys, special), "another kind of tensor has the keys of a plain tensor"
    regions: tuple[Any, ...] = (
        FakeTensorMode(allow_non_fake_inputs=True),
        forward_ad.dual_level(),
    )
    for region in regions:
        with region:
            assert keys(x) != plain, region
            assert not nothing_active(), region
    with torch.inference_mode():
        assert keys(torch.ones(2)) != plain
    active: list[bool] = []

    def summed(row: Tensor) -> Tensor:
        active.append(nothing_active())
        return row.sum()

    torch.func.grad(summed)(x)
    assert active == [False]
    capabilities.destroy(library)
    _test_nodes()


def _test_nodes() -> None:
    assert direct_call(torch.ops.aten.neg.default)(torch.ones(2)).tolist() == [-1.0, -1.0]

    class Sevenfold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * 7

    leaf = torch.ones(2, requires_grad=True)
    result = direct_apply(Sevenfold)(leaf)
    (gradient,) = torch.autograd.grad(result.sum(), leaf)
    assert (result.tolist(), gradient.tolist()) == ([2.0, 2.0], [7.0, 7.0])
    direct_backward(Sevenfold, lambda ctx, grad: grad * 8)
    (gradient,) = torch.autograd.grad(direct_apply(Sevenfold)(leaf).sum(), leaf)
    assert gradient.tolist() == [8.0, 8.0]

    class Attributes(torch.autograd.Function):
        """Attributes of a context that rules use."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            y, z = x * 2, x * 3
            assert ctx.to_save is ctx.dirty_tensors is ctx.non_differentiable is None
            ctx.to_save, ctx.non_differentiable, ctx.materialize_grads = (x, None), (z,), False
            return y, z

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved, nothing = ctx.saved_tensors
            assert saved.equal(torch.ones(2))
            assert nothing is grads[1] is None
            return grads[0] * 2

    results = direct_apply(Attributes)(leaf)
    assert [each.requires_grad for each in results] == [True, False]
    (gradient,) = torch.autograd.grad(results[0].sum(), leaf)
    assert gradient.tolist() == [2.0, 2.0]
