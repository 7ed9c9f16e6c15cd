"""Operators that declare `deterministic=False`: the tag, the refusal as of torch's own, the check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from functions import Doubled
from torch import Tensor

import opsmith
from opsmith import errors

INDEX = torch.tensor([0, 2, 2, 1, 0])
X = torch.tensor([1.0, 0.1, -0.7, 0.3, 0.2])


def summed(x: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(4).index_add(0, index, x)


def in_any_order(x: Tensor, index: Tensor) -> Tensor:
    """Sum in an order that depends on the clock, as atomics do."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(time.perf_counter_ns()))
    result = x.new_zeros(4)
    for position in order.tolist():
        result[index[position]] += x[position]
    return result


def declared(name: str, kernel: Any = None, **options: Any) -> Any:
    operator = opsmith.operator(f"nondeterminism::{name}", **options)(summed)
    operator.gradients(x=lambda grad, index: grad[index])
    return operator if kernel is None else operator.kernel("cpu", kernel)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_it_has_the_tag_for_bits_and_not_that_for_randomness() -> None:
    tags = declared("tagged", deterministic=False).torch_operator.tags
    assert torch.Tag.nondeterministic_seeded not in tags
    if hasattr(torch.Tag, "nondeterministic_bitwise"):
        assert torch.Tag.nondeterministic_bitwise in tags
        assert torch.Tag.nondeterministic_bitwise not in declared("plain").torch_operator.tags


CPP = """
template <class T>
void summed(View<const T, 1> x, View<const int64_t, 1> index, View<T, 1> result) {
  for (int64_t i = 0; i < 4; i++) result(i) = 0;
  for (int64_t i = 0; i < x.size(0); i++) result(index(i)) += x(i);
}
"""


@pytest.mark.every(5)
@pytest.mark.parametrize("calls", [0, 3], ids=["first call", "fast path"])
@pytest.mark.parametrize("kernel", ["reference", "python", "cpp"])
def test_a_call_is_refused_where_torch_must_be_deterministic(
    kernel: str, calls: int, deterministic: None
) -> None:
    written = in_any_order if kernel == "python" else None
    operator = declared(f"refused_{kernel}_{calls}", written, deterministic=False)
    if kernel == "cpp":
        operator.kernel("cpu", cpp=CPP, entry="summed")
    torch.use_deterministic_algorithms(False)
    for _ in range(calls):
        operator(X, INDEX)
        operator(X.clone().requires_grad_(), INDEX)
    torch.use_deterministic_algorithms(True)
    for call in (operator, operator.torch_operator):
        for x in (X, X.clone().requires_grad_()):
            with pytest.raises(errors.NondeterministicError) as caught:
                call(x, INDEX)
    assert caught.value.message().splitlines()[0] == (
        f"{operator.name}: it is declared with `deterministic=False`, and "
        "torch.use_deterministic_algorithms(True) is in force"
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="declared with `deterministic=False`"):
        operator(X, INDEX)
    torch.use_deterministic_algorithms(False)
    assert torch.allclose(operator(X, INDEX), summed(X, INDEX))


def test_an_operator_that_declares_nothing_runs(deterministic: None) -> None:
    operator = opsmith.operator("nondeterminism::twice")(lambda_free_twice)
    assert torch.equal(operator(X), 2 * X)


def lambda_free_twice(x: Tensor) -> Tensor:
    return 2 * x


