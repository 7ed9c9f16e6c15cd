"""Messages of gradients that are wrong, missing, or not to be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import opsmith
from opsmith import errors

Place = Callable[[Callable[..., Any]], str]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x [4, 3], weight [2, 3]."""
    x = torch.arange(12, dtype=dtype).reshape(4, 3).requires_grad_()
    weight = torch.arange(6, dtype=dtype).reshape(2, 3).requires_grad_()
    return x, weight


@pytest.mark.parametrize(
    ("formula", "got", "hint"),
    [
        pytest.param(lambda grad, x: x.mT @ grad, [3, 2], "transpose it: `.mT`", id="transposed"),
        pytest.param(
            lambda grad, x: (grad.mT @ x).reshape(6),
            [6],
            "reshape it, or check whether two dimensions are swapped",
            id="flat",
        ),
        pytest.param(
            lambda grad, x: grad.mT @ x[:, :2], [2, 2], "check which dimensions are summed", id="cut"
        ),
        pytest.param(lambda grad, x: grad.sum(), [], "check which dimensions are summed", id="summed"),
    ],
)
def test_gradient_of_the_wrong_shape(
    formula: Any, got: list[int], hint: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(linear).gradients(weight=formula)
    with says(
        errors.GradientShapeError,
        f"""
        {name}: the gradient of `weight` has the wrong shape
          argument: weight
          expected: [2, 3], or a shape to which it was broadcast
          got: {got}
          where: {place(formula)}
          hint: {hint}
        """,
    ):
        operator(*inputs()).sum().backward()


def test_gradient_of_the_wrong_dtype(name: str, place: Place, says: Any) -> None:
    formula = lambda grad, x: (grad.mT @ x).double()
    operator = opsmith.operator(name)(linear).gradients(weight=formula)
    with says(
        errors.GradientDtypeError,
        f"""
        {name}: the gradient of `weight` has the wrong dtype
          argument: weight
          expected: torch.float32
          got: torch.float64
          where: {place(formula)}
          hint: make new tensors with `dtype=grad.dtype`, without casts
        """,
    ):
        operator(*inputs()).sum().backward()


def test_integer_gradient_where_dtypes_are_mixed(name: str, place: Place, says: Any) -> None:
    def scaled(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    formula = lambda grad, by: (grad * by).int()
    operator = opsmith.operator(name)(scaled).gradients(x=formula)
    with says(
        errors.GradientDtypeError,
        f"""
        {name}: the gradient of `x` has the wrong dtype
          argument: x
          expected: torch.float32
          got: torch.int32
          where: {place(formula)}
          hint: make new tensors with `dtype=grad.dtype`, without casts
        """,
    ):
        operator(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64)).sum().backward()


def test_gradient_on_the_wrong_device(name: str, place: Place, says: Any) -> None:
    formula = lambda x: torch.zeros(4, 3, device="meta")
    operator = opsmith.operator(name)(linear).gradients(x=formula)
    with says(
        errors.GradientDeviceError,
        f"""
        {name}: the gradient of `x` is on the wrong device
          argument: x
          expected: cpu
          got: meta
          where: {place(formula)}
          hint: make new tensors with `device=grad.device`
        """,
    ):
        operator(*inputs()).sum().backward()


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "None"),
        (0, "int 0"),
        (1.5, "float 1.5"),
        (opsmith.non_differentiable, "NonDifferentiable opsmith.non_differentiable"),
    ],
    ids=["none", "int", "float", "answer"],
)
def test_gradient_that_is_no_tensor(value: Any, got: str, name: str, place: Place, says: Any) -> None:
    formula = lambda grad: value
    operator = opsmith.operator(name)(linear).gradients(x=formula)
    with says(
        errors.GradientTypeError,
        f"""
        {name}: the gradient of `x` is not a tensor
          argument: x
          expected: a tensor of shape [4, 3]
          got: {got}
          where: {place(formula)}
          hint: return a tensor, or `opsmith.zero` if the gradient is zero
        """,
    ):
        operator(*inputs()).sum().backward()


def missing(grad: Tensor, weight: Tensor) -> dict[str, Any]:
    return {"x": grad @ weight}


def unknown(grad: Tensor, x: Tensor, weight: Tensor) -> dict[str, Any]:
    return {"x": grad @ weight, "weight": grad.mT @ x, "w": grad}


