"""A class that marks arguments as dirty is adopted in place: it writes into the caller's tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.core import adopted


class Doubles(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class Sigmoid(Function):
    """It saves its result, and its `jvp` writes into the tangent, as torch wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return tangent.mul_(y * (1 - y))


class Squares(Function):
    """It keeps the value from before, of which a second order needs the history."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0]


class BySetup(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, by: float) -> Tensor:
        return x.mul_(by)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.by = inputs
        ctx.mark_dirty(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.by * grad, None


class WithSign(Function):
    """Two results, one of which is the input and the other a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        sign = x.sign()
        ctx.mark_dirty(x.abs_())
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return sign, x

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class WithTotal(Function):
    """Two results with gradients, of which any may be missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        x.mul_(3)
        return x.sum(), x

    @staticmethod
    def backward(ctx: Any, total: Tensor | None, grad: Tensor | None) -> Any:
        whole = 0 if total is None else 3 * total.expand(ctx.shape)
        return whole + (0 if grad is None else 3 * grad)


class WritesTwo(Function):
    """Two inputs are written, and returned in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by: float = 3.0) -> Any:
        ctx.by = by
        ctx.mark_dirty(x, y)
        y.mul_(by)
        x.add_(y)
        return y, x

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_x: Tensor) -> Any:
        return grad_x, ctx.by * (grad_x + grad_y), None


class WritesSecond(Function):
    """The second argument is written; it is saved as it is after the write."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(scale, x.clone())
        ctx.mark_dirty(x)
        return x.mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale, x = ctx.saved_tensors
        return (grad * x).sum(0), grad * scale


class Marks(Function):
    """It marks, and writes nothing: the version rises all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 5 * grad


