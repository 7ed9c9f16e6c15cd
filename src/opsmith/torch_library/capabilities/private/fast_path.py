"""Guards of the fast path, in Python and C, and entry points into torch that skip its Python frames."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opsmith.torch_library import capabilities

_C: Any = torch._C


def guard_names() -> dict[str, Any]:
    """Functions and modules that the guard conditions use, by their names in generated source."""
    return {
        "_op_compiling": torch.compiler.is_dynamo_compiling,
        "_op_watched": _C._has_torch_function_variadic,
        "_op_dispatch_modes": _C._len_torch_dispatch_stack,
        "_op_forward_mode": forward_ad,
        "_op_profiler": torch.autograd.profiler,
    }


GUARD_CONDITIONS = (
    "not _op_dispatch_modes()",
    "_op_forward_mode._current_level < 0",
    "not _op_profiler._is_profiler_enabled",
)
"""Conditions of the fast path besides the tensor guard."""

UNWATCHED = ((forward_ad, "_current_level", -1), (torch.autograd.profiler, "_is_profiler_enabled", False))
"""Modules and names whose values say that no level of forward mode and no profiler is active."""


def torch_function_condition(names: str) -> str:
    """Source of a condition: no tensor subclass and no mode overrides `__torch_function__`."""
    return f"not _op_watched({names})"


def tensor_guard(tensors: Sequence[Tensor], *, sizes: bool = False) -> Callable[..., bool]:
    """Return a guard in C: it accepts tensors with the metadata of these, under the same dispatch keys.

    The guard compares type, dtype, device, rank, requires_grad and dispatch keys: the tensor's own (sparse,
    conjugate, batched, ...) and those of transforms, autocast, traces and modes of users. It does not see
    torch's own modes, of tracing and of fake tensors.
    Nested tensors must not be passed, and a tensor that is given twice is never accepted.

    Args:
        tensors: An example for each argument.
        sizes: True to compare sizes too.
    """
    in_cpp = capabilities.calls_in_cpp()
    if in_cpp is not None:
        accepts: Callable[..., bool] = in_cpp.guard(tuple(tensors), sizes)
        return accepts
    ranks = [[None] * tensor.dim() for tensor in tensors]
    shapes = [list(tensor.shape) for tensor in tensors] if sizes else ranks
    guards = _C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=ranks)
    check: Callable[..., bool] = guards.check
    return check


def versions_source(names: Sequence[str]) -> str:
    """Source of a tuple of the version counters of tensors of these names; None for one that is None."""
    return f"({''.join(f'None if {name} is None else {name}._version, ' for name in names)})"


_RETURN_THEIR_INPUT = ("dequantize", "index", "lift", "resize", "resize_as", "_unsafe_view")
"""Operations that may return their input, although their schemas do not say so."""


def returns_new(name: str) -> bool:
    """Return True if torch's operations of this name return new memory: no alias, and no composition."""
    if name in _RETURN_THEIR_INPUT:
        return False
    schemas = [
        schema
        for schema in _C._jit_get_schemas_for_operator(f"aten::{name}")
        if not any(argument.is_out for argument in schema.arguments)
        and "Dimname" not in schema.overload_name  # in torch 2.11 a composition
    ]
    aliases = any(result.alias_info is not None for schema in schemas for result in schema.returns)
    names = [f"aten::{name}" + f".{each.overload_name}" * bool(each.overload_name) for each in schemas]
    composed = any(
        _C._dispatch_has_kernel_for_dispatch_key(each, "CompositeImplicitAutograd")
        for each in names
        if _C._dispatch_has_kernel(each)  # others are of TorchScript, on numbers
    )
    return bool(schemas) and not aliases and not composed


def writes_nowhere(name: str) -> bool:
    """Return True if torch has operations of this name, and none writes into an argument other than `out`."""
    schemas = _C._jit_get_schemas_for_operator(f"aten::{name}")
    writes = [
        argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        for schema in schemas
        for argument in schema.arguments
    ]
    return bool(schemas) and not any(writes)


