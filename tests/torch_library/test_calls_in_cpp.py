"""Calls and nodes in C++ do what those in Python do: values, gradients, errors."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import sysconfig
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import config, errors
from opsmith.build.toolchain import find_toolchain
from opsmith.torch_library import capabilities
from opsmith.torch_library.calls.accelerator import Accelerator
from opsmith.torch_library.calls.computation import Route
from opsmith.torch_library.calls_extension import calls_extension, compile_calls, target


def missing() -> str:
    """Name what is missing here to build them; empty for nothing."""
    if config.conservative() or config.calls_in_python():
        return "they are turned off"
    try:
        find_toolchain()
    except errors.ToolchainError as error:
        return error.problem
    include = Path(sysconfig.get_paths()["include"])
    return "" if (include / "Python.h").is_file() else "Python's headers are missing"


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
NUMBER = iter(range(10_000))


def declared(reference: Callable[..., Any], **options: Any) -> Any:
    return opsmith.operator(f"calls_in_cpp::case_{next(NUMBER)}", **options)(reference)


def plan_of(operator: Any) -> Any:
    """The table in C++ of an operator's calls; None where there is none."""
    return operator._registration._routes._accelerator._plan


def scaled(x: Tensor, w: Tensor | None = None, by: float = 2.0, *, shift: int = 1) -> Tensor:
    return x * by + shift if w is None else x * w * by + shift


@pytest.fixture
def operator() -> Any:
    made = declared(scaled)
    made.gradients(
        x=lambda grad, w, by: grad * by if w is None else grad * w * by, w=lambda grad, x, by: grad * x * by
    )
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        made(x).sum().backward()
        made(x, x).sum().backward()
        made(x.detach(), x.detach())
    assert plan_of(made) is not None
    return made


