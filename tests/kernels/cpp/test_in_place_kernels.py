"""Kernels in C++ that write in place: straight into the argument's memory, and into nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import EVERY, SHAPES
from kernel_cases import LAYOUTS as READ
from matrices import diagonal
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.runtime.library import fill_new_memory

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
LAYOUTS = {name: layout for name, layout in READ.items() if name != "expanded"}
LAYOUTS["column"] = lambda x: torch.stack([x, x], -1)[..., 1]


def declare(name: str, *mutates: str) -> Callable[[Callable[..., Any]], Any]:
    return opsmith.operator(f"cpp_in_place::{name}", mutates=mutates)


def kernel_of(operator: Any) -> Any:
    function = operator.specification.kernels[0].function
    assert isinstance(function, BuiltKernel)
    return function


@declare("raise_", "cache")
def raise_(cache: Tensor, x: Tensor, by: int) -> Tensor:
    """cache <- cache + by x; returns the first values of the rows from before.  cache, x [N, M]."""
    before = cache[:, :1].clone()
    cache.add_(by * x)
    return before


raise_.kernel(
    "cpu",
    cpp="""
template <class T>
void raise_(View<T, 2> cache, View<const T, 2> x, int64_t by, View<T, 2> before) {
  for (int64_t i = 0; i < cache.size(0); i++) {
    if (cache.size(1)) before(i, 0) = cache(i, 0);
    for (int64_t j = 0; j < cache.size(1); j++) cache(i, j) = T(cache(i, j) + T(T(by) * x(i, j)));
  }
}
""",
    dtypes=[*EVERY, *INTEGERS],
)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("dtype", "shape", "layout"), diagonal([*EVERY, *INTEGERS], SHAPES, LAYOUTS, every=4)
)
def test_every_dtype_size_and_layout(dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    cache, expected = (LAYOUTS[layout](values(shape, dtype)) for _ in range(2))
    x = values(shape, dtype, 1)
    address, count = cache.data_ptr(), cache._version
    for _ in range(3):  # the first call is planned, the others run without Python
        assert_close(raise_(cache, x, 2), raise_.reference(expected, x, 2))
        assert_close(cache, expected)
    assert cache.data_ptr() == address
    assert cache._version == count + 3
    assert kernel_of(raise_).copied == {}


@declare("fill_rest", "x")
def fill_rest(x: Tensor, by: float) -> None:
    """x <- by x.  x of any shape."""
    x.mul_(by)


fill_rest.kernel(
    "cpu",
    cpp="""