SAMPLES = [
    (torch.randn(40, generator=torch.Generator().manual_seed(0)) * 1e6, torch.arange(40) % 4),
    (torch.randn(12, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3),
]


@pytest.mark.slow
def test_a_check_holds_its_runs_to_a_bound_and_names_the_declaration_where_it_lacks() -> None:
    names = ["forward", "gradient", "determinism", "state", "serialization", "layouts", "backward_again"]
    known = opsmith.check(declared("known", in_any_order, deterministic=False), samples=SAMPLES, only=names)
    assert known.passed_as_asked, known
    assert not [note for outcome in known.outcomes for note in outcome.notes if "ound" in note]
    unknown = opsmith.check(declared("unknown", in_any_order), samples=SAMPLES, only=["determinism"])
    (note,) = [note for outcome in unknown.outcomes for note in outcome.notes]
    assert note.endswith(
        "a sum whose order changes from run to run may cause the difference; declare `deterministic=False`"
    )


LOST = count()


def losing_one(x: Tensor, index: Tensor) -> Tensor:
    """Lose one term or another, as a race does."""
    kept = torch.ones_like(x)
    kept[next(LOST) % len(x)] = 0
    return summed(x * kept, index)


def test_what_differs_beyond_rounding_is_found_all_the_same() -> None:
    operator = declared("losing", losing_one, deterministic=False)
    report = opsmith.check(operator, samples=SAMPLES[1:], only=["determinism"])
    found = {(failure.cause, failure.severity) for failure in report.failures}
    assert found == {("nondeterministic", "error")}


def cancelling(x: Tensor, index: Tensor) -> Tensor:
    return in_any_order(torch.cat([x * 1e7, x, -x * 1e7]), index.repeat(3))


def test_a_sum_that_cancels_may_lose_the_digits_that_rounding_takes() -> None:
    def exactly(x: Tensor, index: Tensor) -> Tensor:
        return summed(torch.cat([x * 1e7, x, -x * 1e7]), index.repeat(3))

    for known in (True, False):
        operator = opsmith.operator(f"nondeterminism::cancelling_{known}", deterministic=known)(exactly)
        operator.kernel("cpu", cancelling)
        report = opsmith.check(operator, samples=SAMPLES[1:], only=["determinism"])
        assert report.passed_as_asked is not known


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_sum_of_a_class_that_cancels_is_no_loss(dtype: torch.dtype) -> None:
    """Without a reference, runs in another precision tell rounding from a term that is lost."""

    class Cancelling(InAnyOrder):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
            ctx.save_for_backward(index)
            large = x * 1e7 if dtype == torch.float32 else x * 1e15
            return in_any_order(torch.cat([large, x, -large]), index.repeat(3))

    samples = [(x.to(dtype), index) for x, index in SAMPLES[1:]]
    for known in (True, False):
        operator = opsmith.adopt(Cancelling, f"nondeterminism::class_{known}", deterministic=known)
        report = opsmith.check(operator, samples=samples, only=["determinism"])
        assert report.passed_as_asked is not known


def test_an_operator_of_torch_library_with_the_tag_is_held_to_a_bound() -> None:
    if not hasattr(torch.Tag, "nondeterministic_bitwise"):
        pytest.skip("this torch has no such tag")

    @torch.library.custom_op(
        "nondeterminism::custom", mutates_args=(), tags=(torch.Tag.nondeterministic_bitwise,)
    )
    def custom(x: Tensor, index: Tensor) -> Tensor:
        return in_any_order(x, index)

    report = opsmith.check(custom, samples=SAMPLES, only=["determinism"])
    assert report.passed_as_asked
    assert not [note for outcome in report.outcomes for note in outcome.notes]


class InAnyOrder(torch.autograd.Function):
    """A class whose forward and backward sum in an order that depends on the clock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(x)
        return in_any_order(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return grad[index], None


def adopted(name: str, **options: Any) -> Any:
    return opsmith.adopt(InAnyOrder, f"nondeterminism::{name}", **options)


@pytest.mark.parametrize("calls", [0, 3], ids=["first call", "fast path"])
def test_a_call_of_an_adopted_class_is_refused_too(calls: int, deterministic: None) -> None:
    operator = adopted(
        f"adopted_{calls}", deterministic=False, signature="(x: Tensor, index: Tensor) -> Tensor"
    )
    if hasattr(torch.Tag, "nondeterministic_bitwise"):
        assert torch.Tag.nondeterministic_bitwise in operator.torch_operator.tags
    torch.use_deterministic_algorithms(False)
    for _ in range(calls):
        operator(X, INDEX)
        operator(X.clone().requires_grad_(), INDEX)
    torch.use_deterministic_algorithms(True)
    mapped = torch.func.vmap(torch.func.grad(lambda x: operator(x, INDEX).sum()))
    for call in (operator, operator.torch_operator):
        for x in (X, X.clone().requires_grad_()):
            with pytest.raises(errors.NondeterministicError) as caught:
                call(x, INDEX)
    with pytest.raises(errors.NondeterministicError):
        mapped(X[None])
    assert caught.value.message().splitlines()[-1] == (
        "  hint: allow it, `torch.use_deterministic_algorithms(True, warn_only=True)`"
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="declared with `deterministic=False`") as warned:
        operator(X.clone().requires_grad_(), INDEX)
    assert len(warned) == 1
    torch.use_deterministic_algorithms(False)
    assert torch.allclose(operator(X, INDEX), summed(X, INDEX))


def test_an_adopted_class_that_learns_its_types_keeps_the_declaration() -> None:
    operator = adopted("learning", deterministic=False)
    operator(X, INDEX)
    assert not operator.specification.deterministic
    assert adopted("plain_class").specification.deterministic


@pytest.mark.slow
def test_a_check_holds_an_adopted_class_to_a_bound() -> None:
    names = ["forward", "gradient", "determinism", "state", "layouts", "backward_again"]
    known = opsmith.check(adopted("known_class", deterministic=False), samples=SAMPLES, only=names)
    assert known.passed_as_asked, known
    assert not [note for outcome in known.outcomes for note in outcome.notes if "ound" in note]
    unknown = opsmith.check(adopted("unknown_class"), samples=SAMPLES, only=["determinism"])
    (note,) = [note for outcome in unknown.outcomes for note in outcome.notes]
    assert note.endswith("say so by `deterministic=False`")


def test_a_class_that_loses_terms_is_found_all_the_same() -> None:
    class Losing(InAnyOrder):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
            ctx.save_for_backward(index)
            return losing_one(x, index)

    operator = opsmith.adopt(Losing, "nondeterminism::losing_class", deterministic=False)
    report = opsmith.check(operator, samples=SAMPLES[1:], only=["determinism"])
    assert {(each.cause, each.severity) for each in report.failures} == {("nondeterministic", "error")}


def test_another_value_than_a_flag_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="`deterministic` has an invalid value"):
        adopted("wrong_class", deterministic="no")
    with pytest.raises(errors.UsageError) as caught:
        opsmith.operator("nondeterminism::wrong", deterministic="no")  # type: ignore[call-overload]
    assert "`deterministic` has an invalid value" in str(caught.value)
    assert "hint: write `deterministic=False`, or leave it out" in str(caught.value)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def doubled_and_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


def doubled_(x: Tensor) -> Tensor:
    return x.mul_(2)


class DoubledByRule(Doubled):
    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return x * 2, dims[0]


class DoubledInPlace(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


def any_order(name: str, reference: Any, **options: Any) -> Any:
    return opsmith.operator(f"nondeterminism::{name}", deterministic=False, **options)(reference)


FORMS: dict[str, Any] = {
    "reference": any_order("form_reference", doubled),
    "inlined": any_order("form_inlined", doubled, inline=True),
    "formula": any_order("form_formula", doubled).gradients(x=lambda grad: grad * 2),
    "kernel": any_order("form_kernel", doubled).kernel("cpu", doubled),
    "hidden": any_order("form_hidden", doubled_and_kept, hidden=("k",)).gradients(x=lambda grad, k: grad * 2),
    "batching": any_order("form_batching", doubled, batching="elementwise"),
    "in place": any_order("form_in_place", doubled_, mutates=["x"], returns="x"),
    "class": opsmith.adopt(Doubled, "nondeterminism::form_class", deterministic=False),
    "class with vmap": opsmith.adopt(DoubledByRule, "nondeterminism::form_rule", deterministic=False),
    "class in place": opsmith.adopt(DoubledInPlace, "nondeterminism::form_dirty", deterministic=False),
}

WAYS: dict[str, Any] = {
    "eager": lambda f, x: f(x),
    "graph": lambda f, x: f(x.clone().requires_grad_()),
    "inference": lambda f, x: torch.inference_mode()(f)(x),
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_each_way_of_a_call_is_refused_once(form: str, way: str, deterministic: None) -> None:
    def call(x: Tensor) -> Tensor:
        return FORMS[form](x * 1)  # type: ignore[no-any-return]

    x = torch.ones(2, 3)
    for known in (False, True):
        torch.use_deterministic_algorithms(True)
        with pytest.raises(errors.NondeterministicError, match=FORMS[form].name):
            WAYS[way](call, x)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="declared with `deterministic=False`") as warned:
            WAYS[way](call, x)
        assert len(warned) == 1, known
        torch.use_deterministic_algorithms(False)
        for _ in range(2):
            WAYS[way](call, x)


@pytest.mark.every(2)
@pytest.mark.xdist_group("nondeterminism")
@pytest.mark.parametrize("way", ["eager", "vmap", "graph"])
@pytest.mark.parametrize("form", ["reference", "inlined", "hidden", "class", "in place"])
def test_compiled_code_sees_the_flag_that_is_set_later(form: str, way: str, deterministic: None) -> None:
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: (
            WAYS[way](lambda y: FORMS[form](y * 1) + 1, x) if way != "graph" else FORMS[form](x * 1) + 1
        ),
        backend="aot_eager",
    )
    x = torch.ones(2, 3, requires_grad=way == "graph")
    assert torch.equal(compiled(x), torch.full((2, 3), 3.0))
    torch.use_deterministic_algorithms(True)
    with pytest.raises(Exception, match=r"declared with `deterministic=False`"):
        compiled(x)
    torch.use_deterministic_algorithms(False)
    assert torch.equal(compiled(x), torch.full((2, 3), 3.0))


@pytest.mark.xdist_group("nondeterminism")
def test_a_strict_kernel_and_declared_shapes_hold_in_inlined_code() -> None:
    strict = opsmith.operator("nondeterminism::strict")(doubled)
    strict.kernel("cpu", cpp=STRICT, entry="doubled", strict=True, dtypes=[torch.float32])
    shaped = opsmith.operator("nondeterminism::shaped", shapes="x: N -> N", inline=True)(widened)
    for operator, x, message in (
        (strict, torch.ones(2).double(), "float64"),
        (shaped, X, "differs from"),
    ):
        with pytest.raises(errors.OpsmithError, match=message):
            operator(x)
        torch.compiler.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(operator, backend="aot_eager")(x)


STRICT = """
template <class T>
void doubled(View<const T, 1> x, View<T, 1> y) {
  for (int64_t i = 0; i < x.size(0); i++) y(i) = 2 * x(i);
}
"""


def widened(x: Tensor) -> Tensor:
    return torch.cat([x, x])