class Clips(Function):
    """It writes where a flag says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool = False) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            y = x.relu_()
        else:
            y = x.relu()
        ctx.save_for_backward(y > 0)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Wholes(Function):
    """It marks a tensor of whole numbers as a constant, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor) -> Any:
        ctx.mark_dirty(counts)
        ctx.mark_non_differentiable(counts)
        counts.add_(1)
        return x * 2, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return 2 * grad, None


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A class, its arguments, the positions of those that it writes, and the function that it computes."""

    cls: type[Function]
    make: Callable[[], tuple[Any, ...]]
    written: tuple[int, ...]
    truth: Callable[..., Any]

    @property
    def operator(self) -> opsmith.Operator[..., Any]:
        name = self.cls.__name__.lower()
        return opsmith.adopt(self.cls, f"dirty::{name}_{len(self.make())}_{self.make()[-1] is True}".lower())


def one() -> tuple[Any, ...]:
    return (numbers(3, 4),)


CASES = {
    "doubles": Case(Doubles, one, (0,), lambda x: 2 * x),
    "sigmoid": Case(Sigmoid, one, (0,), torch.sigmoid),
    "squares": Case(Squares, one, (0,), torch.square),
    "by_setup": Case(BySetup, lambda: (numbers(3, 4), 1.5), (0,), torch.mul),
    "with_sign": Case(WithSign, one, (0,), lambda x: (x.sign().detach(), x.abs())),
    "with_total": Case(WithTotal, one, (0,), lambda x: (3 * x.sum(), 3 * x)),
    "writes_two": Case(
        WritesTwo,
        lambda: (numbers(3, 4), numbers(3, 4, seed=1)),
        (0, 1),
        lambda x, y: (3 * y, x + 3 * y),
    ),
    "writes_second": Case(
        WritesSecond, lambda: (numbers(4, seed=1), numbers(3, 4)), (1,), lambda scale, x: scale * x
    ),
    "marks": Case(Marks, one, (0,), lambda x: x + 4 * (x - x.detach())),
    "clips": Case(Clips, lambda: (numbers(3, 4), True), (0,), lambda x, _: x.clamp(0)),
    "clips_not": Case(Clips, lambda: (numbers(3, 4), False), (), lambda x, _: x.clamp(0)),
    "wholes": Case(
        Wholes, lambda: (numbers(3, 4), torch.arange(3)), (1,), lambda x, counts: (2 * x, counts + 1)
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
true_derivative = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in CASES.items() if name not in ("marks", "wholes")]
)


def transposed(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT if value.dim() > 1 else value.clone()


def at_an_offset(value: Tensor) -> Tensor:
    return torch.cat([value.new_ones((1, *value.shape[1:])), value])[1:]


def of_every_second(value: Tensor) -> Tensor:
    return torch.stack([value, value], -1)[..., 1]


LAYOUTS = {
    "contiguous": torch.clone,
    "transposed": transposed,
    "at_an_offset": at_an_offset,
    "of_every_second": of_every_second,
}


def results_of(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


@dataclass
class Observed:
    """All that a caller can see of one call."""

    arguments: list[Any]
    results: list[Tensor]
    same: list[list[bool]]
    rose: list[bool]
    requires: list[bool]
    same_node: list[bool]
    gradients: list[Tensor]
    bases: list[Tensor]


def observed(call: Any, case: Case, layout: str, mode: str) -> Observed:
    """One call, on tensors that are computed from leaves."""
    recorded = mode == "recorded"
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
    with context():
        leaves = [
            value.requires_grad_(recorded)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for value in case.make()
        ]
        given = [LAYOUTS[layout](value) if isinstance(value, Tensor) else value for value in leaves]
        versions = [0 if mode == "inference" else each._version for each in given if isinstance(each, Tensor)]
        results = results_of(call(*given))
        tensors = [each for each in given if isinstance(each, Tensor)]
        rose = [
            mode == "inference" or each._version > before
            for each, before in zip(tensors, versions, strict=True)
        ]
        asking = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        ends = [each for each in (*results, *tensors) if each.requires_grad]
        total = sum(((each * torch.linspace(1, 2, 4)).sum() for each in ends), torch.zeros(()))
        gradients = torch.autograd.grad(total, asking, allow_unused=True) if ends else ()
        return Observed(
            [each.detach().clone() if isinstance(each, Tensor) else each for each in given],
            [each.detach().clone() for each in results],
            [[result is each for each in given] for result in results],
            rose,
            [each.requires_grad for each in (*results, *tensors)],
            [results[-1].grad_fn is each.grad_fn for each in tensors],
            list(gradients),
            [each._base.detach().clone() for each in tensors if each._base is not None],
        )


WRONG_IN_VIEWS = [
    CASES[name] for name in ("with_sign", "with_total", "writes_two", "writes_second", "wholes")
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("case", "layout", "mode"),
    [
        pytest.param(case, layout, mode, id=f"{name}-{layout}-{mode}")
        for name, case in CASES.items()
        for layout in LAYOUTS
        for mode in ("recorded", "plain", "no_grad", "inference")
        if not (mode == "recorded" and layout != "contiguous" and case in WRONG_IN_VIEWS)
    ],
)
def test_as_apply(case: Case, layout: str, mode: str) -> None:
    operator = case.operator
    expected = observed(case.cls.apply, case, layout, mode)
    for _ in range(3):
        found = observed(operator, case, layout, mode)
        assert found.same == expected.same
        assert found.rose == expected.rose
        assert found.requires == expected.requires
        assert found.same_node == expected.same_node
        for field in ("arguments", "results", "gradients", "bases"):
            assert_close(getattr(found, field), getattr(expected, field), msg=field)


@pytest.mark.parametrize("case", WRONG_IN_VIEWS, ids=lambda case: case.cls.__name__)
def test_writes_into_views_are_right_where_apply_refuses_or_is_wrong(case: Case) -> None:
    """Torch allows one result, and loses gradients unless the view is the first tensor."""
    if case.cls is WritesSecond:
        wrong = observed(case.cls.apply, case, "at_an_offset", "recorded").gradients
        assert not torch.allclose(
            wrong[0], observed(case.cls.apply, case, "contiguous", "recorded").gradients[0]
        )
    elif case.cls is not Wholes:
        with pytest.raises(RuntimeError, match="cannot return more than one Tensor"):
            observed(case.cls.apply, case, "at_an_offset", "recorded")
    found = observed(case.operator, case, "at_an_offset", "recorded")
    expected = observed(case.operator, case, "contiguous", "recorded")
    for field in ("arguments", "results", "gradients", "same"):
        assert_close(getattr(found, field), getattr(expected, field))


@every_case
def test_the_schema_says_what_is_written(case: Case) -> None:
    operator = case.operator
    operator(*case.make())
    names = {"x": "Tensor(a!) x", "y": "Tensor(b!) y", "counts": "Tensor(a!) counts"}
    if case.written:
        written = [operator.specification.schema.names[at] for at in case.written]
        assert all(names[name] in str(operator) for name in written)
        assert [f"`{name}` is written in place: forward marks it as dirty" for name in written] == [
            note for note in operator.explain(*case.make()).notes if "in place" in note
        ]


class ReturnsTwice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, x

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        return 2 * one + 2 * other


def test_an_argument_that_is_returned_twice_is_a_copy_then() -> None:
    """Under `apply` the gradient of the first result is lost."""
    operator, leaf = opsmith.adopt(ReturnsTwice, "dirty::twice"), numbers(3).requires_grad_()
    for _ in range(2):
        x = leaf * 1
        one, other = operator(x)
        assert one is x
        assert other is not x
        assert_close(other, one)
        total = (3 * one + 5 * other).sum()
        assert_close(torch.autograd.grad(total, leaf)[0], torch.full((3,), 16.0).double())


def test_one_that_returns_its_first_argument_does_so_in_torchs_library() -> None:
    operator, x = opsmith.adopt(Doubles, "dirty::in_torch"), numbers(3)
    assert str(operator) == "<opsmith operator dirty::in_torch(Tensor(a!) x) -> Tensor(a!)>"
    given = x.clone()
    assert torch.ops.dirty.in_torch(given) is given
    assert_close(given, 2 * x)


LEAF = "a leaf Variable that requires grad"
REFUSED: dict[str, tuple[Callable[[], Tensor], str, str]] = {
    "leaf": (lambda: numbers(3).requires_grad_(), LEAF, "is a leaf that requires a gradient"),
    "view of a leaf": (
        lambda: numbers(3).requires_grad_()[:2],
        "a view of a leaf",
        "is a view of a leaf that requires a gradient",
    ),
    "expanded": (lambda: numbers(1).expand(3), "single memory location", "several elements of `x` are one"),
    "made in inference mode": (
        torch.inference_mode()(lambda: numbers(3)),
        "Inplace update to inference tensor",
        "was made in inference mode",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
@pytest.mark.parametrize("again", [False, True], ids=["first call", "later call"])
def test_refused_as_by_apply_and_before_the_write(which: str, again: bool) -> None:
    make, torchs, ours = REFUSED[which]
    operator = opsmith.adopt(Doubles, f"dirty::refuses_{which.replace(' ', '_')}_{again}")
    if again:
        operator(numbers(3))
    with pytest.raises(RuntimeError, match=torchs):
        Doubles.apply(make())
    given = make()
    before = given.detach().clone()
    with pytest.raises(errors.MutationError, match=ours):
        operator(given)
    assert_close(given.detach(), before)


@pytest.mark.parametrize("which", REFUSED)
@pytest.mark.parametrize("earlier", ["none", "writing", "functional"])
def test_a_call_whose_flags_mark_nothing_takes_what_cannot_be_written(which: str, earlier: str) -> None:
    make, _, ours = REFUSED[which]
    operator = opsmith.adopt(Clips, f"dirty::takes_{which.replace(' ', '_')}_{earlier}")
    if earlier != "none":
        (operator if earlier == "writing" else operator.functional)(numbers(3), earlier == "writing")
    for _ in range(3):
        given = make()
        result = operator(given, False)
        assert_close(result.detach(), given.detach().clamp(0))
        assert result is not given
        if given.requires_grad:
            (gradient,) = torch.autograd.grad(result.sum(), given)
            assert_close(gradient, (given > 0).double())
        before = given.detach().clone()
        with pytest.raises(errors.MutationError, match=ours):
            operator(given, True)
        assert_close(given.detach(), before)


def test_gradcheck_as_the_first_call_where_flags_mark_nothing() -> None:
    operator = opsmith.adopt(Clips, "dirty::gradcheck_first")
    assert torch.autograd.gradcheck(operator, numbers(3).requires_grad_())


def test_a_flag_that_leaves_the_mark_out_and_not_the_write_does_not_take_a_leaf() -> None:
    operator = opsmith.adopt(UnmarkedWhere, "dirty::unmarked_leaf")
    for _ in range(2):
        with pytest.raises(errors.MutationError, match="is a leaf that requires a gradient"):
            operator(numbers(3).requires_grad_(), False)


def test_what_forward_raises_on_a_leaf_is_raised() -> None:
    class Raises(Clips):
        @staticmethod
        def forward(ctx: Any, x: Tensor, inplace: bool = False) -> Tensor:
            if not inplace:
                raise ValueError("it must be in place")
            ctx.mark_dirty(x)
            return x.relu_()

    operator = opsmith.adopt(Raises, "dirty::raises_on_a_leaf")
    with pytest.raises(ValueError, match="it must be in place"):
        operator(numbers(3).requires_grad_())


def test_a_leaf_is_written_without_grad_mode() -> None:
    operator, x = opsmith.adopt(Doubles, "dirty::leaf"), numbers(3)
    for _ in range(2):
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.no_grad():
            found, expected = operator(mine), Doubles.apply(theirs)
        assert (found is mine, found.requires_grad) == (expected is theirs, expected.requires_grad)
        assert_close(mine.detach(), theirs.detach())
        assert found._version == mine._version


def test_a_backward_finds_a_saved_tensor_modified() -> None:
    operator = opsmith.adopt(Doubles, "dirty::modified")
    for call in (Doubles.apply, operator, operator):
        x = numbers(3).requires_grad_() * 1
        kept = x * x
        call(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()


def test_the_history_goes_on_from_the_write() -> None:
    operator = opsmith.adopt(Squares, "dirty::history")
    for call in (Squares.apply, operator, operator):
        leaf = numbers(3).requires_grad_()
        base = leaf * 3
        view = base[:2]
        assert call(view) is view
        (gradient,) = torch.autograd.grad(base.sum(), leaf)
        assert_close(gradient, torch.cat([18 * leaf[:2], torch.full((1,), 3.0)]).double().detach())


@pytest.mark.every(3)
@true_derivative
def test_derivatives_of_the_functional_form_and_of_the_call(case: Case) -> None:
    operator = case.operator
    tensors = [
        at for at, value in enumerate(case.make()) if isinstance(value, Tensor) and value.is_floating_point()
    ]

    def of(function: Any) -> Any:
        def call(*given: Tensor) -> Any:
            arguments = list(case.make())
            for at, value in zip(tensors, given, strict=True):
                arguments[at] = value * 1
            found = results_of(function(*arguments))
            return tuple(each for each in found if each.requires_grad)

        return call

    leaves = [case.make()[at].requires_grad_() for at in tensors]
    for function in (operator, operator.functional):
        assert torch.autograd.gradcheck(of(function), leaves)
        assert torch.autograd.gradgradcheck(of(function), leaves)


@true_derivative
def test_the_functional_form_writes_nothing(case: Case) -> None:
    operator, given = case.operator, case.make()
    operator(*case.make())
    found = operator.functional(*given)
    assert not any("in place" in note for note in operator.functional.explain(*given).notes)
    assert_close(list(results_of(found)), list(results_of(case.truth(*case.make()))))
    assert_close([*given], [*case.make()])


@true_derivative
def test_transforms(case: Case) -> None:
    operator = case.operator
    tensors = [at for at, value in enumerate(case.make()) if isinstance(value, Tensor)]
    rest = case.make()

    def through(function: Any) -> Any:
        def call(*given: Tensor) -> Any:
            arguments = list(rest)
            for at, value in zip(tensors, given, strict=True):
                arguments[at] = value * 1
            results = results_of(function(*arguments))
            return (*results, *(arguments[at] for at in case.written))

        return call

    def truth(*given: Tensor) -> Any:
        arguments = list(rest)
        for at, value in zip(tensors, given, strict=True):
            arguments[at] = value
        results = results_of(case.truth(*arguments))
        written = {"writes_two": lambda: (results[1], results[0])}.get(
            next(name for name, each in CASES.items() if each is case), lambda: results[-1:]
        )
        return (*results, *(written() if case.written else ()))

    given = tuple(rest[at] for at in tensors)
    tangents = tuple(numbers(*each.shape, seed=5) for each in given)
    assert_close(torch.func.jvp(through(operator), given, tangents), torch.func.jvp(truth, given, tangents))
    batch = tuple(torch.stack([each, 2 * each, -each]) for each in given)
    assert_close(torch.vmap(through(operator))(*batch), torch.vmap(truth)(*batch))
    argnums = tuple(range(len(given)))

    def loss(function: Any) -> Any:
        return lambda *given: sum((each**2).sum() for each in function(*given))

    gradients = torch.func.grad(loss(through(operator)), argnums)
    expected = torch.func.grad(loss(truth), argnums)
    assert_close(gradients(*given), expected(*given))
    assert_close(torch.vmap(gradients)(*batch), torch.vmap(expected)(*batch))


def test_what_vmap_maps_is_written_into_what_it_maps() -> None:
    operator, scale = opsmith.adopt(WritesSecond, "dirty::mapped"), numbers(3, 4, seed=1)
    rows = numbers(3, 4)
    given = rows.clone()
    torch.vmap(operator)(scale, given)
    assert_close(given, scale * rows)
    with pytest.raises(errors.TransformError, match="cannot write a value that `vmap` maps into `x`"):
        torch.vmap(operator, in_dims=(0, None))(scale, rows[0].clone())


def test_forward_mode_by_its_own_jvp_writes_into_the_tangent() -> None:
    operator = opsmith.adopt(Sigmoid, "dirty::dual")
    primal, tangent = numbers(3), numbers(3, seed=1)
    for call in (Sigmoid.apply, operator, operator):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(primal.clone(), tangent.clone())
            y = call(x)
            value, moved = forward_ad.unpack_dual(x)
            assert_close(value, primal.sigmoid())
            assert_close(moved, tangent * primal.sigmoid() * (1 - primal.sigmoid()))
            assert_close(forward_ad.unpack_dual(y).tangent, moved)


def test_forward_mode_beside_a_result_that_is_a_constant() -> None:
    operator = opsmith.adopt(WithSign, "dirty::dual_constant")
    primal, tangent = numbers(3), numbers(3, seed=1)
    for _ in range(2):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(primal.clone(), tangent.clone())
            sign, y = operator(x)
            assert y is x
            assert forward_ad.unpack_dual(sign).tangent is None
            assert_close(forward_ad.unpack_dual(x).tangent, tangent * primal.sign())


def test_a_second_order_costs_a_copy_only_where_the_class_keeps_what_it_computed() -> None:
    keeps, saves = opsmith.adopt(Squares, "dirty::keeps"), opsmith.adopt(Sigmoid, "dirty::saves")
    for operator in (keeps, saves):
        operator(numbers(3).requires_grad_() * 1)
    copied = "`x` is copied where a gradient is needed: a second order needs it"
    assert copied in keeps.explain(numbers(3)).notes
    assert copied not in saves.explain(numbers(3)).notes


class KeepsLater(Function):
    times = 0

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        cls.times += 1
        ctx.slope = 2 * x if cls.times > 1 else None
        ctx.mark_dirty(x)
        return x.square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.slope is None else grad * ctx.slope


def test_a_second_order_through_a_value_that_is_gone_is_refused() -> None:
    operator = opsmith.adopt(KeepsLater, "dirty::keeps_later")
    operator(numbers(3).requires_grad_() * 1)
    x = numbers(3).requires_grad_()
    (gradient,) = torch.autograd.grad(operator(x * 1).sum(), x, create_graph=True)
    assert_close(gradient.detach(), 2 * x.detach())
    with pytest.raises(errors.TransformError, match="as before the call, which wrote over it") as raised:
        gradient.sum().backward()
    assert "call it again: later calls keep a copy" in str(raised.value)


class OnceInPlace(Sigmoid):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


def test_a_backward_that_is_once_differentiable() -> None:
    operator, x = opsmith.adopt(OnceInPlace, "dirty::once"), numbers(3).requires_grad_()
    (gradient,) = torch.autograd.grad(operator(x * 1).sum(), x, create_graph=True)
    assert_close(gradient.detach(), (x.sigmoid() * (1 - x.sigmoid())).detach())
    with pytest.raises(errors.TransformError, match="once_differentiable"):
        gradient.sum().backward()


class WithoutBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.sin_()


def test_a_class_without_a_backward_gets_one() -> None:
    operator = opsmith.adopt(WithoutBackward, "dirty::without_backward")
    leaf = numbers(3).requires_grad_()
    for _ in range(2):
        x = leaf * 1
        assert operator(x) is x
        assert_close(torch.autograd.grad(x.sum(), leaf)[0], leaf.detach().cos())
    assert torch.autograd.gradgradcheck(lambda x: operator(x * 1), leaf)


def test_with_a_reference_second_orders_follow_from_it() -> None:
    operator = opsmith.adopt(OnceInPlace, "dirty::with_reference", reference=torch.sigmoid)
    leaf = numbers(3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: operator(x * 1), leaf)
    given = numbers(3)
    assert operator.reference(given) is given
    assert_close(given, numbers(3).sigmoid())


def test_formulas_and_kernels_that_are_given_later() -> None:
    operator = opsmith.adopt(Doubles, "dirty::later")
    operator(numbers(3))
    operator.gradients(x=lambda grad: 10 * grad)
    leaf = numbers(3).requires_grad_()
    x = leaf * 1
    operator(x)
    assert_close(torch.autograd.grad(x.sum(), leaf)[0], torch.full((3,), 10.0).double())

    @operator.kernel("cpu")
    def other(x: Tensor) -> None:
        x.mul_(4)

    given = numbers(3)
    assert operator(given) is given
    assert_close(given, 4 * numbers(3))


# What is known of a class, and when.


class ByHelper(Function):
    """Its source does not show what it marks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        y = x.neg_() if inplace else x.neg()
        mark(ctx, x, inplace)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad, None