template <class T>
void fill_rest(View<T> x, double by) {
  for (int64_t at = 0; at < x.numel(); at++) {
    int64_t rest = at, offset = 0;
    for (int64_t d = x.dim - 1; d >= 0; rest /= x.sizes[d], d--) offset += rest % x.sizes[d] * x.strides[d];
    x.data[offset] = x.data[offset] * T(by);
  }
}
""",
)


@pytest.mark.parametrize("shape", [(), (7,), (0,), (2, 3, 4, 5)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    expected = x * 2
    fill_rest(x, 2.0)
    assert_close(x, expected)


def test_only_the_view_is_written_and_its_base_is_found_modified() -> None:
    whole = torch.randn(4, 5, 6, requires_grad=True) * 1
    saved = (whole * whole).sum()
    with torch.no_grad():
        expected = whole.clone()
        expected[1:3, ::2, -2:] *= 3
        fill_rest(whole[1:3, ::2, -2:], 3.0)
        fill_rest(whole[1:3, ::2, -2:], 1.0)
    assert_close(whole, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("through", ["handle", "dispatcher"])
def test_the_version_rises_once_in_each_call(context: str, through: str) -> None:
    call = fill_rest if through == "handle" else fill_rest.torch_operator
    x = torch.ones(3)
    for count in range(1, 4):
        with CONTEXTS[context]():
            call(x, 2.0)
        assert x._version == count
        assert x.tolist() == [2.0**count] * 3
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        call(leaf, 2.0)
    assert leaf._version == 1
    assert leaf.tolist() == [2.0] * 3


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(errors.MutationError) as caught:
        call()
    return caught.value.message().splitlines()[0].partition(": ")[2]


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_what_cannot_be_written_is_refused_without_python_too(context: str) -> None:
    call, functional = raise_.torch_operator, torch.ones
    with CONTEXTS[context]():
        whole = torch.arange(24.0).reshape(4, 6)
        before = whole.clone()
        for _ in range(2):
            call(functional(4, 6), functional(4, 6), 1)
            call(functional(1, 6), functional(1, 6), 1)
            shares = "the written `cache` shares elements with `x`"
            assert refused(lambda: call(whole, whole, 1)) == shares
            assert refused(lambda: call(whole[:3], whole[1:], 1)) == shares
            assert refused(lambda: call(whole[:, ::2], whole[:, ::2], 1)) == shares
            one = "several elements of `cache` share the same memory"
            assert refused(lambda: call(whole[:1].expand(4, 6), functional(4, 6), 1)) == one
        assert_close(whole, before)
        for _ in range(2):
            call(whole[:, ::2], whole[:, 1::2], 1)  # interleaved
        assert_close(
            whole, torch.stack([before[:, ::2] + 2 * before[:, 1::2], before[:, 1::2]], -1).view(4, 6)
        )
        call(whole[:, :0], whole[:, :0], 1)


def test_tensors_of_inference_mode_are_not_written_outside_of_it() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        fill_rest(x, 2.0)
    for call in (fill_rest, fill_rest.torch_operator):
        assert refused(lambda: call(x, 2.0)) == "`x` was made in inference mode, and is written outside of it"  # noqa: B023
    assert x.tolist() == [2.0] * 3


@declare("step", "parameters", "buffer")
def step(parameters: list[Tensor], slopes: list[Tensor], buffer: Tensor | None, rate: float) -> None:
    """parameters <- parameters - rate slopes, one each; buffer <- buffer + 1."""
    for parameter, slope in zip(parameters, slopes, strict=True):
        parameter.sub_(rate * slope)
    if buffer is not None:
        buffer.add_(1)


step.kernel(
    "cpu",
    cpp="""
