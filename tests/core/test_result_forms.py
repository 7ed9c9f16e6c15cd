"""Results that may be None, and lists of results: values, derivatives, transforms, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith
from opsmith import errors

Operator = opsmith.Operator[..., Any]
make = opsmith.Make()
X = make(3)


def optional(x: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
    """x², and x³ if n is odd."""
    return x**2, x**3 if n % 2 else None


def of_optional(grad_square: Tensor, grad_cube: Tensor | None, x: Tensor) -> Tensor:
    assert grad_square.shape == x.shape
    square = 2 * grad_square * x
    return square if grad_cube is None else square + 3 * grad_cube * x**2


def alone(x: Tensor, n: int) -> Tensor | None:
    """x³ if n is odd."""
    return x**3 if n % 2 else None


def of_alone(grad: Tensor, x: Tensor) -> Tensor:
    return 3 * grad * x**2


def powers(x: Tensor, n: int) -> list[Tensor]:
    """x², x³, ..., n of them."""
    return [x ** (i + 2) for i in range(n)]


def of_powers(grad: list[Tensor], x: Tensor, result: list[Tensor]) -> Tensor:
    assert isinstance(grad, list)
    assert [item.shape for item in grad] == [item.shape for item in result]
    return sum(((i + 2) * item * x ** (i + 1) for i, item in enumerate(grad)), torch.zeros_like(x))


def mixed(x: Tensor, n: int) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """sin x, x², x³, ..., and cos x if n is odd."""
    return x.sin(), powers(x, n), x.cos() if n % 2 else None


def of_mixed(
    grad_sine: Tensor, grad_powers: list[Tensor], grad_cosine: Tensor | None, x: Tensor, powers: list[Tensor]
) -> Tensor:
    total = grad_sine * x.cos() + of_powers(grad_powers, x, powers)
    return total if grad_cosine is None else total - grad_cosine * x.sin()


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...] | None]] = {
    "optional": (optional, of_optional, ("square", "cube")),
    "alone": (alone, of_alone, None),
    "list": (powers, of_powers, None),
    "mixed": (mixed, of_mixed, ("sine", "powers", "cosine")),
}
CALLS = [("optional", 1), ("optional", 2), ("alone", 1), ("list", 0), ("list", 3), ("mixed", 2), ("mixed", 3)]


def declared(name: str, form: str, way: str) -> Operator:
    reference, formula, results = FORMS[form]
    operator = opsmith.operator(name, results=results)(reference)
    if way == "derived":
        operator.kernel("cpu", reference)
    if way == "formulas":
        operator.gradients(x=formula)
    return operator


def flat(returned: Any) -> tuple[Tensor, ...]:
    """All tensors of results, in order."""
    results = returned if isinstance(returned, tuple) else (returned,)
    spread = [each for one in results for each in (one if isinstance(one, list) else [one])]
    return tuple(each for each in spread if each is not None)


@pytest.fixture(params=["ordinary", "derived", "formulas"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("form", "n"), CALLS)
def test_values_and_derivatives(form: str, n: int, way: str, name: str) -> None:
    operator = declared(name, form, way)
    reference = FORMS[form][0]
    x = X.clone().requires_grad_()

    def call(x: Tensor) -> tuple[Tensor, ...]:
        return flat(operator(x, n))

    for given in (X, x):
        got, expected = operator(given, n), reference(given, n)
        assert type(got) is type(expected)
        if isinstance(got, tuple):
            assert [type(each) for each in got] == [type(each) for each in expected]
        assert_close(flat(got), flat(expected))
    if call(x):
        assert gradcheck(call, (x,), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(call, (x,))
        for position in range(len(call(x))):  # the others have no gradient
            of_one = torch.autograd.grad(call(x)[position].sum(), x)[0]
            assert_close(of_one, torch.autograd.grad(flat(reference(x, n))[position].sum(), x)[0])


@pytest.mark.every(5)
@pytest.mark.parametrize(("form", "n"), CALLS)
def test_transforms(form: str, n: int, way: str, name: str) -> None:
    operator, reference = declared(name, form, way), FORMS[form][0]

    def loss(function: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: sum((each.sum() for each in flat(function(x, n))), x.sum())

    batch = make(4, 3)
    for got, expected in zip(
        flat(torch.vmap(lambda x: flat(operator(x, n)))(batch)), flat(reference(batch, n)), strict=True
    ):
        assert_close(got, expected)
    for transform in (
        torch.func.grad,
        lambda f: torch.vmap(torch.func.grad(f)),
        lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum()),
        torch.func.hessian,
        torch.func.jacfwd,
        lambda f: torch.vmap(torch.func.jacfwd(torch.func.grad(f))),
    ):
        assert_close(transform(loss(operator))(batch[0:1]), transform(loss(reference))(batch[0:1]))


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("form", FORMS)
def test_schema_and_check(form: str, name: str) -> None:
    operator = declared(name, form, "formulas")
    returns = {
        "optional": "(Tensor, Tensor)",
        "alone": "Tensor",
        "list": "Tensor[]",
        "mixed": "(Tensor, Tensor[], Tensor)",
    }
    assert str(operator.torch_operator._schema) == f"{name}(Tensor x, SymInt n) -> {returns[form]}"
    operator.samples(lambda make: [(make(3), 1), (make(2, 2), 3), *([(make(3), 2)] * (form != "alone"))])
    report = opsmith.check(operator, effort="quick")
    assert report.passed, report.failures


@pytest.mark.every(8)
@pytest.mark.parametrize("form", ["optional", "list", "mixed"])
def test_the_check_rejects_a_wrong_formula(form: str, name: str) -> None:
    operator = declared(name, form, "formulas")
    right = FORMS[form][1]
    if form == "optional":
        operator.gradients(x=lambda grad_square, grad_cube, x: 2 * grad_square * x)
    if form == "list":
        operator.gradients(x=lambda grad, x, result: right(grad, x, result) + grad[-1])
    if form == "mixed":
        operator.gradients(
            x=lambda grad_sine, grad_powers, grad_cosine, x, powers: right(
                grad_sine, grad_powers[:1], grad_cosine, x, powers[:1]
            )
        )
    operator.samples(lambda make: [(make(3), 3)])
    failures = opsmith.check(operator, effort="quick").failures
    assert {failure.property for failure in failures} >= {"gradient"}


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("presence", [True, False])
def test_the_check_rejects_a_kernel_with_other_results(presence: bool, name: str) -> None:
    operator = opsmith.operator(name)(optional)
    operator.kernel("cpu", lambda x, n: (x**2, x**3 if presence else None))
    operator.samples(lambda make: [(make(3), 0 if presence else 1)])
    first = opsmith.check(operator, effort="quick").failures[0]
    assert (first.property, first.input, first.cause) == ("forward", "result1", "kernel-mismatch")


@pytest.mark.slow
@pytest.mark.compile
def test_compiled(name: str) -> None:
    operator = declared(name, "mixed", "formulas")

    def call(x: Tensor, n: int) -> Any:
        sine, powers, cosine = operator(x, n)
        return sine, [2 * each for each in powers], None if cosine is None else cosine + 1

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    x = X.clone().requires_grad_()
    for n in (2, 3):
        got, expected = compiled(x, n), call(x, n)
        assert (got[2] is None) == (expected[2] is None)
        assert_close(flat(got), flat(expected))
        of_got = torch.autograd.grad(sum(each.sum() for each in flat(got)), x)[0]  # type: ignore[union-attr]
        of_expected = torch.autograd.grad(sum(each.sum() for each in flat(expected)), x)[0]  # type: ignore[union-attr]
        assert_close(of_got, of_expected)


def test_hidden_lists_and_optionals(name: str) -> None:
    def product(x: Tensor, n: int) -> tuple[Tensor, list[Tensor], Tensor | None]:
        parts = [x + i for i in range(n)]
        return torch.stack(parts).prod(0), parts, x * 2 if n > 2 else None

    def of_x(grad: Tensor, parts: list[Tensor], double: Tensor | None) -> Tensor:
        assert (double is None) == (len(parts) <= 2)
        whole = torch.stack(parts).prod(0)
        return grad * sum(whole / part for part in parts)

    operator = opsmith.operator(name, hidden=("parts", "double"))(product).gradients(x=of_x)
    for n in (2, 3):
        x = (make(3) + 3).requires_grad_()
        assert isinstance(operator(x, n), Tensor)
        assert gradcheck(lambda x, n=n: operator(x, n), (x,), check_forward_ad=True)
        assert gradgradcheck(lambda x, n=n: operator(x, n), (x,))


def test_results_without_a_gradient(name: str) -> None:
    def parts(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return [x * 2, x * 3], [x > 0, x * 0]

    results = {"scaled": ..., "signs": opsmith.non_differentiable}
    operator = opsmith.operator(name, results=results)(parts).gradients(
        x=lambda grad_scaled: 2 * grad_scaled[0] + 3 * grad_scaled[1]
    )
    x = X.clone().requires_grad_()
    scaled, signs = operator(x)
    assert [each.requires_grad for each in (*scaled, *signs)] == [True, True, False, False]
    assert_close(torch.autograd.grad(scaled[1].sum(), x)[0], torch.full((3,), 3.0).double())


def test_tangent_formulas(name: str) -> None:
    operator = opsmith.operator(name)(powers)
    operator.tangents(
        result=lambda tangent_x, x, result: [(i + 2) * x ** (i + 1) * tangent_x for i, _ in enumerate(result)]
    )
    _, tangent = torch.func.jvp(lambda x: operator(x, 3), (X,), (torch.ones_like(X),))
    assert_close(tangent, [2 * X, 3 * X**2, 4 * X**3])
    operator.tangents(result=lambda tangent_x: [tangent_x])
    with pytest.raises(errors.GradientCountError) as caught:
        torch.func.jvp(lambda x: operator(x, 3), (X,), (torch.ones_like(X),))
    assert (caught.value.expected, caught.value.got) == ("a list of 3 tensors", "a list of 1")


def test_shapes_hold_every_item(name: str) -> None:
    def halves(x: Tensor, right: bool) -> list[Tensor]:
        return [x[:1] * 2, x * 2 if right else x[:1] * 3]

    operator = opsmith.operator(name, shapes="x: B M -> 1 M")(halves)
    operator(torch.ones(2, 3), False)
    with pytest.raises(errors.ShapeError, match=r"the shape of `result\[1\]` differs from `shapes=`"):
        operator(torch.ones(2, 3), True)


def test_an_opaque_operator(name: str) -> None:
    def rows(x: Tensor) -> list[Tensor]:
        return [torch.from_numpy(row.copy()) for row in x.detach().numpy()]

    operator = opsmith.operator(name, opaque=True)(rows).gradients(x=lambda grad: torch.stack(grad))
    operator.fake(lambda x: [x.new_empty(x.shape[1:]) for _ in range(x.shape[0])])
    x = make(3, 2).requires_grad_()
    assert gradcheck(lambda x: tuple(operator(x)), (x,))
    assert_close(torch.vmap(lambda x: operator(x))(make(4, 3, 2))[0].shape, torch.Size((4, 2)))


def test_examples_with_different_numbers_of_results(name: str) -> None:
    def positive(x: Tensor) -> list[Tensor]:
        return [torch.from_numpy(x.detach().numpy() * 2) for _ in range(int((x > 0).sum()))]

    operator = opsmith.operator(name, opaque=True)(positive)
    assert_close(torch.vmap(operator)(torch.ones(2, 3)), [torch.full((2, 3), 2.0)] * 3)
    with pytest.raises(errors.TransformError, match="its examples have different numbers of results"):
        torch.vmap(operator)(torch.tensor([[1.0, -1.0], [1.0, 1.0]]))


@pytest.mark.slow
def test_a_whole_batch_of_lists(name: str) -> None:
    seen: list[torch.Size] = []

    def both(x: Tensor, three: bool) -> tuple[list[Tensor], Tensor | None]:
        seen.append(x.shape)
        return [x * 2, x.exp()], x * 3 if three else None

    operator = opsmith.operator(name, batching="elementwise")(both)
    operator.kernel("cpu", both)
    x = make(4, 3)
    for three in (False, True):
        found = torch.vmap(lambda x, three=three: flat(operator(x, three)), in_dims=1, out_dims=1)(x)
        assert_close(found, (x * 2, x.exp(), x * 3)[: 2 + three])
    operator.samples(lambda make: [(make(3), True), (make(2, 3), False)])
    (found,) = opsmith.check(operator, effort="quick").failures
    assert (found.property, found.cause) == ("effects", "side-effect"), "that both() appends to `seen`"
    operator = opsmith.operator(f"{name}_led", shapes="x: B M -> B M, B M", batching="B")(both)
    operator.kernel("cpu", both)
    seen.clear()
    found = torch.vmap(lambda x: flat(operator(x, True)))(make(5, 4, 3))
    assert [each.shape for each in found] == [torch.Size((5, 4, 3))] * 3
    assert torch.Size((20, 3)) in seen


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.compile
def test_exported(strict: bool, name: str) -> None:
    operator = declared(name, "mixed", "formulas")

    class Network(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            sine, powers, cosine = operator(x, 2)
            return sine + powers[1], cosine is None

    program = torch.export.export(Network(), (X,), strict=strict)
    assert sum(node.target is operator.torch_operator for node in program.graph.nodes) == 1
    assert_close(program.module()(X)[0], X.sin() + X**3)


WRONG = [
    pytest.param(list[Tensor], lambda x: x + 1, "`result` is not a list", "list[Tensor]", id="no-list"),
    pytest.param(list[Tensor], lambda x: [x + 1, 2], "`result[1]` is not a tensor", "Tensor", id="item"),
    pytest.param(list[Tensor], lambda x: [x + 1, None], "`result[1]` is not a tensor", "Tensor", id="none"),
    pytest.param(
        list[Tensor], lambda x: [x + 1, x], "`result[1]` is its input `x`", "a new tensor", id="input"
    ),
    pytest.param(Tensor | None, lambda x: 3, "`result` is not a tensor", "Tensor | None", id="number"),
    pytest.param(Tensor, lambda x: None, "`result` is not a tensor", "Tensor", id="undeclared"),
]


@pytest.mark.parametrize(("hint", "returned", "problem", "expected"), WRONG)
def test_wrong_results(hint: Any, returned: Any, problem: str, expected: str, name: str) -> None:
    def reference(x: Tensor) -> Any:
        return returned(x)

    reference.__annotations__["return"] = hint
    with pytest.raises(errors.OpsmithError) as caught:
        opsmith.operator(name)(reference)(torch.ones(2))
    assert problem in str(caught.value)
    assert caught.value.expected == expected


def test_two_items_that_share_memory(name: str) -> None:
    def twice(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [y, y[:1]]

    with pytest.raises(errors.AliasError, match=r"`result\[1\]` shares memory with `result\[0\]`"):
        opsmith.operator(name)(twice)(torch.ones(2))


@pytest.mark.parametrize(
    ("annotation", "hint"),
    [
        (Sequence[Tensor], "write `-> list[Tensor]` if the number of results varies"),
        (tuple[Tensor, list[Tensor | None]], "write `-> Tensor` or `-> tuple[Tensor, Tensor]`"),
    ],
    ids=str,
)
def test_refused_results(annotation: Any, hint: str, name: str) -> None:
    def reference(x: Tensor) -> Any:
        return x

    reference.__annotations__["return"] = annotation
    with pytest.raises(errors.UnsupportedTypeError) as caught:
        opsmith.operator(name)(reference)
    assert caught.value.hint == hint
