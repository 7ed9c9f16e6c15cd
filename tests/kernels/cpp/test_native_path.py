"""A call of a known form runs in C++ from end to end; every other goes aside, and comes out right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import frames_in
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.checking.side_effects.canaries import poison_new_memory
from opsmith.kernels.runtime import dispatch, library
from opsmith.kernels.runtime.library import fill_new_memory
from opsmith.torch_library import capabilities

TWICE = """
template <class T>
void twice(Contiguous<const T> x, double by, Contiguous<T> y) {
  OPSMITH_CHECK(by != 7.0, "`by` is seven");
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] * T(by);
}
"""


class Runs:
    """Counter of the reference's runs, and what it raises."""

    count = 0
    raises: BaseException | None = None


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture
def twice(runs: Runs) -> Any:
    @opsmith.operator("native_path::twice")
    def twice(x: Tensor, by: float = 2.0) -> Tensor:
        runs.count += 1
        if runs.raises is not None:
            raise runs.raises
        return x * by

    return twice.kernel("cpu", cpp=TWICE)


def native(operator: Any) -> Callable[..., Any]:
    """The function in C that calls the operator through the dispatcher."""
    overload: Callable[..., Any] = operator.torch_operator
    return capabilities.direct_call(overload) if capabilities.on("known_calls") else overload


def kernel_of(operator: Any) -> Any:
    return operator.specification.kernels[0].function


def test_below_autograd_no_python_runs_for_a_form_that_is_known(twice: Any, runs: Runs) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 4)
        call = native(twice)
        assert frames_in(lambda: call(x, 3.0))
        assert_close(call(x, 3.0), x * 3)
        before = runs.count
        assert frames_in(lambda: call(x, 3.0)) == []
        assert frames_in(lambda: call(x + 1, 3.0)) == []
        assert runs.count == before
        assert frames_in(lambda: call(x[:2], 3.0))  # another form
    assert kernel_of(twice).cached_plans == 2


def test_a_form_is_sizes_strides_dtypes_and_every_other_value(twice: Any) -> None:
    x = torch.randn(4, 4)
    forms = [
        (x,),
        (x.mT,),
        (x[1:],),
        (x.double(),),
        (x, 2.5),
        (x[None],),
        (x.new_empty(0),),
        (x.new_ones(()),),
    ]
    for number, arguments in enumerate(forms, 1):
        for _ in range(3):
            assert_close(twice(*arguments), twice.reference(*arguments))
            assert kernel_of(twice).cached_plans == number


def test_each_call_has_a_result_of_its_own(twice: Any) -> None:
    x = torch.randn(3)
    results = [twice(x) for _ in range(4)]
    assert len({result.data_ptr() for result in results}) == 4


def test_a_call_that_no_instance_takes_is_the_reference_s(twice: Any) -> None:
    with torch.inference_mode():
        for _ in range(3):
            assert_close(native(twice)(torch.arange(3)), torch.arange(3) * 2.0)
    assert kernel_of(twice).cached_plans == 0


class Unusual(BaseException):
    """Nothing that any code would catch."""


@pytest.mark.parametrize("error", [ValueError("a word\nin two lines"), KeyboardInterrupt(), Unusual("élan")])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_the_reference_raises_comes_through_as_it_is(
    twice: Any, runs: Runs, error: BaseException, mode: Any
) -> None:
    runs.raises = error
    with mode():
        for call in (native(twice), twice, kernel_of(twice)):
            with pytest.raises(type(error)) as caught:
                call(torch.arange(3))
            assert caught.value is error
            assert any(frame.name == "twice" for frame in caught.traceback)
        runs.raises = None
        assert_close(native(twice)(torch.arange(3)), torch.arange(3) * 2.0)


