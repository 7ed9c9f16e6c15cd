"""The property `mutation`: calls in place write what their functional form returns, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import planted_in_place
import pytest
import torch
from entries import PLANTED
from heldout_numbers import normal, whole
from sound_in_place import WRITERS, writer
from torch import Tensor

import opsmith
from opsmith.checking.properties.behaviour.write_runs import compare_writes, marked, places
from opsmith.checking.report import Failure, Outcome
from opsmith.core.effort_level import Level

FILE = str(planted_in_place.__file__)


def mutation(operator: Any, samples: Any, effort: Level = "default") -> Outcome:
    (outcome,) = (
        each
        for each in opsmith.check(operator, samples=samples, only=["mutation"], effort=effort).outcomes
        if each.property == "mutation"
    )
    return outcome


def failure_of(name: str) -> Failure:
    """The first failure on a planted fault: of the property, or of `forward` where no call goes through."""
    operator, samples = PLANTED[name].build()
    return opsmith.check(operator, samples=samples, only=["mutation"]).failures[0]


SAYS = {
    "in_place_decay_of_whole_vectors": "a call writes outside of `state`, into memory of other tensors: ",
    "in_place_decay_over_the_gaps": (
        "a call writes outside of `state`, into `x`, whose elements alternate with its elements in "
        "memory: at [0, 0] it is "
    ),
    "in_place_decay_of_whole_blocks": (
        "a call does not write 3 of the 15 elements of `state` that the reference writes, the first "
        "at [4, 0]: write all of them"
    ),
    "in_place_decay_that_is_not_copied_back": (
        "a call writes nothing into `state`, but the reference writes into it: write into the "
        "memory of `state`, for example by `.copy_(...)`"
    ),
    "in_place_decay_that_lays_other_memory_under": (
        "it changed the shape, strides or memory of `state`\n  argument: state\n  expected: new "
        "numbers in the memory that it has\n  got: other memory after the call\n  hint: write "
        "`state.copy_(...)`"
    ),
    "in_place_store_of_one_row_too_many": (
        "a call writes into elements of `cache` that the reference does not change: at [1, 0] it is "
    ),
    "in_place_count_that_is_declared_alone": (
        "`count` is declared in `mutates=`, but the reference does not write into it on any sample: "
        "remove it from `mutates=`, or write into it, for example by `.copy_(...)`"
    ),
    "in_place_decay_of_raw_memory": (
        "`state` is right where `state` is contiguous, and wrong where `state` is transposed: at "
    ),
    "in_place_store_beside_an_interleaved_cache": (
        "`values` is right where `keys` is contiguous, and wrong where `keys` is interleaved "
        "with `values` in memory: "
    ),
    "in_place_decay_in_secret": (
        "a call writes into `state` and does not raise its version counter: a backward that saved "
        "the old value silently uses the new value. Write by torch's in-place operations, not "
        "through `.data`, `.numpy()` or a pointer"
    ),
    "in_place_decay_that_remembers_the_state": (
        "a second call, on the values that the first call wrote, gives a `state` that differs from the "
        "functional form's: at "
    ),
    "in_place_decay_outside_of_grad_mode": (
        "`state` after a call in grad mode, without an input that requires a gradient differs "
        "from the functional form: at "
    ),
    "in_place_rope_that_looks_at_k_late": (
        "a call wrote into `q` before it raised an error (ValueError: the shapes must be the same), "
        "but the reference did not: check shapes, dtypes and devices before the first write"
    ),
}


@pytest.mark.every(9)
@pytest.mark.parametrize("name", SAYS)
def test_messages(name: str) -> None:
    failure = failure_of(name)
    assert SAYS[name] in failure.message
    assert failure.cause == PLANTED[name].cause
    assert failure.where is not None
    assert failure.where.rpartition(":")[0] == FILE


@pytest.mark.slow
def test_a_replay_checks_the_call_in_place() -> None:
    failure = failure_of("in_place_decay_of_a_contiguous_copy")
    assert failure.replay is not None
    with pytest.raises(AssertionError, match="mutation of `state`: layout"):
        exec(failure.replay, {})


@pytest.mark.slow
def test_a_write_that_is_not_declared() -> None:
    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        state.mul_(rate).add_(x)
        if state.stride()[0] == 1 < state.dim():
            x.detach().numpy()[...] = 0

    operator, samples = writer("test", "decay")
    operator.kernel("cpu", kernel)
    (failure,) = mutation(operator, samples).failures
    assert (failure.cause, failure.input) == ("mutates-input", "x")
    assert failure.message.startswith("a call wrote into `x`, which it does not declare: at ")
    assert failure.message.endswith("; name it in `mutates=`, or work on a copy, `x.clone()`")


def test_a_declared_write_that_never_happens_is_the_only_finding() -> None:
    @opsmith.operator("mutation_messages::of_a_name", mutates=["state"])
    def of_a_name(state: Tensor) -> None:
        state = 0.5 * state

    (failure,) = mutation(of_a_name, [(normal(3, 4),)], "quick").failures
    assert (failure.cause, failure.input) == ("not-written", "state")


def test_a_reference_that_changes_sizes() -> None:
    @opsmith.operator("mutation_messages::turned", mutates=["state"])
    def turned(state: Tensor) -> None:
        state.t_()

    report = opsmith.check(turned, samples=[(normal(3, 4),)], only=["mutation"], effort="quick")
    (failure,) = (failure for outcome in report.outcomes for failure in outcome.failures)
    assert (failure.cause, failure.input) == ("shape", "state")
    assert "it changed the shape, strides or memory of `state`" in failure.message
    assert "hint: write `state.copy_(...)`" in failure.message


def test_a_kernel_in_cpp() -> None:
    """It takes a pointer to the first element, and steps by one."""
    operator = opsmith.operator("test_mutation::raw", mutates=["state"])(raw)
    operator.kernel(
        "cpu",
        cpp="""
