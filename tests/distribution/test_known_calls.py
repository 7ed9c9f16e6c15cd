"""Known calls on DTensors are validated no more: values, placements, gradients and refusals stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import recorded_operator
from opsmith.torch_library.calls.routes import RouteTable
from opsmith.torch_library.dtensor.rule import DTensorRule

X, W = torch.arange(1.0, 13).view(4, 3) / 10, torch.tensor([[1.0, 2.0, 3.0]])
ROWS = Shard(0)
runs: list[torch.Size] = []


@opsmith.operator("known::ordinary")
def ordinary(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@opsmith.operator("known::formulas")
def formulas(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


formulas.gradients(
    x=lambda grad, x, w: grad * (x * w).cos() * w, w=lambda grad, x, w: grad * (x * w).cos() * x
)


@opsmith.operator("known::joint")
def joint(x: Tensor, w: Tensor, *, by: float = 2.0) -> Tensor:
    return x * w * by


@joint.gradients("x", "w")
def _(grad: Tensor, x: Tensor, w: Tensor, by: float) -> dict[str, Tensor]:
    return {"x": grad * w * by, "w": (grad * x * by).sum(0, keepdim=True)}


@opsmith.operator("known::partly")
def partly(x: Tensor, w: Tensor) -> Tensor:
    return x * w + w


partly.gradients(w=lambda grad, x: (grad * (x + 1)).sum(0, keepdim=True))


@opsmith.operator("known::kernel")
def kernel(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@kernel.kernel("cpu")
def _(x: Tensor, w: Tensor) -> Tensor:
    runs.append(x.shape)
    assert type(x) is Tensor
    return x * w


kernel.gradients(x=lambda grad, w: grad * w, w=lambda grad, x: grad * x)


@opsmith.operator("known::hidden", hidden=("half",))
def hidden(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    half = x / 2
    return half * w, half


hidden.gradients(x=lambda grad, w: grad * w / 2, w=lambda grad, half: (grad * half).sum(0, keepdim=True))


@opsmith.operator("known::several", results={"y": ..., "large": opsmith.non_differentiable})
def several(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * w, x > w


@opsmith.operator("known::numbered")
def numbered(x: Tensor, w: Tensor) -> Tensor:
    return x * w * torch.arange(x.shape[1])


@opsmith.operator("known::pair")
def pair(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * w, x + w


pair.gradients(
    x=lambda grad_result0, grad_result1, w: grad_result0 * w + grad_result1,
    w=lambda grad_result0, grad_result1, x: (grad_result0 * x + grad_result1).sum(0, keepdim=True),
)


@opsmith.operator("known::repeated")
def repeated(x: Tensor, w: Tensor) -> Tensor:
    return x.sin() + w


repeated.gradients(
    x=lambda grad, x: grad * x.cos(), w=lambda grad, w_shape: grad.sum(0, keepdim=True).reshape(w_shape)
)

OPERATORS = {
    each.name.partition("::")[2]: each
    for each in (ordinary, formulas, joint, partly, kernel, hidden, several, numbered, pair, repeated)
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


Place = Callable[..., tuple[DTensor, DTensor]]


@pytest.fixture
def place(mesh: Any) -> Place:
    """Distribute the arguments, as leaves that require a gradient or not."""

    def place(placement: Any = ROWS, *, requires: bool = True) -> tuple[DTensor, DTensor]:
        w = Replicate() if isinstance(placement, Shard) and placement.dim == 0 else placement
        given = distribute_tensor(X, mesh, [placement]), distribute_tensor(W, mesh, [w])
        x, w = (each.detach().requires_grad_(requires) for each in given)
        return x, w

    return place


def refuse(*_: Any) -> Any:
    raise AssertionError("a call was validated in full")


RESULTS = RouteTable.results


def refuse_dtensors(table: RouteTable, keyset: Any, args: Any, kwargs: Any) -> Any:
    if any(isinstance(each, DTensor) for each in (*args, *kwargs.values())):
        raise AssertionError("a call went through the dispatcher")
    return RESULTS(table, keyset, args, kwargs)


def first_calls(operator: Any, place: Place) -> None:
    """Make the calls that are validated."""
    for requires in (True, False):
        operator(*place(requires=requires))


def run(call: Callable[..., Any], tensors: Any) -> list[Tensor]:
    found = call(*tensors)
    results = found if isinstance(found, tuple) else (found,)
    recorded = [each for each in results if each.requires_grad]
    total = sum((each.sin().sum() for each in recorded), torch.zeros(()))
    return [*results, *torch.autograd.grad(total, tensors)] if recorded else [*results]


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]


@pytest.mark.parametrize("in_cpp", [True, False], ids=["C++ if built", "Python"])
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients(name: str, in_cpp: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS[name]
    if not in_cpp:
        monkeypatch.setattr(capabilities, "calls_in_cpp", lambda: None)
    operator.forget_calls()
    first_calls(operator, place)
    for placement in (Shard(0), Shard(1), Replicate()):
        operator.forget_calls()
        run(operator, place(placement, requires=False))
        slow = run(operator, place(placement))
        with monkeypatch.context() as patched:
            if name != "numbered":
                patched.setattr(DTensorRule, "_computed", refuse)
            for requires in (True, False):
                known = run(operator, place(placement, requires=requires))
                plain = run(
                    operator, (X.clone().requires_grad_(requires), W.clone().requires_grad_(requires))
                )
                assert all(isinstance(each, DTensor) for each in known)
                assert_close(whole(known), plain)
                if requires:
                    assert_close(whole(slow), plain)
                    of_results = len(known) - 2
                    assert [each.placements for each in known[:of_results]] == [
                        each.placements for each in slow[:of_results]
                    ]


def test_a_kernel_runs_on_shards(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first_calls(kernel, place)
    monkeypatch.setattr(DTensorRule, "_computed", refuse)
    known = place(requires=False)
    for _ in range(2):  # the first of them tries on tensors without data
        kernel(*known)
    runs.clear()
    kernel(*known)
    assert runs == [X.shape]


def test_an_optional_tensor_has_its_own_gradient(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    @opsmith.operator("known::optional")
    def optional(x: Tensor, a: Tensor | None = None, b: Tensor | None = None, by: int = 1) -> Tensor:
        return x * by if a is None and b is None else x * (a if b is None else b.exp()) * by

    optional.gradients(
        x=lambda grad, a, b, by: grad * by * (1 if a is None and b is None else a if b is None else b.exp()),
        a=lambda grad, x, by: (grad * x * by).sum(0, keepdim=True),
        b=lambda grad, x, b, by: (grad * x * b.exp() * by).sum(0, keepdim=True),
    )
    x, w = place()
    for known in (False, True):
        if known:
            monkeypatch.setattr(DTensorRule, "_computed", refuse)
        for given, gradient in (((w, None, 2), X * 2), ((None, w, 2), X * W.exp() * 2)):
            found = torch.autograd.grad(optional(x, *given), w, torch.ones_like(x))
            assert_close(found[0].full_tensor(), gradient.sum(0, keepdim=True))
        (found_x,) = torch.autograd.grad(optional(x, by=3), x, torch.ones_like(x))
        assert_close(found_x.full_tensor(), torch.full_like(X, 3.0))


def test_one_of_two_results_has_a_gradient(place: Place) -> None:
    first_calls(pair, place)
    x, w = place()
    for at, gradients in ((0, (W.expand(4, 3), X.sum(0, keepdim=True))), (1, (torch.ones(4, 3), 4 * W / W))):
        found = torch.autograd.grad(pair(x, w)[at], (x, w), torch.ones_like(x))
        assert_close([each.full_tensor() for each in found], list(gradients))


def test_the_same_gradient_for_both_inputs(place: Place) -> None:
    @opsmith.operator("known::added")
    def added(x: Tensor, w: Tensor) -> Tensor:
        return x + w

    added.gradients(x=lambda grad: grad, w=lambda grad: grad)
    x = place()[0]
    y = place()[0]
    for _ in range(3):
        found = torch.autograd.grad(added(x, y), (x, y), torch.ones_like(x))
        assert_close([each.full_tensor() for each in found], [torch.ones(4, 3)] * 2)


def test_only_what_formulas_use_is_saved(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = place()
    kernel(x, w.detach())
    monkeypatch.setattr(DTensorRule, "_computed", refuse)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda t: t
    ):
        result = kernel(x, w.detach())
    assert [each is w or each.shape == w.shape for each in packed] == [True]
    found = recorded_operator(result.grad_fn)
    assert found is not None
    assert (found.saved, found.inputs) == (("w",), ("x",))
    result.sum().backward()
    assert_close(x.grad.full_tensor(), W.expand(4, 3))
    with pytest.raises(RuntimeError, match="second time"):
        result.sum().backward()


def test_a_result_without_a_gradient_is_refused_if_a_formula_uses_it(place: Place) -> None:
    @opsmith.operator("known::compared")
    def compared(x: Tensor, w: Tensor) -> Tensor:
        return x > w

    compared.gradients(x=lambda grad, w: grad * w)
    compared(*place(requires=False))
    for _ in range(2):
        with pytest.raises(errors.IntegerResultError, match=r"torch\.bool"):
            compared(*place())


def test_c_plus_plus_makes_the_call(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if capabilities.calls_in_cpp() is None:
        pytest.skip("calls in C++ are not built, or turned off")
    for operator in (joint, pair, hidden, kernel):
        operator.forget_calls()
        first_calls(operator, place)
        first_calls(operator, place)
        expected = run(operator, place())
        with monkeypatch.context() as patched:
            patched.setattr(RouteTable, "results", refuse_dtensors)
            assert_close(whole(run(operator, place())), whole(expected))
    x, w = place(requires=False)
    monkeypatch.setattr(RouteTable, "results", refuse_dtensors)
    assert_close(joint(w=w, x=x, by=3).full_tensor(), X * W * 3)


def test_modes_see_the_operator(place: Place) -> None:
    first_calls(joint, place)
    seen: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **kwargs or {})

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **kwargs or {})

    x, w = place(requires=False)
    for mode in (Functions, Operations):
        with mode():
            assert_close(joint(x, w).full_tensor(), X * W * 2)
        assert torch.ops.known.joint.default in seen
        seen.clear()


def test_declared_shapes(place: Place) -> None:
    @opsmith.operator("known::shaped", shapes="x: N K, w: 1 K -> N K")
    def shaped(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    shaped.gradients(x=lambda grad, w: grad * w, w=lambda grad, x: (grad * x).sum(0, keepdim=True))
    first_calls(shaped, place)
    x, w = place()
    assert_close(shaped(x, w).full_tensor(), X * W)
    for _ in range(2):
        with pytest.raises(errors.ShapeError, match="`w`"):
            shaped(x, x)


def test_threads(place: Place) -> None:
    first_calls(formulas, place)
    leaves = place()
    tensors = {
        dtype: [each.detach().to(dtype).requires_grad_() for each in leaves]
        for dtype in (torch.float32, torch.float64)
    }

    def repeat(dtype: torch.dtype) -> list[list[Tensor]]:
        return [whole(run(formulas, tensors[dtype])) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for dtype, found in [(dtype, pool.submit(repeat, dtype)) for dtype in (*tensors, *tensors)]:
            plain = run(formulas, [X.to(dtype).requires_grad_(), W.to(dtype).requires_grad_()])
            for each in found.result():
                assert_close(each, plain)


def test_what_is_wrong_is_refused_as_in_full(mesh: Any, place: Place) -> None:
    x, w = place()
    first_calls(ordinary, place)
    with pytest.raises(errors.PlacementError, match="a plain tensor is mixed with a DTensor"):
        ordinary(x, W)
    with pytest.raises(RuntimeError, match=r"size of tensor|broadcast|shape"):
        ordinary(x, distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    assert_close(ordinary(x, w).full_tensor(), X * W)


def test_what_dtensor_does_not_know_is_gathered_with_a_warning(place: Place) -> None:
    @opsmith.operator("known::windows")
    def windows(x: Tensor, w: Tensor) -> Tensor:
        return x.unfold(0, 2, 1).sum(-1) * w

    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = windows(*place(requires=False))
        assert_close(found.full_tensor(), X.unfold(0, 2, 1).sum(-1) * W)
        assert any("gathers its DTensors" in str(each.message) for each in caught)


def test_partial_tensors(mesh: Any, place: Place) -> None:
    first_calls(formulas, place)
    x = DTensor.from_local(X.clone(), mesh, [Partial()], run_check=False)
    w = distribute_tensor(W, mesh, [Replicate()])
    assert_close(formulas(x, w).full_tensor(), (X * W).sin())
    assert_close(kernel(x, w).full_tensor(), X * W)


def test_another_declaration_is_in_force_at_once(place: Place) -> None:
    def declare(factor: float) -> Any:
        @opsmith.operator("known::times")
        def times(x: Tensor, w: Tensor) -> Tensor:
            return x * w * factor

        return times

    for factor in (2.0, 3.0):
        times = declare(factor)
        for _ in range(3):
            assert_close(times(*place(requires=False)).full_tensor(), X * W * factor)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_computes_a_known_call_again(early_stop: bool, place: Place) -> None:
    """What a hook of a saved tensor raises ends the call, and does not begin it anew."""
    first_calls(formulas, place)
    x, w = place()
    with set_checkpoint_early_stop(early_stop):
        checkpoint(formulas, x, w, use_reentrant=False).sum().backward()
    assert_close(x.grad.full_tensor(), (X * W).cos() * W)


def test_a_frozen_tensor_whose_shard_requires_a_gradient(place: Place) -> None:
    for _ in range(3):
        x, w = place(requires=False)
        w.to_local().requires_grad_(True)
        assert not kernel(x.requires_grad_(False), w).requires_grad


def test_a_formula_that_makes_a_plain_tensor(place: Place) -> None:
    @opsmith.operator("known::plain")
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    plain.gradients(
        x=lambda grad, w: grad * w * torch.ones(3), w=lambda grad, x: (grad * x).sum(0, keepdim=True)
    )
    unpacked: list[int] = []
    for _ in range(3):
        x, w = place()
        unpacked.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t):
            result = plain(x, w)
        found = torch.autograd.grad(result.sum(), (x, w))
        assert_close([each.full_tensor() for each in found], [W.expand(4, 3), X.sum(0, keepdim=True)])
        assert len(unpacked) == 2


def test_an_undeclared_write_is_named_in_inference_mode(place: Place) -> None:
    @opsmith.operator("known::written")
    def written(x: Tensor, w: Tensor) -> Tensor:
        return x.mul_(w) * 1

    x, w = place(requires=False)
    with torch.inference_mode(), pytest.raises(errors.MutationError) as refused:
        written(x, w)
    assert refused.value.argument == "x"
    assert_close(x.full_tensor(), X)


def test_several_results_in_a_list(place: Place) -> None:
    @opsmith.operator("known::listed")
    def listed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(x.shape)
        return [x * w, x + w]  # type: ignore[return-value]

    for _ in range(3):
        runs.clear()
        first, second = listed(*place(requires=False))
        assert_close([first.full_tensor(), second.full_tensor()], [X * W, X + W])
    assert len(runs) == 1
