"""A source that is edited runs in the same process: by `reload`, or by declaring the kernel again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.torch_library.registration import DispatcherRegistration

TEMPLATE = "void value(View<const float, 1> x, View<float, 1> y) {{ y(0) = {}; }}\n"


def declare() -> Any:
    @opsmith.operator("cpp_reload::value")
    def value(x: Tensor) -> Tensor:
        return x + 1

    return value


@pytest.mark.slow
def test_an_edited_file_runs_after_reload_and_not_before(tmp_path: Path) -> None:
    file = tmp_path / "value.cpp"
    file.write_text(TEMPLATE.format(10))
    value = declare().kernel("cpu", cpp_file=file)
    x = torch.zeros(1)
    assert value(x).item() == 10
    for number in (20, 30, 20):
        file.write_text(TEMPLATE.format(number))
        assert value(x).item() != number  # a call looks at no file
        assert value.reload()(x).item() == number
        gc.collect()  # what was before is gone, and nothing of it runs
        assert value(x).item() == number


@pytest.mark.slow
@pytest.mark.parametrize("include", ['#include "parts/all.h"\n', '#define ALL "parts/all.h"\n#include ALL\n'])
def test_headers_of_the_author_s_own_are_found_beside_the_file_and_part_of_the_key(
    include: str, tmp_path: Path
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "value.cpp").write_text(include + TEMPLATE.format("number()"))
    (tmp_path / "parts" / "all.h").write_text('#include "opsmith.h"\n#include "number.h"\n')
    number = tmp_path / "parts" / "number.h"
    number.write_text("inline float number() { return 1; }\n")
    value = declare().kernel("cpu", cpp_file=tmp_path / "value.cpp")
    assert value(torch.zeros(1)).item() == 1
    number.write_text("inline float number() { return 2; }\n")
    assert value.reload()(torch.zeros(1)).item() == 2
    number.write_text("inline float number() { return three; }\n")
    with pytest.raises(errors.CompileError) as caught:
        value.reload()(torch.zeros(1))
    first, quoted, mark = caught.value.message().splitlines()[1:4]
    assert first == f"  got: {number}:1:32: 'three' was not declared in this scope"
    assert quoted.endswith("inline float number() { return three; }")
    assert mark.strip() == "^"


@pytest.mark.slow
def test_headers_beside_the_file_that_holds_the_text(tmp_path: Path) -> None:
    header = tmp_path / "number.h"  # by its whole path, as there is none beside this test
    value = declare()
    for number in (1, 2):
        header.write_text(f"inline float number() {{ return {number}; }}\n")
        value.kernel("cpu", cpp=f'#include "{header}"\n' + TEMPLATE.format("number()"))
        assert value(torch.zeros(1)).item() == number


@pytest.mark.slow
def test_a_cell_that_is_run_again_takes_the_place_of_the_kernel() -> None:
    value = declare()
    for number in (1, 2):
        value.kernel("cpu", cpp=TEMPLATE.format(number))
        assert value(torch.zeros(1)).item() == number
    assert len(value.specification.kernels) == 1


def test_an_operator_that_is_declared_again_is_without_it() -> None:
    value = declare().kernel("cpu", cpp=TEMPLATE.format(3))
    assert value(torch.zeros(1)).item() == 3
    again = declare()
    assert again is value
    assert again(torch.zeros(1)).item() == 1
    again.kernel("cpu", cpp=TEMPLATE.format(3))
    assert again(torch.zeros(1)).item() == 3


def test_two_kernels_are_tried_in_turn_the_newest_first() -> None:
    value = declare()
    value.kernel(
        "cpu", entry="general", cpp="void general(View<const float> x, View<float> y) { y.data[0] = 1; }"
    )
    value.kernel(
        "cpu", entry="plane", cpp="void plane(View<const float, 2> x, View<float, 2> y) { y(0, 0) = 2; }"
    )
    assert value(torch.zeros(1)).item() == 1
    assert value(torch.zeros(1, 1)).item() == 2
    assert len(value.specification.kernels) == 2
    (reason,) = value.explain(torch.zeros(1)).rejected
    assert reason.endswith("`x` has 1 dimension, but the kernel takes 2")


@pytest.mark.slow
def test_a_file_that_is_gone_leaves_the_kernel_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "value.cpp"
    file.write_text(TEMPLATE.format(4))
    value = declare().kernel("cpu", cpp_file=file)
    assert value(torch.zeros(1)).item() == 4
    file.unlink()
    with pytest.raises(errors.KernelSourceError, match="cannot be read"):
        value.reload()
    assert value(torch.zeros(1)).item() == 4


def test_reload_without_a_kernel_from_source_does_nothing() -> None:
    value = declare()
    assert value.reload() is value


@pytest.mark.slow
def test_what_another_thread_holds_runs_the_new_kernel(tmp_path: Path) -> None:
    file = tmp_path / "value.cpp"
    file.write_text(TEMPLATE.format(1))
    value = declare().kernel("cpu", cpp_file=file)
    assert value(torch.zeros(1)).item() == 1
    before = value.specification.kernels[0].function._load().overload  # as another thread holds it
    file.write_text(TEMPLATE.format(2))
    value.reload()
    gc.collect()
    assert before(torch.zeros(1)).item() == 2
    assert value(torch.zeros(1)).item() == 2


@pytest.mark.slow
def test_a_kernel_that_was_replaced_computes_what_it_did_when_it_is_called_itself() -> None:
    value = declare().kernel("cpu", cpp=TEMPLATE.format(5))
    before = value.specification.kernels[0].function
    x = torch.zeros(1)
    assert (value(x).item(), before(x)[0].item()) == (5, 5)
    value.kernel("cpu", cpp=TEMPLATE.format(6))
    assert [value(x).item(), before(x)[0].item(), value.torch_operator(x).item()] == [6, 5, 6]
    assert [before(x)[0].item(), value(x).item()] == [5, 6]


@pytest.mark.slow
def test_a_library_serves_an_operator_that_is_declared_again_with_another_schema() -> None:
    text = "void scaled(View<const float, 1> x, double by, View<float, 1> y) { y(0) = x(0) * by; }"

    def first(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    def second(x: Tensor, factor: float = 3.0) -> Tensor:
        return x * factor

    x = torch.ones(1)
    for reference, name, default in ((first, "by", 2), (second, "factor", 3), (first, "by", 2)):
        reference.__qualname__ = "scaled"
        scaled = opsmith.operator("cpp_reload::scaled")(reference).kernel("cpu", entry="scaled", cpp=text)
        assert scaled.explain(x).forward.startswith("kernel for cpu")
        for call in (scaled, torch.ops.cpp_reload.scaled, torch.ops.cpp_reload.scaled.default):
            for size in (1, 2):  # with a plan and without one
                assert call(x.expand(size)).tolist()[0] == default
                assert call(x.expand(size), **{name: 7.0}).tolist()[0] == 7


def kept(turn: Callable[[int], object], count: int) -> int:
    """Return the number of objects that remain after turns."""
    gc.collect()
    before = len(gc.get_objects())
    for number in range(count):
        turn(number)
    gc.collect()
    return len(gc.get_objects()) - before


@pytest.mark.slow
def test_a_reload_keeps_no_object_for_a_text_that_was_loaded_before(tmp_path: Path) -> None:
    file = tmp_path / "value.cpp"
    file.write_text(TEMPLATE.format(0))
    value = declare().kernel("cpu", cpp_file=file)

    def turn(number: int) -> None:
        file.write_text(TEMPLATE.format(number % 2))
        value.reload()
        for call in (value, value.torch_operator, torch.ops.cpp_reload.value):
            for _ in range(2):
                assert call(torch.zeros(1)).item() == number % 2

    kept(turn, 4)
    assert kept(turn, 60) < 30, "half an object a reload: caches of Python and torch that do not grow"


@pytest.mark.slow
def test_a_reload_keeps_few_objects_for_a_new_text(tmp_path: Path) -> None:
    file = tmp_path / "value.cpp"
    file.write_text(TEMPLATE.format(-1))
    value = declare().kernel("cpu", cpp_file=file)

    def turn(number: int) -> None:
        file.write_text(TEMPLATE.format(number + 1))
        value.reload()
        for call in (value, value.torch_operator):
            assert call(torch.zeros(1)).item() == number + 1

    kept(turn, 2)
    texts = 8
    objects = kept(lambda number: turn(number + 2), texts)
    assert objects <= 22 * texts, objects / texts


@pytest.mark.slow
@pytest.mark.parametrize("route", ["handle", "overload"])
def test_no_route_of_before_is_kept_while_another_thread_reloads(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "value.cpp"
    file.write_text(TEMPLATE.format(1))
    value = declare().kernel("cpu", cpp_file=file)
    call = value if route == "handle" else value.torch_operator
    reload = threading.Thread(target=value.reload)

    make_routes = DispatcherRegistration._make_routes

    def make(self: Any) -> Any:
        routes = make_routes(self)
        if reload.ident is None:
            monkeypatch.undo()
            reload.start()
            reload.join(timeout=1)  # it may wait for this thread
        return routes

    monkeypatch.setattr(DispatcherRegistration, "_make_routes", make)
    for _ in range(3):  # the first call is validated, and makes the table
        if reload.ident is None:
            call(torch.zeros(1))
    if reload.ident is not None:  # else no call is known here
        reload.join()
    assert call(torch.zeros(1)).item() == 1