def mark(ctx: Any, x: Tensor, inplace: bool) -> None:
    if inplace:
        ctx.mark_dirty(x)


def test_a_call_shows_what_the_source_does_not() -> None:
    operator, x = opsmith.adopt(ByHelper, "dirty::helper"), numbers(3)
    assert "!" not in str(operator)
    for inplace in (False, True, False, True):
        given = x.clone()
        assert (operator(given, inplace) is given) == inplace
        assert_close(given, -x if inplace else x)
    assert str(operator) == "<opsmith operator dirty::helper(Tensor(a!) x, bool inplace) -> Tensor(a!)>"
    assert "a call whose flags mark nothing returns new tensors, as `functional` does" in (
        operator.explain(x, True).notes
    )


def test_a_sample_shows_it_beforehand() -> None:
    operator = opsmith.adopt(ByHelper, "dirty::sampled", samples=[(numbers(3), True)])
    assert str(operator) == "<opsmith operator dirty::sampled(Tensor(a!) x, bool inplace) -> Tensor(a!)>"


def test_mutates_declares_it_beforehand() -> None:
    operator = opsmith.adopt(ByHelper, "dirty::declared", mutates="x")
    assert "Tensor(a!)" in str(operator)
    for inplace in (False, True, False):
        given = numbers(3)
        assert (operator(given, inplace) is given) == inplace