def test_an_error_while_an_error_is_passed_on_ends_with_its_call(
    twice: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*sizes: int) -> Tensor:
        raise KeyboardInterrupt

    x = torch.ones(3)
    twice(x)
    runs.raises = ValueError("not today")
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "torch", SimpleNamespace(empty=interrupted))
        with pytest.raises(ValueError, match="not today"):
            kernel_of(twice)(torch.ones(4))
    runs.raises = None
    assert_close(kernel_of(twice)(torch.ones(5)), torch.full((5,), 2.0))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_the_kernel_throws_is_an_error_of_the_operator(twice: Any, mode: Any) -> None:
    with mode():
        for call in (native(twice), twice, kernel_of(twice)):
            for _ in range(2):  # the second time the form is known
                with pytest.raises(errors.KernelError, match="threw: `by` is seven"):
                    call(torch.ones(3), 7.0)


def test_a_form_is_forgotten_when_the_operator_changes(twice: Any) -> None:
    x = torch.ones(4)
    assert twice(x).shape == (4,)
    twice.fake(lambda x, by: x.new_empty(2 * len(x)))
    assert twice(x).shape == (8,)
    assert torch.ops.native_path.twice(x).shape == (8,)


def test_a_kernel_that_is_not_the_first_serves_nobody(twice: Any) -> None:
    @twice.kernel("cpu", dtypes=[torch.float64])
    def in_python(x: Tensor, by: float) -> Tensor:
        return x * by + 100

    with torch.inference_mode():
        for _ in range(2):
            assert native(twice)(torch.zeros(1, dtype=torch.float64)).item() == 100
            assert native(twice)(torch.zeros(1)).item() == 0


