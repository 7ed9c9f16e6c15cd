"""Operators that another library registered: their schemas and kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef, _maybe_get_opdef
from torch._library.simple_registry import singleton
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

_C: Any = torch._C

MISSING = object()
"""Marker of an argument without a default."""


@dataclass(frozen=True)
class ArgumentSchema:
    """One argument in an operator's schema.

    Args:
        name: Its name.
        type: Its type in torch's notation: `Optional[Tensor]`, `List[int]`, `ScalarType`.
        length: Fixed length of a list, if it has one.
        default: Its default, or `MISSING`; a dtype, layout or memory format is a number.
        keyword_only: True if it can be given only by name.
        written: True if the operator writes into it.
    """

    name: str
    type: str
    length: int | None
    default: Any
    keyword_only: bool
    written: bool = False


@dataclass(frozen=True)
class OperatorSchema:
    """An operator's schema.

    Args:
        name: `namespace::name`, with the overload's name if it is not the default overload.
        text: The schema as torch writes it.
        arguments: Its arguments.
        results: Name, which may be empty, and type of each new result.
        pure: True if it neither writes into its arguments nor returns views of them.
        returns: Name of the argument that it writes into and returns, if it returns nothing else.
        views: True if it returns an argument, or a view of an argument, in any other way.
    """

    name: str
    text: str
    arguments: tuple[ArgumentSchema, ...]
    results: tuple[tuple[str, str], ...]
    pure: bool
    returns: str | None = None
    views: bool = False


def overloads_of(subject: Any) -> dict[str, Any] | None:
    """The overloads of an operator of torch, by name; None for anything else."""
    if isinstance(subject, CustomOpDef):
        subject = subject._opoverload
    if isinstance(subject, OpOverload):
        return {subject._overloadname: subject}
    if isinstance(subject, OpOverloadPacket):
        return {name: getattr(subject, name) for name in subject.overloads()}
    return None


def signature_of(overload: Any) -> OperatorSchema:
    """The schema of an operator."""
    schema = overload._schema
    arguments = tuple(
        ArgumentSchema(
            each.name,
            str(each.real_type),
            each.N,
            each.default_value if each.has_default_value() else MISSING,
            each.kwarg_only,
            bool(each.alias_info and each.alias_info.is_write),
        )
        for each in schema.arguments
    )
    pure = all(each.alias_info is None for each in (*schema.arguments, *schema.returns))
    aliased = [each.alias_info for each in schema.returns if each.alias_info is not None]
    results = tuple((each.name, str(each.real_type)) for each in schema.returns if each.alias_info is None)
    returned = [
        each.name
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write and str(each.real_type) == "Tensor"
        for alias in aliased
        if alias.before_set == each.alias_info.before_set
    ]
    returns = returned[0] if len(returned) == len(schema.returns) == 1 else None
    read_only = any(each.alias_info and not each.alias_info.is_write for each in schema.arguments)
    views = read_only or (bool(aliased) and returns is None)
    return OperatorSchema(overload._name, str(schema), arguments, results, pure, returns, views)


def registers_kernel(overload: Any, key: str) -> bool:
    """Return True if a kernel was registered for an operator at exactly this dispatch key."""
    known = _C._parse_dispatch_key(key) is not None
    return known and bool(_C._dispatch_has_kernel_for_dispatch_key(overload._name, key))


def kernel_at(overload: Any, key: str) -> Any:
    """The kernel that torch runs at a dispatch key; call this before another kernel replaces it."""
    return _C._dispatch_get_computed_kernel_for_dispatch_key(overload._name, key)


def registrations(overload: Any) -> str:
    """Dump by torch of the registrations of an operator, which changes with each registration."""
    dump: str = _C._dispatch_dump(overload._name)
    return dump


@dataclass(frozen=True)
class CustomParts:
    """Functions given to a `torch.library.custom_op`; for others, torch registers kernels that raise."""

    function: Callable[..., Any]
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None
    fake: Callable[..., Any] | None


def custom_parts(overload: Any) -> CustomParts | None:
    """Functions given to a `torch.library.custom_op`; None for any other operator."""
    definition = _maybe_get_opdef(overload)
    if definition is None:
        return None
    return CustomParts(
        definition._init_fn, definition._backward_fn, definition._setup_context_fn, definition._abstract_fn
    )


_OF_TORCH = frozenset(("aten", "prim", "prims"))
_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
_AUTOGRAD = tuple(name for name in dir(_C.DispatchKey) if name.startswith("Autograd"))


def has_derivative(overload: Any, transformed: bool) -> bool | None:
    """Return False for an operator without autograd; None if it needs no autograd, or is opsmith's.

    A fallthrough kernel does not count as autograd. The kernel of a `custom_op` does not count without a
    formula, or under a transform of `torch.func`, which does not support it.
    """
    if overload.namespace in _OF_TORCH:
        return None
    if any(registers_kernel(overload, key) for key in ("CompositeImplicitAutograd", _TRANSFORMS)):
        return None
    custom = custom_parts(overload)
    if custom is not None:
        return custom.backward is not None and not transformed
    falls_through = _C._dispatch_kernel_for_dispatch_key_is_fallthrough
    own = [key for key in _AUTOGRAD if registers_kernel(overload, key)]
    return not all(falls_through(overload._name, key) for key in own)


def around_operators(call: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Context in which each function of torch is replaced by `call(function, overload, args, kwargs)`.

    The overload is None for a function that is not an operator.
    """
    around: AbstractContextManager[Any] = _Around(call)
    return around


