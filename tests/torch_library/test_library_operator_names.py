"""torch's private names about operators that others registered do what opsmith takes them to do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

PRIVATE = "opsmith.torch_library.capabilities.private"
capabilities: Any = import_module(f"{PRIVATE}.library_operators")
add_fake = import_module(f"{PRIVATE}.fake_registration").add_fake
COUNT = iter(range(100))


@pytest.fixture
def library() -> Iterator[Any]:
    library: Any = torch.library.Library("registered_names", "FRAGMENT")
    yield library
    library._destroy()


def custom() -> tuple[Any, Any]:
    """A custom operator without anything, and its overload."""

    @torch.library.custom_op(f"registered_names::custom{next(COUNT)}", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        return x.sin()

    (overload,) = capabilities.overloads_of(operator).values()
    return operator, overload


def test_overloads_of(library: Any) -> None:
    library.define("several(Tensor x) -> Tensor")
    library.define("several.by(Tensor x, float by) -> Tensor")
    packet = torch.ops.registered_names.several
    assert capabilities.overloads_of(packet) == {"default": packet.default, "by": packet.by}
    assert capabilities.overloads_of(packet.by) == {"by": packet.by}
    operator, overload = custom()
    assert capabilities.overloads_of(operator) == capabilities.overloads_of(overload) == {"default": overload}
    assert capabilities.overloads_of("several") is None
    assert capabilities.overloads_of(torch.sin) is None


def test_signature_of(library: Any) -> None:
    library.define("read(Tensor x, Tensor?[] ys, float a=1, *, ScalarType d=float32, int[2] k=3) -> Tensor y")
    library.define("write(Tensor x, Tensor(a!) y) -> ()")
    library.define("view(Tensor(a) x) -> Tensor(a)")
    read = capabilities.signature_of(torch.ops.registered_names.read.default)
    assert (read.name, read.pure, read.results) == ("registered_names::read", True, (("y", "Tensor"),))
    x, ys, a, d, k = read.arguments
    assert (x.type, ys.type, a.type, d.type) == ("Tensor", "List[Optional[Tensor]]", "float", "ScalarType")
    assert (k.type, k.length, k.default, k.keyword_only) == ("List[int]", 2, [3, 3], True)
    assert (x.default, a.default, d.default, d.keyword_only) == (capabilities.MISSING, 1.0, 6, True)
    assert not capabilities.signature_of(torch.ops.registered_names.write.default).pure
    assert not capabilities.signature_of(torch.ops.registered_names.view.default).pure


def test_registers_kernel(library: Any) -> None:
    library.define("on_cpu(Tensor x) -> Tensor")
    library.impl("on_cpu", lambda x: x.clone(), "CPU")
    overload = torch.ops.registered_names.on_cpu.default
    asked = ("CPU", "CUDA", "Autograd", "AutogradCPU")
    assert [capabilities.registers_kernel(overload, key) for key in asked] == [True, False, False, False]
    assert not capabilities.registers_kernel(overload, "AutogradAbacus"), "a key that torch does not know"


def test_kernel_at(library: Any) -> None:
    """The kernel asked for before another took its place is still called."""
    library.define("replaced(Tensor x) -> Tensor")
    library.impl("replaced", lambda keyset, x: x * 2, "Autograd", with_keyset=True)
    overload = torch.ops.registered_names.replaced.default
    before = capabilities.kernel_at(overload, "AutogradCPU")
    library.impl(
        "replaced", lambda keyset, x: before.call_boxed(keyset, x) + 1, "AutogradCPU", with_keyset=True
    )
    assert overload(torch.ones(2)).tolist() == [3.0, 3.0]


def test_registrations(library: Any) -> None:
    """They are others after each registration, be it at a key of its own or over one that is there."""
    library.define("growing(Tensor x) -> Tensor")
    overload = torch.ops.registered_names.growing.default
    seen = [capabilities.registrations(overload)]
    for key in ("CPU", "AutogradCPU", "Meta"):
        library.impl("growing", lambda x: x.clone(), key)
        seen.append(capabilities.registrations(overload))
    other: Any = torch.library.Library("registered_names", "FRAGMENT")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        other.impl("growing", lambda x: x.sin(), "CPU", allow_override=True)
    seen.append(capabilities.registrations(overload))
    assert len({*seen}) == 5
    other._destroy()
    assert capabilities.registrations(overload) == seen[-2]


def test_has_derivative(library: Any) -> None:
    kernels = {
        "without": ("CPU", False),
        "falling": ("CPU", False),
        "with_autograd": ("AutogradCPU", True),
        "transformed": ("FuncTorchDynamicLayerFrontMode", None),
        "composite": ("CompositeImplicitAutograd", None),
    }
    for name, (key, _) in kernels.items():
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.neg, key)
    library.impl("falling", torch.library.fallthrough_kernel, "Autograd")
    for name, (_, expected) in kernels.items():
        overload = getattr(torch.ops.registered_names, name).default
        assert capabilities.has_derivative(overload, False) is expected, name
    assert capabilities.has_derivative(torch.ops.aten.neg.default, False) is None


def test_around_operators(library: Any) -> None:
    library.define("seen(Tensor x) -> Tensor")
    library.impl("seen", torch.neg, "CPU")
    found: list[Any] = []

    def call(called: Any, overload: Any, args: Any, kwargs: Any) -> Any:
        found.append(overload)
        return called(*args, **kwargs)

    x = torch.ones(2)
    with capabilities.around_operators(call):
        torch.ops.registered_names.seen(torch.ops.registered_names.seen.default(x).exp())
    overload = torch.ops.registered_names.seen.default
    assert found == [overload, None, overload]


def test_custom_parts(library: Any) -> None:
    operator, overload = custom()
    parts = capabilities.custom_parts(overload)
    assert parts is not None
    assert parts.function.__name__ == "operator"
    assert parts == capabilities.CustomParts(parts.function, None, None, None)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    operator.register_autograd(backward)
    operator.register_fake(torch.empty_like)
    assert capabilities.custom_parts(overload) == capabilities.CustomParts(
        parts.function, backward, None, torch.empty_like
    )
    library.define("no_custom(Tensor x) -> Tensor")
    assert capabilities.custom_parts(torch.ops.registered_names.no_custom.default) is None


def test_add_fake(library: Any) -> None:
    _, overload = custom()
    x = torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match="no fake impl registered"):
        overload(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        add_fake(library, overload, lambda x: x.new_empty(7), "a.py:1")
    assert overload(x).shape == (7,)
    library._destroy()
    with pytest.raises(RuntimeError, match="no fake impl registered"):
        overload(x)


def test_shards_itself(library: Any) -> None:
    from torch.distributed.tensor import DTensor

    library.define("sharded(Tensor x) -> Tensor")
    overload = torch.ops.registered_names.sharded.default
    assert not capabilities.shards_itself(overload)
    assert capabilities.shards_itself(torch.ops.aten.mm.default)
    torch.library.register_torch_dispatch(overload, DTensor, lambda *args: NotImplemented, lib=library)
    assert capabilities.shards_itself(overload)
