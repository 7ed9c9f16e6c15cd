"""Exactly what the needed formulas name is saved, formulas nobody needs are not run, nothing is modified."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.testing import assert_close

import opsmith

Operator = opsmith.Operator[..., Any]
NAMES = ("x", "weight", "bias")
SUBSETS = [tuple(chosen) for count in range(4) for chosen in itertools.combinations(NAMES, count)]


def saved_by(operator: Operator, arguments: dict[str, Tensor], **more: Any) -> list[str]:
    """Tensors that one call saves, by name of the argument; `result` for what is none of them."""
    saved: list[str] = []

    def note(value: Tensor) -> Tensor:
        found = [name for name, tensor in arguments.items() if tensor.data_ptr() == value.data_ptr()]
        saved.append(found[0] if found else "result")
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        operator(**arguments, **more)
    return sorted(saved)


def make_arguments(needed: tuple[str, ...]) -> dict[str, Tensor]:
    make = opsmith.Make()
    shapes = {"x": (4, 3), "weight": (2, 3), "bias": (2,)}
    return {name: make(*shape).requires_grad_(name in needed) for name, shape in shapes.items()}


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.mT + bias


def declared(name: str, *formulas: str) -> Operator:
    known: dict[str, Any] = {
        "x": lambda grad, weight: grad @ weight,
        "weight": lambda grad, x: grad.mT @ x,
        "bias": lambda grad: grad.sum(0),
    }
    operator = opsmith.operator(name)(affine)
    return operator.gradients(**{each: known[each] for each in formulas})


WANTED = {"x": {"weight"}, "weight": {"x"}, "bias": set()}


@pytest.mark.parametrize("needed", SUBSETS, ids=lambda needed: "-".join(needed) or "none")
def test_saved_by_formulas(needed: tuple[str, ...], name: str) -> None:
    expected = set().union(*(WANTED[each] for each in needed))
    assert saved_by(declared(name, *NAMES), make_arguments(needed)) == sorted(expected)


@pytest.mark.parametrize("needed", SUBSETS, ids=lambda needed: "-".join(needed) or "none")
def test_saved_where_one_gradient_is_derived(needed: tuple[str, ...], name: str) -> None:
    """Without a formula for `weight` everything is kept where it is needed, to run the reference again."""
    expected = set(NAMES) if "weight" in needed else set().union(*(WANTED[each] for each in needed))
    assert saved_by(declared(name, "x", "bias"), make_arguments(needed)) == sorted(expected)


def test_nothing_is_saved_without_grad_mode(name: str) -> None:
    operator = declared(name, *NAMES)
    with torch.no_grad():
        assert saved_by(operator, make_arguments(NAMES)) == []


def test_result_is_saved_where_the_formula_names_it(name: str) -> None:
    def growth(x: Tensor) -> Tensor:
        return x.exp()

    operator = opsmith.operator(name)(growth).gradients(x=lambda grad, result: grad * result)
    assert saved_by(operator, {"x": torch.ones(3, requires_grad=True)}) == ["result"]


def test_tensor_named_by_two_formulas_is_saved_once(name: str) -> None:
    def scaled(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x * y * z

    operator = opsmith.operator(name)(scaled).gradients(
        x=lambda grad, y, z: grad * y * z,
        y=lambda grad, x, z: grad * x * z,
        z=lambda grad, x, y: grad * x * y,
    )
    arguments = {each: torch.rand(3).requires_grad_() for each in "xyz"}
    assert saved_by(operator, arguments) == ["x", "y", "z"]


def test_answers_save_nothing(name: str) -> None:
    operator = opsmith.operator(name)(affine).gradients(
        x=opsmith.zero, weight=opsmith.non_differentiable, bias=opsmith.not_implemented("why")
    )
    assert saved_by(operator, make_arguments(NAMES)) == []


def test_list_is_saved_only_where_named(name: str) -> None:
    def total(xs: list[Tensor], scale: Tensor) -> Tensor:
        return torch.stack(xs).sum(0) * scale

    operator = opsmith.operator(name)(total).gradients(
        xs=lambda grad, xs, scale: [grad * scale] * len(xs), scale=lambda grad, xs: grad * sum(xs)
    )
    a, b, scale = (torch.rand(2).requires_grad_() for _ in range(3))
    both = {"xs0": a, "xs1": b, "scale": scale}
    saved: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: saved.extend(k for k, v in both.items() if v.data_ptr() == value.data_ptr()),
        lambda value: value,
    ):
        operator([a, b], scale.detach())
    assert sorted(saved) == ["scale", "xs0", "xs1"]


def test_shape_of_an_input_needs_no_tensor(name: str) -> None:
    """A formula that only needs to know a shape asks for `x_shape`, and nothing is kept for it."""
    seen: list[tuple[int, ...]] = []

    def total(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()

    def spread(grad: Tensor, x_shape: torch.Size) -> Tensor:
        seen.append(tuple(x_shape))
        return grad.expand(x_shape)

    operator = opsmith.operator(name)(total).gradients(
        x=spread, y=lambda grad, y_shape, x_shape: grad.expand(y_shape) * len(x_shape)
    )
    x, y = torch.ones(3, 2, requires_grad=True), torch.ones(4, requires_grad=True)
    assert saved_by(operator, {"x": x, "y": y}) == []
    for _ in range(3):
        assert_close(grad(operator(x, y).sum(), (x, y)), (torch.ones(3, 2), torch.full((4,), 2.0)))
    assert set(seen) == {(3, 2)}
    seen.clear()
    batch = torch.ones(5, 3, 2)
    each = torch.func.vmap(torch.func.grad(lambda x: operator(x, y.detach())))(batch)
    assert_close(each, batch)
    assert set(seen) == {(3, 2)}


def test_input_of_that_name_comes_before_a_shape(name: str) -> None:
    def scaled(x: Tensor, x_shape: float) -> Tensor:
        return x * x_shape

    operator = opsmith.operator(name)(scaled).gradients(x=lambda grad, x_shape: grad * x_shape)
    x = torch.ones(2, requires_grad=True)
    assert_close(grad(operator(x, 3.0).sum(), x)[0], torch.full((2,), 3.0))


def counted(name: str) -> tuple[Operator, Counter[str]]:
    calls: Counter[str] = Counter()

    def count(which: str, value: Tensor) -> Tensor:
        calls[which] += 1
        return value

    operator = opsmith.operator(name)(affine).gradients(
        x=lambda grad, weight: count("x", grad @ weight),
        weight=lambda grad, x: count("weight", grad.mT @ x),
        bias=lambda grad: count("bias", grad.sum(0)),
    )
    return operator, calls


@pytest.mark.parametrize("needed", SUBSETS[1:], ids="-".join)
def test_only_needed_formulas_run(needed: tuple[str, ...], name: str) -> None:
    operator, calls = counted(name)
    operator(**make_arguments(needed)).sum().backward()
    assert calls == Counter(needed)


def test_joint_formula_runs_once_for_all(name: str) -> None:
    calls: list[frozenset[str]] = []

    def joint(grad: Tensor, x: Tensor, weight: Tensor, grads_needed: frozenset[str]) -> dict[str, Tensor]:
        calls.append(grads_needed)
        ways = {"x": lambda: grad @ weight, "weight": lambda: grad.mT @ x, "bias": lambda: grad.sum(0)}
        return {each: ways[each]() for each in grads_needed}

    operator = opsmith.operator(name)(affine).gradients(joint)
    arguments = make_arguments(("x", "bias"))
    found = grad(operator(**arguments).sum(), [arguments["x"], arguments["bias"]])
    assert_close(found, grad(affine(**arguments).sum(), [arguments["x"], arguments["bias"]]))
    assert calls == [frozenset({"x", "bias"})]


def test_formulas_do_not_run_where_no_gradient_comes_in(name: str) -> None:
    """A node whose results nobody used hands on nothing, and runs nothing."""
    operator, calls = counted(name)
    arguments = make_arguments(NAMES)
    unused = operator(**arguments)
    loss = affine(**arguments).sum() + unused.detach().sum()
    loss.backward()
    assert calls == Counter()


def test_reference_does_not_run_again_where_formulas_cover_what_is_needed(name: str) -> None:
    runs: list[str] = []

    def counting(x: Tensor, weight: Tensor) -> Tensor:
        runs.append("reference")
        return x * weight

    operator = opsmith.operator(name)(counting).gradients(x=lambda grad, weight: grad * weight)
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    grad(operator(x, weight.detach()).sum(), x)
    assert runs == ["reference"]
    grad(operator(x, weight).sum(), (x, weight))
    assert runs == ["reference"] * 3


def test_saved_and_incoming_tensors_are_unmodified(variant: Operator, inputs: tuple[Tensor, Tensor]) -> None:
    """Also where the incoming gradient and the inputs are used again by others."""
    result = variant(*inputs)
    incoming = torch.ones_like(result)
    tensors = [*inputs, result, incoming]
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    result.backward(incoming, retain_graph=True)
    result.backward(incoming)
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert_close(tensor.detach(), value)
        assert tensor._version == version


def test_gradients_of_two_inputs_do_not_share_memory(name: str) -> None:
    """A formula that hands on `grad` itself gives each input a gradient of its own to accumulate into."""

    def summed(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    operator = opsmith.operator(name)(summed).gradients(x=lambda grad: grad, y=lambda grad: grad)
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    operator(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    x.grad.mul_(100)
    assert_close(y.grad, torch.ones(3))


def test_writing_into_a_saved_input_is_torch_s_own_error(name: str) -> None:
    operator = declared(name, *NAMES)
    arguments = make_arguments(("weight",))
    result = operator(**arguments)
    arguments["x"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_writing_into_an_input_that_is_not_saved_is_fine(name: str) -> None:
    operator = declared(name, *NAMES)
    arguments = make_arguments(("bias",))
    result = operator(**arguments)
    arguments["x"].zero_()
    result.sum().backward()
    assert_close(arguments["bias"].grad, torch.full((2,), 4.0, dtype=torch.float64))


def test_memory_of_a_graph_is_freed(name: str) -> None:
    import weakref

    operator = declared(name, *NAMES)
    arguments = make_arguments(NAMES)
    scratch = arguments["x"] * 2
    alive = weakref.ref(scratch)
    result = operator(scratch, arguments["weight"], arguments["bias"])
    del scratch
    assert alive() is not None
    result.sum().backward()
    del result
    assert alive() is None