SHAPES = {
    "odd": lambda: torch.randn(3, 5, 7),
    "strided": lambda: torch.randn(6, 10)[::2, 1::3],
    "transposed": lambda: torch.randn(4, 3).mT,
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "empty": lambda: torch.randn(0, 3),
    "zero-dimensional": lambda: torch.randn(()),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(operator: Any, shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (SHAPES[shape]() * 4).to(dtype)
    floating = dtype.is_floating_point or dtype.is_complex
    for given in (lambda w: (x,), lambda w: (x, w), lambda w: (w, x)):
        w = torch.ones_like(x).requires_grad_(floating)
        other = w.detach().clone().requires_grad_(floating)
        for _ in range(3):
            found, right = operator(*given(w)), scaled(*given(other))
            assert_close(found, right)
            assert found.requires_grad is right.requires_grad
            if right.requires_grad:
                grad = torch.randn(right.shape).to(dtype)
                assert_close(
                    torch.autograd.grad(found, w, grad),
                    torch.autograd.grad(right, other, grad),
                    equal_nan=True,
                )


def opsmith_frames(call: Callable[[], Any]) -> list[str]:
    """Name the functions of opsmith that a call enters."""
    entered: list[str] = []
    folder = os.path.dirname(opsmith.__file__)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def test_torch_ops_takes_the_same_routes(operator: Any) -> None:
    overload = operator.torch_operator
    x, w = torch.randn(3, 2), torch.randn(3, 2, requires_grad=True)
    y = x.clone().requires_grad_()
    for args in [(x,), (x, x), (y,), (y, w), (w, w, 3.0)]:
        operator(*args)
        assert_close(overload(*args), scaled(*args))
        assert opsmith_frames(partial(overload, *args)) == [], args
    assert_close(torch.autograd.grad(overload(y, w).sum(), (y, w)), (w * 2, x * 2))
    assert_close(overload(x, shift=5), scaled(x, shift=5))
    with torch.autocast("cpu"):
        assert_close(overload(x, x), scaled(x, x))
    assert_close(torch.func.vmap(overload)(x), scaled(x))
    with torch.no_grad():
        assert not overload(y, w).requires_grad
    with pytest.raises(RuntimeError, match="takes 3 positional"):
        overload(x, w, 3.0, 1)


@pytest.mark.parametrize("hidden", [False, True])
def test_torch_ops_returns_what_its_schema_says(hidden: bool) -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 2, x - 1

    made = declared(halves, hidden=("second",) if hidden else (), results=("first", "second"))
    x = torch.ones(2)
    for _ in range(3):
        made(x)
    found = made.torch_operator(x)
    assert_close(found, x / 2) if hidden else assert_close(found, halves(x))
    assert_close(made._registration.full_overload(x), halves(x))


def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * 2, x + 1, x - 1


def by_numpy(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.asarray(x.numpy() * 2)), x.neg()


def test_a_kernel_may_change_the_list_that_it_gets() -> None:
    def emptied(xs: list[Tensor]) -> Tensor:
        total = xs[0] * 1
        while xs:
            xs.pop()
        return total

    operator = declared(emptied, opaque=True)
    given = [torch.empty(0), torch.empty(0)]  # new memory of no size begins nowhere: it is looked at closely
    for _ in range(4):
        assert operator(given).shape == (0,)
        assert len(given) == 2


def test_a_node_that_saves_no_tensor_goes_back_twice() -> None:
    operator = declared(lambda_of_one())
    operator.gradients(x=lambda grad, x_shape: grad.expand(x_shape) * 2)
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        operator(x).sum().backward()
    x.grad = None
    result = operator(x).sum()
    result.backward()
    result.backward()
    assert_close(x.grad, torch.full((2,), 4.0))


@pytest.mark.parametrize("reference", [split, by_numpy])
def test_several_results(reference: Callable[..., Any]) -> None:
    operator = declared(reference, **({"opaque": True} if reference is by_numpy else {}))
    for shape in ((3,), (0, 2), (), (2, 3)):
        x = torch.randn(shape)
        for _ in range(3):
            assert_close(operator(x), reference(x))
            with torch.inference_mode():
                assert_close(operator(x), reference(x))
                inner = torch.ones(2)
            assert_close(operator(inner), reference(inner))
            assert_close(operator(x.mT if x.dim() > 1 else x), reference(x.mT if x.dim() > 1 else x))


def test_arguments_by_name_and_defaults(operator: Any) -> None:
    x, w = torch.ones(3), torch.full((3,), 2.0)
    for args, kwargs in [
        ((x,), {}),
        ((x, w), {}),
        ((x, None, 3), {}),
        ((x, w, 3.5), {"shift": 4}),
        ((), {"x": x, "w": w}),
        ((x,), {"shift": 0, "by": 1.5}),
        ((x,), {"w": None}),
        ((x,), {"".join(["b", "y"]): 3.0}),
    ]:
        assert_close(operator(*args, **kwargs), scaled(*args, **kwargs))


def test_the_graph_is_as_of_a_function_of_torch(operator: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    operator(x, torch.full((2,), 3.0))
    result = operator(x, torch.full((2,), 3.0))
    node: Any = result.grad_fn
    assert (node.name(), node.requires_grad, len(node.next_functions)) == (
        f"{operator.specification.short_name}Backward",
        True,
        2,
    )
    assert [each is None for each, _ in node.next_functions] == [False, True]
    assert node.needs_input_grad == (True, False, False, False)
    assert capabilities.forward_class(node) is not None
    assert isinstance(node, torch.autograd.graph.Node)
    assert f"grad_fn=<{node.name()}>" in repr(result)
    assert len(node.saved_tensors) == len(node._raw_saved_tensors)
    hooked: list[str] = []
    node.register_prehook(lambda grads: hooked.append("before"))
    node.register_hook(lambda inputs, outputs: hooked.append("after"))
    result.register_hook(lambda grad: grad * 2)
    result.sum().backward()
    assert hooked == ["before", "after"]
    assert_close(x.grad, torch.full((2,), 12.0))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        node.saved_tensors  # noqa: B018


def test_hooks_pack_what_is_saved(operator: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor * 10

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor / 10):
        result = operator(x, torch.full((2,), 3.0))
    assert packed
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert_close(gradient, torch.full((2,), 6.0))


def test_a_write_into_what_is_saved_is_told(operator: Any) -> None:
    x, w = torch.ones(2, requires_grad=True), torch.ones(2)
    result = operator(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_an_error_of_a_formula_arrives() -> None:
    wrong = declared(lambda_of_one())
    wrong.gradients(x=lambda grad: (_ for _ in ()).throw(ValueError("no gradient today")))
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        with pytest.raises(ValueError, match="no gradient today"):
            wrong(x).sum().backward()


def lambda_of_one() -> Callable[..., Any]:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    return doubled


def test_an_error_of_a_kernel_arrives() -> None:
    refused = declared(lambda_of_one())

    @refused.kernel("cpu")
    def _(x: Tensor) -> Tensor:
        if x.sum() > 5:
            raise ValueError("too large")
        return x * 2

    for _ in range(3):
        refused(torch.ones(2))
    with pytest.raises(ValueError, match="too large"):
        refused(torch.full((2,), 9.0))


def warns_and_raises(x: Tensor) -> Tensor:
    """x -> x * 2; torch warns in C++, and the author raises for a large number."""
    torch.ops.aten.std(x.detach()[:1])
    if bool((x.detach() > 5).any()):
        raise ValueError("a large number")
    return x * 2


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "of a kernel": lambda operator, x: operator(x),
    "of a node": lambda operator, x: operator(x.requires_grad_()),
    "of a backward": lambda operator, x: operator(x * 0 + x.requires_grad_() * 0).backward(x.detach()),
    "of the way of Python": lambda operator, x: torch.func.grad(lambda x: operator(x).sum())(x),
}


@pytest.mark.parametrize("action", ["always", "error", "ignore"])
@pytest.mark.parametrize("call", CALLS)
def test_a_warning_of_torch_before_an_error_leaves_the_error(call: str, action: Any) -> None:
    """Python would make a `SystemError` of a warning that is given while an error is set."""
    made = declared(lambda_of_one() if call == "of a backward" else warns_and_raises)
    made.gradients(x=lambda grad: warns_and_raises(grad))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python notes it at each line that warns
        for _ in range(3):
            made(torch.ones(2))
            made(torch.ones(2, requires_grad=True))
            CALLS[call](made, torch.ones(2))
    assert plan_of(made) is not None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter(action)
        with pytest.raises((ValueError, UserWarning)) as plain:  # torch 2.15 raises it where it is given
            warns_and_raises(torch.full((2,), 9.0))
        warned.clear()
        with pytest.raises(plain.type, match=re.escape(str(plain.value))):
            CALLS[call](made, torch.full((2,), 9.0))
    assert all("degrees of freedom" in str(each.message) for each in warned)
    if call != "of the way of Python":  # by a node of torch, which loses it
        assert len(warned) == (action == "always")


@pytest.mark.compile
@pytest.mark.xdist_group("calls-in-cpp")
def test_compiled_autograd(operator: Any) -> None:
    from torch._dynamo import compiled_autograd

    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    right = torch.autograd.grad(scaled(x, w).pow(2).sum(), (x, w))
    for _ in range(2):
        loss = operator(x, w).pow(2).sum()
        assert type(operator(x, w).grad_fn).__name__ == "CppFunction"
        x.grad = w.grad = None
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        assert_close((x.grad, w.grad), right)


def test_threads(operator: Any) -> None:
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            torch.manual_seed(seed)
            for size in range(1, 40):
                x = torch.ones(size, requires_grad=True)
                (gradient,) = torch.autograd.grad(operator(x, by=float(seed)).sum(), x)
                assert gradient.tolist() == [float(seed)] * size
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed


def test_nothing_is_kept(operator: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    result = operator(x, torch.ones(2))
    held = weakref.ref(result)
    del result
    assert held() is None, "without a collection of garbage"
    before = len(gc.get_objects())
    for _ in range(50):
        operator(x, torch.ones(2)).sum().backward()
        operator(x.detach())
    gc.collect()
    assert len(gc.get_objects()) - before < 20


def test_a_plan_goes_with_its_handle(operator: Any) -> None:
    class Handle:
        def __call__(self, *args: Any, **kwargs: Any) -> str:
            return "in Python"

    accelerator, x = Accelerator(operator.specification, Handle), torch.ones(2)
    accelerator.accept([x, None, 2.0, 1], Route(lambda values: (scaled(values[0]),)))
    handle = Handle()
    assert_close(handle(x), scaled(x))
    assert handle.__call__(x) == "in Python"
    Handle.__call__ = lambda self, x: "another"  # type: ignore[assignment, method-assign, misc]
    assert handle(x) == "another"
    held = weakref.ref(Handle)
    del Handle, handle, accelerator
    gc.collect()
    assert held() is None


def test_another_kernel_takes_effect() -> None:
    made = declared(lambda_of_one())
    for _ in range(3):
        assert made(torch.ones(1)).item() == 2
    made.kernel("cpu", lambda x: x * 3)
    for _ in range(3):
        assert made(torch.ones(1)).item() == 3


def test_compiled_code_sees_the_operator(operator: Any) -> None:
    graph = torch.export.export(_Module(operator), (torch.ones(2),)).graph
    assert any("mul" in str(node.target) or "case" in str(node.target) for node in graph.nodes)


class _Module(torch.nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Any:
        return self.operator(x)


FALLBACK = """
import torch, opsmith
from opsmith.torch_library.calls.accelerator import Accelerator
from opsmith.torch_library.calls.computation import Route
from opsmith.torch_library.calls_extension import calls_extension
print(calls_extension())
x = torch.ones(2, requires_grad=True)
for _ in range(3):
    opsmith.ops.exp(x).sum().backward()
print(opsmith.ops.exp._registration._routes._accelerator._plan, type(opsmith.ops.exp(x).grad_fn).__name__)
"""


@pytest.mark.slow
def test_a_variable_leaves_them_unused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FALLBACK],
        env={**os.environ, "OPSMITH_PYTHON_CALLS": "1", "PYTHONPATH": str(Path(opsmith.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["None", "None expBackward"]


def test_they_are_built() -> None:
    assert calls_extension() is not None, "`make setup` or `opsmith build --calls` builds them"
    assert compile_calls().source in ("disk", "memory")
    assert torch.__version__.partition("+")[0] in target()
