"""The property `fake`: what the operator says on tensors without data, beside what it gives really."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functions import Doubled
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome
from opsmith.torch_library import capabilities

X = torch.rand(3, 4) + 0.5
names = itertools.count()


def fake(checked: Any, *samples: Any, **options: Any) -> Outcome:
    report = opsmith.check(checked, samples=list(samples), only=["fake"], **options)
    return next(outcome for outcome in report.outcomes if outcome.property == "fake")


@pytest.fixture
def custom_op() -> Iterator[Callable[..., Any]]:
    """Registers a function with torch.library, with a fake kernel or without."""

    def register(function: Callable[..., Any], fake: Callable[..., Any] | None) -> Any:
        operator = torch.library.custom_op(f"test_fake::op{next(names)}", mutates_args=())(function)
        if fake is not None:
            operator.register_fake(fake)
        return operator

    return register


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x.new_empty(x.shape[::-1]), "the shape [4, 3], but the real shape is [3, 4]"),
        (
            lambda x: x.new_empty(3, 4, dtype=torch.float32),
            "the dtype torch.float32, but the real dtype is torch.",
        ),
        (lambda x: torch.empty_like(x, device="meta"), "the device meta, but the real device is cpu"),
        (lambda x: x.new_empty(4, 3).mT, "the stride [1, 3], but the real stride is [4, 1]"),
    ],
)
def test_a_wrong_fake_kernel_of_torch_library_is_found(custom_op: Any, wrong: Any, says: str) -> None:
    found = fake(custom_op(double, wrong), (X,))
    assert found.status == "failed"
    (failure,) = found.failures
    assert (failure.cause, failure.input) == ("fake-mismatch", "result")
    assert says in failure.message
    assert failure.where == "its own fake kernel"


def test_a_fake_kernel_that_forgets_the_order_in_memory_is_found(custom_op: Any) -> None:
    """`x * 2` keeps the order in memory; the fake kernel is right for contiguous tensors alone."""
    found = fake(custom_op(double, lambda x: x.new_empty(x.shape)), (X,))
    (failure,) = found.failures
    assert "the stride [4, 1], but the real stride is [1, 3]" in failure.message
    assert failure.evidence["sample"].endswith("transposed in memory")


def test_a_right_fake_kernel_of_torch_library_passes(custom_op: Any) -> None:
    found = fake(custom_op(double, torch.empty_like), (X,), (X[0],))
    assert (found.status, found.notes) == ("passed", ())


def test_without_a_fake_kernel_a_note_says_how_to_give_one(custom_op: Any) -> None:
    found = fake(custom_op(double, None), (X,))
    assert found.status == "passed"
    assert found.notes[0].startswith(
        "there is no fake kernel to check: register one by `torch.library.register_fake`"
    )


def test_a_fake_kernel_that_fixes_a_size_is_a_limit(custom_op: Any) -> None:
    def fixing(x: Tensor) -> Tensor:
        return torch.empty_like(x) if int(x.shape[0]) > 1 else x.new_empty(x.shape)

    found = fake(custom_op(double, fixing), (X,))
    assert found.word() == "limit"
    (failure,) = found.failures
    assert (failure.cause, failure.input) == ("recompiles", "x")
    assert (
        failure.message
        == "the operator fixes the size of `x` in dimension 0: code is compiled again for each other size"
    )


def test_a_fake_kernel_that_does_not_run_on_symbols_is_a_limit(custom_op: Any) -> None:
    def counting(x: Tensor) -> Tensor:
        if type(x.shape[0]) is not int:
            raise TypeError("whole numbers alone")
        return torch.empty_like(x)

    (failure,) = fake(custom_op(double, counting), (X,)).failures
    assert failure.cause == "recompiles"
    assert failure.message == (
        "the operator does not run with symbolic sizes, so code is compiled again for each size: "
        "TypeError: whole numbers alone"
    )


class Branching(Function):
    """It looks at numbers, which no fake tensor has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1 if bool((x == 1).all()) else x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("adopt", [False, True], ids=["class", "adopted"])
def test_the_place_is_the_line_of_a_class(adopt: bool) -> None:
    checked = opsmith.adopt(Branching, "fake::branching") if adopt else Branching
    failures = opsmith.check(checked, samples=[(X,)], only=["fake"]).failures
    assert len(failures) == 1
    first = Branching.forward.__code__.co_firstlineno + 1  # `def`, under `@staticmethod`
    assert failures[0].where in (f"{__file__}:{first}", f"{__file__}:{first + 1}")


def test_sizes_that_are_wrong_for_symbols_alone_are_found(custom_op: Any) -> None:
    def counting(x: Tensor) -> Tensor:
        return torch.empty_like(x) if type(x.shape[0]) is int else x.new_empty(x.shape[0], x.shape[1] + 1)

    (failure,) = fake(custom_op(double, counting), (X,)).failures
    assert failure.cause == "fake-mismatch"
    assert "`result` has the shape [3, 5], but the real shape is [3, 4]" in failure.message


