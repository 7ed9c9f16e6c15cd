"""The private names that known calls use: each tells what it is taken to tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import opsmith

# The private means themselves, whatever is decided about them.
from opsmith.torch_library import registration
from opsmith.torch_library.capabilities.private import known_calls
from opsmith.torch_library.capabilities.private.calls_in_cpp import calls_in_cpp, table_of_tensors, unwatched
from opsmith.torch_library.capabilities.private.dispatch import destroy
from opsmith.torch_library.capabilities.private.dispatch_mode import observe_operators

X = torch.tensor([2.0, 3.0])
NOTED: list[Any] = []


def _note(value: Any) -> None:
    NOTED.append(value)


def inside(transform: Any, see: Any) -> None:
    """Look around inside a transform."""
    transform(lambda x: (see(x), x.sum())[1])(torch.ones(3, 2))


def test_any_autocast() -> None:
    assert not known_calls.any_autocast()
    with torch.autocast("cpu"):
        assert known_calls.any_autocast()


def test_frame_callback() -> None:
    """Under a transform a graph break leaves the function to Python, and Dynamo compiles what it calls."""
    assert not known_calls.frame_callback()
    seen: list[bool] = []

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        seen.append(registration._is_compiled())
        return x.sum()

    torch.compile(lambda x: torch.vmap(broken)(x), backend="eager")(torch.ones(2, 3))
    assert seen == [True]
    assert not registration._is_compiled()


def test_call_keys() -> None:
    library = torch.library.Library("call_keys", "FRAGMENT")
    library.define("keys(Tensor x) -> Tensor")

    def at_autograd(keyset: Any, x: Tensor) -> Tensor:
        _note(known_calls.call_keys(keyset))
        return x.clone()

    library.impl("keys", at_autograd, "Autograd", with_keyset=True)

    def keys(x: Tensor) -> Any:
        torch.ops.call_keys.keys(x)
        return NOTED.pop()

    plain = keys(X)
    assert isinstance(plain, int)
    assert keys(torch.nn.Parameter(torch.ones(2, 3))) == plain
    with torch.no_grad(), torch.profiler.profile():
        assert keys(X) == plain
    others = (torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn(), X.to("meta"), X.cfloat().conj())
    assert all(keys(each) not in (None, plain) for each in others)
    with FakeTensorMode() as fakes:
        assert keys(fakes.from_tensor(X)) != plain
    with forward_ad.dual_level():
        assert keys(X) is None
    conjugate: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    with torch._C._ExcludeDispatchKeyGuard(conjugate):  # as in the handler of a mode
        assert keys(X) is None
    destroy(library)  # torch 2.11 lists the operators of one that is only dropped


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.trace` is deprecated:FutureWarning")  # torch 2.15
def test_nothing_active() -> None:
    assert known_calls.nothing_active()
    for region in (
        observe_operators(lambda operator, kwargs: None),
        TorchFunctionMode(),
        torch.autocast("cpu"),
        forward_ad.dual_level(),
        torch.profiler.profile(),
    ):
        with region:
            assert not known_calls.nothing_active(), region
    inside(torch.func.vmap, lambda x: _note(known_calls.nothing_active()))
    assert NOTED.pop() is False
    torch.jit.trace(lambda x: (_note(known_calls.nothing_active()), x * 2)[1], (X,), check_trace=False)
    assert NOTED.pop() is False


def test_a_trace_before_dispatch_holds_the_operator_each_time() -> None:
    @opsmith.operator("known_calls_names::through_numpy")
    def through_numpy(x: Tensor) -> Tensor:
        return x * 2

    through_numpy.kernel("cpu", lambda x: torch.from_numpy(x.numpy() * 2))
    known = torch.ops.known_calls_names.through_numpy
    for _ in range(3):
        known(X)
        traced = make_fx(lambda x: known(x), pre_dispatch=True)(torch.ones(2))
        assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [known.default]
        assert traced(torch.full((2,), 3.0)).tolist() == [6.0, 6.0]


FORMS: dict[str, Any] = {
    "dtype": lambda: X.double(),
    "rank": lambda: X[None],
    "meta": lambda: X.to("meta"),
    "parameter": lambda: torch.nn.Parameter(X),
    "requires_grad": lambda: X.clone().requires_grad_(),
    "subclass": lambda: X.as_subclass(type("Subclass", (Tensor,), {})),
    "sparse": lambda: X[None].to_sparse(),
    "compressed": lambda: X[None].to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
    "mkldnn": lambda: X.to_mkldnn(),
    "conjugate": lambda: X.to(torch.complex64).conj(),
    "negative": lambda: X.to(torch.complex64).conj().imag,
    "inference": lambda: _in_inference(),
    "none": lambda: None,
    "number": lambda: 1.0,
}


def _in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2)


class Table:
    """A handle whose table knows the calls of two tensors like two others."""

    def __init__(self, *known: Tensor) -> None:
        in_cpp = self.in_cpp = calls_in_cpp()
        if in_cpp is None:
            pytest.skip("calls in C++ are not built, or turned off")
        handle = type("Handle", (), {"__call__": lambda self, *args: "in Python"})
        self.plan = table_of_tensors(in_cpp, handle, "x", "y")
        assert in_cpp.accept(self.plan, [*known], "k", lambda x, y: "known", None, True, False, False)
        self.handle = handle()

    def detach(self) -> None:
        """Leave the table unused."""
        self.in_cpp.detach(self.plan)

    def knows(self, *given: Any) -> bool:
        """Return True if a call is found in the table."""
        found: bool = self.handle(*given) == "known"
        return found


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning")
@pytest.mark.parametrize("name", FORMS)
def test_a_table_tells_another_form(name: str) -> None:
    table = Table(X, X.clone())
    assert table.knows(X, X.clone())
    assert table.knows(X, X)
    assert table.knows(torch.ones(7)[::2], torch.ones(0)), "sizes and strides are no part of a form"
    assert not table.knows(FORMS[name](), X)
    assert not table.knows(X, FORMS[name]())


def test_a_table_tells_a_conjugate_of_the_same_dtype() -> None:
    x = X.to(torch.complex64)
    table = Table(x, x)
    assert table.knows(x, x)
    assert not table.knows(x.conj(), x)


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.trace` is deprecated:FutureWarning")  # torch 2.15
def test_a_table_tells_what_is_active() -> None:
    table, other = Table(X, X), X.clone()
    for region in (
        observe_operators(lambda operator, kwargs: None),
        FakeTensorMode(),
        TorchFunctionMode(),
        forward_ad.dual_level(),
        torch.profiler.profile(),
        torch.autograd.profiler.profile(),
        torch.autocast("cpu"),
        torch.inference_mode(),
        torch.no_grad(),
    ):
        with region:
            assert not table.knows(X, other), region
    make_fx(lambda x: (_note(table.knows(X, other)), x * 2)[1])(X)
    assert NOTED.pop() is False
    for transform in (torch.func.vmap, torch.func.functionalize):
        inside(transform, lambda x: _note(table.knows(X, other) or table.knows(x, other)))
        assert NOTED.pop() is False
    torch.func.grad(lambda x: (_note(table.knows(X, other) or table.knows(x, other)), x.sum())[1])(X)
    assert NOTED.pop() is False
    traced = torch.jit.trace
    traced(
        lambda x: (_note(table.knows(X, other) or table.knows(x, other)), x * 2)[1], (X,), check_trace=False
    )
    assert NOTED.pop() is False
    assert table.knows(X, other)


def test_a_table_is_detached() -> None:
    table = Table(X, X)
    table.detach()
    assert not table.knows(X, X)
    table.detach()


def test_unwatched() -> None:
    regions = (forward_ad.dual_level(), torch.profiler.profile())
    for (names, name, value), region in zip(unwatched(), regions, strict=True):
        assert names[name] is value
        with region:
            assert names[name] is not value


def test_direct_call() -> None:
    assert_close(known_calls.direct_call(torch.ops.aten.neg.default)(X), -X)


def test_direct_apply() -> None:
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 7

    x = X.clone().requires_grad_()
    result = known_calls.direct_apply(Node)(x)
    assert_close(result.detach(), 2 * X)
    result.sum().backward()
    assert_close(x.grad, torch.full((2,), 7.0))


def test_direct_backward() -> None:
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise AssertionError("it is not to be called")

    known_calls.direct_backward(Node, lambda ctx, grad: grad * ctx.saved_tensors[0])
    x = X.clone().requires_grad_()
    Node.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert_close(x.grad, X)


def test_calls_in_cpp() -> None:
    assert calls_in_cpp() is calls_in_cpp()
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
