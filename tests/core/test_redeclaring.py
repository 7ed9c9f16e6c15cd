"""Declaring again from the same place replaces the operator behind the handle, with all that was attached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.testing import assert_close

import opsmith
from opsmith import errors

Operator = opsmith.Operator[..., Any]
X = torch.tensor([1.0, 2.0])


def declare(name: str, factor: float, **options: Any) -> Operator:
    """The same place, as a notebook cell that is run again after an edit."""

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    return opsmith.operator(name, **options)(scaled)


def declare_with(name: str, annotations: dict[str, Any], function: Any) -> Operator:
    function.__qualname__ = "declare_with.cell"
    function.__annotations__ = annotations
    return opsmith.operator(name)(function)


def gradient(operator: Operator, *args: Any) -> Tensor:
    x = X.clone().requires_grad_()
    return grad(operator(x, *args).sum(), x)[0]


def test_the_handle_stays_and_the_reference_changes(name: str) -> None:
    first = declare(name, 2.0)
    second = declare(name, 3.0)
    assert second is first
    assert_close(first(X), 3 * X)
    assert_close(gradient(first), torch.full((2,), 3.0))
    namespace, _, short = name.partition("::")
    assert_close(getattr(getattr(torch.ops, namespace), short)(X), 3 * X)
    assert opsmith.find_operator(name) is first
    assert len([each for each in opsmith.declared_operators() if each.name == name]) == 1


def test_what_was_attached_is_gone(name: str) -> None:
    operator = declare(name, 2.0).surrogate_gradients(x=lambda grad: 7 * grad)
    operator.kernel("cpu", lambda x: x * 2 + 100)
    operator.samples(lambda make: [(make(2),)])
    assert_close(operator(X), X * 2 + 100)
    declare(name, 2.0)
    assert_close(operator(X), X * 2)
    assert_close(gradient(operator), torch.full((2,), 2.0))
    assert operator.specification.samples is None
    # True and surrogate gradients no longer conflict.
    assert_close(gradient(operator.gradients(x=lambda grad: 2 * grad)), torch.full((2,), 2.0))


def test_new_formulas_are_in_force(name: str) -> None:
    operator = declare(name, 2.0).surrogate_gradients(x=lambda grad: 5 * grad)
    assert_close(gradient(operator), torch.full((2,), 5.0))
    operator = declare(name, 2.0).surrogate_gradients(x=lambda grad: 6 * grad)
    assert_close(gradient(operator), torch.full((2,), 6.0))


def test_attaching_again_after_calls_replaces_what_is_saved(name: str) -> None:
    """Plans of earlier backwards are forgotten."""
    operator = declare(name, 2.0).gradients(x=lambda grad: 2 * grad)
    gradient(operator)
    operator.gradients(x=lambda grad, x, result: grad * result / x)
    assert_close(gradient(operator), torch.full((2,), 2.0))
    operator.gradients(x=opsmith.zero)
    assert_close(gradient(operator), torch.zeros(2))


def test_a_graph_made_before_keeps_its_own_formulas(name: str) -> None:
    x = X.clone().requires_grad_()
    old = declare(name, 2.0).gradients(x=lambda grad: 2 * grad)(x)
    declare(name, 3.0).gradients(x=lambda grad: 3 * grad)
    assert_close(grad(old.sum(), x)[0], torch.full((2,), 2.0))


def test_changed_schema(name: str) -> None:
    operator = declare_with(name, {"x": Tensor, "return": Tensor}, lambda x: x * 2)
    assert_close(operator(X), X * 2)
    again = declare_with(name, {"x": Tensor, "by": float, "return": Tensor}, lambda x, by: x * by)
    assert again is operator
    assert_close(operator(X, 5.0), X * 5)
    assert_close(gradient(operator, 5.0), torch.full((2,), 5.0))
    namespace, _, short = name.partition("::")
    assert operator.torch_operator is getattr(getattr(torch.ops, namespace), short).default
    with pytest.raises(errors.ArgumentError, match="`by` is missing"):
        operator(X)


def test_changed_results(name: str) -> None:
    operator = declare_with(name, {"x": Tensor, "return": Tensor}, lambda x: x * 2)
    operator(X)
    declare_with(name, {"x": Tensor, "return": tuple[Tensor, Tensor]}, lambda x: (x * 2, x * 3))
    assert_close(operator(X), (X * 2, X * 3))
    declare_with(name, {"x": Tensor, "return": Tensor}, lambda x: x * 4)
    assert_close(operator(X), X * 4)


def test_hidden_results_come_and_go(name: str) -> None:
    def cell(hidden: tuple[str, ...]) -> Operator:
        def halves(x: Tensor) -> tuple[Tensor, Tensor]:
            return x / 2, x / 4

        return opsmith.operator(name, hidden=hidden)(halves)

    operator = cell(("quarter",))
    assert_close(operator(X), X / 2)
    assert_close(cell(())(X), (X / 2, X / 4))
    assert_close(cell(("quarter",))(X), X / 2)


def test_options_change(name: str) -> None:
    operator = declare(name, 2.0)
    assert torch.Tag.nondeterministic_seeded not in operator.torch_operator.tags
    declare(name, 2.0, random=True, autocast="lower")
    assert torch.Tag.nondeterministic_seeded in operator.torch_operator.tags
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operator(X).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("annotations", "function", "error"),
    [
        ({"x": Tensor}, lambda x: x * 3, errors.MissingAnnotationError),
        (
            {"x": Tensor, "by": float, "return": Tensor},
            lambda x, by=float("inf"): x * by,
            errors.DefaultError,
        ),
    ],
    ids=["refused", "refused-by-torch"],
)
def test_a_cell_that_fails_leaves_the_operator_as_it_was(
    annotations: Any, function: Any, error: Any, name: str
) -> None:
    operator = declare_with(name, {"x": Tensor, "return": Tensor}, lambda x: x * 2)
    operator.surrogate_gradients(x=lambda grad: 7 * grad)
    with pytest.raises(error):
        declare_with(name, annotations, function)
    assert_close(operator(X), X * 2)
    assert_close(gradient(operator), torch.full((2,), 7.0))
    assert repr(operator) == f"<opsmith operator {name}(Tensor x) -> Tensor>"


def test_a_declaration_that_fails_leaves_the_name_free(name: str) -> None:
    with pytest.raises(errors.DefaultError):
        declare_with(name, {"x": Tensor, "by": float, "return": Tensor}, lambda x, by=float("nan"): x * by)
    assert_close(declare_with(name, {"x": Tensor, "return": Tensor}, lambda x: x * 2)(X), X * 2)


def test_a_formula_that_is_refused_leaves_the_others_in_force(name: str) -> None:
    operator = declare(name, 2.0).surrogate_gradients(x=lambda grad: 7 * grad)
    with pytest.raises(errors.FormulaParameterError):
        operator.surrogate_gradients(x=lambda grad_output: grad_output)
    assert_close(gradient(operator), torch.full((2,), 7.0))


def test_a_module_that_is_reloaded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    text = (
        "import opsmith\nfrom torch import Tensor\n\n"
        "@opsmith.operator('redeclare_reload::f')\ndef f(x: Tensor) -> Tensor:\n    return x * {factor}\n"
    )
    file = tmp_path / "reloaded_module.py"
    file.write_text(text.format(factor=2))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    module: Any = importlib.import_module("reloaded_module")
    held = module.f
    assert_close(held(X), X * 2)
    file.write_text(text.format(factor=30))
    importlib.reload(module)
    assert module.f is held
    assert_close(held(X), X * 30)