class _Around(TorchFunctionMode):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        overload = func if isinstance(func, OpOverload) else None
        if isinstance(func, OpOverloadPacket):
            name = _C._jit_resolve_packet(func._qualified_op_name, *args, **(kwargs or {}))
            overload = getattr(func, name or "default")
        return self.call(func, overload, args, kwargs or {})


_SHARDING_TABLES = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
"""Tables of DTensor's rules for operators; torch 2.11 does not have all of these tables."""


def shards_itself(overload: Any) -> bool:
    """Return True if DTensor has a sharding rule for this operator."""
    from torch.distributed.tensor import DTensor

    known = DTensor._op_dispatcher.sharding_propagator
    rules = singleton.find(overload._name).torch_dispatch_rules
    tables = [getattr(known, table) for table in _SHARDING_TABLES if hasattr(known, table)]
    return rules.find(DTensor) is not None or any(overload in table for table in tables)


_WRITING = ("writing", "several", "returning", "viewing")


def self_test() -> None:
    """A schema is read; kernels are found and called, and are distinguished from kernels that only raise."""
    library = torch.library.Library("opsmith_self_test", "FRAGMENT")
    library.define("others(Tensor x, Tensor[] ys, *, int[2] k=3, ScalarType? d=None) -> (Tensor out, Tensor)")
    library.define("writing(Tensor(a!) x) -> Tensor")
    library.define("several(Tensor(a!)? x, Tensor(b!)[] y, Tensor z) -> ()")
    library.define("returning(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    library.define("viewing(Tensor(a) x) -> Tensor(a)")
    library.impl("others", lambda x, ys, k, d=None: (x * 3, x + 1), "CPU")
    packet: Any = torch.ops.opsmith_self_test.others
    overload = packet.default
    assert overloads_of(packet) == overloads_of(overload) == {"default": overload}
    assert overloads_of(len) is None
    signature = signature_of(overload)
    assert (signature.name, signature.pure) == ("opsmith_self_test::others", True)
    written = [signature_of(getattr(torch.ops.opsmith_self_test, each).default) for each in _WRITING]
    assert [(each.pure, each.returns, each.views) for each in written] == [
        (False, None, False),
        (False, None, False),
        (False, "out", False),
        (False, None, True),
    ]
    assert [[each.written for each in one.arguments] for one in written] == [
        [True],
        [True, True, False],
        [False, True],
        [False],
    ]
    assert signature.results == (("out", "Tensor"), ("", "Tensor"))
    assert signature.arguments == (
        ArgumentSchema("x", "Tensor", None, MISSING, False),
        ArgumentSchema("ys", "List[Tensor]", None, MISSING, False),
        ArgumentSchema("k", "List[int]", 2, [3, 3], True),
        ArgumentSchema("d", "Optional[ScalarType]", None, None, True),
    ), str(signature.arguments)
    keys = ("CPU", "CUDA", "Autograd", "AutogradCPU", "Meta")
    assert [registers_kernel(overload, key) for key in keys] == [True, False, False, False, False]
    assert not registers_kernel(overload, "NoKeyOfThisName")
    registered = registrations(overload)
    assert registered == registrations(overload)
    assert custom_parts(overload) is None
    x = torch.ones(2)
    known, seen = [has_derivative(overload, False)], list[Any]()
    with around_operators(lambda called, found, args, kwargs: seen.append(found)):
        packet(x, [x])
    kernel = kernel_at(overload, "CPU")

    def at_autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel.call_boxed(keyset, *args, **kwargs)

    library.impl("others", at_autograd, "AutogradCPU", with_keyset=True)
    assert registered != registrations(overload)
    known.append(has_derivative(overload, False))
    assert (known, seen) == ([False, True], [overload])
    assert overload(x, [x], k=[1, 1])[0].tolist() == [3.0, 3.0]
    if torch.distributed.is_available():
        _test_sharding(overload)
    library._destroy()

    define: Any = torch.library.custom_op
    custom = define("opsmith_self_test::custom", _returned, mutates_args=(), schema="(Tensor x) -> Tensor")
    found = overloads_of(custom)
    assert found is not None
    (made,) = found.values()
    parts = [custom_parts(made)]
    custom.register_autograd(_returned)
    custom.register_fake(torch.empty_like)
    parts.append(custom_parts(made))
    assert [part and (part.backward, part.setup_context, part.fake) for part in parts] == [
        (None, None, None),
        (_returned, None, torch.empty_like),
    ]
    custom._lib._destroy()


def _test_sharding(overload: Any) -> None:
    """A sharding rule of DTensor, or a kernel for it, is found."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    known = DTensor._op_dispatcher.sharding_propagator
    before = [{*getattr(known, table, ())} for table in _SHARDING_TABLES]
    assert not shards_itself(overload)
    register_sharding(overload)(_returned)
    sharded = shards_itself(overload)
    for table, keys in zip(_SHARDING_TABLES, before, strict=True):
        for key in {*getattr(known, table, ())} - keys:
            del getattr(known, table)[key]
    assert sharded, "a rule for shards is at an unknown place"
    assert not shards_itself(overload)


def _returned(*args: Any) -> Any:
    return args[-1]
