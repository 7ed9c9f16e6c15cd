"""What a kernel in Python, or an opaque function, returns is held to what the operator promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities, held_results
from opsmith.torch_library.held_results import HeldResults


def tripled(x: Tensor) -> Tensor:
    return x * 3


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 3, x.sum(-1)


WRONG: dict[str, tuple[Callable[[Tensor], Any], type[errors.OpsmithError], str]] = {
    "a float32 of a bfloat16": (lambda x: x.float() * 3, errors.ResultTypeError, "torch.float32"),
    "a row less": (lambda x: (x * 3)[1:].clone(), errors.ShapeError, "[1, 4]"),
    "a dimension more": (lambda x: (x * 3)[None].clone(), errors.ShapeError, "[1, 2, 4]"),
    "transposed": (lambda x: (x * 3).T.contiguous(), errors.ShapeError, "[4, 2]"),
    "whole numbers": (lambda x: (x * 3).long(), errors.ResultTypeError, "torch.int64"),
    "without data": (lambda x: (x * 3).to("meta"), errors.ResultTypeError, "meta"),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_another_result_than_the_reference_s(name: str, wrong: str, recorded: bool) -> None:
    kernel, kind, got = WRONG[wrong]
    operator = opsmith.operator(name)(tripled).gradients(x=lambda grad: grad * 3).kernel("cpu", kernel)
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=recorded)
    for _ in range(3):
        with pytest.raises(kind, match=r"of `result` differs from the \w+ of the reference") as caught:
            operator(x)
        assert (caught.value.argument, caught.value.got) == ("result", got)
        assert caught.value.where is not None
        assert "test_held_results.py" in caught.value.where


def test_the_hint_for_a_dtype_works(name: str) -> None:
    operator = opsmith.operator(name)(tripled).kernel("cpu", lambda x: x.float() * 3)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(errors.ResultTypeError, match=r"convert it: `\.to\(x\.dtype\)`"):
        operator(x)
    operator.kernel("cpu", lambda x: (x.float() * 3).to(x.dtype))
    assert_close(operator(x), x * 3)


def test_the_hint_names_a_dtype_that_no_argument_has(name: str) -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x.long()

    operator = opsmith.operator(name)(counted).kernel("cpu", lambda x: x * 1)
    with pytest.raises(errors.ResultTypeError, match=r"convert it: `\.to\(torch\.int64\)`"):
        operator(torch.ones(2))


def test_a_call_that_is_wrong_after_right_ones(name: str) -> None:
    operator = opsmith.operator(name)(tripled).kernel("cpu", lambda x: x[:4] * 3)
    for _ in range(3):
        assert_close(operator(torch.ones(4)), torch.full((4,), 3.0))
    with pytest.raises(errors.ShapeError, match=r"expected: \[5\]"):
        operator(torch.ones(5))


def test_one_of_several_results(name: str) -> None:
    operator = opsmith.operator(name)(both).kernel("cpu", lambda x: (x * 3, x.sum(-1, keepdim=True)))
    with pytest.raises(errors.ShapeError) as caught:
        operator(torch.ones(2, 3))
    assert (caught.value.argument, caught.value.got) == ("result1", "[2, 1]")


def test_an_opaque_function_is_held_to_its_fake_kernel(name: str) -> None:
    def by_numpy(x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(x.numpy(), dtype=np.float64) * 3)

    runs: list[torch.Size] = []

    def noted(x: Tensor) -> Tensor:
        runs.append(x.shape)
        return by_numpy(x)

    operator = opsmith.operator(name, opaque=True)(noted)
    assert operator(torch.ones(2)).dtype is torch.float64  # nothing is promised of it
    assert len(runs) == 1
    operator.fake(lambda x: torch.empty_like(x))
    with pytest.raises(errors.ResultTypeError, match=r"differs from the \w+ of the fake kernel"):
        operator(torch.ones(2))
    operator.fake(lambda x: torch.empty_like(x, dtype=torch.float64))
    assert_close(operator(torch.ones(2)), torch.full((2,), 3.0, dtype=torch.float64))


def columns(x: Tensor) -> Tensor:
    return (torch.nn.functional.pad(x, (0, 2)) * 3)[:, :-2]


def test_other_strides_are_copied_and_explained(name: str) -> None:
    operator = opsmith.operator(name)(tripled).gradients(x=lambda grad: grad * 3).kernel("cpu", columns)
    x = torch.randn(4, 5)
    assert operator.explain(x).copies == ()
    for each in (x, x.T, x[:, ::2], x[:0], x.expand(3, 4, 5)[0]):
        for recorded in (False, True, False):
            found = operator(each.detach().requires_grad_(recorded))
            assert found.stride() == (each * 3).stride()
            assert_close(found.detach(), each * 3)
    (copied,) = operator.explain(x).copies
    assert "`result`: the strides of the kernel at " in copied
    assert "test_held_results.py" in copied
    assert "copies `result`" in str(operator.explain(x))


def test_each_combination_is_compared_once(name: str) -> None:
    runs: list[torch.Size] = []

    def reference(x: Tensor, by: float = 3.0) -> Tensor:
        runs.append(x.shape)
        return x * by

    operator = opsmith.operator(name)(reference).kernel("cpu", lambda x, by: x * by)
    for _ in range(3):
        for size in (2, 3):
            for by in (3.0, 4.0):
                assert_close(operator(torch.ones(size), by), torch.full((size,), by))
    assert sorted(runs) == [torch.Size([2])] * 2 + [torch.Size([3])] * 2


@pytest.mark.parametrize("empty", [False, True])
def test_sizes_that_depend_on_data_are_free(name: str, empty: bool) -> None:
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    operator = opsmith.operator(name)(positive).kernel("cpu", positive)
    for _ in range(3):
        x = -torch.ones(4) if empty else torch.tensor([1.0, -1.0, 2.0])
        assert_close(operator(x), x[x > 0])


def test_a_reference_that_refuses_what_a_kernel_takes(name: str) -> None:
    def halves(x: Tensor) -> Tensor:
        if x.numel() % 2:
            raise ValueError("of an even length")
        return x.reshape(2, -1).sum(0)

    operator = opsmith.operator(name)(halves).kernel("cpu", lambda x: x[: x.numel() // 2] * 2)
    assert_close(operator(torch.ones(4)), torch.full((2,), 2.0))
    assert_close(operator(torch.ones(5)), torch.full((2,), 2.0))


@pytest.mark.compile
@pytest.mark.xdist_group("held-results")
@pytest.mark.parametrize("kernel", [columns, lambda x: x.float() * 3], ids=["strides", "dtype"])
def test_compiled_code(name: str, kernel: Any) -> None:
    operator = opsmith.operator(name)(tripled).kernel("cpu", kernel)
    x = torch.ones(4, 6, dtype=torch.float32 if kernel is columns else torch.bfloat16)
    compiled = torch.compile(lambda x: operator(x).view(-1) + 1, fullgraph=True)
    if kernel is columns:
        assert_close(compiled(x), (x * 3).view(-1) + 1)
    else:
        with pytest.raises(errors.ResultTypeError, match="dtype of `result`"):
            compiled(x)


def test_a_float_that_chooses_the_shape_is_compared_again() -> None:
    @opsmith.operator("held_results::resized")
    def resized(x: Tensor, scale: float) -> Tensor:
        return x.new_zeros(int(x.shape[0] * scale))

    resized.kernel("cpu", lambda x, scale: x.new_zeros(4))
    x = torch.ones(2)
    for _ in range(2):
        assert resized(x, 2.0).shape == (4,)
        with pytest.raises(errors.ShapeError):
            resized(x, 3.0)


def test_floats_that_choose_no_shape_are_compared_some_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    compared = HeldResults._compared

    def counted(self: HeldResults, function: Any, returned: Any, /, *args: Any) -> Any:
        calls.append(args[-1])
        return compared(self, function, returned, *args)

    monkeypatch.setattr(HeldResults, "_compared", counted)
    operator = opsmith.operator("held_results::scaled")(scaled)
    operator.kernel("cpu", lambda x, scale: x * scale)
    for number in range(30):
        operator(torch.ones(2), float(number))
    assert calls == [*map(float, range(held_results.MAX_NUMBERS))]


def scaled(x: Tensor, scale: float) -> Tensor:
    return x * scale


def test_a_function_is_held_in_cpp_once_calls_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_cpp = capabilities.calls_in_cpp()
    held = held_results.HeldResults(opsmith.operator(name)(tripled)._specification)
    monkeypatch.setattr(capabilities, "calls_in_cpp", lambda: None)
    in_python = held.of(columns)
    assert held.of(columns) is in_python
    monkeypatch.undo()
    assert (held.of(columns) is in_python) == (in_cpp is None)


def multiples(x: Tensor, n: int) -> list[Tensor]:
    return [x * each for each in range(n)]


def positive(x: Tensor, given: bool = True) -> Tensor | None:
    return x * 3 if given else None


def mixed(x: Tensor, n: int) -> tuple[Tensor, list[Tensor], Tensor | None]:
    return x * 3, multiples(x, n), None if n > 2 else x + n


OTHER_FORMS: dict[str, tuple[Any, Any, tuple[Any, ...], type[errors.OpsmithError], str, str, str]] = {
    "a shorter list": (multiples, lambda x, n: [x * 0], (3,), errors.ResultCountError, "result", "3", "1"),
    "a longer list": (
        multiples,
        lambda x, n: [x * 2, x * 3],
        (1,),
        errors.ResultCountError,
        "result",
        "1",
        "2",
    ),
    "an empty list": (multiples, lambda x, n: [], (1,), errors.ResultCountError, "result", "1", "0"),
    "a shorter tuple": (multiples, lambda x, n: (x * 0,), (2,), errors.ResultCountError, "result", "2", "1"),
    "an item of another shape": (
        multiples,
        lambda x, n: [x * 0, x[:1] * 1],
        (2,),
        errors.ShapeError,
        "result[1]",
        "[2]",
        "[1]",
    ),
    "an item of another dtype": (
        multiples,
        lambda x, n: [x.double(), x * 1],
        (2,),
        errors.ResultTypeError,
        "result[0]",
        "torch.float32",
        "torch.float64",
    ),
    "None for a tensor": (
        positive,
        lambda x, given: None,
        (),
        errors.ResultTypeError,
        "result",
        "Tensor",
        "None",
    ),
    "a tensor for None": (
        positive,
        lambda x, given: x * 3,
        (False,),
        errors.ResultTypeError,
        "result",
        "None",
        "Tensor of torch.float32, shape [2]",
    ),
    "another shape of an optional one": (
        positive,
        lambda x, given: x[:1] * 3,
        (),
        errors.ShapeError,
        "result",
        "[2]",
        "[1]",
    ),
    "a list among several": (
        mixed,
        lambda x, n: (x * 3, [x * 0], None),
        (3,),
        errors.ResultCountError,
        "result1",
        "3",
        "1",
    ),
    "None among several": (
        mixed,
        lambda x, n: (x * 3, [x * 0], None),
        (1,),
        errors.ResultTypeError,
        "result2",
        "Tensor",
        "None",
    ),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_list_or_an_optional_result_of_another_form(name: str, form: str, recorded: bool) -> None:
    reference, kernel, rest, kind, argument, expected, got = OTHER_FORMS[form]
    operator: Any = opsmith.operator(name)(reference)
    operator.kernel("cpu", kernel)
    x = torch.ones(2, requires_grad=recorded)
    for _ in range(3):
        with pytest.raises(
            kind, match=rf"of `{re.escape(argument)}` differs from the \w+ of the ref"
        ) as caught:
            operator(x, *rest)
        error = caught.value
        assert (error.operator, error.argument, error.expected, error.got) == (name, argument, expected, got)
        assert "test_held_results.py" in str(error.where)
        assert error.hint is not None
        assert error.hint.endswith("or correct the reference")
    operator.kernel("cpu", reference)  # the hint is followed
    assert_close(operator(x, *rest), reference(x, *rest))


@pytest.mark.parametrize("form", [list, tuple])
def test_lists_that_are_right(name: str, form: Any) -> None:
    operator = opsmith.operator(name)(multiples).kernel("cpu", lambda x, n: form(multiples(x, n)))
    for recorded in (False, True, False):
        for n in (0, 3, 1):
            found = operator(torch.ones(2, requires_grad=recorded), n)
            assert isinstance(found, list)
            assert [each.tolist() for each in found] == [[float(at)] * 2 for at in range(n)]


def test_forms_that_are_wrong_after_right_ones(name: str) -> None:
    lengths = iter([2, 2, 3, 2])
    operator: Any = opsmith.operator(name)(multiples)
    operator.kernel("cpu", lambda x, n: multiples(x, next(lengths)))
    x = torch.ones(2)
    assert [len(operator(x, 2)) for _ in range(2)] == [2, 2]
    with pytest.raises(errors.ResultCountError, match=r"expected: 2\n  got: 3"):
        operator(x, 2)
    assert len(operator(x, 2)) == 2
    answers = iter([x * 3, None, x * 3])
    optional: Any = opsmith.operator(f"{name}_optional")(positive)
    optional.kernel("cpu", lambda x, given: next(answers))
    assert optional(x) is not None
    with pytest.raises(errors.ResultTypeError, match=r"expected: Tensor\n  got: None"):
        optional(x)
    assert optional(x) is not None


def test_lists_are_compared_once(name: str) -> None:
    runs: list[int] = []

    def reference(x: Tensor, n: int) -> list[Tensor]:
        runs.append(n)
        return multiples(x, n)

    operator = opsmith.operator(name)(reference).kernel("cpu", multiples)
    for _ in range(3):
        for n in (1, 2):
            operator(torch.ones(2), n)
    assert runs == [1, 2]


def test_an_item_in_other_strides_is_copied(name: str) -> None:
    operator = opsmith.operator(name)(multiples)
    operator.kernel("cpu", lambda x, n: [(x.T.contiguous() * each).T for each in range(n)])
    x = torch.randn(4, 5)
    for _ in range(2):
        found = operator(x, 2)
        assert [each.stride() for each in found] == [(5, 1)] * 2
        assert_close(found, multiples(x, 2))
    first, second = operator.explain(x, 2).copies
    assert first.startswith("`result[0]`: the strides of the kernel at ")
    assert second.startswith("`result[1]`: ")


def test_a_length_that_depends_on_data_is_free(name: str) -> None:
    def counted(x: Tensor) -> list[Tensor]:
        return [x * each for each in range(int(x.sum()))]

    operator = opsmith.operator(name)(counted).kernel("cpu", lambda x: [x * 0, x * 1])
    for _ in range(2):
        assert len(operator(torch.ones(3))) == 2


def test_an_opaque_list_is_held_to_its_fake_kernel(name: str) -> None:
    operator = opsmith.operator(name, opaque=True)(multiples)
    assert len(operator(torch.ones(2), 3)) == 3  # nothing is promised of it
    operator.fake(lambda x, n: [torch.empty_like(x)] * 2)
    with pytest.raises(errors.AliasError):  # a fake kernel is held to the contract, too
        operator(torch.ones(2, device="meta"), 3)
    operator.fake(lambda x, n: [torch.empty_like(x) for _ in range(2)])
    with pytest.raises(
        errors.ResultCountError, match="the length of `result` differs from the length of the"
    ):
        operator(torch.ones(2), 3)
    operator.fake(lambda x, n: [torch.empty_like(x) for _ in range(n)])
    assert len(operator(torch.ones(2), 3)) == 3
    optional = opsmith.operator(f"{name}_optional", opaque=True)(positive)
    optional.fake(lambda x, given: torch.empty_like(x))
    assert optional(torch.ones(2)) is not None
    with pytest.raises(
        errors.ResultTypeError, match="the type of `result` differs from the type of the fake"
    ):
        optional(torch.ones(2), False)


@pytest.mark.compile
@pytest.mark.xdist_group("held-results")
@pytest.mark.parametrize("form", ["a shorter list", "None for a tensor"])
def test_other_forms_in_compiled_code(name: str, form: str) -> None:
    reference, kernel, rest, kind, *_ = OTHER_FORMS[form]
    operator: Any = opsmith.operator(name)(reference).kernel("cpu", kernel)

    def function(x: Tensor) -> Any:
        found = operator(x, *rest)
        return found + 1 if isinstance(found, Tensor) else found[0] + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(kind, match=r"differs from the \w+ of the reference"):
        compiled(torch.ones(2))
    operator.kernel("cpu", reference)
    assert_close(compiled(torch.ones(2)), function(torch.ones(2)))
