"""Arguments that a class cannot write into, and classes whose marks do not fit what they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dirty_classes import Clips, Doubles, MarksArguments, numbers
from torch import Tensor
from torch.autograd import Function
from torch.testing import assert_close

import opsmith
from opsmith import errors

LEAF = "a leaf Variable that requires grad"


REFUSED: dict[str, tuple[Callable[[], Tensor], str, str]] = {
    "leaf": (lambda: numbers(3).requires_grad_(), LEAF, "is a leaf that requires a gradient"),
    "view of a leaf": (
        lambda: numbers(3).requires_grad_()[:2],
        "a view of a leaf",
        "is a view of a leaf that requires a gradient",
    ),
    "expanded": (
        lambda: numbers(1).expand(3),
        "single memory location",
        "several elements of `x` share the same memory",
    ),
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
    with pytest.raises(errors.MutationError, match="marks `x` as dirty but does not return it") as raised:
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
    with pytest.raises(
        errors.MutationError, match="did not mark it as dirty, unlike in earlier runs"
    ) as raised:
        operator(numbers(3), False)
    assert "let forward call `ctx.mark_dirty(x)` in each call that writes into `x`" in str(raised.value)


def test_one_of_any_number_of_arguments_needs_a_declaration() -> None:
    operator = opsmith.adopt(MarksArguments, "dirty::any_number")
    with pytest.raises(
        errors.MutationError, match=r"marks one tensor of `\*tensors` as dirty, but an operator"
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
        results = [x.mul_(2), x.sum()]
        ctx.mark_dirty(x)
        return results[0], results[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, total: Tensor) -> Any:
        return 2 * grad + 2 * total


def test_an_output_that_the_source_does_not_show() -> None:
    with pytest.raises(
        errors.UsageError, match=r"it is not known which output of `Hidden\.forward` is `x`"
    ) as raised:
        opsmith.adopt(Hidden, "dirty::hidden", mutates="x")
    assert "`return x`, not inside a nested tuple" in str(raised.value)
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