def test_with_a_stated_signature() -> None:
    operator = opsmith.adopt(
        ByHelper, "dirty::stated", signature="(x: Tensor, inplace: bool = True) -> Tensor"
    )
    given = numbers(3)
    assert operator(given, True) is given
    assert str(operator) == "<opsmith operator dirty::stated(Tensor(a!) x, bool inplace=True) -> Tensor(a!)>"


def test_without_any_it_works_on_copies() -> None:
    operator, x = opsmith.adopt(WritesTwo, "dirty::copies", mutates=()), numbers(3)
    assert (
        str(operator)
        == "<opsmith operator dirty::copies(Tensor x, Tensor y, float by=3.0) -> (Tensor, Tensor)>"
    )
    given = x.clone(), x.clone()
    for _ in range(2):
        assert_close(operator(*given), (3 * x, 4 * x))
        assert_close(given, (x, x))
    assert "`x` is copied first: forward writes into it" in operator.explain(*given).notes


def test_what_is_left_out_is_copied() -> None:
    operator, x = opsmith.adopt(WritesTwo, "dirty::one_of_two", mutates=["y"]), numbers(3)
    for _ in range(2):
        given = x.clone(), x.clone()
        new_y, new_x = operator(*given)
        assert new_y is given[1]
        assert_close((*given, new_x), (x, 3 * x, 4 * x))