template <class T>
void step(List<View<T, 1>> parameters, List<Contiguous<const T, 1>> slopes, std::optional<View<T>> buffer,
          double rate) {
  for (int64_t n = 0; n < parameters.size; n++)
    OPSMITH_CHECK(slopes[n].size(0) == parameters[n].size(0), "slope %d has another size", int(n));
  OPSMITH_CHECK(!buffer || buffer->dim == 0, "`buffer` is one number");
  for (int64_t n = 0; n < parameters.size; n++)
    for (int64_t i = 0; i < parameters[n].size(0); i++) parameters[n](i) -= T(rate) * slopes[n][i];
  if (buffer) *buffer->data += T(1);
}
""",
)


@pytest.mark.slow
def test_lists_and_optional_tensors() -> None:
    for _ in range(2):
        parameters = [torch.ones(3), torch.ones(10)[::2]]
        buffer = torch.zeros(())
        step(parameters, [torch.ones(3), torch.ones(5, 2)[:, 0]], buffer, 0.5)
        assert [each.tolist() for each in parameters] == [[0.5] * 3, [0.5] * 5]
        assert [each._version for each in parameters] == [1, 1]
        assert (buffer, buffer._version) == (1, 1)
        step(parameters, [torch.ones(3), torch.ones(5)], None, 0.5)
        assert [each.tolist() for each in parameters] == [[0] * 3, [0] * 5]
    step([], [], None, 0.5)
    same = torch.ones(3)
    with torch.inference_mode():
        words = "the written `parameters[0]` shares elements with `parameters[1]`"
        assert refused(lambda: step([same, same], [torch.ones(3), torch.ones(3)], None, 1.0)) == words
        apart = "the written `parameters[1]` shares elements with `slopes[0]`"
        assert refused(lambda: step([torch.ones(3), same], [same, torch.ones(3)], None, 1.0)) == apart
    assert same.tolist() == [1] * 3


CONTIGUOUS = """
template <class T>
void {name}(Contiguous<T> x, Contiguous<const T> y) {{
  for (int64_t i = 0; i < x.numel(); i++) x[i] += y[i];
}}
"""


def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


strictly = declare("strictly", "x")(add_into)
strictly.kernel("cpu", cpp=CONTIGUOUS.format(name="strictly"))
copying = declare("copying", "x")(add_into)
copying.kernel("cpu", cpp=CONTIGUOUS.format(name="copying"), copies="allowed")


def test_another_layout_is_rejected_and_the_reference_writes_in_place() -> None:
    whole = torch.zeros(3, 8)
    (rejected,) = strictly.explain(whole[:, ::2], torch.ones(3, 4)).rejected
    assert rejected.endswith(
        "`x`, which the kernel writes, is not contiguous, "
        'but the kernel takes only contiguous memory without `copies="allowed"`'
    )
    for count in range(1, 4):
        strictly(whole[:, ::2], torch.ones(4, 3).T)
        assert_close(whole[:, ::2], torch.full((3, 4), float(count)))
        assert not whole[:, 1::2].any()
        assert whole._version == count
    dense = torch.zeros(3, 4)
    found = strictly.explain(dense, torch.ones(4, 3).T)
    assert found.forward.startswith("kernel for cpu")
    assert "`y`, which is not contiguous" in found.copies
    strictly(dense, torch.ones(4, 3).T)
    assert_close(dense, torch.ones(3, 4))
    assert kernel_of(strictly).copied == {"y": 1}


def test_the_next_kernel_takes_what_the_first_does_not() -> None:
    both = declare("both", "x")(add_into)
    both.kernel(
        "cpu",
        cpp="template <class T> void strided(View<T, 2> x, View<const T, 2> y) {"
        " for (int64_t i = 0; i < x.size(0); i++) for (int64_t j = 0; j < x.size(1); j++)"
        " x(i, j) += 2 * y(i, j); }",
        entry="strided",
    )
    both.kernel("cpu", cpp=CONTIGUOUS.format(name="both"))
    whole = torch.zeros(3, 4)
    for count in (1, 2):
        both(whole, torch.ones(3, 4))
        assert_close(whole, torch.full((3, 4), 3.0 * count - 2))
        both(whole.T, torch.ones(4, 3))
        assert_close(whole, torch.full((3, 4), 3.0 * count))


def test_a_strict_kernel_refuses_another_layout_before_anything_is_written() -> None:
    strict = declare("strict", "x")(add_into)
    strict.kernel("cpu", cpp=CONTIGUOUS.format(name="strict"), strict=True)
    x = torch.zeros(4, 6)
    with pytest.raises(errors.KernelRefusedError, match="`x`, which the kernel writes, is not contiguous"):
        strict(x[:, ::2], torch.ones(4, 3))
    assert not x.any()


@pytest.mark.parametrize("filled", [False, True])
def test_copies_there_and_back_where_they_are_allowed(filled: bool) -> None:
    whole = torch.zeros(3, 8, dtype=torch.float64)
    before = kernel_of(copying).copied.get("x", 0)
    found = copying.explain(whole[:, ::2], torch.ones(3, 4, dtype=torch.float64))
    assert "`x`, which is not contiguous, and back" in found.copies
    filling = fill_new_memory(filled)
    try:
        for count in range(1, 4):
            copying(whole[:, ::2], torch.ones(3, 4, dtype=torch.float64))
            assert_close(whole[:, ::2], torch.full((3, 4), float(count), dtype=torch.float64))
            assert not whole[:, 1::2].any()
            assert whole._version >= count
    finally:
        fill_new_memory(filling)
    assert kernel_of(copying).copied["x"] == before + 3


@pytest.mark.slow
def test_a_kernel_that_throws_does_not_copy_back() -> None:
    throws = declare("throws", "x")(add_into)
    throws.kernel(
        "cpu",
        cpp="""
void throws(Contiguous<float, 2> x, Contiguous<const float, 2> y) {
  x[0] = 5;
  OPSMITH_CHECK(y[0] < 2, "y is %g", y[0]);
}
""",
        copies="allowed",
    )
    x = torch.zeros(2, 2).T
    throws(x, torch.ones(2, 2))
    assert x.tolist() == [[5, 0], [0, 0]]
    x.zero_()
    for _ in range(2):
        with pytest.raises(errors.KernelError, match="the C\\+\\+ kernel threw: y is 3"):
            throws(x, torch.full((2, 2), 3.0))
        assert not x.any()


@declare("normalise", "x")
def normalise(x: Tensor, weight: Tensor) -> None:
    """x <- x weight, along channels.  x [B, C, H, W], weight [C]."""
    x.mul_(weight[:, None, None])


normalise.kernel(
    "cpu",
    cpp="""