def by_position(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
    return grad @ weight, grad.mT @ x


@pytest.mark.parametrize(
    ("joint", "got"),
    [(missing, "`x`"), (unknown, "`x`, `weight`, `w`"), (by_position, "tuple")],
    ids=["missing", "unknown", "tuple"],
)
def test_joint_gradient_that_answers_for_others(
    joint: Any, got: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(linear).gradients(joint)
    with says(
        errors.GradientCountError,
        f"""
        {name}: the joint gradient does not return a gradient for each input that it covers
          expected: a dict with `x`, `weight`
          got: {got}
          where: {place(joint)}
          hint: return a dict by input name; cover fewer inputs with `@op.gradients('x', ...)`
        """,
    ):
        operator(*inputs()).sum().backward()


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


@pytest.mark.parametrize(
    ("formula", "got"),
    [
        pytest.param(lambda grad: [grad], "a list of 1", id="too-few"),
        pytest.param(lambda grad: (grad,) * 3, "a list of 3", id="too-many"),
        pytest.param(lambda grad: grad, "Tensor", id="tensor"),
    ],
)
def test_gradient_of_a_list_of_the_wrong_length(
    formula: Any, got: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(total).gradients(xs=formula)
    with says(
        errors.GradientCountError,
        f"""
        {name}: the gradient of the list `xs` has the wrong length
          argument: xs
          expected: a list of 2 tensors
          got: {got}
          where: {place(formula)}
          hint: return one gradient for each tensor of the list
        """,
    ):
        operator([torch.ones(2, requires_grad=True), torch.ones(2)]).sum().backward()


def test_gradient_of_an_item_of_a_list(name: str, place: Place, says: Any) -> None:
    formula = lambda grad: [grad, grad[:1], grad[:2]]
    operator = opsmith.operator(name)(total).gradients(xs=formula)
    with says(
        errors.GradientShapeError,
        f"""
        {name}: the gradient of `xs[2]` has the wrong shape
          argument: xs[2]
          expected: [3], or a shape to which it was broadcast
          got: [2]
          where: {place(formula)}
          hint: check which dimensions are summed
        """,
    ):
        # The second tensor needs no gradient, so nobody looks at what was returned for it.
        operator([torch.ones(3, requires_grad=need) for need in (True, False, True)]).sum().backward()


def test_gradient_that_is_not_implemented(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(linear).gradients(
        weight=opsmith.not_implemented("nobody has derived it")
    )
    x, weight = inputs()
    operator(x, weight.detach()).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(4, 3))
    with says(
        errors.GradientNotImplementedError,
        f"""
        {name}: the gradient of `weight` is not implemented: nobody has derived it
          argument: weight
          where: {place(linear)}
          hint: call it with `weight.detach()`, or give a formula: `.gradients(weight=...)`
        """,
    ):
        operator(x, weight).sum().backward()


def test_forward_mode_through_a_gradient_that_is_not_implemented(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(linear).gradients(weight=opsmith.not_implemented("why"))
    x, weight = (tensor.detach() for tensor in inputs())
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(operator(forward_ad.make_dual(x, x), weight)).tangent
        torch.testing.assert_close(tangent, x @ weight.mT)
        with says(
            errors.GradientNotImplementedError,
            f"""
            {name}: the gradient of `weight` is not implemented: why
              argument: weight
              where: {place(linear)}
              hint: call it with `weight.detach()`, or give a formula: `.gradients(weight=...)`
            """,
        ):
            operator(x, forward_ad.make_dual(weight, weight))


def cube(x: Tensor) -> Tensor:
    return x**3


def cube_gradient(g: Tensor, x: Tensor) -> Tensor:
    return 3 * g * x**2


@pytest.mark.parametrize("linear_in_x", [True, False], ids=["constant-grad", "grad-requires-grad"])
def test_second_order_through_a_gradient_that_has_none(
    linear_in_x: bool, name: str, place: Place, says: Any
) -> None:
    kernel = opsmith.operator(f"{name}_gradient")(cube_gradient).gradients(
        x=opsmith.not_implemented("the kernel has no gradient")
    )
    operator = opsmith.operator(name)(cube).gradients(x=lambda grad, x: kernel(grad, x))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = operator(x)
    (first,) = torch.autograd.grad((y if linear_in_x else y**2).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x**2 if linear_in_x else 6 * x**5)
    with says(
        errors.GradientNotImplementedError,
        f"""
        {name}_gradient: the gradient of `x` is not implemented: the kernel has no gradient
          argument: x
          where: {place(cube_gradient)}
          hint: call it with `x.detach()`, or give a formula: `.gradients(x=...)`
        """,
    ):
        first.sum().backward()


@pytest.mark.parametrize(
    ("formula", "written"),
    [
        pytest.param(lambda grad, weight: (weight.mul_(2), grad @ weight)[1], "weight", id="saved"),
        pytest.param(lambda grad, weight: (grad.view(-1).zero_(), grad @ weight)[1], "grad", id="grad"),
    ],
)
def test_formula_that_writes_into_what_it_was_given(
    formula: Any, written: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(linear).gradients(x=formula)
    x, weight = inputs()
    with says(
        errors.SavedTensorModifiedError,
        f"""
        {name}: a gradient formula wrote into `{written}`
          argument: {written}
          where: {place(formula)}
          hint: work on a copy, `{written}.clone()`, or use an operation without a trailing `_`
        """,
    ):
        operator(x, weight.detach()).sum().backward()


IN_TORCH = (
    "write the formula with torch operations or opsmith operators: then a second-order gradient exists; "
    "if the gradient is zero, give `opsmith.zero`"
)


def through_numpy(grad: Tensor, weight: Tensor) -> Tensor:
    return torch.from_numpy(grad.detach().numpy() @ weight.detach().numpy())


def detached(grad: Tensor, weight: Tensor) -> Tensor:
    return (grad @ weight).detach()


@pytest.mark.parametrize("power", [1, 2], ids=["constant-grad", "grad-requires-grad"])
@pytest.mark.parametrize("formula", [through_numpy, detached], ids=lambda f: f.__name__)
def test_second_order_through_a_formula_that_loses_the_graph(
    formula: Any, power: int, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(linear).gradients(x=formula)
    x, weight = inputs()
    right = torch.autograd.grad((linear(x, weight) ** power).sum(), x)
    first = torch.autograd.grad((operator(x, weight) ** power).sum(), x, create_graph=True)
    assert torch.equal(first[0], right[0]), "a first order is right"
    with says(
        errors.GraphCutError,
        f"""
        {name}: torch cannot see that the gradient of `x` depends on `grad`
          argument: x
          where: {place(formula)}
          hint: {IN_TORCH}
        """,
    ):
        first[0].sum().backward()


def test_joint_formula_that_loses_the_graph_for_one_input(name: str, place: Place, says: Any) -> None:
    def joint(grad: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"x": grad @ weight, "weight": (grad.mT @ x).detach()}

    operator = opsmith.operator(name)(linear).gradients(joint)
    x, weight = inputs()
    with says(
        errors.GraphCutError,
        f"""
        {name}: torch cannot see that the gradient of `weight` depends on `grad`
          argument: weight
          where: {place(joint)}
          hint: {IN_TORCH}
        """,
    ):
        torch.autograd.grad(operator(x, weight).sum(), (x, weight), create_graph=True)[1].sum().backward()


def test_integer_result_differentiated(name: str, place: Place, says: Any) -> None:
    def rounded(x: Tensor) -> Tensor:
        return x.round().int()

    operator = opsmith.operator(name)(rounded).gradients(x=lambda grad: grad)
    assert operator(torch.ones(2)).dtype is torch.int32
    with says(
        errors.IntegerResultError,
        f"""
        {name}: an input requires a gradient, but `result` is torch.int32, which has none
          argument: result
          expected: a floating or complex result, because a formula uses its gradient
          got: torch.int32
          where: {place(rounded)}
          hint: declare `results={{'result': opsmith.non_differentiable}}`, or call it on floating tensors
        """,
    ):
        operator(torch.ones(2, requires_grad=True))


def routine(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() ** 2)


WRITE_FAKE = (
    "write `@op.fake` over a function that returns `x.new_empty(shape)` for each result; a size that "
    "depends on data is `torch.library.get_ctx().new_dynamic_size()`"
)


@pytest.mark.parametrize("way", ["meta", "fake"])
def test_opaque_operator_traced_without_a_fake_kernel(way: str, name: str, place: Place, says: Any) -> None:
    from torch._subclasses import FakeTensorMode

    operator = opsmith.operator(name, opaque=True)(routine)
    x = torch.ones(2, device="meta") if way == "meta" else FakeTensorMode().from_tensor(torch.ones(2))
    with says(
        errors.MissingFakeError,
        f"""
        {name}: it is opaque and has no fake kernel, but tracing, compiling and `meta` tensors need one
          where: {place(routine)}
          hint: {WRITE_FAKE}
        """,
    ):
        operator(x)


def test_opaque_operator_differentiated_without_a_gradient(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, opaque=True)(routine)
    with says(
        errors.MissingGradientError,
        f"""
        {name}: the operator is opaque, but no gradient is given for `x`
          argument: x
          where: {place(routine)}
          hint: write `.gradients(x=lambda grad: ...)`, or `x=opsmith.non_differentiable`
        """,
    ):
        operator(torch.ones(2, requires_grad=True)).sum().backward()


def test_forward_mode_of_an_opaque_operator_without_a_gradient(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, opaque=True)(routine)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with says(
            errors.MissingGradientError,
            f"""
            {name}: the operator is opaque, but no gradient is given for `x`
              argument: x
              where: {place(routine)}
              hint: write `.gradients(x=lambda grad: ...)`, or `x=opsmith.non_differentiable`
            """,
        ):
            operator(x)


HINT_HIDDEN = (
    "let the formulas use `grad_root`; if `root` depends on no input, "
    "declare `results={'root': opsmith.non_differentiable}`"
)


def test_second_order_through_a_hidden_result_of_an_opaque_operator(
    name: str, place: Place, says: Any
) -> None:
    def routine_and_root(x: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.from_numpy(x.numpy() ** 0.5)
        return 2 * root, root

    formula = lambda grad, root: grad / root
    operator = opsmith.operator(name, opaque=True, hidden=("root",))(routine_and_root).gradients(x=formula)
    x = torch.tensor([4.0, 9.0], requires_grad=True)
    (first,) = torch.autograd.grad(operator(x).sum(), x, create_graph=True)
    torch.testing.assert_close(first, x**-0.5)
    message = f"""
        {name}: a second-order gradient, or forward mode, needs the derivative of the hidden \
result `root`, but the operator is opaque
          argument: root
          where: {place(formula)}
          hint: {HINT_HIDDEN}
        """
    with says(errors.HiddenResultError, message):
        first.sum().backward()
    with forward_ad.dual_level(), says(errors.HiddenResultError, message):
        operator(forward_ad.make_dual(x, x))


AS_HIDDEN = (
    "return the drawn numbers as a hidden result that is non-differentiable, and give formulas that use it"
)


def noisy(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return x * torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("own", [False, True], ids=["declared", "generator"])
@pytest.mark.parametrize("way", ["forward_ad", "jvp", "grad"])
def test_numbers_that_cannot_be_drawn_again(own: bool, way: str, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, random=not own)(noisy).kernel("cpu", noisy)
    generator = torch.Generator() if own else None
    x = torch.ones(2)
    with says(
        errors.ForwardModeError,
        f"""
        {name}: it draws random numbers: its reference cannot be run again in forward mode or torch.func
          where: {place(noisy)}
          hint: {AS_HIDDEN}
        """,
    ):
        if way == "forward_ad":
            with forward_ad.dual_level():
                operator(forward_ad.make_dual(x, x), generator)
        elif way == "jvp":
            torch.func.jvp(lambda x: operator(x, generator), (x,), (x,))
        else:
            torch.func.grad(lambda x: operator(x, generator).sum())(x)


@pytest.mark.parametrize("randomness", ["error", "same"])
def test_opaque_random_operator_under_vmap(randomness: str, name: str, place: Place, says: Any) -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() + torch.rand_like(x).numpy())

    operator = opsmith.operator(name, opaque=True, random=True)(noise)
    with says(
        errors.TransformError,
        f"""
        {name}: it is random and called for each example, but vmap has randomness={randomness!r}
          where: {place(noise)}
          hint: call `vmap(..., randomness='different')`, or pass the drawn numbers as an argument
        """,
    ):
        torch.func.vmap(operator, randomness=randomness)(torch.ones(3, 2))


def test_numbers_drawn_in_a_kernel_while_tracing(name: str, place: Place, says: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    operator = opsmith.operator(name, random=True)(noisy).kernel("cpu", noisy)
    x = torch.ones(2, requires_grad=True)
    with says(
        errors.TransformError,
        f"""
        {name}: its kernel draws random numbers, and a traced backward cannot draw the same numbers again
          where: {place(noisy)}
          hint: {AS_HIDDEN}
        """,
    ):
        make_fx(lambda x: torch.autograd.grad(operator(x).sum(), x))(x)


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), id="grad"),
        pytest.param(lambda f, x: torch.func.jvp(f, (x,), (x,)), id="jvp"),
    ],
)
def test_transform_of_an_opaque_operator_without_a_gradient(
    transform: Any, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name, opaque=True)(routine)
    with says(
        errors.MissingGradientError,
        f"""
        {name}: the operator is opaque, but no gradient is given for `x`
          argument: x
          where: {place(routine)}
          hint: write `.gradients(x=lambda grad: ...)`, or `x=opsmith.non_differentiable`
        """,
    ):
        transform(operator, torch.ones(2))


def test_exception_of_a_formula_tells_where_it_was_raised(name: str, place: Place) -> None:
    formula = lambda grad, x: grad @ x
    operator = opsmith.operator(name)(linear).gradients(weight=formula)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        operator(*inputs()).sum().backward()
    assert caught.value.__notes__ == [f"raised in the gradient of `weight` of {name}, {place(formula)}"]