def test_a_class_that_writes_and_does_not_mark_works_on_a_copy() -> None:
    class Unmarked(Doubles):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.mul_(2)

    operator, given = opsmith.adopt(Unmarked, "dirty::unmarked"), numbers(3)
    for _ in range(2):
        assert_close(operator(given), 2 * numbers(3))
        assert_close(given, numbers(3))
    assert operator.explain(given).notes == ("`x` is copied first: forward writes into it",)


class MarksArguments(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.mark_dirty(tensors[0])
        return (tensors[0].mul_(2), tensors[1] * 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0], grads[1]


def test_arguments_that_signature_names_one_by_one_are_written() -> None:
    operator = opsmith.adopt(
        MarksArguments, "dirty::named", signature="(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]"
    )
    given = numbers(3)
    assert operator(given, given.clone())[0] is given
    assert_close(given, 2 * numbers(3))


class Drifts(Function):
    """What it returns, and whether it writes, changes from call to call."""

    results = ("dirty",)

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Any:  # type: ignore[override]
        if "dirty" in cls.results:
            ctx.mark_dirty(x)
        if "dirty" in cls.results or "written" in cls.results:
            x.mul_(2)
        every = {"dirty": x, "written": x, "new": x * 2, "none": None}
        found = tuple(every[each] for each in cls.results)
        return found if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0]