void normalise(ChannelsLast<float> x, Contiguous<const float, 1> weight) {
  const int64_t n = x.numel(), channels = x.size(1);
  for (int64_t i = 0; i < n; i++) x.data[i] *= weight[i % channels];
}
""",
)


@pytest.mark.slow
def test_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for each in (x, x.contiguous(), x[:, :2]):
        weight = torch.arange(1.0, each.shape[1] + 1)
        expected = each * weight[:, None, None]
        for _ in range(2):
            taken = normalise.explain(each, weight).forward.startswith("kernel")
            assert taken == each.is_contiguous(memory_format=torch.channels_last)
            own = torch.empty_strided(each.shape, each.stride()).copy_(each)
            normalise(own, weight)
            assert_close(own, expected)


def test_nothing_is_written_where_the_reference_refuses() -> None:
    cache = torch.ones(3, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"must match the size of tensor|broadcast"):
            raise_(cache, torch.ones(3, 5), 1)
        with pytest.raises(RuntimeError, match=r"can.t be cast|dtype"):
            raise_(torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4), 1)
    assert_close(cache, torch.ones(3, 4))
    assert cache._version == 0
    raise_(cache, torch.ones(3, 4, dtype=torch.float64), 1)  # of another dtype: by the reference, in place
    assert_close(cache, torch.full((3, 4), 2.0))


@pytest.mark.slow
def test_a_reference_that_reads_data_needs_no_fake_kernel_where_nothing_is_returned() -> None:
    @declare("write_at", "cache")
    def write_at(cache: Tensor, at: Tensor, x: Tensor) -> None:
        for slot, row in zip(at.tolist(), x, strict=True):
            cache[slot].copy_(row)

    write_at.kernel(
        "cpu",
        cpp="""