def call_in_cpp(handle: type, call: Any) -> None:
    """Make the calls of a handle in C++, until its `__call__` is set or deleted.

    Args:
        handle: The class of the handle, of which it is the only one.
        call: Its `__call__`, with a `CallPlan` as `call_plan`.
    """
    in_cpp = capabilities.calls_in_cpp()
    if in_cpp is not None:
        unchanged = tuple((vars(module), sys.intern(name), value) for module, name, value in UNWATCHED)
        plan = call.call_plan
        call.in_cpp = in_cpp.plan(handle, *plan.switches, *plan.objects, unchanged)  # lives as long as `call`


def direct_call(overload: Any) -> Callable[..., Any]:
    """The function in C that calls an operator, without its frame in Python."""
    function: Callable[..., Any] = overload._op
    return function


def override_call(operator: Any, answer: Callable[..., Any] | None) -> None:
    """Replace the `__call__` of `torch.ops.namespace.name` or an overload of it; None restores torch's."""
    # The class is replaced, not the object, which is a key of sets and graphs.
    kind = type(operator)
    torch_s = getattr(kind, "_op_kind", kind)
    described = {"__module__": torch_s.__module__, "__doc__": torch_s.__doc__, "_op_kind": torch_s}
    named = {"__qualname__": torch_s.__qualname__, "__hash__": torch_s.__hash__}
    operator.__class__ = (
        torch_s
        if answer is None
        else type(torch_s.__name__, (torch_s,), {**described, **named, "__call__": answer})
    )


def self_test() -> None:
    """A guard accepts equal calls, and rejects each special one; schemas show what operations do."""
    x, y = torch.ones(2), torch.ones(3)
    plain = tensor_guard((x, y))
    known = {"x": x, "nothing": None, **guard_names()}

    def differs(*tensors: Tensor) -> bool:
        """Return True if the guard or a condition rejects a call with these tensors."""
        conditions = (torch_function_condition("x"), *GUARD_CONDITIONS)
        return not (plain(*tensors) and all(eval(each, known) for each in conditions))

    assert not differs(x, y), "a plain call does not look plain"
    assert not differs(torch.zeros(5)[::2], torch.zeros(0)), "another size or stride is another form"
    sized = tensor_guard((x,), sizes=True)
    assert (sized(torch.zeros(2)), sized(y)) == (True, False)
    assert capabilities.nothing_active()
    others = (x.double(), torch.ones(1, 2), x.to("meta"), torch.nn.Parameter(x), x.clone().requires_grad_())
    special = (
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_mkldnn(),
    )
    assert all(differs(other, y) for other in (*others, *special))
    assert not tensor_guard((special[0].conj(),))(special[0]), "a conjugate view looks plain"
    nothing: Any = _Nothing
    regions: tuple[Any, ...] = (
        nothing(),
        FakeTensorMode(),
        TorchFunctionMode(),
        torch.autocast("cpu"),
        forward_ad.dual_level(),
        torch.inference_mode(),
    )
    for region in regions:
        with region:
            assert differs(x, y), region
    seen: list[bool] = []

    def inner(row: Tensor) -> Tensor:
        seen.append(differs(x, y) and differs(row, y) and not capabilities.nothing_active())
        return row

    torch.func.vmap(inner)(torch.ones(3, 2))
    assert seen == [True]

    negative = torch.ops.aten.neg.default
    assert direct_call(negative)(x).tolist() == [-1.0, -1.0]
    kept = {negative}
    override_call(negative, lambda *args: args)
    assert negative(x) == (negative, x)
    assert negative in kept
    override_call(negative, None)
    assert negative(x).tolist() == [-1.0, -1.0]

    source = versions_source(["x", "nothing"])
    before = eval(source, known)
    x.add_(1)
    after = eval(source, known)
    assert before[1] is after[1] is None
    assert before[0] != after[0], "a write was not counted"

    writes = [writes_nowhere(name) for name in ("mul", "matmul", "view", "mul_", "no_such_operation")]
    assert writes == [True, True, True, False, False]
    new = [
        returns_new(name) for name in ("exp", "tanh", "contiguous", "dropout", "view", "no_such_operation")
    ]
    assert new == [True, True, False, False, False, False]


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operator(*args, **(kwargs or {}))