@pytest.mark.slow
def test_another_kernel_takes_what_the_first_does_not() -> None:
    @opsmith.operator("native_path::both")
    def twice(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    twice.kernel("cpu")(lambda x, by: x * by + 100)
    twice.kernel("cpu", cpp=TWICE, entry="twice")
    with torch.inference_mode():
        for _ in range(2):
            assert native(twice)(torch.zeros(1, dtype=torch.int64)).item() == 100
            assert native(twice)(torch.zeros(1)).item() == 0


@pytest.mark.slow
def test_a_shape_that_is_not_declared_is_refused_each_time() -> None:
    @opsmith.operator("native_path::square", shapes="x: N N -> N N")
    def square(x: Tensor) -> Tensor:
        return x * 2

    square.kernel(
        "cpu",
        cpp="void square(View<const float, 2> x, View<float, 2> y) { y(0, 0) = x(0, 0) * 2; }",
    )
    with torch.inference_mode():
        assert native(square)(torch.ones(1, 1)).item() == 2
        for call in (native(square), square, kernel_of(square)):
            for _ in range(2):
                with pytest.raises(errors.ShapeError):
                    call(torch.ones(1, 2))


@pytest.mark.slow
def test_tensors_of_a_list_are_copied_where_they_lie_otherwise() -> None:
    @opsmith.operator("native_path::added")
    def added(x: Tensor, others: list[Tensor], last: Tensor) -> Tensor:
        return x + sum(others) + last

    added.kernel(
        "cpu",
        cpp="""
void added(View<const float> x, List<Contiguous<const float>> others, Contiguous<const float> last,
           Contiguous<float> sum) {
  for (int64_t i = 0; i < sum.numel(); i++) {
    sum[i] = x.data[i] + last[i];
    for (auto& each : others) sum[i] += each[i];
  }
}
""",
    )
    x, square = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    others = [square, square.mT, x, x.mT]
    for count in (1, 2):
        result = kernel_of(added)(x, others, square.mT)
        assert_close(result, added.reference(x, others, square.mT))
        assert not result.requires_grad
        assert kernel_of(added).copied == {"others": count, "last": count}


def test_a_result_that_is_written_in_another_layout_is_copied_and_counted(twice: Any) -> None:
    x = torch.randn(3, 4).mT
    for count in (1, 2):
        result = twice(x)
        assert_close(result, x * 2)
        assert result.stride() == (x * 2).stride() == (1, 4)
        assert kernel_of(twice).copied == {"x": count, "result": count}


def test_threads_share_what_is_known(twice: Any) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for size in range(60):
            x = torch.full((1 + (size * seed) % 37, 3), float(seed))
            if not torch.equal(twice(x), x * 2):
                wrong.append((seed, size))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_more_forms_than_are_kept(twice: Any) -> None:
    with torch.inference_mode():
        for size in range(4200):
            x = torch.ones(size)
            assert twice(x).shape == x.shape
    assert 0 < kernel_of(twice).cached_plans <= 4096


@pytest.fixture
def answered() -> Any:
    @opsmith.operator("native_path::answered")
    def answered(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    return answered


def test_torch_s_operator_is_the_same_one_when_calls_are_answered_before_the_dispatcher(
    answered: Any,
) -> None:
    packet, overload = torch.ops.native_path.answered, torch.ops.native_path.answered.default
    known = {packet: 1, overload: 2}
    x = torch.ones(2)
    for _ in range(3):
        assert_close(packet(x), x * 2)
        assert_close(overload(x, 3.0), x * 3)
        assert_close(overload(x=x, by=3.0), x * 3)
    assert (known[packet], known[overload]) == (1, 2)
    assert isinstance(overload, torch._ops.OpOverload)
    with pytest.raises((RuntimeError, TypeError), match=r"missing value for argument 'x'|missing"):
        overload(by=3.0)
    with pytest.raises((RuntimeError, TypeError)):
        packet("no tensor")
    answered.gradients(x=lambda grad, by: grad * by * 10)
    leaf = torch.ones(2, requires_grad=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(packet(leaf).sum(), leaf)
        assert gradient.tolist() == [20.0, 20.0]


@pytest.mark.slow
def test_new_memory_is_filled_where_the_check_looks_for_what_nothing_writes() -> None:
    @opsmith.operator("native_path::nothing_written")
    def nothing_written(x: Tensor) -> Tensor:
        return x.mT * 2

    nothing_written.kernel(
        "cpu",
        cpp="template <class T> void nothing_written(View<const T> x, Contiguous<T> y) {}",
        dtypes=[torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int16, torch.uint8],
    )
    nothing_written(torch.ones(2, 3))  # loads it
    with poison_new_memory():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            assert nothing_written(torch.ones(2, 3, dtype=dtype)).isnan().all()
        assert (nothing_written(torch.ones(2, 3, dtype=torch.int16)) == -1).all()
        assert (nothing_written(torch.ones(2, 3, dtype=torch.uint8)) == 255).all()
        assert nothing_written(torch.ones(0, 3)).numel() == 0
        with poison_new_memory():
            pass
        assert fill_new_memory(True)
    assert not fill_new_memory(False)


@pytest.mark.slow
def test_new_memory_is_filled_for_the_first_kernel_of_a_process_too() -> None:
    @opsmith.operator("native_path::first_written")
    def first_written(x: Tensor) -> Tensor:
        return x * 2

    first_written.kernel("cpu", cpp="void first_written(View<const float> x, View<float> y) {}")
    library.runtime.cache_clear()  # as before anything is loaded
    with poison_new_memory():
        assert first_written(torch.ones(3)).isnan().all()


@pytest.mark.slow
def test_a_call_without_a_tensor_is_the_reference_s() -> None:
    @opsmith.operator("native_path::total")
    def total(xs: list[Tensor]) -> Tensor:
        return torch.stack(xs).sum(0) if xs else torch.zeros(2)

    total.kernel(
        "cpu", cpp="void total(List<Contiguous<const float, 1>> xs, Contiguous<float, 1> y) { y[0] = 7; }"
    )
    assert total([torch.ones(1)]).tolist() == [7]
    assert total([]).tolist() == [0, 0]
    assert "the arguments contain no tensor" in total.explain([]).rejected[0]
