"""Operators that others registered: what they lack before they are adopted, and what they have afterwards."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.func as F
from faults_of_torch import marked
from foreign_operators import (
    Foreign,
    at_autograd_of_the_cpu,
    custom,
    custom_with_everything,
    defined,
    everywhere,
    numpy_sine,
    of_many_arguments,
    on_the_cpu,
    sine,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.checking.effort import EFFORTS
from opsmith.checking.subject_kinds import subject_of
from opsmith.torch_library import capabilities

x = torch.tensor([[0.5, -1.0, 2.0], [0.25, 3.0, -0.75]], dtype=torch.float64)
Subject = Callable[..., Tensor]

LACKING = {"custom": custom, "on-the-cpu": on_the_cpu, "everywhere": everywhere}
DIFFERENTIATING = {"custom": custom_with_everything, "at-autograd-of-the-cpu": at_autograd_of_the_cpu}
EVERY = {**LACKING, **{f"{name}-with-gradient": make for name, make in DIFFERENTIATING.items()}}


def adopted(made: Foreign, **given: Any) -> opsmith.Operator[..., Any]:
    return opsmith.adopt(made.operator, reference=made.reference, **given)


def quietly(function: Callable[[], Any]) -> Any:
    """Silence torch's warnings that nothing is registered, or slow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def dual(f: Subject) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent


def backward(f: Subject) -> Tensor | None:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(leaf).sum(), leaf, allow_unused=True)
    return found