class ThroughNumpy(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().float().numpy() * 2).to(x.dtype)


class AsksForNumbers(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x * 2 + 0


class KnowsFakes(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if type(x) is Tensor else x.sum(0)


def test_a_class_runs_on_fake_tensors() -> None:
    found = fake(Doubled, (X,))
    assert (found.status, found.notes) == ("passed", ())


@pytest.mark.parametrize("leaving", [ThroughNumpy, AsksForNumbers])
def test_a_class_that_leaves_torch_is_noted(leaving: Any) -> None:
    found = fake(leaving, (X,))
    assert found.status == "passed"
    assert found.notes[0].startswith(
        "the forward does not run on fake tensors, which have a shape and a dtype but no data, "
        "so it cannot be "
    )


def test_a_class_with_another_form_on_fake_tensors_is_found() -> None:
    found = fake(KnowsFakes, (X,))
    assert found.status == "failed"
    (failure,) = found.failures
    assert (failure.cause, failure.input) == ("fake-mismatch", "result")


def test_a_dtype_in_which_it_does_not_run_is_noted(custom_op: Any) -> None:
    def narrow(x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("not in float16")
        return x * 2

    found = fake(custom_op(narrow, torch.empty_like), (X,))
    assert found.status == "passed"
    assert found.notes == ("float16 was left out, because the operator does not run there: not in float16",)


def places(x: Tensor) -> Tensor:
    return (x > 1).nonzero()


def of_any_count(x: Tensor, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *shape, dtype=dtype)


needs_symbols = pytest.mark.skipif(
    not capabilities.on("fake_tensors"), reason="sizes that depend on data need fake tensors"
)


@needs_symbols
@pytest.mark.parametrize(
    "reference", [lambda x: (x > 1).nonzero(), lambda x: x[x > 1]], ids=["places", "mask"]
)
def test_a_size_that_depends_on_data_is_derived(reference: Any) -> None:
    def chosen(x: Tensor) -> Tensor:
        found: Tensor = reference(x)
        return found

    found = fake(opsmith.operator(f"test_fake::chosen{next(names)}")(chosen), (X,))
    assert (found.status, found.notes) == ("passed", ())


@pytest.mark.slow
@needs_symbols
def test_a_size_that_depends_on_data_is_declared(custom_op: Any) -> None:
    assert fake(custom_op(places, lambda x: of_any_count(x, x.dim())), (X,)).status == "passed"
    opaque = opsmith.operator(f"test_fake::opaque{next(names)}", opaque=True)(places)
    assert (
        fake(opaque, (X,))
        .notes[0]
        .endswith("a size that depends on data is `torch.library.get_ctx().new_dynamic_size()`")
    )
    opaque.fake(lambda x: of_any_count(x, x.dim()))
    assert fake(opaque, (X,)).status == "passed"


@needs_symbols
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: of_any_count(x, 3), "the shape [any, 3], but the real shape is ["),
        (lambda x: of_any_count(x), "the shape [any], but the real shape is ["),
        (
            lambda x: of_any_count(x, 2, dtype=torch.int32),
            "the dtype torch.int32, but the real dtype is torch.int64",
        ),
        (lambda x: of_any_count(x, 2).to("meta"), "the device meta, but the real device is cpu"),
    ],
)
def test_beside_a_size_that_depends_on_data_the_rest_is_compared(
    custom_op: Any, wrong: Any, says: str
) -> None:
    (failure,) = fake(custom_op(places, wrong), (X,)).failures
    assert (failure.cause, failure.input) == ("fake-mismatch", "result")
    assert says in failure.message


def test_on_meta_a_size_that_depends_on_data_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.torch_library.capabilities import public

    monkeypatch.setattr(capabilities, "symbolic_mode", public.symbolic_mode)
    monkeypatch.setattr(capabilities, "fake_mode", public.fake_mode)
    found = fake(opsmith.operator(f"test_fake::places{next(names)}")(places), (X,))
    assert "sizes that depend on data were left out: they need the capability `fake_tensors`" in found.notes
    assert found.status == "passed"


def test_an_operation_that_torch_decomposes_in_python_fixes_no_size() -> None:
    @opsmith.operator("fake::turned")
    def turned(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, y).exp()).clone()

    samples = [(torch.ones(3, 5), torch.ones(3, 5))]
    report = opsmith.check(turned, samples=samples, only=["fake"])
    assert not report.failures, str(report)
    dynamic = torch.export.Dim("n")
    torch.export.export(Turned(turned), samples[0], dynamic_shapes=({0: dynamic}, {0: dynamic}))


class Turned(torch.nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.operator(x, y)