def drifts(name: str, *first: str, **options: Any) -> opsmith.Operator[..., Any]:
    Drifts.results = first
    operator = opsmith.adopt(Drifts, f"dirty::drifts_{name}", **options)
    operator(numbers(3))
    return operator


def test_marks_that_no_flag_chooses_are_refused() -> None:
    operator = drifts("marks", "dirty")
    Drifts.results = ("new",)
    with pytest.raises(errors.MutationError, match="marks `x` as dirty in some calls and not in others"):
        operator(numbers(3))
    given = numbers(3)
    assert_close(operator(given), 2 * numbers(3))
    assert_close(given, numbers(3))


def test_a_write_that_is_not_marked_any_more_is_refused() -> None:
    operator = drifts("writes", "dirty")
    Drifts.results = ("written",)
    with pytest.raises(errors.MutationError, match="marks `x` as dirty in some calls"):
        operator(numbers(3))


def test_another_structure_after_the_write_is_refused() -> None:
    operator = drifts("structure", "dirty")
    Drifts.results = ("dirty", "new")
    with pytest.raises(
        errors.MutationError, match="returned something else than in earlier runs, after it had"
    ) as raised:
        operator(numbers(3))
    assert "declare what it may return" in str(raised.value)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_first_call_that_shows_another_structure_writes_once(mode: Any) -> None:
    Drifts.results = ("new", "dirty")
    operator = opsmith.adopt(Drifts, f"dirty::drifts_first_{mode.__name__}", mutates=None)
    for _ in range(2):
        with mode():
            given = numbers(3)
            results = operator(given)
        assert results[1] is given
        assert_close([*results], [4 * numbers(3), 2 * numbers(3)])


def test_a_later_call_in_inference_mode_that_shows_another_structure_is_refused() -> None:
    operator = drifts("inference", "dirty", "new")
    Drifts.results = ("dirty", "none")
    for _ in range(2):
        with torch.inference_mode():
            given = numbers(3)
            with pytest.raises(errors.MutationError, match="returned something else than in earlier runs"):
                operator(given)
        assert_close(given, 2 * numbers(3))


def test_flags_that_mark_nothing_are_learnt_in_inference_mode_too() -> None:
    operator = opsmith.adopt(Clips, "dirty::clips_inference")
    operator.functional(numbers(3), False)
    with torch.inference_mode():
        given = numbers(3)
        assert operator(given, False) is not given
    assert_close(given, numbers(3))


