"""A call leaves what it only reads as it is, and results have memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import config, errors
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract import are_apart, are_new

NUMBER = iter(range(10_000))


@pytest.fixture(params=["in C++", "in Python"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The executor of operators that are declared from now on."""
    if request.param == "in Python":
        monkeypatch.setattr(capabilities, "calls_in_cpp", lambda: None)
    elif config.conservative() or capabilities.calls_in_cpp() is None:
        pytest.skip("calls in C++ are not built, or turned off")
    return str(request.param)


def declare(function: Callable[..., Any], **options: Any) -> Any:
    return opsmith.operator(f"contract::case_{next(NUMBER)}", **options)(function)


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().T)


def part_by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy()[1:])


def by_dlpack(x: Tensor) -> Tensor:
    return torch.from_dlpack(x.detach())


def by_data(x: Tensor) -> Tensor:
    return x.data


def by_buffer(x: Tensor) -> Tensor:
    return torch.frombuffer(x.detach().numpy(), dtype=torch.float32).view(x.shape)


@pytest.mark.parametrize("function", [by_numpy, part_by_numpy, by_dlpack, by_data, by_buffer])
def test_one_memory_is_one_memory(calls: str, function: Callable[[Tensor], Tensor]) -> None:
    switch = [False]

    def perhaps(x: Tensor) -> Tensor:
        return function(x) if switch[0] else x * 2

    operator, x = declare(perhaps, opaque=True), torch.arange(4.0).view(2, 2)
    for _ in range(3):  # the last one is a known call
        assert operator(x).tolist() == [[0.0, 2.0], [4.0, 6.0]]
    switch[0] = True
    for _ in range(2):
        with pytest.raises(errors.AliasError, match="`result` shares memory with its input `x`"):
            operator(x)


def test_memory_of_others_that_is_new_is_taken(calls: str) -> None:
    operator = declare(doubled_by_numpy, opaque=True)
    for _ in range(3):
        assert operator(torch.from_numpy(np.ones(3, np.float32))).tolist() == [2.0, 2.0, 2.0]


def doubled_by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def resized(x: Tensor) -> None:
    x.resize_(7)


def transposed(x: Tensor) -> None:
    x.t_()


def other_data(x: Tensor) -> None:
    x.data = torch.zeros(2, 2)


def a_part_of_it(x: Tensor) -> None:
    x.data = x.data[1:]


def no_storage(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


CHANGES = {
    resized: "shape [7], strides [1]",
    transposed: "shape [2, 2], strides [1, 2]",
    other_data: "other memory",
    a_part_of_it: "shape [1, 2], strides [2, 1]",
    no_storage: "other memory",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_only_read_keeps_its_shape_and_memory(calls: str, change: Callable[[Tensor], None]) -> None:
    switch = [False]

    def perhaps(x: Tensor) -> Tensor:
        result = x * 2
        if switch[0]:
            change(x)
        return result

    operator = declare(perhaps, opaque=True)
    for _ in range(3):
        operator(torch.ones(2, 2))
    switch[0] = True
    with pytest.raises(errors.MutationError, match="must not write into an input that it does not declare"):
        operator(torch.ones(2, 2))


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_keeps_its_shape_and_memory(calls: str, change: Callable[[Tensor], None]) -> None:
    switch = [False]

    def perhaps(x: Tensor) -> None:
        x.mul_(2)
        if switch[0]:
            change(x)

    operator = declare(perhaps, mutates=["x"])
    for _ in range(3):
        operator(torch.ones(2, 2))
    switch[0] = True
    with pytest.raises(errors.MetadataError, match="it changed the shape, strides or memory of `x`") as got:
        operator(torch.ones(2, 2))
    assert got.value.got == f"{CHANGES[change]} after the call"
    assert "hint: write `x.copy_(...)`" in str(got.value)


def test_the_hint_for_a_shape_that_is_written_is_right(calls: str) -> None:
    def copied(x: Tensor, y: Tensor) -> None:
        x.copy_(y[:2])

    x = torch.zeros(2)
    declare(copied, mutates=["x"])(x, torch.arange(1.0, 4.0))
    assert x.tolist() == [1.0, 2.0]


def test_python_tells_new_memory_as_cpp_does() -> None:
    in_cpp = capabilities.calls_in_cpp()
    if in_cpp is None:
        pytest.skip("calls in C++ are not built")
    x, shared = torch.ones(4), torch.ones(4)
    view = torch.from_numpy(shared.numpy()[2:])
    cases = [
        (x * 2, x),
        (x[1:], x),
        (x.detach(), x),
        ((x * 2)[1:], x),
        (view, shared),
        (view, shared[:1]),
        (view, x),
        (torch.empty(0), torch.empty(0)),
        (x.to_sparse(), x),
        (None, x),
        (x * 2,),
    ]
    assert [in_cpp.freshness(1)(*each) for each in cases] == [are_new(1, *each) for each in cases]
    pairs = [((x * 2, x * 3), x), ((x, x * 3), x), ((view, view), x), ([x * 2, x * 3], x), ((x * 2,), x)]
    assert [in_cpp.freshness(2)(*each) for each in pairs] == [are_new(2, *each) for each in pairs]
    assert are_new(2, (x * 2, x * 3), x, None)


def test_many_tensors_are_told_apart_by_their_addresses() -> None:
    base = np.zeros(400, np.float32)
    parts = [torch.from_numpy(base[at : at + 4]) for at in range(0, 400, 4)]
    assert are_apart(parts[::2], parts[1::2])
    assert not are_apart([*parts[::2], torch.from_numpy(base[3:5])], [])
    assert not are_apart(parts[:1], [torch.from_numpy(base)])


def test_a_written_argument_that_is_returned_undeclared_is_to_be_declared() -> None:
    @opsmith.operator("contract::updated_", mutates=["x"])
    def updated_(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    for call in (updated_, updated_.functional):
        with pytest.raises(errors.AliasError, match='declare it, `returns="x"`') as raised:
            call(torch.ones(2), torch.ones(2))
        assert "`result` is its input `x`" in str(raised.value)


def test_a_view_of_a_written_argument_is_told_by_its_name() -> None:
    @opsmith.operator("contract::turned_", mutates=["x"])
    def turned_(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y).t()

    for call in (turned_, turned_.functional):
        with pytest.raises(errors.AliasError, match="`result` shares memory with its input `x`") as raised:
            call(torch.ones(2, 3), torch.ones(2, 3))
        assert raised.value.argument == "x"