template <class T>
void raw(View<T, 1> state, View<const T, 1> x) {
  OPSMITH_CHECK(state.size(0) == x.size(0), "the sizes must be the same");
  T* first = &state(0);
  for (int64_t i = 0; i < state.size(0); i++) first[i] += x(i);
}
""",
    )
    (failure,) = mutation(operator, [(normal(7), normal(7, seed=1))], "quick").failures
    assert (failure.cause, failure.input) == ("layout", "state")


def raw(state: Tensor, x: Tensor) -> None:
    state.add_(x)


@pytest.mark.slow
def test_what_follows_from_a_wrong_write() -> None:
    operator, samples = PLANTED["in_place_decay_of_whole_blocks"].build()
    report = opsmith.check(operator, samples=samples, effort="quick")
    assert {each.property for each in report.failures if each.follows is None} == {"mutation"}
    followed = {each.property: each.follows for each in report.failures if each.follows is not None}
    assert followed["forward"] == "mutation"


def test_gradients_after_the_write() -> None:
    """The functional form gets a new tensor, and the call in place a view, which the reference knows."""

    @opsmith.operator("test_mutation::double", mutates=["x"])
    def double(x: Tensor) -> None:
        x.mul_(2 if x._is_view() else 3)

    (failure, *_) = mutation(double, [(normal(2, 3),)]).failures
    assert (failure.cause, failure.input) == ("layout", "x")
    assert "`x` is right where `x` is contiguous, and wrong where `x` is " in failure.message
    assert "use the strides and the offset" in failure.message


@pytest.mark.slow
def test_what_is_skipped_and_named() -> None:
    operator, samples = writer("test", "decay")
    form = mutation(operator.functional, samples)
    assert (form.status, form.reason) == ("skipped", "the operator does not declare a write into an argument")
    assert opsmith.check(operator, samples=samples, only=["mutation"]).operator == operator.name
    scalars = mutation(writer("test", "momentum")[0], [(normal(3), normal(3))], "quick")
    assert scalars.status == "passed"
    (limit,) = scalars.failures
    assert (limit.cause, limit.severity, limit.input) == ("not-exercised", "limit", "velocity")
    assert limit.message == "no sample has a tensor with elements for `velocity`: add one"

    @opsmith.operator("test_mutation::lower", mutates=["x"])
    def lower(x: Tensor) -> None:
        x.clamp_(max=0)

    (limit,) = mutation(lower, [(-torch.ones(3),)], "quick").failures
    assert limit.message == "no sample changes an element of `x`: add a sample that changes one"


def test_a_refused_layout_is_a_note() -> None:
    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        if not state.is_contiguous():
            raise ValueError("the state must be contiguous")
        state.mul_(rate).add_(x)

    operator, samples = writer("test", "decay")
    found = mutation(operator.kernel("cpu", kernel), samples, "quick")
    assert not found.failures
    words = "the operator refuses `state` (transposed): ValueError: the state must be contiguous"
    assert words in found.notes


def test_an_exception_in_a_layout_is_a_failure() -> None:
    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        state.view(-1).mul_(rate).add_(x.reshape(-1))

    operator, samples = writer("test", "decay")
    (failure,) = mutation(operator.kernel("cpu", kernel), samples[:1], "quick").failures
    assert failure.cause == "layout"
    assert "and wrong where `state` is transposed: RuntimeError: view size" in failure.message


def test_an_exception_in_a_mode_is_a_failure() -> None:
    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("no")
        state.mul_(rate).add_(x)

    operator, samples = writer("test", "decay")
    (failure,) = mutation(operator.kernel("cpu", kernel), samples[:1], "quick").failures
    assert failure.cause == "raises"
    assert str(failure.evidence["sample"]).endswith("under `torch.inference_mode()`")


TORCHS: dict[str, tuple[Callable[..., Any], list[str], list[Any]]] = {}


def torchs(mutates: list[str], *samples: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter an operation of torch."""

    def enter(reference: Callable[..., Any]) -> Callable[..., Any]:
        TORCHS[reference.__name__] = reference, mutates, list(samples)
        return reference

    return enter