class ByFlagAndText(Function):
    """A flag chooses whether it writes, and a text does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, mode: str) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            return x.mul_(2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, None, None


def test_threads_that_show_new_flags_do_not_disturb_one_another() -> None:
    interval, problems = sys.getswitchinterval(), list[str]()

    def calls(operator: opsmith.Operator[..., Any], thread: int) -> None:
        for at in range(15):
            for inplace in (True, False):
                x = torch.ones(2)
                try:
                    result = operator(x, inplace, f"{thread} {at}")
                except errors.OpsmithError as error:
                    problems.append(str(error))
                else:
                    if (result is x) != inplace or x[0] != 1 + inplace:
                        problems.append(f"inplace={inplace}: {x}")

    sys.setswitchinterval(1e-6)
    try:
        for trial in range(20):
            operator = opsmith.adopt(ByFlagAndText, f"dirty::threads_{trial}")
            threads = [threading.Thread(target=calls, args=(operator, each)) for each in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems, problems[0]


def test_a_text_that_varies_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted, "MAX_FLAGS", 8)
    operator = opsmith.adopt(ByFlagAndText, "dirty::texts")
    for at in range(20):
        x = numbers(3).requires_grad_() * 1
        assert operator(x, True, str(at)) is x
        assert operator(x, False, str(at)) is not x
        assert_close(x.detach(), 2 * numbers(3))
    assert operator.specification.adopted is not None
    facts = operator.specification.adopted.facts
    for known in (facts.dirty_under, facts.written_under, facts.keeps_under):
        assert 0 < len(known) <= 8


class Swaps(Function):
    """A flag chooses the order of its outputs, or which argument it writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, which: str) -> Any:
        written = y if which == "second" else x
        mark(ctx, written, True)
        written.add_(1)
        new = x * 2
        return (new, written) if which == "swapped" else (written, new)

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        return one, other, None


@pytest.mark.parametrize(
    ("which", "problem", "hint"),
    [
        ("swapped", "returns `x` at another position", "let it return `x` at one position"),
        ("second", "marks other arguments as dirty", "not which: adopt one class for each; or let it work"),
    ],
)
def test_a_flag_cannot_choose_which_argument_is_written(which: str, problem: str, hint: str) -> None:
    operator = opsmith.adopt(Swaps, f"dirty::swaps_{which}")
    operator(numbers(3), numbers(3), "first")
    given = numbers(3), numbers(3, seed=1)
    with pytest.raises(errors.ResultTypeError, match=problem) as raised:
        operator(*given, which)
    assert hint in str(raised.value)
    assert_close(given, (numbers(3), numbers(3, seed=1)))


class Unreturned(Doubles):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2).view(-1)


class MarkedConstant(Doubles):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(x)
        return x.mul_(2)


class UnmarkedWhere(Clips):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: bool = False) -> Tensor:
        if mark:
            ctx.mark_dirty(x)
        return x.mul_(2)


def test_what_apply_refuses_is_refused() -> None:
    operator = opsmith.adopt(Unreturned, "dirty::unreturned")
    with pytest.raises(RuntimeError, match="were not returned as output"):
        Unreturned.apply(numbers(3))
    with pytest.raises(errors.MutationError, match="marks `x` as dirty and does not return it") as raised:
        operator(numbers(3))
    assert "return `x` itself, not a view or a copy" in str(raised.value)
    copies = opsmith.adopt(Unreturned, "dirty::unreturned_copies", mutates=())
    assert_close(copies(numbers(3)), 2 * numbers(3))


def test_a_constant_that_is_written_is_refused_where_it_has_a_gradient() -> None:
    operator = opsmith.adopt(MarkedConstant, "dirty::constant")
    given = numbers(3)
    assert operator(given) is given
    with pytest.raises(errors.MutationError, match="as dirty and as non-differentiable"):
        operator(numbers(3).requires_grad_() * 1)


def test_a_flag_that_leaves_the_mark_out_and_not_the_write_is_refused() -> None:
    operator = opsmith.adopt(UnmarkedWhere, "dirty::unmarked_where")
    operator(numbers(3), True)
    with pytest.raises(errors.MutationError, match="wrote into `x` and did not mark it as dirty") as raised:
        operator(numbers(3), False)
    assert "let it call `ctx.mark_dirty(x)` wherever it writes into it" in str(raised.value)


def test_one_of_any_number_of_arguments_needs_a_declaration() -> None:
    operator = opsmith.adopt(MarksArguments, "dirty::any_number")
    with pytest.raises(
        errors.MutationError, match=r"marks one of `\*tensors` as dirty, which needs a declar"
    ) as raised:
        operator(numbers(3), numbers(3))
    assert "name the arguments one by one" in str(raised.value)


def test_an_argument_that_is_not_there() -> None:
    with pytest.raises(errors.UnknownInputError, match="cannot write into `y`"):
        opsmith.adopt(Doubles, "dirty::unknown", mutates="y")
    with pytest.raises(errors.UnknownInputError, match="cannot write into `inplace`"):
        opsmith.adopt(Clips, "dirty::unknown", mutates="inplace")