TRANSFORMS: dict[str, Callable[[Subject], Any]] = {
    "values": lambda f: f(x),
    "backward": backward,
    "func-grad": lambda f: F.grad(lambda x: f(x, 0.5).sum())(x),
    "vmap": lambda f: F.vmap(f, in_dims=1, out_dims=1)(x),
    "jvp": lambda f: F.jvp(f, (x,), (x.cos(),)),
    "dual": dual,
    "jacrev": lambda f: F.jacrev(f)(x),
    "jacfwd": lambda f: F.jacfwd(f)(x),
    "hessian": lambda f: F.hessian(lambda x: f(x).sum())(x),
    "vmap-of-grad": lambda f: F.vmap(F.grad(lambda row: f(row).sum()))(x),
    "grad-of-vmap": lambda f: F.grad(lambda x: F.vmap(f)(x).prod())(x),
    "functionalize": lambda f: F.functionalize(f)(x),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", EVERY)
def test_every_transform(kind: str, transform: str) -> None:
    """Calls that others make of it, past the handle, gain as much."""
    made = EVERY[kind]()
    handle = adopted(made)
    expected = TRANSFORMS[transform](made.reference)
    assert_close(TRANSFORMS[transform](handle), expected)
    assert_close(TRANSFORMS[transform](made.operator), expected)


@pytest.mark.parametrize("kind", LACKING)
def test_what_it_lacked(kind: str) -> None:
    """Before: a tangent of zero, gradients that are zero, none or an error, no fake kernel."""
    made = LACKING[kind]()
    operator = made.operator
    _, tangent = quietly(lambda: F.jvp(operator, (x,), (x,)))
    assert tangent.tolist() == torch.zeros_like(x).tolist(), "torch has become honest: fix the documents"
    if kind == "custom":
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            backward(operator)
    else:
        assert quietly(lambda: backward(operator)) is None
        assert quietly(lambda: TRANSFORMS["func-grad"](operator)).eq(0).all()
    with pytest.raises((RuntimeError, TypeError)):
        operator(x.to("meta"))
    handle = adopted(made)
    assert_close(F.jvp(operator, (x,), (x,)), F.jvp(sine, (x,), (x,)))
    assert_close(backward(operator), backward(sine))
    assert operator(x.to("meta")).shape == x.shape
    explained = handle.explain(x)
    assert explained.forward == "the operator's own kernel"
    assert explained.gradients == {"x": "derived: the reference, run again"}


@pytest.mark.parametrize("kind", EVERY)
def test_second_order(kind: str) -> None:
    made = EVERY[kind]()
    leaf = x.clone().requires_grad_()
    for function in (adopted(made), made.operator):
        assert torch.autograd.gradcheck(function, (leaf,))
        assert torch.autograd.gradgradcheck(function, (leaf,))


@pytest.mark.parametrize("kind", DIFFERENTIATING)
def test_its_own_gradient_and_fake_kernel_are_kept(kind: str) -> None:
    made = DIFFERENTIATING[kind]()
    handle = adopted(made)
    assert_close(backward(handle), backward(sine))
    assert made.ran.count("backward") == 1
    assert handle(x.to("meta")).shape == x.shape
    assert "fake" in made.ran
    explained = handle.explain(x.clone().requires_grad_())
    assert explained.gradients["x"].startswith("the operator's own autograd")
    assert str(explained).endswith("saved for the backward: the tensors that its own autograd saves")


def test_its_own_rule_for_vmap_is_kept() -> None:
    made = custom_with_everything()
    handle = adopted(made)
    assert_close(F.vmap(handle)(x), sine(x))
    assert made.ran.count("vmap") == 1
    assert_close(F.grad(lambda x: F.vmap(handle)(x).sum())(x), F.grad(lambda x: sine(x).sum())(x))
    assert made.ran.count("vmap") == 2


def test_autocast() -> None:
    """Its own rule, which goes to float64, is kept; without one, what it is given is promoted."""
    kept, added = custom_with_everything(), of_many_arguments()
    single, half = x.float(), torch.ones(3, dtype=torch.float16)
    handle, many = adopted(kept), adopted(added)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert handle(single).dtype is torch.float64
        assert F.grad(lambda x: handle(x).sum().float())(single).dtype is torch.float32
        product, _ = many(single, half, [])
        gradient = F.grad(lambda w: many(single, w, [])[0].sum())(half)
    assert product.dtype is torch.float32
    assert gradient.dtype is torch.float16
    assert_close(gradient.float(), (2 * single).sum(0), rtol=1e-3, atol=1e-3)


def test_formulas_take_the_place_of_what_is_derived_and_of_its_own() -> None:
    for kind, make in EVERY.items():
        made = make()
        handle = adopted(made)
        handle.gradients(x=lambda grad, x, by: 7 * grad * by * (x * by).cos())
        for transform in ("backward", "func-grad", "vmap-of-grad"):
            expected = TRANSFORMS[transform](sine)
            assert_close(TRANSFORMS[transform](made.operator), 7 * expected, msg=f"{kind}, {transform}")
        assert "backward" not in made.ran
        assert handle.explain(x).gradients["x"].startswith("formula, ")


MANY = {
    "weight": (True, 2, {}),
    "no-weight": (False, 1, {"by": 0.5}),
    "empty-list": (True, 0, {"k": 4}),
    "pair": (False, 2, {"by": 0.5, "k": (1, 2)}),
}


@pytest.mark.parametrize("case", MANY)
def test_many_arguments_and_results(case: str) -> None:
    """Arguments are matched by position, and those after `*` by name; torch's defaults are in force."""
    weight, count, given = MANY[case]
    made = of_many_arguments()
    handle = adopted(made)
    leaves = [(x * i).requires_grad_() for i in range(1, 2 + weight + count)]

    def call(function: Callable[..., Any], **filled: Any) -> Callable[..., Any]:
        def f(first: Tensor, *rest: Tensor) -> Any:
            others = list(rest[weight:])
            return function(first, rest[0] if weight else None, others, **filled)

        return f

    k = given.get("k", 3)
    full = {"by": given.get("by", 2.0), "k": k if isinstance(k, tuple) else (k, k)}
    mine, theirs = call(handle, **given), call(made.reference, **full)
    assert_close(mine(*leaves), theirs(*leaves))
    assert torch.autograd.gradcheck(mine, leaves)
    assert torch.autograd.gradgradcheck(mine, leaves)
    values = tuple(leaf.detach() for leaf in leaves)
    assert_close(F.jvp(mine, values, values), F.jvp(theirs, values, values))
    assert_close(F.vmap(mine)(*values), F.vmap(theirs)(*values))
    every = tuple(range(len(values)))
    assert_close(F.jacrev(mine, argnums=every)(*values), F.jacrev(theirs, argnums=every)(*values))


def test_a_reference_needs_no_type_hints() -> None:
    """The schema of the operator says all of the types; hints that are there count."""

    def kernel(x: Tensor, others: list[Tensor], k: list[int], by: float = 2.0) -> tuple[Tensor, Tensor]:
        return x.detach().clone() * by, torch.stack(others).sum(0) * k[0]

    def without_hints(y, others, k, factor=2, *, mode):  # type: ignore[no-untyped-def]
        return y * factor, torch.stack(others).sum(0) * k[0]

    def with_some(y: Tensor, others, k: tuple[int, int], *, mode, by=2.0):  # type: ignore[no-untyped-def]
        assert isinstance(k, tuple)
        return y * by, torch.stack(others).sum(0) * k[0]

    head = "(Tensor x, Tensor[] others, int[2] k"
    schema = f'{head}, float by=2.0, *, str mode="up") -> (Tensor, Tensor)'
    handle = opsmith.adopt(defined(schema, kernel)[0], reference=without_hints)
    assert str(handle).endswith(f"{schema}>".replace("int[2]", "SymInt[2]"))
    leaf = x.clone().requires_grad_()
    one, other = handle(leaf, [leaf, leaf], [3, 4])
    assert_close(torch.autograd.grad((one + other).sum(), leaf)[0], torch.full_like(x, 8.0))
    schema = f'{head}, *, str mode="up", float by=2.0) -> (Tensor, Tensor)'
    handle = opsmith.adopt(defined(schema, kernel)[0], reference=with_some)
    assert F.grad(lambda x: handle(x, [x], (3, 3))[1].sum())(x).unique().tolist() == [3.0]
    with pytest.raises(errors.ArgumentError, match="`others` has the wrong type"):
        handle(leaf, leaf, [3, 4])


def test_names_that_formulas_use_are_no_obstacle() -> None:
    """The backward of somebody's operator takes a `grad`: its result is then called something else."""

    def kernel(grad: Tensor, result: Tensor) -> Tensor:
        return grad.detach() * result.detach()

    def reference(g: Tensor, y: Tensor) -> Tensor:
        return g * y

    operator, _ = defined("(Tensor grad, Tensor result) -> Tensor", kernel)
    handle = opsmith.adopt(operator, reference=reference)
    handle.gradients(
        grad=lambda grad_out, result: 3 * grad_out * result, result=lambda grad_out, grad: 3 * grad_out * grad
    )
    first, second = F.grad(lambda *xy: handle(*xy).sum(), argnums=(0, 1))(x, x + 1)
    assert_close(first, 3 * (x + 1))
    assert_close(second, 3 * x)


def test_literals_and_numbers() -> None:
    """A reference may take some of the strings, and say more exactly what a `Scalar` is."""

    def kernel(x: Tensor, mode: str = "up", by: float = 2) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * by * (1 if mode == "up" else -1))

    def reference(x: Tensor, mode: Literal["up", "down"], by: int | float) -> Tensor:
        return x * by * {"up": 1, "down": -1}[mode]

    operator, _ = defined('(Tensor x, str mode="up", Scalar by=2) -> Tensor', kernel)
    handle = opsmith.adopt(operator, reference=reference)
    leaf = x.clone().requires_grad_()
    assert_close(torch.autograd.grad(handle(leaf, "down", 3).sum(), leaf)[0], torch.full_like(x, -3.0))
    assert_close(torch.autograd.grad(operator(leaf).sum(), leaf)[0], torch.full_like(x, 2.0))
    with pytest.raises(errors.ArgumentError, match="`mode` has the wrong type"):
        handle(leaf, "sideways")