@torchs(["x"], (normal(3, 4), normal(3, 4, seed=1), normal(4, seed=2)))
def addcmul_(x: Tensor, one: Tensor, other: Tensor) -> None:
    x.addcmul_(one, other, value=0.5)


@torchs(["x"], (normal(5, 3), torch.tensor([4, 1]), normal(2, 3, seed=1)))
def index_copy_(x: Tensor, index: Tensor, rows: Tensor) -> None:
    x.index_copy_(0, index, rows)


@torchs(["x"], (normal(5, 3), whole(4, high=5), normal(4, 3, seed=1)))
def index_add_(x: Tensor, index: Tensor, rows: Tensor) -> None:
    x.index_add_(0, index, rows)


@torchs(["x"], (normal(3, 5), torch.tensor([[0, 4], [1, 2], [3, 0]]), normal(3, 2, seed=1)))
def scatter_(x: Tensor, index: Tensor, values: Tensor) -> None:
    x.scatter_(1, index, values)


@torchs(["x"], (normal(3, 5), normal(3, 5, seed=3) > 0, normal(15, seed=1)))
def masked_scatter_(x: Tensor, mask: Tensor, values: Tensor) -> None:
    x.masked_scatter_(mask, values)


@torchs(["x"], (normal(3, 4), normal(3, 2, seed=1), normal(2, 4, seed=2)))
def addmm_(x: Tensor, one: Tensor, other: Tensor) -> None:
    x.addmm_(one, other)


@torchs(["x"], (normal(4, 4),))
def triu_(x: Tensor) -> None:
    x.triu_(1)


@torchs(["x"], (whole(3, 4, high=90), whole(3, 4, high=7, seed=1)))
def bitwise_xor_(x: Tensor, by: Tensor) -> None:
    x.bitwise_xor_(by)


@torchs(["x"], (normal(3, 4),))
def cumsum_(x: Tensor) -> None:
    x.cumsum_(1)