template <class T>
void write_at(View<T, 2> cache, Contiguous<const int64_t, 1> at, View<const T, 2> x) {
  for (int64_t i = 0; i < x.size(0); i++) {
    OPSMITH_CHECK(at[i] >= 0 && at[i] < cache.size(0), "slot %d", int(at[i]));
    for (int64_t j = 0; j < x.size(1); j++) cache(at[i], j) = x(i, j);
  }
}
""",
    )
    for size in (5, 300):  # a small one is planned on copies, another one on tensors without data
        cache, x = torch.zeros(size, 300), torch.randn(2, 300)
        for _ in range(2):
            write_at(cache, torch.tensor([3, 1]), x)
        assert_close(cache[[3, 1]], x)
        assert not cache[[0, 2, 4]].any()
        with pytest.raises(errors.KernelError, match="slot 1000"):
            write_at(cache, torch.tensor([1000, 1]), x)


def test_an_opaque_operator() -> None:
    @opsmith.operator("cpp_in_place::opaque", mutates=["x"], opaque=True)
    def opaque(x: Tensor) -> None:
        x.numpy()[...] += 1

    opaque.kernel(
        "cpu", cpp="void opaque(View<float, 1> x) { for (int64_t i = 0; i < x.size(0); i++) x(i)++; }"
    )
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(3, dtype=dtype)
        for count in (1, 2):
            opaque(x)
            assert (x.tolist(), x._version) == ([count] * 3, count)


SIZED = """
template <class T> Shape sizes(View<T, 2> x, int64_t width) { return {x.size(0), width}; }
template <class T> void sized(View<T, 2> x, int64_t width, View<T, 2> y) {
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < width; j++) { y(i, j) = x(i, j); x(i, j) = 0; }
}
"""


def take(x: Tensor, width: int) -> Tensor:
    taken = x[:, :width].clone()
    x[:, :width] = 0
    return taken


@pytest.mark.slow
def test_sizes_of_results_without_python() -> None:
    sized = declare("sized", "x")(take)
    sized.kernel("cpu", cpp=SIZED)
    assert kernel_of(sized).sizing.startswith("`sizes` in C++")
    for rows in range(2, 7):
        x = torch.randn(rows, 5)
        expected, right = x.clone(), x[:, :3].clone()
        take(expected, 3)
        assert_close(sized(x, 3), right)
        assert_close(x, expected)
        assert x._version == 1
    assert kernel_of(sized).cached_plans == 1


def test_declared_shapes_plan_a_call_that_returns_nothing_without_python() -> None:
    operator = opsmith.operator("cpp_in_place::shaped", mutates=["x"], shapes="x: B M, y: B M ->")(add_into)
    operator.kernel("cpu", cpp=CONTIGUOUS.format(name="shaped"))
    for rows in range(2, 7):
        x = torch.zeros(rows, 5)
        operator(x, torch.ones(rows, 5))
        assert_close(x, torch.ones(rows, 5))
    with pytest.raises(errors.ShapeError):
        operator(torch.zeros(2, 5), torch.zeros(2, 6))
    assert kernel_of(operator).cached_plans == 1


def message(caught: Any) -> str:
    return str(caught.value)


@pytest.mark.slow
def test_wrong_parameters_are_named() -> None:
    reads = declare("reads", "x")(add_into)
    reads.kernel("cpu", cpp="void reads(View<const float> x, View<const float> y) {}")
    with pytest.raises(errors.KernelSignatureError) as caught:
        reads(torch.ones(2), torch.ones(2))
    assert "expected: (View<float> x, View<const float> y)" in message(caught)
    assert "got: (View<const float32>, View<const float32>)" in message(caught)
    listed = declare("listed", "parameters", "buffer")(step.reference)
    listed.kernel(
        "cpu",
        cpp="void listed(List<View<const float>> p, List<View<float>> s, std::optional<View<float>> b,"
        " double r) {}",
    )
    with pytest.raises(errors.KernelSignatureError) as caught:
        listed([torch.ones(2)], [torch.ones(2)], None, 1.0)
    expected = (
        "(List<View<float>> parameters, List<View<const float>> slopes, std::optional<View<float>> buffer, "
        "double rate)"
    )
    assert f"expected: {expected}" in message(caught)
    assert "got: (List<View<const float32>>, List<View<float32>>, " in message(caught)
    rightly = declare("rightly", "parameters", "buffer")(step.reference)
    rightly.kernel("cpu", cpp=f"void rightly{expected} {{ parameters[0](0) -= rate * slopes[0](0); }}")
    x = torch.ones(1)
    rightly([x], [torch.ones(1)], None, 0.25)
    assert x.item() == 0.75


@pytest.mark.slow
def test_sizes_of_another_number_of_results_are_refused() -> None:
    text = "Shape sizes(View<const float> y) { return {1}; } void f(View<const float> y, View<float> x) {}"
    wrong = opsmith.operator("cpp_in_place::no_results", mutates=["x"])(_written_last)
    wrong.kernel("cpu", cpp=text, entry="f")
    with pytest.raises(
        errors.KernelSignatureError, match="does not return the sizes of the operator's"
    ) as caught:
        wrong(torch.ones(2), torch.ones(2))
    assert caught.value.hint == "leave `sizes` out: the operator returns nothing"


def _written_last(y: Tensor, x: Tensor) -> None:
    x.add_(y)


@pytest.mark.parametrize(
    ("mutates", "copies", "words"),
    [
        (["x"], "always", "`copies=` of a kernel has only one possible value"),
        ([], "allowed", "`copies=` is given for an operator that writes into no argument"),
    ],
)
def test_copies_is_refused(mutates: list[str], copies: str, words: str) -> None:
    def written(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    def read(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    name = f"cpp_in_place::refused_{copies}"
    operator = opsmith.operator(name, mutates=mutates)(written if mutates else read)
    with pytest.raises(errors.UsageError, match=words) as caught:
        operator.kernel("cpu", cpp="void refused() {}", copies=copies)
    assert caught.value.argument == "copies"


@pytest.mark.slow
def test_a_reload_and_an_edit(tmp_path: Path) -> None:
    file = tmp_path / "edited.cpp"
    file.write_text(CONTIGUOUS.format(name="edited"))
    edited = declare("edited", "x")(add_into)
    edited.kernel("cpu", cpp_file=file)
    x = torch.zeros(3)
    edited(x, torch.ones(3))
    file.write_text(CONTIGUOUS.format(name="edited").replace("+=", "-="))
    edited.reload()
    for _ in range(2):
        edited(x, torch.ones(3))
    assert x.tolist() == [-1] * 3
    assert x._version == 3


def test_a_kernel_that_writes_a_wrong_element_is_found() -> None:
    wrong = declare("wrong", "x")(add_into)
    wrong.kernel("cpu", cpp=CONTIGUOUS.format(name="wrong").replace("x.numel()", "x.numel() - 1"))
    sample = (torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64))
    report = opsmith.check(wrong, samples=[sample], effort="quick", only=["forward"])
    assert ("result_x", "kernel-mismatch") in {(each.input, each.cause) for each in report.failures}
    right = opsmith.check(strictly, samples=[sample], effort="quick")
    assert right.passed, str(right)


FAULTS = {
    "outside": ("i < x", "i <= x", "out-of-bounds", "outside of `"),
    "unset": (
        "x[i] += y[i];",
        "{{ volatile T one; x[i] += y[i] + one; }}",
        "uninitialized",
        "`x` depends on",
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="sanitizers are those of g++ on Linux")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in (*FAULTS, "right")])
def test_sanitizers(name: str) -> None:
    right, fault, cause, words = FAULTS.get(name, ("", "", "", ""))
    operator = declare(f"sanitized_{name}", "x")(add_into)
    operator.kernel("cpu", cpp=CONTIGUOUS.replace(right, fault).format(name=operator.name.split("::")[1]))
    samples = [(torch.randn(4, 5), torch.randn(4, 5))]
    report = opsmith.check(operator, samples=samples, effort="quick", only=["sanitized"])
    assert {each.cause for each in report.failures} == ({cause} if cause else set()), str(report)
    assert all(words in each.message for each in report.failures)
    (outcome,) = [each for each in report.outcomes if each.property == "sanitized"]
    assert outcome.status == ("failed" if cause else "passed")


def add_twice(x: Tensor, y: Tensor) -> None:
    x.add_(2 * y)


def test_the_location_of_a_wrong_kernel_and_the_next_kernel() -> None:
    operator = declare("two", "x")(add_into)
    operator.kernel("cpu", add_twice, dtypes=[torch.float64])
    operator.kernel("cpu", cpp=CONTIGUOUS.format(name="two"), dtypes=[torch.float32])
    assert [each.where for each in operator.functional.specification.kernels] == [
        each.where for each in operator.specification.kernels
    ]
    sample = (torch.randn(4, 5), torch.randn(4, 5))
    report = opsmith.check(operator, samples=[sample], effort="quick", only=["forward"])
    (failure,) = [each for each in report.failures if each.cause == "kernel-mismatch"]
    assert failure.where == operator.specification.kernels[1].where


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.xdist_group("in_place_kernels")
def test_compiled_code_writes_into_the_view() -> None:
    @torch.compile(fullgraph=True)
    def decode(cache: Tensor, x: Tensor) -> Tensor:
        taken = raise_(cache[1], x, 2) + raise_(cache[2, :, :3], x[:, :3], 1)
        return taken + cache.sum()

    cache, expected = (values((3, 4, 5), torch.float32) for _ in range(2))
    x = values((4, 5), torch.float32, 1)
    with torch.no_grad():
        for _ in range(2):
            found = decode(cache, x)
            taken = raise_.reference(expected[1], x, 2) + raise_.reference(expected[2, :, :3], x[:, :3], 1)
            assert_close(found, taken + expected.sum())
            assert_close(cache, expected)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.compile
@pytest.mark.xdist_group("in_place_kernels")
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_writes_into_a_view_at_an_offset_that_changes(grad: bool) -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def decode(cache: Tensor, layer: int, x: Tensor) -> Tensor:
        raise_(cache[layer, :, 1:], x[:, 1:], 2)
        return cache.sum()

    cache, expected = (values((3, 4, 5), torch.float32) for _ in range(2))
    x = values((4, 5), torch.float32, 1)
    with torch.set_grad_enabled(grad):
        for layer in (1, 2, 1):
            decode(cache, layer, x)
            raise_.reference(expected[layer, :, 1:], x[:, 1:], 2)
            assert_close(cache, expected)
    torch.compiler.reset()