def test_adopting_again_replaces_and_stacks_nothing() -> None:
    made = custom()
    handle = adopted(made)
    handle.gradients(x=lambda grad: grad * 0)
    assert backward(handle) is not None

    def other(x: Tensor, by: float = 2.0) -> Tensor:
        return (by * x).sin()

    for _ in range(3):
        again = opsmith.adopt(made.operator, reference=other)
        assert again is handle
        assert handle.reference is other
        assert_close(backward(handle), backward(sine))
    own = handle.specification.origin.own
    assert not any(map(own, ("gradient", "fake", "vmap"))), "what opsmith added is its own"


def test_adopting_again_takes_nothing_back_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that calls the operator finds in it, at each moment, what it lacked."""
    made = custom()
    handle = adopted(made)
    own, overload = handle.specification.origin, made.operator._opoverload

    def destroyed(library: Any) -> None:
        raise AssertionError("the operator was taken out of the dispatcher")

    with monkeypatch.context() as patched:
        patched.setattr(capabilities, "destroy", destroyed)
        adopted(made)
    assert handle.specification.origin is own

    def by_three(x: Tensor, by: float = 2.0) -> Tensor:
        return by * x

    with monkeypatch.context() as patched:
        patched.setattr(capabilities, "destroy", destroyed)
        opsmith.adopt(overload, reference=by_three)
    assert_close(backward(handle), torch.full_like(x, 2.0))
    assert handle.reference is by_three


def test_a_check_watches_what_its_own_function_keeps() -> None:
    handle = adopted(custom())
    subject = subject_of(handle, [(x,)], 0, EFFORTS["quick"])
    assert subject.kind.has_reference
    assert {numpy_sine, sine} <= set(subject.functions)


def test_what_is_registered_between_two_adoptions_is_seen() -> None:
    made = custom()
    handle = adopted(made)
    made.operator.register_autograd(lambda ctx, grad: (made.ran.append("backward") or grad * 5, None))
    assert_close(backward(handle), backward(sine))
    adopted(made)
    assert_close(backward(handle), torch.full_like(x, 5.0))
    assert made.ran == ["backward"]


def test_pickle_and_lookup_by_name() -> None:
    handle = adopted(custom())
    assert handle.specification.module == __name__
    assert handle in opsmith.declared_operators(__name__)
    assert pickle.loads(pickle.dumps(handle)) is handle


def samples(make: opsmith.Make) -> Any:
    yield make(3, 2), 0.5
    yield (make(4),)


@pytest.mark.slow
def test_check_passes() -> None:
    handle = adopted(on_the_cpu(), samples=samples)
    report = opsmith.check(handle, skip=["integration"])
    assert report.passed_as_asked, report
    assert any("bfloat16 was left out" in note for outcome in report.outcomes for note in outcome.notes)


def test_check_finds_a_kernel_that_fails_in_a_narrow_dtype() -> None:
    """A dtype for which there is no code is left out; one in which the code fails is not."""

    def kernel(x: Tensor, by: float = 2.0) -> Tensor:
        if x.dtype is torch.bfloat16:
            raise NotImplementedError("\"sine\" not implemented for 'BFloat16'")
        if x.dtype is torch.float16:
            raise RuntimeError("out of cheese")
        return numpy_sine(x, by)

    operator, _ = defined("(Tensor x, float by=2.) -> Tensor", kernel)
    handle = opsmith.adopt(operator, reference=sine, samples=samples)
    report = opsmith.check(handle, only=["forward"])
    failure = next(each for each in report.failures if "cheese" in each.message)
    assert (failure.cause, failure.message) == ("raises", "RuntimeError: out of cheese")
    assert "in float16 on cpu" in failure.evidence["sample"]
    assert [note for note in report.outcomes[0].notes if "left out" in note] == [
        "bfloat16 was left out on cpu: the operator's own kernel does not run in this dtype: "
        "\"sine\" not implemented for 'BFloat16'"
    ]


def wrong_kernel(x: Tensor, by: float = 2.0) -> Tensor:
    return numpy_sine(x, by) + (x.detach() > 2)


def test_check_finds_a_wrong_kernel() -> None:
    operator, _ = defined("(Tensor x, float by=2.) -> Tensor", wrong_kernel)
    handle = opsmith.adopt(operator, reference=sine, samples=lambda make: [(make(64) * 3,)])
    report = opsmith.check(handle, only=["forward"])
    assert [failure.property for failure in report.failures] == ["forward"]
    assert "from the operator is wrong" in report.failures[0].message


def test_check_finds_a_wrong_gradient_of_its_own() -> None:
    made = custom()
    made.operator.register_autograd(lambda ctx, grad: (grad, None))
    report = opsmith.check(adopted(made, samples=samples), only=["gradient"])
    assert {failure.property for failure in report.failures} == {"gradient"}


def test_check_finds_a_wrong_fake_kernel_of_its_own() -> None:
    made = custom()
    made.operator.register_fake(lambda x, by=2.0: x.new_empty(7))
    report = opsmith.check(adopted(made, samples=samples), only=["fake"])
    assert {(failure.cause, failure.where) for failure in report.failures} == {
        ("fake-mismatch", "its own fake kernel")
    }


def test_a_kernel_that_writes_or_returns_its_input_is_found_where_it_is_differentiated() -> None:
    def writing(x: Tensor, by: float = 2.0) -> Tensor:
        x.mul_(by)
        return x.sin()

    leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for kernel, kind in ((writing, errors.MutationError), (lambda x, by=2.0: x, errors.AliasError)):
        operator, _ = defined("(Tensor x, float by=2.) -> Tensor", kernel)
        opsmith.adopt(operator, reference=sine)
        with pytest.raises(kind):
            operator(leaf * 1)


def test_floating_point_operations_are_counted() -> None:
    def reference(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    operator, _ = defined(
        "(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.from_numpy(x.numpy() @ y.numpy())
    )
    opsmith.adopt(operator, reference=reference)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        operator(torch.ones(2, 3), torch.ones(3, 4))
    assert counter.get_total_flops() == 2 * 2 * 3 * 4


@pytest.mark.every(5)
@pytest.mark.compile
@pytest.mark.parametrize("make", [on_the_cpu, custom_with_everything])
def test_compiled(make: Callable[[], Foreign]) -> None:
    """One graph: its own kernel stays whole, and its gradient is its own, or derived."""
    made = make()
    handle = adopted(made)
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(lambda x: handle(x.exp(), 0.5) * 2, fullgraph=True)
    result = compiled(leaf)
    assert_close(result, sine(x.exp(), 0.5) * 2)
    (gradient,) = torch.autograd.grad(result.sum(), leaf)
    assert_close(gradient, F.grad(lambda x: (sine(x.exp(), 0.5) * 2).sum())(x))
    assert ("backward" in made.ran) == (make is custom_with_everything)


@pytest.mark.parametrize("case", marked(["custom_op_defined_again"]))
def test_a_custom_op_that_is_defined_again(case: str) -> None:
    """As a notebook does: the new definition loses what was added to the old one, until it is adopted too."""

    def define(factor: float) -> Any:
        @torch.library.custom_op("elsewhere::again", mutates_args=())
        def again(x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * factor)

        return again

    def by(factor: float) -> Callable[[Tensor], Tensor]:
        def reference(x: Tensor) -> Tensor:
            return x * factor

        return reference

    handle = opsmith.adopt(define(2.0), reference=by(2.0))
    assert_close(backward(handle), torch.full_like(x, 2.0))
    anew = define(3.0)
    assert opsmith.adopt(anew, reference=by(3.0)) is handle
    for function in (handle, anew, torch.ops.elsewhere.again):
        for transform in TRANSFORMS.keys() - {"func-grad"}:
            assert_close(TRANSFORMS[transform](function), TRANSFORMS[transform](by(3.0)))


KEPT: list[torch.library.Library] = []
"""torch 2.11 looks at every name in `torch.ops` when it exports, and fails at one that lost its overloads."""


def test_one_overload_of_several() -> None:
    """It alone gains; the others stay as they were."""
    library = torch.library.Library("elsewhere", "FRAGMENT")
    KEPT.append(library)
    library.define("overloaded(Tensor x) -> Tensor")
    library.define("overloaded.by(Tensor x, float by) -> Tensor")
    library.impl("overloaded", numpy_sine, "CPU")
    library.impl("overloaded.by", numpy_sine, "CPU")
    packet = torch.ops.elsewhere.overloaded
    handle = opsmith.adopt(packet.by, reference=sine)
    assert handle.name == "elsewhere::overloaded.by"
    f = lambda x, by=2.0: packet(x, by)
    for transform in TRANSFORMS:
        assert_close(TRANSFORMS[transform](f), TRANSFORMS[transform](sine))
    assert quietly(lambda: backward(packet)) is None
    assert f(x.to("meta")).shape == x.shape
    assert pickle.loads(pickle.dumps(handle)) is handle


ADOPTING = """
import torch, opsmith

@torch.library.custom_op("adopting_file::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 2

opsmith.adopt(doubled, reference=plain, samples=lambda make: [(make(3),)])
"""


def test_the_command_finds_what_a_module_adopts(tmp_path: Path) -> None:
    from opsmith.targets import Target

    file = tmp_path / "adopting_file.py"
    file.write_text(ADOPTING)
    (handle,) = Target.of(str(file)).operators()
    assert handle.name == "adopting_file::doubled"
    assert opsmith.check(handle, only=["forward", "gradient"]).passed_as_asked
