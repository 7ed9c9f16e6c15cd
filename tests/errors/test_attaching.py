"""Messages of what is attached to an operator and does not fit it: gradients, kernels, samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import Make, errors
from opsmith.core.samples import samples_of

Place = Callable[[Callable[..., Any]], str]


def scaled(x: Tensor, weight: Tensor, by: float = 2.0) -> Tensor:
    return x * weight * by


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2, x / 2


def test_gradient_for_an_unknown_input(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.UnknownInputError,
        f"""
        {name}: a gradient is given for `wieght`, which is not an input
          argument: wieght
          expected: one of `x`, `weight`
          where: {place(scaled)}
          hint: name the gradient after the argument of the reference
        """,
    ):
        operator.gradients(wieght=lambda grad: grad)


def test_joint_gradient_for_an_unknown_input(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.UnknownInputError,
        f"""
        {name}: a gradient is given for `y`, which is not an input
          argument: y
          expected: one of `x`, `weight`
          where: {place(scaled)}
          hint: name the gradient after the argument of the reference
        """,
    ):

        @operator.gradients("x", "y")
        def _(grad: Tensor) -> dict[str, Tensor]:
            return {}


def test_gradient_for_an_input_that_is_no_tensor(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.NotDifferentiableError,
        f"""
        {name}: a gradient is given for `by`, which is not a tensor
          argument: by
          expected: one of `x`, `weight`
          got: float
          where: {place(scaled)}
          hint: leave `by` out: only tensors have gradients
        """,
    ):
        operator.gradients(by=lambda grad, x: (grad * x).sum())


ONE_RESULT = "one of `x`, `weight`, `by`, `result`, `grad`"


@pytest.mark.parametrize(
    ("formula", "unknown", "hint"),
    [
        pytest.param(
            lambda grad_output: grad_output,
            "grad_output",
            "the gradient of the result is called `grad`",
            id="grad_output",
        ),
        pytest.param(lambda g: g, "g", "the gradient of the result is called `grad`", id="g"),
        pytest.param(lambda grad, out: grad * out, "out", "the result is called `result`", id="out"),
        pytest.param(lambda grad, y: grad * y, "y", "the result is called `result`", id="y"),
        pytest.param(lambda grad, wieght: grad * wieght, "wieght", "did you mean `weight`?", id="nearest"),
        pytest.param(
            lambda grad, temperature: grad, "temperature", "use one of the expected names", id="nothing-near"
        ),
        pytest.param(
            lambda grad, grads_needed: grad, "grads_needed", "use one of the expected names", id="joint-only"
        ),
    ],
)
def test_formula_with_an_unknown_parameter(
    formula: Any, unknown: str, hint: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.FormulaParameterError,
        f"""
        {name}: the gradient of `x` names `{unknown}`, which is not an input, result or gradient
          argument: {unknown}
          expected: {ONE_RESULT}
          where: {place(formula)}
          hint: {hint}
        """,
    ):
        operator.gradients(x=formula)


def test_formula_that_asks_for_the_one_gradient_of_two_results(name: str, place: Place, says: Any) -> None:
    def formula(grad: Tensor) -> Tensor:
        return grad

    operator = opsmith.operator(name)(halves)
    with says(
        errors.FormulaParameterError,
        f"""
        {name}: the gradient of `x` names `grad`, which is not an input, result or gradient
          argument: grad
          expected: one of `x`, `result0`, `result1`, `grad_result0`, `grad_result1`
          where: {place(formula)}
          hint: with several results, each has its own gradient: `grad_result0`, `grad_result1`
        """,
    ):
        operator.gradients(x=formula)


def test_joint_formula_with_an_unknown_parameter(name: str, place: Place, says: Any) -> None:
    def joint(grad: Tensor, needed: frozenset[str]) -> dict[str, Tensor]:
        return {"x": grad, "weight": grad}

    operator = opsmith.operator(name)(scaled)
    with says(
        errors.FormulaParameterError,
        f"""
        {name}: the joint gradient names `needed`, which is not an input, result or gradient
          argument: needed
          expected: {ONE_RESULT}, `grads_needed`
          where: {place(joint)}
          hint: did you mean `grads_needed`?
        """,
    ):
        operator.gradients(joint)


def several(*grads: Tensor) -> Tensor:
    return grads[0]


def options(grad: Tensor, **rest: Any) -> Tensor:
    return grad


def positional(grad: Tensor, /) -> Tensor:
    return grad


@pytest.mark.parametrize(
    ("formula", "shown"),
    [(several, "*grads: 'Tensor'"), (options, "**rest: 'Any'"), (positional, "grad: 'Tensor'")],
    ids=["star", "star-star", "positional-only"],
)
def test_formula_whose_parameters_name_nothing(
    formula: Any, shown: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(scaled)
    problem = f"the gradient of `x` takes `{shown}`, but its parameters must be names of single values"
    with says(
        errors.FormulaError,
        f"""
        {name}: {problem}
          expected: parameters from `x`, `weight`, `by`, `result`, `grad`
          where: {place(formula)}
          hint: write one parameter for each value that the formula uses
        """,
    ):
        operator.gradients(x=formula)


def test_formula_with_a_default(name: str, place: Place, says: Any) -> None:
    formula = lambda grad, by=3.0: grad * by
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.FormulaError,
        f"""
        {name}: the gradient of `x` gives its parameter `by` a default, but formulas get values by name
          argument: by
          where: {place(formula)}
          hint: close over the value: write the formula inside a function that has the value
        """,
    ):
        operator.gradients(x=formula)


def test_formula_without_a_signature(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.FormulaError,
        f"""
        {name}: the signature of the gradient of `x` cannot be read
          expected: parameters from `x`, `weight`, `by`, `result`, `grad`
          got: neg
          where: {place(scaled)}
          hint: write a function around it: `lambda grad: ...`
        """,
    ):
        operator.gradients(x=torch.neg)


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        pytest.param(None, "write `x=lambda grad: ...` or `opsmith.zero`", id="none"),
        pytest.param(0, "write `x=lambda grad: ...` or `opsmith.zero`", id="zero"),
        pytest.param("grad * weight", "write `x=lambda grad: ...`", id="str"),
    ],
)
def test_formula_that_is_no_function(rule: Any, hint: str, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.FormulaError,
        f"""
        {name}: the gradient of `x` is neither a function nor a value that replaces a function
          argument: x
          expected: a function, or opsmith.zero, .non_differentiable or .not_implemented(...)
          got: {rule!r}
          where: {place(scaled)}
          hint: {hint}
        """,
    ):
        operator.gradients(x=rule)


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        pytest.param(torch.ones(2), "Tensor of torch.float32, shape [2]", id="tensor"),
        pytest.param(torch.zeros(()), "Tensor of torch.float32, shape []", id="number-tensor"),
        pytest.param(numpy.ones(2), "ndarray array([1., 1.])", id="array"),
    ],
)
def test_values_that_are_no_formulas(rule: Any, got: str, name: str) -> None:
    operator = opsmith.operator(name)(scaled)
    with pytest.raises(errors.FormulaError, match=f"^{name}: the gradient of `x` is neither") as caught:
        operator.gradients(x=rule)
    assert (caught.value.argument, caught.value.got) == ("x", got)
    assert caught.value.hint == "write `x=lambda grad: ...`"
    with pytest.raises(errors.FormulaError, match=f"^{name}: the tangent of `result` is neither"):
        operator.tangents(result=rule)
    for aspect in ("gradient", "tangent"):
        attach = getattr(operator, f"{aspect}s")
        with pytest.raises(errors.FormulaError, match=f"{name}: the joint {aspect} is not a func") as caught:
            attach(rule)
        assert caught.value.got == got
        assert f"write `@op.{aspect}s` over the function" in str(caught.value.hint)
    operator.gradients(x=lambda grad, weight, by: grad * weight * by)
    operator.gradients("weight")(lambda grad, x, by: {"weight": grad * x * by})
    x, weight = (torch.full((2,), 3.0, requires_grad=True) for _ in range(2))
    operator(x, weight, 2.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


def test_stand_in_with_other_arguments(name: str, place: Place, says: Any) -> None:
    def soft(x: Tensor) -> Tensor:
        return x.tanh()

    operator = opsmith.operator(name)(scaled)
    with says(
        errors.NotAFunctionError,
        f"""
        {name}: the stand-in cannot be called like the operator: too many positional arguments
          expected: a function of `x`, `weight`, `by`
          got: soft(x: 'Tensor') -> 'Tensor'
          where: {place(soft)}
          hint: write `def f(x, weight, by): ...`, even if it uses only some of them
        """,
    ):
        operator.surrogate_gradients(soft)


@pytest.mark.parametrize("surrogate_first", [True, False], ids=["surrogate-first", "true-first"])
def test_true_and_surrogate_gradients(surrogate_first: bool, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    ways = [operator.gradients, operator.surrogate_gradients]
    first, second = reversed(ways) if surrogate_first else ways
    first(x=lambda grad: grad)
    with says(
        errors.GradientConflictError,
        f"""
        {name}: true and surrogate gradients are both declared for this operator
          got: {second.__name__}(...)
          where: {place(scaled)}
          hint: keep one of the two; to change the kind, declare the operator again
        """,
    ):
        second(weight=lambda grad: grad)


@pytest.mark.parametrize("device", ["gpu", "cuda:0", "CPU", ""])
def test_kernel_for_an_unknown_device(device: str, name: str, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.DeviceNameError,
        f"""
        {name}: the device of a kernel is not a device type that torch knows
          expected: a str such as 'cpu', 'cuda' or 'mps', without an index
          got: {device!r}
          hint: write `op.kernel('cpu', ...)` or `op.kernel('cuda', ...)`
        """,
    ):
        operator.kernel(device, scaled)


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cpu"), None], ids=repr)
def test_a_kernel_is_required_by_a_device_type(device: Any, name: str, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.DeviceNameError,
        f"""
        {name}: the device of a kernel is not a device type that torch knows
          expected: a str such as 'cpu', 'cuda' or 'mps', without an index
          got: {device!r}
          hint: write `op.require_kernel('cpu')` or `op.require_kernel('cuda')`
        """,
    ):
        operator.require_kernel(device)


@pytest.mark.parametrize(
    ("sample", "problem", "details"),
    [
        pytest.param(
            (torch.ones(2),),
            "`weight` is missing",
            ["argument: weight", "expected: Tensor", "got: nothing"],
            id="missing",
        ),
        pytest.param(
            (torch.ones(2), torch.ones(2), "twice"),
            "`by` has the wrong type",
            ["argument: by", "expected: float", "got: str 'twice'"],
            id="wrong-type",
        ),
        pytest.param(
            (torch.ones(2), torch.ones(2), 1.0, 2.0),
            "it takes 3 positional arguments, but 4 were given",
            [],
            id="too-many",
        ),
    ],
)
def test_sample_that_does_not_fit(
    sample: Any, problem: str, details: list[str], name: str, place: Place, says: Any
) -> None:
    def samples(make: Make) -> Any:
        yield sample

    operator = opsmith.operator(name)(scaled)
    operator.samples(samples)
    lines = [
        f"{name}: sample 0 does not fit the signature: {problem}",
        *(f"  {detail}" for detail in details),
        f"  where: {place(samples)}",
        "  hint: yield the arguments of one call of the operator",
    ]
    with says(errors.SampleError, "\n".join(lines)):
        samples_of(samples, Make(), operator.specification.schema, name)


def test_sample_that_is_no_call(name: str, place: Place, says: Any) -> None:
    def samples(make: Make) -> Any:
        yield {"x": 1}

    operator = opsmith.operator(name)(scaled)
    with says(
        errors.SampleError,
        f"""
        {name}: sample 0 is neither a tuple of arguments nor `make.call(...)`
          got: dict {{'x': 1}}
          where: {place(samples)}
          hint: yield `(x, weight)` or `make.call(x, weight, stride=2)`
        """,
    ):
        samples_of(samples, Make(), operator.specification.schema, name)


def test_operator_that_is_not_declared(says: Any) -> None:
    with says(
        errors.OperatorNotFoundError,
        """
        messages::nobody: no operator of this name is declared
          hint: import the module that declares it first
        """,
    ):
        opsmith.find_operator("messages::nobody")


def test_operator_that_its_module_does_not_declare(says: Any) -> None:
    with says(
        errors.OperatorNotFoundError,
        """
        messages::nobody: no operator of this name is declared
          got: module `json`, which does not declare it
          hint: import the module that declares it first
        """,
    ):
        opsmith.find_operator("messages::nobody", "json")


@pytest.mark.parametrize(
    ("attach", "what"),
    [
        (lambda operator, value: operator.kernel("cpu", value), "the kernel for cpu"),
        (lambda operator, value: operator.fake(value), "the fake kernel"),
        (lambda operator, value: operator.surrogate_gradients(value), "the stand-in"),
    ],
    ids=["kernel", "fake", "stand-in"],
)
def test_what_is_attached_is_no_function(attach: Any, what: str, name: str, says: Any) -> None:
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    operator = opsmith.operator(name)(scaled)
    with says(
        errors.NotAFunctionError,
        f"""
        {name}: {what} is not a function
          expected: a function of `x`, `by`
          got: int 3
          hint: write `def f(x, by): ...`
        """,
    ):
        attach(operator, 3)


def test_kernel_that_takes_other_arguments(name: str, place: Place, says: Any) -> None:
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    def fast(x):  # type: ignore[no-untyped-def]
        return x

    with says(
        errors.NotAFunctionError,
        f"""
        {name}: the kernel for cpu cannot be called like the operator: too many positional arguments
          expected: a function of `x`, `by`
          got: fast(x)
          where: {place(fast)}
          hint: write `def f(x, by): ...`, even if it uses only some of them
        """,
    ):
        opsmith.operator(name)(scaled).kernel("cpu", fast)


def test_builtins_without_a_signature_are_taken_at_their_word(name: str) -> None:
    def rounded(x: Tensor) -> Tensor:
        return x.round()

    operator = opsmith.operator(name)(rounded).surrogate_gradients(torch.sigmoid)
    x = torch.zeros(2, requires_grad=True)
    operator(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 0.25))


def test_samples_that_are_no_function(name: str, place: Place, says: Any) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    operator: Any = opsmith.operator(name)(scaled)
    with says(
        errors.NotAFunctionError,
        f"""
        {name}: samples must be given as a function that yields samples
          expected: a function of `make`
          got: int 3
          where: {place(scaled)}
          hint: write `@op.samples` over `def _(make): yield make(2, 3), ...`
        """,
    ):
        operator.samples(3)


@pytest.mark.parametrize("dtypes", [3, "float32", [torch.float32, 3]], ids=["number", "text", "mixed"])
def test_kernel_for_no_dtype(name: str, dtypes: Any, says: Any) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    with says(
        errors.KernelDtypeError,
        f"""
        {name}: a kernel is declared for a value that is not a dtype
          argument: dtypes
          expected: a list of at least one torch.dtype
          got: {dtypes!r}
          hint: write `dtypes=[torch.float32, torch.float64]`
        """,
    ):
        opsmith.operator(name)(scaled).kernel("cpu", scaled, dtypes=dtypes)


def test_one_dtype_needs_no_list(name: str) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    operator = opsmith.operator(name)(scaled).kernel("cpu", scaled, dtypes=torch.float32)
    assert operator.explain(torch.ones(2)).forward.startswith("kernel")
    assert operator.explain(torch.ones(2).double()).forward.startswith("reference")


@pytest.mark.parametrize(
    ("args", "kwargs", "got"),
    [
        (("x",), {"y": abs}, "'x', y=..."),
        ((abs,), {"y": abs}, "abs, y=..."),
        ((abs, len), {}, "abs, len"),
        (("x", abs), {}, "'x', abs"),
    ],
    ids=["names-and-rules", "joint-and-rules", "two-joint", "name-and-joint"],
)
def test_gradients_in_two_ways_at_once(
    args: Any, kwargs: Any, got: str, name: str, place: Place, says: Any
) -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    operator: Any = opsmith.operator(name)(product)
    with says(
        errors.FormulaError,
        f"""
        {name}: `gradients` mixes ways to give formulas in one call
          expected: one joint formula, or names of inputs, or `name=formula` for each input
          got: {got}
          where: {place(product)}
          hint: call `gradients` once for each way
        """,
    ):
        operator.gradients(*args, **kwargs)


def test_operator_of_a_module_that_is_not_there(says: Any) -> None:
    """As where a pickle is loaded on another machine."""
    with says(
        errors.OperatorNotFoundError,
        """
        messages::nobody: the module that declared this operator cannot be found
          expected: a module `no_such_package.operators`
          got: No module named 'no_such_package'
          hint: install the package of `no_such_package.operators`, or put it where Python looks for modules
        """,
    ):
        opsmith.find_operator("messages::nobody", "no_such_package.operators")


def test_a_module_that_lacks_another_one_says_so_itself(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_another.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        opsmith.find_operator("messages::nobody", "lacking_another")
