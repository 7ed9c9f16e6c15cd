"""The private names that calls past the dispatcher use: each tells what it is taken to tell."""

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
from opsmith.torch_library.capabilities.private import fast_path as capabilities
from opsmith.torch_library.capabilities.private import known_calls
from opsmith.torch_library.capabilities.private.calls_in_cpp import calls_in_cpp
from opsmith.torch_library.capabilities.private.dispatch import (
    destroy,
)  # torch 2.11 lists what is only dropped
from opsmith.torch_library.capabilities.private.dispatch_mode import observe_operators

X = torch.tensor([2.0, 3.0])
NOTED: list[Any] = []


def _note(value: Any) -> None:
    NOTED.append(value)


def inside(transform: Any, see: Any) -> None:
    """Look around inside a transform."""
    transform(lambda x: (see(x), x.sum())[1])(torch.ones(3, 2))


def test_guard_names() -> None:
    """Each condition fails where it should; what watches torch functions is asked for by the tensors."""
    names = capabilities.guard_names()

    def fails() -> list[str]:
        conditions = (capabilities.torch_function_condition("x"), *capabilities.GUARD_CONDITIONS)
        return [text for text in conditions if not eval(text, {**names, "x": X})]

    assert fails() == []
    with observe_operators(lambda operator, kwargs: None):
        assert fails() == ["not _op_dispatch_modes()"]
    with FakeTensorMode():
        assert fails() == ["not _op_dispatch_modes()"]
    make_fx(lambda x: (_note(fails()), x * 2)[1])(X)
    assert "not _op_dispatch_modes()" in NOTED.pop()
    with TorchFunctionMode():
        assert fails() == [capabilities.torch_function_condition("x")]
    with forward_ad.dual_level():
        assert fails() == ["_op_forward_mode._current_level < 0"]
    with torch.profiler.profile():
        assert fails() == ["not _op_profiler._is_profiler_enabled"]
    with torch.autograd.profiler.profile():
        assert fails() == ["not _op_profiler._is_profiler_enabled"]
    assert not names["_op_compiling"]()
    assert fails() == []


def test_guard_conditions() -> None:
    names = capabilities.guard_names()
    assert all(any(name in text for name in names) for text in capabilities.GUARD_CONDITIONS)


def test_any_autocast() -> None:
    assert not known_calls.any_autocast()
    with torch.autocast("cpu"):
        assert known_calls.any_autocast()


def test_torch_function_condition() -> None:
    class Watching(Tensor):
        pass

    question = capabilities.torch_function_condition("x, y")
    names = {**capabilities.guard_names(), "y": None}
    assert eval(question, {**names, "x": X})
    assert not eval(question, {**names, "x": X.as_subclass(Watching)})


def test_dispatch_in_python() -> None:
    library = torch.library.Library("dispatch_in_python", "FRAGMENT")
    library.define("scaled(Tensor x, float by=1.0) -> Tensor")
    library.impl("scaled", lambda x, by=1.0: x * by, "CompositeExplicitAutograd")
    operator: Any = torch.ops.dispatch_in_python.scaled.default
    known_calls.dispatch_in_python(operator)
    counts = torch.ones(2, dtype=torch.int64)
    for found in (operator(counts, 2), operator(counts, by=2), operator(counts)):
        assert found.dtype is torch.float32, "a number is not converted"
    with observe_operators(lambda which, _: _note(which)):
        operator(X)
    assert operator in NOTED, "a mode does not see the call"
    NOTED.clear()
    destroy(library)  # torch 2.11 lists the operators of one that is only dropped


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
    destroy(library)


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
    @opsmith.operator("fast_path_names::through_numpy")
    def through_numpy(x: Tensor) -> Tensor:
        return x * 2

    through_numpy.kernel("cpu", lambda x: torch.from_numpy(x.numpy() * 2))
    known = torch.ops.fast_path_names.through_numpy
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


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning")
@pytest.mark.parametrize("name", FORMS)
def test_tensor_guard_tells_another_form(name: str) -> None:
    check = capabilities.tensor_guard((X, X.clone()))
    assert check(X, X.clone())
    assert check(torch.ones(7)[::2], torch.ones(0)), "sizes and strides are no part of a form"
    assert not check(FORMS[name](), X)
    assert not check(X, FORMS[name]())


def test_tensor_guard_tells_a_conjugate_of_the_same_dtype() -> None:
    x = X.to(torch.complex64)
    assert capabilities.tensor_guard((x,))(x)
    assert not capabilities.tensor_guard((x,))(x.conj())
    assert not capabilities.tensor_guard((X,))(x.conj().imag)


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.trace` is deprecated:FutureWarning")  # torch 2.15
def test_tensor_guard_tells_what_is_active() -> None:
    check = capabilities.tensor_guard((X, X.clone()))
    other = X.clone()
    for region in (
        observe_operators(lambda operator, kwargs: None),
        torch.autocast("cpu"),
        torch.inference_mode(),
    ):
        with region:
            assert not check(X, other), region
    for transform in (torch.func.vmap, torch.func.functionalize):
        inside(transform, lambda x: _note(check(X, other) or check(x, other)))
        assert NOTED.pop() is False
    torch.func.grad(lambda x: (_note(check(X, other) or check(x, other)), x.sum())[1])(X)
    assert NOTED.pop() is False
    torch.jit.trace(lambda x: (_note(check(X, other) or check(x, other)), x * 2)[1], (X,), check_trace=False)
    assert NOTED.pop() is False
    assert check(X, other)


def test_tensor_guard_takes_no_tensor_twice() -> None:
    assert not capabilities.tensor_guard((X, X))(X, X)


def test_versions_source() -> None:
    x = X.clone()
    source = capabilities.versions_source(["x", "nothing"])
    before = eval(source, {"x": x, "nothing": None})
    x.add_(1)
    assert eval(source, {"x": x, "nothing": None}) == (before[0] + 1, None)


def test_writes_nowhere() -> None:
    assert all(map(capabilities.writes_nowhere, ("mul", "exp", "matmul", "view", "detach", "sum")))
    assert not any(
        map(capabilities.writes_nowhere, ("mul_", "copy_", "index_put_", "append", "no_such", "numpy"))
    )


def test_returns_new() -> None:
    assert all(map(capabilities.returns_new, ("mul", "exp", "tanh", "sum", "relu", "clone")))
    assert not any(map(capabilities.returns_new, ("dequantize", "resize", "resize_as", "index")))
    assert not any(
        map(capabilities.returns_new, ("view", "detach", "contiguous", "to", "dropout", "reshape", "no_such"))
    )


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


def test_sizes_may_be_part_of_a_form() -> None:
    check = capabilities.tensor_guard((X, torch.ones(2, 3)), sizes=True)
    assert check(X.clone(), torch.ones(3, 2).mT)
    assert not check(torch.ones(3), torch.ones(2, 3))
    assert not check(X, torch.ones(3, 2))


def test_calls_in_cpp() -> None:
    in_cpp = calls_in_cpp()
    assert in_cpp is calls_in_cpp()
    if in_cpp is None:  # not built here: `test_calls_in_cpp.py` fails where it can be
        assert capabilities.tensor_guard((X,))(X.clone())
        return
    assert in_cpp.guard((X,), False)(X.clone())
    assert not in_cpp.guard((X,), False)(X.double())
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
