"""Messages that met new users: each names what to write, and the hint is followed."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import opsmith
from opsmith import errors

ONES = torch.ones(2, 3)


def refused(kind: type[errors.OpsmithError], run: Any) -> str:
    with pytest.raises(kind) as caught:
        run()
    return caught.value.message()


def test_out_is_an_attribute_and_no_argument(name: str) -> None:
    @opsmith.operator(name)
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    buffer = torch.empty(2, 3)
    said = refused(errors.ArgumentError, lambda: twice(ONES, out=buffer))  # type: ignore[call-arg]
    assert "it has no argument `out`" in said
    assert said.endswith("hint: call it as `twice.out(x, out=out)`")
    assert twice.out(ONES, out=buffer) is buffer
    assert buffer.tolist() == [[2.0] * 3] * 2


def in_two(x: Tensor, by: float, *, shift: int = 0) -> tuple[Tensor, Tensor]:
    return x * by + shift, x + by


@pytest.mark.parametrize("wrong", ["call", "tensor", "list", "one-of-two", "nothing"])
def test_out_of_several_results_is_a_tuple(name: str, wrong: str) -> None:
    named: Any = opsmith.operator(name)(in_two)
    outs = (torch.empty(2, 3), torch.empty(2, 3))
    calls: dict[str, Any] = {
        "call": lambda: named(ONES, 2.0, out=outs),
        "tensor": lambda: named.out(ONES, 2.0, out=outs[0]),
        "list": lambda: named.out(ONES, 2.0, out=[*outs]),
        "one-of-two": lambda: named.out(ONES, 2.0, out=outs[:1]),
        "nothing": lambda: named.out(out=outs),
    }
    said = refused(errors.OpsmithError, calls[wrong])
    hint = "named.out(x, by, shift=0, out=(out0, out1))"
    assert said.endswith(f"hint: call it as `{hint}`")
    eval(hint, {"named": named, "x": ONES, "by": 2.0, "out0": outs[0], "out1": outs[1]})
    assert (outs[0].mean().item(), outs[1].mean().item()) == (2.0, 3.0)


@pytest.mark.parametrize("returns", ["x", None])
def test_the_hint_of_an_operator_in_place_is_a_call(name: str, returns: str | None) -> None:
    def double(x: Tensor) -> Tensor:
        x.mul_(2)
        return x

    def void(x: Tensor) -> None:
        x.mul_(2)

    inp: Any = opsmith.operator(name, mutates="x", returns=returns)(double if returns else void)
    x = torch.ones(2)
    said = refused(errors.ArgumentError, lambda: inp(x, out=x))
    assert said.endswith("hint: call it as `inp(x)`")
    eval("inp(x)", {"inp": inp, "x": x})
    assert x.tolist() == [2.0, 2.0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


HELD: dict[str, Any] = {}


def test_a_hint_names_the_variable_that_holds_the_operator(name: str) -> None:
    mine = opsmith.adopt(Doubled, name)
    said = refused(errors.MissingSamplesError, lambda: opsmith.draw(mine, "doubled.svg"))
    assert "write `@mine.samples` over" in said
    assert "`mine.out(x, out=out)`" in refused(errors.ArgumentError, lambda: mine(ONES, out=ONES))
    assert "`mine(x)`;" in refused(errors.ArgumentError, lambda: mine())


def test_a_hint_looks_up_an_operator_that_no_variable_holds(name: str) -> None:
    HELD["twice"] = opsmith.operator(name)(lambda_free)
    said = refused(errors.ArgumentError, lambda: HELD["twice"]())
    call = f"opsmith.find_operator({name!r})(x)"
    assert said.endswith(f"hint: call it as `{call}`")
    assert eval(call, {"opsmith": opsmith, "x": ONES}).tolist() == (2 * ONES).tolist()
    assert f"write `@opsmith.find_operator({name!r}).samples` over" in refused(
        errors.MissingSamplesError, lambda: opsmith.check(HELD["twice"])
    )


def lambda_free(x: Tensor) -> Tensor:
    return 2 * x


def test_a_hint_names_the_variable_of_the_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("holding_operators")
    module.short = opsmith.operator(name)(lambda_free)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert replace(module.short.specification, module=module.__name__).variable == "short"


def returned(x: Tensor, y: Tensor) -> Tensor:
    return x.mul_(y)


def beside(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.mul_(y), x + y


def second(y: Tensor, x: Tensor) -> Tensor:
    return x.mul_(y)


def test_a_function_that_returns_what_it_writes_declares_it(name: str) -> None:
    first = opsmith.operator(name, mutates="x")(returned)
    said = refused(errors.AliasError, lambda: first(ONES.clone(), 2 * ONES))
    assert said.endswith(
        'hint: declare it, `returns="x"`, if callers get `x` itself; or return a copy: `.clone()`'
    )
    x = ONES.clone()
    assert opsmith.operator(name, mutates="x", returns="x")(returned)(x, 2 * ONES) is x


@pytest.mark.parametrize("function", [beside, second])
def test_what_cannot_be_returned_is_left_out_of_the_results(name: str, function: Any) -> None:
    operator: Any = opsmith.operator(name, mutates="x")(function)
    said = refused(errors.AliasError, lambda: operator(*(torch.ones(2), torch.ones(2))))
    assert said.endswith(
        "hint: leave `x` out of the results, because callers have it; or return a copy: `.clone()`"
    )


def test_an_alias_of_what_is_not_written_is_copied(name: str) -> None:
    operator = opsmith.operator(name)(lambda_free)
    same = opsmith.operator(f"{name}_same")(identity)
    assert operator(ONES).shape == ONES.shape
    assert refused(errors.AliasError, lambda: same(ONES)).endswith("hint: return a copy: `.clone()`")


def identity(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("first", ["self", "cls", "ctx"])
def test_a_method_with_a_hint_for_its_object_is_no_function(name: str, first: str) -> None:
    scope: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def method({first}: 'M', x: Tensor) -> Tensor:\n    return x * 2\n", scope)
    said = refused(errors.UnsupportedTypeError, lambda: opsmith.operator(name)(scope["method"]))
    assert "import the name" not in said
    assert ("leave `ctx` out" if first == "ctx" else "declare a function outside of the class") in said
    exec(f"def method({first}: Tensor, x: 'M') -> Tensor:\n    return x * 2\n", scope)
    assert "import the name" in refused(
        errors.UnsupportedTypeError, lambda: opsmith.operator(name)(scope["method"])
    )


def test_out_is_not_told_of_an_operator_that_returns_nothing(name: str) -> None:
    @opsmith.operator(name, mutates="x")
    def double(x: Tensor) -> None:
        x.mul_(2)

    said = refused(errors.ArgumentError, lambda: double(ONES, out=ONES))  # type: ignore[call-arg]
    assert ".out(" not in said


def normalized(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rstd = x.square().mean(-1).rsqrt()
    return x * rstd[:, None] * weight, rstd


@pytest.mark.parametrize("results", ["B M, B", "B M"], ids=["all-results", "visible-results"])
def test_a_shape_hint_shows_no_hidden_result(name: str, results: str) -> None:
    declare = opsmith.operator(name, hidden=("rstd",), shapes=f"x: B M, weight: M -> {results}")
    operator = declare(normalized)
    said = refused(errors.ShapeError, lambda: operator(ONES, torch.ones(2)))
    assert said.endswith("hint: call it with `x: B M, weight: M -> B M`")
    assert operator(ONES, torch.ones(3)).shape == (2, 3)


def test_a_count_of_shapes_counts_no_hidden_result(name: str) -> None:
    def declare(shapes: str) -> Any:
        return opsmith.operator(name, hidden=("rstd",), shapes=shapes)(normalized)

    said = refused(errors.ShapePatternError, lambda: declare("x: B M, weight: M -> B M, B, B"))
    assert said.endswith("hint: write one entry for each result after `->`, 1 in all")
    assert declare("x: B M, weight: M -> B M")(ONES, torch.ones(3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("shapes", "hint"),
    [
        ("x: B M", "write the arguments, `->`, and nothing after it: the operator returns nothing"),
        ("x: B M -> B M", "write nothing after `->`"),
    ],
)
def test_shapes_of_an_operator_that_returns_nothing(name: str, shapes: str, hint: str) -> None:
    def double(x: Tensor) -> None:
        x.mul_(2)

    declare = opsmith.operator(name, mutates="x", shapes=shapes)
    said = refused(errors.ShapePatternError, lambda: declare(double))
    assert "expected: `x: B M, weight: N M ->`, with no results" in said
    assert said.endswith(f"hint: {hint}")
    x = torch.ones(2, 3)
    opsmith.operator(name, mutates="x", shapes="x: B M ->")(double)(x)
    assert x.tolist() == [[2.0] * 3] * 2


def test_ctx_belongs_to_a_class(name: str) -> None:
    def scale(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return 2 * x

    said = refused(errors.MissingAnnotationError, lambda: opsmith.operator(name)(scale))
    assert said.endswith(
        "hint: leave `ctx` out: a formula gets values by name, `op.gradients(x=lambda grad, x: ...)`; adopt "
        "a class with `ctx`: `opsmith.adopt(Class, 'mylib::name')`"
    )

    @opsmith.operator(name)
    def followed(x: Tensor) -> Tensor:
        return x * x

    followed.gradients(x=lambda grad, x: 2 * grad * x)
    leaf = torch.tensor([3.0], requires_grad=True)
    followed(leaf).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6.0]


def test_ctx_with_its_type_belongs_to_a_class(name: str) -> None:
    def scale(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return 2 * x

    said = refused(errors.UnsupportedTypeError, lambda: opsmith.operator(name)(scale))
    assert "argument: ctx" in said
    assert "`ctx`: `opsmith.adopt(Class, 'mylib::name')`" in said


@pytest.mark.parametrize("parameter", ["self", "cls"])
def test_a_method_is_no_operator(name: str, parameter: str) -> None:
    given: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def scale({parameter}, x: Tensor) -> Tensor:\n    return 2 * x", given)
    said = refused(errors.MissingAnnotationError, lambda: opsmith.operator(name)(given["scale"]))
    assert said.endswith("hint: declare a function outside of the class, and call it in the method")


class NumpySine(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.from_numpy(numpy.sin(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.from_numpy(numpy.cos(ctx.saved_tensors[0].numpy()))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return torch.from_numpy(tangent.numpy() * numpy.cos(ctx.saved_tensors[0].numpy()))


def declared_sine(name: str) -> Any:
    @opsmith.operator(name, opaque=True)
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(numpy.sin(x.detach().numpy()))

    sine.fake(torch.empty_like)
    sine.tangents(result=lambda x, tangent_x: torch.from_numpy(numpy.cos(x.numpy()) * tangent_x.numpy()))
    return sine


@pytest.mark.parametrize("kind", ["adopted", "declared"])
@pytest.mark.parametrize("transform", ["jvp", "jacfwd"])
def test_a_tangent_by_numpy_under_torch_func(name: str, kind: str, transform: str) -> None:
    operator = opsmith.adopt(NumpySine, name) if kind == "adopted" else declared_sine(name)
    run = {
        "jvp": lambda: torch.func.jvp(operator, (ONES,), (ONES,)),
        "jacfwd": lambda: torch.func.jacfwd(operator)(torch.ones(3)),
    }[transform]
    said = refused(errors.ForwardModeError, run)
    assert said.startswith(f"{name}: its tangent reads tensor memory, as NumPy does")
    assert said.endswith("hint: write the tangent with torch operations, or use `torch.autograd.forward_ad`")
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(operator(forward_ad.make_dual(ONES, ONES))).tangent
    torch.testing.assert_close(tangent, ONES.cos())


def test_a_tangent_with_torch_operations_follows_the_other_hint(name: str) -> None:
    sine = declared_sine(name)
    sine.tangents(result=lambda x, tangent_x: x.cos() * tangent_x)
    found = torch.func.jvp(sine, (ONES,), (ONES,))
    torch.testing.assert_close(found, (ONES.sin(), ONES.cos()))


def of(returned: Any, annotation: Any = Tensor) -> Any:
    def reference(x: Tensor) -> Any:
        return returned(x)

    reference.__annotations__["return"] = annotation
    return reference


MAY_BE_NONE = "return the result; annotate it as `Tensor | None` if it may be None"
REFERENCES = {
    "tuple": (lambda x: (x * 1, x * 2), "annotate `-> tuple[Tensor, Tensor]`, or return one tensor"),
    "three": (lambda x: (x, x, x), "annotate `-> tuple[Tensor, Tensor, Tensor]`, or return one tensor"),
    "list": (lambda x: [x * 1, x * 2], "annotate `-> list[Tensor]`, or return one tensor"),
    "tuple-of-one": (lambda x: (x * 1,), "return the tensor itself"),
    "number": (lambda x: 3.0, "convert it, for example with `torch.as_tensor(...)`"),
    "forgotten": (lambda x: None, MAY_BE_NONE),
}


@pytest.mark.parametrize("given", REFERENCES)
def test_what_a_reference_returns_for_one_tensor(name: str, given: str) -> None:
    returned, hint = REFERENCES[given]
    said = refused(errors.ResultTypeError, lambda: opsmith.operator(name)(of(returned))(ONES))
    assert f"  hint: {hint}" in said
    followed = {
        "tuple": of(returned, tuple[Tensor, Tensor]),
        "list": of(returned, list[Tensor]),
        "number": of(lambda x: torch.as_tensor(returned(x))),
        "forgotten": of(returned, Tensor | None),
    }
    found = opsmith.operator(name)(followed.get(given, of(lambda x: x * 1)))(ONES)
    expected = {"number": torch.tensor(3.0), "three": ONES, "tuple-of-one": ONES}
    torch.testing.assert_close(found, expected.get(given, returned(ONES)))


@pytest.mark.parametrize(
    ("annotation", "returned", "hint"),
    [
        pytest.param(Tensor, lambda x: None, "return the result", id="forgotten"),
        pytest.param(Tensor, lambda x: [x * 2], "return the tensor itself", id="list"),
        pytest.param(Tensor, lambda x: (x * 2, x * 3), "return one tensor", id="tuple"),
        pytest.param(list[Tensor], lambda x: None, "return the result", id="forgotten-list"),
        pytest.param(
            list[Tensor],
            lambda x: [x * 2, None],
            "put a tensor there, or leave it out of the list",
            id="item",
        ),
        pytest.param(tuple[Tensor, Tensor], lambda x: None, "return the results", id="forgotten-tuple"),
        pytest.param(tuple[Tensor, Tensor], lambda x: (x * 2,), "return the declared results", id="too-few"),
    ],
)
@pytest.mark.parametrize("aspect", ["kernel", "fake"])
def test_what_a_kernel_returns_is_never_annotated(
    name: str, aspect: str, annotation: Any, returned: Any, hint: str
) -> None:
    right = {Tensor: lambda x: x * 2, list[Tensor]: lambda x: [x * 2]}
    reference = of(right.get(annotation, lambda x: (x * 2, x * 3)), annotation)
    operator = opsmith.operator(name)(reference)
    attach = operator.fake if aspect == "fake" else partial(operator.kernel, "cpu")
    attach(returned)
    x = ONES.to("meta") if aspect == "fake" else ONES
    said = refused(errors.OpsmithError, lambda: operator(x))
    assert said.endswith(f"  hint: {hint}")
    attach(reference)
    torch.testing.assert_close(operator(x), reference(x))


def test_a_reference_without_return_that_has_several_results(name: str) -> None:
    wrong = of(lambda x: None, tuple[Tensor, Tensor])
    said = refused(errors.ResultCountError, lambda: opsmith.operator(name)(wrong)(ONES))
    assert said.endswith("  hint: return the results")
    first, second = opsmith.operator(name)(of(lambda x: (x * 1, x * 2), tuple[Tensor, Tensor]))(ONES)
    assert (first.mean().item(), second.mean().item()) == (1.0, 2.0)