class Hidden(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y, z = x.mul_(2), x.sum()
        ctx.mark_dirty(x)
        return y, z

    @staticmethod
    def backward(ctx: Any, grad: Tensor, total: Tensor) -> Any:
        return 2 * grad + 2 * total


def test_an_output_that_the_source_does_not_show() -> None:
    with pytest.raises(
        errors.UsageError, match=r"the output of `Hidden\.forward` that is `x` is not known"
    ) as raised:
        opsmith.adopt(Hidden, "dirty::hidden", mutates="x")
    assert "`return x`, at the top of what forward returns" in str(raised.value)
    operator = opsmith.adopt(Hidden, "dirty::hidden_sampled", mutates="x", samples=[(numbers(3),)])
    assert str(operator) == "<opsmith operator dirty::hidden_sampled(Tensor(a!) x) -> Tensor>"
    learnt, given = opsmith.adopt(Hidden, "dirty::hidden_learnt"), numbers(3)
    assert learnt(given)[0] is given


def test_an_operator_of_torch_library_says_it_in_its_schema() -> None:
    @torch.library.custom_op("dirty::registered", mutates_args=("x",))
    def registered(x: Tensor) -> None:
        x.mul_(2)

    with pytest.raises(errors.UsageError, match="`mutates` is for a Function class"):
        opsmith.adopt(registered, reference=lambda x: x.mul_(2), mutates="x")


# Compiled and exported.


@pytest.mark.every(4)
@pytest.mark.compile
@pytest.mark.xdist_group("dirty")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at that of each argument
@every_case
def test_compiled(case: Case) -> None:
    operator = case.operator
    expected = observed(case.cls.apply, case, "contiguous", "recorded")
    operator(*case.make())
    step = torch.compile(lambda *given: operator(*given), backend="aot_eager", fullgraph=True, dynamic=False)
    try:
        for mode in ("recorded", "plain"):
            found = observed(step, case, "contiguous", mode)
            assert_close(found.arguments, expected.arguments)
            assert_close(found.results, expected.results)
            assert found.same == expected.same
            if mode == "recorded":
                assert_close(found.gradients, expected.gradients)
    finally:
        torch.compiler.reset()


@pytest.mark.compile
@pytest.mark.xdist_group("dirty")
def test_compiled_before_any_call() -> None:
    operator, flagged = opsmith.adopt(Doubles, "dirty::first"), opsmith.adopt(Clips, "dirty::first_flag")
    hidden = opsmith.adopt(ByHelper, "dirty::first_hidden")

    def compiled(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
        return result

    try:
        x = numbers(3)
        compiled(operator, x)
        assert_close(x, 2 * numbers(3))
        compiled(lambda x: flagged(x, True), x)
        assert_close(x, 2 * numbers(3).clamp(0))
        for call in (lambda x: flagged(x, False), lambda x: hidden(x, True)):
            with pytest.raises(Exception, match="marks other arguments as dirty than it was adopted with"):
                compiled(call, numbers(3))
        flagged(numbers(3), False)
        x = numbers(3)
        compiled(lambda x: flagged(x, False), x)
        assert_close(x, numbers(3))
    finally:
        torch.compiler.reset()


@pytest.mark.compile
@pytest.mark.xdist_group("dirty")
def test_exported() -> None:
    operator = opsmith.adopt(WithTotal, "dirty::exported")

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            total, new = operator(x)
            return total + new

    program = torch.export.export(Model(), one())
    assert "dirty.exported.default" in {str(node.target) for node in program.graph.nodes}
    (given,) = one()
    program.module()(given)
    assert_close(given, 3 * one()[0])


# The check.


CHECKED = [
    "forward",
    "mutation",
    "gradient",
    "second_order",
    "layouts",
    "vmap",
    "forward_mode",
    "fake",
    "effects",
]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.slow if name in ("with_sign", "sigmoid") else ())
        for name, case in CASES.items()
        if name not in ("marks", "wholes", "clips_not")
    ],
)
def test_checked(case: Case) -> None:
    operator = case.operator
    report = opsmith.check(operator, samples=[case.make()], only=CHECKED, effort="quick")
    assert not report.failures, report
    status = {outcome.property: outcome.status for outcome in report.outcomes}
    assert status["mutation"] == status["gradient"] == "passed"


def test_a_check_finds_a_gradient_that_is_wrong_after_a_write() -> None:
    class Wrong(Doubles):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 3 * grad

    operator = opsmith.adopt(Wrong, "dirty::wrong")
    report = opsmith.check(operator, samples=[one()], only=["gradient"], effort="quick")
    assert [(each.input, each.cause) for each in report.failures] == [("x", "scale")]


def test_a_check_that_calls_it_first_learns_what_it_writes() -> None:
    operator = opsmith.adopt(ByHelper, "dirty::checked_first")
    report = opsmith.check(operator, samples=[(numbers(3, 4), True)], only=["forward", "effects", "mutation"])
    assert not report.failures, report
    assert [each.status for each in report.outcomes if each.property == "mutation"] == ["passed"]


class ReturnsACopy(Doubles):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x * 1


def test_a_check_reports_what_the_first_call_refuses() -> None:
    operator = opsmith.adopt(ReturnsACopy, "dirty::reported")
    report = opsmith.check(operator, samples=[(numbers(3),)], only=["forward"], effort="quick")
    assert "marks `x` as dirty and does not return it" in str(report)


def test_a_check_of_the_class_itself_looks_at_apply() -> None:
    report = opsmith.check(Doubles, samples=[one()], only=["forward", "effects", "gradient"], effort="quick")
    assert not report.failures, report
    assert report.operator.endswith("Doubles")