@torchs(["xs"], ([normal(3, 4), normal(5, seed=1)], [normal(3, 4, seed=2), normal(5, seed=3)]))
def foreach_add_(xs: list[Tensor], others: list[Tensor]) -> None:
    torch._foreach_add_(xs, others, alpha=0.5)


@torchs(["mean", "variance"], (normal(4, 3), normal(3, seed=1), 1 + normal(3, seed=2).square()))
def batch_norm(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return torch.nn.functional.batch_norm(x, mean, variance, training=True)


@pytest.mark.every(6)
@pytest.mark.parametrize("name", TORCHS)
def test_operations_of_torch_pass(name: str) -> None:
    """The call of torch itself, as the reference, and as a kernel beside it."""
    reference, mutates, samples = TORCHS[name]
    operator = opsmith.operator(f"test_mutation::{name}", mutates=mutates)(reference)
    found = mutation(operator, samples)
    assert found.status == "passed", found
    assert not found.failures
    operator.kernel("cpu", reference)
    found = mutation(operator, samples)
    assert found.status == "passed", found
    assert not found.failures


@pytest.mark.every(6)
@pytest.mark.parametrize("base", WRITERS)
def test_a_kernel_that_is_the_reference_passes(base: str) -> None:
    operator, samples = writer("as_kernel", base)
    found = mutation(operator.kernel("cpu", WRITERS[base][0]), samples, "quick")
    assert found.status == "passed", found
    assert not found.failures


def test_elements_are_compared_by_their_bits() -> None:
    before = torch.tensor([1.0, 2.0, -0.0, 4.0])
    right = torch.tensor([1.0, 3.0, -0.0, 4.0])
    got = torch.tensor([1.0 + 2**-23, 2.0, 0.0, 5.0])
    found = compare_writes(before, right, got, None)
    assert found.left.tolist() == [False, True, False, False]
    assert found.more.tolist() == [False, False, False, True]
    assert found.changed == 1
    found = compare_writes(before, right, got, torch.tensor([True, False, True, True]))
    assert found.more.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
def test_a_mark_survives_copies_and_no_arithmetic(dtype: torch.dtype) -> None:
    x = marked(torch.ones(3, dtype=dtype))
    bits = x.clone().view(torch.uint8)
    assert torch.equal(torch.where(torch.tensor([True, False, True]), x, x).view(torch.uint8), bits)
    assert not torch.equal((x * 1).view(torch.uint8), bits)


def test_places_hold_each_element_once() -> None:
    flat = [normal(3, 4), normal(3, 4, seed=1), 2.0]
    found = list(places(flat, [0]))
    assert (0, 1) in {each.interleaved for each in found}
    assert "transposed" in {each.name for each in found}
    for place in found:
        for argnum, layout in place.layouts.items():
            laid = layout.of(flat[argnum])
            assert torch.equal(laid, flat[argnum])
            assert not laid.is_neg()
            assert not laid.is_conj()
            assert all(step for step, size in zip(laid.stride(), laid.shape, strict=True) if size > 1)


class Records(logging.Handler):
    """The log of the root logger at WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    records = Records()
    logging.getLogger().addHandler(records)
    yield records.found
    logging.getLogger().removeHandler(records)


@pytest.mark.slow
def test_calls_that_are_refused_on_purpose_leave_no_log(logged: list[logging.LogRecord]) -> None:
    @opsmith.operator("mutation::add_", mutates=["y"])
    def add_(y: Tensor, x: Tensor) -> None:
        y.add_(x)

    add_.kernel(
        "cpu",
        cpp="""
        template <class T> void add_(View<T, 1> y, View<const T, 1> x) {
          OPSMITH_CHECK(y.size(0) == x.size(0), "the sizes differ");
          for (int64_t i = 0; i < x.size(0); i++) y(i) += x(i);
        }
        """,
    )
    report = opsmith.check(add_, samples=[(torch.ones(3), torch.ones(3))], only=["mutation"], effort="quick")
    assert not report.failures
    assert logged == []
